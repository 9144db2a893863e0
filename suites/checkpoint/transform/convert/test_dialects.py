"""FP8, NVFP4, MXFP4 and MXFP8 change their dialect: no value changes unless a user asks."""

from __future__ import annotations

import json
from copy import copy
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, LayoutMismatch, Refused, UnknownName
from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.checkpoint.transform.convert.dialects import divisor_of
from degarble.harness.checkpoint.transform.convert.job import convert, job_for, prove
from degarble.harness.checkpoint.transform.units import ONE_ULP
from degarble.harness.checkpoint.view.quantisation_configs import InputFormats
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.checkpoint.write.writer import begin
from degarble.harness.commands.audit.audit import AuditRequest, audit
from degarble.suites.checkpoint.view.integer_cases import write

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

_MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")
_EXACT, _MOVED = 2.0**-14, float(np.float32(2.0**-14 * 1.75))  # without and with a next divisor
_FP8 = torch.float8_e4m3fn


def _module(fmt: str, seed: int, factor: float, rows: int = 160, width: int = 256) -> Any:
    """Return codes and scales of a matrix as ModelOpt stores them."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int, low: int = 0, high: int = 256) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    codes = numbers(rows, width)
    codes = torch.where(codes & 127 == 127, codes & 128, codes)  # no NaN
    scale = torch.tensor(factor)
    fields: dict[str, Tensor] = {"weight": codes.view(_FP8), "weight_scale": scale}
    if "NVFP4" in fmt:
        blocks = numbers(rows, width // 16, low=40, high=126).view(_FP8)
        fields = {"weight": numbers(rows, width // 2), "weight_scale": blocks}
        fields["weight_scale_2"] = scale
    elif fmt.startswith("MXFP"):
        codes = numbers(rows, width // 2) if fmt == "MXFP4" else codes.view(_FP8)
        fields = {"weight": codes, "weight_scale": numbers(rows, width // 32, low=110, high=130)}
    elif fmt == "FP8_PER_CHANNEL_PER_TOKEN":
        fields["weight_scale"] = torch.rand(rows, generator=generator) + 0.1
    elif fmt == "FP8_PB_WO":
        scales = torch.rand(-(-rows // 128), 1, width // 128, 1, generator=generator)
        fields["weight_scale"] = scales + 0.1
    if fmt in {"NVFP4", "FP8"}:
        fields["input_scale"] = torch.tensor(2.0**-9 * 1.25)
    return fields


def _modelopt(folder: Path, fmt: str, factor: float = _EXACT, **stated: Any) -> Path:
    tensors = {"model.norm.weight": torch.ones(256), "lm_head.weight": torch.ones(8, 256)}
    for seed, module in enumerate(_MODULES):
        fields = _module(fmt, seed, factor)
        tensors |= {f"{module}.{part}": tensor for part, tensor in fields.items()}
    told = {"quant_method": "modelopt", "quant_algo": fmt, "ignore": ["lm_head"]}
    return write(folder, tensors, {**told, **stated})


def _bytes(folder: Path) -> dict[str, bytes]:
    with Checkpoint.open(folder) as checkpoint:
        return {name: bytes(checkpoint.raw(name)) for name in checkpoint.entries}


def _stated(folder: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return raw


def _alarms(folder: Path) -> set[str]:
    findings = audit(AuditRequest(folder)).findings
    return {str(each.rule) for each in findings if each.level is not Level.NOTE}


FORMATS = ("NVFP4", "W4A16_NVFP4", "MXFP4", "MXFP8", "FP8", "FP8_PER_CHANNEL_PER_TOKEN",
           "FP8_PB_WO")  # fmt: skip


@pytest.mark.parametrize("fmt", FORMATS)
def test_there_and_back_restores_every_byte(tmp_path: Path, fmt: str) -> None:
    source = _modelopt(tmp_path / "source", fmt)
    convert(source, tmp_path / "ct", "compressed-tensors")
    convert(tmp_path / "ct", tmp_path / "back", "modelopt")
    for before, after in ((source, tmp_path / "ct"), (tmp_path / "ct", tmp_path / "back")):
        proof = prove(before, after)
        assert proof.holds, list(proof.lines())
        assert proof.exact == len(proof.tensors) == 2
    assert _bytes(source) == _bytes(tmp_path / "back")
    assert _stated(tmp_path / "back")["quant_algo"] == fmt
    assert _stated(tmp_path / "ct")["ignore"] == ["lm_head"]
    # What inputs become is stated alike, and the audit finds nothing that the source has not.
    for folder in (tmp_path / "ct", tmp_path / "back"):
        with Checkpoint.open(source) as one, Checkpoint.open(folder) as other:
            formats = {
                InputFormats(each.quantisation.values()).of(_MODULES[0], "FP8_ROW")
                for each in (one, other)
            }
        assert len(formats) == 1
        assert _alarms(folder) == _alarms(source)


@pytest.mark.slow  # its import takes ten seconds
@pytest.mark.needs("compressed_tensors")
def test_compressed_tensors_reads_what_is_written(tmp_path: Path) -> None:
    registry = import_module("compressed_tensors.compressors.base").BaseCompressor
    config_class = import_module("compressed_tensors.quantization").QuantizationConfig
    for fmt in FORMATS:
        source, made = _modelopt(tmp_path / fmt / "source", fmt), tmp_path / fmt / "made"
        convert(source, made, "compressed-tensors")
        read = config_class.model_validate(_stated(made))
        (group,) = read.config_groups.values()
        assert group.targets == ["Linear"]
        compressor = registry.get_value_from_registry(group.format)
        with Checkpoint.open(source) as one, Checkpoint.open(made) as other:
            for module in _MODULES:
                named = {name.removeprefix(f"{module}."): other.tensor(name)
                         for name in other.entries if name.startswith(f"{module}.")}  # fmt: skip
                wanted = set(compressor.compression_param_names(group))
                if group.input_activations is not None and fmt in {"NVFP4", "FP8"}:
                    assert {name for name in named if name.startswith("input_")}
                assert wanted - {"input_global_scale"} <= named.keys()
                values = compressor.decompress(dict(named), group)["weight"].double()
                ours = one.weight(module).values(torch.float64)
                # Its sums of NVFP4 are in bfloat16, three roundings; the others in float32.
                near = 3 * 2.0**-8 if "NVFP4" in fmt else 2.0**-22
                assert bool(((values - ours).abs() <= near * ours.abs()).all()), fmt


def test_mixed_precision_and_caches_are_stated_by_name(tmp_path: Path) -> None:
    first, second = _MODULES
    layers = {first: {"quant_algo": "NVFP4", "group_size": 16}, second: {"quant_algo": "FP8"}}
    projection = "model.layers.0.self_attn.k_proj"
    tensors = {"lm_head.weight": torch.ones(8, 256), f"{projection}.weight": torch.ones(8, 256)}
    tensors |= {f"{first}.{part}": each for part, each in _module("NVFP4", 0, _EXACT).items()}
    tensors |= {f"{second}.{part}": each for part, each in _module("FP8", 1, 0.3).items()}
    tensors[f"{projection}.k_scale"] = torch.tensor(0.25)
    told = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers,
            "kv_cache_quant_algo": "FP8"}  # fmt: skip
    source = write(tmp_path / "source", tensors, told)
    convert(source, tmp_path / "ct", "compressed-tensors")
    convert(tmp_path / "ct", tmp_path / "back", "modelopt")
    stated = _stated(tmp_path / "ct")
    assert stated["format"] == "mixed-precision"
    targets = {each["format"]: each["targets"] for each in stated["config_groups"].values()}
    assert targets == {"nvfp4-pack-quantized": [first], "float-quantized": [second]}
    assert stated["kv_cache_scheme"]["type"] == "float"
    assert stated["ignore"] == ["lm_head", projection]
    assert "model.layers.0.self_attn.k_scale" in _bytes(tmp_path / "ct")
    assert _bytes(source) == _bytes(tmp_path / "back")
    assert _stated(tmp_path / "back")["quantized_layers"] == layers
    beside = json.loads((tmp_path / "back" / "hf_quant_config.json").read_text())
    assert beside["quantization"]["kv_cache_quant_algo"] == "FP8"
    assert all(prove(*pair).holds for pair in ((source, tmp_path / "ct"),
                                               (tmp_path / "ct", tmp_path / "back")))  # fmt: skip
    with pytest.raises(LayoutMismatch, match="2 of 2 modules, to finegrained-fp8"):
        convert(source, tmp_path / "fine", "finegrained-fp8")


def test_scales_without_a_divisor_are_refused_and_rounded_on_request(tmp_path: Path) -> None:
    source = _modelopt(tmp_path / "it's", "NVFP4", _MOVED)
    with pytest.raises(LayoutMismatch, match="2 scales of NVFP4") as refused:
        convert(source, tmp_path / "made", "compressed-tensors")
    assert "q_proj.weight_scale_2" in str(refused.value.value)
    assert "--tensor-scales nearest" in refused.value.remedy
    assert """'"'"'""" in refused.value.remedy
    assert not (tmp_path / "made").exists()
    convert(source, tmp_path / "made", "compressed-tensors", {"tensor_scales": "nearest"})
    proof = prove(source, tmp_path / "made")
    assert proof.holds
    assert proof.exact == 0
    assert all(each.different > 0 and each.bound == ONE_ULP for each in proof.tensors)
    assert "elements of 2 modules moved, by one unit" in "\n".join(proof.lines())
    record = json.loads((tmp_path / "made" / "conversion.json").read_text())
    assert list(record["moved_scales"].values()) == [1.0, 1.0]
    # A divisor that is off by more than that breaks the promise.
    with Checkpoint.open(tmp_path / "made") as made:
        entry = made.entry(f"{_MODULES[0]}.weight_global_scale")
        raw = np.frombuffer(bytes(made.raw(entry.name)), np.float32)
    with entry.file.open("r+b") as file:
        file.seek(entry.begin)
        file.write(np.float32(raw * np.float32(1 + 2.0**-20)).tobytes())
    assert not prove(source, tmp_path / "made").holds
    with pytest.raises(UnknownName):
        convert(source, tmp_path / "other", "bf16", {"tensor_scales": "nearest"})


