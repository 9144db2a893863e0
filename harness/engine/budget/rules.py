"""The call that is judged, and the slack of each kind of arithmetic: products, functions, norms.

Slack bounds the error before the output is rounded. u = 2^-24 is half a spacing of float32, in
which every component accumulates; the twin is exact in comparison.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.base.errors import ShapeMismatch, Undecided
from degarble.harness.engine.budget.budget import Budget
from degarble.harness.formats.codec import FORMAT_OF_DTYPE
from degarble.harness.formats.number_formats import BF16, FP32
from degarble.harness.report.number_text import number
from degarble.references.binding import as_they_are
from degarble.references.linears import CODES, STAGE, X_LOOSE, activation_values
from degarble.references.numerics import DecodedOperands
from degarble.references.tensor_core import WGMMA_FP8

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    from degarble.harness.formats.number_formats import ElementFormat
    from degarble.harness.formats.weight import Weight
    from degarble.references.binding import BoundModel
    from degarble.references.facts import ModelFacts


# --------------------------------------------------------------------------------------------------
# Products, functions and norms.
#
# * A sum of K products, in any order in float32 or in the steps of a tensor core. Each addition
#   errs by at most u times its partial sum. In the order of K, partial sums are read off the data
#   at CHECKPOINTS places. In an order that is as good as random they are |s| k / K plus a bridge of
#   deviation at most |x * w|_2 / 2, which Cauchy-Schwarz bounds by row norms: |x|_4 |w|_4 / 2. An
#   aligned step of a tensor core (16 products and C, each cut 2^-25 below the largest) counts as 17
#   more.
# * A function of few operations: their number times u times the largest intermediate value.
# * A value stored on the way: one spacing of the stored format, carried on.
#
# Shape letters: M rows, K summed, N outputs.

U = 2.0**-24
UNDERFLOW = 2.0**-126  # smaller numbers may become 0: flushed, or 1 / e^x with e^x infinite
CHECKPOINTS = 16  # partial sums that are computed; the bridge bounds those in between
ALIGNED_TERMS = 17  # of one wgmma or tcgen05 step of 16-bit operands (facts of MMA-Sim)
LARGE = 1 << 25  # elements of a matrix; a larger one is processed in pieces of its rows
_AT_ONCE = 1 << 18  # partial sums held at once; below this, calls cost more than sums
_IN_CACHE = 1 << 18  # elements that a thread processes at once, so that no step waits for memory
_ROW_BLOCK = 64  # of which a product's parts have a multiple of rows, as loops of BLAS have
_DIGEST_BITS = 40  # of a row's digest: enough to tell rows apart, few enough for sums in any order
SCALE_ROUNDINGS = 4  # two scales, their product, and the product with the sum


def output_format(out: Tensor) -> ElementFormat:
    """Return the number format of an output; a twin's float64 output is judged as float32."""
    return FORMAT_OF_DTYPE.get(out.dtype, FP32)


def cut_off(share: Tensor) -> Tensor:
    """Return how far a share near 0 may be off: it may become 0, or err by a few times 2^-149."""
    return torch.where(share < 2 * UNDERFLOW, (8 * share).clamp(max=UNDERFLOW), 0.0)


def exact(output: ElementFormat, why: str) -> Budget:
    """Return the budget of a copy: nothing may differ."""
    return Budget(output, torch.zeros(()), (why,))


class ProductOperand(NamedTuple):
    """Rows of one side of a product, with the facts that a bound needs."""

    rows: Tensor
    four: Tensor  # the norms |row|_4
    repeats: int  # rows at most that are equal but for sign and size

    def on(self, device: torch.device) -> ProductOperand:
        """Return it on a device."""
        return self._replace(rows=self.rows.to(device), four=self.four.to(device))


class MatrixParts(NamedTuple):
    """A matrix [N, K] whose rows are made part by part, in float32, whenever they are read."""

    shape: tuple[int, ...]
    parts: Callable[[], Iterable[Tensor]]


_KNOWN: dict[int, tuple[weakref.ref[Tensor], int, tuple[Tensor, int]]] = {}
_MOST_KNOWN = 4096


