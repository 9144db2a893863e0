"""Every parameter of a model comes back, bit for bit, from every layout that can hold it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from degarble.harness.base.errors import ShapeMismatch, UnknownName
from degarble.harness.checkpoint.read.types import StoredLayout
from degarble.harness.checkpoint.view import view
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.model.config.config import V4Config
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.parameters import parameter_named, parameters
from degarble.harness.model.storage import Part
from degarble.suites.checkpoint.reading_cases import (
    TINY_V4,
    TINY_V32,
    header_of,
    make_model,
    write_model,
    write_raw,
)

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.model.config.config import Config

CASES = [
    (TINY_V4, "official", None, StoredLayout.OFFICIAL),
    (TINY_V4, "bf16", None, StoredLayout.BF16),
    (TINY_V4, "nvfp4-experts", None, StoredLayout.MODELOPT),
    (TINY_V4, "nvfp4-full", None, StoredLayout.MODELOPT),
    (TINY_V4, "transformers", None, StoredLayout.TRANSFORMERS),
    (TINY_V4, "vllm", None, StoredLayout.VLLM),
    (TINY_V4, "vllm", "nvfp4-experts", StoredLayout.VLLM),
    (TINY_V32, "official", None, StoredLayout.HF_FP8),
    (TINY_V32, "inference", None, StoredLayout.OFFICIAL),
    (TINY_V32, "bf16", None, StoredLayout.BF16),
    (TINY_V32, "nvfp4-experts", None, StoredLayout.MODELOPT),
    (TINY_V32, "nvfp4-full", None, StoredLayout.MODELOPT),
    (TINY_V32, "transformers", None, StoredLayout.TRANSFORMERS),
    (TINY_V32, "vllm", "bf16", StoredLayout.VLLM),
]


@pytest.mark.parametrize(("config", "name", "recipe", "summary"), CASES)
def test_every_parameter_comes_back(
    tmp_path: Path, seed: int, config: Config, name: str, recipe: str | None, summary: StoredLayout
) -> None:
    layout = layout_named(name, config)
    model = make_model(config, layout.with_recipe(recipe) if recipe else layout, seed)
    write_model(tmp_path, model)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.layout is summary
        assert checkpoint.model == config
        assert set(checkpoint.weights) == set(model.parts)
        assert len(checkpoint.weights) == len(model.parts)
        for parameter, parts in model.parts.items():
            weight = checkpoint.weights[parameter]
            fields = {
                Part.VALUE: weight.value,
                Part.CODES: weight.codes,
                Part.BLOCK_SCALE: weight.block_scale,
                Part.TENSOR_SCALE: weight.tensor_scale,
                Part.INPUT_SCALE: weight.input_scale,
            }
            for part, found in fields.items():
                assert (found is None) == (part not in parts), f"{parameter}: {part}"
                assert found is None or torch.equal(found, parts[part]), f"{parameter}: {part}"
            values = model.values[parameter]
            assert torch.equal(weight.values(values.dtype), values), parameter


def test_what_a_layout_leaves_out_is_not_there(tmp_path: Path, seed: int) -> None:
    model = make_model(TINY_V4, layout_named("nvfp4-full", TINY_V4), seed)
    write_model(tmp_path, model)
    checkpoint = Checkpoint.open(tmp_path)
    left_out = {each.name for each in parameters(TINY_V4)} - set(checkpoint.weights)
    assert left_out
    assert all(name.startswith("mtp.") for name in left_out)
    with pytest.raises(KeyError):
        checkpoint.weights["mtp.0.enorm"]
    with pytest.raises(UnknownName, match=r"layers\.0\.attn\.wq_a"):
        checkpoint.names.place("layers.0.attn.wq_c")  # type: ignore[union-attr]


def test_an_unknown_family_and_unknown_names_have_no_logical_names(
    tmp_path: Path, seed: int
) -> None:
    write_model(tmp_path, make_model(TINY_V32, layout_named("bf16", TINY_V32), seed))
    assert Checkpoint.open(tmp_path).names is not None
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": "llama"}))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.model is None
    assert checkpoint.names is None
    assert not checkpoint.weights
    assert "model.layers.0.self_attn.q_a_proj" in checkpoint.modules()
    (tmp_path / "config.json").unlink()
    assert Checkpoint.open(tmp_path).model is None


def test_names_of_another_model_are_not_taken_for_this_one(tmp_path: Path, seed: int) -> None:
    write_model(tmp_path, make_model(TINY_V32, layout_named("inference", TINY_V32), seed))
    raw = json.loads((tmp_path / "config.json").read_text())
    for path in tmp_path.glob("*.safetensors"):
        header = header_of(path)
        changed = {
            name if name.startswith("__") else f"something.else.{name}": each
            for name, each in header.items()
        }
        write_raw(path, changed, path.read_bytes()[-_data_size(header) :])
    (tmp_path / "model.safetensors.index.json").unlink()
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.model is not None
    assert raw["model_type"] == checkpoint.model.family
    assert checkpoint.names is None


def _data_size(header: dict[str, dict[str, Any]]) -> int:
    ends: list[int] = [each["data_offsets"][1] for each in header.values() if "shape" in each]
    return max(ends)


@pytest.mark.parametrize("name", ["nvfp4-full", "vllm", "transformers"])
def test_a_shape_that_the_config_does_not_imply_is_refused(
    tmp_path: Path, seed: int, name: str
) -> None:
    write_model(tmp_path, make_model(TINY_V4, layout_named(name, TINY_V4), seed))
    raw = json.loads((tmp_path / "config.json").read_text())
    larger = {"moe_intermediate_size": 2 * raw["moe_intermediate_size"]}
    (tmp_path / "config.json").write_text(json.dumps(raw | larger))
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(ShapeMismatch, match="as the config implies"):
        checkpoint.weight("layers.1.ffn.experts.0.w2")
    checkpoint.weight("layers.1.attn.wq_a")


def test_a_mixed_up_order_of_experts_would_be_seen(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(TINY_V4, layout_named("transformers", TINY_V4), seed)
    write_model(tmp_path, model)
    name = "layers.1.ffn.experts.1.w1"
    honest = view.LogicalNames.place

    def mixed_up(names: view.LogicalNames, wanted: str) -> view.ParameterLocation:
        return honest(names, wanted.replace(".1.w1", ".2.w1"))

    assert torch.equal(
        Checkpoint.open(tmp_path).weight(name).values(torch.float32), model.values[name].float()
    )
    monkeypatch.setattr(view.LogicalNames, "place", mixed_up)
    assert not torch.equal(
        Checkpoint.open(tmp_path).weight(name).values(torch.float32), model.values[name].float()
    )


def test_members_are_found_after_the_anatomy_forgot_them(tmp_path: Path, seed: int) -> None:
    """Anatomy keeps the parameters of a few configs; those made again are others, but equal."""
    write_model(tmp_path, make_model(TINY_V4, layout_named("vllm", TINY_V4), seed))
    with Checkpoint.open(tmp_path) as checkpoint:
        before = checkpoint.stored("layers.0.attn.wq_a")
        for extra in range(1, 12):
            parameter_named(replace(TINY_V4, vocab_size=TINY_V4.vocab_size + extra), "embed")
        after = checkpoint.stored("layers.0.attn.wq_a")
        assert after.boxes
        assert after.boxes == before.boxes
        assert torch.equal(after.values(), before.values())


def test_both_families_are_shown() -> None:
    assert {type(config) for config, *_ in CASES} == {V4Config, type(TINY_V32)}


def test_names_of_compressed_tensors_are_found_too(tmp_path: Path, seed: int) -> None:
    model = make_model(TINY_V32, layout_named("nvfp4-full", TINY_V32), seed)
    write_model(tmp_path, model, shards=1)
    path = next(tmp_path.glob("*.safetensors"))
    renamed = {}
    for name, tensor in load_file(path).items():
        module, _, suffix = name.rpartition(".")
        if suffix == "weight" and f"{name}_scale_2" in header_of(path):
            renamed[f"{module}.weight_packed"] = tensor
        elif suffix in ("weight_scale_2", "input_scale"):
            divisor = {"weight_scale_2": "weight_global_scale"}.get(suffix, "input_global_scale")
            renamed[f"{module}.{divisor}"] = tensor.reciprocal().reshape(1)
        else:
            renamed[name] = tensor
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file(renamed, path)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.layout is StoredLayout.COMPRESSED_TENSORS
    assert set(checkpoint.weights) == set(model.values)
    for name, values in model.values.items():
        weight = checkpoint.weights[name]
        torch.testing.assert_close(
            weight.values(torch.float32), values.float(), rtol=2.0**-21, atol=0
        )
        stored = model.parts[name].get(Part.INPUT_SCALE)
        if stored is not None:
            assert weight.input_scale is not None
            torch.testing.assert_close(weight.input_scale, stored, rtol=2.0**-22, atol=0)
