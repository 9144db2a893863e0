"""Conversions between number formats keep their promise, and planted faults are detected."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, LayoutMismatch
from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.checkpoint.audit.structure.structure import audit_structure
from degarble.harness.checkpoint.transform import recode
from degarble.harness.checkpoint.transform import source as reading
from degarble.harness.checkpoint.transform.convert.job import convert, prove
from degarble.harness.checkpoint.transform.quantise.job import (
    QuantiseJob,
    target_layout,
    weight_only,
)
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.formats.codec import pack_nibbles, unpack_nibbles
from degarble.harness.formats.dialects import CANONICAL, MODELOPT
from degarble.harness.formats.number_formats import NVFP4, NibbleOrder
from degarble.harness.formats.quantise import quantise
from degarble.harness.formats.weight import Weight
from degarble.harness.model.recipes import recipe_named
from degarble.harness.model.tensors import PartKind
from degarble.suites.checkpoint.converting_cases import KINDS, broken, converted, damage, source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from degarble.harness.checkpoint.view.stored import StoredWeight


MODULE = "layers.0.attn.wq_a"  # renamed: transformers reads released names
HF = "model.layers.0.self_attn.q_a_proj"


@pytest.mark.parametrize(
    "kind", ["official", "nvfp4-full", "nvfp4-experts", "compressed-tensors", "v32", "v32-nvfp4"]
)
def test_every_dialect_is_decoded_in_its_own_direction(kind: str, tmp_path: Path) -> None:
    proof = converted(kind, tmp_path / "out", "bf16")
    assert proof.holds, list(proof.lines())
    with Checkpoint.open(source(kind)) as before, Checkpoint.open(tmp_path / "out") as after:
        assert not after.quantisation
        assert before.names is not None
        for name in before.names.present:
            values = before.stored(name).weight().values(torch.bfloat16)
            assert after.stored(name).format is None
            assert torch.equal(after.stored(name).weight().values(torch.bfloat16), values), name


def test_fp8_and_mxfp4_of_power_of_two_scales_lose_nothing(tmp_path: Path) -> None:
    proof = converted("official", tmp_path / "out", "bf16")
    assert proof.exact == len(proof.tensors)


def test_some_modules_alone(tmp_path: Path) -> None:
    """Origin, part A: fused_wqa_wkv, wo_b, shared experts and compressors, and no other."""
    only = ("*.attn.wq_a", "*.attn.wkv", "*.attn.wo_b", "*shared_experts*", "*.compressor.*")
    proof = converted("nvfp4-full", tmp_path / "out", "bf16", only=only)
    assert proof.holds
    with Checkpoint.open(tmp_path / "out") as after:
        formats = {
            name: after.stored(name).format
            for name in ("layers.0.attn.wo_b", "layers.0.attn.wq_b", "layers.1.ffn.experts.2.w1")
        }
        assert [fmt and fmt.name for fmt in formats.values()] == [None, "NVFP4", "NVFP4"]
        ignored = after.quantisation["config.json"]["ignore"]
    assert "layers.0.attn.wo_b" in ignored
    assert "layers.0.attn.wq_b" not in ignored


def test_input_scales_are_left_out_and_reported(tmp_path: Path) -> None:
    proof = converted("nvfp4-full", tmp_path / "out", "bf16")
    assert f"{HF}.input_scale" in proof.left_out
    told = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert sum(told["left_out"].values()) == len(proof.left_out)
    with Checkpoint.open(tmp_path / "out") as after:
        assert not any(name.endswith("input_scale") for name in after.entries)


def _swapped_nibbles(record: Weight) -> Weight:
    assert record.codes is not None
    wrong = pack_nibbles(unpack_nibbles(record.codes), NibbleOrder.HIGH_EVEN)
    return _with(record, codes=wrong)


def _with(record: Weight, **fields: object) -> Weight:
    parts = {
        name: getattr(record, name)
        for name in ("codes", "block_scale", "tensor_scale", "input_scale", "storage")
    }
    return Weight(**(parts | fields))


FAULTS: dict[str, Callable[[Weight], Weight]] = {
    "wrong nibble": _swapped_nibbles,
    "scale inverted": lambda w: _with(w, tensor_scale=w.tensor_scale.reciprocal()),  # type: ignore[union-attr]
    "input scale multiplied in": lambda w: _with(w, tensor_scale=w.tensor_scale * w.input_scale),  # type: ignore[operator]
    "all-ones scale": lambda w: _with(w, block_scale=torch.full_like(w.block_scale, 0x38)),  # type: ignore[arg-type]
    "sign lost": lambda w: _with(w, codes=w.codes & 0x77),  # type: ignore[operator]
    "code 7 read as 4": lambda w: _with(w, codes=_edge(w.codes)),  # type: ignore[arg-type]
}


def _edge(packed: torch.Tensor) -> torch.Tensor:
    codes = unpack_nibbles(packed)
    return pack_nibbles(torch.where(codes & 7 == 7, codes - 1, codes))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_decoder_is_detected(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(weight: StoredWeight) -> Iterator[tuple[int, Weight]]:
        for begin, record in honest(weight):
            yield begin, FAULTS[fault](record) if record.is_quantised else record

    honest = reading.rows_of
    with monkeypatch.context() as planted:
        planted.setattr(recode, "rows_of", wrong)
        convert(source("nvfp4-full"), tmp_path / "out", "bf16", {"only": (MODULE,)})
    assert broken("nvfp4-full", tmp_path / "out") == [MODULE]


def test_one_wrong_element_is_detected_and_placed(tmp_path: Path) -> None:
    converted("nvfp4-full", tmp_path / "out", "bf16")

    def wrong(values: torch.Tensor) -> torch.Tensor:
        values[100, 7] += 1.0
        return values

    damage(tmp_path / "out", f"{MODULE}.weight", wrong)
    (proof,) = prove(source("nvfp4-full"), tmp_path / "out").broken
    assert (proof.tensor, proof.beyond) == (MODULE, 1)
    assert proof.worst is not None
    assert proof.worst.coordinate == (100, 7)


def test_a_damaged_copy_is_detected(tmp_path: Path) -> None:
    converted("nvfp4-full", tmp_path / "out", "bf16")
    damage(tmp_path / "out", "norm.weight", lambda values: values * 2)
    assert broken("nvfp4-full", tmp_path / "out") == ["norm.weight"]


def test_nothing_to_do_and_unreached_patterns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="nothing"):
        convert(source("bf16"), tmp_path / "out", "bf16")
    with pytest.raises(InvalidArgument, match="patterns that reach a linear"):
        convert(source("official"), tmp_path / "out", "bf16", {"only": ("*.q_proj",)})
    assert not (tmp_path / "out").exists()


FP8_BLOCK_MODULE = "layers.0.attn.wo_a"


@pytest.mark.parametrize("scale", ["fp32", "ue8m0"])
@pytest.mark.parametrize("kind", ["nvfp4-full", "compressed-tensors", "bf16", "official"])
def test_each_source_becomes_fp8(kind: str, scale: str, tmp_path: Path) -> None:
    proof = converted(kind, tmp_path / "out", "fp8-block", scale=scale)
    assert proof.holds, list(proof.lines())
    name = "layers.0.attn.wq_b"
    with Checkpoint.open(source(kind)) as before, Checkpoint.open(tmp_path / "out") as after:
        fmt = after.stored(name).format
        assert fmt is not None
        assert fmt.name == {"fp32": "FP8_128X128_F32", "ue8m0": "FP8_128X128_UE8M0"}[scale]
        if before.stored(name).format is None or kind == "nvfp4-full":
            made = quantise(before.stored(name).values(), fmt, CANONICAL)
            assert torch.equal(after.weight(name).codes, made.codes)  # type: ignore[arg-type]
            assert torch.equal(after.weight(name).block_scale, made.block_scale)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["bf16", "official", "v32"])
def test_the_output_is_what_its_config_says(kind: str, tmp_path: Path) -> None:
    """V4's FP8 experts have fp32 scales, and a word of their own in the config."""
    assert converted(kind, tmp_path / "out", "fp8-block").holds
    with Checkpoint.survey(tmp_path / "out") as after:
        assert not [finding for finding in audit_structure(after) if finding.level is Level.ERROR]
        if kind != "v32":
            assert after.config["expert_dtype"] == "fp8"
            experts = after.stored("layers.0.ffn.experts.0.w1").format
            assert experts is not None
            assert experts.name == "FP8_128X128_F32"


