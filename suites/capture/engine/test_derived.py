"""The derived map of an engine's modules: healthy runs agree, faults of a loader are placed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.capture.engine.derived import EngineTree, derived_maps
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.recorded_tensors import recorded_config
from degarble.harness.engine.localise.localise import localise
from degarble.harness.model.recipes import recipe_named
from degarble.references.numerics import Numerics
from degarble.references.traced.family import TracedModel
from degarble.suites.capture.engine.engine_runs import engine_capture
from degarble.suites.capture.imports import dumps
from degarble.suites.commands.calls import call
from degarble.suites.references.traced.traced_models import (
    built,
    config_of,
    weights_of,
)
from degarble.suites.support.engine_stand_in import engine_models
from degarble.suites.support.rank_faults import by_token, shard_of_rank_0
from degarble.suites.support.thinned import thinned

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.needs("transformers")


def _judged(
    name: str,
    folder: Path,
    ranks: int,
    plant: Callable[[int, Any], object] | None = None,
    *,
    by_expert: bool = True,
) -> Any:
    """Capture two requests of an engine on its ranks, join, and judge."""
    source = dumps.checkpoint(name, folder / "ckpt")
    out, apart = engine_capture(source, folder, ranks, plant, by_expert=by_expert)
    joined = Capture.open(out)
    config: Any = recorded_config(joined.facts)
    exact = torch.float64
    numerics = replace(Numerics.bf16(), work=exact, products=exact, store=torch.bfloat16)
    twin = TracedModel(config, numerics, weights_of(built(name, torch.bfloat16)))
    return localise(twin, recipe_named("bf16", config), joined), apart


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_healthy_engine_agrees(tmp_path: Path, name: str, ranks: int) -> None:
    found, apart = _judged(name, tmp_path, ranks)
    assert found.verdict == "AGREES", [origin.component for origin in found.origins]
    assert not found.unjudged
    assert not apart
    judged = {row.component.name for row in found.rows}
    # Every linear, norm and sum by itself, attention with its cache, rotations with their angles.
    assert {"layers.1.self_attn.attention", "layers.1.self_attn.rotation", "lm_head"} <= judged
    assert not {each for each in judged if each.endswith(".span")}


_RANKS = [
    pytest.param("llama", 4, True, marks=pytest.mark.slow),
    # Every rank has a part of every expert.
    pytest.param("qwen3_moe", 2, False, marks=pytest.mark.slow),
    ("qwen3_moe", 4, True),  # two key heads, normed by heads, on four ranks
    pytest.param("qwen3_moe", 4, False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "ranks", "by_expert"), _RANKS)
def test_several_ranks_agree(tmp_path: Path, name: str, ranks: int, by_expert: bool) -> None:
    found, apart = _judged(name, tmp_path, ranks, by_expert=by_expert)
    assert found.verdict == "AGREES", [origin.component for origin in found.origins]
    assert not apart


@pytest.mark.slow
def test_copies_of_a_key_head_are_compared(tmp_path: Path) -> None:
    def plant(rank: int, model: Any) -> None:
        if rank == 1:  # it shares a key head with rank 0
            weight = model.layers[1].self_attn.qkv_proj.weight.data
            weight[-32:-16] *= 2

    _, apart = _judged("llama", tmp_path, 4, plant)
    assert "layers.1.self_attn.k_proj.out: rank 1 is not as rank 0" in apart


def _swapped(path: str) -> Callable[[int, Any], None]:
    def plant(_rank: int, model: Any) -> None:
        weight = model.layers[1].get_submodule(path).weight.data
        weight.copy_(torch.cat(weight.chunk(2)[::-1]))

    return plant


def _key_and_value(_rank: int, model: Any) -> None:
    projection = model.layers[1].self_attn.qkv_proj
    q, k, v = projection.weight.data.split(model.layers[1].self_attn._sizes)
    projection.weight.data.copy_(torch.cat([q, v, k]))


def _other_layer(_rank: int, model: Any) -> None:
    layers = model.layers
    layers[1].input_layernorm.weight.data.copy_(layers[0].input_layernorm.weight.data)


def _experts(_rank: int, model: Any) -> None:
    weight = model.layers[1].mlp.experts.w2.data
    weight.copy_(weight[[1, 0, *range(2, len(weight))]])


def _one_rank(rank: int, model: Any) -> None:
    if rank == 1:
        weight = model.layers[1].mlp.down_proj.weight.data
        weight.copy_(weight.roll(1, 1))


_PLANTS = {
    "gate and up": (
        "llama", 1, _swapped("mlp.gate_up_proj"), {"layers.1.mlp.gate_proj", "layers.1.mlp.up_proj"}
    ),
    "key and value": (
        "llama", 1, _key_and_value, {"layers.1.self_attn.k_proj", "layers.1.self_attn.v_proj"}
    ),
    "norm of another layer": ("llama", 2, _other_layer, {"layers.1.input_layernorm"}),
    "columns of one rank": ("llama", 2, _one_rank, {"layers.1.mlp.down_proj"}),
    "two experts exchanged": ("qwen3_moe", 1, _experts, {"layers.1.mlp.experts"}),
}  # fmt: skip


@pytest.mark.parametrize("plant", thinned(_PLANTS))
def test_a_fault_of_the_loader_is_placed(tmp_path: Path, plant: str) -> None:
    name, ranks, change, blamed = _PLANTS[plant]
    found, _ = _judged(name, tmp_path, ranks, change)
    assert {origin.component for origin in found.origins} == blamed


_NAMED = {
    "columns": ("llama", 2, "mlp.down_proj", "weight", True, {"mlp.down_proj"}),
    "rows": ("llama", 2, "mlp.gate_up_proj", "weight", True, {"mlp.gate_proj", "mlp.up_proj"}),
    "heads": ("llama", 4, "self_attn.qkv_proj", "weight", True, {"self_attn.q_proj"}),
    "experts": ("qwen3_moe", 2, "mlp.experts", "w2", True, {"mlp.experts"}),
    "outputs of experts": ("qwen3_moe", 2, "mlp.experts", "w13", False, {"mlp.experts"}),
    "inputs of experts": ("qwen3_moe", 2, "mlp.experts", "w2", False, {"mlp.experts"}),
}


@pytest.mark.parametrize("case", thinned(_NAMED, 6))
def test_a_rank_with_the_shard_of_another_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, case: str
) -> None:
    name, ranks, path, tensor, by_expert, blamed = _NAMED[case]
    source = dumps.checkpoint(name, tmp_path / "ckpt")
    plant = shard_of_rank_0(path, tensor)
    out, _ = engine_capture(source, tmp_path, ranks, plant, by_expert=by_expert)
    origins = _origins(capsys, out, tmp_path / "ckpt")
    assert {each["component"] for each in origins} == blamed
    assert {each["fault"] for each in origins} == {"M16.rank_part"}
    for each in origins:
        assert (each["where"]["rank"], each["where"]["holds"]) == (1, 0)


def _origins(capsys: pytest.CaptureFixture[str], out: Path, checkpoint: Path) -> Any:
    line = ("check", out, "--checkpoint", checkpoint, "--reference", checkpoint, "--json")
    return call(capsys, *line).document["origins"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float", "int"])
@pytest.mark.parametrize(("name", "ranks"), [("llama", 2), ("llama", 4), ("qwen3_moe", 4)])
def test_ranks_quantise_their_own_part_of_a_token(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, ranks: int, kind: str
) -> None:
    """A linear that is split along K, or an expert by width, has a token's scale on each rank."""
    source = dumps.checkpoint(name, tmp_path / "ckpt")
    quantise = by_token(source, tmp_path / "ckpt", kind)
    out, _ = engine_capture(source, tmp_path, ranks, quantise, by_expert=False)
    assert not _origins(capsys, out, tmp_path / "ckpt")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("name", "path", "tensor"),
    [("llama", "mlp.down_proj", "weight"), ("qwen3_moe", "mlp.experts", "w2")],
)
def test_a_factor_on_one_rank_is_named(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
    path: str,
    tensor: str,
    ranks: int,
) -> None:
    source = dumps.checkpoint(name, tmp_path / "ckpt")
    # Experts in BF16: those in FP8 take minutes.
    coded = by_token(source, tmp_path / "ckpt") if name == "llama" else None

    def plant(rank: int, model: Any) -> None:
        if coded is not None:
            coded(rank, model)
        if rank == 1:
            getattr(model.layers[1].get_submodule(path), tensor).data *= 1.25

    out, _ = engine_capture(source, tmp_path, ranks, plant, by_expert=False)
    (origin,) = _origins(capsys, out, tmp_path / "ckpt")
    assert (origin["component"], origin["fault"]) == (path, "M21.rank_gain")
    assert origin["where"] == {"rank": 1, "ranks": ranks, "gain": 1.25}


def test_a_tree_survives_json() -> None:
    (model,) = engine_models(built("qwen3_moe", torch.bfloat16))
    tree = EngineTree.from_model(model, 2)
    again = EngineTree.of_json(json.loads(json.dumps(tree.document())))
    assert again == tree
    assert tree.packed["qkv_proj"] == ("q_proj", "k_proj", "v_proj")


def test_few_key_heads_are_copies_on_consecutive_ranks() -> None:
    (model,) = engine_models(built("llama", torch.bfloat16))
    maps = derived_maps(EngineTree.from_model(model, 4), config_of("llama").whole)
    (keys,) = (each for each in maps if each.component == "layers.0.self_attn.k_proj")
    # Two key heads of 16 on four ranks: each has one, behind its query head.
    assert keys.outputs["out"].columns == (16, 32)
    assert keys.outputs["out"].share.copies == 2


def test_modules_of_another_model_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="engine's modules"):
        derived_maps(EngineTree.from_paths(["transformer.wte"]), config_of("llama").whole)
