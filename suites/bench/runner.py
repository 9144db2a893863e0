"""Time arms side by side, and report tables, targets and notes: the one runner of all benches.

    python -m degarble.suites.bench NAME ... [--only WORD ...] [--rounds N] [--json | --page]
    python -m degarble.suites.bench --list

A Bench yields its parts: a Comparison, whose arms are timed here, or a Table, Target or note that
is ready. Arms take turns within a round, and each round starts with another arm, so that a
disturbance hits all of them; a ratio is the median over rounds of ratios within a round. On a GPU
an arm is a CUDA graph of one launch on each of several buffer sets, so that the L2 cache holds
nothing that is read next.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import UnknownName
from degarble.suites.bench.machine import Neighbours, machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

TURN_SECONDS = 0.02  # of a CPU arm, in as many calls as it takes
SETS = 4  # of buffers on a GPU, at least
REPEATS = 3  # of all sets in a graph
COLD_BYTES = 256 << 20  # of all sets together at least: four times the L2 of an H200
PAGE = 4096
SLOW_FROM, SLOW_STEP = 1 << 29, 1 << 25  # bytes of a copy: at least, and multiples of it
COPY = "copy"
DEVICE = "cuda"


# ---- what a bench consists of --------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """Something to time: `make` returns a call on the buffers of a set, by the set's number."""

    name: str
    make: Callable[[int], Callable[[], object]]
    moved: int = 0  # bytes read and written by one call
    operations: int = 0
    baseline: bool = False  # what others are compared with, which --only does not leave out
    sets: int = 0  # of buffers; 0: as many as leave nothing in the cache
    repeats: int = REPEATS

    @property
    def buffer_sets(self) -> int:
        return self.sets or sets_for(self.moved)


@dataclass(frozen=True)
class Reading:
    """Seconds of one call of an arm, one entry a round, and the readings of the same rounds."""

    arm: Arm
    seconds: tuple[float, ...]
    beside: Mapping[str, Reading] = field(default_factory=dict, repr=False, compare=False)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        return quartiles(self.seconds)

    @property
    def bandwidth(self) -> float:
        """Bytes a second over the median."""
        return self.arm.moved / self.median

    @property
    def speed(self) -> float:
        """Operations a second over the median."""
        return self.arm.operations / self.median

    def ratios(self, other: str) -> list[float]:
        """How many times as long another arm took, round by round."""
        pairs = zip(self.seconds, self.beside[other].seconds, strict=True)
        return [theirs / ours for ours, theirs in pairs]

    def times(self, other: str) -> float:
        return statistics.median(self.ratios(other))

    def share_of(self, other: str = COPY) -> float:
        """Bandwidth as a share of another arm's."""
        return self.times(other) * self.arm.moved / self.beside[other].arm.moved


def pair_share(reading: Reading) -> float:
    """Time of all baselines of the same rounds over that of all other arms."""
    sums: list[list[float]] = []
    for baseline in (True, False):
        arms = [each.seconds for each in reading.beside.values() if each.arm.baseline == baseline]
        sums.append([sum(times) for times in zip(*arms, strict=True)])
    ratios = (theirs / ours for theirs, ours in zip(*sums, strict=True))
    return float(statistics.median(ratios))


Readings = dict[str, Reading]
Column = tuple[str, "Callable[[Reading], str]"]


def shared(
    made: Callable[[int], Mapping[str, Callable[[], object]]], name: str
) -> Callable[[int], Callable[[], object]]:
    """Return how an arm is made of calls that several arms make together, on the same buffers."""
    return lambda number: made(number)[name]


@dataclass(frozen=True)
class Claim:
    """A target that is computed from an arm's reading, and from those of the same rounds."""

    text: str
    arm: str
    value: Callable[[Reading], float]
    wanted: float
    at_least: bool = True


@dataclass(frozen=True)
class Target:
    """A claim: what was measured must be at least (or, if not at_least, at most) `wanted`."""

    claim: str
    measured: float
    wanted: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.measured >= self.wanted if self.at_least else self.measured <= self.wanted


@dataclass(frozen=True)
class Comparison:
    """A table to measure. Arms of one tuple of `turns` take turns; each is a row.

    Baselines have rows only where all arms take turns together; else the columns quote them.
    """

    title: str
    turns: Sequence[tuple[Arm, ...]]
    columns: Sequence[Column]
    claims: Sequence[Claim] = ()
    rounds: int = 0  # 0: those of the run
    first: str = "arm"
    rows: Callable[[Readings], Iterable[tuple[str, ...]]] | None = None  # instead of a row an arm
    notes: Callable[[Readings], Iterable[str]] | None = None
    against: Callable[[Reading], tuple[float, str]] | None = None  # share, and of what
    keep_going: bool = False  # after arms that fail
    as_one: str = ""  # the name of the only row: all arms but baselines count together

    def only(self, words: Sequence[str]) -> Comparison | None:
        """Leave out the arms whose names have none of the words, unless the title has one."""
        if not words or any(word in self.title for word in words):
            return self
        kept = []
        for arms in self.turns:
            named = [arm for arm in arms if any(word in arm.name for word in words)]
            if any(not arm.baseline for arm in named):
                kept.append(tuple(arm for arm in arms if arm.baseline or arm in named))
        return replace(self, turns=kept) if kept else None


