"""What the kernels of products register: forms with derived figures, cases, replays."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from degarble.kernels.gemm import gemv_problem
from degarble.kernels.gemm import problem as gemm
from degarble.kernels.gemm import w4a16_problem as w4a16
from degarble.kernels.gemm import w4a16_wgmma_problem as w4a16_wgmma
from degarble.kernels.gemm.gemv_problem import GemvForm, GemvProblem
from degarble.kernels.gemm.grouped_problem import (
    GroupedFp8Problem,
    GroupedProblem,
    choose_fp8_form,
    choose_grouped_form,
)
from degarble.kernels.gemm.w4a16_problem import W4A16Problem, W4A16Tactic
from degarble.kernels.runtime.compiling import fused_instructions
from degarble.kernels.runtime.targets import SM90A, TARGETS
from degarble.suites.kernels import gemm_checks, gemm_code, row_checks
from degarble.suites.kernels.contract import (
    BLACKWELL,
    HOPPER,
    Detection,
    Judged,
    MachineCode,
    Replay,
    ReplayCase,
    Round,
    kernels_of,
)
from degarble.suites.kernels.gemm import grouped_checks, grouped_fp8_checks, w4a16_checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from degarble.kernels.gemm.problem import GemmForm
    from degarble.kernels.runtime.compiling import CompiledKernel


# ---- plain products ------------------------------------------------------------------------------


def _leaves(kernel: CompiledKernel, form: GemmForm) -> None:
    """Raise where a tile does not leave as its tactic says: by TMA, or two numbers a word."""
    stores = 0 if form.tactic.direct else None
    assert not gemm_code.complaints(kernel, form, issued=1, stores=stores)
    # A warpgroup's 64 rows are so many words a thread; pieces leave by TMA.
    words = form.tactic.columns // 4 if form.tactic.direct else 0
    assert len(re.findall(r"st\.global\S*\.b32", kernel.ptx)) == words
    assert kernel.ptx.count("shfl.sync.bfly.b32") == words * form.tactic.swapped
    asked = form.tactic.asked_early > 0
    assert kernel.ptx.count("cp.async.bulk.prefetch.tensor.2d.L2") == asked
    shares = form.tactic.cluster_rows * form.tactic.cluster_columns > 1
    assert ("multicast::cluster" in kernel.ptx) is shares


def _is_bf16(kernel: CompiledKernel, form: GemmForm) -> None:
    _leaves(kernel, form)
    shape = f"m64n{form.tactic.columns}k16.f32.bf16.bf16"
    # A stage is four steps of K; the first stage of a tile has its own text.
    assert gemm_code.wgmmas(kernel.ptx) == 8 * [f"wgmma.mma_async.sync.aligned.{shape}"]


def _is_fp8(kernel: CompiledKernel, form: GemmForm) -> None:
    _leaves(kernel, form)
    shape = f"m64n{form.tactic.columns}k32.f32.e4m3.e4m3"
    # Overlapped stages: the first, two that take turns, one where their number is even. Of folds
    # each stage of a slot of factors has its own text, and those of a last slot share one.
    overlapped, folds = gemm.overlaps(form), form.tactic.folds
    assert overlapped is (folds == 1)
    taken = folds * (gemm.FACTOR_STAGES + 1)
    stages, promoted = (4, 5) if overlapped else (taken, taken)
    assert gemm_code.wgmmas(kernel.ptx) == 4 * stages * [f"wgmma.mma_async.sync.aligned.{shape}"]
    # A sum of a stage is promoted by one fma; a thread holds so many sums.
    assert len(fused_instructions(kernel.ptx)) == promoted * form.tactic.columns // 2
    # In front of a promotion the next stage's wgmma stay under way.
    assert kernel.ptx.count("wgmma.wait_group.sync.aligned \t1") == 3 * overlapped


def _is_nvfp4(kernel: CompiledKernel, form: GemmForm) -> None:
    # Loads are written twice: before the first tile, and beside each stage that is decoded.
    assert not gemm_code.complaints(kernel, form, issued=2)
    shape = f"m64n{form.tactic.columns}k16.f32.f16.f16"
    # First stage of a tile, two that take turns, one where their number is odd.
    assert gemm_code.wgmmas(kernel.ptx) == 16 * [f"wgmma.mma_async.sync.aligned.{shape}"]
    assert "cvt.rn.bf16x2.e2m1" not in kernel.ptx
    assert "fma" not in kernel.ptx


PLAIN: dict[str, tuple[Callable[[CompiledKernel, GemmForm], None], tuple[int, ...]]] = {
    "bf16": (_is_bf16, (2, -1)), "fp8_block": (_is_fp8, (4, -1)), "nvfp4": (_is_nvfp4, (0,)),
}  # fmt: skip


def _plain_code() -> Iterator[MachineCode]:
    for operands, (is_sound, usual) in PLAIN.items():
        forms = gemm_checks.forms(operands)
        for form in forms:
            slow = form not in [forms[i] for i in usual]
            yield MachineCode(f"sm90_gemm_{operands}", form, more=is_sound, slow=slow)


def _plain_launched(case: gemm_checks.Case) -> Any:
    sides = gemm_checks.SIDES[case.problem.operands](case, "cuda")
    return gemm_checks.on_device(case, sides)


def _plain_judged(operands: str) -> Judged:
    return Judged(
        f"sm90_gemm_{operands}", (), gemm_checks.mismatch, partial(gemm_checks.fuzzed, operands),
        5, 40, _plain_launched, 15, HOPPER, repeat_seed=77,
    )  # fmt: skip


def _replay_plain(operands: str) -> Replay:
    scales = gemm.OPERANDS[operands].scales[-1]
    cases = [gemm_checks.table_case(operands, (700, 520, 1184), scales, n) for n in range(4)]
    sides = [gemm_checks.SIDES[operands](case, "cuda") for case in cases]
    out, kernels = gemm_checks.on_device(cases[0], sides[0]), gemm_checks.hopper(operands)
    rounds = [
        Round(
            gemm_checks.flat(side.given), mismatch=partial(gemm_checks.difference, case, out, side)
        )
        for case, side in zip(cases[1:], sides[1:], strict=True)
    ]
    return Replay(
        lambda: gemm_checks.multiply(
            kernels, sides[0].given, cases[0].problem, cases[0].form, out[:700]
        ),
        gemm_checks.flat(sides[0].given), out, rounds, poison=0xFF,
    )  # fmt: skip


# ---- products of few rows ------------------------------------------------------------------------


def _few_rows_code(target: str) -> Iterator[MachineCode]:
    forms = [
        GemvForm(rows, out, target, walk)
        for rows, out in product(gemv_problem.ROWS, gemv_problem.OUTPUTS)
        for walk in (gemv_problem.OF_ONE_ROW if rows == 1 else gemv_problem.OF_SEVERAL)
    ]
    forms += [replace(form, late=True) for form in forms if form.rows == 1]
    for form in forms:
        rows, walk = form.rows, form.walk
        fused = walk.ahead * gemv_problem.VECTOR * walk.together * rows
        # 16 bytes a lane: a row of activations each to hold them, weights in front and in the walk.
        turns = 1 if walk.once else 2
        loads = rows * walk.copied + turns * walk.ahead * walk.together
        slow = (rows, form.out, walk.together) != (8, "fp32", 4)
        threads = walk.blocks * walk.warps * gemv_problem.LANES  # of a processor
        yield MachineCode(
            "simt_gemv_bf16", form, 65_536 // threads, fused=fused,
            counts={"ld.global.v4": loads}, more=_weights_alone_before_the_wait, reads_early=True,
            slow=slow,
        )  # fmt: skip


def _weights_alone_before_the_wait(kernel: CompiledKernel, form: GemvForm) -> None:
    """A lane's first steps, which nothing writes while launches are under way."""
    text = kernel.ptx
    before = text[: text.index("griddepcontrol.wait")]
    first = form.walk.ahead * form.walk.together
    assert before.count("ld.global") == before.count("ld.global.v4") == first
    assert "ld.global.nc" not in text
    for access in ("st.global", "cp.async"):
        assert access not in before, access
    # A late one lets the next launch be set up behind its last store.
    follows = text.index("griddepcontrol.launch_dependents")
    assert (follows > text.rindex("st.global")) == form.late
    assert (follows < len(before)) == (not form.late)


