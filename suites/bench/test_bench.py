"""The runner with planted clocks and arms, the page with planted markers, the benches of a CPU."""

from __future__ import annotations

import json
import mmap
import re
import shlex
import subprocess
import sys
import time
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import EXIT_DIFFERS, EXIT_REFUSED, UnknownName
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.model.config.config import V3_2, V4_PRO
from degarble.harness.museum.museum import WHOLE, Museum
from degarble.harness.museum.plants import CauseAnswer, PlaceAnswer, PlantOutcome
from degarble.harness.museum.scores import HealthyRun
from degarble.references import experts
from degarble.suites.bench import (
    __main__,
    checkpoints,
    detection,
    machine,
    models,
    runner,
    runs,
    tensors,
)
from degarble.suites.bench.__main__ import (
    MODULES,
    bench_named,
    main,
    measure,
    names,
    on_page,
    options_of,
    parser_of,
    replaced,
)
from degarble.suites.bench.runner import (
    PAGE,
    SLOW_STEP,
    Arm,
    Bench,
    Claim,
    Comparison,
    Reading,
    Section,
    Table,
    Target,
    call,
    copied,
    rendered,
    timed,
)
from degarble.suites.engine.diagnose.judge.decoder_toy import FAULTS, toy
from degarble.suites.house.repository import ROOT, documents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from degarble.harness.model.config.config import Config


class Clock:
    """A stopwatch that moves only when an arm says so: no neighbour can disturb these tests."""

    def __init__(self) -> None:
        self.now = 0.0

    def arm(self, name: str, *seconds: float) -> Arm:
        """Take the given times by turns."""
        left = cycle(seconds)

        def work() -> None:
            self.now += next(left)

        return call(name, work)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


# ---- the runner ----------------------------------------------------------------------------------


def test_planted_times_come_out_as_their_ratio(clock: Clock) -> None:
    found = timed([clock.arm("a", 0.1), clock.arm("b", 0.2, 0.4, 0.6, 0.2, 0.8)], 5)
    assert found["a"].seconds == pytest.approx([0.1] * 5)
    assert found["b"].seconds == pytest.approx([0.6, 0.2, 0.8, 0.2, 0.4])
    ratios = found["a"].ratios("b")
    assert (found["a"].times("b"), *runner.quartiles(ratios)) == pytest.approx((4, 2, 6))
    assert runner.times("b", "", spread=True)[1](found["a"]) == "4.00 (2.00 to 6.00)"
    assert runner.time_over("a", "")[1](found["b"]) == "4.00 (2.00 to 6.00)"


def test_a_turn_of_a_quick_arm_is_many_calls_and_counts_by_their_mean(clock: Clock) -> None:
    quick = clock.arm("quick", 0.004, 0.004, 0.002, 0.002, 0.002, 0.002, 0.012)
    assert timed([quick], 1)["quick"].seconds == pytest.approx([0.02 / 5])


def test_arms_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(runner, "TURN_SECONDS", 0.0)
    timed([call(name, partial(calls.append, name)) for name in "abc"], 2)
    assert "".join(calls) == "aabbcc" + "abc" + "bca"


def test_reading_returns_median_and_quartiles() -> None:
    arm = call("any", object)
    assert Reading(arm, (5.0, 1.0, 3.0)).median == 3
    assert Reading(arm, (1.0, 2.0, 3.0, 4.0, 5.0)).quartiles == (2, 4)
    assert Reading(arm, (2.0,)).quartiles == (2, 2)


def test_targets_know_their_direction() -> None:
    assert Target("x", 3.0, 3.0).met
    assert not Target("x", 2.9, 3.0).met
    assert Target("x", 1.2, 1.3, at_least=False).met
    assert not Target("x", 1.4, 1.3, at_least=False).met


