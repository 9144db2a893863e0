"""Pair each weight with its counterpart in the reference, and measure how far its values are off.

Memory is bounded by a window of rows on each side and a few numbers a row. Shape letters: M rows,
K columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from degarble.harness.base.errors import InvalidArgument, Refused, Undecided
from degarble.harness.checkpoint.audit.against.codes import Misfits, misfits_of
from degarble.harness.checkpoint.audit.table import FORMATS, SKETCH, Pair
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.transform.convert.vllm_parameters import (
    is_arranged,
    stated_backend,
)
from degarble.harness.checkpoint.transform.source import row_values
from degarble.harness.checkpoint.view.quantisation_configs import moves_factors
from degarble.harness.checkpoint.view.weight_units import stored_of, units_of
from degarble.harness.formats.codec import decode_array, encode_array
from degarble.harness.formats.fast.nvfp4 import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    dequantise_nvfp4,
    largest_magnitude_or_nan,
    quantise_modelopt,
)
from degarble.harness.formats.number_formats import (
    E2M1,
    E4M3,
    FP8_128X128_F32,
    FP8_128X128_UE8M0,
    MXFP4,
    NVFP4,
    WHOLE,
    ScaleDirection,
    TableFormat,
)
from degarble.harness.formats.quantise import spread_blocks
from degarble.harness.model.tensors import PartKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.checkpoint.view.stored import StoredWeight
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.checkpoint.view.weight_units import WeightUnit
    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.harness.formats.quantise import QuantisedTensor
    from degarble.harness.formats.weight import Weight


# --------------------------------------------------------------------------------------------------
# Pairs. If both have a known config, weights are matched by logical name, whatever the spelling,
# fusing and stacking on either side; otherwise by the name of the stored module. A stack that a
# config knows as one matrix (wo_a in three axes) is compared member by member with its rows.
# Weights without a counterpart are listed with the reason. A reference of another family, or with
# no tensor in common, is rejected.


@dataclass
class Pairs:
    """All pairs, and unmatched weights with reasons. `unlike`: pairs of different shapes."""

    pairs: list[Pair] = field(default_factory=list)
    unlike: dict[str, str] = field(default_factory=dict)
    only_here: dict[str, str] = field(default_factory=dict)
    only_there: dict[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes that a comparison reads on both sides."""
        return sum(pair.nbytes for pair in self.pairs)


def pairs_of(checkpoint: Checkpoint, reference: Checkpoint) -> Pairs:
    """Match every weight of a checkpoint with its counterpart."""
    _require_one_family(checkpoint, reference)
    found, pairing = Pairs(), _NameTables(checkpoint, reference)
    factors = moves_factors(checkpoint.quantisation.values())
    for unit in units_of(checkpoint).units:
        if pairing.is_arranged(unit):
            found.only_here[unit.name] = "it is stored in the order of one backend's kernels"
            continue
        if factors and _moved(unit, checkpoint):
            found.only_here[unit.name] = (
                "its config states pre_quant_scale: factors were moved between norms and linears"
            )
            continue
        place = pairing.place_of(unit)
        if place is None:
            found.only_here[unit.name] = "the reference has nothing by its name"
            continue
        _add_pair(pairing, unit, place, found)
    if not found.pairs:
        raise Undecided(
            "tensors that both checkpoints have",
            0,
            "at least one of one name and shape",
            "Name the checkpoint that this one was made from.",
        )
    _require_one_model(found)
    taken = {pair.reference_name for pair in found.pairs} | found.unlike.keys()
    for name in pairing.names_there:
        if name not in taken:
            found.only_there[name] = "this checkpoint has nothing by its name"
    return found


def _moved(unit: WeightUnit, checkpoint: Checkpoint) -> bool:
    """Return whether a norm or a quantised linear may hold factors of an input by itself."""
    if unit.is_bare or unit.kind is None:
        return len(stored_of(checkpoint, unit).shape) == 1
    return PartKind.CHANNEL_SCALE not in checkpoint.form(unit.module).parts


