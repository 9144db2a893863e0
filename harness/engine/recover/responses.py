"""Solve for an input of a component whose rows are independent, from the outputs that were seen.

How outputs answer to every number of a row is measured with the twin: rows with one number changed
are computed together. Then the input that gives what was seen is found by Newton's method: in a few
columns, the same ones in all rows, or else in all of them. Norms do not tell the size of a row;
there it is taken from the numbers that most likely stayed as they were.

Shape letters: T rows, K columns of the input, N numbers that come out of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.engine.faults.model_faults import has_facts, unrounded, with_facts
from degarble.harness.engine.recover.maps import Sides

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import ComponentContext

    Tensors = Mapping[str, Tensor]

MOST_WIDE = 1 << 12  # columns of an input
MOST_ROWS = 32  # rows that are solved for
MOST_COMPUTED = 1 << 13  # rows, with one number changed each
MOST_COLUMNS = 8  # in which a few numbers of a row differ
TURNS = 6  # of Newton's method
STALLED = 0.9  # of the difference before a turn: what is left is no matter of these numbers
FAR = 16.0  # times what is allowed
NEAR = 6.0  # standard errors
REGULAR = 1e-10  # added to the diagonal of normal equations
OPEN = 4.0  # times its size, that a number is off at least
_UNRELATED = 1e-7  # of the largest answer: roundings
_STEP = 2.0**-14  # of a row's size, by which numbers are changed
_TINY = 1e-300


@dataclass(frozen=True, eq=False)
class Seen:
    """Rows of inputs, and what came out of them, all outputs side by side."""

    inputs: Tensors  # of these rows
    outputs: Tensor  # [T, N] of float64
    allowed: Tensor  # [T, N], infinite where nothing is known
    call: Callable[[Tensors], Tensor]  # the twin: [T, N]


def seen_rows(
    context: ComponentContext, inputs: Tensors, sides: Sequence[Sides], counted: Tensor | None
) -> Seen | None:
    """Choose wrong rows of a call; `counted` outputs [N] are looked at."""
    first = next(iter(inputs.values()))
    outputs, right, allowed = (
        torch.cat([side.reshape(len(first), -1) for side in each], 1)
        for each in zip(*((s.seen, s.right, s.allowed) for s in sides), strict=True)
    )
    if counted is not None:
        allowed = torch.where(counted, allowed, torch.inf)
    wrong = ((outputs - right).abs() > allowed).any(1).nonzero().flatten()
    if not len(wrong) or not bool(outputs.isfinite().all()):
        return None
    rows = wrong[:: -(-len(wrong) // MOST_ROWS)]
    own = with_facts(context, unrounded)(context.call) if has_facts(context) else context.call
    weights, names = context.weights, [each.output for each in sides]

    def call(given: Tensors) -> Tensor:
        made = own(given, weights)
        return torch.cat([made[name].double().flatten(1) for name in names], 1)

    given = {name: tensor[rows] if tensor.ndim else tensor for name, tensor in inputs.items()}
    return Seen(given, outputs[rows], allowed[rows].clamp(min=_TINY), call)


def recovered_input(seen: Seen, name: str) -> Iterator[Sides]:
    """Yield what an input may have been in the rows, those with fewest other columns first."""
    x = seen.inputs[name].double().flatten(1)
    wide = x.shape[1]
    if wide > MOST_WIDE:
        return
    rows = max(2, MOST_COMPUTED // wide)
    if rows < len(x):
        kept = torch.arange(0, len(x), -(-len(x) // rows))
        seen = Seen(_rows(seen.inputs, kept), seen.outputs[kept], seen.allowed[kept], seen.call)
        x = x[kept]
    solver = _Solver(seen, name, x)
    try:
        answers = solver.answers(torch.arange(wide))
        few = solver.in_few(answers)
        if few is not None:
            yield few
            return
        yield from solver.in_all(answers)
    except CANNOT_RUN:
        return


def _rows(inputs: Tensors, rows: Tensor) -> dict[str, Tensor]:
    return {name: tensor[rows] if tensor.ndim else tensor for name, tensor in inputs.items()}


class _NormalEquations:
    """Least squares for changes of inputs, from how outputs answer to them.

    Columns that share no output with others are solved for apart from these.
    """

    def __init__(self, answers: Tensor, along: Tensor | None) -> None:
        """Take answers [T, N, K], and numbers [T, K] whose size does not matter."""
        self._shape = answers.shape
        self._parts = None if along is not None else _parts_apart(answers)
        if self._parts is not None:
            outputs, columns = self._parts
            answers = answers[:, outputs[:, :, None], columns[:, None]].flatten(0, 1)
        self._answers = answers
        self._size = answers.square().sum(1).clamp(min=_TINY).rsqrt()
        # Where outputs are fewer than columns, as many equations as outputs are solved.
        self._is_dual = along is None and 2 * answers.shape[1] < answers.shape[2]
        if self._is_dual:
            self._answers = answers * self._size[:, None]
            gram = self._answers @ self._answers.transpose(1, 2)
        else:
            gram = answers.transpose(1, 2) @ answers
            gram = gram * self._size[:, :, None] * self._size[:, None]
        if along is not None:
            unit = torch.nn.functional.normalize(along / self._size, dim=1)
            gram = gram + unit[:, :, None] * unit[:, None]
        self._gram = gram + REGULAR * torch.eye(gram.shape[1], dtype=gram.dtype)

    def solve(self, left: Tensor) -> Tensor:
        """Return the change [T, K] that gives what is left [T, N]."""
        if self._parts is not None:
            left = left[:, self._parts[0]].flatten(0, 1)
        turned = self._answers.transpose(1, 2)
        if self._is_dual:
            step = turned @ torch.linalg.solve(self._gram, left[..., None])
        else:
            step = torch.linalg.solve(self._gram, turned @ left[..., None] * self._size[..., None])
        return self._whole(step[..., 0] * self._size)

    def errors(self) -> Tensor:
        """Return standard errors [T, K]."""
        # Inverting costs three times what solving does, so it is done where numbers are known.
        inverse = torch.linalg.inv(self._gram)
        if self._is_dual:
            known = (self._answers * (inverse @ self._answers)).sum(1)
            return self._whole(((1 - known) / REGULAR).clamp(min=1.0).sqrt() * self._size)
        return self._whole(inverse.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt() * self._size)

    def _whole(self, numbers: Tensor) -> Tensor:
        if self._parts is None:
            return numbers
        high, _, wide = self._shape
        made = numbers.new_zeros(high, wide)
        made[:, self._parts[1].flatten()] = numbers.reshape(high, -1)
        return made


def _parts_apart(answers: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return groups of outputs [P, N / P] and of columns [P, K / P] that have nothing in common.

    None where there are no such groups of one size.
    """
    most = answers.abs().amax((1, 2), keepdim=True)
    acts = (answers.abs() > _UNRELATED * most).any(0)  # [N, K]
    shared = acts.float()
    together = (shared.T @ shared) > 0
    first = together.int().argmax(1)
    numbers, counts = first.unique(return_counts=True)
    apart = len(numbers) > 1 and bool((counts == counts[0]).all())
    if not apart or not torch.equal(together, first[:, None] == first):
        return None
    columns = first.argsort(stable=True).reshape(len(numbers), -1)
    owner = torch.where(acts.any(1), first[acts.int().argmax(1)], -1)
    outputs = [(owner == number).nonzero().flatten() for number in numbers]
    if len({len(each) for each in outputs}) > 1:
        return None
    return torch.stack(outputs), columns