def test_only_keeps_tables_and_arms_of_that_name_and_their_baselines(clock: Clock) -> None:
    arms = (clock.arm("red", 1.0), clock.arm("green", 2.0))
    base = Arm("base", lambda _: lambda: None, baseline=True)
    table = Comparison("colours", [(base, *arms), (base, arms[1])], ())
    kept = table.only(["red"])
    assert kept is not None
    assert [[arm.name for arm in turns] for turns in kept.turns] == [["base", "red"]]
    assert table.only(["colour"]) == table.only([]) == table
    assert table.only(["base"]) is None
    with pytest.raises(UnknownName, match="colours"):
        runner.run("b", Bench("b", lambda _: [table]), options("peers", only=["blue"]))


def options(name: str, **changed: Any) -> Any:
    return options_of(name, **{"size": 64, "rounds": 1, "threads": 1, "peers": False, **changed})


def test_parts_of_a_bench_become_a_section(clock: Clock) -> None:
    arms = (clock.arm("fast", 0.1), clock.arm("slow", 0.3))
    claim = Claim("ratio", "fast", lambda reading: reading.times("slow"), 3.0)
    column = ("times", lambda each: f"{each.times('slow'):.0f}")

    def parts(_options: Any) -> Iterator[runner.Part]:
        yield Comparison("table", [arms], [column], [claim])
        yield Target("ready", 1.0, 2.0)
        yield "a note"

    said: list[str] = []
    section = runner.run("b", Bench("title", parts), options("peers"), said.append)
    assert section.tables == (Table("table", ("arm", "times"), (("fast", "3"), ("slow", "1"))),)
    assert [(target.claim, target.met) for target in section.targets] == [
        ("ratio", True), ("ready", False)
    ]  # fmt: skip
    assert section.notes[0] == "a note"
    assert "other processes took" in section.notes[1]
    assert said[0].startswith("**table**\n\n| arm | times |")
    assert section.speeds["fast"]["microseconds"] == pytest.approx(1e5)


def test_planted_memory_is_detected() -> None:
    def touched() -> mmap.mmap:  # not by an allocator, which may hold pages from before
        made = mmap.mmap(-1, 1 << 25)
        for page in range(0, len(made), mmap.PAGESIZE):
            made[page] = 1
        return made

    peak = machine.peak_rise(touched)
    if peak is None:
        pytest.skip("this kernel has no resettable high-water mark")
    assert 0.9 * (1 << 25) < peak < 1.5 * (1 << 25)


def test_neighbours_and_machine_are_reported() -> None:
    with machine.Neighbours() as neighbours:
        time.sleep(0.01)
    assert 0 <= neighbours.cores < 1024
    assert "torch 2." in machine.machine(("torch", "no-such-package"))
    assert "no-such-package absent" in machine.machine(("no-such-package",))


def test_a_function_in_a_process_of_its_own_says_what_it_took() -> None:
    done = machine.in_child("json:dumps", {"a": 1})
    assert done.result == json.dumps({"a": 1})
    assert 0 < done.cpu_seconds < 60
    assert 1_000_000 < done.peak < 1 << 30
    with pytest.raises(subprocess.CalledProcessError):
        machine.in_child("json:loads", "{")


# ---- the command ---------------------------------------------------------------------------------


def test_every_bench_is_registered_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(set(names())) == len(names())
    for module, several in MODULES.items():
        home = sys.modules[bench_named(several[0]).parts.__module__]
        assert home.__name__.endswith(f".{module}")
        assert set(several) == set(home.BENCHES)
    assert main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == names()


def test_figures_of_the_page_are_those_of_the_registry() -> None:
    """Whatever the page shows can be measured again, and the other way round."""
    page = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- figures: ([\w-]+) -->", page)) == set(on_page())


def commands() -> list[str]:
    """Every command of ours in a document: after the runner's name, or in the tables of kernels."""
    found = []
    for page in documents():
        text = page.read_text(encoding="utf-8")
        found += re.findall(r"degarble\.suites\.bench (?!and )([a-z][^`\n]*)`", text)
        found += re.findall(r'make figures ARGS="([^"]*)"', text)
        if page.name == "figures.md":
            table = text.split("## Kernels on an H200")[1].split("<!--")[0]
            of_rows = [line.split(" | ")[-2] for line in table.splitlines() if line[:2] == "| "]
            found += [each for cell in of_rows for each in re.findall(r"`([^`]+)`", cell)]
    return [each for each in found if not each.startswith("pytest")]


