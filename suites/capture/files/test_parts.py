from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors import safe_open

from degarble.harness.base.errors import UnreadableFile, UnwritablePath
from degarble.harness.capture.files.records import (
    CapturedStep,
    Phase,
    head_of,
    read_part,
    sync,
    write_part,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STEPS = (CapturedStep(0, Phase.PREFILL, (1,), (0,), (0,)),)
NAMED = [("000000 embed.out", "F32", (2, 3)), ("000001 norm.out", "I64", ())]
DATA = [np.arange(6, dtype=np.float32), np.array([9])]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "part-000004.safetensors"
    datas = [memoryview(each.tobytes()) for each in DATA]
    write_part(made, head_of(4, NAMED, STEPS, ()), datas)
    sync(tmp_path, [made.name])
    return made


def test_the_oracle_reads_what_is_written(path: Path) -> None:
    with safe_open(path, "np") as theirs:
        assert set(theirs.keys()) == {name for name, _, _ in NAMED}
        assert theirs.get_tensor("000000 embed.out").tolist() == [[0, 1, 2], [3, 4, 5]]
        assert theirs.get_tensor("000001 norm.out").tolist() == 9
        assert theirs.metadata()["format"] == "degarble-capture"
    ours = read_part(path)
    assert (ours.number, ours.steps, ours.calls) == (4, STEPS, ())
    assert bytes(ours.read("000000 embed.out")) == DATA[0].tobytes()
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def with_head(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    """Change a head and keep the data."""

    def changed(data: bytes) -> bytes:
        end = 8 + int.from_bytes(data[:8], "little")
        head = json.loads(data[8:end])
        change(head)
        text = json.dumps(head).encode()
        return len(text).to_bytes(8, "little") + text + data[end:]

    return changed


FAULTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut in the head": (lambda d: d[:50], "length of the head"),
    "cut in the data": (lambda d: d[:-1], "size"),
    "longer": (lambda d: d + b"\0", "size"),
    "no length": (lambda d: b"\0" * 8 + d[8:], "length of the head"),
    "no JSON": (lambda d: d[:8] + b"x" + d[9:], "head"),
    "no metadata": (with_head(lambda h: h.pop("__metadata__")), "__metadata__"),
    "newer": (with_head(lambda h: h["__metadata__"].update(version="2")), "version"),
    "another part": (with_head(lambda h: h["__metadata__"].update(part="5")), "part"),
    "another index": (
        with_head(lambda h: h["__metadata__"].update(index='{"steps":[],"calls":[]}')),
        "index",
    ),
    "a gap": (with_head(lambda h: h[NAMED[1][0]].update(data_offsets=[25, 33])), "tensor 000001"),
    "another shape": (with_head(lambda h: h[NAMED[0][0]].update(shape=[2, 4])), "tensor 000000"),
    "another dtype": (with_head(lambda h: h[NAMED[0][0]].update(dtype="F3")), "tensor 000000"),
    "a hostile name": (with_head(lambda h: h.update({"\x1b[2J": 1})), r"tensor .*\\u001b"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_part_is_refused_by_name(fault: str, path: Path) -> None:
    change, told = FAULTS[fault]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UnreadableFile, match=rf"^part-000004\.safetensors.*{told}"):
        read_part(path)


def test_a_folder_that_is_gone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnwritablePath, match="No such file"):
        write_part(tmp_path / "gone" / "part-000000.safetensors", b"", [])
    with pytest.raises(UnwritablePath, match="No such file"):
        sync(tmp_path / "gone", [])
