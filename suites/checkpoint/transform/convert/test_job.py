"""Whole conversions: the same bytes in any order, names that consumers read, and the way back."""

from __future__ import annotations

import json
from copy import copy
from itertools import product
from pathlib import Path

import pytest

from degarble.harness.base.errors import (
    InvalidArgument,
    LayoutMismatch,
    UnknownName,
    UnreadableFile,
    UnwritablePath,
)
from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.checkpoint.audit.structure.structure import audit_structure
from degarble.harness.checkpoint.transform.convert.back import InverseJob, convert_back
from degarble.harness.checkpoint.transform.convert.job import CONVERSIONS, convert, job_for, prove
from degarble.harness.checkpoint.transform.convert.vllm_parameters import BACKENDS
from degarble.harness.checkpoint.transform.quantise.job import QuantiseJob, weight_only
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.checkpoint.write.writer import begin, bytes_of
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.recipes import recipe_named
from degarble.references import tiny
from degarble.references.tiny import figures, language
from degarble.suites.checkpoint.converting_cases import converted, damage, source
from degarble.suites.checkpoint.transform.loading_cases import loaded_by_transformers, our_logits
from degarble.suites.checkpoint.writing_cases import tree
from degarble.suites.support.thinned import thinned

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
        copy(job).make_shard(tmp_path / "parts", shard)
    job.finish(tmp_path / "parts", plan)
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


def test_scales_made_alone_equal_those_made_with_their_codes() -> None:
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
        findings = audit_structure(after)
        assert not [finding for finding in findings if finding.level is not Level.NOTE], findings
        is_engines = any(finding.rule == "structure.engine_form" for finding in findings)
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


def test_the_report_lists_what_was_done(tmp_path: Path) -> None:
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


CASES = [
    ("official", "vllm", {}),
    ("bf16", "fused-compressor", {}),
    ("official", "fused-compressor", {}),
    ("official", "deepgemm-wo-a", {"gpu": "sm90"}),
    ("official", "deepgemm-wo-a", {"gpu": "sm100"}),
    ("official", "deepgemm-wo-a", {"gpu": "sm100", "direction": "encode"}),
    ("official", "nvfp4-lossless", {}),
    *(("nvfp4-experts", "vllm", {"backend": backend}) for backend in BACKENDS),
]


@pytest.mark.parametrize(("kind", "to", "options"), thinned(CASES))
def test_a_round_trip_yields_the_same_bytes(
    kind: str, to: str, options: dict[str, object], tmp_path: Path
) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    converted(kind, there, to, **options)
    convert_back(there, back)
    with Checkpoint.open(source(kind)) as before, Checkpoint.open(back) as after:
        assert {e.name: (e.dtype, e.shape) for e in before.entries.values()} == {
            e.name: (e.dtype, e.shape) for e in after.entries.values()
        }
        differing = [name for name in before.entries if before.raw(name) != after.raw(name)]
    assert not differing
    assert (back / "config.json").read_bytes() == (source(kind) / "config.json").read_bytes()
    assert prove(back, there).holds


