"""Tiny models of transformers with random weights, as traced families read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.formats.weight import Weight
from degarble.references.traced.family import TracedConfig, logical_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

_SMALL: Mapping[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 128,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 160},
    "qwen2": {"intermediate_size": 160},
    "qwen3": {"intermediate_size": 160, "head_dim": 16},
    "qwen3_moe": {
        "intermediate_size": 160,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    },
    "gpt_oss": {
        "intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    },
    "gemma3_text": {"intermediate_size": 160, "head_dim": 16},
    "mixtral": {"intermediate_size": 160, "num_local_experts": 4},
    "glm4_moe": {
        "intermediate_size": 160,
        "head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        "intermediate_size": 160,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_group": 2,
        "topk_group": 1,
    },
    "phi3": {"intermediate_size": 160, "pad_token_id": 0},
    "olmo2": {"intermediate_size": 160},
    "granite": {"intermediate_size": 160},
    "minimax_m2": {
        "intermediate_size": 32,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}
QUICK = ("llama", "gpt_oss", "deepseek_v3")  # plain; sinks and biases; latent attention and groups
NAMES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ARCHITECTURES
]


def raw_config(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return a config.json."""
    own = (ARCHITECTURES | RECURRENT)[name]
    return {**_SMALL, **own, "model_type": name, "dtype": str(dtype).removeprefix("torch.")}


def built(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the model, with weights that keep the size of what passes."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  heavy

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**_SMALL, **ARCHITECTURES[name]})
    model: nn.Module = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    for path, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        else:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in path else 0.0, std=0.1)
    return model


def weights_of(model: nn.Module) -> dict[str, Weight]:
    """Return copies of a model's weights under our names."""
    held = [*model.named_parameters(), *model.named_buffers()]
    return {logical_name(path): Weight(value=tensor.detach().clone()) for path, tensor in held}


def config_of(name: str, dtype: torch.dtype = torch.float32) -> TracedConfig:
    """Return the traced config."""
    return TracedConfig.of(raw_config(name, dtype))