def reference_weight(reference: Checkpoint, pair: Pair) -> StoredWeight:
    """Return the reference's weight of a pair, whole even where `rows` selects a part."""
    stored = reference.stored(pair.reference_name)
    return stored if pair.member is None else stored.member(pair.member)


def _add_pair(pairing: _NameTables, unit: WeightUnit, place: _Counterpart, found: Pairs) -> None:
    """Add a pair, if both sides can be read and have one shape."""
    try:
        here = stored_of(pairing.checkpoint, unit)
        there = pairing.reference.stored(place.name)
        there = there if place.member is None else there.member(place.member)
    except Refused as error:
        found.unlike[unit.name] = str(error)
        return
    height = there.shape[0] if there.shape else 1
    rows = place.rows(here.shape[0] if here.shape else 1)
    shape = there.shape if rows is None else (rows[1] - rows[0], *there.shape[1:])
    # A row range must begin and end at whole blocks of the reference's format.
    unit_rows = (there.format.block[0] or 1) if there.format else 1
    is_cut = rows is not None and (
        rows[0] % unit_rows or (rows[1] % unit_rows and rows[1] < height)
    )
    if here.shape != shape or (rows and rows[1] > height) or is_cut:
        found.unlike[unit.name] = f"{list(here.shape)}, in the reference {list(there.shape)}"
        return
    size = sum(entry.nbytes for entry in there.form.parts.values())
    if there.boxes is not None or place.member is not None or rows is not None:
        size = _share(there, size, shape)
    found.pairs.append(Pair(unit, place.name, place.member, rows, unit.nbytes + size))


def _share(stored: StoredWeight, size: int, shape: tuple[int, ...]) -> int:
    """Return roughly how many bytes of a shared module belong to a weight."""
    whole = elements = 1
    for extent in stored.form.shape:
        whole *= extent
    for extent in shape:
        elements *= extent
    return size * elements // max(whole, 1)


class _Counterpart(NamedTuple):
    """A weight's location in the reference; `part`: index of a member stored as rows there."""

    name: str
    member: int | None
    part: int | None

    def rows(self, height: int) -> tuple[int, int] | None:
        return None if self.part is None else (self.part * height, (self.part + 1) * height)


class _NameTables:
    """Both checkpoints, with their name tables."""

    def __init__(self, checkpoint: Checkpoint, reference: Checkpoint) -> None:
        self.checkpoint, self.reference = checkpoint, reference
        self._by_name = checkpoint.names is not None and reference.names is not None
        self._backend = stated_backend(checkpoint)

    def is_arranged(self, unit: WeightUnit) -> bool:
        return self._backend is not None and is_arranged(unit.module)

    def place_of(self, unit: WeightUnit) -> _Counterpart | None:
        names = self.reference.names
        if unit.is_bare:
            return None
        if self._by_name and names is not None:
            if unit.member is None and unit.name in names.present:
                return _Counterpart(unit.name, None, None)
            logical = self._logical_of.get(unit.module, "")
            if logical in names.present:
                return _Counterpart(logical, None, unit.member)
        if unit.module in self.reference.table.suffixes:
            return _Counterpart(unit.module, unit.member, None)
        return None

    @cached_property
    def names_there(self) -> list[str]:
        names = self.reference.names
        if self._by_name and names is not None:
            return list(names.present)
        return list(self.reference.table.suffixes)

    @cached_property
    def _logical_of(self) -> dict[str, str]:
        """Logical names by stored module, where a module holds one parameter."""
        names = self.checkpoint.names
        if names is None:
            return {}
        own = (parameter for parameter in names.present.values() if not names.is_fused(parameter))
        return {names.module_of(parameter): parameter.name for parameter in own}


