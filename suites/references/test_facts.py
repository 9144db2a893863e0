"""Which tokens belong to which sequence: read once a step, and anew when the tensors change."""

from __future__ import annotations

import torch

from degarble.harness.model.config.config import small_v4, small_v32
from degarble.references.facts import Span, V4Facts, V32Facts, spans_of
from degarble.references.numerics import SOURCES, Numerics


def test_epsilons_that_sources_do_not_take_from_the_config() -> None:
    config, v4 = small_v32(rms_norm_eps=1e-3), small_v4(rms_norm_eps=1e-3)
    names = ("attn.norm", "attn.q_norm", "attn.kv_norm", "attn.indexer.k_norm", "norm")
    found = {}
    for source in (None, "vllm", "transformers"):
        numerics = Numerics.definition(switches=SOURCES[source] if source else None)
        facts = V32Facts(config, numerics, config.layers[1], {})
        found[source] = [facts.norm_epsilon(name) for name in names]
        assert V4Facts(v4, numerics, v4.layers[1], {}).norm_epsilon("attn.q_norm") == 1e-3
    assert found[None] == found["vllm"] == [1e-3, 1e-3, 1e-3, 1e-6, 1e-3]
    assert found["transformers"] == [1e-3, 1e-6, 1e-6, 1e-6, 1e-3]


def test_spans_are_read_once_until_they_are_overwritten() -> None:
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
