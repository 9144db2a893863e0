"""Problems of the row kernels as arithmetic: threads, stated orders, bytes, refusals."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.kernels.primitives.quantise_problem import (
    LAYOUTS,
    REGISTERS_OF_PROCESSOR,
    QuantiseProblem,
)
from degarble.kernels.rows import mhc_problem as mhc
from degarble.kernels.rows import problem as rows
from degarble.kernels.rows import router_problem as routers
from degarble.kernels.rows.mhc_problem import MIX_PARTS, InnerCut, MhcMixProblem, ProjectProblem
from degarble.kernels.rows.problem import (
    EmbedProblem,
    InverseRopeProblem,
    NormProblem,
    NormTactic,
    QNormRopeProblem,
    ResidualProblem,
    ScaleForm,
    ScaleProblem,
    choose_norm_form,
    choose_scale_form,
    embed_grid,
    embed_threads,
    norm_grid,
    norm_threads,
)
from degarble.kernels.rows.router_problem import RouterProblem, choose_form
from degarble.references import elementary
from degarble.references import experts as routing
from degarble.references.numerics import Mode, Numerics
from degarble.suites.kernels import mhc_checks, row_checks
from degarble.suites.kernels.rows import router_checks

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("error", "name", "wrong"),
    [
        *(
            (ShapeMismatch, "matrix to norm", lambda shape=shape: NormProblem(*shape))
            for shape in ((4, 72), (4, 48), (4, 16_400), (-1, 64), (1 << 31, 64))
        ),
        (UnknownName, "fp32", lambda: NormProblem(1, 64, weight="fp16")),
        (UnknownName, "128x4", lambda: NormProblem(1, 64, layout="128x5")),
        (UnknownName, "scale layout of a kernel", lambda: NormProblem(1, 64, layout="packed_mn")),
        (InvalidArgument, "epsilon", lambda: NormProblem(1, 64, -1.0)),
        (InvalidArgument, "keeps_values", lambda: NormProblem(1, 64, keeps_values=True)),
        (ShapeMismatch, "matrix to norm", lambda: ResidualProblem(1, 100)),
        (ShapeMismatch, "matrix to norm", lambda: ResidualProblem(4, 60)),
        (UnknownName, "dtype of a norm's weight", lambda: ResidualProblem(1, 128, weight="fp16")),
        (InvalidArgument, "epsilon", lambda: ResidualProblem(1, 128, 2.0)),
        (ShapeMismatch, "tokens", lambda: QNormRopeProblem(-1, 8, 1)),
        (ShapeMismatch, "query heads", lambda: QNormRopeProblem(1, 0, 1)),
        (ShapeMismatch, "query heads", lambda: QNormRopeProblem(1, 129, 1)),
        (ShapeMismatch, "positions", lambda: QNormRopeProblem(1, 8, 0)),
        (InvalidArgument, "epsilon", lambda: QNormRopeProblem(1, 8, 1, epsilon=-1.0)),
        (ShapeMismatch, "tokens", lambda: InverseRopeProblem(-1, 8, 1)),
        (ShapeMismatch, "heads of attention's output", lambda: InverseRopeProblem(1, 0, 1)),
        (ShapeMismatch, "heads of attention's output", lambda: InverseRopeProblem(1, 129, 1)),
        (ShapeMismatch, "positions", lambda: InverseRopeProblem(1, 8, 0)),
        *(
            (ShapeMismatch, "embedding", lambda extents=extents: EmbedProblem(*extents))
            for extents in ((-1, 1, 8), (1, 0, 8), (1, 1, 12), (1, 1, 0), (1 << 31, 1, 8))
        ),
        (UnknownName, "int64", lambda: EmbedProblem(1, 1, 8, "int16")),
        (UnknownName, "dtype of source of a scaling", lambda: ScaleProblem(1, 1.0, "fp16")),
        (UnknownName, "dtype of out of a scaling", lambda: ScaleProblem(1, 1.0, out="fp16")),
        *(
            (InvalidArgument, "factor", lambda factor=factor: ScaleProblem(1, factor))
            for factor in (math.nan, math.inf, 2.0**128)
        ),
        (ShapeMismatch, "numbers to scale", lambda: ScaleProblem(1 << 31, 1.0)),
        *(
            (ShapeMismatch, "router", lambda counts=counts: RouterProblem(1, *counts))
            for counts in ((513, 6), (0, 1), (8, 9), (384, 17), (8, 0))
        ),
        (UnknownName, "sqrtsoftplus", lambda: RouterProblem(1, 8, 2, "softmax")),
        (UnknownName, "int64", lambda: RouterProblem(1, 8, 2, ids="int8")),
        *(
            (
                InvalidArgument, "groups",
                lambda of=of: RouterProblem(1, 64, 9, groups=of[0], groups_kept=of[1]),
            )
            for of in ((3, 1), (2, 3), (64, 2), (8, 1))
        ),
        (
            InvalidArgument, "groups",
            lambda: RouterProblem(1, 64, 2, groups=2, groups_kept=1, vocabulary=5),
        ),
        (ShapeMismatch, "lanes of all tokens", lambda: MhcMixProblem(-1, 8)),
        (ShapeMismatch, "width", lambda: MhcMixProblem(1, 12)),
        (ShapeMismatch, "width", lambda: MhcMixProblem(1, 1 << 17)),
        (UnknownName, "part of mHC", lambda: MhcMixProblem(1, 8, "pre")),
        (InvalidArgument, "iterations", lambda: MhcMixProblem(1, 8, iterations=0)),
        (InvalidArgument, "epsilon", lambda: MhcMixProblem(1, 8, epsilon=1.0)),
        (ShapeMismatch, "thread blocks", lambda: mhc.mix_grid(MhcMixProblem((1 << 29) - 1, 7168))),
        (ShapeMismatch, "width of a stream", lambda: ProjectProblem(3, 12)),
        (ShapeMismatch, "lanes of all tokens", lambda: ProjectProblem(-1, 16)),
        (ShapeMismatch, "partial sums", lambda: ProjectProblem(1 << 23, 16)),
        (UnknownName, "projection of mHC", lambda: ProjectProblem(3, 16, "tail")),
        (UnknownName, "rows of mHC", lambda: mhc.split_weight(torch.zeros(23, 8))),
    ],
)  # fmt: skip
def test_what_no_kernel_holds_is_refused(
    error: type[Exception], name: str, wrong: Callable[[], object]
) -> None:
    with pytest.raises(error, match=name):
        wrong()


# --------------------------------------------------------------------------------------------------
# RMSNorm: who holds which row and block, the stated order, bytes.

U = 2.0**-24
OFFICIAL = Numerics(Mode.BF16, torch.float32, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("columns", [64, 1024, 1040, 7168, 16_384])
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
@pytest.mark.parametrize("walkers", [0, 1])
def test_every_block_of_every_row_has_one_lane(
    columns: int, layout: str | None, walkers: int
) -> None:
    problem = NormProblem(37, columns, layout=layout)
    narrow, threads = rows.is_narrow(columns), rows.norm_threads(problem)
    assert threads % rows.LANES == 0
    assert threads <= rows.LANES * (rows.NARROW_WARPS if narrow else rows.MOST_WARPS)
    apart = rows.NARROW_WARPS if narrow else 1
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
    assert rows.SLOTS_OF_LANE * lanes >= -(-problem.blocks // wide) * wide


@pytest.mark.parametrize("columns", [64, 512, 1536, 7168])
@pytest.mark.parametrize("kind", ["rows", "tiny", "zeros"])
def test_the_stated_order_is_as_near_to_float64_as_derived(columns: int, kind: str) -> None:
    values = row_checks.spread((9, columns), kind, columns)
    weight = torch.linspace(-2, 2, columns)
    got = row_checks.normed_by_definition(values, weight, 1e-6).double()
    x = values.double()
    exact = weight.double() * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    # A lane's 16 products and 2 sums, 9 folds and the mean are rounded, halved by the root; then
    # four more roundings; at last BF16, half a step of 2**-7. Tiny squares vanish under epsilon.
    allowed = exact.abs() * ((8 + 2 + 9 + 2) / 2 + 4) * U
    bf16 = (exact.abs() + allowed) * 2.0**-8
    assert bool(((got - exact).abs() <= allowed + bf16).all())


def test_is_the_references_norm_but_for_the_order_of_the_sum() -> None:
    values = row_checks.spread((64, 1536), "rows", 1)
    weight = torch.rand(1536).bfloat16()
    want = elementary.rms_norm(values, weight, 1e-6, OFFICIAL)
    got = row_checks.normed_by_definition(values, weight, 1e-6)
    apart = (got.view(torch.int16).int() - want.view(torch.int16).int()).abs()
    assert int(apart.max()) <= 1
    assert float((apart > 0).double().mean()) < 2e-3  # a few units of float32 across a BF16 tie


@pytest.mark.parametrize("kind", ["special", "huge"])
def test_infinities_and_nan_stay_in_their_rows(kind: str) -> None:
    values = row_checks.spread((10, 64), kind, 2)
    weight = torch.ones(64)
    got = row_checks.normed_by_definition(values, weight, 1e-6)
    want = elementary.rms_norm(values, weight, 1e-6, OFFICIAL)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isfinite(), want.isfinite())


def test_rows_do_not_depend_on_other_rows() -> None:
    values, weight = row_checks.spread((8, 7168), "rows", 3), torch.rand(7168)
    whole = row_checks.normed_by_definition(values, weight, 1e-6)
    for row in range(8):
        alone = row_checks.normed_by_definition(values[row : row + 1], weight, 1e-6)
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
    assert rows.norm_threads(plain) == 224
    assert rows.norm_grid(plain, NormTactic(2), 132) == 264
    held = [
        rows.choose_norm_tactic(NormProblem(1, k)).walkers for k in (64, 1536, 4112, 7152, 16_368)
    ]
    assert held == [2, 10, 4, 2, 1]
    assert rows.choose_norm_tactic(NormProblem(1, 7152, weight="fp32")).walkers == 2
    assert rows.choose_norm_tactic(NormProblem(1, 7168)).walkers == 0
    assert rows.choose_norm_tactic(NormProblem(1, 7168, layout="128x4")).walkers == 4
    fp32 = NormProblem(1, 16_384, weight="fp32", layout="8x4", keeps_values=True)
    assert rows.choose_norm_tactic(fp32).walkers == 1


def test_extents_are_no_part_of_a_form() -> None:
    forms = {choose_norm_form(NormProblem(m, k), "sm_90a") for m in (1, 5000) for k in (1040, 7152)}
    assert len(forms) == 1
    assert choose_norm_form(NormProblem(1, 1024), "sm_90a").narrow


def test_rows_of_whole_lines_have_forms_of_their_own() -> None:
    found = {
        k: choose_norm_form(NormProblem(5, k), "sm_90a").warps for k in (512, 1024, 2048, 7168)
    }
    assert found == {512: 0, 1024: 0, 2048: 2, 7168: 7}
    assert choose_norm_form(NormProblem(5, 7152), "sm_90a").warps == 0
    forms = {rows.choose_residual_form(ResidualProblem(m, 7168), "sm_90a") for m in (1, 5000)}
    assert {form.warps for form in forms} == {7}
    problem = ResidualProblem(5000, 7168)
    assert rows.residual_grid(problem, rows.choose_residual_tactic(problem), 132) == 5000


# --------------------------------------------------------------------------------------------------
# A residual in front of a norm: form, tactic, bytes.


def test_two_rows_are_read_and_two_written() -> None:
    problem = ResidualProblem(8192, 7168, weight="fp32")
    assert problem.bytes_moved == 4 * 2 * 8192 * 7168 + 4 * 7168
    assert problem.norm == NormProblem(8192, 7168, weight="fp32")


@pytest.mark.parametrize("columns", [64, 512, 1024, 1040, 7152, 16_368])
def test_thread_blocks_fit_a_processor(columns: int) -> None:
    problem = ResidualProblem(8192, columns)
    tactic = rows.choose_residual_tactic(problem)
    held = tactic.walkers * norm_threads(problem.norm) * rows.RESIDUAL_REGISTERS
    assert held <= REGISTERS_OF_PROCESSOR
    assert rows.residual_grid(problem, tactic, 132) <= 132 * tactic.walkers
    assert rows.choose_residual_form(problem, "sm_90a").narrow is (columns <= 1024)
    assert rows.residual_grid(ResidualProblem(1, columns), tactic, 132) == 1


# --------------------------------------------------------------------------------------------------
# Query heads: every head has one warp.


@pytest.mark.parametrize("heads", [1, 7, 8, 9, 64, 128])
def test_every_head_has_one_warp(heads: int) -> None:
    tokens, groups = rows.heads_grid(QNormRopeProblem(3, heads, 1))
    walked = [
        group * rows.HEAD_WARPS + warp for group in range(groups) for warp in range(rows.HEAD_WARPS)
    ]
    assert tokens == 3
    assert [head for head in walked if head < heads] == list(range(heads))


def test_bytes_count_everything_once() -> None:
    assert QNormRopeProblem(3, 64, 9).bytes_moved == 3 * (2 * 2 * 64 * 512 + 8 + 256)


# --------------------------------------------------------------------------------------------------
# Turning back: every chunk has one thread, in place the last 64 alone.


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("heads", [1, 7, 64, 128])
@pytest.mark.parametrize("width", [128, 512])
def test_every_chunk_has_one_thread(width: int, heads: int, in_place: bool) -> None:
    problem = InverseRopeProblem(2, heads, 1, in_place, width)
    tokens, groups = rows.back_grid(problem)
    walked = [
        group * rows.CHUNKS_AT_ONCE * rows.BACK_THREADS + turn * rows.BACK_THREADS + thread
        for group in range(groups)
        for turn in range(rows.CHUNKS_AT_ONCE)
        for thread in range(rows.BACK_THREADS)
    ]
    places = [
        rows.place_of_chunk(c, width, in_place=in_place) for c in walked if c < problem.chunks
    ]
    assert tokens == 2
    chunks = width // 8
    of_head = range(chunks - 8 if in_place else 0, chunks)
    want = [(head * chunks + within, within) for head in range(heads) for within in of_head]
    assert sorted(places) == want


def test_bytes_count_what_moves() -> None:
    assert InverseRopeProblem(3, 64, 9).bytes_moved == 3 * (2 * 2 * 64 * 512 + 8 + 256)
    assert InverseRopeProblem(3, 64, 9, in_place=True).bytes_moved == 3 * (
        2 * 2 * 64 * 64 + 8 + 256
    )


# --------------------------------------------------------------------------------------------------
# Looking up rows: every vector is copied once.


@pytest.mark.parametrize("columns", [8, 264, 7168, 20_000])
def test_every_vector_of_a_row_has_one_thread(columns: int) -> None:
    problem = EmbedProblem(3, 10, columns)
    tokens, parts = embed_grid(problem)
    visited = [
        part * embed_threads(problem) * rows.EMBED_VECTORS_OF_THREAD
        + place * embed_threads(problem)
        + thread
        for part in range(parts)
        for thread in range(embed_threads(problem))
        for place in range(rows.EMBED_VECTORS_OF_THREAD)
    ]
    assert tokens == 3
    assert sorted(v for v in visited if v < problem.vectors) == list(range(problem.vectors))
    assert len(set(visited)) == len(visited)


def test_facts_of_the_model() -> None:
    problem = EmbedProblem(8192, 129_280, 7168)
    assert (embed_grid(problem), embed_threads(problem)) == ((8192, 1), 224)
    assert problem.bytes_moved == 8192 * (4 * 7168 + 8)
    assert len({rows.choose_embed_form(EmbedProblem(t, 9, 64), "sm_90a") for t in (1, 8)}) == 1


# --------------------------------------------------------------------------------------------------
# Scaling by one factor.


def test_every_number_has_a_thread() -> None:
    assert [ScaleProblem(n, 2.0).blocks for n in (0, 1, 256, 257)] == [0, 1, 1, 2]
    assert choose_scale_form(ScaleProblem(1, 2.0, "bf16"), "sm_90a") == ScaleForm(
        "bf16", "fp32", "sm_90a"
    )


# --------------------------------------------------------------------------------------------------
# The router: scores against float64, order and choice against the references'.

SMALLEST = 2.0**-149
SOFTPLUS_UNITS, SIGMOID_UNITS = 3, 3


def logits() -> torch.Tensor:
    spread = torch.randn(200_000, generator=torch.Generator().manual_seed(0)) * 5
    return torch.cat([torch.linspace(-110, 110, 400_001), spread])


def exact_score(logit: torch.Tensor, scoring: str) -> torch.Tensor:
    x = logit.double()
    if scoring == "sigmoid":
        return torch.where(x < 0, x.exp() / (1 + x.exp()), 1 / (1 + (-x).exp()))
    return torch.where(x > 20, x, torch.log1p(x.exp())).sqrt()


@pytest.mark.parametrize(
    ("scoring", "units"), [("sqrtsoftplus", SOFTPLUS_UNITS), ("sigmoid", SIGMOID_UNITS)]
)
def test_scores_are_within_the_stated_units(scoring: str, units: int) -> None:
    logit = logits()
    got, exact = routers.score_of(logit, scoring, torch.sqrt).double(), exact_score(logit, scoring)
    # Where softplus or the share vanishes, some steps of the subnormals are lost, or their root.
    lost = math.sqrt(3 * SMALLEST) if scoring == "sqrtsoftplus" else SMALLEST
    assert float(((got - exact).abs() - exact * units * U).max()) <= lost
    specials = torch.tensor([math.inf, -math.inf, math.nan])
    top, bottom, nan = routers.score_of(specials, scoring, torch.sqrt).tolist()
    assert (top, bottom) == (math.inf if scoring == "sqrtsoftplus" else 1.0, 0.0)
    assert math.isnan(nan)


def test_the_exponential_alone() -> None:
    distance = torch.linspace(0, 103, 100_001)
    got, exact = routers.exp_of_minus(distance).double(), (-distance.double()).exp()
    assert float(((got - exact).abs() - exact * 1.6 * U).max()) <= SMALLEST
    assert float(routers.exp_of_minus(torch.tensor([math.inf]))) == 0.0


def test_keys_are_in_the_order_of_torchs_sort() -> None:
    bits = torch.arange(-(2**31), 2**31, 65_521, dtype=torch.int64).to(torch.int32)
    numbers = torch.cat([bits.view(torch.float32), torch.tensor([0.0, -0.0, math.nan, -math.nan])])
    by_key = torch.sort(routers.key_of(numbers), descending=True, stable=True).indices
    by_torch = torch.sort(numbers, descending=True, stable=True).indices
    assert torch.equal(by_key, by_torch)
    assert int(routers.key_of(torch.tensor([-math.inf]))) == routers.LOWEST_KEY
    assert int(routers.key_of(numbers).min()) > routers.TAKEN
    again = routers.number_of_key(routers.key_of(numbers))
    assert torch.equal(again.isnan(), numbers.isnan())
    known = ~numbers.isnan()
    assert torch.equal(again[known], numbers[known])  # both zeros are +0
    assert not again[numbers == 0].signbit().any()


def by_reference(case: router_checks.RouterCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights as references/components do it, in float32."""
    p = case.problem
    softplus = p.scoring == "sqrtsoftplus"
    score = routing.sqrt_softplus(case.logits) if softplus else torch.sigmoid(case.logits)
    if p.vocabulary:
        token, table = (part.long() for part in case.table)
        experts = table[token]
    else:
        biased = score + case.bias
        if p.groups > 1:
            biased = routing.grouped_scores(biased, routing.GroupFacts(p.groups, p.groups_kept))
        experts = routing.largest_experts(biased, p.chosen)
    return experts, routing.router_weights(score, experts, p.scale, p.epsilon)


