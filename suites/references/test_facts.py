"""Which tokens belong to which sequence: read once a step, and anew when the tensors change."""

from __future__ import annotations

import torch

from degarble.references.facts import Span, spans_of


def test_spans_are_read_once_while_nobody_writes_into_them() -> None:
    given = {"positions": torch.tensor([4, 5, 0]), "token_offsets": torch.tensor([0, 2, 3])}
    spans = spans_of(given)
    assert spans == (Span(0, 2, 4), Span(2, 3, 0))
    assert spans_of(dict(given)) is spans
    given["positions"][2] = 9
    assert spans_of(given) == (Span(0, 2, 4), Span(2, 3, 9))
    given["token_offsets"][1] = 1
    given["positions"][1] = 3
    assert spans_of(given) == (Span(0, 1, 4), Span(1, 3, 3))
    alone = {"positions": torch.tensor([7]), "token_offsets": torch.tensor([0, 1])}
    assert spans_of(alone) == (Span(0, 1, 7),)


def test_tensors_without_a_version_are_always_read() -> None:
    with torch.inference_mode():
        given = {"positions": torch.tensor([4]), "token_offsets": torch.tensor([0, 1])}
        assert spans_of(given) == (Span(0, 1, 4),)
        given["positions"][0] = 6
        assert spans_of(given) == (Span(0, 1, 6),)
