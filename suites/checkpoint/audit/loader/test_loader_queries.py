"""What a loader proof answers when it is asked: of a tensor, a parameter, a list, one rank."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import yaml

from degarble.harness.base.errors import InvalidArgument, LayoutMismatch, UnknownName
from degarble.harness.checkpoint.audit.loader.engine_maps import engine_map
from degarble.harness.checkpoint.audit.loader.map_files import loader_map_from_text
from degarble.harness.checkpoint.audit.loader.maps import Rename, Split, Stack
from degarble.harness.checkpoint.audit.loader.proof import prove
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.suites.checkpoint.audit.loader.loader_cases import FIELD, inventory_of, map_of, proven
from degarble.suites.checkpoint.audit.loader.loader_moves import require_claims
from degarble.suites.checkpoint.structure_cases import V4, errors, replant, told, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from degarble.harness.model.config.config import Config

    Write = Callable[[Config, str], Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Write:
    made: dict[tuple[Config, str], Path] = {}

    def write_once(config: Config, layout: str) -> Path:
        if (config, layout) not in made:
            made[config, layout] = write(tmp_path_factory.mktemp("queries") / "c", config, layout)
        return made[config, layout]

    return write_once


def test_where_a_tensor_goes_and_what_a_parameter_holds(written: Write) -> None:
    name, fused = "layers.1.attn.wkv.weight", "model.layers.1.attn.fused_wqa_wkv.weight"
    proof = proven(written(V4, "official"), {"base": "vllm", "tp": 2})
    found = list(proof.reaches(name))
    assert [(rank, parameter) for rank, parameter, _ in found] == [(0, fused), (1, fused)]
    rows = V4.q_lora_rank
    for rank, parameter, move in found:
        assert move in proof.fills(parameter, rank)
        assert move.source_box.ranges == ((0, V4.head_dim), (0, V4.hidden_size))
        assert move.target_box.ranges == ((rows, rows + V4.head_dim), (0, V4.hidden_size))


def test_bytes_are_those_of_the_file(written: Write) -> None:
    folder, name = written(V4, "official"), "layers.1.attn.wo_b.weight"
    with Checkpoint.open(folder) as checkpoint:
        proof = prove(checkpoint, map_of(checkpoint, {"base": "vllm", "tp": 2}))
        whole = bytes(checkpoint.tensor(name).view(dtype=torch.uint8).numpy())
        entry = checkpoint.entries[name]
    columns = entry.shape[1]
    for rank, _, move in proof.reaches(name):
        (runs,) = proof.bytes_of(move)
        assert runs.nbytes * 2 == len(whole)
        taken = b"".join(whole[begin - entry.begin : end - entry.begin] for begin, end in runs)
        expected = np.frombuffer(whole, np.uint8).reshape(entry.shape)
        half = expected[:, rank * columns // 2 : (rank + 1) * columns // 2]
        assert taken == half.tobytes()


def test_a_conversion_reads_its_tensors_as_wholes(written: Write) -> None:
    proof = proven(written(V4, "nvfp4-full"), FIELD)
    (move,) = proof.fills("model.layers.1.attn.wo_b.weight", 0)
    names = {"weight", "weight_scale", "weight_scale_2"}
    module = "model.layers.1.self_attn.o_b_proj"
    assert set(move.made_from) == {f"{module}.{name}" for name in names}
    for name in move.made_from:
        assert proof.outcomes[name] == "converted"
        assert list(proof.reaches(name))
    sizes = [runs.nbytes for runs in proof.bytes_of(move)]
    assert sizes == [proof.entries[name].nbytes for name in move.made_from]


def test_unknown_names_are_refused(written: Write) -> None:
    proof = proven(written(V4, "official"), {"base": "vllm", "tp": 2, "rank": 1})
    with pytest.raises(UnknownName, match=r"stored tensor = 'layers\.9\.x'"):
        list(proof.reaches("layers.9.x"))
    with pytest.raises(UnknownName, match="parameter of rank 1"):
        proof.fills("model.norm.weights", 1)
    with pytest.raises(InvalidArgument, match=r"rank = 0: expected one of \[1\]"):
        proof.fills("model.norm.weight", 0)


def test_one_rank_alone_leaves_the_others_rows_unjudged(written: Write) -> None:
    proof = proven(written(V4, "official"), {"base": "vllm", "tp": 2, "rank": 1})
    assert proof.findings == []
    assert proof.unread == {}
    assert proof.summary()["ranks"] == 1


def test_a_list_of_parameters_is_judged_by_shapes_and_names(written: Write) -> None:
    folder = written(V4, "official")
    with Checkpoint.open(folder) as checkpoint:
        inventory = inventory_of(checkpoint)
        engine = prove(checkpoint, engine_map(inventory, "vllm"))
        (held,) = engine.held()
        parameters = {}
        for target in held.targets.values():
            first = 1 if target.stacked else 0
            slots = {key[1]: member.box for key, member in target.members.items()}
            rows = [slots[number].shape[first] for number in sorted(slots) if len(slots) > 1]
            parameters[target.name] = {
                "dtype": target.dtype,
                "shape": list(target.shape),
                "slots": rows,
                "experts": target.stacked,
            }
        base = engine.map
        raw = {
            "parameters": parameters,
            "rename": [vars(each) for each in base.rename],
            "stack": [vars(each) for each in base.stack],
        }
        proof = prove(checkpoint, map_of(checkpoint, raw))
    assert proof.findings == []
    assert proof.summary() == engine.summary()
    require_claims(proof)


def test_a_checkpoint_of_no_known_model_can_be_proven_against_a_list(
    tmp_path: Path, written: Write
) -> None:
    folder = shutil.copytree(written(V4, "bf16"), tmp_path / "c")
    (folder / "config.json").write_text('{"model_type": "unheard_of"}', encoding="utf-8")
    half = {"dtype": "BF16", "shape": [V4.vocab_size // 2, V4.hidden_size]}
    with Checkpoint.survey(folder) as checkpoint:
        assert checkpoint.names is None
        raw = {
            "tp": 2,
            "parameters": {"embed.weight": half, "extra.weight": {**half, "shape": [3, 5]}},
            "split": [{"match": "^embed", "dim": 0}],
        }
        made = loader_map_from_text(yaml.safe_dump(raw), None)
        proof = prove(checkpoint, made)
        with pytest.raises(InvalidArgument, match="cannot be derived"):
            loader_map_from_text("base: vllm", None)
    assert set(proof.unwritten) == {(0, "extra.weight"), (1, "extra.weight")}
    assert proof.outcomes["embed.weight"] == "placed"
    assert errors(proof.findings) == {"loader.unwritten"}


def test_an_expert_beyond_every_rank_is_unread(written: Write) -> None:
    folder = written(V4, "official")
    raw = {
        "parameters": {"w1": {"dtype": "I8", "shape": [2, 256, 64], "experts": True}},
        "stack": [{"match": r"layers\.1\..*experts\.(?P<expert>\d+)\.w1\.weight", "into": "w1"}],
    }
    proof = proven(folder, raw)
    names = [f"layers.1.ffn.experts.{expert}.w1.weight" for expert in (2, 3)]
    assert set(proof.unread) == set(names)
    (found,) = told(proof.findings, "loader.unread")
    assert found.count == 2
    require_claims(proof)


def test_fused_checkpoints_of_transformers_are_refused(written: Write) -> None:
    raw = {"parameters": {"a": {"dtype": "U8", "shape": [1]}}}
    with pytest.raises(LayoutMismatch, match="prove the checkpoint that it was made from"):
        proven(written(V4, "transformers"), raw)


def test_rules_are_records(written: Write) -> None:
    """Maps that are made in Python, without text, are proven like any other."""
    with Checkpoint.open(written(V4, "official")) as checkpoint:
        made = engine_map(inventory_of(checkpoint), "vllm")
        changed = replace(
            made,
            rename=(Rename("a", "a"), *made.rename),
            stack=(Stack("never", "x"), *made.stack),
            split=(Split("never", 0), *made.split),
        )
        found = prove(checkpoint, changed).findings
    assert {each.rule for each in found} == {"loader.dead_rule"}
    assert sum(each.count for each in found) == 2


def test_hostile_names_are_reported_and_nothing_else_happens(
    tmp_path: Path, written: Write
) -> None:
    hostile = ("layers." + "9" * 5000, "layers.1.ffn.experts." + "1" * 4400 + ".w1.weight")

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: torch.zeros(2) for name in hostile})

    folder = replant(written(V4, "official"), tmp_path / "c", add)
    with Checkpoint.survey(folder) as checkpoint:
        proof = prove(checkpoint, map_of(checkpoint, {"base": "vllm", "tp": 2}))
    assert errors(proof.findings) == set()
    assert sum(each.count for each in told(proof.findings, "loader.extra_dropped")) == len(hostile)
    assert {proof.outcomes[name] for name in hostile} == {"dropped"}
