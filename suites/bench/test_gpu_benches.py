"""Benches that need a GPU: every arm made on a pretended one, what they count, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import EXIT_DIFFERS, EXIT_REFUSED
from degarble.kernels.attention import problem as attention_facts
from degarble.kernels.gemm import tensor_memory
from degarble.kernels.gemm.problem import OPERANDS, GemmProblem
from degarble.kernels.gemm.w4a16_problem import W4A16Problem
from degarble.kernels.runtime.targets import SM90A, SM100A, TARGETS
from degarble.references.tiny import figures
from degarble.references.tiny.configs import TINY_V4, TINY_V32
from degarble.suites.backends.cutedsl_standin import StandIn
from degarble.suites.bench import (
    attention,
    cache,
    decoder,
    gemm,
    gpu,
    indexer,
    moe,
    night,
    quality_attention,
    quality_linears,
    rows,
    runner,
    small_models,
)
from degarble.suites.bench.__main__ import bench_named, main, names, options_of
from degarble.suites.bench.runner import COPY, Arm, Comparison, Reading
from degarble.suites.kernels import cache_checks, sm100_table
from degarble.suites.kernels import sm100_checks as blackwell
from degarble.suites.kernels.attention import attention_checks as checks
from degarble.suites.kernels.moe import moe_checks
from degarble.suites.support.pretended_gpu import pretended_gpu

if TYPE_CHECKING:
    from torch import Tensor

ON_GPU = [name for name in names() if bench_named(name).device(options_of(name))]
TINY_MOE = {"V4-Flash": (256, 128, 4, 2), "V4-Pro": (256, 128, 4, 2)}
OF_MODELS = (
    "decoder",
    "decoder-v32",
    "decoder-products",
    "cosines",
    "attention-quality",
    "decoder-text",
)
# Every option that changes what is measured; "nvfp4-products" needs a GPU with an option alone.
CALLS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ON_GPU if name not in OF_MODELS),
    ("gemm", {"tactics": True}), ("moe", {"steps": True, "tokens": (3,)}),
    ("w4a16", {"layout": "128x4"}), ("attention-splits", {"family": "V4"}),
]  # fmt: skip


def readings(**arms: tuple[Arm, tuple[float, ...]]) -> dict[str, Reading]:
    """Readings in microseconds, taken in the same rounds."""
    found: dict[str, Reading] = {}
    for arm, microseconds in arms.values():
        seconds = tuple(microsecond * 1e-6 for microsecond in microseconds)
        found[arm.name] = Reading(arm, seconds, found)
    return found


def arm(name: str, moved: int = 0, operations: int = 0, *, baseline: bool = False) -> Arm:
    return Arm(name, lambda _: lambda: None, moved, operations, baseline)


def cells(comparison: Comparison, reading: Reading) -> list[str]:
    return [cell(reading) for _, cell in comparison.columns]


def tables(name: str, **changed: Any) -> list[Comparison]:
    """The comparisons of a bench."""
    parts = bench_named(name).parts(options_of(name, **changed))
    return [part for part in parts if isinstance(part, Comparison)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and this shows its absence")
@pytest.mark.parametrize("name", [*ON_GPU, "nvfp4-products"])
def test_refuses_without_a_gpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, *["--kernels"] * (name == "nvfp4-products")]) == EXIT_REFUSED
    text = capsys.readouterr().err
    assert "REFUSED: CUDA device" in text
    assert "NVIDIA GPU" in text


@pytest.mark.parametrize("name", ["gemm", "moe", "indexer", "sm100-gemm"])
def test_refuses_other_gpus(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    other = {SM90A.name: SM100A.name, SM100A.name: SM90A.name}[str(bench_named(name).needs)]
    with pretended_gpu(other):
        assert main([name]) == EXIT_REFUSED
    assert bench_named(name).remedy in capsys.readouterr().err


@pytest.mark.needs("cutlass")
@pytest.mark.parametrize(("name", "changed"), CALLS, ids=[f"{n} {' '.join(c)}" for n, c in CALLS])
def test_every_arm_is_made_and_called(
    name: str, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its true size, without memory; experts are drawn in earnest, so those are small."""
    device = "cpu" if name in moe.BENCHES else "meta"
    monkeypatch.setattr(moe, "MODELS", TINY_MOE)
    monkeypatch.setattr(moe, "BY_ROW_MODELS", TINY_MOE)
    monkeypatch.setattr(moe, "COPIED", 1 << 13)
    if name in moe.BENCHES:
        changed = {"tokens": (3,)} | changed
    if name == "night":
        monkeypatch.setattr(moe, "given_of", moe_on_cpu)
    needs = bench_named(name).device(options_of(name))
    with pretended_gpu(SM100A.name if needs == SM100A.name else SM90A.name, device):
        options = options_of(name, rounds=2, **changed)
        section = runner.run(name, bench_named(name), options)
    assert not section.failed
    assert section.tables
    for table in section.tables:
        shown = [row[0] for row in table.rows]
        assert shown
        assert len(set(shown)) == len(shown), table.title
        assert {len(row) for row in table.rows} == {len(table.header)}
    assert len({table.title for table in section.tables}) == len(section.tables)
    claims = [claim for part in comparisons(name, options) for claim in part.claims]
    assert len(section.targets) == len(claims), "a claim names an arm that is not there"


