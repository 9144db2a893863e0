"""How many faults are found, how often a healthy run alarms, and how soon a history sees a shift.

`museum`: every fault planted in several places, and 200 healthy runs. Shares have Wilson's interval
at 95 %. Only the last target is a time. With fewer than 15 rounds a small part is run, as a trial.

`peers`: a plain decoder of 16 layers, d = 1024, 512 tokens, whose linears hold decoded NVFP4
weights: clean, and with one of three faults in `layers.7.mlp.down_proj`. And a W4A4 product of
512 x 1024 x 2048 with sixteen faults, on Gaussian, heavy-tailed and small inputs, healthy in every
legal order of its sum; published gates are applied to the same outputs.

`history`: a store of 61 layers of 40 components, a night a day for five years, with one shift.
Healthy years are simulated, and shifts of 3 standard deviations of a single run.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from degarble.harness import api
from degarble.harness.commands.report_folder import history_page
from degarble.harness.history.changes import changes_of
from degarble.harness.history.panel import history_of
from degarble.harness.history.records import BUDGETS, HistoryRun
from degarble.harness.history.store import HistoryStore
from degarble.harness.museum.cases import KEYS
from degarble.harness.museum.museum import (
    WHOLE,
    MuseumExtent,
    chosen,
    effect_text,
    percent,
    run_museum,
)
from degarble.harness.museum.scores import (
    by_family,
    by_strength,
    classes,
    has_effect,
    is_missed,
)
from degarble.harness.report.verdict import Verdict
from degarble.reports.page_html import page_html
from degarble.suites.bench.runner import Bench, Part, Table, Target
from degarble.suites.engine.diagnose.judge.decoder_toy import FAULTS as TOY_FAULTS
from degarble.suites.engine.diagnose.judge.decoder_toy import PLACE, Toy, toy
from degarble.suites.engine.diagnose.judge.gemm_faults import (
    FAULTS,
    HEALTHY,
    INPUTS,
    Gemm,
    gemm,
    values,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.museum.museum import Museum
    from degarble.harness.museum.scores import MuseumScore

# ---- the museum of faults ------------------------------------------------------------------------

LONGEST = 3600.0  # seconds on two cores
_SMALL = MuseumExtent(plants=1, healthy=2)
_HEADER = ("plants", "localised", "cause named first", "wrong cause")


def museum(options: Any) -> Iterator[Part]:
    whole = options.rounds >= BENCHES["museum"].rounds
    faults = chosen(()) if whole else chosen(("M10.nibble_order",))
    yield from told_of(run_museum(faults, WHOLE if whole else _SMALL, options.threads))


def told_of(museum: Museum) -> Iterator[Part]:
    """The tables, targets and notes of a museum."""
    strengths = tuple(
        (name, *_cells(count, three)) for name, count, *three in by_strength(museum.outcomes)
    )
    families = tuple(
        (name, *_cells(count, three))
        for name, (count, _, *three) in by_family(museum.outcomes).items()
    )
    misses = tuple(
        (
            outcome.fault,
            outcome.component,
            effect_text(outcome.effect),
            outcome.place.value,
            outcome.named or "-",
        )
        for outcome in museum.outcomes
        if is_missed(outcome)
    )
    tables = [
        Table("By effect in units of budget", ("effect", *_HEADER), strengths),
        Table("By family, from 3x", ("family", *_HEADER), families),
    ]
    strict = tuple((s.claim.strip(), percent(s)) for s in museum.scores if s.wanted is None)
    tables.append(Table("Without classes of the same data effect", ("share", "measured"), strict))
    pairs = tuple((f"{a}, {b}", str(n)) for (a, b), n in classes(museum.outcomes).items())
    if pairs:
        tables.append(Table("Pairs that made the same of the data", ("pair", "seen"), pairs))
    if misses:
        header = ("fault", "component", "effect", "place", "named")
        tables.append(Table("Missed", header, misses))
    yield from tables
    yield from _targets(museum)
    yield from _notes(museum)


def _cells(count: int, three: list[MuseumScore]) -> tuple[str, ...]:
    return (str(count), *(percent(score) for score in three))


def _targets(museum: Museum) -> tuple[Target, ...]:
    claims = tuple(
        Target(f"{score.claim}: {percent(score)}", score.share, score.wanted, score.at_least)
        for score in museum.scores
        if score.total and score.wanted is not None
    )
    return (*claims, Target("seconds in all", museum.seconds, LONGEST, at_least=False))


def _notes(museum: Museum) -> tuple[str, ...]:
    faults = {outcome.fault for outcome in museum.outcomes}
    effective = sum(map(has_effect, museum.outcomes))
    without = ", ".join(museum.without_effect) or "none"
    cases = ", ".join(map(str, KEYS))
    return (
        f"{len(faults)} faults planted {len(museum.outcomes)} times into {cases}",
        f"{effective} plants have an effect; without effect wherever they were planted: {without}",
        f"fewer than three plants with an effect: {', '.join(museum.scarce) or 'no family'}",
        f"{len(museum.healthy)} healthy runs: seeds, lengths, batches, switches, orders, controls",
        f"{len(museum.repeats)} cases run twice: races, and healthy candidates",
        "both are the trained small models of references/tiny",
        "localised: its component is blamed and no other one; an edge is compared bit for bit",
        "named: first, or one that makes the same of the same calls is first (docs/faults.md)",
    )


# ---- faults that published gates miss ------------------------------------------------------------

SECONDS = 8
FULL, SMALL = (512, 1024, 2048), (128, 256, 256)
_WIDTH = 1024


def _cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


def _difference(a: Tensor, b: Tensor) -> float:
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


# Published rules, as they are stated; `bf16` is the unquantised product, `twin` the decoded one.
GATES: Mapping[str, Callable[[Tensor, Tensor, Tensor], bool]] = {
    "cosine with BF16 > 0.97": lambda out, bf16, _twin: _cosine(out, bf16) > 0.97,
    "1 - 2 xy / (xx + yy) with BF16 < 0.02": lambda out, bf16, _t: _difference(out, bf16) < 0.02,
    "cosine with BF16 > 0.99, norm within 25 %": lambda out, bf16, _twin: (
        _cosine(out, bf16) > 0.99 and abs(float(out.norm() / bf16.norm()) - 1) <= 0.25
    ),
    "assert_close 0.1, 0.1 with the decoded product": lambda out, _bf16, twin: bool(
        torch.isclose(out, twin, rtol=0.1, atol=0.1).all()
    ),
}


class Scenario(NamedTuple):
    """One judged run of the toy: what was planted, what was said, and how long it took."""

    name: str
    found: api.Checked
    expected: str | None
    seconds: float

    @property
    def right(self) -> bool:
        """Nothing in a clean model; the one module and its cause in another."""
        causes = [
            (e.component, e.cause.fault if e.cause else None) for e in self.found.discrepancies
        ]
        return causes == ([] if self.expected is None else [(PLACE, self.expected)])


class Case(NamedTuple):
    """One output of the product, judged."""

    kind: str
    name: str
    expected: str | None
    judged: api.JudgedKernel
    passed: tuple[str, ...]  # gates that let it pass


def scenarios(made: Toy) -> list[Scenario]:
    """Capture the clean toy and the three faulty ones, then judge them one after the other."""
    runs: list[tuple[str, str | None, Any]] = [
        ("clean", None, api.capture(made.model, made.tokens))
    ]
    for name, (change, fault) in TOY_FAULTS.items():
        made.put(PLACE, change(made.weights[PLACE]))
        runs.append((name, fault, api.capture(made.model, made.tokens)))
    made.put(PLACE, made.weights[PLACE])
    twin = api.Twin(made.weights)
    found = []
    for name, expected, run in runs:
        begin = time.perf_counter()
        checked = api.check(run, twin)
        found.append(Scenario(name, checked, expected, time.perf_counter() - begin))
    return found


def cases(shape: tuple[int, int, int], kinds: Sequence[str] = INPUTS) -> list[Case]:
    """Every legal order and every fault, on kinds of inputs."""
    found = []
    for kind in kinds:
        made = gemm(kind, shape)
        outputs: list[tuple[str, str | None, Tensor]] = [
            (name, None, order(made)) for name, order in HEALTHY.items()
        ]
        outputs += [(name, planted.named, planted.run(made)) for name, planted in FAULTS.items()]
        for name, expected, out in outputs:
            found.append(_judged(made, kind, name, expected, out.bfloat16()))
    return found


def _judged(made: Gemm, kind: str, name: str, expected: str | None, out: Tensor) -> Case:
    judged = api.judge("gemm", made.xq, made.wq, out, reference={"x": made.x, "w": made.w})
    x, w = values(made)
    bf16, twin = made.x.float() @ made.w.float().T, x @ w.T
    passed = tuple(gate for gate, rule in GATES.items() if rule(out.float(), bf16, twin))
    return Case(kind, name, expected, judged, passed)


def peers(options: Any) -> Iterator[Part]:
    """Through the Python surface; capturing is not counted."""
    full = options.size >= _WIDTH
    small = toy(layers=9, width=64, wide=128, tokens=32)
    scenarios(small)  # loops are compiled once
    toys = scenarios(toy() if full else small)
    begin = time.perf_counter()
    judged = cases(FULL) if full else cases(SMALL, INPUTS[:1])
    seconds = time.perf_counter() - begin
    clean = [case for case in judged if case.expected is None]
    faulty = [case for case in judged if case.expected is not None]
    yield _toy_table(toys)
    yield _gate_table(judged)
    yield _fault_table(faulty)
    total = sum(scenario.seconds for scenario in toys)
    yield Target("toy, clean and three faults, s", total, SECONDS, at_least=False)
    right = sum(scenario.right for scenario in toys)
    yield Target("toy: verdict, place and cause right, of 4", right, 4)
    missed = sum(bool(case.judged) for case in faulty)
    yield Target("product: faults missed", missed, 0, at_least=False)
    alarms = sum(not case.judged for case in clean) + len(toys[0].found.discrepancies)
    yield Target("false alarms", alarms, 0, at_least=False)
    named = [e for e in faulty if e.judged.cause and e.judged.cause.fault == e.expected]
    yield Target("product: cause named first, share", len(named) / len(faulty), 0.9)
    yield f"toy: {len(toys[0].found.judged)} linears; capturing is not counted"
    yield f"product: {len(judged)} outputs judged in {seconds:.1f} s, diagnosis included"


def _toy_table(toys: list[Scenario]) -> Table:
    rows = []
    for scenario in toys:
        lines = [
            f"{e.component}: {e.cause.fault if e.cause else '-'}"
            for e in scenario.found.discrepancies
        ]
        rows.append((scenario.name, str(scenario.found.verdict), ", ".join(lines) or "-",
                     f"{scenario.seconds:.2f}"))  # fmt: skip
    return Table("Toy decoder", ("planted", "verdict", "place and cause", "s"), tuple(rows))


def _gate_table(judged: list[Case]) -> Table:
    """How many faults each gate lets pass, and whether it passes healthy ones."""
    rows, kinds = [], tuple(dict.fromkeys(case.kind for case in judged))
    ours: Callable[[Case], bool] = lambda case: bool(case.judged)  # noqa: E731  one rule of many
    rules = {gate: (lambda case, gate=gate: gate in case.passed) for gate in GATES}
    for name, passes in {**rules, "judge (this project)": ours}.items():
        missed = [
            sum(passes(e) for e in judged if e.kind == kind and e.expected is not None)
            for kind in kinds
        ]
        healthy = all(passes(e) for e in judged if e.expected is None)
        rows.append((name, "yes" if healthy else "no", *map(str, missed)))
    header = ("rule", "healthy ones pass", *(f"missed of 16, {kind}" for kind in kinds))
    return Table("Published gates beside ours", header, tuple(rows))


def _fault_table(faulty: list[Case]) -> Table:
    rows, kinds = [], tuple(dict.fromkeys(case.kind for case in faulty))
    for name in FAULTS:
        found = [case for case in faulty if case.name == name]
        lines = [e.judged.cause.fault if e.judged.cause else "-" for e in found]
        rows.append((name, *(f"{e.judged.ratio:.3g}" for e in found), *lines))
    header = ("fault", *(f"ratio, {kind}" for kind in kinds), *(f"cause, {k}" for k in kinds))
    return Table(
        "Faults of the product: times the budget, and the cause named", header, tuple(rows)
    )


# ---- the history of all nights -------------------------------------------------------------------

LAYERS, COMPONENTS, YEARS = 61, 40, 5
_SHIFTED, _AT = "layers.23.component 07", 1700
_HEALTHY = 4  # stores of five years for each kind of noise
_LEARNED = 365  # nights before a shift
_FIRST = date(2021, 1, 1)


def filled(url: str, nights: int, places: int) -> None:
    """Fill a store with nights of small noise, in which one component moves."""
    rng = np.random.default_rng(0)
    names = [f"layers.{n // COMPONENTS}.component {n % COMPONENTS:02d}" for n in range(places)]
    base = 0.1 + 0.4 * rng.random(places)
    with HistoryStore(url, create=True) as store:
        for night in range(nights):
            values = dict(zip(names, (base + 0.02 * rng.standard_normal(places)).tolist(),
                              strict=True))  # fmt: skip
            if night >= _AT and _SHIFTED in values:
                values[_SHIFTED] += 0.12
            run = HistoryRun(
                "V4-Pro", str(_FIRST + timedelta(night)), "B200", Verdict.AGREES,
                {BUDGETS.name: values}, commit=f"{night:040x}",
            )  # fmt: skip
            store.add(run)


def asked(url: str) -> tuple[str, list[tuple[str, str]]]:
    """Query the whole history and draw it; return the page and what moved."""
    with HistoryStore(url) as store:
        history = history_of(store, store.streams()[0])
    return page_html(history_page(history)), [(move.place, move.first) for move in history.moves]


def alarms_a_year(noise: Callable[[np.random.Generator], NDArray[np.float64]]) -> float:
    """Count changes that a healthy store tells, over simulated years."""
    found = sum(len(changes_of(noise(np.random.default_rng(seed)))) for seed in range(_HEALTHY))
    return found / (_HEALTHY * YEARS)


def _normal(rng: np.random.Generator) -> NDArray[np.float64]:
    return rng.standard_normal((365 * YEARS, LAYERS * COMPONENTS))


def _heavy(rng: np.random.Generator) -> NDArray[np.float64]:
    return rng.standard_t(5, (365 * YEARS, LAYERS * COMPONENTS))


def _carried(rng: np.random.Generator) -> NDArray[np.float64]:
    values = _normal(rng)
    for night in range(1, len(values)):
        values[night] += 0.5 * values[night - 1]
    return values


def found_within(runs: int, nights: tuple[int, ...]) -> list[float]:
    """Return the share of shifts of 3 deviations of one run that so many nights find."""
    series = LAYERS * COMPONENTS
    rng = np.random.default_rng(runs)
    values = rng.standard_normal((_LEARNED + max(nights), series)) / np.sqrt(runs)
    values[_LEARNED:] += 3 * np.where(np.arange(series) % 2, 1.0, -1.0)
    first: dict[int, int] = {}
    for change in changes_of(values):
        if change.found >= _LEARNED:
            first.setdefault(change.series, change.found - _LEARNED + 1)
    return [sum(when <= limit for when in first.values()) / series for limit in nights]


def history(options: Any) -> Iterator[Part]:
    with tempfile.TemporaryDirectory(prefix="degarble-") as folder:
        url = str(Path(folder) / "history.sqlite")
        filled(url, 365 * YEARS, LAYERS * COMPONENTS)
        seconds = []
        for _ in range(max(3, options.rounds // 3)):
            start = time.perf_counter()
            page, moves = asked(url)
            seconds.append(time.perf_counter() - start)
        stored = Path(url).stat().st_size
    size = f"{stored / 1e6:.0f} MB stored, page {len(page.encode()) / 1e6:.2f} MB"
    yield from _query(statistics.median(seconds), "; ".join(map(" on ".join, moves)), size)
    yield from _alarms()
    yield from _shifts()
    yield f"{_LEARNED} nights are learned before a shift; noise is independent between runs"
    yield "two nights of one run show 4.2 deviations; one alarm a year asks for more than 5"


def _query(taken: float, moved: str, size: str) -> Iterator[Part]:
    numbers = 365 * YEARS * LAYERS * COMPONENTS
    yield Table(
        f"{numbers:,} numbers: {365 * YEARS:,} nights x {LAYERS * COMPONENTS:,} places",
        ("queried, tested and drawn", "what moved", "size"),
        ((f"{taken:.2f} s", moved, size),),
    )
    yield Target("seconds to query and draw five years", taken, 2.0, at_least=False)


def _alarms() -> Iterator[Part]:
    kinds = {"normal": _normal, "heavy tails (t, 5)": _heavy, "carried over (0.5)": _carried}
    alarms = {name: alarms_a_year(noise) for name, noise in kinds.items()}
    yield Table(
        f"Alarms a year over {LAYERS * COMPONENTS:,} healthy series",
        ("noise", f"alarms a year, of {_HEALTHY * YEARS} simulated"),
        tuple((name, f"{each:.2f}") for name, each in alarms.items()),
    )
    for name, alarm in alarms.items():
        yield Target(f"alarms a year, {name}", alarm, 1.0, at_least=False)


def _shifts() -> Iterator[Part]:
    limits = (1, 2, 3, 8)
    found = {runs: found_within(runs, limits) for runs in (1, 2, 4, 8)}
    yield Table(
        "A shift of 3 standard deviations of one run, in one series",
        ("runs a night", *(f"found within {n} nights" for n in limits)),
        tuple((str(runs), *(f"{share:.1%}" for share in each)) for runs, each in found.items()),
    )
    for runs in (4, 1):
        yield Target(f"found within 2 nights, runs a night: {runs}", found[runs][1], 0.95)


BENCHES = {
    "peers": Bench("Faults that published gates miss", peers, ("torch", "numba"), page=True),
    "museum": Bench("The museum of faults", museum, page=True),
    "history": Bench(
        "The history of all nights", history, ("numpy", "SQLAlchemy"), page=True
    ),
}  # fmt: skip
