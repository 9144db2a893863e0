"""Records of a page: ragged blocks are refused, and JSON round-trips."""

from __future__ import annotations

import getpass
import json
import math
import platform
from dataclasses import fields, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnreadableFile
from degarble.harness.base.version import VERSION
from degarble.harness.report.blocks import (
    BLOCKS,
    Block,
    Cell,
    Column,
    Details,
    HeatMap,
    HeatScale,
    JudgedCell,
    JudgedMap,
    Profile,
    Sentence,
    Table,
    Trend,
    Trends,
)
from degarble.harness.report.kernel_table import KernelTable, Launch, table_lines
from degarble.harness.report.page import (
    Page,
    Panel,
    PanelKind,
    Subject,
    from_plain,
    machine,
    page_from_json,
    page_to_json,
    provenance,
    to_plain,
)
from degarble.harness.report.replay_record import (
    AxisProfile,
    Histogram,
    JudgedOutput,
    PromptTexts,
    ReplayRecord,
    worst_first,
)
from degarble.harness.report.verdict import SEVERITY, Origin, Verdict
from degarble.suites.reports.page_cases import HOSTILE, blocks, page_of
from degarble.suites.reports.replay_cases import replay


def test_every_block_has_one_name() -> None:
    assert set(BLOCKS.values()) == set(Block.__args__)


def test_a_ragged_table_is_refused_with_its_row() -> None:
    with pytest.raises(ShapeMismatch, match=r"row 1 of table 'cells' = 1: expected 2 cells"):
        Table("cells", (Column("a"), Column("b")), (("x", 1), ("y",)))


@pytest.mark.parametrize(
    ("values", "anchors"),
    [
        (((1.0,), (1.0, 2.0)), ()),
        (((1.0, 2.0),), ()),
        ((), ()),
        (((1.0, 2.0), (3.0, 4.0)), (("a", "b"),)),
    ],
)
def test_a_ragged_heat_map_is_refused(
    values: tuple[tuple[float, ...], ...], anchors: tuple[tuple[str, ...], ...]
) -> None:
    with pytest.raises(ShapeMismatch, match="heat map 'map'"):
        HeatMap("map", "r", "c", ("0", "1"), ("a", "b"), values, HeatScale(0, 1), anchors)


@pytest.mark.parametrize("end", [1.0, math.nan])
def test_a_scale_without_extent_is_refused(end: float) -> None:
    with pytest.raises(InvalidArgument, match="two different finite ends"):
        HeatScale(end, end)


def test_a_scale_clips_and_turns_round() -> None:
    rising, falling = HeatScale(1.0, 3.0), HeatScale(1.0, 0.98)
    assert [rising.position(v) for v in (0.0, 1.0, 2.0, 9.0)] == [0, 0, 0.5, 1]
    assert falling.position(1.0) == 0
    assert falling.position(0.5) == 1
    assert math.isnan(rising.position(math.nan))


def judged(steps: tuple[float, ...], rows: int = 1) -> JudgedMap:
    readings = ((JudgedCell(1.0),),) * rows
    return JudgedMap("map", "r", "c", ("0",), ("a",), readings, steps)


def test_a_shade_begins_beyond_its_step() -> None:
    rising = judged((0.5, 1.0, 10.0))
    assert [rising.passed(v) for v in (0.0, 0.5, 0.9, 1.0, 99.0, math.inf, math.nan)] == [
        0, 0, 1, 1, 3, 3, 3,
    ]  # fmt: skip
    falling = judged((0.9999, 0.99, 0.5))
    assert [falling.passed(v) for v in (1.0, 0.9999, 0.995, 0.5, -1.0, math.nan)] == [
        0, 0, 1, 2, 3, 3,
    ]  # fmt: skip


@pytest.mark.parametrize("steps", [(), (1.0, 3.0, 2.0), (1.0, math.nan), (0.0, math.inf)])
def test_steps_that_are_no_steps_are_refused(steps: tuple[float, ...]) -> None:
    with pytest.raises(InvalidArgument, match="finite numbers that rise or fall"):
        judged(steps)


def test_a_ragged_map_and_an_unlabelled_profile_are_refused() -> None:
    with pytest.raises(ShapeMismatch, match="readings of map 'map'"):
        judged((1.0,), rows=2)
    with pytest.raises(ShapeMismatch, match="labels of profile 'p' = 1: expected 2"):
        Profile("p", ("0",), (1.0, 2.0))


# --------------------------------------------------------------------------------------------------
# Series of a history: what does not fit is refused.


