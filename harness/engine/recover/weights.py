"""Recover which numbers of a weight a kernel multiplied, from its inputs and wrong outputs.

Each wrong column of a product is one row of the weight. Hypotheses are solved for on half of the
rows and have to predict the other half: another row's numbers, a factor on the row, one block with
another scale, a few elements of other values. A value that the format can hold is reported with its
code.

Shape letters: T rows of inputs, N rows of a weight, C wrong columns, K elements, B blocks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.base.errors import UnknownName
from degarble.harness.engine.faults.regions import full_name
from degarble.harness.engine.faults.weight_faults import by_tensor_scale, numbers_of, scale_numbers
from degarble.harness.engine.recover.maps import moved, simplest
from degarble.harness.engine.recover.stated import operation
from degarble.harness.formats.codec import decode_array, pack_nibbles
from degarble.harness.formats.quantise import spread_blocks
from degarble.harness.formats.weight import Weight
from degarble.harness.report.number_text import number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import ComponentContext
    from degarble.harness.engine.recover.products import ProductView
    from degarble.harness.formats.number_formats import NumberFormat
    from degarble.harness.formats.quantise import QuantisedTensor

SHOWN = 8  # rows of a table, weights of a sentence
FEW_PARTS = 2  # different changes in a sentence
MOST_COLUMNS = 512  # wrong columns examined at most
FEW_COLUMNS = 8  # of them that are examined first
MOST_ELEMENTS = 4  # of a row that are solved for one after the other
NEAR = 6.0  # standard errors by which a recovered value may miss a code
ROUNDED = 2.0**-10  # of a value, beside its standard error: what activations are rounded by
MOST_PAIRED = 512  # elements of which every pair is tried
TELLING_ROWS = 12  # by which most elements are ruled out
MOST_NEAR = 1 << 22  # pairs of columns and rows that are compared at once
MOST_ALIKE = 16  # elements that explain a row alike and are compared by their codes
_COLLINEAR = 1e-9
_TINY = 1e-300


@operation
class Element(NamedTuple):
    """A number of a row that was another one; codes are None where none fits."""

    column: int
    stored: float
    used: float
    stored_code: int | None = None
    used_code: int | None = None
    as_well: tuple[int, ...] = ()  # codes that outputs do not tell from the used one
    error: float = 0.0  # two standard errors of the used value, where it is no code
    byte: int | None = None  # the offset of its first byte in the codes

    @property
    def bits(self) -> tuple[int, ...]:
        """Return the bits in which the codes differ."""
        if self.stored_code is None or self.used_code is None:
            return ()
        changed = self.stored_code ^ self.used_code
        return tuple(bit for bit in range(changed.bit_length()) if changed >> bit & 1)


@operation
class ScaleChange(NamedTuple):
    """A block of a row whose scale was another one; a code is None where no scale fits."""

    begin: int  # columns
    end: int
    factor: float
    stored_code: int | None = None
    used_code: int | None = None


@operation
class CopiedRow(NamedTuple):
    """A row that held the numbers of another row, of this weight or of another one."""

    source: str
    row: int


@operation
class RowGain(NamedTuple):
    """A factor on a whole row; 0 for a row that was left out."""

    factor: float


Change = Element | ScaleChange | CopiedRow | RowGain


@operation
@dataclass(frozen=True)
class RecoveredRow:
    """What one row of a weight held when it was multiplied; `others` explain it as well."""

    name: str  # of the weight in the model
    row: int
    changes: tuple[Change, ...]
    others: int = 0


@operation
@dataclass(frozen=True, eq=False)
class RecoveredWeight:
    """The rows of one weight that held other numbers."""

    name: str
    rows: tuple[RecoveredRow, ...]


def recovered_weight(
    view: ProductView,
    name: str,
    sources: Mapping[str, Tensor],
    elsewhere: Iterable[tuple[str, Tensor]] = (),
) -> tuple[RecoveredWeight, Mapping[str, Tensor]] | None:
    """Solve for the wrong rows of a weight; None where one of them cannot be.

    `sources` are the numbers of weights of the same width, by name, whose rows may have been used
    instead; the weight itself has to be among them. Those of `elsewhere` are read only where
    nothing else explains the rows. Returns the sources that were used as well.
    """
    wrong = view.wrong.any(0).nonzero().flatten()
    if not len(wrong) or len(wrong) > MOST_COLUMNS or not bool(view.seen.isfinite().all()):
        return None
    few = wrong[:: -(-len(wrong) // FEW_COLUMNS)]  # they tell whether it is worth while
    found = _Solver(view, few, name, sources).solved()
    left = [at for at in few.tolist() if at + view.first_row not in found]
    if left:
        several = len(wrong) > 1
        used = _looked_up(view, torch.tensor(left), name, elsewhere) if several else None
        if used is None:
            return None
        sources = {**sources, **used}
    if left or len(few) < len(wrong):
        found = _Solver(view, wrong, name, sources).solved()
    if len(found) < len(wrong):
        return None
    return RecoveredWeight(name, tuple(found[at] for at in sorted(found))), sources


def _looked_up(
    view: ProductView, wrong: Tensor, name: str, elsewhere: Iterable[tuple[str, Tensor]]
) -> dict[str, Tensor] | None:
    """Return the weights that hold what wrong rows were used as; None where one is nowhere."""
    used: dict[str, Tensor] = {}
    for other, numbers in elsewhere:
        found = _Solver(view, wrong, name, {other: numbers}).copies()
        if found:
            used[other] = numbers
            wrong = torch.tensor([at for at in wrong.tolist() if at + view.first_row not in found])
            if not len(wrong):
                return used
    return None


class _Solver:
    """The wrong columns of one product: fitted on even rows, predicted on odd ones."""

    def __init__(
        self, view: ProductView, wrong: Tensor, name: str, sources: Mapping[str, Tensor]
    ) -> None:
        self._view, self._wrong, self._name, self._sources = view, wrong, name, sources
        self._gap_TC = (view.seen - view.product)[:, wrong]
        self._allowed_TC = view.allowed[:, wrong].clamp(min=_TINY)
        self._fitted_TC = _every_other(self._gap_TC.abs() > self._allowed_TC)

    def solved(self) -> dict[int, RecoveredRow]:
        """Return the rows that were solved for, simplest explanation first."""
        found: dict[int, RecoveredRow] = {}
        for attempt in (self.gains, self.copies, self.scales, self.elements):
            if len(found) < len(self._wrong):
                found = {**attempt(), **found}
        return found

    def _row(self, at: int) -> int:
        """Return the weight's row of a wrong column."""
        return int(self._wrong[at]) + self._view.first_row

    def _holds(self, left_TC: Tensor) -> Tensor:
        """Tell for each column whether what is left is within what is allowed, on every row."""
        return (left_TC.abs() <= self._allowed_TC).all(0)

    def _is_seen(self) -> Tensor:
        """Tell for each column whether rows that are not fitted are wrong as well."""
        beyond = self._gap_TC.abs() > self._allowed_TC
        return (beyond & ~self._fitted_TC).any(0)

    def gains(self) -> dict[int, RecoveredRow]:
        """Solve for a factor on each row."""
        expected = self._view.product[:, self._wrong]
        factors, _ = self._fit(expected[..., None])
        left = self._gap_TC - expected * factors[:, 0]
        held = self._holds(left) & self._is_seen()
        return {
            self._row(at): RecoveredRow(
                self._name, self._row(at), (RowGain(_rounded(1 + float(factors[at, 0]))),)
            )
            for at in held.nonzero().flatten().tolist()
        }

    def copies(self) -> dict[int, RecoveredRow]:
        """Look the rows up among the rows of this weight and of others."""
        found: dict[int, RecoveredRow] = {}
        seen, first = self._view.seen[:, self._wrong], self._gap_TC.abs().argmax(0)
        for name, numbers in self._sources.items():
            made = self._view.x @ numbers.double().T

            # By one row first: it rules nearly all of them out.
            def near(some: Tensor, made: Tensor = made) -> Tensor:
                rows = first[some]
                gap = made[rows] - seen[rows, some, None]
                return gap.abs() <= self._allowed_TC[rows, some, None]

            parts = torch.arange(len(first)).split(max(1, MOST_NEAR // max(1, len(numbers))))
            for at in torch.cat([near(part).any(1) for part in parts]).nonzero().flatten().tolist():
                row = self._row(at)
                if row in found:
                    continue
                kept = near(torch.tensor([at]))[0].nonzero().flatten()
                apart = (made[:, kept] - seen[:, at, None]).abs() <= self._allowed_TC[:, at, None]
                equal = [
                    each
                    for each in kept[apart.all(0)].tolist()
                    if name != self._name or each != row
                ]
                if equal and bool(made[:, equal[0]].any()):
                    nearest = min(equal, key=lambda each: abs(each - row))
                    found[row] = RecoveredRow(
                        self._name, row, (CopiedRow(name, nearest),), len(equal) - 1
                    )
        return found

    def scales(self) -> dict[int, RecoveredRow]:
        """Solve for one block of each row with another scale."""
        wide = _block_width(self._view.weight)
        if wide is None:
            return {}
        w_CK = self._view.numbers[self._wrong + self._view.first_row]
        parts_TCB = torch.stack(
            [
                self._view.x[:, begin : begin + wide] @ w_CK[:, begin : begin + wide].T
                for begin in range(0, w_CK.shape[1], wide)
            ],
            dim=-1,
        )
        factors_CB, left_CB = self._fit(parts_TCB)
        found = {}
        for at in self._is_seen().nonzero().flatten().tolist():
            block = int(left_CB[at].argmin())
            factor = float(factors_CB[at, block])
            left = self._gap_TC[:, at] - factor * parts_TCB[:, at, block]
            if bool((left.abs() <= self._allowed_TC[:, at]).all()):
                row = self._row(at)
                change = _scale_change(self._view.weight, row, block, 1 + factor)
                found[row] = RecoveredRow(self._name, row, (change,))
        return found

    def elements(self) -> dict[int, RecoveredRow]:
        """Solve for one element of each row, then for a few."""
        found = {}
        for at in self._is_seen().nonzero().flatten().tolist():
            row = self._one_element(at) or self._few_elements(at)
            if row is not None:
                found[self._row(at)] = row
        return found

    def _one_element(self, at: int) -> RecoveredRow | None:
        """Find the element of which another number gives every row, and count those that also do.

        What a healthy kernel may be off is a whole spacing and more, and a rounding is half of one:
        codes that half of it allows are preferred.
        """
        narrow = self._alike(at, 0.5)
        elements, count = narrow if any(_has_code(each) for each in narrow[0]) else self._alike(at)
        if not elements:
            return None
        coded = [each for each in elements if _has_code(each)]
        if coded and self._view.weight.is_quantised and count == len(elements):
            count = len(coded)  # whatever was read of the others was a code
        first = min(coded, key=lambda each: len(each.bits)) if coded else elements[0]
        return RecoveredRow(self._name, self._row(at), (first,), count - 1)

    def _alike(self, at: int, part: float = 1.0) -> tuple[list[Element], int]:
        """Return the elements that explain a row alone, the best ones first, and their number.

        Each row of outputs allows an interval of an element's change, by a part of what is allowed.
        """
        view, row = self._view, self._row(at)
        gap_T, allowed_T = self._gap_TC[:, at], self._allowed_TC[:, at]
        # By a few rows first: they rule nearly all of them out.
        telling = (gap_T.abs() / allowed_T).topk(min(len(gap_T), TELLING_ROWS)).indices
        columns = torch.arange(view.x.shape[1])
        for rows in (telling, torch.arange(len(gap_T))):
            x_TK = view.x[rows][:, columns]
            low_K, high_K = _bounds(x_TK, gap_T[rows, None], part * allowed_T[rows, None])
            kept = low_K <= high_K
            columns, low_K, high_K = columns[kept], low_K[kept], high_K[kept]
        x_TK = view.x[:, columns] / allowed_T[:, None]
        along_K, square_K = x_TK.T @ (gap_T / allowed_T), x_TK.square().sum(0)
        gain_K, fit_K = along_K.square() / square_K, along_K / square_K
        elements = [
            _element(
                view.weight, view.numbers, (row, int(columns[each])),
                _Change.between(float(low_K[each]), float(high_K[each]), float(fit_K[each])),
            )
            for each in gain_K.argsort(descending=True, stable=True)[:MOST_ALIKE].tolist()
        ]  # fmt: skip
        return elements, len(columns)

    def _few_elements(self, at: int) -> RecoveredRow | None:
        """Solve for a few elements of a row, which have to be codes, and no others as well."""
        x_TK, gap_T, allowed_T = self._view.x, self._gap_TC[:, at], self._allowed_TC[:, at]
        row, fitted = self._row(at), self._fitted_TC[:, at]
        chosen = _pursued((x_TK / allowed_T[:, None])[fitted], (gap_T / allowed_T)[fitted])
        for columns, deltas, errors, others in chosen:
            left = gap_T - x_TK[:, columns] @ deltas
            if not bool((left.abs() <= allowed_T).all()):
                continue
            fits = zip(columns, deltas.tolist(), errors.tolist(), strict=True)
            changes = tuple(
                _element(
                    self._view.weight, self._view.numbers, (row, column),
                    _Change(delta, NEAR * error, 2 * error, delta),
                )
                for column, delta, error in fits
            )  # fmt: skip
            # Several numbers explain much by chance; codes, and no choice, do not.
            if not others and all(change.used_code is not None for change in changes):
                return RecoveredRow(self._name, row, changes)
            return None
        return None

    def _fit(self, parts_TCB: Tensor) -> tuple[Tensor, Tensor]:
        """Return, for each column and part, the factor that explains most, and what is left."""
        weigh = self._fitted_TC / self._allowed_TC
        gap = self._gap_TC * weigh
        parts = parts_TCB * weigh[..., None]
        across = (parts * gap[..., None]).sum(0)
        along = parts.square().sum(0).clamp(min=_TINY)
        return across / along, gap.square().sum(0)[:, None] - across.square() / along


def _has_code(element: Element) -> bool:
    return element.used_code is not None


class _Change(NamedTuple):
    """What a number changed by, how far off that may be, how far off it likely is, and the fit."""

    delta: float
    reach: float
    error: float
    fitted: float  # by least squares: nearer than the middle of two bounds

    @classmethod
    def between(cls, low: float, high: float, fitted: float) -> _Change:
        """Return the change that has two bounds."""
        half = (high - low) / 2
        return cls((low + high) / 2, half, half, min(max(fitted, low), high))


def _bounds(x_TK: Tensor, gap_T1: Tensor, allowed_T1: Tensor) -> tuple[Tensor, Tensor]:
    """Return by how much at least and at most each element changed, if it alone explains a gap."""
    ends = torch.stack([(gap_T1 - allowed_T1) / x_TK, (gap_T1 + allowed_T1) / x_TK])
    low_TK, high_TK = ends.amin(0), ends.amax(0)
    # An input of zero tells nothing of its element, and rules it out where the output is wrong.
    end = torch.where(gap_T1.abs() <= allowed_T1, torch.inf, -torch.inf)
    low_TK, high_TK = (
        torch.where(x_TK == 0, sign * end, side) for sign, side in ((-1, low_TK), (1, high_TK))
    )
    return low_TK.amax(0), high_TK.amin(0)


def _every_other(wrong_TC: Tensor) -> Tensor:
    """Choose every other wrong row of each column, and every other one that is right."""
    before = wrong_TC.cumsum(0) - 1, (~wrong_TC).cumsum(0) - 1
    return torch.where(wrong_TC, before[0], before[1]) % 2 == 0


def _pursued(x_TK: Tensor, gap_T: Tensor) -> Iterator[tuple[list[int], Tensor, Tensor, int]]:
    """Yield sets of columns that may explain a gap: the best pair, then one more each time.

    With each set come its values, their standard errors, and how many other columns would explain
    the gap as well in place of the last one. Rows bound how many may be solved for.
    """
    along_K = x_TK.square().sum(0)
    chosen: list[int] = []
    left = gap_T
    for count in range(1, min(MOST_ELEMENTS, len(gap_T) // 2) + 1):
        gain_K = (x_TK.T @ left).square() / along_K.clamp(min=_TINY)
        gain_K[along_K <= _TINY] = 0.0
        gain_K[chosen] = 0.0
        as_well = int((left.square().sum() - gain_K <= len(gap_T)).sum()) - 1
        chosen = _best_pair(x_TK, gap_T) if count == 2 else [*chosen, int(gain_K.argmax())]
        x = x_TK[:, chosen]
        values = torch.linalg.lstsq(x, gap_T[:, None]).solution[:, 0]
        left = gap_T - x @ values
        errors = torch.linalg.pinv(x.T @ x).diagonal().clamp(min=0).sqrt()
        if count > 1:
            yield list(chosen), values, errors, max(0, as_well)


def _best_pair(x_TK: Tensor, gap_T: Tensor) -> list[int]:
    """Return the two columns that explain most together, among those that explain most alone."""
    along_K, across_K = x_TK.square().sum(0), x_TK.T @ gap_T
    gain_K = torch.where(along_K > _TINY, across_K.square() / along_K.clamp(min=_TINY), 0.0)
    kept = gain_K.topk(min(len(gain_K), MOST_PAIRED)).indices
    x, a, g = x_TK[:, kept], along_K[kept], across_K[kept]
    gram = x.T @ x
    # Explained by a pair: g' inverse(G) g, of its Gram matrix G.
    determinant = a[:, None] * a[None] - gram.square()
    explained = a[None] * g[:, None].square() - 2 * gram * g[:, None] * g[None]
    explained = (explained + a[:, None] * g[None].square()) / determinant.clamp(min=_TINY)
    explained[determinant <= _COLLINEAR * a[:, None] * a[None]] = 0.0
    first, second = divmod(int(explained.argmax()), len(kept))
    return [int(kept[first]), int(kept[second])]


# ---- codes of what was recovered -----------------------------------------------------------------


def _rounded(factor: float) -> float:
    """Round a factor to what it was known to: three digits, or a whole number or power of two."""
    near = 2.0 ** round(torch.log2(torch.tensor(abs(factor))).item()) if abs(factor) > 1e-3 else 0.0
    if abs(abs(factor) - near) <= 2e-3 * max(near, 0.5):
        return near if factor >= 0 else -near
    return float(f"{factor:.4g}")


def _block_width(weight: Weight) -> int | None:
    """Return the width of a row's own blocks; None where rows share one, or there are none."""
    if not weight.is_quantised:
        return None
    tensor = weight.quantised()
    high, wide = tensor.format.block
    plain = tensor.zero_point is None and tensor.group_index is None
    return wide if plain and high == 1 and wide > 0 else None


def _scale_change(weight: Weight, row: int, block: int, factor: float) -> ScaleChange:
    tensor = weight.quantised()
    wide = tensor.format.block[1]
    begin, end = block * wide, min((block + 1) * wide, tensor.shape[-1])
    stored = tensor.linear_scale_codes()
    if stored.dtype is torch.float32:
        return ScaleChange(begin, end, _rounded(factor))
    code = int(stored[row, block])
    numbers = _values(tensor.format.scale)
    wanted = float(numbers[code]) * factor
    used = int((numbers - wanted).abs().nan_to_num(torch.inf).argmin())
    near = abs(float(numbers[used]) - wanted) <= 0.03 * abs(wanted) + 1e-12
    return ScaleChange(begin, end, _rounded(factor), code, used if near else None)


def _values(form: NumberFormat) -> Tensor:
    return decode_array(torch.arange(form.code_count), form).double()


def _element(weight: Weight, w_NK: Tensor, at: tuple[int, int], change: _Change) -> Element:
    row, column = at
    delta = change.delta
    stored = float(w_NK[row, column])
    wanted = stored + delta
    # A run may round what it decodes to BF16.
    slack = change.reach + ROUNDED * (abs(delta) + abs(wanted) + abs(stored))
    if weight.is_quantised:
        tensor = weight.quantised()
        numbers = _values(tensor.format.element)
        if tensor.zero_point is not None:
            numbers = numbers - _at(tensor, tensor.zero_point.double(), row, column)
        numbers = numbers * _scale_at(tensor, row, column)
        code = int(tensor.element_codes()[row, column])
    else:
        plain, numbers = _plain_codes(weight, row, column)
        if plain is None:
            return Element(column, stored, stored + change.fitted, error=change.error)
        code = plain
    # Of codes that fit, the one with fewest other bits; a code of the same number is no change.
    far = (numbers - wanted).abs().nan_to_num(torch.inf)
    fitting = [each for each in (far <= slack).nonzero().flatten().tolist()
               if abs(float(numbers[each]) - stored) > abs(delta) / 4]  # fmt: skip
    codes = {each if weight.is_quantised else code ^ (1 << each): each for each in fitting}
    if not codes:
        return Element(column, stored, stored + change.fitted, error=change.error)
    ranked = sorted(codes, key=lambda each: ((each ^ code).bit_count(), float(far[codes[each]])))
    fewest = [c for c in ranked if (c ^ code).bit_count() == (ranked[0] ^ code).bit_count()]
    value = float(numbers[codes[ranked[0]]])
    byte = _byte_of(weight, row, column)
    return Element(column, stored, value, code, ranked[0], tuple(fewest[1:]), byte=byte)


def _at(tensor: QuantisedTensor, of_blocks: Tensor, row: int, column: int) -> float:
    return float(spread_blocks(tensor, of_blocks, torch.tensor([row]))[0, column])


def _scale_at(tensor: QuantisedTensor, row: int, column: int) -> float:
    scale = torch.tensor([[_at(tensor, scale_numbers(tensor).double(), row, column)]])
    return float(by_tensor_scale(scale.double(), tensor))


def _byte_of(weight: Weight, row: int, column: int) -> int:
    """Return the offset of an element's first byte in what is stored of a matrix."""
    at = row * weight.shape[1] + column
    if weight.is_quantised:
        return at // 2 if weight.quantised().nibble_order is not None else at
    return at if weight.value is None else at * weight.value.itemsize


_INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def _plain_codes(weight: Weight, row: int, column: int) -> tuple[int | None, Tensor]:
    """Return the bits of a plain number, and the numbers with one bit flipped, by bit."""
    value = weight.value
    kind = None if value is None else _INTEGERS.get(value.dtype)
    if value is None or kind is None:
        return None, torch.empty(0, dtype=torch.float64)
    width = 8 * value.itemsize
    bits = int(value[row, column].contiguous().view(kind)) & ((1 << width) - 1)
    flipped = torch.tensor([bits ^ (1 << bit) for bit in range(width)])
    signed = torch.where(flipped >= 1 << (width - 1), flipped - (1 << width), flipped)
    return bits, signed.to(kind).view(value.dtype).double()


# ---- the weight as it was used -------------------------------------------------------------------


@operation
@dataclass(frozen=True, eq=False)
class UsedWeights:
    """Weights of a component with what was recovered of them; each is made once.

    `copied` are the numbers of weights whose rows were used; those that it lacks are looked up.
    """

    context: ComponentContext
    found: Mapping[str, Sequence[RecoveredWeight]]  # by local name
    copied: dict[str, Tensor] = field(default_factory=dict, metadata={"stated": False})
    _made: dict[str, tuple[Weight, Weight]] = field(default_factory=dict, init=False)

    def __call__(self, name: str, weight: Weight) -> Weight:
        """Return a weight as it was used."""
        if name not in self.found:
            return weight
        known = self._made.get(name)
        if known is None or known[0] is not weight:
            made = weight
            for each in self.found[name]:
                made = as_used(made, numbers_of(made).double(), each, self._sources(each))
            known = self._made[name] = weight, made
        return known[1]

    def _sources(self, found: RecoveredWeight) -> Mapping[str, Tensor]:
        for row in found.rows:
            for change in row.changes:
                if isinstance(change, CopiedRow) and change.source not in self.copied:
                    self.copied[change.source] = numbers_of(
                        named_weight(self.context, change.source)
                    )
        return self.copied


def named_weight(context: ComponentContext, name: str) -> Weight:
    """Return a weight of the model by its full name: of this component, or of another one."""
    own = (each for each in context.weights if full_name(context, each) == name)
    local = next(own, None)
    if local is not None:
        return context.weights[local]
    for component in context.bound.calls:
        sibling = context.sibling(component) if component != context.name else None
        if sibling is None:
            continue
        try:
            weights = dict(sibling.weights)
        except KeyError:
            continue  # the model was bound for one component
        for each, weight in weights.items():
            if full_name(sibling, each) == name:
                return weight
    raise UnknownName.among("weight", name, [full_name(context, each) for each in context.weights])


def as_used(
    weight: Weight, w_NK: Tensor, found: RecoveredWeight, sources: Mapping[str, Tensor]
) -> Weight:
    """Return the weight with what was recovered: its own codes where all changes are codes."""
    codes = _with_codes(weight, found)
    if codes is not None:
        return codes
    made = w_NK.clone()
    for row in found.rows:
        for change in row.changes:
            match change:
                case CopiedRow(source, at):
                    made[row.row] = sources[source][at]
                case RowGain(factor):
                    made[row.row] *= factor
                case ScaleChange(begin, end, factor):
                    made[row.row, begin:end] *= factor
                case Element(column, _, used):
                    made[row.row, column] = used
    return Weight(value=made, input_scale=weight.input_scale)


def _with_codes(weight: Weight, found: RecoveredWeight) -> Weight | None:
    changes = [(row.row, change) for row in found.rows for change in row.changes]
    if not weight.is_quantised or not all(
        isinstance(change, Element | ScaleChange) and change.used_code is not None
        for _, change in changes
    ):
        return None
    tensor = weight.quantised()
    codes, scales = tensor.element_codes().clone(), tensor.linear_scale_codes().clone()
    for row, change in changes:
        assert isinstance(change, Element | ScaleChange)
        assert change.used_code is not None
        if isinstance(change, Element):
            codes[row, change.column] = change.used_code
        else:
            scales[row, change.begin // tensor.format.block[1]] = change.used_code
    packed = codes if tensor.nibble_order is None else pack_nibbles(codes, tensor.nibble_order)
    linear = tensor.block_scale.shape == scales.shape
    if not linear and any(isinstance(change, ScaleChange) for _, change in changes):
        return None  # scales in another layout: the numbers say it as well
    kept = scales if linear else weight.block_scale
    return replace(weight, codes=packed, block_scale=kept, _decoded={})


# ---- what is said of them ------------------------------------------------------------------------


def sentence_of(found: Sequence[RecoveredWeight], everything: int) -> str:
    """Say what follows, weights with the same changes together."""
    by_words: dict[str, list[str]] = {}
    for name, rows in _rows_by_name(found).items():
        by_words.setdefault(_words_of(name, rows), []).append(name)
    parts = []
    for words, names in by_words.items():
        if len(names) == 1:
            where = names[0]
        elif len(names) == everything:
            where = f"each of its {len(names)} weights"
        else:
            where = f"each of {', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"
        parts.append(words.format(weight=where))
    shown = " and ".join(parts[:FEW_PARTS])
    more = f", and {len(parts) - FEW_PARTS} weights more are changed" if parts[FEW_PARTS:] else ""
    return f"The outputs follow if {shown}{more}."


def _rows_by_name(found: Sequence[RecoveredWeight]) -> dict[str, list[RecoveredRow]]:
    """Join what was found in the groups of a weight."""
    rows: dict[str, list[RecoveredRow]] = {}
    for each in found:
        rows.setdefault(each.name, []).extend(each.rows)
    return rows


def _words_of(name: str, rows: Sequence[RecoveredRow]) -> str:
    """Describe the changes of one weight, which `{weight}` stands for."""
    if len(rows) == 1:
        return f"row {rows[0].row} of {{weight}} {_changes(rows[0], name)}"
    changes = [change for row in rows for change in row.changes]
    kinds = Counter(type(change) for change in changes)
    where = f"{_range_of(rows)} of {{weight}}"
    if kinds.keys() == {CopiedRow}:
        return _copied_words(name, rows) or f"{where} hold the numbers of other rows"
    alike = {change[:3] if isinstance(change, ScaleChange) else change for change in changes}
    if len(alike) == 1 and all(len(row.changes) == 1 for row in rows):
        match changes[0]:
            case RowGain(factor):
                what = f"are multiplied by {number(factor, 4)}" if factor else "are left out"
                return f"{where} {what}"
            case ScaleChange(begin, end, factor):
                return (
                    f"columns {begin} to {end - 1} have {number(factor, 4)} times their scale in"
                    f" {where}"
                )
    words = {
        Element: "other elements", ScaleChange: "blocks with other scales",
        CopiedRow: "the numbers of other rows", RowGain: "a factor each",
    }  # fmt: skip
    parts = " and ".join(words[kind] for kind in kinds)
    return f"{where} have {parts}"


def _copied_words(name: str, rows: Sequence[RecoveredRow]) -> str:
    """Say by what rule rows hold the numbers of others of one weight; empty where by none."""
    copies = [change for row in rows for change in row.changes if isinstance(change, CopiedRow)]
    sources = {change.source for change in copies}
    shifts = {change.row - row.row for row, change in zip(rows, copies, strict=True)}
    first, last = rows[0].row, rows[-1].row
    run = last - first == len(rows) - 1
    if len(sources) > 1 or not run:
        return ""
    of = "" if sources == {name} else f" of {copies[0].source}"
    if len(shifts) == 1:
        by = shifts.pop()
        return (
            f"rows {first} to {last} of {{weight}} hold the numbers of rows {first + by} to"
            f" {last + by}{of}"
        )
    places = torch.tensor([change.row for change in copies]) - first
    if of or not 0 <= int(places.min()) <= int(places.max()) < len(rows):
        return ""
    rule = moved(places, "row")
    return f"among rows {first} to {last} of {{weight}}, {rule}" if rule else ""


def remedy_of(kinds: set[type]) -> str:
    """Say where to look, by the kinds of changes."""
    if kinds <= {Element}:
        return (
            "Compare the weight's bytes in memory with those of the file, and run `degarble audit"
            " --against` on the file: few other numbers come from damaged storage or memory."
        )
    if kinds <= {ScaleChange}:
        return "Compare the block scales in memory with those of the file: look at the loader."
    if kinds <= {CopiedRow}:
        return "Look at how rows are packed, split or addressed: loader, swizzle, tile offsets."
    return "Compare the weight in memory with the file: look at loader, packer and epilogue."


def _range_of(rows: Sequence[RecoveredRow]) -> str:
    numbers = [row.row for row in rows]
    steps = {b - a for a, b in pairwise(numbers)}
    if steps == {1}:
        return f"rows {numbers[0]} to {numbers[-1]}"
    if len(steps) == 1 and len(numbers) > 2:
        return f"every row {steps.pop()} apart from {numbers[0]} to {numbers[-1]}"
    listed = ", ".join(map(str, numbers[:SHOWN])) + (", ..." if len(numbers) > SHOWN else "")
    return f"{len(numbers)} rows ({listed})"


def _changes(row: RecoveredRow, name: str) -> str:
    parts = []
    for change in row.changes:
        match change:
            case Element():
                parts.append(f"has {_element_words(change)}")
            case ScaleChange(begin, end, factor, stored, used):
                codes = f" (code {stored:#04x} became {used:#04x})" if used is not None else ""
                where = f"columns {begin} to {end - 1}"
                parts.append(f"has {number(factor, 4)} times its scale in {where}{codes}")
            case CopiedRow(source, at):
                of = "" if source == name else f" of {source}"
                parts.append(f"holds the numbers of row {at}{of}")
            case RowGain(factor):
                parts.append(f"is multiplied by {number(factor, 4)}" if factor else "is left out")
    several = f", or of {row.others} others that explain it as well" if row.others > 1 else ""
    one = ", or of one other that explains it as well" if row.others == 1 else ""
    return f"{' and '.join(parts)}{several}{one}"


def _bytes_of(row: RecoveredRow) -> str:
    """Say which bytes of the codes these are, for whoever compares memory with the file."""
    held = [each.byte for each in row.changes if isinstance(each, Element)]
    known = [byte for byte in held if byte is not None]
    return f"; byte {' and '.join(map(str, known))} of its codes" if known else ""


def _element_words(change: Element) -> str:
    used = f"{simplest(change.used, change.error):.4g}"
    text = f"{used} in place of {number(change.stored, 4)} in column {change.column}"
    if change.used_code is None:
        return f"about {text}"
    bits = " and ".join(map(str, change.bits))
    also = f" or {', '.join(f'{code:#x}' for code in change.as_well)}" if change.as_well else ""
    return (
        f"{text} (code {change.stored_code:#x} became {change.used_code:#x}{also}, bit"
        f"{'s' if len(change.bits) > 1 else ''} {bits})"
    )


def lines_of(found: Sequence[RecoveredWeight]) -> tuple[str, ...]:
    """Return a line for each row that was another one."""
    lines = [
        f"{each.name}, row {row.row}: {_changes(row, each.name)}{_bytes_of(row)}"
        for each in found
        for row in each.rows
    ]
    return tuple(lines[:SHOWN])
