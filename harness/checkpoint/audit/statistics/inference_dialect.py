"""Infer which producer wrote NVFP4 tensors, by excluding those whose rules leave other bytes.

Three traces: the scale byte of blocks of zeros; the smallest scales (one producer has none below
2^-6, only one has zeros over codes); and the tensor scale. The amax of bfloat16 weights has eight
significant bits, and only the producer's own arithmetic leads from such a number to the stored
float32. A scale fits by chance with a probability of 2^-15, but two producers' arithmetic agrees
for three amax in four, so it takes a dozen tensors.

Producers with the same traces share one answer: Transformer Engine, FlashInfer and vLLM cannot be
told apart. The result is undecided where no trace excludes enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from degarble.harness.checkpoint.audit.statistics.inferred import CERTAIN, Inferred, undecided
from degarble.harness.formats.number_formats import ScaleDirection

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

ABOUT = "dialect"
FULL = np.float32(2688.0)  # 6 * 448
_FITTING = 0.98  # of the tensors: then their amax were bfloat16
_UNEXPLAINED = 2  # tensors whose scale one producer explains and another does not


@dataclass(frozen=True)
class Producer:
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


PRODUCERS: Mapping[str, Producer] = MappingProxyType(
    {
        each.name: each
        for each in (
            Producer("modelopt", 0x38, 2.0**-9, False, lambda s: s * 2688, _decode),
            Producer(
                "canonical, flashinfer or vllm",
                0x00,
                2.0**-9,
                True,
                lambda s: s * 2688,
                _decode_of_encode,
            ),
            Producer("torchao", 0x08, 2.0**-6, False, lambda s: s * 2688, _decode),
            Producer(
                "compressed_tensors", 0x20, 2.0**-9, False, lambda s: 2688 / s, _encode_bfloat16
            ),
        )
    }
)
LOSSLESS = "modelopt, cast from MXFP4 without loss"


@dataclass(frozen=True)
class Traces:
    """The traces of a group of NVFP4 tensors. `scales`: tensor scales, as stored."""

    scales: Sequence[float]
    direction: ScaleDirection
    zero_bytes: Sequence[int]  # commonest scale byte of zero blocks, of tensors that have some
    smallest: float  # positive block scale over codes
    zero_over_codes: int  # blocks
    powers_only: bool  # every block scale and every tensor scale is a power of two


def infer_dialect(traces: Traces) -> Inferred:
    """Return the one producer that no trace excludes, or undecided."""
    if not traces.scales:
        return undecided(ABOUT, "no tensors")
    if traces.powers_only:
        because = "all scales are powers of two"
        return Inferred(ABOUT, LOSSLESS, CERTAIN, because, MappingProxyType({}))
    fits = {name: _fit(producer, traces) for name, producer in PRODUCERS.items()}
    reasons: dict[str, str] = {}
    best = max(fits.values())
    for name, producer in PRODUCERS.items():
        reasons[name] = _excluded(producer, traces, fits[name], best)
    left = [name for name in PRODUCERS if not reasons[name]]
    told = "; ".join(f"not {name}: {why}" for name, why in reasons.items() if why)
    if len(left) != 1:
        names = " or ".join(left) if left else "none that is known"
        return undecided(ABOUT, f"left: {names}; {told}", fits)
    return Inferred(ABOUT, left[0], CERTAIN, told, MappingProxyType(fits))


def candidates(traces: Traces) -> tuple[str, ...]:
    """Return the producers that no trace excludes."""
    fits = {name: _fit(producer, traces) for name, producer in PRODUCERS.items()}
    best = max(fits.values(), default=0.0)
    return tuple(
        name for name, p in PRODUCERS.items() if not _excluded(p, traces, fits[name], best)
    )


def _excluded(producer: Producer, traces: Traces, fit: float, best: float) -> str:
    """Return why a producer is excluded; empty if it is not."""
    others = [byte for byte in traces.zero_bytes if byte != producer.zero_byte]
    if len(others) * 2 > len(traces.zero_bytes):
        return f"zero blocks have the scale 0x{others[0]:02x}"
    if traces.smallest < producer.smallest:
        return f"block scales go down to {traces.smallest:.3g}"
    if traces.zero_over_codes and not producer.zero_over_codes:
        return "scales of zero stand over codes"
    if best >= _FITTING and (best - fit) * len(_distinct(traces)) >= _UNEXPLAINED:
        return f"{fit:.0%} of the tensor scales follow from a bfloat16 amax by its arithmetic"
    return ""


def _distinct(traces: Traces) -> NDArray[np.float32]:
    """Return the usable scales, one for each significand: equal ones add no evidence."""
    stored = np.array(traces.scales, np.float32)
    stored = stored[np.isfinite(stored) & (stored > 0)]
    _, first = np.unique(np.frexp(stored)[0], return_index=True)
    return stored[first]


def _fit(producer: Producer, traces: Traces) -> float:
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
    producer: Producer, amax: NDArray[np.float32], stored: NDArray[np.float32]
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
