from __future__ import annotations

import json
from copy import copy
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import (
    InvalidArgument,
    UnknownName,
    UnreadableFile,
    UnwritablePath,
)
from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.checkpoint.audit.structure.structure import audit_structure
from degarble.harness.checkpoint.transform.convert.job import CONVERSIONS, convert, job_for
from degarble.harness.checkpoint.transform.convert.prove import prove
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.checkpoint.write.writer import begin, bytes_of, finish, write_shard
from degarble.suites.checkpoint.converting_cases import source
from degarble.suites.checkpoint.writing_cases import tree

if TYPE_CHECKING:
    from pathlib import Path

SOURCES = dict.fromkeys(CONVERSIONS, "nvfp4-full") | {
    "nvfp4": "official",
    "nvfp4-lossless": "official",
}


@pytest.mark.parametrize("to", CONVERSIONS)
def test_shards_made_apart_in_any_order_are_the_same_bytes(to: str, tmp_path: Path) -> None:
    """As a pool or a cluster does it: each shard by a job that carries nothing opened."""
    job = job_for(source(SOURCES[to]), to)
    job.run(tmp_path / "whole", shard_bytes=400_000)
    plan = job.plan(400_000)
    assert len(plan.shards) > 3
    begin(tmp_path / "parts", plan)
    for shard in reversed(plan.shards):
        write_shard(tmp_path / "parts", shard, copy(job))
    finish(tmp_path / "parts", plan, job.ending())
    assert tree(tmp_path / "whole") == tree(tmp_path / "parts")
    assert prove(source(SOURCES[to]), tmp_path / "parts").holds


@pytest.mark.parametrize("to", CONVERSIONS)
def test_every_tensor_of_the_source_is_accounted_for(to: str, tmp_path: Path) -> None:
    job = job_for(source(SOURCES[to]), to)
    job.run(tmp_path / "out")
    taken = {name for unit in job.units for name in unit.sources}
    groups = [taken - job.left_out.keys(), set(job.copied), set(job.left_out)]
    assert sum(map(len, groups)) == len(job.checkpoint.entries)
    assert set.union(*groups) == set(job.checkpoint.entries)
    with Checkpoint.open(tmp_path / "out") as after:
        assert not after.problems.found
        assert {job.names.tensor(name) for name in job.copied} <= after.entries.keys()
        assert not after.entries.keys() & job.left_out.keys()


def test_scales_are_made_again_where_they_are_asked_for_alone() -> None:
    job = job_for(source("nvfp4-full"), "fp8-block")
    unit = next(unit for unit in job.units if len(unit.tensors) == 2)
    codes, scale = unit.tensors
    alone = b"".join(bytes_of(chunk) for chunk in unit.make(scale))
    list(unit.make(codes))
    assert b"".join(bytes_of(chunk) for chunk in unit.make(scale)) == alone


def test_an_interrupted_run_refuses_another_conversion(tmp_path: Path) -> None:
    job = job_for(source("nvfp4-full"), "bf16")
    begin(tmp_path / "out", job.plan())
    with pytest.raises(UnwritablePath):
        convert(source("nvfp4-full"), tmp_path / "out", "fused-compressor")
    convert(source("nvfp4-full"), tmp_path / "out", "bf16")
    assert prove(source("nvfp4-full"), tmp_path / "out").holds


@pytest.mark.parametrize(
    ("kind", "to"),
    [
        ("nvfp4-full", "fp8-block"),
        ("bf16", "vllm"),
        ("bf16", "deepgemm-wo-a"),
        ("nvfp4-full", "vllm"),
        ("v32", "vllm"),
        ("official", "deepgemm-wo-a"),
        ("official", "fused-compressor"),
        ("nvfp4-full", "fused-compressor"),
    ],
)
def test_what_is_written_passes_the_structure_audit(kind: str, to: str, tmp_path: Path) -> None:
    convert(source(kind), tmp_path / "out", to)
    assert prove(source(kind), tmp_path / "out").holds
    with Checkpoint.survey(tmp_path / "out") as after:
        found = audit_structure(after)
        assert not [each for each in found if each.level is not Level.NOTE], found
        is_engines = any(each.rule == "structure.engine_form" for each in found)
        assert is_engines == (to in {"deepgemm-wo-a", "fused-compressor"})


def test_a_target_inside_the_source_is_refused() -> None:
    inside = source("nvfp4-full") / "out"
    with pytest.raises(InvalidArgument, match="outside the source"):
        convert(source("nvfp4-full"), inside, "bf16")
    assert not inside.exists()


def test_a_tensor_that_is_missing_or_extra_breaks_the_promise(tmp_path: Path) -> None:
    convert(source("nvfp4-full"), tmp_path / "out", "bf16")
    (head,) = (tmp_path / "out").glob("*.safetensors")
    data = head.read_bytes()
    head.write_bytes(data.replace(b'"norm.weight"', b'"morn.weight"', 1))
    index = tmp_path / "out" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"norm.weight"', '"morn.weight"'))
    proof = prove(source("nvfp4-full"), tmp_path / "out")
    assert set(proof.faults) == {
        "norm.weight is missing",
        "morn.weight belongs to no conversion",
    }
    assert not proof.holds


def test_what_was_done_is_told(tmp_path: Path) -> None:
    convert(source("nvfp4-full"), tmp_path / "out", "bf16", {"only": ("*.wq_a",)})
    told = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert (told["to"], told["options"]) == ("bf16", {"only": ["*.wq_a"]})
    assert told["converted"] == told["left_out"].popitem()[1]
    (tmp_path / "out" / "conversion.json").write_text("{}")
    with pytest.raises(UnreadableFile, match="KeyError"):
        prove(source("nvfp4-full"), tmp_path / "out")


def test_unknown_conversions_and_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="Did you mean"):
        convert(source("bf16"), tmp_path / "out", "fp8-blok")
    with pytest.raises(UnknownName, match="option of bf16"):
        convert(source("official"), tmp_path / "out", "bf16", {"scale": "fp32"})
    assert not (tmp_path / "out").exists()
