"""What the kernels of experts register: forms with derived figures, cases, replays."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm import problem as gemm
from degarble.kernels.gemm import w4a16_problem as w4a16
from degarble.kernels.gemm import w4a16_walk_problem as walks
from degarble.kernels.gemm.w4a16_walk_problem import W4A16WalkForm
from degarble.kernels.moe import by_row_problem as by_row
from degarble.kernels.moe import problem as facts
from degarble.kernels.moe.by_row_problem import ByRowProblem, DecodeForm
from degarble.kernels.moe.problem import AFTER_W2, BEFORE_W2, CombineForm, MoeProblem, RowsForm
from degarble.kernels.runtime.targets import SM90A, TARGETS
from degarble.suites.kernels import gemm_code
from degarble.suites.kernels.contract import (
    BLACKWELL,
    HOPPER,
    Judged,
    MachineCode,
    Replay,
    ReplayCase,
    Round,
)
from degarble.suites.kernels.moe import by_row_checks, decoded_checks
from degarble.suites.kernels.moe import moe_checks as checks
from degarble.suites.kernels.moe.moe_checks import Case

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from degarble.kernels.gemm.problem import GemmTactic
    from degarble.kernels.gemm.w4a16_problem import W4A16ByRowForm
    from degarble.kernels.moe.problem import MoeForm
    from degarble.kernels.runtime.compiling import CompiledKernel

MODELS = {
    "v4-pro": (7168, 3072, 384, 6), "v4-flash": (4096, 2048, 256, 6), "v3.2": (7168, 2048, 256, 8),
}  # fmt: skip
UNCLAMPED = "v3.2"


def problem_of(model: str, tokens: int, weighting: str = AFTER_W2) -> MoeProblem:
    """Return a model's layer with all its experts."""
    hidden, width, routed, chosen = MODELS[model]
    limit = None if model == UNCLAMPED else 10.0
    return MoeProblem(tokens, hidden, width, routed, chosen, routed, limit, weighting)


# ---- machine code --------------------------------------------------------------------------------


def _is_sound(kernel: CompiledKernel, form: MoeForm) -> None:
    # FC1 stores no tile by TMA: it leaves as codes.
    few = gemm.has_few_rows(form.gemm)  # FC2 of few rows neither: it leaves in 16 bytes a thread
    stores = 0 if few or form.gemm.parts == facts.GATE_AND_UP else None
    assert not gemm_code.complaints(kernel, form.gemm, issued=1 if few else 2, stores=stores)
    assert "cvt.rn.bf16x2.e2m1" not in kernel.ptx


def _code() -> Iterator[MachineCode]:
    tactics = facts.TILES[SM90A.name]
    for tactic, weighting in product(tactics.values(), facts.WEIGHTINGS):
        first, second = facts.forms_of(problem_of("v4-pro", 1, weighting), SM90A.name, tactic)
        usual = tactic.rows == min(tactics) and weighting == BEFORE_W2
        for form in (first, replace(first, shown=True), second):
            slow = not usual or form.shown
            registers = gemm.registers_at_launch(form.gemm)
            yield MachineCode("sm90_moe_nvfp4", form, registers, more=_is_sound, slow=slow)
    for target in TARGETS:
        for tile in {tactic.rows for tactic in facts.TACTICS[target]}:
            for name, launched in (("PLAN", 2), ("GATHER", 1)):
                ordered = RowsForm(tile, target)
                yield MachineCode(
                    f"simt_moe_rows.{name}", ordered, launched=launched, slow=tile != 16
                )
        for weighted, shared in product((False, True), (False, True)):
            summed = CombineForm(6, weighted, shared, target)
            yield MachineCode("simt_moe_rows.COMBINE", summed, slow=not (weighted and shared))


# Forms of one row that a GPU compares: two thread blocks a processor, or one.
BY_ROW_TACTICS = (
    *by_row.TACTICS, *(replace(tactic, resident=1, stages=3) for tactic in by_row.TACTICS),
)  # fmt: skip


def _by_row_code() -> Iterator[MachineCode]:
    for target, (hidden, width) in product(TARGETS, ((4096, 2048), (4128, 416))):
        problem = ByRowProblem(MoeProblem(1, hidden, width, 256, 6, 256, 10.0), shared=True)
        usual = (target, hidden) == (SM90A.name, 4096)
        tactics = (None, *BY_ROW_TACTICS) if usual else (None,)
        for products, tactic in product((facts.GATE_AND_UP, 1), tactics):
            form = by_row.form_of(problem, products, target, tactic)
            yield _by_row_form(form, slow=not usual or tactic is not None)
            if usual:
                yield _by_row_form(replace(form, early=True), slow=True)
        for source, limit in (("values", None), *(("swiglu", each) for each in (10.0, 2.0, None))):
            yield MachineCode(
                f"sm90_moe_by_row.{'GATED' if source == 'swiglu' else 'ROWS'}",
                DecodeForm(source, limit, target), 64, more=_lets_in_who_loads_early,
                slow=target != SM90A.name or limit == 2.0,
            )  # fmt: skip