def test_divisors_are_exact_wherever_one_exists(seed: int) -> None:
    """Held to every float32 number near the reciprocal, for mantissas of a whole octave."""
    generator = np.random.default_rng(seed)
    mantissas = generator.integers(0, 1 << 23, 400, dtype=np.uint32)
    exponents = generator.integers(60, 190, 400, dtype=np.uint32)
    factors = ((exponents << np.uint32(23)) | mantissas).view(np.float32)
    exact = 0
    for factor in factors:
        middle = int((np.float32(1) / factor).view(np.uint32))
        near = np.arange(middle - 32, middle + 33, dtype=np.uint32).view(np.float32)
        exists = bool((np.float32(1) / near == factor).any())
        found = divisor_of(float(factor))
        assert (found.factor == float(factor)) == exists
        assert float(np.float32(1) / np.float32(found.divisor)) == found.factor
        assert abs(found.factor - float(factor)) <= float(np.spacing(factor))
        exact += exists
    assert 0.76 < exact / len(factors) < 0.90  # 0.83 is the share of all
    rounded = torch.tensor([33536.0, 400.0, 2688.0, 1.5625e4]).bfloat16().float()
    for divisor in rounded.tolist():  # as exporters compute them in bfloat16
        assert divisor_of(float(np.float32(1) / np.float32(divisor))).divisor == divisor


