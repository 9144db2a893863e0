"""Launches of kernels on the CPU, down to the compiled kernel, which only records its arguments.

A case is a problem and its operands by name. A pointer is recorded by the operand that it points
to, its element and its alignment; a number by its DSL type and value.
"""

from __future__ import annotations

import json
import re
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from degarble.harness.base.errors import DegarbleError
from degarble.kernels.attention.heads_problem import HeadsProblem
from degarble.kernels.attention.problem import (
    EXPERIMENT,
    AttentionProblem,
    KeyList,
    MergeProblem,
    QueryProblem,
)
from degarble.kernels.cache.problem import (
    PagedPoolProblem,
    PoolProblem,
    SlotsProblem,
    StatePages,
)
from degarble.kernels.indexer.problem import KeyPages, OperandProblem, ScoresProblem, TopkProblem
from degarble.kernels.primitives.kv_problem import Pages, ReadProblem, WriteProblem
from degarble.kernels.primitives.quantise_problem import Fp8Problem, QuantiseProblem
from degarble.kernels.rows.mhc_few_problem import MhcNormProblem, OnwardProblem
from degarble.kernels.rows.mhc_problem import MhcMixProblem, ProjectProblem
from degarble.kernels.rows.problem import (
    EmbedProblem,
    InverseRopeProblem,
    NormProblem,
    QNormRopeProblem,
    ResidualProblem,
    ScaleProblem,
)
from degarble.kernels.rows.router_problem import RouterProblem
from degarble.kernels.runtime import compiling
from degarble.kernels.runtime import kernel as descriptor
from degarble.kernels.runtime import operands as runtime_operands
from degarble.kernels.runtime.modules import module_of
from degarble.kernels.runtime.targets import TARGETS
from degarble.suites.kernels.runtime import product_cases
from degarble.suites.kernels.runtime.launch_case import (
    BF16,
    BYTES,
    FP8,
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

KEPT = Path(__file__).with_name("arguments.json")
PROCESSORS = 132
_ATTENTION = ("sm90_sparse_attention", "simt_attention_merge", "simt_kv_write", "simt_kv_read")
LAUNCHED_BY = {
    "sm90_sparse_attention": _ATTENTION,
    "sm100_sparse_attention": _ATTENTION,
    **product_cases.LAUNCHED_BY,
}
_MODULES = re.compile(r"(?:degarble\.[\w.]+ )|(?:<class 'cutlass[\w.]*\.(?=\w+'>))|'>(?=, <Addr)")


def _norm(
    problem: NormProblem, weight: torch.dtype = BF16, scale: tuple[int, ...] = (1,)
) -> dict[str, Given]:
    given = {
        "values": Given(BF16, (problem.rows, problem.columns)),
        "weight": Given(weight, (problem.columns,)),
    }
    scaled = problem.layout or problem.decoded
    return given | ({"decode_scale": Given(FP32, scale)} if scaled else {})


def _norm_cases() -> Iterator[LaunchCase]:
    name = "simt_rmsnorm"
    plain, wide = NormProblem(5, 64), NormProblem(300, 7168, 1e-5, "fp32")
    coded = NormProblem(4, 512, layout="128x4")
    both = NormProblem(130, 2048, layout="8x4", keeps_values=True)
    yield LaunchCase(name, plain, _norm(plain))
    yield LaunchCase(name, wide, _norm(wide, FP32), "sm_100a")
    yield LaunchCase(name, coded, _norm(coded, scale=()))
    decoded = NormProblem(2, 1024, decoded=True)
    yield LaunchCase(name, decoded, _norm(decoded))
    outputs = {
        "normed": Given(BF16, (130, 2048)), "codes": Given(BYTES, (130, 1024)),
        "scales": Given(BYTES, (both.scale_bytes,)),
    }  # fmt: skip
    yield LaunchCase(name, both, _norm(both) | outputs, "sm_100a")


def _row_cases() -> Iterator[LaunchCase]:
    of_heads = {"turns": Given(FP32, (9, 64)), "positions": Given(INT64, (3,))}
    for width in (512, 128):
        heads = {"heads": Given(BF16, (3, 4, width))} | of_heads
        yield LaunchCase("simt_qnorm_rope", QNormRopeProblem(3, 4, 9, 1e-5, width), heads)
        for in_place in (False, True):
            back = InverseRopeProblem(3, 4, 9, in_place, width)
            yield LaunchCase("simt_inverse_rope", back, heads, "sm_100a")
    ready = of_heads | {
        "heads": Given(BF16, (3, 4, 512)), "out": Given(BF16, (3, 4, 512)),
    }  # fmt: skip
    yield LaunchCase("simt_qnorm_rope", QNormRopeProblem(3, 4, 9), ready, "sm_100a")
    yield LaunchCase("simt_inverse_rope", InverseRopeProblem(3, 4, 9), ready)
    for ids, dtype, more in (
        ("int64", INT64, {}),
        ("int32", INT32, {"out": Given(BF16, (6, 96))}),
    ):
        table = {"ids": Given(dtype, (6,)), "table": Given(BF16, (11, 96))}
        yield LaunchCase("simt_embed", EmbedProblem(6, 11, 96, ids), table | more)
    yield LaunchCase(
        "simt_scale", ScaleProblem(24, 0.5, "fp32", "bf16"), {"values": Given(FP32, (4, 6))}
    )
    yield LaunchCase(
        "simt_scale", ScaleProblem(70, 3.0, "bf16", "fp32"),
        {"values": Given(BF16, (70,)), "out": Given(FP32, (70,))}, "sm_100a",
    )  # fmt: skip
    for weight, dtype, rounded in (("bf16", BF16, False), ("fp32", FP32, True)):
        summed = ResidualProblem(300, 1536, 1e-5, weight, rounded)
        rows = Given(BF16, (300, 1536))
        given = {"values": rows, "residual": rows, "weight": Given(dtype, (1536,))}
        more = {"normed": rows, "total": rows} if rounded else {}
        yield LaunchCase("simt_residual_norm", summed, given | more)


def _experts_rows(rows: int, chosen: int, experts: int, width: int) -> dict[str, Given]:
    """What a launch that adds up experts' rows is given of them."""
    return {
        "made": Given(BF16, (experts, width)), "places": Given(INT32, (rows * chosen,)),
        "weights": Given(FP32, (rows, chosen)),
    }  # fmt: skip


def _few_mhc_cases() -> Iterator[LaunchCase]:
    for tokens, width, target in ((1, 4096, "sm_90a"), (3, 192, "sm_100a")):
        row, streams = Given(BF16, (tokens, width)), Given(BF16, (tokens, 4, width))
        mixed = {"post": Given(FP32, (tokens, 4)), "mix": Given(FP32, (tokens, 4, 4))}
        plain = OnwardProblem(tokens, width)
        split = {"split": Given(BF16, (3, 24, 4 * width))}
        given = {"streams": streams} | mixed | split
        yield LaunchCase("simt_mhc_onward", plain, given | {"made": row}, target)
        partials = {"partials": Given(FP32, (tokens, plain.project.partials, 32))}
        of_rows = _experts_rows(tokens, 6, 7 * tokens, width)
        for rides, more in ((True, {"out": streams} | partials), (False, {"shared": row})):
            problem = OnwardProblem(tokens, width, "rows", 6, 7 * tokens, rides)
            yield LaunchCase("simt_mhc_onward", problem, given | of_rows | more, target)
        scales = {"decode_scale0": Given(FP32, (1,)), "decode_scale1": Given(FP32, ())}
        for decoded, weight, dtype in ((0, "fp32", FP32), (2, "bf16", BF16)):
            normed = MhcNormProblem(tokens, width, 7, 1e-5, 1e-4, weight, decoded)
            given_here = {"streams": streams} | partials | {
                "base": Given(FP32, (24,)), "scale": Given(FP32, (3,)),
                "weight": Given(dtype, (width,)),
            }  # fmt: skip
            more = scales if decoded else mixed | {"out": row, "normed": row}
            yield LaunchCase("simt_mhc_norm", normed, given_here | more, target)


def _router_cases() -> Iterator[LaunchCase]:
    scored = RouterProblem(5, 256, 6, scale=2.5, epsilon=1e-20)
    logits = {"logits": Given(FP32, (5, 256))}
    out = {"experts": Given(INT32, (5, 6)), "weights": Given(FP32, (5, 6))}
    yield LaunchCase("simt_router", scored, logits | {"bias": Given(FP32, (256,))})
    yield LaunchCase("simt_router", scored, logits | {"bias": Given(FP32, (256,))} | out, "sm_100a")
    for ids, dtype in (("int64", INT64), ("int32", INT32)):
        looked_up = RouterProblem(5, 256, 6, vocabulary=40, ids=ids)
        table = {"ids": Given(dtype, (5,)), "table": Given(dtype, (40, 6))}
        yield LaunchCase("simt_router", looked_up, logits | table)


def _mhc_cases() -> Iterator[LaunchCase]:
    streams, rows = Given(BF16, (3, 4, 512)), Given(BF16, (3, 512))
    mixed = {"post": Given(FP32, (3, 4)), "mix": Given(FP32, (3, 4, 4))}

    def projected(count: int, scales: int) -> dict[str, Given]:
        return {
            "products": Given(FP32, (3, count)), "squares": Given(FP32, (3,)),
            "base": Given(FP32, (count,)), "scale": Given(FP32, (scales,)),
        }  # fmt: skip

    for part, given in (
        ("all", {"streams": streams} | projected(24, 3)),
        ("coefficients", projected(24, 3)),
        ("collapse", {"streams": streams, "pre": Given(FP32, (3, 4))}),
        ("head", {"streams": streams} | projected(4, 1)),
        ("post", {"streams": streams, "layer": rows} | mixed),
        ("post", {"streams": streams, "layer": rows, "out": streams} | mixed),
    ):
        yield LaunchCase("simt_mhc", MhcMixProblem(3, 512, part, 7, 1e-5, 1e-4), given)
    for kind, count in (("layer", 24), ("head", 4)):
        problem = ProjectProblem(3, 512, kind)
        given = {
            "streams": streams, "split": Given(BF16, (3, problem.weight_rows, problem.inner)),
        }  # fmt: skip
        yield LaunchCase("simt_mhc_project", problem, given)
        out = {
            "partials": Given(FP32, (3, problem.partials, 32)),
            "products": Given(FP32, (3, count)), "squares": Given(FP32, (3,)),
        }  # fmt: skip
        yield LaunchCase("simt_mhc_project", problem, given | out, "sm_100a")


def _quantise_cases() -> Iterator[LaunchCase]:
    for problem, scale, target in (
        (QuantiseProblem(5, 128), (1,), "sm_90a"),
        (QuantiseProblem(300, 1024, "8x4", "swiglu", limit=10.0), (), "sm_100a"),
        (QuantiseProblem(7, 256, "linear", experts=3, keeps_values=True), (3,), "sm_90a"),
        (QuantiseProblem(4, 256, "linear", decoded=True), (1,), "sm_90a"),
    ):
        given = {
            "values": Given(BF16, (problem.rows, problem.input_columns)),
            "decode_scale": Given(FP32, scale),
        }
        if problem.experts:
            given["offsets"] = Given(INT32, (problem.experts + 1,))
        yield LaunchCase("simt_quantise_nvfp4", problem, given, target)
        codes = Given(BYTES, (problem.rows, problem.columns // 2))
        out = {"codes": codes, "scales": Given(BYTES, (problem.scale_bytes,))}
        if problem.decoded:
            out = {"decoded": Given(BF16, (problem.rows, problem.columns))}
        if problem.keeps_values:
            out["kept"] = Given(BF16, (problem.rows, problem.columns))
        yield LaunchCase("simt_quantise_nvfp4", problem, given | out, target)
    for fp8_problem, target in (
        (Fp8Problem(5, 256), "sm_90a"),
        (Fp8Problem(4, 512, "ue8m0", "swiglu"), "sm_100a"),
        (Fp8Problem(6, 1024, "ue8m0", turned=512, positions=9), "sm_90a"),
    ):
        given = {"values": Given(BF16, (fp8_problem.rows, fp8_problem.input_columns))}
        if fp8_problem.turned:
            given |= {"turns": Given(FP32, (9, 64)), "positions": Given(INT64, (6,))}
        yield LaunchCase("simt_quantise_fp8", fp8_problem, given, target)
        given = given | {
            "codes": Given(FP8, (fp8_problem.rows, fp8_problem.columns)),
            "scales": Given(
                FP32 if fp8_problem.scales == "float32" else BYTES,
                (fp8_problem.rows, fp8_problem.blocks),
            ),
        }
        yield LaunchCase("simt_quantise_fp8", fp8_problem, given, target)


def _cache_cases() -> Iterator[LaunchCase]:
    for entry, width in (("fp8", 512), ("nvfp4", 512), ("bf16", 512), ("bf16", 128)):
        pages = Pages(entry, 64, 2, width=width)
        cache = {"cache": Given(BYTES, (2, pages.stride))}
        read = {"indices": Given(INT32, (7,))} | cache
        yield LaunchCase("simt_kv_read", ReadProblem(7, pages), read)
        yield LaunchCase(
            "simt_kv_read", ReadProblem(7, pages),
            read | {"out": Given(BF16, (7, width))}, "sm_100a",
        )  # fmt: skip
        rows = {"values": Given(BF16, (5, width)), "slots": Given(INT64, (5,))}
        plain = WriteProblem(5, pages, source="row")
        yield LaunchCase("simt_kv_write", plain, rows | cache)
        last = WriteProblem(5, pages, 9, 1e-5, "fp32", duplicates="last")
        more = {
            "weight": Given(FP32, (width,)), "turns": Given(FP32, (9, 64)),
            "positions": Given(INT64, (5,)), "claims": Given(INT32, (pages.slots,)),
        }  # fmt: skip
        yield LaunchCase("simt_kv_write", last, rows | cache | more, "sm_100a")
    for kind, width in (("window", 8), ("entries", 16), ("chosen", 16)):
        problem = SlotsProblem(6, width, kind, 3, 16, 4)
        given = {
            "positions": Given(INT64, (6,)), "owners": Given(INT32, (6,)),
            "table": Given(INT32, (3, 16)),
        }  # fmt: skip
        if kind == "chosen":
            given["numbers"] = Given(INT32, (6, width))
        yield LaunchCase("simt_slots", problem, given)


def _pool_cases() -> Iterator[LaunchCase]:
    for ratio, width, parts in ((4, 512, 2), (128, 128, 1)):
        columns, count = parts * width, 3
        for problem in (
            PoolProblem(5, 2, count, 4, ratio, width),
            PoolProblem(5, 2, count, 4, ratio, width, page_entries=64),
        ):
            given = {
                "projected": Given(FP32, (5, 2 * columns)), "ape": Given(FP32, (ratio, columns)),
                "rings": Given(FP32, (4, problem.ring_rows, 2 * columns)),
                "closing": Given(INT32, (count,)), "owners": Given(INT32, (count,)),
                "starts": Given(INT64, (2,)), "offsets": Given(INT32, (3,)),
                "ring_of": Given(INT32, (2,)), "table": Given(INT32, (2, 7)),
            }  # fmt: skip
            yield LaunchCase("simt_compressor", problem, given)
        pages = StatePages(4, 6, columns)
        paged = PagedPoolProblem(5, 2, ratio, pages, width)
        tokens = Given(INT64, (5,))
        fields = {
            "projected": Given(FP32, (5, 2 * columns)), "ape": Given(FP32, (ratio, columns)),
            "requests": Given(INT32, (5,)), "positions": tokens, "slots": tokens,
            "table": Given(INT32, (2, 7)), "entries": tokens,
            "states": Given(BYTES, (6, pages.stride)),
        }  # fmt: skip
        yield LaunchCase("simt_paged_pool", paged, fields, "sm_100a")
        out = {
            "pooled": Given(BF16, (5, width)), "firsts": tokens, "places": tokens,
        }  # fmt: skip
        yield LaunchCase("simt_paged_pool", paged, fields | out)


def _attention_cases() -> Iterator[LaunchCase]:
    near, far = KeyList(128, Pages("fp8", 64, 3)), KeyList(1024, Pages("fp8", 2, 5))
    latent = KeyList(2048, Pages("fp8-v32", 64, 3, width=576))
    nvfp4 = KeyList(70, Pages("nvfp4-v41", 64, 2))
    split = AttentionProblem(3, 64, near, far, splits=9)
    v32 = AttentionProblem(2, 128, latent, mode="decode", scale=0.1)
    for name, target in (
        ("sm90_sparse_attention", "sm_90a"),
        ("sm100_sparse_attention", "sm_100a"),
    ):
        for problem in (
            AttentionProblem(3, 8, KeyList(5, Pages("bf16", 64, 2))),
            AttentionProblem(3, 64, near, far, mode="decode", lengths=True),
            split, replace(split, splits=12, lengths=True), v32, replace(v32, splits=11),
            AttentionProblem(2, 8, nvfp4, products=EXPERIMENT),
        ):  # fmt: skip
            yield LaunchCase(name, problem, _attention_operands(problem), target)
        out = {
            "out": Given(BF16, (3, 64, 512)), "lse": Given(FP32, (3, 64)),
            "sums": Given(FP32, (3, 9, 64, 512)), "stats": Given(FP32, (3, 9, 64, 2)),
        }  # fmt: skip
        yield LaunchCase(name, split, _attention_operands(split) | out, target)
    apart = replace(v32, splits=11)
    splits = {"sums": Given(FP32, (2, 11, 128, 512)), "stats": Given(FP32, (2, 11, 128, 2))}
    yield LaunchCase("sm90_sparse_attention.SPLITS", apart, _attention_operands(apart) | splits)
    merged = MergeProblem(3, 64, 9)
    given = {name: out[name] for name in ("sums", "stats")}
    yield LaunchCase("simt_attention_merge", replace(merged, sinks=False), given)
    given = out | {"sink": Given(FP32, (64,))}
    yield LaunchCase("simt_attention_merge", merged, given, "sm_100a")


def _attention_operands(p: AttentionProblem) -> dict[str, Given]:
    given = {"q": Given(BF16, (p.tokens, p.heads, p.family.key))}
    given |= {"sink": Given(FP32, (p.heads,))} if p.family.sinks else {}
    for kind, keys in zip(("window", "entries"), p.lists, strict=False):
        given[f"{kind}_slots"] = Given(INT32, (p.tokens, keys.width))
        given |= {f"{kind}_lengths": Given(INT32, (p.tokens,))} if p.lengths else {}
        given[f"{kind}_cache"] = Given(BYTES, (keys.pages.count, keys.pages.stride))
    return given


def _query_cases() -> Iterator[LaunchCase]:
    for problem, target in (
        (QueryProblem(2, 3, 192, 5), "sm_90a"), (QueryProblem(4, 128, 64, 9), "sm_100a"),
    ):  # fmt: skip
        rows = problem.tokens, problem.heads
        given = {
            "latent": Given(BF16, (*rows, 512)), "heads": Given(BF16, (*rows, problem.width)),
            "turns": Given(FP32, (problem.positions, 64)), "positions": Given(INT64, rows[:1]),
        }  # fmt: skip
        yield LaunchCase("simt_latent_query", problem, given, target)
        yield LaunchCase(
            "simt_latent_query", problem, given | {"out": Given(BF16, (*rows, 576))}, target
        )


def _heads_cases() -> Iterator[LaunchCase]:
    name, scale = "sm90_latent_heads", {"decode_scale": Given(FP32, (1,))}
    keys = HeadsProblem(2, 3, 512, 128, 192, 9)
    given = {
        "x": Given(BF16, (2, 3, 192)), "weight": Given(BF16, (3 * 512, 128)),
        "turns": Given(FP32, (9, 64)), "positions": Given(INT64, (2,)),
    }  # fmt: skip
    yield LaunchCase(name, keys, given)
    yield LaunchCase(name, keys, given | {"out": Given(BF16, (2, 3, 576))})
    values, weight = HeadsProblem(4, 3, 128, 512, 512), {"weight": Given(BF16, (3 * 128, 512))}
    heads = {"x": Given(BF16, (4, 3, 512))} | weight
    yield LaunchCase(name, values, heads)
    yield LaunchCase(name, replace(values, decoded=True), heads | scale)
    splits = {"sums": Given(FP32, (4, 7, 3, 512)), "stats": Given(FP32, (4, 7, 3, 2))} | weight
    yield LaunchCase(name, replace(values, splits=7), splits)
    merged = replace(values, splits=7, decoded=True)
    yield LaunchCase(name, merged, splits | scale | {"out": Given(BF16, (4, 3, 128))})


def _indexer_cases() -> Iterator[LaunchCase]:
    name = "simt_indexer_operand"
    for problem, target in (
        (OperandProblem(3, 4, "none", "mxfp4", hadamard=True), "sm_90a"),
        (OperandProblem(3, 4, "interleaved", "fp8", coded=True, positions=9), "sm_100a"),
        (OperandProblem(3, 1, "halves", "fp8", normed=True, positions=9, epsilon=1e-5), "sm_90a"),
    ):
        rows = problem.tokens, problem.heads
        given = {"rows": Given(BF16, (*rows, 128))}
        if problem.positions:
            given |= {"turns": Given(FP32, (9, 64)), "positions": Given(INT64, (3,))}
        if problem.normed:
            given |= {"weight": Given(FP32, (128,)), "bias": Given(FP32, (128,))}
        yield LaunchCase(name, problem, given, target)
        values = Given(FP8 if problem.coded else BF16, (*rows, 128))
        given = given | {"values": values}
        given |= {"scales": Given(FP32, rows)} if problem.coded else {}
        yield LaunchCase(name, problem, given, target)
    for name, target in (("sm90_indexer_scores", "sm_90a"), ("sm100_indexer_scores", "sm_100a")):
        for tokens, operands, arithmetic, dtype in (
            (2, "bf16", "stored", BF16), (2, "bf16", "float32", FP32), (9, "fp8", "float32", FP32),
        ):  # fmt: skip
            pages = KeyPages(operands, 64, 5)
            scores_problem = ScoresProblem(tokens, 64, 700, 2, pages, 4, arithmetic)
            codes = FP8 if operands == "fp8" else BF16
            given = {
                "queries": Given(codes, (tokens, 64, 128)), "weights": Given(dtype, (tokens, 64)),
                "positions": Given(INT64, (tokens,)), "sequences": Given(INT32, (tokens,)),
                "table": Given(INT32, (2, 11)), "pages": Given(BYTES, (5, pages.stride)),
            }  # fmt: skip
            given |= {"scales": Given(FP32, (tokens, 64))} if operands == "fp8" else {}
            yield LaunchCase(name, scores_problem, given, target)
        yield LaunchCase(name, scores_problem, given | {"out": Given(FP32, (tokens, 700))}, target)
    for topk_problem, target in (
        (TopkProblem(3, 40, 8), "sm_90a"), (TopkProblem(90, 20_001, 2048, 4), "sm_100a"),
        (TopkProblem(2, 60_000, 512, 1), "sm_90a"),
    ):  # fmt: skip
        given = {"scores": Given(FP32, (topk_problem.rows, topk_problem.entries))}
        given |= {"positions": Given(INT64, (topk_problem.rows,))} if topk_problem.ratio else {}
        yield LaunchCase("simt_indexer_topk", topk_problem, given, target)
    given = given | {"out": Given(INT32, (2, 512))}
    yield LaunchCase("simt_indexer_topk", topk_problem, given, "sm_100a")


def _by_name(m: Any, p: Any, t: dict[str, Tensor]) -> Any:
    return tuple(m.KERNEL.run(p, SETTINGS, **t).values())


PUBLIC: dict[str, Callable[[Any, Any, dict[str, Tensor]], Any]] = {
    "simt_attention_merge": _by_name,
    "simt_compressor": _by_name,
    "simt_embed": _by_name,
    "simt_indexer_operand": _by_name,
    "simt_indexer_topk": _by_name,
    "simt_inverse_rope": _by_name,
    "simt_kv_read": _by_name,
    "simt_kv_write": _by_name,
    "simt_latent_query": _by_name,
    "simt_mhc": _by_name,
    "simt_mhc_norm": _by_name,
    "simt_mhc_onward": _by_name,
    "simt_mhc_project": _by_name,
    "simt_paged_pool": _by_name,
    "simt_qnorm_rope": _by_name,
    "simt_quantise_fp8": _by_name,
    "simt_quantise_nvfp4": _by_name,
    "simt_residual_norm": _by_name,
    "simt_rmsnorm": _by_name,
    "simt_router": _by_name,
    "simt_scale": _by_name,
    "simt_slots": _by_name,
    "sm100_indexer_scores": _by_name,
    "sm100_sparse_attention": _by_name,
    "sm90_indexer_scores": _by_name,
    "sm90_latent_heads": _by_name,
    "sm90_sparse_attention": _by_name,
    "sm90_sparse_attention.SPLITS": lambda m, p, t: tuple(m.SPLITS.run(p, SETTINGS, **t).values()),
    **product_cases.PUBLIC,
}
CASES = (
    *_norm_cases(), *_row_cases(), *_router_cases(), *_mhc_cases(), *_few_mhc_cases(),
    *_quantise_cases(), *_cache_cases(), *_pool_cases(), *_attention_cases(), *_query_cases(),
    *_heads_cases(), *_indexer_cases(), *product_cases.CASES,
)  # fmt: skip


class RecordingKernel:
    """A compiled kernel that keeps what it is called with."""

    def __init__(self, entry: Any, arguments: Any, target: Any) -> None:
        self.target = target
        self.entry = f"{entry.__module__.rpartition('.')[2]}.{entry.__name__}"
        # What the key of the cache is made of, without the names of modules.
        self.compiled = [_MODULES.sub("", compiling._described(argument)) for argument in arguments]
        self.launched: list[Any] = []

    def __call__(self, *arguments: Any) -> None:
        self.launched.append(arguments)

    def shown(self, names: PointerNames) -> dict[str, Any]:
        """Return what the kernel was compiled with, and its one launch."""
        (launched,) = self.launched
        return {
            "entry": self.entry,
            "target": self.target.name,
            "compiled": self.compiled,
            "launched": [names.shown(each) for each in launched],
        }


@contextmanager
def recording(kernel: str, target: str) -> Iterator[list[RecordingKernel]]:
    """Let launches of a kernel end at recording ones, with a GPU of `target` pretended."""
    kernels: list[RecordingKernel] = []
    held: list[Tensor] = []  # so that no two allocations get one address
    empty = torch.empty

    def allocated(*shape: Any, **kind: Any) -> Tensor:
        held.append(empty(*shape, **kind))
        return held[-1]

    def compiled(
        entry: Any, arguments: Any, target: Any, _settings: Any, _described: Any
    ) -> RecordingKernel:
        kernels.append(RecordingKernel(entry, arguments, target))
        return kernels[-1]

    instead = {
        "compile_kernel": compiled,
        "require_device": lambda _tensors: 0,
        "target_of_device": lambda _device: TARGETS[target],
        "current_stream": lambda device: f"stream of device {device}",
        "processors_of": lambda _device: PROCESSORS,
    }
    names = dict.fromkeys((kernel, *LAUNCHED_BY.get(kernel, ())))
    modules = [import_module(module_of(name)) for name in names]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "empty", allocated))
        places = (*modules, descriptor, runtime_operands)
        for place, name in product(places, instead):
            if hasattr(place, name):
                stack.enter_context(mock.patch.object(place, name, instead[name]))
        for module in modules:
            fresh = {
                name: each.__wrapped__
                for name, each in tuple(vars(module).items())
                if name.startswith("compile_") and hasattr(each, "__wrapped__")
            }
            stack.enter_context(mock.patch.dict(vars(module), fresh))
            for each in vars(module).values():
                for described in kernels_in(each):
                    cached: Any = described.compile_form
                    anew = {"compile_form": getattr(cached, "__wrapped__", cached)}
                    stack.enter_context(mock.patch.dict(vars(described), anew))
                    # What other suites of this process derived may be of other operands.
                    for name, of in vars(descriptor.Kernel).items():
                        if isinstance(of, cached_property) and name not in anew:
                            vars(described).pop(name, None)
        yield kernels


def kernels_in(value: Any) -> tuple[Any, ...]:
    """Return the descriptors that a value of a module is or has."""
    if isinstance(value, descriptor.KernelSequence):
        return value.kernels
    return (value,) if isinstance(value, descriptor.Kernel) else ()


@dataclass
class PointerNames:
    """Names of addresses: given operands, then allocated memory in the order of the pointers."""

    known: dict[int, str]

    def shown(self, argument: Any) -> str:
        """Return an argument of a launch as text."""
        if isinstance(argument, tuple):
            return f"({', '.join(self.shown(each) for each in argument)})"
        if isinstance(argument, str):
            return argument
        if not hasattr(argument, "__cache_key__"):
            return f"{type(argument).__name__} {argument.value}"
        element, _, alignment = argument.__cache_key__
        address = argument._pointer
        name = "none" if address == alignment else self.name_of(address)
        return f"{name} as {element.__name__} at {alignment}"

    def name_of(self, address: int) -> str:
        """Return the name of an address, a new one for memory that nobody gave."""
        made = sum(name.startswith("made") for name in self.known.values())
        return self.known.setdefault(address, f"made {made}")


def arguments_of(case: LaunchCase, run: Callable[[dict[str, Tensor]], Any]) -> dict[str, Any]:
    """Return what a launch of a case compiles with, passes and returns; `run` gets the operands."""
    tensors = case.tensors()
    with recording(case.kernel, case.target) as kernels:
        result = run(tensors)
    names = PointerNames({tensor.data_ptr(): name for name, tensor in tensors.items()})
    first, *others = (kernel.shown(names) for kernel in kernels)
    results = result if isinstance(result, tuple) else (result,)
    returned = [None if each is None else names.name_of(each.data_ptr()) for each in results]
    return first | {"returned": returned} | ({"then": others} if others else {})


def damaged(case: LaunchCase) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield operand, damage and the operands of a case with one of them damaged."""
    siblings = [launch_case.given for launch_case in CASES if launch_case.kernel == case.kernel]
    every = {name: of for given in siblings for name, of in given.items()}
    for name, of in case.given.items():
        given = case.tensors()
        tensor = given[name]
        wide = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
        for damage, other in (
            ("of another dtype", tensor.to(torch.float64)),
            ("of another shape", torch.cat([tensor.reshape(-1), tensor.reshape(-1)])),
            ("at another address", wide),
            ("with other strides", torch.zeros((*of.shape, 2), dtype=of.dtype)[..., 0]),
            ("left out", None),
        ):
            yield name, damage, {**given, name: other}
    for name in sorted(set(every) - set(case.given)):
        of = every[name]
        yield name, "too many", {**case.tensors(), name: torch.zeros(of.shape, dtype=of.dtype)}


def refusals_of(
    case: LaunchCase, run: Callable[[dict[str, Tensor]], Any]
) -> Iterator[tuple[str, str]]:
    """Yield operand with damage, and the error; nothing where there is none."""
    for name, damage, tensors in damaged(case):
        with recording(case.kernel, case.target):
            try:
                run(tensors)
            except DegarbleError as error:
                yield f"{case.kernel}: {name} {damage}", f"{type(error).__name__}: {error}"
            except (AttributeError, KeyError, TypeError):
                continue


def public(case: LaunchCase) -> Callable[[dict[str, Tensor]], Any]:
    """Return a call of a case's public function."""
    module = import_module(module_of(case.kernel))
    return lambda tensors: PUBLIC[case.kernel](module, case.problem, tensors)


def refusals(kernel: str) -> dict[str, str]:
    """Return the errors of every damaged operand of a kernel's cases, the first of each kind."""
    found: dict[str, str] = {}
    for case in CASES:
        if case.kernel == kernel:
            for name, text in refusals_of(case, public(case)):
                found.setdefault(name, text)
    return found


def kept() -> dict[str, dict[str, Any]]:
    """Return the arguments and refusals that are kept in a file."""
    found: dict[str, dict[str, Any]] = json.loads(KEPT.read_text())
    return found


def write() -> None:
    """Keep arguments and refusals as they are now."""
    arguments = {case.key: arguments_of(case, public(case)) for case in CASES}
    errors = {name: text for kernel in PUBLIC for name, text in refusals(kernel).items()}
    text = json.dumps({"arguments": arguments, "refusals": errors}, indent=1)
    KEPT.write_text(text + "\n")
