"""Lay out V3.2's weights on the device, layer by layer, as the decoder's kernels read them.

wkv_b never multiplies a token (absorbed MLA): its key rows of a head multiply queries before
attention, its value rows the result, as sums of BF16 matrices that represent every value exactly.
What no kernel computes within a whole layer raises NotBuilt with the reason. Weights are laid out
once and stay on the device.

Shape letters: D hidden, H heads, N indexer heads, n nope width, v value width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from degarble.harness.backends.cutedsl.latent import absorbed
from degarble.harness.backends.cutedsl.parts import NoKernelError, own
from degarble.harness.backends.graph.weights import Gated, Laid, Norm, Routed, refusing
from degarble.kernels.indexer.problem import WIDTH as KEY_WIDTH
from degarble.kernels.primitives.kv_problem import ROTATED, WIDTH

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.backends.graph.matrices import Matrix
    from degarble.harness.model.config.config import V32Config
    from degarble.harness.model.recipes import Recipe
    from degarble.harness.model.types import Block, Rope
    from degarble.references.binding import Bound


@dataclass(frozen=True)
class KeyIndexing:
    """The indexer: queries, keys with their LayerNorm, weights of heads and their factor."""

    wq_b: Matrix
    wk: Matrix
    norm: Tensor  # float32 [128]
    bias: Tensor  # float32 [128]
    weights: Tensor  # BF16 [N, D]
    factor: float


@dataclass(frozen=True)
class LatentWeights:
    """Attention of a layer, absorbed."""

    norm: Norm
    wq_a: Matrix
    q_norm: Norm
    wq_b: Matrix
    wkv_a: Matrix
    kv_norm: Norm
    key: Tensor  # BF16 [H 512, n], or n as often as it takes to hold it exactly
    value: Tensor  # BF16 [H v, 512], likewise
    wo: Matrix
    indexer: KeyIndexing


@dataclass(frozen=True)
class MlpWeights:
    """A dense layer's MLP, or routed experts with a shared one."""

    norm: Norm
    gated: Gated
    routed: Routed | None


@dataclass(frozen=True)
class LatentLayer:
    """One layer."""

    block: Block
    rope: Rope
    attn: LatentWeights
    ffn: MlpWeights


@dataclass(frozen=True)
class LatentEnds:
    """Embedding before the layers, norm and head after them."""

    embed: Tensor  # BF16 [V, D]
    norm: Norm
    head: Tensor  # BF16 [V, D]


class LatentLaying(Laid):
    """A bound model's weights while they are laid out."""

    def __init__(
        self, bound: Bound, config: V32Config, recipe: Recipe, device: torch.device
    ) -> None:
        super().__init__(bound, recipe, device)
        self.config = config

    def layer(self, block: Block) -> LatentLayer:
        """Lay out one layer."""
        with refusing(f"decoder layer {block.prefix}"):
            attn, ffn = self._attention(f"{block.prefix}.attn."), self._ffn(f"{block.prefix}.ffn.")
        return LatentLayer(block, self.config.rope(block), attn, ffn)

    def ends(self) -> LatentEnds:
        """Lay out embedding, final norm and head."""
        with refusing("ends of a decoder"):
            return LatentEnds(self._bf16("embed"), self._norm("norm"), self._bf16("head"))

    def _attention(self, p: str) -> LatentWeights:
        c = self.config
        if (c.kv_lora_rank, c.qk_rope_head_dim, c.index_head_dim) != (WIDTH, ROTATED, KEY_WIDTH):
            widths = f"{c.kv_lora_rank}, {c.qk_rope_head_dim} and {c.index_head_dim}"
            raise NoKernelError(f"rows of {widths}; kernels have {WIDTH}, {ROTATED}, {KEY_WIDTH}")
        part, weights = self._of(f"{p}attend")
        key, value = (own(each.to(self._device)) for each in absorbed(weights[part.name], c))
        return LatentWeights(
            self._norm(f"{p}norm"), self._matrix(f"{p}wq_a"), self._norm(f"{p}q_norm"),
            self._matrix(f"{p}wq_b"), self._matrix(f"{p}wkv_a"), self._norm(f"{p}kv_norm"),
            key, value, self._matrix(f"{p}wo"), self._indexing(f"{p}indexer."),
        )  # fmt: skip

    def _indexing(self, p: str) -> KeyIndexing:
        c = self.config
        part, weights = self._of(f"{p}k")
        ends = {name.rpartition(".")[2]: weights[name] for name in part.shapes}
        norm, bias = (self._there(ends[end], torch.float32) for end in ("k_norm", "bias"))
        factor = float((c.index_head_dim * c.index_n_heads) ** -0.5)
        return KeyIndexing(
            self._matrix(f"{p}wq_b"), self._matrix(f"{p}wk"), norm, bias,
            *self._factored(f"{p}weights_proj", factor),
        )  # fmt: skip

    def _ffn(self, p: str) -> MlpWeights:
        norm = self._norm(f"{p}norm")
        if f"{p}w13" in self._parts:
            return MlpWeights(norm, self._gated(p), None)
        routed = self._routed(p, self.config.n_routed_experts)
        return MlpWeights(norm, self._gated(f"{p}shared."), routed)
