"""Codes by packed BF16: every value by every scale is coded as its true quotient is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from degarble.harness.formats import scalar_ops as codecs
from degarble.kernels.primitives import e2m1 as halves
from degarble.kernels.primitives.e2m1 import HALF_OPERATORS, WORDS

SCALES = torch.arange(1, 0x7F)


def words_of(code_N: torch.Tensor) -> list[torch.Tensor]:
    """Pack BF16 codes by two, four words to a group."""
    pairs = code_N.unflatten(-1, (-1, WORDS, 2))
    return list((pairs[..., 0] + pairs[..., 1] * 65_536).unbind(-1))


def coded(code_N: torch.Tensor, scale: torch.Tensor, off: int = 0) -> torch.Tensor:
    """Return words of codes of BF16 values up to six scales, as a kernel makes them."""
    estimate = ((1 / scale).view(torch.int32) + off).view(torch.float32)
    terms = halves.inverse_terms(scale, estimate)
    assert (terms[1] >= 0).all()
    inverse: Any = tuple(codecs.bf16_encode(term) * 0x1_0001 for term in terms)
    made: torch.Tensor = halves.code_word(halves.quotients(words_of(code_N), inverse))
    return made


def wanted(number_N: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return words of the codes of true quotients."""
    code_N = codecs.e2m1_encode((number_N.double() / scale.double()).float())
    places = torch.arange(8) * 4
    made: torch.Tensor = (code_N.unflatten(-1, (-1, 8)) << places).sum(-1)
    return made


def bounded(scale: torch.Tensor) -> torch.Tensor:
    """Return every BF16 between 2**-11 and six of a scale, and some below, with both signs."""
    most = codecs.bf16_encode(scale * codecs.E2M1_MAX)
    code_N = torch.cat((torch.tensor([0, 1, 0x80, 0x1000]), torch.arange(0x3A00, 0x4528)))
    code_N = code_N.minimum(most)
    both = torch.cat((code_N, code_N + 0x8000), -1)
    return both[..., : both.shape[-1] // 8 * 8]


@pytest.mark.parametrize("off", [-2, 0, 2])
def test_every_value_by_every_scale(off: int) -> None:
    for code in SCALES[:: 1 if not off else 9]:
        scale = codecs.e4m3_decode(code[None])
        values = bounded(scale)
        number = codecs.bf16_decode(values)
        assert torch.equal(coded(values, scale, off), wanted(number, scale)), int(code)


def test_neighbours_do_not_matter() -> None:
    scale = codecs.e4m3_decode(torch.tensor([0x3B]))
    values = bounded(scale)
    for step in (1, 3, 5):
        order = torch.randperm(len(values), generator=torch.Generator().manual_seed(step))
        number = codecs.bf16_decode(values[order])
        assert torch.equal(coded(values[order], scale), wanted(number, scale))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_SUMMANDS", 0x4284_4284),
        ("_WITHOUT_CONSTANT", 0),
        ("_SIGNS_AND_EXPONENTS", 0x7F80_7F80),
        ("_UPPER_BF16", 0xFF80_0000),
    ],
)
def test_other_constants_are_detected(
    name: str, wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, name, wrong)
    found = 0
    for code in SCALES[::13]:
        scale = codecs.e4m3_decode(code[None])
        values = bounded(scale)
        found += not torch.equal(coded(values, scale), wanted(codecs.bf16_decode(values), scale))
    assert found


def test_the_first_term_alone_moves_values() -> None:
    scale = codecs.e4m3_decode(torch.tensor([0x3F]))
    values = bounded(scale)
    first = codecs.bf16_encode(halves.inverse_terms(scale, 1 / scale)[0]) * 0x1_0001
    got = halves.code_word([HALF_OPERATORS.product(word, first) for word in words_of(values)])
    assert not torch.equal(got, wanted(codecs.bf16_decode(values), scale))
