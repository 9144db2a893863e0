"""Launch every Hopper and SIMT kernel on small inputs, for a memory checker to watch: a script.

    compute-sanitizer python -m degarble.suites.kernels.memory_checks GROUP

A group lists the kernels that it has to launch; a module in the list stands for every kernel that
it defines. Rows, columns and lists end within tiles. Results are left to the kernels' own suites:
only memory is checked here. Each tensor has an allocation of its own, so that a byte past its end
belongs to no other. `planted` launches a kernel on a tensor that is too short, which has to be
reported. Prints the kernels that were launched.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from degarble.harness.base.errors import DegarbleError, UnknownName
from degarble.kernels.attention import problem as attention
from degarble.kernels.attention.problem import QueryProblem
from degarble.kernels.cache.problem import KINDS, SlotsProblem
from degarble.kernels.indexer.problem import TopkProblem
from degarble.kernels.moe import problem as moe_problem
from degarble.kernels.moe.by_row_problem import ByRowProblem
from degarble.kernels.primitives import kv_problem
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.quantise_problem import SCALES, Fp8Problem
from degarble.kernels.rows.mhc_problem import LEAST_TOKENS, MOST_WITH_FOUR, MhcMixProblem
from degarble.kernels.rows.problem import (
    EmbedProblem,
    NormProblem,
    ResidualProblem,
    ScaleProblem,
)
from degarble.kernels.runtime.compiling import CompiledKernel, CompileSettings, current_stream
from degarble.kernels.runtime.modules import MODULES, kernel_named, module_of
from degarble.kernels.runtime.targets import target_of_device
from degarble.suites.kernels import (
    cache_checks,
    gemm_checks,
    indexer_checks,
    latent_checks,
    mhc_checks,
    row_checks,
)
from degarble.suites.kernels.attention import attention_checks, heads_checks
from degarble.suites.kernels.cache import compressor_checks, paged_pool_checks
from degarble.suites.kernels.gemm import grouped_checks, grouped_fp8_checks, w4a16_checks
from degarble.suites.kernels.indexer import indexer_operand_checks, topk_checks
from degarble.suites.kernels.moe import by_row_checks, decoded_checks, moe_checks
from degarble.suites.kernels.quantise import quantise_checks
from degarble.suites.kernels.rows import (
    head_checks,
    joined_checks,
    mhc_project_checks,
    residual_checks,
    router_checks,
)
from degarble.suites.support.probes import wgmma_checks

if TYPE_CHECKING:
    from collections.abc import Callable

SETTINGS = CompileSettings()
SEED = 61
SOURCES = Path(__file__).parents[2] / "kernels"
PROBES = Path(__file__).parents[1] / "support" / "probes"
# A module's kernels that lie in others.
OF_SHARED = {
    "sm90_attention_turns": ("attention/sm90_attention_kernel",),
    "sm90_moe_nvfp4": ("moe/few_rows",),
    "sm90_moe_decoded": ("moe/decoded_few", "moe/decoded_rows"),
    "sm90_moe_by_row": ("moe/w4a16_by_row", "gemm/w4a16_walk"),
}
_DEFINED = re.compile(r"(?m)^@cute\.kernel\ndef (\w+)\(")
_IN_PTX = re.compile(r"\.entry kernel_cutlass_(\w+?_kernel)_")


@dataclass(frozen=True)
class Group:
    """Launches, and the modules all of whose kernels they launch."""

    launch: Callable[[], None]
    kernels: tuple[str, ...]


def file_of(module: str) -> Path:
    """Return the file of a kernel's module, or of a probe's."""
    if module not in MODULES:
        return PROBES / f"{module}.py"
    inner = MODULES[module].removeprefix("degarble.kernels.").replace(".", "/")
    return SOURCES / f"{inner}.py"


def kernels_of(module: str) -> set[str]:
    """Return the names of all kernels that a module launches, its own name in front."""
    files = [file_of(module), *(SOURCES / f"{name}.py" for name in OF_SHARED.get(module, ()))]
    texts = [file.read_text(encoding="utf-8") for file in files]
    return {f"{module}.{name}" for text in texts for name in _DEFINED.findall(text)}


def _gemms(operands: str) -> Callable[[], None]:
    def launch() -> None:
        for n, form in enumerate(gemm_checks.forms(operands)):
            case = gemm_checks.with_form(form, (67 + n, 72, 4 * 128), "ordinary", n)
            gemm_checks.on_device(case, gemm_checks.SIDES[operands](case, "cuda"))

    return launch


def _grouped() -> None:
    for case in grouped_checks.fuzzed(SEED, 6):
        grouped_checks.launched(case, case.operands())


def _grouped_fp8() -> None:
    for case in grouped_fp8_checks.fuzzed(SEED, 6):
        grouped_fp8_checks.launched(case, grouped_fp8_checks.operands(case))


def _w4a16() -> None:
    for kernel in w4a16_checks.KERNELS:
        for case in w4a16_checks.fuzzed(SEED, 8, kernel):
            w4a16_checks.on_device(case)
    for by_row in by_row_checks.fuzzed(SEED, 8):
        by_row_checks.on_device(by_row)
    for hidden in (512, 4352):  # one token's products quantise their rows, or down alone does
        moe = moe_problem.MoeProblem(1, hidden, 256, 5, 3, 5, 10.0)
        alone = by_row_checks.Case(ByRowProblem(moe, shared=True))
        given = by_row_checks.given_of(alone)
        by_row_checks.launch_whole(alone, given, by_row_checks.memory_of(alone, given))


def _experts() -> None:
    tactics = tuple(moe_problem.TILES[moe_checks.TARGET].values())
    for n, case in enumerate(moe_checks.fuzzed(SEED, 2 * len(tactics))):
        tokens = min(case.problem.tokens, 70)
        few = replace(case, problem=replace(case.problem, tokens=tokens), tactic=tactics[n // 2])
        moe_checks.on_device(few, moe_checks.given_of(few))


def _decoded_experts() -> None:
    tactics = moe_problem.DECODED_TACTICS
    for n, case in enumerate(decoded_checks.fuzzed(SEED, 2 * len(tactics))):
        tokens = min(case.problem.tokens, 70)
        few = replace(case, problem=replace(case.problem, tokens=tokens), tactic=tactics[n // 2])
        decoded_checks.on_device(few)


def _shared_expert() -> None:
    kernels = import_module("degarble.kernels.moe.sm90_shared_expert")
    for tokens in (5, 33, 130):  # tiles of few rows, of 64 and of 128
        case = moe_checks.Case(moe_checks.one_expert(tokens, 256, 384, 10.0), seed=SEED)
        given = moe_checks.given_of(case)
        moe_checks.by_shared_expert(case, given)
        sides = [torch.zeros(*side, device="cuda") for side in ((768, 256), (256, 384))]
        made = [(w.to(torch.float8_e4m3fn), w[::128, ::128].contiguous()) for w in sides]
        names = ("w13", "w13_scales", "w2", "w2_scales")
        weights = dict(zip(names, (*made[0], *made[1]), strict=True))
        kernels.FP8.run(case.problem, SETTINGS, x=given.x, **weights)


def _attention(width: int, entries: tuple[str, ...]) -> Callable[[], None]:
    def launch() -> None:
        plain = attention_checks.Case(tokens=3, near=70, seed=SEED, key=width)
        for n, entry in enumerate(entries):
            for mode in attention.MODES:
                far = None if width == rows.WITH_KEY else 130 + n
                # Three splits merge in a cluster, twelve by a kernel of their own.
                splits, near = ((0, 70), (3, 70), (12, 700))[n % 3]
                case = replace(
                    plain, entry=entry, heads=9 + 37 * n, near=near, far=far, mode=mode,
                    lengths=n % 2 == 0, splits=splits, pages=(5, 64),
                )  # fmt: skip
                attention_checks.on_device(case, attention_checks.drawn(case))
        if width == rows.WITH_KEY:  # several pairs of tiles, each way in which splits end
            for entry, (splits, near) in product(entries, ((1, 330), (2, 700), (3, 700), (4, 700))):
                case = replace(
                    plain, entry=entry, heads=9, near=near, far=None, mode="decode", splits=splits
                )
                attention_checks.on_device(case, attention_checks.drawn(case))

    return launch


def _few_heads() -> None:
    """Attend in small batches, whose thread blocks have 16 or 32 heads."""
    for (tokens, heads), splits in product(((1, 70), (1, 9), (3, 40)), (2, 3, 8, 9)):
        # The first token of several has no keys.
        case = attention_checks.Case(
            tokens, heads, far=700, splits=splits, lengths=tokens > 1, seed=SEED
        )
        cases = [case]
        if case.lengths:
            cases.append(replace(case, key=rows.WITH_KEY, entry="fp8-v32", near=1300, far=None))
        for each in cases:
            assert attention.heads_of_block(each.problem) < attention.HEADS
            attention_checks.on_device(each, attention_checks.drawn(each))


def _blocks_that_stay() -> None:
    """Attend with prompts of more items than thread blocks that run at a time."""
    plain = attention_checks.Case(140, 70, far=130, mode="prefill", entry="bf16", seed=SEED)
    of_codes, of_v32 = replace(plain, entry="fp8"), replace(plain, key=rows.WITH_KEY, far=None)
    for case in (replace(plain, lengths=True), of_codes, replace(of_v32, near=330, lengths=True)):
        attention_checks.on_device(case, attention_checks.drawn(case))


WRONG_GUESSES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "one more": lambda true, tensor, at: true(tensor, at) + 1,
    "zero": lambda true, tensor, at: true(tensor, at) * 0,
    "negative": lambda true, tensor, at: true(tensor, at) * 0 - 7,
    "the largest": lambda true, tensor, at: true(tensor, at) * 0 + 0x7FFF_FFFF,
}


def _wrong_guesses() -> None:
    """Launch every kernel that guesses before its wait (runtime/pdl), each guess a wrong one."""
    words = "degarble.kernels.primitives.device_words"
    few = heads_checks.Case("keys", kv_problem.TOKENS_GUESSED, 5, heads_checks.KEYS, seed=3)
    guessing = {  # where a kernel guesses, and what launches it
        "simt_compressor": (module_of("simt_compressor"), _compressed_one_by_one),
        "simt_paged_pool": (module_of("simt_paged_pool"), _pooled_one_by_one),
        "simt_qnorm_rope": (words, _few_turned_heads),
        "simt_latent_query": (words, partial(_latent_queries, kv_problem.TOKENS_GUESSED)),
        heads_checks.KERNEL: (words, partial(heads_checks.launched, few)),
    }
    for (name, (place, launch)), wrong in product(guessing.items(), WRONG_GUESSES.values()):
        module, kernels = import_module(place), import_module(module_of(name))
        with (
            mock.patch.object(module, "guessed", partial(wrong, module.guessed)),
            mock.patch.object(kernels, "KERNEL", replace(kernels.KERNEL)),
        ):
            launch()


def _compressed_one_by_one() -> None:
    for case in _one_by_one():
        compressor_checks.mismatch(case)


def _pooled_one_by_one() -> None:
    for case in _one_by_one():
        paged_pool_checks.mismatch(case)
    for position in (4, 5, 6, 7):  # behind the only page there is nothing
        paged_pool_checks.on_device(paged_pool_checks.call_on_one_page(position))


def _few_turned_heads() -> None:
    head_checks.on_device(head_checks.Case("norm", kv_problem.TOKENS_GUESSED, 5, seed=SEED))


def _latent_queries(tokens: int) -> None:
    queries = kernel_named("simt_latent_query")
    queries.run(
        QueryProblem(tokens, 8, 192, 40), SETTINGS, latent=_normal(tokens, 8, 512),
        heads=_normal(tokens, 8, 192), turns=latent_checks.table_of_turns(40).cuda(),
        positions=torch.tensor([0, 39, 40, -1, 7], device="cuda").repeat(tokens)[:tokens],
    )  # fmt: skip


def _scores() -> None:
    # FP8 has other warpgroups than BF16, and others again where each token has its sequence.
    fp8 = indexer_checks.ScoresCase("fp8", 64, (577, 70, 3), (9, 1, 1), 4, 16)
    # Of one token a block asks for keys early; a sequence without a token is no block's.
    one_token = replace(fp8, fresh=(1, 1, 1)), replace(fp8, fresh=(1, 0, 1), page=64)
    for case in (*indexer_checks.fuzzed(SEED, 6), fp8, *one_token):
        indexer_checks.on_device(case, indexer_checks.sides(case, "cuda").given)


def _operands() -> None:
    for case in indexer_operand_checks.fuzzed(SEED, 12):
        indexer_operand_checks.on_device(case)


def _choices() -> None:
    # A row of registers, of a cluster, and streamed, where a sample misleads.
    problems = TopkProblem(5, 301, 30, 1), TopkProblem(3, 9001, 300, 1), TopkProblem(140, 9001, 900)
    choices = [topk_checks.TopkCase(problem, "low sample", SEED) for problem in problems]
    for choice in (*choices, *topk_checks.fuzzed(SEED, 6)):
        topk_checks.on_device(choice)
    for case in router_checks.fuzzed(SEED, 8):
        router_checks.on_device(case)


def _cache() -> None:
    for case in cache_checks.fuzzed(SEED, 14):
        cache_NB = cache_checks.on_device(case)
        pages = case.problem.pages
        slots = torch.arange(-1, min(pages.slots, 40), dtype=torch.int32)
        cache_checks.read_on_device(cache_NB, slots, kv_problem.ReadProblem(len(slots), pages))


def _paged_pool() -> None:
    for case in paged_pool_checks.fuzzed(SEED, 6):
        paged_pool_checks.mismatch(case)
    _pooled_one_by_one()


def _one_by_one() -> list[compressor_checks.Case]:
    """One sequence, of which single tokens close a window."""
    begun = ((4, 6), (128, 126))
    return [
        compressor_checks.Case(ratio, 512, ((count,), (1,), (1,)), seed=SEED)
        for ratio, count in begun
    ]


def _compressor() -> None:
    for case in compressor_checks.fuzzed(SEED, 6):
        compressor_checks.mismatch(case)
    _compressed_one_by_one()


def _streams() -> None:
    many = mhc_checks.Case(MhcMixProblem(MOST_WITH_FOUR + 9, 8, "coefficients"))
    for case in (many, *mhc_checks.fuzzed(SEED, 14)):
        mhc_checks.on_device(case)
    # A piece that is one step has a kernel of its own.
    steps = [mhc_project_checks.Case(tokens, 192) for tokens in (3, LEAST_TOKENS + 1)]
    for projected in (*steps, *mhc_project_checks.fuzzed(SEED, 6)):
        mhc_project_checks.on_device(projected)


def _joined() -> None:
    for kernel in joined_checks.KERNELS:
        for case in joined_checks.fuzzed(kernel, SEED, 4):
            joined_checks.on_device(case)


def _rows() -> None:
    whole = [row_checks.NormCase(NormProblem(3, 4096, layout=name)) for name in (None, "128x4")]
    walked = row_checks.NormCase(NormProblem(900, 7168, layout="128x4"))  # rows one after another
    for case in (*whole, walked, *row_checks.fuzzed_norms(SEED, 8)):
        row_checks.norm_on_device(case)
    for gemv in row_checks.fuzzed_gemvs(SEED, 6):
        row_checks.product_on_device(gemv)
    for kind in ("norm", "back"):
        for heads in head_checks.fuzzed(kind, SEED, 6):
            head_checks.on_device(heads)


def _sums() -> None:
    whole = residual_checks.Case(ResidualProblem(3, 4096))
    for case in (whole, *residual_checks.fuzzed(SEED, 6)):
        residual_checks.on_device(case)
    scale = import_module(module_of("simt_scale"))
    scale.KERNEL.run(ScaleProblem(165, 0.5), SETTINGS, values=torch.randn(5, 33, device="cuda"))
    _latent_queries(5)


def _heads() -> None:
    for kind in heads_checks.KINDS:
        heads_checks.launched(next(case for case in heads_checks.cases() if case.kind == kind))
    for case in heads_checks.fuzzed(SEED, 10):
        heads_checks.launched(case)


def _quantised() -> None:
    for case in quantise_checks.fuzzed(SEED, 10):
        quantise_checks.on_device(case)
    fp8 = kernel_named("simt_quantise_fp8")
    for scales in SCALES:
        fp8.run(Fp8Problem(7, 384, scales), SETTINGS, values=_normal(7, 384))


def _looked_up() -> None:
    embed, slots = map(kernel_named, ("simt_embed", "simt_slots"))
    id_T = torch.tensor([0, 99, -1, 100, 7], device="cuda")
    embed.run(EmbedProblem(5, 100, 264), SETTINGS, ids=id_T, table=_normal(100, 264))
    for kind in KINDS:
        problem = SlotsProblem(5, 33, kind, 2, 40, 4)
        positions = torch.tensor([0, 5, 39, 40, 700], device="cuda")
        owners = torch.tensor([0, 1, -1, 2, 1], dtype=torch.int32, device="cuda")
        table = torch.arange(80, dtype=torch.int32, device="cuda").reshape(2, 40)
        numbers = torch.randint(-2, 43, (5, 33), device="cuda").int()
        given = {"positions": positions, "owners": owners, "table": table}
        given |= {"numbers": numbers} if kind == "chosen" else {}
        slots.run(problem, SETTINGS, **given)


def _normal(*shape: int) -> Any:
    return torch.randn(shape, device="cuda").bfloat16()


def _probes() -> None:
    for case in list(wgmma_checks.cases())[:3]:
        wgmma_checks.on_device(case)


def _planted() -> None:
    crowded, runtime = (
        import_module(name)
        for name in ("degarble.suites.kernels.runtime.crowded_kernel", "cutlass.cute.runtime")
    )
    short = torch.zeros(16, device="cuda")
    kernel = crowded.compile_crowded(128, target_of_device(), SETTINGS)
    space = import_module("cutlass").cute.AddressSpace.gmem
    number = import_module("cutlass").Float32
    kernel(runtime.make_ptr(number, short.data_ptr(), space, assumed_align=16), current_stream())


GROUPS = {
    "bf16": Group(_gemms("bf16"), ("sm90_gemm_bf16",)),
    "nvfp4": Group(_gemms("nvfp4"), ("sm90_gemm_nvfp4",)),
    "fp8_block": Group(_gemms("fp8_block"), ("sm90_gemm_fp8_block",)),
    "grouped": Group(_grouped, ("sm90_gemm_grouped",)),
    "grouped in FP8": Group(_grouped_fp8, ("sm90_gemm_grouped_fp8", "simt_quantise_fp8")),
    "w4a16, experts by row": Group(_w4a16, (*w4a16_checks.KERNELS, "sm90_moe_by_row")),
    "experts": Group(_experts, ("sm90_moe_nvfp4", "simt_moe_rows")),
    "decoded experts": Group(_decoded_experts, ("sm90_moe_decoded",)),
    "shared expert": Group(
        _shared_expert, ("sm90_moe_nvfp4", "sm90_gemm_fp8_block", "simt_quantise_fp8")
    ),
    "attention": Group(
        _attention(rows.WIDTH, tuple(kv_problem.ENTRIES)),
        ("sm90_attention_turns", "simt_attention_merge"),
    ),
    "absorbed": Group(
        _attention(rows.WITH_KEY, cache_checks.WITH_KEY),
        ("sm90_attention_turns", "simt_attention_merge"),
    ),
    "attention of few heads": Group(_few_heads, ("sm90_attention_turns", "simt_attention_merge")),
    "attention of prompts": Group(_blocks_that_stay, ()),
    "heads": Group(_heads, (heads_checks.KERNEL,)),
    "scores": Group(_scores, ("sm90_indexer_scores",)),
    "indexer rows": Group(_operands, ("simt_indexer_operand",)),
    "choices": Group(_choices, ("simt_indexer_topk", "simt_router")),
    "cache": Group(_cache, ("simt_kv_write", "simt_kv_read")),
    "compressor": Group(_compressor, ("simt_compressor",)),
    "paged_pool": Group(_paged_pool, ("simt_paged_pool",)),
    "wrong guesses": Group(
        _wrong_guesses,
        (
            "simt_compressor",
            "simt_paged_pool",
            "simt_qnorm_rope",
            "simt_latent_query",
            heads_checks.KERNEL,
        ),
    ),
    "streams": Group(_streams, ("simt_mhc", "simt_mhc_project")),
    "joined": Group(_joined, joined_checks.KERNELS),
    "rows": Group(
        _rows, ("simt_rmsnorm", "simt_gemv_bf16", "simt_qnorm_rope", "simt_inverse_rope")
    ),
    "sums": Group(_sums, ("simt_residual_norm", "simt_scale", "simt_latent_query")),
    "quantised": Group(_quantised, ("simt_quantise_nvfp4", "simt_quantise_fp8")),
    "looked up": Group(_looked_up, ("simt_embed", "simt_slots")),
    "probes": Group(_probes, ("sm90_probe_wgmma",)),
}
PLANTED = "planted"


def launched(name: str) -> list[str]:
    """Launch a group and return the names of the kernels that were."""
    if name != PLANTED and name not in GROUPS:
        raise UnknownName.among("group of launches", name, [*GROUPS, PLANTED])
    seen: set[str] = set()
    true = CompiledKernel.__call__

    def counted(kernel: CompiledKernel, *given: Any) -> None:
        module = kernel.name.partition(".")[0]
        seen.update(f"{module}.{name}" for name in _IN_PTX.findall(kernel.ptx))
        true(kernel, *given)

    with mock.patch.object(CompiledKernel, "__call__", counted):
        _planted() if name == PLANTED else GROUPS[name].launch()
        torch.cuda.synchronize()
    return sorted(seen)


def main(arguments: list[str]) -> int:
    """Launch one group and print what was launched."""
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    try:
        for name in launched(" ".join(arguments)):
            print(f"launched {name}", flush=True)  # noqa: T201  a script
    except DegarbleError as error:
        print(f"REFUSED: {error}", file=sys.stderr)  # noqa: T201  a script
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
