"""Run linear layers of every recipe by our GEMM kernels: choose the kernel, prepare operands.

The choice depends on the formats of weight and activation. Products of head, router and compressors
stay in float32. FP8 or MXFP4 weights with BF16 activations are multiplied as BF16, which is exact:
each value is a code times a power of two.

Shape letters: M rows, N outputs, K inputs, P = K / 2 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.backends.cutedsl.kernels import NoKernelError, own
from degarble.harness.base.errors import InvalidArgument
from degarble.harness.formats.layouts import LINEAR, SWIZZLE_128X4, to_layout
from degarble.harness.formats.number_formats import NibbleOrder, ScaleDirection
from degarble.kernels.gemm.gemv_problem import ROWS, GemvProblem, inner_held, rows_of_form
from degarble.kernels.gemm.problem import GemmProblem, choose_form
from degarble.kernels.gemm.w4a16_problem import LARGEST_ROWS, W4A16Problem
from degarble.kernels.primitives.quantise_problem import Fp8Problem, QuantiseProblem
from degarble.kernels.runtime.targets import SM90A

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from degarble.harness.backends.cutedsl.kernels import (
        ComponentCallWork,
        ComponentPart,
        Compute,
        Outputs,
    )
    from degarble.harness.formats.weight import Weight

_ACT_QUANT = ".act_quant"
_TILE = 128  # rows of FP8 weights that share a scale
_FP8_SCALES = {"UE8M0": "ue8m0", "F32": "float32"}
# A code by a power of two has at most four significant bits, so that BF16 holds it.
_EXACT_IN_BF16 = ("BF16", "FP8_128X128_UE8M0", "FP8_128X128_F32", "MXFP4", "MXFP8")


class LinearRows(NamedTuple):
    """Activations of a linear: values [M, K], or codes with their scales."""

    values: Tensor | None = None
    codes: Tensor | None = None
    block_scale: Tensor | None = None
    tensor_scale: Tensor | None = None

    def select(self, index: Tensor) -> LinearRows:
        """Select some of the rows."""
        parts = (None if part is None else part[index] if part.ndim else part for part in self)
        return LinearRows(*parts)


@dataclass(frozen=True)
class LinearKernel:
    """The kernel that multiplies a weight, and the problem for one row."""

    kernel: str
    problem: GemmProblem | W4A16Problem


def kernel_of_weight(part: ComponentPart, name: str) -> LinearKernel:
    """Choose the kernel of a weight; raise NoKernelError with the reason if there is none."""
    activation, weight = part.facts.activation(name), part.format_of(name)
    outputs, inner = part.shapes[name][-2:]
    if activation is None and weight == "NVFP4":
        return LinearKernel("sm90_gemm_w4a16", W4A16Problem(1, outputs, inner, LINEAR.name))
    if activation is None and weight in _EXACT_IN_BF16:
        problem = GemmProblem(1, outputs, inner)
    elif activation == weight == "NVFP4":
        problem = GemmProblem(1, outputs, inner, "nvfp4", "e4m3")
    elif activation and activation.startswith("FP8_1X128") and weight.startswith("FP8_128X128"):
        kinds = [each.rpartition("_")[2] for each in (activation, weight)]
        if kinds[0] != kinds[1]:
            raise NoKernelError(f"{activation} activations with {weight} weights")
        problem = GemmProblem(1, outputs, inner, "fp8_block", _FP8_SCALES[kinds[0]])
    else:
        raise NoKernelError(f"no kernel multiplies {activation or 'BF16'} by {weight}")
    if part.target != SM90A.name:
        raise NoKernelError(f"the GEMM of {problem.operands} has run on {SM90A.name} alone")
    choose_form(problem, part.target)
    return LinearKernel(f"sm90_gemm_{problem.operands}", problem)


def product(work: ComponentCallWork, kernel: LinearKernel, name: str, rows: LinearRows) -> Tensor:
    """Multiply rows by one weight, BF16 [M, N]."""
    multiply = {
        "sm90_gemm_bf16": _by_bf16,
        "sm90_gemm_nvfp4": _by_nvfp4,
        "sm90_gemm_fp8_block": _by_fp8,
        "sm90_gemm_w4a16": _by_w4a16,
    }[kernel.kernel]
    return multiply(work, kernel, name, rows)


def _by_bf16(work: ComponentCallWork, kernel: LinearKernel, name: str, rows: LinearRows) -> Tensor:
    a = own(_known(rows.values))
    problem = replace(kernel.problem, rows=a.shape[0])
    return work.run(kernel.kernel, problem, a=a, b=work.weights.bf16(name))[0]


def _by_nvfp4(work: ComponentCallWork, kernel: LinearKernel, name: str, rows: LinearRows) -> Tensor:
    codes, scale = own(_known(rows.codes)), _known(rows.tensor_scale)
    if scale.numel() > 1 and bool((scale != scale[:1]).any()):
        raise InvalidArgument(
            f"tensor scales in front of {name}", f"{scale.numel()} rows with scales of their own",
            "one input scale for all rows of a product",
            "Quantise with --calibration, so that the checkpoint has input scales.",
        )  # fmt: skip
    b_codes, b_scales, b_scale = work.weights.derived(name, "nvfp4 in 128x4", partial(nvfp4, work))
    (made,) = work.run(
        kernel.kernel, replace(kernel.problem, rows=codes.shape[0]),
        a=codes, a_scales=own(to_layout(_known(rows.block_scale), SWIZZLE_128X4)),
        a_decode_scale=own(scale.reshape(-1)[:1].float()),
        b=b_codes, b_scales=b_scales, b_decode_scale=b_scale,
    )  # fmt: skip
    return made


def nvfp4(
    work: ComponentCallWork, weight: Weight, layout: str = SWIZZLE_128X4.name
) -> tuple[Tensor, ...]:
    """Return codes, block scales in a layout, and decode scale of a weight, on the device."""
    return tuple(map(work.weights.on_device, nvfp4_parts(weight, layout)))


def nvfp4_parts(weight: Weight, layout: str = SWIZZLE_128X4.name) -> tuple[Tensor, ...]:
    """Return codes, block scales in a layout, and decode scale [1], on the weight's own device."""
    tensor = weight.quantised().with_direction(ScaleDirection.DECODE)
    tensor = tensor.with_nibble_order(NibbleOrder.LOW_EVEN)
    tensor = tensor.with_layout(SWIZZLE_128X4 if layout == SWIZZLE_128X4.name else LINEAR)
    return tensor.codes, tensor.block_scale, tensor.decode_scale.reshape(1).float()


