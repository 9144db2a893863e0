"""Plant faults in the grouped experts' code, for `capture --backend cutedsl` to show.

They are the faults of suites/kernels/moe/moe_faults.py whose effect a small model shows, and faults
in the order of rows, in their quantisation and in warps without rows. The kernel's own suite plants
what needs several tiles a thread block or different scales of gate and up, and what could make a
kernel read out of bounds.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.runtime.modules import module_of
from degarble.kernels.runtime.targets import SM90A
from degarble.suites.backends.cutedsl.cutedsl_faults import SHORT, Fault
from degarble.suites.kernels.moe import moe_faults

_PRODUCTS, _ROWS = "sm90_moe_nvfp4", "simt_moe_rows"
_WORDS, _EPILOGUE = (
    "degarble.kernels.primitives.device_words",
    "degarble.kernels.moe.sm90_moe_nvfp4",
)
# Tiles of 64 rows, whose functions the faults are in, answer them all.
_OF_64_ROWS = ("degarble.kernels.moe.problem", "TACTICS", {SM90A.name: (moe_faults.OF_64_ROWS,)})


def _twice(true: Any, groups: Any, expert: Any, parts: int) -> Any:
    return tuple((exact, ops.multiply_rn(s, s)) for exact, s in true(groups, expert, parts))


def _scale_of_activations_left_out(_true: Any, groups: Any, expert: Any, parts: int) -> Any:
    module = import_module(module_of(_PRODUCTS))
    number = import_module("cutlass").Float32
    of_b = (number(groups.scale_b[expert * parts + part]) for part in range(parts))
    return tuple((module.stages.RESTORE, each) for each in of_b)


def _neighbour(true: Any, chosen: Any, local: Any, slot: Any, extents: Any) -> Any:
    found = true(chosen, local, slot, extents)
    return ops.select(found > 0, found - 1, found)


def _map_left_out(true: Any, chosen: Any, local: Any, slot: Any, extents: Any) -> Any:
    slots, routed, experts, mapped = extents
    return true(chosen, local, slot, (slots, routed, experts, mapped * 0))


def _half(true: Any, words: Any) -> Any:
    return true(words[: len(words) // 2])


def _next_code(true: Any, amax: Any, share: Any) -> Any:
    return ops.minimum(true(amax, share) + 1, 0x7E)  # 0x7F would be a NaN


def _other_rows(true: Any, groups: Any, first: Any) -> Any:
    return import_module("cutlass").Int32(true(groups, first)) == 0


def _block_beside(true: Any, outlet: Any, row: Any, block: Any, buffer: Any) -> Any:
    return true(outlet, row, block ^ 1, buffer)


def _scale_of_first(true: Any, decode_scale: Any, factors: Any) -> Any:
    return true(decode_scale * 0.0 + 0.01, factors)


def _low_limit(true: Any, gate: Any, up: Any, _limit: Any) -> Any:
    return true(gate, up, 0.125)


def _squared(_true: Any, numbers: Any, weight: Any) -> Any:
    return [ops.multiply_rn(number, ops.multiply_rn(weight, weight)) for number in numbers]


def _of_kernel(name: str, component: str, kernel: str = _PRODUCTS, **more: Any) -> Fault:
    known = moe_faults.BY_NAME[name]
    place = known.module, known.function
    return _of(name, kernel, place, known.instead, component, **more)


def _of(
    name: str, kernel: str, place: tuple[str, str], instead: Any, component: str, **more: Any
) -> Fault:
    module, function = place
    more = {"prompts": SHORT, "beside": (_OF_64_ROWS,), **more}
    return Fault(f"experts: {name}", kernel, module, function, instead, component, **more)


_GROUPED, _PLAN = module_of(_PRODUCTS), module_of(_ROWS)
# A row that lies with another expert's is quantised and multiplied as that expert's.
_THROUGHOUT = ("experts.w13", "experts.w2", "experts.act_quant", "w13.act_quant")
# What nobody wrote may be any number, and leave the range of whatever comes behind.
_OUT_OF_RANGE = ("hc_pre", "norm", "hc_head")
FAULTS = (
    _of_kernel("gate and up changed", "experts.act_quant", cause="M14"),
    _of_kernel("scales of the expert before", "experts.w13", cause="M12"),
    _of_kernel("expert before", "experts.w13", cause="M16"),
    _of_kernel("unwritten tile", "experts.w13", also=_OUT_OF_RANGE, cause="M41"),
    _of_kernel("routing weight left out after", "combine", _ROWS, cause="M26"),
    _of_kernel("scale rows of up", "experts.w13", cause="M12"),
    _of("tensor scales twice", _PRODUCTS, (_GROUPED, "scales_of"), _twice, "experts.w13",
        cause="M02"),
    _of("scale of activations left out", _PRODUCTS, (_GROUPED, "scales_of"),
        _scale_of_activations_left_out, "experts.w2", cause="M02"),
    _of("rows of a warp", _PRODUCTS, (_GROUPED, "warp_has_rows"), _other_rows, "experts.w13",
        cause="M41"),
    _of("block beside", _PRODUCTS, (_EPILOGUE, "block_at"), _block_beside, "experts.act_quant",
        cause="M10"),
    _of("the next scale behind FC1", _PRODUCTS, (_WORDS, "scale_code_of"), _next_code,
        "experts.act_quant", cause="M08"),
    _of("low limit", _PRODUCTS, (_WORDS, "swiglu_numbers"), _low_limit, "experts.act_quant",
        cause="M25"),
    _of("expert before in the order", _ROWS, (_PLAN, "expert_here"), _neighbour,
        "experts.w13", also=_THROUGHOUT, cause="M16"),
    _of("map of experts left out", _ROWS, (_PLAN, "expert_here"), _map_left_out,
        "experts.w13", also=_THROUGHOUT, cause="M16"),
    _of("maximum of half a block", _ROWS, (_WORDS, "block_amax"), _half, "w13.act_quant",
        cause="M08"),
    _of("one scale for all experts", _ROWS, (_WORDS, "scaling_of"), _scale_of_first,
        "w13.act_quant", cause="M02"),
    _of("routing weight twice", _ROWS, (_PLAN, "weighed"), _squared, "combine", cause="M26"),
)  # fmt: skip
EXPERTS_BY_NAME = {fault.name: fault for fault in FAULTS}
