"""Weights of a decoder layer laid out for their GEMMs, and the product with a few rows.

A Matrix holds the chosen GEMM, its operands on the device, and the scale of its activations.
`multiply` quantises rows as the recipe requires, in the layout that the GEMM reads, without torch
arithmetic in between. Experts are stacked for the grouped kernel.

Shape letters: M rows, N outputs, K inputs, E experts, G groups, H heads, L head width, D hidden, F
width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.cutedsl.kernels import NoKernelError, exact_bf16, own
from degarble.harness.backends.cutedsl.linears import (
    LinearKernel,
    by_group,
    kernel_of_weight,
    nvfp4_parts,
    require_group_rows,
)
from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.formats.layouts import LINEAR, SWIZZLE_128X4
from degarble.kernels.gemm.gemv_problem import ROWS, GemvProblem, decodes, inner_held
from degarble.kernels.gemm.grouped_problem import GroupedFp8Problem, GroupedProblem, turns_first
from degarble.kernels.gemm.problem import COLUMNS_MULTIPLE, GemmProblem
from degarble.kernels.gemm.w4a16_problem import LARGEST_ROWS, W4A16Problem
from degarble.kernels.moe import by_row_problem
from degarble.kernels.moe.by_row_problem import ByRowProblem
from degarble.kernels.primitives.quantise_problem import Fp8Problem, QuantiseProblem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from degarble.harness.backends.cutedsl.kernels import ComponentPart, Kernels
    from degarble.harness.formats.weight import Weight
    from degarble.kernels.moe.problem import MoeProblem

BF16, NVFP4, FP8, W4A16, W4A16_WGMMA = (
    f"sm90_gemm_{each}" for each in ("bf16", "nvfp4", "fp8_block", "w4a16", "w4a16_wgmma")
)
GROUPED_FP8 = "sm90_gemm_grouped_fp8"
TILE_OF_FP8 = 128  # rows of weights that share a scale
STEP_OF_GROUPS = 64  # columns of a group in whole tiles: grouped_problem

# How a graph multiplies, chosen when it is built. Tiles: NVFP4 codes and BF16 by the GEMMs. Few
# rows: NVFP4 activations are quantised and decoded, exactly, and W4A16 multiplies them, by mma or
# in graphs of more than 16 lanes by wgmma; in graphs of very few lanes also each row by its own
# expert's matrices, and BF16 by the GEMV. The arithmetic is that of the recipe, and sums have these
# kernels' stated order. A row's bits depend on the choice and on which of the three the graph is,
# not on the number of its lanes nor on who is awake.
ALONE = "sm90_moe_by_row.ALONE"  # one row of a matrix
PRODUCTS_BY_ROW = "sm90_moe_by_row.PRODUCTS"  # of experts, not added up
SUM_BY_ROW = "sm90_moe_by_row.SUM"
TILES, FEW_ROWS = PRODUCTS = ("tiles", "few-rows")
MOST_ROWS = LARGEST_ROWS
MMA_ROWS = 16  # up to which mma is not slower: docs/design-notes/w4a16_kernel.md
VERY_FEW_ROWS = 4  # up to which experts by row are not slower: docs/design-notes/moe_kernel.md


def require_products(products: str, rows: int) -> None:
    """Raise for a choice that does not exist, or few rows where there are many."""
    if products not in PRODUCTS:
        raise UnknownName.among("products of a decoder", products, PRODUCTS)
    if products == FEW_ROWS and rows > MOST_ROWS:
        raise InvalidArgument(
            f"lanes of a decoder with products={FEW_ROWS!r}", rows, f"at most {MOST_ROWS}",
            f"Make a decoder with fewer lanes, or with products={TILES!r}.",
        )  # fmt: skip


def few_rows_kernel(rows: int) -> str:
    """Return the kernel of products of few rows in a graph of so many lanes."""
    return W4A16 if rows <= MMA_ROWS else W4A16_WGMMA


@dataclass(frozen=True)
class Matrix:
    """One weight [N, K]: its GEMM, the GEMM's operands, and its problem."""

    kernel: LinearKernel
    operands: Mapping[str, Tensor]
    input_scale: Tensor | None = None  # float32 [1], of NVFP4 activations
    factor: Tensor | None = None  # float32 [1], of W4A16 on decoded activations
    alone: Tensor | None = None  # int32 [1, 1], the matrix's number 0, for one row that walks it

    @property
    def outputs(self) -> int:
        """Return N."""
        found: int = getattr(self.kernel.problem, "outputs", 0) or self.kernel.problem.columns
        return found


