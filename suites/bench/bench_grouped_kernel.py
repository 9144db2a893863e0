"""Measure o_a with heads turned back in the product beside its pieces and cuBLAS, and projections.

    python -m degarble.suites.bench.bench_grouped_kernel [--tokens T ...] [--only FP8]

Arms at V4-Pro's and V4-Flash's shapes: fused; inverse_rope, then the same product; the product
alone; torch.bmm alone, which is cuBLAS. The same with weights in FP8 blocks, with each format of
scales, quantised in the product or before, and with a product for every group. And the compressor's
projection with float32 results, against cuBLAS with BF16 ones. Rotating cold buffers, in a graph,
all arms in every round.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.kernels.gemm.grouped_problem import GroupedFp8Problem, GroupedProblem
from degarble.kernels.gemm.problem import FP8_BLOCK, GemmProblem
from degarble.kernels.primitives.quantise_problem import SCALES, Fp8Problem
from degarble.kernels.rows.problem import BackProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.suites.bench.bench_quantise_kernel import Figure, captured, sets_for, timed
from degarble.suites.bench.gpu import refused_here, say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Launch = Callable[[], object]
    Problem = GroupedProblem | GroupedFp8Problem

SETTINGS = CompileSettings()
POSITIONS, HEAD = 1 << 16, 512
GROUPS = {"V4-Pro": 16, "V4-Flash": 8}
COLUMNS, INNER = 1024, 4096
HIDDEN, PROJECTED = 7168, 2048


def drawn(*shape: int) -> Any:
    """Draw BF16 numbers on the GPU."""
    return torch.randn(shape, device="cuda").bfloat16()


def output_launches(tokens: int, groups: int) -> dict[str, Launch]:
    """Return the arms of o_a on buffers of their own."""
    from degarble.kernels.gemm import sm90_gemm_grouped as kernels  # noqa: PLC0415  needs the DSL
    from degarble.kernels.rows import simt_inverse_rope  # noqa: PLC0415  needs the DSL

    a, b = drawn(tokens, groups * INNER), drawn(groups * COLUMNS, INNER)
    turns = torch.randn(POSITIONS, 64, device="cuda")
    positions = torch.randint(POSITIONS, (tokens,), device="cuda")
    heads = a.view(tokens, -1, HEAD)
    fused = GroupedProblem(tokens, groups, COLUMNS, INNER, HEAD, POSITIONS)
    plain = GroupedProblem(tokens, groups, COLUMNS, INNER)
    back = BackProblem(tokens, heads.shape[1], POSITIONS, in_place=True)
    out = drawn(tokens, groups * COLUMNS)
    by_group = a.view(tokens, groups, INNER).transpose(0, 1)
    weights = b.view(groups, COLUMNS, INNER).transpose(1, 2)
    d = drawn(groups, tokens, COLUMNS)

    def composed() -> None:
        simt_inverse_rope.inverse_rope(heads, turns, positions, back, SETTINGS)
        kernels.gemm_grouped(a, b, plain, SETTINGS, out=out)

    return {
        "turned in the product": lambda: kernels.gemm_grouped(
            a, b, fused, SETTINGS, turns=(turns, positions), out=out
        ),
        "inverse_rope, then the product": composed,
        "the product alone": lambda: kernels.gemm_grouped(a, b, plain, SETTINGS, out=out),
        "cuBLAS alone": lambda: torch.bmm(by_group, weights, out=d),
    }


class Coded(NamedTuple):
    """Buffers of o_a in FP8, and what its kernels are asked for."""

    heads: Any
    quantised: Any  # codes and scales that quantise_fp8 writes, with B
    told: Fp8Problem
    alone: GroupedFp8Problem

    def quantise(self, problem: Fp8Problem, turns: Any = None) -> None:
        """Quantise the heads."""
        from degarble.kernels.quantise import simt_quantise_fp8 as quantising  # noqa: PLC0415  needs the DSL

        out = quantising.Fp8Quantised(self.quantised.a, self.quantised.a_scales)
        quantising.quantise_fp8(self.heads.a, problem, SETTINGS, out=out, turns=turns)

    def turn_and_quantise(self) -> None:
        """Turn the heads back on their way to their codes."""
        self.quantise(self.told, (self.heads.turns, self.heads.positions))

    def turn_then_quantise(self) -> None:
        """Turn the heads back in place and quantise them."""
        from degarble.kernels.rows import simt_inverse_rope  # noqa: PLC0415  needs the DSL

        each = self.heads.a.view(self.told.rows, -1, HEAD)
        back = BackProblem(self.told.rows, each.shape[1], POSITIONS, in_place=True)
        turns = self.heads.turns, self.heads.positions
        simt_inverse_rope.inverse_rope(each, *turns, back, SETTINGS)
        self.quantise(replace(self.told, turned=0, positions=0))

    def each_group(self) -> None:
        """Multiply group by group, as long as no kernel had them all: torch cuts and joins."""
        from degarble.kernels.gemm import sm90_gemm_fp8_block as plain  # noqa: PLC0415  needs the DSL

        self.turn_then_quantise()
        groups, held = self.alone.groups, self.quantised
        one = GemmProblem(self.told.rows, COLUMNS, INNER, FP8_BLOCK.name, self.told.scales)
        of_a = (each.chunk(groups, 1) for each in (held.a, held.a_scales))
        of_b = (each.chunk(groups) for each in (held.b, held.b_scales))
        made = [
            plain.gemm_fp8_block(
                plain.Fp8Operands(x.contiguous(), of_x.contiguous(), w, of_w), one, SETTINGS
            )
            for x, of_x, w, of_w in zip(*of_a, *of_b, strict=True)
        ]
        torch.cat(made, 1)


def coded_buffers(a: Any, b: Any, groups: int, kind: str) -> Coded:
    """Make codes of B, and memory for those of A."""
    from degarble.kernels.gemm import sm90_gemm_grouped_fp8 as kernels  # noqa: PLC0415  needs the DSL
    from degarble.kernels.quantise import simt_quantise_fp8 as quantising  # noqa: PLC0415  needs the DSL

    tokens, codes = len(a), b.to(torch.float8_e4m3fn)
    of_b = torch.ones(groups * COLUMNS // 128, INNER // 128, device="cuda")
    of_b = of_b if kind == "float32" else torch.full_like(of_b, 127, dtype=torch.uint8)
    turns = torch.randn(POSITIONS, 64, device="cuda")
    positions = torch.randint(POSITIONS, (tokens,), device="cuda")
    told = Fp8Problem(tokens, groups * INNER, kind, turned=HEAD, positions=POSITIONS)
    held = quantising.empty_outputs(told, a.device)
    heads = kernels.GroupedFp8Operands(a, codes, of_b, turns=turns, positions=positions)
    quantised = kernels.GroupedFp8Operands(held.codes, codes, of_b, held.scales)
    alone = GroupedFp8Problem(tokens, groups, COLUMNS, INNER, kind)
    return Coded(heads, quantised, told, alone)


def coded_launches(tokens: int, groups: int, kind: str) -> dict[str, Launch]:
    """Return the arms of o_a in FP8 on buffers of their own; cuBLAS multiplies BF16."""
    from degarble.kernels.gemm import sm90_gemm_grouped_fp8 as kernels  # noqa: PLC0415  needs the DSL

    a, b = drawn(tokens, groups * INNER), drawn(groups * COLUMNS, INNER)
    out, d = drawn(tokens, groups * COLUMNS), drawn(groups, tokens, COLUMNS)
    held = coded_buffers(a, b, groups, kind)
    held.turn_and_quantise()
    fused = replace(held.alone, turned=HEAD, positions=POSITIONS)
    by_group = a.view(tokens, groups, INNER).transpose(0, 1)
    weights = b.view(groups, COLUMNS, INNER).transpose(1, 2)

    def product() -> None:
        kernels.gemm_grouped_fp8(held.quantised, held.alone, SETTINGS, out=out)

    def composed(first: Callable[[], None]) -> None:
        first()
        product()

    return {
        "turned and quantised in the product": lambda: kernels.gemm_grouped_fp8(
            held.heads, fused, SETTINGS, out=out
        ),
        "turned and quantised, then the product": lambda: composed(held.turn_and_quantise),
        "inverse_rope, quantise_fp8, then the product": lambda: composed(held.turn_then_quantise),
        "the same, a product for every group": held.each_group,
        "the product alone": product,
        "cuBLAS alone, BF16": lambda: torch.bmm(by_group, weights, out=d),
    }


def projection_launches(tokens: int) -> dict[str, Launch]:
    """Return the arms of the compressor's projection on buffers of their own."""
    from degarble.kernels.gemm import sm90_gemm_grouped as kernels  # noqa: PLC0415  needs the DSL

    a, b = drawn(tokens, HIDDEN), drawn(PROJECTED, HIDDEN)
    problem = GroupedProblem(tokens, 1, PROJECTED, HIDDEN, out="fp32")
    out, rounded = a.new_empty(tokens, PROJECTED, dtype=torch.float32), drawn(tokens, PROJECTED)
    return {
        "projection in float32": lambda: kernels.gemm_grouped(a, b, problem, SETTINGS, out=out),
        "cuBLAS, BF16 results": lambda: torch.mm(a, b.T, out=rounded),
    }


