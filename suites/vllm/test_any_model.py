"""The proof of any model in vLLM: its steps against the stand-in, and, with a GPU, vLLM itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from degarble.suites.capture.engine.engine_runs import engine_capture
from degarble.suites.commands.calls import call
from degarble.suites.vllm import any_model
from degarble.suites.vllm.any_model import MODELS, RANK_RUNS, RUNS
from degarble.suites.vllm.imitated_vllm import install

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

_TRANSFORMERS = pytest.mark.needs("transformers")
_QUICK = ("healthy llama", "healthy qwen3_moe", "gate and up")


def _cases() -> list[Any]:
    names = [name for name, run in RUNS.items() if run.model in MODELS]
    return [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, nn.Module]]:
    """Write both checkpoints once."""
    folder = tmp_path_factory.mktemp("models")
    return {name: (folder / name, any_model.write(name, folder / name)) for name in MODELS}


@_TRANSFORMERS
@pytest.mark.parametrize("name", _cases())
def test_a_run_of_the_stand_in_holds(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    written: dict[str, tuple[Path, nn.Module]],
    name: str,
) -> None:
    run = RUNS[name]
    checkpoint, source = written[run.model]
    (tmp_path / "ckpt").symlink_to(checkpoint)

    def plant(_rank: int, model: nn.Module) -> None:
        if run.plant is not None:
            run.plant(model)

    capture, _ = engine_capture(source, tmp_path, 1, plant)
    document = call(capsys, *any_model.check_words(capture, checkpoint)).document
    assert run.holds(document), document
    assert not document["not_judged"]
    # What is true of one run is not true of another.
    others = [each for each in RUNS.values() if each.holds(document)]
    assert {each.blamed for each in others} == {run.blamed}


class _Distributed(ModuleType):
    """What plants of one rank ask of vLLM, where ranks are built one after the other."""

    rank = 0
    first: torch.Tensor | None = None

    def get_tensor_model_parallel_rank(self) -> int:
        return self.rank

    def tensor_model_parallel_all_gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        if self.rank == 0:
            self.first = part.clone()
        assert self.first is not None
        return torch.cat([self.first, part], dim)


@_TRANSFORMERS
@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, run in RANK_RUNS.items() if run.model in MODELS])
def test_a_run_on_two_ranks_holds(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    written: dict[str, tuple[Path, nn.Module]],
    name: str,
) -> None:
    run = RANK_RUNS[name]
    checkpoint, source = written[run.model]
    (tmp_path / "ckpt").symlink_to(checkpoint)
    distributed = _Distributed("vllm.distributed")
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.distributed", distributed)

    def plant(rank: int, model: nn.Module) -> None:
        distributed.rank = rank
        if run.plant is not None:
            run.plant(model)

    capture, _ = engine_capture(source, tmp_path, run.ranks, plant, by_expert=run.by_expert)
    document = call(capsys, *any_model.check_words(capture, checkpoint)).document
    assert run.holds(document), document["origins"]


@_TRANSFORMERS
@pytest.mark.slow
def test_all_steps_run_as_they_will_with_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = install(tmp_path / "imitated")
    paths = f"{place}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", paths)
    out = tmp_path / "out"
    out.mkdir()
    assert any_model.prove(out, sys.executable, ["healthy llama", "columns"]) == 0
    text = capsys.readouterr().out
    assert "held · healthy llama · AGREES" in text
    assert "held · columns · DIFFERS · 1.self_attn.o_proj" in text
    results = json.loads((out / "results.json").read_text())
    assert all(result["held"] for result in results.values())
    # A run that vLLM does not finish is no success.
    (place / "vllm" / "__init__.py").write_text("raise RuntimeError('no GPU')\n")
    shutil.rmtree(out / "columns")
    assert any_model.prove(out, sys.executable, ["columns"]) == 1
    assert "DID NOT HOLD · columns · NOT RUN · see" in capsys.readouterr().out


@_TRANSFORMERS
def test_a_checkpoint_is_what_vllm_reads(written: dict[str, tuple[Path, nn.Module]]) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415  heavy

    for name, (folder, _) in written.items():
        names = [key for file in folder.glob("*.safetensors") for key in load_file(file)]
        assert any(".experts.7.down_proj." in key for key in names) == (name == "qwen3_moe")
        assert AutoTokenizer.from_pretrained(folder).encode("hello")


@_TRANSFORMERS
@pytest.mark.needs("compressed_tensors")
@pytest.mark.slow
def test_the_real_model_is_captured_and_exported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    written: dict[str, tuple[Path, nn.Module]],
) -> None:
    place = install(tmp_path / "imitated")
    paths = f"{place}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", paths)
    source, out = written["llama"][0], tmp_path / "out"
    assert any_model.prove(out, sys.executable, ["real BF16"], real=source) == 0
    assert "held · real BF16 · AGREES" in capsys.readouterr().out
    for name in any_model.FORMATS:
        any_model.export(source, name, tmp_path / name)
        assert call(capsys, "audit", tmp_path / name, "--against", source).status == 0


def test_the_entry_point_is_found_and_plants_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = any_model.entry_point(tmp_path)
    script = (
        "from importlib.metadata import entry_points; print([point.load().__name__ for point in"
        f" entry_points(group='vllm.general_plugins') if point.name == {any_model.NAME!r}])"
    )
    places = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    found = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": places},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.strip() == "['register']"
    calls: list[Any] = []
    loader = ModuleType(any_model.LOADER)
    loader.__dict__[any_model.LOADED] = lambda *given, **named: calls.append((given, named))
    monkeypatch.setitem(sys.modules, any_model.LOADER, loader)
    for package in ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setenv(any_model.VARIABLE, "healthy llama")
    any_model.register()
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3), requires_grad=False)
    name = "model.layers.1.self_attn.o_proj.weight"
    model: Any = SimpleNamespace(named_parameters=lambda: [(name, weight)])
    getattr(loader, any_model.LOADED)(model, "config")
    assert weight[0].tolist() == [0, 1, 2]
    monkeypatch.setenv(any_model.VARIABLE, "columns")
    any_model.register()
    any_model.register()
    getattr(loader, any_model.LOADED)(model, "config", device="cuda")
    assert weight[0].tolist() == [2, 0, 1]
    assert calls[1] == ((model, "config"), {"device": "cuda"})


def test_every_fault_finds_its_parameters() -> None:
    assert sum(run.plant is not None for run in RUNS.values()) == 5
    healthy = {run.model.partition(" ")[0] for run in RUNS.values() if run.plant is None}
    assert healthy == {*MODELS}
    with pytest.raises(StopIteration):
        any_model.columns_turned(torch.nn.Linear(2, 2))


@pytest.mark.vllm
@pytest.mark.gpu
def test_vllm_itself_holds(tmp_path: Path) -> None:
    assert any_model.prove(tmp_path, sys.executable) == 0