def moe_on_cpu(problem: Any, seed: int) -> Any:
    return moe_checks.given_of(moe_checks.Case(problem, "even", seed), "cpu")


def comparisons(name: str, options: Any) -> list[Comparison]:
    with pretended_gpu(SM100A.name if "sm100" in name else SM90A.name):
        return [p for p in bench_named(name).parts(options) if isinstance(p, Comparison)]


# ---- what the tables count -----------------------------------------------------------------------


def test_buffer_sets_are_more_than_a_cache() -> None:
    for moved in (1_000, 10_000_000, 150_000_000):
        sets = runner.sets_for(moved)
        assert sets >= runner.SETS
        assert sets == 64 or sets * moved >= runner.COLD_BYTES - moved


def test_the_share_of_a_kernel_that_moves_other_bytes() -> None:
    found = readings(
        copy=(arm(COPY, 100_000_000), (20.0, 25.0, 40.0)),
        kernel=(arm("kernel", 200_000_000), (50.0, 50.0, 100.0)),
    )
    kernel, copy = found["kernel"], found[COPY]
    assert kernel.share_of() == pytest.approx(0.8)
    assert copy.share_of() == 1.0
    assert copy.bandwidth == pytest.approx(4e12)
    (table,) = (rows.beside_copy("t", 1, []),)
    assert cells(table, kernel) == ["200.00", "50.00 [50.00, 75.00]", "4.00", "0.800"]


def test_row_kernels_miss_their_targets_by_name() -> None:
    found = readings(
        copy=(arm(COPY, 100), (8.4,)), kernel=(arm("kernel", 100), (10.0,)),
        fused=(arm("fused", 100), (12.0,)),
    )  # fmt: skip
    share = rows.claim_share("kernel", 0.85)
    assert share.text == "kernel, share of copy"
    assert share.value(found["kernel"]) == pytest.approx(0.84)
    assert rows.over("kernel")(found["fused"]) == pytest.approx(1.2)


def test_every_part_of_row_kernels_can_be_named() -> None:
    for name, parts in (
        ("rows", ("walks", "norms", "residuals", "heads", "routers")),
        ("indexer", ("scores", "topk", "operand")),
    ):
        every = [table.title for table in tables(name)]
        some = [[table.title for table in tables(name, only=[part])] for part in parts]
        assert [title for titles in some for title in titles] == every
        assert all(part in title for part, each in zip(parts, some, strict=True) for title in each)


def test_attention_rows_have_names_of_their_own_and_their_problems_bytes() -> None:
    many, nodes = tables("cache-rows")
    arms = {each.name: each for _, each in many.turns}
    assert len(arms) == len(many.turns) == 10 + 4 + 12 + 2 + 4
    kept = many.only(["mhc p"])
    assert kept is not None
    assert [each.name for _, each in kept.turns] == [
        f"mhc {part}, {width}" for part, width in
        (("post", 4096), ("post", 7168), ("project", 4096), ("project", 7168))
    ]  # fmt: skip
    assert arms["kv_write fp8"].moved == 8192 * (1024 + 8 + 8 + 256 + 584)
    assert arms["kv_read fp8-v32"].moved == 8192 * (4 + 656 + 1152)
    assert arms["mhc post, 7168"].moved == 8192 * (16 + 64 + 9 * 2 * 7168)
    (turns,) = nodes.turns
    assert {turn.repeats * turn.buffer_sets for turn in turns} == {cache.NODES}