def test_scale_formats_change_both_ways_without_loss(tmp_path: Path) -> None:
    """V3.2 has powers of two in fp32: to UE8M0 and back yields its bytes."""
    first = converted("v32", tmp_path / "e8m0", "fp8-block")
    assert first.exact == len(first.tensors)
    convert(tmp_path / "e8m0", tmp_path / "fp32", "fp8-block", {"scale": "fp32"})
    assert prove(tmp_path / "e8m0", tmp_path / "fp32").holds
    with Checkpoint.open(source("v32")) as before, Checkpoint.open(tmp_path / "fp32") as after:
        assert before.entries.keys() == after.entries.keys()
        assert all(before.raw(name) == after.raw(name) for name in before.entries)


def test_mxfp4_experts_become_fp8_exactly(tmp_path: Path) -> None:
    proof = converted("official", tmp_path / "out", "fp8-block", only=("*.experts.*",))
    assert proof.exact == len(proof.tensors) > 0


def test_all_ones_scales_are_detected_even_where_codes_fit_them(tmp_path: Path) -> None:
    """Origin, fault 5: on a grid of step one, values stay within half a step and are lost."""
    converted("nvfp4-full", tmp_path / "out", "fp8-block", scale="fp32", only=(FP8_BLOCK_MODULE,))
    with Checkpoint.open(source("nvfp4-full")) as before:
        values = before.stored(FP8_BLOCK_MODULE).values()
    ones = values.to(torch.float8_e4m3fn)
    damage(tmp_path / "out", f"{FP8_BLOCK_MODULE}.weight", lambda _: ones)
    damage(tmp_path / "out", f"{FP8_BLOCK_MODULE}.scale", torch.ones_like)
    (proof,) = prove(source("nvfp4-full"), tmp_path / "out").broken
    assert proof.beyond == 0
    assert "scales are not the largest magnitude over 448" in proof.faults[0]


