"""A checkpoint's own code is never run, and a reference of another model is noticed."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from degarble.suites.commands.calls import call
from degarble.suites.commands.test_traced_families import captured
from degarble.suites.commands.traced_checkpoints import write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    Capsys = pytest.CaptureFixture[str]

pytestmark = pytest.mark.needs("transformers")
_CLASSES = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}


@pytest.mark.parametrize(
    "known", [pytest.param(True, marks=pytest.mark.slow), False], ids=["known", "unknown"]
)
def test_code_of_a_checkpoint_is_never_run(capsys: Capsys, tmp_path: Path, known: bool) -> None:
    folder = write_checkpoint(tmp_path / "ckpt", "llama")
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    path = folder / "config.json"
    raw: dict[str, Any] = {**json.loads(path.read_text()), "auto_map": _CLASSES}
    path.write_text(json.dumps(raw if known else {**raw, "model_type": "own"}))
    stated = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    assert call(capsys, "audit", folder).status == 0
    for backend in ("torch", "transformers"):
        done = captured(capsys, folder, tmp_path / backend, "--backend", backend)
        # Where transformers has the architecture, its own class computes it.
        assert done.status == (0 if known else 2), done.err
        assert known or "code is never run" in " ".join(done.err.split())
        assert (tmp_path / backend).exists() == known
    assert call(capsys, "generate", folder, "--prompt", "a").status == (0 if known else 2)
    assert not ran.exists()


def test_a_reference_of_another_model_is_noticed(capsys: Capsys, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "ckpt", "llama")
    line = ("--backend", "transformers", "--layers", "0")
    assert captured(capsys, folder, tmp_path / "capture", *line).status == 0
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    generator = torch.Generator().manual_seed(1)
    for shard in other.glob("*.safetensors"):
        held = load_file(shard)
        for name, tensor in held.items():
            if tensor.ndim > 1:
                held[name] = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        save_file(held, shard, {"format": "pt"})
    noticed = []
    for reference in (folder, other):
        document = call(
            capsys, "check", tmp_path / "capture", "--reference", reference, "--json"
        ).document
        assert document["verdict"] == "AGREES"
        noticed.append(any("little in common" in note for note in document["notes"]))
    assert noticed == [False, True]


@pytest.mark.parametrize("options", [(), ("--amax-only",)], ids=["run", "ranges"])
def test_a_capture_is_not_written_into_a_checkpoint(
    capsys: Capsys, tmp_path: Path, options: tuple[str, ...]
) -> None:
    folder = write_checkpoint(tmp_path / "ckpt", "llama")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for files in (before, {**before, folder / "manifest.json": b"{}"}):
        for path, data in files.items():
            path.write_bytes(data)
        done = call(capsys, "capture", folder, "--out", folder, "--prompt", "a", *options)
        assert done.status == 2
        assert "a folder without a checkpoint" in done.err
        assert "rm -r" not in done.err
        assert {path: path.read_bytes() for path in folder.iterdir()} == files
