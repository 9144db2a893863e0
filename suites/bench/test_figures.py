"""The benches at a small size, the stopwatch with planted sleeps, the page with planted markers."""

from __future__ import annotations

import mmap
import time
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import EXIT_DIFFERS, EXIT_REFUSED, UnknownName
from degarble.suites.bench import bench_formats, figures, timing
from degarble.suites.bench.figures import main, measure, rendered, replaced
from degarble.suites.bench.timing import (
    Neighbours,
    Reading,
    Section,
    Settings,
    Table,
    Target,
    interleave,
    machine,
    paired_ratio,
    peak_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SMALL = Settings(size=64, rounds=2, threads=1, peers=False)


class Clock:
    """A stopwatch that moves only when an arm says so: no neighbour can disturb these tests."""

    def __init__(self) -> None:
        self.now = 0.0

    def arm(self, *seconds: float) -> Callable[[], None]:
        """Take the given times by turns."""
        left = cycle(seconds)

        def call() -> None:
            self.now += next(left)

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def test_planted_times_come_out_as_their_ratio(clock: Clock) -> None:
    readings = interleave({"a": clock.arm(0.1), "b": clock.arm(0.2, 0.4, 0.6, 0.2, 0.8)}, 5)
    assert readings["a"].seconds == pytest.approx([0.1] * 5)
    assert readings["b"].seconds == pytest.approx([0.6, 0.2, 0.8, 0.2, 0.4])
    assert paired_ratio(readings["b"], readings["a"]) == pytest.approx((4, 2, 6))


def test_a_turn_of_a_quick_arm_is_many_calls_and_counts_by_their_mean(clock: Clock) -> None:
    quick = clock.arm(0.004, 0.004, 0.002, 0.002, 0.002, 0.002, 0.012)
    reading = interleave({"quick": quick}, 1)["quick"]
    assert reading.seconds == pytest.approx([0.02 / 5])


def test_arms_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(timing, "TURN_SECONDS", 0.0)
    interleave({name: partial(calls.append, name) for name in "abc"}, 2)
    assert "".join(calls) == "aabbcc" + "abc" + "bca"


def test_reading_returns_median_and_quartiles() -> None:
    assert Reading((5.0, 1.0, 3.0)).median == 3
    assert Reading((1.0, 2.0, 3.0, 4.0, 5.0)).quartiles == (2, 4)
    assert Reading((2.0,)).quartiles == (2, 2)


def test_targets_know_their_direction() -> None:
    assert Target("x", 3.0, 3.0).met
    assert not Target("x", 2.9, 3.0).met
    assert Target("x", 1.2, 1.3, at_least=False).met
    assert not Target("x", 1.4, 1.3, at_least=False).met


def test_planted_memory_is_detected() -> None:
    def touched() -> mmap.mmap:  # not by an allocator, which may hold pages from before
        made = mmap.mmap(-1, 1 << 25)
        for page in range(0, len(made), mmap.PAGESIZE):
            made[page] = 1
        return made

    peak = peak_bytes(touched)
    if peak is None:
        pytest.skip("this kernel has no resettable high-water mark")
    assert 0.9 * (1 << 25) < peak < 1.5 * (1 << 25)


def test_neighbours_and_machine_are_reported() -> None:
    with Neighbours() as neighbours:
        time.sleep(0.01)
    assert 0 <= neighbours.cores < 1024
    assert "torch 2." in machine(("torch", "no-such-package"))
    assert "no-such-package absent" in machine(("no-such-package",))


@pytest.mark.slow
def test_the_formats_bench_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(bench_formats, "_peak_ratio", lambda *_arguments: 1.25)
    section = measure("formats", SMALL)
    claims = {target.claim: target for target in section.targets}
    assert claims["decoding is bit-equal to the textbook version (1 = yes)"].met
    assert claims["quantise: peak memory over input and output"].met
    text = rendered(section, ["today"])
    assert "**Dequantise to BF16**" in text
    assert "degarble, out=" in text


def test_disagreement_of_a_baseline_is_reported() -> None:
    ours = torch.tensor([0.0, 1.0, 2.0, -3.0]).bfloat16()
    said = bench_formats._decoder_agreement(
        {
            "same": ours.clone,
            "zero": lambda: torch.tensor([-0.0, 1.0, 2.0, -3.0]).bfloat16(),
            "off": lambda: torch.tensor([0.0, 1.0, 2.0, -3.03125]).bfloat16(),
        },
        ours,
    )
    assert said["same"] == "bit-equal"
    assert said["zero"] == "25.00% of values differ, in the sign of zero only"
    assert said["off"] == "25.00% of values differ, by at most 2 ulp"


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


def _planted(claim: Target) -> Section:
    return Section("formats", "Planted", (Table("t", ("h",), (("c",),)),), (claim,), ("note",))


def test_a_missed_target_is_written_and_ends_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "figures.md"
    monkeypatch.setattr(figures, "pin", lambda _threads: [])
    monkeypatch.setattr(bench_formats, "run", lambda _settings: _planted(Target("x", 1.0, 2.0)))
    assert main(["--only", "formats", "--page", str(page)]) == EXIT_DIFFERS
    assert "| x | >= 2 | 1.00 | MISSED |" in page.read_text()
    monkeypatch.setattr(bench_formats, "run", lambda _settings: _planted(Target("x", 3.0, 2.0)))
    assert main(["--only", "formats", "--page", str(page)]) == 0
    assert "| x | >= 2 | 3.00 | met |" in page.read_text()
    assert "MISSED" not in page.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["figures.md"]
    assert "Planted" in capsys.readouterr().out


def test_what_others_write_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "figures.md"
    page.write_text("# Figures\n")

    def measured(key: str, settings: Settings) -> Section:
        del settings
        page.write_text(replaced(page.read_text(), "other", "told\n"))
        return Section(key, "Formats", (), (), ())

    monkeypatch.setattr(figures, "pin", lambda _threads: [])
    monkeypatch.setattr(figures, "measure", measured)
    assert main(["--only", "formats", "--page", str(page)]) == 0
    assert "told" in page.read_text()
    assert "## Formats" in page.read_text()
    assert [each.name for each in tmp_path.iterdir()] == ["figures.md"]


def test_an_unknown_bench_is_refused_and_nothing_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "figures.md"
    monkeypatch.setattr(figures, "pin", lambda _threads: [])
    assert main(["--only", "format", "--page", str(page)]) == EXIT_REFUSED
    assert "formats" in capsys.readouterr().err
    assert not page.exists()
