"""What recording and judging a run costs: captures, `degarble check`, V4-Pro's width."""

from __future__ import annotations

import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch

from degarble.harness.base.errors import EXIT_AGREES, EXIT_DIFFERS
from degarble.harness.capture import capture as capturing
from degarble.harness.capture.files.writer import CaptureWriter
from degarble.harness.capture.modules import places_by_name, recording
from degarble.harness.capture.recorder import Recorder
from degarble.harness.engine.localise.localise import localise
from degarble.harness.engine.localise.recorded_run import InMemoryRun
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.layouts import LINEAR
from degarble.harness.formats.number_formats import NVFP4, NibbleOrder, ScaleDirection
from degarble.harness.formats.weight import Weight, WeightEncoding
from degarble.harness.inference.devices import CPU, require_device, run_on_device
from degarble.harness.inference.model import open_model
from degarble.harness.model.config.config import V4_PRO
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import recipe_named
from degarble.harness.model.types import Dtype, Kind
from degarble.harness.museum.cases import ModelKey, prepare
from degarble.references import tiny
from degarble.references.binding import BoundModel
from degarble.references.numerics import Mode, Numerics, switches_of
from degarble.suites.bench.machine import in_child
from degarble.suites.bench.runner import (
    Bench,
    Part,
    Reading,
    Table,
    Target,
    call,
    time_over,
)
from degarble.suites.capture.capture_models import Stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from degarble.harness.model.parameters import Parameter

# ---- captures ------------------------------------------------------------------------------------

RATIO = 1.2
WIDTH, LAYERS, TOKENS, IDS = 1024, 16, 512, 1000
PLAIN, CAPTURED = "plain", "captured, inputs and outputs"


class Turn(NamedTuple):
    """One forward pass: seconds of it, seconds until all was on the disk, bytes there."""

    forward: float
    rest: float = 0.0
    nbytes: int = 0


def plain_pass(model: Stack, tokens: torch.Tensor, _folder: Path) -> Turn:
    """The pass alone."""
    return Turn(_timed(model, tokens))


def captured(
    model: Stack, tokens: torch.Tensor, folder: Path, *, statistics_only: bool = False
) -> Turn:
    """Every input and output, to the disk."""
    with CaptureWriter(folder, {}) as writer:
        recorder = Recorder(writer, statistics_only=statistics_only)
        with recording(model, places_by_name(model), recorder):
            forward = _timed(model, tokens)
        begin = time.perf_counter()
        tally = writer.finish()
    return Turn(forward, time.perf_counter() - begin, tally.stored_bytes)


def statistics_alone(model: Stack, tokens: torch.Tensor, folder: Path) -> Turn:
    """Statistics and hashes."""
    return captured(model, tokens, folder, statistics_only=True)


def by_hand(model: Stack, tokens: torch.Tensor, folder: Path) -> Turn:
    """Hooks that clone what a module puts out, and one file at the end."""
    from safetensors.torch import save_file  # noqa: PLC0415  of this arm alone

    seen: dict[str, torch.Tensor] = {}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name and next(module.children(), None) is None:

                def hook(_module: Any, _given: Any, made: Any, name: str = name) -> None:
                    seen[name] = made.detach().clone()

                stack.callback(module.register_forward_hook(hook).remove)
        forward = _timed(model, tokens)
    begin = time.perf_counter()
    folder.mkdir()
    save_file(seen, folder / "all.safetensors")
    nbytes = sum(tensor.nbytes for tensor in seen.values())
    return Turn(forward, time.perf_counter() - begin, nbytes)


ARMS: dict[str, Callable[[Stack, torch.Tensor, Path], Turn]] = {
    PLAIN: plain_pass,
    CAPTURED: captured,
    "statistics only": statistics_alone,
    "hooks and clones of outputs, by hand": by_hand,
}


def _timed(model: Stack, tokens: torch.Tensor) -> float:
    begin = time.perf_counter()
    model(tokens)
    return time.perf_counter() - begin


def turns(options: Any) -> dict[str, list[Turn]]:
    """Run every arm once to warm up, then by turns."""
    width = min(options.size, WIDTH)
    model = Stack(LAYERS, width, 4 * width, IDS)
    tokens = torch.arange(TOKENS)[None] * 37 % IDS
    found: dict[str, list[Turn]] = {name: [] for name in ARMS}
    names = list(ARMS)
    with torch.inference_mode():
        for number in range(options.rounds + 1):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                with tempfile.TemporaryDirectory() as folder:
                    turn = ARMS[name](model, tokens, Path(folder) / "capture")
                if number:
                    found[name].append(turn)
    return found


