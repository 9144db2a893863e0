"""Launches of the kernels that multiply matrices, and of the experts' steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from degarble.harness.formats.layouts import SWIZZLE_128X4, ceil_div
from degarble.kernels.gemm.gemv_problem import GemvProblem
from degarble.kernels.gemm.grouped_problem import GroupedFp8Problem, GroupedProblem
from degarble.kernels.gemm.problem import GemmProblem
from degarble.kernels.gemm.w4a16_problem import W4A16Problem
from degarble.kernels.moe.by_row_problem import ByRowProblem, DecodeProblem, summed
from degarble.kernels.moe.problem import (
    BEFORE_W2,
    GATE_AND_UP,
    PLANNED,
    MoeProblem,
    RowsProblem,
    choose_decoded_tactic,
    combined,
    rows_of_call,
    scale_bytes,
)
from degarble.suites.kernels.runtime.launch_case import (
    BF16,
    BYTES,
    FP8,
    FP16,
    FP32,
    INT32,
    INT64,
    SETTINGS,
    Given,
    LaunchCase,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

TARGETS = {"sm90": "sm_90a", "sm100": "sm_100a"}
_EXPERTS = ("sm90_moe_nvfp4", "simt_moe_rows")
_EXPERTS_100 = ("sm100_moe_nvfp4", *_EXPERTS)
LAUNCHED_BY = {
    "sm90_moe_by_row": ("sm90_moe_by_row", "sm90_gemm_w4a16", "simt_moe_rows"),
    "sm90_moe_decoded": ("sm90_moe_decoded", "simt_moe_rows"),
    "sm90_moe_nvfp4": ("sm90_moe_decoded", *_EXPERTS),
    "sm100_moe_nvfp4": _EXPERTS_100,
    "sm90_shared_expert": (*_EXPERTS, "sm90_gemm_fp8_block", "simt_quantise_fp8"),
    "sm100_shared_expert": (*_EXPERTS_100, "sm100_gemm_fp8_block", "simt_quantise_fp8"),
}


def _gemm_cases() -> Iterator[LaunchCase]:
    for architecture, target in TARGETS.items():
        for rows in (5, 40, 300):
            for given, problem in (
                (_bf16(rows), GemmProblem(rows, 264, 256)),
                (_nvfp4(rows), GemmProblem(rows, 264, 256, "nvfp4", "e4m3")),
                (_fp8(rows, FP32), GemmProblem(rows, 264, 256, "fp8_block", "float32")),
                (_fp8(rows, BYTES), GemmProblem(rows, 264, 256, "fp8_block", "ue8m0")),
            ):
                name = f"{architecture}_gemm_{problem.operands}"
                yield LaunchCase(name, problem, given, target)
                if rows == 40:
                    more = given | {"out": Given(BF16, (rows, 264))}
                    yield LaunchCase(name, problem, more, target)


def _bf16(rows: int) -> dict[str, Given]:
    return {"a": Given(BF16, (rows, 256)), "b": Given(BF16, (264, 256))}


def _nvfp4(rows: int) -> dict[str, Given]:
    given = {}
    for side, extent in (("a", rows), ("b", 264)):
        given[side] = Given(BYTES, (extent, 128))
        given[f"{side}_scales"] = Given(BYTES, (SWIZZLE_128X4.storage_size(extent, 16),))
        given[f"{side}_decode_scale"] = Given(FP32, (1,))
    return given


def _fp8(rows: int, scales: Any) -> dict[str, Given]:
    return {
        "a": Given(FP8, (rows, 256)), "a_scales": Given(scales, (rows, 2)),
        "b": Given(FP8, (264, 256)), "b_scales": Given(scales, (3, 2)),
    }  # fmt: skip


def _by_name(m: Any, p: Any, t: dict[str, Tensor]) -> Any:
    return tuple(m.KERNEL.run(p, SETTINGS, **t).values())


def _of_several(record: str) -> Callable[[Any, Any, dict[str, Tensor]], Any]:
    return lambda m, p, t: tuple(getattr(m, record).run(p, SETTINGS, **t).values())


def _few_rows_cases() -> Iterator[LaunchCase]:
    for rows, out, target in ((1, "fp32", "sm_90a"), (7, "bf16", "sm_100a")):
        problem = GemvProblem(rows, 263, 512, out)
        given = {"x": Given(BF16, (rows, 512)), "weight": Given(BF16, (263, 512))}
        yield LaunchCase("simt_gemv_bf16", problem, given, target)
        more = {"out": Given(FP32 if out == "fp32" else BF16, (rows, 263))}
        yield LaunchCase("simt_gemv_bf16", problem, given | more, target)
    for columns, inner, spared in ((256, 7168, 0), (4096, 1536, 24)):
        problem = GemvProblem(1, columns, inner, "bf16", spared=spared)
        given = {"x": Given(BF16, (1, inner)), "weight": Given(BF16, (columns, inner))}
        yield LaunchCase("simt_gemv_bf16", problem, given)
    for rows, target in ((1, "sm_90a"), (3, "sm_100a")):
        turning = {"turns": Given(FP32, (9, 64)), "positions": Given(INT64, (rows,))}
        of_groups = {"x": Given(BF16, (rows, 4096)), "weight": Given(BF16, (256, 1024))}
        turned = GemvProblem(rows, 64, 1024, "bf16", 4, 512, 9)
        yield LaunchCase("simt_gemv_bf16", turned, of_groups | turning, target)
        scale = {"decode_scale": Given(FP32, (1,))}
        decoded = replace(turned, decoded=True)
        yield LaunchCase("simt_gemv_bf16", decoded, of_groups | turning | scale, target)
    for rows, layout in ((1, "linear"), (9, "128x4"), (16, "linear")):
        w4_a16_problem = W4A16Problem(rows, 256, 512, layout)
        blocks = Given(BYTES, (w4_a16_problem.scale_bytes,))
        given = {
            "x": Given(BF16, (rows, 512)), "codes": Given(BYTES, (256, 256)), "scales": blocks,
            "decode_scale": Given(FP32, (1,)),
        }  # fmt: skip
        yield LaunchCase("sm90_gemm_w4a16", w4_a16_problem, given)
        yield LaunchCase("sm90_gemm_w4a16_wgmma", w4_a16_problem, given)
    yield LaunchCase(
        "sm90_gemm_w4a16", w4_a16_problem, given | {"out": Given(BF16, (16, 256))}, "sm_100a"
    )


def _grouped_cases() -> Iterator[LaunchCase]:
    turning = {"turns": Given(FP32, (9, 64)), "positions": Given(INT64, (70,))}
    for architecture, target in TARGETS.items():
        for problem in (
            GroupedProblem(70, 2, 64, 512),
            GroupedProblem(70, 2, 128, 1024, turned=512, positions=9),
            GroupedProblem(70, 1, 72, 512, out="fp32"),
        ):
            if problem.out == "fp32" and architecture == "sm100":
                continue
            wide = problem.groups * problem.columns
            given = {
                "a": Given(BF16, (70, problem.groups * problem.inner)),
                "b": Given(BF16, (wide, problem.inner)),
            }  # fmt: skip
            given |= turning if problem.turned else {}
            name = f"{architecture}_gemm_grouped"
            yield LaunchCase(name, problem, given, target)
            out = Given(FP32 if problem.out == "fp32" else BF16, (70, wide))
            yield LaunchCase(name, problem, given | {"out": out}, target)
    for scales, dtype in (("float32", FP32), ("ue8m0", BYTES)):
        for turned in (0, 512):
            of_fp8 = GroupedFp8Problem(70, 2, 128, 1024, scales, turned, 9 if turned else 0)
            tiles = ceil_div(2 * 128, 128)
            given = {"b": Given(FP8, (256, 1024)), "b_scales": Given(dtype, (tiles, 8))}
            if turned:
                given |= {"a": Given(BF16, (70, 2048))} | turning
            else:
                given |= {"a": Given(FP8, (70, 2048)), "a_scales": Given(dtype, (70, 16))}
            yield LaunchCase("sm90_gemm_grouped_fp8", of_fp8, given)
        more = given | {"out": Given(BF16, (70, 256))}
        yield LaunchCase("sm90_gemm_grouped_fp8", of_fp8, more)


def _moe_cases() -> Iterator[LaunchCase]:
    for architecture, target in TARGETS.items():
        name = f"{architecture}_moe_nvfp4"
        for problem in (
            MoeProblem(3, 256, 128, experts=4, chosen=2, routed=4, limit=10.0),
            MoeProblem(300, 256, 128, experts=4, chosen=2, routed=4, weighting=BEFORE_W2),
            MoeProblem(2000, 512, 256, experts=3, chosen=2, routed=8),
        ):
            given = moe_operands(problem)
            local = {"local": Given(INT32, (problem.routed,))}
            given |= local if problem.experts < problem.routed else {}
            yield LaunchCase(name, problem, given, target)
        shared = {"shared": Given(BF16, (2000, 512))}
        yield LaunchCase(name, problem, given | shared, target)
        name = f"{architecture}_shared_expert"
        alone = MoeProblem(3, 256, 128, experts=1, chosen=1, routed=1, limit=10.0)
        yield LaunchCase(name, alone, moe_operands(alone), target)
        for tokens, scales in ((3, FP32), (5, BYTES)):
            of_fp8 = {
                "x": Given(BF16, (tokens, 256)),
                "w13": Given(FP8, (256, 256)), "w13_scales": Given(scales, (2, 2)),
                "w2": Given(FP8, (256, 128)), "w2_scales": Given(scales, (2, 1)),
            }  # fmt: skip
            yield LaunchCase(name, replace(alone, tokens=tokens), of_fp8, target)


def _decoded_cases() -> Iterator[LaunchCase]:
    """Experts whose rows are decoded once: whole calls, and each kernel alone."""
    name = "sm90_moe_decoded"
    for moe in (
        MoeProblem(3, 256, 128, 4, 2, 4, 10.0),
        MoeProblem(300, 256, 128, 3, 2, 8, weighting=BEFORE_W2),
    ):
        given, mapped = moe_operands(moe), moe.experts < moe.routed
        local = {"local": Given(INT32, (moe.routed,))} if mapped else {}
        yield LaunchCase(name, moe, given | local)
        rows = RowsProblem(moe, choose_decoded_tactic(moe), mapped)
        order, scale = _order(rows), given["w13_input_scale"]
        gather = {"x": given["x"], **order, "w13_input_scale": scale}
        yield LaunchCase(f"{name}.GATHER", rows, gather)
        w13, w2 = (
            {each: of for each, of in given.items() if each.startswith(product)}
            for product in ("w13", "w2_")
        )
        more = {"w2_input_scale": w2["w2_input_scale"], "weights": given["weights"]}
        x, hidden = (
            {f"{each}_numbers": Given(FP16, (rows.rows, width))}
            for each, width in (("x", 256), ("hidden", 128))
        )
        yield LaunchCase(f"{name}.FC1", rows, {**x, **w13, **order, **more})
        yield LaunchCase(f"{name}.FC2", rows, {**hidden, **w2, **order})


def moe_operands(p: MoeProblem) -> dict[str, Given]:
    """Return what a call of experts reads."""
    slots = p.tokens, p.chosen
    given = {
        "x": Given(BF16, (p.tokens, p.hidden)),
        "experts": Given(INT32, slots), "weights": Given(FP32, slots),
    }  # fmt: skip
    for name, leading, rows, inner in (
        ("w13", (p.experts, GATE_AND_UP), p.width, p.hidden),
        ("w2", (p.experts,), p.hidden, p.width),
    ):
        given |= {
            f"{name}_codes": Given(BYTES, (*leading, rows, inner // 2)),
            f"{name}_scales": Given(BYTES, (*leading, scale_bytes(rows, inner))),
            f"{name}_decode_scale": Given(FP32, leading),
            f"{name}_input_scale": Given(FP32, leading[:1]),
        }
    return given


def _experts_cases() -> Iterator[LaunchCase]:
    """Each kernel of a call alone, as the backend launches them."""
    for architecture, target in TARGETS.items():
        for moe, shown in (
            (MoeProblem(3, 256, 128, 4, 2, 4, 10.0), architecture == "sm90"),
            (MoeProblem(300, 256, 128, 3, 2, 8, weighting=BEFORE_W2), False),
        ):
            mapped = moe.experts < moe.routed
            rows = replace(rows_of_call(moe, target, mapped=mapped), shown=shown)
            given, order = moe_operands(moe), _order(rows)
            plan = {"experts": given["experts"]}
            plan |= {"local": Given(INT32, (moe.routed,))} if mapped else {}
            yield LaunchCase("simt_moe_rows.PLAN", rows, plan, target)
            scale = given["w13_input_scale"]
            gather = {"x": given["x"], **order, "w13_input_scale": scale}
            yield LaunchCase("simt_moe_rows.GATHER", rows, gather, target)
            x, hidden = (_coded(rows, *side) for side in (("x", 256), ("hidden", 128)))
            w13, w2 = (
                {name: of for name, of in given.items() if name.startswith(product)}
                for product in ("w13", "w2_")
            )
            more = {"w2_input_scale": w2["w2_input_scale"], "weights": given["weights"]}
            first, name = {**x, **w13, **order, **more}, f"{architecture}_moe_nvfp4"
            yield LaunchCase(f"{name}.FC1", rows, first, target)
            yield LaunchCase(f"{name}.FC2", rows, {**hidden, **w2, **order}, target)
            products = {"products": Given(BF16, (rows.rows, 256))}
            yield LaunchCase(f"{name}.FC2", rows, {**hidden, **w2, **order, **products}, target)
            for shared in (False, True):
                summed = products | {
                    "places": Given(INT32, (moe.slots,)), "weights": given["weights"],
                }  # fmt: skip
                summed |= {"shared": given["x"]} if shared else {}
                problem = combined(rows, shared=shared)
                yield LaunchCase("simt_moe_rows.COMBINE", problem, summed, target)


def _by_row_cases() -> Iterator[LaunchCase]:
    """Experts of few tokens: the whole call, and each of its kernels."""
    for shared, target in ((True, "sm_90a"), (False, "sm_90a"), (True, "sm_100a")):
        moe = MoeProblem(3, 256, 128, 4, 2, 4, 10.0)
        problem = ByRowProblem(moe, shared)
        stacked = moe_operands(replace(moe, experts=4 + shared, routed=4 + shared))
        given = stacked if shared else stacked | {"shared": Given(BF16, (3, 256))}
        yield LaunchCase("sm90_moe_by_row", problem, given, target)
        rows = problem.rows
        between = {
            "x_rows": Given(BF16, (rows, 256)), "gate_and_up": Given(BF16, (rows, 256)),
            "hidden_rows": Given(BF16, (rows, 128)), "products": Given(BF16, (rows, 256)),
            "places": Given(INT32, (6,)),
        }  # fmt: skip
        every = given | between
        w13 = ("w13_codes", "w13_scales", "w13_decode_scale", "w13_input_scale", "experts")
        for name, of, names in (
            ("ROWS", DecodeProblem(problem, "values"), ("x", "experts", "w13_input_scale")),
            ("FC1", problem, ("x_rows", *w13)),
            (
                "GATED", DecodeProblem(problem, "swiglu"),
                ("gate_and_up", "experts", "w2_input_scale"),
            ),
            ("FC2", problem, ("hidden_rows", *(each.replace("w13", "w2") for each in w13))),
            (
                "SUM", summed(problem, shared=not shared),
                ("products", "places", "weights", *(() if shared else ("shared",))),
            ),
        ):  # fmt: skip
            own = {each: every[each] for each in names}
            yield LaunchCase(f"sm90_moe_by_row.{name}", of, own, target)
        of_matrices = {name: of for name, of in given.items() if name.startswith("w")}
        of_matrices.pop("weights")
        own = {each: every[each] for each in ("x", "experts")} | of_matrices
        yield LaunchCase("sm90_moe_by_row.PRODUCTS", problem, own, target)


def _order(rows: RowsProblem) -> dict[str, Given]:
    sizes = dict(zip(PLANNED, rows.sizes, strict=True))
    return {name: Given(INT32, (sizes[name],)) for name in ("rows", "tiles", "slots")}


def _coded(rows: RowsProblem, name: str, width: int) -> dict[str, Given]:
    return {
        f"{name}_codes": Given(BYTES, (rows.rows, width // 2)),
        f"{name}_scales": Given(BYTES, (scale_bytes(rows.rows, width),)),
    }


def _shared_expert(m: Any, p: Any, t: dict[str, Tensor]) -> Any:
    sequence = m.FP8 if "w13" in t else m.KERNEL
    return tuple(sequence.run(p, SETTINGS, **t).values())


PUBLIC: dict[str, Callable[[Any, Any, dict[str, Tensor]], Any]] = {
    "simt_gemv_bf16": _by_name,
    "sm100_gemm_bf16": _by_name,
    "sm100_gemm_fp8_block": _by_name,
    "sm100_gemm_grouped": _by_name,
    "sm100_gemm_nvfp4": _by_name,
    "sm100_moe_nvfp4": _by_name,
    "sm100_shared_expert": _shared_expert,
    "sm90_gemm_bf16": _by_name,
    "sm90_gemm_fp8_block": _by_name,
    "sm90_gemm_grouped": _by_name,
    "sm90_gemm_grouped_fp8": _by_name,
    "sm90_gemm_nvfp4": _by_name,
    "sm90_gemm_w4a16": _by_name,
    "sm90_gemm_w4a16_wgmma": _by_name,
    "sm90_moe_decoded": _by_name,
    "sm90_moe_nvfp4": _by_name,
    "sm90_moe_by_row": _by_name,
    "sm90_shared_expert": _shared_expert,
    **{
        f"sm90_moe_by_row.{name}": _of_several(name)
        for name in ("ROWS", "FC1", "GATED", "FC2", "SUM", "PRODUCTS")
    },
    **{f"sm90_moe_decoded.{name}": _of_several(name) for name in ("GATHER", "FC1", "FC2")},
    **{f"simt_moe_rows.{name}": _of_several(name) for name in ("PLAN", "GATHER", "COMBINE")},
    **{
        f"{architecture}_moe_nvfp4.{name}": _of_several(name)
        for architecture in TARGETS
        for name in ("FC1", "FC2")
    },
}
CASES = (
    *_gemm_cases(), *_few_rows_cases(), *_grouped_cases(), *_moe_cases(), *_experts_cases(),
    *_decoded_cases(), *_by_row_cases(),
)  # fmt: skip
