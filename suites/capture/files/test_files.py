"""Captures on disk: written, read, killed, damaged and refused by name."""

from __future__ import annotations

import errno
import json
import random
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from degarble.harness.base.errors import InvalidArgument, UnreadableFile, UnwritablePath
from degarble.harness.capture.files import records as capture_parts
from degarble.harness.capture.files.reader import (
    _NUMPY,
    _TORCH,
    Capture,
    capture_document,
    capture_lines,
    require_usable_inputs,
)
from degarble.harness.capture.files.records import (
    DTYPE_BYTES,
    FACTS,
    CapturedCall,
    CapturedStep,
    CapturedTensor,
    Phase,
    head_of,
    read_json_object,
    read_part,
    require_known_types,
    sync,
    write_part,
)
from degarble.harness.capture.files.writer import CaptureWriter, PendingCall, PendingTensor
from degarble.harness.model.components import components
from degarble.suites.capture.capture_models import captured_v4
from degarble.suites.capture.files.capture_cases import FACTS as CAPTURE_CASES_FACTS
from degarble.suites.capture.files.capture_cases import (
    arrays,
    old_capture,
    payload,
    sent,
    write_capture,
)
from degarble.suites.checkpoint.reading_cases import TINY_V4
from degarble.suites.hang_guard import HANG_SECONDS, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor


HASH = "0f" * 32
KEPT = CapturedTensor("BF16", (2, 3), HASH, "000000 embed.out", (4, 9), {"amax": 1.5, "nan": 0})
CALL = CapturedCall(
    3, 1, "layers.0.attn.wq_a", {"x": KEPT}, {"out": KEPT._replace(rows=None)}, ("x",)
)
STEP = CapturedStep(1, Phase.DECODE, (7, 8), (4, 0), (0, 1))


def test_what_is_spelled_is_read_again() -> None:
    assert CapturedTensor.of_json(KEPT.to_json(), "k") == KEPT
    assert CapturedCall.of_json(CALL.to_json(), "c") == CALL
    assert CapturedStep.of_json(STEP.to_json(), "s") == STEP
    assert KEPT.nbytes == 12
    places = [str(site) for site, _ in CALL.sites()]
    assert places == ["layers.0.attn.wq_a.in.x", "layers.0.attn.wq_a.out"]


@pytest.mark.parametrize(
    ("where", "value", "told"),
    [
        (("dtype",), "F4", "dtype"),
        (("shape",), [2, -3], "shape"),
        (("shape",), [1 << 40, 1 << 40], "shape"),
        (("shape",), [True], "shape"),
        (("sha256",), "0f", "sha256"),
        (("rows",), [1, 2, 3], "rows"),
        (("at",), 7, "at"),
        (("statistics",), {"amax": "1"}, "statistics"),
    ],
)
def test_a_damaged_tensor_is_refused_by_field(where: tuple[str], value: Any, told: str) -> None:
    raw = KEPT.to_json() | {where[0]: value}
    with pytest.raises(UnreadableFile, match=rf"k: {told} = .*Capture the run again"):
        CapturedTensor.of_json(raw, "k")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("number", -1),
        ("step", "0"),
        ("component", "layers.00.attn"),
        ("inputs", {"In": {}}),
        ("inputs", []),
        ("outputs", {"a.b": {}}),
        ("changed", ["y"]),
    ],
)
def test_a_damaged_call_is_refused_by_field(field: str, value: Any) -> None:
    with pytest.raises(UnreadableFile, match=rf"c.*: {field} = "):
        CapturedCall.of_json(CALL.to_json() | {field: value}, "c")


@pytest.mark.parametrize(("field", "value"), [("phase", "training"), ("tokens", [1]), ("x", 0)])
def test_a_damaged_step_is_refused(field: str, value: Any) -> None:
    raw = STEP.to_json() | {field: value}
    if field == "x":
        del raw["positions"]
    with pytest.raises(UnreadableFile, match=r"^s"):
        CapturedStep.of_json(raw, "s")


@pytest.mark.parametrize(
    "text", [b'{"a":1,"a":2}', b'{"a":NaN}', b"[1]", b"\xff", b"{", b"[" * 100_000]
)
def test_text_that_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(UnreadableFile, match="head"):
        read_json_object(text, "head")


# --------------------------------------------------------------------------------------------------
# Facts of a capture: a known one of another type is refused by name, others are let through.

