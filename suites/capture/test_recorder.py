"""A recorder copies what a run computed, once, into a folder or memory, and changes nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from degarble.harness import api
from degarble.harness.base.errors import DtypeMismatch
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.records import DTYPE_BYTES, Phase
from degarble.harness.capture.files.writer import CaptureWriter
from degarble.harness.capture.options import CaptureFilter
from degarble.harness.capture.recorder import (
    WORDS,
    MemoryRun,
    Recorder,
    Snapshots,
    same,
    statistics_of,
)
from degarble.suites.capture.capture_models import PROMPTS, Stack, bound_v4, captured_v4, run_v4

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


# --------------------------------------------------------------------------------------------------
# Components of a captured run: replayed from the capture alone, each gives what it gave.


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    return captured_v4(tmp_path_factory.mktemp("captured") / "v4")


def equal(ours: Tensor, theirs: Tensor) -> bool:
    alike = (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    return alike and torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))


def test_every_component_replays_from_the_capture(capture: Capture) -> None:
    bound = bound_v4(5)
    ran = {name for name in bound.calls if not name.startswith("mtp.")}
    assert set(capture.by_component()) == ran
    for call in capture.calls:
        with torch.inference_mode():
            outputs = bound(call.component, **capture.inputs(call))
        kept = capture.outputs(call)
        assert set(outputs) == set(kept)
        wrong = [name for name in kept if not equal(outputs[name], kept[name])]
        assert not wrong, (call.component, wrong)


def test_steps_are_prefill_then_decode(capture: Capture) -> None:
    first, *following = capture.steps
    assert (first.phase, first.tokens) == (Phase.PREFILL, (*PROMPTS[0], *PROMPTS[1]))
    assert first.sequences == (0,) * 9 + (1,) * 2
    assert first.positions == (*range(9), 0, 1)
    assert [(s.phase, s.positions) for s in following] == [
        (Phase.DECODE, (9, 2)), (Phase.DECODE, (10, 3)),
    ]  # fmt: skip
    assert {call.step for call in capture.calls} == {0, 1, 2}
    assert not any(call.changed for call in capture.calls)


def test_what_flows_between_components_is_stored_once(capture: Capture) -> None:
    calls = {call.component: call for call in capture.calls if call.step == 0}
    made = calls["layers.0.attn.norm"].outputs["out"]
    for taker in ("wq_a", "wkv"):
        assert calls[f"layers.0.attn.{taker}"].inputs["x"].at == made.at
    assert len({k.at for c in capture.calls for _, k in c.sites()}) < 0.6 * sum(
        len(c.inputs) + len(c.outputs) for c in capture.calls
    )


def test_capturing_changes_nothing(tmp_path: Path) -> None:
    logits: list[Tensor] = []
    for name in ("plain", "captured"):
        bound = bound_v4(5)
        bound.observer = lambda c, _i, o: logits.append(o["out"]) if c == "head" else None
        with CaptureWriter(tmp_path / name, {}) as writer:
            recorder = Recorder(writer)
            if name == "captured":
                recorder.wrap(bound)
            run_v4(bound, recorder)
    half = len(logits) // 2
    assert all(map(torch.equal, logits[:half], logits[half:]))


def test_a_component_that_writes_over_its_input_is_reported(tmp_path: Path) -> None:
    """The input is kept as it was before; what came behind is kept as it became."""
    bound, name = bound_v4(5), "layers.1.ffn.shared.w13"
    plain = bound.calls[name]

    def spoiling(inputs: Any, weights: Any) -> Any:
        outputs = plain(inputs, weights)
        inputs["x"].view(torch.int16).numpy()[0, 0] ^= 1  # as a kernel does, behind torch's back
        return outputs

    bound.calls[name] = spoiling
    with CaptureWriter(tmp_path, {}) as writer:
        recorder = Recorder(writer)
        recorder.wrap(bound)
        run_v4(bound, recorder, decode=0)
        writer.finish()
    capture = Capture.open(tmp_path)
    changed = {call.component: call.changed for call in capture.calls if call.changed}
    assert changed == {name: ("x",)}
    calls = {call.component: call for call in capture.calls}
    made = calls["layers.1.ffn.norm"].outputs["out"]
    assert calls[name].inputs["x"].sha256 == made.sha256


def test_filters_leave_the_rest_out(tmp_path: Path, capture: Capture) -> None:
    wanted = CaptureFilter.from_options(layers="1", components="attn.*", tokens="1,9")
    found = captured_v4(tmp_path, wanted)
    whole = {(c.step, c.component): c for c in capture.calls}
    assert {c.component.rsplit("attn.", 1)[0] for c in found.calls} == {"layers.1."}
    assert {c.step for c in found.calls} == {0, 1}  # no token of step 2 is wanted
    for call in found.calls:
        rows = (1, 10) if call.step == 0 else (0,)
        for port in ("inputs", "outputs"):
            sites = getattr(call, port)
            for name, kept in sites.items():
                full = capture.tensor(getattr(whole[call.step, call.component], port)[name])
                assert kept.rows in (None, rows)
                expected = full if kept.rows is None else full[list(kept.rows)]
                assert equal(found.tensor(kept), expected), (call.component, name)
        if "x" in call.inputs and not call.component.endswith("compressor.write"):
            assert call.inputs["x"].rows == rows


def test_a_step_of_which_all_tokens_are_chosen_is_whole(tmp_path: Path, capture: Capture) -> None:
    """So attention of a long prompt is judged in the pieces that were kept."""
    wanted = CaptureFilter.from_options(layers="1", tokens="0-999")
    found = captured_v4(tmp_path, wanted)
    assert {call.step for call in found.calls} == {step.number for step in capture.steps}
    assert {kept.rows for call in found.calls for _, kept in call.sites()} == {None}


def test_statistics_only_keeps_hashes_and_no_bytes(tmp_path: Path, capture: Capture) -> None:
    found = captured_v4(tmp_path, statistics_only=True)
    assert sum(part.size for part in found.parts) < 0.5 * sum(p.size for p in capture.parts)
    for ours, theirs in zip(found.calls, capture.calls, strict=True):
        for (site, kept), (_, full) in zip(ours.sites(), theirs.sites(), strict=True):
            assert kept.at is None
            assert (kept.sha256, kept.shape) == (full.sha256, full.shape), site
            assert kept.statistics is not None
            assert kept.statistics["count"] == capture.tensor(full).numel()


def test_every_dtype_of_the_format_is_taken_as_it_is() -> None:
    assert set(WORDS.values()) == set(DTYPE_BYTES)
    snapshots = Snapshots()
    for dtype, word in WORDS.items():
        values = torch.tensor([0, 1, 1, 0, 1, 0], dtype=torch.uint8)
        tensor = values.to(dtype).reshape(2, 3)
        payload = snapshots.take(tensor).payload
        assert (payload.dtype, payload.shape) == (word, (2, 3))
        assert payload.data is not None
        assert bytes(payload.data) == tensor.view(torch.uint8).numpy().tobytes()


def test_an_unchanged_tensor_gives_the_same_snapshot() -> None:
    snapshots, x = Snapshots(), torch.arange(12.0).reshape(3, 4)
    first = snapshots.take(x)
    assert snapshots.take(x.view(4, 3)).payload is first.payload
    assert snapshots.take(x[:2]).payload is not first.payload
    assert snapshots.take(x.T).payload is not first.payload
    assert snapshots.take(x.clone()).payload is not first.payload  # told by hash, not here


def test_a_changed_tensor_is_another_snapshot() -> None:
    """Also one changed behind torch's back, as a kernel does."""
    snapshots, x = Snapshots(), torch.arange(12.0)
    first = snapshots.take(x)
    x.numpy()[3] = -0.0
    assert not same(first, x)
    second = snapshots.take(x)
    assert second.payload is not first.payload
    assert first.codes.view(torch.float32)[3] == 3