def _few_rows_joined_code(target: str) -> Iterator[MachineCode]:
    """Forms that turn heads back, or quantise."""
    for rows in (1, 4):
        for problem in (
            GemvProblem(rows, 1024, 4096, "bf16", 8, 512, 9),
            GemvProblem(rows, 1024, 4096, "bf16", 8, 512, 9, decoded=True),
            GemvProblem(rows, 1024, 4096, "bf16", 8, decoded=True),
        ):
            form = gemv_problem.choose_form(problem, target)
            fused = form.walk.ahead * gemv_problem.VECTOR * form.walk.together * rows
            # Rounding to what a code stands for takes two additions a value of half a block.
            yield MachineCode(
                "simt_gemv_bf16", form, 128, fused=fused + 16 * problem.decoded, reads_early=True,
                more=_weights_alone_before_the_wait, slow=(target, rows) != (SM90A.name, 1),
            )  # fmt: skip


def _few_rows(case: row_checks.GemvCase) -> Any:
    return row_checks.grouped_by_definition(case, *case.operands)


def _replay_few_rows() -> Replay:
    problem = GemvProblem(3, 777, 1032)
    x = torch.zeros(3, 1032, dtype=torch.bfloat16, device="cuda")
    weight = torch.zeros(777, 1032, dtype=torch.bfloat16, device="cuda")
    out = torch.full((3, 777), torch.nan, device="cuda")
    cases = [row_checks.GemvCase(problem, "rows", seed) for seed in range(3)]
    rounds = [Round(case.operands, partial(row_checks.product_on_device, case)) for case in cases]
    return Replay(lambda: row_checks.multiply(x, weight, problem, out), [x, weight], out, rounds)


