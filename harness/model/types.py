"""Types of the model structure: dtypes, layer types, RoPE and YaRN facts, blocks, boxes.

A *block* is one decoder layer or one drafter layer; a *box* is a half-open range per dimension of a
tensor. Imports no sibling. Records hold data only and raise where an impossible one is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import log, prod

RECIPE_NAMES = ("bf16", "official", "nvfp4-experts", "nvfp4-full")  # the built-in recipes


class Dtype(StrEnum):
    """Element types of stored tensors, by the names that safetensors headers use."""

    BF16 = "BF16"
    F32 = "F32"
    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    I8 = "I8"
    U8 = "U8"
    I32 = "I32"
    I64 = "I64"

    @property
    def size(self) -> int:
        """Return the bytes of one element."""
        return _SIZES[self]


_SIZES = {
    Dtype.BF16: 2,
    Dtype.F32: 4,
    Dtype.F8_E4M3: 1,
    Dtype.F8_E8M0: 1,
    Dtype.I8: 1,
    Dtype.U8: 1,
    Dtype.I32: 4,
    Dtype.I64: 8,
}


class LayerType(StrEnum):
    """Kinds of attention that a block may have; the values are transformers' words."""

    SLIDING = "sliding_attention"  # V4, ratio 0: the window alone
    SPARSE = "compressed_sparse_attention"  # V4, ratio 4: window and the indexer's top-k
    HEAVY = "heavily_compressed_attention"  # V4, ratio 128: window and all complete groups
    INDEXED = "indexed_attention"  # V3.2: the indexer's top-k tokens
    FULL = "full_attention"  # all tokens before
    TRACED = "traced"  # as transformers' own code says


class MlpType(StrEnum):
    """How a block's feed-forward half chooses experts."""

    HASH = "hash_moe"  # V4: a table from token id to expert ids
    SCORED = "moe"  # top-k of scores plus correction bias
    DENSE = "dense"  # V3.2: one wide MLP
    TRACED = "traced"  # as transformers' own code says


class Kind(StrEnum):
    """Kinds of parameter; only a LINEAR one can be quantised by a recipe."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    NORM = "norm"
    PLAIN = "plain"  # stored under its own name, without `.weight`

    @property
    def has_suffix(self) -> bool:
        """Return whether the tensor's name ends with `.weight`."""
        return self is not Kind.PLAIN


class RopePairing(StrEnum):
    """Which two dims a rotation mixes."""

    INTERLEAVED = "interleaved"  # (2i, 2i + 1)
    HALVES = "halves"  # (i, i + dims / 2)


class RopeEnd(StrEnum):
    """Which end of a head carries the rotary dims."""

    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN's facts as the config states them; None where it states none."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32
    beta_slow: float = 1
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True  # whole pairs bound the ramp

    @property
    def rotation_scale(self) -> float:
        """Return the factor of cos and sin, as transformers and vLLM derive it.

        The paper's 0.1 ln(factor) + 1, unless the config states it, or has both mscales: equal
        ones leave cos and sin alone. With one mscale alone vLLM takes 1 or 0 for the other;
        transformers, followed here, ignores both.
        """
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.amplitude(self.mscale) / self.amplitude(self.mscale_all_dim)
        return self.amplitude(1.0)

    @property
    def logit_scale(self) -> float:
        """Return the factor of V3.2's attention logits; 1 without mscale_all_dim."""
        if not self.mscale_all_dim:
            return 1.0
        amplitude = self.amplitude(self.mscale_all_dim)
        return amplitude * amplitude

    def amplitude(self, mscale: float) -> float:
        """Return 0.1 mscale ln(factor) + 1; a context that was not extended has 1."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * log(self.factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class Rope:
    """RoPE of one place of the model: base, how many dims, which, and YaRN where it applies."""

    theta: float
    dims: int
    pairing: RopePairing
    end: RopeEnd
    yarn: Yarn | None

    @property
    def scale(self) -> float:
        """Return the factor of cos and sin."""
        return 1.0 if self.yarn is None else self.yarn.rotation_scale


@dataclass(frozen=True)
class Block:
    """One decoder layer (`layers.17`) or one drafter layer (`mtp.0`)."""

    scope: str  # "layers" or "mtp"
    index: int
    layer_type: LayerType
    mlp_type: MlpType
    ratio: int  # tokens in one compressed entry; 0: no compressor

    @property
    def prefix(self) -> str:
        """Return `layers.17`, the prefix of sites and of DeepSeek's own tensors."""
        return f"{self.scope}.{self.index}"

    @property
    def is_drafter(self) -> bool:
        """Return whether the block drafts tokens ahead and is no part of the main model."""
        return self.scope == "mtp"


@dataclass(frozen=True)
class Box:
    """A half-open range per dimension; a scalar has no ranges."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    @lru_cache(maxsize=1024)
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box that covers all of `shape`."""
        return cls(tuple((0, extent) for extent in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the extents of the box."""
        return tuple(stop - start for start, stop in self.ranges)

    @property
    def count(self) -> int:
        """Return the number of elements inside; 1 for a scalar."""
        return prod(self.shape)

    def overlaps(self, other: Box) -> bool:
        """Return whether an element lies in both."""
        pairs = zip(self.ranges, other.ranges, strict=True)
        return all(a0 < b1 and b0 < a1 for (a0, a1), (b0, b1) in pairs)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint: name, shape, dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: Dtype

    @property
    def count(self) -> int:
        """Return the number of elements; 1 for a scalar."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the bytes of its data."""
        return self.count * self.dtype.size
