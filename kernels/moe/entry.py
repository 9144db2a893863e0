"""Describe FC1 and FC2 of routed experts, and the kernels of a whole call, for both targets.

A call runs plan, gather (simt_moe_rows), FC1, FC2, combine. Memory between them is allocated by the
call, unless its operands are given.
Shape letters: T tokens, K chosen, D hidden, F width of an expert, E experts here, R rows at most.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from cutlass import BFloat16, Float16, Int32, Uint32

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.formats.layouts import SWIZZLE_128X4, ceil_div
from degarble.harness.formats.number_formats import NVFP4, NibbleOrder, ScaleDirection
from degarble.harness.formats.quantise import require, require_same
from degarble.kernels.gemm.problem import FP8_BLOCK, TMA_ALIGNMENT, GemmProblem
from degarble.kernels.moe import problem as facts
from degarble.kernels.moe.problem import GATE_AND_UP, MoeForm, RowsProblem
from degarble.kernels.moe.simt_moe_rows import (
    COMBINE,
    FLOATS,
    GATHER,
    INTEGERS,
    LANES,
    PLAN,
    WARPS,
)
from degarble.kernels.primitives.quantise_problem import FP8_BLOCK as FP8_VALUES
from degarble.kernels.primitives.quantise_problem import Fp8Problem
from degarble.kernels.quantise.simt_quantise_fp8 import KERNEL as QUANTISER
from degarble.kernels.runtime.kernel import (
    Kernel,
    KernelSequence,
    LaunchContext,
    Operand,
    Presence,
    Storage,
    renamed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from degarble.harness.formats.quantise import QuantisedTensor
    from degarble.kernels.gemm.problem import GemmForm, GemmTactic
    from degarble.kernels.moe.problem import MoeProblem, RowsForm
    from degarble.kernels.runtime.compiling import CompiledKernel, CompileSettings
    from degarble.kernels.runtime.kernel import Operands
    from degarble.kernels.runtime.targets import Target

READ = 9  # pointers of a product that both read; then what its epilogue reads and writes
EXTENTS = 5  # of a launch: rows at most, N, K, experts, clusters
_CODED, _BOTH = ("x", "hidden"), "gate_and_up"
_Rows = Operand[RowsProblem]
_CODES = Storage(Uint32, torch.uint8, TMA_ALIGNMENT)
_SHOWN = Presence[Any](lambda of: of.shown, lambda p: f"It says shown={p.shown}.")


class ScaleWords(NamedTuple):
    """The DSL types in which a target reads scales, and in which its FC1 writes them."""

    read: Any
    written: Any


class ProductKernels(NamedTuple):
    """Both products of a target."""

    first: Kernel[RowsProblem, MoeForm]
    second: Kernel[RowsProblem, MoeForm]

    def compile_form(self, form: MoeForm, settings: CompileSettings) -> CompiledKernel:
        """Compile one of both; needs no GPU."""
        kernel = self.first if form.gemm.parts == GATE_AND_UP else self.second
        return kernel.compile_form(form, settings)


def _nvfp4_rows(
    name: str, width: Callable[[RowsProblem], int], scales: Any, *, output: bool = False
) -> tuple[_Rows, _Rows]:
    """Describe rows: packed codes [R, K / 2], and scale bytes in 128x4 order."""
    return (
        _Rows(f"{name}_codes", _CODES, lambda p: (p.rows, width(p) // 2), output=output),
        _Rows(
            f"{name}_scales",
            Storage(scales, torch.uint8, TMA_ALIGNMENT),
            lambda p: (facts.scale_bytes(p.rows, width(p)),),
            output=output,
        ),
    )


def _matrices(name: str, parts: int, scales: Any) -> tuple[_Rows, ...]:
    """Describe a product's matrices of all experts here, w1 and w3 of each, or w2."""

    def leading(p: RowsProblem) -> tuple[int, ...]:
        return (p.moe.experts, GATE_AND_UP)[:parts]

    def extents(p: RowsProblem) -> tuple[int, int]:
        sides = p.moe.width, p.moe.hidden
        return sides if parts == GATE_AND_UP else sides[::-1]

    def codes(p: RowsProblem) -> tuple[int, ...]:
        n, k = extents(p)
        return (*leading(p), n, k // 2)

    of_scales = Storage(scales, torch.uint8, TMA_ALIGNMENT)
    return (
        _Rows(f"{name}_codes", _CODES, codes, label=f"codes of {name}"),
        _Rows(
            f"{name}_scales", of_scales, lambda p: (*leading(p), facts.scale_bytes(*extents(p))),
            label=f"scales of {name}",
        ),
        _input_scale(name),
        _Rows(f"{name}_decode_scale", FLOATS, leading, label=f"decode scales of {name}"),
    )  # fmt: skip


def _input_scale(name: str) -> _Rows:
    """Describe the decode scale of what an expert's matrices are multiplied with."""
    label = f"input scales of {name}"
    return _Rows(f"{name}_input_scale", FLOATS, lambda p: (p.moe.experts,), label=label)


def described(entry: Callable[..., Any], target: Target, scales: ScaleWords) -> ProductKernels:
    """Describe both products of a target, which share an entry."""
    first = (
        *_nvfp4_rows("x", lambda p: p.moe.hidden, scales.read),
        *_matrices("w13", GATE_AND_UP, scales.read),
        *_order(),
        *_nvfp4_rows("hidden", lambda p: p.moe.width, scales.written, output=True),
        _input_scale("w2"),
        _Rows(
            "weights", FLOATS, lambda p: (p.moe.tokens, p.moe.chosen), label="routing weights"
        ),
        _Rows(
            _BOTH, Storage(Uint32, torch.bfloat16, 16),
            lambda p: (p.rows, GATE_AND_UP * p.moe.width), _SHOWN, output=True, passed=False,
        ),
    )  # fmt: skip
    second = (
        *_nvfp4_rows("hidden", lambda p: p.moe.width, scales.read),
        *_matrices("w2", 1, scales.read),
        *_order(),
        _Rows(
            "products", Storage(BFloat16, torch.bfloat16, TMA_ALIGNMENT),
            lambda p: (p.rows, p.moe.hidden), output=True,
        ),
    )  # fmt: skip
    return _products(entry, (first, second), target)


def _order() -> tuple[_Rows, ...]:
    """Describe what a product reads of a plan."""
    return (
        _Rows("rows", INTEGERS, lambda _: (1,)),
        _Rows("tiles", INTEGERS, lambda p: (p.sizes[2],)),
        _Rows("slots", INTEGERS, lambda p: (p.rows,)),
    )


def _products(
    entry: Callable[..., Any], operands: tuple[tuple[_Rows, ...], ...], target: Target
) -> ProductKernels:
    chosen = facts.choose_first_form, facts.choose_second_form
    return ProductKernels(
        *(
            Kernel[RowsProblem, MoeForm](
                entry=entry, operands=own, choose_form=choose, kinds=((Int32,) * EXTENTS,),
                numbers=_numbers, work=lambda problem: problem.moe.tokens, target=target,
            )
            for own, choose in zip(operands, chosen, strict=True)
        )
    )  # fmt: skip


def _numbers(of: LaunchContext[RowsProblem, MoeForm]) -> tuple[Any, ...]:
    moe = of.problem.moe
    clusters = facts.grid(moe, of.form, of.processors)
    return ((of.problem.rows, *facts.columns_of(moe, of.form), moe.experts, clusters),)


def described_decoded(
    gather: Callable[..., Any], entry: Callable[..., Any], target: Target
) -> tuple[Kernel[RowsProblem, RowsForm], ProductKernels]:
    """Describe what quantises and decodes rows, and both products of decoded rows."""

    def numbers(name: str, width: Callable[[RowsProblem], int], *, output: bool = False) -> _Rows:
        storage = Storage(Float16, torch.float16, TMA_ALIGNMENT)
        return _Rows(f"{name}_numbers", storage, lambda p: (p.rows, width(p)), output=output)

    def hidden(p: RowsProblem) -> int:
        return p.moe.hidden

    def width(p: RowsProblem) -> int:
        return p.moe.width

    weights = _Rows(
        "weights", FLOATS, lambda p: (p.moe.tokens, p.moe.chosen), label="routing weights"
    )
    first = (
        numbers("x", hidden), *_matrices("w13", GATE_AND_UP, Uint32), *_order(),
        numbers("hidden", width, output=True), _input_scale("w2"), weights,
    )  # fmt: skip
    second = (
        numbers("hidden", width), *_matrices("w2", 1, Uint32), *_order(),
        _Rows(
            "products", Storage(BFloat16, torch.bfloat16, TMA_ALIGNMENT),
            lambda p: (p.rows, p.moe.hidden), output=True,
        ),
    )  # fmt: skip
    gathered = replace(
        GATHER, entry=gather,
        operands=(
            *(each for each in GATHER.operands if not each.output),
            numbers("x", hidden, output=True),
        ),
        numbers=_decoded_gather_numbers, target=target, refuse=_require_decoded,
    )  # fmt: skip
    products = _products(entry, (first, second), target)
    return gathered, ProductKernels(
        *(replace(kernel, refuse=_require_decoded) for kernel in products)
    )


def _require_decoded(problem: RowsProblem, _tensors: Operands) -> None:
    facts.require_decoded(problem.moe, problem.tactic)


def _decoded_gather_numbers(of: LaunchContext[RowsProblem, RowsForm]) -> tuple[Any, ...]:
    moe = of.problem.moe
    blocks = moe.hidden // facts.BLOCK
    columns = ceil_div(blocks, LANES)  # a warp has 32 blocks of a row
    at_once = of.processors * facts.WALKERS // columns
    return ((blocks, moe.chosen, min(ceil_div(of.problem.rows, WARPS), max(1, at_once)), columns),)


def routed_experts(
    products: ProductKernels, target: Target, decoded: KernelSequence[MoeProblem] | None = None
) -> KernelSequence[MoeProblem]:
    """Return the kernels of a call: `out` is float32 [T, D], or BF16 with `shared` added.

    `decoded` are the kernels that decode rows once. They serve where `decodes_rows` says so, and
    where they have all that the call names, in the same shape.
    """
    shorter = None if decoded is None else (decoded, facts.decodes_rows)
    return _call((GATHER, *products), target, shorter)


def decoded_experts(
    gather: Kernel[RowsProblem, RowsForm], products: ProductKernels, target: Target
) -> KernelSequence[MoeProblem]:
    """Return the kernels of a call that decodes rows once."""
    return _call((gather, *products), target, choose=facts.choose_decoded_tactic)


def _call(
    kernels: tuple[Kernel[Any, Any], ...],
    target: Target,
    shorter: Any = None,
    choose: Callable[[MoeProblem], GemmTactic] | None = None,
) -> KernelSequence[MoeProblem]:
    def problems(
        problem: MoeProblem, tactic: GemmTactic | None, given: Operands
    ) -> tuple[Any, ...]:
        cut = tactic if choose is None else tactic or choose(problem)
        rows = facts.rows_of_call(problem, target.name, cut, mapped=_has(given, "local"))
        return rows, rows, rows, rows, facts.combined(rows, shared=_has(given, "shared"))

    every = (PLAN, *kernels, COMBINE)
    return KernelSequence(every, problems, lambda _, t: {"out": t["out"]}, shorter)


def shared_expert(products: ProductKernels, target: Target) -> KernelSequence[MoeProblem]:
    """Return the kernels of one expert that every token visits; `out` is BF16 [T, D].

    `experts` are zeros and `weights` are ones: tensors that the caller keeps.
    """

    def problems(
        problem: MoeProblem, tactic: GemmTactic | None, _given: Operands
    ) -> tuple[Any, ...]:
        _require_one_expert(problem)
        return (facts.rows_of_call(problem, target.name, tactic),) * 4

    # All tokens visit one expert, so rows are in the order of tokens; padding follows.
    return KernelSequence(
        (PLAN, GATHER, *products), problems, lambda p, t: {"out": t["products"][: p.tokens]}
    )


def shared_expert_fp8(gemm: Kernel[GemmProblem, GemmForm]) -> KernelSequence[MoeProblem]:
    """Return the kernels of that expert in FP8 by a target's product: quantise, multiply, twice.

    `w13` [2 F, D] has w1 above w3 and `w2` is [D, F], in E4M3; their scales are those of blocks of
    128 x 128.
    """

    def problems(problem: MoeProblem, _tactic: None, given: Operands) -> tuple[Any, ...]:
        _require_one_expert(problem)
        tokens, hidden, width = problem.tokens, problem.hidden, problem.width
        if hidden % FP8_VALUES or width % FP8_VALUES:
            raise ShapeMismatch(
                "hidden and width of an FP8 expert",
                (hidden, width),
                f"multiples of {FP8_VALUES}: w1 and w3 have blocks of their own",
                "Pad with zeros.",
            )
        of_weights = given.get("w13_scales")
        # The weights decide the scale format of activations too: a product takes one for both.
        coded = of_weights is not None and of_weights.dtype is torch.uint8
        scales = "ue8m0" if coded else "float32"
        both, kind = GATE_AND_UP * width, (FP8_BLOCK.name, scales)
        return (
            Fp8Problem(tokens, hidden, scales),
            GemmProblem(tokens, both, hidden, *kind),
            Fp8Problem(tokens, width, scales, "swiglu", problem.limit),
            GemmProblem(tokens, hidden, width, *kind),
        )

    x, hidden = ({"codes": f"{name}_codes", "scales": f"{name}_scales"} for name in _CODED)
    kernels = (
        renamed(QUANTISER, values="x", **x),
        renamed(
            gemm, a=x["codes"], a_scales=x["scales"], b="w13", b_scales="w13_scales", out=_BOTH
        ),
        renamed(QUANTISER, values=_BOTH, **hidden),
        renamed(gemm, a=hidden["codes"], a_scales=hidden["scales"], b="w2", b_scales="w2_scales"),
    )
    return KernelSequence(kernels, problems, lambda _, t: {"out": t["out"]})


def _require_one_expert(problem: MoeProblem) -> None:
    if problem.slots != problem.tokens or problem.routed != 1:
        raise ShapeMismatch(
            "experts of a shared expert",
            (problem.chosen, problem.routed),
            "one expert, which every token visits",
            "Give experts=1, chosen=1, routed=1.",
        )


def _has(given: Operands, name: str) -> bool:
    return given.get(name) is not None


def stacked(
    name: str, experts: Sequence[Sequence[QuantisedTensor]], input_scale_E: Tensor
) -> dict[str, Tensor]:
    """Return the operands of matrices as a checkpoint stores them: w1 and w3 of each, or w2.

    Raise for formats, layouts, scale directions and nibble orders that kernels do not read, and for
    mixtures of them.
    """
    every = [matrix for matrices in experts for matrix in matrices]
    require_same(*every)
    for matrix in every:
        require(
            matrix,
            format=NVFP4,
            layout=SWIZZLE_128X4,
            direction=ScaleDirection.DECODE,
            nibble_order=NibbleOrder.LOW_EVEN,
        )
    kinds = {(len(matrices), *(matrix.shape for matrix in matrices)) for matrices in experts}
    if len(kinds) != 1 or len({matrix.shape for matrix in every}) != 1:
        raise ShapeMismatch(
            "experts' matrices", sorted(map(str, kinds)), "one shape", "Pass one layer's experts."
        )
    parts = {
        "codes": [[matrix.codes for matrix in expert] for expert in experts],
        "scales": [[matrix.block_scale for matrix in expert] for expert in experts],
        "decode_scale": [[m.decode_scale.reshape(()) for m in expert] for expert in experts],
    }
    made = {f"{name}_{part}": _stacked(of_experts) for part, of_experts in parts.items()}
    return made | {f"{name}_input_scale": input_scale_E}


def _stacked(experts: list[list[Tensor]]) -> Tensor:
    """Stack expert by expert; of a single matrix each, without an extent of 1."""
    made = torch.stack([torch.stack(expert) for expert in experts])
    return made[:, 0].contiguous() if len(experts[0]) == 1 else made
