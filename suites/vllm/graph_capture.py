"""Capture decoding inside CUDA graphs on a GPU: torch's own graphs, then those of vLLM.

    python -m degarble.suites.vllm.graph_capture OUT [--judge PYTHON] [--attention NAME]
    python -m degarble.suites.vllm.graph_capture OUT --torch
    python -m degarble.suites.vllm.graph_capture OUT --ours

Prints one line a run, and ends with status 1 if any did not hold. Every run decodes three sequences
in graphs of four rows. Healthy runs have to agree; a fault, planted into loaded weights or only
into what the graphs compute, has to be placed in its component alone; tokens have to be those of
the same engine without a capture. `step` is a decoding step without a capture, `copies` one in
graphs with copies that nobody reads, and `graph` the same of the GPU alone. OUT/graphs.json has it
all. Needs vLLM 0.26, and transformers 5 in the environment of PYTHON. --torch are torch's graphs of
a model that imitates vLLM's, --ours whole layers of V4 by our kernels; both without vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.cutedsl.backend import CONVENTIONS
from degarble.harness.backends.cutedsl.kernels import KernelsOnGpu
from degarble.harness.backends.graph.decoder import Decoder, DecoderLogitsModel
from degarble.harness.backends.graph.matrices import FEW_ROWS, TILES
from degarble.harness.capture.capture import CaptureSettings
from degarble.harness.capture.decoding import decoding_captured, layer_facts
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.options import CaptureRequest
from degarble.harness.cli.values import settings_here
from degarble.harness.inference.model import open_model
from degarble.harness.vllm import capture as vllm_capture
from degarble.harness.vllm.graphs import GRAPH_OPTIONS
from degarble.references.model import Sequence as ModelSequence
from degarble.suites.backends import cutedsl_cases
from degarble.suites.support.graphed_engine import GraphedWorker
from degarble.suites.vllm.any_model import (
    MEMORY,
    NAME,
    RUNS,
    VARIABLE,
    LoaderRun,
    columns_turned,
    entry_point,
    told,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

_SELF = "degarble.suites.vllm.graph_capture"
PROMPTS = ((5, 17, 99, 3, 42, 8, 100, 301, 77), (7, 7, 1, 90), (11, 12))
NEW_TOKENS = 8
_TIMED, _REPEATS, _REPLAYS = 64, 5, 200
_CACHE = 256 << 20  # bytes of the KV cache: several engines share the GPU
_TOGETHER = 5
_COLUMNS = RUNS["columns"].blamed
_OURS = "ours"
TORCH_RUNS = {
    "torch healthy": LoaderRun("llama"),
    "torch columns": LoaderRun("llama", columns_turned, _COLUMNS),
    "torch columns in graphs alone": LoaderRun("llama", columns_turned, _COLUMNS),
}
VLLM_RUNS = {
    "llama": LoaderRun("llama"),  # vLLM's newer model runner
    "qwen3_moe": LoaderRun("qwen3_moe"),  # the older one
    "llama FP8_DYNAMIC": LoaderRun("llama FP8_DYNAMIC"),
    "llama NVFP4A16": LoaderRun("llama NVFP4A16"),
    "columns": RUNS["columns"],
    "gate and up": RUNS["gate and up"],
}


# --------------------------------------------------------------------------------------------------
# Torch's graphs, of a model that imitates vLLM's


@contextmanager
def _planted(model: nn.Module, plant: Callable[[nn.Module], None]) -> Iterator[None]:
    """Plant a fault for a while, in weights of another address."""
    kept = {name: parameter.data for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    try:
        plant(model)
        yield
    finally:
        # Graphs that were recorded in here go on to read the faulty copies.
        model.faulty = [p.data for p in model.parameters()]  # type: ignore[assignment]
        for name, parameter in model.named_parameters():
            parameter.data = kept[name]


def capture_torch(
    checkpoint: Path,
    source: nn.Module,
    out: Path,
    name: str,
    graph_class: Any = torch.cuda.CUDAGraph,
    device: str = "cuda",
) -> dict[str, Any]:
    """Capture one run of the imitation, and say whether its tokens stayed what they were."""
    run = TORCH_RUNS[name]
    worker = GraphedWorker(str(checkpoint), source, graph_class, device)
    runner, own = worker.model_runner, worker.model_runner.capture_model
    if run.plant is not None and name.endswith("alone"):

        def recorded() -> None:
            with _planted(runner.inner, run.plant):
                own()

        vars(runner)["capture_model"] = recorded
    elif run.plant is not None:
        run.plant(runner.inner)
    before = worker.generate_ids(PROMPTS, NEW_TOKENS)
    runner.forget()
    vllm_capture.GRAPH_CLASS = graph_class
    state = vllm_capture.capture_vllm(
        checkpoint, PROMPTS, out, CaptureSettings(new_tokens=NEW_TOKENS, graph_bytes=1 << 24),
        lambda **_: worker,
    )  # fmt: skip
    runner.forget()
    same = before == worker.generate_ids(PROMPTS, NEW_TOKENS)
    return {"replayed": state["replayed"], "same": same}


# --------------------------------------------------------------------------------------------------
# vLLM, in a process of its own


def _step(engine: Any) -> float:
    """Return milliseconds of a decoding step of four sequences: the best of a few runs."""
    prompts = [[n + 1, 2, 3] for n in range(4)]
    found = []
    for _ in range(_REPEATS):
        spans = []
        for new in (1, _TIMED + 1):  # the first step computes the prompts
            begin = time.perf_counter()
            engine.generate_ids(prompts, new)
            spans.append(time.perf_counter() - begin)
        found.append((spans[1] - spans[0]) / _TIMED * 1e3)
    return min(found)


def _graph_time(worker: Any) -> float:
    """Return microseconds that the GPU needs for the graph of four rows."""
    runner = worker.model_runner
    manager = vars(runner).get("cudagraph_manager")
    if manager is not None:
        graph = next(g for desc, g in manager.graphs.items() if desc.num_tokens == 4)
    else:
        entries = runner.model.concrete_cudagraph_entries
        graph = next(e.cudagraph for desc, e in entries.items() if desc.num_tokens == 4)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    for _ in range(_REPLAYS):
        torch.cuda.CUDAGraph.replay(graph)  # past our own watching of this one
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / _REPLAYS * 1e3


def capture_in_vllm(checkpoint: Path, out: Path, attention: str | None, *, timed: bool) -> None:
    """Decode in vLLM's graphs without a capture, in one, and after it; write what came of it."""
    asked = {} if attention is None else {"attention_backend": attention}
    engine = vllm_capture._engine()(
        model=str(checkpoint), worker_extension_cls=vllm_capture.EXTENSION, dtype="bfloat16",
        compilation_config=GRAPH_OPTIONS, max_model_len=512, max_num_seqs=8,
        gpu_memory_utilization=MEMORY, kv_cache_memory_bytes=_CACHE,
        enable_prefix_caching=False, **asked,
    )  # fmt: skip
    prompts = [list(prompt) for prompt in PROMPTS]
    facts: dict[str, Any] = {"runner": type(_runner(engine)).__module__}

    def measure(name: str) -> None:
        if timed:
            facts[name] = {"step": _step(engine), "graph": engine.collective_rpc(_graph_time)[0]}

    tokens = engine.generate_ids(prompts, NEW_TOKENS)
    measure("before")
    request = {"count": len(prompts), "max_bytes": 1 << 30, "seconds": 3600}
    begin = time.perf_counter()
    spec = json.dumps({"folder": str(out), "asked": request})
    replies = engine.collective_rpc("degarble_capture_open", args=(spec,))
    vllm_capture._require(replies)
    facts |= {"opened_in": time.perf_counter() - begin, "graphs": replies[0]["graphs"]}
    captured = engine.generate_ids(prompts, NEW_TOKENS)
    measure("copies")  # the capture has its requests: these are not read
    begin = time.perf_counter()
    replies = engine.collective_rpc("degarble_capture_close")
    facts["closed_in"] = time.perf_counter() - begin
    vllm_capture._require(replies)
    measure("after")
    facts["same"] = tokens == captured == engine.generate_ids(prompts, NEW_TOKENS)
    facts |= {name: replies[0][name] for name in ("replayed", "calls", "unseen")}
    vllm_capture.joined(checkpoint, out, replies[0])
    out.with_suffix(".json").write_text(json.dumps(facts))


