"""Infer what a checkpoint does not state: nibble order, scale layout, and the producer of NVFP4.

A value is given only where the evidence is far beyond chance; otherwise the inference says what was
missing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from degarble.harness.base.errors import Refused
from degarble.harness.formats.codec import unpack_nibbles
from degarble.harness.formats.fast.buffers import values_of
from degarble.harness.formats.layouts import (
    PACKED_MN,
    ROW_ORDERS,
    SWIZZLE_8X4,
    SWIZZLE_128X4,
    ScaleLayout,
    from_layout,
    reorder_rows,
    restore_rows,
    to_layout,
)
from degarble.harness.formats.number_formats import E2M1, E4M3, NibbleOrder, ScaleDirection
from degarble.harness.model.types import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.checkpoint.audit.statistics.tensor import TensorStatistics
    from degarble.harness.checkpoint.view.weight_units import WeightUnit
    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.harness.formats.weight import Weight


# --------------------------------------------------------------------------------------------------
# Results. A value is given only where both its evidence and its lead over the next best value are
# far beyond chance; otherwise `because` says what was missing. `confidence` is one minus the
# probability of such evidence by chance, over all values tried and for independent draws. Real
# weights are only nearly independent: hence the wide margin, and never more than CERTAIN.

CERTAIN = 0.999999
FAR = 6.0  # standard deviations of evidence, and of its distance to the next best value


@dataclass(frozen=True)
class Inference:
    """One inference. `value` None: undecided. `evidence`: a score for each value tried.

    `lead`: of the best over the next best, or over zero, in standard deviations.
    """

    about: str
    value: str | None
    confidence: float
    because: str
    evidence: Mapping[str, float]
    lead: float = 0.0

    @property
    def is_decided(self) -> bool:
        """Whether there is a value."""
        return self.value is not None


def undecided(
    about: str, because: str, evidence: Mapping[str, float] | None = None, lead: float = 0.0
) -> Inference:
    """Return an inference without a value."""
    return Inference(about, None, 0.0, because, MappingProxyType(dict(evidence or {})), lead)


def best_of(about: str, scores: Mapping[str, float], because: str) -> Inference:
    """Return the value of highest score, in standard deviations, if it leads by FAR."""
    evidence = MappingProxyType(dict(scores))
    ranked = sorted(
        (name for name in scores if math.isfinite(scores[name])), key=lambda name: -scores[name]
    )
    if not ranked:
        return undecided(about, "nothing varies, so nothing can be inferred", scores)
    first = ranked[0]
    second = scores[ranked[1]] if len(ranked) > 1 else 0.0
    lead = min(scores[first], scores[first] - max(second, 0.0))
    if lead < FAR:
        text = f"{first} leads by {max(lead, 0.0):.1f} standard deviations; {FAR:.0f} are asked for"
        return undecided(about, text, scores, lead)
    return Inference(about, first, confidence_of(lead, len(scores)), because, evidence, lead)


def confidence_of(deviations: float, tried: int = 1) -> float:
    """Return the confidence of a lead in standard deviations, over the number of values tried."""
    return max(0.0, min(CERTAIN, 1.0 - tried * math.erfc(deviations / math.sqrt(2))))


# --------------------------------------------------------------------------------------------------
# Packing order of nibbles along K, from energies by column. Swapping nibbles moves codes inside
# their block of 16, so no statistic of one matrix alone shows it. But matrices that read the same
# input share its channels: where a channel is large or small, it is so in all of them. So the
# profile of a packed matrix (energy by column) is compared, inside blocks, with profiles of known
# order: linears on the same input that are not packed; the norm before it; the rows of the linear
# that produces the input. For the last two the sign of the relation is unknown; it is taken from
# the means of blocks, which no order inside a block changes.
#
# A matrix without outstanding channels, or without a reference profile, is undecided. Derivation,
# power and limits: docs/design-notes/audit_statistics.md.

BLOCK = 16
PACKING_ORDER = "packing order"
_FEWEST_COLUMNS = 128
# Where the codes of a block lie when read low nibble first: position of each logical index.
_EVEN = np.arange(BLOCK)
ORDERS = {
    NibbleOrder.LOW_EVEN.value: _EVEN,
    NibbleOrder.HIGH_EVEN.value: _EVEN ^ 1,
    # Low nibbles hold the first half of a block, high ones the second: GGUF's packing of FP4.
    "halves": np.concatenate([_EVEN[::2], _EVEN[1::2]]),
}
ORDER_NAMES = tuple(ORDERS)


class Kinship(StrEnum):
    """Relation of a reference profile to a packed matrix."""

    SIBLING = "linears on the same input that are not packed"
    NORM = "the norm in front"
    PRODUCER = "the rows of what makes its input"
    EXPERTS = "the rows of what makes the inputs of all experts of its layer, taken together"
    AROUND = "the norm in front, or the rows of what makes its input, by their names"
    PACKED = "packed linears on the same input"  # shows a difference, not which of them is right


@dataclass(frozen=True, eq=False)
class ReferenceProfile:
    """A profile of known order: one logarithm for each column."""

    kinship: Kinship
    logs: NDArray[np.float64]

    @cached_property
    def templates(self) -> NDArray[np.float64]:
        """The profile as each order would show it, read low nibble first; unit length."""
        blocks = _inside(self.logs).reshape(-1, BLOCK)
        # argsort(p) inverts `p`: the logical index of the code at each stored position.
        stacked = np.stack([blocks[:, np.argsort(p)].reshape(-1) for p in ORDERS.values()])
        return _of_length_one(stacked)

    @cached_property
    def means(self) -> NDArray[np.float64]:
        """Means of blocks, at unit length."""
        return _of_length_one(_means(self.logs))


def logs_of(energies: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return binary logarithms of a profile; zero columns take its smallest value."""
    wide = energies.astype(np.float64)
    positive = wide[(wide > 0) & np.isfinite(wide)]
    if not len(positive):
        return np.zeros(len(wide))
    kept = np.clip(np.nan_to_num(wide, posinf=positive.max()), positive.min(), None)
    logs: NDArray[np.float64] = np.log2(kept)
    return logs