class _Solver:
    """Newton's method for an input [T, K] of some rows."""

    def __init__(self, seen: Seen, name: str, x: Tensor) -> None:
        self._seen, self._name, self._right, self._x = seen, name, x, x
        self._rounding = torch.finfo(seen.inputs[name].dtype).eps / 2
        self._weigh = torch.where(seen.allowed.isfinite(), 1 / seen.allowed, 0.0)

    def _made(self, x: Tensor, each: int = 1) -> Tensor:
        """Return the outputs for other numbers; every row so many times."""
        inputs = {
            name: tensor.repeat_interleave(each, 0) if tensor.ndim else tensor
            for name, tensor in self._seen.inputs.items()
        }
        like = inputs[self._name]
        return self._seen.call({**inputs, self._name: x.reshape(like.shape)})

    def answers(self, columns: Tensor) -> Tensor:
        """Return how outputs answer to each of these columns, in units of what is allowed."""
        x, count = self._x, len(columns)
        step = _STEP * _sizes(x).clamp(min=_TINY) / x.shape[1] ** 0.5
        changed = x.repeat_interleave(count, 0)
        which = columns.repeat(len(x))
        changed[torch.arange(len(changed)), which] += step.repeat_interleave(count)
        gap = self._made(changed, count).reshape(len(x), count, -1) - self._made(x)[:, None]
        found: Tensor = gap.transpose(1, 2) / step[:, None, None] * self._weigh[..., None]
        return found.nan_to_num(0, 0, 0)

    def _left(self) -> Tensor:
        left: Tensor = (self._seen.outputs - self._made(self._x)) * self._weigh
        return left.nan_to_num(0, 0, 0)

    def _newton(self, columns: Tensor, answers: Tensor, *, sizeless: bool = False) -> Tensor | None:
        """Change some columns until outputs are as seen; return errors, None where they are not.

        Rows of which the size does not matter keep it.
        """
        normal = _NormalEquations(answers, self._x if sizeless else None)
        for _ in range(TURNS):
            left = self._left()
            if float(left.abs().max()) <= 1.0:
                break
            step = normal.solve(left)
            x = self._x.clone()
            x[:, columns] += step
            before, self._x = self._x, x
            after = self._left()
            far = float(after.abs().max())
            if far > 1.0:
                if float(after.norm()) > float(left.norm()):
                    x = before.clone()
                    x[:, columns] += step / 4
                    self._x = x
                elif float(after.norm()) > STALLED * float(left.norm()) and far > FAR:
                    break
                normal = _NormalEquations(self.answers(columns), self._x if sizeless else None)
        if float(self._left().abs().max()) > 1.0:
            return None
        return normal.errors()

    def in_few(self, answers: Tensor) -> Sides | None:
        """Return the input with other numbers in a few columns, the same ones in all rows."""
        along = answers.square().sum(1)
        chosen: list[int] = []
        for _ in range(min(MOST_COLUMNS, answers.shape[2] - 1)):
            across = (answers * self._left()[..., None]).sum(1)
            gain = (across.square() / along.clamp(min=_TINY)).sum(0)
            gain[along.sum(0) <= _TINY] = 0.0
            gain[chosen] = -1.0
            chosen.append(int(gain.argmax()))
            self._x = self._right
            columns = torch.tensor(chosen)
            error = self._newton(columns, answers[..., columns])
            if error is not None:
                errors = torch.zeros_like(self._right)
                errors[:, columns] = error
                return self._sides(self._x, errors)
        return None

    def in_all(self, answers: Tensor) -> Iterator[Sides]:
        """Yield the input with other numbers anywhere."""
        self._x = self._right
        columns = torch.arange(answers.shape[2])
        along = (answers @ self._right[..., None])[..., 0].norm(dim=1)
        every = answers.norm(dim=(1, 2)) * self._right.norm(dim=1) / len(columns) ** 0.5
        sizeless = bool((along < 1e-3 * every).all())
        if not sizeless and self._is_open(answers):
            return
        error = self._newton(columns, answers, sizeless=sizeless)
        if error is None and self._begin_as_seen():
            error = self._newton(columns, self.answers(columns), sizeless=sizeless)
        if error is None:
            return
        size = self._x.norm(dim=1, keepdim=True)
        if not sizeless:
            if bool((error < size).all()):
                yield self._sides(self._x, error)
            return
        # Numbers that stayed have one factor in a row, the size that is not known.
        for factor in (_most_common(self._right, self._x), self._right.norm(dim=1)[:, None] / size):
            used = self._x * factor
            yield self._sides(used, 2.0**-11 * used.abs().mean(1, keepdim=True).expand_as(used))

    def _is_open(self, answers: Tensor) -> bool:
        """Return whether outputs are so few that a number would be known worse than to its size.

        No number is known better than if it were the only unknown one. Of numbers without an
        equation each adds one to the sum of what errors are of the most that the solver allows
        them, so one of all has at least its share.
        """
        count, wide = (self._weigh > 0).sum(1), answers.shape[2]
        lacking = (wide - count).clamp(min=0) / wide / REGULAR
        sizes = answers.norm(dim=1).clamp(min=_TINY)
        least = torch.maximum(lacking.sqrt() / sizes.amax(1), 1 / sizes.amin(1))
        return bool((least > OPEN * _sizes(self._right)).any())

    def _begin_as_seen(self) -> bool:
        """Begin with inputs that differ as outputs do, number by number: far from the right ones.

        Return whether outputs stand for inputs number by number, as those of a norm do.
        """
        right, seen = self._made(self._right), self._seen.outputs
        if right.shape != self._right.shape or not bool((right != 0).all()):
            return False
        self._x = self._right * (seen / right)
        return bool(self._x.isfinite().all())

    def _sides(self, used: Tensor, error: Tensor) -> Sides:
        allowed = NEAR * error + self._rounding * used.abs() + _TINY
        return Sides(self._name, used, self._right, allowed)


def _sizes(rows: Tensor) -> Tensor:
    """Return the lengths [T] of rows; of rows of zeros, as a sine's at position 0, other rows'."""
    size = rows.norm(dim=1)
    return torch.where(size > 0, size, size.median())


def _most_common(one: Tensor, other: Tensor) -> Tensor:
    """Return the ratio [T, 1] that most numbers of a row have."""
    ratio = torch.where((one != 0) & (other.abs() > 1e-6 * other.norm(dim=1)[:, None]),
                        one / torch.where(other == 0, 1.0, other), torch.inf)  # fmt: skip
    ranked, count = ratio.sort(1).values, max(2, ratio.shape[1] // 8)
    width = ranked[:, count - 1 :] - ranked[:, : 1 - count]
    middle = ranked[:, count // 2 :][:, : width.shape[1]]
    at = (width / middle.abs().clamp(min=_TINY)).nan_to_num(torch.inf).argmin(1)
    found: Tensor = middle.gather(1, at[:, None])
    return found.nan_to_num(1.0, 1.0, 1.0)