def test_a_move_outside_of_the_nights_is_refused() -> None:
    with pytest.raises(ShapeMismatch, match="bands 0 to 0"):
        Trend("a", ((0.0, 1.0),), 1.0, None, (1,))


def test_series_of_unequal_nights_are_refused() -> None:
    rows = (Trend("a", (None,), None, None), Trend("b", (None, None), None, None))
    with pytest.raises(ShapeMismatch, match="one length"):
        Trends("c", "x", "y", "", rows)


def test_panels_keep_one_order_whatever_the_order_of_runs() -> None:
    page = page_of("x")
    assert [panel.kind for panel in page.ordered_panels] == [
        "audit",
        "replay",
        "text",
        "kernels",
        "history",
    ]
    assert [p.kind for p in page.ordered_panels if p.verdict is None] == [
        "text",
        "kernels",
        "history",
    ]


def test_a_panel_takes_the_place_of_the_older_one_of_its_kind() -> None:
    page = page_of("x").with_panel(Panel(PanelKind.AUDIT, "new", Verdict.AGREES))
    assert [p.sentence for p in page.ordered_panels if p.kind is PanelKind.AUDIT] == ["new"]
    assert len(page.panels) == 3


def test_two_panels_of_one_kind_are_refused() -> None:
    page = page_of("x")
    with pytest.raises(InvalidArgument, match="at most one panel of a kind"):
        Page(
            page.subject,
            page.provenance,
            page.verdict,
            "",
            (),
            (Panel(PanelKind.TEXT, "a"), Panel(PanelKind.TEXT, "b")),
        )


@pytest.mark.parametrize(
    ("name", "digest", "key"),
    [
        ("DeepSeek-V4-Pro NVFP4", "sha256:AB12", "deepseek-v4-pro-nvfp4-ab12"),
        ("../../etc/passwd", "0" * 64, "etc-passwd-000000000000"),
        ("数", "", "page-nohash"),
        ("x" * 300, "sha256:f", "x" * 48 + "-f"),
    ],
)
def test_a_key_is_a_file_name_and_nothing_else(name: str, digest: str, key: str) -> None:
    assert Subject(name, "checkpoint", digest).key == key


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_give_harmless_keys(text: str) -> None:
    key = Subject(text, "checkpoint", text).key
    assert set(key) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


# Written by version 0.1.0 and never changed: an old page must still open.
OLD = Path(__file__).with_name("page_schema_1.json")


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_round_trips(text: str) -> None:
    written = page_to_json(page_of(text))
    written.encode("ascii")
    assert page_to_json(page_from_json(written)) == written


def test_an_old_page_is_still_read() -> None:
    page = page_from_json(OLD.read_text(encoding="utf-8"), OLD.name)
    assert page.verdict is Verdict.DIFFERS
    assert page.findings[0].origin.fault == "an old page"
    assert [panel.kind for panel in page.panels] == ["replay", "audit", "history"]


@pytest.mark.parametrize(
    ("text", "expectation"),
    [
        ("", "a JSON document"),
        ("{", "a JSON document"),
        ("[" * 100_000, "a JSON document"),
        ("[]", "a document of kind degarble.page"),
        ('{"kind": "degarble.capture", "schema": 1}', "a document of kind degarble.page"),
        ('{"kind": "degarble.page", "schema": 2, "page": {}}', "schema 1"),
        ('{"kind": "degarble.page", "schema": 1}', "an object"),
    ],
)
def test_what_is_no_page_is_refused(text: str, expectation: str) -> None:
    with pytest.raises(UnreadableFile) as caught:
        page_from_json(text, "report.json")
    assert caught.value.expectation == expectation


def test_a_page_is_one_document_with_a_schema() -> None:
    document = json.loads(page_to_json(page_of("x")))
    assert document["schema"] == 1
    assert document["kind"] == "degarble.page"


@given(blocks)
def test_blocks_round_trip(block: Block) -> None:
    text = json.dumps(to_plain(block), allow_nan=False)
    assert from_plain(type(block), json.loads(text), "block") == block


@pytest.mark.parametrize("value", [math.inf, -math.inf, "nan", "inf", 0, 0.0, True, None, 2**60])
def test_cells_keep_value_and_type(value: Cell) -> None:
    table = Table("t", (Column("a"),), ((value,),))
    back = from_plain(Table, json.loads(json.dumps(to_plain(table))), "t").rows[0][0]
    assert back == value
    assert type(back) is type(value)


def test_nan_round_trips() -> None:
    table = Table("t", (Column("a"),), ((math.nan,),))
    back = from_plain(Table, json.loads(json.dumps(to_plain(table))), "t").rows[0][0]
    assert isinstance(back, float)
    assert math.isnan(back)


