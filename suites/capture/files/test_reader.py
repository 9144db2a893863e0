from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, UnreadableFile
from degarble.harness.capture.files.reader import _NUMPY, _TORCH, Capture
from degarble.harness.capture.files.records import DTYPE_BYTES, Phase
from degarble.suites.capture.files.capture_cases import arrays, old_capture, write_capture

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_capture(tmp_path / "capture", layers=4, part_bytes=100)
    return tmp_path / "capture"


def test_what_was_written_is_read(folder: Path) -> None:
    capture = Capture.open(folder)
    assert capture.complete
    assert capture.facts["texts"] == ["anna"]
    assert len(capture.parts) > 2
    (step,) = capture.steps
    assert (step.phase, step.tokens) == (Phase.PREFILL, (5, 6, 7))
    calls = capture.by_component()
    assert len(calls) == 8
    for layer in range(4):
        x, codes = arrays(layer)
        (norm,), (linear,) = (calls[f"layers.{layer}.attn.{n}"] for n in ("norm", "wq_a"))
        assert capture.array(norm.inputs["x"]).tobytes() == x.tobytes()
        assert capture.array(norm.outputs["out"]).tolist() == codes.tolist()
        taken = capture.inputs(linear)["x"]
        assert (taken.dtype, taken.shape) == (torch.bfloat16, (12,))
        assert taken.view(torch.uint16).tolist() == codes.reshape(-1).tolist()
        assert capture.outputs(linear)["scale"].item() == layer
        assert linear.changed == ("x",)


def test_every_dtype_has_the_width_that_its_word_says() -> None:
    for word, width in DTYPE_BYTES.items():
        assert np.dtype(_NUMPY[word]).itemsize == width
        assert getattr(torch, _TORCH[word]).itemsize == width


def test_an_old_capture_still_opens(tmp_path: Path) -> None:
    """Version 1 as it was written once; whatever changes, it must be read as this."""
    capture = Capture.open(old_capture(tmp_path / "old"))
    assert capture.complete
    assert list(capture.damage()) == []
    calls = capture.by_component()
    assert sorted(calls) == [f"layers.{n}.attn.{c}" for n in (0, 1) for c in ("norm", "wq_a")]
    linear = calls["layers.1.attn.wq_a"][0]
    assert capture.array(linear.inputs["x"]).tolist() == arrays(1)[1].reshape(-1).tolist()
    assert capture.array(linear.outputs["out"]).tobytes() == arrays(1)[0].tobytes()
    assert (linear.changed, capture.facts["family"]) == (("x",), "toy")


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_damaged_bytes_are_reported_by_tensor(folder: Path) -> None:
    flip(folder / "part-000001.safetensors", -1)
    capture = Capture.open(folder)
    (told,) = capture.damage()
    assert told.startswith("part-000001.safetensors: tensor 00000")
    owner = next(k for call in capture.calls for _, k in call.sites() if str(k.at) in told)
    with pytest.raises(UnreadableFile, match="expected the bytes that were hashed"):
        capture.tensor(owner)


def test_every_flipped_byte_of_a_head_is_refused(folder: Path) -> None:
    path = folder / "part-000001.safetensors"
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    for place in range(0, end, 37):
        flip(path, place)
        with pytest.raises(UnreadableFile):
            Capture.open(folder)
        path.write_bytes(whole)


def test_statistics_have_no_bytes(folder: Path) -> None:
    capture = Capture.open(folder)
    kept = capture.calls[0].inputs["x"]._replace(at=None)
    with pytest.raises(InvalidArgument, match="--statistics-only"):
        capture.read(kept)


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "manifest.json"
        raw = json.loads(path.read_text(encoding="utf-8"))
        change(raw)
        path.write_text(json.dumps(raw), encoding="utf-8")

    return edit


def without(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


def foreign(folder: Path) -> None:
    """A part of another capture, of the same number."""
    write_capture(folder.parent / "other", layers=3, part_bytes=400)
    shutil.copy(folder.parent / "other" / "part-000000.safetensors", folder)


def reordered(folder: Path) -> None:
    edited(lambda raw: raw.update(complete=False))(folder)
    (folder / "part-000001.safetensors").unlink()


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no folder": (shutil.rmtree, r"a capture: a folder with manifest\.json"),
    "no manifest": (without("manifest.json"), r"a capture: a folder with manifest\.json"),
    "a file of another tool": (edited(lambda r: r.update(format="x")), "format degarble-capture"),
    "newer": (edited(lambda r: r.update(version=2)), "or a newer one"),
    "version true": (edited(lambda r: r.update(version=True)), "expected 1 to 1"),
    "complete unsaid": (edited(lambda r: r.pop("complete")), "complete = None"),
    "calls miscounted": (edited(lambda r: r.update(calls=1)), r"manifest\.json: calls = 1"),
    "a part less": (edited(lambda r: r["parts"].pop()), "calls = 8"),
    "a part renamed": (edited(lambda r: r["parts"][0].update(file="x")), r"part 0 = 'x'"),
    "a path": (edited(lambda r: r["parts"][0].update(file="../x")), r"part 0 = "),
    "part missing": (without("part-000001.safetensors"), r"^part-000001\.safetensors = 'missing'"),
    "part foreign": (foreign, r"^part-000000\.safetensors = "),
    "gap of an incomplete one": (reordered, r"^part-000001\.safetensors = 'missing'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_capture_is_refused_by_name(fault: str, folder: Path) -> None:
    damage, told = FAULTS[fault]
    damage(folder)
    with pytest.raises(UnreadableFile, match=told):
        Capture.open(folder)