def test_a_changed_last_byte_and_another_size_are_detected() -> None:
    snapshots, x = Snapshots(), torch.arange(1 << 16, dtype=torch.uint8)
    first = snapshots.take(x)
    x[-1] += 1
    assert not same(first, x)
    x[-1] -= 1
    assert same(first, x)
    assert not same(first, x[:-1])
    assert same(snapshots.take(x[:0]), x[:0])


def test_nan_and_the_sign_of_zero_are_bytes() -> None:
    snapshots, x = Snapshots(), torch.tensor([math.nan, 0.0])
    first = snapshots.take(x)
    assert same(first, x)
    x[1] = -0.0
    assert not same(first, x)


def test_rows_with_gaps_are_taken_without_them() -> None:
    x = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    snapshot = Snapshots().take(x[:, 1:3])
    assert snapshot.codes.view(torch.bfloat16).tolist() == [1, 2, 5, 6, 9, 10]
    assert same(snapshot, x[:, 1:3])


def test_only_so_many_bytes_are_kept() -> None:
    snapshots = Snapshots(kept_bytes=100)
    tensors = [torch.full((10,), float(n)) for n in range(5)]
    taken = [snapshots.take(tensor) for tensor in tensors]
    again = [snapshots.take(tensor) for tensor in reversed(tensors)]
    shared = [a.payload is b.payload for a, b in zip(taken, reversed(again), strict=True)]
    assert shared == [False, False, False, True, True]
    assert snapshots.take(torch.zeros(1000)).payload.nbytes == 4000


