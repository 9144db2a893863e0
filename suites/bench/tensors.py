"""Single tensors on the CPU: NVFP4 and E2M1 beside packages of today, and comparing a pair.

`formats`: bytes count once read and once written, for the copy as for us. A copy goes into memory
that was touched before. So the bandwidth target is for decoding into `out=` and for repeated calls,
which reuse the memory of dead outputs. Never-touched memory is an arm of its own, compared with
torch's clone, because its page faults cost more than the work.

`compare`: `compare` with everything that it reports, beside a loop as one would write it in torch
(whole tensors, nothing by rows or tiles), on one core. Files are read once before, so that the
figure is that of the page cache and not of a disk.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.engine.compare.compare import compare
from degarble.harness.formats.fast.buffers import drop_spare_memory, empty_tensor
from degarble.harness.formats.fast.nvfp4 import (
    decode_e2m1,
    dequantise_nvfp4,
    encode_e2m1,
    round_e2m1,
)
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.suites.bench import peers
from degarble.suites.bench.machine import in_child, peak_rise, pin
from degarble.suites.bench.runner import (
    MS,
    Arm,
    Bench,
    Claim,
    Comparison,
    Part,
    Reading,
    Table,
    Target,
    call,
    time_over,
    times,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

COPY_SHARE = 0.6
QUANTISE_RATIO = 3.0
ROUND_TRIP_RATIO = 100.0
PEAK_RATIO = 1.3
IN_CACHE = 1024  # rows and columns of the small round trip, which memory bandwidth does not bound
OURS = "degarble"
OURS_OUT = "degarble, out="
OURS_NEW = "degarble, new memory"
ONE_PASS = "one pass, out="
ML_DTYPES = "ml_dtypes"
COPY = "torch copy_"
CLONE = "torch clone"


def weights(size: int) -> Tensor:
    """Return normally distributed BF16 values, always the same ones."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, size, generator=generator, dtype=torch.float32).bfloat16()


def formats(options: Any) -> Iterator[Part]:
    values = weights(options.size)
    with peers.quiet():
        yield from _dequantise(values, options)
        yield from _quantise(values, options)
        yield _round_trip(values, options)
    yield from _peaks(options)
    yield f"{options.size} x {options.size}, {options.rounds} rounds"
    yield (
        "no target for the large float32 round trip: it moves 8 bytes an element, so the machine's "
        "memory bounds it"
    )


def _dequantise(values: Tensor, options: Any) -> Iterator[Part]:
    tensor = quantise(values, NVFP4)
    given = (tensor.codes, tensor.block_scale, tensor.decode_scale)
    out = empty_tensor(values.shape, torch.bfloat16).fill_(0)
    target = torch.zeros_like(values)
    moved = tensor.codes.nbytes + tensor.block_scale.nbytes + values.nbytes
    chosen = peers.DECODERS if options.peers else {"textbook": peers.textbook_decoder}
    arms = [
        call(OURS_OUT, lambda: dequantise_nvfp4(*given, out=out), moved),
        call(COPY, lambda: target.copy_(values), 2 * values.nbytes),
        call(OURS, lambda: dequantise(tensor, torch.bfloat16), moved),
        call(OURS_NEW, lambda: dequantise_nvfp4(*given, out=torch.empty_like(values)), moved),
        call(CLONE, values.clone, 2 * values.nbytes),
        *(call(name, decoder(*given), moved) for name, decoder in chosen.items()),
    ]
    agreement = _decoder_agreement(arms, dequantise_nvfp4(*given))
    columns = (
        MS,
        ("GB/s read + written", lambda each: f"{each.bandwidth / 1e9:.1f}"),
        time_over(OURS, "time / degarble"),
        ("against the definition", lambda each: agreement.get(each.arm.name, "")),
    )
    claims = [
        Claim(f"decoding is faster than {name} (ratio)", name, _slower_than_ours, 1.0)
        for name in chosen
    ]
    claims += [
        Claim(f"share of copy bandwidth ({name})", name, _share_of_copy, COPY_SHARE)
        for name in (OURS_OUT, OURS)
    ]
    yield Comparison("Dequantise to BF16", [tuple(arms)], columns, claims)
    equal = float(agreement["textbook"] == "bit-equal")
    yield Target("decoding is bit-equal to the textbook version (1 = yes)", equal, 1.0)


