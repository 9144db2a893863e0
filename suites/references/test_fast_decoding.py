"""The compiled loops of a decoding step equal the readable forms; the definition never takes them.

Products of BF16 by BF16 are exact in float64 and their sums nearly so: bits that are stored in BF16
do not depend on who computed them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from degarble.harness.formats.weight import Weight
from degarble.references import attention, compiled, linears
from degarble.references.numerics import Numerics, compiles

HELD = replace(Numerics.bf16(), work=torch.float64, products=torch.float64)


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("tokens", [1, 4])
def test_products_read_weights_as_they_are_stored(tokens: int, seed: int) -> None:
    x = noise(tokens, 70, seed=seed)
    weight = Weight(value=noise(33, 70, seed=seed + 1).bfloat16())
    made = linears.product(x, weight, torch.float64, HELD)
    assert not weight._decoded  # the compiled one ran: nothing was decoded
    expected = x @ weight.values(torch.float64).T
    assert (made - expected).abs().max() < 1e-13
    stored = x.bfloat16()
    both = [linears.matmul(each, weight, HELD) for each in (stored, stored.repeat(5, 1))]
    assert torch.equal(both[0], both[1][:tokens])  # alone and in company


def test_groups_have_a_matrix_each(seed: int) -> None:
    x, value = noise(2, 3 * 16, seed=seed), noise(3, 5, 16, seed=seed + 1).bfloat16()
    made = attention.grouped_as_stored(x, value, HELD)
    assert torch.equal(made, attention.grouped(x, value.double(), HELD))
    turned = attention.grouped_as_stored(x, value.flip(0), HELD)
    assert not torch.equal(made, turned)  # a group with another's matrix is seen


@pytest.mark.parametrize("counts", [(40,), (31, 1, 8), (0, 5)])
def test_attention_of_one_token_is_the_readable_one(counts: tuple[int, ...], seed: int) -> None:
    q, sink = noise(1, 8, 24, seed=seed), noise(8, seed=seed)
    rows = [noise(count, 24, seed=seed + n) for n, count in enumerate(counts, 1)]
    seen = torch.ones(1, sum(counts), dtype=torch.bool)
    made = attention.attend(q, rows, None, sink, HELD)
    assert torch.equal(made, attention.attend(q, rows, seen, sink, HELD))
    direct = compiled.attend(q[0], rows, sink, 24**-0.5)
    kept = replace(HELD, store=torch.float64)
    expected = attention.attend(q, rows, seen, sink, kept)[0]
    assert (direct - expected).abs().max() > 0.0  # weights are rounded to BF16 as they are stored
    assert (direct - expected).abs().max() < 2**-7 * expected.abs().max()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_numbers_that_are_none_stay_so(poison: float, seed: int) -> None:
    q, sink, rows = noise(1, 2, 8, seed=seed), noise(2, seed=seed), noise(5, 8, seed=seed + 1)
    rows[3, 2] = poison
    made = attention.attend(q, [rows], None, sink, HELD)
    seen = torch.ones(1, 5, dtype=torch.bool)
    expected = attention.attend(q, [rows], seen, sink, HELD)
    assert torch.equal(made.isfinite(), expected.isfinite())
    assert not made.isfinite().all()


def test_who_may_compile(seed: int) -> None:
    x = noise(2, 8, seed=seed)
    assert compiles(HELD, x)
    assert not compiles(Numerics.definition(), x)  # the definition stays readable
    assert not compiles(Numerics.bf16(), x)  # float32 sums would change in stored bits
    assert not compiles(HELD, x.clone().requires_grad_())
    assert not compiles(HELD, x.T)
    weight = Weight(value=noise(4, 8, seed=seed).bfloat16())
    linears.product(x, weight, torch.float64, Numerics.definition())
    linears.product(noise(5, 8, seed=seed), weight, torch.float64, HELD)  # too many tokens
    assert weight._decoded
    with pytest.raises(RuntimeError):  # by torch, instead of reading beyond the end
        linears.product(x[:, :7].contiguous(), weight, torch.float64, HELD)