def test_what_a_dialect_cannot_state_is_refused_by_name(tmp_path: Path) -> None:
    blocks = _modelopt(tmp_path / "blocks", "FP8_PB_WO")
    cases = [
        (blocks, "finegrained-fp8", LayoutMismatch, "inputs as they are"),
        (_modelopt(tmp_path / "nvfp4", "NVFP4"), "finegrained-fp8", LayoutMismatch, "2 of 2"),
        (_modelopt(tmp_path / "zero", "NVFP4", 0.0), "compressed-tensors", InvalidArgument,
         "weight_scale_2"),
        (_modelopt(tmp_path / "cache", "NVFP4", kv_cache_quant_algo="NVFP4"),
         "compressed-tensors", LayoutMismatch, "the cache of keys"),
        (blocks, "modelopt", InvalidArgument, "nothing"),
    ]  # fmt: skip
    for source, to, kind, words in cases:
        with pytest.raises(kind, match=words) as refused:
            convert(source, tmp_path / "made", to)
        assert refused.value.remedy
        assert not (tmp_path / "made").exists()
    tensors = {f"a.{part}": each for part, each in _module("NVFP4", 0, _EXACT).items()}
    tensors["a.pre_quant_scale"] = torch.ones(256)
    told = {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}
    with pytest.raises(LayoutMismatch, match="factors of inputs"):
        convert(write(tmp_path / "awq", tensors, told), tmp_path / "made", "compressed-tensors")


