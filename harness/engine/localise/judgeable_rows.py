"""Leave out the rows of a replay that cannot be judged, and keep all others.

These are rows that a NaN or infinity can reach, and rows beyond the range of float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.base.sums import all_finite
from degarble.harness.engine.faults.model_faults import facts_of, with_numerics
from degarble.harness.engine.localise.replay import STATE, Batch, Replay, is_ragged, replayed, taken
from degarble.harness.engine.localise.tensor_forms import LARGEST, finite
from degarble.harness.model.family import family_of
from degarble.references.binding import plain_call
from degarble.references.facts import spans_of
from degarble.references.linears import activation_values

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from degarble.harness.engine.localise.replay import TwinComponents
    from degarble.harness.model.components import Component
    from degarble.harness.model.config.config import Config
    from degarble.references.facts import Span


# --------------------------------------------------------------------------------------------------
# Rows that a NaN or infinity can reach.
#
# Where rows are independent that is the value's own row. Where the tokens of a sequence meet
# (attention, pooling, scores), judging of the sequence ends before the first token that can see the
# NaN: a shorter call is replayed, which is equivalent because these components are causal. So
# judging, diagnosis and minimal reproducers never receive a row that was left out, and need no
# special case for it.
#
# Shape letters: T tokens, W entries, B sequences.

if TYPE_CHECKING:
    Tensors = Mapping[str, Tensor]

_SCORES = "scores"
_OFFSETS = "token_offsets"
_BY_SEQUENCE = frozenset({"state_latent", "state_gate"})
_CODED = frozenset({"codes", "block_scale", "tensor_scale"})
_COUNTED = "entry_offsets"


@dataclass(frozen=True, eq=False)
class JudgeablePart:
    """A replay of the remaining rows; `kept` holds their numbers in the whole batch."""

    replay: Replay
    kept: Tensor
    whole: int

    @property
    def left_out(self) -> int:
        """Return how many rows are not judged."""
        return self.whole - len(self.kept)

    def within(self, outer: JudgeablePart) -> JudgeablePart:
        """Return this part with row numbers of the batch that `outer` is a part of."""
        return JudgeablePart(self.replay, outer.kept[self.kept], outer.whole)

    def rows_of(self, tensor: Tensor) -> Tensor | None:
        """Return the kept rows of a tensor of the whole batch; None if it has other rows."""
        if not tensor.ndim or tensor.shape[0] != self.whole:
            return None
        return tensor[self.kept]


def finite_part(known: TwinComponents, replay: Replay) -> JudgeablePart | None:
    """Return the rows that no NaN or infinity can reach; None where these are none, or all.

    Masked scores are -inf by design. Where the twin itself cannot run (a quantisation that raises
    for a NaN), it is run on the remaining rows.
    """
    if replay.undecided:
        replay = replace(replay, inputs=taken(replay.batch))
    spoilt = {name: bad for name, bad in _spoilt(known, replay).items() if bool(bad.any())}
    return _without(known, replay, spoilt) if spoilt else None


def part_without(known: TwinComponents, replay: Replay, rows: Tensor) -> JudgeablePart | None:
    """Return all rows but `rows` [T]; within a sequence, leave out those and all later ones."""
    if not is_ragged(replay.batch.component):
        return _of_rows(known, replay, ~rows)
    return _without(known, replay, {"positions": rows})


def is_finite(known: TwinComponents, replay: Replay) -> bool:
    """Tell whether all inputs are finite, decoded where codes arrived."""
    return not any(bool(bad.any()) for bad in _spoilt(known, replay).values())


def _spoilt(known: TwinComponents, replay: Replay) -> dict[str, Tensor]:
    """Return which rows of the inputs hold NaN or infinity; an input without any may be absent."""
    found = {
        name: _rows_with(~tensor.isfinite() & ~(tensor.isneginf() & (name == _SCORES)))
        for name, tensor in replay.inputs.items()
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1 and name not in _CODED
        if not all_finite(tensor)
    }
    # Decoding is most of the work, so it is done only where the twin's outputs are not finite.
    if "codes" in replay.inputs and not finite(replay.expected) and not replay.undecided:
        form = replay.judgeable(known).activation
        try:
            x = activation_values(replay.inputs, form, torch.float32)
        except (*CANNOT_RUN, AssertionError):
            return found  # codes of another form: judging reports that
        found["codes"] = _rows_with(~x.isfinite())
    return found


def _rows_with(bad: Tensor) -> Tensor:
    return bad.flatten(1).any(1) if bad.ndim > 1 else bad


def _without(known: TwinComponents, replay: Replay, spoilt: Tensors) -> JudgeablePart | None:
    component, count = replay.batch.component, len(replay.batch.step_of)
    if is_ragged(component):
        return _of_sequences(known, replay, spoilt)
    kept = torch.ones(count, dtype=torch.bool)
    for bad in spoilt.values():
        if not bad.ndim or len(bad) != count:
            return None  # shared by all rows, so none is left
        kept &= ~bad
    return _of_rows(known, replay, kept)


def _of_rows(known: TwinComponents, replay: Replay, kept: Tensor) -> JudgeablePart | None:
    """Cut independent rows out of every tensor that has one row for each."""
    batch, count = replay.batch, len(kept)
    if not bool(kept.any()) or bool(kept.all()):
        return None

    def cut(side: Tensors) -> dict[str, Tensor]:
        return {
            name: tensor[kept] if tensor.ndim and tensor.shape[0] == count else tensor
            for name, tensor in side.items()
        }

    spans = batch.spans or (slice(0, count),)
    counts = [int(kept[span].sum()) for span in spans]
    shorter = _cut_batch(batch, (cut(batch.inputs), cut(batch.outputs)), kept, counts)
    if replay.undecided:
        made = replayed(known, shorter)
    else:
        sides = cut(replay.expected), cut(replay.inputs)
        made = replace(replay, batch=shorter, expected=sides[0], inputs=sides[1])
    if made.undecided:
        return None
    return JudgeablePart(made, kept.nonzero().flatten(), count)


def _cut_batch(
    batch: Batch, sides: tuple[Tensors, Tensors], kept: Tensor, counts: Sequence[int]
) -> Batch:
    """Return the same calls with fewer rows; drop calls without any."""
    begins = [0, *accumulate(counts)]
    calls = [(call, n) for n, call in enumerate(batch.calls) if counts[n]] or [(batch.calls[0], 0)]
    return replace(
        batch,
        calls=tuple(call for call, _ in calls),
        inputs=sides[0],
        outputs=sides[1],
        step_of=batch.step_of[kept],
        position_of=batch.position_of[kept],
        spans=tuple(slice(begins[n], begins[n + 1]) for _, n in calls),
        whole=batch.whole or batch,
        kept=kept.nonzero().flatten() if batch.kept is None else batch.kept[kept],
    )


def _of_sequences(known: TwinComponents, replay: Replay, spoilt: Tensors) -> JudgeablePart | None:
    """Cut every sequence of a call before the first token that can see a NaN or infinity."""
    batch, inputs = replay.batch, replay.inputs
    lines = rows_by_sequence(batch.component, known.twin.config, inputs)
    if lines is None:
        return None
    spans, counts = lines.spans, lines.counts(spoilt)
    # Nothing to keep, or nothing to leave out.
    if counts is None or not any(counts) or sum(counts) == sum(each.count for each in spans):
        return None
    if "chosen" in inputs and not _choices_exist(inputs["chosen"], lines, counts):
        return None
    kept = torch.zeros(sum(each.count for each in spans), dtype=torch.bool)
    for span, count in zip(spans, counts, strict=True):
        kept[span.begin : span.begin + count] = True
    if len(kept) != len(batch.step_of):
        return None
    own, made = (lines.cut_side(side, counts) for side in (batch.inputs, batch.outputs))
    if own is None or made is None:
        return None
    shorter = _cut_batch(batch, (own, made), kept, [int(kept.sum())])
    again = replayed(known, shorter)
    if again.undecided:
        return None
    return JudgeablePart(_settled(again, lines, counts), kept.nonzero().flatten(), len(kept))


def _settled(replay: Replay, lines: RowsBySequence, counts: Sequence[int]) -> Replay:
    """Use the twin's carried state on both sides, since a shorter sequence carries another one.

    Entries that only dropped sequences have are no columns of the remaining scores.
    """
    outputs = dict(replay.batch.outputs)
    cut_short = [n for n, own in lines.shortened(counts) if own]
    for name, tensor in replay.expected.items():
        own = outputs.get(name)
        if own is None:
            continue
        if name in _BY_SEQUENCE and cut_short and own.shape == tensor.shape:
            # The carried state after fewer tokens is unknown for the candidate: take the twin's.
            outputs[name] = own.clone()
            outputs[name][cut_short] = tensor[cut_short].to(own.dtype)
        elif name == "out" and own.ndim == tensor.ndim == 2 and own.shape[1] > tensor.shape[1]:
            hidden = own[:, tensor.shape[1] :]
            if bool(hidden.isneginf().all()):
                outputs[name] = own[:, : tensor.shape[1]]
    return replace(replay, batch=replace(replay.batch, outputs=outputs))


def _choices_exist(chosen_TK: Tensor, lines: RowsBySequence, counts: Sequence[int]) -> bool:
    """Tell whether no remaining token was given an entry that only later tokens complete."""
    for span, count in zip(lines.spans, counts, strict=True):
        entries = (span.start + count) // lines.ratio
        whole = span.stop // lines.ratio
        own = chosen_TK[span.begin : span.begin + count]
        if bool(((own >= entries) & (own < whole)).any()):
            return False
    return True


def rows_by_sequence(
    component: Component, config: Config, inputs: Tensors
) -> RowsBySequence | None:
    """Return the sequences of a call; None where its offsets are unusable."""
    try:
        spans = spans_of(inputs)
    except (*CANNOT_RUN, AssertionError):
        return None
    return RowsBySequence(component, spans, family_of(config).earlier_window(config) or 0)


class RowsBySequence:
    """The assignment of each tensor's rows to the sequences of a call."""

    def __init__(self, component: Component, spans: Sequence[Span], reach: int) -> None:
        block = component.block
        self.ratio = max(1, block.ratio) if block is not None else 1
        self.spans, self._reach = spans, reach

    def shortened(self, counts: Sequence[int]) -> list[tuple[int, bool]]:
        """Return the remaining sequences by their new numbers, and whether they are shorter."""
        left = [(span, n) for span, n in zip(self.spans, counts, strict=True) if n]
        return [(at, n < span.count) for at, (span, n) in enumerate(left)]

    def _extents(self, name: str, rows: int) -> list[int] | None:
        """Return how many rows each sequence has; None where that is ambiguous."""
        if name in _BY_SEQUENCE:
            made = [1] * len(self.spans)
        elif name == "state_window":
            made = [min(span.start, self._reach) for span in self.spans]
        elif name.startswith(STATE):
            made = [span.entries_before(self.ratio) for span in self.spans]
        else:
            made = [span.count for span in self.spans]
            if sum(made) != rows:
                made = [span.entries_made(self.ratio) for span in self.spans]
        return made if sum(made) == rows else None

    def counts(self, spoilt: Tensors) -> list[int] | None:
        """Return how many tokens of each sequence depend on nothing that is spoilt."""
        found = [span.count for span in self.spans]
        for name, bad in spoilt.items():
            extents = self._extents(name, len(bad)) if bad.ndim else None
            if extents is None:
                return None
            for at, (span, own) in enumerate(zip(self.spans, bad.split(extents), strict=True)):
                if not bool(own.any()):
                    continue
                first = int(own.nonzero()[0])
                # Spoilt memory reaches the first token.
                if name.startswith(STATE):
                    first = 0
                elif extents[at] != span.count:
                    # An entry exists once its last token has been processed.
                    first = (span.start // self.ratio + first + 1) * self.ratio - 1 - span.start
                found[at] = min(found[at], max(0, first))
        return found

    def cut_side(self, side: Tensors, counts: Sequence[int]) -> dict[str, Tensor] | None:
        """Return the rest of inputs or outputs; None where the rows of one cannot be assigned."""
        made = {}
        for name, tensor in side.items():
            own = self._cut(name, tensor, counts)
            if own is None:
                return None
            made[name] = own
        return made

    def _cut(self, name: str, tensor: Tensor, counts: Sequence[int]) -> Tensor | None:
        if name == _OFFSETS:
            left = [n for n in counts if n]
            return torch.tensor([0, *accumulate(left)], dtype=tensor.dtype)
        if name == _COUNTED:
            return self._entries(tensor, counts)
        if not tensor.ndim:
            return tensor
        extents = self._extents(name, tensor.shape[0])
        if extents is None:
            return None
        parts = []
        for at, (span, own) in enumerate(zip(self.spans, tensor.split(extents), strict=True)):
            count = extents[at] if counts[at] else 0
            if counts[at] and not name.startswith(STATE):
                count = counts[at]
                if extents[at] != span.count:
                    stop = span.start + counts[at]
                    count = stop // self.ratio - span.start // self.ratio
            parts.append(own[:count])
        return torch.cat(parts)

    def _entries(self, offsets: Tensor, counts: Sequence[int]) -> Tensor | None:
        """Return the entry offsets of the remaining sequences."""
        if offsets.shape != (len(self.spans) + 1,):
            return None
        told, left = offsets.diff().tolist(), []
        for span, count, own in zip(self.spans, counts, told, strict=True):
            if count == span.count:
                left.append(own)
            elif count:
                left.append((span.start + count) // self.ratio - span.start // self.ratio)
        return torch.tensor([0, *accumulate(left)], dtype=offsets.dtype)


# --------------------------------------------------------------------------------------------------
# Rows on which a correct float32 kernel may overflow.
#
# 10^20 squared does not fit into float32. A norm in float32 then returns zeros, in another order of
# operations NaN, and in float64 the right numbers. All of these are correct kernels, so such a row
# cannot be judged. The twin runs once more in float32, and every intermediate tensor is inspected,
# so norms, softmax, mixing, pooling and products need no list of their own. This runs only where
# something differs and very large or very small values arrived.
#
# Underflow is checked only before a reciprocal root: vanishing squares do not matter next to
# epsilon, unless epsilon is as small as they are.

OVERFLOW = "a correct float32 kernel may overflow on them"
_SMALLEST = 2.0**-100  # before a root: its terms may have been flushed to zero
_ORDINARY = 2.0**32  # the product of three inputs below this stays in range
_TINY = 2.0**-40  # the square of an input above this stays in range
_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm"})


def rows_out_of_range(known: TwinComponents, replay: Replay) -> Tensor | None:
    """Return which rows [T] may leave float32 in an intermediate value; None where none can."""
    batch = replay.batch
    if replay.undecided or not _is_extreme(known, replay):
        return None
    name, count = batch.component.name, len(batch.step_of)
    if not is_ragged(batch.component):
        found = _watched(known, name, replay.inputs, count)
        return found if bool(found.any()) else None
    lines = rows_by_sequence(batch.component, known.twin.config, replay.inputs)
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


def _is_extreme(known: TwinComponents, replay: Replay) -> bool:
    wide = [tensor for tensor in replay.inputs.values() if tensor.dtype.itemsize > 1]
    sizes = [tensor.abs() for tensor in wide if tensor.is_floating_point() and tensor.numel()]
    if "codes" in replay.inputs:
        try:
            form = replay.judgeable(known).activation
            sizes.append(activation_values(replay.inputs, form, torch.float32).abs())
        except (*CANNOT_RUN, AssertionError):
            return False
    rows = [size.flatten(1).amax(1) if size.ndim > 1 else size for size in sizes]
    return any(bool(((row > _ORDINARY) | ((row > 0) & (row < _TINY))).any()) for row in rows)


def _watched(known: TwinComponents, name: str, inputs: Tensors, count: int) -> Tensor:
    """Run the twin's function in float32 and mark the rows whose intermediates leave its range."""
    call = plain_call(known.twin.calls[name])
    facts = facts_of(call)
    if not isinstance(call, partial) or facts is None:
        return torch.zeros(count, dtype=torch.bool)
    # The same function, in float32 from end to end.
    narrow = with_numerics(facts, work=torch.float32, products=torch.float32)
    given = {
        # Compiled loops hide their intermediates; tensors that require gradients bypass them.
        key: tensor.detach().clone().requires_grad_()
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1
        else tensor
        for key, tensor in inputs.items()
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