def matrix_of(part: ComponentPart, name: str, weights: Mapping[str, Weight], device: Any) -> Matrix:
    """Lay a weight out for its GEMM; raise NoKernelError with the reason if there is none."""
    kernel, weight = kernel_of_weight(part, name), weights[name]
    if kernel.kernel == BF16:
        return Matrix(kernel, {"b": own(exact_bf16(name, weight).to(device))})
    if kernel.kernel == FP8:
        tensor = weight.quantised()
        codes = own(tensor.codes.to(device)).view(torch.float8_e4m3fn)
        return Matrix(kernel, {"b": codes, "b_scales": own(tensor.block_scale.to(device))})
    layout = SWIZZLE_128X4 if kernel.kernel == NVFP4 else LINEAR
    codes, scales, decode = nvfp4_on(device, weight, layout.name)
    if kernel.kernel == W4A16:
        return Matrix(kernel, {"codes": codes, "scales": scales, "decode_scale": decode})
    operands = {"b": codes, "b_scales": scales, "b_decode_scale": decode}
    return Matrix(kernel, operands, input_scale_of([weight], name).to(device))


def for_few_rows(matrix: Matrix, name: str) -> Matrix:
    """Return an NVFP4 matrix with the factor of its few-rows product; others as they are.

    Both tensor scales are folded into one, as the GEMM multiplies them.
    """
    if matrix.kernel.kernel != NVFP4:
        return matrix
    assert matrix.input_scale is not None, "NVFP4 activations have a scale"
    factor = matrix.input_scale * matrix.operands["b_decode_scale"]
    if not (factor.isfinite() & (factor.abs() >= torch.finfo(torch.float32).tiny)).all():
        raise NoKernelError(
            f"the product of both tensor scales of {name}, {factor.item():g}, is no normal number"
        )
    number = torch.zeros_like(factor, dtype=torch.int32).reshape(1, 1)
    return replace(matrix, factor=factor, alone=number)


def few_rows_problem(matrix: Matrix, rows: int) -> W4A16Problem:
    """Return W4A16's problem for an NVFP4 matrix as its GEMM has it."""
    problem: Any = matrix.kernel.problem
    return W4A16Problem(rows, problem.columns, problem.inner, SWIZZLE_128X4.name)


def decoded_rows(
    kernels: Kernels, x_MK: Tensor, scale: Tensor, gating: QuantiseProblem | None = None
) -> Tensor:
    """Quantise rows to NVFP4, after SwiGLU if a problem says so; return them without the scale."""
    rows, columns = x_MK.shape
    problem = gating or QuantiseProblem(rows, columns, LINEAR.name, decoded=True)
    return kernels.run("simt_quantise_nvfp4", problem, values=x_MK, decode_scale=scale)[0]


def few_rows_product(kernels: Kernels, matrix: Matrix, decoded_MK: Tensor, by: str) -> Tensor:
    """Multiply decoded rows by an NVFP4 matrix, by one of both W4A16 kernels: BF16 [M, N]."""
    assert matrix.factor is not None, "laid out for few rows"
    operands, problem = matrix.operands, few_rows_problem(matrix, 1)
    alone = by_row_problem.alone(problem.outputs, problem.columns, kernels.target)
    if by == W4A16 and len(decoded_MK) == 1 and alone is not None:
        return kernels.run(
            ALONE, alone, x=decoded_MK,
            codes=operands["b"][None], scales=operands["b_scales"][None],
            decode_scale=operands["b_decode_scale"], input_scale=matrix.input_scale,
            number=matrix.alone,
        )[0]  # fmt: skip
    return kernels.run(
        by, replace(problem, rows=len(decoded_MK)), x=decoded_MK, codes=operands["b"],
        scales=operands["b_scales"], decode_scale=matrix.factor,
    )[0]  # fmt: skip


