"""`degarble check` of dumps that were imported, and of an engine's captures of traced models."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.inference.traced import TracedWeights, traced_config
from degarble.references.linears import activation_values, quantise_activations
from degarble.references.traced.family import logical_name
from degarble.suites.campaigns.healthy_exports import modelopt_export
from degarble.suites.capture.engine.engine_runs import engine_capture
from degarble.suites.capture.imports import dumps
from degarble.suites.commands.calls import call
from degarble.suites.support.engine_stand_in import product

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from degarble.suites.support.engine_stand_in import EngineModel

    Capsys = pytest.CaptureFixture[str]
    Plant = Callable[[EngineModel], object] | None

pytestmark = pytest.mark.needs("transformers")

_SPAN = "layers.1.self_attn.o_proj.span"


def _half(model: EngineModel) -> None:
    layer: Any = model.model.layers[1]
    layer.self_attn.o_proj.weight.data.mul_(0.5)


def _imported(
    capsys: Capsys, folder: Path, kind: str, path: Path, *options: object, model: str = "ckpt"
) -> Path:
    out = folder / f"capture-{path.name}"
    made = call(capsys, "import", kind, path, "--model", folder / model, "--out", out, *options)
    assert made.status == 0, made.err
    return out


def _checked(capsys: Capsys, folder: Path, capture: Path, *options: object) -> dict[str, Any]:
    reference = ("--reference", folder / "ckpt")
    made = call(capsys, "check", capture, *reference, *options, "--json")
    assert made.out, made.err
    return made.document


def _blamed(found: dict[str, Any]) -> set[str]:
    return {origin["site"].rpartition(".")[0] for origin in found["origins"]}


@pytest.mark.parametrize(
    ("name", "wide"),
    [
        ("sglang", 0),
        pytest.param("few", 2, marks=pytest.mark.slow),
        pytest.param("states", 2, marks=pytest.mark.slow),
        ("flashinfer", 6),
    ],
)
def test_a_dump_of_a_healthy_run_agrees(
    capsys: Capsys, tmp_path: Path, name: str, wide: int
) -> None:
    source, path = dumps.checkpoint("llama", tmp_path / "ckpt"), tmp_path / name
    kind, options = "sglang", list[object]()
    if name == "sglang":
        dumps.sglang_folder(path, source, 2)
    elif name == "few":
        dumps.sglang_folder(path, source, 1, without="self_attn")
    elif name == "states":
        kind, options = "vllm-states", ["--layers", "0,1,2"]
        path = dumps.vllm_states(path, source, (0, 1, 2))
    else:
        kind = "flashinfer"
        dumps.flashinfer_folder(path, source)
    capture = _imported(capsys, tmp_path, kind, path, *options)
    # By the checkpoint that is named as well as by the capture's own.
    for named in ((), ("--checkpoint", tmp_path / "ckpt")):
        found = _checked(capsys, tmp_path, capture, *named)
        assert found["verdict"] == "AGREES", (path.name, found["origins"])
        assert not found["not_judged"], path.name
        assert len(found["spans"]) == wide
    if name == "flashinfer":
        assert {"norm", "lm_head"} <= {*found["uncovered"]}
        assert found["notes"] == ["Not recorded with all tensors in every step: embed_tokens."]


def test_a_mixture_and_its_engine_agree(capsys: Capsys, tmp_path: Path) -> None:
    source = dumps.checkpoint("qwen3_moe", tmp_path / "ckpt")
    path = dumps.sglang_folder(tmp_path / "sglang", source, 2)
    capture, apart = engine_capture(source, tmp_path, 2)
    assert not apart
    for each in (_imported(capsys, tmp_path, "sglang", path), capture):
        found = _checked(capsys, tmp_path, each)
        assert found["verdict"] == "AGREES", found["origins"]
        assert not found["not_judged"]


def test_a_fault_is_named_in_its_component(capsys: Capsys, tmp_path: Path) -> None:
    source = dumps.checkpoint("llama", tmp_path / "ckpt")
    path = dumps.sglang_folder(tmp_path / "sglang", source, 1, _half)
    by_engine, _ = engine_capture(source, tmp_path, 1, lambda _, model: _half_of(model))
    for capture in (_imported(capsys, tmp_path, "sglang", path), by_engine):
        found = _checked(capsys, tmp_path, capture)
        assert found["verdict"] == "DIFFERS"
        (origin,) = found["origins"]
        assert (origin["layer"], origin["component"]) == (1, "self_attn.o_proj")
        assert origin["fault"] == "M43.whole"
        assert not found["notes"]


def _half_of(model: Any) -> None:
    model.layers[1].self_attn.o_proj.weight.data.mul_(0.5)


@pytest.mark.slow
def test_a_fault_in_a_stretch_says_what_to_dump_next(capsys: Capsys, tmp_path: Path) -> None:
    source = dumps.checkpoint("llama", tmp_path / "ckpt")
    path = dumps.sglang_folder(tmp_path / "few", source, 1, _half, without="self_attn")
    capture = _imported(capsys, tmp_path, "sglang", path)
    report = ("--report", tmp_path / "report")
    made = call(capsys, "check", capture, "--reference", tmp_path / "ckpt", *report)
    assert made.status == 1, made.err
    text = " ".join(made.out.split())
    assert "19 components and 2 stretches of several" in text
    assert "It is one of 9 components, recorded at their ends alone" in text
    assert "dump layers.1.self_attn.q_proj, layers.1.self_attn.k_proj" in text
    (script,) = (tmp_path / "report").rglob("reproduce.py")
    # It runs by itself, and shows the same difference.
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, timeout=300
    )
    assert ran.returncode == 1, ran.stderr
    assert f"{_SPAN}.out" in ran.stdout
    assert _blamed(_checked(capsys, tmp_path, capture)) == {_SPAN}


def test_a_dump_of_another_model_is_refused(capsys: Capsys, tmp_path: Path) -> None:
    source = dumps.checkpoint("llama", tmp_path / "ckpt")
    dumps.checkpoint("qwen3_moe", tmp_path / "other")
    path = dumps.sglang_folder(tmp_path / "sglang", source)
    wrong = ("import", "sglang", path, "--model", tmp_path / "other", "--out", tmp_path / "no")
    made = call(capsys, *wrong)
    assert made.status == 2
    assert "gate_up_proj" in made.err
    assert "--model CKPT" in made.err
    assert not (tmp_path / "no").exists()
    capture = _imported(capsys, tmp_path, "sglang", path)
    own, other = tmp_path / "ckpt", tmp_path / "other"
    made = call(capsys, "check", capture, "--reference", other)
    assert (made.status, "that was quantised" in made.err) == (2, True)
    made = call(capsys, "check", capture, "--reference", own, "--checkpoint", other)
    assert (made.status, "that of the capture" in made.err) == (2, True)


@pytest.mark.slow  # a cause is searched for in every component
def test_other_weights_of_the_same_shapes_are_suspected(capsys: Capsys, tmp_path: Path) -> None:
    source = dumps.checkpoint("llama", tmp_path / "ckpt")
    for parameter in source.parameters():
        parameter.data.add_(0.125)
    path = dumps.sglang_folder(tmp_path / "sglang", source)
    found = _checked(capsys, tmp_path, _imported(capsys, tmp_path, "sglang", path))
    assert found["verdict"] == "DIFFERS"
    assert any("is this the checkpoint that the engine loaded" in note for note in found["notes"])


@pytest.mark.slow
@pytest.mark.needs("modelopt")
@pytest.mark.parametrize(
    ("factor", "blamed"),
    [
        pytest.param(1.0, set(), id="healthy"),
        pytest.param(0.5, {"layers.1.self_attn.o_proj"}, id="sick", marks=pytest.mark.slow),
    ],
)
def test_inputs_that_an_engine_quantises_are_judged(
    capsys: Capsys, tmp_path: Path, factor: float, blamed: set[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what ModelOpt imports
        made, _ = modelopt_export("llama", "NVFP4_DEFAULT_CFG", tmp_path / "export")
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  heavy

    source = AutoModelForCausalLM.from_pretrained(
        tmp_path / "export/source", dtype=torch.bfloat16
    ).eval()
    (tmp_path / "ckpt").symlink_to(made)
    with Checkpoint.open(made) as checkpoint:
        weights = TracedWeights(checkpoint, traced_config(checkpoint))
        plant = _quantising(weights, factor)
        path = dumps.sglang_folder(tmp_path / "dump", source, 1, plant)
        found = _checked(capsys, tmp_path, _imported(capsys, tmp_path, "sglang", path))
    assert _blamed(found) == blamed
    assert found["verdict"] == ("DIFFERS" if blamed else "AGREES"), found["not_judged"]
    judged = {each["name"] for each in found["cosines"] if each["budgets"] is not None}
    assert {"layers.0.mlp.up_proj", "layers.1.mlp.down_proj"} <= judged


def _quantising(weights: TracedWeights, factor: float) -> Plant:
    """Let every linear multiply the codes of its input; `factor` is one input scale's fault."""

    def plant(model: EngineModel) -> None:
        for path, module in model.named_modules():
            if not path.endswith("_proj"):
                continue
            parent, _, leaf = logical_name(path).rpartition(".")
            parts = {"qkv_proj": "qkv", "gate_up_proj": ("gate_", "up_")}.get(leaf)
            names = [f"{parent}.{part.rstrip('_')}_proj" for part in parts] if parts else [
                f"{parent}.{leaf}"
            ]  # fmt: skip
            held = [weights[f"{name}.weight"] for name in names]
            scale = held[0].input_scale
            assert scale is not None
            if path.endswith("1.self_attn.o_proj"):
                scale = scale * factor
            matrix = torch.cat([each.values(torch.float32) for each in held])
            module.forward = _forward(matrix, scale.float().reshape(()))

    return plant


def _forward(matrix: torch.Tensor, scale: torch.Tensor) -> Any:
    def forward(x: torch.Tensor) -> Any:
        codes = quantise_activations(x, "NVFP4", scale)
        given = activation_values(codes, "NVFP4", torch.float64)
        return product(given, matrix).to(x.dtype), None

    return forward