@pytest.mark.parametrize("model", [router_checks.V4_PRO, router_checks.V4_FLASH, router_checks.V32])
@pytest.mark.parametrize("kind", ["ordinary", "wide", "ties", "equal"])
def test_chooses_as_the_references_do(model: dict[str, Any], kind: str) -> None:
    case = router_checks.RouterCase(RouterProblem(2000, **model), kind, 11)
    experts, weights = router_checks.by_definition(case, "cpu")
    want, of_want = by_reference(case)
    moved = (experts.long() != want).any(-1)
    if kind == "ties":  # logits on a grid: equal ones have equal scores in both
        assert not bool(moved.any())
    budget = 2 * (SOFTPLUS_UNITS + 2) * U
    exact = exact_score(case.logits, case.problem.scoring) + case.bias.double()
    for token in moved.nonzero().flatten().tolist():
        mine, theirs = (exact[token][row[token].long()].sort().values for row in (experts, want))
        assert bool(((mine - theirs).abs() <= budget * theirs.abs().clamp(min=1.0)).all())
    assert int(moved.sum()) <= (len(moved) if kind == "wide" else 4)
    same = ~moved
    relative = (weights[same] - of_want[same]).abs() / of_want[same].abs().clamp(min=1e-30)
    assert float(relative.max()) <= (2 * SOFTPLUS_UNITS + 2 * case.problem.chosen) * U * 2