def capture(options: Any) -> Iterator[Part]:
    """The time is that of the forward pass; the time until all is on disk is listed separately."""
    found = turns(options)
    readings: dict[str, Reading] = {}
    for name, each in found.items():
        seconds = tuple(turn.forward for turn in each)
        readings[name] = Reading(call(name, object), seconds, readings)
    rows = []
    for name, each in found.items():
        rest = statistics.median(turn.rest for turn in each)
        ratio = time_over(PLAIN, "")[1](readings[name])
        size = each[0].nbytes / 1e9
        rows.append(
            (name, f"{readings[name].median:.3f}", ratio, f"{rest:.2f}", f"{size:.2f}")
        )  # fmt: skip
    header = ("arm", "forward, s", "times plain", "then until on the disk, s", "GB")
    yield Table("Forward pass of a toy on the CPU", header, tuple(rows))
    whole = readings[PLAIN].times(CAPTURED)
    yield Target("forward with everything captured, times plain", whole, RATIO, at_least=False)
    yield f"{LAYERS} layers of width {min(options.size, WIDTH)}, {TOKENS} tokens, float32"
    yield f"{options.rounds} rounds, by turns"


# ---- checks --------------------------------------------------------------------------------------

KEY = ModelKey("v4", "nvfp4-full")
RELEASED = Path(tiny.__file__).parent / "v1" / "v4"
SHORT_PROMPT = "anna paints blue"
SPOILT = "layers.2.ffn.shared.w2"
SECONDS = 5.0


class CheckedCapture(NamedTuple):
    """One capture, and the exit status that its check has to have."""

    capture: Path
    status: int


def _swapped(weight: Weight) -> Weight:
    names = [field.name for field in fields(weight) if not field.name.startswith("_")]
    made = {name: getattr(weight, name) for name in names}
    codes = made["codes"]
    return Weight(**made | {"codes": (codes >> 4) | (codes << 4)})


def captured_run(source: Path, folder: Path, *, spoilt: bool) -> Path:
    """Capture a run, healthy or with one component that reads its nibbles the other way."""

    def opened(*args: Any, **named: Any) -> Any:
        model = open_model(*args, **named)
        calls = model.logits_model.bound.calls
        healthy = calls[SPOILT]

        def faulty(inputs: Mapping[str, Any], weights: Mapping[str, Any]) -> Any:
            return healthy(inputs, {name: _swapped(weights[name]) for name in weights})

        if spoilt:
            calls[SPOILT] = faulty
        return model

    with mock.patch.object(capturing, "open_model", opened):
        capturing.capture(source, [SHORT_PROMPT], folder, lambda _streamed: nullcontext())
    return folder


def arms_in(root: Path) -> dict[str, CheckedCapture]:
    """Make the checkpoint and both captures."""
    prepare(root, (KEY,))
    source = root / KEY.folder
    return {
        "healthy run": CheckedCapture(
            captured_run(source, root / "healthy", spoilt=False), EXIT_AGREES
        ),
        "one fault: diagnosed, attributed, shrunk": CheckedCapture(
            captured_run(source, root / "spoilt", spoilt=True), EXIT_DIFFERS
        ),
    }


def seconds_of(arm: CheckedCapture, root: Path) -> float:
    """Run the command once."""
    line = [sys.executable, "-m", "degarble.harness.cli.main", "--quiet", "check", str(arm.capture)]
    line += ["--reference", str(RELEASED), "--json", str(root / f"{arm.capture.name}.json")]
    # As installed: a shell that forbids bytecode files would have every module compiled each time.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    begin = time.perf_counter()
    status = subprocess.run(line, check=False, env=environment).returncode
    seconds = time.perf_counter() - begin
    assert status == arm.status, (arm.capture.name, status)
    return seconds