def test_every_command_of_the_documents_is_understood() -> None:
    said = [shlex.split(line) for line in commands()]
    named = {words[0] for words in said if not words[0].startswith("-")}
    with_gpu = {name for name in names() if bench_named(name).device(options_of(name))}
    assert named >= with_gpu - {"night"}
    for words in said:
        asked = [words[0]] if words[0] in named else []
        read = parser_of([bench_named(name) for name in asked]).parse_args(words)
        assert read.names == asked
        assert set(read.only) <= set(names()) or asked


# ---- the page ------------------------------------------------------------------------------------


def test_a_section_is_replaced_and_the_rest_stays() -> None:
    page = replaced("# Figures\n\nby hand\n", "a", "one\n")
    page = replaced(page, "b", "two\n")
    page = replaced(page, "a", "three\n")
    assert page.startswith("# Figures\n\nby hand\n")
    assert page.count("<!-- figures: a -->") == 1
    assert "one" not in page
    assert page.index("three") < page.index("two")
    with pytest.raises(UnknownName, match="end of figures: b"):
        replaced(page.replace("<!-- end of figures: b -->", ""), "b", "four\n")


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Any]], None]:
    """Let `formats` be a bench of these parts."""
    monkeypatch.setattr(__main__, "pin", lambda _threads: [])

    def put(parts: Callable[[Any], Any]) -> None:
        monkeypatch.setitem(tensors.BENCHES, "formats", Bench("Planted", parts, page=True))

    return put


