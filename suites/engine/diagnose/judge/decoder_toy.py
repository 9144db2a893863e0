"""A plain decoder whose linears hold decoded NVFP4 weights, and three faults of one of them.

The toy of the side-by-side measurement of other tools: 16 layers, d = 1024, 512 tokens, random
weights, so that block scales are alike and faults of scale layout as mild as they can be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.quantise import dequantise, quantise

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from degarble.harness.formats.quantise import QuantisedTensor

PLACE = "layers.7.mlp.down_proj"


class Attention(nn.Module):
    """Causal attention over heads of 64."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.heads = max(1, width // 64)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            proj(x).view(batch, time, self.heads, -1).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        made = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(made.transpose(1, 2).reshape(batch, time, width))
        return out


class Gated(nn.Module):
    """SwiGLU between three linears."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, wide, bias=False)
        self.up_proj = nn.Linear(width, wide, bias=False)
        self.down_proj = nn.Linear(wide, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and MLP, each behind a norm, each added."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width)
        self.self_attn = Attention(width)
        self.post_attention_layernorm = nn.RMSNorm(width)
        self.mlp = Gated(width, wide)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, layers, norm."""

    def __init__(self, layers: int, width: int, wide: int, ids: int = 1000) -> None:
        super().__init__()
        self.embed = nn.Embedding(ids, width)
        self.layers = nn.ModuleList([Layer(width, wide) for _ in range(layers)])
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.norm(x)
        return out


@dataclass(frozen=True)
class Toy:
    """A model, the weights as they are stored, and tokens."""

    model: Decoder
    weights: Mapping[str, QuantisedTensor]
    tokens: Tensor

    def put(self, name: str, tensor: QuantisedTensor) -> None:
        """Give one linear what a loader decoded."""
        linear = self.model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        with torch.no_grad():
            linear.weight.copy_(dequantise(tensor, linear.weight.dtype))


def toy(layers: int = 16, width: int = 1024, wide: int = 2816, tokens: int = 512) -> Toy:
    """Random weights, quantised; the model holds them decoded."""
    torch.manual_seed(7)
    model = Decoder(layers, width, wide).eval()
    weights: dict[str, QuantisedTensor] = {}
    made = Toy(model, weights, torch.arange(tokens)[None] * 37 % 1000)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            weights[name] = quantise(module.weight.detach(), NVFP4)
            made.put(name, weights[name])
    return made


def _nibbles(tensor: QuantisedTensor) -> QuantisedTensor:
    return replace(tensor, codes=(tensor.codes >> 4) | (tensor.codes << 4))


def _column(tensor: QuantisedTensor) -> QuantisedTensor:
    return replace(tensor, block_scale=tensor.block_scale.roll(-1, 1).contiguous())


def _doubled(tensor: QuantisedTensor) -> QuantisedTensor:
    assert tensor.tensor_scale is not None
    return replace(tensor, tensor_scale=tensor.tensor_scale * 2)


FAULTS: Mapping[str, tuple[Callable[[QuantisedTensor], QuantisedTensor], str]] = {
    "nibble swap": (_nibbles, "M10.nibble_order"),
    "scale column off by one": (_column, "M12.column_off"),
    "global scale x2": (_doubled, "M43.whole"),
}
