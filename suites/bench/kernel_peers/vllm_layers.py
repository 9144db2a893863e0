"""Time decoding steps of whole V4 layers by vLLM's own kernels, in a process of its own.

    python -m degarble.suites.bench.kernel_peers.vllm_layers CHECKPOINT OUT.json --layers 4

An engine loads the first layers of a checkpoint. Lanes compute prompts as long as the context and
decode a few tokens. Then the engine's own CUDA graph of the last step is replayed between events:
scheduler, sampler and head are no part of that. No plugin is loaded.

OUT.json has what was measured so far after every number of lanes. Processes with the same --turn
FILE share the GPU while they load and compute prompts, and time one after another.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import shutil
import statistics
import sys
import time
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
BLOCK = 256  # tokens of a page; V4's own
CHUNK, SPARE = 8192, 2  # tokens that are computed together; what a prompt is shorter
CACHE_BYTES = 12 << 30
SHARE = 0.25  # of the GPU that has to be free
WARM, STEPS, REPLAYS = 3, 8, 40
WAITS = 1200.0  # seconds for a checkpoint that is being written
LOOKS = 0.2  # seconds between two looks for it
NOW = "now "  # before what a process says that it does, for who ends it
_BEGUN = time.monotonic()


def say(text: str) -> None:
    sys.stdout.write(f"[{time.monotonic() - _BEGUN:6.1f} s] {text}\n")
    sys.stdout.flush()


# ---- a checkpoint of fewer layers ----------------------------------------------------------------


def layer_of(name: str) -> int:
    """Return the layer of a tensor; -1 for what belongs to none."""
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        if part == "layers":
            return int(parts[place + 1])
    return -1


def first_layers(checkpoint: Path, folder: Path, count: int) -> Path:
    """Make a folder of links that has only the first layers' files, and a config that says so."""
    config = json.loads((checkpoint / CONFIG).read_text(encoding="utf-8"))
    if config["num_hidden_layers"] == count:
        return checkpoint
    index = json.loads((checkpoint / INDEX).read_text(encoding="utf-8"))
    kept = {name: file for name, file in index["weight_map"].items() if layer_of(name) < count}
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
    folder.mkdir(parents=True)
    for file in sorted(set(kept.values())):
        (folder / file).symlink_to((checkpoint / file).resolve())
    config["num_hidden_layers"] = count
    config["compress_ratios"] = config["compress_ratios"][:count]
    for name, document in ((CONFIG, config), (INDEX, {**index, "weight_map": kept})):
        (folder / name).write_text(json.dumps(document), encoding="utf-8")
    return folder


def read_first_layers() -> None:
    """Let vLLM's loader pass over layers that its config does not have: files can hold both."""
    model = import_module("vllm.models.deepseek_v4").DeepseekV4ForCausalLM
    own = model.load_weights

    def load_weights(self: Any, weights: Iterable[tuple[str, Any]]) -> Any:
        count = self.config.num_hidden_layers
        return own(self, (pair for pair in weights if layer_of(pair[0]) < count))

    model.load_weights = load_weights


def share_plans() -> None:
    """Let all layers of a kind share FlashMLA's plan of a step, as in the whole model.

    vLLM plans once for each kind of layer and group of sliding windows. 43 layers make two groups
    and four plans; of so few layers the groups are so small that every layer would have its own.
    """
    groups: Any = import_module("vllm.v1.core.kv_cache_utils")
    groups._approximate_gcd = lambda values, **_: max(values)  # layers of a group


def without_foreign_warmup() -> None:
    """Leave out what vLLM compiles ahead for the routers of other models."""
    warmup: Any = import_module("vllm.model_executor.warmup.kernel_warmup")
    warmup._warmup_ll_bf16_router_gemm = lambda: None


# ---- an engine -----------------------------------------------------------------------------------


