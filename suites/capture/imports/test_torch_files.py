"""Files of torch.save are read as torch reads them, and nothing in them runs."""

from __future__ import annotations

import os
import zipfile
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.capture.imports.torch_files import ForeignObject, read_saved

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int32,
    torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn,
)  # fmt: skip


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_tensors_are_those_that_were_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.arange(24).reshape(4, 6).to(dtype)
    saved: dict[str, Any] = {
        "value": whole[1:, ::2].T,
        "scalar": whole[3, 3],
        "empty": whole[:0],
        "shared": [whole, whole[2]],
        "meta": {"name": "layers.0", "step": 3, "rate": 0.5, "last": None, "on": True},
        "parameter": torch.nn.Parameter(whole, requires_grad=False),
    }
    torch.save(saved, tmp_path / "x.pt")
    found = read_saved(tmp_path / "x.pt")
    assert found["meta"] == saved["meta"]
    for name in ("value", "scalar", "empty", "parameter"):
        _same(found[name], saved[name])
    for one, other in zip(found["shared"], saved["shared"], strict=True):
        _same(one, other)


def _same(found: torch.Tensor, saved: torch.Tensor) -> None:
    assert found.dtype == saved.dtype
    assert found.shape == saved.shape
    assert found.double().equal(saved.double())


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    saved = OrderedDict(a=torch.ones(3), b=(torch.zeros(2), "text", -70000, 2**40))
    torch.save(saved, tmp_path / "x.pt", pickle_protocol=protocol)
    found = read_saved(tmp_path / "x.pt")
    assert list(found) == ["a", "b"]
    assert found["b"][1:] == ("text", -70000, 2**40)
    assert found["a"].equal(torch.ones(3))


class _Hostile:
    """An object whose unpickling runs a command."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._marker}",)


def test_foreign_objects_stay_names(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    torch.save({"bad": _Hostile(marker), "good": torch.ones(2)}, tmp_path / "x.pt")
    found = read_saved(tmp_path / "x.pt")
    assert not marker.exists()
    assert isinstance(found["bad"], ForeignObject)
    assert found["bad"].name.endswith("system")
    assert found["good"].equal(torch.ones(2))


def _rewritten(path: Path, change: Callable[[str, bytes], bytes | None]) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            made = change(name, data)
            if made is not None:
                archive.writestr(name, made)


@pytest.mark.parametrize(
    "change",
    [
        lambda name, data: data[:4] if "/data/" in name else data,
        lambda name, data: None if "/data/" in name else data,
        lambda name, data: None if name.endswith("data.pkl") else data,
        lambda name, data: data[: len(data) // 2] if name.endswith("data.pkl") else data,
        lambda name, data: b"\x80\x02\x81." if name.endswith("data.pkl") else data,
        lambda name, data: b"\x80\x02}(q\x00." if name.endswith("data.pkl") else data,
    ],
    ids=["short bytes", "no bytes", "no description", "cut description", "no stack", "open mark"],
)
def test_damaged_files_are_refused(
    tmp_path: Path, change: Callable[[str, bytes], bytes | None]
) -> None:
    path = tmp_path / "x.pt"
    torch.save({"value": torch.ones(100)}, path)
    _rewritten(path, change)
    try:
        found = read_saved(path)
    except UnreadableFile:
        return
    assert not isinstance(found, dict)  # an object that is no dump: its readers refuse it


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\x80\x02}q\x00."])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(UnreadableFile, match="torch"):
        read_saved(tmp_path / "x.pt")