def _runner(engine: Any) -> Any:
    return engine.collective_rpc(_own_runner)[0]


def _own_runner(worker: Any) -> Any:
    return worker.model_runner


# --------------------------------------------------------------------------------------------------
# Whole layers of V4 by our kernels


def norm_moved(decoder: Decoder) -> None:
    """Move the weights of a norm in layer 1 by one."""
    weight = decoder.layers[1].attn.q_norm.weight
    weight.copy_(weight.roll(1))


def factor_doubled(decoder: Decoder) -> None:
    """Double what folds both tensor scales of a product of few rows in layer 1."""
    factor = decoder.layers[1].attn.wq_b.factor
    assert factor is not None, "the graph was built for few rows"
    factor.mul_(2)


OUR_RUNS = {
    "ours healthy": LoaderRun(_OURS),
    "ours norm": LoaderRun(_OURS, norm_moved, ("attn.q_norm",)),
    "few rows healthy": LoaderRun(_OURS),
    "few rows factor": LoaderRun(_OURS, factor_doubled, ("attn.wq_b",)),
}


def write_ours(out: Path) -> None:
    """Write a small V4 in NVFP4."""
    config = replace(cutedsl_cases.CONFIG_V4, index_n_heads=64)
    model = cutedsl_cases.write_model(out / "written", "v4", "nvfp4-full", 5, config)
    model.checkpoint.rename(out / _OURS)


