"""Softmax attention as a definition, and whether a model's own function computes the same.

Shape letters: T tokens of a sequence, S tokens that it attends to, H query heads, G heads of keys,
D width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

MASK = "mask"
FIRST_KEY = "first_key"  # the position of the first key that a cache kept; 0 where it kept all
SINK = "s_aux"  # what transformers calls the parameter
SCALED_AFTER = "sinks scale the result"
SINK_WIDE = "sinks are held in float32"
MASKED = -(2.0**30)  # what is added to a score to hide its key; the lowest number may overflow
_PROBED = 5  # tokens of a comparison with the model's own function
_NEAR = 1e-4  # its softmax may be in float32


@dataclass(frozen=True)
class MaskOperator:
    """Stands for the code that makes a mask: what eager attention adds to its scores."""

    admits: Any = field(compare=False)  # the mask function that the model chose
    dtype: torch.dtype

    def name(self) -> str:
        """Return the operator's name."""
        return MASK

    def __call__(self, queries: int, keys: int) -> Tensor:
        """Return zeros where a key is seen, and the lowest number of the dtype where not."""
        hidden = ~admitted_keys(self.admits, queries, keys)[None, None]
        lowest = torch.finfo(self.dtype).min
        return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, lowest)


def admitted_keys(mask: Any, queries: int, keys: int, first: int = 0) -> Tensor:
    """Return which keys each query sees [T, S], by the function that the model masks with.

    `first` is the position of the first key: chunks begin at fixed positions.
    """
    at_q = torch.arange(first + keys - queries, first + keys)[:, None].expand(-1, keys)
    at_k = torch.arange(first, first + keys)[None].expand(queries, -1)
    if mask is None:
        return at_k <= at_q
    zero = torch.zeros_like(at_q)
    admitted: Tensor = mask(zero, zero, at_q, at_k).bool()
    return admitted


def unpadded(own: Any, uniform: Mapping[int, Tensor], *at: Tensor) -> Any:
    """Call a mask function; what it kept of the trace is `uniform`, or says that nothing is padded.

    `uniform` holds the value of tensors by identity, where all of their elements have the same.
    """
    with _Unpadded(uniform):
        return own(*at)


class _Unpadded(TorchDispatchMode):
    """Gives values to tensors of the trace."""

    def __init__(self, uniform: Mapping[int, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not
        self._uniform = uniform

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on what is known."""
        del types
        return func(*tree_map(self._filled, args), **tree_map(self._filled, kwargs or {}))

    def _filled(self, argument: Any) -> Any:
        if not isinstance(argument, torch.Tensor) or not argument.is_meta:
            return argument
        value = self._uniform.get(id(argument), torch.tensor(argument.dtype is torch.bool))
        return value.to(argument.dtype).expand(argument.shape)


class Stored(Protocol):
    """Rounds what a run stores on the way, or returns it as it is."""

    def __call__(self, value: Tensor, /) -> Tensor:
        """Store an operation's result."""

    def shares(self, value: Tensor, /) -> Tensor:
        """Store attention's shares."""


class _Exact:
    def __call__(self, value: Tensor, /) -> Tensor:
        return value

    shares = __call__


def attended(
    inputs: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    sink: Tensor | None = None,
    stored: Stored | None = None,
) -> Tensor:
    """Return softmax attention [T, H, D] over the keys that the model's mask admits.

    The last T of S keys are those of the new tokens. A mask that the model computed is an input.
    """
    stored = stored or _Exact()
    q_THD, k_SGD, v_SGD = (inputs[name].double() for name in ("query", "key", "value"))
    group = q_THD.shape[1] // k_SGD.shape[1]
    keys, values = (side.repeat_interleave(group, 1) for side in (k_SGD, v_SGD))
    scale = facts.get("scaling")
    q_HTD, k_HDS = q_THD.transpose(0, 1), keys.permute(1, 2, 0)
    scores = stored(torch.bmm(q_HTD, k_HDS))
    scores = stored(scores * (q_THD.shape[-1] ** -0.5 if scale is None else float(scale)))
    cap = facts.get("softcap")
    if cap:
        scores = stored(stored(torch.tanh(stored(scores / cap))) * cap)
    if MASK in inputs:
        scores = stored(scores + inputs[MASK].double().movedim(1, 0))
    else:
        first = int(inputs.get(FIRST_KEY, 0))
        admitted = admitted_keys(facts.get(MASK), q_THD.shape[0], k_SGD.shape[0], first)
        scores = scores.masked_fill(~admitted, -torch.inf)
    if sink is None:
        return _weighted(scores.softmax(-1), values, stored)
    # torch computes in float32 what one of its operands has.
    joined = _Exact() if facts.get(SINK_WIDE) else stored
    if facts.get(SCALED_AFTER):
        # The same as one more column of scores.
        top = scores.amax(-1, keepdim=True)
        total = stored(stored(stored(scores - top).exp()).sum(-1, keepdim=True))
        size = stored(stored(total.log()) + top)
        share = joined(torch.sigmoid(joined(size - sink.double().reshape(-1, 1, 1))))
        return stored(_weighted(scores.softmax(-1), values, stored)) * share.transpose(0, 1)
    column = sink.double().reshape(-1, 1, 1).expand(-1, scores.shape[1], 1)
    both = torch.cat([scores, column], -1)
    both = joined(both - both.amax(-1, keepdim=True))
    return _weighted(both.softmax(-1)[..., :-1], values, stored)


def _weighted(shares: Tensor, values: Tensor, stored: Stored) -> Tensor:
    return torch.bmm(stored.shares(shares), values.transpose(0, 1)).transpose(0, 1)


class _Names(TorchDispatchMode):
    """Keeps the names of operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator."""
        del types
        self.names.add(str(func.name()).removeprefix("aten::").partition(".")[0])
        return func(*args, **(kwargs or {}))


def facts_of(
    own: Any, module: nn.Module, forms: Mapping[str, Tensor], named: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return what `attended` has to know so that it computes what a model's function does.

    None where it computes something else: the function is tried on a few random tokens.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    with _disable_current_modes(), torch.no_grad():
        given = {
            name: drawn(1, form.shape[1], _PROBED, form.shape[3]) for name, form in forms.items()
        }
        held = {name: drawn(*each.shape) for name, each in _parameters(module).items()}
        stated = {
            name: _standing_for(fact, _parameters(module), held) for name, fact in named.items()
        }
        facts = {name: fact for name, fact in stated.items() if not isinstance(fact, torch.Tensor)}
        added = MaskOperator(None, torch.float32)(_PROBED, _PROBED)
        sink = stated.get(SINK)
        watched = _Names()
        try:
            with watched, mock.patch.dict(module._parameters, held):  # noqa: SLF001
                want = own(module, *given.values(), added, **stated)[0]
            rows = {name: each[0].transpose(0, 1) for name, each in given.items()}
            got = attended(rows, facts, sink)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return None
        if want.shape[1:] != got.shape or not torch.allclose(want[0], got, atol=_NEAR):
            return None
    facts[SCALED_AFTER] = sink is not None and "cat" not in watched.names
    facts[SINK_WIDE] = sink is not None and named[SINK].dtype is torch.float32
    return facts


def _parameters(module: nn.Module) -> dict[str, Any]:
    return {name: each for name, each in module._parameters.items() if each is not None}  # noqa: SLF001


def _standing_for(fact: Any, own: Mapping[str, Any], held: Mapping[str, Tensor]) -> Any:
    return next((held[name] for name, each in own.items() if each is fact), fact)