def test_a_fault_of_the_reverse_conversion_is_detected(tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    converted("nvfp4-experts", there, "vllm", backend="cutedsl")
    convert_back(there, back)
    damage(back, "layers.1.ffn.experts.2.w3.weight", lambda codes: codes.roll(64, 0))
    assert [proof.sources for proof in prove(back, there).broken] == [
        ("layers.1.ffn.experts.2.w3",)
    ]


@pytest.mark.parametrize(
    ("kind", "to", "options", "lost"),
    [
        ("nvfp4-full", "vllm", {}, "q_a_proj"),
        ("nvfp4-full", "fused-compressor", {}, "compressor"),
        ("bf16", "deepgemm-wo-a", {}, "wo_a"),
        ("official", "deepgemm-wo-a", {"per": "tensor"}, "wo_a"),
        ("v32", "vllm", {}, "indexer.wk.weight"),
    ],
)
def test_what_was_rounded_or_left_out_has_no_way_back(
    kind: str, to: str, options: dict[str, object], lost: str, tmp_path: Path
) -> None:
    convert(source(kind), tmp_path / "there", to, options)
    with pytest.raises(LayoutMismatch, match=lost):
        convert_back(tmp_path / "there", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_rounding_conversions_have_none_at_all(tmp_path: Path) -> None:
    convert(source("official"), tmp_path / "there", "bf16")
    with pytest.raises(LayoutMismatch, match="no way back"):
        convert_back(tmp_path / "there", tmp_path / "back")
    assert InverseJob(tmp_path / "there").source.name == "there"


# --------------------------------------------------------------------------------------------------
# Targets are named as their consumers read them: by our table, and by transformers itself.

RENAMED = ("nvfp4-full", "compressed-tensors")  # spelled as nobody reads V4
TRAINED = Path(tiny.__file__).parent / "v1"  # at random, experts tie, and logits differ by a choice


def write_source(kind: str, folder: Path) -> None:
    """Write a trained model in FP8, or in NVFP4 under transformers' words for single experts."""
    if kind != "v4, other words":
        convert(TRAINED / kind, folder, "fp8-block")
        return
    with Checkpoint.open(TRAINED / "v4") as checkpoint:
        config = checkpoint.model
    assert config is not None
    recipe = weight_only(recipe_named("nvfp4-full", config))
    layout = layout_named("nvfp4-full", config).with_recipe(recipe)
    QuantiseJob(TRAINED / "v4", layout).run(folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_transformers_reads_every_decoded_checkpoint(tmp_path: Path) -> None:
    """Names of single experts in transformers' own words left them at random: 62 for 8.5."""
    tokens = language.document(figures.HELD_OUT).ids[:48]
    kinds = ("v4, other words", "v4", "v32")
    folders = [tmp_path / kind for kind in kinds]
    for kind, folder in zip(kinds, folders, strict=True):
        stored = tmp_path / f"{kind}, source"
        write_source(kind, stored)
        convert(stored, folder, "bf16")
        assert prove(stored, folder).holds
    for folder, theirs in zip(folders, loaded_by_transformers(folders, tokens), strict=True):
        assert theirs.is_clean, (folder.name, theirs.told)
        assert theirs.logits is not None
        ours = our_logits(folder, tokens)
        assert (ours - theirs.logits).abs().max() < 1e-5 * ours.abs().max(), folder.name


@pytest.mark.parametrize(
    ("kind", "to"),
    [
        *product(RENAMED, ["bf16", "fp8-block", "fused-compressor"]),
        ("nvfp4-full", "deepgemm-wo-a"),
    ],
)
def test_other_spellings_are_renamed_as_a_whole(kind: str, to: str, tmp_path: Path) -> None:
    proof = converted(kind, tmp_path / "out", to)
    assert proof.names is not None
    assert proof.holds, list(proof.lines())
    with Checkpoint.open(tmp_path / "out") as after, Checkpoint.open(source(kind)) as before:
        assert not any(name.startswith("model.") for name in after.entries)
        assert any(name.startswith("layers.0.ffn.experts.0.w1.weight") for name in after.entries)
        assert all(name.startswith(("model.", "lm_head")) for name in before.entries)
        assert after.raw("layers.0.ffn.gate.tid2eid") == before.raw(
            "model.layers.0.mlp.gate.tid2eid"
        )


def test_a_spelling_that_the_consumer_knows_stays(tmp_path: Path) -> None:
    converted("official", tmp_path / "out", "bf16")
    with Checkpoint.open(tmp_path / "out") as after, Checkpoint.open(source("official")) as before:
        scales = {name for name in before.entries if name.endswith(".scale")}
        assert after.entries.keys() == before.entries.keys() - scales


def test_a_renamed_target_leads_back(tmp_path: Path) -> None:
    convert(source("nvfp4-full"), tmp_path / "out", "fused-compressor", {"only": ("layers.1*",)})
    with pytest.raises(Exception, match="neither rounded nor left out"):
        convert_back(tmp_path / "out", tmp_path / "again")  # compressors were NVFP4
    convert(source("bf16"), tmp_path / "plain", "fused-compressor")
    convert_back(tmp_path / "plain", tmp_path / "back")
    with Checkpoint.open(tmp_path / "back") as again, Checkpoint.open(source("bf16")) as before:
        assert all(again.raw(name) == before.raw(name) for name in before.entries)


def test_names_that_the_consumer_does_not_read_break_the_promise(tmp_path: Path) -> None:
    """What 6c9aa70 wrote: right values under names that transformers does not know."""
    converted("nvfp4-full", tmp_path / "out", "bf16")
    (shard,) = (tmp_path / "out").glob("*.safetensors")
    index = tmp_path / "out" / "model.safetensors.index.json"
    old, new = b"layers.1.ffn.experts.2.w1.weight", b"layers.1.mlp.expertz.2.w1.weight"
    shard.write_bytes(shard.read_bytes().replace(old, new, 1))
    index.write_bytes(index.read_bytes().replace(old, new))
    proof = prove(source("nvfp4-full"), tmp_path / "out")
    assert proof.names is not None
    assert proof.names.missing == (old.decode(),)
    assert proof.names.unexpected == (new.decode(),)
    assert not proof.holds
    lines = list(proof.lines())
    assert f"{old.decode()}: it reads this tensor, which is missing" in lines
    assert f"{new.decode()}: it has no place for this tensor" in lines


def test_formats_that_the_consumer_does_not_load_are_reported(tmp_path: Path) -> None:
    convert(source("official"), tmp_path / "out", "bf16", {"only": ("*.attn.*",)})
    proof = prove(source("official"), tmp_path / "out")
    assert proof.names is not None
    assert proof.names.other_formats == {"MXFP4": 27}
    assert proof.holds
    assert "It does not load MXFP4, in which 27 linears stay." in list(proof.lines())
    told = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert told["written_for"].startswith("transformers 5.20")
