"""Components on another device: what goes there, what comes back, and a device that is absent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import MissingDevice
from degarble.harness.commands.check.check import CheckRun, Wanted
from degarble.harness.engine.localise.localise import localise
from degarble.harness.engine.localise.recorded_run import InMemoryRun
from degarble.harness.formats.weight import Weight
from degarble.harness.inference import devices
from degarble.harness.inference.model import HELD_VALUES, open_model
from degarble.harness.report.verdict import Verdict
from degarble.suites.commands.check.test_check import captured
from degarble.suites.serve.talking_cases import write_speaker

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = [[7, 8, 9, 31], [9]]


@pytest.mark.parametrize("family", ["v4", "v32"])
def test_a_model_behind_the_way_there_and_back_is_the_same_model(
    family: str, tmp_path: Path
) -> None:
    source = write_speaker(tmp_path / "model", family, "nvfp4-full")
    with open_model(source) as plain, open_model(source) as moved:
        bound = moved.speaker.bound
        devices.wrap_calls(bound, torch.device("cpu"))
        run = InMemoryRun.of(bound, PROMPTS)
        expected = InMemoryRun.of(plain.speaker.bound, PROMPTS)
        assert all(map(torch.equal, run.logits, expected.logits))
        assert localise(bound, moved.recipe, expected).verdict is Verdict.AGREES


def test_a_cause_is_named_behind_another_device_and_with_streamed_weights(tmp_path: Path) -> None:
    """Ways that rebind a reference's facts ask the call that computes, not the one in front."""
    source = write_speaker(tmp_path / "model")
    capture = captured(source, tmp_path / "capture", "layers.1.attn.q_norm")
    told = []
    for held_values, device in ((HELD_VALUES, False), (HELD_VALUES, True), (0, False)):
        with CheckRun(Wanted(capture, source, held_values=held_values)) as run:
            if device:
                devices.wrap_calls(run.twin, torch.device("cpu"))
            (origin,) = run.judge().origins
            assert (run.model.streamed is None) == bool(held_values)
            assert origin.diagnosed is not None
            told.append((origin.diagnosed.sentence, [e.id for e in origin.diagnosed.named]))
    assert told[0][1]
    assert [ids for _, ids in told] == [told[0][1]] * 3
    assert told[1] == told[0]


def test_what_a_kernel_writes_into_its_inputs_there_is_written_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A copy stands for another device: no machine of the suites has one."""
    plain = torch.Tensor.to

    def away(tensor: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        made = plain(tensor, *args, **named)
        return made.clone() if args and isinstance(args[0], torch.device) else made

    source = write_speaker(tmp_path / "model")
    seen: dict[str, torch.Tensor] = {}

    def kernel(inputs: Any, weights: Any) -> Any:
        (weight,) = weights.values()
        seen["weight"] = weight.values(torch.float32)
        inputs["x"].mul_(2)
        return {"out": inputs["x"]}

    with open_model(source) as model:
        bound = model.speaker.bound
        bound.calls["norm"] = kernel
        devices.wrap_calls(bound, torch.device("cpu"))
        monkeypatch.setattr(torch.Tensor, "to", away)
        x = torch.ones(2, 3)
        made = bound.calls["norm"]({"x": x}, bound.weights_of("norm"))["out"]
        (own,) = bound.weights_of("norm").values()
        assert isinstance(own, Weight)
        assert seen["weight"] is not own.values(torch.float32)
        assert torch.equal(seen["weight"], own.values(torch.float32))
        first = seen["weight"]
        bound.calls["norm"]({"x": x}, bound.weights_of("norm"))
        assert seen["weight"] is first, "a held weight goes there once"
    assert torch.equal(made, torch.full((2, 3), 2.0))
    assert torch.equal(x, torch.full((2, 3), 4.0))


def test_a_device_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    devices.require_device("--device", "cpu")
    with pytest.raises(MissingDevice, match="--device = 'cuda'"):
        devices.require_device("--device", "cuda")
