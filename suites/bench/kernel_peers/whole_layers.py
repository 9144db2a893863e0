"""A decoding step of whole layers beside vLLM 0.26 with its own kernels, by layer.

    python -m degarble.suites.bench.kernel_peers.whole_layers OUT [--layers 4 6] [--lanes 1 64]

A layer's time is a slope: steps of two numbers of layers, the difference by layers. So what a graph
costs to launch drops out, and embedding, last norm and lists that all layers share. Behind its
first two layers V4-Flash is pairs of one with ratio 4 and one with ratio 128, so the numbers should
be even. Both sides have its true widths, all experts, FP8 linears with 128x128 blocks and NVFP4
experts, and lanes at the end of the same context. vLLM loads a checkpoint that is written here, and
replays its own CUDA graph (vllm_layers.py); ours is a graph over random weights of the same formats
(decoder.py). On Hopper vLLM multiplies NVFP4 experts by BF16 activations, ours by NVFP4 ones.

Engines start and compute prompts beside each other and while our kernels compile; what is timed has
the GPU alone, ours last. OUT/layers.json is what the command of all kernels joins.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from degarble.harness.backends.graph.matrices import FEW_ROWS, MOST_ROWS, TILES
from degarble.harness.base.errors import DegarbleError, InvalidArgument
from degarble.harness.cli.values import settings_here
from degarble.harness.model.config.config import V4_FLASH
from degarble.harness.vllm.engine.server import QUIET
from degarble.suites.bench import decoder as bench
from degarble.suites.bench.kernel_peers import report, tokens
from degarble.suites.bench.kernel_peers.contest import OURS, Gpu, TimedRow, reason_of
from degarble.suites.bench.kernel_peers.vllm_layers import NOW, say, turn
from degarble.suites.bench.runner import Arm, quartiles
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from degarble.suites.bench.kernel_peers.contest import Clock

ENGINE = "degarble.suites.bench.kernel_peers.vllm_layers"
OUT = Path("out") / "kernel-layers"
VLLM = "vLLM 0.26"
LAYERS, LANES, CONTEXT = (4, 6), (1, 64), 8192
LAYOUT, SEED = "nvfp4-experts", 3
WANTED = 1.0  # of vLLM's time over ours
ENGINE_SECONDS = 1500.0  # in which engines have to end
ROUNDS, OUR_SECONDS = 20, 5.0
NO_VLLM = "vLLM cannot be imported here: make vllm-pack, docs/vllm.md"
_TAIL = 40  # lines of a log that are shown
_MICRO = 1e6
_DOING = re.compile(rf"^\[.*\] {NOW}(.*)$", re.MULTILINE)


# ---- what is measured ----------------------------------------------------------------------------


class SlopeReading(NamedTuple):
    """Seconds of a layer: the median, and what quartiles of both steps allow."""

    median: float
    low: float
    high: float


def slope(seconds: Mapping[int, Sequence[float]]) -> SlopeReading:
    """Return by how much a step grows with each layer."""
    (few, fewer), (many, more) = sorted(seconds.items())
    between = many - few
    low, high = quartiles(fewer), quartiles(more)
    return SlopeReading(
        (statistics.median(more) - statistics.median(fewer)) / between,
        (high[0] - low[1]) / between, (high[1] - low[0]) / between,
    )  # fmt: skip


def arm_record(seconds: Mapping[int, Sequence[float]], **more: Any) -> dict[str, Any]:
    """Return an arm of a row; `steps` has the whole steps by number of layers."""
    made = slope(seconds)
    steps = {str(n): statistics.median(each) * _MICRO for n, each in sorted(seconds.items())}
    return {
        "microseconds": made.median * _MICRO, "low": made.low * _MICRO,
        "high": made.high * _MICRO, "steps": steps, **more,
    }  # fmt: skip


def row_record(arms: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what a row says: arms, ratio, goal."""
    made: dict[str, Any] = {"arms": dict(arms), "goals": []}
    if all("microseconds" in arms.get(name, {}) for name in (OURS, VLLM)):
        ratio = arms[VLLM]["microseconds"] / arms[OURS]["microseconds"]
        made |= {"best": VLLM, "ratio": ratio}
        made["goals"].append({
            "text": "of the best peer", "value": ratio, "wanted": WANTED, "at_least": True,
            "met": ratio >= WANTED,
        })  # fmt: skip
    return made


# ---- both sides ----------------------------------------------------------------------------------


def config_of(layers: int) -> Any:
    """Return V4-Flash with its first layers; every layer chooses experts by score."""
    return replace(
        V4_FLASH, num_hidden_layers=layers, compress_ratios=V4_FLASH.compress_ratios[:layers],
        num_hash_layers=0, num_nextn_predict_layers=0,
    )  # fmt: skip