def _by_fp8(work: ComponentCallWork, kernel: LinearKernel, name: str, rows: LinearRows) -> Tensor:
    codes = own(_known(rows.codes)).view(torch.float8_e4m3fn)

    def fp8(weight: Weight) -> tuple[Tensor, Tensor]:
        tensor = weight.quantised()
        return tuple(map(work.weights.on_device, (tensor.codes, tensor.block_scale)))  # type: ignore[return-value]

    b, b_scales = work.weights.derived(name, "fp8", fp8)
    (made,) = work.run(
        kernel.kernel, replace(kernel.problem, rows=codes.shape[0]), a=codes,
        a_scales=own(_known(rows.block_scale)), b=b.view(torch.float8_e4m3fn), b_scales=b_scales,
    )  # fmt: skip
    return made


def _by_w4a16(work: ComponentCallWork, kernel: LinearKernel, name: str, rows: LinearRows) -> Tensor:
    x = _known(rows.values)
    codes, scales, scale = work.weights.derived(
        name, "nvfp4", partial(nvfp4, work, layout=LINEAR.name)
    )
    tensors = [
        work.run(
            kernel.kernel, replace(kernel.problem, rows=some.shape[0]),
            x=own(some), codes=codes, scales=scales, decode_scale=scale,
        )[0]
        for some in _pieces(x, LARGEST_ROWS)
    ]  # fmt: skip
    return _joined(tensors)


