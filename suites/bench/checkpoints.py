"""Whole checkpoints on the CPU: quantising, converting, proving, and auditing them.

Rates of one core are bytes over processor seconds where the table says so, system time included, so
that other load does not count. A projection multiplies a measured rate by a size, and says so.
Every run is in a process of its own, where memory and processor time can be read.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.checkpoint.audit.against.against import measure_against
from degarble.harness.checkpoint.audit.numbers.numbers import judge_numbers, measure_numbers
from degarble.harness.checkpoint.transform.convert.job import job_for, prove
from degarble.harness.checkpoint.transform.nvfp4_scales import (
    Errors,
    ScaleRule,
    quantise_rows,
    tensor_scale,
)
from degarble.harness.checkpoint.transform.quantise.calibration import Amax, Calibration
from degarble.harness.checkpoint.transform.quantise.job import QuantiseJob, target_layout
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.formats.dialects import MODELOPT
from degarble.harness.formats.fast.nvfp4 import largest_finite
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.quantise import quantise
from degarble.harness.model.config.config import V4_PRO, small_v4
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import recipe_named
from degarble.suites.bench import peers
from degarble.suites.bench.machine import (
    child_command,
    child_result,
    drop_from_cache,
    in_child,
    read_all,
)
from degarble.suites.bench.runner import (
    Bench,
    Claim,
    Comparison,
    Part,
    Reading,
    Table,
    Target,
    call,
)
from degarble.suites.bench.tensors import weights
from degarble.suites.checkpoint.transform.convert.memory_watch import watched
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.model.config.config import Config

PEAK_BYTES = 1_000_000_000
FULL_SIZE = 881e9  # bytes of the V4-Pro checkpoint that was written


def small_config(width: int, inner: int, experts: int) -> Config:
    """Return a V4 of two layers."""
    return small_v4(
        num_hidden_layers=2, compress_ratios=(0, 4, 0), num_hash_layers=1, hidden_size=width,
        moe_intermediate_size=inner, n_routed_experts=experts, vocab_size=256,
    )  # fmt: skip


def job_of(config: Config, source: Path) -> QuantiseJob:
    """Return the job that quantises a source in nvfp4-full."""
    recipe = recipe_named("nvfp4-full", config)
    wanted = [
        parameter
        for parameter in parameters(config)
        if recipe.format_of(parameter).activation == "NVFP4"
    ]
    calibration = Calibration.from_records({parameter.name: Amax(8.0, 1) for parameter in wanted})
    return QuantiseJob(source, target_layout(config, recipe), calibration=calibration)


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in shards_of(folder))


def write(layout: str, folder: str, *extents: int) -> None:
    """Write a source; in a process of its own, because it needs more memory than what reads it."""
    write_checkpoint(Path(folder), Synthetic(small_config(*extents), layout))


def peak_target(peaks: list[int]) -> Target:
    return Target("peak resident bytes", max(peaks), PEAK_BYTES, at_least=False)


# ---- quantising: one matrix, a whole checkpoint, and packages over the same weights --------------

RATIO = 3.0
RIVALS = ("nvidia-modelopt", "compressed-tensors")
OURS = "degarble, amax"
RULES = {
    "amax": ScaleRule.AMAX, "four-over-six": ScaleRule.FOUR_OVER_SIX, "mse": ScaleRule.MSE,
}  # fmt: skip


def quantising(options: Any) -> Iterator[Part]:
    with peers.quiet():
        yield from _matrix(weights(options.size), options)
    yield from _whole(options.size)
    if options.peers:
        yield from _rivals(options.size)
    yield f"{options.size} x {options.size}, {options.rounds} rounds"


def _with_report(values: Tensor, rule: ScaleRule) -> Errors:
    scale, errors = tensor_scale(largest_finite(values), rule), Errors()
    errors.add(0, values, quantise_rows(values, scale, rule), scale)
    return errors


def _matrix(values: Tensor, options: Any) -> Iterator[Part]:
    """BF16 to NVFP4 in ModelOpt's dialect, tensor amax included, the same tensor for all."""
    arms = [call(OURS, lambda: quantise(values, NVFP4, MODELOPT))]
    for name, rule in RULES.items():
        arms.append(call(f"degarble, {name} with report", partial(_with_report, values, rule)))
    agreement: dict[str, str] = {}
    ours = quantise(values, NVFP4, MODELOPT)
    for name in RIVALS if options.peers else ():
        arm = peers.QUANTISERS[name](values)
        arms.append(call(name, arm))
        codes, scales = arm()
        differ = (codes != ours.codes).double().mean(), (scales != ours.block_scale).sum()
        same = not (bool(differ[0]) or bool(differ[1]))
        agreement[name] = "bit-equal" if same else f"{float(differ[0]):.2%} of bytes differ"
    if agreement:
        equal = float(agreement["nvidia-modelopt"] == "bit-equal")
        yield Target("output is bit-equal to nvidia-modelopt (1 = yes)", equal, 1.0)
    elements = values.numel()

    def slower(reading: Reading) -> float:
        return reading.beside[OURS].times(reading.arm.name)

    columns = (
        ("ms", lambda each: f"{each.median * 1e3:.1f}"),
        ("ns an element", lambda each: f"{each.median / elements * 1e9:.2f}"),
        ("time / degarble", lambda each: f"{slower(each):.1f}"),
        ("against our bytes", lambda each: agreement.get(each.arm.name, "")),
    )
    claims = [Claim(f"times as fast as {name}", name, slower, RATIO) for name in agreement]
    yield Comparison("One matrix, BF16 to NVFP4", [tuple(arms)], columns, claims)