def problems_of(tokens: int) -> list[tuple[str, Problem, Callable[[], dict[str, Launch]]]]:
    """Return title, problem and arms of every table at so many tokens."""
    made: list[tuple[str, Problem, Callable[[], dict[str, Launch]]]] = []
    for name, groups in GROUPS.items():
        problem = GroupedProblem(tokens, groups, COLUMNS, INNER, HEAD, POSITIONS)
        made.append((f"o_a of {name}", problem, partial(output_launches, tokens, groups)))
    for name, groups in GROUPS.items():
        for kind in SCALES:
            coded = GroupedFp8Problem(tokens, groups, COLUMNS, INNER, kind, HEAD, POSITIONS)
            title = f"o_a of {name} in FP8, scales {kind}"
            made.append((title, coded, partial(coded_launches, tokens, groups, kind)))
    problem = GroupedProblem(tokens, 1, PROJECTED, HIDDEN, out="fp32")
    made.append(("compressor's projection", problem, partial(projection_launches, tokens)))
    return made


def rows_of(title: str, problem: Problem, figures: Sequence[Figure]) -> list[str]:
    """Return the lines of a table; the last arm is cuBLAS."""
    lines = [
        f"\n| {title}, {problem.tokens} tokens | us | TFLOP/s | of cuBLAS |",
        "|---|---|---|---|",
    ]
    for figure in figures:
        rate = problem.operations / figure.median / 1e6
        share = figures[-1].median / figure.median
        lines.append(f"| {figure.arm.name} | {figure.median:.1f} | {rate:.0f} | {share:.2f} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; status 2 where nothing can be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=(8192, 64, 1))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="tables with this in their title")
    settings = parser.parse_args(arguments)
    if status := refused_here():
        return status
    for tokens in settings.tokens:
        for title, problem, launches in problems_of(tokens):
            if settings.only not in title:
                continue
            sets = [launches() for _ in range(sets_for(problem.bytes_moved))]
            arms = [captured(name, 0, [each[name] for each in sets]) for name in sets[0]]
            for line in rows_of(title, problem, timed(arms, settings.rounds)):
                say(line)
            del sets, arms
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