def engine_of(checkpoint: Path, options: Any) -> Any:
    vllm: Any = import_module("vllm")
    lanes = sorted(options.lanes)
    return vllm.LLM(
        model=str(checkpoint), skip_tokenizer_init=True, dtype="bfloat16", kv_cache_dtype="fp8",
        block_size=BLOCK, max_model_len=options.context + BLOCK, max_num_seqs=lanes[-1],
        max_num_batched_tokens=CHUNK, gpu_memory_utilization=SHARE,
        kv_cache_memory_bytes=CACHE_BYTES, enable_prefix_caching=False, async_scheduling=False,
        compilation_config={
            "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": lanes
        },
    )  # fmt: skip


def runner_of(engine: Any) -> Any:
    return engine.collective_rpc(_own_runner)[0]


def _own_runner(worker: Any) -> Any:
    return worker.model_runner


def step_graph(runner: Any, lanes: int) -> tuple[Callable[[], object], int]:
    """Return the replay of the graph for so many tokens, and of how many parts it is."""
    entries = vars(runner.model).get("entries")
    if entries is not None:  # vLLM's breakable graphs
        captured = [e.capture for d, e in entries.items() if d.num_tokens == lanes and e.capture]
        return captured[0].replay, len(captured[0].segments)
    entries = runner.model.concrete_cudagraph_entries
    graphs = [e.cudagraph for d, e in entries.items() if d.num_tokens == lanes and e.cudagraph]
    return graphs[0].replay, 1


@contextmanager
def watched(runner: Any, seen: list[int]) -> Iterator[None]:
    """Run steps without graphs, and count the different experts that each layer's rows choose."""
    place = "vllm.model_executor.layers.fused_moe.router.fused_moe_router"
    routers, dispatcher = import_module(place).FusedMoERouter, runner.cudagraph_dispatcher
    none = import_module("vllm.config").CUDAGraphMode.NONE
    select, dispatch = routers.select_experts, dispatcher.dispatch

    def noting(self: Any, *given: Any, **named: Any) -> Any:
        made = select(self, *given, **named)
        seen.append(int(made[1].unique().numel()))
        return made

    def eagerly(*given: Any, **named: Any) -> Any:
        return dispatch(*given, **(named | {"valid_modes": {none}, "invalid_modes": None}))

    routers.select_experts, dispatcher.dispatch = noting, eagerly
    try:
        yield
    finally:
        routers.select_experts, dispatcher.dispatch = select, dispatch


def replays(replay: Callable[[], object]) -> list[float]:
    """Return seconds of replays, by events."""
    torch: Any = import_module("torch")
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
    for _ in range(WARM):
        replay()
    torch.cuda.synchronize()
    for first, last in pairs:
        first.record()
        replay()
        last.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(last) * 1e-3 for first, last in pairs]


def kernels_of(replay: Callable[[], object]) -> list[tuple[str, int, float]]:
    """Return the kernels of a replay by name: launches, and microseconds in all, largest first."""
    profiler: Any = import_module("torch.profiler")
    torch: Any = import_module("torch")
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as found:
        replay()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = {}
    on_gpu = [event for event in found.events() if event.device_type.name == "CUDA"]
    for event in on_gpu:
        spent.setdefault(event.name, []).append(event.time_range.elapsed_us())
    rows = [(name, len(times), sum(times)) for name, times in spent.items()]
    return sorted(rows, key=lambda row: -row[2])