def nvfp4_on(device: Any, weight: Weight, layout: str = SWIZZLE_128X4.name) -> tuple[Tensor, ...]:
    """Return codes, scales in a layout, and the decode scale [1], on the device."""
    return tuple(own(part.to(device)) for part in nvfp4_parts(weight, layout))


def input_scale_of(weights: Sequence[Weight], name: str) -> Tensor:
    """Return the decode scale of activations before weights that share them [1]."""
    known = [weight.input_scale for weight in weights if weight.input_scale is not None]
    if len(known) < len(weights):
        raise NoKernelError(f"no input scale in front of {name}: quantise with --calibration")
    return torch.stack([tensor.float().reshape(()) for tensor in known]).amax().reshape(1)


def multiply(kernels: Kernels, matrix: Matrix, x_MK: Tensor, few: str = "") -> Tensor:
    """Quantise rows as the matrix requires, and multiply: BF16 [M, N].

    `few` is the kernel of products of few rows, in a graph that has them.
    """
    kernel, (rows, inner) = matrix.kernel, x_MK.shape
    if few and kernel.kernel == NVFP4:
        assert matrix.input_scale is not None, "NVFP4 activations have a scale"
        decoded = decoded_rows(kernels, x_MK, matrix.input_scale)
        return few_rows_product(kernels, matrix, decoded, few)
    if kernel.kernel == BF16:
        given: dict[str, Tensor | None] = {"a": x_MK}
    elif kernel.kernel == W4A16:
        given = {"x": x_MK}
    elif kernel.kernel == FP8:
        kind = kind_of(matrix.operands["b_scales"])
        codes, scales = kernels.run("simt_quantise_fp8", Fp8Problem(rows, inner, kind), values=x_MK)
        given = {"a": codes, "a_scales": scales}
    else:
        problem = QuantiseProblem(rows, inner, SWIZZLE_128X4.name)
        codes, scales = kernels.run(
            "simt_quantise_nvfp4", problem, values=x_MK, decode_scale=matrix.input_scale
        )
        given = {"a": codes, "a_scales": scales, "a_decode_scale": matrix.input_scale}
    problem_here = replace(kernel.problem, rows=rows)
    return kernels.run(kernel.kernel, problem_here, **given, **matrix.operands)[0]


def widely(kernels: Kernels, weight_NK: Tensor, x_MK: Tensor, *, few: bool) -> Tensor:
    """Multiply BF16 rows by a BF16 weight into float32: by the GEMV for few, else the grouped GEMM.

    `few` is a fact of the graph, not of this call, whose rows may be those that speak. If the
    columns are not whole vectors of a GEMM, the GEMV takes all.
    """
    if few or len(weight_NK) % COLUMNS_MULTIPLE:
        return by_gemv(kernels, weight_NK, x_MK, "fp32")
    columns, inner = weight_NK.shape
    grouped = GroupedProblem(len(x_MK), 1, columns, inner, out="fp32")
    return kernels.run("sm90_gemm_grouped", grouped, a=x_MK, b=weight_NK)[0]


def by_gemv(kernels: Kernels, weight_NK: Tensor, x_MK: Tensor, out: str, spared: int = 0) -> Tensor:
    """Multiply BF16 rows by a BF16 weight, few rows a launch."""
    columns, inner = weight_NK.shape
    most = max(each for each in ROWS if inner <= inner_held(each))
    tensors = [
        kernels.run(
            "simt_gemv_bf16", GemvProblem(len(some), columns, inner, out, spared=spared),
            x=own(some), weight=weight_NK,
        )[0]
        for some in x_MK.split(most)
    ]  # fmt: skip
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def gemv_turned(
    kernels: Kernels,
    groups: DenseGroups,
    heads_MHL: Tensor,
    turning: tuple[Tensor, Tensor],
    scale: Tensor | None,
) -> tuple[Tensor, ...]:
    """Turn heads back and multiply groups of them, each by its own weight, in one launch.

    With a scale the products are quantised by it where that can be, and returned decoded as well.
    """
    (table, positions), (rows, _, width) = turning, heads_MHL.shape
    of, weight = 1 if groups.dense else groups.groups, groups.weight
    columns, inner = weight.shape[0] // of, weight.shape[1]
    problem = GemvProblem(rows, columns, inner, "bf16", of, width, len(table))
    if scale is not None and not decodes(problem):
        scale = None
    return kernels.run(
        "simt_gemv_bf16", replace(problem, decoded=scale is not None), x=heads_MHL.flatten(1),
        weight=weight, turns=table, positions=positions, decode_scale=scale,
    )  # fmt: skip


