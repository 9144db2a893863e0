"""What a history of five years costs, how often it cries wolf, and how soon it sees a shift.

The store holds 61 layers of 40 components, a night a day for five years, with one shift. Healthy
years are simulated, and shifts of 3 standard deviations of a single run.
"""

from __future__ import annotations

import tempfile
import time
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from degarble.harness.commands.report_folder import history_page
from degarble.harness.history.changes import changes_of
from degarble.harness.history.panel import history_of
from degarble.harness.history.records import BUDGETS, HistoryRun
from degarble.harness.history.store import HistoryStore
from degarble.harness.report.verdict import Verdict
from degarble.reports.page_html import page_html
from degarble.suites.bench.timing import Neighbours, Reading, Section, Table, Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from degarble.suites.bench.timing import Settings

PACKAGES = ("numpy", "SQLAlchemy")
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
    return page_html(history_page(history)), [(each.place, each.first) for each in history.moves]


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
    for each in changes_of(values):
        if each.found >= _LEARNED:
            first.setdefault(each.series, each.found - _LEARNED + 1)
    return [sum(when <= limit for when in first.values()) / series for limit in nights]


def run(settings: Settings) -> Section:
    """Measure all three."""
    neighbours = Neighbours()
    with tempfile.TemporaryDirectory(prefix="degarble-") as folder:
        url = str(Path(folder) / "history.sqlite")
        filled(url, 365 * YEARS, LAYERS * COMPONENTS)
        seconds = []
        with neighbours:
            for _ in range(max(3, settings.rounds // 3)):
                start = time.perf_counter()
                page, moves = asked(url)
                seconds.append(time.perf_counter() - start)
        stored = Path(url).stat().st_size
    taken = Reading(tuple(seconds)).median
    size = f"{stored / 1e6:.0f} MB stored, page {len(page.encode()) / 1e6:.2f} MB"
    query, wanted = _query(taken, "; ".join(map(" on ".join, moves)), size)
    alarms, silent = _alarms()
    shifts, seen = _shifts()
    return Section(
        key="history",
        title="The history of all nights",
        tables=(query, alarms, shifts),
        targets=(wanted, *silent, *seen),
        notes=(
            f"{_LEARNED} nights are learned before a shift; noise is independent between runs",
            "two nights of one run show 4.2 deviations; one alarm a year asks for more than 5",
            f"other processes took {neighbours.cores:.1f} cores while the store was asked",
        ),
    )


def _query(taken: float, moved: str, size: str) -> tuple[Table, Target]:
    numbers = 365 * YEARS * LAYERS * COMPONENTS
    table = Table(
        f"{numbers:,} numbers: {365 * YEARS:,} nights x {LAYERS * COMPONENTS:,} places",
        ("queried, tested and drawn", "what moved", "size"),
        ((f"{taken:.2f} s", moved, size),),
    )
    return table, Target("seconds to query and draw five years", taken, 2.0, at_least=False)


def _alarms() -> tuple[Table, list[Target]]:
    kinds = {"normal": _normal, "heavy tails (t, 5)": _heavy, "carried over (0.5)": _carried}
    alarms = {name: alarms_a_year(noise) for name, noise in kinds.items()}
    table = Table(
        f"Alarms a year over {LAYERS * COMPONENTS:,} healthy series",
        ("noise", f"alarms a year, of {_HEALTHY * YEARS} simulated"),
        tuple((name, f"{each:.2f}") for name, each in alarms.items()),
    )
    wanted = [
        Target(f"alarms a year, {name}", each, 1.0, at_least=False) for name, each in alarms.items()
    ]
    return table, wanted


def _shifts() -> tuple[Table, list[Target]]:
    limits = (1, 2, 3, 8)
    found = {runs: found_within(runs, limits) for runs in (1, 2, 4, 8)}
    table = Table(
        "A shift of 3 standard deviations of one run, in one series",
        ("runs a night", *(f"found within {n} nights" for n in limits)),
        tuple((str(runs), *(f"{share:.1%}" for share in each)) for runs, each in found.items()),
    )
    wanted = [
        Target(f"found within 2 nights, runs a night: {runs}", found[runs][1], 0.95)
        for runs in (4, 1)
    ]
    return table, wanted