class Lanes:
    """Requests that decode together, and come to the end of a context."""

    def __init__(self, engine: Any, context: int, most: int, words: int) -> None:
        self.core, self.runner = engine.llm_engine, runner_of(engine)
        self.context, self.most, self.words = context, most, words
        self.lanes = 0
        self.ends: dict[str, int] = {}  # tokens of each request that has computed its prompt

    def prompt(self, lane: int) -> list[int]:
        """Draw a prompt; early lanes decode while the prompts of the others are computed.

        So nearly every chunk is full, the last one too: DeepGEMM compiles for other sizes anew.
        """
        chance = random.Random(lane)
        length = self.context - SPARE - (self.most - lane) * self.context // CHUNK
        return [chance.randrange(self.words) for _ in range(length)]

    def add(self, lanes: int) -> None:
        """Compute prompts until so many lanes decode."""
        vllm: Any = import_module("vllm")
        how = vllm.SamplingParams(
            temperature=0.0, max_tokens=BLOCK, ignore_eos=True, detokenize=False
        )
        for lane in range(self.lanes, lanes):
            prompt = {"prompt_token_ids": self.prompt(lane)}
            self.core.add_request(str(lane), prompt, how)
        self.lanes = lanes
        done = -1
        while len(self.ends) < lanes:
            if len(self.ends) > done:
                done = len(self.ends)
                say(f"{NOW}computing {lanes} prompts of {self.context:,} tokens, {done} are done")
            self.step()

    def step(self) -> None:
        for made in self.core.step():
            tokens = len(made.prompt_token_ids) + len(made.outputs[0].token_ids)
            self.ends[made.request_id] = tokens

    def timed(self) -> dict[str, Any]:
        """Time steps of all lanes, and replays of the last one's graph."""
        lanes, spans = self.lanes, []
        say(f"{NOW}timing {lanes} lanes")
        for _ in range(STEPS):
            begin = time.perf_counter()
            self.step()
            spans.append(time.perf_counter() - begin)
        replay, parts = step_graph(self.runner, lanes)
        seen: list[int] = []
        found = {
            "lanes": lanes, "context": [min(self.ends.values()), max(self.ends.values())],
            "parts": parts, "seconds": replays(replay), "experts": seen,
            "step_seconds": statistics.median(spans),
        }  # fmt: skip
        try:
            with watched(self.runner, seen):
                self.step()
        except Exception as error:  # noqa: BLE001  what was timed stays
            say(f"experts not counted: {error!r}")
        return found


def wait_for(path: Path) -> None:
    end = time.monotonic() + WAITS
    while not path.exists() and time.monotonic() < end:
        time.sleep(LOOKS)


@contextmanager
def turn(path: Path, *, alone: bool) -> Iterator[None]:
    """Use the GPU alone, or beside others that time nothing."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def measured(options: Any) -> None:
    """Measure every number of lanes; then list the kernels of the last one."""
    say(f"{NOW}importing vLLM")
    versions = {name: import_module(name).__version__ for name in ("vllm", "torch")}
    read_first_layers()
    share_plans()
    without_foreign_warmup()
    say(f"{NOW}waiting for the checkpoint")
    wait_for(options.checkpoint)
    folder = options.out.with_suffix(".layers")
    checkpoint = first_layers(options.checkpoint, folder, options.layers)
    words = json.loads((checkpoint / CONFIG).read_text(encoding="utf-8"))["vocab_size"]
    rows: list[dict[str, Any]] = []

    def write() -> None:
        draft = options.out.with_suffix(".draft")
        draft.write_text(json.dumps({"versions": versions, "rows": rows}), encoding="utf-8")
        draft.replace(options.out)

    say(f"{NOW}starting an engine of {options.layers} layers")
    with turn(options.turn, alone=False):
        engine = engine_of(checkpoint, options)
    lanes = Lanes(engine, options.context, max(options.lanes), words)
    for number in sorted(options.lanes):
        with turn(options.turn, alone=False):
            lanes.add(number)
        say(f"{NOW}waiting for the other engine")
        with turn(options.turn, alone=True):
            rows.append({"layers": options.layers, **lanes.timed()})
        write()
        say(str({name: of for name, of in rows[-1].items() if name != "seconds"}))
    # Of the last lanes alone: a graph of fewer reads tables that are of other requests by now. And
    # at the end, since a profiler slows what is timed after it.
    say(f"{NOW}listing kernels")
    with turn(options.turn, alone=True):
        rows[-1]["kernels"] = kernels_of(step_graph(lanes.runner, lanes.lanes)[0])
    write()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--turn", type=Path, metavar="FILE")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # As vLLM sets it for V4, but before this program imports V4's modules, which look at it then.
    os.environ.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    given = parser.parse_args(arguments)
    given.turn = given.turn or given.out.with_suffix(".turn")
    measured(given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
