"""Check V4-Flash, V4-Pro or V3.2 at full width: seconds and bytes a layer, and what follows.

    python -m degarble.suites.campaigns.size.full_size prepare --model v4-pro --device cuda
    python -m degarble.suites.campaigns.size.full_size layers --model v4-pro --device cuda
    python -m degarble.suites.campaigns.size.full_size commands --model v4-pro \
        --run="--device cuda:0 --workers 1" --run="--device cuda:0,1"

`prepare` writes a synthetic checkpoint by its seed, with as many layers as the disk holds, a
capture of it, and one of its first layer and both ends. `layers` judges it in this process on one
thread, whole and by `--screen`, and projects. `commands` times whole commands on both captures:
what more layers take has no start in it. It compares their JSON. The reference has no manifest,
since what would be hashed is the same in both. Nothing else should run.

The candidate of `--candidate nudged` computes as the twin does, and one number of every product and
function falls on the other side: without any difference no budget would have to be derived.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.capture import capture as capturing
from degarble.harness.capture.capture import CaptureSettings
from degarble.harness.capture.options import ENDS, CaptureFilter
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.commands.check.check import CheckRun, CheckSettings
from degarble.harness.engine.localise.localise import During, localise
from degarble.harness.inference.model import one_thread
from degarble.harness.model.config.config import V3_2, V4_FLASH, V4_PRO, V4Config
from degarble.harness.model.parameters import parameters
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MODELS: Mapping[str, Any] = {"v4-flash": V4_FLASH, "v4-pro": V4_PRO, "v3.2": V3_2}
LAYOUT = "nvfp4-experts"
GPUS = 8
_FEW = 1  # layers of the small capture, and the ends
_SPARE = 6 << 30  # bytes of the disk that are left, the capture's among them
_ENDS = "embedding and head"
_NUDGED = (
    "wq_a", "wq_b", "wkv", "wkv_a", "wo", "wo_a", "wo_b", "proj", "gate", "w13", "w2", "head",
    "norm", "attend", "act", "combine",
)  # fmt: skip


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def patch(candidate: Any) -> None:
    """Let one number of a component's outputs fall on the other side."""
    for name in candidate.components:
        if name.rpartition(".")[2] in _NUDGED:
            candidate.components[name] = partial(_nudged, candidate.components[name])


def _nudged(call: Any, inputs: Any, weights: Any) -> dict[str, Any]:
    made = {name: each.clone() for name, each in call(inputs, weights).items()}
    for each in made.values():
        if each.is_floating_point() and each.numel():
            first = each.view(-1)[:1]
            after = torch.nextafter(first, torch.full_like(first, torch.inf))
            # Nothing rounds a sum of zeros to another number.
            first.copy_(torch.where(first == 0, first, after))
    return made


def cut(config: Any, layers: int, experts: int = 0) -> Any:
    """Return a config of so many layers, one of each type first, at full width."""
    fewer: dict[str, Any] = {"n_routed_experts": experts} if experts else {}
    if not isinstance(config, V4Config):
        return replace(
            config, num_hidden_layers=layers, first_k_dense_replace=1, num_nextn_predict_layers=0,
            **fewer,
        )  # fmt: skip
    kinds = list(dict.fromkeys(config.compress_ratios[: config.num_hidden_layers]))
    most = kinds[-2:]  # the first layers of V4-Flash have no compressor
    ratios = [*kinds[:-2], *most * layers][:layers]
    return replace(
        config, num_hidden_layers=layers, compress_ratios=tuple(ratios), num_hash_layers=1,
        num_nextn_predict_layers=0, **fewer,
    )  # fmt: skip


def layer_type(config: Any, layer: int) -> str:
    """Name the type of a layer."""
    if isinstance(config, V4Config):
        return f"ratio {config.compress_ratios[layer]}"
    return "dense" if layer < config.first_k_dense_replace else "experts"


def layer_bytes(config: Any) -> int:
    """Return about how many bytes the largest layer has on the disk: 4.5 bits a value."""
    sizes: dict[str, int] = defaultdict(int)
    for parameter in parameters(config):
        wide = 4.5 if parameter.expert is not None else 16
        sizes[parameter.block.prefix if parameter.block else ""] += int(
            prod(parameter.shape) * wide / 8
        )
    return max(size for block, size in sizes.items() if block)


