"""Bound the rounding errors of any computation in torch while it runs in float64.

Inside the context every operator also propagates, element by element, how far a float32 computation
may differ from the exact one: the errors of its operands, and its own roundings. Sums may be taken
in any order. An operator without a rule makes its results unbounded (infinite errors), and its name
is kept, so that a caller can say what it could not derive.

Elementary functions count as accurate to two units in the last place, including approximate ones of
a device. Errors are tracked for tensors by identity; a tensor that was never seen is exact.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from degarble.harness.engine.budget.bounded_values import (
    FUNCTION,
    BoundedValue,
    layer_normed,
    stored,
)
from degarble.harness.engine.budget.rules import U, product_slack
from degarble.references.traced.trace import named, operator_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    Rule = Callable[["RunningErrors", Tensor, tuple[Any, ...], dict[str, Any]], Tensor]

_NARROW = (torch.bfloat16, torch.float16)
_PART = 1 << 22  # elements of a matrix whose bounds are held at once
# A tensor of inference mode is converted by `to` itself.
_CONVERSIONS = ("_to_copy", "to")
# Operators that move elements: they do the same to the errors.
MOVES = named(
    """
    view _unsafe_view reshape transpose permute slice split split_with_sizes unsqueeze
    squeeze expand select clone detach alias t cat stack index gather index_select
    unbind contiguous repeat flip roll constant_pad_nd narrow as_strided tril triu
    unfold copy embedding view_as_real view_as_complex
    """
)
# Operators whose results carry no error: fresh memory, choices and comparisons.
EXACT = named(
    """
    zeros ones full empty new_zeros new_ones new_full new_empty zeros_like ones_like
    full_like empty_like arange scalar_tensor lift_fresh eq ne lt le gt ge logical_and
    logical_or logical_not bitwise_not bitwise_and bitwise_or argmax argmin one_hot
    sort_indices nonzero isnan isinf floor ceil round sign histc searchsorted bucketize
    floor_divide empty_strided
    """
)


class RunningErrors(TorchDispatchMode):
    """Propagates bounds of rounding errors; ask `of` for those of a tensor."""

    def __init__(self, store: torch.dtype = torch.float32) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not
        self.store = store  # in which a run holds the results of its operators
        self.unknown: dict[str, None] = {}  # operators without a rule
        self._errors: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []  # an id may be reused once its object dies

    def of(self, tensor: Tensor) -> Tensor:
        """Return the bound of every element; zeros for an exact tensor."""
        found = self._errors.get(id(tensor))
        return torch.zeros_like(tensor) if found is None else found

    def note(self, tensor: Tensor, error: Tensor) -> None:
        """State the errors of a tensor."""
        if error.stride() != tensor.stride():
            # A later view of the tensor has to be possible for its errors as well.
            error = torch.empty_like(tensor).copy_(error)
        self._errors[id(tensor)] = error
        self._kept.append(tensor)

    def stored(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a value as memory of a dtype holds it; its error becomes that of a neighbour."""
        if not value.is_floating_point() or dtype not in _NARROW:
            return value
        with _disable_current_modes():
            bounded_value = stored(BoundedValue(value, self.of(value)), dtype)
        self.note(bounded_value.value, bounded_value.error)
        return bounded_value.value

    def widened(self, value: Tensor, share: float) -> Tensor:
        """Return a value that may be rounded by a share of itself, or not."""
        with _disable_current_modes():
            made, error = value.clone(), self.of(value) + value.abs() * share
        self.note(made, error)
        return made

    def is_exact(self, tensor: Any) -> bool:
        """Return whether nothing is known to be off."""
        return not isinstance(tensor, torch.Tensor) or id(tensor) not in self._errors

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, then bound its results."""
        del types
        keywords = dict(kwargs or {})
        name = operator_name(func)
        if name in _IN_PLACE:
            return _IN_PLACE[name](self, func, args, keywords)
        result = func(*args, **keywords)
        made = result if isinstance(result, (tuple, list)) else (result,)
        floating = [each for each in made if _is_floating(each)]
        if not floating:
            return result
        if name in EXACT:
            if name.startswith(("zeros", "empty", "new", "full")):
                # Written into later, and views of it have to share the memory of its errors.
                for each in floating:
                    self.note(each, torch.zeros_like(each))
            return result
        if name in MOVES:
            self._moved(func, args, keywords, made)
            return result
        if name in _CONVERSIONS and self.is_exact(args[0]):
            return result
        rule = RULES.get(name)
        for each in floating:
            if rule is None:
                self.unknown[name] = None
                self.note(each, torch.full_like(each, math.inf))
            else:
                self.note(each, rule(self, each, args, keywords))
        return result

    def _moved(
        self, func: Any, args: tuple[Any, ...], keywords: dict[str, Any], made: Sequence[Any]
    ) -> None:
        if all(self.is_exact(tensor) for tensor in _flat(args)):
            return
        moved = func(*(_errors_in(self, each) for each in args), **keywords)
        errors = moved if isinstance(moved, (tuple, list)) else (moved,)
        for result, error in zip(made, errors, strict=True):
            self.note(result, error)


def _is_floating(value: Any) -> bool:
    """Return whether a value has errors; those of a complex one are bounds of its two parts."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _flat(arguments: Any) -> list[Tensor]:
    if isinstance(arguments, torch.Tensor):
        return [arguments]
    if isinstance(arguments, (tuple, list)):
        return [tensor for part in arguments for tensor in _flat(part)]
    return []


