"""Lay out V4's and V3.2's weights on the device, layer by layer, as kernels read them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.backends.cutedsl import rows as turning
from degarble.harness.backends.cutedsl.attention import absorbed
from degarble.harness.backends.cutedsl.backend import parts_of
from degarble.harness.backends.cutedsl.kernels import NoKernelError, exact_bf16, own
from degarble.harness.backends.cutedsl.linears import kernel_of_weight
from degarble.harness.backends.cutedsl.rows import norm_weight
from degarble.harness.backends.graph.matrices import (
    FEW_ROWS,
    NVFP4,
    TILES,
    CodedGroups,
    DenseGroups,
    Experts,
    Matrix,
    alone_for_few_rows,
    coded_groups_of,
    experts_of,
    for_few_rows,
    groups_of,
    joined,
    matrix_of,
    side_by_side,
)
from degarble.harness.base.errors import NotBuilt
from degarble.kernels.indexer.problem import WIDTH as KEY_WIDTH
from degarble.kernels.primitives.kv_problem import ROTATED, WIDTH
from degarble.kernels.rows.mhc_problem import split_weight

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from degarble.harness.backends.cutedsl.kernels import ComponentPart
    from degarble.harness.formats.weight import Weight
    from degarble.harness.model.config.config import V4Config, V32Config
    from degarble.harness.model.recipes import Recipe
    from degarble.harness.model.types import Block, Rope
    from degarble.references.binding import BoundModel


# --------------------------------------------------------------------------------------------------
# V4. The recipe's formats are handled by the same rules as component by component. What no kernel
# computes within a whole layer raises NotBuilt with the reason. Weights are laid out once and stay
# on the device.
#
# Shape letters: D hidden, F columns of a compressor, H heads, V vocabulary.

_NORMS = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class MhcLayout:
    """mHC of a sublayer or of the head: the projection in three BF16 parts, base and scale."""

    split: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True)
class NormWeight:
    """An RMSNorm's weight and its dtype."""

    weight: Tensor

    @property
    def kind(self) -> str:
        """Return its dtype by the kernels' name."""
        return "fp32" if self.weight.dtype is torch.float32 else "bf16"


@dataclass(frozen=True)
class Compressing:
    """A compressor: one BF16 matrix [2 F, D] of latents and gates, or two with NVFP4 codes."""

    joined: Tensor | None
    apart: tuple[Matrix, ...]
    ape: Tensor  # float32 [ratio, F]
    norm: NormWeight


@dataclass(frozen=True)
class Indexing:
    """The indexer: queries, weights of heads and their factor, and keys."""

    wq_b: Matrix
    weights: Tensor  # BF16 [N, D]
    compressor: Compressing
    factor: float = 1.0  # 1 where it is a power of two, which is part of the matrix then


@dataclass(frozen=True)
class AttentionWeights:
    """Attention of a layer."""

    mixing: MhcLayout
    norm: NormWeight
    wq_a: Matrix
    q_norm: NormWeight
    wq_b: Matrix
    wkv: Matrix
    kv_norm: NormWeight
    sink: Tensor  # float32 [H]
    wo_a: DenseGroups | CodedGroups
    wo_b: Matrix
    compressor: Compressing | None
    indexer: Indexing | None


# Gate and up, then down: one expert of NVFP4, or matrices, of which the last is down.
Gated = Experts | tuple[Matrix, ...]


@dataclass(frozen=True)
class RoutedWeights:
    """The router and its experts."""

    gate: Tensor  # BF16 [E, D]
    source: Tensor  # float32 bias [E], or int64 table [V, K]
    experts: Experts


@dataclass(frozen=True)
class FfnWeights:
    """Routed experts of a layer, and the shared one."""

    mixing: MhcLayout
    norm: NormWeight
    routed: RoutedWeights
    shared: Gated


@dataclass(frozen=True)
class LayerWeights:
    """One layer."""

    block: Block
    rope: Rope
    attn: AttentionWeights
    ffn: FfnWeights


