"""What counts as the same: bits of what two ways make of the same calls, in every call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.engine.faults.model_faults import Sight, Way, with_outputs
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.museum.plants import FaultyTwin, equal_outputs, same_effect
from degarble.suites.museum.museum_stages import small_stage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

WO = "layers.1.attn.wo"


def times(factor: float) -> Way:
    def change(_inputs: Any, outputs: Any) -> Any:
        return {name: factor * each for name, each in outputs.items()}

    return Way(f"times {factor}", with_outputs(change))


def every_other(factor: float) -> Way:
    """Wrong in every second call: a way that remembers."""

    def apply(call: Any) -> Any:
        calls = iter(range(1000))

        def faulty(inputs: Any, weights: Any) -> Any:
            outputs = call(inputs, weights)
            wrong = next(calls) % 2
            return {n: factor * each if wrong else each for n, each in outputs.items()}

        return faulty

    return Way("every other", apply)


def same(planted: Way, named: Way, calls: slice = slice(None)) -> bool:
    stage = small_stage()
    candidate = stage.candidate()
    candidate.calls[WO] = planted.apply(candidate.calls[WO])
    run = stage.run(candidate)
    scene = stage.scene(WO)
    sights = []
    for call in [each for each in run.calls if each.component == WO]:
        inputs = run.inputs(call)
        expected = stage.twin.calls[WO](inputs, scene.weights)
        sights.append(Sight(inputs, run.outputs(call), expected, step=call.step))
    chosen = sights[calls]
    trouble: Any = SimpleNamespace(scene=scene, sight=chosen[0], more=tuple(chosen[1:]))
    first: Any = SimpleNamespace(way=named, fault=MODEL_FAULTS["M43.whole"])
    return same_effect(FaultyTwin(stage.twin, WO, planted, run), trouble, first)


@pytest.mark.parametrize(
    ("planted", "named", "expected"),
    [
        (times(2.0), times(2.0), True),
        (times(2.0), times(2.02), False),
        (every_other(2.0), times(2.0), False),
    ],
)
def test_it_is_the_same_in_every_call_or_it_is_not(
    planted: Way, named: Way, expected: bool
) -> None:
    assert same(planted, named) == expected


def test_a_way_that_remembers_is_remade_in_order() -> None:
    """The second call of the run is wrong, and asked alone it still is."""
    assert same(every_other(2.0), times(2.0), slice(1, 2))
    assert not same(every_other(2.0), times(2.0), slice(0, 1))


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ({"out": torch.arange(4000.0)}, True),
        ({"out": torch.arange(4000.0).where(torch.arange(4000) != 7, -1.0)}, True),
        ({"out": torch.arange(4000.0).where(torch.arange(4000) > 7, -1.0)}, False),
        ({"out": torch.arange(4001.0)}, False),
        ({"other": torch.arange(4000.0)}, False),
    ],
)
def test_nearly_all_elements_have_to_be_equal(made: Mapping[str, Tensor], expected: bool) -> None:
    assert equal_outputs(made, {"out": torch.arange(4000.0)}) == expected
    nan = {"out": torch.full((5,), torch.nan)}
    assert equal_outputs(nan, nan)