def capture_ours(out: Path, name: str, kernels: Any) -> dict[str, Any]:
    """Capture steps of two sequences, of which one begins later; a third lane rests."""
    run, place = OUR_RUNS[name], _place(out, name)
    with open_model(out / _OURS, switches=CONVENTIONS) as model, torch.inference_mode():
        bound, on_gpu = model.logits_model.bound, kernels.device.type == "cuda"
        products = FEW_ROWS if name.startswith("few rows") else TILES
        decoder = Decoder.from_model(kernels, bound, model.recipe, 3, 192, products=products)
        if run.plant is not None:
            run.plant(decoder)
        facts = layer_facts(out / _OURS, model, CaptureSettings(backend="cutedsl"))
        facts_of_run: dict[str, Any] = {"runner": "whole layers"}
        if on_gpu:
            decoder.capture(speaks=False)
            facts_of_run["before"] = _ours_timed(decoder)
        plain = _ours_spoken(bound, decoder)
        with decoding_captured(decoder, model.config, place, CaptureRequest(nbytes=1 << 30), facts):
            captured = _ours_spoken(bound, decoder)
            if on_gpu:
                decoder.feed([None] * 3, [0] * 3)
                facts_of_run["copies"] = _ours_timed(decoder)
        if on_gpu:
            facts_of_run["after"] = _ours_timed(decoder)
        same = torch.equal(plain, captured) and torch.equal(plain, _ours_spoken(bound, decoder))
    replayed = Capture.open(place).facts.get("replayed", [])
    return {"replayed": len(replayed), "same": same, **facts_of_run}


def _ours_spoken(bound: Any, decoder: Decoder) -> torch.Tensor:
    speaker, first, second = DecoderLogitsModel(bound, decoder), ModelSequence(), ModelSequence()
    made = []
    for number in range(NEW_TOKENS):
        live = [first] if number < 2 else [first, second]
        new = [torch.tensor([9 + 3 * number + n]) for n in range(len(live))]
        made.append(speaker.next_logits(live, new).cpu())
    return torch.cat(made)


def _ours_timed(decoder: Decoder) -> dict[str, float]:
    graph = decoder._graph
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(_REPLAYS):
        torch.cuda.CUDAGraph.replay(graph)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / _REPLAYS
    return {"step": seconds * 1e3, "graph": seconds * 1e6}


# --------------------------------------------------------------------------------------------------
# All runs, and their table


def _place(out: Path, name: str) -> Path:
    return out / f"run-{name.replace(' ', '-')}"  # models are written beside them