@dataclass(frozen=True)
class EndWeights:
    """Embedding before the layers, mixing, norm and head after them."""

    embed: Tensor  # BF16 [V, D]
    mixing: MhcLayout
    norm: NormWeight
    head: Tensor  # BF16 [V, D]


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Convert NoKernelError to NotBuilt, with its reason."""
    try:
        yield
    except NoKernelError as reason:
        raise NotBuilt(
            name, str(reason), "a recipe whose components all have kernels that work in one step",
            "Leave --graph out: components run one by one.",
        ) from reason  # fmt: skip


class LayoutBase:
    """Weights of a bound model of either family while they are laid out."""

    def __init__(
        self, bound: BoundModel, recipe: Recipe, device: torch.device, products: str
    ) -> None:
        self._bound, self._device, self._products = bound, device, products
        self._parts = {part.component.name: part for part in parts_of(bound, recipe, "sm_90a")}

    def _of(self, component: str) -> tuple[ComponentPart, Mapping[str, Weight]]:
        return self._parts[component], self._bound.weights_of(component)

    def _there(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        return own(weight.values(dtype).to(self._device))

    def _exact(self, name: str, weights: Mapping[str, Weight]) -> Tensor:
        return own(exact_bf16(name, weights[name]).to(self._device))

    def _bf16(self, component: str) -> Tensor:
        part, weights = self._of(component)
        if part.format_of(part.name) != "BF16":
            raise NoKernelError(f"{component} is {part.format_of(part.name)}")
        return self._exact(part.name, weights)

    def _norm(self, component: str, name: str | None = None) -> NormWeight:
        part, weights = self._of(component)
        name = name or part.name
        return NormWeight(self._there(weights[name], _NORMS[norm_weight(part, name)]))

    def _matrix(self, component: str) -> Matrix:
        part, weights = self._of(component)
        return self._laid(part, part.name, weights)

    def _laid(self, part: ComponentPart, name: str, weights: Mapping[str, Weight]) -> Matrix:
        matrix = matrix_of(part, name, weights, self._device)
        return for_few_rows(matrix, name) if self._products == FEW_ROWS else matrix

    def _factored(self, component: str, factor: float) -> tuple[Tensor, float]:
        """Fold a factor into a BF16 weight; return it separately if it is no power of two."""
        weight = self._bf16(component)
        if torch.frexp(torch.tensor(factor)).mantissa == 0.5:
            return weight * factor, 1.0
        return weight, factor

    def _routed(self, p: str, count: int) -> RoutedWeights:
        part, weights = self._of(f"{p}experts.w13")
        second, down = self._of(f"{p}experts.w2")
        stem = "ffn.experts.{}.{}"
        names = [tuple(stem.format(e, n) for n in ("w1", "w3", "w2")) for e in range(count)]
        one, three, two = names[0]  # a recipe treats all experts alike
        ways = (
            kernel_of_weight(part, one),
            kernel_of_weight(part, three),
            kernel_of_weight(second, two),
        )
        if any(kernel.kernel != NVFP4 for kernel in ways) or part.facts.weight_before_w2:
            raise NoKernelError("the grouped kernel has NVFP4 experts, weighted after w2")
        source, of_source = self._of(f"{p}topk")
        dtype = torch.int64 if source.name.endswith("tid2eid") else torch.float32
        every = {**weights, **down}
        return RoutedWeights(
            self._bf16(f"{p}gate"), self._there(of_source[source.name], dtype),
            experts_of(names, every, self._device),  # type: ignore[arg-type]
        )  # fmt: skip

    def _gated(self, prefix: str) -> Gated:
        """Lay out a shared expert, or a dense layer."""
        first, weights = self._of(f"{prefix}w13")
        second, down = self._of(f"{prefix}w2")
        ends = {name.rpartition(".")[2]: name for name in first.shapes}
        one, three = ends["w1"], ends["w3"]
        ways = (
            kernel_of_weight(first, one),
            kernel_of_weight(first, three),
            kernel_of_weight(second, second.name),
        )
        if all(kernel.kernel == NVFP4 for kernel in ways):
            expert = experts_of([(one, three, second.name)], {**weights, **down}, self._device)
            few = self._products == FEW_ROWS
            return alone_for_few_rows(expert, prefix) if few else expert
        both = side_by_side([self._laid(first, name, weights) for name in (one, three)])
        return *both, self._laid(second, second.name, down)

    def _joined(
        self, routed: RoutedWeights, shared: Gated, prefix: str
    ) -> tuple[RoutedWeights, Gated]:
        """Stack a shared expert of NVFP4 behind the routed ones, for products of few rows."""
        if self._products != FEW_ROWS or not isinstance(shared, Experts):
            return routed, shared
        stacked = joined(routed.experts, shared)
        if not stacked.with_shared:
            return routed, shared
        # Both have their tensors in the same memory.
        return replace(routed, experts=stacked), alone_for_few_rows(stacked.shared, prefix)


class V4Layout(LayoutBase):
    """V4's weights while they are laid out."""

    def __init__(
        self,
        bound: BoundModel,
        config: V4Config,
        recipe: Recipe,
        device: torch.device,
        products: str = TILES,
    ) -> None:
        super().__init__(bound, recipe, device, products)
        self.config = config

    def layer(self, block: Block) -> LayerWeights:
        """Lay out one layer."""
        with refusing(f"decoder layer {block.prefix}"):
            attn, ffn = self._attention(block), self._ffn(block)
        return LayerWeights(block, self.config.rope(block), attn, ffn)

    def ends(self) -> EndWeights:
        """Lay out embedding, final mixing, norm and head."""
        with refusing("ends of a decoder"):
            return EndWeights(
                self._bf16("embed"), self._mixing("hc_head"), self._norm("norm"), self._bf16("head")
            )

    def _mixing(self, component: str) -> MhcLayout:
        _, weights = self._of(component)
        ends = {name.rpartition("_")[2]: weights[name] for name in weights}
        split = own(split_weight(ends["fn"].values(torch.float32)).to(self._device))
        base, scale = (self._there(ends[end], torch.float32) for end in ("base", "scale"))
        return MhcLayout(split, base, scale)

    def _attention(self, block: Block) -> AttentionWeights:
        p = f"{block.prefix}.attn."
        sink = self._of(f"{p}attend")
        return AttentionWeights(
            self._mixing(f"{p}hc_pre"), self._norm(f"{p}norm"), self._matrix(f"{p}wq_a"),
            self._norm(f"{p}q_norm"), self._matrix(f"{p}wq_b"), self._matrix(f"{p}wkv"),
            self._norm(f"{p}kv_norm_rope"),
            self._there(sink[1][sink[0].name], torch.float32),
            self._groups(f"{p}wo_a"), self._matrix(f"{p}wo_b"),
            self._compressing(f"{p}compressor.") if block.ratio else None,
            self._indexing(f"{p}indexer.") if f"{p}indexer.scores" in self._parts else None,
        )  # fmt: skip

    def _groups(self, component: str) -> DenseGroups | CodedGroups:
        part, weights = self._of(component)
        if part.facts.activation(part.name) is not None:
            return coded_groups_of(part, weights[part.name], self._device)
        return groups_of(self._exact(part.name, weights), self.config.o_groups)

    def _compressing(self, prefix: str) -> Compressing:
        part, weights = self._of(f"{prefix}proj")
        names = {name.rpartition(".")[2]: name for name in part.shapes}
        ordered = [names["wkv"], names["wgate"]]
        pool, of_pool = self._of(f"{prefix}pool")
        by_end = {name.rpartition(".")[2]: name for name in pool.shapes}
        joined: Tensor | None = None
        apart: tuple[Matrix, ...] = ()
        if all(part.format_of(name) == "BF16" for name in ordered):
            joined = torch.cat([self._exact(name, weights) for name in ordered])
        else:
            apart = tuple(self._laid(part, name, weights) for name in ordered)
        norm = self._norm(f"{prefix}pool", by_end["norm"])
        return Compressing(joined, apart, self._there(of_pool[by_end["ape"]], torch.float32), norm)

    def _indexing(self, prefix: str) -> Indexing:
        c = self.config
        weights, factor = self._factored(
            f"{prefix}weights_proj", float((c.index_head_dim * c.index_n_heads) ** -0.5)
        )
        compressor = self._compressing(f"{prefix}compressor.")
        return Indexing(self._matrix(f"{prefix}wq_b"), weights, compressor, factor)

    def _ffn(self, block: Block) -> FfnWeights:
        p = f"{block.prefix}.ffn."
        routed = self._routed(p, self.config.n_routed_experts)
        routed, shared = self._joined(routed, self._gated(f"{p}shared."), f"{p}shared.")
        return FfnWeights(self._mixing(f"{p}hc_pre"), self._norm(f"{p}norm"), routed, shared)