def test_a_table_chooses_as_the_references_do() -> None:
    case = router_checks.RouterCase(
        RouterProblem(500, **router_checks.V4_PRO, vocabulary=77), "ordinary", 5
    )
    experts, weights = router_checks.by_definition(case, "cpu")
    want, of_want = by_reference(case)
    assert torch.equal(experts.long(), want)
    assert torch.allclose(weights, of_want, rtol=3e-6, atol=0)


def test_ids_outside_give_no_expert_and_no_weight() -> None:
    case = router_checks.RouterCase(
        RouterProblem(70, **router_checks.V4_PRO, vocabulary=20), "special", 5
    )
    finite = torch.nan_to_num(case.logits, nan=0.0, posinf=9.0, neginf=-9.0)
    case.__dict__["logits"] = finite
    experts, weights = router_checks.by_definition(case, "cpu")
    assert bool((experts[0] == routers.NONE).all())
    assert bool((weights[experts == routers.NONE] == 0).all())
    some = (experts >= 0).any(-1)
    assert torch.allclose(weights[some].sum(-1), torch.tensor(2.5), rtol=1e-6)


def test_ties_go_to_the_lower_id_and_nan_first() -> None:
    case = router_checks.RouterCase(RouterProblem(3, **router_checks.V4_PRO), "equal", 0)
    assert router_checks.by_definition(case, "cpu")[0].tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    biased = torch.zeros(1, 8)
    biased[0, 5], biased[0, 3], biased[0, 1] = math.nan, math.inf, -0.0
    chosen = router_checks.chosen_by_definition(biased, RouterProblem(1, 8, 4))
    assert chosen.tolist() == [[5, 3, 0, 1]]


