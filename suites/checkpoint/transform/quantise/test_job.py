"""Quantising small checkpoints: values, input scales, reports, and what is refused."""

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
    Refused,
    ScaleDirectionMismatch,
    UnknownName,
    UnreadableFile,
    UnwritablePath,
)
from degarble.harness.checkpoint.read.types import StoredLayout
from degarble.harness.checkpoint.transform import nvfp4_scales
from degarble.harness.checkpoint.transform.nvfp4_scales import Errors, Exponents, ScaleRule
from degarble.harness.checkpoint.transform.quantise import job as quantise_producer
from degarble.harness.checkpoint.transform.quantise.calibration import (
    FILE,
    Amax,
    Calibration,
    InputScale,
    InputScales,
    ScaleOrigin,
)
from degarble.harness.checkpoint.transform.quantise.conversion_report import (
    REPORT,
    GroupScale,
    ShardFacts,
    report_bytes,
)
from degarble.harness.checkpoint.transform.quantise.job import (
    QuantiseJob,
    recipe_for,
    target_layout,
    weight_only,
)
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.checkpoint.write.manifest import UNFINISHED
from degarble.harness.checkpoint.write.plan import PlannedTensor, WritePlan
from degarble.harness.checkpoint.write.writer import begin, write
from degarble.harness.formats.dialects import MODELOPT
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.quantise import quantise_definition
from degarble.harness.formats.scale_rules import TensorScales
from degarble.harness.model.parameters import Parameter, parameter_named, parameters
from degarble.harness.model.recipes import recipe_named
from degarble.suites.checkpoint.reading_cases import TINY_V4, TINY_V32
from degarble.suites.checkpoint.writing_cases import quick_folder, tree
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from degarble.harness.model.config.config import Config
    from degarble.harness.model.recipes import Recipe


