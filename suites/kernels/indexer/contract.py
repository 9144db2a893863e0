"""What the indexer's kernels register: forms with derived figures, cases, replays."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.kernels.indexer import problem as facts
from degarble.kernels.indexer.problem import (
    ScoresForm,
    TopkForm,
    TopkProblem,
    choose_operand_form,
)
from degarble.kernels.runtime.targets import SM90A, TARGETS
from degarble.suites.kernels import gemm_code, indexer_checks
from degarble.suites.kernels.contract import (
    BLACKWELL,
    HOPPER,
    SETTINGS,
    Judged,
    MachineCode,
    Replay,
    ReplayCase,
    Round,
    kernels_of,
)
from degarble.suites.kernels.indexer import indexer_operand_checks, topk_checks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.kernels.runtime.compiling import CompiledKernel

TOPKS = (
    TopkForm("", 1024, 8, 16, held=True, by_four=True, limited=True),
    TopkForm("", 1024, 4, 32, held=True, by_four=True, limited=True),
    TopkForm("", 1024, 1, 8, held=True, by_four=False, limited=False),
    TopkForm("", 1024, 1, 8, held=True, by_four=True, limited=True, blocks=2),
    TopkForm("", 1024, 1, 8, held=False, by_four=True, limited=True),
    TopkForm("", 512, 1, 12, held=False, by_four=True, limited=False, blocks=2),
)
SCORES = [
    ScoresForm(SM90A.name, operands, arithmetic, padded, at_once, 64)
    for operands in ("bf16", "fp8")
    for arithmetic in facts.ARITHMETICS
    for padded, at_once in ((64, 4), (64, 1), (8, 4))
]


def _code(target: str) -> Iterator[MachineCode]:
    for kind in range(len(indexer_operand_checks.KINDS)):
        operand = choose_operand_form(indexer_operand_checks.problem_of(1, 1, kind), target)
        # Of each value: Hadamard's three across lanes, two of MXFP4's rounding, and nothing else.
        fused = facts.OF_LANE * (3 * operand.hadamard + 2 * (operand.format == "mxfp4"))
        slow = kind not in {0, 9}
        yield MachineCode("simt_indexer_operand", operand, 96, fused=fused, slow=slow)
    for topk in TOPKS:
        form = replace(topk, target=target)
        usual = topk is TOPKS[0] and target == SM90A.name
        yield MachineCode(
            "simt_indexer_topk", form, 65_536 // (form.threads * form.blocks),
            has={"barrier.cluster": form.cluster > 1}, more=_counts_in_shared_memory,
            slow=not usual,
        )  # fmt: skip


def _counts_in_shared_memory(kernel: CompiledKernel, form: TopkForm) -> None:
    def search(held: int) -> int:
        """Digits of a thread's scores; the list of a bin; digits of listed keys."""
        return held + 1 + len(facts.LEVELS)

    # Of a sample; where there are too many candidates; of the candidates.
    streamed = facts.VECTOR + 2 * search(form.kept)
    wanted = search(form.each) if form.held else streamed
    assert kernel.ptx.count("atom.shared.add.u32") == wanted
    # A cluster meets when it has begun; before it reads bins; before and after it clears them, for
    # each level of keys; when a list is shared; and for the totals.
    meetings = 1 + 2 * len(facts.LEVELS) + 3 if form.cluster > 1 else 0
    assert kernel.ptx.count("barrier.cluster.arrive") == meetings


def _loads_and_products(kernel: CompiledKernel, form: ScoresForm) -> None:
    kind = facts.OPERANDS[form.operands]
    expected = {facts.expected_bytes(form), facts.query_bytes(form)}
    assert gemm_code.expected_bytes(kernel.ptx) == expected
    loads = [
        len(re.findall(rf"cp\.async\.bulk\.tensor\.{rank}d\.shared::c", kernel.ptx))
        for rank in (2, 3)
    ]
    scales = kind.scaled * facts.keys_of_stage(form) // form.box
    queries = form.at_once * kind.halves
    assert loads == [scales, facts.boxes_of_stage(form) + queries]
    shape, steps = ("k32.f32.e4m3.e4m3", 4) if form.operands == "fp8" else ("k16.f32.bf16.bf16", 8)
    wgmma = f"wgmma.mma_async.sync.aligned.m64n{facts.columns_of_set(form)}{shape}"
    team, sets = facts.team_of(form), facts.sets(form)
    # The last stages, fewer than are taken at once, have a loop of their own.
    loops = sorted({team.stages_at_once, 1}, reverse=True)
    assert gemm_code.wgmmas(kernel.ptx) == sum(loops) * sets * steps * [wgmma]
    # While one set is weighed, the other is multiplied, up to the end of a loop's body.
    waits = re.findall(r"wgmma\.wait_group\S+ \s*(\d+);", kernel.ptx)
    wanted = [int(sets > 1 and i > 0) for count in loops for i in range(count * sets)]
    assert sorted(map(int, waits)) == sorted(wanted)
    kept = sorted(map(int, re.findall(r"setmaxnreg\S+ \s*(\d+);", kernel.ptx)))
    assert kept == list(team.registers)
    _guesses_early(kernel, form)