def test_blocks_move_between_three_dialects(tmp_path: Path) -> None:
    tensors = {}
    for seed, module in enumerate(_MODULES):
        fields = _module("FP8_PB_WO", seed, 1.0)
        tensors[f"{module}.weight"] = fields["weight"]
        tensors[f"{module}.weight_scale_inv"] = fields["weight_scale"][:, 0, :, 0].contiguous()
    told = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    source = write(tmp_path / "source", tensors, told)
    convert(source, tmp_path / "ct", "compressed-tensors")
    convert(tmp_path / "ct", tmp_path / "back", "finegrained-fp8")
    assert prove(source, tmp_path / "ct").exact == prove(tmp_path / "ct", tmp_path / "back").exact
    assert _bytes(source) == _bytes(tmp_path / "back")
    assert _stated(tmp_path / "back")["weight_block_size"] == [128, 128]
    # Inputs in blocks have no word in ModelOpt that engines read.
    with pytest.raises(LayoutMismatch, match="FP8_1X128_F32"):
        convert(source, tmp_path / "mo", "modelopt")


@pytest.mark.parametrize("fmt", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"])
def test_decoding_is_proven_whatever_one_scale_covers(tmp_path: Path, fmt: str) -> None:
    source = _modelopt(tmp_path / "source", fmt, 0.3)
    convert(source, tmp_path / "plain", "bf16")
    assert prove(source, tmp_path / "plain").holds
    with Checkpoint.open(tmp_path / "plain") as made:
        entry = made.entry(f"{_MODULES[1]}.weight")
        raw = np.frombuffer(bytes(made.raw(entry.name)), np.uint16)
    with entry.file.open("r+b") as file:
        file.seek(entry.begin)
        file.write((raw ^ np.uint16(4)).tobytes())
    assert [each.tensor for each in prove(source, tmp_path / "plain").broken] == [_MODULES[1]]


def test_an_interrupted_conversion_is_finished_with_the_same_bytes(tmp_path: Path) -> None:
    source = _modelopt(tmp_path / "source", "NVFP4")
    job = job_for(source, "compressed-tensors")
    job.run(tmp_path / "whole", shard_bytes=30_000)
    plan = job.plan(30_000)
    assert len(plan.shards) > 1
    begin(tmp_path / "parts", plan)
    copy(job).make_shard(tmp_path / "parts", plan.shards[-1])
    with pytest.raises(Refused):
        Checkpoint.open(tmp_path / "parts")
    job.run(tmp_path / "parts", shard_bytes=30_000)
    assert _bytes(tmp_path / "whole") == _bytes(tmp_path / "parts")