def _require_one_family(checkpoint: Checkpoint, reference: Checkpoint) -> None:
    """Raise for another family, unless more than half of the module names agree."""
    here, there = checkpoint.model, reference.model
    common = len(checkpoint.table.suffixes.keys() & reference.table.suffixes.keys())
    # Mostly equal names: a wrong family in the config is a finding, not another model.
    if common * 2 > len(checkpoint.table.suffixes):
        return
    if here is not None and there is not None and here.family != there.family:
        raise InvalidArgument(
            f"reference {shown(str(reference.root))}",
            there.family,
            f"a model of the family {here.family}",
            "Name the checkpoint that this one was made from.",
        )


def _require_one_model(found: Pairs) -> None:
    if len(found.unlike) > len(found.pairs):
        name, text = next(iter(found.unlike.items()))
        raise InvalidArgument(
            "reference",
            f"{len(found.unlike)} weights of other shapes, such as {shown(name)}: {text}",
            "the same model in another layout or format",
            "Name the checkpoint that this one was made from.",
        )


# --------------------------------------------------------------------------------------------------
# Error floors: reference values quantised ideally and dequantised again. Each round trip follows
# the definition of its format: scale by the largest magnitude of a block, round to nearest. The
# scale rule is the stored tensor's where it can be recognised: powers of two or not; exponents of
# MXFP4 rounded up (DeepSeek) or down (OCP MX), whichever more stored scales agree with; NVFP4's own
# tensor scale if the reference could have led to it. A wrong scale must not explain the error that
# it causes.
#
# Rows that are not finite have no round trip; the caller leaves them out.

_NVFP4_FULL = E2M1.largest * E4M3.largest
# A tensor scale that cuts off by no more than rounding, and leaves 2^14.8 / 2^10 to block scales.
_LEAST, _MOST = 0.99, 2.0**10
_WIDEST = 126  # exponents whose powers of two float32 has
_UE8M0_BIAS = 127
_LARGEST_POWER = 2  # 2^2 is the largest power of two in E2M1
# Formats that weights may have had on their way, and one after the other.
CHAINS = ((FP8_128X128_F32,), (NVFP4,), (MXFP4,), (MXFP4, NVFP4))


def ideal_like(weight: Weight, there: Tensor, rows: Tensor) -> Tensor:
    """Convert rows of the reference to a stored weight's format and back, in float32.

    `rows`: indices of the matching rows of the stored weight.
    """
    if weight.storage is None:
        assert weight.value is not None, "a weight without codes has values"
        return there.to(weight.value.dtype).float()
    fmt, scale = weight.storage.format, weight.block_scale
    if fmt == NVFP4:
        return _nvfp4(there, _decode_scale(weight))
    assert scale is not None, "a quantised weight has scales"
    if isinstance(fmt.element, TableFormat) or WHOLE in fmt.block:
        return _on_grid(weight.quantised(), there, rows)
    if fmt.element == E2M1:
        return _mxfp4(there, fmt.block[1], scale[rows])
    in_powers = scale.dtype is torch.uint8 or bool((torch.frexp(scale).mantissa == 0.5).all())
    return _fp8(there, fmt, in_powers=in_powers)


def ideal_in(fmt: BlockFormat, there: Tensor) -> Tensor:
    """Convert rows of the reference to a format of CHAINS and back."""
    if fmt == NVFP4:
        return _nvfp4(there, None)
    if fmt == MXFP4:
        return _mxfp4(there, fmt.block[1], None)
    return _fp8(there, fmt, in_powers=fmt == FP8_128X128_UE8M0)


def fits(fmt: BlockFormat, width: int) -> bool:
    """Return whether rows of a width can be stored in a format."""
    return fmt.ragged or width % (fmt.block[1] or 1) == 0


