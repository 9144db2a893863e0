"""Quantising whole small checkpoints: every value against the definition, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from degarble.harness.base.errors import (
    InvalidArgument,
    ScaleDirectionMismatch,
    UnknownName,
    UnwritablePath,
)
from degarble.harness.checkpoint.read.types import StoredLayout
from degarble.harness.checkpoint.transform import nvfp4_scales
from degarble.harness.checkpoint.transform.nvfp4_scales import ScaleRule
from degarble.harness.checkpoint.transform.quantise import job as quantise_producer
from degarble.harness.checkpoint.transform.quantise.calibration import Amax, Calibration
from degarble.harness.checkpoint.transform.quantise.conversion_report import REPORT
from degarble.harness.checkpoint.transform.quantise.job import (
    QuantiseJob,
    finish_job,
    make_shard,
    plan_job,
    recipe_for,
    run_job,
    target_layout,
    weight_only,
)
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.checkpoint.write.manifest import UNFINISHED
from degarble.harness.checkpoint.write.plan import PlannedTensor, WritePlan
from degarble.harness.checkpoint.write.writer import begin, write
from degarble.harness.formats.dialects import MODELOPT, TensorScales
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.quantise import quantise_definition
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import recipe_named
from degarble.suites.checkpoint.reading_cases import TINY_V4, TINY_V32
from degarble.suites.checkpoint.writing_cases import quick_folder, tree
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from degarble.harness.model.config.config import Config
    from degarble.harness.model.recipes import Recipe

FAMILIES: dict[str, Config] = {"v4": TINY_V4, "v32": TINY_V32}
SHARD = 150_000
UNREACHED = ("layers.1.ffn.experts.1.w1", "layers.1.ffn.experts.1.w3")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with quick_folder() as made:
        yield made


def source_of(folder: Path, family: str, layout: str) -> Path:
    path = folder / f"{family}-{layout}"
    if not path.exists():
        write_checkpoint(path, Synthetic(FAMILIES[family], layout, seed=3))
        (path / "tokenizer.json").write_text("{}")
    return path


@cache
def calibration_of(config: Config, recipe: str) -> Calibration:
    chosen = recipe_named(recipe, config)
    return Calibration.of(
        {
            each.name: Amax(1 + i / 16, 0 if each.name in UNREACHED else 7)
            for i, each in enumerate(parameters(config))
            if chosen.format_of(each).activation == "NVFP4"
        }
    )


def job_of(source: Path, family: str, recipe: str, **choices: Any) -> QuantiseJob:
    config = FAMILIES[family]
    layout = target_layout(config, recipe_named(recipe, config))
    return QuantiseJob(source, layout, calibration=calibration_of(config, recipe), **choices)


@pytest.mark.parametrize("recipe", ["nvfp4-experts", "nvfp4-full"])
@pytest.mark.parametrize("layout", ["official", "bf16", "transformers"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_value_is_the_definition(folder: Path, family: str, layout: str, recipe: str) -> None:
    config, source = FAMILIES[family], source_of(folder, family, layout)
    job = job_of(source, family, recipe, lossless=False)
    target = folder / f"{family}-{layout}-{recipe}"
    run_job(job, target, shard_bytes=SHARD)
    chosen = job.layout.recipe_for(config)
    report = json.loads((target / REPORT).read_text())
    with Checkpoint.open(source) as before, Checkpoint.open(target) as after:
        assert after.layout is StoredLayout.MODELOPT
        assert not after.problems.found
        assert after.names is not None
        for name, parameter in after.names.present.items():
            wanted, old, new = chosen.format_of(parameter), before.stored(name), after.stored(name)
            assert (new.format.name if new.format else "BF16") == wanted.weight
            if wanted.weight == "NVFP4":
                assert_quantised(before, after, name, report["weights"][name])
            elif old.format == new.format or new.format is None:
                assert torch.equal(old.values(), new.values().to(torch.float32))


def test_a_hub_cache_is_read_and_what_no_parameter_explains_is_listed(folder: Path) -> None:
    plain, repo = source_of(folder, "v4", "bf16"), folder / "models--one--two"
    snapshot, blobs = repo / "snapshots" / "abc", repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    write(
        snapshot / "extra",
        WritePlan.of([PlannedTensor("rotary.inv_freq", "F32", (4,))]),
        lambda tensor: [bytes(tensor.nbytes)],
    )
    (snapshot / "extra" / "model-00001-of-00001.safetensors").rename(blobs / "extra")
    shutil.rmtree(snapshot / "extra")
    (snapshot / "model-extra.safetensors").symlink_to("../../blobs/extra")
    for path in plain.iterdir():
        if "index" not in path.name and path.is_file():
            (blobs / path.name).write_bytes(path.read_bytes())
            (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    job = job_of(snapshot, "v4", "nvfp4-experts")
    assert plan_job(job).unclaimed == ("rotary.inv_freq",)
    target = folder / "from-the-cache"
    before = tree(repo)
    run_job(job, target)
    assert tree(repo) == before
    assert json.loads((target / REPORT).read_text())["unclaimed"] == ["rotary.inv_freq"]
    assert not any(path.is_symlink() for path in target.rglob("*"))
    assert (target / "tokenizer.json").read_text() == "{}"
    with Checkpoint.open(target) as made:
        assert "rotary.inv_freq" not in made.entries


def assert_quantised(
    before: Checkpoint, after: Checkpoint, name: str, told: dict[str, Any]
) -> None:
    """Hold one weight against the definition, its scales against its partners."""
    values, made = before.weight(name).values(torch.float32), after.weight(name)
    assert made.tensor_scale is not None
    assert made.codes is not None
    assert made.block_scale is not None
    assert made.input_scale is not None
    amax = float(values.abs().max())
    scale = made.tensor_scale
    assert float(scale) >= float(np.float32(amax) / np.float32(2688))
    assert float(scale) == told["weight_scale_2"]
    codes, block_scale = quantise_definition(
        values, MODELOPT.rule_for(NVFP4), TensorScales(encode=1 / scale, decode=scale)
    )
    assert torch.equal(made.codes, codes)
    assert torch.equal(made.block_scale.view(torch.uint8), block_scale)
    error = float((made.values(torch.float32) - values).norm() / values.norm())
    assert told["relative_error"] == pytest.approx(error, rel=1e-4)
    if name.endswith(".w1"):
        partner = after.weight(name[:-1] + "3")
        assert partner.tensor_scale is not None
        assert partner.input_scale is not None
        largest = max(amax, float(before.weight(name[:-1] + "3").values(torch.float32).abs().max()))
        assert float(scale) == float(np.float32(largest) / np.float32(2688))
        assert torch.equal(scale, partner.tensor_scale)
        assert torch.equal(made.input_scale, partner.input_scale)


def test_mxfp4_is_taken_over_exactly(folder: Path) -> None:
    source = source_of(folder, "v4", "official")
    target = folder / "lossless"
    run_job(job_of(source, "v4", "nvfp4-experts"), target, shard_bytes=SHARD)
    report = json.loads((target / REPORT).read_text())
    assert report["lossless"] == {"weights": 27, "exact": 27, "share_of_elements": 1.0}
    assert report["flagged"]["unreached_experts"] == list(UNREACHED)
    with Checkpoint.open(source) as before, Checkpoint.open(target) as after:
        for name in report["weights"]:
            old, new = (each.weight(name).values(torch.float64) for each in (before, after))
            assert torch.equal(old.view(torch.int64), new.view(torch.int64))


def test_what_is_not_exact_falls_back_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvfp4_scales, "WIDEST", -1)
    source, target = source_of(folder, "v4", "official"), folder / "not-lossless"
    run_job(job_of(source, "v4", "nvfp4-experts"), target, shard_bytes=SHARD)
    report = json.loads((target / REPORT).read_text())
    assert report["lossless"] == {"weights": 27, "exact": 0, "share_of_elements": 0.0}
    assert "E4M3 holds" in next(iter(report["flagged"]["not_lossless"].values()))


def test_a_wrong_exact_scale_never_reaches_the_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = nvfp4_scales.block_scales_of
    monkeypatch.setattr(nvfp4_scales, "block_scales_of", lambda *given: real(*given) + 8)
    target = folder / "planted"
    with pytest.raises(AssertionError, match="same numbers"):
        run_job(job_of(source_of(folder, "v4", "official"), "v4", "nvfp4-experts"), target)
    assert not list(target.glob("*.safetensors"))


@pytest.mark.parametrize("rule", [ScaleRule.MSE, ScaleRule.FOUR_OVER_SIX])
def test_searching_rules_lessen_the_error(folder: Path, rule: ScaleRule) -> None:
    source = source_of(folder, "v32", "bf16")
    found = {}
    for each in (ScaleRule.AMAX, rule):
        target = folder / f"rules-{rule}-{each}"
        run_job(job_of(source, "v32", "nvfp4-experts", scale_rule=each), target)
        report = json.loads((target / REPORT).read_text())
        assert report["scale_rule"] == each
        found[each] = [each["relative_error"] for each in report["weights"].values()]
    assert all(a > b for a, b in zip(found[ScaleRule.AMAX], found[rule], strict=True))


def test_interrupted_and_shared_out_work_gives_the_same_bytes(folder: Path) -> None:
    job = job_of(source_of(folder, "v4", "official"), "v4", "nvfp4-full")
    whole, parts = folder / "whole", folder / "parts"
    run_job(job, whole, shard_bytes=SHARD)
    planned = plan_job(job, shard_bytes=SHARD)
    begin(parts, planned.plan)
    for shard in planned.plan.shards[::-2]:  # another order, another run
        make_shard(job, parts, shard)
    facts = sorted((parts / UNFINISHED).glob("*.facts"))
    facts[0].unlink()  # what was lost is worked out again
    run_job(job, parts, shard_bytes=SHARD, workers=2)
    assert tree(parts) == tree(whole)
    run_job(job, whole, shard_bytes=SHARD)  # finished: nothing to do
    assert tree(parts) == tree(whole)


def test_an_end_between_report_and_configs_is_mended(folder: Path) -> None:
    job = job_of(source_of(folder, "v4", "official"), "v4", "nvfp4-experts")
    target = folder / "mended"
    planned = plan_job(job, shard_bytes=SHARD)
    begin(target, planned.plan)
    for shard in planned.plan.shards:
        make_shard(job, target, shard)
    finish_job(job, target, planned)
    before = tree(target)
    (target / "config.json").unlink()  # as if the run had ended just before its last file
    (target / UNFINISHED).mkdir()
    (target / UNFINISHED / "plan.json").write_bytes(b"")
    (target / UNFINISHED / "plan.json").unlink()
    run_job(job, target, shard_bytes=SHARD)
    assert tree(target) == before


def test_another_choice_does_not_resume(folder: Path) -> None:
    job = job_of(source_of(folder, "v4", "official"), "v4", "nvfp4-experts")
    target = folder / "choice"
    begin(target, plan_job(job).plan)
    with pytest.raises(UnwritablePath, match="scale_rule"):
        run_job(replace(job, scale_rule=ScaleRule.MSE), target)


def test_activations_without_a_calibration_are_refused(folder: Path) -> None:
    job = job_of(source_of(folder, "v4", "official"), "v4", "nvfp4-experts")
    with pytest.raises(InvalidArgument, match="uninitialised"):
        plan_job(replace(job, calibration=None))
    weights: Recipe = weight_only(recipe_named("nvfp4-experts", TINY_V4))
    target = folder / "weight-only"
    run_job(replace(job, layout=target_layout(TINY_V4, weights), calibration=None), target)
    with Checkpoint.open(target) as made:
        assert not [name for name in made.entries if name.endswith("input_scale")]
        stated = made.quantisation["config.json"]
        assert stated["moe_quant_algo"] == "W4A16_NVFP4"
        assert "input_activations" not in stated["config_groups"]["group_0"]


def test_input_scales_of_the_source_stand_where_nothing_newer_is(folder: Path) -> None:
    source = source_of(folder, "v32", "nvfp4-experts")
    job = replace(job_of(source, "v32", "nvfp4-experts"), calibration=None)
    target = folder / "again"
    run_job(job, target)
    with Checkpoint.open(source) as before, Checkpoint.open(target) as after:
        assert before.entries.keys() == after.entries.keys()
        for name in before.entries:
            assert bytes(before.raw(name)) == bytes(after.raw(name))


def test_sources_that_cannot_do_are_refused(folder: Path, tmp_path: Path) -> None:
    packed = source_of(folder, "v4", "compressed-tensors")
    with pytest.raises(ScaleDirectionMismatch, match="divisor"):
        plan_job(job_of(packed, "v4", "nvfp4-full"))
    damaged = tmp_path / "damaged"
    write_checkpoint(damaged, Synthetic(TINY_V32, "bf16", seed=1))
    path = damaged / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(InvalidArgument, match="missing"):
        plan_job(job_of(damaged, "v32", "nvfp4-full"))
    with pytest.raises(UnknownName, match="recipe"):
        recipe_for("nvfp4-most", TINY_V4)


def test_a_custom_recipe(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "name: mine\nbase: official\nrules:\n"
        "  - {match: 'layers.0.attn.wq_b', weight: NVFP4}\n"
        "  - {match: 'layers.*.ffn.experts.*', weight: FP8_128X128_F32}\n"
    )
    layout = target_layout(TINY_V4, recipe_for(str(file), TINY_V4))
    target = folder / "custom"
    run_job(QuantiseJob(source_of(folder, "v4", "official"), layout), target)
    report = json.loads((target / REPORT).read_text())
    assert list(report["weights"]) == ["layers.0.attn.wq_b"]
    assert report["counts"]["requantised: MXFP4 to FP8_128X128_F32"] == 27
    assert (target / "tokenizer.json").read_text() == "{}"


def test_memory_does_not_grow_with_a_matrix() -> None:
    for shape in ((129_280, 7168), (3072, 7168), (128,), (), (24, 28_672)):
        elements = quantise_producer._elements(shape)
        assert elements <= max(1 << 22, 128 * int(np.prod(shape[1:])))
        assert elements % (128 * max(1, int(np.prod(shape[1:])))) == 0
