"""Inputs that no run can have had are refused by call and input; those of healthy runs are not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.capture.files.reader import require_usable_inputs
from degarble.harness.model.components import components
from degarble.suites.capture.capture_models import captured_v4
from degarble.suites.checkpoint.reading_cases import TINY_V4

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.capture.files.reader import Capture
    from degarble.harness.capture.files.records import CapturedTensor

ATTEND = "layers.1.attn.attend"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    return captured_v4(tmp_path_factory.mktemp("inputs") / "capture")


class Changed:
    """A capture in which one input of one call is another tensor."""

    def __init__(self, capture: Capture, component: str, name: str, value: Tensor) -> None:
        call = next(each for each in capture.by_component()[component] if name in each.inputs)
        kept: CapturedTensor = call.inputs[name]._replace(
            dtype={torch.int64: "I64", torch.float32: "F32"}[value.dtype], shape=tuple(value.shape)
        )
        changed = replace(call, inputs=dict(call.inputs) | {name: kept})
        self.calls = [changed if each is call else each for each in capture.calls]
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
