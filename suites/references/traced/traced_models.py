"""Tiny models of transformers with random weights, as traced families read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.formats.weight import Weight
from degarble.references.traced.family import TracedConfig, logical_name
from degarble.references.traced.trace import as_loaded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

_SMALL: Mapping[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 128,
}  # fmt: skip
_MOE: Mapping[str, Any] = {
    "intermediate_size": 160, "moe_intermediate_size": 32, "num_experts_per_tok": 2,
}  # fmt: skip
_LATENT: Mapping[str, Any] = {
    **_MOE, "num_key_value_heads": 4, "n_routed_experts": 8, "first_k_dense_replace": 1,
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip
_DELTA: Mapping[str, Any] = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
    "intermediate_size": 160, "head_dim": 16, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
_WIDE: Mapping[str, Any] = {"intermediate_size": 160}
_PADDED: Mapping[str, Any] = {"intermediate_size": 160, "pad_token_id": 0}
ARCHITECTURES: dict[str, Mapping[str, Any]] = {
    "llama": _WIDE,
    "qwen2": _WIDE,
    "qwen3": {**_WIDE, "head_dim": 16},
    "qwen3_moe": {**_MOE, "num_experts": 8, "num_experts_per_tok": 4, "head_dim": 16},
    "gpt_oss": {
        "intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16,
    },
    "gemma3_text": {**_WIDE, "head_dim": 16},
    "mixtral": {**_WIDE, "num_local_experts": 4},
    "glm4_moe": {
        **_MOE, "head_dim": 16, "n_routed_experts": 8, "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
    },
    "deepseek_v3": {**_LATENT, "n_group": 2, "topk_group": 1, "num_hidden_layers": 3},
    "phi3": _PADDED,
    "olmo2": _WIDE,
    "granite": _WIDE,
    "minimax_m2": {
        "intermediate_size": 32, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "mistral": _WIDE,
    "gemma2": {**_WIDE, "head_dim": 16},
    "cohere": _PADDED,
    "cohere2": {**_PADDED, "head_dim": 16},
    "starcoder2": _WIDE,
    "stablelm": _WIDE,
    "nemotron": {**_WIDE, "head_dim": 16},
    "phi": _PADDED,
    "phimoe": {**_WIDE, "num_local_experts": 4},
    "exaone4": _WIDE,
    "smollm3": _PADDED,
    "seed_oss": {**_WIDE, "head_dim": 16},
    "glm4": {**_PADDED, "head_dim": 16},
    "ernie4_5": {**_WIDE, "head_dim": 16},
    "ernie4_5_moe": {
        **_WIDE, "moe_intermediate_size": 32, "moe_num_experts": 8, "moe_k": 4,
        "num_hidden_layers": 3,  # a convention of experts needs two witnesses
    },
    "hunyuan_v1_dense": {**_WIDE, "head_dim": 16},
    "afmoe": {
        **_MOE, "num_experts": 8, "head_dim": 16, "num_dense_layers": 1, "num_hidden_layers": 3,
    },
    "olmoe": {**_MOE, "num_experts": 8},
    "nanochat": _WIDE,
    "qwen3_next": {
        **_MOE, **_DELTA, "num_experts": 8, "shared_expert_intermediate_size": 32,
    },
    "qwen3_5_text": {
        **_DELTA,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0],
            "mrope_interleaved": True, "partial_rotary_factor": 0.25,
        },
    },
    "nemotron_h": {
        **_MOE, "num_hidden_layers": 4, "head_dim": 16, "n_routed_experts": 8,
        "layers_block_type": ["mamba", "attention", "moe", "attention"], "ssm_state_size": 16,
        "moe_shared_expert_intermediate_size": 32, "n_groups": 2, "mamba_num_heads": 4,
        "mamba_head_dim": 32, "chunk_size": 32,
    },
    "minimax": {
        "intermediate_size": 96, "head_dim": 16, "num_local_experts": 4, "block_size": 16,
        "layer_types": ["full_attention", "linear_attention"] * 2, "num_hidden_layers": 4,
    },
    "granitemoehybrid": {
        "intermediate_size": 96, "shared_intermediate_size": 64, "num_local_experts": 4,
        "num_experts_per_tok": 2, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16,
        "mamba_n_groups": 1, "mamba_chunk_size": 32, "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "attention"],
    },
    "falcon_h1": {
        "intermediate_size": 96, "head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4,
        "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 32,
    },
    "glm_moe_dsa": {
        **_LATENT, "n_group": 1, "topk_group": 1, "num_hidden_layers": 3, "index_n_heads": 16,
        "index_head_dim": 16, "index_topk": 8,
    },
    "llama4_text": {
        "intermediate_size": 96, "intermediate_size_mlp": 96, "head_dim": 16, "pad_token_id": 0,
        "num_local_experts": 4, "num_experts_per_tok": 1, "num_hidden_layers": 2,
    },
    "granite_swa": {**_WIDE, "head_dim": 16},
    "diffllama": _WIDE,
    "bloom": {"n_head": 4, "n_layer": 2},
    "mamba": {"state_size": 8, "time_step_rank": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 32},
    "jamba": {
        "intermediate_size": 96, "mamba_d_state": 16, "mamba_dt_rank": 8, "num_hidden_layers": 4,
        "num_experts": 8, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
    },
    "bamba": {
        "intermediate_size": 96, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16,
        "mamba_chunk_size": 32, "num_hidden_layers": 4, "attn_layer_indices": [1, 3],
    },
    "zamba2": {
        "intermediate_size": 96, "num_key_value_heads": 4, "n_mamba_heads": 8, "mamba_d_state": 16,
        "chunk_size": 32, "adapter_rank": 8, "use_mem_rope": True, "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
    },
    "lfm2": {
        "intermediate_size": 96, "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "full_attention"],
    },
    "doge": _WIDE,
    "git": {
        "intermediate_size": 96,
        "vision_config": {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4},
    },
    "xglm": {"ffn_dim": 96, "pad_token_id": 0},
    "megatron-bert": {"intermediate_size": 96, "is_decoder": True},
    "hy_v4": {**_LATENT, "pad_token_id": 0},
    "recurrent_gemma": {"intermediate_size": 96, "head_dim": 16},
}  # fmt: skip
# Plain; sinks and biases; latent attention and groups; a choice of earlier tokens; attention as
# plain operations; a convolution along the tokens.
QUICK = ("llama", "gpt_oss", "deepseek_v3", "glm_moe_dsa", "bloom", "lfm2")
NAMES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ARCHITECTURES
]


def raw_config(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> dict[str, Any]:
    """Return a config.json."""
    own = ARCHITECTURES[name]
    return {**_SMALL, **own, **more, "model_type": name, "dtype": str(dtype).removeprefix("torch.")}


def built(
    name: str,
    dtype: torch.dtype = torch.float32,
    settings: Mapping[str, Any] | None = None,
    seed: int = 0,
    **more: Any,
) -> nn.Module:
    """Return the model, with weights that keep the size of what passes."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  heavy

    torch.manual_seed(seed)
    own = {**_SMALL, **ARCHITECTURES[name]} if settings is None else settings
    config = AutoConfig.for_model(name, **{**own, **more})
    made = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    model: nn.Module = as_loaded(made, dtype).eval()
    for path, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        else:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in path else 0.0, std=0.1)
    for path, buffer in model.named_buffers():
        if path.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
    return model


def weights_of(model: nn.Module) -> dict[str, Weight]:
    """Return copies of a model's weights under our names."""
    held = [*model.named_parameters(), *model.named_buffers()]
    return {logical_name(path): Weight(value=tensor.detach().clone()) for path, tensor in held}


def config_of(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> TracedConfig:
    """Return the traced config."""
    return TracedConfig.of(raw_config(name, dtype, **more))
