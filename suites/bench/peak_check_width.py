"""A run of V4-Pro's width judged component by component, in a process of its own.

`python -m degarble.suites.bench.peak_check_width RECIPE [DEVICE]` runs one layer of each type
(window, compressed by 4 and by 128) and both ends at V4-Pro's extents, float32 inside, localises
it, and prints verdict, judged outputs, the worst in units of budget, seconds and peak of resident
memory in bytes. Weights are drawn at each use and not kept. RECIPE is bf16 or nvfp4-experts;
experts then are random codes. DEVICE is cpu, or cuda, where candidate and twin then compute; the
peak of the GPU's memory is printed last.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.localise.localise import localise
from degarble.harness.engine.localise.recorded_run import InMemoryRun
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.layouts import LINEAR
from degarble.harness.formats.number_formats import NVFP4, NibbleOrder, ScaleDirection
from degarble.harness.formats.weight import Weight, WeightEncoding
from degarble.harness.inference.devices import CPU, require_device, run_on_device
from degarble.harness.model.config.config import V4_PRO
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import recipe_named
from degarble.harness.model.types import Dtype, Kind
from degarble.references.binding import BoundModel
from degarble.references.numerics import Mode, Numerics, switches_of
from degarble.suites.bench.peak_full_size import peak_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.harness.model.parameters import Parameter

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
    """Weights by name, made anew whenever one is asked for."""

    def __init__(self, quantised: bool) -> None:
        self._known = {each.name: each for each in parameters(CONFIG)}
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
    how = WeightEncoding(
        NVFP4, CANONICAL, LINEAR, ScaleDirection.DECODE, NibbleOrder.LOW_EVEN, shape
    )
    return Weight(
        codes=codes, block_scale=scales, tensor_scale=torch.tensor(0.25 * width**-0.5), storage=how
    )


def _rounded_otherwise(call: Any, inputs: Any, weights: Any) -> dict[str, Tensor]:
    """One rounding fell on the other side: what is equal to the bit would need no budget."""
    made = {name: each.clone() for name, each in call(inputs, weights).items()}
    for each in made.values():
        first = each.view(-1)[:1]
        first.copy_(torch.nextafter(first, torch.full_like(first, torch.inf)))
    return made


def main(recipe_name: str, device: str = CPU) -> None:
    """Run, localise, print."""
    torch.set_grad_enabled(False)
    start, recipe = time.perf_counter(), recipe_named(recipe_name, CONFIG)
    numerics = Numerics(
        Mode.TWIN, torch.float32, torch.bfloat16, torch.float32, switches_of("official-v4")
    )
    weights = Drawn(recipe_name != "bf16")
    candidate = BoundModel(CONFIG, numerics, weights, recipe)
    for name, call in candidate.calls.items():
        if candidate.bound_to(name)[0].role in PRODUCTS or name == "head":
            candidate.calls[name] = partial(_rounded_otherwise, call)
    twin = BoundModel(CONFIG, replace(numerics), weights, recipe)
    require_device("DEVICE", device)
    for each in (candidate, twin):
        run_on_device(each, device)
    run = InMemoryRun.of(candidate, [PROMPT], 1)
    found = localise(twin, recipe, run)
    worst = max(row.ratio for row in found.rows)
    seconds = time.perf_counter() - start
    told = (found.verdict, len(found.rows), len(found.unjudged), worst, seconds, peak_bytes())
    on_device = (torch.cuda.max_memory_allocated(),) if device != CPU else ()
    sys.stdout.write(" ".join(map(str, told + on_device)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