def write(folder: Path, layers: int, workers: int) -> None:
    """Write a checkpoint, which engines wait for; one that is there is taken."""
    if folder.exists():
        return
    begin = time.monotonic()
    model, draft = Synthetic(config_of(layers), LAYOUT, seed=SEED), folder.with_suffix(".draft")
    write_checkpoint(draft, model, shards=3 * workers, workers=workers)
    size = sum(file.stat().st_size for file in draft.iterdir())
    draft.rename(folder)
    say(f"written: {layers} layers, {size / 1e9:.1f} GB in {time.monotonic() - begin:.0f} s")


def our_arms(given: bench.Given, blocks: Sequence[Any], layers: Sequence[int], lanes: int) -> Any:
    """Yield an arm for each number of layers, over the same layers."""
    kinds = [tokens.kind_of(given, block) for block in blocks]
    one_of = dict(zip(kinds, blocks, strict=True))
    steps = {kind: tokens.steps_of(given, block, lanes) for kind, block in one_of.items()}
    for count in layers:
        own = {kind: steps[kind] for kind in dict.fromkeys(kinds[:count])}
        run = tokens.layers_call(kinds[:count], own)
        yield Arm(f"{count} layers", partial(_whole, run), sets=1, repeats=1)


def _whole(run: Callable[[], object], _number: int) -> Callable[[], object]:
    return run


def given_here(context: int) -> bench.Given:
    """Return what our layers share; the shared expert is FP8 and no part of the routed ones."""
    config = config_of(max(LAYERS))
    sizes = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    kernels = bench.Remembering(settings_here())
    return bench.Given(kernels, config, bench.experts(*sizes), bench.FP8, bench.ENTRY, context)


@dataclass
class LayersRun:
    """Numbers of layers and lanes, where everything is written, and until when."""

    out: Path = OUT
    layers: Sequence[int] = LAYERS
    lanes: Sequence[int] = LANES
    context: int = CONTEXT
    rounds: int = ROUNDS
    workers: int = field(default_factory=lambda: min(16, os.cpu_count() or 1))
    within: float = float("inf")
    begun: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if len(set(self.layers)) < 2 or min(self.layers) < 1:
            raise InvalidArgument(
                "layers", " ".join(map(str, self.layers)), "two numbers of layers",
                f"Give --layers {LAYERS[0]} {LAYERS[1]}.",
            )  # fmt: skip

    @property
    def checkpoint(self) -> Path:
        """Where as many layers are written as the larger engine loads."""
        return self.out / f"checkpoint-{max(self.layers)}"

    @property
    def left(self) -> float:
        """Seconds until ours has to be timed."""
        return self.within - OUR_SECONDS - (time.monotonic() - self.begun)


# ---- ours ----------------------------------------------------------------------------------------


class OurGraphs:
    """Our steps as graphs, by lanes; a failure is kept as a reason."""

    def __init__(self, run: LayersRun, clock: Clock) -> None:
        self.run, self.clock = run, clock
        self.graphs: dict[int, list[Any]] = {}
        self.reasons: dict[int, str] = {}

    def capture(self) -> None:
        """Compile, allocate, capture."""
        blocks = config_of(max(self.run.layers)).layers
        shared = None
        for lanes in self.run.lanes:
            products = FEW_ROWS if lanes <= MOST_ROWS else TILES
            try:
                shared = shared or given_here(self.run.context)
                own = replace(shared, products=products)
                arms = our_arms(own, blocks, sorted(self.run.layers), lanes)
                self.graphs[lanes] = [self.clock.captured(arm) for arm in arms]
                say(f"ours, {lanes} lanes: captured")
            except Exception as error:  # noqa: BLE001  it is the reason of the row
                self.reasons[lanes] = reason_of(error)
                say(f"ours, {lanes} lanes: {self.reasons[lanes]}")

    def timed(self, lanes: int) -> dict[str, Any]:
        if lanes in self.reasons:
            return {"reason": self.reasons[lanes]}
        found = self.clock.replayed(self.graphs[lanes], self.run.rounds)
        return arm_record(dict(zip(sorted(self.run.layers), found, strict=True)))


# ---- vLLM ----------------------------------------------------------------------------------------


def has_vllm() -> bool:
    """Return whether vLLM is here: a folder with its kernels alone is a package of no file."""
    spec = find_spec("vllm")
    return spec is not None and spec.origin is not None


