"""Captures of whole layers of our kernels, by stand-ins on the CPU: what a step shows is judged."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.backends.cutedsl.backend import CONVENTIONS
from degarble.harness.backends.graph.decoder import Decoder
from degarble.harness.base.errors import NotBuilt
from degarble.harness.capture.decoding import V4_SHOWN, decoding_captured
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.options import CaptureRequest
from degarble.harness.inference.model import open_model
from degarble.harness.model.components import components
from degarble.suites.backends import cutedsl_cases as cases
from degarble.suites.backends.cutedsl_standin import StandIn
from degarble.suites.vllm import graph_capture
from degarble.suites.vllm.any_model import told

if TYPE_CHECKING:
    from pathlib import Path


def test_a_step_shows_what_its_components_take_and_return(tmp_path: Path) -> None:
    model = cases.write_model(tmp_path, "v4", "nvfp4-full")
    with open_model(model.checkpoint, switches=CONVENTIONS) as found, torch.inference_mode():
        bound: Any = found.logits_model.bound
        decoder = Decoder.from_model(StandIn(), bound, found.recipe, lanes=3, positions=64)
        place = tmp_path / "a"
        with decoding_captured(decoder, found.config, place, CaptureRequest(nbytes=1 << 30), {}):
            for ids in ([9, None, None], [None, 12, 31]):
                decoder.feed(ids, [0, 0, 0])
                decoder.run()
        decoder.run()  # and afterwards nobody watches
    capture = Capture.open(place)
    shown = {each.name: each for each in components(found.config) if each.role in V4_SHOWN}
    assert {call.component for call in capture.calls} == shown.keys()
    for call in capture.calls:
        component = shown[call.component]
        assert set(call.inputs) == {each.name for each in component.inputs}
        assert set(call.outputs) == set(component.outputs)
    assert [step.tokens for step in capture.steps] == [(9,), (12, 31)], "lanes at rest are left out"
    assert [step.sequences for step in capture.steps] == [(0,), (1, 2)]
    low, normed = (
        next(call for call in capture.calls if call.component == f"layers.1.attn.{name}")
        for name in ("wq_a", "q_norm")
    )
    assert torch.equal(capture.outputs(low)["out"], capture.inputs(normed)["x"])


@pytest.mark.slow
@pytest.mark.parametrize("name", graph_capture.OUR_RUNS)
def test_layers_agree_and_a_planted_fault_is_placed(tmp_path: Path, name: str) -> None:
    graph_capture.write_ours(tmp_path)
    graph_capture.capture_ours(tmp_path, name, StandIn())
    place = tmp_path / f"run-{name.replace(' ', '-')}"
    document = told(place, tmp_path / "ours", sys.executable)
    assert graph_capture.OUR_RUNS[name].holds(document), document


def test_prompts_that_are_fed_in_pieces_are_refused(tmp_path: Path) -> None:
    model = cases.write_model(tmp_path, "v32", "nvfp4-full")
    with open_model(model.checkpoint, switches=CONVENTIONS) as found, torch.inference_mode():
        bound: Any = found.logits_model.bound
        decoder = Decoder.from_model(StandIn(), bound, found.recipe, lanes=1, positions=64)
        captured = decoding_captured(decoder, found.config, tmp_path / "a", CaptureRequest(), {})
        with pytest.raises(NotBuilt, match="DeepSeek-V4"), captured:
            pass
    assert not (tmp_path / "a").exists()
