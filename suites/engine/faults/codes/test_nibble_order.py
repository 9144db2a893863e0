from __future__ import annotations

import torch

from degarble.harness.engine.faults.codes.nibble_order import inject, signature
from degarble.harness.engine.faults.family import Case
from degarble.harness.formats.number_formats import MXFP8, NVFP4
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.suites.engine.weights import heavy_tailed


def test_neighbours_change_places(seed: int) -> None:
    tensor = quantise(heavy_tailed(4, 64, seed), NVFP4)
    damaged = inject(tensor)
    assert damaged is not None
    right, wrong = dequantise(tensor), dequantise(damaged)
    assert torch.equal(wrong[:, 0::2], right[:, 1::2])
    assert torch.equal(wrong[:, 1::2], right[:, 0::2])


def test_twice_is_none(seed: int) -> None:
    tensor = quantise(heavy_tailed(4, 64, seed), NVFP4)
    once = inject(tensor)
    assert once is not None
    twice = inject(once)
    assert twice is not None
    assert torch.equal(twice.codes, tensor.codes)


def test_the_evidence_counts_codes(seed: int) -> None:
    tensor = quantise(heavy_tailed(4, 64, seed), NVFP4)
    damaged = inject(tensor)
    assert damaged is not None
    match = signature(Case(tensor, damaged, torch.tensor([True, True, False, False])))
    assert match is not None
    assert match.reproduced == 1.0
    assert "reproduces 100.0 % of 128 codes" in match.evidence


def test_unpacked_formats_have_no_nibbles(seed: int) -> None:
    tensor = quantise(heavy_tailed(4, 64, seed), MXFP8)
    assert inject(tensor) is None
    assert signature(Case(tensor, tensor, torch.ones(4, dtype=torch.bool))) is None