def _decode_scale(weight: Weight) -> float | None:
    scale = weight.tensor_scale
    if scale is None or scale.numel() != 1:
        return None
    assert weight.storage is not None, "only quantised weights have a tensor scale"
    value = float(scale)
    if weight.storage.direction is ScaleDirection.DECODE:
        return value
    return 1 / value if value else None


def _nvfp4(there: Tensor, scale: float | None) -> Tensor:
    # The tensor scale of the amax rule, the smallest that clips nothing.
    least = largest_magnitude_or_nan(there.contiguous()) / _NVFP4_FULL
    chosen = scale if scale is not None and _LEAST * least <= scale <= _MOST * least else least
    if not SMALLEST_SCALE <= chosen <= LARGEST_SCALE:
        return there.clone()  # zeros, or beyond what any trained weight is
    codes, scales = quantise_modelopt(there.contiguous(), chosen, threads=1)
    decode = torch.tensor(chosen, dtype=torch.float32)
    return dequantise_nvfp4(codes, scales, decode, torch.float32)


def _mxfp4(there: Tensor, block: int, stored: Tensor | None) -> Tensor:
    blocks = there.reshape(-1, block)
    amax = blocks.abs().amax(1, keepdim=True)
    # DeepSeek: the least power of two at which the largest value fits. OCP MX: the exponent of the
    # largest value less that of E2M1's largest power of two, which may clip.
    up = _exponent_up(amax / E2M1.largest)
    down = torch.frexp(amax).exponent - 1 - _LARGEST_POWER
    rounded_up = True
    if stored is not None:
        kept = stored.reshape(-1, 1).int() - _UE8M0_BIAS
        rounded_up = int((kept == up).sum()) >= int((kept == down).sum())
    exponent = (up if rounded_up else down).clamp(-_WIDEST, _WIDEST)
    made = torch.ldexp(_e2m1(torch.ldexp(blocks, -exponent)), exponent)
    return torch.where(amax > 0, made, torch.zeros_like(blocks)).reshape(there.shape)


def _exponent_up(scale: Tensor) -> Tensor:
    """Return the exponent of the smallest power of two that is at least a scale."""
    parts = torch.frexp(scale)
    return parts.exponent - (parts.mantissa == 0.5).int()


def _e2m1(values: Tensor) -> Tensor:
    """Round to the nearest E2M1 value, ties to even codes."""
    magnitude = values.abs().clamp(max=E2M1.largest)
    # Even multiples of the step are even codes, so rounding half to even is right.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.copysign(torch.round(magnitude / step) * step, values)


def _on_grid(tensor: QuantisedTensor, there: Tensor, rows: Tensor) -> Tensor:
    """Round to the nearest value that the stored scales and zero points allow.

    Tools that choose other codes on purpose (GPTQ) differ from it, by less than a step of its grid.
    """
    element = tensor.format.element
    lowest = min(element.table) if isinstance(element, TableFormat) else -element.largest
    scale_MK = spread_blocks(tensor, tensor.scale_values(), rows)
    zero_MK = 0.0 if tensor.zero_point is None else spread_blocks(tensor, tensor.zero_point, rows)
    known = (scale_MK > 0) & scale_MK.isfinite()
    place_MK = there / torch.where(known, scale_MK, 1.0) + zero_MK
    place_MK = place_MK.nan_to_num(0.0).clamp(lowest, element.largest)
    made: Tensor = (decode_array(encode_array(place_MK, element), element) - zero_MK) * scale_MK
    return torch.where(known, made, torch.zeros_like(made))