@pytest.mark.parametrize("scale", ["fp32", "ue8m0"])
def test_scales_of_ones_alone_are_detected(scale: str, tmp_path: Path) -> None:
    converted("nvfp4-full", tmp_path / "out", "fp8-block", scale=scale, only=(FP8_BLOCK_MODULE,))
    ones = {"fp32": torch.ones_like, "ue8m0": lambda t: torch.full_like(t.view(torch.uint8), 127)}
    damage(tmp_path / "out", f"{FP8_BLOCK_MODULE}.scale", ones[scale])
    assert broken("nvfp4-full", tmp_path / "out") == [FP8_BLOCK_MODULE]


def test_reciprocal_and_shifted_scales_are_detected(tmp_path: Path) -> None:
    converted("bf16", tmp_path / "out", "fp8-block", scale="fp32", only=("layers.0.attn.wq_b",))
    name = "layers.0.attn.wq_b.scale"
    damage(tmp_path / "out", name, torch.reciprocal)
    assert broken("bf16", tmp_path / "out") == ["layers.0.attn.wq_b"]
    damage(tmp_path / "out", name, lambda scale: scale.reciprocal() * 2)
    assert broken("bf16", tmp_path / "out") == ["layers.0.attn.wq_b"]


@pytest.mark.parametrize("kind", ["official", "bf16", "v32"])
def test_weights_are_quantised_as_modelopt_does_with_shared_scales(
    kind: str, tmp_path: Path
) -> None:
    proof = converted(kind, tmp_path / "out", "nvfp4")
    assert proof.holds, list(proof.lines())
    names = [f"layers.1.ffn.experts.1.{part}" for part in ("w1", "w3")]
    with Checkpoint.open(source(kind)) as before, Checkpoint.open(tmp_path / "out") as after:
        values = [before.stored(name).values() for name in names]
        amax = torch.stack([value.abs().max() for value in values]).max()
        for name, own in zip(names, values, strict=True):
            made, weight = quantise(own, NVFP4, MODELOPT, amax=amax), after.weight(name)
            assert torch.equal(weight.codes, made.codes)  # type: ignore[arg-type]
            assert torch.equal(weight.block_scale, made.block_scale)  # type: ignore[arg-type]
            assert weight.tensor_scale == made.tensor_scale
            assert weight.input_scale is None


def _doubled(scale: torch.Tensor) -> torch.Tensor:
    return scale.float().mul(2).to(scale.dtype)


def test_wrong_nibbles_and_wrong_tensor_scales_are_detected(tmp_path: Path) -> None:
    converted("v32", tmp_path / "out", "nvfp4", only=("layers.1.ffn.experts.*",))
    stem = "model.layers.1.mlp.experts.0"
    damage(tmp_path / "out", f"{stem}.gate_proj.weight", lambda c: c // 16 + c % 16 * 16)
    damage(tmp_path / "out", f"{stem}.up_proj.weight_scale_2", torch.reciprocal)
    damage(
        tmp_path / "out", f"{stem}.down_proj.weight_scale", lambda s: s.float().mul(2).to(s.dtype)
    )
    parts = ("gate_proj", "up_proj", "down_proj")
    assert sorted(broken("v32", tmp_path / "out")) == sorted(f"{stem}.{part}" for part in parts)


@pytest.mark.parametrize("to", ["nvfp4", "nvfp4-lossless"])
def test_weights_alone_are_declared_as_such(to: str, tmp_path: Path) -> None:
    """Told NVFP4, engines would read an input_scale that is not there."""
    assert converted("official", tmp_path / "out", to).holds
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert not any(name.endswith("input_scale") for name in checkpoint.entries)
        for stated in checkpoint.quantisation.values():
            text = json.dumps(stated)
            assert "W4A16_NVFP4" in text
            assert '"NVFP4"' not in text
            assert "input_activations" not in text
        assert not [
            finding for finding in audit_structure(checkpoint) if finding.level is Level.ERROR
        ]


def test_weight_only_formats_are_never_mixed_with_quantised_activations(tmp_path: Path) -> None:
    with pytest.raises(LayoutMismatch, match="without input scales"):
        converted("nvfp4-experts", tmp_path / "out", "nvfp4")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["bf16", "v32"])
