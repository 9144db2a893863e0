"""RMSNorm, as arithmetic: who holds which row and block, the stated order, bytes; refusals."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.kernels.primitives.quantise_problem import LAYOUTS, QuantiseProblem
from degarble.kernels.rows import problem as facts
from degarble.kernels.rows.problem import NormProblem, NormTactic, choose_norm_form, norm_grid
from degarble.references import elementary
from degarble.references.numerics import Mode, Numerics
from degarble.suites.kernels import row_checks as checks

U = 2.0**-24
OFFICIAL = Numerics(Mode.BF16, torch.float32, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("columns", [64, 1024, 1040, 7168, 16_384])
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
@pytest.mark.parametrize("walkers", [0, 1])
def test_every_block_of_every_row_has_one_lane(
    columns: int, layout: str | None, walkers: int
) -> None:
    problem = NormProblem(37, columns, layout=layout)
    narrow, threads = facts.is_narrow(columns), facts.norm_threads(problem)
    assert threads % facts.LANES == 0
    assert threads <= facts.LANES * (facts.NARROW_WARPS if narrow else facts.MOST_WARPS)
    apart = facts.NARROW_WARPS if narrow else 1
    blocks = norm_grid(problem, NormTactic(walkers), 3)
    visited = [
        row
        for block in range(blocks)
        for warp in range(apart)
        for row in range(block * apart + warp, problem.padded_rows, blocks * apart)
    ]
    assert sorted(visited) == list(range(problem.padded_rows))
    lanes = threads // apart
    wide = LAYOUTS[layout].column_tile if layout else 1
    assert facts.SLOTS_OF_LANE * lanes >= -(-problem.blocks // wide) * wide


@pytest.mark.parametrize("columns", [64, 512, 1536, 7168])
@pytest.mark.parametrize("kind", ["rows", "tiny", "zeros"])
def test_the_stated_order_is_as_near_to_float64_as_derived(columns: int, kind: str) -> None:
    values = checks.spread((9, columns), kind, columns)
    weight = torch.linspace(-2, 2, columns)
    got = checks.normed_by_definition(values, weight, 1e-6).double()
    x = values.double()
    exact = weight.double() * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    # A lane's 16 products and 2 sums, 9 folds and the mean are rounded, halved by the root; then
    # four more roundings; at last BF16, half a step of 2**-7. Tiny squares vanish under epsilon.
    allowed = exact.abs() * ((8 + 2 + 9 + 2) / 2 + 4) * U
    bf16 = (exact.abs() + allowed) * 2.0**-8
    assert bool(((got - exact).abs() <= allowed + bf16).all())


def test_is_the_references_norm_but_for_the_order_of_the_sum() -> None:
    values = checks.spread((64, 1536), "rows", 1)
    weight = torch.rand(1536).bfloat16()
    want = elementary.rms_norm(values, weight, 1e-6, OFFICIAL)
    got = checks.normed_by_definition(values, weight, 1e-6)
    apart = (got.view(torch.int16).int() - want.view(torch.int16).int()).abs()
    assert int(apart.max()) <= 1
    assert float((apart > 0).double().mean()) < 2e-3  # a few units of float32 across a BF16 tie


@pytest.mark.parametrize("kind", ["special", "huge"])
def test_infinities_and_nan_stay_in_their_rows(kind: str) -> None:
    values = checks.spread((10, 64), kind, 2)
    weight = torch.ones(64)
    got = checks.normed_by_definition(values, weight, 1e-6)
    want = elementary.rms_norm(values, weight, 1e-6, OFFICIAL)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isfinite(), want.isfinite())


def test_rows_do_not_depend_on_other_rows() -> None:
    values, weight = checks.spread((8, 7168), "rows", 3), torch.rand(7168)
    whole = checks.normed_by_definition(values, weight, 1e-6)
    for row in range(8):
        alone = checks.normed_by_definition(values[row : row + 1], weight, 1e-6)
        assert torch.equal(alone[0], whole[row])


def test_bytes_and_extents() -> None:
    plain = NormProblem(8192, 7168)
    assert plain.bytes_moved == 2 * 117_440_512 + 14_336
    fused = NormProblem(8192, 7168, layout="128x4")
    assert fused.bytes_moved == QuantiseProblem(8192, 7168).bytes_moved + 14_336
    assert NormProblem(1, 64, layout="128x4").scale_bytes == 512
    assert (NormProblem(1, 64, layout="128x4").padded_rows, NormProblem(1, 64).padded_rows) == (
        128,
        1,
    )
    assert facts.norm_threads(plain) == 224
    assert facts.norm_grid(plain, NormTactic(2), 132) == 264
    held = [
        facts.choose_norm_tactic(NormProblem(1, k)).walkers for k in (64, 1536, 4096, 7168, 16_384)
    ]
    assert held == [2, 10, 5, 2, 1]
    assert facts.choose_norm_tactic(NormProblem(1, 7168, weight="fp32")).walkers == 2


def test_extents_are_no_part_of_a_form() -> None:
    made = {choose_norm_form(NormProblem(m, k), "sm_90a") for m in (1, 5000) for k in (1040, 7168)}
    assert len(made) == 1
    assert choose_norm_form(NormProblem(1, 1024), "sm_90a").narrow


def test_refuses_by_name() -> None:
    for rows, columns in ((4, 72), (4, 48), (4, 16_400), (-1, 64), (1 << 31, 64)):
        with pytest.raises(ShapeMismatch, match="matrix to norm"):
            NormProblem(rows, columns)
    with pytest.raises(UnknownName, match="fp32"):
        NormProblem(1, 64, weight="fp16")
    with pytest.raises(UnknownName, match="128x4"):
        NormProblem(1, 64, layout="128x5")
    with pytest.raises(UnknownName, match="scale layout of a kernel"):
        NormProblem(1, 64, layout="packed_mn")
    with pytest.raises(InvalidArgument, match="epsilon"):
        NormProblem(1, 64, -1.0)
    with pytest.raises(InvalidArgument, match="keeps_values"):
        NormProblem(1, 64, keeps_values=True)
