"""How a warp holds attention rows of 512 or 128 values, the order of their sums, and RoPE.

A lane holds two slots of 8 values: 8 lane to 8 lane + 7, and the same 256 further on. So 16-byte
loads are adjacent, both halves of a 16-wide block are in neighbouring lanes, and the pairs that
RoPE rotates are in one lane. Lanes 24 to 31 hold the last 64 values, the rotated ones, in their
second slot. A row of 128 (small models, the indexer) has one slot in each of 16 lanes; the others
hold zeros.

The sum of squares has one order: a lane sums each slot from its first value on by fma, then both;
lanes are folded by distance 16, 8, 4, 2, 1. So a row's bits depend on the row alone.

A RoPE table is float32 [positions, 64]: 32 cosines, then 32 sines, as vLLM keeps it. Importable
without the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

WIDTH = 512  # values of a row; DeepSeek-V4 config.json, head_dim
ROTATED = 64  # of them turned, the last ones; qk_rope_head_dim
PLAIN = WIDTH - ROTATED
WITH_KEY = WIDTH + ROTATED  # V3.2's cached row: the latent, then the rotated key
HALF = 8  # values of a lane's 16-byte load
LANES = 32
SLOTS = WIDTH // (LANES * HALF)
PAIRS_OF_LANE = HALF // 2
TABLE_WIDTH = ROTATED  # 32 cosines, 32 sines
LARGEST = 1 << 31
WEIGHTS = ("bf16", "fp32")  # dtypes of a norm's weight
MOST_HEADS = 1 << 16  # CUDA C++ Programming Guide 13.0: a grid has fewer thread blocks along y


def require_extent(name: str, extent: int, least: int = 0) -> None:
    """Raise on an extent that a kernel's 32-bit numbers do not hold."""
    if not least <= extent < LARGEST:
        raise ShapeMismatch(name, extent, f"from {least} to below 2**31", "Split the launch.")


def require_epsilon(epsilon: float) -> None:
    """Raise on an epsilon outside [0, 1)."""
    if not 0 <= epsilon < 1:
        raise InvalidArgument(
            "epsilon", epsilon, "a number from 0 up to 1", "Models have 1e-6 or 1e-20."
        )


@dataclass(frozen=True)
class Geometry:
    """How a warp holds a row of `width` values."""

    width: int

    @property
    def plain(self) -> int:
        """Return the number of values that are not rotated, the leading ones."""
        return self.width - ROTATED

    @property
    def chunks(self) -> int:
        """Return the number of 16-byte loads of a row."""
        return self.width // HALF

    @property
    def slots(self) -> int:
        """Return the number of slots of a lane, of eight values each."""
        held: int = ceil_div(self.chunks, LANES)
        return held

    @property
    def lanes(self) -> int:
        """Return the number of lanes that hold values."""
        return min(self.chunks, LANES)

    @property
    def first_turned_lane(self) -> int:
        """Return the lane that holds the first rotated values, in the last slot."""
        return self.lanes_of(self.slots - 1) - ROTATED // HALF

    def lanes_of(self, slot: int) -> int:
        """Return the number of lanes that hold values in a slot, the first ones."""
        return min(self.chunks - slot * LANES, LANES)


GEOMETRIES: Mapping[int, Geometry] = MappingProxyType(
    {width: Geometry(width) for width in (128, WIDTH)}
)


def geometry(width: int) -> Geometry:
    """Return how a row is held; raise on a width without a kernel."""
    if width not in GEOMETRIES:
        raise ShapeMismatch(
            "width of a row",
            width,
            " or ".join(map(str, GEOMETRIES)),
            "Heads, latents and index keys of the known models have these.",
        )
    return GEOMETRIES[width]


def cached_geometry(width: int) -> Geometry:
    """Return how a cached row is held; V3.2's key follows the latent."""
    return Geometry(width) if width == WITH_KEY else geometry(width)


def folded(numbers: Sequence[Any]) -> Any:
    """Add number i and number i + n / 2 until one is left; n is a power of two."""
    while len(numbers) > 1:
        middle = len(numbers) // 2
        pairs = zip(numbers[:middle], numbers[middle:], strict=True)
        numbers = [ops.add_rn(first, second) for first, second in pairs]
    return numbers[0]


def lane_sum(halves: Sequence[Sequence[Any]]) -> Any:
    """Return the sum of squares of a lane's values, in the stated order."""
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
    """Return a row's norm factor from the sums of its lanes; each step is rounded once."""
    mean = ops.multiply_rn(folded(lanes), 1.0 / width)
    return ops.divide_rn(1.0, root(ops.add_rn(mean, epsilon)))


def normed(number: Any, weight: Any, factor: Any) -> Any:
    """Return a normed value in float32; the caller rounds it to BF16."""
    return ops.multiply_rn(weight, ops.multiply_rn(number, factor))


def turned(
    numbers: Sequence[Any], cos: Sequence[Any], sin: Sequence[Any], *, back: bool
) -> list[Any]:
    """Rotate adjacent pairs, or rotate them back; each product and sum is rounded."""
    made: list[Any] = []
    for pair in range(len(numbers) // 2):
        even, odd = numbers[2 * pair], numbers[2 * pair + 1]
        of_sine = ops.multiply_rn(sin[pair], -1.0) if back else sin[pair]
        made += codecs.rope_rotate(even, odd, cos[pair], of_sine)
    return made
