from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.report.blocks import Block, Cell, Column, Details, Sentence, Table
from degarble.harness.report.page import Page, Panel, PanelKind, from_plain, to_plain
from degarble.harness.report.verdict import Verdict
from degarble.suites.reports.page_cases import blocks, page_of


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


@pytest.mark.parametrize("damage", [{"unknown": 1}, [[]], -1.5, "☠"])
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
