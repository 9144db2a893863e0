"""Effects of planted faults, applied to stand-ins: a check names the cause, on any CPU.

The faults themselves are those of cutedsl_faults, of products, experts and around attention, in
kernels' code. Here a stand-in gets the operands that such a kernel would have used, so that naming
the cause needs no GPU. Letters: E experts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from degarble.harness.backends.cutedsl import backend as cutedsl
from degarble.harness.formats.codec import decode_array, encode_array, pack_nibbles
from degarble.harness.formats.layouts import SWIZZLE_128X4, from_layout, to_layout
from degarble.harness.formats.number_formats import E2M1, E4M3
from degarble.harness.formats.quantise import quantise
from degarble.harness.report.verdict import Verdict
from degarble.references.numerics import KeyValueCache
from degarble.suites.backends import cutedsl_cases as cases
from degarble.suites.backends import cutedsl_standin as standin
from degarble.suites.backends import cutedsl_standin_moe as moe
from degarble.suites.backends.cutedsl import cutedsl_faults as faults
from degarble.suites.backends.cutedsl import cutedsl_faults_attention as of_attention
from degarble.suites.backends.cutedsl import cutedsl_faults_experts as experts
from degarble.suites.backends.cutedsl_standin import STAND_INS, StandIn

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    Made = tuple[Tensor, ...]
    Given = dict[str, Any]
    Instead = Callable[[Callable[..., Made], Any, Given], Made]
    Change = Callable[[Tensor], Tensor]

pytestmark = pytest.mark.slow
SHOWN = "FC1 that shows gate and up"
PRODUCTS = (SHOWN, moe.first, moe.second)
PROMPTS = (tuple(range(6, 60)) + tuple(range(9, 63)), (9, 40, 9))  # more rows than a warpgroup has


def _step(true: Callable[..., Made], problem: Any) -> Any:
    """Return what stands for a step of the experts: its stand-in, but for FC1 that shows."""
    return SHOWN if getattr(problem, "shown", False) else true


def _of_product(*of_steps: Any, **changes: Change) -> Instead:
    """Another value of something that is of a product's matrices, in some steps."""

    def instead(true: Callable[..., Made], problem: Any, given: Given) -> Made:
        product = "w2" if true is moe.second else "w13"
        own = {f"{product}_{part}": change for part, change in changes.items()}
        return _given(*of_steps, **own)(true, problem, given)

    return instead


def _given(*of_steps: Any, **changes: Change) -> Instead:
    """Another value of something that a kernel is handed, in some steps or in all calls."""

    def instead(true: Callable[..., Made], problem: Any, given: Given) -> Made:
        if of_steps and _step(true, problem) not in of_steps:
            return true(problem, given)
        changed = {name: change(given[name]) for name, change in changes.items()}
        return true(problem, {**given, **changed})

    return instead


def _made(change: Callable[[Made], Made], *of_steps: Any) -> Instead:
    def instead(true: Callable[..., Made], problem: Any, given: Given) -> Made:
        tensors = true(problem, given)
        return change(tensors) if not of_steps or _step(true, problem) in of_steps else tensors

    return instead


def _quantising(module: Any, other: Callable[..., Any], *of_steps: Any) -> Instead:
    """Codes and scales made in another way."""

    def instead(true: Callable[..., Made], problem: Any, given: Given) -> Made:
        if of_steps and _step(true, problem) not in of_steps:
            return true(problem, given)
        with mock.patch.object(module, "quantise", other):
            return true(problem, given)

    return instead


class Faulty(StandIn):
    """A stand-in of which one kernel does something else."""

    def __init__(self, kernel: str, instead: Instead) -> None:
        super().__init__()
        self._kernel, self._instead = kernel, instead

    def _run(self, kernel: str, problem: Any, tensors: Any) -> Made:
        if kernel.partition(".")[0] != self._kernel:
            made: Made = super()._run(kernel, problem, tensors)
            return made
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        return self._instead(STAND_INS[kernel], problem, given)


# ---- around attention ----------------------------------------------------------------------------


def _another_width(true: Callable[..., Made], problem: Any, given: Given) -> Made:
    return true(replace(problem, scale=2 * problem.scale), given)


def _one_fewer(true: Callable[..., Made], problem: Any, given: Given) -> Made:
    (scores,) = true(problem, given)
    seen = (given["positions"] + 1) // problem.ratio - 1
    return (scores.masked_fill(torch.arange(scores.shape[1]) >= seen[:, None], -torch.inf),)