def test_forms_do_not_know_the_extents() -> None:
    for several in ((1, 64), (65, 999)):  # a thread block each, or a warp each
        forms = {choose_form(RouterProblem(t, e, 6), "sm_90a") for t in several for e in (300, 384)}
        assert len(forms) == 1
    assert choose_form(RouterProblem(1, 384, 6, vocabulary=9), "sm_90a").by_table


# --------------------------------------------------------------------------------------------------
# mHC: near the references on tensors and scalars, thread blocks, bytes.

ON_SCALARS = mhc.MhcMixPrimitives(
    lambda x: np.float32(math.exp(x)), lambda x: np.float32(1) / x, lambda x: 1 / np.sqrt(x)
)


@pytest.mark.parametrize("part", MIX_PARTS)
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 5.0])
def test_every_part_is_near_the_references(part: str, sharpness: float) -> None:
    for tokens, width in ((1, 8), (70, 256)):
        case = mhc_checks.Case(MhcMixProblem(tokens, width, part), sharpness=sharpness, seed=tokens)
        assert not mhc_checks.far_from_references(case, mhc_checks.by_stated_order(case))


def test_one_iteration_is_softmax_and_columns() -> None:
    case = mhc_checks.Case(MhcMixProblem(9, 64, "coefficients", iterations=1), sharpness=3.0)
    made = mhc_checks.by_stated_order(case)
    assert not mhc_checks.far_from_references(case, made)
    assert torch.allclose(made["mix"].sum(1), torch.ones(9, 4), atol=1e-5)