def test_bytes_are_those_of_quantise(kind: str, tmp_path: Path) -> None:
    converted(kind, tmp_path / "out", "nvfp4")
    config, _ = KINDS[kind]
    recipe = weight_only(recipe_named("nvfp4-full", config))
    job = QuantiseJob(source(kind), target_layout(config, recipe), lossless=False)
    job.run(tmp_path / "quantised")
    compared = 0
    with (
        Checkpoint.open(tmp_path / "out") as ours,
        Checkpoint.open(tmp_path / "quantised") as theirs,
    ):
        assert ours.names is not None
        assert theirs.names is not None
        for name in ours.names.present.keys() & theirs.names.present.keys():
            one, other = ours.stored(name), theirs.stored(name)
            if one.format == NVFP4:
                compared += 1
                assert other.format == NVFP4
                for part in (PartKind.CODES, PartKind.BLOCK_SCALE, PartKind.TENSOR_SCALE):
                    pair = (
                        ours.raw(one.form.parts[part].name),
                        theirs.raw(other.form.parts[part].name),
                    )
                    assert pair[0] == pair[1], (name, part)
    assert compared >= 20


def test_no_value_changes_and_codes_stay(tmp_path: Path) -> None:
    proof = converted("official", tmp_path / "out", "nvfp4-lossless")
    assert proof.holds
    assert proof.exact == len(proof.tensors) > 0
    with Checkpoint.open(source("official")) as before, Checkpoint.open(tmp_path / "out") as after:
        first = "layers.0.ffn.experts.0"
        assert after.raw(f"{first}.w1.weight") == before.raw(f"{first}.w1.weight")
        scales = [after.weight(f"{first}.{part}").tensor_scale for part in ("w1", "w3")]
        assert scales[0] == scales[1]
        assert after.quantisation["config.json"]["moe_quant_algo"] == "W4A16_NVFP4"


def test_a_scale_off_by_one_exponent_is_detected(tmp_path: Path) -> None:
    converted("official", tmp_path / "out", "nvfp4-lossless")
    name = "layers.0.ffn.experts.0.w2"
    damage(tmp_path / "out", f"{name}.weight_scale_2", lambda scale: scale * 2)
    assert broken("official", tmp_path / "out") == [name]


def copied(tmp_path: Path) -> Path:
    target = tmp_path / "in"
    target.mkdir()
    for path in source("official").iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize("apart", [6, 20])
def test_partners_are_judged_together(apart: int, tmp_path: Path) -> None:
    """w1 and w3 share a tensor scale: far apart they are refused, otherwise nothing is lost."""
    changed = copied(tmp_path)
    stem = "layers.0.ffn.experts.1"
    damage(changed, f"{stem}.w3.scale", lambda scale: scale.view(torch.uint8) - apart)
    if apart > 17:
        with pytest.raises(LayoutMismatch, match=r"experts\.1\.w1, layers\.0\.ffn\.experts\.1\.w3"):
            convert(changed, tmp_path / "out", "nvfp4-lossless")
        assert not (tmp_path / "out").exists()
        return
    convert(changed, tmp_path / "out", "nvfp4-lossless")
    assert prove(changed, tmp_path / "out").holds
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert (
            checkpoint.weight(f"{stem}.w1").tensor_scale
            == checkpoint.weight(f"{stem}.w3").tensor_scale
        )


def test_exponents_too_far_apart_are_refused_by_name(tmp_path: Path) -> None:
    config_source = copied(tmp_path)

    def deep(scale: torch.Tensor) -> torch.Tensor:
        codes = scale.view(torch.uint8)
        codes[3, 1] = int(codes.max()) - 30
        return codes

    damage(config_source, "layers.0.ffn.experts.1.w2.scale", deep)
    with pytest.raises(LayoutMismatch, match=r"exponents of layers\.0\.ffn\.experts\.1\.w2"):
        convert(config_source, tmp_path / "out", "nvfp4-lossless")
    assert not (tmp_path / "out").exists()


def test_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutMismatch, match="none in MXFP4"):
        convert(source("nvfp4-full"), tmp_path / "out", "nvfp4-lossless")