# --------------------------------------------------------------------------------------------------
# Quantising whole small checkpoints: every value against the definition, and what is refused.

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
    return Calibration.from_records(
        {
            parameter.name: Amax(1 + i / 16, 0 if parameter.name in UNREACHED else 7)
            for i, parameter in enumerate(parameters(config))
            if chosen.format_of(parameter).activation == "NVFP4"
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
    job.run(target, shard_bytes=SHARD)
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
        WritePlan.from_tensors([PlannedTensor("rotary.inv_freq", "F32", (4,))]),
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
    assert job.unclaimed == ("rotary.inv_freq",)
    target = folder / "from-the-cache"
    before = tree(repo)
    job.run(target)
    assert tree(repo) == before
    assert json.loads((target / REPORT).read_text())["unclaimed"] == ["rotary.inv_freq"]
    assert not any(path.is_symlink() for path in target.rglob("*"))
    assert (target / "tokenizer.json").read_text() == "{}"
    with Checkpoint.open(target) as checkpoint:
        assert "rotary.inv_freq" not in checkpoint.entries


def assert_quantised(
    before: Checkpoint, after: Checkpoint, name: str, told: dict[str, Any]
) -> None:
    """Hold one weight against the definition, its scales against its partners."""
    values, weight = before.weight(name).values(torch.float32), after.weight(name)
    assert weight.tensor_scale is not None
    assert weight.codes is not None
    assert weight.block_scale is not None
    assert weight.input_scale is not None
    amax = float(values.abs().max())
    scale = weight.tensor_scale
    assert float(scale) >= float(np.float32(amax) / np.float32(2688))
    assert float(scale) == told["weight_scale_2"]
    codes, block_scale = quantise_definition(
        values, MODELOPT.rule_for(NVFP4), TensorScales(encode=1 / scale, decode=scale)
    )
    assert torch.equal(weight.codes, codes)
    assert torch.equal(weight.block_scale.view(torch.uint8), block_scale)
    error = float((weight.values(torch.float32) - values).norm() / values.norm())
    assert told["relative_error"] == pytest.approx(error, rel=1e-4)
    if name.endswith(".w1"):
        partner = after.weight(name[:-1] + "3")
        assert partner.tensor_scale is not None
        assert partner.input_scale is not None
        largest = max(amax, float(before.weight(name[:-1] + "3").values(torch.float32).abs().max()))
        assert float(scale) == float(np.float32(largest) / np.float32(2688))
        assert torch.equal(scale, partner.tensor_scale)
        assert torch.equal(weight.input_scale, partner.input_scale)


def test_mxfp4_is_taken_over_exactly(folder: Path) -> None:
    source = source_of(folder, "v4", "official")
    target = folder / "lossless"
    job_of(source, "v4", "nvfp4-experts").run(target, shard_bytes=SHARD)
    report = json.loads((target / REPORT).read_text())
    assert report["lossless"] == {"weights": 27, "exact": 27, "share_of_elements": 1.0}
    assert report["flagged"]["unreached_experts"] == list(UNREACHED)
    with Checkpoint.open(source) as before, Checkpoint.open(target) as after:
        for name in report["weights"]:
            old, new = (
                checkpoint.weight(name).values(torch.float64) for checkpoint in (before, after)
            )
            assert torch.equal(old.view(torch.int64), new.view(torch.int64))


def test_what_is_not_exact_falls_back_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvfp4_scales, "WIDEST", -1)
    source, target = source_of(folder, "v4", "official"), folder / "not-lossless"
    job_of(source, "v4", "nvfp4-experts").run(target, shard_bytes=SHARD)
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
        job_of(source_of(folder, "v4", "official"), "v4", "nvfp4-experts").run(target)
    assert not list(target.glob("*.safetensors"))


@pytest.mark.parametrize("rule", [ScaleRule.MSE, ScaleRule.FOUR_OVER_SIX])
def test_searching_rules_lessen_the_error(folder: Path, rule: ScaleRule) -> None:
    source = source_of(folder, "v32", "bf16")
    found = {}
    for scale_rule in (ScaleRule.AMAX, rule):
        target = folder / f"rules-{rule}-{scale_rule}"
        job_of(source, "v32", "nvfp4-experts", scale_rule=scale_rule).run(target)
        report = json.loads((target / REPORT).read_text())
        assert report["scale_rule"] == scale_rule
        found[scale_rule] = [each["relative_error"] for each in report["weights"].values()]
    assert all(a > b for a, b in zip(found[ScaleRule.AMAX], found[rule], strict=True))


def test_interrupted_and_shared_out_work_gives_the_same_bytes(folder: Path) -> None:
    job = job_of(source_of(folder, "v4", "official"), "v4", "nvfp4-full")
    whole, parts = folder / "whole", folder / "parts"
    job.run(whole, shard_bytes=SHARD)
    plan = job.plan(shard_bytes=SHARD)
    begin(parts, plan)
    for shard in plan.shards[::-2]:  # another order, another run
        job.make_shard(parts, shard)
    facts = sorted((parts / UNFINISHED).glob("*.facts"))
    facts[0].unlink()  # what was lost is worked out again
    job.run(parts, shard_bytes=SHARD, workers=2)
    assert tree(parts) == tree(whole)
    job.run(whole, shard_bytes=SHARD)  # finished: nothing to do
    assert tree(parts) == tree(whole)


def test_an_end_between_report_and_configs_is_mended(folder: Path) -> None:
    job = job_of(source_of(folder, "v4", "official"), "v4", "nvfp4-experts")
    target = folder / "mended"
    plan = job.plan(shard_bytes=SHARD)
    begin(target, plan)
    for shard in plan.shards:
        job.make_shard(target, shard)
    job.finish(target, plan)
    before = tree(target)
    (target / "config.json").unlink()  # as if the run had ended just before its last file
    (target / UNFINISHED).mkdir()
    (target / UNFINISHED / "plan.json").write_bytes(b"")
    (target / UNFINISHED / "plan.json").unlink()
    job.run(target, shard_bytes=SHARD)
    assert tree(target) == before


def test_another_choice_does_not_resume(folder: Path) -> None:
    job = job_of(source_of(folder, "v4", "official"), "v4", "nvfp4-experts")
    target = folder / "choice"
    begin(target, job.plan())
    with pytest.raises(UnwritablePath, match="scale_rule"):
        replace(job, scale_rule=ScaleRule.MSE).run(target)


def test_activations_without_a_calibration_are_refused(folder: Path) -> None:
    job = job_of(source_of(folder, "v4", "official"), "v4", "nvfp4-experts")
    with pytest.raises(InvalidArgument, match="uninitialised"):
        replace(job, calibration=None).plan()
    weights: Recipe = weight_only(recipe_named("nvfp4-experts", TINY_V4))
    target = folder / "weight-only"
    replace(job, layout=target_layout(TINY_V4, weights), calibration=None).run(target)
    with Checkpoint.open(target) as checkpoint:
        assert not [name for name in checkpoint.entries if name.endswith("input_scale")]
        stated = checkpoint.quantisation["config.json"]
        assert stated["moe_quant_algo"] == "W4A16_NVFP4"
        assert "input_activations" not in stated["config_groups"]["group_0"]


def test_input_scales_of_the_source_stand_where_nothing_newer_is(folder: Path) -> None:
    source = source_of(folder, "v32", "nvfp4-experts")
    job = replace(job_of(source, "v32", "nvfp4-experts"), calibration=None)
    target = folder / "again"
    job.run(target)
    with Checkpoint.open(source) as before, Checkpoint.open(target) as after:
        assert before.entries.keys() == after.entries.keys()
        for name in before.entries:
            assert bytes(before.raw(name)) == bytes(after.raw(name))


def test_sources_that_cannot_do_are_refused(folder: Path, tmp_path: Path) -> None:
    packed = source_of(folder, "v4", "compressed-tensors")
    with pytest.raises(ScaleDirectionMismatch, match="divisor"):
        job_of(packed, "v4", "nvfp4-full").plan()
    damaged = tmp_path / "damaged"
    write_checkpoint(damaged, Synthetic(TINY_V32, "bf16", seed=1))
    path = damaged / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(InvalidArgument, match="missing"):
        job_of(damaged, "v32", "nvfp4-full").plan()
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
    QuantiseJob(source_of(folder, "v4", "official"), layout).run(target)
    report = json.loads((target / REPORT).read_text())
    assert list(report["weights"]) == ["layers.0.attn.wq_b"]
    assert report["counts"]["requantised: MXFP4 to FP8_128X128_F32"] == 27
    assert (target / "tokenizer.json").read_text() == "{}"


def test_memory_does_not_grow_with_a_matrix() -> None:
    for shape in ((129_280, 7168), (3072, 7168), (128,), (), (24, 28_672)):
        elements = quantise_producer._elements(shape)
        assert elements <= max(1 << 22, 128 * int(np.prod(shape[1:])))
        assert elements % (128 * max(1, int(np.prod(shape[1:])))) == 0


# --------------------------------------------------------------------------------------------------
# Amax records: the file, and the scales that follow from it for reached and unreached experts.


def wanted(config: Config, recipe: str = "nvfp4-full") -> list[Parameter]:
    chosen = recipe_named(recipe, config)
    return [
        parameter
        for parameter in parameters(config)
        if chosen.format_of(parameter).activation == "NVFP4"
    ]


def records(config: Config) -> dict[str, Amax]:
    return {parameter.name: Amax(1.0 + i / 8, 10) for i, parameter in enumerate(wanted(config))}


def test_the_file_round_trips(tmp_path: Path) -> None:
    calibration = Calibration.from_records(records(TINY_V4))
    (tmp_path / FILE).write_bytes(calibration.to_bytes())
    assert Calibration.load(tmp_path) == calibration
    assert Calibration.load(tmp_path / FILE).fingerprint == calibration.fingerprint
    raw = json.loads(calibration.to_bytes())
    assert raw["format"] == "degarble-amax"
    assert raw["linears"]["layers.0.attn.wq_a"] == {"amax": 1.0, "tokens": 10}


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"format": "degarble-amax", "version": 2, "linears": {}}',
        '{"format": "degarble-amax", "version": 1}',
        '{"format": "degarble-amax", "version": 1, "linears": {"a": 3}}',
        '{"format": "degarble-amax", "version": 1, "linears": {"a": {"amax": 1}}}',
        '{"format": "degarble-amax", "version": 1, "linears": {"a": {"amax": true, "tokens": 1}}}',
        '{"format": "degarble-amax", "version": 1, "linears": {"a": {"amax": 1, "tokens": -1}}}',
        '{"format": "degarble-amax", "version": 1, "linears": {"a": {"amax": 0, "tokens": 4}}}',
        '{"format": "degarble-amax", "version": 1, "linears": {"a": {"amax": -1, "tokens": 4}}}',
        '{"format": "degarble-amax", "version": 1, "linears": {"a": {"amax": 1e39, "tokens": 4}}}',
        '{"format": "degarble-amax", "version": 1, "linears": {"a": {"amax": "1", "tokens": 4}}}',
        '{"format": "degarble-amax", "version": 1, "linears": {}} x',
        "not json",
    ],
)
def test_a_file_with_other_content_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises((UnreadableFile, InvalidArgument)):
        Calibration.load(tmp_path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="--amax-only"):
        Calibration.load(tmp_path)
    with pytest.raises(Refused):
        Calibration.load(tmp_path / "nowhere")