SOUND: dict[str, Any] = {
    "source": {"name": "model", "path": "/x", "fingerprint": "ab", "content": None},
    "config": {"hidden_size": 8},
    "recipe": [{"match": "*", "weight": "BF16", "activation": "BF16"}],
    "filters": {"layers": ["layers.0"], "components": None, "tokens": ["0-3"]},
    "budget": {
        "bytes": 9,
        "estimate": 7,
        "whole": 20,
        "layers_left_out": ["1-2"],
        "tokens_left_out": [],
    },
    "statistics_only": False,
    "new_tokens": 4,
    "versions": {"torch": "2"},
    "conventions": {"wo_a_follows_recipe": True},
    "by_backend": ["head"],
    "fell_to_torch": [],
    "fraction_bits": {"head": 13},
    "biases": ["layers.0.mlp.up_proj"],
    "sequences": [{"prompt": [1], "new": [], "text": "", "finish": "length"}],
    **dict.fromkeys(("family", "backend", "arithmetic", "form", "sums", "device"), "a"),
}


def test_facts_of_our_captures_are_known_and_others_are_accepted() -> None:
    assert SOUND.keys() == FACTS.keys()
    require_known_types(SOUND)
    require_known_types({"texts": ["anna"], "engine": [{}], "config": None})


@pytest.mark.parametrize("name", sorted(FACTS))
@pytest.mark.parametrize("value", [-1, 2**63, True, 0.5, "a", [], {}, [[]], [1], {"a": [{}]}])
def test_a_fact_of_another_type_is_refused_by_name(name: str, value: Any) -> None:
    alike = type(value) is type(SOUND[name])
    try:
        require_known_types({name: value})
    except UnreadableFile as error:
        assert error.name == f"facts: {name}"  # noqa: PT017  a value of the type may be legal
    else:
        assert alike


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
    change, text = FAULTS[fault]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UnreadableFile, match=rf"^part-000004\.safetensors.*{text}"):
        read_part(path)


def test_a_folder_that_is_gone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnwritablePath, match="No such file"):
        write_part(tmp_path / "gone" / "part-000000.safetensors", b"", [])
    with pytest.raises(UnwritablePath, match="No such file"):
        sync(tmp_path / "gone", [])


WRITER_STEP = CapturedStep(0, Phase.PREFILL, (5,), (0,), (0,))


def test_shared_bytes_are_stored_once(tmp_path: Path) -> None:
    with CaptureWriter(tmp_path, CAPTURE_CASES_FACTS) as writer:
        writer.step(WRITER_STEP)
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
    with CaptureWriter(tmp_path, CAPTURE_CASES_FACTS) as writer:
        writer.step(WRITER_STEP)
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
    with CaptureWriter(tmp_path, CAPTURE_CASES_FACTS, memory_bytes=40_000) as writer:
        writer.step(WRITER_STEP)
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
    with CaptureWriter(tmp_path, CAPTURE_CASES_FACTS, memory_bytes=100) as writer:
        writer.step(WRITER_STEP)
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
        with CaptureWriter(tmp_path, CAPTURE_CASES_FACTS, part_bytes=1) as writer:
            writer.step(WRITER_STEP)
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
        with CaptureWriter(tmp_path, CAPTURE_CASES_FACTS) as writer:
            writer.step(WRITER_STEP)
            writer.call(PendingCall(0, "norm", {"x": sent(arrays(0)[0])}, {}))
            raise KeyError("the run's own fault")

    with pytest.raises(KeyError):
        run()
    capture = Capture.open(tmp_path)
    assert (capture.complete, len(capture.calls)) == (False, 1)
    assert list(capture.damage()) == []


def test_a_run_that_is_refused_before_its_first_call_leaves_nothing(tmp_path: Path) -> None:
    def run() -> None:
        with CaptureWriter(tmp_path, CAPTURE_CASES_FACTS):
            raise KeyError("no such prompt")

    with pytest.raises(KeyError):
        run()
    assert list(tmp_path.iterdir()) == []


def test_a_capture_is_never_written_over(tmp_path: Path) -> None:
    write_capture(tmp_path)
    before = (tmp_path / "manifest.json").read_bytes()
    with pytest.raises(UnwritablePath, match=r"--out = .*a folder without a capture"):
        CaptureWriter(tmp_path, CAPTURE_CASES_FACTS)
    (tmp_path / "manifest.json").rename(tmp_path / "manifest.old")
    with pytest.raises(UnwritablePath, match="--out"):
        CaptureWriter(tmp_path, CAPTURE_CASES_FACTS)
    assert (tmp_path / "manifest.old").read_bytes() == before


# --------------------------------------------------------------------------------------------------
# A capturing run that is killed at any moment leaves a capture that opens, marked incomplete.


def _exists_or_ended(path: Path, run: subprocess.Popen[bytes]) -> bool:
    return path.exists() or run.poll() is not None