def infer_order(columns: NDArray[np.float32], references: Sequence[ReferenceProfile]) -> Inference:
    """Infer the packing order from a profile read low nibble first; the best reference counts."""
    fitting = [reference for reference in references if len(reference.logs) == len(columns)]
    if len(columns) < _FEWEST_COLUMNS or len(columns) % BLOCK:
        return undecided(PACKING_ORDER, f"{len(columns)} columns are too few")
    if not fitting:
        return undecided(PACKING_ORDER, "no profile of known order for this input")
    profile = logs_of(columns)
    inferences = [_judge(profile, reference_profile) for reference_profile in fitting]
    return max(
        inferences,
        key=lambda inference: (inference.is_decided, max(inference.evidence.values(), default=0.0)),
    )


def infer_shared_order(
    columns: Sequence[NDArray[np.float32]], references: Sequence[ReferenceProfile]
) -> Inference:
    """Infer the common order of several matrices, each with a reference of its own.

    Each is weak evidence; together they form one long profile. Matrices have equal weight: a dead
    expert, whose logarithms are wide on both sides, must not decide for all of them.
    """
    pairs = [
        (_standard(logs_of(ours)), _standard(reference.logs))
        for ours, reference in zip(columns, references, strict=True)
        if len(ours) == len(reference.logs) and len(ours) % BLOCK == 0
    ]
    if sum(len(ours) for ours, _ in pairs) < _FEWEST_COLUMNS:
        return undecided(PACKING_ORDER, "too few columns, even of all experts")
    profile, theirs = (np.concatenate(side) for side in zip(*pairs, strict=True))
    return _judge(profile, ReferenceProfile(Kinship.EXPERTS, theirs))