UNDECODED = ("values", by_row.serves_undecoded), ("swiglu", by_row.serves_gating)


def _walk_code() -> Iterator[MachineCode]:
    for hidden, width in ((4096, 2048), (7168, 2048), (7168, 3072), (512, 256)):
        problem = ByRowProblem(MoeProblem(1, hidden, width, 256, 6, 256, 10.0), shared=True)
        for form in (
            by_row.choose_first_form(problem, SM90A.name),
            by_row.choose_second_form(problem, SM90A.name),
            *(by_row.undecoded_form(problem, source) for source, serves in UNDECODED
              if serves(problem, SM90A.name)),
        ):  # fmt: skip
            assert isinstance(form, W4A16WalkForm)
            yield _walk_form(form, slow=hidden != 4096)


def _walk_form(form: W4A16WalkForm, *, slow: bool) -> MachineCode:
    undecoded = form.source != walks.DECODED
    # Where some parts of K have a step less, their warps have a text of their own.
    texts, steps = 2 - form.whole, form.rounds + (not form.whole) * (form.rounds - 1)
    counts = {
        # A lane's four words of two rows, in each step: two mma each.
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": 8 * steps,
        "mul.rn.f16x2": (32 + 2) * steps,  # of weights, and of two words of scales
        "mad.lo.u32": (16 + 2) * steps,  # of weights of low nibbles, and of two words of scales
        # A box for a tile's codes, and one for its scales.
        "cp.async.bulk.tensor.5d": form.tiles,
        "cp.async.bulk.tensor.3d": form.tiles,
        # By who loads; and of the first row's scale, by who multiplies.
        "ld.relaxed.gpu.global.b32": form.early * (1 + undecoded * texts),
        "ld.relaxed.gpu.global.f32": form.early * undecoded * texts,
        # A part's sums: two rows of a tile a lane. Zeros of parts without any step vary.
        **({"st.shared.f32": 2 * texts} if form.whole or form.rounds > 1 else {}),
        "st.global.b32": form.places * texts,
        "mbarrier.arrive.shared::cta.b64 _, [all]": steps,
        # Of stages, full and empty; of sums; and of whose turn it is to ask for stages.
        "mbarrier.init.shared::cta.b64": 4,
    }
    has = {"ld.global.nc": False, "max.xorsign.abs.bf16x2": undecoded, "bf16.bf16.f32": False}
    of_tokens = form.products == facts.GATE_AND_UP
    names = ("FIRST", "SECOND") if undecoded else ("FC1", "FC2")
    # Each of a processor's four schedulers has a quarter of them, in eights.
    warps = ceil_div(form.threads, 128) * form.resident
    registers = 65_536 // 4 // 32 // warps // 8 * 8
    return MachineCode(
        f"sm90_moe_by_row.{names[not of_tokens]}", form, registers, counts=counts, has=has,
        slow=slow, more=_all_but_who_loads_wait, reads_early=form.early,
    )  # fmt: skip


def _all_but_who_loads_wait(kernel: CompiledKernel, form: Any) -> None:
    """Early forms load weights and what names them; all else, and the next launch, waits."""
    text = kernel.ptx
    # Of who loads and adds up, then of who multiplies: each before its other accesses.
    waits = [each.start() for each in re.finditer("griddepcontrol.wait", text)]
    lets = [each.start() for each in re.finditer("griddepcontrol.launch_dependents", text)]
    assert len(waits) == 1 + len(lets) == 3 - form.whole
    assert all(wait < let for wait, let in zip(waits[1:], lets, strict=True))
    # Who loads waits for its turn, a free stage, and sums; early also for the stage before.
    stored = text.index("st.global.b16")
    assert text[:stored].count("mbarrier.try_wait") == 3 + form.early
    begins = [0, stored + 1]
    begins += [text.rindex("st.shared.f32", 0, wait) for wait in waits[2:]]
    plain = ("st.global", "ld.global.f32", "ld.global.b32", "ld.global.v")
    for begin, wait in zip(begins, waits, strict=True):
        assert not [access for access in plain if access in text[begin:wait]]
    assert (text.index("cp.async.bulk.tensor") < waits[0]) == form.early