def _errors_in(errors: RunningErrors, argument: Any) -> Any:
    if _is_floating(argument):
        return errors.of(argument)
    if isinstance(argument, (tuple, list)):
        return [_errors_in(errors, each) for each in argument]
    return argument


def _pair(errors: RunningErrors, side: Any) -> tuple[Any, Any]:
    """Return value and error of an operand, which may be a number."""
    if isinstance(side, torch.Tensor):
        return side, (0.0 if errors.is_exact(side) else errors.of(side))
    return side, 0.0


def _rounded(result: Tensor, error: Any, roundings: float = 1.0) -> Tensor:
    made: Tensor = error + result.abs() * (roundings * U)
    return made.expand_as(result)


# --------------------------------------------------------------------------------------------------
# Rules: the errors of a result from those of its operands.


def _sum_of_two(errors: RunningErrors, result: Tensor, args: Any, keywords: Any) -> Tensor:
    (_, first), (_, second) = _pair(errors, args[0]), _pair(errors, args[1])
    factor = abs(keywords.get("alpha", args[2] if len(args) > 2 else 1))
    return _rounded(result, first + factor * second)


def _product_of_two(errors: RunningErrors, result: Tensor, args: Any, _keywords: Any) -> Tensor:
    (a, off_a), (b, off_b) = _pair(errors, args[0]), _pair(errors, args[1])
    if result.is_complex():
        return _product_of_pairs(a, off_a, b, off_b)
    return _rounded(result, _size(a) * off_b + _size(b) * off_a + off_a * off_b)


def _product_of_pairs(a: Any, off_a: Any, b: Any, off_b: Any) -> Tensor:
    """Return the errors of a complex product: two products and their sum in each part."""
    parts = []
    for side in (a, off_a, b, off_b):
        pair = torch.view_as_real(torch.as_tensor(side).to(torch.complex128).resolve_conj())
        parts.append((pair[..., 0].abs(), pair[..., 1].abs()))
    a_parts, a_off, b_parts, b_off = parts

    def product(i: int, j: int) -> Tensor:
        size = a_parts[i] * b_parts[j]
        return a_parts[i] * b_off[j] + a_off[i] * (b_parts[j] + b_off[j]) + 2 * U * size

    return torch.complex(product(0, 0) + product(1, 1), product(0, 1) + product(1, 0))


def _polar(errors: RunningErrors, result: Tensor, args: Any, _keywords: Any) -> Tensor:
    (size, off), (_, turned) = _pair(errors, args[0]), _pair(errors, args[1])
    error = size.abs() * (turned + FUNCTION * U) + off
    made: Tensor = torch.complex(*2 * (error.expand(result.shape),))
    return made


