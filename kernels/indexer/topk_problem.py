"""Problem, form and search levels of the indexer's top-k. Importable without the DSL.

Rows of W float32 scores, of which the first `visible` count. The rule: the k largest scores; among
equal ones the lower entry; -0 equals +0; a NaN lies above every number; -inf is never chosen. The
result is the chosen entries in ascending order, padded with -1. So it is unique, whatever the
form.
"""

from __future__ import annotations

from dataclasses import dataclass

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.formats.layouts import ceil_div, round_up

WARP = 32
MOST_COUNT = 2048
MOST_ENTRIES = 1 << 18  # V4-Pro: 1,048,576 tokens, four an entry
LARGEST = 1 << 31
CLUSTERS = (1, 2, 4, 8)  # thread blocks of a row; PTX ISA 9.1, clusters: portable up to 8
CAPACITIES = (8192, 16384, 32768)  # keys that a thread block holds
KEYS_OF_THREAD = 32  # a lane holds the marks of 32 neighbouring keys, at most one word
MOST_THREADS = 1024
FEW_KEYS = 8192  # of a thread block where there are processors to spare
SEGMENT_STEP = 128
LEVELS = ((21, 2048), (10, 2048), (0, 1024))  # shift and bins: 11, 11 and 10 bits from the top
BINS = LEVELS[0][1]
NEVER = 0x007F_FFFF  # the key of -inf: keys up to here are not chosen
NONE = -1


@dataclass(frozen=True)
class TopkProblem:
    """R rows of W scores; choose k among what a token sees of them, ratio 0: among all."""

    rows: int
    entries: int
    count: int
    ratio: int = 0

    def __post_init__(self) -> None:
        for name, extent, least, most in (
            ("rows of scores", self.rows, 0, LARGEST // CLUSTERS[-1] - 1),
            ("entries of a row", self.entries, 1, MOST_ENTRIES),
            ("chosen entries", self.count, 1, MOST_COUNT),
            ("tokens that become one entry", self.ratio, 0, LARGEST - 1),
        ):
            if not least <= extent <= most:
                raise ShapeMismatch(name, extent, f"{least} to {most}", "Split the launch.")

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes: every score once, every chosen entry once."""
        return 4 * self.rows * (self.entries + self.count)


@dataclass(frozen=True)
class TopkForm:
    """Compile-time parameters of a kernel; extents come with the launch."""

    target: str
    threads: int
    cluster: int
    capacity: int
    by_four: bool  # rows begin at whole 16 bytes
    limited: bool  # by positions

    @property
    def warps(self) -> int:
        """Return the number of warps of a thread block."""
        return self.threads // WARP


def choose_form(problem: TopkProblem, target: str, processors: int) -> TopkForm:
    """Return the form for a problem: few rows are cut among several thread blocks."""
    fitting = [c for c in CLUSTERS if segment(problem.entries, c) <= CAPACITIES[-1]]
    few = 2 * problem.rows <= processors
    cluster = fitting[0]
    if few:
        spare = [c for c in fitting if problem.rows * c <= processors] or fitting[:1]
        short = [c for c in spare if segment(problem.entries, c) <= FEW_KEYS] or spare[-1:]
        cluster = short[0]
    need = segment(problem.entries, cluster)
    capacity = next(size for size in CAPACITIES if size >= need)
    alone = problem.rows * cluster <= processors
    threads = MOST_THREADS if alone else capacity // KEYS_OF_THREAD
    return TopkForm(target, threads, cluster, capacity, problem.entries % 4 == 0, problem.ratio > 0)


def segment(entries: int, cluster: int) -> int:
    """Return how many keys of a row each thread block has."""
    found: int = round_up(ceil_div(entries, cluster), SEGMENT_STEP)
    return found


def grid(problem: TopkProblem, form: TopkForm) -> int:
    """Return the number of thread blocks, cluster after cluster."""
    return problem.rows * form.cluster


def shared_bytes(form: TopkForm) -> int:
    """Return the shared memory of a thread block: keys, bins, and counts of warps."""
    notes = len(LEVELS) * (form.warps + 2) + 2 * form.warps + 2
    return 4 * (form.capacity + sum(bins for _, bins in LEVELS) + notes)