def _known(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "a recipe says in which form activations arrive"
    return tensor


def _pieces(x: Tensor, rows: int) -> Sequence[Tensor]:
    return x.split(rows) if len(x) else (x,)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def rows_in(work: ComponentCallWork) -> LinearRows:
    """Return the activations of a call: codes if it has them, else values."""
    given = work.inputs
    if "codes" not in given:
        return LinearRows(values=work.bf16())
    return LinearRows(
        codes=given["codes"],
        block_scale=given["block_scale"],
        tensor_scale=given.get("tensor_scale"),
    )


def linear(part: ComponentPart) -> Compute:
    """Return the compute function of linears over one input, with outputs concatenated."""
    ways = {name: kernel_of_weight(part, name) for name in part.shapes}

    def compute(work: ComponentCallWork) -> Outputs:
        rows = rows_in(work)
        tensors = [product(work, kernel, name, rows) for name, kernel in ways.items()]
        return {"out": tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=-1)}

    return compute


def _act_quant_fp8(columns: int, scales: str) -> Compute:
    """Quantise to E4M3 with a scale for every 128 values of a row."""
    Fp8Problem(1, columns, scales)

    def compute(work: ComponentCallWork) -> Outputs:
        x = work.bf16()
        problem = Fp8Problem(x.shape[0], x.shape[1], scales)  # of wo_a: all groups side by side
        codes, block_scale = work.run("simt_quantise_fp8", problem, values=x)
        return {"codes": codes.view(torch.uint8), "block_scale": block_scale}

    return compute


def _grouped_fp8(part: ComponentPart, kernel: LinearKernel) -> Compute:
    """Compute one product a group; a 128 x 128 tile under one scale may contain several groups."""
    name, groups, rank = part.name, part.config.o_groups, part.config.o_lora_rank
    require_group_rows(rank)

    def fp8(work: ComponentCallWork, weight: Weight) -> list[tuple[Tensor, Tensor]]:
        there = work.weights.on_device
        return [(there(codes), there(scales)) for codes, scales in by_group(weight, groups, rank)]

    def compute(work: ComponentCallWork) -> Outputs:
        rows = rows_in(work)
        codes, scales = _known(rows.codes), _known(rows.block_scale)
        weights = work.weights.derived(name, "fp8 by group", partial(fp8, work))
        pairs = zip(codes.chunk(groups, 1), scales.chunk(groups, 1), weights, strict=True)
        problem = replace(kernel.problem, rows=codes.shape[0])
        tensors = [
            work.run(
                kernel.kernel, problem, a=own(a).view(torch.float8_e4m3fn), a_scales=own(of_a),
                b=b.view(torch.float8_e4m3fn), b_scales=of_b,
            )[0]
            for a, of_a, (b, of_b) in pairs
        ]  # fmt: skip
        return {"out": torch.cat(tensors, dim=-1)}

    return compute


def require_group_rows(rank: int) -> None:
    """Raise NoKernelError if a tile of FP8 scales is shared with rows of other groups."""
    if rank % _TILE and _TILE % rank:
        raise NoKernelError(f"groups of {rank} rows share scales of {_TILE} with parts of others")


