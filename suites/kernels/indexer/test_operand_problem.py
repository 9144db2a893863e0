"""Rows of the indexer: problem, blocks as the references round them, the whole beside the twin."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.model.types import End, Pairing, Rope
from degarble.kernels.indexer import problem as facts
from degarble.kernels.indexer.problem import OperandProblem, choose_operand_form
from degarble.kernels.primitives.kv_problem import fp8_factor
from degarble.references import elementary, rounding
from degarble.references.numerics import Numerics
from degarble.suites.kernels.indexer import indexer_operand_checks as checks


def test_mxfp4_numbers_are_the_references_for_every_bf16_value() -> None:
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    numbers = numbers[~numbers.isnan()]
    got, want = facts.mxfp4_number(numbers), rounding.round_e2m1(numbers)
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))


def test_mxfp4_scales_are_the_references_for_every_amax() -> None:
    bits = torch.arange(facts.NAN_BF16)
    code = facts.mxfp4_scale_code(bits)
    amax = codecs.bf16_decode(bits).clamp(min=rounding.FP4_AMAX_FLOOR)
    want = rounding.power_of_two_above(amax * (1.0 / rounding.E2M1_LARGEST))
    assert torch.equal(codecs.ue8m0_decode(code), want)
    assert torch.equal(fp8_factor(code) * want, torch.ones_like(want))
    assert facts.mxfp4_scale_code(torch.tensor([facts.NAN_BF16])).item() == facts.NAN_CODE


def test_the_transform_is_the_references() -> None:
    x = torch.randn(50, facts.WIDTH, generator=torch.Generator().manual_seed(1))
    want = elementary.hadamard(x.double())
    assert (checks.transformed(x) - want).abs().max() <= 2e-6


@pytest.mark.parametrize("pairing", ["interleaved", "halves"])
def test_the_whole_is_the_twins_but_for_neighbours(pairing: str) -> None:
    """Sums of another order move a few values to the next code: at most a step of their block."""
    halves, tokens = pairing == "halves", 200
    kind = Pairing.HALVES if halves else Pairing.INTERLEAVED
    end = End.FIRST if halves else End.LAST
    rope = Rope(theta=10_000, dims=64, pairing=kind, end=end, yarn=None)
    numerics, position_T = Numerics.bf16(), torch.arange(tokens) * 37
    table = elementary.rotation_table(rope, position_T, numerics)
    name = "fp8" if halves else "mxfp4"
    p = OperandProblem(tokens, 4, pairing, name, hadamard=True, positions=tokens * 37)
    case = checks.OperandCase(p, seed=5)
    turns = torch.zeros(p.positions, facts.TABLE_WIDTH)
    turns[position_T] = torch.cat((table.cos, table.sin), dim=1)
    case.__dict__["turning"] = (turns, position_T)

    x, wide = case.rows, elementary.over_heads(table)
    if halves:
        part = elementary.rotate_halves(x[..., :64].float(), wide)
        x = torch.cat((part, x[..., 64:].float()), -1).bfloat16()
    else:
        x = elementary.rotate_tail(x.float(), wide).bfloat16()
    x = elementary.hadamard(x.float()).bfloat16()
    want = rounding.through_fp8(x, 128) if halves else rounding.through_mxfp4(x)
    got = checks.by_definition(case).values.float()
    moved = got != want
    assert float(moved.float().mean()) <= 2e-3
    block = x.float().abs().unflatten(-1, (-1, facts.BLOCKS[name])).amax(-1, keepdim=True)
    step = (block / (14 if halves else 1.5)).expand(*block.shape[:-1], facts.BLOCKS[name])
    assert bool(((got - want).abs() <= step.flatten(-2)).all())


def test_refuses_by_name() -> None:
    for error, name, numbers in (
        (UnknownName, "pairing", (1, 1, "pairs", "fp8")),
        (UnknownName, "format", (1, 1, "none", "nvfp4")),
        (InvalidArgument, "coded", (1, 1, "none", "mxfp4", True, True)),
        (ShapeMismatch, "tokens, heads", (-1, 1, "none", "fp8")),
        (ShapeMismatch, "tokens, heads", (1, 0, "none", "fp8")),
        (ShapeMismatch, "positions", (1, 1, "halves", "fp8")),
        (ShapeMismatch, "positions", (1, 1, "none", "fp8", False, False, False, 9)),
        (InvalidArgument, "epsilon", (1, 1, "none", "fp8", False, False, False, 0, 1.0)),
    ):
        with pytest.raises(error, match=name):
            OperandProblem(*numbers)


def test_extents_are_no_part_of_a_form() -> None:
    forms = {choose_operand_form(checks.problem_of(n, 2 * n, 0), "sm_90a") for n in (1, 9)}
    assert len(forms) == 1
    assert [facts.operand_grid(checks.problem_of(n, 3, 0)) for n in (3, 10, 11)] == [1, 1, 2]
    assert checks.problem_of(3, 3, 6).bytes_moved == 9 * (256 + 132) + 3 * (256 + 8)