# ---- grouped products ----------------------------------------------------------------------------


def _grouped_forms() -> Iterator[tuple[GroupedProblem, bool]]:
    yield GroupedProblem(8192, 16, 1024, 4096, 512, 99), False
    yield GroupedProblem(1, 1, 2048, 7168, out="fp32"), True
    for tokens in (1, 300, 8192):
        for turned, out in ((0, "bf16"), (512, "bf16"), (128, "bf16"), (0, "fp32")):
            yield GroupedProblem(tokens, 2, 256, 1024, turned, turned, out), True


def _grouped_code() -> Iterator[MachineCode]:
    for problem, slow in _grouped_forms():
        form = choose_grouped_form(problem)
        # The turned stages are written out once for the first head and once for the others.
        counts = {
            "ld.shared.v4": 8 * bool(form.turned),
            "st.global.v2": (form.out == "fp32") * form.gemm.tactic.columns // 4,
        }
        yield MachineCode(
            "sm90_gemm_grouped", form, gemm.registers_at_launch(form.gemm), fused=0, counts=counts,
            more=_expects_a_stage, slow=slow,
        )  # fmt: skip
    for fp8, slow in (
        (GroupedFp8Problem(8, 16, 1024, 4096, "ue8m0", 512, 99), False),
        (GroupedFp8Problem(8192, 16, 1024, 4096), False),
        *(
            (GroupedFp8Problem(tokens, 2, 256, 1024, scales, turned, turned), True)
            for scales, turned, tokens in product(("float32", "ue8m0"), (0, 128, 512), (1, 8192))
        ),
    ):
        fp8_form = choose_fp8_form(fp8)
        # The stages of a head are written out; each has four steps of 32, A's codes in registers.
        stages = fp8_form.steps_of_head or 1
        counts = {
            "cvt.rn.satfinite.e4m3x2": 64 * stages // 2 * bool(fp8_form.turned),
            "ld.shared.v2": 16 * stages * bool(fp8_form.turned),
        }
        yield MachineCode(
            "sm90_gemm_grouped_fp8", fp8_form, gemm.registers_at_launch(fp8_form.gemm),
            counts=counts, more=_expects_a_stage_and_steps, slow=slow,
        )  # fmt: skip


def _expects_a_stage(kernel: CompiledKernel, form: Any) -> None:
    assert gemm_code.expected_bytes(kernel.ptx) == {gemm.transaction_bytes(form.gemm)}


def _expects_a_stage_and_steps(kernel: CompiledKernel, form: Any) -> None:
    _expects_a_stage(kernel, form)
    assert len(gemm_code.wgmmas(kernel.ptx)) == 4 * (form.steps_of_head or 1)