def test_what_misses_its_target_among_attention_rows() -> None:
    many, nodes = tables("cache-rows")
    claims = {claim.text: claim for table in (many, nodes) for claim in table.claims}
    share, node = claims["kv_write fp8, share of copy"], claims["mhc all, 4096, of an empty node"]
    assert (share.wanted, share.at_least, node.wanted, node.at_least) == (0.8, True, 2.5, False)
    found = readings(
        empty=(arm(cache.EMPTY), (1.0, 1.0)), write=(arm("kv_write"), (2.0, 2.4)),
        mhc=(arm("mhc"), (2.6, 2.7)),
    )  # fmt: skip
    assert node.value(found["kv_write"]) == pytest.approx(2.2)
    assert node.value(found["mhc"]) == pytest.approx(2.65)


def test_a_product_is_judged_round_by_round() -> None:
    found = readings(
        cublas=(arm(gemm.CUBLAS, 0, 1, baseline=True), (100.0, 200.0, 120.0)),
        kernel=(arm("bf16", 0, 400_000_000), (200.0, 200.0, 300.0)),
    )
    (first, *_) = tables("gemm")
    assert found["bf16"].times(gemm.CUBLAS) == pytest.approx(0.5)
    assert found[gemm.CUBLAS].times(gemm.CUBLAS) == 1.0
    assert cells(first, found["bf16"]) == ["200.00 [200.00, 250.00]", "2", "0.50"]
    claims = {claim.text: claim for claim in first.claims}
    assert claims["bf16 of cuBLAS"].value(found["bf16"]) == pytest.approx(0.5)
    assert {claim.wanted for claim in claims.values()} == {0.85, 0.55, 1.2}


def test_every_kind_of_operands_has_an_arm() -> None:
    made = {problem.operands: problem for problem in gemm.problems((16, 7168, 4096))}
    assert set(made) == set(OPERANDS)
    assert made["nvfp4"].bytes_moved < made["fp8_block"].bytes_moved < made["bf16"].bytes_moved
    (first, *_) = tables("gemm")
    assert {each.name for each in first.turns[0]} == {gemm.CUBLAS, *OPERANDS}


def test_tables_of_grouped_products_have_their_problems() -> None:
    found = tables("grouped", tokens=(64,))
    assert [comparison.title.removesuffix(", 64 tokens") for comparison in found] == [
        "o_a of V4-Pro", "o_a of V4-Flash",
        "o_a of V4-Pro in FP8, scales float32", "o_a of V4-Pro in FP8, scales ue8m0",
        "o_a of V4-Flash in FP8, scales float32", "o_a of V4-Flash in FP8, scales ue8m0",
        "compressor's projection",
    ]  # fmt: skip
    assert [comparison.turns[0][0].operations for comparison in found] == [
        2 * 64 * groups * 1024 * 4096 for groups in (16, 8, 16, 16, 8, 8)
    ] + [2 * 64 * 2048 * 7168]
    flash = tables("grouped", tokens=(8192,))[1]
    fused, *_, cublas = flash.turns[0]
    timed = readings(fused=(fused, (1000.0,)), cublas=(cublas, (800.0,)))
    assert cells(flash, timed[fused.name]) == ["1000.0", "550", "0.80"]
    assert cells(flash, timed[cublas.name])[-1] == "1.00"