def test_statistics_by_hand() -> None:
    x = torch.tensor([3.0, -4.0, 0.0, math.nan, math.inf, -math.inf])
    found = statistics_of(x)
    rms = found.pop("rms")
    assert found == {
        "count": 6, "nan": 1, "inf": 2, "zeros": 1, "min": -4.0, "max": 3.0, "mean": -1 / 3,
    }  # fmt: skip
    assert math.isclose(rms, math.sqrt(25 / 3))
    assert math.isclose(statistics_of(torch.full((2,), 1e300, dtype=torch.float64))["rms"], 1e300)
    assert statistics_of(torch.tensor([math.nan])) == {"count": 1, "nan": 1, "inf": 0}
    assert statistics_of(torch.empty(0)) == {"count": 0}
    assert statistics_of(torch.tensor([True, False]))["mean"] == 0.5


def test_what_the_format_cannot_spell_is_refused() -> None:
    with pytest.raises(DtypeMismatch, match="complex64"):
        Snapshots().take(torch.zeros(2, dtype=torch.complex64))


# --------------------------------------------------------------------------------------------------
# A run in memory is the capture on disk, without the disk.


def test_memory_and_disk_hold_the_same(tmp_path: Path) -> None:
    model, tokens = Stack(), torch.arange(6)[None]
    run = api.capture(model, tokens)
    disk = api.capture(model, tokens, folder=tmp_path / "run")
    assert isinstance(run, MemoryRun)
    assert isinstance(disk, Capture)
    assert run.steps == list(disk.steps)
    assert [c.component for c in run.calls] == [c.component for c in disk.calls]
    for ours, theirs in zip(run.calls, disk.calls, strict=True):
        for read in ("inputs", "outputs"):
            left, right = getattr(run, read)(ours), getattr(disk, read)(theirs)
            assert set(left) == set(right)
            assert all(torch.equal(left[name], right[name]) for name in left)
    assert {kept.dtype for c in run.calls for _, kept in c.sites()} == {"F32", "I64"}


def test_what_is_written_over_later_stays_as_it_was() -> None:
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.last = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.first(x)
            out: torch.Tensor = self.last(made)
            made.zero_()
            return out

    run = api.capture(Careless(), torch.randn(3, 4))
    assert isinstance(run, MemoryRun)
    first, last = run.calls
    assert torch.equal(run.outputs(first)["out"], run.inputs(last)["x"])
    assert bool(run.outputs(first)["out"].any())


def test_a_model_of_numbers_has_one_row_a_token() -> None:
    run = api.capture(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 5, 4))
    assert len(run.steps[0].tokens) == 10
    (call,) = run.calls
    assert run.inputs(call)["x"].shape == (10, 4)
    single = api.capture(nn.Sequential(nn.Linear(4, 4)), torch.randn(5, 4))
    assert len(single.steps[0].tokens) == 5
