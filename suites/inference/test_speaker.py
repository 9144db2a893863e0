"""Next logits are the last rows of all logits, for sequences of any length side by side."""

from __future__ import annotations

import pytest
import torch

from degarble.references.state import Sequence
from degarble.suites.inference.speaking_cases import ids, speaker


@pytest.mark.parametrize("family", ["v4", "v32"])
def test_next_logits_are_the_last_rows(family: str) -> None:
    made = speaker(family)
    prompts = [torch.tensor(ids(n, length)) for n, length in enumerate((5, 1, 140))]
    sequences = [Sequence() for _ in prompts]
    following = made.next_logits(sequences, prompts)
    assert [each.length for each in sequences] == [5, 1, 140]
    for row, prompt in zip(following, prompts, strict=True):
        alone = made.logits(made.hidden([Sequence()], [prompt]))
        assert alone.shape == (len(prompt), 64)
        assert (row - alone[-1]).abs().max() < 1e-12


def test_the_context_is_the_configs() -> None:
    assert speaker("v4").context == 400