def _spread(**changes: Change) -> Instead:
    """Change what a spreading is handed; other parts of mHC are the kernel's as well."""
    changed = _given(**changes)
    return lambda true, problem, given: (
        changed(true, problem, given) if problem.part == "post" else true(problem, given)
    )


def _reversed(true: Callable[..., Made], problem: Any, given: Given) -> Made:
    tensors = true(problem, given)
    return (tensors[0].flip(1),) if problem.part == "post" else tensors


def _smallest(scores: Tensor) -> Tensor:
    return torch.where(scores.isneginf(), scores, -scores)


def _coarse(scores: Tensor) -> Tensor:
    """Scores without their last bits: no key of the kernel's is another one's."""
    code, low = scores.view(torch.int32), (1 << 19) - 1
    bits = torch.where(code < 0, code | low, code & ~low)
    return torch.where(scores.isneginf(), scores, bits.view(torch.float32))


def _as_e4m3(scores: Tensor) -> Tensor:
    coarse = scores.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return torch.where(scores.isneginf(), scores, coarse)


def _codes_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 numbers of blocks of 64 and their powers of two, as a cache of FP8 entries has them."""
    blocks = rows[:, :448].float().reshape(len(rows), 7, 64)
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1).clamp(min=1e-4) * (1.0 / 448.0))
    scale = torch.exp2((exponent - (mantissa == 0.5).int()).float())
    return (blocks / scale[..., None]).to(torch.float8_e4m3fn).float(), scale


class Coded(StandIn):
    """Pages of FP8 entries whose blocks are read with each other's scales."""

    def _run(self, kernel: str, problem: Any, tensors: Any) -> Made:
        if kernel == "simt_kv_write" and problem.pages.entry == "fp8":
            self._rows = dict(zip(tensors["slots"].tolist(), tensors["values"], strict=True))
            return (tensors["cache"],)
        if kernel == "simt_kv_read" and problem.pages.entry == "fp8":
            found = [self._rows[slot] for slot in tensors["indices"].tolist()]
            if not found:
                return (torch.empty(0, problem.pages.width, dtype=torch.bfloat16),)
            rows = torch.stack(found)
            codes, scale = _codes_of(rows)
            read = (codes * scale.flip(1)[..., None]).flatten(1).to(rows.dtype)
            return (torch.cat((read, rows[:, 448:]), dim=1),)
        made: Made = super()._run(kernel, problem, tensors)
        return made


def _not_rectified(true: Callable[..., Made], problem: Any, given: Given) -> Made:
    """Every head once more, the other way round."""
    q, weights = given["queries"], given["weights"]
    both = {"queries": torch.cat((q, -q), dim=1), "weights": torch.cat((weights, -weights), dim=1)}
    return true(replace(problem, heads=2 * problem.heads), {**given, **both})


def _one_more(true: Callable[..., Made], problem: Any, given: Given) -> Made:
    return true(problem, {**given, "positions": given["positions"] + problem.ratio})


def _pairs(heads: Tensor) -> Tensor:
    """The dims that are turned, in pairs."""
    tail = heads[..., -64:].unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.cat((heads[..., :-64], tail), dim=-1)


def _neighbours(weights: Tensor) -> Tensor:
    made: Tensor = weights.unflatten(1, (-1, 2)).flip(2).flatten(1)
    return made


def _gates_reversed(true: Callable[..., Made], problem: Any, given: Given) -> Made:
    if problem.part != "all":
        return true(problem, given)
    order = [3, 2, 1, 0, *range(4, 24)]
    changed = {name: given[name][..., order].contiguous() for name in ("products", "base")}
    return true(problem, {**given, **changed})


def _oldest_out(slots: Tensor) -> Tensor:
    made = slots.clone()
    made[:, 0] = -1
    return made


AROUND_ATTENTION: dict[str, Instead] = {
    "positions a place later": _given(positions=lambda x: x + 1),
    "sink counted twice": _given(sink=lambda x: x + math.log(2)),
    "logits scaled by another width": _another_width,
    "window of one less": _given(window_slots=_oldest_out),
    "an entry too late": _one_fewer,
    "smallest scores chosen": _given(scores=_smallest),
    "scores compared as E4M3": _given(scores=_as_e4m3),
    "scores compared coarsely": _given(scores=_coarse),
    "mix the other way round": _spread(mix=lambda x: x.transpose(1, 2).contiguous()),
    "layer without its factor": _spread(post=lambda x: x / 2),
    "streams reversed": _reversed,
    "pairs of queries swapped": _given(heads=_pairs),
    "not transformed": lambda true, problem, given: true(replace(problem, hadamard=False), given),
    "negative products kept": _not_rectified,
    "weights of the neighbouring heads": _given(weights=_neighbours),
    "an entry too early": _one_more,
    "gates of streams reversed": _gates_reversed,
}