def table_of_turns(rope: Rope, positions: int, device: torch.device) -> Tensor:
    """Return cosines and sines of every position that a memory has room for."""
    return turning.table_of(rope, positions).to(device)


# --------------------------------------------------------------------------------------------------
# V3.2. wkv_b never multiplies a token (absorbed MLA): its key rows of a head multiply queries
# before attention, its value rows the result, as sums of BF16 matrices that represent every value
# exactly.
#
# Shape letters: D hidden, H heads, N indexer heads, n nope width, v value width, V vocabulary.


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

    norm: NormWeight
    wq_a: Matrix
    q_norm: NormWeight
    wq_b: Matrix
    wkv_a: Matrix
    kv_norm: NormWeight
    key: Tensor  # BF16 [H 512, n], or n as often as it takes to hold it exactly
    value: Tensor  # BF16 [H v, 512], likewise
    wo: Matrix
    indexer: KeyIndexing


@dataclass(frozen=True)
class MlpWeights:
    """A dense layer's MLP, or routed experts with a shared one."""

    norm: NormWeight
    gated: Gated
    routed: RoutedWeights | None


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
    norm: NormWeight
    head: Tensor  # BF16 [V, D]


class V32Layout(LayoutBase):
    """A bound model's weights while they are laid out."""

    def __init__(
        self,
        bound: BoundModel,
        config: V32Config,
        recipe: Recipe,
        device: torch.device,
        products: str = TILES,
    ) -> None:
        super().__init__(bound, recipe, device, products)
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
        key, value = (own(tensor.to(self._device)) for tensor in absorbed(weights[part.name], c))
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
        routed, shared = self._joined(routed, self._gated(f"{p}shared."), f"{p}shared.")
        return MlpWeights(norm, shared, routed)