@pytest.mark.parametrize("trials", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_killed_at_any_moment(trials: int, tmp_path: Path, seed: int) -> None:
    chance, calls = random.Random(seed), 0
    for trial in range(trials):
        folder = tmp_path / str(trial)
        command = [sys.executable, "-m", "degarble.suites.capture.files.capture_cases", str(folder)]
        with subprocess.Popen(command) as run:
            third = folder / "part-000003.safetensors"
            until(partial(_exists_or_ended, third, run))
            assert run.poll() is None
            time.sleep(chance.random() * 0.05)
            run.kill()
        capture = Capture.open(folder)
        assert not capture.complete
        assert list(capture.damage()) == []
        assert len(capture.parts) >= 4
        first = capture.calls[0]
        assert capture.array(first.inputs["x"]).tolist() == arrays(0)[0].tolist()
        calls += len(capture.calls)
        shutil.rmtree(folder)
    assert calls > 8 * trials


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
    (text,) = capture.damage()
    assert text.startswith("part-000001.safetensors: tensor 00000")
    owner = next(k for call in capture.calls for _, k in call.sites() if str(k.at) in text)
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


READER_FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
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


@pytest.mark.parametrize("fault", READER_FAULTS)
def test_a_damaged_capture_is_refused_by_name(fault: str, folder: Path) -> None:
    damage, text = READER_FAULTS[fault]
    damage(folder)
    with pytest.raises(UnreadableFile, match=text):
        Capture.open(folder)


TOLD = """\
Capture {hash}, complete, by degarble {version}
  run         toy, toy, torch, bf16
  steps       1 of prefill (3 tokens)
  calls       4 of 4 components
  tensors     10, 6 stored: 248 B
  changed     2 calls wrote into their inputs, first layers.0.attn.wq_a (x)"""


def test_an_old_capture_still_renders_without_torch(tmp_path: Path) -> None:
    old = old_capture(tmp_path / "old")
    code = (
        "import sys; from pathlib import Path\n"
        "from degarble.harness.capture.files.reader import Capture\n"
        "from degarble.harness.capture.files.reader import capture_lines\n"
        "print(*capture_lines(Capture.open(Path(sys.argv[1]))), sep='\\n')\n"
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(old)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    capture = Capture.open(old)
    text = TOLD.format(hash=capture.hash[:12], version=capture.tool_version)
    assert done.stdout == text + "\n"
    assert capture_document(capture)["changed"] == 2


def test_an_incomplete_one_says_so_first(tmp_path: Path) -> None:
    write_capture(tmp_path / "capture")
    file = tmp_path / "capture" / "manifest.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    raw |= {"complete": False, "facts": {"source": {"name": "\x1b[2J"}}}
    file.write_text(json.dumps(raw), encoding="utf-8")
    lines = capture_lines(Capture.open(tmp_path / "capture"))
    assert lines[0].startswith("Capture, incomplete")
    assert "\x1b" not in "".join(lines)


# --------------------------------------------------------------------------------------------------
# Inputs that no run can have had are refused by call and input; those of healthy runs are not.

ATTEND = "layers.1.attn.attend"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    return captured_v4(tmp_path_factory.mktemp("inputs") / "capture")


class Changed:
    """A capture in which one input of one call is another tensor."""

    def __init__(self, capture: Capture, component: str, name: str, value: Tensor) -> None:
        call = next(
            captured_call
            for captured_call in capture.by_component()[component]
            if name in captured_call.inputs
        )
        kept: CapturedTensor = call.inputs[name]._replace(
            dtype={torch.int64: "I64", torch.float32: "F32"}[value.dtype], shape=tuple(value.shape)
        )
        changed = replace(call, inputs=dict(call.inputs) | {name: kept})
        self.calls = [
            changed if captured_call is call else captured_call for captured_call in capture.calls
        ]
        self._capture, self._kept, self._value = capture, kept, value

    def tensor(self, kept: CapturedTensor) -> Tensor:
        return self._value if kept is self._kept else self._capture.tensor(kept)


def test_a_healthy_run_is_taken(healthy: Capture) -> None:
    require_usable_inputs(healthy, components(TINY_V4), TINY_V4.vocab_size)


@pytest.mark.parametrize(
    ("component", "name", "value", "told"),
    [
        (ATTEND, "positions", torch.full((11,), -1), "numbers from 0"),
        (ATTEND, "positions", torch.full((11,), 2**40), "numbers from 0"),
        (ATTEND, "positions", torch.zeros(11), "integers in one row"),
        (ATTEND, "token_offsets", torch.tensor([0, 9, 10]), "from 0 up to 11"),
        (ATTEND, "token_offsets", torch.tensor([0, 0, 11]), "each larger"),
        (ATTEND, "token_offsets", torch.tensor([11]), "from 0 up to 11"),
        ("embed", "tokens", torch.full((11,), TINY_V4.vocab_size), "below 64"),
    ],
)
def test_an_input_that_no_run_had_is_refused(
    healthy: Capture, component: str, name: str, value: Tensor, told: str
) -> None:
    changed: Any = Changed(healthy, component, name, value)
    with pytest.raises(UnreadableFile, match=told) as caught:
        require_usable_inputs(changed, components(TINY_V4), TINY_V4.vocab_size)
    assert component in caught.value.name