def _quotient(errors: RunningErrors, result: Tensor, args: Any, _keywords: Any) -> Tensor:
    (_, off_a), (b, off_b) = _pair(errors, args[0]), _pair(errors, args[1])
    below = _size(b) - off_b
    error = (off_a + result.abs() * off_b) / below
    if isinstance(below, torch.Tensor):
        error = torch.where(below > 0, error, math.inf)
    return _rounded(result, error, FUNCTION)


def _size(value: Any) -> Any:
    return value.abs() if isinstance(value, torch.Tensor) else abs(value)


def _same(errors: RunningErrors, result: Tensor, args: Any, _keywords: Any) -> Tensor:
    """Return the error of an operator that rounds nothing: a sign, a bound, a copy."""
    return errors.of(args[0]).expand_as(result).clone()


def _widest(errors: RunningErrors, result: Tensor, args: Any, _keywords: Any) -> Tensor:
    """Return the larger of two operands' errors: a choice between them may go either way."""
    sides = [_pair(errors, each)[1] for each in args[:2]]
    wide = [side if isinstance(side, torch.Tensor) else result.new_tensor(side) for side in sides]
    return torch.maximum(*wide).expand_as(result)


def _where(errors: RunningErrors, result: Tensor, args: Any, _keywords: Any) -> Tensor:
    chosen, a, b = args
    made: Tensor = torch.where(chosen, errors.of(a), errors.of(b))
    return made.expand_as(result)


def _filled(errors: RunningErrors, result: Tensor, args: Any, _keywords: Any) -> Tensor:
    return errors.of(args[0]).masked_fill(args[1], 0.0).expand_as(result)


def _exponential(errors: RunningErrors, result: Tensor, args: Any, _keywords: Any) -> Tensor:
    """Return the error of e^x, or of e^x - 1 where that is the result."""
    x, off = _pair(errors, args[0])
    # The rounded argument of e^x costs |x| u; a masked one is exactly minus infinity.
    grown = torch.expm1(torch.as_tensor(off, dtype=result.dtype))
    moved = torch.where(x.isfinite(), x.exp() * (grown + x.abs() * U), 0.0)
    return _rounded(result, moved, FUNCTION)


def _logarithm(errors: RunningErrors, result: Tensor, args: Any, _keywords: Any) -> Tensor:
    x, off = _pair(errors, args[0])
    below = x - off
    return _rounded(result, torch.where(below > 0, off / below, math.inf), FUNCTION)


def _logistic(errors: RunningErrors, result: Tensor, args: Any, _keywords: Any) -> Tensor:
    x, off = _pair(errors, args[0])
    off = torch.where(x.isfinite(), off + x.abs() * U, 0.0)
    return _rounded(result, (result * (1 - result) * off + 0.1 * off**2).clamp(max=1), FUNCTION + 2)


def _silu(errors: RunningErrors, result: Tensor, args: Any, _keywords: Any) -> Tensor:
    x, off = _pair(errors, args[0])
    share = torch.sigmoid(x)
    slope = (share + result * (1 - share)).abs()
    inner = x.abs() * share * (1 - share) * x.abs() * U  # the rounded argument of e^-x
    # The second derivative of x sigmoid(x) is below 1/2.
    return _rounded(result, slope * off + 0.5 * off**2 + inner, FUNCTION + 3)


def _shifted_logarithm(errors: RunningErrors, result: Tensor, args: Any, _keywords: Any) -> Tensor:
    x, off = _pair(errors, args[0])
    below = 1 + x - off
    return _rounded(result, torch.where(below > 0, off / below, math.inf), FUNCTION)


def _reciprocal(errors: RunningErrors, result: Tensor, args: Any, keywords: Any) -> Tensor:
    return _quotient(errors, result, (1.0, args[0]), keywords)


def _scattered_copy(errors: RunningErrors, _result: Tensor, args: Any, _keywords: Any) -> Tensor:
    target, dim, index, source = args
    off = _pair(errors, source)[1]
    moved: Tensor = errors.of(target).scatter(dim, index, off)
    return moved


def _added_rows(errors: RunningErrors, result: Tensor, args: Any, _keywords: Any) -> Tensor:
    target, dim, index, source = args
    return _rounded(result, errors.of(target).index_add(dim, index, errors.of(source)), 2)


