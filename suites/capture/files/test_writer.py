from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from degarble.harness.base.errors import UnwritablePath
from degarble.harness.capture.files import records as capture_parts
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.records import CapturedStep, Phase
from degarble.harness.capture.files.writer import CaptureWriter, PendingCall, PendingTensor
from degarble.suites.capture.files.capture_cases import FACTS, arrays, payload, sent, write_capture
from degarble.suites.hang_guard import HANG_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

STEP = CapturedStep(0, Phase.PREFILL, (5,), (0,), (0,))


def test_shared_bytes_are_stored_once(tmp_path: Path) -> None:
    with CaptureWriter(tmp_path, FACTS) as writer:
        writer.step(STEP)
        x, _ = arrays(0)
        same = payload(x)
        call = PendingCall(
            0, "norm", {"x": PendingTensor(same, x.shape)}, {"out": PendingTensor(same, (24,))}
        )
        writer.call(call)
        # Another object with the same bytes, and the same bytes in another dtype.
        writer.call(PendingCall(0, "head", {"x": sent(x), "y": sent(x.view(np.uint16))}, {}))
        tally = writer.finish()
    assert (tally.tensors, tally.stored_bytes, tally.shown_bytes) == (4, 2 * 96, 4 * 96)
    capture = Capture.open(tmp_path)
    first, second = capture.calls
    assert first.inputs["x"].at == first.outputs["out"].at == second.inputs["x"].at
    assert capture.array(first.outputs["out"]).tolist() == x.reshape(-1).tolist()
    assert second.inputs["y"].at == "000001 head.in.y"


def test_only_hashes_of_what_is_not_stored(tmp_path: Path) -> None:
    with CaptureWriter(tmp_path, FACTS) as writer:
        writer.step(STEP)
        x, _ = arrays(0)
        told = PendingTensor(payload(x, stored=False), x.shape, None, {"amax": 2.0})
        writer.call(PendingCall(0, "norm", {"x": told}, {}))
        writer.call(PendingCall(0, "head", {"x": sent(x)}, {}))
        assert writer.finish().stored_bytes == 96
    first, second = Capture.open(tmp_path).calls
    assert first.inputs["x"].at is None
    assert first.inputs["x"].sha256 == second.inputs["x"].sha256


def test_the_same_run_writes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_capture(tmp_path / name)
    one, other = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in "ab")
    assert one == other
    assert sorted(one) == ["manifest.json", "part-000000.safetensors"]


def test_memory_is_bounded_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, waiting = threading.Event(), []
    plain = capture_parts.write_part

    def slow(*given: Any) -> None:
        gate.wait(HANG_SECONDS)
        waiting.append(writer._in_memory)
        plain(*given)

    monkeypatch.setattr(capture_parts, "write_part", slow)
    chance = np.random.default_rng(1)
    with CaptureWriter(tmp_path, FACTS, memory_bytes=40_000) as writer:
        writer.step(STEP)
        done = threading.Event()

        def run() -> None:
            for _ in range(50):
                x = chance.standard_normal((1000,), np.float32)
                writer.call(PendingCall(0, "norm", {"x": sent(x)}, {}))
            done.set()

        thread = threading.Thread(target=run)
        thread.start()
        assert not done.wait(0.2)  # 200 kB do not fit, so the run waits
        gate.set()
        thread.join()
        writer.finish()
    assert max(waiting) <= 40_000
    capture = Capture.open(tmp_path)
    assert len(capture.calls) == 50
    assert len(capture.parts) > 10
    assert list(capture.damage()) == []


def test_one_tensor_larger_than_the_bound_passes(tmp_path: Path) -> None:
    with CaptureWriter(tmp_path, FACTS, memory_bytes=100) as writer:
        writer.step(STEP)
        for value in range(5):
            x = np.full(1000, value, np.float32)
            writer.call(PendingCall(0, "norm", {"x": sent(x)}, {}))
        writer.finish()
    assert len(Capture.open(tmp_path).calls) == 5


@pytest.mark.parametrize("where", ["call", "finish"])
def test_a_full_disk_is_reported_and_leaves_an_incomplete_capture(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, written = capture_parts.write_part, threading.Event()

    def full(path: Path, *given: Any) -> None:
        if path.name != "part-000000.safetensors":
            written.set()
            raise UnwritablePath("part", "No space left", "room", "Make room.") from OSError(
                errno.ENOSPC, "No space left"
            )
        plain(path, *given)

    monkeypatch.setattr(capture_parts, "write_part", full)

    def run(calls: int) -> None:
        with CaptureWriter(tmp_path, FACTS, part_bytes=1) as writer:
            writer.step(STEP)
            for value in range(calls):
                writer.call(PendingCall(0, "norm", {"x": sent(np.full(9, value, np.float32))}, {}))
                assert value < 2 or written.wait(HANG_SECONDS)
            writer.finish()

    with pytest.raises(UnwritablePath, match="No space left"):
        run(1000 if where == "call" else 2)
    capture = Capture.open(tmp_path)
    assert not capture.complete
    assert len(capture.parts) == 1


def test_a_run_that_fails_leaves_what_it_had(tmp_path: Path) -> None:
    def run() -> None:
        with CaptureWriter(tmp_path, FACTS) as writer:
            writer.step(STEP)
            writer.call(PendingCall(0, "norm", {"x": sent(arrays(0)[0])}, {}))
            raise KeyError("the run's own fault")

    with pytest.raises(KeyError):
        run()
    capture = Capture.open(tmp_path)
    assert (capture.complete, len(capture.calls)) == (False, 1)
    assert list(capture.damage()) == []


def test_a_run_that_is_refused_before_its_first_call_leaves_nothing(tmp_path: Path) -> None:
    def run() -> None:
        with CaptureWriter(tmp_path, FACTS):
            raise KeyError("no such prompt")

    with pytest.raises(KeyError):
        run()
    assert list(tmp_path.iterdir()) == []


def test_a_capture_is_never_written_over(tmp_path: Path) -> None:
    write_capture(tmp_path)
    before = (tmp_path / "manifest.json").read_bytes()
    with pytest.raises(UnwritablePath, match=r"--out = .*a folder without a capture"):
        CaptureWriter(tmp_path, FACTS)
    (tmp_path / "manifest.json").rename(tmp_path / "manifest.old")
    with pytest.raises(UnwritablePath, match="--out"):
        CaptureWriter(tmp_path, FACTS)
    assert (tmp_path / "manifest.old").read_bytes() == before