def _by_row_form(form: W4A16ByRowForm, *, slow: bool) -> MachineCode:
    native = TARGETS[form.target].converts_e2m1
    counts = {
        # A lane's four words of two rows: two mma each.
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": form.tiles * 8,
        "mul.rn.bf16x2": 32 * form.tiles * (not native),
        "add.rn.f32": w4a16.PARTS - 1,
        # The loading warp alone reads the expert and both scales.
        "ld.relaxed.gpu.global.b32": int(form.early),
        "ld.global.b32": 1,
        "ld.global.f32": 2,
        "st.shared.v4.b32": 1,
        "ld.shared.v4.b32 {a, b, one, other}": 1,
        "st.shared.f32": 2 * form.tiles,  # a part's sums: two rows of a tile a lane
        "ld.shared.f32": w4a16.PARTS,
        "mbarrier.arrive.shared::cta.b64 _, [all]": form.tiles + 1,
    }
    has = {"e2m1x2": native, "fma.rn.f32": False, "ld.global.nc": False}
    name = "FC1" if form.products == facts.GATE_AND_UP else "FC2"
    registers = 65_536 // (form.resident * form.threads)
    return MachineCode(
        f"sm90_moe_by_row.{name}", form, registers, counts=counts, has=has,
        more=_waits_before_it_reads, slow=slow,
    )  # fmt: skip


def _waits_before_it_reads(kernel: CompiledKernel, _form: Any) -> None:
    wait = kernel.ptx.index("griddepcontrol.wait")
    for text in ("ld.global", "cp.async.bulk.tensor", "st.global"):
        assert text not in kernel.ptx or kernel.ptx.index(text) > wait, text


def _lets_in_who_loads_early(kernel: CompiledKernel, form: Any) -> None:
    """What is behind may take for granted all that this launch has waited for."""
    _waits_before_it_reads(kernel, form)
    text = kernel.ptx
    assert text.index("griddepcontrol.launch_dependents") > text.index("griddepcontrol.wait")


def _once(codes: Iterator[MachineCode]) -> list[MachineCode]:
    kept: dict[str, MachineCode] = {}
    for code in codes:
        if code.name not in kept or kept[code.name].slow:
            kept[code.name] = code
    return list(kept.values())


