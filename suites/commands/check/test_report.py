"""The page of a check: statistics of outputs, panels, and the panels in a real Chromium."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch

from degarble.harness.capture.files.reader import Capture
from degarble.harness.commands.check import error_picture, report
from degarble.harness.commands.check.error_picture import error_blocks
from degarble.harness.commands.check.output_statistics import StatisticsCollector
from degarble.harness.commands.check.report import (
    check_page,
    check_word,
    origin_of,
    page_sentence,
    replay_record,
    write_check_page,
)
from degarble.harness.commands.report_folder import write_page
from degarble.harness.engine.budget.budget import Budget, OutputResult, judge
from degarble.harness.engine.localise.localise import During, localise
from degarble.harness.engine.localise.replay import Batch, Replay
from degarble.harness.formats.codec import FORMAT_OF_DTYPE
from degarble.harness.model.components import component_named
from degarble.harness.model.config.config import small_v4
from degarble.harness.model.recipes import recipe_named
from degarble.harness.report.blocks import ErrorPicture, PictureLayer, Profile
from degarble.harness.report.page import Page, Panel, PanelKind, Subject, from_plain, page_from_json
from degarble.harness.report.replay_record import PromptTexts, ReplayRecord, TextRecord
from degarble.harness.report.verdict import NO_ERRORS, Verdict
from degarble.reports.page_html import page_html
from degarble.suites.capture.files.capture_cases import old_capture
from degarble.suites.museum.demo_cases import PROVENANCE, whole_story
from degarble.suites.reports.page_cases import HOSTILE
from degarble.suites.reports.replay_cases import replay_page
from degarble.suites.reports.test_page_browser import CONTRAST, TOO_WIDE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.commands.check.check import DiagnosedOrigin
    from degarble.harness.report.replay_record import AxisProfile, CloseLook
    from degarble.suites.commands.browser import Window


CONFIG = small_v4()


@dataclass(frozen=True)
class Pair:
    """A candidate and its twin at a component."""

    name: str
    candidate: Tensor
    twin: Tensor
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    positions: tuple[int, ...] = ()


def looked(*pairs: Pair) -> CloseLook:
    collector = StatisticsCollector(CONFIG)
    for pair in pairs:
        count = len(pair.twin)
        positions = torch.tensor(pair.positions or range(count))
        component = component_named(CONFIG, pair.name)
        batch = Batch(
            component, cast("Any", (None,)), pair.inputs, {"out": pair.candidate},
            torch.zeros(count), positions, (slice(0, count),),
        )  # fmt: skip
        collector(Replay(batch, {"out": pair.twin}), {"out": _judged(pair)})
    return collector.look(pairs[0].name, "out")


def _judged(pair: Pair) -> OutputResult:
    if pair.candidate.dtype not in FORMAT_OF_DTYPE or pair.candidate.shape != pair.twin.shape:
        return OutputResult("out", Verdict.DIFFERS)
    budget = Budget(FORMAT_OF_DTYPE[pair.twin.dtype], torch.full((1,), 1e-6), ("because",))
    return judge(pair.candidate, pair.twin, budget)


def along(look: CloseLook, name: str) -> AxisProfile:
    return next(profile for profile in look.along if profile.name == name)


def test_positions_heads_and_experts_are_distinguished() -> None:
    twin = torch.ones(4, 3, 2)
    candidate = twin.clone()
    candidate[2, 1] += 0.5
    look = looked(Pair("layers.0.attn.q_head_norm_rope", candidate, twin, positions=(7, 8, 9, 12)))
    assert along(look, "position").labels == ("7", "8", "9", "12")
    assert along(look, "position").values == pytest.approx((0.0, 0.0, math.sqrt(0.5 / 6), 0.0))
    assert along(look, "head").values == pytest.approx((0.0, math.sqrt(0.5 / 8), 0.0))
    experts = torch.tensor([[0, 2, 4], [2, 4, 5], [5, 2, 0], [1, 0, 2]])
    routed = looked(Pair("layers.0.ffn.experts.w2", candidate, twin, {"experts": experts}))
    by_expert = along(routed, "expert")
    struck = dict(zip(by_expert.labels, by_expert.values, strict=True))
    assert [name for name, value in struck.items() if value] == ["2"]


def test_calls_add_up_and_the_worst_element_has_its_codes() -> None:
    twin = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    near, far = twin.clone(), twin.clone()
    near[0, 0] = torch.nextafter(twin[0, 0], torch.tensor(9.0))
    far[1, 1] = -4.0
    name = "layers.0.attn.wq_a"
    look = looked(Pair(name, near, twin), Pair(name, far, twin), Pair(name, twin, twin))
    assert look.worst is not None
    assert (look.worst.place, look.worst.candidate_code) == ("row 1, column 1", "0xc0800000")
    assert (look.worst.twin_code, look.worst.candidate, look.worst.twin) == ("0x40800000", -4, 4)
    assert look.worst.steps == 2 * 0x40800000
    assert look.histogram is not None
    assert dict(zip(look.histogram.labels, look.histogram.counts, strict=True)) == {
        "0": 10, "1": 1, "2": 0, "3-4": 0, "5-8": 0, "9-16": 0, "17-64": 0, "65-256": 0,
        "257-4096": 0, "> 4096": 1,
    }  # fmt: skip
    assert look.places[0].level == "element"
    assert look.derivation == ("because",)


def test_values_that_are_not_finite_are_counted_and_left_out_of_sums() -> None:
    twin = torch.ones(2, 2)
    candidate = twin.clone()
    candidate[1, 0] = math.nan
    look = looked(Pair("layers.0.attn.wq_a", candidate, twin))
    assert look.histogram is not None
    assert (look.histogram.labels[-1], look.histogram.counts[-1]) == ("not finite", 1)
    assert along(look, "position").values == (0.0, 0.0)


def test_choices_and_codes_are_compared_one_by_one() -> None:
    twin = torch.tensor([[0, 1], [2, 3]])
    candidate = torch.tensor([[0, 1], [2, 7]])
    look = looked(Pair("layers.1.ffn.topk", candidate, twin))
    assert look.histogram is not None
    assert look.histogram.unit == "codes that differ"
    assert (look.histogram.labels, look.histogram.counts) == (("equal", "other"), (3, 1))
    codes = torch.zeros(2, 4, dtype=torch.uint8)
    assert looked(Pair("layers.0.attn.wq_a", codes, codes)).histogram is not None


def test_tiles_are_shown_where_there_are_several() -> None:
    twin = torch.ones(130, 256)
    candidate = twin.clone()
    candidate[129, 200] = 3.0
    look = looked(Pair("layers.0.attn.wq_a", candidate, twin))
    tiles = along(look, "tile (its first row and column)")
    assert tiles.labels == ("0, 0", "0, 128", "128, 0", "128, 128")
    assert [bool(value) for value in tiles.values] == [False, False, False, True]


def test_long_profiles_are_joined_and_forms_are_left_alone() -> None:
    twin = torch.ones(1000, 2)
    look = looked(Pair("layers.0.attn.wq_a", twin * 2, twin))
    profile = along(look, "position")
    assert len(profile.values) <= 192
    assert profile.labels[0] == "0-5"
    assert profile.values[0] == 1.0
    broken = looked(Pair("layers.0.attn.wq_a", torch.ones(2, 3), torch.ones(2, 4)))
    assert broken.histogram is None
    assert broken.along == ()
    assert StatisticsCollector(CONFIG).look("layers.0.attn.wq_a", "out").places == ()


# --------------------------------------------------------------------------------------------------
# The picture of an error: what differs, where, and what its cause reproduces.


def view(picture: ErrorPicture, name: str) -> PictureLayer:
    return next(each for each in picture.layers if each.name == name)


Shown = tuple[tuple[ErrorPicture, ErrorPicture], tuple[Profile, Profile]]


@pytest.fixture(scope="module")
def shown() -> Shown:
    """What is shown of the demonstration's fault: one expert's nibbles, swapped."""
    [origin] = whole_story().sick.origins
    whole, close, twin, cause = error_blocks(origin)
    assert isinstance(whole, ErrorPicture)
    assert isinstance(close, ErrorPicture)
    assert isinstance(twin, Profile)
    assert isinstance(cause, Profile)
    return (whole, close), (twin, cause)


def test_rows_of_the_sick_expert_are_coloured_and_no_others(shown: Shown) -> None:
    (whole, _), _ = shown
    [origin] = whole_story().sick.origins
    record = origin.discrepancy.record
    assert record is not None
    experts = record.inputs["experts"].flatten().tolist()
    size, sick = whole.cell[0], origin.discrepancy.where["expert"]
    struck = {row // size for row, expert in enumerate(experts) if expert == sick}
    coloured = {y for y, row in enumerate(view(whole, "difference").cells) if set(row) != {"0"}}
    assert coloured == struck
    assert (whole.rows, whole.columns) == ((0, len(experts)), (0, record.outputs["out"].shape[-1]))


def test_the_cause_gives_what_the_candidate_has(shown: Shown) -> None:
    pictures, (twin, cause) = shown
    for picture in pictures:
        candidate = view(picture, "the candidate").cells
        assert candidate == view(picture, "the twin with this cause").cells
        assert candidate != view(picture, "the twin").cells
    far = dict(zip(twin.labels, twin.values, strict=True))
    assert far["> 4096"]
    assert set(cause.labels) <= {"0", "1"}  # roundings alone


def test_the_close_picture_holds_the_worst_element(shown: Shown) -> None:
    (_, close), _ = shown
    row, column = (int(part.split()[-1]) for part in close.caption.split(",")[1:])
    assert close.cell == (1, 1)
    digit = view(close, "difference").cells[row - close.rows[0]][column - close.columns[0]]
    assert digit == max("".join(view(close, "difference").cells))


def test_lines_are_those_of_the_judgement(shown: Shown) -> None:
    (whole, _), _ = shown
    [origin] = whole_story().sick.origins
    assert origin.discrepancy.record is not None
    slots = origin.discrepancy.record.inputs["experts"].shape[1]
    lines = [(line.name, line.rows, line.columns) for line in whole.lines]
    assert lines == [
        ("tiles of 128 x 128", 128, 128),
        (f"tokens of {slots} rows", slots, 0),
    ]


def test_a_large_output_is_shown_around_its_worst_row(monkeypatch: pytest.MonkeyPatch) -> None:
    [origin] = whole_story().sick.origins
    full = error_blocks(origin)
    width = full[0].columns[1] if isinstance(full[0], ErrorPicture) else 0
    monkeypatch.setattr(error_picture, "_MOST", 20 * width)
    part, close, *_ = error_blocks(origin)
    assert isinstance(part, ErrorPicture)
    assert part.rows[1] - part.rows[0] == 20
    assert isinstance(close, ErrorPicture)
    assert close.caption == full[1].caption if isinstance(full[1], ErrorPicture) else False
    assert part.rows[0] <= close.rows[0] < close.rows[1] <= part.rows[1]


def test_without_a_call_or_with_another_form_nothing_is_drawn() -> None:
    [origin] = whole_story().sick.origins
    record = origin.discrepancy.record
    assert record is not None
    bare = replace(origin, discrepancy=replace(origin.discrepancy, record=None))
    assert error_blocks(bare) == ()
    other = replace(record, outputs={"out": record.outputs["out"].float()})
    assert (
        error_blocks(replace(origin, discrepancy=replace(origin.discrepancy, record=other))) == ()
    )


def test_values_that_are_not_finite_are_blank_and_beyond_every_step() -> None:
    [origin] = whole_story().sick.origins
    record = origin.discrepancy.record
    assert record is not None
    out = record.outputs["out"].clone()
    flat = out.reshape(-1, out.shape[-1])
    flat[0, 0] = torch.nan
    broken = replace(origin.discrepancy, record=replace(record, outputs={"out": out}))
    picture = error_blocks(replace(origin, discrepancy=broken, diagnosed=None))[0]
    assert isinstance(picture, ErrorPicture)
    assert view(picture, "difference").cells[0][0] == "8"
    assert view(picture, "the candidate").cells[0][0] == " "
    assert "the twin with this cause" not in [each.name for each in picture.layers]


def test_a_cell_is_its_worst_element_with_its_sign() -> None:
    part = np.array([[1.0, -3.0, 0.5], [2.0, 0.0, -0.25]])
    extremes = error_picture._extreme(part, (2, 2))
    assert extremes.tolist() == [[-3.0, 0.5]]
    assert error_picture._signed(extremes, 2.0) == ("05",)
    assert error_picture._digits(np.array([[0.0, 1.0, 1.5, np.inf]])) == ("0018",)


# --------------------------------------------------------------------------------------------------
# The page with its panels.

SUBJECT = Subject("tiny V4, nvfp4-full", "Checkpoint", "sha256:0123456789ab")
TEXTS = TextRecord((PromptTexts("3 plus 4 is", (("Twin", ("7",)), ("Candidate", ("8",)))),))


def plain(*origins: DiagnosedOrigin) -> tuple[Page, ReplayRecord]:
    """Return page and record of the sick run; without `origins` those that were found."""
    sick = whole_story().sick
    began = origins or sick.origins
    sentence = page_sentence(sick.localised, began)
    record = replay_record(sick.localised, began, sick.statistics, sentence)
    return check_page(SUBJECT, PROVENANCE, record, began, TEXTS), record


def test_the_first_screen_has_origin_cause_evidence_and_command() -> None:
    page, _ = plain()
    assert page.sentence == "Layer 3, ffn.experts.w2: The two nibbles of every byte are swapped."
    origin = page.findings[0].origin
    assert (origin.layer, origin.component, origin.fault) == (
        3, "ffn.experts.w2", "M10.nibble_order",
    )  # fmt: skip
    assert origin.site == "layers.3.ffn.experts.w2.out"
    assert origin.where["expert"] == 4
    assert origin.confidence > 0.9
    assert origin.cosine is not None
    assert origin.cosine < 0.999
    assert origin.difference is not None
    assert origin.budget is not None
    assert origin.difference > 5 * origin.budget


def test_every_output_is_in_the_record_with_its_cosines_and_look() -> None:
    _, record = plain()
    assert len(record.outputs) == len(whole_story().sick.localised.rows)
    sick = next(output for output in record.outputs if output.site == record.origins[0])
    assert sick.verdict is Verdict.DIFFERS
    assert sick.ratio is not None
    assert sick.ratio > 1
    twin, candidate_reference, reference = sick.cosines
    assert twin is not None
    assert reference is not None
    assert candidate_reference is not None
    assert reference > candidate_reference
    look = sick.look
    assert {profile.name for profile in look.along} >= {"position", "expert"}
    expert = next(profile for profile in look.along if profile.name == "expert")
    values = dict(zip(expert.labels, expert.values, strict=True))
    assert (values["4"] or 0.0) > 100 * max(v or 0.0 for k, v in values.items() if k != "4")
    assert look.worst is not None
    assert look.worst.candidate_code.startswith("0x")
    assert look.derivation
    healthy = [output for output in record.outputs if output.verdict is Verdict.AGREES]
    assert all(output.ratio is None or output.ratio <= 0.7 for output in healthy)


def test_tables_are_written_next_to_the_page_with_the_same_content(tmp_path: Path) -> None:
    _, record = plain()
    page = write_check_page(tmp_path, *plain())
    with (tmp_path / f"{page.stem}-outputs.csv").open(newline="", encoding="utf-8") as stream:
        rows = {row["site"]: row for row in csv.DictReader(stream)}
    assert len(rows) == len(record.outputs)
    for output in record.outputs:
        row = rows[output.site]
        assert row["verdict"] == output.verdict
        if output.ratio is not None:
            assert math.isclose(float(row["difference_in_budgets"]), output.ratio)
        if output.cosines[0] is not None:
            assert float(row["cosine_candidate_twin"]) == output.cosines[0]
    with (tmp_path / f"{page.stem}-budgets.csv").open(newline="", encoding="utf-8") as stream:
        wide = {row["role"]: row for row in csv.DictReader(stream)}
    sick = rows["layers.3.ffn.experts.w2.out"]["difference_in_budgets"]
    assert float(wide["ffn.experts.w2"]["3"]) == float(sick)
    document = json.loads((tmp_path / f"{page.stem}-replay.json").read_text(encoding="utf-8"))
    assert from_plain(ReplayRecord, document["record"], "record") == record
    markup = page.read_text(encoding="utf-8")
    for name in ("outputs.csv", "budgets.csv", "replay.json"):
        assert f'href="{page.stem}-{name}"' in markup


def test_an_audit_that_was_there_stays(tmp_path: Path) -> None:
    audit = Panel(PanelKind.AUDIT, "All rules hold.", Verdict.AGREES)
    write_page(tmp_path, Page(SUBJECT, PROVENANCE, Verdict.AGREES, "Fine.", (), (audit,)))
    path = write_check_page(tmp_path, *plain())
    page = page_from_json(path.with_suffix(".json").read_text(encoding="utf-8"))
    ran = [panel.kind for panel in page.ordered_panels if panel.verdict]
    assert ran == [PanelKind.AUDIT, PanelKind.REPLAY, PanelKind.TEXT]
    assert page.verdict is Verdict.DIFFERS
    again = write_check_page(tmp_path, *plain())
    assert again == path


def test_close_looks_give_way_until_the_page_can_be_mailed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "SIZE_LIMIT", 400_000)
    path = write_check_page(tmp_path, *plain())
    markup = path.read_text(encoding="utf-8")
    assert len(markup.encode()) <= 400_000
    assert "outputs can be looked at closely here" in markup
    assert 'id="look-0"' in markup


def test_a_healthy_an_unstable_and_an_unjudged_run() -> None:
    fine, sick = whole_story().healthy.localised, whole_story().sick
    assert page_sentence(fine, ()).startswith("Every component does what its twin does: ")
    part = page_sentence(fine, (), in_part=True)
    assert part.startswith("Every component that was captured does what its twin does: ")
    own = page_sentence(fine, (), built_in=True)
    assert own.startswith("Built-in reference: no kernel was tested. ")
    facts: dict[str, object] = {"backend": "torch"}
    checked: Any = SimpleNamespace(verdict=Verdict.AGREES, capture=SimpleNamespace(facts=facts))
    assert check_word(checked) == NO_ERRORS
    checked.verdict = Verdict.DIFFERS
    assert check_word(checked) == ""
    checked.verdict, facts["backend"] = Verdict.AGREES, "vllm"
    assert check_word(checked) == ""
    unstable = replace(fine, unstable=("layers.1.ffn.gate",))
    assert page_sentence(unstable, ()) == "layers.1.ffn.gate gave two answers to the same question."
    blank = replace(fine, verdict=Verdict.UNDECIDED, rows=())
    assert page_sentence(blank, ()).startswith("Nothing is claimed")
    assert page_sentence(sick.localised, sick.origins * 3).endswith("2 more places.")


def test_an_origin_without_a_cause_keeps_its_place() -> None:
    (diagnosed_origin,) = whole_story().sick.origins
    origin = origin_of(replace(diagnosed_origin, diagnosed=None))
    assert (origin.layer, origin.component, origin.fault) == (3, "ffn.experts.w2", None)
    assert origin.confidence == 0
    assert origin.evidence == diagnosed_origin.discrepancy.sentence


def test_a_reproducer_is_shown_as_a_command_and_a_capture_states_where_it_ran() -> None:
    origin = replace(whole_story().sick.origins[0], reproducer="a b/reproduce.py", share=0.75)
    page, _ = plain(origin)
    assert page.findings[0].reproduction == "python 'a b/reproduce.py'"
    assert page.findings[0].origin.reproducer == "a b/reproduce.py"
    assert "removes 75.0 % of the difference of the logits" in page.findings[0].note
    hiding, _ = plain(replace(origin, share=-0.153))
    assert "15.3 % larger" in hiding.findings[0].note
    recipe = whole_story().model.museum.recipe
    facts = dict(report.captured_facts({"versions": {"torch": "2"}, "sums": 7}, recipe))
    assert facts["captured with"] == "torch 2"
    assert "NVFP4 x NVFP4" in facts["recipe"]
    assert facts["sums"] == "7"
    assert "captured with" not in dict(report.captured_facts({"versions": []}, recipe))


def test_a_capture_of_version_1_still_renders(tmp_path: Path) -> None:
    """Its model is a toy, so that nothing can be claimed; the page says so."""
    capture = Capture.open(old_capture(tmp_path / "capture"))
    twin = whole_story().model.twin
    collector = StatisticsCollector(twin.config)
    recipe = recipe_named("bf16", twin.config)
    found = localise(twin, recipe, capture, None, During(looked=collector))
    record = replay_record(found, (), collector, page_sentence(found, ()))
    page = check_page(SUBJECT, PROVENANCE, record, ())
    path = write_check_page(tmp_path / "report", page, record)
    page = page_from_json(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert page.verdict in {Verdict.UNDECIDED, Verdict.DIFFERS}
    assert "<html" in path.read_text(encoding="utf-8")


# --------------------------------------------------------------------------------------------------
# The replay and text panels in a real Chromium: click, keys, tabs, dark, narrow, paper.

SHOWN = """
return Array.from(document.querySelectorAll('.look'))
  .filter((look) => look.checkVisibility())
  .map((look) => look.getAttribute('aria-label'));