def _smooth(slope: float, argument: float = 1.0) -> Rule:
    """Return the rule of a function of bounded slope; its argument is rounded as well."""

    def rule(errors: RunningErrors, result: Tensor, args: Any, _keywords: Any) -> Tensor:
        x, off = _pair(errors, args[0])
        return _rounded(result, slope * (off + argument * x.abs() * U), FUNCTION + 4)

    return rule


def _turned(errors: RunningErrors, result: Tensor, args: Any, _keywords: Any) -> Tensor:
    """Return the error of a sine or cosine: its argument's, and two units of one."""
    _, off = _pair(errors, args[0])
    made: Tensor = (torch.zeros_like(result) + off + FUNCTION * U).clamp(max=2)
    return made


def _power(errors: RunningErrors, result: Tensor, args: Any, _keywords: Any) -> Tensor:
    (x, off), exponent = _pair(errors, args[0]), args[1]
    if isinstance(exponent, torch.Tensor) or not isinstance(x, torch.Tensor):
        base, power = (torch.as_tensor(each, dtype=result.dtype) for each in (x, exponent))
        turned = base.abs().log().abs() * (_pair(errors, exponent)[1] + power.abs() * U)
        return _rounded(result, result.abs() * (turned + (power * off / base).abs()), FUNCTION)
    if exponent == 2:
        return _rounded(result, 2 * x.abs() * off + off**2)
    slope = (exponent * result / x).abs().nan_to_num(nan=0.0)
    # torch cubes as x x x in the dtype of x, so the square may be rounded to it.
    square = torch.finfo(errors.store).eps / 2 if exponent == 3 else 0.0
    return _rounded(result, slope * off * 2 + result.abs() * square, FUNCTION)


def _root(errors: RunningErrors, result: Tensor, args: Any, _keywords: Any) -> Tensor:
    x, off = _pair(errors, args[0])
    return _rounded(result, result * (off / (2 * x)).nan_to_num(nan=0.0), FUNCTION)


def _inverse_root(errors: RunningErrors, result: Tensor, args: Any, _keywords: Any) -> Tensor:
    x, off = _pair(errors, args[0])
    below = x - off
    error = torch.where(below > 0, below.clamp(min=0).rsqrt() - result, math.inf)
    return _rounded(result, error, FUNCTION)


def _total(errors: RunningErrors, result: Tensor, args: Any, keywords: Any) -> Tensor:
    """Return the error of a sum along dimensions: half of its length in additions."""
    x, off = _pair(errors, args[0])
    count = max(1.0, x.numel() / max(1, result.numel()))
    size = _reduced(x.abs(), args, keywords)
    own = size * ((count / 2 + 2) * U)
    made: Tensor = own if errors.is_exact(x) else own + _reduced(off, args, keywords)
    return made.reshape(result.shape)


def _mean(errors: RunningErrors, result: Tensor, args: Any, keywords: Any) -> Tensor:
    count = max(1.0, args[0].numel() / max(1, result.numel()))
    made: Tensor = _total(errors, result, args, keywords) / count + result.abs() * (2 * U)
    return made


def _reduced(x: Tensor, args: Any, keywords: Any) -> Tensor:
    dims = args[1] if len(args) > 1 else keywords.get("dim")
    keep = args[2] if len(args) > 2 else keywords.get("keepdim", False)
    if dims is None or dims == []:
        return x.sum()
    return x.sum(dims, keepdim=keep)


def _cumulated(errors: RunningErrors, _result: Tensor, args: Any, _keywords: Any) -> Tensor:
    x, dim = args[0], args[1]
    size = x.abs().cumsum(dim)
    made: Tensor = size * ((x.shape[dim] / 2 + 2) * U) + errors.of(x).cumsum(dim)
    return made


def _extreme(errors: RunningErrors, result: Tensor, args: Any, keywords: Any) -> Tensor:
    """Return the error of a largest element, which another may replace."""
    off = errors.of(args[0])
    if len(args) < 2 and "dim" not in keywords:
        return off.amax().expand_as(result)
    dims = args[1] if len(args) > 1 else keywords["dim"]
    keep = args[2] if len(args) > 2 else keywords.get("keepdim", False)
    return off.amax(dims, keepdim=keep).expand_as(result)