def _share_of_copy(reading: Reading) -> float:
    return reading.share_of(COPY)


def _slower_than_ours(reading: Reading) -> float:
    return reading.beside[OURS].times(reading.arm.name)


def _decoder_agreement(arms: list[Arm], ours: Tensor) -> dict[str, str]:
    """Say for each decoder how far its bits are from ours."""
    said = {}
    for arm in arms:
        if arm.name in (COPY, CLONE):
            continue
        made: Any = arm.make(0)()
        codes, expected = made.view(torch.int16), ours.view(torch.int16)
        differing = codes != expected
        share = differing.double().mean().item()
        if share == 0:
            said[arm.name] = "bit-equal"
            continue
        ulps = int((_ordinals(codes[differing]) - _ordinals(expected[differing])).abs().max())
        by = f"by at most {ulps} ulp" if ulps else "in the sign of zero only"
        said[arm.name] = f"{share:.2%} of values differ, {by}"
    return said


def _ordinals(values: Tensor) -> Tensor:
    """Number BF16 codes in the order of their values; both zeros are 0."""
    codes = values.contiguous().view(torch.int16).int()
    return torch.where(codes < 0, -(codes & 0x7FFF), codes)


def _quantise(values: Tensor, options: Any) -> Iterator[Part]:
    chosen = peers.QUANTISERS if options.peers else {}
    arms = [call(OURS, lambda: quantise(values, NVFP4))]
    agreement, ours = {OURS: "the definition"}, quantise(values, NVFP4)
    for name, quantiser in chosen.items():
        arm = quantiser(values)
        arms.append(call(name, arm))
        codes, scales = arm()
        low, high = ((codes ^ ours.codes) & 0xF) != 0, ((codes ^ ours.codes) >> 4) != 0
        nibbles = (low.double().mean().item() + high.double().mean().item()) / 2
        scale_bytes = (scales != ours.block_scale).double().mean().item()
        agreement[name] = f"{scale_bytes:.3%} of scale bytes, {nibbles:.3%} of codes differ"
    columns = (
        MS, time_over(OURS, "time / degarble"),
        ("against the definition", lambda each: agreement[each.arm.name]),
    )  # fmt: skip
    claims = []
    if chosen:
        text = "quantising: times as fast as the fastest peer"
        claims.append(Claim(text, OURS, _of_the_fastest, QUANTISE_RATIO))
    yield Comparison("Quantise BF16, tensor amax included", [tuple(arms)], columns, claims)


def _of_the_fastest(reading: Reading) -> float:
    others = [each for each in reading.beside.values() if each is not reading]
    return reading.times(min(others, key=lambda each: each.median).arm.name)


