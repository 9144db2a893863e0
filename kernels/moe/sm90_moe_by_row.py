"""Experts for very few tokens (sm_90a, sm_100a): each row multiplies its own expert's matrices.

Five launches (`KERNEL`): `ROWS` quantises each token once for each of its experts, with that
expert's scale, and writes what the codes stand for, which is exact in BF16; `FC1` multiplies each
row by gate and by up of its expert; `GATED` quantises and decodes what SwiGLU makes of both; `FC2`
multiplies by down; `SUM` adds a token's slots in their order (simt_moe_rows). Products are walks
(w4a16_walk), or runs where matrices have parts of lines (w4a16_by_row). The shared expert's rows
come first, if its matrices are stacked behind the routed ones. Numbers of rows: by_row_problem.
For one token `SECOND` takes the place of `GATED` and `FC2` where the experts' width is at most 4096
(`GATING`, four launches), and `FIRST` that of `ROWS` and `FC1` where the hidden size is, too
(`UNDECODED`, three). `PRODUCTS` is `KERNEL` without the sum, `ALONE` is `FC2` for a matrix that is
no expert's, and for rows that were decoded alike: walks keep them in FP16.

Which expert a row has is read on the GPU from the router's output. An expert that is not here
leaves its slot out of the sum. Nothing here synchronises with the host, so a call can be captured
in a CUDA graph. Forms that load early (w4a16_walk) take for granted that what is in front, ROWS,
GATED or a walk, lets the next launch begin behind its own wait, and that nothing writes weights.
Shape letters: T tokens, K chosen, R rows, E experts, D hidden, F width.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, cute

from degarble.harness.formats import scalar_ops as codecs
from degarble.kernels.gemm import w4a16_problem as product
from degarble.kernels.gemm.w4a16_walk import launch_walk
from degarble.kernels.gemm.w4a16_walk_problem import W4A16WalkForm
from degarble.kernels.moe import by_row_problem as facts
from degarble.kernels.moe.by_row_problem import AnyForm, ByRowProblem, DecodeForm, DecodeProblem
from degarble.kernels.moe.problem import GATE_AND_UP, NONE, scale_bytes
from degarble.kernels.moe.simt_moe_rows import COMBINE, FLOATS, INTEGERS, flat, in_words
from degarble.kernels.moe.w4a16_by_row import launch_by_row
from degarble.kernels.primitives import device_words as words
from degarble.kernels.primitives.quantise_problem import BLOCK, SWIGLU, VALUES
from degarble.kernels.runtime.kernel import (
    Kernel,
    KernelSequence,
    LaunchContext,
    Operand,
    Operands,
    Presence,
    Storage,
    renamed,
)
from degarble.kernels.runtime.pdl import EARLY, wait_then_let_follow
from degarble.kernels.runtime.targets import SM90A

# ---- rows quantised and decoded ------------------------------------------------------------------


@cute.kernel
def decode_kernel(
    tensors: tuple[Any, ...], extents: tuple[Int32, ...], form: cutlass.Constexpr
) -> None:
    """Quantise a row with its expert's scale, and write codes times block scales."""
    # The product behind reads, before it waits, what a router made before this launch.
    wait_then_let_follow()
    values, experts, scales, decoded = tensors[:4]
    blocks, shared, routed, count, chosen = (Uint32(extent) for extent in extents)
    thread, _, _ = cute.arch.thread_idx()
    part, row, _ = cute.arch.block_idx()
    row = Uint32(row)
    block = Uint32(part) * facts.DECODING_THREADS + Uint32(thread)
    slot = product.slot_of(row, shared)
    expert = product.expert_of(row, Uint32(experts[slot]), (shared, routed, count))
    here = expert < count
    if cutlass.const_expr(form.source == VALUES.name):  # noqa: SIM102  traced
        if (block == 0) & (row >= shared):
            tensors[4][slot] = codecs.select(here, Int32(row), Int32(NONE))
    expert = codecs.select(here, expert, Uint32(0))
    if block < blocks:
        at, index = Int64(blocks), Int64(row) * Int64(blocks) + Int64(block)
        if cutlass.const_expr(form.source == VALUES.name):
            token = codecs.select(row < shared, row, slot // chosen)
            read = words.loaded(values, Int64(token) * at + Int64(block))
        else:
            # A row of the input is gate, then up.
            gate = 2 * Int64(row) * at + Int64(block)
            halves = words.loaded(values, gate), words.loaded(values, gate + at)
            read = words.swiglu_words(*halves, form.limit)
        decoding = words.decoding_of(Float32(scales[expert]))
        code, factor = words.coded_scale(words.block_amax(read), decoding)
        words.store(decoded, index, words.nvfp4_rounded(read, factor, code))


@cute.jit
def launch_decode(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch on blocks of a row, shared rows, routed, all experts, chosen; grid along x and y."""
    *known, along, rows = extents
    values, experts, scales, decoded, *places = pointers
    tensors = (
        in_words(values, words.BLOCK_WORDS),
        *flat((experts, scales)),
        in_words(decoded, words.BLOCK_WORDS),
        *flat(places),
    )
    decode_kernel(tensors, tuple(known), form).launch(
        grid=[along, rows, 1],
        block=[facts.DECODING_THREADS, 1, 1],
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------


def _decode_numbers(of: LaunchContext[DecodeProblem, DecodeForm]) -> tuple[Any, ...]:
    problem, moe = of.problem.by_row, of.problem.by_row.moe
    blocks = of.problem.columns // BLOCK
    counts = (problem.shared_rows, moe.routed, problem.experts, moe.chosen)
    return ((blocks, *counts, *of.problem.grid),)


_VALUES = Storage(Uint32, torch.bfloat16, 32)
_Rows = Operand[DecodeProblem]
_DECODE = Kernel[DecodeProblem, DecodeForm](
    entry=launch_decode,
    operands=(
        _Rows("values", _VALUES, lambda p: p.input_shape),
        _Rows(
            "experts",
            INTEGERS,
            lambda p: (p.by_row.moe.tokens, p.by_row.moe.chosen),
            label="experts of tokens",
        ),
        _Rows("input_scale", FLOATS, lambda p: (p.by_row.experts,), label="input scales"),
        _Rows("decoded", _VALUES, lambda p: (p.by_row.rows, p.columns), output=True),
        _Rows("places", INTEGERS, lambda p: (p.by_row.moe.slots,), output=True),
    ),
    choose_form=facts.choose_decode_form,
    kinds=((Int32,) * 7,),
    numbers=_decode_numbers,
    work=lambda problem: problem.by_row.rows,
)

_CODES = Storage(Uint8, torch.uint8, 16)
_Product = Operand[ByRowProblem]


@cute.jit
def launch_product(
    pointers: tuple[cute.Pointer, ...],
    numbers: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch a walk, or runs of sm90_gemm_w4a16 where a matrix has parts of lines."""
    if cutlass.const_expr(isinstance(form, W4A16WalkForm)):
        launch_walk(pointers, numbers, form, stream)
    else:
        launch_by_row(pointers, numbers, form, stream)


def _product_kinds(form: AnyForm) -> tuple[Any, ...]:
    return ((Int32,) * (10 if isinstance(form, W4A16WalkForm) else 12),)


def _product_numbers(of: LaunchContext[ByRowProblem, AnyForm]) -> tuple[Any, ...]:
    if isinstance(of.form, W4A16WalkForm):
        return (facts.walk_numbers(of.problem, of.form, of.processors),)
    division = of.tactic or facts.choose_division(of.problem, of.form, of.processors)
    return (facts.extents_of(of.problem, of.form, division),)


def _product(
    names: tuple[str, str, str],
    products: int,
    choose_form: Callable[[ByRowProblem, str], AnyForm],
) -> Kernel[ByRowProblem, AnyForm]:
    """Describe a product by the names of its rows, its matrices and its output."""
    rows, name, out = names
    of = partial(facts.matrix_problem, products=products)

    def leading(p: ByRowProblem) -> tuple[int, ...]:
        return (p.experts, GATE_AND_UP)[:products]

    def scales(p: ByRowProblem) -> tuple[int, ...]:
        return (*leading(p), scale_bytes(of(p).outputs, of(p).columns))

    return Kernel[ByRowProblem, AnyForm](
        entry=launch_product,
        operands=(
            _Product(rows, Storage(Uint8, torch.bfloat16, 16), lambda p: (p.rows, of(p).columns)),
            _Product(
                f"{name}_codes",
                _CODES,
                lambda p: (*leading(p), of(p).outputs, of(p).columns // 2),
                label=f"codes of {name}",
            ),
            _Product(f"{name}_scales", _CODES, scales, label=f"scales of {name}"),
            _Product(f"{name}_decode_scale", FLOATS, leading, label=f"decode scales of {name}"),
            _Product(
                out,
                Storage(BFloat16, torch.bfloat16, 2),
                lambda p: (p.rows, products * of(p).outputs),
                output=True,
            ),
            _Product(
                f"{name}_input_scale",
                FLOATS,
                lambda p: (p.experts,),
                label=f"input scales of {name}",
            ),
            _Product("experts", INTEGERS, lambda p: (p.moe.tokens, p.moe.chosen)),
        ),
        choose_form=choose_form,
        kinds=_product_kinds,
        numbers=_product_numbers,
        work=lambda problem: problem.rows,
    )


FC1 = _product(("x_rows", "w13", "gate_and_up"), GATE_AND_UP, facts.choose_first_form)
FC2 = _product(("hidden_rows", "w2", "products"), 1, facts.choose_second_form)
ALONE = renamed(
    FC2, hidden_rows="x", w2_codes="codes", w2_scales="scales", w2_decode_scale="decode_scale",
    products="out", w2_input_scale="input_scale", experts="number",
)  # fmt: skip
# The shared expert's rows are the first products: their address is that of all.
_SHARED = Presence[Any](
    lambda p: p.shared and not p.rides, "Give it where the shared expert's matrices are not here."
)
SUM = replace(
    COMBINE,
    operands=tuple(
        replace(operand, present=_SHARED, address_of="products")
        if operand.name == "shared"
        else operand
        for operand in COMBINE.operands
    ),
)


# Both products on rows that are not decoded yet: each in the place of two launches.
FIRST = replace(
    FC1,
    operands=(
        _Product("x", FC1.operands[0].storage, lambda p: (p.moe.tokens, p.moe.hidden)),
        *FC1.operands[1:],
        _Product("places", INTEGERS, lambda p: (p.moe.slots,), output=True),
    ),
    choose_form=lambda problem, _target: facts.undecoded_form(problem, VALUES.name),
    target=SM90A,
)
SECOND = replace(
    FC2,
    operands=(
        replace(FC1.operands[4], output=False, storage=FC2.operands[0].storage),
        *FC2.operands[1:],
    ),
    choose_form=lambda problem, _target: facts.undecoded_form(problem, SWIGLU.name),
    target=SM90A,
)


def _problems(problem: ByRowProblem, _tactic: None, given: Operands) -> tuple[Any, ...]:
    first, second = (DecodeProblem(problem, source.name) for source in (VALUES, SWIGLU))
    summed = facts.summed(problem, shared=given.get("shared") is not None)
    return first, problem, second, problem, summed


ROWS = renamed(_DECODE, values="x", input_scale="w13_input_scale", decoded="x_rows")
GATED = renamed(
    replace(_DECODE, operands=_DECODE.operands[:-1]),  # rows of tokens alone have places
    values="gate_and_up",
    input_scale="w2_input_scale",
    decoded="hidden_rows",
)


def _undecoded(problem: ByRowProblem, _tactic: None, given: Operands) -> tuple[Any, ...]:
    summed = facts.summed(problem, shared=given.get("shared") is not None)
    return problem, problem, summed


def _gating(problem: ByRowProblem, _tactic: None, given: Operands) -> tuple[Any, ...]:
    return DecodeProblem(problem, VALUES.name), *_undecoded(problem, None, given)


def _sum(_problem: ByRowProblem, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {"out": tensors["out"]}


def _rows(_problem: ByRowProblem, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {"products": tensors["products"], "places": tensors["places"]}


UNDECODED = KernelSequence[ByRowProblem]((FIRST, SECOND, SUM), _undecoded, _sum)
GATING = KernelSequence[ByRowProblem](
    (ROWS, FC1, SECOND, SUM), _gating, _sum, (UNDECODED, facts.serves_undecoded)
)
KERNEL = KernelSequence[ByRowProblem](
    (ROWS, FC1, GATED, FC2, SUM), _problems, _sum, (GATING, facts.serves_gating)
)


def _without_sum(sequence: KernelSequence[ByRowProblem]) -> KernelSequence[ByRowProblem]:
    """Return the products of a call: what adds up the rows reads them itself."""
    shorter = None
    if sequence.shorter is not None:
        shorter = _without_sum(sequence.shorter[0]), sequence.shorter[1]
    return KernelSequence(
        sequence.kernels[:-1], lambda *given: sequence.problems(*given)[:-1], _rows, shorter
    )


PRODUCTS = _without_sum(KERNEL)