def _decoded_code() -> Iterator[MachineCode]:
    for tactic, weighting in product(facts.DECODED_TACTICS, facts.WEIGHTINGS):
        problem = problem_of("v4-pro", 1, weighting)
        usual = tactic.rows == 16 and weighting == BEFORE_W2
        few, widths = tactic.inner > gemm.SPAN, facts.WIDTHS[tactic.rows]
        for form in facts.forms_of(problem, SM90A.name, tactic):
            # A stage in front of a loop and one in it, or two where registers alternate by stage.
            spans = 2 * (tactic.inner // gemm.SPAN if few else 2)
            counts = {
                "wgmma.mma_async": len(widths) * spans * (gemm.SPAN // 16),
                "setmaxnreg.inc": 1,
                "griddepcontrol.wait": 1,
            }
            first = form.gemm.parts == facts.GATE_AND_UP
            threads = gemm.WARPGROUP * (1 + facts.decoded_groups(form.gemm))
            yield MachineCode(
                f"sm90_moe_decoded.{'FC1' if first else 'FC2'}", form,
                gemm.REGISTERS_OF_PROCESSOR // threads // 8 * 8, counts=counts, slow=not usual,
            )  # fmt: skip
        ordered = RowsForm(tactic.rows, SM90A.name)
        yield MachineCode("sm90_moe_decoded.GATHER", ordered, slow=tactic.rows != 16)


CODE = [*_once(_code()), *_once(_decoded_code()), *_once(_by_row_code()), *_once(_walk_code())]


# ---- cases ---------------------------------------------------------------------------------------


def _cases(target: str, tactics: Sequence[GemmTactic], tokens: Sequence[int]) -> Iterator[Case]:
    for choice, weighting, tactic in product(checks.CHOICES, facts.WEIGHTINGS, tactics):
        alone = MoeProblem(700, 352, 416, 8, 1, 8, 10.0, weighting)
        yield Case(alone, choice, 3, tactic, target=target)
    for model, count in product(MODELS, tokens):
        weighting = BEFORE_W2 if count == 17 else AFTER_W2
        yield Case(problem_of(model, count, weighting), "skewed", target=target)
    for count in (1, 8, 300):
        yield Case(MoeProblem(count, 256, 256, 8, 2, 8, 10.0), shared=True, target=target)
    for seed, experts in enumerate((1, 7, 16)):
        elsewhere = MoeProblem(333, 320, 288, experts, 4, 32, 10.0)
        yield Case(elsewhere, "even", seed, target=target)


def _decoded_cases() -> Iterator[Case]:
    tactics, weightings = facts.DECODED_TACTICS, facts.WEIGHTINGS
    for choice, weighting, tactic in product(checks.CHOICES, weightings, tactics):
        yield Case(MoeProblem(700, 384, 512, 8, 1, 8, 10.0, weighting), choice, 3, tactic)
    for model, count in product(MODELS, (1, 17, 400, 2048)):
        weighting = BEFORE_W2 if count == 17 else AFTER_W2
        yield Case(problem_of(model, count, weighting), "skewed")
    for count in (1, 8, 300):
        yield Case(MoeProblem(count, 256, 256, 8, 2, 8, 10.0), shared=True)
    for seed, experts in enumerate((1, 7, 16)):
        yield Case(MoeProblem(333, 384, 128, experts, 4, 32, 10.0), "even", seed)


def _launched(case: Case) -> Any:
    return checks.on_device(case, checks.given_of(case))


def _judged(target: str, cases: Iterator[Case], seeds: int, devices: Any) -> Judged:
    return Judged(
        f"{checks.ARCHITECTURES[target]}_moe_nvfp4", list(cases), checks.mismatch,
        lambda seed, count: checks.fuzzed(seed, count, target), seeds, 40, _launched, 10, devices,
    )  # fmt: skip


# FC2 in other tiles than the table's.
OF_SECOND = [replace(facts.TACTICS["sm_100a"][0], columns=columns) for columns in (64, 192, 256)]
JUDGED = [
    _judged(
        "sm_90a",
        _cases("sm_90a", [*facts.TILES["sm_90a"].values()], (1, 17, 400, 2048)), 10, HOPPER,
    ),
    _judged("sm_100a", _cases("sm_100a", OF_SECOND, (1, 17, 2048)), 3, BLACKWELL),
    Judged(
        "sm90_moe_decoded", list(_decoded_cases()), decoded_checks.mismatch, decoded_checks.fuzzed,
        10, 40, decoded_checks.on_device, 10, HOPPER,
    ),
    Judged(
        "sm90_moe_by_row", by_row_checks.cases(), by_row_checks.mismatch, by_row_checks.fuzzed,
        6, 20, by_row_checks.on_device, 10, HOPPER,
    ),
]  # fmt: skip
DETECTIONS: list[Any] = []


# ---- replays -------------------------------------------------------------------------------------


def _replay(target: str) -> Replay:
    """Other tokens, and other choices of them."""
    case = Case(MoeProblem(200, 512, 384, 16, 4, 16, 10.0), "one", 1, shared=True, target=target)
    other = replace(case, choice="skewed", seed=2)
    given, later = checks.given_of(case), checks.given_of(other)
    result = checks.poisoned(case, given)

    def tensors(of: checks.MoeInputs) -> list[Tensor]:
        return list(of.operands.values())

    def mismatch() -> str:
        return checks.difference(other, given, result)

    return Replay(
        lambda: checks.launch(case, given, result), tensors(given), result.out,
        [Round(tensors(later), mismatch=mismatch)], scratch=result.workspace, poison=0xFF,
    )  # fmt: skip


def _replay_decoded() -> Replay:
    """Other tokens, and other choices of them."""
    case = Case(MoeProblem(200, 512, 384, 16, 4, 16, 10.0), "one", 1, shared=True)
    other = replace(case, choice="skewed", seed=2)
    given, later = checks.given_of(case), checks.given_of(other)
    memory = decoded_checks.poisoned(case, given)

    def tensors(of: checks.MoeInputs) -> list[Tensor]:
        return list(of.operands.values())

    def mismatch() -> str:
        return decoded_checks.difference(other, given, memory)

    return Replay(
        lambda: decoded_checks.launch(case, given, memory), tensors(given), memory["out"],
        [Round(tensors(later), mismatch=mismatch)], poison=0xFF,
        scratch={name: each for name, each in memory.items() if name != "out"},
    )  # fmt: skip


def _replay_by_row() -> Replay:
    """Other tokens, and other choices of them."""
    case = by_row_checks.Case(
        ByRowProblem(MoeProblem(4, 512, 384, 16, 4, 16, 10.0), shared=True), "even", 1
    )
    given = by_row_checks.given_of(case)
    memory = by_row_checks.memory_of(case, given)
    out = memory.pop("out")
    rounds = []
    for other in (replace(case, choice="absent", seed=2), replace(case, choice="same", seed=3)):
        later = list(by_row_checks.given_of(other).values())

        def mismatch(other: by_row_checks.Case = other) -> str:
            return by_row_checks.difference(other, given, {**memory, "out": out})

        rounds.append(Round(later, mismatch=mismatch))
    return Replay(
        lambda: by_row_checks.launch(case, given, {**memory, "out": out}),
        list(given.values()), out, rounds, scratch=memory, poison=0xFF,
    )  # fmt: skip


REPLAYS = [
    ReplayCase("sm90_moe_by_row", _replay_by_row, HOPPER),
    ReplayCase("sm90_moe_decoded", _replay_decoded, HOPPER),
    ReplayCase("sm90_moe_nvfp4", partial(_replay, "sm_90a"), HOPPER),
    ReplayCase("sm100_moe_nvfp4", partial(_replay, "sm_100a"), BLACKWELL),
]