def product_operand(rows: Tensor) -> ProductOperand:
    """Return an Operand; cache its facts while the tensor stays unmodified (weights recur)."""
    wide = rows.float()
    if rows.is_inference():  # inference tensors have no version counter, so changes go unnoticed
        return ProductOperand(wide, _four_norm(wide), _repeats(wide))
    known = _KNOWN.get(id(rows))
    if known is None or known[0]() is not rows or known[1] != rows._version:  # noqa: SLF001
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        found = _four_norm(wide), _repeats(wide)
        known = weakref.ref(rows), rows._version, found  # noqa: SLF001
        _KNOWN[id(rows)] = known
    return ProductOperand(wide, *known[2])


def summed(
    x_MK: Tensor | ProductOperand,
    w_NK: Tensor | ProductOperand | MatrixParts,
    output: ElementFormat = BF16,
    *,
    worded: bool = True,
) -> Budget:
    """Return the budget of a matrix product x w^T, with scales before or after the sum.

    Without words no number of it has to be read, for which a GPU would be waited for.
    """
    shapes = tuple(
        tuple((side.rows if isinstance(side, ProductOperand) else side).shape)
        for side in (x_MK, w_NK)
    )
    if any(len(shape) != 2 for shape in shapes) or shapes[0][1] != shapes[1][1]:
        raise ShapeMismatch(
            "operands", shapes, "(M, K) and (N, K)",
            "Pass the weight as rows of K; join leading extents.",
        )  # fmt: skip
    x = x_MK if isinstance(x_MK, ProductOperand) else product_operand(x_MK)
    length = x.rows.shape[1]
    if isinstance(w_NK, ProductOperand) or (
        isinstance(w_NK, torch.Tensor) and w_NK.numel() <= LARGE
    ):
        w = w_NK if isinstance(w_NK, ProductOperand) else product_operand(w_NK)
        total, mean = _partial_sums(x.rows, w.rows)
        four, repeats = w.four, (x.repeats, w.repeats)
    else:
        total, mean, four, equal = _in_pieces(x.rows, _parts_of(w_NK), w_NK.shape[0])
        repeats = x.repeats, equal
    # |x|_4 |w|_4 for all pairs of rows [M, N]
    bridge = x.four[:, None] * four[None, :]
    slack = _slack_of_sums(total, mean, bridge, length)
    if not worded:
        return Budget(output, slack, (), repeats)
    middle = float(mean.mean()), float(bridge.mean())
    return Budget(
        output,
        slack,
        (
            f"K = {length} additions in float32, u = 2^-24 = {number(U)}",
            f"partial sums in the order of K: {number(middle[0])} on average",
            f"in any other order: bridge |x|_4 |w|_4 = {number(middle[1])} on average",
            f"slack = u (K partial + (K / 2 + {ALIGNED_TERMS}) bridge + {SCALE_ROUNDINGS} |s|)",
            f"that is {number(float(slack.mean()))} on average",
            f"equal rows, which round alike: up to {repeats[0]} of x, {repeats[1]} of w",
            f"and one rounding to {output.name}",
        ),
        repeats,
    )


def product_slack(x: Tensor, w: Tensor) -> Tensor:
    """Return the slack of products x w^T alone, of matrices [..., M, K] and [..., N, K]."""
    total, mean = _partial_sums(x, w)
    bridge = _four_norm(x)[..., :, None] * _four_norm(w)[..., None, :]
    return _slack_of_sums(total, mean, bridge, x.shape[-1])


def _slack_of_sums(total: Tensor, mean: Tensor, bridge: Tensor, length: int) -> Tensor:
    slack = mean.mul(length).add_(bridge, alpha=length / 2 + ALIGNED_TERMS)
    return slack.add_(total.abs_(), alpha=SCALE_ROUNDINGS).mul_(U)