def _fp8(there: Tensor, fmt: BlockFormat, *, in_powers: bool) -> Tensor:
    rows, columns = there.shape
    height, width = fmt.extents(rows, columns)
    filled = torch.nn.functional.pad(there, (0, -columns % width, 0, -rows % height))
    blocks = filled.view(filled.shape[0] // height, height, filled.shape[1] // width, width)
    scale = blocks.abs().amax((1, 3), keepdim=True) / E4M3.largest
    if in_powers:
        scale = torch.ldexp(torch.ones_like(scale), _exponent_up(scale).clamp(-_WIDEST, _WIDEST))
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    # The quotient may round to just above the largest value.
    scaled = (blocks / scale).clamp(-E4M3.largest, E4M3.largest)
    decoded: Tensor = scaled.to(torch.float8_e4m3fn).float() * scale
    return decoded.reshape(filled.shape)[:rows, :columns].contiguous()


# --------------------------------------------------------------------------------------------------
# Rows. `compare` sums over all values and by row, converts one row (or panel of rows) in eight of
# the reference there and back, and keeps a sketch of each side.  A row that is off by half of
# itself is measured again with its own round trip, because a row too weak for its format is no
# fault.

WINDOW = 1 << 20  # elements of a row block: 4 MiB of float32 a side
PANEL = 128  # rows: a multiple of every block's height
SAMPLED = 8  # one row, or panel, in so many has a round trip, where there are enough
_FEW_ROWS = 512
_ROW_OFF = 0.25  # of a row's squares
_WEAK = 2.0**-20  # of the strongest row's squares: weaker rows are not judged
_LOOKED_AT = 8  # rows that are looked at again
_SKETCH_ROWS = 16


@dataclass
class WeightComparison:
    """Measurements of one weight against its reference."""

    format: str
    reference_format: str
    height: int
    elements: int
    sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros(7))
    floor: NDArray[np.float64] = field(default_factory=lambda: np.zeros(4))
    rows: list[NDArray[np.float64]] = field(default_factory=list)
    sketches: NDArray[np.float64] = field(default_factory=lambda: np.zeros((2, SKETCH)))
    bad_rows: tuple[int, int] = (0, -1)  # how many, the first
    scales: tuple[float, float] = (math.nan, math.nan)  # of inputs, of codes
    misfits: Misfits = field(default_factory=Misfits)

    def facts(self) -> dict[str, Any]:
        """Return the measurements by column of the table."""
        there, here, product, error, equal, odd_here, odd_there = map(float, self.sums)
        cosine = product / math.sqrt(there * here) if there and here else math.nan
        sampled, own, ideal, ideal_product = map(float, self.floor)
        worst, worst_error = self._worst()
        # Sketches are stored as float16, so each side is scaled to a largest magnitude of 1.
        largest = np.abs(np.nan_to_num(self.sketches, posinf=0, neginf=0)).max(1, keepdims=True)
        return {
            "sketches": self.sketches / np.where(largest > 0, largest, 1.0),
            "format": FORMATS.index(self.format),
            "reference_format": FORMATS.index(self.reference_format),
            "elements": self.elements,
            "height": self.height,
            "cosine": min(max(cosine, -1.0), 1.0),
            "gain": _over(product, there),
            "error": math.sqrt(_over(error, there)) if there else (math.inf if error else 0.0),
            "residual": math.sqrt(max(0.0, 1 - cosine * cosine)) if here and there else math.nan,
            "floor": math.sqrt(_over(ideal, sampled)),
            "floor_gain": _over(ideal_product, sampled),
            "over_floor": math.sqrt(own / ideal) if ideal else (math.inf if own else math.nan),
            "equal": equal / max(self.elements, 1),
            "worst_row": worst,
            "worst_row_error": worst_error,
            "bad_rows": self.bad_rows[0],
            "first_bad_row": self.bad_rows[1],
            "odd_here": odd_here,
            "odd_there": odd_there,
            "energy": here,
            "reference_energy": there,
            "input_scale": self.scales[0],
            "decode_scale": self.scales[1],
            "judged_elements": self.misfits.judged,
            "misfits": self.misfits.near,
            "misfits_beyond": self.misfits.beyond,
            "misfit_rows": self.misfits.rows,
            "first_misfit": self.misfits.first,
        }

    def _worst(self) -> tuple[int, float]:
        """Return the row with the largest relative error, weak rows excluded."""
        if not self.rows:
            return -1, math.nan
        rows = np.concatenate(self.rows)
        strong = rows[:, 0] > _WEAK * rows[:, 0].max(initial=0.0)
        share = np.divide(rows[:, 1], rows[:, 0], out=np.full(len(rows), -1.0), where=strong)
        index = int(share.argmax()) if len(share) else -1
        if index < 0 or share[index] < 0:
            return -1, math.nan
        return index, math.sqrt(float(share[index]))