class EngineProcess:
    """One engine, in a process of its own; a context that ends it."""

    def __init__(self, run: LayersRun, count: int) -> None:
        self.count = count
        self.out, self.log = (run.out / f"vllm-{count}.{end}" for end in ("json", "log"))
        self.out.unlink(missing_ok=True)
        line = [
            sys.executable, "-m", ENGINE, run.checkpoint, self.out, "--layers", count,
            "--turn", run.out / "turn", "--context", run.context, "--lanes", *run.lanes,
        ]  # fmt: skip
        own = {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                list(map(str, line)), env=dict(os.environ) | QUIET | own, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ended(self, seconds: float) -> str:
        """Wait until it ends; return why it did not end well, or nothing."""
        try:
            status = self.process.wait(max(1.0, min(seconds, ENGINE_SECONDS)))
        except subprocess.TimeoutExpired:
            doing = _DOING.findall(self.logged())
            return f"time ran out while {doing[-1] if doing else 'starting'}"
        lines = self.logged().splitlines()
        errors = [line for line in lines if "Error" in line]
        return f"status {status}: {(errors or lines or [''])[-1].strip()[:300]}" if status else ""

    def rows(self) -> list[dict[str, Any]]:
        """Return what it has written so far."""
        if not self.out.exists():
            return []
        document = json.loads(self.out.read_text(encoding="utf-8"))
        return [{**row, "versions": document["versions"]} for row in document["rows"]]

    def logged(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


def vllm_arm(rows: Sequence[Mapping[str, Any]], layers: Sequence[int], why: str) -> dict[str, Any]:
    """Return vLLM's arm of a row; without a step of each number of layers, `why`."""
    seconds = {row["layers"]: row["seconds"] for row in rows}
    if sorted(seconds) != sorted(layers):
        return {"reason": why or "not every number of layers was timed"}
    experts = [count for row in rows for count in row["experts"]]
    most = max(rows, key=lambda row: row["layers"])
    return arm_record(
        seconds, context=most["context"], parts=most["parts"],
        engine_steps={str(row["layers"]): row["step_seconds"] * _MICRO for row in rows},
        experts=statistics.mean(experts) if experts else None, versions=most["versions"],
    )  # fmt: skip


# ---- the contest ---------------------------------------------------------------------------------


def contested(run: LayersRun, clock: Clock) -> dict[int, dict[str, Any]]:
    """Return the records of all rows, by lanes."""
    run.out.mkdir(parents=True, exist_ok=True)
    ours, whys = OurGraphs(run, clock), list[str]()
    timed = defaultdict[int, list[dict[str, Any]]](list)
    with ExitStack() as stack:
        engines = []
        if has_vllm():
            engines = [stack.enter_context(EngineProcess(run, count)) for count in run.layers]
            say(f"{len(engines)} engines start")
            write(run.checkpoint, max(run.layers), run.workers)
        else:
            whys.append(NO_VLLM)
        with turn(run.out / "turn", alone=False):  # no engine is timed meanwhile
            ours.capture()
        for engine in engines:
            if why := engine.ended(run.left):
                whys.append(f"{engine.count} layers: {why}")
                tail = "\n".join(line[:300] for line in engine.logged().splitlines()[-_TAIL:])
                say(f"vLLM, {whys[-1]}\n{tail}")
            for row in engine.rows():
                timed[row["lanes"]].append(row)
    why = "; ".join(whys)
    return {
        lanes: row_record({
            OURS: ours.timed(lanes), VLLM: vllm_arm(timed[lanes], run.layers, why)
        })
        for lanes in run.lanes
    }  # fmt: skip


def name_of(lanes: int, context: int = CONTEXT) -> str:
    """Return a row's name; the table's title has the usual context."""
    behind = "" if context == CONTEXT else f", context {context:,}"
    return f"V4-Flash, a layer, mean of ratio 4 and 128, {lanes} token{'s' * (lanes > 1)}{behind}"


def layers() -> Iterator[TimedRow]:
    """Rows that are measured together, when the first one is."""

    @cache
    def every(rounds: int, clock: Clock) -> dict[int, dict[str, Any]]:
        run = LayersRun(rounds=rounds)
        try:
            return contested(run, clock)
        finally:
            shutil.rmtree(run.checkpoint, ignore_errors=True)

    for lanes in LANES:
        yield TimedRow(name_of(lanes), partial(_one, every, lanes))


def _one(every: Callable[..., Any], lanes: int, rounds: int, clock: Clock) -> dict[str, Any]:
    record: dict[str, Any] = every(rounds, clock)[lanes]
    return record


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print what was found; status 1 where a side was not timed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, nargs=2, default=LAYERS)
    parser.add_argument("--lanes", type=int, nargs="+", default=LANES)
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--within", type=float, default=float("inf"), metavar="SECONDS")
    given = parser.parse_args(arguments)
    try:
        run = LayersRun(**vars(given))
    except DegarbleError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_status
    import torch  # noqa: PLC0415  --help needs none

    from degarble.suites.bench.kernel_peers import __main__ as command  # noqa: PLC0415  as above

    origin = command.origin_here()
    with torch.inference_mode():
        found = contested(run, Gpu())
    rows = [
        command.failed_row(f"layers: {name_of(lanes, given.context)}", "", origin) | record
        for lanes, record in found.items()
    ]
    (given.out / "layers.json").write_text(report.records_text(rows), encoding="utf-8")
    for row in rows:
        say(json.dumps(row))
    return int(any("ratio" not in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