def _round_trip(values: Tensor, options: Any) -> Comparison:
    turns: list[tuple[Arm, ...]] = []
    claims: list[Claim] = []
    elements: dict[str, int] = {}
    corner = values[:IN_CACHE, :IN_CACHE].contiguous()
    for source in (values, values.float(), corner, corner.float()):
        name = f"{str(source.dtype).removeprefix('torch.')} {source.shape[0]} x {source.shape[1]}"
        if any(name in known for known in elements):
            continue  # the corner of a small matrix is all of it
        arms = _round_trip_arms(name, source)
        if options.peers:
            arms.append(call(f"{name}: {ML_DTYPES}", peers.ml_dtypes_round_trip(source)))
        turns.append(tuple(arms))
        elements |= dict.fromkeys((arm.name for arm in arms), source.numel())
        bounded = source.dtype is torch.float32 and source.shape[0] > IN_CACHE
        if options.peers and not bounded:
            text = f"E2M1 round trip of {name}: times as fast as ml_dtypes"
            claims.append(Claim(text, arms[0].name, _slowest_ratio, ROUND_TRIP_RATIO))
    columns = (
        MS,
        ("speed / ml_dtypes", _speed_of_last),
        ("ns an element", lambda each: f"{each.median / elements[each.arm.name] * 1e9:.3f}"),
    )
    rounds = max(3, options.rounds // 3)
    return Comparison("E2M1: value to code to value", turns, columns, claims, rounds=rounds)


def _base(reading: Reading) -> str:
    """ml_dtypes where it takes part, else the one pass."""
    names = list(reading.beside)
    return next((name for name in names if name.endswith(ML_DTYPES)), names[0])


def _slowest_ratio(reading: Reading) -> float:
    return reading.times(_base(reading))


def _speed_of_last(reading: Reading) -> str:
    return times(_base(reading), "", spread=True)[1](reading)


def _round_trip_arms(name: str, source: Tensor) -> list[Arm]:
    codes = empty_tensor(source.shape, torch.uint8).fill_(0)
    out = empty_tensor(source.shape, source.dtype).fill_(0)
    arms: dict[str, Callable[[], Any]] = {
        ONE_PASS: lambda: round_e2m1(source, out=out),
        "encode, then decode, out=": lambda: decode_e2m1(
            encode_e2m1(source, out=codes), source.dtype, out=out
        ),
        "one pass, fresh output": lambda: round_e2m1(source),
        "encode, then decode, fresh outputs": lambda: decode_e2m1(
            encode_e2m1(source), source.dtype
        ),
    }
    return [call(f"{name}: {arm}", function) for arm, function in arms.items()]


def _peaks(options: Any) -> Iterator[Part]:
    rows = []
    for task, chosen in (("dequantise", peers.DECODERS), ("quantise", peers.QUANTISERS)):
        for name in (OURS, *(chosen if options.peers else ())):
            ratio = in_child(f"{__name__}:peak_ratio", task, name, options.size).result
            rows.append((f"{task}: {name}", "not measured" if ratio is None else f"{ratio:.2f}"))
            if name == OURS and ratio is not None:
                claim = f"{task}: peak memory over input and output"
                yield Target(claim, ratio, PEAK_RATIO, at_least=False)
    title = "Peak memory, each arm in a process of its own, after a first call"
    yield Table(title, ("arm", "(input + peak rise) / (input + output)"), tuple(rows))


def peak_ratio(task: str, arm: str, size: int) -> float | None:
    """Return (input + rise) / (input + output); the first call compiles and is not counted."""
    pin(2)
    values = weights(size)
    tensor = quantise(values, NVFP4)
    small = tensor.codes.nbytes + tensor.block_scale.nbytes
    ours: dict[str, Callable[[], Any]] = {
        "quantise": lambda: quantise(values, NVFP4),
        "dequantise": lambda: dequantise(tensor, torch.bfloat16),
    }
    with peers.quiet():
        function = ours[task]
        if arm != OURS and task == "quantise":
            function = peers.QUANTISERS[arm](values)
        elif arm != OURS:
            scales = tensor.block_scale, tensor.decode_scale
            function = peers.DECODERS[arm](tensor.codes, *scales)
        function()
        drop_spare_memory()
        rise = peak_rise(function)
    read, written = (values.nbytes, small) if task == "quantise" else (small, values.nbytes)
    return None if rise is None else (read + rise) / (read + written)


# ---- comparing a pair ----------------------------------------------------------------------------

IN_MEMORY, FROM_FILE = 6.0, 3.0  # GB of pair a second
RESIDENT = 0.8e9
TENSORS = 5
TIMES = 3
PLAIN = "plain torch loop"


def pair(size: int) -> tuple[Tensor, Tensor]:
    """A reference, and a candidate of which one value in sixteen is a step away."""
    reference = weights(size)
    generator = torch.Generator().manual_seed(size + 1)
    moved = torch.randint(0, 16, reference.shape, generator=generator, dtype=torch.int16) == 0
    return (reference.view(torch.int16) + moved.short()).view(torch.bfloat16), reference


def plain(candidate: Tensor, reference: Tensor) -> tuple[float, float, float, int, float]:
    """Cosine, relative L2, gain, largest step, identical share, by whole tensors in float32."""
    c, r = candidate.float().flatten(), reference.float().flatten()
    difference = c - r
    steps = (_ordinals(candidate) - _ordinals(reference)).abs().max()
    return (
        float(torch.cosine_similarity(c, r, dim=0)),
        float(difference.norm() / r.norm()),
        float(c.dot(r) / r.dot(r)),
        int(steps),
        float((candidate == reference).double().mean()),
    )


def compare_pair(options: Any) -> Iterator[Part]:
    """On one core, whatever the options say of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        candidate, reference = pair(options.size)
        total = candidate.nbytes + reference.nbytes
        arms = (
            call(OURS, lambda: compare(candidate, reference), total),
            call(PLAIN, lambda: plain(candidate, reference), total),
        )
        columns = (
            ("ms", lambda each: f"{each.median * 1e3:.1f}"),
            ("GB/s of pair", lambda each: f"{each.bandwidth / 1e9:.2f}"),
        )
        claims = (
            Claim(
                "GB/s of pair in memory", OURS, lambda reading: reading.bandwidth / 1e9, IN_MEMORY
            ),
            Claim(
                "times as fast as the plain loop", OURS, lambda reading: reading.times(PLAIN), 1.0
            ),
        )
        corner = slice(min(256, options.size))
        same = _say_the_same(candidate[corner, corner], reference[corner, corner])
        yield Target("both arms say the same (1 = yes)", float(same), 1.0)
        yield Comparison("In memory", [arms], columns, claims)
        yield from _from_file(options.size)
        yield f"BF16, {options.size} x {options.size}, {options.rounds} rounds"
    finally:
        torch.set_num_threads(threads)


def _say_the_same(candidate: Tensor, reference: Tensor) -> bool:
    """Whether both arms agree. Trap: sums of millions in float32 would make a cosine above 1."""
    comparison = compare(candidate, reference)
    cosine, relative, gain, steps, identical = plain(candidate, reference)
    near = (
        (float(comparison.total.cosine), cosine),
        (float(comparison.total.relative_l2), relative),
        (float(comparison.total.gain), gain),
    )
    return (
        all(abs(ours - theirs) < 1e-3 for ours, theirs in near)
        and comparison.ulps == steps
        and abs(comparison.identical - identical) < 1e-12
    )


def _from_file(size: int) -> Iterator[Part]:
    """Compare two files in a process of its own, where memory can be read."""
    with tempfile.TemporaryDirectory() as folder:
        for name, side in zip(("candidate", "reference"), pair(size), strict=True):
            tensors = {f"x.{number}": side.clone() for number in range(TENSORS)}
            save_file(tensors, Path(folder) / f"{name}.safetensors")
            del tensors
        done = in_child(f"{__name__}:compare_files", folder)
    total, seconds = done.result
    rate = total / seconds / 1e9
    row = (f"{TENSORS} tensors", f"{total / 1e9:.2f}", f"{rate:.2f}", f"{done.peak / 1e6:.0f}")
    header = ("two files in the page cache", "GB of pair", "GB/s of pair", "peak resident MB")
    yield Table("From mapped files", header, (row,))
    yield Target("GB/s of pair from a cached file", rate, FROM_FILE)
    yield Target("peak resident bytes", float(done.peak), RESIDENT, at_least=False)


def compare_files(folder: str) -> tuple[int, float]:
    """Return bytes of the pair, and the seconds of the fastest of some times.

    The first time compiles the loops and fills the page cache.
    """
    torch.set_num_threads(1)
    fastest, total = float("inf"), 0
    with (
        Checkpoint.open(Path(folder) / "candidate.safetensors") as candidate,
        Checkpoint.open(Path(folder) / "reference.safetensors") as reference,
    ):
        for _ in range(TIMES):
            start, total = time.perf_counter(), 0
            for name, entry in reference.entries.items():
                compare(candidate.tensor(name), reference.tensor(name))
                candidate.release(name)
                reference.release(name)
                total += entry.nbytes + candidate.entry(name).nbytes
            fastest = min(fastest, time.perf_counter() - start)
    return total, fastest


BENCHES = {
    "formats": Bench(
        "NVFP4 and E2M1 on the CPU", formats, page=True,
        packages=("torch", "numba", "numpy", "torchao", "compressed-tensors", "nvidia-modelopt",
                  "ml_dtypes"),
    ),
    "compare": Bench(
        "Comparing a pair on one core", compare_pair, ("torch", "numba", "numpy", "safetensors"),
        page=True,
    ),
}  # fmt: skip