def _over(share: float, whole: float) -> float:
    return share / whole if whole else math.nan


def compare(here: StoredWeight, there: StoredWeight, first: int = 0) -> WeightComparison:
    """Compare a weight with the reference's; `first`: its first row there."""
    shape = here.shape
    elements = math.prod(shape)
    comparison = WeightComparison(
        _format_name(here), _format_name(there), math.prod(shape[:-1]) if shape else 1, elements
    )
    if not elements:
        return comparison
    for begin, ours, theirs in _row_blocks(here, there, first):
        if begin == 0:
            comparison.scales = _scales(ours)
        _add_rows(comparison, begin, ours, theirs)
    if comparison.format != "integers":
        comparison.bad_rows = _bad_rows(comparison, here, there, first)
    return comparison


def _format_name(stored: StoredWeight) -> str:
    """Return the format's name; integers are recognised only when they are read."""
    return stored.format.name if stored.format else "plain"


def _row_blocks(
    here: StoredWeight, there: StoredWeight, first: int
) -> Iterator[tuple[int, Weight, Weight]]:
    """Yield (first row, weight here, weight there) by blocks of whole panels."""
    if len(here.shape) not in (1, 2):
        yield 0, here.weight(), there.weight()
        return
    height, width = here.shape[0], math.prod(here.shape[1:])
    step = max(PANEL, WINDOW // max(width, 1) // PANEL * PANEL)
    for begin in range(0, height, step):
        end = min(begin + step, height)
        yield begin, here.rows(begin, end), there.rows(first + begin, first + end)


def _add_rows(comparison: WeightComparison, begin: int, ours: Weight, theirs: Weight) -> None:
    from degarble.harness.checkpoint.audit.statistics import loops  # noqa: PLC0415  numba

    if _is_integer(ours) and _is_integer(theirs):
        assert ours.value is not None, "integers are values"
        assert theirs.value is not None, "integers are values"
        comparison.format = comparison.reference_format = "integers"
        same = ours.value.to(torch.int64) == theirs.value.to(torch.int64)
        comparison.sums[loops.EQUAL] += int(same.sum())
        return
    x_MK, y_MK = _floats(ours), _floats(theirs)
    sums = np.empty((len(x_MK), loops.SUMS))
    loops.compare_rows(x_MK.numpy(), y_MK.numpy(), sums)
    comparison.sums += sums.sum(0)
    comparison.rows.append(sums[:, [loops.REFERENCE, loops.ERROR]].copy())
    comparison.misfits = comparison.misfits.and_then(misfits_of(ours, theirs, y_MK, begin))
    _take_sketch(comparison, begin, x_MK, y_MK)
    _take_floor(comparison, begin, ours, y_MK, sums)


def _is_integer(weight: Weight) -> bool:
    return weight.value is not None and not weight.value.dtype.is_floating_point


def _floats(weight: Weight) -> Tensor:
    values = row_values(weight).float()
    return values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(1, -1)


def _take_floor(
    comparison: WeightComparison, begin: int, ours: Weight, y_MK: Tensor, sums: NDArray[np.float64]
) -> None:
    """Add the round trip of the sampled rows."""
    from degarble.harness.checkpoint.audit.statistics import loops  # noqa: PLC0415  numba

    rows = _due(comparison, begin, ours, sums[:, loops.ODD_HERE] + sums[:, loops.ODD_THERE] > 0)
    if not len(rows):
        return
    chosen = torch.from_numpy(rows)
    sampled = y_MK[chosen]
    ideal = ideal_like(ours, sampled, chosen)
    trip = np.empty((len(rows), loops.SUMS))
    loops.compare_rows(ideal.numpy(), sampled.numpy(), trip)
    comparison.floor += (
        sums[rows, loops.REFERENCE].sum(),
        sums[rows, loops.ERROR].sum(),
        trip[:, loops.ERROR].sum(),
        trip[:, loops.PRODUCT].sum(),
    )


def _due(
    comparison: WeightComparison, begin: int, ours: Weight, odd: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Choose the sampled rows of a block: one row, or one panel, in SAMPLED.

    Rows, or panels, that hold something not finite are left out.
    """
    numbers = np.arange(begin, begin + len(odd))
    by_panel = ours.storage is not None and ours.storage.format.block[0] > 1
    unit = numbers // PANEL if by_panel else numbers
    due = ~np.isin(unit, unit[odd])
    if comparison.height > _FEW_ROWS:
        due &= unit % SAMPLED == 0
    return np.flatnonzero(due)


def _take_sketch(comparison: WeightComparison, begin: int, x_MK: Tensor, y_MK: Tensor) -> None:
    """Keep a few values of a few rows, at places that depend on the shape alone."""
    columns = SKETCH // _SKETCH_ROWS
    for number in range(_SKETCH_ROWS):
        row = (2 * number + 1) * comparison.height // (2 * _SKETCH_ROWS) - begin
        if not 0 <= row < len(x_MK):
            continue
        # Primes spread the sampled columns, in the same way for every tensor of this width.
        places = (np.arange(columns) * 7919 + number * 104729) % x_MK.shape[1]
        kept = slice(number * columns, (number + 1) * columns)
        for side, values in enumerate((x_MK, y_MK)):
            # Trap: numpy warns where it widens a signalling NaN, which torch does silently.
            comparison.sketches[side, kept] = values[row][torch.from_numpy(places)].double().numpy()


def _scales(weight: Weight) -> tuple[float, float]:
    """Return the input scale and the decode scale; NaN for absent ones."""
    inputs, scale = weight.input_scale, weight.tensor_scale
    decode = float(scale) if scale is not None and scale.numel() == 1 else math.nan
    if weight.storage is not None and weight.storage.direction is ScaleDirection.ENCODE:
        decode = 1 / decode if decode else math.inf
    return float(inputs) if inputs is not None and inputs.numel() == 1 else math.nan, decode


def _bad_rows(
    comparison: WeightComparison, here: StoredWeight, there: StoredWeight, first: int
) -> tuple[int, int]:
    """Count rows that are off by half of themselves though their own round trips are not."""
    rows = np.concatenate(comparison.rows)
    strong = rows[:, 0] > _WEAK * rows[:, 0].max(initial=0.0)
    off = np.flatnonzero(strong & (rows[:, 1] > _ROW_OFF * rows[:, 0]))
    if len(here.shape) != 2 or not len(off):
        return 0, -1
    explained = []
    for row in off[:_LOOKED_AT]:
        begin = int(row) // PANEL * PANEL
        end = min(begin + PANEL, here.shape[0])
        ours, theirs = here.rows(begin, end), there.rows(first + begin, first + end)
        values = _floats(theirs).nan_to_num(0.0, 0.0, 0.0)
        ideal = ideal_like(ours, values, torch.arange(len(values)))[row - begin]
        wanted = values[row - begin]
        trip = float((ideal - wanted).double().square().sum())
        # The round trip alone leaves more than half of the row's error (a quarter of its square).
        if 4 * trip > rows[row, 1]:
            explained.append(row)
    left = np.setdiff1d(off, explained)
    if len(explained) == min(len(off), _LOOKED_AT):
        return 0, -1
    return len(left), int(left[0])