@pytest.mark.parametrize("name", [*AROUND_ATTENTION, "scales of blocks reversed"])
def test_what_a_fault_around_attention_does_is_named(tmp_path: Path, name: str) -> None:
    fault = of_attention.ATTENTION_BY_NAME[name]
    kernels = Faulty(fault.kernel, AROUND_ATTENTION[name]) if name in AROUND_ATTENTION else Coded()
    model = cases.write_model(tmp_path, "v4", "nvfp4-full", 1)
    prompts = cases.drawn_prompts(fault.prompts) if fault.prompts else cases.PROMPTS
    conventions = {**cutedsl.CONVENTIONS, "kv_cache": KeyValueCache(fault.cache)}
    with mock.patch.object(cutedsl, "CONVENTIONS", conventions):
        cases.capture_by(
            kernels, model.checkpoint, tmp_path / "run", prompts, new_tokens=2,
            components=f"*{fault.component}",
        )  # fmt: skip
    result = cases.checked(tmp_path / "run", model)
    assert result.verdict is Verdict.DIFFERS
    named = {
        named_fault.id
        for origin in result.origins
        if origin.discrepancy.component.endswith(fault.component) and origin.diagnosed
        for named_fault in origin.diagnosed.named
    }
    assert fault.cause
    assert any(each.startswith(f"{fault.cause}.") for each in named), named


# ---- in products and experts ---------------------------------------------------------------------


def _coded(x: Tensor, codes: Tensor, decode_scale: Tensor) -> Any:
    scale = decode_array(codes, E4M3)[..., None] * decode_scale
    quotients = torch.where(scale > 0, x.unflatten(-1, (-1, 16)) / scale, 0.0).flatten(-2)
    return SimpleNamespace(codes=pack_nibbles(encode_array(quotients, E2M1)), block_scale=codes)


def _by_next(x: Tensor, *how: Any, decode_scale: Tensor) -> Any:
    right = quantise(x, *how, decode_scale=decode_scale).block_scale.int() + 1
    return _coded(x, right.clamp(max=0x7E).to(torch.uint8), decode_scale)


def _by_half(x: Tensor, *_how: Any, decode_scale: Tensor) -> Any:
    amax = x.unflatten(-1, (-1, 16))[..., :8].abs().amax(-1)
    return _coded(x, encode_array(amax / 6 / decode_scale, E4M3), decode_scale)


def _by_one_scale(x: Tensor, *how: Any, decode_scale: Tensor) -> Any:
    return quantise(x, *how, decode_scale=torch.full_like(decode_scale, 0.01))


def _halves(values: Tensor) -> Tensor:
    return torch.cat(values.chunk(2, -1)[::-1], dim=-1).contiguous()


def _swapped(true: Callable[..., Made], problem: Any, given: Given) -> Made:
    if problem.source != "swiglu":
        return true(problem, given)
    return true(problem, {**given, "values": _halves(given["values"])})


def _rows_changed(scales: Tensor) -> Tensor:
    row = torch.arange(len(scales))
    return scales[(row ^ 8).clamp(max=len(scales) - 1)].contiguous()


def _first_rows(tensors: Made) -> Made:
    row = torch.arange(len(tensors[0]))
    return (tensors[0][row - row % 128 + row % 64],)


def _of_first_lane(true: Callable[..., Made], problem: Any, given: Given) -> Made:
    """Sums over what the first of 32 lanes reads: eight numbers of every 256."""
    first = torch.arange(given["x"].shape[1]) // 8 % 32 == 0
    return true(problem, {**given, "x": given["x"] * first})


def _delayed(scales: Tensor) -> Tensor:
    return torch.cat((scales[:, :1], scales[:, :-1]), dim=1).contiguous()


def _before(of_E: Tensor) -> Tensor:
    return torch.cat((of_E[:1], of_E[:-1])).contiguous()


def _other_order(map_: Tensor) -> Tensor:
    return torch.where(map_ > 0, map_ - 1, map_)


def _no_map(true: Callable[..., Made], problem: Any, given: Given) -> Made:
    if true is not moe.order:
        return true(problem, given)
    number, count = torch.arange(len(given["local"])), problem.moe.experts
    local = torch.where(number < count, number, -1).to(torch.int32)
    return true(problem, {**given, "local": local})


