"""Components of a captured run: replayed from the capture alone, each gives what it gave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.records import Phase
from degarble.harness.capture.files.writer import CaptureWriter
from degarble.harness.capture.options import CaptureFilter
from degarble.harness.capture.recorder import Recorder
from degarble.suites.capture.capture_models import PROMPTS, bound_v4, captured_v4, run_v4

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


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
    wanted = CaptureFilter.of(layers="1", components="attn.*", tokens="1,9")
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


def test_statistics_only_keeps_hashes_and_no_bytes(tmp_path: Path, capture: Capture) -> None:
    found = captured_v4(tmp_path, statistics_only=True)
    assert sum(part.size for part in found.parts) < 0.5 * sum(p.size for p in capture.parts)
    for ours, theirs in zip(found.calls, capture.calls, strict=True):
        for (site, kept), (_, full) in zip(ours.sites(), theirs.sites(), strict=True):
            assert kept.at is None
            assert (kept.sha256, kept.shape) == (full.sha256, full.shape), site
            assert kept.statistics is not None
            assert kept.statistics["count"] == capture.tensor(full).numel()