def test_weights_of_four_bits_are_compared_with_the_stricter_copy() -> None:
    def found(kernel: float, cublas: float) -> Reading:
        made = readings(
            kernel=(arm("8x32, M = 1", 16_000_000), (kernel, kernel)),
            copy=(arm(COPY, 16_000_000, baseline=True), (6.0, 6.0)),
            large=(arm(gemm.LARGE, 160_000_000, baseline=True), (40.0, 40.0)),
            cublas=(arm(gemm.CUBLAS, 58_000_000, baseline=True), (cublas, cublas)),
        )
        return made["8x32, M = 1"]

    (table,) = tables("w4a16")
    row = found(8.0, 20.0)
    assert (row.share_of(COPY), row.share_of(gemm.LARGE)) == pytest.approx((0.75, 0.5))
    assert cells(table, row) == ["8.00 [8.00, 8.00]", "2.00", "0.750", "0.500", "20.00", "2.50"]
    share, faster = table.claims[:2]
    for kernel, cublas, met in ((8.0, 20.0, (0, 1)), (6.5, 20.0, (1, 1)), (6.5, 12.0, (1, 0))):
        row = found(kernel, cublas)
        assert (share.value(row) >= share.wanted, faster.value(row) >= faster.wanted) == met
    assert gemm.w4a16_arm(W4A16Problem(1, 7168, 4096)).moved == 7168 * 4096 * 9 // 16


def test_every_tactic_of_a_b200_meets_a_shape_that_it_can_address() -> None:
    seen = set()
    for m, n, k in gemm.SM100_SHAPES:
        forms = gemm.tactics(m)
        seen |= {blackwell.named(form) for form in forms}
        assert len(forms) == len({blackwell.named(form) for form in forms})
        for form in forms:
            tensor_memory.require_extents(GemmProblem(m, n, k, "nvfp4", "e4m3"), form)
    families = (blackwell.forms(), blackwell.pairs(), blackwell.swapped())
    assert {blackwell.named(form) for family in families for form in family} <= seen


def test_a_tactic_of_a_b200_is_held_against_its_bound() -> None:
    problem = GemmProblem(4096, 7168, 4096, "nvfp4", "e4m3")
    form = blackwell.forms()[-1]
    bound = sm100_table.bound_of(problem, form)
    assert bound.seconds == pytest.approx(problem.operations / (bound.filled * sm100_table.PEAK))
    assert (bound.waves, bound.blocks, bound.limit) == (7, 148, "matrix")
    found = readings(
        own=(arm("a", 1, 1), (bound.seconds * 2e6,) * 2),
        cublas=(arm(gemm.CUBLAS, 1, 1), (bound.seconds * 4e6,) * 2),
    )
    assert found["a"].times(gemm.CUBLAS) == pytest.approx(2.0)
    assert gemm.bound_share(problem, form, found["a"]) == "matrix 0.50"
    few = GemmProblem(16, 512, 7168, "nvfp4", "e4m3")
    assert sm100_table.bound_of(few, gemm.tactics(16)[0]).blocks == 4


