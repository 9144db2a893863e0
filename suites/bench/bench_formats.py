"""NVFP4 to BF16 and back, E2M1 round trip: against the packages that a user would call today.

Targets: decode faster than every peer, bit-equal, at 60 % of the machine's copy bandwidth; encode
three times as fast as the fastest peer; the E2M1 round trip a hundred times as fast as ml_dtypes;
peak memory 1.3 times input and output. Bytes count once read and once written, for the copy as for
us.

A copy goes into memory that was touched before. So the bandwidth target is for decoding into `out=`
and for repeated calls, which reuse the memory of dead outputs. Never-touched memory is an arm of
its own, compared with torch's clone, because its page faults cost more than the work.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.formats.fast.buffers import empty_tensor
from degarble.harness.formats.fast.nvfp4 import (
    decode_e2m1,
    dequantise_nvfp4,
    encode_e2m1,
    round_e2m1,
)
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.suites.bench import peers_formats as peers
from degarble.suites.bench.timing import (
    Neighbours,
    Reading,
    Section,
    Settings,
    Table,
    Target,
    interleave,
    paired_ratio,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Arms = dict[str, Callable[[], Any]]

PACKAGES = (
    "torch",
    "numba",
    "numpy",
    "torchao",
    "compressed-tensors",
    "nvidia-modelopt",
    "ml_dtypes",
)

COPY_SHARE = 0.6
QUANTISE_RATIO = 3.0
ROUND_TRIP_RATIO = 100.0
PEAK_RATIO = 1.3
IN_CACHE = 1024  # rows and columns of the small round trip, which memory bandwidth does not bound

FLOAT32_NOTE = (
    "no target for the large float32 round trip: it moves 8 bytes an element, so the machine's"
    " memory bounds it"
)

OURS = "degarble"
OURS_OUT = "degarble, out="
OURS_NEW = "degarble, new memory"
ONE_PASS = "one pass, out="
COPY = "torch copy_"
CLONE = "torch clone"


def run(settings: Settings) -> Section:
    """Measure all three groups and the peaks; return what docs/figures.md says of them."""
    values = weights(settings.size)
    with Neighbours() as neighbours, peers.quiet():
        parts = [
            _dequantise(values, settings),
            _quantise(values, settings),
            _round_trip(values, settings),
        ]
    parts.append(_peaks(settings))
    return Section(
        key="formats",
        title="NVFP4 and E2M1 on the CPU",
        tables=tuple(table for tables, _ in parts for table in tables),
        targets=tuple(target for _, targets in parts for target in targets),
        notes=(
            f"{settings.size} x {settings.size}, {settings.rounds} rounds",
            FLOAT32_NOTE,
            f"other processes took {neighbours.cores:.2f} cores of this machine meanwhile",
        ),
    )


def weights(size: int) -> Tensor:
    """Return normally distributed BF16 values, always the same ones."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, size, generator=generator, dtype=torch.float32).bfloat16()


def _dequantise(values: Tensor, settings: Settings) -> tuple[list[Table], list[Target]]:
    tensor = quantise(values, NVFP4)
    given = (tensor.codes, tensor.block_scale, tensor.decode_scale)
    out = empty_tensor(values.shape, torch.bfloat16).fill_(0)
    target = torch.zeros_like(values)
    arms: Arms = {
        OURS_OUT: lambda: dequantise_nvfp4(*given, out=out),
        COPY: lambda: target.copy_(values),
        OURS: lambda: dequantise(tensor, torch.bfloat16),
        OURS_NEW: lambda: dequantise_nvfp4(*given, out=torch.empty_like(values)),
        CLONE: values.clone,
    }
    chosen = peers.DECODERS if settings.peers else {"textbook": peers.textbook_decoder}
    arms |= {name: decoder(*given) for name, decoder in chosen.items()}
    agreement = _decoder_agreement(arms, dequantise_nvfp4(*given))
    readings = interleave(arms, settings.rounds)
    moved = tensor.codes.nbytes + tensor.block_scale.nbytes + values.nbytes
    copied = 2 * values.nbytes
    rows = []
    for name, reading in readings.items():
        size = copied if name in (COPY, CLONE) else moved
        rows.append(
            (
                name,
                _milliseconds(reading),
                f"{size / reading.median / 1e9:.1f}",
                _ratio(reading, readings[OURS]),
                agreement.get(name, ""),
            )
        )
    targets = [
        Target(
            f"decoding is faster than {name} (ratio)",
            paired_ratio(readings[name], readings[OURS])[0],
            1.0,
        )
        for name in chosen
    ]
    textbook_equal = float(agreement["textbook"] == "bit-equal")
    targets.append(
        Target("decoding is bit-equal to the textbook version (1 = yes)", textbook_equal, 1.0)
    )
    for name in (OURS_OUT, OURS):
        share = paired_ratio(readings[COPY], readings[name])[0] * moved / copied
        targets.append(Target(f"share of copy bandwidth ({name})", share, COPY_SHARE))
    header = ("arm", "ms", "GB/s read + written", "time / degarble", "against the definition")
    return [Table("Dequantise to BF16", header, tuple(rows))], targets


def _decoder_agreement(arms: Arms, ours: Tensor) -> dict[str, str]:
    """Say for each decoder how far its bits are from ours."""
    said = {}
    for name, arm in arms.items():
        if name in (COPY, CLONE):
            continue
        codes, expected = arm().view(torch.int16), ours.view(torch.int16)
        differing = codes != expected
        share = differing.double().mean().item()
        if share == 0:
            said[name] = "bit-equal"
            continue
        ulps = int((_order(codes[differing]) - _order(expected[differing])).abs().max())
        by = f"by at most {ulps} ulp" if ulps else "in the sign of zero only"
        said[name] = f"{share:.2%} of values differ, {by}"
    return said


