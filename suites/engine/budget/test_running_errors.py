"""Running errors bound float32 computations, in whatever order sums are taken."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.engine.budget.running_errors import RunningErrors

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Function = Callable[[Tensor, Tensor], Tensor]

_ELEMENTWISE: dict[str, Function] = {
    "add": lambda a, b: (a + b) + a,
    "mul": lambda a, b: (a * b) * a,
    "div": lambda a, b: (a * b) / (b.abs() + 1),
    "exp": lambda a, b: (a * b).exp(),
    "sigmoid": lambda a, b: (a * b).sigmoid(),
    "silu": lambda a, b: torch.nn.functional.silu(a * b),
    "gelu": lambda a, b: torch.nn.functional.gelu(a * b),
    "tanh": lambda a, b: (a * b).tanh(),
    "cos": lambda a, b: (a * b).cos(),
    "pow": lambda a, b: (a * b).pow(2),
    "sqrt": lambda a, b: (a * b).abs().add(0.1).sqrt(),
    "rsqrt": lambda a, b: (a * b).abs().add(0.1).rsqrt(),
    "softplus": lambda a, b: torch.nn.functional.softplus(a * b),
    "maximum": lambda a, b: torch.maximum(a * b, a + b),
    "cat": lambda a, b: torch.cat([a * b, a + b], -1),
    "exp of a masked row": lambda a, b: (a * b).masked_fill(b > 0, -torch.inf).exp(),
    "expm1": lambda a, b: (a * b).expm1(),
    "log": lambda a, b: ((a * b).abs() + 1).log(),
    "log1p": lambda a, b: (a * b).abs().log1p(),
    "cube": lambda a, b: (a * b).pow(3),
    "reciprocal": lambda a, b: ((a * b).abs() + 1).reciprocal(),
    "scatter": lambda a, b: a.scatter(-1, (b > 0).long(), a * b),
    "layer norm": lambda a, b: torch.nn.functional.layer_norm(a * b, (64,), b[0], a[0]),
    "in place": lambda a, b: (a * b).clone().mul_(b).add_(a),
}
_REDUCED: dict[str, Function] = {
    "sum": lambda a, b: (a * b).sum(-1),
    "mean": lambda a, b: (a * b).mean(-1),
    "softmax": lambda a, b: (a * b).softmax(-1).amax(-1),
    "mm": lambda a, b: (a * a) @ b.T,
    "index_add": lambda a, b: (
        torch.zeros_like(a[:1]).index_add(0, torch.zeros(16, dtype=torch.int64), a * b).sum(-1)
    ),
}


def _operands() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(7)
    return torch.randn(16, 64, generator=draw), torch.randn(16, 64, generator=draw)


def _bounded(function: Function, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    with RunningErrors() as errors:
        exact = function(a.double(), b.double())
    assert not errors.unknown
    return exact, errors.of(exact)


@pytest.mark.parametrize("name", _ELEMENTWISE)
def test_an_elementwise_rule_bounds_float32(name: str) -> None:
    a, b = _operands()
    exact, bound = _bounded(_ELEMENTWISE[name], a, b)
    off = (_ELEMENTWISE[name](a, b).double() - exact).abs()
    assert bool((off <= bound).all())
    assert float((bound / exact.abs().clamp(min=1e-3)).median()) < 1e-5, "a bound that says much"


@pytest.mark.parametrize("name", _REDUCED)
def test_a_sum_is_bounded_in_random_orders(name: str) -> None:
    a, b = _operands()
    exact, bound = _bounded(_REDUCED[name], a, b)
    draw = torch.Generator().manual_seed(8)
    for _ in range(20):
        order = torch.randperm(64, generator=draw)
        off = (_REDUCED[name](a[:, order], b[:, order]).double() - exact).abs()
        assert bool((off <= bound).all())


def test_an_operator_without_a_rule_is_unbounded() -> None:
    with RunningErrors() as errors:
        made = torch.erfinv(torch.rand(4, dtype=torch.float64))
    assert "erfinv" in errors.unknown
    assert bool(errors.of(made).isinf().all())


def test_tensors_of_inference_mode_are_converted_as_others() -> None:
    """They reach a mode as `to`, and not as what it is made of."""
    with torch.inference_mode():
        a, b = _operands()
        with RunningErrors() as errors:
            made = (a * b).to(torch.float64)
        assert not errors.unknown
        assert bool((errors.of(made) > 0).any())