def test_two_runs_join() -> None:
    one = Calibration.from_records({"a": Amax(2.0, 3), "b": Amax(1.0, 1)})
    two = Calibration.from_records({"a": Amax(1.5, 4), "c": Amax(0.0, 0)})
    assert one.merged(two).records == {"a": (2.0, 7), "b": (1.0, 1), "c": (0.0, 0)}


def scale_of(config: Config, given: dict[str, Amax], name: str) -> Any:
    input_scales = InputScales(config, Calibration.from_records(given), wanted(config))
    return input_scales.scale_of(parameter_named(config, name))


def test_partners_take_the_larger_amax() -> None:
    given = records(TINY_V4)
    given["layers.0.ffn.experts.1.w1"] = Amax(5.0, 9)
    given["layers.0.ffn.experts.1.w3"] = Amax(7.0, 9)
    one = scale_of(TINY_V4, given, "layers.0.ffn.experts.1.w1")
    three = scale_of(TINY_V4, given, "layers.0.ffn.experts.1.w3")
    assert one.scale == three.scale == float(np.float32(7) / np.float32(2688))
    assert (one.origin, three.origin) == (ScaleOrigin.PARTNER, ScaleOrigin.MEASURED)


@pytest.mark.parametrize("absent", [False, True], ids=["no tokens", "no record"])
def test_an_unreached_expert_takes_the_largest_of_its_projection(absent: bool) -> None:
    given = records(TINY_V4)
    names = [f"layers.1.ffn.experts.2.{each}" for each in ("w1", "w3", "w2")]
    for name in names:
        given.pop(name) if absent else given.__setitem__(name, Amax(0.0, 0))
    given["layers.2.ffn.experts.0.w1"] = Amax(96.0, 4)
    given["layers.0.ffn.experts.0.w2"] = Amax(64.0, 4)
    assert [scale_of(TINY_V4, given, name)[1:] for name in names] == [
        (96.0, 0, ScaleOrigin.UNREACHED),
        (96.0, 0, ScaleOrigin.UNREACHED),
        (64.0, 0, ScaleOrigin.UNREACHED),
    ]