@dataclass(frozen=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Section:
    """What one bench found: tables, targets, and what a reader must know about them."""

    key: str
    title: str
    tables: tuple[Table, ...] = ()
    targets: tuple[Target, ...] = ()
    notes: tuple[str, ...] = ()
    speeds: Mapping[str, Mapping[str, float | str]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        return not self.failed and all(target.met for target in self.targets)


Part = Comparison | Table | Target | str  # a str is a note


@dataclass(frozen=True)
class Bench:
    """One row of the table of benches."""

    what: str
    parts: Callable[[Any], Iterable[Part]]  # of the options
    packages: tuple[str, ...] = ("torch",)
    options: Mapping[str, Any] = field(default_factory=dict)  # with their defaults, or choices
    rounds: int = 15
    needs: Callable[[Any], str] | str = ""  # a GPU: "gpu", or a target's name; "": none
    remedy: str = ""  # without it
    page: bool = False  # whether docs/figures.md has a section of it

    def device(self, options: Any) -> str:
        return self.needs if isinstance(self.needs, str) else self.needs(options)


# ---- columns -------------------------------------------------------------------------------------


def column(header: str, unit: float, form: str, spread: bool = False, between: str = "") -> Column:
    """A column of times in a unit of seconds, with quartiles if wanted."""

    def cell(reading: Reading) -> str:
        text = f"{reading.median / unit:{form}}"
        if not spread:
            return text
        low, high = (f"{quartile / unit:{form}}" for quartile in reading.quartiles)
        return f"{text} ({low} to {high})" if between else f"{text} [{low}, {high}]"

    return header, cell


US = column("us", 1e-6, ".2f", spread=True)
US_MEDIAN = column("us", 1e-6, ".1f")
MS = column("ms", 1e-3, ".2f", spread=True, between="to")
MEGABYTES: Column = ("MB", lambda reading: f"{reading.arm.moved / 1e6:.2f}")
TERABYTES: Column = ("TB/s", lambda reading: f"{reading.bandwidth * 1e-12:.2f}")
TERAFLOPS: Column = (
    "TFLOP/s",
    lambda reading: f"{reading.speed * 1e-12:.0f}" if reading.arm.operations else "",
)


def share_of(other: str = COPY, header: str = "share of copy") -> Column:
    return header, lambda reading: f"{reading.share_of(other):.3f}"


def times(other: str, header: str, spread: bool = False) -> Column:
    """How many times as long another arm takes."""

    def cell(reading: Reading) -> str:
        if other not in reading.beside:
            return ""
        text = f"{reading.times(other):.2f}"
        low, high = quartiles(reading.ratios(other))
        return f"{text} ({low:.2f} to {high:.2f})" if spread else text

    return header, cell


def time_over(other: str, header: str) -> Column:
    """How many times as long this arm takes as another one."""

    def cell(reading: Reading) -> str:
        ratios = [1 / ratio for ratio in reading.ratios(other)]
        low, high = quartiles(ratios)
        return f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"

    return header, cell


def quartiles(numbers: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile; of a single number, twice that number."""
    if len(numbers) == 1:
        return numbers[0], numbers[0]
    first, _, third = statistics.quantiles(numbers, n=4, method="inclusive")
    return first, third


# ---- the two clocks ------------------------------------------------------------------------------


def call(name: str, function: Callable[[], object], moved: int = 0) -> Arm:
    """An arm of the CPU."""
    return Arm(name, lambda _number: function, moved)


def timed(arms: Sequence[Arm], rounds: int, gpu: bool = False) -> Readings:
    """Time arms by turns, on the CPU or on the GPU."""
    clock = _gpu_seconds if gpu else _cpu_seconds
    found: Readings = {}
    for arm, seconds in zip(arms, clock(arms, rounds), strict=True):
        found[arm.name] = Reading(arm, seconds, found)
    return found


def _turns(count: int, rounds: int) -> Iterator[tuple[int, int]]:
    for turn in range(rounds):
        for place in range(count):
            yield turn, (turn + place) % count


def _cpu_seconds(arms: Sequence[Arm], rounds: int) -> list[tuple[float, ...]]:
    """Run every arm twice to warm up, then by turns.

    A turn of a quick arm is several calls, TURN_SECONDS in all, and counts by their mean: after a
    slow arm the first call would measure whose data the caches hold.
    """
    functions = [arm.make(0) for arm in arms]
    calls = [_calls_a_turn(function) for function in functions]
    seconds: list[list[float]] = [[] for _ in arms]
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _, place in _turns(len(arms), rounds):
            taken = 0.0
            for _ in range(calls[place]):
                start = time.perf_counter()
                result = functions[place]()
                taken += time.perf_counter() - start
                del result  # freed outside of the measured time
            seconds[place].append(taken / calls[place])
            if len({len(second) for second in seconds}) == 1:
                gc.collect()
    finally:
        if collecting:
            gc.enable()
    return [tuple(second) for second in seconds]


def _calls_a_turn(function: Callable[[], object]) -> int:
    function()
    start = time.perf_counter()
    function()
    return max(1, math.ceil(TURN_SECONDS / (time.perf_counter() - start)))


def sets_for(moved: int) -> int:
    """Buffer sets so many that together they leave nothing in the cache."""
    return max(SETS, min(64, COLD_BYTES // max(1, moved)))


class Captured(NamedTuple):
    """A graph of so many calls. It keeps addresses, so the launches keep the memory."""

    graph: Any
    launches: list[Callable[[], object]]
    calls: int


def captured(arm: Arm) -> Captured:
    """Run an arm on each of its buffer sets, then capture all of them in a graph."""
    import torch  # noqa: PLC0415  a bench of the start of a process must not have it

    launches = [arm.make(number) for number in range(arm.buffer_sets)]
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(arm.repeats):
            for launch in launches:
                launch()
    return Captured(graph, launches, arm.repeats * len(launches))


def replayed(graphs: Sequence[Captured], rounds: int) -> list[tuple[float, ...]]:
    """Replay graphs by turns; return seconds of a call. Two rounds warm up."""
    import torch  # noqa: PLC0415  as above

    seconds: list[list[float]] = [[] for _ in graphs]
    for turn, place in _turns(len(graphs), rounds + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graphs[place].graph.replay()
        end.record()
        end.synchronize()
        if turn >= 2:
            seconds[place].append(start.elapsed_time(end) * 1e-3 / graphs[place].calls)
    return [tuple(second) for second in seconds]


def _gpu_seconds(arms: Sequence[Arm], rounds: int) -> list[tuple[float, ...]]:
    """Capture each arm in a graph, and replay the graphs by turns."""
    return replayed([captured(arm) for arm in arms], rounds)


def copied(moved: int) -> int:
    """Return how many bytes a copy takes that moves so many in all.

    Trap: the driver copies whole pages half again as fast as anything that is not a multiple, but
    multiples of 32 MiB from 512 MiB on at two thirds of the speed (H200, driver 580: 2.75 TB/s,
    where 500, 600 and 750 MiB are copied at 4.25 TB/s).
    """
    half = max(1, moved // 2 // PAGE) * PAGE
    return half - SLOW_STEP // 2 if half >= SLOW_FROM and half % SLOW_STEP == 0 else half


def copy_arm(moved: int, name: str = COPY) -> Arm:
    """Copy half as many bytes from one place to another: as many are moved."""
    half = copied(moved)

    def make(_number: int) -> Callable[[], object]:
        import torch  # noqa: PLC0415  as above

        source = torch.randint(0, 255, (half,), dtype=torch.uint8, device=DEVICE)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return Arm(name, make, 2 * half, baseline=True)


# ---- running a bench -----------------------------------------------------------------------------


def measured(comparison: Comparison, rounds: int, gpu: bool) -> Section:
    """Time the arms of a comparison; what fails is named where the comparison goes on."""
    readings: Readings = {}
    rows: list[tuple[str, ...]] = []
    failed = {}
    together = len(comparison.turns) == 1
    speeds: dict[str, dict[str, float | str]] = {}
    for arms in comparison.turns:
        try:
            found = timed(arms, comparison.rounds or rounds, gpu)
        except Exception as error:
            if not comparison.keep_going:
                raise
            name = next((arm.name for arm in arms if not arm.baseline), arms[0].name)
            failed[comparison.as_one or name] = (
                f"{type(error).__name__}: {' '.join(str(error).split())}"
            )
            continue
        finally:
            _release(gpu)
        readings |= found
        if comparison.as_one:
            found = {comparison.as_one: summed(comparison.as_one, found)}
        for name, reading in found.items():
            if together or not reading.arm.baseline:
                rows.append((name, *(cell(reading) for _, cell in comparison.columns)))
                speeds[name] = {"microseconds": reading.median * 1e6}
                if comparison.against is not None:
                    speeds[name]["share"], speeds[name]["of"] = comparison.against(reading)
    header = (comparison.first, *(name for name, _ in comparison.columns))
    if comparison.rows is not None:
        header = tuple(name for name, _ in comparison.columns)
        rows = list(comparison.rows(readings))
    return Section(
        "", "", (Table(comparison.title, header, tuple(rows)),),
        tuple(_targets(comparison, readings)),
        tuple(comparison.notes(readings)) if comparison.notes else (), speeds, failed,
    )  # fmt: skip


def summed(name: str, readings: Readings) -> Reading:
    """Return all arms but baselines as one, round by round."""
    ours = [reading for reading in readings.values() if not reading.arm.baseline]
    moved, operations = (sum(getattr(reading.arm, of) for reading in ours)
                         for of in ("moved", "operations"))  # fmt: skip
    arm = Arm(name, ours[0].arm.make, moved, operations)
    seconds = zip(*(reading.seconds for reading in ours), strict=True)
    return Reading(arm, tuple(sum(second) for second in seconds), readings)


def _targets(comparison: Comparison, readings: Readings) -> Iterator[Target]:
    for claim in comparison.claims:
        try:
            value = claim.value(readings[claim.arm])
        except KeyError:
            continue  # its arm was left out by --only
        yield Target(claim.text, value, claim.wanted, claim.at_least)


def _release(gpu: bool) -> None:
    if gpu:
        import torch  # noqa: PLC0415  as above

        torch.cuda.empty_cache()


def run(
    name: str, bench: Bench, options: Any, say: Callable[[str], object] = lambda _text: None
) -> Section:
    """Measure a bench; `say` gets each table as soon as it is there."""
    gpu = bool(bench.device(options))
    whole = Section(name, bench.what)
    names: list[str] = []
    with Neighbours() as neighbours:
        for part in bench.parts(options):
            if isinstance(part, (Comparison, Table)):
                names.append(part.title)
            section = _found(part, options, gpu)
            del part  # its memory, before the next one is made
            for table in section.tables:
                say(rendered_table(table))
            for why, text in section.failed.items():
                say(f"not timed: {why}: {text}")
            whole = replace(
                whole,
                tables=whole.tables + section.tables, targets=whole.targets + section.targets,
                notes=whole.notes + section.notes, speeds={**whole.speeds, **section.speeds},
                failed={**whole.failed, **section.failed},
            )  # fmt: skip
    if options.only and not whole.tables and not whole.failed:
        raise UnknownName("--only", ", ".join(options.only), f"a word of: {'; '.join(names)}",
                          "Use words of these names, or of arms.")  # fmt: skip
    note = f"other processes took {neighbours.cores:.2f} cores of this machine meanwhile"
    return replace(whole, notes=(*whole.notes, note))


def _found(part: Part, options: Any, gpu: bool) -> Section:
    """Return what a part contributes; nothing where --only leaves it out."""
    if isinstance(part, Comparison):
        kept = part.only(options.only)
        return Section("", "") if kept is None else measured(kept, options.rounds, gpu)
    if isinstance(part, Target):
        return Section("", "", targets=(part,))
    if isinstance(part, str):
        return Section("", "", notes=(part,))
    wanted = not options.only or any(word in part.title for word in options.only)
    return Section("", "", (part,) if wanted else ())


# ---- texts ---------------------------------------------------------------------------------------


def rendered(section: Section, origin: Sequence[str]) -> str:
    """Return a section as Markdown; `origin` says date, machine and command."""
    parts = [f"## {section.title}", "\n".join(f"- {line}" for line in (*origin, *section.notes))]
    if section.targets:
        parts.append(rendered_table(target_table(section.targets)))
    parts += [rendered_table(table) for table in section.tables]
    return "\n\n".join(parts) + "\n"


def target_table(targets: Sequence[Target]) -> Table:
    rows = tuple(
        (
            target.claim,
            f"{'>=' if target.at_least else '<='} {target.wanted:g}",
            f"{target.measured:.2f}" if target.measured >= 0.01 else f"{target.measured:.2g}",
            "met" if target.met else "MISSED",
        )
        for target in targets
    )
    return Table("Targets", ("claim", "wanted", "measured", ""), rows)


def rendered_table(table: Table) -> str:
    lines = [table.header, ("---",) * len(table.header), *table.rows]
    body = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return f"**{table.title}**\n\n{body}"


def document(section: Section, device: str) -> dict[str, Any]:
    """Return what --json prints."""
    return {"target": device, "machine": machine(()), **asdict(section)}
