"""What the kernels of rows register: forms with derived figures, cases, replays."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from degarble.kernels.primitives.quantise_problem import LAYOUTS
from degarble.kernels.rows import mhc_few_problem, mhc_problem, problem, router_problem
from degarble.kernels.rows.mhc_few_problem import MhcNormProblem, OnwardForm, OnwardProblem
from degarble.kernels.rows.mhc_problem import (
    BF16_PARTS,
    MIX_PARTS,
    MhcMixForm,
    MhcMixProblem,
    ProjectForm,
    ProjectProblem,
)
from degarble.kernels.rows.problem import (
    ID_DTYPES,
    NORM_WEIGHTS,
    SCALE_KINDS,
    EmbedForm,
    EmbedProblem,
    InverseRopeForm,
    NormProblem,
    QNormRopeForm,
    ResidualProblem,
    ScaleForm,
    ScaleProblem,
)
from degarble.kernels.rows.router_problem import RouterProblem
from degarble.kernels.runtime.modules import kernel_named
from degarble.kernels.runtime.targets import TARGETS
from degarble.suites.kernels import latent_checks, mhc_checks, row_checks
from degarble.suites.kernels.contract import (
    SETTINGS,
    Detection,
    Judged,
    MachineCode,
    Replay,
    ReplayCase,
    Round,
    require_early_reads_alone,
)
from degarble.suites.kernels.rows import (
    head_checks,
    joined_checks,
    mhc_project_checks,
    residual_checks,
    router_checks,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.kernels.runtime.compiling import CompiledKernel

REGISTERS_OF_MIX = {"all": 64, "coefficients": 64, "collapse": 32, "head": 32, "post": 64}
# Three to a weighted sum of four, three to an exponential, one to a logit; of Sinkhorn four to each
# of four rows and columns. One of four lanes has one column, but where rounds may end early.
SINKHORN = 2 * 16
SINKHORN_OF_FOUR = 16 + 4
FUSED_OF_MIX = {
    "all": 3 * 8 + 36 + SINKHORN_OF_FOUR,
    "coefficients": 24 + SINKHORN_OF_FOUR,
    "collapse": 3 * 8,
    "head": 3 * 8 + 16,
    "post": 128,
}
# Where two lanes share a token each has two rows, and two gates of a kind.
FUSED_OF_TWO = {"all": 3 * 8 + 16 + 40 + SINKHORN, "coefficients": 48 + SINKHORN}
SQUARES = 4 * 7  # 7 of each of 4 halves sum squares
ROUTERS = {
    "V4-Pro": RouterProblem(1, **router_checks.V4_PRO),
    "V3.2": RouterProblem(1, **router_checks.V32),
    "by table": RouterProblem(1, **router_checks.V4_PRO, vocabulary=129_280),
    "V4-Flash": RouterProblem(1, **router_checks.V4_FLASH),
    "largest": RouterProblem(1, 512, 16),
}


def _code(target: str) -> Iterator[MachineCode]:
    for ids in ID_DTYPES:
        vectors = {"ld.global.v4": 4, "st.global.v4": 4}
        yield MachineCode("simt_embed", EmbedForm(ids, target), 64, counts=vectors)
    for in_place in (False, True):  # every thread that a processor can hold
        yield MachineCode("simt_inverse_rope", InverseRopeForm(in_place, target), 32, fused=0)
    # Six thread blocks of eight warps fit beside each other; only the sum of squares is fused.
    yield MachineCode("simt_qnorm_rope", QNormRopeForm(target), 40, fused=14)
    yield MachineCode(
        "simt_qnorm_rope", QNormRopeForm(target, few=True), 40, fused=14, reads_early=True,
        more=_guesses_its_turn,
    )  # fmt: skip
    for source, out in product(SCALE_KINDS, SCALE_KINDS):
        yield MachineCode("simt_scale", ScaleForm(source, out, target))
    for part in MIX_PARTS:
        mix = MhcMixForm(part, target)
        yield MachineCode(
            "simt_mhc", mix, REGISTERS_OF_MIX[part], 0,
            fused=FUSED_OF_MIX[part], slow=part not in {"all", "post"}, reads_early=mix.reads_early,
            more=_reads_weights_of_mix_early,
        )  # fmt: skip
    for part, fused in FUSED_OF_TWO.items():
        of_two = MhcMixForm(part, target, lanes=2)
        yield MachineCode("simt_mhc", of_two, 64, 0, fused=fused, slow=part == "all")
    for kind, tokens in product(
        ("layer", "head"), (mhc_problem.LEAST_TOKENS, mhc_problem.FEW_TOKENS, 1 << 13)
    ):
        form = mhc_problem.choose_form(ProjectProblem(tokens, 7168, kind), target)
        # Three parts, four times sixteen values of a stage, for every tile of rows and of tokens.
        products = 3 * 4 * form.tiles * form.tokens_of_warp // 16
        yield MachineCode(
            "simt_mhc_project", form, 200, launched=2, counts={"mma.sync": products},
            more=_weight_alone_before_the_wait, reads_early=form.one_step,
            slow=kind == "head" or tokens == mhc_problem.FEW_TOKENS,
        )  # fmt: skip
    for columns, weight, rounded in product((512, 7168, 16_384), NORM_WEIGHTS, (False, True)):
        summed = ResidualProblem(1, columns, 1e-6, weight, rounded)
        summed_form = problem.choose_residual_form(summed, target)
        slow = (columns, weight, rounded) != (7168, "fp32", False)
        yield MachineCode(
            "simt_residual_norm", summed_form, 128, fused=SQUARES, slow=slow,
            reads_early=summed_form.reads_weight_early, more=_reads_its_weight_early,
        )  # fmt: skip
    for columns, weight, layout in product((512, 7168, 16_384), NORM_WEIGHTS, (None, *LAYOUTS)):
        for keeps_values in (False, True)[: 2 if layout else 1]:
            yield _norm_code(NormProblem(1, columns, 1e-6, weight, layout, keeps_values), target)
    for weight, layout in product(NORM_WEIGHTS, LAYOUTS):
        yield _norm_code(NormProblem(8192, 7168, 1e-6, weight, layout), target)
    yield from _joined_code(target)
    for name, routed in ROUTERS.items():
        many = replace(routed, tokens=router_problem.FEW_TOKENS + 1)
        routers = {router_problem.choose_form(each, target) for each in (routed, many)}
        for router_form in sorted(routers, key=str):
            slow = name not in {"V4-Pro", "V3.2"} or not router_form.few
            yield MachineCode("simt_router", router_form, 64, slow=slow)


def _joined_code(target: str) -> Iterator[MachineCode]:
    of_codes = 16  # two a value of half a block, where it is rounded without its code
    riding = OnwardProblem(1, 4096, "rows", 6, 7, rides=True)
    for spread in (riding, OnwardProblem(4, 4096), OnwardProblem(1, 64)):
        onward = mhc_few_problem.choose_onward_form(spread, target)
        # Eight squares of each of four words of two rows; four products of each spread value.
        yield MachineCode(
            "simt_mhc_onward", onward, 64, fused=32 + 8 * onward.words,
            counts={"mma.sync": 3 * 4 * onward.project.tiles}, slow=spread.width == 64,
            more=_weight_alone_before_the_wait, reads_early=True,
        )  # fmt: skip
    for mixed in (
        MhcNormProblem(1, 4096, decoded=2), MhcNormProblem(1, 7168, weight="fp32"),
        MhcNormProblem(2, 192),
    ):  # fmt: skip
        # As in all of mHC, but that a lane has one gate, of the collapse or of post; seven of half
        # a block sum squares. Iterations of Sinkhorn go in pairs, behind an odd one.
        fused = 24 + 4 + 16 + 3 * SINKHORN + 7 + of_codes * mixed.decoded
        form = mhc_few_problem.choose_mhc_norm_form(mixed, target)
        # Sums are given by words that say themselves that they have come; the cluster meets once.
        turns = -(-form.cluster // 4)  # in which four warps, or threads, give to all
        given = {
            "st.relaxed.cluster.shared::cluster": (form.turns + 1) * turns,
            "ld.relaxed.cluster.shared::cta": 2 + turns, "barrier.cluster.arrive": 1,
        }  # fmt: skip
        slow = mixed.width != 4096
        yield MachineCode("simt_mhc_norm", form, 80, fused=fused, counts=given, slow=slow)


def _weight_alone_before_the_wait(kernel: CompiledKernel, form: ProjectForm | OnwardForm) -> None:
    """A piece's part of the weight, which nothing writes while launches are under way."""
    project = form.project if isinstance(form, OnwardForm) else form
    if not project.one_step:
        return
    rows = BF16_PARTS * project.tiles * mhc_problem.TILE
    if isinstance(form, OnwardForm):
        rows += project.tokens_of_block  # zeros
    found = []
    for entry in kernel.ptx.split(".visible .entry")[1:]:
        before = entry[: entry.index("griddepcontrol.wait")]
        found.append(before.count("cp.async.cg.shared.global"))
        for access in ("ld.global", "st.global", "atom.global", "cp.async.bulk"):
            assert access not in before, access
    assert sorted(found) == [0] * (len(found) - 1) + [rows // project.rows_at_once]


def _reads_weights_of_mix_early(kernel: CompiledKernel, form: MhcMixForm) -> None:
    """A lane's row of the base of mix, its base of each gate, and the scales."""
    if form.reads_early:
        require_early_reads_alone(kernel.ptx, 1 + 2 * len(form.gates) + 1)


def _guesses_its_turn(kernel: CompiledKernel, _form: QNormRopeForm) -> None:
    """Cosines and sines of a lane, which nothing writes, of the guessed position."""
    require_early_reads_alone(kernel.ptx, 2, guesses=True)


def _norm_code(norm: NormProblem, target: str) -> MachineCode:
    form = problem.choose_norm_form(norm, target)
    registers = 65_536 // problem.norm_threads_declared(form) // 8 * 8
    # Rounding to a code takes one addition a value.
    of_codes = 32 if norm.layout and not TARGETS[target].converts_e2m1 else 0
    usual = {
        NormProblem(1, 7168), NormProblem(1, 7168, layout="128x4"),
        NormProblem(8192, 7168, layout="128x4"),
    }  # fmt: skip
    # Four chunks of the first row, and of each next one.
    asked = 8 if form.coded_lines else 0
    # The mean of columns that are no power of two, its root, and the root's inverse.
    of_factor = 2 * (norm.columns.bit_count() > 1) + 2 + 4
    # The upper halves of words that are coded.
    of_halves = 16 if form.together == 1 and not form.converts else 0
    of_lines = of_factor + of_halves if form.coded_lines else 0
    return MachineCode(
        "simt_rmsnorm", form, registers, 1024, fused=SQUARES + of_codes + of_lines,
        counts={"cp.async.cg.shared.global": asked}, slow=norm not in usual,
        reads_early=not form.warps, more=_reads_its_weight_early,
    )  # fmt: skip


def _reads_its_weight_early(
    kernel: CompiledKernel, form: problem.NormForm | problem.ResidualForm
) -> None:
    """Read a thread's weights before the wait, of two blocks or of halves of four; or nothing."""
    if form.reads_weight_early if isinstance(form, problem.ResidualForm) else not form.warps:
        vectors = 8 if form.weight == "fp32" else 4
        # A B200 reads 32 bytes at once where no instruction says otherwise.
        wide = TARGETS[form.target].converts_e2m1 and not form.warps
        require_early_reads_alone(kernel.ptx, vectors // 2 if wide else vectors)


def _once(codes: Iterator[MachineCode]) -> list[MachineCode]:
    """Leave out forms that are those of other problems as well; a quick one stays."""
    kept: dict[str, MachineCode] = {}
    for code in codes:
        if code.name not in kept or kept[code.name].slow:
            kept[code.name] = code
    return list(kept.values())


CODE = _once(code for target in TARGETS for code in _code(target))


HEADS = {
    "norm": "simt_qnorm_rope",
    "back": "simt_inverse_rope",
    "back in place": "simt_inverse_rope-in-place",
}


def _heads(kind: str, seeds: int) -> Judged:
    return Judged(
        HEADS[kind], head_checks.cases(kind), head_checks.mismatch,
        partial(head_checks.fuzzed, kind), seeds, 50, head_checks.on_device,
    )  # fmt: skip


JUDGED = [
    _heads("norm", 10),
    _heads("back", 5),
    _heads("back in place", 5),
    Judged(
        "simt_mhc", mhc_checks.cases(), mhc_checks.mismatch, mhc_checks.fuzzed, 10, 50,
        mhc_checks.on_device, 20,
    ),
    Judged(
        "simt_mhc_project", mhc_project_checks.cases(), mhc_project_checks.mismatch,
        mhc_project_checks.fuzzed, 10, 50, mhc_project_checks.on_device,
    ),
    Judged(
        "simt_residual_norm", residual_checks.cases(), residual_checks.mismatch,
        residual_checks.fuzzed, 3, 100, residual_checks.on_device,
    ),
    Judged(
        "simt_rmsnorm", row_checks.norm_cases(), row_checks.norm_mismatch, row_checks.fuzzed_norms,
        6, 50, row_checks.norm_on_device,
    ),
    *(
        Judged(
            joined_checks.NAMES[kernel], joined_checks.cases(kernel), joined_checks.mismatch,
            partial(joined_checks.fuzzed, kernel), 4, 50, joined_checks.on_device,
        )
        for kernel in joined_checks.KERNELS
    ),
    Judged(
        "simt_router", router_checks.cases(), router_checks.mismatch, router_checks.fuzzed, 4, 50,
        router_checks.on_device,
    ),
]  # fmt: skip


def _residual_results(case: residual_checks.Case) -> Any:
    return residual_checks.ResidualNormed(*residual_checks.by_definition(case, "cpu"))


def _norm_results(case: row_checks.NormCase) -> Any:
    return row_checks.Normed(*row_checks.norm_by_definition(case, "cpu"))


def _router_results(case: router_checks.RouterCase) -> Any:
    return router_checks.RoutedTokens(*router_checks.by_definition(case, "cpu"))


DETECTIONS = [
    *(
        Detection(
            name, head_checks, "on_device", head_checks.mismatch,
            head_checks.Case(kind, 3, 2), head_checks.by_definition,
        )
        for kind, name in HEADS.items()
    ),
    Detection(
        "simt_residual_norm", residual_checks, "on_device", residual_checks.mismatch,
        residual_checks.Case(ResidualProblem(5, 80)), _residual_results,
    ),
    Detection(
        "simt_rmsnorm", row_checks, "norm_on_device", row_checks.norm_mismatch,
        row_checks.NormCase(NormProblem(5, 80, layout="128x4", keeps_values=True)), _norm_results,
    ),
    Detection(
        "simt_router", router_checks, "on_device", router_checks.mismatch,
        router_checks.RouterCase(RouterProblem(3, **router_checks.V4_PRO)), _router_results,
    ),
]  # fmt: skip


def _replay_embed() -> Replay:
    """Look up rows of a table of more than 32 bits."""
    shape = EmbedProblem(64, 400_000, 7168)  # 5.7 GB
    table = torch.empty(400_000, 7168, dtype=torch.bfloat16, device="cuda")
    table[::1000] = torch.randn(400, 7168, device="cuda").bfloat16()
    table[-1] = 3.0
    id_T = torch.zeros(64, dtype=torch.int64, device="cuda")
    out = torch.empty(64, 7168, dtype=torch.bfloat16, device="cuda")
    rounds = []
    for start in (0, 100_000, 336_000):
        given_T = torch.arange(start, start + 64_000, 1000)
        given_T[-1] = 399_999
        rounds.append(Round([given_T], lambda: table[id_T]))
    kernel, given = kernel_named("simt_embed"), {"ids": id_T, "table": table, "out": out}
    return Replay(lambda: kernel.run(shape, SETTINGS, **given), [id_T], out, rounds)


def _replay_heads(kind: str) -> Replay:
    cases = [head_checks.Case(kind, 33, 16, "wide", seed) for seed in range(3)]
    values, positions = cases[0].values.cuda(), cases[0].positions.cuda()
    operands = (values, latent_checks.table_of_turns(head_checks.POSITIONS).cuda(), positions)
    out = head_checks.outputs(cases[0], values)
    rounds = [
        Round([case.values, case.positions], partial(head_checks.by_definition, case, "cuda"))
        for case in cases
    ]
    return Replay(
        lambda: head_checks.run(cases[0], operands, out), [values, positions], out, rounds,
        cases[0].in_place,
    )  # fmt: skip


def _replay_mhc(part: str) -> Replay:
    kernel = kernel_named("simt_mhc")
    cases = [mhc_checks.Case(MhcMixProblem(131, 1032, part), seed=seed) for seed in range(3)]
    inputs = {name: tensor.cuda() for name, tensor in mhc_checks.given(cases[0]).items()}
    made = kernel.run(cases[0].problem, SETTINGS, **inputs)
    outputs = {name: each for name, each in made.items() if each is not None}
    rounds = [
        Round(list(mhc_checks.given(case).values()), partial(mhc_checks.on_device, case))
        for case in cases
    ]
    return Replay(
        lambda: kernel.run(cases[0].problem, SETTINGS, **inputs, **outputs),
        list(inputs.values()), list(outputs.values()), rounds,
    )  # fmt: skip


def _replay_mhc_project(tokens: int) -> Replay:
    kernel = kernel_named("simt_mhc_project")
    cases = [mhc_project_checks.Case(tokens, 264, seed=seed) for seed in range(3)]
    for case in cases:
        case.__dict__["fn"] = cases[0].fn
    split, streams = mhc_problem.split_weight(cases[0].fn).cuda(), cases[0].streams.cuda()
    shape = cases[0].problem
    out = kernel.allocate(shape, torch.device("cuda"))
    results, given = [out["products"], out["squares"]], {"streams": streams, "split": split}
    rounds = [Round([case.streams], partial(mhc_project_checks.on_device, case)) for case in cases]
    return Replay(
        lambda: kernel.run(shape, SETTINGS, **given, **out), [streams], results, rounds,
        scratch=out["partials"],
    )  # fmt: skip


def _replay_residual() -> Replay:
    kernel, shape = kernel_named("simt_residual_norm"), ResidualProblem(300, 7168, weight="fp32")
    cases = [residual_checks.Case(shape, "rows", seed) for seed in (1, 2)]
    operands = [tensor.cuda() for tensor in cases[0].operands]
    given = dict(zip(residual_checks.OPERANDS, operands, strict=True))
    out = kernel.allocate(shape, torch.device("cuda"))
    rounds = [Round(case.operands, partial(residual_checks.on_device, case)) for case in cases]
    return Replay(lambda: kernel.run(shape, SETTINGS, **given, **out), operands, out, rounds)


def _replay_norm(layout: str | None) -> Replay:
    shape = NormProblem(257, 1040, layout=layout)
    cases = [row_checks.NormCase(shape, "rows", seed=seed) for seed in range(4)]
    values, weight = torch.zeros_like(cases[0].values).cuda(), cases[0].weight.cuda()
    scale, out = cases[0].decode_scale, row_checks.poisoned(shape)
    given = {"values": values, "weight": weight, **out}
    given |= {} if scale is None else {"decode_scale": scale.cuda()}
    kernel = kernel_named("simt_rmsnorm")
    rounds = [
        Round([case.values, case.weight], partial(row_checks.norm_on_device, case))
        for case in cases
    ]
    return Replay(lambda: kernel.run(shape, SETTINGS, **given), [values, weight], out, rounds)


def _replay_joined(kernel: str) -> Replay:
    first = joined_checks.cases(kernel)[0]
    cases = [replace(first, seed=seed) for seed in range(3)]
    drawn = [joined_checks.given(case) for case in cases]
    given = {name: tensor.cuda() for name, tensor in drawn[0].items()}
    run, shape = kernel_named(kernel), first.problem
    out = {n: t for n, t in run.allocate(shape, torch.device("cuda")).items() if t is not None}
    scratch = out.get("partials")  # its last columns are nobody's
    results = {name: tensor for name, tensor in out.items() if name != "partials"}

    def made(case: joined_checks.Case) -> dict[str, Any]:
        found = joined_checks.on_device(case)
        return {name: found[name] for name in results}

    rounds = [
        Round(list(of.values()), partial(made, case)) for case, of in zip(cases, drawn, strict=True)
    ]
    return Replay(
        lambda: run.run(shape, SETTINGS, **given, **out), list(given.values()), results, rounds,
        scratch=scratch,
    )  # fmt: skip


def _replay_router() -> Replay:
    kernel, shape = kernel_named("simt_router"), RouterProblem(70, **router_checks.V32)
    cases = [router_checks.RouterCase(shape, "ordinary", seed) for seed in range(3)]
    logits, bias = torch.zeros(70, 256, device="cuda"), torch.zeros(256, device="cuda")
    given, out = {"logits": logits, "bias": bias}, kernel.allocate(shape, logits.device)
    rounds = [
        Round([case.logits, case.bias], partial(router_checks.on_device, case)) for case in cases
    ]
    return Replay(lambda: kernel.run(shape, SETTINGS, **given, **out), [logits, bias], out, rounds)


def _replay_scale() -> Replay:
    values, shape = torch.randn(16, 64, device="cuda"), ScaleProblem(1024, 8192**-0.5)
    out, kernel = torch.empty_like(values), kernel_named("simt_scale")
    rounds = [
        Round([torch.randn(16, 64)], lambda: values * torch.tensor(8192**-0.5, device="cuda"))
    ]
    return Replay(
        lambda: kernel.run(shape, SETTINGS, values=values, out=out), [values], out, rounds
    )


REPLAYS = [
    ReplayCase("simt_embed", _replay_embed),
    *(ReplayCase(name, partial(_replay_heads, kind)) for kind, name in HEADS.items()),
    *(ReplayCase(f"simt_mhc-{part}", partial(_replay_mhc, part)) for part in MIX_PARTS),
    *(
        ReplayCase(f"simt_mhc_project-{tokens}", partial(_replay_mhc_project, tokens))
        for tokens in (3, mhc_project_checks.FEW + 5)
    ),
    ReplayCase("simt_residual_norm", _replay_residual),
    *(
        ReplayCase(f"simt_rmsnorm-{layout}", partial(_replay_norm, layout))
        for layout in (None, "128x4")
    ),
    *(
        ReplayCase(joined_checks.NAMES[kernel], partial(_replay_joined, kernel))
        for kernel in joined_checks.KERNELS
    ),
    ReplayCase("simt_router", _replay_router),
    ReplayCase("simt_scale", _replay_scale),
]