def _low_limit(true: Callable[..., Made], problem: Any, given: Given) -> Made:
    return true(replace(problem, moe=replace(problem.moe, limit=0.125)), given)


def _beside(true: Callable[..., Made], problem: Any, given: Given) -> Made:
    tensors = true(problem, given)
    if _step(true, problem) is moe.first:
        codes, scales = tensors
        codes.copy_(codes.unflatten(1, (-1, 2, 8)).flip(2).flatten(1))
        count = codes.shape[1] // 8
        linear = from_layout(scales, SWIZZLE_128X4, len(codes), count)
        changed = linear.unflatten(1, (-1, 2)).flip(2).flatten(1)
        scales.copy_(to_layout(changed.contiguous(), SWIZZLE_128X4))
    return tensors


def _reversed_runs(weight: Tensor) -> Tensor:
    made: Tensor = weight.unflatten(0, (-1, 16)).flip(1).flatten()
    return made


def _exchanged(mix: Tensor) -> Tensor:
    return mix[:, [1, 0, 2, 3]].contiguous()


_BOTH = {"a_decode_scale": torch.square, "b_decode_scale": torch.square}
_NEITHER = {"a_decode_scale": torch.ones_like, "b_decode_scale": torch.ones_like}
_FIRSTS = (SHOWN, moe.first)
IN_PRODUCTS: dict[str, Instead] = {
    "tensor scale twice": _given(**_BOTH),
    "tensor scale left out": _given(**_NEITHER),
    "scaled without a scale": _made(lambda tensors: (tensors[0] * 2,)),
    "scale group of the step before": _given(a_scales=_delayed, b_scales=_delayed),
    "scales of rows changed": _given(a_scales=_rows_changed),
    "sums of lanes not folded": _of_first_lane,
    "rows of the other warpgroup": _made(_first_rows),
    "gate and up": _swapped,
    "norm's weights reversed": _given(weight=_reversed_runs),
    "streams changed": _spread(mix=_exchanged),
    "maximum of half a block": _quantising(standin, _by_half),
    "the next scale": _quantising(standin, _by_next),
    "experts: gate and up changed": _of_product(
        moe.first, **dict.fromkeys(("codes", "scales", "decode_scale"), lambda x: x.flip(1))
    ),
    "experts: scales of the expert before": _of_product(*_FIRSTS, scales=_before),
    "experts: expert before": _of_product(
        *_FIRSTS, **dict.fromkeys(("codes", "scales", "decode_scale", "input_scale"), _before)
    ),
    "experts: routing weight left out after": _given(moe.combine, weights=torch.ones_like),
    "experts: routing weight twice": _given(moe.combine, weights=torch.square),
    "experts: tensor scales twice": _of_product(
        *PRODUCTS, input_scale=torch.square, decode_scale=torch.square
    ),
    "experts: scale of activations left out": _given(
        moe.second, w2_input_scale=torch.ones_like
    ),
    "experts: block beside": _beside,
    "experts: the next scale behind FC1": _quantising(moe, _by_next, moe.first),
    "experts: low limit": _low_limit,
    "experts: expert before in the order": _given(moe.order, local=_other_order),
    "experts: map of experts left out": _no_map,
    "experts: maximum of half a block": _quantising(moe, _by_half, moe.gather),
    "experts: one scale for all experts": _quantising(moe, _by_one_scale, moe.gather),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PRODUCTS)
def test_what_a_fault_in_products_does_is_named(tmp_path: Path, name: str) -> None:
    fault = {**faults.BY_NAME, **experts.EXPERTS_BY_NAME}[name]
    model = cases.write_model(tmp_path, "v4", fault.layout, 1)
    cases.capture_by(
        Faulty(fault.kernel, IN_PRODUCTS[name]), model.checkpoint, tmp_path / "run", PROMPTS,
        new_tokens=2, components=f"*{fault.component}",
    )  # fmt: skip
    result = cases.checked(tmp_path / "run", model)
    assert result.verdict is Verdict.DIFFERS
    own = [
        origin
        for origin in result.origins
        if origin.discrepancy.component.endswith(fault.component)
    ]
    first = {
        origin.diagnosed.named[0].id
        for origin in own
        if origin.diagnosed and origin.diagnosed.named
    }
    assert first, [origin.diagnosed and origin.diagnosed.sentence for origin in own]
    assert fault.cause
    assert all(each.startswith(f"{fault.cause}.") for each in first), first