def test_a_missed_target_is_written_and_ends_with_status_1(
    tmp_path: Path, planted: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "figures.md"
    line = ["--only", "formats", "--page", str(page)]
    planted(lambda _: [Table("t", ("h",), (("c",),)), Target("x", 1.0, 2.0), "note"])
    assert main(line) == EXIT_DIFFERS
    assert "| x | >= 2 | 1.00 | MISSED |" in page.read_text()
    assert '`make figures ARGS="--only formats"`' in page.read_text()
    planted(lambda _: [Table("t", ("h",), (("c",),)), Target("x", 3.0, 2.0), "note"])
    assert main(line) == 0
    assert "| x | >= 2 | 3.00 | met |" in page.read_text()
    assert "MISSED" not in page.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["figures.md"]
    assert "Planted" in capsys.readouterr().out
    assert main(["formats"]) == 0
    assert "`python -m degarble.suites.bench formats`" in capsys.readouterr().out


def test_what_others_write_meanwhile_stays(tmp_path: Path, planted: Any) -> None:
    page = tmp_path / "figures.md"
    page.write_text("# Figures\n")

    def parts(_options: Any) -> Iterator[str]:
        page.write_text(replaced(page.read_text(), "other", "told\n"))
        yield "note"

    planted(parts)
    assert main(["--only", "formats", "--page", str(page)]) == 0
    assert "told" in page.read_text()
    assert "## Planted" in page.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["figures.md"]


@pytest.mark.parametrize("line", [["--only", "format", "--page"], ["format"], []])
def test_an_unknown_bench_is_refused_and_nothing_written(
    line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "figures.md"
    assert main([*line, *[str(page)] * ("--page" in line)]) == EXIT_REFUSED
    assert "formats" in capsys.readouterr().err
    assert not page.exists()


# ---- benches of a CPU at a small size: every arm runs, a missed bound shows ---------------------

Rows = dict[str, list[str]]  # first cells of a section's tables


def targets_of(section: Section) -> dict[str, Target]:
    return {target.claim: target for target in section.targets}


def check_formats(section: Section, rows: Rows) -> None:
    assert targets_of(section)["decoding is bit-equal to the textbook version (1 = yes)"].met
    assert "degarble, out=" in rows["Dequantise to BF16"]
    assert len(rows["E2M1: value to code to value"]) == 2 * 4


def check_compare(section: Section, rows: Rows) -> None:
    assert rows["In memory"] == [tensors.OURS, tensors.PLAIN]
    stored = section.tables[1].rows[0]
    assert float(stored[1]) == round(tensors.TENSORS * 2 * 256 * 256 * 2 / 1e9, 2)
    assert targets_of(section)["both arms say the same (1 = yes)"].met
    assert targets_of(section)["peak resident bytes"].met


def check_quantising(section: Section, rows: Rows) -> None:
    matrix, whole = rows.values()
    assert matrix[0] == checkpoints.OURS
    assert len(matrix) == 4
    assert whole == ["V4, official to nvfp4-full", "V4, bf16 to nvfp4-full"]
    missed_peak(section)


def missed_peak(section: Section) -> None:
    """The planted fault: nothing fits in one byte."""
    peak = targets_of(section)["peak resident bytes"]
    assert peak.measured > 20_000_000
    assert not peak.met


def check_large(section: Section, rows: Rows) -> None:
    assert rows["Steps"] == list(checkpoints.STEPS.values())
    size, peak, _ = section.targets
    assert not size.met  # a small source is no large one
    assert peak.measured > 100_000_000
    assert peak.met
    assert "881e9 /" in section.notes[0]


def check_audit(section: Section, rows: Rows) -> None:
    rates, cold, profile = rows.values()
    assert rates == ["V4, nvfp4-experts", "V4, nvfp4-experts, --against itself"]
    assert len(cold) == 2
    assert profile[-1].startswith("everything else")
    assert min(target.measured for target in section.targets[:2]) > 0
    missed_peak(section)


def check_full_size(section: Section, rows: Rows) -> None:
    assert list(rows) == ["Time and memory", "The plan that came out"]
    maps = [each for _, each in checkpoints.MAPS]
    times, plans = section.tables
    assert [row[:2] for row in times.rows] == [("V4-Pro, official", each) for each in maps]
    assert [row[2:4] for row in plans.rows] == [("8", "1"), ("8", "8")]
    found = targets_of(section)
    assert 0 < found["seconds from start to end"].measured < 60
    assert found["healthy checkpoints raise no error (1 = yes)"].met
    missed_peak(section)


def check_capture(section: Section, rows: Rows) -> None:
    assert list(rows.values()) == [list(runs.ARMS)]
    (target,) = section.targets
    assert (target.wanted, target.at_least) == (1.2, False)


def check_references(section: Section, rows: Rows) -> None:
    ours = ["degarble, BF16", "degarble, float32", "degarble generate, BF16"]
    assert list(rows.values()) == [ours]
    assert all(float(row[1]) > 1 for row in section.tables[0].rows)
    assert section.targets == ()


def check_streaming(section: Section, rows: Rows) -> None:
    found = targets_of(section)
    assert found["share of experts visited"].measured == 1.0
    assert 0 < found["peak resident bytes"].measured < 3e9
    assert float(section.tables[0].rows[0][0]) > 0
    assert list(rows.values())[1] == ["V4-Pro", "V3.2"]


def check_peers(section: Section, _rows: Rows) -> None:
    assert all(target.met for target in section.targets if not target.claim.endswith(", s"))
    gates = {row[0]: row[1:] for row in section.tables[1].rows}
    assert gates["judge (this project)"] == ("yes", "0")
    assert int(gates["cosine with BF16 > 0.97"][1]) > 4


def check_width(section: Section, _rows: Rows) -> None:
    """V4-Pro's width, one layer of each type and both ends: judged within 4 GB of memory."""
    _, _, verdict, outputs, unjudged, *_ = section.tables[0].rows[0]
    assert (verdict, unjudged) == ("AGREES", "0")
    assert int(outputs) > 90
    assert all(target.met for target in section.targets)
    assert 0 < section.targets[1].measured <= 0.7


slow = pytest.mark.slow
SMALL = {"size": 256}
SMALL_RUNS = [
    pytest.param("formats", {"rounds": 2}, check_formats, marks=slow),
    ("compare", SMALL, check_compare),
    pytest.param("checkpoint-quantise", SMALL, check_quantising, marks=slow),
    pytest.param("checkpoint-large", SMALL, check_large, marks=slow),
    pytest.param("audit", SMALL, check_audit, marks=slow),
    pytest.param("full-size", SMALL, check_full_size, marks=slow),
    ("capture", {"size": 16, "rounds": 2}, check_capture),
    pytest.param("references", {}, check_references, marks=slow),
    pytest.param("streaming", {}, check_streaming, marks=slow),
    pytest.param("peers", {"size": 16}, check_peers, marks=slow),
    pytest.param("check-width", {"recipe": "bf16"}, check_width, marks=slow),
    pytest.param("check-width", {"recipe": "nvfp4-experts"}, check_width, marks=slow),
]


@pytest.mark.parametrize(("name", "changed", "check"), SMALL_RUNS)
def test_a_small_run_measures_every_arm(
    name: str, changed: dict[str, Any], check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "TURN_SECONDS", 0.0)
    if name != "checkpoint-large":
        monkeypatch.setattr(checkpoints, "PEAK_BYTES", 1)
    monkeypatch.setattr(checkpoints, "LAYOUTS", {"nvfp4-experts": 1.0})
    official = (("official", "vllm:tp=8"), ("official", "vllm:tp=2,ep=8"))
    monkeypatch.setattr(checkpoints, "MAPS", official)
    section, device = measure(name, options(name, **changed))
    assert not device
    for table in section.tables:
        assert {len(row) for row in table.rows} == {len(table.header)}, table.title
    assert rendered(section, ["today"]).startswith(f"## {bench_named(name).what}\n")
    check(section, {table.title: [row[0] for row in table.rows] for table in section.tables})


def test_disagreement_of_a_baseline_is_reported() -> None:
    ours = torch.tensor([0.0, 1.0, 2.0, -3.0]).bfloat16()
    arms = [
        call("same", ours.clone),
        call("zero", lambda: torch.tensor([-0.0, 1.0, 2.0, -3.0]).bfloat16()),
        call("off", lambda: torch.tensor([0.0, 1.0, 2.0, -3.03125]).bfloat16()),
    ]
    assert tensors._decoder_agreement(arms, ours) == {
        "same": "bit-equal",
        "zero": "25.00% of values differ, in the sign of zero only",
        "off": "25.00% of values differ, by at most 2 ulp",
    }


def test_a_pair_steps_where_it_should() -> None:
    candidate, reference = tensors.pair(128)
    _, _, _, steps, identical = tensors.plain(candidate, reference)
    assert steps == 1
    assert 0.9 < identical < 0.97
    assert torch.isfinite(candidate).all()


@slow
@pytest.mark.parametrize(("task", "most"), [("dequantise", 1.5), ("quantise", 1.5)])
def test_peak_memory_of_a_child_is_a_share(task: str, most: float) -> None:
    ratio = machine.in_child(f"{tensors.__name__}:peak_ratio", task, tensors.OURS, 2048).result
    assert ratio is None or 0.2 < ratio < most  # spare memory may hold the output


def test_capture_arms_write_what_they_say() -> None:
    found = runs.turns(options("capture", size=16))
    sizes = {name: turns[0].nbytes for name, turns in found.items()}
    plain, captured, told, by_hand = sizes.values()
    assert plain == told == 0
    assert by_hand > 512 * 16 * 4 * runs.LAYERS
    # Outputs, and the inputs that no module put out: sums and products between modules.
    assert by_hand < captured < 2 * by_hand


@slow
def test_checked_captures_end_as_they_should(tmp_path: Path) -> None:
    for arm in runs.arms_in(tmp_path).values():
        assert runs.seconds_of(arm, tmp_path) > 0


def test_an_arm_continues_its_own_text() -> None:
    given = []

    def step(ids: torch.Tensor) -> torch.Tensor:
        given.append(ids.tolist())
        return ids[-1] + 1

    arm = models.Decoding(step)
    arm()
    assert len(given) == 1 + models.TOKENS
    assert given[1:3] == [[int(models.PROMPT[-1]) + 1], [int(models.PROMPT[-1]) + 2]]
    assert arm.named == [int(models.PROMPT[-1]) + n for n in range(1, models.TOKENS + 2)]


def test_a_fitted_bias_lets_every_expert_have_tokens(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(128, 16, generator=generator) + torch.linspace(-3, 3, 16)
    for bias, least in ((torch.zeros(16), 0), (models.fitted_bias(logits, 2), 10)):
        chosen = (experts.sqrt_softplus(logits) + bias).topk(2, dim=-1).indices
        load = torch.bincount(chosen.flatten(), minlength=16)
        assert (int(load.min()) == 0) == (least == 0)
        assert int(load.min()) >= least


@pytest.mark.parametrize(("config", "gigabytes"), [(V4_PRO, 865), (V3_2, 690)])
def test_sizes_of_the_full_models_are_those_of_their_files(config: Config, gigabytes: int) -> None:
    """805.3 GiB of V4-Pro's headers, its drafter included; 671e9 FP8 weights of V3.2."""
    assert models.official_bytes(config) / 1e9 == pytest.approx(gigabytes, rel=0.05)


# ---- detection -----------------------------------------------------------------------------------

MADE = Museum(
    (
        PlantOutcome(
            "M10.nibble_order", "head", "a", "b", 9.0, PlaceAnswer.EXACT, CauseAnswer.FIRST
        ),
        PlantOutcome("M06.up", "norm", "a", "b", 90.0, PlaceAnswer.NOWHERE),
    ),
    (HealthyRun("a"),),
    ("M03.first",),
    12.0,
)


def test_the_museum_runs_everything_and_reports_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def planted(*arguments: object) -> Museum:
        asked.append(arguments)
        return MADE

    monkeypatch.setattr(detection, "run_museum", planted)
    section, _ = measure("museum", options_of("museum"))
    assert asked == [(tuple(MODEL_FAULTS), WHOLE, 2)]
    text = rendered(section, ("today",))
    assert "| M06.up | norm | 90.0x | nowhere | - |" in text
    assert "M03.first" in text
    met = {target.claim.partition(":")[0]: target.met for target in section.targets}
    assert met["localised to the component, from 3x"] is False
    assert met["alarms on healthy runs"] is True
    assert met["seconds in all"] is True
    measure("museum", options_of("museum", rounds=1))
    assert asked[1][0] == ("M10.nibble_order",)


def test_scenarios_of_the_toy_are_distinguished() -> None:
    scenarios = detection.scenarios(toy(layers=9, width=64, wide=128, tokens=32))
    assert [scenario.name for scenario in scenarios] == ["clean", *FAULTS]
    assert all(scenario.right for scenario in scenarios)
    wrong = scenarios[0]._replace(expected="M10.nibble_order")
    assert not wrong.right


def test_the_planted_shift_is_reported_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detection, "_AT", 60)
    monkeypatch.setattr(detection, "_SHIFTED", "layers.0.component 07")
    url = str(tmp_path / "h.sqlite")
    detection.filled(url, 70, 40)
    page, moves = detection.asked(url)
    assert moves == [("layers.0.component 07", "2021-03-02")]
    assert "layers.0.component 07" in page


def test_more_runs_a_night_find_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "LAYERS", 5)
    one, four = detection.found_within(1, (2, 8)), detection.found_within(4, (2, 8))
    assert four[0] > 0.9 > one[0]
    assert one[1] > 0.9


def test_alarms_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "_HEALTHY", 1)

    def stepping(rng: np.random.Generator) -> NDArray[np.float64]:
        values = rng.standard_normal((100, 10))
        values[50:] += 20
        return values

    assert detection.alarms_a_year(stepping) == 10 / detection.YEARS


@pytest.mark.parametrize("megabytes", [1024, 1088, 2048, 3072, 1000, 1200, 512, 64])
def test_no_copy_has_a_size_that_is_slow(megabytes: int) -> None:
    moved = megabytes << 20
    half = copied(moved)
    assert half % PAGE == 0
    assert half < 1 << 29 or half % SLOW_STEP
    assert 0 <= moved - 2 * half <= SLOW_STEP, "a rate of nearly as many bytes"


def test_little_is_copied_by_whole_pages() -> None:
    assert [copied(moved) for moved in (1, 2 * PAGE, 3 * PAGE, 5 * PAGE)] == [
        PAGE, PAGE, PAGE, 2 * PAGE
    ]  # fmt: skip