def test_the_experts_of_a_v32_layer_share_one() -> None:
    given = records(TINY_V32)
    given["layers.1.ffn.experts.3.w1"] = Amax(50.0, 2)
    given["layers.1.ffn.experts.0.w1"] = Amax(0.0, 0)
    found = [scale_of(TINY_V32, given, f"layers.1.ffn.experts.{e}.w3").amax for e in range(4)]
    assert found == [50.0] * 4
    assert scale_of(TINY_V32, given, "layers.1.ffn.experts.0.w1").origin is ScaleOrigin.LAYER


def test_what_cannot_be_answered_is_refused() -> None:
    given = records(TINY_V4)
    missing = {name: amax for name, amax in given.items() if name != "layers.0.attn.wq_a"}
    with pytest.raises(InvalidArgument, match=r"layers\.0\.attn\.wq_a"):
        scale_of(TINY_V4, missing, "layers.0.attn.wq_b")
    with pytest.raises(InvalidArgument, match=r"layers\.9\.attn\.wq_a.*with the model that"):
        scale_of(TINY_V4, given | {"layers.9.attn.wq_a": Amax(1.0, 1)}, "layers.0.attn.wq_b")
    with pytest.raises(InvalidArgument, match="no linear"):
        scale_of(TINY_V4, given | {"norm": Amax(1.0, 1)}, "layers.0.attn.wq_b")
    nobody = {name: amax for name, amax in given.items() if ".experts." not in name}
    with pytest.raises(InvalidArgument, match="no expert in any layer"):
        scale_of(TINY_V4, nobody, "layers.0.ffn.experts.0.w2")