def side_by_side(matrices: Sequence[Matrix]) -> tuple[Matrix, ...]:
    """Stack matrices over one input by rows; return them separately if they do not stack.

    FP8 needs whole tiles of rows under one scale; NVFP4 has a tensor scale for every matrix.
    """
    first = matrices[0]
    outputs = [matrix.outputs for matrix in matrices]
    whole = first.kernel.kernel == BF16 or all(n % TILE_OF_FP8 == 0 for n in outputs)
    kernels = {matrix.kernel.kernel for matrix in matrices}
    if kernels not in ({BF16}, {FP8}) or not whole:
        return tuple(matrices)
    operands = {
        name: torch.cat([matrix.operands[name] for matrix in matrices]) for name in first.operands
    }
    problem = replace(first.kernel.problem, columns=sum(outputs))
    return (Matrix(LinearKernel(first.kernel.kernel, problem), operands),)


# ---- experts and wo_a ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Experts:
    """Stacked NVFP4 experts as sm90_moe_nvfp4 reads them: the tensors of both products.

    `alone` has gate, up and down of a single expert for products of few rows, in the same memory.
    """

    tensors: Mapping[str, Tensor]
    alone: tuple[Matrix, ...] = ()
    with_shared: bool = False  # whether the last one is the shared expert

    @property
    def routed(self) -> Mapping[str, Tensor]:
        """Return the tensors of the routed experts."""
        if not self.with_shared:
            return self.tensors
        return {name: tensor[:-1] for name, tensor in self.tensors.items()}

    @property
    def shared(self) -> Experts:
        """Return the shared expert, in the same memory."""
        assert self.with_shared, "the last expert is the shared one"
        return Experts({name: tensor[-1:] for name, tensor in self.tensors.items()})


def experts_of(
    names: Sequence[tuple[str, str, str]], weights: Mapping[str, Weight], device: Any
) -> Experts:
    """Stack experts; `names` are those of w1, w3 and w2 of each."""
    first: list[list[tuple[Tensor, ...]]] = []
    second: list[list[tuple[Tensor, ...]]] = []
    scales: dict[str, list[Tensor]] = {"w13": [], "w2": []}
    for one, three, two in names:
        both = [weights[one], weights[three]]
        first.append([nvfp4_on(device, weight) for weight in both])
        second.append([nvfp4_on(device, weights[two])])
        scales["w13"].append(input_scale_of(both, one))
        scales["w2"].append(input_scale_of([weights[two]], two))
    made: dict[str, Tensor] = {}
    for name, found in (("w13", first), ("w2", second)):
        for place, part in enumerate(("codes", "scales", "decode_scale")):
            stacked = torch.stack([torch.stack([m[place] for m in each]) for each in found])
            stacked = stacked if name == "w13" else stacked[:, 0]
            made[f"{name}_{part}"] = own(stacked.squeeze(-1) if part == "decode_scale" else stacked)
        made[f"{name}_input_scale"] = own(torch.cat(scales[name]).to(device))
    return Experts(made)


def alone_for_few_rows(experts: Experts, name: str) -> Experts:
    """Return a single expert with its matrices for products of few rows."""
    found = []
    for product, leading in (("w13", (0, 0)), ("w13", (0, 1)), ("w2", (0,))):
        codes, scales, decode = (
            experts.tensors[f"{product}_{part}"][leading]
            for part in ("codes", "scales", "decode_scale")
        )
        problem = GemmProblem(1, codes.shape[0], codes.shape[1] * 2, "nvfp4", "e4m3")
        operands = {"b": codes, "b_scales": scales, "b_decode_scale": decode.reshape(1)}
        scale = experts.tensors[f"{product}_input_scale"][:1]
        matrix = Matrix(LinearKernel(NVFP4, problem), operands, scale)
        found.append(for_few_rows(matrix, f"{name}{product}"))
    return replace(experts, alone=tuple(found))