def _in_bf16(cases: list[grouped_checks.Case]) -> list[grouped_checks.Case]:
    """Leave out what has no form on Blackwell."""
    return [case for case in cases if case.out == "bf16"]


def _grouped_result(case: grouped_checks.Case) -> Any:
    return grouped_checks.launched(case, case.operands())[0]


def _grouped_fp8_result(case: grouped_fp8_checks.Case) -> Any:
    return grouped_fp8_checks.launched(case, grouped_fp8_checks.operands(case))[0]


def _replay_grouped() -> Replay:
    case = grouped_checks.Case(130, grouped_checks.TINY)
    other = replace(case, seed=9)
    parts: Any = case.operands()
    later: Any = other.operands()
    a, b, turns = parts
    out, kernels = torch.empty_like(_grouped_result(case)), kernels_of("sm90_gemm_grouped")

    def mismatch() -> str:
        want = grouped_checks.composed(case, (a, b, turns))
        return grouped_checks.difference(case.name, out, want)

    return Replay(
        lambda: grouped_checks.multiply(kernels, (a, b), case.problem, turns, out),
        [a, turns[1]], out, [Round([later[0], later[2][1]], mismatch=mismatch)], poison=0xFF,
    )  # fmt: skip


def _replay_grouped_fp8() -> Replay:
    case = grouped_fp8_checks.Case(50, grouped_fp8_checks.TINY)
    given, out = grouped_fp8_checks.operands(case), torch.empty_like(_grouped_fp8_result(case))
    other = grouped_fp8_checks.operands(replace(case, seed=9))

    def mismatch() -> str:
        want = grouped_fp8_checks.composed(case, given)
        return grouped_checks.difference(case.name, out, want)

    return Replay(
        lambda: grouped_fp8_checks.multiply(given, case.problem, out), [given.a, given.positions],
        out, [Round([other.a, other.positions], mismatch=mismatch)], poison=0xFF,
    )  # fmt: skip


# ---- BF16 times NVFP4 ----------------------------------------------------------------------------


def _w4a16_code(target: str) -> Iterator[MachineCode]:
    for problem in (W4A16Problem(1, 7168, 4096), W4A16Problem(16, 7168, 4128, "128x4")):
        yield _w4a16_form(problem, w4a16.choose_tactic(problem), target, slow=False)
    for layout, columns, tactic in product(w4a16.LAYOUTS, (4096, 4128), w4a16.TACTICS):
        for rows in sorted({min(8, tactic.rows), tactic.rows}):
            problem = W4A16Problem(rows, 7168, columns, layout)
            yield _w4a16_form(problem, tactic, target, slow=True)


def _w4a16_form(
    problem: W4A16Problem, tactic: W4A16Tactic, target: str, *, slow: bool
) -> MachineCode:
    form, native = w4a16.choose_form(problem, tactic, target), TARGETS[target].converts_e2m1
    counts = {
        # A lane's four words of two rows: two mma each, for every eight columns.
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": form.tiles * form.columns // 8 * 8,
        "mul.rn.bf16x2": 32 * form.tiles * (not native),
        "add.rn.f32": w4a16.PARTS - 1,
        # A stage that was read is given back behind a vote on what was read; activations as well.
        "vote.sync.ballot.b32 all, some, 0xffffffff; add.u32 all, all, ": form.tiles + 1,
        "mbarrier.arrive.shared::cta.b64 _, [all]": form.tiles + 1,
        # The others belong to warps behind the end of K, which have read nothing.
        "mbarrier.arrive.shared::cta.b64": 2 * form.tiles + 1,
    }
    has = {"e2m1x2": native, "fma.rn.f32": False}
    return MachineCode(
        "sm90_gemm_w4a16", form, 65_536 // form.threads, counts=counts, has=has, slow=slow,
    )  # fmt: skip


