"""Import every name of vLLM that the plugin uses; the contract records are about this list."""

from __future__ import annotations

from degarble.harness.base.errors import MissingDependency
from degarble.harness.vllm.installed import require_vllm, series_of

VERSION = require_vllm()
SERIES = series_of(VERSION)

try:
    from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
    from vllm.forward_context import get_forward_context
    from vllm.logger import init_logger
    from vllm.model_executor.layers.activation import SiluAndMulWithClamp
    from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.fused_moe.routed_experts import FusedMoeWeightScaleSupported
    from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import (
        FusedTopKBiasRouter,
    )
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import (
        LinearBase,
        LinearMethodBase,
        UnquantizedLinearMethod,
        register_weight_loader_v2_supported_method,
    )
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    from vllm.model_executor.layers.quantization.utils.fp8_utils import (
        create_fp8_scale_parameter,
        create_fp8_weight_parameter,
        per_token_group_quant_fp8,
        validate_fp8_block_shape,
    )
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.model_executor.parameter import (
        BlockQuantScaleParameter,
        ModelWeightParameter,
        PerTensorScaleParameter,
    )
    from vllm.model_executor.utils import set_weight_attrs
    from vllm.models.deepseek_v4.attention import DeepseekV4Indexer, DeepseekV4IndexerCache
    from vllm.models.deepseek_v4.common.ops import compute_global_topk_indices_and_lens
    from vllm.models.deepseek_v4.compressor import DeepseekCompressor
    from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention
    from vllm.models.deepseek_v4.nvidia.model import (
        DeepseekV4DecoderLayer,
        DeepseekV4ForCausalLM,
        DeepseekV4Model,
    )
    from vllm.models.deepseek_v4.quant_config import DeepseekV4FP8Config
    from vllm.models.deepseek_v4.sparse_mla import (
        DeepseekV4FlashMLABackend,
        DeepseekV4FlashMLAMetadataBuilder,
    )
    from vllm.platforms import current_platform
    from vllm.sequence import IntermediateTensors
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends.mla.indexer import (
        DeepseekV4IndexerBackend,
        DeepseekV32IndexerMetadataBuilder,
    )
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache

    if SERIES == "0.26":  # before FlashMLA had a builder of its own for the window
        from vllm.v1.attention.backends.mla.sparse_swa import (
            DeepseekSparseSWABackend as DeepseekSparseSWAFlashMLABackend,
        )
        from vllm.v1.attention.backends.mla.sparse_swa import (
            DeepseekSparseSWAMetadataBuilder as DeepseekSparseSWAFlashMLAMetadataBuilder,
        )
    else:
        from vllm.models.deepseek_v4.nvidia.flashmla import (
            DeepseekSparseSWAFlashMLABackend,
            DeepseekSparseSWAFlashMLAMetadataBuilder,
        )
except ImportError as error:
    raise MissingDependency(
        "vllm",
        str(error),
        "vLLM with what its DeepSeek-V4 imports",
        "make vllm-env builds an environment that has both.",
    ) from error

__all__ = [
    "SERIES",
    "VERSION",
    "AttentionCGSupport",
    "BlockQuantScaleParameter",
    "DeepseekCompressor",
    "DeepseekSparseSWAFlashMLABackend",
    "DeepseekSparseSWAFlashMLAMetadataBuilder",
    "DeepseekV4DecoderLayer",
    "DeepseekV4FP8Config",
    "DeepseekV4FlashMLAAttention",
    "DeepseekV4FlashMLABackend",
    "DeepseekV4FlashMLAMetadataBuilder",
    "DeepseekV4ForCausalLM",
    "DeepseekV4Indexer",
    "DeepseekV4IndexerBackend",
    "DeepseekV4IndexerCache",
    "DeepseekV4Model",
    "DeepseekV4SWACache",
    "DeepseekV32IndexerMetadataBuilder",
    "FusedMoEMethodBase",
    "FusedMoeWeightScaleSupported",
    "FusedTopKBiasRouter",
    "GateLinear",
    "IntermediateTensors",
    "LinearBase",
    "LinearMethodBase",
    "LogitsProcessor",
    "ModelRegistry",
    "ModelWeightParameter",
    "PerTensorScaleParameter",
    "QuantizationConfig",
    "RMSNorm",
    "RoutedExperts",
    "SiluAndMulWithClamp",
    "UnquantizedFusedMoEMethod",
    "UnquantizedLinearMethod",
    "compute_global_topk_indices_and_lens",
    "create_fp8_scale_parameter",
    "create_fp8_weight_parameter",
    "current_platform",
    "get_current_vllm_config",
    "get_current_vllm_config_or_none",
    "get_forward_context",
    "get_pp_group",
    "get_tensor_model_parallel_rank",
    "init_logger",
    "per_token_group_quant_fp8",
    "register_quantization_config",
    "register_weight_loader_v2_supported_method",
    "set_weight_attrs",
    "validate_fp8_block_shape",
]