def joined(routed: Experts, shared: Experts) -> Experts:
    """Stack the shared expert behind the routed ones; return those if it has other extents."""
    pairs = [(tensor, shared.tensors[name]) for name, tensor in routed.tensors.items()]
    if any(one.shape[1:] != other.shape[1:] for one, other in pairs):
        return routed
    tensors = {
        name: torch.cat([routed.tensors[name], shared.tensors[name]]) for name in routed.tensors
    }
    return Experts(tensors, with_shared=True)


def few_rows_expert(
    kernels: Kernels, matrices: Sequence[Matrix], x_MK: Tensor, limit: float | None, by: str
) -> Tensor:
    """Compute a single expert: two products, SwiGLU, a product; roundings are the expert's own."""
    gate, up, down = matrices
    assert gate.input_scale is not None, "gate and up share a scale"
    assert down.input_scale is not None, "NVFP4 activations have a scale"
    x = decoded_rows(kernels, x_MK, gate.input_scale)
    # Trap: torch joins the halves; W4A16 has one tensor scale a launch, and gate and up have two.
    halves = torch.cat([few_rows_product(kernels, matrix, x, by) for matrix in (gate, up)], dim=1)
    gating = QuantiseProblem(
        len(x), gate.outputs, LINEAR.name, "swiglu", limit=limit, decoded=True
    )  # fmt: skip
    gated = decoded_rows(kernels, halves, down.input_scale, gating)
    return few_rows_product(kernels, down, gated, by)


def experts_by_row(
    kernels: Kernels, experts: Experts, moe: MoeProblem, given: Mapping[str, Tensor | None]
) -> Tensor:
    """Compute routed experts of few rows, each row by its own expert's matrices.

    Without `shared` in `given` the shared expert is one of them.
    """
    rides = given.get("shared") is None
    tensors = experts.tensors if rides else experts.routed
    return kernels.run("sm90_moe_by_row", ByRowProblem(moe, rides), **given, **tensors)[0]


@dataclass(frozen=True)
class ExpertRows:
    """What experts made of their rows, not added up: the next launch does that."""

    products: Tensor  # BF16 [R, D]
    places: Tensor  # int32 [T K], rows of a token's experts
    weights: Tensor  # float32 [T, K]
    shared: Tensor | None  # BF16 [T, D]; None: its rows are the first ones
    problem: ByRowProblem


def rows_of_experts(
    kernels: Kernels, experts: Experts, moe: MoeProblem, given: Mapping[str, Tensor | None]
) -> ExpertRows:
    """Compute routed experts of few rows as `experts_by_row` does, without adding them up."""
    shared, weights = given.get("shared"), given["weights"]
    assert weights is not None, "the router weighs what it chooses"
    problem = ByRowProblem(moe, shared is None)
    tensors = experts.tensors if shared is None else experts.routed
    products, places = kernels.run(
        PRODUCTS_BY_ROW, problem, x=given["x"], experts=given["experts"], **tensors
    )
    return ExpertRows(products, places, weights, shared, problem)


def added_up(kernels: Kernels, rows: ExpertRows) -> Tensor:
    """Add up what experts made, by a launch of its own."""
    problem = by_row_problem.summed(rows.problem, shared=rows.shared is not None)
    return kernels.run(
        SUM_BY_ROW, problem, products=rows.products, places=rows.places, weights=rows.weights,
        shared=rows.shared,
    )[0]  # fmt: skip


@dataclass(frozen=True)
class DenseGroups:
    """V4's wo_a in BF16: a grouped GEMM that also rotates heads, or one dense matrix."""

    weight: Tensor  # BF16 [G N, K of a group], dense: [G N, G K] with zeros beside the groups
    groups: int
    dense: bool


def groups_of(weight: Tensor, groups: int) -> DenseGroups:
    """Choose how groups are multiplied; narrow ones are zero-padded to one dense matrix."""
    if groups == 1 or weight.shape[0] // groups % STEP_OF_GROUPS == 0:
        return DenseGroups(weight, groups, dense=False)
    (rows, inner), each = weight.shape, weight.shape[0] // groups
    whole = weight.new_zeros(rows, groups * inner)
    for group in range(groups):
        own_rows = slice(group * each, (group + 1) * each)
        whole[own_rows, group * inner : (group + 1) * inner] = weight[own_rows]
    return DenseGroups(whole, groups, dense=True)