def _standard(logs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a profile with mean 0 and deviation 1; a nearly constant one becomes zero."""
    return _of_length_one(logs - logs.mean()) * math.sqrt(len(logs))


def _judge(profile: NDArray[np.float64], reference: ReferenceProfile) -> Inference:
    sign = 1.0
    around = reference.kinship is Kinship.AROUND
    if not around and reference.kinship not in (Kinship.SIBLING, Kinship.PACKED):
        means = _of_length_one(_means(profile))
        # Both vectors have unit length: the product is a correlation, here in standard deviations.
        between = float(reference.means @ means) * math.sqrt(len(means))
        if abs(between) < FAR:
            because = f"blocks show no relation to {reference.kinship} ({between:+.1f} deviations)"
            return undecided(PACKING_ORDER, because)
        sign = math.copysign(1.0, between)
    # Correlations, in their standard deviations under chance.
    inside = _of_length_one(_inside(profile))
    found = sign * math.sqrt(len(inside)) * (reference.templates @ inside)
    # Large gains go with large or with small columns; out of order neither is left.
    found = np.abs(found) if around else found
    return best_of(
        PACKING_ORDER, dict(zip(ORDERS, map(float, found), strict=True)), str(reference.kinship)
    )


def _means(profile: NDArray[np.float64]) -> NDArray[np.float64]:
    means: NDArray[np.float64] = profile.reshape(-1, BLOCK).mean(1)
    centred: NDArray[np.float64] = means - means.mean()
    return centred


def _inside(profile: NDArray[np.float64]) -> NDArray[np.float64]:
    blocks = profile.reshape(-1, BLOCK)
    centred: NDArray[np.float64] = blocks - blocks.mean(1, keepdims=True)
    return centred.reshape(-1)


def _of_length_one(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale vectors to length 1; nearly constant ones become zero."""
    lengths = np.sqrt((vectors * vectors).sum(-1, keepdims=True))
    scaled: NDArray[np.float64] = np.where(lengths > 1e-6, vectors / np.maximum(lengths, 1e-6), 0.0)
    return scaled


# --------------------------------------------------------------------------------------------------
# Profiles of one block's weights. For each packed matrix it finds the profiles that can decide:
# linears with the same input, the norm before it, and the rows of the linear that produces its
# columns. The model's wiring gives these relations; without a config, matrices of equal width have
# no known relation and nothing is inferred. Profiles are dropped with their block: a layer of 384
# experts has 50 MB of them.

_FEWEST_POOLED = 3  # experts of a layer
_FEWEST_PACKED = 3  # others, whose mean stands for the order of packed siblings
_HOPS = 2  # from an input back to the linear whose rows make it: over an activation or a norm


class EnergyProfile(NamedTuple):
    """One weight's energies by column and by row, float32."""

    row: int
    unit: WeightUnit
    is_packed: bool
    columns: NDArray[np.float32]
    rows: NDArray[np.float32] | None


class InferredOrder(NamedTuple):
    """The inferred order of one packed weight; `kinship`: relation of the deciding reference."""

    row: int
    inferred: Inference
    kinship: Kinship | None


@dataclass
class BlockProfiles:
    """The profiles of one block; `feeds` maps each component to the site that feeds it."""

    feeds: Mapping[str, str]
    by_name: bool = False  # the wiring follows from names alone
    profiles: list[EnergyProfile] = field(default_factory=list)
    _rows: dict[tuple[str, int | None], list[NDArray[np.float32]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, row: int, unit: WeightUnit, tensor_statistics: TensorStatistics) -> None:
        """Keep the profile of a weight if it can serve as evidence or be judged."""
        if tensor_statistics.columns is not None and (unit.feed or _is_norm(unit)):
            is_packed = tensor_statistics.blocks is not None and len(tensor_statistics.counts) == 16
            self.profiles.append(
                EnergyProfile(
                    row, unit, is_packed, tensor_statistics.columns, tensor_statistics.rows
                )
            )
            if unit.is_linear and tensor_statistics.rows is not None:
                self._rows[unit.component, unit.expert].append(tensor_statistics.rows)

    def judge(self) -> Iterator[InferredOrder]:
        """Infer the packing order of every packed weight of the block."""
        by_feed: dict[str, list[EnergyProfile]] = defaultdict(list)
        for profile in self.profiles:
            if profile.is_packed:
                by_feed[profile.unit.feed].append(profile)
        for feed, packed in by_feed.items():
            shared = list(self._shared(feed))
            found = []
            for profile in packed:
                references = [*shared, *self._producers(feed, profile.unit.expert)]
                found.append(infer_order(profile.columns, references))
            self._pool(feed, packed, found)
            yield from _with_pooled_profiles(packed, found, by_name=self.by_name)

    def _pool(self, feed: str, packed: list[EnergyProfile], inferences: list[Inference]) -> None:
        """Judge the undecided experts of a layer together, each by its own producers' rows.

        Trap: a producer shared by all experts would count the same chance once for each expert.
        """
        members, references = [], []
        for i, profile in enumerate(packed):
            if profile.unit.expert is None or inferences[i].is_decided:
                continue
            for reference in self._producers(feed, profile.unit.expert, alone=True):
                members.append(i)
                references.append(reference)
        if len(members) < _FEWEST_POOLED or self.by_name:
            return
        together = infer_shared_order([packed[i].columns for i in members], references)
        if together.is_decided:
            for i in members:
                inferences[i] = together

    def _shared(self, feed: str) -> Iterator[ReferenceProfile]:
        """Yield the references for an input, whichever matrix reads it."""
        siblings = [p for p in self.profiles if p.unit.feed == feed and not p.is_packed]
        yield from _reference(Kinship.SIBLING, (sibling.columns for sibling in siblings))
        maker = _component(feed)
        norms = [p for p in self.profiles if _is_norm(p.unit)]
        gains = (norm.columns for norm in norms if norm.unit.component == maker)
        yield from _reference(Kinship.AROUND if self.by_name else Kinship.NORM, gains)

    def _producers(
        self, feed: str, expert: int | None, *, alone: bool = False
    ) -> Iterator[ReferenceProfile]:
        """Yield the rows of the linears that produce an input, the same expert's where it has one.

        `alone`: only that expert's own linears.
        """
        experts = (expert,) if alone or expert is None else (None, expert)
        # Walk back over activations and norms, which have no rows, to the linear before them.
        for _ in range(_HOPS + 1):
            component = _component(feed)
            makers = [rows for each in experts for rows in self._rows.get((component, each), ())]
            if makers:
                around = Kinship.AROUND if self.by_name else Kinship.PRODUCER
                yield from _reference(around, makers)
                return
            feed = self.feeds.get(component, "")


def _with_pooled_profiles(
    packed: list[EnergyProfile], inferences: list[Inference], *, by_name: bool
) -> Iterator[InferredOrder]:
    """Yield each inference; undecided ones are compared with the mean of the other packed ones."""
    open_ones = [i for i, inferred in enumerate(inferences) if not inferred.is_decided]
    if open_ones and len(packed) > _FEWEST_PACKED and not by_name:
        total = sum(logs_of(energy_profile.columns) for energy_profile in packed)
        for i in open_ones:
            others = (total - logs_of(packed[i].columns)) / (len(packed) - 1)
            inferences[i] = infer_order(
                packed[i].columns, [ReferenceProfile(Kinship.PACKED, others)]
            )
    for profile, inferred in zip(packed, inferences, strict=True):
        kinship = Kinship(inferred.because) if inferred.is_decided else None
        yield InferredOrder(profile.row, inferred, kinship)


def _reference(
    kinship: Kinship, energies: Iterable[NDArray[np.float32]]
) -> Iterator[ReferenceProfile]:
    """Yield the mean of profiles of one width; nothing if there are none or widths differ."""
    logs = [logs_of(energy) for energy in energies]
    if logs and len({len(log) for log in logs}) == 1:
        yield ReferenceProfile(kinship, np.mean(logs, axis=0))


def _is_norm(unit: WeightUnit) -> bool:
    """Return whether a weight is a norm's, by its config or by its name."""
    return unit.kind is Kind.NORM or (unit.kind is None and unit.component.endswith("layernorm"))


def _component(site: str) -> str:
    """Return the component whose output is a site such as `layers.3.ffn.norm.out`."""
    return site.rpartition(".out")[0]


# --------------------------------------------------------------------------------------------------
# Layout of block scales, from codes and scales alone, by trying every known order. A quantiser
# scales by the largest value of a block, so an outlier raises its block's scale and shrinks the
# other codes: the logarithms of scale and code energy correlate negatively, whatever the model. In
# any other order scales are paired with foreign codes and the correlation vanishes; the right order
# stands out by tens of standard deviations. Means of rows and columns are subtracted first, because
# outlier channels make neighbouring rows alike.
#
# Undecided where blocks do not vary (weights of one magnitude), where most weights are zero (more
# of them raise scale and energy alike), or where blocks are too few. Derivation and power:
# docs/design-notes/audit_statistics.md.
#
# Shape letters: R rows, C columns of blocks.

SCALE_LAYOUT = "scale layout"
LINEAR = "linear"
_FEWEST_BLOCKS = 512
_MOST_ROWS = 512  # as many rows, from the whole height, tell enough


def infer_layout(weight: Weight) -> Inference:
    """Infer the order of a quantised matrix's block scales by trying every known one."""
    if weight.storage is None or weight.codes is None or weight.block_scale is None:
        return undecided(SCALE_LAYOUT, "no block scales")
    fmt = weight.storage.format
    stored_RC = weight.block_scale.reshape(-1, weight.block_scale.shape[-1])
    if fmt.block[0] != 1 or stored_RC.numel() < _FEWEST_BLOCKS:
        return undecided(
            SCALE_LAYOUT, f"{stored_RC.numel()} blocks of {fmt.block[0]} rows are too few"
        )
    rows = torch.arange(0, len(stored_RC), max(1, len(stored_RC) // _MOST_ROWS))
    energy_log = _energy_logs(weight.codes[rows], fmt)
    scale_log = _scale_logs(fmt)
    scores: dict[str, float] = {}
    tried: list[Tensor] = []
    for name, order in orders_for(stored_RC.shape[0], stored_RC.shape[1]).items():
        try:
            logical_RC = order(stored_RC)[rows]
        except Refused:  # this order does not divide these rows
            continue
        if not any(torch.equal(logical_RC, other) for other in tried):  # some undo themselves
            tried.append(logical_RC)
            scores[name] = -_deviations(scale_log[logical_RC.numpy()], energy_log)
    return best_of(SCALE_LAYOUT, scores, "scale and code energy of a block belong together")


def orders_for(rows: int, columns: int) -> Mapping[str, Callable[[Tensor], Tensor]]:
    """Return, by name, functions from stored scales [R, C] to logical ones."""
    found: dict[str, Callable[[Tensor], Tensor]] = {
        LINEAR: lambda stored: stored,
        "transposed": lambda stored: stored.reshape(columns, rows).t().contiguous(),
        "groups of 4 transposed": _groups_of_four,
    }
    for layout in (SWIZZLE_128X4, SWIZZLE_8X4, PACKED_MN):
        if layout.storage_size(rows, columns) == rows * columns:
            found[layout.name] = _read_from(layout, rows, columns)
            found[f"{layout.name}, undone once too often"] = _written_to(layout)
    for name, order in ROW_ORDERS.items():
        if name != "as_stored":
            found[f"rows {name}"] = partial(restore_rows, order=order)
            found[f"rows {name}, undone"] = partial(reorder_rows, order=order)
    return found


def _read_from(layout: ScaleLayout, rows: int, columns: int) -> Callable[[Tensor], Tensor]:
    return lambda stored: from_layout(stored.reshape(-1), layout, rows, columns)


def _written_to(layout: ScaleLayout) -> Callable[[Tensor], Tensor]:
    return lambda stored: to_layout(stored, layout).reshape(stored.shape)


def _groups_of_four(stored: Tensor) -> Tensor:
    """Undo a transpose inside each group of 4 rows and 4 columns."""
    rows, columns = stored.shape
    if rows % 4 or columns % 4:
        return stored.new_zeros(stored.shape)
    groups = stored.reshape(rows // 4, 4, columns // 4, 4)
    return groups.permute(0, 3, 2, 1).reshape(rows, columns)


def _energy_logs(codes: Tensor, fmt: BlockFormat) -> NDArray[np.float64]:
    element = unpack_nibbles(codes) if fmt.packed else codes
    table = values_of(E2M1 if fmt.packed else E4M3).astype(np.float64)
    squares = np.nan_to_num(table * table)[element.numpy()]
    energy: NDArray[np.float64] = squares.reshape(len(codes), -1, fmt.block[1]).sum(2)
    with np.errstate(divide="ignore"):
        return np.log2(energy)


def _scale_logs(fmt: BlockFormat) -> NDArray[np.float64]:
    values = values_of(fmt.scale).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log2(values)


def _deviations(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Return the correlation about rows' and columns' means, in standard deviations."""
    known = np.isfinite(a) & np.isfinite(b)
    if known.sum() < _FEWEST_BLOCKS:
        return float("nan")
    a, b = _centred(a, known), _centred(b, known)
    squares = float((a * a).sum() * (b * b).sum())
    if squares < 1e-9:
        return float("nan")
    return float((a * b).sum()) / math.sqrt(squares) * math.sqrt(float(known.sum()))


def _centred(values: NDArray[np.float64], known: NDArray[np.bool_]) -> NDArray[np.float64]:
    centred = np.where(known, values, 0.0)
    for axis in (1, 0):
        counts = np.maximum(known.sum(axis, keepdims=True), 1)
        centred = np.where(known, centred - centred.sum(axis, keepdims=True) / counts, 0.0)
    return centred


# --------------------------------------------------------------------------------------------------
# Producer of NVFP4 tensors, by excluding those whose rules leave other bytes. Three traces: the
# scale byte of blocks of zeros; the smallest scales (one producer has none below 2^-6, only one has
# zeros over codes); and the tensor scale. The amax of bfloat16 weights has eight significant bits,
# and only the producer's own arithmetic leads from such a number to the stored float32. A scale
# fits by chance with a probability of 2^-15, but two producers' arithmetic agrees for three amax in
# four, so it takes a dozen tensors.
#
# Producers with the same traces share one answer: Transformer Engine, FlashInfer and vLLM cannot be
# told apart. The result is undecided where no trace excludes enough.

DIALECT = "dialect"
FULL = np.float32(2688.0)  # 6 * 448
_FITTING = 0.98  # of the tensors: then their amax were bfloat16
_UNEXPLAINED = 2  # tensors whose scale one producer explains and another does not


@dataclass(frozen=True)
class DialectProducer:
    """The traces of one group of dialects. `zero_byte`: scale byte of a block of zeros."""

    name: str
    zero_byte: int
    smallest: float  # positive block scale over codes
    zero_over_codes: bool  # whether a scale of zero may stand over codes
    amax_of: Callable[[NDArray[np.float64]], NDArray[np.float64]]
    scale_of: Callable[[NDArray[np.float32]], NDArray[np.float32]]


def _decode(amax: NDArray[np.float32]) -> NDArray[np.float32]:
    return amax / FULL


def _decode_of_encode(amax: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.float32(1) / (FULL / amax)


def _encode_bfloat16(amax: NDArray[np.float32]) -> NDArray[np.float32]:
    return _to_bfloat16(_to_bfloat16(np.float32(1) / amax) * FULL)


PRODUCERS: Mapping[str, DialectProducer] = MappingProxyType(
    {
        producer.name: producer
        for producer in (
            DialectProducer("modelopt", 0x38, 2.0**-9, False, lambda s: s * 2688, _decode),
            DialectProducer(
                "canonical, flashinfer or vllm",
                0x00,
                2.0**-9,
                True,
                lambda s: s * 2688,
                _decode_of_encode,
            ),
            DialectProducer("torchao", 0x08, 2.0**-6, False, lambda s: s * 2688, _decode),
            DialectProducer(
                "compressed_tensors", 0x20, 2.0**-9, False, lambda s: 2688 / s, _encode_bfloat16
            ),
        )
    }
)
LOSSLESS = "modelopt, cast from MXFP4 without loss"


@dataclass(frozen=True)
class DialectTraces:
    """The traces of a group of NVFP4 tensors. `scales`: tensor scales, as stored."""

    scales: Sequence[float]
    direction: ScaleDirection
    zero_bytes: Sequence[int]  # commonest scale byte of zero blocks, of tensors that have some
    smallest: float  # positive block scale over codes
    zero_over_codes: int  # blocks
    powers_only: bool  # every block scale and every tensor scale is a power of two


def infer_dialect(traces: DialectTraces) -> Inference:
    """Return the one producer that no trace excludes, or undecided."""
    if not traces.scales:
        return undecided(DIALECT, "no tensors")
    if traces.powers_only:
        because = "all scales are powers of two"
        return Inference(DIALECT, LOSSLESS, CERTAIN, because, MappingProxyType({}))
    fits = {name: _fit(producer, traces) for name, producer in PRODUCERS.items()}
    reasons: dict[str, str] = {}
    best = max(fits.values())
    for name, producer in PRODUCERS.items():
        reasons[name] = _excluded(producer, traces, fits[name], best)
    left = [name for name in PRODUCERS if not reasons[name]]
    text = "; ".join(f"not {name}: {why}" for name, why in reasons.items() if why)
    if len(left) != 1:
        names = " or ".join(left) if left else "none that is known"
        return undecided(DIALECT, f"left: {names}; {text}", fits)
    return Inference(DIALECT, left[0], CERTAIN, text, MappingProxyType(fits))


def candidates(traces: DialectTraces) -> tuple[str, ...]:
    """Return the producers that no trace excludes."""
    fits = {name: _fit(producer, traces) for name, producer in PRODUCERS.items()}
    best = max(fits.values(), default=0.0)
    return tuple(
        name for name, p in PRODUCERS.items() if not _excluded(p, traces, fits[name], best)
    )


def _excluded(producer: DialectProducer, traces: DialectTraces, fit: float, best: float) -> str:
    """Return why a producer is excluded; empty if it is not."""
    others = [byte for byte in traces.zero_bytes if byte != producer.zero_byte]
    if len(others) * 2 > len(traces.zero_bytes):
        return f"zero blocks have the scale 0x{others[0]:02x}"
    if traces.smallest < producer.smallest:
        return f"block scales go down to {traces.smallest:.3g}"
    if traces.zero_over_codes and not producer.zero_over_codes:
        return "blocks with codes have scales of zero"
    if best >= _FITTING and (best - fit) * len(_distinct(traces)) >= _UNEXPLAINED:
        return f"{fit:.0%} of the tensor scales follow from a bfloat16 amax by its arithmetic"
    return ""


def _distinct(traces: DialectTraces) -> NDArray[np.float32]:
    """Return the usable scales, one for each significand: equal ones add no evidence."""
    stored = np.array(traces.scales, np.float32)
    stored = stored[np.isfinite(stored) & (stored > 0)]
    _, first = np.unique(np.frexp(stored)[0], return_index=True)
    return stored[first]


def _fit(producer: DialectProducer, traces: DialectTraces) -> float:
    """Return the share of tensor scales that a bfloat16 amax explains, bit for bit."""
    stored = _distinct(traces)
    if not len(stored):
        return 0.0
    stores_encode = producer.scale_of is _encode_bfloat16
    is_encode = traces.direction is ScaleDirection.ENCODE
    if stores_encode != is_encode:
        return 0.0
    with np.errstate(all="ignore"):
        amax = _to_bfloat16(producer.amax_of(stored.astype(np.float64)).astype(np.float32))
        return float(_near(producer, amax, stored).mean())


def _near(
    producer: DialectProducer, amax: NDArray[np.float32], stored: NDArray[np.float32]
) -> NDArray[np.bool_]:
    """Return a mask of scales that follow from this bfloat16 amax or one of its neighbours."""
    bits = amax.view(np.uint32)
    found = np.zeros(len(amax), np.bool_)
    for step in (-1, 0, 1):
        # One step of bfloat16 is 2^16 in the bits of a float32.
        neighbour = (bits + np.uint32((step << 16) & 0xFFFFFFFF)).view(np.float32)
        found |= producer.scale_of(neighbour) == stored
    return found


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round to bfloat16, nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)