def _order(codes: Tensor) -> Tensor:
    """Number BF16 codes in the order of their values; both zeros are 0."""
    wide = codes.int()
    return torch.where(wide < 0, -(wide & 0x7FFF), wide)


def _quantise(values: Tensor, settings: Settings) -> tuple[list[Table], list[Target]]:
    arms: Arms = {OURS: lambda: quantise(values, NVFP4)}
    chosen = peers.QUANTISERS if settings.peers else {}
    arms |= {name: quantiser(values) for name, quantiser in chosen.items()}
    ours = quantise(values, NVFP4)
    agreement = {OURS: "the definition"}
    for name in chosen:
        codes, scales = arms[name]()
        low = ((codes ^ ours.codes) & 0xF) != 0
        high = ((codes ^ ours.codes) >> 4) != 0
        nibbles = (low.double().mean().item() + high.double().mean().item()) / 2
        scale_bytes = (scales != ours.block_scale).double().mean().item()
        agreement[name] = f"{scale_bytes:.3%} of scale bytes, {nibbles:.3%} of codes differ"
    readings = interleave(arms, settings.rounds)
    rows = tuple(
        (name, _milliseconds(reading), _ratio(reading, readings[OURS]), agreement[name])
        for name, reading in readings.items()
    )
    header = ("arm", "ms", "time / degarble", "against the definition")
    table = Table("Quantise BF16, tensor amax included", header, rows)
    targets = []
    if chosen:
        fastest = min(chosen, key=lambda name: readings[name].median)
        ratio = paired_ratio(readings[fastest], readings[OURS])[0]
        claim = f"quantising: times as fast as the fastest peer ({fastest})"
        targets.append(Target(claim, ratio, QUANTISE_RATIO))
    return [table], targets


def _round_trip(values: Tensor, settings: Settings) -> tuple[list[Table], list[Target]]:
    rows, targets = [], []
    corner = values[:IN_CACHE, :IN_CACHE].contiguous()
    for source in (values, values.float(), corner, corner.float()):
        name = f"{str(source.dtype).removeprefix('torch.')} {source.shape[0]} x {source.shape[1]}"
        codes = empty_tensor(source.shape, torch.uint8).fill_(0)
        out = empty_tensor(source.shape, source.dtype).fill_(0)
        arms = _round_trip_arms(source, codes, out)
        if settings.peers:
            arms["ml_dtypes"] = peers.ml_dtypes_round_trip(source)
        readings = interleave(arms, max(3, settings.rounds // 3))
        base = readings.get("ml_dtypes", readings[ONE_PASS])
        for arm, reading in readings.items():
            cells = (f"{name}: {arm}", _milliseconds(reading), _ratio(base, reading))
            rows.append((*cells, f"{reading.median / source.numel() * 1e9:.3f}"))
        bounded = source.dtype is torch.float32 and source.shape[0] > IN_CACHE
        if settings.peers and not bounded:
            ratio = paired_ratio(base, readings[ONE_PASS])[0]
            claim = f"E2M1 round trip of {name}: times as fast as ml_dtypes"
            targets.append(Target(claim, ratio, ROUND_TRIP_RATIO))
    header = ("arm", "ms", "speed / ml_dtypes", "ns an element")
    return [Table("E2M1: value to code to value", header, tuple(rows))], targets


def _round_trip_arms(source: Tensor, codes: Tensor, out: Tensor) -> Arms:
    return {
        ONE_PASS: lambda: round_e2m1(source, out=out),
        "encode, then decode, out=": lambda: decode_e2m1(
            encode_e2m1(source, out=codes), source.dtype, out=out
        ),
        "one pass, fresh output": lambda: round_e2m1(source),
        "encode, then decode, fresh outputs": lambda: decode_e2m1(
            encode_e2m1(source), source.dtype
        ),
    }


def _peaks(settings: Settings) -> tuple[list[Table], list[Target]]:
    rows, targets = [], []
    for task, chosen in (("dequantise", peers.DECODERS), ("quantise", peers.QUANTISERS)):
        for name in (OURS, *(chosen if settings.peers else ())):
            ratio = _peak_ratio(task, name, settings.size)
            rows.append((f"{task}: {name}", "not measured" if ratio is None else f"{ratio:.2f}"))
            if name == OURS and ratio is not None:
                claim = f"{task}: peak memory over input and output"
                targets.append(Target(claim, ratio, PEAK_RATIO, at_least=False))
    header = ("arm", "(input + peak rise) / (input + output)")
    title = "Peak memory, each arm in a process of its own, after a first call"
    return [Table(title, header, tuple(rows))], targets


def _peak_ratio(task: str, arm: str, size: int) -> float | None:
    command = [sys.executable, "-m", "degarble.suites.bench.peak_formats", task, arm, str(size)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
    return None if said == "None" else float(said)


def _milliseconds(reading: Reading) -> str:
    first, third = reading.quartiles
    return f"{reading.median * 1e3:.2f} ({first * 1e3:.2f} to {third * 1e3:.2f})"


def _ratio(slow: Reading, fast: Reading) -> str:
    median, first, third = paired_ratio(slow, fast)
    return f"{median:.2f} ({first:.2f} to {third:.2f})"