def prepared(folder: Path, given: argparse.Namespace) -> None:
    """Write checkpoint and capture."""
    config = MODELS[given.model]
    size = layer_bytes(cut(config, 2, given.experts))
    folder.mkdir(parents=True, exist_ok=True)
    holds = max(2, (shutil.disk_usage(folder).free - _SPARE) // size)
    layers = min(given.layers, holds)
    if layers < given.layers:
        say(f"the disk holds {layers} layers of {size / 1e9:.1f} GB")
    config = cut(config, layers, given.experts)
    begun = time.monotonic()
    model = Synthetic(config, LAYOUT, seed=given.seed)
    write_checkpoint(folder / "model", model, shards=given.workers * 3, workers=given.workers)
    seconds = time.monotonic() - begun
    written = sum(file.stat().st_size for file in (folder / "model").iterdir())
    say(f"written: {written / 1e9:.1f} GB in {seconds:.0f} s, {layers} layers")
    chance = random.Random(given.seed)
    prompt = tuple(chance.randrange(1, 500) for _ in range(given.tokens))
    shutil.rmtree(folder / "capture", ignore_errors=True)
    nudged = given.candidate == "nudged"
    settings = CaptureSettings(
        new_tokens=2, device=given.device, backend="torch" if nudged else given.candidate,
        patch=Path(__file__) if nudged else None,
    )  # fmt: skip
    begun = time.monotonic()
    model_folder, watch = folder / "model", lambda _: nullcontext()
    capturing.capture(model_folder, [prompt], folder / "capture", watch, settings)
    say(f"captured by {given.candidate}: {time.monotonic() - begun:.0f} s")
    few = replace(settings, wanted=CaptureFilter.from_options(f"0-{_FEW - 1},{ENDS}"))
    shutil.rmtree(folder / "few", ignore_errors=True)
    capturing.capture(model_folder, [prompt], folder / "few", watch, few)
    (model_folder / "manifest.json").unlink(missing_ok=True)


class LayerCosts:
    """Seconds and bytes of a check, by layer; `named` is called as each component begins."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.bytes: dict[str, int] = defaultdict(int)
        self.components: dict[str, float] = defaultdict(float)
        self._name, self._begun = "", 0.0
        self._seen: set[str] = set()

    def named(self, name: str) -> None:
        """Count what has passed for the component before."""
        now = time.monotonic()
        if self._name:
            self.seconds[_block(self._name)] += now - self._begun
            self.components[self._name] += now - self._begun
        self._name, self._begun = name, now
        self._seen.clear()

    def read(self, size: int, name: str) -> None:
        """Count the bytes of a weight, once a component."""
        if name not in self._seen:
            self._seen.add(name)
            self.bytes[_block(name)] += size


def _block(name: str) -> str:
    first, _, rest = name.partition(".")
    return f"layers.{rest.partition('.')[0]}" if first == "layers" else _ENDS


def layer_costs(folder: Path, device: str, *, screen: bool) -> tuple[Any, LayerCosts, str]:
    """Check in this process on one thread, as a worker does."""
    costs = LayerCosts()
    settings = CheckSettings(folder / "capture", folder / "model", device=device, screen=screen)
    with one_thread(), CheckRun(settings, verify=False) as run, one_thread():
        for bound in (run.twin, run.reference):
            bound.weights.on_read = costs.read  # type: ignore[attr-defined]  # they are streamed
        begun = time.monotonic()
        during = During(costs.named, screen=screen)
        found = localise(run.twin, run.recipe, run.capture, run.reference, during)
        costs.named("")
        say(f"judged in {time.monotonic() - begun:.1f} s, screen: {screen}")
    worst = max(row.ratio for row in found.rows if row.ratio == row.ratio)
    words = f"{found.verdict}, {len(found.rows)} outputs, worst {worst:.3f} of its budget"
    return run.twin.config, costs, words


def projected(config: Any, model: Any, costs: LayerCosts) -> tuple[float, float]:
    """Return seconds and bytes of all layers of a model: the mean of a type, times its layers."""
    seconds: dict[str, list[float]] = defaultdict(list)
    read: dict[str, list[int]] = defaultdict(list)
    for layer in range(config.num_hidden_layers):
        kind = layer_type(config, layer)
        seconds[kind].append(costs.seconds[f"layers.{layer}"])
        read[kind].append(costs.bytes[f"layers.{layer}"])
    say("| type | layers here | s a layer | GB read a layer | layers of the model |")
    say("| --- | --- | --- | --- | --- |")
    total, size = costs.seconds[_ENDS], float(costs.bytes[_ENDS])
    for kind, found in seconds.items():
        numbers = range(model.num_hidden_layers)
        count = sum(layer_type(model, number) == kind for number in numbers)
        each, own = sum(found) / len(found), sum(read[kind]) / len(found)
        total, size = total + count * each, size + count * own
        say(f"| {kind} | {len(found)} | {each:.2f} | {own / 1e9:.2f} | {count} |")
    say(f"| {_ENDS} | | {costs.seconds[_ENDS]:.2f} | {costs.bytes[_ENDS] / 1e9:.2f} | |")
    return total, size


def layers(folder: Path, given: argparse.Namespace) -> int:
    """Print costs by layer type, and the projection."""
    model = MODELS[given.model]
    for screen in (False, True):
        config, costs, words = layer_costs(folder, given.device, screen=screen)
        say(f"\n{given.model}, {given.device}, {'--screen' if screen else 'whole'}: {words}")
        for layer in range(config.num_hidden_layers):
            say(f"layers.{layer}: {costs.seconds[f'layers.{layer}']:.2f} s")
        slowest = sorted(costs.components.items(), key=lambda pair: -pair[1])[: given.slowest]
        say("; ".join(f"{name} {seconds:.2f}" for name, seconds in slowest))
        total, size = projected(config, model, costs)
        longest = max(costs.components.values())
        several = max(total / GPUS, longest)
        say(f"projected: ends + sum over types of layers x s = {total:.0f} s, {size / 1e9:.0f} GB")
        say(f"on {GPUS} GPUs: max(that / {GPUS}, the slowest component) = {several:.0f} s + start")
    return 0


def timed(folder: Path, capture: str, options: str) -> tuple[float, bytes | None]:
    """Return the seconds of a command, and its JSON; None where it has written none."""
    result = folder / "found.json"
    result.unlink(missing_ok=True)
    known = ("check", folder / capture, "--reference", folder / "model")
    line = [sys.executable, "-m", "degarble.harness.cli.main", *map(str, known), *options.split()]
    begun = time.monotonic()
    done = subprocess.run([*line, f"--json={result}"], check=False, capture_output=True)
    seconds = time.monotonic() - begun
    if not result.exists():
        say(done.stderr.decode()[-2000:])
        return seconds, None
    return seconds, result.read_bytes()


def commands(folder: Path, runs: Sequence[str]) -> int:
    """Print the seconds of whole commands; their JSON has to be equal."""
    count = Checkpoint.open(folder / "model").config["num_hidden_layers"]
    results: dict[bool, set[bytes]] = defaultdict(set)
    first = 0.0
    say("| options | s | one layer, s | s for one more | of the first | verdict |")
    say("| --- | --- | --- | --- | --- | --- |")
    for options in runs:
        start, _ = timed(folder, "few", options)
        seconds, found = timed(folder, "capture", options)
        if found is None:
            return 1
        each = (seconds - start) / (count - _FEW)
        first = first or each
        results["--screen" in options].add(found)
        verdict = json.loads(found)["verdict"]
        numbers = f"{seconds:.1f} | {start:.1f} | {each:.2f} | {first / each:.2f}x"
        say(f"| {options} | {numbers} | {verdict} |")
    equal = all(len(each) == 1 for each in results.values())
    say(f"same JSON: {equal}")
    return int(not equal)


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description="degarble check at full width")
    parser.add_argument("what", choices=("prepare", "layers", "commands"))
    parser.add_argument("--model", choices=MODELS, default="v4-pro")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--experts", type=int, default=0, help="fewer experts than the model has")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--candidate", default="nudged", choices=("nudged", "cutedsl"))
    parser.add_argument("--workers", type=int, default=1, help="processes that write")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--slowest", type=int, default=12)
    parser.add_argument("--run", action="append", help="options of the check")
    parser.add_argument("--out", type=Path, default=Path("out/campaigns/full_size"))
    given = parser.parse_args()
    folder = given.out / given.model
    if given.what == "prepare":
        prepared(folder, given)
        return 0
    if given.what == "layers":
        return layers(folder, given)
    return commands(folder, given.run or ["--workers 1"])


if __name__ == "__main__":
    sys.exit(main())