def _parts_of(w: Tensor | MatrixParts) -> Iterable[Tensor]:
    if isinstance(w, MatrixParts):
        return w.parts()
    return (part.float() for part in w.split(max(1, LARGE // w.shape[1])))


def _in_pieces(
    x: Tensor, parts: Iterable[Tensor], count: int
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return totals and partial sums, norms of `count` rows, and how many of these are equal.

    A matrix may be too large to be widened as a whole: a head takes 3.7 GB. Results are written
    into memory of their own: small tensors between large ones would keep freed memory from reuse.
    """
    totals, means = torch.empty(2, len(x), count, device=x.device)
    four = torch.empty(count, device=x.device)
    digests = torch.empty(count, dtype=torch.float64, device=x.device)
    begin = 0
    for wide in parts:
        rows = slice(begin, begin := begin + len(wide))
        totals[:, rows], means[:, rows] = _partial_sums(x, wide)
        four[rows], digests[rows] = _four_norm(wide), _digests(wide)
    return totals, means, four, _most_alike(digests) if count > 1 else 1


def _partial_sums(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the products, and the mean magnitude of their partial sums at the CHECKPOINTS."""
    length, shape = x.shape[-1], (*x.shape[:-1], w.shape[-2])
    # Small products: all partial sums in one bmm, then a cumulative sum.
    if x.ndim == 2 and length % CHECKPOINTS == 0 and prod(shape) * CHECKPOINTS <= _AT_ONCE:
        parts = [side.reshape(len(side), CHECKPOINTS, -1).transpose(0, 1) for side in (x, w)]
        sums = torch.bmm(parts[0], parts[1].transpose(1, 2)).cumsum(0)
        return sums[-1].clone(), sums.abs_().mean(0)
    total = torch.zeros(shape, device=x.device)
    partial = torch.zeros_like(total)
    bounds = [length * part // CHECKPOINTS for part in range(CHECKPOINTS + 1)]
    for begin, end in pairwise(bounds):
        total += x[..., begin:end] @ w[..., begin:end].mT
        partial += total.abs()
    return total, partial / CHECKPOINTS


@lru_cache(maxsize=16)
def _probe(width: int, device: torch.device) -> Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(0)).double().to(device)


def _repeats(rows: Tensor) -> int:
    """Return how many rows at most are equal but for sign and size: they round alike."""
    return _most_alike(_digests(rows)) if len(rows) > 1 else 1


def _digests(rows: Tensor) -> Tensor:
    """Return a number for each row; rows equal but for sign and size have equal numbers.

    A row of zeros has NaN.
    """
    # A fixed random projection: equal rows have equal values whatever their sign and scale.
    probe = _probe(rows.shape[1], rows.device)
    if not _leaves_cache(rows):
        return _digests_of(rows.double(), probe)
    count, most = len(rows), _rows_at_once(rows) // _ROW_BLOCK * _ROW_BLOCK
    step = max(_ROW_BLOCK, most)
    wide = torch.empty(min(step, count), rows.shape[1], dtype=torch.float64)
    parts = (rows[begin : begin + step] for begin in range(0, count, step))
    return torch.cat([_digests_of(wide[: len(part)].copy_(part), probe) for part in parts])


def _digests_of(wide: Tensor, probe: Tensor) -> Tensor:
    found: Tensor = ((wide @ probe) / wide.norm(dim=1)).abs()
    return found


def _leaves_cache(rows: Tensor) -> bool:
    """Tell whether steps over all rows on the CPU would each wait for memory."""
    most = _IN_CACHE * torch.get_num_threads()
    return rows.device.type == "cpu" and rows.is_contiguous() and rows.numel() > most


def _rows_at_once(rows: Tensor) -> int:
    return max(1, _IN_CACHE * torch.get_num_threads() // rows.shape[-1])


def _most_alike(digests: Tensor) -> int:
    digests = digests.cpu()  # at once: every further step would wait for a GPU
    digests = digests[~digests.isnan()]
    if not len(digests):
        return 1
    found = torch.unique((digests * 2**_DIGEST_BITS).round(), return_counts=True)
    return int(found[1].max())


def _four_norm(rows: Tensor) -> Tensor:
    """Return (sum of x^4)^(1/4) of every row, scaled so that nothing overflows."""
    rows = rows.detach()  # what is written into a buffer has no gradient
    if not _leaves_cache(rows):
        return _four_norm_of(rows)
    flat = rows.reshape(-1, rows.shape[-1])
    # Two rows at least: a single one may be summed by several threads, in another order.
    parts = flat.tensor_split(max(1, len(flat) // max(2, _rows_at_once(rows))))
    buffer = torch.empty_like(parts[0])  # the longest, as the first ones are
    return torch.cat([_four_norm_of(part, buffer[: len(part)]) for part in parts]).reshape(
        rows.shape[:-1]
    )


def _four_norm_of(rows: Tensor, buffer: Tensor | None = None) -> Tensor:
    """Return the norms; steps are written into a buffer of the same extents."""
    largest = torch.abs(rows, out=buffer).amax(-1).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = torch.div(rows, largest[..., None], out=buffer).square_().square_()
    four: Tensor = scaled.sum(-1).sqrt().sqrt() * largest
    return four


def ambiguous(values: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return how far a decoded number's rounding moves if its float32 product errs by 2 u."""
    wide = values.double()
    ends = [(wide * (1 + sign * 2 * U)).to(dtype).double() for sign in (1, -1)]
    return (ends[0] - ends[1]).abs()


def few(amplitude: Tensor, roundings: float, output: ElementFormat, what: str) -> Budget:
    """Return the budget of a few operations whose intermediate values stay below `amplitude`."""
    return Budget(
        output,
        amplitude.float() * (roundings * U),
        (
            f"{what}: {number(roundings)} roundings in float32",
            f"each at most u = 2^-24 = {number(U)} of the largest intermediate value",
            f"and one rounding to {output.name}",
        ),
    )


def stored_between(budget: Budget, amplitude: Tensor, spacings: float, what: str) -> Budget:
    """Add values stored in BF16 on the way: each may fall on the neighbour."""
    added = amplitude.float() * (spacings * 2.0**-BF16.mantissa_bits)
    words = f"{what}: {number(spacings)} spacings of BF16 (2^-7) of what is stored on the way"
    return Budget(budget.output, budget.slack + added, (*budget.derivation, words))


def over_ranks(budget: Budget, x: Tensor, w: Tensor, ranks: int, *, on_the_way: bool) -> Budget:
    """Add the storing of each rank's term; `on_the_way`: partial sums over ranks are stored too."""
    terms = zip(x.tensor_split(ranks, 1), w.tensor_split(ranks, 1), strict=True)
    # Sum over ranks of |term|: each term is stored in BF16 before the reduction.
    amplitude = torch.stack([(a @ b.T).abs() for a, b in terms]).sum(0).reshape(budget.slack.shape)
    if on_the_way:
        return stored_between(budget, amplitude, 0.5 * ranks, f"terms of {ranks} ranks, their sums")
    return stored_between(budget, amplitude, 0.5, f"terms of {ranks} ranks")


def normed(
    out: Tensor,
    width: int,
    output: ElementFormat,
    *,
    additions: int = 0,
    weight: Tensor | None = None,
) -> Budget:
    """Return the budget of an RMS norm over `width`: squares have one sign, so errors are relative.

    The mean errs by half of width u, halved again by the root; root, products and weight add 8 u.
    Rows far below epsilon all have the same factor, so equal elements round alike.
    """
    roundings = width / 4 + 8 + additions
    budget = few(out.abs(), roundings, output, f"RMS norm of {width}")
    plain = out.float() if weight is None else out.float() / weight.float().where(weight != 0, 1)
    square = plain.square().mean(-1)
    alike = int(((square > 0) & (square <= roundings * U)).sum())
    if alike < 2:
        return budget
    words = f"rows far below epsilon, which have one factor: {alike}"
    return replace(budget, derivation=(*budget.derivation, words), repeats=(alike, 1))


# --------------------------------------------------------------------------------------------------
# Hopper's tensor core: the error of truncated accumulation of FP8 products.
#
# A step of `wgmma` takes 32 products of 8-bit codes and the accumulator C. All 33 terms are aligned
# to the largest nominal exponent among them and cut 2^-13 below it (references/tensor_core.py), so
# each term loses less than 2^-13 of the largest. Kernels add such sums to float32 after every 128
# of K, the extent of a scale, and a stage begins again from zero. The largest terms are read off
# the data: products by the extremes of a step's rows, C by the partial sum of its stage. Scales are
# constant within a stage and do not matter.
#
# The bound applies only to components whose candidate declares it (`fraction_bits` of a manifest);
# all others are judged as float32.

FP8_ACTIVATIONS = ("FP8_1X128_UE8M0", "FP8_1X128_F32")


def cut_in_steps(budget: Budget, x_MK: Tensor, w_NK: Tensor, bits: int) -> Budget:
    """Add the loss of steps with so many fraction bits to a budget."""
    slack = budget.slack + lost_in_steps(x_MK, w_NK, bits).reshape(budget.slack.shape)
    words = (
        f"FP8 products in steps of {WGMMA_FP8.step}, "
        f"each term cut 2^-{bits} below the largest of a step"
    )
    return replace(budget, slack=slack, derivation=(*budget.derivation, words))


def lost_in_steps(x_MK: Tensor, w_NK: Tensor, bits: int) -> Tensor:
    """Return the bound of the loss [M, N]."""
    lost, step = x_MK.new_zeros(x_MK.shape[0], w_NK.shape[0]), WGMMA_FP8.step
    for stage in range(0, x_MK.shape[1], STAGE):
        # The accumulator starts again from zero in every stage.
        partial = torch.zeros_like(lost)
        for begin in range(stage, min(stage + STAGE, x_MK.shape[1]), step):
            x, w = x_MK[:, begin : begin + step], w_NK[:, begin : begin + step]
            largest = x.abs().amax(1)[:, None] * w.abs().amax(1)[None]
            # A step's products and the accumulator, each cut below the largest of them.
            lost += (step + 1) * 2.0**-bits * torch.maximum(largest, partial.abs())
            partial += x @ w.T
    return lost


# --------------------------------------------------------------------------------------------------
# The call that is judged, built from a bound twin.
#
# `facts` are those that the twin's callable was bound to: config, arithmetic, block, formats. Roles
# whose budget chains through several stored values need them and are UNDECIDED without.


@dataclass(frozen=True, eq=False)
class JudgeableCall:
    """One component call on the candidate's inputs; `outputs` are the twin's."""

    role: str
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    weights: Mapping[str, Weight]
    activation: str | None = None
    facts: ModelFacts | None = None
    ranks: int = 1  # over which the candidate sums the outputs of linears split along K
    fraction_bits: int | None = None  # that the candidate's tensor core keeps of FP8 products
    placed: Callable[[Mapping[str, Weight]], Mapping[str, Weight]] = as_they_are

    @classmethod
    def from_twin(
        cls,
        twin: BoundModel,
        component: str,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor] | None = None,
    ) -> JudgeableCall:
        """Build the call of a bound twin; run the twin where `outputs` are not given."""
        what, facts = twin.bound_to(component)
        weights = twin.weights_of(component)
        if outputs is None:
            outputs = twin.calls[component](inputs, weights)
        name = next(iter(weights), None)
        form = facts.activation(name) if "codes" in inputs and name is not None else None
        bits = twin.fraction_bits.get(component)
        return cls(
            what.judged_as, inputs, outputs, weights, form, facts, twin.ranks, bits, twin.placed
        )

    @property
    def matrices(self) -> Mapping[str, Weight]:
        """Return the weights where products are computed: on the twin's device."""
        return self.placed(self.weights)

    @property
    def x(self) -> Tensor:
        """Return the input's numbers as they are multiplied, decoded where codes arrived."""
        numerics = None if self.facts is None else self.facts.numerics
        return activation_values(self.inputs, self.activation, torch.float32, numerics)

    @property
    def operands(self) -> DecodedOperands:
        """Return how quantised operands are rounded after decoding."""
        return DecodedOperands.EXACT if self.facts is None else self.facts.numerics.operands

    @property
    def x_loose(self) -> Tensor | None:
        """Return how far the input's rounded numbers may be off [rows, K]; None if exact."""
        own = self.inputs.get(X_LOOSE)
        if own is not None:
            return own.reshape(-1, own.shape[-1]).float()
        if self.operands is not DecodedOperands.BOTH or CODES not in self.inputs:
            return None
        decoded = activation_values(self.inputs, self.activation, torch.float32)
        dtype = self.known_facts.numerics.decoded
        return ambiguous(decoded.reshape(-1, decoded.shape[-1]), dtype).float()

    @property
    def known_facts(self) -> Any:
        """Return the facts, of its family's own class; raise Undecided where they are missing."""
        if self.facts is None:
            raise Undecided(
                "budget", self.role, "a call with the facts that its twin was bound to",
                "Make it with JudgeableCall.from_twin(twin, component, inputs).",
            )  # fmt: skip
        return self.facts