def by_group(weight: Weight, groups: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return FP8 codes and scales of each group's rows; a tile's scale may serve several groups."""
    tensor, found = weight.quantised(), []
    for group in range(groups):
        rows = slice(group * rank, (group + 1) * rank)
        tiles = slice(rows.start // _TILE, -(-rows.stop // _TILE))
        found.append((tensor.codes[rows], tensor.block_scale[tiles]))
    return found


def grouped(part: ComponentPart) -> Compute:
    """Compute V4's wo_a: one matrix and one product for each group of heads."""
    name, groups, rank = part.name, part.config.o_groups, part.config.o_lora_rank
    whole = replace(part, shapes={name: (rank, part.shapes[name][1])})
    kernel = kernel_of_weight(whole, name)
    if kernel.kernel == "sm90_gemm_fp8_block":
        return _grouped_fp8(part, kernel)
    if kernel.kernel != "sm90_gemm_bf16":
        raise NoKernelError(f"groups of {part.format_of(name)} have no kernel; BF16 and FP8 do")

    def compute(work: ComponentCallWork) -> Outputs:
        x = work.bf16()
        x_TGK = x.reshape(x.shape[0], groups, -1)
        weight = work.weights.bf16(name).reshape(groups, rank, -1)
        problem = replace(kernel.problem, rows=x.shape[0])
        tensors = [
            work.run(kernel.kernel, problem, a=own(x_TGK[:, group]), b=own(weight[group]))[0]
            for group in range(groups)
        ]
        return {"out": torch.cat(tensors, dim=-1)}

    return compute


def wide_product(work: ComponentCallWork, x: Tensor, weight: Tensor, columns: int) -> Tensor:
    """Multiply BF16 rows by a BF16 weight into float32, a few rows a launch."""
    inner = x.shape[1]
    most = max(rows for rows in ROWS if inner <= inner_held(rows))
    tensors = [
        work.run(
            "simt_gemv_bf16", GemvProblem(some.shape[0], columns, inner),
            x=own(some), weight=weight,
        )[0]
        for some in _pieces(x, most)
    ]  # fmt: skip
    return _joined(tensors)


def _require_wide(part: ComponentPart) -> None:
    for name, (outputs, inner) in part.shapes.items():
        if part.format_of(name) != "BF16" or part.facts.activation(name) is not None:
            raise NoKernelError(f"float32 sums of a {part.format_of(name)} weight have no kernel")
        GemvProblem(1, outputs, inner)
        assert rows_of_form(1) == 1, "one row is a form of its own"


def wide(part: ComponentPart) -> Compute:
    """Compute head and router, whose sums stay float32."""
    _require_wide(part)

    def compute(work: ComponentCallWork) -> Outputs:
        name = part.name
        weight = work.weights.bf16(name)
        return {"out": wide_product(work, work.bf16(), weight, part.shapes[name][0])}

    return compute


def compressor(part: ComponentPart) -> Compute:
    """Compute latent and gate: float32 if weights are plain, BF16 with NVFP4 weights."""
    if all(part.facts.activation(name) == "NVFP4" for name in part.shapes):
        ways = {name: kernel_of_weight(part, name) for name in part.shapes}

        def by_codes(work: ComponentCallWork) -> Outputs:
            rows = rows_in(work)
            return _latent_and_gate(
                {name: product(work, kernel, name, rows) for name, kernel in ways.items()}
            )

        return by_codes
    _require_wide(part)

    def compute(work: ComponentCallWork) -> Outputs:
        x = work.bf16()
        return _latent_and_gate(
            {
                name: wide_product(work, x, work.weights.bf16(name), shape[0])
                for name, shape in part.shapes.items()
            }
        )

    return compute


def _latent_and_gate(made: dict[str, Tensor]) -> Outputs:
    by_part = {name.rpartition(".")[2]: tensor for name, tensor in made.items()}
    return {"latent": by_part["wkv"], "gate": by_part["wgate"]}


def input_scale(work: ComponentCallWork, names: Sequence[str]) -> Tensor:
    """Return the largest decode scale [1] of activations before weights that share them."""
    scales = [work.weights.source[name].input_scale for name in names]
    known = [scale.float().reshape(()) for scale in scales if scale is not None]
    if len(known) < len(scales):
        raise InvalidArgument(
            f"input scale of {names[0]}", None, "a scale of the activations in front of it",
            "Quantise with --calibration: the kernel takes no scale of a row.",
        )  # fmt: skip
    return work.weights.on_device(torch.stack(known).amax().reshape(1))


def act_quant(part: ComponentPart) -> Compute:
    """Quantise the input of a linear to NVFP4 codes with scales in linear layout."""
    names = tuple(part.shapes)
    activation = part.facts.activation(names[0])
    if activation is not None and activation.startswith("FP8_1X128"):
        return _act_quant_fp8(part.shapes[names[0]][-1], _FP8_SCALES[activation.rpartition("_")[2]])
    if activation != "NVFP4":
        raise NoKernelError(f"no kernel quantises activations to {activation}")
    QuantiseProblem(1, part.shapes[names[0]][-1], LINEAR.name)

    def compute(work: ComponentCallWork) -> Outputs:
        x, scale = work.bf16(), input_scale(work, names)
        problem = QuantiseProblem(x.shape[0], x.shape[1], LINEAR.name)
        codes, scales = work.run("simt_quantise_nvfp4", problem, values=x, decode_scale=scale)
        return {
            "codes": codes,
            "block_scale": scales.reshape(x.shape[0], -1),
            "tensor_scale": scale.reshape(()),
        }

    return compute