def test_a_processors_reciprocal_stays_within_the_budget() -> None:
    """Reciprocals and powers that are a step off: what the approximate instructions may be."""
    off = mhc.MhcMixPrimitives(
        lambda x: torch.exp(x) * (1 + 2.0**-22),
        lambda x: torch.reciprocal(x) * (1 - 2.0**-22),
        lambda x: torch.rsqrt(x) * (1 + 2.0**-22),
    )
    case = mhc_checks.Case(MhcMixProblem(60, 64, "coefficients"), sharpness=5.0)
    assert not mhc_checks.far_from_references(case, mhc_checks.by_stated_order(case, off))


@pytest.mark.parametrize("size", [0.01, 0.5, 1.0])
def test_divisors_that_stand_still_stay(size: float) -> None:
    """So iterations may end where one leaves the divisors of rows and columns as they were."""
    logits = list(size * mhc_checks.Case(MhcMixProblem(1, 8)).numbers(9, 16))
    rows_of = range(0, 16, mhc.STREAMS)
    powers = [
        mhc.softmax_row(logits[at : at + mhc.STREAMS], 1e-6, mhc_checks.ON_CPU) for at in rows_of
    ]
    lines = powers, list(zip(*powers, strict=True))
    state, still = mhc.sinkhorn_begun(lines[1], 1e-6, mhc_checks.ON_CPU), 0
    for _ in range(60):
        after = mhc.sinkhorn_step(lines, state, 1e-6, mhc_checks.ON_CPU)
        kept = [*state.of_rows, *state.of_columns] == [*after.of_rows, *after.of_columns]
        assert kept or not still
        if kept:
            assert [*after.shares, *after.factors] == [*state.shares, *state.factors]
            assert (after.scale, after.inverse) == (state.scale, state.inverse)
        still, state = still + kept, after
    assert still > 20