def test_experts_are_judged_round_by_round_and_both_products_together() -> None:
    found = readings(
        plain1=(arm(moe.PLAIN1, baseline=True), (60.0, 100.0, 60.0)),
        plain2=(arm(moe.PLAIN2, baseline=True), (40.0, 100.0, 40.0)),
        fc1=(arm(moe.FC1, 0, 300_000_000), (150.0, 150.0, 300.0)),
        fc2=(arm(moe.FC2), (50.0, 50.0, 100.0)),
    )
    assert moe.share(found, (moe.FC1, moe.FC2)) == pytest.approx(0.5)
    assert runner.pair_share(found[moe.FC1]) == pytest.approx(0.5)
    assert found[moe.FC1].speed == pytest.approx(2e12)
    problem = moe.problem_of("V4-Flash", 8192)
    assert problem.operations == sum(
        gemm_problem.operations for gemm_problem in moe.plain_problems(problem)
    )
    few = moe.problem_of("V4-Flash", 16)
    assert moe.weight_bytes(few, 256) == 256 * 3 * (4096 * 2048 // 2 + 4096 * 2048 // 16)
    judged = [part.claims[0] for part in tables("moe") if part.claims]
    assert [(claim.arm, claim.wanted) for claim in judged] == [(moe.FC1, 0.7)]
    assert judged[0].value(found[moe.FC1]) == pytest.approx(0.5)


def test_scores_and_choices_are_judged_round_by_round() -> None:
    found = readings(
        theirs=(arm(indexer.TOPK, 8, baseline=True), (90.0, 60.0, 80.0)),
        ours=(arm("ours", 2_000_000), (10.0, 20.0, 20.0)),
    )
    table = next(comparison for comparison in tables("indexer") if comparison.title == "topk")
    assert found["ours"].times(indexer.TOPK) == pytest.approx(4.0)
    assert cells(table, found["ours"]) == ["80.0", "20.0", "0.10", "4.00"]
    problem = indexer.scores_problem(2048, 16_384, 1, ("bf16", "float32"))
    assert problem.operations == 2 * 2048 * 16_384 * 64 * 128
    assert problem.pages.count * indexer.PAGE == 16_384
    decode = indexer.scores_problem(64, 8192, 64, ("fp8", "stored"))
    assert decode.bytes_moved > 64 * 8192 * 128


# ---- attention -----------------------------------------------------------------------------------


def test_attention_counts_operations_and_bytes() -> None:
    problem = attention.decode("fp8", 64, 64)
    assert problem.operations == 4 * 64 * 64 * 1152 * 512
    found = readings(
        own=(attention.arm_of("an arm", problem), (27.6,)),
        copy=(arm(COPY, problem.gathered_bytes), (55.2,)),
    )
    table = attention.beside_copies("t", [])
    assert cells(table, found["an arm"])[1:] == ["350", "2.000"]
    for attention_problem in (
        attention.prefill("nvfp4", 100, 64),
        attention.decode("bf16", 3, 128),
    ):
        assert all(of.pages.slots >= of.width for of in attention_problem.lists)
    decode = attention.latent("decode", "fp8-v32", 64, 128)
    assert decode.operations == 2 * 64 * 128 * 2048 * 1088
    assert decode.gathered_bytes == 64 * 2048 * 656
    for mode in ("decode", "prefill"):
        of = attention.latent(mode, "bf16", 3, 16).window
        assert of.pages.slots >= of.width


@pytest.mark.parametrize(
    ("prefill", "speed", "share", "met"),
    [(450, 350, 0.1, True), (450, 349, 0.7, True), (449, 350, 0.7, False),
     (450, 349, 0.69, False)],
)  # fmt: skip
def test_targets_of_attention(prefill: int, speed: int, share: float, met: bool) -> None:
    found = readings(
        own=(arm("fp8, 64 heads", 100, speed * 10**6), (1.0,)),
        copy=(arm(COPY, 100), (share,)),
        filled=(arm("bf16, 64 heads", 100, prefill * 10**6), (1.0,)),
    )
    claims = (attention.PREFILL_CLAIM, attention.DECODE_CLAIM)
    values = [round(claim.value(found[claim.arm]), 9) >= claim.wanted for claim in claims]
    assert all(values) == met


@pytest.mark.parametrize("far", [20, None])
def test_torch_version_is_the_formula(far: int | None) -> None:
    key = {} if far else {"key": 576}
    case = checks.Case(tokens=2, heads=3, near=9 if far else 20, far=far, entry="bf16", gaps=0.0,
                       **({"pages": (3, 2)} if far else key))  # fmt: skip
    given = checks.drawn(case, "cpu")
    keys = [*zip(given.slots, given.caches, strict=True)]
    sink = given.sink if far else None
    out = attention.torch_attention(case.problem, given.q, sink, keys)
    assert torch.allclose(out.double(), checks.formula(case, given)[0], atol=2e-3, rtol=0.02)


def test_a_missing_triton_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "find_spec", lambda _name: None)
    assert "triton is not installed" in attention.why_not_triton()


@pytest.mark.h200
def test_triton_version_has_the_numbers_of_torch() -> None:
    assert not attention.why_not_triton()


@pytest.mark.needs("cutlass")
def test_drawn_entries_are_small_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    problem = attention.latent("prefill", "fp8-v32", 2, 8)
    operands = attention.drawn(problem)
    pages, slots = problem.window.pages, torch.arange(5, dtype=torch.int32)
    read = cache_checks.read_by_definition(operands["window_cache"], slots, pages)
    assert read.isfinite().all()
    assert 0 < read[:, :512].abs().amax() < 8


# ---- the night -----------------------------------------------------------------------------------


