"""Norms against quack's and vLLM's; norm + quantise over quantise; mHC; nodes of a token."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.kernels.primitives.quantise_problem import QuantiseProblem
from degarble.kernels.rows.problem import NormProblem, ResidualProblem
from degarble.suites.bench import cache as cache_bench
from degarble.suites.bench import rows as bench
from degarble.suites.bench.gpu import empty, normal
from degarble.suites.bench.kernel_peers import operands, vendors
from degarble.suites.bench.kernel_peers.contest import (
    EMPTY,
    OURS,
    Call,
    Contender,
    Goal,
    Outcome,
    Row,
    of_arm,
    of_best,
    of_copy,
    over_empty,
)
from degarble.suites.bench.runner import Arm, copy_arm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

EXTENTS = ((8192, 7168), (8192, 4096), (16, 7168))
EPSILON = 1e-6
PLAIN = "plain quantise"
COEFFICIENTS = ("mhc coefficients, 4096", "mhc coefficients, 7168")
TOKENS = 8192


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """Norm in float64."""
    wide = x.double()
    made: Tensor = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
    return made * weight.double()


def norm_row(problem: NormProblem) -> Row:
    shape = problem.rows, problem.columns
    shared = cache(lambda _number: {"values": normal(*shape), "weight": normal(shape[1])})
    some = operands.sample(problem.rows)

    def by_vllm(number: int) -> Call:
        given, out = shared(number), empty(*shape)
        norm = vendors.common().rms_norm
        return Call(lambda: norm(out, *given.values(), EPSILON), lambda: out[some])

    def by_quack(number: int) -> Call:
        given, norm = shared(number), vendors.module("quack.rmsnorm").rmsnorm_fwd
        made: list[Any] = []

        def run() -> None:
            made[:] = [norm(*given.values(), eps=EPSILON)[0]]

        return Call(run, lambda: made[0][some])

    def by_torch(number: int) -> Call:
        given, made = shared(number), list[Any]()
        weight = given["weight"]

        def run() -> None:
            made[:] = [torch.nn.functional.rms_norm(given["values"], shape[1:], weight, EPSILON)]

        return Call(run, lambda: made[0][some])

    peers = {"quack": by_quack, "vLLM": by_vllm, "torch": by_torch}
    kernel = operands.ours("simt_rmsnorm", problem, shared, lambda tensors: tensors["normed"][some])
    return Row(
        "RMSNorm, {} x {}".format(*shape),
        [kernel, *(Contender(name, make) for name, make in peers.items())],
        problem.bytes_moved, 0,
        lambda: normed(shared(0)["values"][some], shared(0)["weight"]),
        [of_best(1.0)], ceilings=[copy_arm(problem.bytes_moved)],
    )  # fmt: skip


def sum_row(problem: ResidualProblem) -> Row:
    """Sum and norm; vLLM's overwrites its operands, so it is compared after one run."""
    shape, some = (problem.rows, problem.columns), operands.sample(problem.rows)
    shared = cache(
        lambda _number: {
            "values": normal(*shape), "residual": normal(*shape), "weight": normal(shape[1])
        }
    )  # fmt: skip

    def by_vllm(number: int) -> Call:
        given = shared(number)
        x, residual = given["values"].clone(), given["residual"].clone()
        norm = vendors.common().fused_add_rms_norm
        return Call(
            lambda: norm(x, residual, given["weight"], EPSILON), lambda: x[some], repeats=False
        )

    def wanted() -> Tensor:
        given = shared(0)
        total = (given["values"][some].float() + given["residual"][some].float()).bfloat16()
        return normed(total, given["weight"])

    kernel = operands.ours(
        "simt_residual_norm", problem, shared, lambda tensors: tensors["normed"][some]
    )
    return Row(
        "sum and RMSNorm, {} x {}".format(*shape), [kernel, Contender("vLLM, in place", by_vllm)],
        problem.bytes_moved, 0, wanted, [of_best(1.0)], ceilings=[copy_arm(problem.bytes_moved)],
    )  # fmt: skip


def norms() -> Iterator[Row]:
    for rows, columns in EXTENTS:
        yield norm_row(NormProblem(rows, columns))
    for rows, columns in EXTENTS[::2]:
        yield sum_row(ResidualProblem(rows, columns))


# ---- our kernels beside ceilings: other suites hold their bits -----------------------------------


def over_plain(wanted: float) -> Goal:
    """Time a byte over that of the plain quantiser."""

    def value(of: Outcome) -> float:
        return of.readings[PLAIN].bandwidth / of.ours.bandwidth

    return Goal("a byte, of plain quantise", value, wanted, PLAIN, at_least=False)


def fused_row(rows: int, columns: int) -> Row:
    plain = QuantiseProblem(rows, columns)
    fused = NormProblem(rows, columns, layout="128x4")
    arms = bench.norm_arm(OURS, fused), bench.quantise_arm(PLAIN, plain)
    return Row(
        f"RMSNorm + NVFP4, {rows} x {columns}", [of_arm(arm.name, arm) for arm in arms],
        fused.bytes_moved, goals=[over_plain(1.1)], ceilings=[copy_arm(fused.bytes_moved)],
        other_bytes={PLAIN: plain.bytes_moved},
    )  # fmt: skip


def arm_row(arm: Arm, name: str) -> Row:
    return Row(
        name, [of_arm(OURS, arm)], arm.moved, goals=[of_copy(0.75)], ceilings=[copy_arm(arm.moved)]
    )


def node_row(arm: Arm, empty_node: Callable[[], Arm]) -> Row:
    return Row(
        f"node of one token: {arm.name}", [of_arm(OURS, arm)], arm.moved, goals=[over_empty(2.5)],
        sets=1, repeats=cache_bench.NODES, ceilings=[empty_node()],
    )  # fmt: skip


def empty_arm() -> Arm:
    return Arm(EMPTY, lambda _: partial(torch.cuda._sleep, 0), sets=1, repeats=cache_bench.NODES)


def nodes() -> Iterator[Row]:
    """Fused rows, mHC's coefficients, and every small kernel of a token."""
    for rows, columns in EXTENTS[:2]:
        yield fused_row(rows, columns)
    for arm in cache_bench.arms_of(TOKENS):
        if arm.name in COEFFICIENTS:
            yield arm_row(arm, f"{arm.name}, {TOKENS} tokens")
    for arm in cache_bench.arms_of(1, sets=1, repeats=cache_bench.NODES):
        yield node_row(arm, empty_arm)
