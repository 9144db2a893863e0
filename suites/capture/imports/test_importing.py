"""Imported dumps of healthy runs agree, planted faults are placed, and coarse dumps say so."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName, UnreadableFile
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.imports.importing import ImportOptions, import_dump
from degarble.harness.capture.recorded_tensors import recorded_config
from degarble.harness.engine.localise.localise import localise
from degarble.harness.model.recipes import recipe_named
from degarble.references.numerics import Numerics
from degarble.references.traced.family import TracedModel
from degarble.suites.capture.imports import dumps
from degarble.suites.references.traced.traced_models import weights_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from degarble.harness.capture.imports.importing import ImportSummary

pytestmark = pytest.mark.needs("transformers")


def _imported(
    kind: str, path: Path, folder: Path, layers: tuple[int, ...] = ()
) -> tuple[ImportSummary, Any]:
    """Import a dump of the checkpoint in `folder / "ckpt"`, and judge it."""
    out = folder / f"capture-{kind}"
    summary = import_dump(ImportOptions(kind, path, folder / "ckpt", out, layers))
    capture = Capture.open(out)
    config: Any = recorded_config(capture.facts)
    assert config == summary.config
    from degarble.suites.references.traced.traced_models import built  # noqa: PLC0415

    weights = weights_of(built(config.raw["model_type"], torch.bfloat16))
    exact = torch.float64
    numerics = replace(Numerics.bf16(), work=exact, products=exact, store=torch.bfloat16)
    twin = TracedModel(config, numerics, weights)
    return summary, localise(twin, recipe_named("bf16", config), capture)


def _blamed(found: Any) -> set[str]:
    return {origin.component for origin in found.origins}


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_dump_of_sglang_agrees(tmp_path: Path, name: str, ranks: int) -> None:
    source = dumps.checkpoint(name, tmp_path / "ckpt")
    folder = dumps.sglang_folder(tmp_path / "dump", source, ranks)
    summary, found = _imported("sglang", folder, tmp_path)
    assert found.verdict == "AGREES", _blamed(found)
    assert not summary.left_out
    assert not found.unjudged
    # Every linear is judged alone.
    linears = [name for name in summary.coverage.alone if name.endswith("_proj")]
    assert len(linears) == (14 if name == "llama" else 8)
    assert len(Capture.open(summary.folder).steps) == 3


def _swapped(model: Any) -> None:
    weight = model.model.layers[1].mlp.gate_up_proj.weight.data
    weight.copy_(torch.cat(weight.chunk(2)[::-1]))


def _half(path: str, factor: float = 0.5) -> Callable[[Any], None]:
    return lambda model: model.model.layers[1].get_submodule(path).weight.data.mul_(factor)


@pytest.mark.parametrize(
    ("plant", "blamed"),
    [
        (_swapped, {"layers.1.mlp.gate_proj", "layers.1.mlp.up_proj"}),
        (_half("self_attn.o_proj"), {"layers.1.self_attn.o_proj"}),
        (_half("post_attention_layernorm"), {"layers.1.post_attention_layernorm"}),
    ],
)
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_fault_in_sglang_is_placed(
    tmp_path: Path, plant: Callable[[Any], None], blamed: set[str], ranks: int
) -> None:
    source = dumps.checkpoint("llama", tmp_path / "ckpt")
    folder = dumps.sglang_folder(tmp_path / "dump", source, ranks, plant)
    _, found = _imported("sglang", folder, tmp_path)
    assert _blamed(found) == blamed


def test_a_coarse_dump_says_what_to_dump_next(tmp_path: Path) -> None:
    source = dumps.checkpoint("llama", tmp_path / "ckpt")
    plant = _half("self_attn.o_proj")
    folder = dumps.sglang_folder(tmp_path / "dump", source, 1, plant, without="self_attn")
    summary, found = _imported("sglang", folder, tmp_path)
    # post_attention_layernorm is given what o_proj returned, so attention is one stretch.
    span = "layers.1.self_attn.o_proj.span"
    assert _blamed(found) == {span}
    assert "layers.1.self_attn.attention" in summary.coverage.wide[span]
    text = "\n".join(summary.lines())
    assert f"{span}: 9 components judged as one; to split it, dump layers.1.self_attn.q" in text
    assert summary.document()["spans"][span]["dump_next"]


def test_passes_of_the_forward_hook_agree(tmp_path: Path) -> None:
    source = dumps.checkpoint("llama", tmp_path / "ckpt")
    folder = dumps.sglang_passes(tmp_path / "dump", source)
    summary, found = _imported("sglang", folder, tmp_path)
    assert found.verdict == "AGREES", _blamed(found)
    # Results alone: a norm's shows the sum as well, and gate_up_proj both of its matrices.
    assert "layers.1.mlp.down_proj" in summary.coverage.alone
    assert "layers.0.residual_2" in summary.coverage.alone


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_hidden_states_of_vllm_agree(tmp_path: Path, name: str) -> None:
    source = dumps.checkpoint(name, tmp_path / "ckpt")
    if name == "qwen3_moe":
        folder = dumps.vllm_states(tmp_path / "dump", source, (0, 1))
        summary, found = _imported("vllm-states", folder, tmp_path, (0, 1))
    else:
        folder = dumps.vllm_states(tmp_path / "dump", source, (0, 1, 2))
        summary, found = _imported("vllm-states", folder, tmp_path, (0, 1, 2))
        assert set(summary.coverage.uncovered) == {"norm", "lm_head"}
    assert found.verdict == "AGREES", _blamed(found)
    assert len(Capture.open(summary.folder).steps) == len(dumps.PROMPTS)


def test_a_fault_is_placed_between_two_layers_of_hidden_states(tmp_path: Path) -> None:
    source = dumps.checkpoint("llama", tmp_path / "ckpt")
    folder = dumps.vllm_states(tmp_path / "dump", source, (1, 2), scale=1.5)
    _, found = _imported("vllm-states", folder, tmp_path, (1, 2))
    assert _blamed(found) == {"layers.1.residual_2.span"}


@pytest.mark.parametrize("plain", [True, False])
def test_a_flight_recorder_agrees(tmp_path: Path, *, plain: bool) -> None:
    source = dumps.checkpoint("llama", tmp_path / "ckpt")
    folder = dumps.flashinfer_folder(tmp_path / "dump", source, plain=plain)
    summary, found = _imported("flashinfer", folder, tmp_path)
    assert found.verdict == "AGREES", _blamed(found)
    assert summary.read.unplaced == ["run"]
    # Tokens are unknown, so nothing is claimed of the embedding.
    assert set(summary.left_out) == {"embed_tokens"}
    judged = {row.component.name for row in found.rows}
    assert {"layers.0.residual", "layers.1.mlp.gated", "layers.1.mlp.down_proj"} <= judged


def test_without_positions_nothing_that_attends_is_judged(tmp_path: Path) -> None:
    source = dumps.checkpoint("llama", tmp_path / "ckpt")
    folder = dumps.flashinfer_folder(tmp_path / "dump", source, rope=False)
    summary, found = _imported("flashinfer", folder, tmp_path)
    assert found.verdict == "AGREES"
    assert "layers.1.self_attn.o_proj.span" in summary.left_out


@pytest.mark.parametrize(
    ("path", "blamed"),
    [
        ("mlp.down_proj", {"layers.1.mlp.down_proj"}),
        ("self_attn.qkv_proj", {"layers.1.self_attn.o_proj.span"}),
    ],
)
def test_a_fault_in_a_flight_recorder_is_placed(
    tmp_path: Path, path: str, blamed: set[str]
) -> None:
    source = dumps.checkpoint("llama", tmp_path / "ckpt")
    folder = dumps.flashinfer_folder(tmp_path / "dump", source, _half(path, -1))
    _, found = _imported("flashinfer", folder, tmp_path)
    assert blamed <= _blamed(found)
    assert not {name for name in _blamed(found) if name.startswith("layers.0")}


def test_refusals_name_what_is_wrong(tmp_path: Path) -> None:
    source = dumps.checkpoint("llama", tmp_path / "ckpt")
    empty = tmp_path / "empty"
    empty.mkdir()

    def imported(kind: str, path: Path, layers: tuple[int, ...] = ()) -> None:
        import_dump(ImportOptions(kind, path, tmp_path / "ckpt", tmp_path / "out", layers))

    with pytest.raises(UnknownName, match="KIND"):
        imported("vllm", empty)
    for kind, expected in (("sglang", "DUMPER_ENABLE"), ("flashinfer", "FLASHINFER_LOGLEVEL")):
        with pytest.raises(InvalidArgument, match=expected):
            imported(kind, empty)
    states = dumps.vllm_states(tmp_path / "states", source, (0, 1))
    with pytest.raises(InvalidArgument, match="--layers"):
        imported("vllm-states", states)
    with pytest.raises(ShapeMismatch, match="--layers 1,2,3"):
        imported("vllm-states", states, (0, 1, 2))
    with pytest.raises(InvalidArgument, match="after the last layer"):
        imported("vllm-states", states, (0, 3))
    dumps.checkpoint("mixtral", tmp_path / "other")
    folder = dumps.flashinfer_folder(tmp_path / "dump", built_like(source))
    with pytest.raises(InvalidArgument, match="weight of this checkpoint"):
        import_dump(ImportOptions("flashinfer", folder, tmp_path / "ckpt", tmp_path / "out"))
    (states / "cmpl-0.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(UnreadableFile):
        imported("vllm-states", states, (0, 1))
    assert not (tmp_path / "out" / "manifest.json").exists()


def built_like(source: Any) -> Any:
    """Return a model whose norms have other weights."""
    for name, parameter in source.named_parameters():
        if "norm" in name:
            parameter.data.add_(1.0)
    return source