def test_a_share_of_the_night_is_of_all_arms_round_by_round_and_of_the_work() -> None:
    found = readings(
        fc1=(arm("fc1", 15), (10.0, 20.0, 30.0)), fc2=(arm("fc2", 15), (10.0, 20.0, 10.0)),
        theirs=(arm(COPY, 10, baseline=True), (10.0, 10.0, 10.0)),
    )  # fmt: skip
    one = runner.summed("both", found)
    assert one.median == pytest.approx(40e-6)
    assert night.work_share(one, night.COPY) == pytest.approx(0.75)


def test_a_kernel_that_cannot_be_timed_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_number: int) -> Any:
        raise RuntimeError("no such\ninstruction")

    pair = [arm("ours"), arm("theirs", baseline=True)]
    rows_of = {
        "good": night.Row(lambda: pair, night.TOPK),
        "bad": night.Row(lambda: [Arm("x", broken), pair[1]], night.TOPK),
    }
    monkeypatch.setattr(night, "ROWS", rows_of)
    with pretended_gpu():
        assert main(["night", "--rounds", "2", "--json"]) == EXIT_DIFFERS
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["speeds"]["good"] == {"share": 1.0, "of": "torch.topk", "microseconds": 1.0}
    assert said["failed"] == {"bad": "RuntimeError: no such instruction"}
    assert said["target"] == SM90A.name


def test_every_target_has_rows_of_the_night_and_hopper_has_all() -> None:
    for target in TARGETS:
        assert [name for name, row in night.ROWS.items() if target in row.targets]
    assert all(SM90A.name in row.targets for row in night.ROWS.values())


# ---- a step of a decoder -------------------------------------------------------------------------


def test_kernels_are_summed_over_their_launches_and_compared_with_the_whole() -> None:
    launches = {f"{n} x": (arm(f"{n} x"), (us,)) for n, us in enumerate((20.0, 4.0, 10.0, 2.0))}
    told = decoder.kernel_rows(["one", "two", "one"], readings(**launches))
    assert told == [
        ("two", "1", "10.0", "62.5%"), ("one", "2", "6.0", "37.5%"),
        ("launches one by one", "3", "16.0", "100 %"),
        ("the whole step as a graph", "1", "20.0", "125.0%"),
    ]  # fmt: skip


class Recording(StandIn):
    """Stand-ins that remember what they were handed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def _run(self, kernel: str, problem: Any, tensors: Any) -> Any:
        self.calls.append((kernel, problem, dict(tensors)))
        return super()._run(kernel, problem, tensors)


@pytest.mark.parametrize("recipe", decoder.RECIPES)
def test_a_step_of_v32_launches_every_kernel_of_its_layers(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At small widths, by stand-ins: the layers that are timed are layers that run."""
    small = replace(  # whole tiles of FP8
        TINY_V32, index_n_heads=8, q_lora_rank=128, moe_intermediate_size=128,
        intermediate_size=256,
    )  # fmt: skip
    monkeypatch.setattr(decoder, "SETS", 1)
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    every = decoder.experts(128, 128, small.n_routed_experts)
    given = decoder.Given(Recording(), small, every, recipe, "bf16", 256)
    for block, size in zip(small.layers, ((2, 2), (1, 64)), strict=True):
        (step,) = decoder.steps_of_v32(given, block, *size)
        made = step.run()
        assert isinstance(made, tuple)
        assert all(each.isfinite().all() for each in made)
        launched = {name for name, *_ in step.calls}
        assert {"simt_residual_norm", "simt_latent_query", "sm90_sparse_attention"} <= launched
        table = decoder.step_table("t", given.kernels, [step], lambda _found: [])
        assert len(table.turns[0]) == 1 + len(step.calls)