def _places(document: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    inside: list[tuple[str | int, object]] = []
    if isinstance(document, dict):
        inside = list(document.items())
    elif isinstance(document, list):
        inside = list(enumerate(document))
    return [path] + [p for key, item in inside for p in _places(item, (*path, key))]


def _damaged(document: object, path: tuple[str | int, ...], value: object) -> object:
    if not path:
        return value
    copy = json.loads(json.dumps(document))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copy


@pytest.mark.parametrize(
    "damage",
    [{"unknown": 1}, [[]], *(pytest.param(d, marks=pytest.mark.slow) for d in (-1.5, "☠"))],
)
def test_damage_anywhere_is_refused_by_name_or_read_as_what_it_is(damage: object) -> None:
    """Every place of a document is damaged once: no crash, and what is accepted round-trips."""
    document = to_plain(page_of("x"))
    names: list[str] = []
    for path in _places(document):
        changed = _damaged(document, path, damage)
        try:
            page = from_plain(Page, changed, "page")
        except UnreadableFile as error:
            names.append(error.name)
        else:
            assert from_plain(Page, to_plain(page), "page") is not None
    assert len(names) > 50
    assert all(name.startswith("page") for name in names)


def test_missing_and_extra_fields_are_named() -> None:
    plain = to_plain(Sentence("x"))
    assert isinstance(plain, dict)
    with pytest.raises(UnreadableFile, match=r"s = \['tone'\]"):
        from_plain(Sentence, {"block": "sentence", "text": "x"}, "s")
    with pytest.raises(UnreadableFile, match=r"s = \['colour'\]"):
        from_plain(Sentence, {**plain, "colour": "red"}, "s")


def test_an_unknown_block_is_named_with_its_place() -> None:
    page = replace(page_of("x"), panels=(Panel(PanelKind.TEXT, "s", Verdict.AGREES, ()),))
    document = json.loads(json.dumps(to_plain(page)))
    document["panels"][0]["blocks"] = [{"block": "script"}]
    with pytest.raises(UnreadableFile, match=r"page\.panels\[0\]\.blocks\[0\]\.block = 'script'"):
        from_plain(Page, document, "page")


def test_nesting_without_end_is_refused() -> None:
    plain: object = {"block": "sentence", "text": "x", "tone": "plain"}
    for _ in range(200):
        plain = {"block": "details", "summary": "x", "anchor": "", "blocks": [plain]}
    with pytest.raises(UnreadableFile, match="nesting of at most"):
        from_plain(Details, plain, "block")


def test_what_has_no_plain_form_is_our_mistake() -> None:
    with pytest.raises(TypeError, match="object has no plain form"):
        to_plain(object())


def test_a_record_survives_its_file() -> None:
    record = replay("plain")
    text = json.dumps(to_plain(record), allow_nan=False)
    assert from_plain(ReplayRecord, json.loads(text), "record") == record


def test_where_texts_part_is_found() -> None:
    def said(*texts: str) -> int | None:
        return PromptTexts(
            "p", tuple((str(n), tuple(t.split())) for n, t in enumerate(texts))
        ).parting

    assert said("a b c", "a b c") is None
    assert said("a b c", "a x c") == 1
    assert said("a b", "a b c") == 2  # one goes on
    assert said("", "a") == 0
    assert said("a b c", "a b c", "a b d") == 2
    assert said() is None


def test_what_differs_comes_first_then_what_is_undecided_then_what_is_near() -> None:
    def made(name: str, verdict: Verdict, ratio: float | None) -> JudgedOutput:
        return JudgedOutput(name, name, 0, "out", verdict, ratio)

    given = (
        made("fine", Verdict.AGREES, 0.1),
        made("near", Verdict.AGREES, 0.69),
        made("open", Verdict.UNDECIDED, None),
        made("off", Verdict.DIFFERS, 2.0),
        made("far", Verdict.DIFFERS, 900.0),
    )
    assert [output.component for output in worst_first(given)] == [
        "far",
        "off",
        "open",
        "near",
        "fine",
    ]


def test_sites_and_columns_are_named() -> None:
    output = JudgedOutput("layers.3.ffn.topk", "ffn.topk", 3, "experts", Verdict.AGREES)
    assert (output.site, output.column) == ("layers.3.ffn.topk.out.experts", "3")
    head = JudgedOutput("head", "head", None, "out", Verdict.AGREES)
    assert (head.site, head.column) == ("head.out", "ends")
    drafter = JudgedOutput("mtp.0.attn.norm", "attn.norm", 0, "out", Verdict.AGREES)
    assert drafter.column == "mtp.0"


def test_labels_and_values_have_one_number() -> None:
    with pytest.raises(ShapeMismatch, match="labels of head = 1: expected 2"):
        AxisProfile("head", ("0",), (0.1, 0.2))
    with pytest.raises(ShapeMismatch, match="labels of histogram"):
        Histogram("ulps", ("0", "1"), (3,))


# The keys of `origins` in the contract of the command line.
CONTRACT = (
    *("layer", "component", "site", "where", "fault", "cosine", "difference", "budget"),
    *("confidence", "evidence", "reproducer", "level", "changes"),
)


def test_origin_has_the_keys_of_the_contract() -> None:
    assert tuple(field.name for field in fields(Origin)) == CONTRACT


def test_exit_statuses_are_those_of_the_contract() -> None:
    assert {str(verdict): verdict.exit_status for verdict in Verdict} == {
        "AGREES": 0,
        "DIFFERS": 1,
        "UNSTABLE": 1,
        "UNDECIDED": 2,
        "REFUSED": 2,
    }


def test_what_fails_weighs_more_than_what_could_not_run() -> None:
    assert set(SEVERITY) == set(Verdict)
    assert len(SEVERITY) == len(Verdict)
    statuses = [verdict.exit_status for verdict in SEVERITY]
    assert statuses == [0, 2, 2, 1, 1]


def test_every_verdict_is_explained_once() -> None:
    meanings = [verdict.meaning for verdict in Verdict]
    assert len(set(meanings)) == len(meanings)
    assert all(meanings)


# --------------------------------------------------------------------------------------------------
# The table of who computed what: counted by component, told by role, read back from a manifest.

GEMM, TALL = Launch("sm90_gemm_bf16", "64x64x64"), Launch("sm90_gemm_bf16", "128x128x64")


def table() -> KernelTable:
    reasons = {"layers.0.attn.attend": "none yet", "layers.1.attn.attend": "none yet"}
    kernel_table = KernelTable("sm_90a", reasons)
    kernel_table.note("layers.0.attn.wq_a", [GEMM])
    kernel_table.note("layers.0.attn.wq_a", [TALL, GEMM])
    kernel_table.note("layers.1.attn.wq_a", [GEMM])
    kernel_table.note("head", [Launch("simt_gemv_bf16", "")])
    return kernel_table


def test_launches_are_counted_by_component_and_listed_by_role() -> None:
    document = table().document()
    assert document["kernels"]["layers.0.attn.wq_a"] == [
        {"kernel": "sm90_gemm_bf16", "tactic": "128x128x64", "launches": 1},
        {"kernel": "sm90_gemm_bf16", "tactic": "64x64x64", "launches": 2},
    ]
    lines = table().lines()
    assert lines[0] == "Kernels on sm_90a, by component:"
    assert any("sm90_gemm_bf16 [64x64x64] x3" in line and "attn.wq_a" in line for line in lines)
    assert any(line.endswith("simt_gemv_bf16 x1") for line in lines)
    assert sum("reference: none yet" in line for line in lines) == 1


def test_a_table_read_from_json_has_the_same_lines_and_a_partial_one_fewer() -> None:
    back = json.loads(json.dumps(table().document()))
    assert table_lines(back) == table().lines()
    assert table_lines({}) == ["Kernels on an unknown target, by component:"]
    assert table_lines({"kernels": [], "reference": 3})[1:] == []


def test_it_says_when_where_and_with_what() -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=1)))
    told = provenance("degarble demo", moment)
    assert told.created == "2026-01-02 02:04 UTC"
    assert told.command == "degarble demo"
    assert told.machine.startswith("CPU: ")
    versions = dict(told.versions)
    assert versions["degarble"] == VERSION
    assert versions["Python"] == platform.python_version()
    assert set(versions) == {"degarble", "Python", "torch", "numpy", "numba"}


def test_it_names_no_person_and_no_place() -> None:
    text = repr(provenance("degarble demo"))
    assert platform.node() not in text
    assert str(Path.home()) not in text
    user = getpass.getuser()
    assert f"'{user}'" not in text


def test_a_machine_without_a_processor_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> str:
        raise PermissionError

    monkeypatch.setattr("degarble.harness.report.page.Path.read_text", refuse)
    monkeypatch.setattr("degarble.harness.report.page.os.cpu_count", lambda: 1)
    assert ", 1 core, " in machine()


def test_a_package_that_is_missing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("degarble.harness.report.page._PACKAGES", ("no-such-package-here",))
    assert [name for name, _ in provenance("x").versions] == ["degarble", "Python"]