@dataclass(frozen=True)
class CodedGroups:
    """V4's wo_a in FP8: all groups as one matrix [G N, K], or narrow groups one by one."""

    kernel: LinearKernel  # of one group
    parts: tuple[tuple[Tensor, Tensor], ...]  # codes [N, K] and scales of each, or of all at once
    groups: int
    whole: bool

    def problem(self, rows: int, turned: int = 0, positions: int = 0) -> GroupedFp8Problem:
        """Return the product of all groups, with heads of `turned` values or with codes."""
        (codes, scales), *_ = self.parts
        columns, inner = len(codes) // self.groups, codes.shape[1]
        return GroupedFp8Problem(
            rows, self.groups, columns, inner, kind_of(scales), turned, positions
        )


def kind_of(scales: Tensor) -> str:
    """Return the format name of FP8's block scales."""
    return "ue8m0" if scales.dtype is torch.uint8 else "float32"


def coded_groups_of(part: ComponentPart, weight: Weight, device: Any) -> CodedGroups:
    """Keep wo_a whole, or split it by groups narrower than a tile of the grouped kernel.

    A tile of 128 rows under one scale may contain several groups.
    """
    name, groups, rank = part.name, part.config.o_groups, part.config.o_lora_rank
    kernel = kernel_of_weight(replace(part, shapes={name: (rank, part.shapes[name][1])}), name)
    if kernel.kernel != FP8:
        raise NoKernelError(f"groups of {rank} rows by {kernel.kernel} have no kernel in a layer")
    require_group_rows(rank)
    whole = rank % STEP_OF_GROUPS == 0 and part.shapes[name][1] % TILE_OF_FP8 == 0
    cut = by_group(weight, 1, groups * rank) if whole else by_group(weight, groups, rank)
    found = (tuple(own(tensor.to(device)) for tensor in of) for of in cut)
    parts = tuple((codes.view(torch.float8_e4m3fn), scales) for codes, scales in found)
    return CodedGroups(kernel, parts, groups, whole)


def coded_product(
    kernels: Kernels, groups: CodedGroups, heads: Tensor, turning: tuple[Tensor, Tensor]
) -> Tensor:
    """Rotate heads [M, H, L] back, quantise and multiply; in one launch if that is faster."""
    (rows, count, width), (table, positions) = heads.shape, turning
    given = {"turns": table, "positions": positions}
    (b, of_b), *_ = groups.parts
    if groups.whole and not turns_first(rows):
        problem = groups.problem(rows, width, len(table))
        return kernels.run(GROUPED_FP8, problem, a=heads.flatten(1), b=b, b_scales=of_b, **given)[0]
    kind = kind_of(of_b)
    fp8_problem = Fp8Problem(rows, count * width, kind, turned=width, positions=len(table))
    codes, scales = kernels.run("simt_quantise_fp8", fp8_problem, values=heads.flatten(1), **given)
    if groups.whole:
        problem = groups.problem(rows)
        return kernels.run(GROUPED_FP8, problem, a=codes, a_scales=scales, b=b, b_scales=of_b)[0]
    return group_by_group(kernels, groups, codes, scales)


def group_by_group(kernels: Kernels, groups: CodedGroups, codes: Tensor, scales: Tensor) -> Tensor:
    """Multiply narrow groups. Trap: torch slices codes and concatenates outputs."""
    count, problem = len(groups.parts), replace(groups.kernel.problem, rows=len(codes))
    cut = zip(codes.chunk(count, 1), scales.chunk(count, 1), groups.parts, strict=True)
    tensors = [
        kernels.run(FP8, problem, a=own(a), a_scales=own(of_a), b=b, b_scales=of_b)[0]
        for a, of_a, (b, of_b) in cut
    ]
    return torch.cat(tensors, dim=1)


def dense_product(kernels: Kernels, weight_NK: Tensor, x_MK: Tensor) -> Tensor:
    """Multiply BF16 by BF16."""
    problem = GemmProblem(x_MK.shape[0], *weight_NK.shape)
    return kernels.run(BF16, problem, a=x_MK, b=weight_NK)[0]