def test_both_products_are_timed_in_turns_and_one_is_said_to_be_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At small widths, by stand-ins; the command chooses by the sum over all layers."""
    small = replace(TINY_V32, moe_intermediate_size=128, intermediate_size=256)
    monkeypatch.setattr(decoder, "Given", partial(decoder.Given, context=128))
    monkeypatch.setattr(decoder, "SETS", 1)
    monkeypatch.setattr(decoder, "ENTRY_V32", "bf16")
    monkeypatch.setattr(decoder, "V3_2", small)
    monkeypatch.setattr(decoder, "Remembering", lambda _settings: Recording())
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    said: list[Any] = []
    launched: dict[str, set[str]] = {}
    for part in decoder.decoder_products(SimpleNamespace(model="V3.2", lanes=(2,))):
        if isinstance(part, str):
            said.append(part)
            continue
        assert isinstance(part, runner.Comparison)
        (arms,) = part.turns
        for each in arms:
            make: Any = each.make
            calls = make.args[0][0].calls
            launched.setdefault(each.name, set()).update(name for name, *_ in calls)
        for each in arms:
            each.make(0)()  # kernels remember on
        times = {each.name: (each, (us,)) for each, us in zip(arms, (20.0, 9.0), strict=True)}
        assert part.notes is not None
        said += part.notes(readings(**times))
    assert "sm90_gemm_w4a16" in launched["few-rows"]
    assert not launched["few-rows"] & {"sm90_gemm_nvfp4", "sm90_shared_expert"}
    assert {"sm90_gemm_nvfp4", "sm90_shared_expert"} <= launched["tiles"]
    assert said[-1].endswith("tiles 0.04 ms, few-rows 0.02 ms; faster: few-rows")


@pytest.mark.parametrize("recipe", decoder.RECIPES)
@pytest.mark.parametrize("ratio", decoder.TYPES)
def test_a_step_of_v4_launches_every_kernel_of_its_layers(
    recipe: str, ratio: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(
        TINY_V4, hidden_size=256, q_lora_rank=128, o_lora_rank=128, moe_intermediate_size=128,
        num_hash_layers=0,
    )  # fmt: skip
    monkeypatch.setattr(decoder, "SETS", 1)
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    every = decoder.experts(256, 128, small.n_routed_experts)
    given = decoder.Given(Recording(), small, every, recipe, "bf16", 256)
    block = [layer for layer in small.layers if layer.ratio == ratio][-1]
    (step,) = decoder.steps_of(given, block, 2)
    made = step.run()
    assert isinstance(made, torch.Tensor)
    assert made.isfinite().all()
    launched = {name for name, *_ in step.calls}
    assert {"simt_mhc", "simt_qnorm_rope", "sm90_sparse_attention", "simt_router"} <= launched
    assert ("simt_indexer_topk" in launched) == (ratio == 4)
    assert ("simt_compressor" in launched) == bool(ratio)


# ---- cosines with BF16 ---------------------------------------------------------------------------


class Noisy(quality_linears.Twin):
    """The twin with an output that is a twentieth off."""

    def through(self, layer: quality_linears.Layer) -> Tensor:
        out = super().through(layer)
        return out + 0.05 * out.std() * torch.randn(out.shape, generator=torch.Generator())


def test_the_small_model_and_a_part_of_v4_pro_reach_their_ceilings() -> None:
    small = quality_linears.captured(24, "cpu")
    assert [layer.kind for layer in small] == [*["linear"] * 4, "shared expert", "experts"]
    table, targets = quality_linears.judged(small, quality_linears.Twin())
    assert all(target.met for target in targets)
    assert table.rows[0][:2] == ("tiny wq_a", "linear")
    assert table.rows[0][2].startswith("0.97")
    large = list(quality_linears.drawn_layers(8, "cpu", scale=32))
    table, targets = quality_linears.judged(large, Noisy())
    assert not any(target.met for target in targets)
    assert len(targets) == len(large)
    assert table.rows[-1][-1] == "0.988"


@pytest.mark.needs("cutlass")
def test_our_kernels_compute_every_kind_of_layer_and_of_products() -> None:
    """On a pretended GPU: what is called, not what it gives."""
    with pretended_gpu(device="cpu"):
        for layer in quality_linears.drawn_layers(8, "cpu", scale=16):
            out = quality_linears.Stack().through(layer)
            assert out.shape == quality_linears.Reference().through(layer).shape
        for entry, products in quality_attention.KINDS.values():
            assert quality_attention.by_kernel(SMALL, entry, products).shape == (2, 3, 512)


def test_outliers_and_scales_are_what_they_say() -> None:
    generator = torch.Generator().manual_seed(1)
    x = quality_linears.activations(64, 2048, generator).float()
    size = x.square().mean(0).sqrt()
    assert 8 < float(size.max() / size.median()) < 64
    assert 0.003 < float((size > 7 * size.median()).float().mean()) < 0.03
    drawn = quality_linears.drawn_layers(8, "cpu", scale=32)
    layer = next(each for each in drawn if each.experts)
    first, second = quality_linears.calibrated(layer, 0)
    assert first == quality_linears.decode_scale(layer.x)
    assert second > 0


def test_kernels_of_attention_may_be_a_hair_below_the_twin_and_no_more() -> None:
    row = quality_attention.QualityRow
    near, far, broken = (
        row("rows, fp8 cache", "any", 0.9997, 0.9998, each)
        for each in (0.999695, 0.9996, float("nan"))
    )
    absent = row("rows, fp8 cache", "any", 0.9997, 0.9998)
    assert [
        [target.met for target in quality_row.targets()]
        for quality_row in (near, far, broken, absent)
    ] == [[True], [False], [False], []]
    assert near.line()[2:] == ("0.9997", "0.9997000", "0.9998000", "0.9996950")
    assert absent.line()[-1] == "not run"


def test_a_cosine_is_of_all_numbers() -> None:
    a = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert quality_linears.cosine(a, a.clone()) == 1.0
    other = torch.tensor([[4.0, -3.0], [0.0, 0.0]])
    assert quality_linears.cosine(a, other) == pytest.approx(0.0)


SMALL = quality_attention.Inputs(
    "small",
    torch.randn(2, 3, 512, generator=torch.Generator().manual_seed(1)).bfloat16(),
    torch.randn(40, 512, generator=torch.Generator().manual_seed(2)).bfloat16(),
    torch.arange(40) < torch.tensor([[30], [40]]),
    torch.zeros(3),
)


def test_nvfp4_products_name_what_is_rounded_and_lose_in_order() -> None:
    found = quality_attention.compared(SMALL, kernels=False)
    assert [row.kind for row in found] == list(quality_attention.KINDS)
    logits = [row.cosines[0] for row in found]
    assert 1 > logits[0] > logits[1] > logits[2] > logits[3] > 0.98
    # Keys alone and queries alone each lose about half as much as both.
    assert logits[3] == pytest.approx(1 - 2 * (1 - logits[2]), abs=1e-3)
    assert found[3].line()[:2] == ("small", "nvfp4 keys and queries")
    assert found[3].line()[2].startswith("0.99")
    kinds = [products for _, products in quality_attention.KINDS.values()]
    assert kinds.count(attention_facts.EXPERIMENT) == 1


def test_keys_outside_the_mask_do_not_count() -> None:
    other = SMALL.keys.clone()
    other[30:] *= 100
    alone = replace(SMALL, q=SMALL.q[:1], seen=SMALL.seen[:1])
    assert quality_attention.compared(alone, kernels=False) == quality_attention.compared(
        replace(alone, keys=other), kernels=False
    )


def test_rotation_changes_no_logit_and_evens_out_channels() -> None:
    plain, turned = (quality_attention.drawn(f"V4-Pro, outliers{end}") for end in ("", ", rotated"))
    logits = [
        quality_attention.logits_of(inputs, inputs.q, inputs.keys) for inputs in (plain, turned)
    ]
    assert quality_linears.cosine(*logits) > 0.9999
    largest = [inputs.keys.float().square().mean(0).amax() for inputs in (plain, turned)]
    assert largest[0] > 20 * largest[1]


# ---- answers of the small models -----------------------------------------------------------------


def answers(right: int, asked: int = 100) -> small_models.Found:
    score = figures.ProbeScore()
    score.asked["sum"], score.right["sum"] = asked, right
    score.tokens = 1
    return small_models.Found("any", score, (3, 4))


def test_shares_are_apart_where_neither_lies_in_the_others_interval() -> None:
    assert answers(90).apart_from(answers(50)) == ["sums"]
    assert answers(90).apart_from(answers(86)) == []
    assert answers(2, 2).apart_from(answers(60)) == [], "two answers say little"


def test_a_row_shows_share_interval_and_number() -> None:
    row = answers(90).row()
    assert "90.0 % [82.6, 94.5] of 100" in row
    assert row[-1] == "75.0 % of 4"