def test_scalars_and_tensors_agree() -> None:
    logits = mhc_checks.Case(MhcMixProblem(1, 8)).numbers(9, 16)
    on_tensors = mhc.sinkhorn(list(logits), 3, 1e-6, mhc_checks.ON_CPU)
    on_scalars = mhc.sinkhorn(list(logits.numpy()), 3, 1e-6, ON_SCALARS)
    for tensors, scalars in zip(on_tensors, on_scalars, strict=True):
        assert [float(n) for n in tensors] == pytest.approx([float(n) for n in scalars], rel=1e-6)
    assert float(mhc.gate(np.float32(0.0), ON_SCALARS)) == 0.5


def test_turned_sums_are_detected() -> None:
    """New stream k takes old stream j with mix[j, k]: the other way round is another result."""
    case = mhc_checks.Case(MhcMixProblem(5, 64, "post"))
    mix = case.coefficients[2]
    case.__dict__["coefficients"] = (*case.coefficients[:2], mix)
    right = mhc_checks.by_stated_order(case)
    case.__dict__["coefficients"] = (*case.coefficients[:2], mix.mT.contiguous())
    assert mhc_checks.far_from_references(case, right)


@pytest.mark.parametrize("part", MIX_PARTS)
@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (129, 1032), (7, 7168), (4225, 8)])
def test_every_chunk_and_every_token_has_one_thread(part: str, tokens: int, width: int) -> None:
    problem = MhcMixProblem(tokens, width, part)
    form = mhc.choose_mix_form(problem, "sm_90a")
    assert form.lanes == (2 if tokens > 4224 and form.makes_coefficients else 4)
    leading, groups = mhc.leading_blocks(problem), mhc.groups_of_chunks(problem)
    made, moved = [], []
    for block in range(mhc.mix_grid(problem)):
        for thread in range(mhc.MIX_THREADS):
            lane = block * mhc.MIX_THREADS + thread
            if block < leading and lane // form.lanes < tokens:
                streams = range(lane % form.lanes, mhc.STREAMS, form.lanes)
                made += [(lane // form.lanes, stream) for stream in streams]
            chunk = (block - leading) % groups * mhc.MIX_THREADS + thread
            if form.touches_streams and block >= leading and chunk < width // mhc.CHUNK_VALUES:
                moved.append(((block - leading) // groups, chunk))
    each = [(token, stream) for token in range(tokens) for stream in range(mhc.STREAMS)]
    assert sorted(made) == (each if form.makes_coefficients else [])
    chunks = width // mhc.CHUNK_VALUES if form.touches_streams else 0
    assert sorted(moved) == [(token, chunk) for token in range(tokens) for chunk in range(chunks)]


def test_mhc_bytes_count_everything_once() -> None:
    found = {part: MhcMixProblem(2, 4096, part).bytes_moved for part in MIX_PARTS}
    row = 2 * 4096
    assert found == {
        "all": 2 * (25 * 4 + 5 * row + 16 + 64),
        "coefficients": 2 * (25 * 4 + 32 + 64),
        "collapse": 2 * (16 + 5 * row),
        "head": 2 * (5 * 4 + 5 * row),
        "post": 2 * (16 + 64 + 9 * row),
    }


# --------------------------------------------------------------------------------------------------
# The projection of mHC: the split is exact, K is cut once.


def test_three_parts_are_the_weight() -> None:
    fn = torch.randn(24, 640, generator=torch.Generator().manual_seed(1)) / 50
    fn[0, :3] = torch.tensor([0.0, 1.0 + 2.0**-23, -3.0000002])
    split = mhc.split_weight(fn)
    assert split.shape == (3, 24, 640)
    assert torch.equal(split.double().sum(0), fn.double())
    assert not torch.equal(split[:2].double().sum(0), fn.double())
    head = mhc.split_weight(fn[:4])
    assert head.shape == (3, 8, 640)
    assert torch.equal(head.double().sum(0)[:4], fn[:4].double())
    assert not head[:, 4:].any()


@pytest.mark.parametrize("width", [8, 64, 256, 1032, 4096, 5120, 7168, 65536])
def test_every_step_of_k_is_in_one_piece_and_every_piece_in_one_group(width: int) -> None:
    cut = InnerCut(4 * width)
    pieces = [
        range(n * cut.per_piece, min((n + 1) * cut.per_piece, cut.steps)) for n in range(cut.pieces)
    ]
    assert [step for piece in pieces for step in piece] == list(range(cut.steps))
    assert all(pieces)
    assert 0 <= cut.steps * mhc.STEP - 4 * width < mhc.STEP
    groups = [n // cut.per_group for n in range(cut.pieces)]
    assert sorted(set(groups)) == list(range(cut.groups))
    assert cut.pieces <= mhc.MOST_PIECES
    assert cut.groups <= mhc.MOST_GROUPS
    assert (cut.spans - 1) * mhc.SPAN < cut.groups <= cut.spans * mhc.SPAN
    assert cut.spans <= mhc.MOST_SPANS


def test_tokens_choose_who_computes_and_nothing_else() -> None:
    forms = [
        mhc.choose_form(ProjectProblem(tokens, 7168), "sm_90a")
        for tokens in (mhc.LEAST_TOKENS, mhc.FEW_TOKENS, mhc.FEW_TOKENS + 1)
    ]
    assert [(form.few, form.lines) for form in forms] == [
        (True, "pieces"), (True, "groups"), (False, "groups")
    ]  # fmt: skip
    assert [form.tokens_of_block for form in forms] == [16, 16, 128]
    grids = {1: (448, 1), 33: (16, 3), 600: (16, 5), 8064: (16, 63), 8192: (4, 64)}
    for tokens, grid in grids.items():
        problem = ProjectProblem(tokens, 7168)
        form = mhc.choose_form(problem, "sm_90a")
        assert mhc.project_grid(problem, form) == grid
    assert ProjectProblem(2, 4096).bytes_moved == 2 * (32768 + 100) + 6 * 24 * 16384


def test_two_thread_blocks_fit_and_every_bank_is_read_once() -> None:
    for kind in mhc.WEIGHTS:
        form = mhc.ProjectForm(kind, few=False, target="sm_90a")
        assert 2 * (form.shared_bytes + 2048) <= 228 * 1024
        for project_form in (form, mhc.ProjectForm(kind, few=True, target="sm_90a")):
            # Chunks keep their place from row to row, or have two by turns, 64 bytes apart.
            assert project_form.rows_at_once % 8 in {0, 4}
            assert project_form.tokens_of_block % project_form.rows_at_once == 0
    for chunk in range(8):
        assert {mhc.chunk_place(row, chunk) for row in range(8, 16)} == set(range(8))
        assert mhc.chunk_place(4, chunk) == mhc.chunk_place(0, chunk) ^ 4
    places = {mhc.chunk_place(3, chunk) for chunk in range(8)}
    assert places == set(range(8))