def _chosen(errors: RunningErrors, result: Tensor, args: Any, _keywords: Any) -> Tensor:
    """Return the error of the largest k: that of any element of the row."""
    dim = args[2] if len(args) > 2 else -1
    return errors.of(args[0]).amax(dim, keepdim=True).expand_as(result)


def _shares(errors: RunningErrors, result: Tensor, args: Any, _keywords: Any) -> Tensor:
    x, off = _pair(errors, args[0])
    dim = args[1]
    finite = torch.where(x.isfinite(), x, 0.0)
    top = x.amax(dim, keepdim=True)
    apart = torch.where(x.isfinite(), (finite - top).abs(), 0.0)
    off = torch.where(x.isfinite(), off + apart * U, 0.0)
    count = x.shape[dim]
    # A share moves by its own logit's error, and by the mean of all errors through the sum.
    mean = (result * off).sum(dim, keepdim=True)
    relative = torch.expm1((off + mean).clamp(max=50)) + (FUNCTION + count / 4) * U
    made: Tensor = (result * relative).clamp(max=1)
    return made


def _multiplied(errors: RunningErrors, result: Tensor, args: Any, keywords: Any) -> Tensor:
    """Return the error of a matrix product, batched or not, with an addend or without.

    A run may store the product before it adds: cuBLAS does for a single query.
    """
    addend, (a, b) = (args[0], args[1:3]) if len(args) > 2 else (None, args[:2])
    off = torch.empty_like(result)
    # Part by part: a matrix may be most of the memory, and its bounds would be several of it.
    width = max(1, _PART // max(1, b.shape[-2]))
    for begin in range(0, b.shape[-1], width):
        columns = slice(begin, begin + width)
        part = b[..., columns]
        own = product_slack(a.float(), part.mT.float().contiguous()).double()
        if not errors.is_exact(b):
            own = own + a.abs() @ errors.of(b)[..., columns]
        if not errors.is_exact(a):
            size = part.abs() if errors.is_exact(b) else part.abs() + errors.of(b)[..., columns]
            own = own + errors.of(a) @ size
        off[..., columns] = own
    if addend is not None:
        scale, factor = keywords.get("beta", 1), keywords.get("alpha", 1)
        made = (result - scale * addend).abs()
        once = torch.finfo(errors.store).eps / 2 if errors.store in _NARROW else 0.0
        off = abs(factor) * off + abs(scale) * errors.of(addend) + result.abs() * U + made * once
    return off


def _layer_norm(errors: RunningErrors, result: Tensor, args: Any, _keywords: Any) -> Tensor:
    x, _, weight, bias, epsilon = args
    if result.shape != x.shape:  # mean and root, which nothing reads
        return torch.full_like(result, math.inf)
    one = torch.ones(x.shape[-1], dtype=x.dtype)
    scale = one if weight is None else weight
    error = layer_normed(x, scale, 0 * one if bias is None else bias, epsilon).error
    if errors.is_exact(x):
        return error
    centred = x - x.mean(-1, keepdim=True)
    factor = (centred.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    # A row's own error moves its mean, and through the squares its factor.
    off = errors.of(x)
    off = off + off.mean(-1, keepdim=True)
    share = ((centred.abs() + off) * off).mean(-1, keepdim=True) * factor.square()
    moved = (off + centred.abs() * share) * factor / (1 - share)
    return error + torch.where(share < 0.5, moved, math.inf) * scale.abs()


def _convolved(errors: RunningErrors, result: Tensor, args: Any, _keywords: Any) -> Tensor:
    x, weight, bias, *rest = args
    size: Tensor = torch.ops.aten.convolution(x.abs(), weight.abs(), None, *rest)
    off: Tensor = size * ((weight.numel() / weight.shape[0] + 2) * U)
    if not errors.is_exact(x):
        off = off + torch.ops.aten.convolution(errors.of(x), weight.abs(), None, *rest)
    return off if bias is None else off + result.abs() * U


def _softplus(errors: RunningErrors, result: Tensor, args: Any, _keywords: Any) -> Tensor:
    x, off = _pair(errors, args[0])
    return _rounded(result, off + x.abs() * U + FUNCTION * U, FUNCTION + 2)


def _converted(errors: RunningErrors, result: Tensor, args: Any, _keywords: Any) -> Tensor:
    """Return the error of a cast between wide types: none of its own."""
    source = args[0]
    if not source.is_floating_point():
        return torch.zeros_like(result)
    return errors.of(source).to(result.dtype)


def _rule_table() -> dict[str, Rule]:
    table: dict[str, Rule] = {}
    for names, rule in (
        ("add sub rsub", _sum_of_two),
        ("mul", _product_of_two),
        ("div", _quotient),
        ("neg abs relu hardtanh clamp clamp_min clamp_max", _same),
        ("maximum minimum", _widest),
        ("where", _where),
        ("masked_fill", _filled),
        ("exp expm1", _exponential),
        ("log", _logarithm),
        ("log1p", _shifted_logarithm),
        ("reciprocal", _reciprocal),
        ("scatter", _scattered_copy),
        ("index_add", _added_rows),
        ("sigmoid", _logistic),
        ("silu", _silu),
        # 1 + erf(x) cancels below zero: the errors of erf and of the sum stay as large as x.
        ("gelu", _smooth(1.13, 4.0)),
        ("tanh", _smooth(1.0)),
        ("cos sin", _turned),
        ("polar", _polar),
        ("pow", _power),
        ("sqrt", _root),
        ("rsqrt", _inverse_root),
        ("sum", _total),
        ("mean", _mean),
        ("cumsum", _cumulated),
        ("amax max amin min", _extreme),
        ("topk sort", _chosen),
        ("_softmax", _shares),
        ("mm bmm addmm baddbmm", _multiplied),
        ("softplus", _softplus),
        ("native_layer_norm", _layer_norm),
        ("convolution", _convolved),
        (" ".join(_CONVERSIONS), _converted),
    ):
        table |= dict.fromkeys(names.split(), rule)
    return table


RULES: Mapping[str, Rule] = MappingProxyType(_rule_table())


# --------------------------------------------------------------------------------------------------
# Operators that write into their first argument.


def _copy_into(errors: RunningErrors, func: Any, args: Any, keywords: Any) -> Any:
    made = func(*args, **keywords)
    if _is_floating(args[0]):
        if errors.is_exact(args[0]):
            errors.note(args[0], torch.zeros_like(args[0]))
        errors.of(args[0]).copy_(errors.of(args[1]))
    return made


def _in_place(rule: Rule) -> Callable[..., Any]:
    """Return an operator that overwrites its first operand with a result that has a rule."""

    def write(errors: RunningErrors, func: Any, args: Any, keywords: Any) -> Any:
        before = args[0].clone()
        if not errors.is_exact(args[0]):
            errors.note(before, errors.of(args[0]))
        made = func(*args, **keywords)
        errors.note(made, rule(errors, made, (before, *args[1:]), keywords))
        return made

    return write


def _scattered(errors: RunningErrors, func: Any, args: Any, keywords: Any) -> Any:
    target, dim, index, source = args
    off = _pair(errors, source)[1]
    moved = errors.of(target).scatter(dim, index, off)
    made = func(*args, **keywords)
    errors.note(made, moved)
    return made


def _scattered_sum(errors: RunningErrors, func: Any, args: Any, keywords: Any) -> Any:
    target, dim, index, source = args
    off = errors.of(target).index_add(dim, index, errors.of(source))
    made = func(*args, **keywords)
    errors.note(made, _rounded(made, off, 2))
    return made


_IN_PLACE: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "copy_": _copy_into,
        "add_": _in_place(_sum_of_two),
        "sub_": _in_place(_sum_of_two),
        "mul_": _in_place(_product_of_two),
        "div_": _in_place(_quotient),
        "masked_fill_": _in_place(_filled),
        "clamp_": _in_place(_same),
        "scatter_": _scattered,
        "index_add_": _scattered_sum,
    }
)