# --------------------------------------------------------------------------------------------------
# The report: facts of shards in any order make the same bytes, and what matters stands on top.


def facts() -> list[ShardFacts]:
    one, two = ShardFacts(), ShardFacts()
    exact = GroupScale(0.5, None, True, Exponents(0, 7), "")
    plain = GroupScale(0.25, 3.0, False, None, "exponents from 0 to 40")
    one.add_nvfp4("a", "MXFP4", 300, exact, Errors())
    one.add_nvfp4("b", "MXFP4", 100, plain, Errors(100.0, 1.0, 1.0, 0.25))
    two.add_nvfp4(
        "c", "BF16", 100, plain._replace(amax=0.0, why_not=""), Errors(4.0, 1.0, 2.0, 2.0)
    )
    two.add_input("c", InputScale(0.1, 268.8, 0, ScaleOrigin.UNREACHED))
    two.add_plain("norm", "copied", "F32", "BF16", 7)
    one.add_plain("embed", "copied", "BF16", "BF16", 0)
    return [one, two]


def test_the_report_says_what_happened() -> None:
    raw = json.loads(report_bytes({"recipe": "mine"}, facts()))
    assert raw["recipe"] == "mine"
    assert raw["counts"] == {
        "copied": 1,
        "copied: F32 to BF16": 1,
        "lossless: MXFP4 to NVFP4": 1,
        "quantised: BF16 to NVFP4": 1,
        "quantised: MXFP4 to NVFP4": 1,
    }
    assert raw["lossless"] == {"weights": 2, "exact": 1, "share_of_elements": 0.75}
    assert raw["flagged"] == {
        "unreached_experts": ["c"],
        "not_lossless": {"b": "exponents from 0 to 40"},
        "zero_weights": ["c"],
        "rounded_to_a_narrower_dtype": {"norm": 7},
    }
    assert raw["worst"] == [
        {"weight": "b", "over_floor": 2.0, "relative_error": 0.1},
        {"weight": "c", "over_floor": 1.0, "relative_error": 0.5},
    ]
    assert raw["weights"]["a"]["relative_error"] == 0.0


def test_order_and_travel_change_nothing() -> None:
    one, two = facts()
    travelled = [ShardFacts.from_bytes(shard_facts.to_bytes()) for shard_facts in (two, one)]
    assert None not in travelled
    assert report_bytes({}, filter(None, travelled)) == report_bytes({}, facts())


@pytest.mark.parametrize("swapped", [False, True])
def test_a_weight_and_its_input_scale_may_lie_in_two_shards(swapped: bool) -> None:
    one, two = ShardFacts(), ShardFacts()
    plain = GroupScale(0.25, 3.0, False, None, "")
    one.add_nvfp4("a", "BF16", 100, plain, Errors(100.0, 1.0, 1.0, 0.25))
    two.add_input("a", InputScale(0.1, 268.8, 7, ScaleOrigin.UNREACHED))
    raw = json.loads(report_bytes({}, (two, one) if swapped else (one, two)))
    assert raw["weights"]["a"]["action"] == "quantised"
    assert raw["weights"]["a"]["input_amax"] == 268.8
    assert raw["flagged"]["unreached_experts"] == ["a"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"weights": {}}', '{"weights": {"a": 1}, "counts": {}, "rounded": {}}']
)
def test_facts_that_no_shard_left_are_none(text: str) -> None:
    assert ShardFacts.from_bytes(text.encode()) is None
