"""Find the rows on which a correct float32 kernel may overflow, whatever the component.

10^20 squared does not fit into float32. A norm in float32 then returns zeros, in another order of
operations NaN, and in float64 the right numbers. All of these are correct kernels, so such a row
cannot be judged. The twin itself shows which rows these are: it runs once more in float32, and
every intermediate tensor is inspected. So norms, softmax, mixing, pooling and products need no list
of their own. This runs only where something differs and very large or very small values arrived.

Underflow is checked only before a reciprocal root: vanishing squares do not matter next to epsilon,
unless epsilon is as small as they are.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.engine.faults.rebinding import facts_of, with_numerics
from degarble.harness.engine.localise.judgeable_rows import lines_of
from degarble.harness.engine.localise.output_forms import LARGEST
from degarble.harness.engine.localise.replay import is_ragged
from degarble.references.binding import plain_call
from degarble.references.linears import activation_values

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.engine.localise.replay import Known, Replay

    Tensors = Mapping[str, Tensor]

OVERFLOW = "a correct float32 kernel may overflow on them"
_SMALLEST = 2.0**-100  # before a root: its terms may have been flushed to zero
_ORDINARY = 2.0**32  # the product of three inputs below this stays in range
_TINY = 2.0**-40  # the square of an input above this stays in range
_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm"})


def rows_out_of_range(known: Known, replay: Replay) -> Tensor | None:
    """Return which rows [T] may leave float32 in an intermediate value; None where none can."""
    batch = replay.batch
    if replay.undecided or not _is_extreme(known, replay):
        return None
    name, count = batch.component.name, len(batch.step_of)
    if not is_ragged(batch.component):
        found = _watched(known, name, replay.inputs, count)
        return found if bool(found.any()) else None
    lines = lines_of(batch.component, known.twin.config, replay.inputs)
    if lines is None or lines.spans[-1].end != count:
        return None
    found = torch.zeros(count, dtype=torch.bool)
    for at, span in enumerate(lines.spans):
        # Run each sequence alone: its tokens interact, so it is marked as a whole.
        counts = [each.count * (n == at) for n, each in enumerate(lines.spans)]
        own = lines.cut_side(replay.inputs, counts)
        if own is not None:
            found[span.tokens] = bool(_watched(known, name, own, span.count).any())
    return found if bool(found.any()) else None


def _is_extreme(known: Known, replay: Replay) -> bool:
    wide = [each for each in replay.inputs.values() if each.dtype.itemsize > 1]
    sizes = [each.abs() for each in wide if each.is_floating_point() and each.numel()]
    if "codes" in replay.inputs:
        try:
            form = replay.judgeable(known).activation
            sizes.append(activation_values(replay.inputs, form, torch.float32).abs())
        except (*CANNOT_RUN, AssertionError):
            return False
    rows = [each.flatten(1).amax(1) if each.ndim > 1 else each for each in sizes]
    return any(bool(((row > _ORDINARY) | ((row > 0) & (row < _TINY))).any()) for row in rows)


def _watched(known: Known, name: str, inputs: Tensors, count: int) -> Tensor:
    """Run the twin's function in float32 and mark the rows whose intermediates leave its range."""
    call = plain_call(known.twin.calls[name])
    facts = facts_of(call)
    if not isinstance(call, partial) or facts is None:
        return torch.zeros(count, dtype=torch.bool)
    # The same function, in float32 from end to end.
    narrow = with_numerics(facts, work=torch.float32, products=torch.float32)
    given = {
        # Compiled loops hide their intermediates; tensors that require gradients bypass them.
        key: each.detach().clone().requires_grad_()
        if each.is_floating_point() and each.dtype.itemsize > 1
        else each
        for key, each in inputs.items()
    }
    watch = _Watch(count)
    try:
        with torch.inference_mode(mode=False), torch.no_grad(), watch:
            call.func(narrow, given, known.twin.weights_of(name))
    except CANNOT_RUN:
        return torch.zeros(count, dtype=torch.bool)
    return watch.rows


class _Watch(TorchDispatchMode):
    """A dispatch mode that marks the rows of tensors that float32 may not hold."""

    def __init__(self, count: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = torch.zeros(count, dtype=torch.bool)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and inspect its result; of a product, its terms as well."""
        made = func(*args, **(kwargs or {}))
        word = func.overloadpacket.__name__
        if word in _PRODUCTS:
            a, b = args[-2:]
            if a.numel() and b.numel():
                # Bound of the sum of magnitudes: partial sums may overflow although the product is
                # finite.
                self._mark(a.abs().amax(-1).double() * float(b.abs().amax()) * a.shape[-1])
        if word == "rsqrt":
            self._mark(torch.where(args[0] < _SMALLEST, torch.inf, 0.0))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, torch.Tensor) and each.dtype in (torch.float32, torch.float64):
                self._mark(each)
        return made

    def _mark(self, values: Tensor) -> None:
        # -inf marks masked scores.
        large = (values.abs() > LARGEST) & ~values.isneginf()
        large |= values.isnan()
        if not bool(large.any()):
            return
        count = len(self.rows)
        # Rows, or rows times heads, slots or streams.
        if large.ndim and large.shape[0] and large.shape[0] % count == 0:
            self.rows |= large.reshape(count, -1).any(1)
        else:
            self.rows[:] = True  # experts or groups: the row is ambiguous, so mark all
