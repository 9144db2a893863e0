"""Rows of 512 or 128 values as attention has them: which lane holds what, the turn of the last 64.

Owns the geometry that kernels of latent rows and query heads share. A warp has a row; a lane holds
two halves of a block, values 8 lane to 8 lane + 7 and the same 256 further on, so that loads of 16
bytes lie side by side, both halves of a 16-wide block are neighbours, and pairs that turn together
are in one lane. The last 64 values are what lanes 24 to 31 hold second. The sum of squares has one
order: a lane sums each half from its first value on by fma, then both; lanes are folded by distance
16, 8, 4, 2, 1. So the bits of a row depend on nothing but the row. A row of 128, the small models'
and the indexer's, has one half in each of 16 lanes; the others hold zeros.

A table of turns is float32 [positions, 64]: 32 cosines, then 32 sines, as vLLM keeps it. Pure host
arithmetic, no GPU and no DSL. Refuses heads, tokens and tables that do not fit. Kept honest by
suites/kernels/primitives/test_attention_rows.py, against the references.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.harness.formats import scalar_codecs as codecs
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

WIDTH = 512  # values of a row; DeepSeek-V4 config.json, head_dim
ROTATED = 64  # of them turned, the last ones; qk_rope_head_dim
PLAIN = WIDTH - ROTATED
WITH_KEY = WIDTH + ROTATED  # V3.2's cached row: the latent, then the turned key beside it
HALF = 8  # values of a lane's 16-byte load
LANES = 32
SLOTS = WIDTH // (LANES * HALF)
PAIRS_OF_LANE = HALF // 2
TABLE_WIDTH = ROTATED  # 32 cosines, 32 sines
LARGEST = 1 << 31
WEIGHTS = ("bf16", "fp32")  # dtypes of a norm's weight
MOST_HEADS = 1 << 16  # CUDA C++ Programming Guide 13.0: a grid has fewer thread blocks along y


def require_extent(name: str, extent: int, least: int = 0) -> None:
    """Refuse an extent that a kernel's 32-bit numbers do not hold."""
    if not least <= extent < LARGEST:
        raise ShapeMismatch(name, extent, f"from {least} to below 2**31", "Split the launch.")


def require_epsilon(epsilon: float) -> None:
    """Refuse an epsilon that no norm has."""
    if not 0 <= epsilon < 1:
        raise InvalidArgument(
            "epsilon", epsilon, "a number from 0 up to 1", "Models have 1e-6 or 1e-20."
        )


@dataclass(frozen=True)
class Geometry:
    """How a warp holds a row of so many values."""

    width: int

    @property
    def plain(self) -> int:
        """Values that are not turned, the leading ones."""
        return self.width - ROTATED

    @property
    def chunks(self) -> int:
        """Loads of 16 bytes of a row."""
        return self.width // HALF

    @property
    def slots(self) -> int:
        """Halves that a lane holds."""
        held: int = ceil_div(self.chunks, LANES)
        return held

    @property
    def lanes(self) -> int:
        """Lanes that hold values."""
        return min(self.chunks, LANES)

    @property
    def first_turned_lane(self) -> int:
        """Lane that holds the first turned values, in the last slot."""
        return self.lanes_of(self.slots - 1) - ROTATED // HALF

    def lanes_of(self, slot: int) -> int:
        """Lanes that hold values in a slot, the first ones."""
        return min(self.chunks - slot * LANES, LANES)


GEOMETRIES: Mapping[int, Geometry] = MappingProxyType(
    {width: Geometry(width) for width in (128, WIDTH)}
)


def geometry(width: int) -> Geometry:
    """Return how a row is held; a width without a kernel is refused."""
    if width not in GEOMETRIES:
        raise ShapeMismatch(
            "width of a row",
            width,
            " or ".join(map(str, GEOMETRIES)),
            "Heads, latents and index keys of the known models have these.",
        )
    return GEOMETRIES[width]


def cached_geometry(width: int) -> Geometry:
    """Return how a cached row is held, which may have V3.2's key beside the latent."""
    return Geometry(width) if width == WITH_KEY else geometry(width)


def folded(numbers: Sequence[Any]) -> Any:
    """Add number i and number i + n / 2 until one is left; n is a power of two."""
    while len(numbers) > 1:
        middle = len(numbers) // 2
        pairs = zip(numbers[:middle], numbers[middle:], strict=True)
        numbers = [ops.add_rn(first, second) for first, second in pairs]
    return numbers[0]


def lane_sum(halves: Sequence[Sequence[Any]]) -> Any:
    """Return the sum of squares of what a lane holds."""
    sums = []
    for numbers in halves:
        total = ops.multiply_rn(numbers[0], numbers[0])
        for number in numbers[1:]:
            total = ops.fma_rn(number, number, total)
        sums.append(total)
    return folded(sums)


def row_factor(
    lanes: Sequence[Any], epsilon: Any, root: Callable[[Any], Any], width: int = WIDTH
) -> Any:
    """Return what a row is multiplied by, from the sums of its lanes; each step is rounded once."""
    mean = ops.multiply_rn(folded(lanes), 1.0 / width)
    return ops.divide_rn(1.0, root(ops.add_rn(mean, epsilon)))


def normed(number: Any, weight: Any, factor: Any) -> Any:
    """Return a normed value in float32; rounding it to BF16 is the caller's."""
    return ops.multiply_rn(weight, ops.multiply_rn(number, factor))


def turned(
    numbers: Sequence[Any], cos: Sequence[Any], sin: Sequence[Any], *, back: bool
) -> list[Any]:
    """Turn pairs that lie side by side, or turn them back; each product and sum is rounded."""
    made: list[Any] = []
    for pair in range(len(numbers) // 2):
        even, odd = numbers[2 * pair], numbers[2 * pair + 1]
        of_sine = ops.multiply_rn(sin[pair], -1.0) if back else sin[pair]
        made += codecs.rope_rotate(even, odd, cos[pair], of_sine)
    return made