def check(options: Any) -> Iterator[Part]:
    """The command in a process of its own, as a person starts it, start-up included."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        found: dict[str, list[float]] = {}
        every = arms_in(root)
        for number in range(min(options.rounds, 5) + 1):
            for name, arm in every.items():
                seconds = seconds_of(arm, root)
                if number:  # the first warms caches up
                    found.setdefault(name, []).append(seconds)
    medians = {name: statistics.median(each) for name, each in found.items()}
    rows = tuple((name, f"{median:.2f}") for name, median in medians.items())
    yield Table("`degarble check`, start-up included", ("capture", "seconds"), rows)
    for name, median in medians.items():
        yield Target(f"check of a {name}, seconds", median, SECONDS, at_least=False)
    yield "the trained small V4 in nvfp4-full, 4 layers, a short prompt and 4 new tokens"


# ---- a run of V4-Pro's width ---------------------------------------------------------------------

CONFIG = replace(
    V4_PRO, num_hidden_layers=3, compress_ratios=(0, 4, 128), num_hash_layers=1,
    num_nextn_predict_layers=0,
)  # fmt: skip
PROMPT = (17, 4711)
PRODUCTS = (
    "attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "attn.compressor.proj",
    "attn.indexer.wq_b", "ffn.gate", "ffn.experts.w13", "ffn.experts.w2", "ffn.shared.w13",
    "ffn.shared.w2",
)  # fmt: skip
_DRAWN = 1 << 20  # values that are really drawn; more are the same ones, shifted


class Drawn(Mapping[str, Weight]):
    """Weights by name, drawn again at every look-up."""

    def __init__(self, quantised: bool) -> None:
        self._known = {parameter.name: parameter for parameter in parameters(CONFIG)}
        self._quantised = quantised

    def __getitem__(self, name: str) -> Weight:
        parameter = self._known[name]
        digest = hashlib.sha256(name.encode()).digest()
        chance = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        if self._quantised and parameter.expert is not None and parameter.kind is Kind.LINEAR:
            return _codes(parameter.shape, chance)
        return Weight(value=_value(parameter, chance))

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def _value(parameter: Parameter, chance: torch.Generator) -> Tensor:
    shape, row = parameter.shape, parameter.row
    count = torch.Size(shape).numel()
    if row.dtype is Dtype.I64:
        return (torch.arange(count) % CONFIG.n_routed_experts).reshape(shape)
    noise = torch.randn(min(count, _DRAWN), generator=chance)
    if parameter.kind is Kind.NORM or row.name.endswith("scale"):
        noise = 1.0 + 0.1 * noise
    elif len(shape) > 1 and parameter.kind is not Kind.EMBEDDING:
        noise = noise * shape[-1] ** -0.5
    drawn = noise.to(torch.bfloat16) if row.dtype is Dtype.BF16 else noise
    made = torch.empty(count, dtype=drawn.dtype)
    for number, part in enumerate(made.split(_DRAWN)):
        part.copy_(drawn.roll(number)[: len(part)])
    return made.reshape(shape)


def _codes(shape: tuple[int, ...], chance: torch.Generator) -> Weight:
    height, width = shape
    codes = torch.randint(256, (height, width // 2), generator=chance, dtype=torch.uint8)
    scales = torch.randint(0x28, 0x38, (height, width // 16), generator=chance, dtype=torch.uint8)
    encoding = WeightEncoding(
        NVFP4, CANONICAL, LINEAR, ScaleDirection.DECODE, NibbleOrder.LOW_EVEN, shape
    )
    return Weight(
        codes=codes,
        block_scale=scales,
        tensor_scale=torch.tensor(0.25 * width**-0.5),
        storage=encoding,
    )


def _rounded_otherwise(call: Any, inputs: Any, weights: Any) -> dict[str, Tensor]:
    """One rounding fell on the other side: what is equal to the bit would need no budget."""
    made = {name: each.clone() for name, each in call(inputs, weights).items()}
    for each in made.values():
        first = each.view(-1)[:1]
        first.copy_(torch.nextafter(first, torch.full_like(first, torch.inf)))
    return made


def check_width(options: Any) -> Iterator[Part]:
    """Run one layer of each type and both ends at V4-Pro's extents, and localise them."""
    done = in_child(f"{__name__}:judged_width", options.recipe, options.device)
    verdict, outputs, unjudged, worst, on_device = done.result
    row = (
        options.recipe, options.device, verdict, str(outputs), str(unjudged), f"{worst:.3f}",
        f"{done.seconds:.0f}", f"{done.peak / 1e9:.2f}", f"{on_device / 1e9:.2f}",
    )  # fmt: skip
    header = (
        "recipe", "device", "verdict", "outputs judged", "not judged", "worst, of its budget", "s",
        "peak resident GB", "of the GPU's memory, GB",
    )  # fmt: skip
    yield Table("V4-Pro's width, one layer of each type and both ends", header, (row,))
    yield Target("peak resident bytes", done.peak, 4 << 30, at_least=False)
    yield Target("worst output, of its budget", worst, 1.0, at_least=False)


def judged_width(recipe_name: str, device: str = CPU) -> tuple[str, int, int, float, int]:
    """Return verdict, judged outputs, others, the worst in units of budget, bytes of the GPU."""
    torch.set_grad_enabled(False)
    recipe = recipe_named(recipe_name, CONFIG)
    numerics = Numerics(
        Mode.TWIN, torch.float32, torch.bfloat16, torch.float32, switches_of("official-v4")
    )
    weights = Drawn(recipe_name != "bf16")
    candidate = BoundModel(CONFIG, numerics, weights, recipe)
    for name, component in candidate.calls.items():
        if candidate.bound_to(name)[0].role in PRODUCTS or name == "head":
            candidate.calls[name] = partial(_rounded_otherwise, component)
    twin = BoundModel(CONFIG, replace(numerics), weights, recipe)
    require_device("DEVICE", device)
    for model in (candidate, twin):
        run_on_device(model, device)
    found = localise(twin, recipe, InMemoryRun.from_prompts(candidate, [PROMPT], 1))
    worst = max(row.ratio for row in found.rows)
    on_device = torch.cuda.max_memory_allocated() if device != CPU else 0
    return str(found.verdict), len(found.rows), len(found.unjudged), worst, on_device


BENCHES = {
    "capture": Bench("What a capture costs", capture, ("torch", "safetensors"), page=True),
    "check": Bench("Checking a run", check, ("torch", "numpy", "numba"), page=True),
    "check-width": Bench(
        "a run of V4-Pro's width judged component by component", check_width,
        options={"recipe": ("bf16", "nvfp4-experts"), "device": ("cpu", "cuda")},
        needs=lambda options: "gpu" if options.device == "cuda" else "",
    ),
}  # fmt: skip