def expert_extents(size: int) -> tuple[int, int, int]:
    """Experts are as wide as the hidden size, within bounds."""
    return max(128, size // 128 * 128), max(128, size // 256 * 128), 8


def _whole(size: int) -> Iterator[Part]:
    rows, peaks = [], []
    with tempfile.TemporaryDirectory() as folder:
        for layout in ("official", "bf16"):
            done = in_child(f"{__name__}:quantise_whole", layout, size, f"{folder}/{layout}")
            read, seconds = done.result
            peaks.append(done.peak)
            rate = read / seconds
            hours = FULL_SIZE / rate / 3600
            cells = (f"{read / 1e9:.2f}", f"{rate / 1e9:.2f}", f"{done.peak / 1e6:.0f}")
            rows.append((f"V4, {layout} to nvfp4-full", *cells, f"{hours:.2f}"))
    header = (
        "run, one worker",
        "GB read",
        "GB/s read, output written and hashed",
        "peak resident MB",
        "core hours for 881 GB read (size / rate; storage not counted)",
    )
    yield Table("Whole checkpoints", header, tuple(rows))
    yield peak_target(peaks)


def quantise_whole(layout: str, size: int, folder: str) -> tuple[int, float]:
    """Return bytes read and seconds, after a small run that compiles the loops."""
    torch.set_num_threads(1)
    for extent in (128, size):
        source, seconds, _ = _quantised(layout, extent, Path(folder))
        read = size_of(source)
        shutil.rmtree(folder)
    return read, seconds


def _quantised(layout: str, size: int, folder: Path) -> tuple[Path, float, Path]:
    """Write a source and quantise it; return it, the seconds and what was written."""
    source, target, extents = folder / "source", folder / "target", expert_extents(size)
    in_child(f"{__name__}:write", layout, str(source), *extents)
    start = time.perf_counter()
    job_of(small_config(*extents), source).run(target)
    return source, time.perf_counter() - start, target


def _rivals(size: int) -> Iterator[Part]:
    """Let today's packages quantise the weights of the same checkpoint, and do nothing else.

    Ours reads, quantises, measures errors, writes, hashes and syncs; theirs quantises.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in RIVALS:
            done = in_child(f"{__name__}:rivalled", name, size, f"{folder}/{name}")
            ours, theirs, equal = done.result
            rows.append(
                (name, f"{theirs:.1f}", f"{ours:.1f}", f"{theirs / ours:.1f}", f"{equal:.0%}")
            )
            yield Target(f"a checkpoint: times as fast as {name}", theirs / ours, RATIO)
            if name == "nvidia-modelopt":
                yield Target("share of weights bit-equal to nvidia-modelopt", equal, 1.0)
    header = ("package", "its seconds", "our seconds, all of it", "ratio",
              "weights with equal bytes")  # fmt: skip
    yield Table("Whole checkpoint, BF16 to nvfp4-full, one thread", header, tuple(rows))


def rivalled(name: str, size: int, folder: str) -> tuple[float, float, float]:
    """Return our seconds for the whole run, another package's for the weights, and equality.

    Equal bytes are a share of the weights that share no scale.
    """
    torch.set_num_threads(1)
    source, ours, target = _quantised("bf16", size, Path(folder))
    seconds, equal = 0.0, []
    with peers.quiet(), Checkpoint.open(source) as before, Checkpoint.open(target) as after:
        assert after.names is not None
        for logical, parameter in after.names.present.items():
            stored_weight = after.stored(logical)
            if stored_weight.format != NVFP4:
                continue
            start = time.perf_counter()
            value = before.stored(logical).weight().value
            assert value is not None
            codes, scales = peers.QUANTISERS[name](value)()
            seconds += time.perf_counter() - start
            if parameter.row.name.endswith((".w2", ".wq_b", ".wo_b")):
                weight = stored_weight.weight()
                assert weight.codes is not None
                assert weight.block_scale is not None
                same = torch.equal(codes, weight.codes) and torch.equal(scales, weight.block_scale)
                equal.append(same)
            before.release()
    shutil.rmtree(folder)
    return ours, seconds, sum(equal) / len(equal)


# ---- larger than memory allows: written, quantised, converted, proven ----------------------------

LEAST_BYTES = 8_000_000_000
PROVE_RATE = 300e6
SHARDS = 8
SHARD_BYTES = 400_000_000
WIDE = 4096  # hidden size of the full run: 84 experts a layer make 8.5 GB in BF16
STEPS = {
    "write": "write_checkpoint, synthetic values included, one core",
    "quantise": "quantise BF16 to nvfp4-full with report, one core",
    "quantise-2": "the same, two workers",
    "convert": "convert --to nvfp4, one core",
    "prove": "its proof, source and output read, one core",
}


class Step(NamedTuple):
    """What one step took. `peak`: memory of all its processes together."""

    read: float
    written: float
    seconds: float
    peak: int

    @property
    def rate(self) -> float:
        """Bytes a second: of what is read, or of what is written where nothing is."""
        return (self.read or self.written) / self.seconds


def large(options: Any) -> Iterator[Part]:
    found: dict[str, Step] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for step in STEPS:
            if step.startswith("quantise"):
                shutil.rmtree(folder / "quantise", ignore_errors=True)
            command = child_command(f"{__name__}:large_step", step, options.size, name)
            done = watched(*command)
            assert done.status == 0, done.told
            read, written, seconds = child_result(done.told).result
            found[step] = Step(read, written, seconds, done.peak)
    rows = tuple(
        (
            STEPS[step],
            f"{each.read / 1e9:.2f}",
            f"{each.written / 1e9:.2f}",
            f"{each.seconds:.1f}",
            f"{each.rate / 1e6:.0f}",
            f"{each.peak / 1e6:.0f}",
        )
        for step, each in found.items()
    )
    header = ("step", "GB read", "GB written", "seconds", "MB/s", "peak MB, all processes")
    yield Table("Steps", header, rows)
    yield Target("bytes of the source", found["quantise"].read, LEAST_BYTES)
    peak = max(each.peak for step, each in found.items() if step != "write")
    yield Target("peak of all processes, bytes", peak, PEAK_BYTES, at_least=False)
    yield Target("proof: bytes a second and core", found["prove"].rate, PROVE_RATE)
    alone, together = found["quantise"].rate, found["quantise-2"].rate
    yield (
        f"881 GB read by quantise: 881e9 / {alone:.3g} bytes a second = {FULL_SIZE / alone:.0f} s ="
        f" {FULL_SIZE / alone / 3600:.2f} h on one core,"
        f" {FULL_SIZE / together / 3600:.2f} h with two workers;"
        " a disk that is slower than this bounds it instead"
    )


def large_step(name: str, size: int, folder: str) -> tuple[int, int, float]:
    """Do one step; return bytes read, bytes written and seconds, loops compiled before."""
    torch.set_num_threads(1)
    full = size >= WIDE
    width = WIDE if full else 256
    config = small_config(width, width // 2, 84 if full else 8)
    stem = name.removesuffix("-2").replace("prove", "convert")
    source, target = Path(folder) / "source", Path(folder) / stem
    if name == "write":
        start = time.perf_counter()
        write_checkpoint(source, Synthetic(config, "bf16"), shards=SHARDS)
        return 0, size_of(source), time.perf_counter() - start
    from degarble.harness.checkpoint.transform.convert import worker_imports  # noqa: PLC0415  compiles

    assert worker_imports.READY
    start = time.perf_counter()
    if name == "convert":
        job_for(source, "nvfp4").run(target, shard_bytes=SHARD_BYTES)
    elif name == "prove":
        proof = prove(source, target)
        assert proof.holds, list(proof.lines())
        return size_of(source) + size_of(target), 0, time.perf_counter() - start
    else:
        workers = 2 if name.endswith("-2") else 1
        job_of(config, source).run(target, workers=workers, shard_bytes=SHARD_BYTES)
    return size_of(source), size_of(target), time.perf_counter() - start


# ---- auditing the numbers ------------------------------------------------------------------------

RATE = 1.2e9  # bytes a second and core
COLD_SHARE = 0.8  # of the disk's sequential rate
FULL_BYTES = 8.2e9  # of the largest synthetic one at the default size
LARGEST = "nvfp4-experts"
LAYOUTS = {LARGEST: 1.0, "official": 0.25, "bf16": 0.25}
BITS = {LARGEST: 4.5, "official": 4.25, "bf16": 16.0}  # of an expert's element
LOOPS = {  # loops that the profile shows by name; all others are one row
    "e2m1_rows": "codes and block scales (e2m1_rows)",
    "e2m1_columns": "profile of columns (e2m1_columns)",
    "e4m3_panel": "FP8 codes (e4m3_panel)",
    "float_rows": "floats (float_rows)",
    "row_digests": "digests of rows (row_digests)",
    "byte_counts": "entropy of bytes (byte_counts)",
    "preadv": "reading (preadv)",
}


def audit_extents(layout: str, size: int, wanted: int) -> tuple[int, int, int]:
    """Return so many experts that the files have about `wanted` bytes."""
    width = max(128, size // 128 * 128)
    inner = max(128, width * 3 // 7 // 128 * 128)
    expert = 3 * width * inner * BITS[layout] / 8
    return width, inner, max(4, round(wanted / expert / 3))


def audit(options: Any) -> Iterator[Part]:
    """Every layout from the page cache by one thread, then the largest one cold."""
    wanted = FULL_BYTES * (options.size / 7168) ** 2
    few = min(options.rounds, 3)
    runs: dict[str, Mapping[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for layout, share in LAYOUTS.items():
            target = f"{folder}/{layout}"
            extents = audit_extents(layout, options.size, int(share * wanted))
            in_child(f"{__name__}:write", layout, target, *extents)
            runs[f"V4, {layout}"] = _audited("audit_cached", target, min(options.rounds, 5))
            if layout == LARGEST:
                against = _audited("audit_against", target, few)
                cold = _audited("audit_cold", target, few, options.threads)
    largest = runs[f"V4, {LARGEST}"]
    runs[f"V4, {LARGEST}, --against itself"] = against
    yield _rates(runs)
    header = ("arm", "GB/s by the clock, median", "turns")
    rows = (
        ("plain reads of 16 MiB in order", f"{cold['disk'] / 1e9:.2f}", str(cold["turns"])),
        (f"audit, {options.threads} threads", f"{cold['rate'] / 1e9:.2f}", str(cold["turns"])),
    )
    yield Table("Files dropped from the page cache before every turn", header, rows)
    rows_of_profile = tuple(
        (name, f"{seconds / largest['profiled']:.0%}") for name, seconds in largest["profile"]
    )
    title = "Where the time of a cached audit goes"
    yield Table(title, ("step", "share of the clock"), rows_of_profile)
    yield Target("GB a second and core, cached, NVFP4", largest["rate"] / 1e9, RATE / 1e9)
    yield Target("share of the disk's sequential rate, cold", cold["rate"] / cold["disk"],
                 COLD_SHARE)  # fmt: skip
    yield peak_target([each["peak"] for each in (*runs.values(), cold)])
    yield f"{largest['bytes'] / 1e9:.2f} GB at size {options.size}, the others a quarter of it"
    hours = FULL_SIZE / largest["rate"] / 3600
    yield f"881 GB at that rate: {hours:.2f} core hours (size / rate; storage not counted)"


def _audited(function: str, *arguments: object) -> dict[str, Any]:
    done = in_child(f"{__name__}:{function}", *arguments)
    return {**done.result, "peak": done.peak}


def _rates(runs: Mapping[str, Mapping[str, Any]]) -> Table:
    header = (
        "run, one thread", "GB", "weights", "GB/s and core", "GB/s by the clock",
        "peak resident MB",
    )  # fmt: skip
    rows = [
        (
            name,
            f"{run['bytes'] / 1e9:.2f}",
            f"{run['weights']:,}",
            f"{run['rate'] / 1e9:.2f}",
            f"{run['clock_rate'] / 1e9:.2f}",
            f"{run['peak'] / 1e6:.0f}",
        )
        for name, run in runs.items()
    ]
    return Table("From the page cache", header, tuple(rows))


def audit_cached(folder: str, rounds: int) -> dict[str, Any]:
    """Audit by one thread, several times; the median counts. One more round is profiled."""
    torch.set_num_threads(1)
    with Checkpoint.open(folder) as checkpoint:
        found: list[Any] = []

        def once() -> None:
            found[:] = [measure_numbers(checkpoint)]
            judge_numbers(checkpoint, found[0])

        seconds = _timed(once, rounds)
        size, weights = int(found[0]["nbytes"].sum()), len(found[0])
        profile = cProfile.Profile()
        start = time.perf_counter()
        profile.runcall(once)
        profiled = time.perf_counter() - start
    shares = {"profiled": profiled, "profile": _shares(profile, profiled)}
    return _rated(seconds, size, weights) | shares


def audit_against(folder: str, rounds: int) -> dict[str, Any]:
    """Compare a checkpoint with itself; bytes of both sides count."""
    torch.set_num_threads(1)
    with Checkpoint.open(folder) as here, Checkpoint.open(folder) as there:
        found: list[Any] = []
        seconds = _timed(lambda: found.append(measure_against(here, there)), rounds)
        size = sum(pair.nbytes for pair in found[0].pairs)
        return _rated(seconds, size, len(found[0]))


def audit_cold(folder: str, rounds: int, workers: int) -> dict[str, Any]:
    """Take turns between plain reads and an audit, each of them from the disk."""
    torch.set_num_threads(1)
    paths, size = shards_of(Path(folder)), size_of(Path(folder))
    with Checkpoint.open(folder) as checkpoint:
        measure_numbers(checkpoint)  # compiles, and is not counted
    disk, rate = [], []
    for _ in range(max(1, rounds)):
        drop_from_cache(paths)
        disk.append(size / _clock(lambda: read_all(paths)))
        drop_from_cache(paths)
        with Checkpoint.open(folder) as checkpoint:
            rate.append(size / _clock(lambda: measure_numbers(checkpoint, workers=workers)))
    return {
        "disk": statistics.median(disk), "rate": statistics.median(rate), "turns": len(rate),
    }  # fmt: skip


def _clock(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _timed(work: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Return median processor seconds and median seconds, after a round that compiles."""
    work()
    processor, clock = [], []
    for _ in range(max(1, rounds)):
        start = time.process_time()
        clock.append(_clock(work))
        processor.append(time.process_time() - start)
    return statistics.median(processor), statistics.median(clock)


def _rated(seconds: tuple[float, float], size: int, weights: int) -> dict[str, Any]:
    rates = {"rate": size / seconds[0], "clock_rate": size / seconds[1]}
    return {"bytes": size, "weights": weights, **rates}


def _shares(profile: cProfile.Profile, whole: float) -> list[tuple[str, float]]:
    spent = dict.fromkeys(LOOPS.values(), 0.0)
    raw: Any = pstats.Stats(profile)
    for (_, _, name), (_, _, own, _, _) in raw.stats.items():
        step = next((text for key, text in LOOPS.items() if key in name), None)
        if step:
            spent[step] += own
    found = sorted(spent.items(), key=lambda each: -each[1])
    return [*found, ("everything else: Python, records, judging", whole - sum(spent.values()))]


# ---- a checkpoint of full size: structure, loader proof and sharding plan, heads alone -----------

SECONDS = 60.0
PRO_SIZE = 1024  # below this size the small model stands in
SHARDS_OF_PRO = 95
MAPS = (
    ("official", "vllm:tp=8"),
    (LARGEST, "vllm:tp=8"),
    (LARGEST, "vllm:tp=8,ep=8"),
)


def full_size(options: Any) -> Iterator[Part]:
    """True heads over holes: about 0.9 TB in appearance, some 80 MB on disk.

    These steps read only heads and configs. What the page cache holds is not controlled.
    """
    times, plans, seconds, peaks, healthy = [], [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for layout in dict.fromkeys(layout for layout, _ in MAPS):
            target, out = Path(folder) / layout, Path(folder) / "said.json"
            in_child(f"{__name__}:write_sparse", layout, options.size >= PRO_SIZE, str(target))
            for loader in [each for of, each in MAPS if of == layout]:
                line = ["audit", str(target), "--only", "structure", "--loader", loader]
                # The command is called in its module, so that its imports count.
                done = in_child("degarble.harness.cli.main:main",
                                [*line, "--json", str(out), "--quiet"])  # fmt: skip
                said = json.loads(out.read_text(encoding="utf-8"))
                seconds.append(done.seconds)
                peaks.append(done.peak)
                healthy.append(done.result == 0)
                counts = said["loader"]["counts"]
                times.append((
                    f"V4-Pro, {layout}", loader, f"{said['bytes'] / 1e9:.0f}",
                    f"{said['tensors']:,}", f"{counts['transfers']:,}", f"{done.seconds:.1f}",
                    f"{done.cpu_seconds:.1f}", f"{done.peak / 1e6:.0f}",
                ))  # fmt: skip
                sizes = [rank["bytes"] for rank in said["loader"]["shares"]]
                groups = {tuple(rank["experts"]) for rank in said["loader"]["shares"]}
                plans.append((
                    f"V4-Pro, {layout}", loader, str(len(sizes)), str(len(groups)),
                    f"{min(sizes) / 1e9:.1f}", f"{max(sizes) / 1e9:.1f}",
                ))  # fmt: skip
            shutil.rmtree(target)
    header = ("checkpoint", "map", "GB", "tensors", "writes proven", "s", "CPU s", "peak MB")
    yield Table("Time and memory", header, tuple(times))
    header_of_plans = (
        "checkpoint",
        "map",
        "ranks",
        "groups of experts",
        "least GB a rank",
        "most GB",
    )
    yield Table("The plan that came out", header_of_plans, tuple(plans))
    yield Target("seconds from start to end", max(seconds), SECONDS, at_least=False)
    yield peak_target(peaks)
    yield Target("healthy checkpoints raise no error (1 = yes)", float(all(healthy)), 1.0)
    yield "`degarble audit CKPT --only structure --loader MAP --json FILE`, one process"


def write_sparse(layout: str, pro: bool, folder: str) -> None:
    config = V4_PRO if pro else small_v4(num_attention_heads=16, o_groups=8)
    write_checkpoint(Path(folder), Synthetic(config, layout), sparse=True, shards=SHARDS_OF_PRO)


_RIVAL_PACKAGES = ("torch", "numba", "numpy", "nvidia-modelopt", "compressed-tensors")
BENCHES = {
    "checkpoint-quantise": Bench(
        "Quantising checkpoints on the CPU", quantising, _RIVAL_PACKAGES, page=True
    ),
    "checkpoint-large": Bench(
        "A checkpoint larger than memory allows", large, ("torch", "numba", "numpy"), page=True
    ),
    "full-size": Bench(
        "A checkpoint of full size: structure, loader proof, sharding plan", full_size,
        ("torch", "numpy"), page=True,
    ),
    "audit": Bench(
        "Auditing the numbers of checkpoints", audit, ("torch", "numba", "numpy"), page=True
    ),
}  # fmt: skip