def _vllm_run(
    name: str, out: Path, attention: Sequence[str], timed: Sequence[str]
) -> dict[str, Any]:
    run, place = VLLM_RUNS[name], _place(out, name)
    paths = os.pathsep.join([str(out / "plants"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "VLLM_PLUGINS": NAME, "PYTHONPATH": paths, "VLLM_NO_USAGE_STATS": "1",
        VARIABLE: name if run.plant is not None else "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }  # fmt: skip
    command = [sys.executable, "-m", _SELF, str(out), *attention, *timed]
    with place.with_suffix(".log").open("w") as log:
        ran = subprocess.run(
            [*command, "--capture", str(out / run.model), str(place)],
            env=environment, stdout=log, stderr=log, check=False,
        )  # fmt: skip
    if ran.returncode:
        last = place.with_suffix(".log").read_text().splitlines()[-40:]
        sys.stdout.write("".join(f"{name}: {line[:300]}\n" for line in last))
        return {"error": f"see {place.with_suffix('.log')}", "same": False, "replayed": 0}
    found: dict[str, Any] = json.loads(place.with_suffix(".json").read_text())
    return found


def _judged(
    out: Path, judge: str, runs: dict[str, LoaderRun], found: dict[str, dict[str, Any]]
) -> int:
    """Judge every capture, print a line for each, and return 1 if one did not hold."""

    def one(name: str) -> dict[str, Any]:
        if "error" in found[name]:
            return {"verdict": "NOT RUN", "origins": []}
        return told(_place(out, name), out / runs[name].model, judge)

    with ThreadPoolExecutor(_TOGETHER) as pool:
        documents = dict(zip(found, pool.map(one, found), strict=True))
    every = True
    for name, facts in found.items():
        document = documents[name]
        held = runs[name].holds(document) and facts["same"] and facts["replayed"] > 0
        every &= held
        facts |= {"held": held, "document": document}
        blamed = ", ".join(f"{o['layer']}.{o['component']}" for o in document["origins"])
        words = [
            "held" if held else "DID NOT HOLD", name, str(document["verdict"]), blamed,
            f"{facts['replayed']} of {NEW_TOKENS} steps replayed",
            "same tokens" if facts["same"] else "OTHER TOKENS", facts.get("runner", ""),
            str(document.get("error", "")), *_times(facts),
        ]  # fmt: skip
        sys.stdout.write(" | ".join(word for word in words if word) + "\n")
        sys.stdout.flush()
    (out / "graphs.json").write_text(json.dumps(found, indent=1))
    return int(not every)


def _times(facts: dict[str, Any]) -> Iterator[str]:
    if "opened_in" in facts:
        seconds = f"{facts['opened_in']:.1f} s, closed in {facts['closed_in']:.2f} s"
        yield f"{facts['graphs']} graphs, opened in {seconds}"
    if "before" in facts:
        for what, unit in (("step", "ms"), ("graph", "us")):
            plain, copies, after = (facts[n][what] for n in ("before", "copies", "after"))
            ratio = f"{copies / plain:.2f}x, after it {after / plain:.2f}x"
            yield f"{what} {plain:.3f} {unit}, copies {copies:.3f} {unit}: {ratio}"


def _written(out: Path, judge: str, models: set[str]) -> None:
    """Write checkpoints, each in a process that has transformers."""
    todo = [name for name in sorted(models) if not (out / name).exists()]
    line = [judge, "-m", "degarble.suites.vllm.any_model", "--write"]
    with ThreadPoolExecutor(_TOGETHER) as pool:
        list(pool.map(lambda n: subprocess.run([*line, n, str(out / n)], check=True), todo))


def in_torch(out: Path, judge: str) -> int:
    """Prove torch's own graphs; return 1 if anything did not hold."""
    out.mkdir(parents=True, exist_ok=True)
    source = write("llama", out / "llama")
    found = {
        name: capture_torch(out / "llama", source, _place(out, name), name) for name in TORCH_RUNS
    }
    return _judged(out, judge, TORCH_RUNS, found)


def in_ours(out: Path, judge: str, kernels: Any = None) -> int:
    """Prove whole layers of our kernels; return 1 if anything did not hold."""
    out.mkdir(parents=True, exist_ok=True)
    write_ours(out)
    given = kernels or KernelsOnGpu(settings_here())
    found = {name: capture_ours(out, name, given) for name in OUR_RUNS}
    return _judged(out, judge, OUR_RUNS, found)


def in_vllm(out: Path, judge: str, attention: Sequence[str], only: Sequence[str]) -> int:
    """Prove vLLM's graphs; return 1 if anything did not hold."""
    out.mkdir(parents=True, exist_ok=True)
    runs = {name: run for name, run in VLLM_RUNS.items() if not only or name in only}
    entry_point(out / "plants")
    _written(out, judge, {run.model for run in runs.values()})
    first, *others = runs
    found = {first: _vllm_run(first, out, attention, ("--timed",))}  # alone on the GPU
    work = partial(_vllm_run, out=out, attention=attention, timed=())
    with ThreadPoolExecutor(_TOGETHER) as pool:
        found |= dict(zip(others, pool.map(work, others), strict=True))
    return _judged(out, judge, runs, found)


def main() -> int:
    """Run one step, or all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--judge", metavar="PYTHON", default=sys.executable)
    parser.add_argument("--attention", metavar="NAME", help="backend of vLLM, as TRITON_ATTN")
    parser.add_argument("--only", metavar="RUN", action="append", default=[])
    parser.add_argument("--torch", action="store_true", help="torch's graphs alone, without vLLM")
    parser.add_argument("--ours", action="store_true", help="our kernels' graphs, without vLLM")
    parser.add_argument("--timed", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--capture", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.capture:
        checkpoint, folder = map(Path, asked.capture)
        capture_in_vllm(checkpoint, folder, asked.attention, timed=asked.timed)
        return 0
    attention = ("--attention", asked.attention) if asked.attention else ()
    out = asked.out.resolve()
    if asked.torch or asked.ours:
        return in_torch(out, asked.judge) if asked.torch else in_ours(out, asked.judge)
    return in_vllm(out, asked.judge, attention, asked.only)


if __name__ == "__main__":
    sys.exit(main())
