"""Problem and form of products of very few rows of heads, each head by a matrix of its own.

out[t, h] = x[t, h] W[h]^T in BF16 with x [T, H, width], whose first K values of a head count, and
W [H N, K]. Two kinds, V3.2's absorbed matrices:
* keys: N = 512; a row of `out` has 576 values, the last 64 of a head turned (RoPE) behind the sums;
* values: a head has N values; with `decoded` they are quantised to NVFP4 and decoded. With `splits`
  there is no x: float32 sums of attention's splits, and their peaks, are merged to x first.

The order of a sum is that of sm90_gemm_grouped: steps of 16 along K, one wgmma each.
Host arithmetic only, no GPU and no DSL. Shape letters: T tokens, H heads, N columns, K inner.
"""

from __future__ import annotations

from dataclasses import dataclass

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.kernels.attention.problem import MERGED_AT_ONCE, MOST_SPLITS
from degarble.kernels.primitives import kv_problem as rows

STEP = 64  # values of K in a box: 128 bytes of a row
TILE = 64  # rows of a matrix that a wgmma multiplies
MOST_TOKENS = 8  # its columns
MOST_SPAN = 256  # rows of a box
BLOCK_BYTES = 65_536  # of weights in a thread block: three share a multiprocessor
BLOCKS = 3
THREADS = 128


@dataclass(frozen=True)
class HeadsProblem:
    """T tokens of H heads of `width` values, K of which are multiplied by N rows a head."""

    tokens: int
    heads: int
    columns: int
    inner: int
    width: int
    positions: int = 0  # rows of the table of turns: keys
    decoded: bool = False  # values as NVFP4 has them
    splits: int = 0  # of attention, which are merged first: x is their sums and peaks; 0: none

    def __post_init__(self) -> None:
        rows.require_extent("heads", self.heads, 1)
        rows.require_extent("columns of a head", self.columns, 1)
        rows.require_extent("values of a head that are multiplied", self.inner, 1)
        rows.require_extent("positions of the table of turns", self.positions)
        if not 0 <= self.tokens <= MOST_TOKENS or not serves(self.columns, self.inner):
            raise ShapeMismatch(
                "tokens, columns and values of heads", (self.tokens, self.columns, self.inner),
                f"up to {MOST_TOKENS} tokens, N and K in multiples of {TILE}, up to "
                f"{BLOCK_BYTES // (2 * TILE)} values of K", "Use the grouped product.",
            )  # fmt: skip
        if self.width % STEP or self.width < self.inner:
            raise ShapeMismatch(
                "width of a head", self.width, f"whole {STEP}, and no less than {self.inner}",
                "Use the grouped product.",
            )  # fmt: skip
        self._require_keys_or_values()

    def _require_keys_or_values(self) -> None:
        if self.positions and (self.decoded or self.splits):
            raise InvalidArgument(
                "positions, decoded and splits of heads",
                (self.positions, self.decoded, self.splits),
                "keys are turned, and neither quantised nor merged",
                "Give positions for keys alone, decoded and splits for values.",
            )
        if self.positions and self.width < self.inner + rows.ROTATED:
            raise ShapeMismatch(
                "width of a head of keys", self.width,
                f"at least {self.inner + rows.ROTATED}: {rows.ROTATED} values are turned",
                "Give whole heads, or no positions.",
            )  # fmt: skip
        if not 0 <= self.splits <= MOST_SPLITS:
            raise InvalidArgument(
                "splits of heads", self.splits, f"0 to {MOST_SPLITS}", "0 is x that is whole."
            )
        if self.splits and not self.inner == self.width == rows.WIDTH:
            raise ShapeMismatch(
                "merged values of a head", (self.inner, self.width),
                f"{rows.WIDTH}, all of them multiplied", "Merge them by simt_attention_merge.",
            )  # fmt: skip

    @property
    def steps(self) -> int:
        """Return the boxes of K."""
        return self.inner // STEP

    @property
    def out_width(self) -> int:
        """Return the values of a head in `out`."""
        return self.columns + (rows.ROTATED if self.positions else 0)

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes moved: matrices, results, and x or float32 sums and peaks."""
        read = self.inner + (rows.ROTATED if self.positions else 0)
        if self.splits:
            read = self.splits * 2 * (self.width + 2)  # words of 2 bytes
        of_head = read + self.out_width
        return 2 * self.heads * (self.columns * self.inner + self.tokens * of_head)


@dataclass(frozen=True)
class HeadsForm:
    """Compile-time parameters; extents come with the launch."""

    target: str
    steps: int
    span: int  # rows of a matrix in a thread block
    turned: bool
    decoded: bool
    at_once: int = 0  # splits that are merged, at most
    sinks: bool = False  # read by `merged`; V3.2 has none


def span_of(columns: int, inner: int) -> int:
    """Return the rows of a head's matrix that a thread block has: whole tiles, evenly."""
    span = min(MOST_SPAN, BLOCK_BYTES // (2 * inner) // TILE * TILE)
    while span > 0 and columns % span:
        span -= TILE
    return span


def serves(columns: int, inner: int) -> bool:
    """Return whether a head's matrix can be divided among thread blocks."""
    return columns % TILE == 0 and inner % STEP == 0 and span_of(columns, inner) > 0


def choose_form(problem: HeadsProblem, target: str) -> HeadsForm:
    """Return the form of a problem."""
    span = span_of(problem.columns, problem.inner)
    at_once = next(n for n in MERGED_AT_ONCE if n >= problem.splits) if problem.splits else 0
    turned = problem.positions > 0
    return HeadsForm(target, problem.steps, span, turned, problem.decoded, at_once)


def parts_of(problem: HeadsProblem) -> int:
    """Return the thread blocks of a head."""
    return problem.columns // span_of(problem.columns, problem.inner)