"""
FOCUSED = "return document.activeElement.id || document.activeElement.textContent"
VISIBLE_TABS = """
return Array.from(document.querySelectorAll('.tab'))
  .filter((view) => view.checkVisibility()).map((view) => view.querySelector('h3').textContent);
"""
SICK = "layers.2.ffn.experts.w2.out"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Window]:
    from degarble.suites.commands.browser import chromium  # noqa: PLC0415  only with selenium

    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page_html(replay_page()), encoding="utf-8")
    return path


@pytest.fixture
def window(started: Window, page: Path) -> Window:
    started.media()
    started.open(page)
    return started


def settled(window: Window, script: str) -> Any:
    """What a script returns when an address has been followed."""
    waiting = "const done = arguments[arguments.length - 1]; setTimeout(() => done("
    inner = f"(() => {{ {script} }})()"
    return window.driver.execute_async_script(f"{waiting}{inner}), 120)")


@pytest.mark.needs("chromium", "selenium")
def test_it_is_quiet_and_loads_nothing(window: Window, page: Path) -> None:
    assert window.complaints() == []
    others = [url for url in window.requests() if not url.startswith("data:image/svg+xml")]
    assert others == [page.as_uri()]


@pytest.mark.needs("chromium", "selenium")
def test_a_click_shows_one_close_look_and_marks_its_cell(window: Window) -> None:
    assert window.run(SHOWN) == [SICK]  # where it began is open from the start
    window.run("document.querySelector('.judged tbody tr:nth-child(2) td:nth-child(3) a').click()")
    assert settled(window, SHOWN) == ["layers.1.attn.norm.out"]
    asked = "return document.querySelectorAll('.judged td.asked').length"
    assert window.run(asked) >= 1
    text = window.run("return document.querySelector('.look:target').innerText")
    for word in ("Cosine, candidate and twin", "0x3f80", "by distance", "How the budget comes"):
        assert word in text


@pytest.mark.needs("chromium", "selenium")
def test_the_keyboard_walks_the_map_opens_a_detail_view_and_returns(window: Window) -> None:
    window.run("document.querySelector('.judged a[tabindex=\"0\"]').focus()")
    window.press("ArrowDown")
    cell = "return document.activeElement.closest('td').cellIndex"
    window.press("ArrowDown")
    window.press("ArrowLeft")
    at = window.run(cell)
    window.press("Enter", "\r")
    look = settled(window, FOCUSED)
    assert look.startswith("look-")
    window.press("Escape")
    assert window.run(cell) == at
    assert window.run("return document.activeElement.hash") == f"#{look}"


@pytest.mark.needs("chromium", "selenium")
def test_tabs_obey_arrow_keys_and_are_announced_to_screen_readers(window: Window) -> None:
    assert window.run(VISIBLE_TABS) == ["Difference in budgets"]
    window.run("document.querySelector('[role=tab]').focus()")
    window.press("ArrowRight")
    assert window.run(VISIBLE_TABS) == ["Cosine: candidate and twin"]
    chosen = "return document.querySelectorAll('[role=tab][aria-selected=true]').length"
    assert window.run(chosen) == 1
    window.press("ArrowLeft")
    window.press("ArrowLeft")
    assert window.run(VISIBLE_TABS) == ["Cosine: twin and BF16"]
    named = """return Array.from(document.querySelectorAll('[role=tabpanel]'),
      (view) => document.getElementById(view.getAttribute('aria-labelledby')).textContent)"""
    assert window.run(named)[0] == "Difference in budgets"


@pytest.mark.needs("chromium", "selenium")
def test_every_cell_says_more_than_its_colour(window: Window) -> None:
    script = """return Array.from(document.querySelectorAll('.judged tbody td'),
      (cell) => [cell.className, cell.textContent])"""
    cells = window.run(script)
    assert ["h7 is-bad", "×17,210, differs"] in [
        [name.replace(" asked", ""), t] for name, t in cells
    ]
    assert any("is-warning" in name and "undecided" in text for name, text in cells)
    assert all(text.strip() for _, text in cells)
    drawn = "return Array.from(document.querySelectorAll('svg.profile'), (s) => s.ariaLabel)"
    assert all(window.run(drawn))


@pytest.mark.needs("chromium", "selenium")
def test_where_texts_diverge_is_underlined_and_stated(window: Window) -> None:
    parts = window.run(
        "return Array.from(document.querySelectorAll('.apart'), (part) => part.textContent)"
    )
    assert parts == [" was", "plain"]
    style = "return getComputedStyle(document.querySelector('.apart')).textDecorationLine"
    assert window.run(style) == "underline"
    assert "(from here they part:)" in window.run("return document.body.textContent")


@pytest.mark.needs("chromium", "selenium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_word_has_contrast(window: Window, scheme: str) -> None:
    window.media(scheme=scheme)
    for view in range(4):
        window.run("document.querySelectorAll('[role=tab]')[arguments[0]].click()", view)
        assert window.run(CONTRAST) == []


@pytest.mark.needs("chromium", "selenium")
@pytest.mark.parametrize("width", [390, 768, 1280])
def test_nothing_runs_out_of_the_window(window: Window, width: int) -> None:
    window.media(width=width)
    window.run("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    assert window.run(TOO_WIDE, width) == []


@pytest.mark.needs("chromium", "selenium")
def test_paper_has_all_maps_and_the_look_at_the_origin_only(window: Window) -> None:
    window.run("location.hash = '#look-4'")
    window.media("print", "dark", 718)
    window.run("dispatchEvent(new Event('beforeprint'))")
    assert len(window.run(VISIBLE_TABS)) == 4
    assert window.run(SHOWN) == [SICK]
    tablist = "return getComputedStyle(document.querySelector('[role=tablist]')).display"
    assert window.run(tablist) == "none"
    assert window.run("return document.documentElement.scrollWidth") <= 718


@pytest.mark.needs("chromium", "selenium")
def test_hostile_words_stay_words(started: Window, tmp_path: Path, page: Path) -> None:
    count = "return document.querySelectorAll('*').length"
    started.media()
    started.open(page)
    elements = started.run(count)
    for number, text in enumerate(HOSTILE):
        path = tmp_path / f"{number}.html"
        path.write_text(page_html(replay_page(text)), encoding="utf-8")
        started.open(path)
        assert started.run(count) == elements, text
        assert started.complaints() == []
        assert started.run("return document.title").startswith("DIFFERS · ")
