"""A folder of adopted faults is read, searched, and refused where a file states none."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness import api
from degarble.harness.base.errors import DegarbleError, InvalidArgument
from degarble.harness.commands.adopt import adopted_from
from degarble.harness.engine.adopted.files import fault_text, read_fault, read_folder
from degarble.harness.report.verdict import AnswerLevel

if TYPE_CHECKING:
    from pathlib import Path

DRAWN = torch.Generator().manual_seed(1)
W = torch.randn(48, 64, generator=DRAWN).bfloat16()
X = torch.randn(32, 64, generator=DRAWN).bfloat16()


def wrong_product() -> torch.Tensor:
    """What a product returns whose weight has another number in row 5."""
    other = W.clone()
    other[5, 7] = 3.0
    return (X.float() @ other.float().T).bfloat16()


@cache
def verdict_of_product() -> str:
    """The verdict of the product, as JSON."""
    return json.dumps(api.judge("gemm", X, W, wrong_product()).document())


def saved(folder: Path) -> Path:
    """Adopt what the verdict of the product describes; give the data."""
    verdict = folder / "verdict.json"
    verdict.write_text(verdict_of_product())
    made = adopted_from(verdict, folder / "adopted")
    made.write()
    assert made.page.read_text().startswith(f"# {made.fault.id}\n")
    return made.data


def test_judge_names_what_it_described_before(tmp_path: Path) -> None:
    data = saved(tmp_path)
    setting = api.Setting(faults=data.parent)
    again = api.judge("gemm", X, W, wrong_product(), setting=setting)
    assert again.level is AnswerLevel.NAMED
    assert again.cause is not None
    assert again.cause.fault == data.stem
    assert "row 5 of its weight has about 3" in again.cause.title
    healthy = (X.float() @ W.float().T).bfloat16()
    assert api.judge("gemm", X, W, healthy, setting=setting)


def test_check_of_modules_names_it_too(tmp_path: Path) -> None:
    first = torch.nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        first.weight.copy_(W)
        first.weight[5, 7] = 3.0
    run = api.capture(torch.nn.Sequential(OrderedDict(first=first)), X)
    found = api.check(run, {"first": W})
    verdict = tmp_path / "verdict.json"
    verdict.write_text(json.dumps(found.document()))
    made = adopted_from(verdict, tmp_path / "adopted", identity="adopted.row_5")
    made.write()
    again = api.check(run, {"first": W}, faults=tmp_path / "adopted")
    assert [origin.fault for origin in again.origins] == ["adopted.row_5"]
    assert again.origins[0].level is AnswerLevel.NAMED


def test_a_file_reads_back_to_its_text(tmp_path: Path) -> None:
    data = saved(tmp_path)
    assert fault_text(read_fault(data)) == data.read_text()
    adopted_from(tmp_path / "verdict.json", data.parent).write()  # the same again changes nothing
    assert [each.id for each in read_folder(data.parent)] == [data.stem]


def test_another_fault_does_not_replace_one(tmp_path: Path) -> None:
    data = saved(tmp_path)
    made = adopted_from(tmp_path / "verdict.json", data.parent)
    with pytest.raises(DegarbleError, match="does not state already"):
        replace(made, fault=replace(made.fault, remedy="another")).write()


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("degarble_fault", 2, "degarble_fault"),
        ("id", "../x", "id"),
        ("families", [], "families"),
        ("components", "*", "components"),
        ("change", {"do": "torch.abs"}, "change.do"),
        ("change", {"do": "os.system"}, "change.do"),
        ("condition", {"expert": 3}, "condition"),
        ("python", "import os", "python"),
        ("remedy", None, "remedy"),
    ],
)
def test_a_file_that_states_no_fault_is_refused_by_name(
    tmp_path: Path, key: str, value: Any, name: str
) -> None:
    data = saved(tmp_path)
    data.write_text(json.dumps(json.loads(data.read_text()) | {key: value}))
    with pytest.raises(DegarbleError) as refused:
        read_folder(data.parent)
    assert refused.value.name == f"{data}: {name}"
    assert refused.value.remedy


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 9000])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DegarbleError):
        read_folder(tmp_path)


def test_an_id_of_the_catalogue_or_of_another_file_is_refused(tmp_path: Path) -> None:
    data = saved(tmp_path)
    (data.parent / "again.json").write_text(data.read_text())
    with pytest.raises(InvalidArgument, match="no other file"):
        read_folder(data.parent)
    (data.parent / "again.json").write_text(data.read_text().replace(data.stem, "M10.nibble_order"))
    with pytest.raises(InvalidArgument, match="the catalogue does not have"):
        api.judge("gemm", X, W, wrong_product(), setting=api.Setting(faults=data.parent))


def test_a_verdict_without_a_description_is_refused(tmp_path: Path) -> None:
    verdict = tmp_path / "verdict.json"
    healthy = (X.float() @ W.float().T).bfloat16()
    verdict.write_text(json.dumps(api.judge("gemm", X, W, healthy).document()))
    with pytest.raises(InvalidArgument, match="cause that is described"):
        adopted_from(verdict, tmp_path)


@pytest.mark.parametrize(
    ("descriptions", "finding", "words"),
    [
        ([{"origin_number": 1, "refused": "no rule"}], None, "no rule"),
        ([{"origin_number": 1, "refused": ""}], 1, "a described one: 2"),
        ([{"origin_number": n, "refused": ""} for n in (1, 3)], None, "one of 2, 4"),
        ([{"origin_number": 0}], None, "origin"),
        ([{"origin_number": 0, "origin": {}, "change": {"do": "x"}}], None, "sentence"),
    ],
)
def test_findings_that_cannot_be_adopted_are_refused(
    tmp_path: Path, descriptions: list[Any], finding: int | None, words: str
) -> None:
    verdict = tmp_path / "verdict.json"
    verdict.write_text(json.dumps({"descriptions": descriptions}))
    with pytest.raises(DegarbleError, match=words):
        adopted_from(verdict, tmp_path, finding)