def _guesses_early(kernel: CompiledKernel, form: ScoresForm) -> None:
    """Read no more than a guess before the wait, past L1, and only for what L2 is asked for."""
    before, _ = kernel.ptx.split("griddepcontrol.wait")
    asks = facts.team_of(form).asked_early > 0
    kind = facts.OPERANDS[form.operands]
    read = len(re.findall(r"ld\.relaxed\.gpu\.global\.b32", kernel.ptx))
    assert read == before.count("ld.relaxed.gpu.global.b32") == 3 * asks  # sequence, position, page
    assert before.count("cp.async.bulk.prefetch.L2") == asks * (1 + kind.scaled)


def registers_of(form: ScoresForm) -> int:
    """Return the most registers of a thread, with as many thread blocks as a form asks for."""
    return 65_536 // (facts.threads(form) * facts.team_of(form).blocks) // 8 * 8


CODE = [code for target in TARGETS for code in _code(target)] + [
    MachineCode(
        "sm90_indexer_scores",
        form,
        registers_of(form),
        more=_loads_and_products,
        slow=form != SCORES[0],
    )
    for form in SCORES
]


def _scores(case: indexer_checks.ScoresCase) -> Any:
    return indexer_checks.on_device(case, indexer_checks.sides(case, "cuda").given)


JUDGED = [
    Judged(
        "simt_indexer_operand", indexer_operand_checks.cases(), indexer_operand_checks.mismatch,
        indexer_operand_checks.fuzzed, 4, 50, indexer_operand_checks.on_device,
    ),
    Judged(
        "simt_indexer_topk", topk_checks.cases(), topk_checks.mismatch, topk_checks.fuzzed, 4, 50,
        topk_checks.on_device,
    ),
    *(
        Judged(
            kernel, indexer_checks.cases(), indexer_checks.mismatch, indexer_checks.fuzzed, 3, 40,
            _scores, 15, devices, repeat_seed=77,
        )
        for kernel, devices in (
            ("sm90_indexer_scores", HOPPER), ("sm100_indexer_scores", BLACKWELL),
        )
    ),
]  # fmt: skip
DETECTIONS = ()


def _replay_operand() -> Replay:
    cases = [
        indexer_operand_checks.OperandCase(indexer_operand_checks.problem_of(30, 8, 0), which, 4)
        for which in indexer_operand_checks.SPREADS
    ]
    problem, given = cases[0].problem, cases[0].operands()
    kernel, rows = kernels_of("simt_indexer_operand").KERNEL, given["rows"]
    rounds = [
        Round(
            list(case.operands().values()),
            mismatch=partial(indexer_operand_checks.difference, case, rows, None),
        )
        for case in cases
    ]
    return Replay(
        lambda: kernel.run(problem, SETTINGS, **given, values=rows), list(given.values()), rows,
        rounds, in_place=True,
    )  # fmt: skip


def _replay_topk() -> Replay:
    problem, kernel = TopkProblem(5, 40_000, 700, 4), kernels_of("simt_indexer_topk").KERNEL
    cases = [topk_checks.TopkCase(problem, spread, 5) for spread in topk_checks.SPREADS]
    scores, positions = torch.zeros(5, 40_000, device="cuda"), torch.zeros(5, device="cuda").long()
    out = torch.empty(5, 700, dtype=torch.int32, device="cuda")
    rounds = []
    for case in cases:
        assert case.positions is not None
        mismatch = partial(topk_checks.difference, case, out)
        rounds.append(Round([case.scores, case.positions], mismatch=mismatch))
    return Replay(
        lambda: kernel.run(problem, SETTINGS, scores=scores, positions=positions, out=out),
        [scores, positions], out, rounds,
    )  # fmt: skip


def _replay_scores() -> Replay:
    case = indexer_checks.ScoresCase("fp8", 64, (700, 300), (30, 12), arithmetic="stored")
    given = indexer_checks.sides(case, "cuda").given
    kernel, out = kernels_of("sm90_indexer_scores").KERNEL, indexer_checks.on_device(case, given)
    rounds = []
    for seed in range(1, 4):
        other = indexer_checks.sides(replace(case, seed=seed), "cuda")
        mismatch = partial(indexer_checks.difference, case, out, other)
        rounds.append(Round([other.given[name] for name in given], mismatch=mismatch))
    return Replay(
        lambda: kernel.run(case.problem, SETTINGS, **given, out=out), list(given.values()), out,
        rounds, poison=0xFF,
    )  # fmt: skip


REPLAYS = [
    ReplayCase("simt_indexer_operand", _replay_operand),
    ReplayCase("simt_indexer_topk", _replay_topk),
    ReplayCase("sm90_indexer_scores", _replay_scores, HOPPER),
]
