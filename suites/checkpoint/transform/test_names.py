"""Targets are named as their consumers read them: by our table, and by transformers itself."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from degarble.harness.checkpoint.transform.convert.back import convert_back
from degarble.harness.checkpoint.transform.convert.job import convert
from degarble.harness.checkpoint.transform.convert.prove import prove
from degarble.harness.checkpoint.transform.quantise.job import QuantiseJob, run_job, weight_only
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.recipes import recipe_named
from degarble.references import tiny
from degarble.references.tiny import figures, language
from degarble.suites.checkpoint.converting_cases import converted, source
from degarble.suites.checkpoint.transform.loading_cases import loaded_by_transformers, our_logits

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
    run_job(QuantiseJob(TRAINED / "v4", layout), folder)


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


def test_formats_that_the_consumer_does_not_load_are_told(tmp_path: Path) -> None:
    convert(source("official"), tmp_path / "out", "bf16", {"only": ("*.attn.*",)})
    proof = prove(source("official"), tmp_path / "out")
    assert proof.names is not None
    assert proof.names.other_formats == {"MXFP4": 27}
    assert proof.holds
    assert "It does not load MXFP4, in which 27 linears stay." in list(proof.lines())
    told = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert told["written_for"].startswith("transformers 5.20")
