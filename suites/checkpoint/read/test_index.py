"""Index and headers must tell one story, and no name may lead out of the folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.checkpoint.read import safetensors_files as index_module
from degarble.harness.checkpoint.read.safetensors_files import (
    list_folder,
    read_index,
    unsafe_reason,
)
from degarble.harness.checkpoint.read.types import EXAMPLES_KEPT, ProblemKind, Problems
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.checkpoint.write.manifest import UNFINISHED
from degarble.suites.checkpoint.reading_cases import write_shards

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shards = [{"a.weight": torch.zeros(2, 2)}, {"b.weight": torch.ones(3), "c": torch.ones(1)}]
    write_shards(tmp_path, shards)
    return tmp_path


def change_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    found = json.loads((folder / INDEX).read_text())
    change(found)
    (folder / INDEX).write_text(json.dumps(found))


def test_a_sound_checkpoint_has_no_problem(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    assert not checkpoint.problems.found
    assert sorted(checkpoint.entries) == ["a.weight", "b.weight", "c"]
    assert [shard.tensors for shard in checkpoint.shards] == [1, 2]
    assert checkpoint.index is not None
    assert checkpoint.index.weight_map["c"] == TWO


def test_without_an_index_all_shards_are_read(folder: Path) -> None:
    (folder / INDEX).unlink()
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.index is None
    assert len(checkpoint.entries) == 3


def test_one_file_is_a_checkpoint(folder: Path) -> None:
    assert list(Checkpoint.open(folder / ONE).entries) == ["a.weight"]


def test_another_index_name_is_taken_when_it_is_the_only_one(folder: Path) -> None:
    (folder / INDEX).rename(folder / "other.safetensors.index.json")
    opened = Checkpoint.open(folder)
    assert opened.index is not None
    assert opened.index.file.name == "other.safetensors.index.json"


# Every disagreement has a kind; a strict opening refuses the fatal ones


def _lose(folder: Path) -> None:
    (folder / TWO).unlink()


def _cut(folder: Path) -> None:
    raw = (folder / TWO).read_bytes()
    (folder / TWO).write_bytes(raw[:-1])


def _forget(folder: Path) -> None:
    change_index(folder, lambda index: index["weight_map"].pop("c"))


def _invent(folder: Path) -> None:
    change_index(folder, lambda index: index["weight_map"].update(d=TWO))


def _misplace(folder: Path) -> None:
    change_index(folder, lambda index: index["weight_map"].update(c=ONE))


def _escape(folder: Path) -> None:
    change_index(folder, lambda index: index["weight_map"].update(c=f"../{folder.name}/{TWO}"))


def _double(folder: Path) -> None:
    (folder / ONE).write_bytes((folder / TWO).read_bytes())
    change_index(folder, lambda index: index["weight_map"].pop("a.weight"))
    change_index(folder, lambda index: index["weight_map"].update({"b.weight": ONE}))


def _stray(folder: Path) -> None:
    (folder / "more.safetensors").write_bytes((folder / ONE).read_bytes())


def _pickled(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def _miscount(folder: Path) -> None:
    change_index(folder, lambda index: index["metadata"].update(total_size=1))


def _break_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')


def _break_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "deepseek_v4"}')


def _link_away(folder: Path) -> None:
    other = folder.parent / f"{folder.name}-elsewhere"
    other.mkdir()
    (folder / TWO).rename(other / TWO)
    (folder / TWO).symlink_to(other / TWO)


def _interrupt(folder: Path) -> None:
    (folder / UNFINISHED).mkdir()


DISAGREEMENTS: list[tuple[Callable[[Path], None], ProblemKind, str]] = [
    (_lose, ProblemKind.UNREADABLE_SHARD, TWO),
    (_cut, ProblemKind.UNREADABLE_SHARD, TWO),
    (_forget, ProblemKind.NOT_IN_INDEX, "tensor c at byte"),
    (_invent, ProblemKind.NOT_IN_HEADER, "tensor d"),
    (_misplace, ProblemKind.IN_OTHER_SHARD, "tensor c at byte"),
    (_escape, ProblemKind.UNSAFE_NAME, "shard of tensor c at byte"),
    (_double, ProblemKind.IN_TWO_SHARDS, "tensor b.weight at byte"),
    (_stray, ProblemKind.STRAY_SHARD, "more.safetensors"),
    (_pickled, ProblemKind.UNPICKLED, "pytorch_model.bin"),
    (_miscount, ProblemKind.TOTAL_SIZE, "total_size"),
    (_break_index, ProblemKind.UNREADABLE_INDEX, "each key once"),
    (_break_config, ProblemKind.UNREADABLE_CONFIG, "missing"),
    (_link_away, ProblemKind.FOREIGN_LINK, "a file inside"),
    (_interrupt, ProblemKind.UNFINISHED, UNFINISHED),
]


@pytest.mark.parametrize(("spoil", "kind", "says"), DISAGREEMENTS)
def test_each_disagreement_is_told_and_the_fatal_ones_refused(
    folder: Path, spoil: Callable[[Path], None], kind: ProblemKind, says: str
) -> None:
    spoil(folder)
    surveyed = Checkpoint.survey(folder)
    told = [problem for problem in surveyed.problems.found if problem.kind is kind]
    assert told, f"nothing of {kind} in {surveyed.problems.found}"
    assert says in str(told[0].error)
    assert told[0].file
    if kind.is_fatal:
        with pytest.raises(type(told[0].error)):
            Checkpoint.open(folder)
    else:
        assert Checkpoint.open(folder).problems.counts[kind] == 1


def test_every_kind_of_problem_is_shown_once() -> None:
    assert {kind for _, kind, _ in DISAGREEMENTS} == set(ProblemKind)


def test_a_tensor_in_two_shards_is_read_where_the_index_says(folder: Path) -> None:
    shards = [{"a": torch.zeros(2), "b": torch.ones(1)}, {"a": torch.ones(2), "c": torch.ones(1)}]
    write_shards(folder, shards)
    for shard, value in ((ONE, 0.0), (TWO, 1.0)):
        weight_map = {"a": shard, "b": ONE, "c": TWO}
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        checkpoint = Checkpoint.survey(folder)
        assert checkpoint.problems.counts == {ProblemKind.IN_TWO_SHARDS: 1}
        assert checkpoint.tensor("a").tolist() == [value, value]


def test_what_is_left_of_a_damaged_checkpoint_can_be_read(folder: Path) -> None:
    _cut(folder)
    checkpoint = Checkpoint.survey(folder)
    assert list(checkpoint.entries) == ["a.weight"]
    assert checkpoint.tensor("a.weight").tolist() == [[0, 0], [0, 0]]
    assert set(checkpoint.problems.counts) == {ProblemKind.UNREADABLE_SHARD}


def test_links_of_a_hub_cache_are_no_problem(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "models--some--model"
    blobs, snapshot = model / "blobs", model / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, name in enumerate((ONE, TWO, INDEX)):
        (folder / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    checkpoint = Checkpoint.open(snapshot)
    assert not checkpoint.problems.found
    assert checkpoint.tensor("b.weight").tolist() == [1, 1, 1]


def test_problems_are_counted_and_not_hoarded(folder: Path) -> None:
    more = {f"t{i}": TWO for i in range(EXAMPLES_KEPT + 50)}
    change_index(folder, lambda index: index["weight_map"].update(more))
    problems = Checkpoint.survey(folder).problems
    assert problems.counts[ProblemKind.NOT_IN_HEADER] == EXAMPLES_KEPT + 50
    assert len(problems.found) == EXAMPLES_KEPT


@pytest.mark.parametrize(
    "name",
    [
        "../a.safetensors",
        "/etc/a.safetensors",
        "a/b.safetensors",
        "a\\b.safetensors",
        ".a.safetensors",
        "..safetensors",
        "a.bin",
        "a.safetensors/..",
        "a\0.safetensors",
        "a\x1b[2J.safetensors",
        "a\n.safetensors",
        "x" * 300 + ".safetensors",
        "",
    ],
)
def test_unsafe_names_are_refused_unopened(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unsafe_reason(name)
    change_index(folder, lambda index: index["weight_map"].update(c=name))
    with pytest.raises(UnreadableFile, match="Do not open this checkpoint") as refused:
        Checkpoint.open(folder)
    assert str(refused.value).isprintable()
    monkeypatch.setattr(index_module, "unsafe_reason", lambda _name: "")
    found = read_index(folder / INDEX, Problems(strict=True))
    assert found.weight_map["c"] == name, "the rule, disabled, lets it through"


def test_usual_names_are_safe() -> None:
    for name in (ONE, "model.safetensors", "a b+c~1.safetensors", "модель.safetensors"):
        assert unsafe_reason(name) == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "weight_map"),
        ("[]", "an object"),
        ('{"weight_map": []}', "an object"),
        ('{"weight_map": {"a": 1}}', "a string"),
        ('{"weight_map": {"a": "b.safetensors"}', "the end of the object"),
        ('{"weight_map": {}, "weight_map": {}}', "each key once"),
        ('{"metadata": {"a": NaN}, "weight_map": {}}', "NaN"),
        ("", "an object"),
    ],
)
def test_refuses_what_is_no_index(folder: Path, text: str, says: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(UnreadableFile, match=INDEX) as refused:
        Checkpoint.open(folder)
    assert says in str(refused.value)


def test_sizes_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "LARGEST_INDEX", 10)
    with pytest.raises(UnreadableFile, match="at most 10 bytes"):
        Checkpoint.open(folder)
    monkeypatch.undo()
    monkeypatch.setattr(index_module, "MOST_TENSORS", 2)
    with pytest.raises(UnreadableFile, match="at most 2 tensors"):
        Checkpoint.open(folder)
    (folder / INDEX).unlink()
    with pytest.raises(UnreadableFile, match="more than 2 tensors"):
        Checkpoint.open(folder)
    monkeypatch.undo()
    monkeypatch.setattr(index_module, "_MOST_FILES", 1)
    with pytest.raises(UnreadableFile, match="more than 1 files"):
        Checkpoint.open(folder)


def test_only_pickled_files_are_refused_and_told(tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "consolidated.00.pth", "a.ckpt", "b.pkl"):
        (tmp_path / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    assert len(list_folder(tmp_path).pickled) == 4
    with pytest.raises(UnreadableFile, match="4 pickled"):
        Checkpoint.open(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UnreadableFile):
            Checkpoint.survey(path)
