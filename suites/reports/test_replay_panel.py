"""The replay panel: maps, close looks, texts, and the chart of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from degarble.harness.report.blocks import (
    BLOCKS,
    Details,
    JudgedCell,
    JudgedMap,
    Look,
    Looks,
    Points,
    Sentence,
    Tabs,
    TextComparison,
    Tone,
)
from degarble.harness.report.page import page_from_json, page_to_json
from degarble.harness.report.replay_record import ReplayRecord, TextRecord
from degarble.harness.report.verdict import Verdict
from degarble.reports.page_html import SIZE_LIMIT, page_html
from degarble.reports.plots_html import points_element
from degarble.reports.replay_panel import CARDS, layer_ticks, replay_panel, run_chart, text_panel
from degarble.suites.reports.page_cases import HOSTILE
from degarble.suites.reports.replay_cases import FILES, replay, replay_page, texts

if TYPE_CHECKING:
    from degarble.harness.report.page import Panel


DIFFERS = Verdict.DIFFERS


def maps(panel: Panel) -> dict[str, JudgedMap]:
    (tabs,) = (block for block in panel.blocks if isinstance(block, Tabs))
    found = {tab.title: block for tab in tabs.tabs for block in tab.blocks}
    assert all(isinstance(block, JudgedMap) for block in found.values())
    return found  # type: ignore[return-value]


def cell(judged: JudgedMap, role: str, layer: str) -> JudgedCell | None:
    return judged.readings[judged.row_labels.index(role)][judged.column_labels.index(layer)]


def looks(panel: Panel) -> tuple[Look, ...]:
    return next(block.looks for block in panel.blocks if isinstance(block, Looks))


def test_layers_and_components_are_a_map_of_budgets_and_three_of_cosines() -> None:
    panel = replay_panel(replay(), FILES)
    found = maps(panel)
    assert list(found) == [
        "Difference in budgets",
        "Cosine: candidate and twin",
        "Cosine: candidate and BF16",
        "Cosine: twin and BF16",
    ]
    budget = found["Difference in budgets"]
    assert budget.row_labels == ("embed", "attn.norm", "attn.wq_a", "ffn.experts.w2", "head")
    assert budget.column_labels == ("0", "1", "2", "ends")
    sick = cell(budget, "ffn.experts.w2", "2")
    assert sick is not None
    assert (sick.value, sick.tone) == (17210.0, Tone.BAD)
    assert cell(budget, "attn.wq_a", "0") is None  # it is not in that layer
    open_one = cell(budget, "attn.norm", "0")
    assert open_one == JudgedCell(None, Tone.WARNING, open_one.anchor if open_one else "", "plain")
    twin = cell(found["Cosine: candidate and twin"], "ffn.experts.w2", "2")
    assert twin is not None
    assert twin.value == 0.5


def test_every_cell_leads_to_its_close_look_and_the_origin_is_open() -> None:
    panel = replay_panel(replay())
    titles = {look.anchor: look.title for look in looks(panel)}
    for judged in maps(panel).values():
        for role, row in zip(judged.row_labels, judged.readings, strict=True):
            for column, reading in zip(judged.column_labels, row, strict=True):
                if reading is not None:
                    layer = "" if column == "ends" else f"layers.{column}."
                    assert titles[reading.anchor] == f"{layer}{role}.out"
    assert [look.title for look in looks(panel) if look.first] == ["layers.2.ffn.experts.w2.out"]


def test_what_gives_way_for_size_is_counted() -> None:
    panel = replay_panel(replay(), most=2)
    assert [look.title for look in looks(panel)] == [
        "layers.2.ffn.experts.w2.out",
        "layers.0.attn.norm.out",
    ]
    text = str(panel.blocks)
    assert "2 of 10 outputs can be looked at closely here, the worst ones" in text
    assert not any(isinstance(block, Looks) for block in replay_panel(replay(), most=0).blocks)


def test_a_run_of_which_nothing_was_judged_has_a_panel() -> None:
    panel = replay_panel(ReplayRecord(Verdict.UNDECIDED, "nothing", ()))
    assert panel.blocks == ()
    assert panel.verdict is Verdict.UNDECIDED


def test_where_texts_diverge_is_stated_and_replayed() -> None:
    panel = text_panel(texts(), DIFFERS)
    assert panel.sentence == "They part on 1 of 2 prompts, first at new token 2."
    assert panel.verdict is DIFFERS
    first, second = (block for block in panel.blocks if isinstance(block, TextComparison))
    assert (first.parting, second.parting) == (None, 1)
    legal = text_panel(texts(), Verdict.AGREES)
    assert legal.verdict is Verdict.AGREES
    assert legal.sentence.endswith("of two likely words, rounding chose the other.")
    same = text_panel(TextRecord(texts().said[:1]), DIFFERS)
    assert (same.verdict, same.sentence) == (Verdict.AGREES, "Candidate and twin say the same.")
    assert text_panel(TextRecord(()), DIFFERS).verdict is Verdict.UNDECIDED


def test_near_ties_and_undecided_outputs_are_listed_apart() -> None:
    folds = [block for block in replay_panel(replay()).blocks if isinstance(block, Details)]
    assert [fold.summary for fold in folds] == [
        "1 output with near ties",
        "1 output with no judgement",
    ]


def test_the_page_survives_its_file_and_renders_alike() -> None:
    page = replay_page()
    again = page_from_json(page_to_json(page))
    assert page_html(again) == page_html(page)
    assert {type(block) for panel in page.panels for block in panel.blocks} <= set(BLOCKS.values())


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_words_stay_words(text: str) -> None:
    markup = page_html(replay_page(text))
    for tag in ("<script>", "<img src=x", "<svg onload"):
        assert markup.count(tag) == page_html(replay_page("plain")).count(tag)
    markup.encode("utf-8")


def test_a_model_of_61_layers_fits_with_few_looks() -> None:
    record = replay()
    outputs = tuple(
        replace(output, component=f"layers.{layer}.a{role}", role=f"a{role}", layer=layer)
        for layer in range(61)
        for role in range(43)
        for output in record.outputs[2:3]
    )
    page = replay_page()
    panel = replay_panel(replace(record, outputs=outputs), FILES, 150)
    size = len(page_html(page.with_panel(panel)).encode())
    assert size < SIZE_LIMIT


def test_a_page_that_an_earlier_version_wrote_still_renders() -> None:
    kept = Path(__file__).with_name("replay_page_1.json")
    markup = page_html(page_from_json(kept.read_text(encoding="utf-8"), kept.name))
    for word in ("17,210", "How the budget comes about", "0x3f80", "(from here they part:)"):
        assert word in markup


def test_the_plot_says_what_it_shows_and_names_the_layers() -> None:
    record = replay()
    plot = run_chart(record)
    assert plot.description == (
        "9 outputs in the order of the run, 1 beyond their budget; the furthest is "
        "layers.2.ffn.experts.w2.out at 17,210 budgets."
    )
    assert [plot.values[at] for at in plot.marked] == [17210.0]
    assert [name for _, name in plot.ticks] == ["0", "1", "2"]
    assert plot.limit == 1.0


def test_of_many_layers_every_fifth_is_named() -> None:
    columns = ["ends", *(str(layer) for layer in range(61) for _ in range(2)), "mtp.61"]
    ticks = layer_ticks(columns)
    assert [name for _, name in ticks] == [str(layer) for layer in range(0, 61, 5)]
    assert [columns[at] for at, _ in ticks] == [name for _, name in ticks]


def test_a_run_of_nothing_is_drawn() -> None:
    plot = run_chart(ReplayRecord(Verdict.UNDECIDED, "", ()))
    assert plot.description == "0 outputs in the order of the run, 0 beyond their budget."
    assert "<svg" in str(points_element(plot))


def test_sentences_of_the_first_findings_are_left_to_their_cards() -> None:
    record = replace(replay(), findings=tuple(f"finding {at}" for at in range(CARDS + 1)))
    told = [block.text for block in replay_panel(record).blocks if isinstance(block, Sentence)]
    assert f"finding {CARDS}" in told
    assert "finding 0" not in told


def test_a_run_that_equals_its_twin_is_told_and_not_drawn_empty() -> None:
    first, *others = replay().outputs
    equal = (replace(first, ratio=None), *(replace(output, ratio=0.0) for output in others))
    blocks = replay_panel(replace(replay(), outputs=equal)).blocks
    said = [block.text for block in blocks if isinstance(block, Sentence)]
    assert "Each of the 9 outputs with a budget equals its twin's: nothing to draw." in said
    assert not any(isinstance(block, Points) for block in blocks)
    assert any(isinstance(block, Points) for block in replay_panel(replay()).blocks)
