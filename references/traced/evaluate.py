"""Run traced operations on given tensors: in float64 as a definition, for any number of tokens.

A tensor of the trace has a batch of one and an axis of tokens somewhere; outside of this module
every tensor has its tokens in front: `to_rows` and `from_rows` convert. Roundings that the traced
model makes on the way (casts to its own dtype) are left out, those of the results are the caller's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from degarble.references.traced.trace import VIEWS, ExtentRef, ParameterRef, Ref

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from degarble.references.linears import InputQuantiser
    from degarble.references.traced.graph import ViewEdge
    from degarble.references.traced.trace import Operation, Trace, TracedTensor

    Stored = Callable[[Tensor, torch.dtype], Tensor]


class Parameters(Protocol):
    """The parameters of a model by name, whole or in part."""

    def __call__(self, name: str) -> Tensor:
        """Return all values of a parameter."""
        ...

    def count(self, name: str) -> int:
        """Return the extent of its first axis."""
        ...

    def entry(self, name: str, number: int) -> Tensor:
        """Return one entry of its first axis."""
        ...

    def table(self, name: str, numbers: Tensor) -> Tensor:
        """Return some rows of it."""
        ...

    def quantiser(self, name: str, expert: int | None = None) -> InputQuantiser | None:
        """Return how the input of a weight is quantised; None: not at all."""
        ...

    def short_summed(
        self, name: str, number: int, x: Tensor, quantiser: InputQuantiser
    ) -> Tensor | None:
        """Return the product of a stack's entry as a tensor core sums FP8; None where none does."""
        ...

    def cached(self, module: str, side: str) -> InputQuantiser | None:
        """Return how keys or values of an attention module are cached; None: as they are."""
        ...


_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def to_rows(value: Tensor, traced: TracedTensor) -> Tensor:
    """Return a tensor of the trace's form with its tokens in front and without the batch."""
    axis = traced.token_axis
    if value.is_complex():
        value = torch.view_as_real(value)
    if axis is None:
        return value
    if traced.rows > 1:
        return value.reshape(-1, traced.rows, *value.shape[1:])
    if axis and traced.shape[0] == 1:
        value, axis = value.squeeze(0), axis - 1
    return value.movedim(axis, 0)


def from_rows(rows: Tensor, traced: TracedTensor) -> Tensor:
    """Return rows in the form that the trace has them; pairs of numbers as complex ones."""
    if traced.dtype.is_complex and not rows.is_complex():
        rows = torch.view_as_complex(rows.contiguous())
    axis = traced.token_axis
    if axis is None:
        return rows
    if traced.rows > 1:
        return rows.flatten(0, 1)
    batched = bool(axis) and traced.shape[0] == 1
    extents = [extent for at, extent in enumerate(traced.shape) if at != axis][batched:]
    if not traced.columns:
        rows = rows.reshape(-1, *extents)
    rows = rows.movedim(0, axis - batched)
    return rows.unsqueeze(0) if batched else rows


def joined(parts: Iterable[Tensor], axis: int = 0) -> Tensor:
    """Return tensors one after the other; columns of tokens are filled up with the last one."""
    held = list(parts)
    widest = max((part.shape[-1] for part in held if part.ndim > 1), default=0)
    return torch.cat([_filled_up(part, widest) for part in held], axis)


def _filled_up(part: Tensor, width: int) -> Tensor:
    if part.ndim < 2 or part.shape[-1] == width:
        return part
    missing = width - part.shape[-1]
    return torch.cat([part, part[..., -1:].expand(*part.shape[:-1], missing)], -1)


def view_of(trace: Trace, edge: ViewEdge, rows: Mapping[int, Tensor], number: int) -> Tensor:
    """Return a tensor that is a view of a recorded one, both as rows."""
    (source,) = edge.sources
    made = rows[source.number]
    values = {source.number: from_rows(made, trace.tensors[source.number])}
    operations = (trace.operations[operation] for operation in edge.operations)
    run(operations, values, None, made.shape[0], made.dtype)
    return to_rows(values[number], trace.tensors[number])


def run(
    operations: Iterable[Operation],
    values: dict[int, Tensor],
    parameters: Parameters | None,
    tokens: int,
    work: torch.dtype = torch.float64,
    stored: Stored = lambda value, _dtype: value,
) -> None:
    """Run operations in order; `values` holds tensors by number, and receives every result.

    `stored` gets every result with the dtype in which the traced model holds it, and returns it
    rounded, or as it is.
    """

    def known(argument: Any) -> Any:
        if isinstance(argument, Ref):
            return values[argument.number]
        if isinstance(argument, ParameterRef):
            assert parameters is not None, "views read no parameters"
            return _widened(parameters(argument.name), work)
        if isinstance(argument, ExtentRef):
            return argument.factor * tokens
        if isinstance(argument, torch.Tensor):
            return _widened(argument, work)
        if isinstance(argument, torch.dtype):
            if argument.is_complex:
                return work.to_complex()
            return work if argument in _FLOATS else argument
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    for operation in operations:
        given: Sequence[Any] = operation.arguments
        if operation.name == "embedding" and isinstance(given[0], ParameterRef):
            # A table of a hundred thousand rows in float64 is larger than most memories.
            chosen, numbers = known(given[1]).unique(return_inverse=True)
            assert parameters is not None, "views read no parameters"
            given = (parameters.table(given[0].name, chosen), numbers, *given[2:])
        arguments = [_mapped(argument, known) for argument in given]
        keywords = {name: _mapped(keyword, known) for name, keyword in operation.keywords.items()}
        if operation.name == "_softmax":
            arguments[2] = False  # half_to_float: what it widens is wide already
        if operation.name == "topk":
            arguments[1] = min(arguments[1], arguments[0].shape[-1])
        made = operation.function(*arguments, **keywords)
        results = made if isinstance(made, (tuple, list)) else (made,)
        dtypes = operation.dtypes
        for number, result, dtype in zip(operation.results, results, dtypes, strict=True):
            values[number] = result if operation.name in VIEWS else stored(result, dtype)


def _mapped(argument: Any, known: Callable[[Any], Any]) -> Any:
    if isinstance(argument, (Ref, ParameterRef, ExtentRef)):
        return known(argument)
    if isinstance(argument, (list, tuple)):
        return [_mapped(part, known) for part in argument]
    return known(argument)


def _widened(tensor: Tensor, work: torch.dtype) -> Tensor:
    return tensor.to(work) if tensor.is_floating_point() else tensor