def _wgmma_code() -> Iterator[MachineCode]:
    for rows, layout, columns in product((8, 16, 32, 64), w4a16.LAYOUTS, (4096, 4128)):
        problem = W4A16Problem(rows, 7168, columns, layout)
        form = w4a16_wgmma.choose_form(problem, SM90A.name)
        counts = {
            # Two halves of a stage, each four steps of K.
            f"wgmma.mma_async.sync.aligned.m64n{form.columns}k16.f32.bf16.bf16": 8,
            "mul.rn.bf16x2": 2 * (2 + 16),  # of a half: its scales, and 16 pairs of weights
            "add.rn.f32": 4 * (form.ranks - 1) * form.turns,
            "wgmma.wait_group": 3,
        }
        yield MachineCode(
            w4a16_checks.BY_WGMMA, form, 65_536 // form.threads, counts=counts,
            has={"fma.rn.f32": False}, slow=(rows, layout, columns) != (64, "128x4", 4096),
        )  # fmt: skip


def _replay_w4a16(kernel: str, rows: int) -> Replay:
    problem = W4A16Problem(rows, 1536, 7168, "128x4")
    cases = [w4a16_checks.Case(problem, seed=7 * seed, kernel=kernel) for seed in range(4)]
    x, weights = cases[0].activations.cuda(), w4a16_checks.on_gpu(cases[0].weights)
    out = torch.empty(rows, 1536, dtype=torch.bfloat16, device="cuda")
    rounds = [
        Round(
            [case.activations, case.weights.codes, case.weights.block_scale],
            partial(w4a16_checks.on_device, case),
        )
        for case in cases
    ]
    return Replay(
        lambda: w4a16_checks.multiply(x, weights, out, kernel),
        [x, weights.codes, weights.block_scale], out, rounds,
    )  # fmt: skip


# ---- registered ----------------------------------------------------------------------------------


def _code() -> Iterator[MachineCode]:
    yield from _plain_code()
    yield from _grouped_code()
    yield from _wgmma_code()
    for target in TARGETS:
        yield from _few_rows_code(target)
        yield from _few_rows_joined_code(target)
        yield from _w4a16_code(target)


def _once(codes: Iterator[MachineCode]) -> list[MachineCode]:
    kept: dict[str, MachineCode] = {}
    for code in codes:
        if code.name not in kept or kept[code.name].slow:
            kept[code.name] = code
    return list(kept.values())


CODE = _once(_code())
JUDGED = [
    *(_plain_judged(operands) for operands in PLAIN),
    Judged(
        "simt_gemv_bf16", row_checks.gemv_cases(), row_checks.product_mismatch,
        row_checks.fuzzed_gemvs, 4, 50, row_checks.product_on_device,
    ),
    Judged(
        "sm90_gemm_grouped", grouped_checks.cases(), grouped_checks.mismatch,
        grouped_checks.fuzzed, 10, 50, _grouped_result, devices=HOPPER,
    ),
    Judged(
        "sm90_gemm_grouped_fp8", grouped_fp8_checks.cases(), grouped_fp8_checks.mismatch,
        grouped_fp8_checks.fuzzed, 6, 50, _grouped_fp8_result, devices=HOPPER,
    ),
    Judged(
        "sm100_gemm_grouped", _in_bf16(grouped_checks.cases()), grouped_checks.mismatch,
        lambda seed, count: _in_bf16(grouped_checks.fuzzed(seed, count)), 4, 50, _grouped_result,
        devices=BLACKWELL,
    ),
    *(
        Judged(
            kernel, w4a16_checks.cases(kernel), w4a16_checks.mismatch,
            partial(w4a16_checks.fuzzed, kernel=kernel), 6, 50, devices=HOPPER,
        )
        for kernel in w4a16_checks.KERNELS
    ),
]  # fmt: skip
DETECTIONS = [
    Detection(
        "simt_gemv_bf16", row_checks, "product_on_device", row_checks.product_mismatch,
        row_checks.GemvCase(GemvProblem(2, 5, 264)), _few_rows,
    )
]  # fmt: skip
REPLAYS = [
    *(
        ReplayCase(f"sm90_gemm_{operands}", partial(_replay_plain, operands), HOPPER)
        for operands in PLAIN
    ),
    ReplayCase("simt_gemv_bf16", _replay_few_rows),
    ReplayCase("sm90_gemm_grouped", _replay_grouped, HOPPER),
    ReplayCase("sm90_gemm_grouped_fp8", _replay_grouped_fp8, HOPPER),
    *(
        ReplayCase(kernel, partial(_replay_w4a16, kernel, rows), HOPPER)
        for kernel, rows in zip(w4a16_checks.KERNELS, (7, 50), strict=True)
    ),
]
