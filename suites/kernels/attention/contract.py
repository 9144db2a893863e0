"""What the kernels of attention register: forms with derived figures, cases, replays."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from degarble.kernels.attention import heads_problem
from degarble.kernels.attention import problem as facts
from degarble.kernels.attention.heads_problem import HeadsForm, HeadsProblem
from degarble.kernels.attention.problem import AttentionForm, MergeForm, QueryForm, QueryProblem
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.kv_problem import ENTRIES
from degarble.kernels.runtime.targets import TARGETS
from degarble.suites.kernels import latent_checks as plain
from degarble.suites.kernels.attention import attention_checks as checks
from degarble.suites.kernels.attention import heads_checks
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
    require_early_reads_alone,
)
from degarble.suites.kernels.format_checks import difference

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.kernels.runtime.compiling import CompiledKernel

POSITIONS = 300
WIDTH = rows.WITH_KEY
OF_V32 = ("fp8-v32", "fp8-v32-ue8m0", "bf16")
SHAPES = ((True, 2), (False, 1), (True, 0), (False, 8))  # lengths, and thread blocks together
KINDS = [(entry, lengths) for entry in OF_V32 for lengths in (True, False)]
V32 = checks.Case(key=WIDTH, entry="fp8-v32", near=2048, far=None)
# Logits of about 1 are sums of 36 steps, each cut by 2**-23 at most and by half of that on average.
# The public gate is absolute where LSE passes zero, as one head in 50,000 of fuzzed cases does.
LSE_OF_CUT_SUMS = 36 * 2.0**-24


# ---- V3.2's query rows ---------------------------------------------------------------------------


@dataclass(frozen=True)
class QueryCase:
    """One launch; everything follows from these facts."""

    problem: QueryProblem
    spread: str = "wide"
    seed: int = 0

    @property
    def name(self) -> str:
        """One line that finds the case again."""
        p = self.problem
        return f"{p.tokens}x{p.heads}x{p.width} {self.spread} seed={self.seed}"

    def operands(self, device: str) -> dict[str, Tensor]:
        """Draw the operands by name."""
        p, generator = self.problem, torch.Generator().manual_seed(self.seed)
        latent, heads = (
            plain.drawn(self.spread, (p.tokens, p.heads, width), self.seed + width)
            for width in (512, p.width)
        )
        positions = torch.randint(p.positions, (p.tokens,), generator=generator)
        if p.tokens > 100:
            positions[-1], positions[-2] = p.positions, -1
        turns = plain.table_of_turns(p.positions)
        made = {"latent": latent, "heads": heads, "turns": turns, "positions": positions}
        return {name: tensor.to(device) for name, tensor in made.items()}


def query_rows(case: QueryCase, device: str = "cuda") -> Tensor:
    """Return rows by definition: the latent part, and the turned tail of the heads."""
    latent, heads, table, positions = case.operands(device).values()
    problem = case.problem
    turns = plain.turns_at(table, positions).repeat_interleave(problem.heads, 0)
    tail = heads.reshape(-1, problem.width)[:, -64:].float()
    made = plain.with_the_machines_nan(plain.turned_tail(tail, turns))
    return torch.cat((latent, made.view(problem.tokens, problem.heads, 64)), -1)


def launched_query(case: QueryCase) -> Tensor:
    """Run a case on the GPU, into poisoned memory."""
    kernel, given = kernels_of("simt_latent_query").KERNEL, case.operands("cuda")
    out = kernel.allocate(case.problem, given["latent"].device)["out"].fill_(7.0)
    made: Tensor = kernel.run_one(case.problem, SETTINGS, **given, out=out)
    return made


def query_mismatch(case: QueryCase) -> str:
    """Say how a case differs from its definition on the GPU; empty where it does not."""
    got = launched_query(case)
    want = query_rows(case, got.device.type)
    return difference(case.name, plain.bits(got), plain.bits(want))


def query_cases() -> list[QueryCase]:
    """Return the named cases: heads of the model, tails, spreads, and some drawn ones."""
    cases = [
        QueryCase(QueryProblem(tokens, heads, width, POSITIONS), "wide", tokens)
        for tokens, heads, width in ((1, 128, 192), (3, 4, 192), (130, 16, 192), (65, 7, 64))
    ]
    cases += [QueryCase(QueryProblem(110, 8, 256, POSITIONS), kind, 3) for kind in plain.SPREADS]
    return cases + fuzzed_queries(5, 40)


def fuzzed_queries(seed: int, count: int) -> list[QueryCase]:
    """Draw cases."""
    some, made = random.Random(seed), []
    for number in range(count):
        problem = QueryProblem(
            some.randint(1, 160), some.randint(1, 40), 64 + 16 * some.randint(0, 16), POSITIONS
        )
        made.append(QueryCase(problem, some.choice(plain.SPREADS), number))
    return made


def _replay_queries() -> Replay:
    case = QueryCase(QueryProblem(16, 8, 192, POSITIONS))
    kernel, given = kernels_of("simt_latent_query").KERNEL, case.operands("cuda")
    out, other = kernel.run_one(case.problem, SETTINGS, **given), replace(case, seed=4)
    return Replay(
        lambda: kernel.run(case.problem, SETTINGS, **given, out=out), list(given.values()), out,
        [Round(list(other.operands("cuda").values()), partial(query_rows, other))],
    )  # fmt: skip


# ---- products of few rows of heads ---------------------------------------------------------------


def _heads_forms() -> list[HeadsForm]:
    keys = HeadsProblem(1, 128, *heads_checks.KEYS, 9)
    values = HeadsProblem(1, 128, *heads_checks.VALUES)
    several = [replace(values, splits=each) for each in facts.MERGED_AT_ONCE]
    decoded = [replace(each, decoded=True) for each in (values, *several)]
    problems = (keys, values, *several, *decoded)
    return [heads_problem.choose_form(problem, "sm_90a") for problem in problems]


def _loads_its_matrix_early(kernel: CompiledKernel, form: HeadsForm) -> None:
    """The matrix is requested before the wait, a head's values or splits after it."""
    before, behind = kernel.ptx.split("griddepcontrol.wait")
    copies = "cp.async.bulk.tensor"
    assert before.count(copies) == form.steps
    assert behind.count(copies) == (0 if form.at_once else form.steps)
    # The scale of what is quantised, or the turn of a guessed position: nothing writes them.
    assert before.count("ld.global") == (2 if form.turned else int(form.decoded))
    assert "st.global" not in before
    tiles = form.span // heads_problem.TILE
    assert _products_of(kernel) == ["m64n8k16"] * (form.steps * 4 * tiles)


def _replay_heads(case: heads_checks.Case) -> Replay:
    kernel, given = kernels_of(heads_checks.KERNEL).KERNEL, case.operands()
    out, other = kernel.run_one(case.problem, SETTINGS, **given), replace(case, seed=4)
    changed = other.operands()
    return Replay(
        lambda: kernel.run(case.problem, SETTINGS, **given, out=out), list(given.values()), out,
        [Round(list(changed.values()), partial(heads_checks.apart, other, changed))],
    )  # fmt: skip


# ---- sparse attention ----------------------------------------------------------------------------


def _products_of(kernel: CompiledKernel) -> list[str]:
    return re.findall(r"wgmma\.mma_async\S+?\.(m\d+n\d+k\d+)\.", kernel.ptx)


def _reads_are_not_converted(kernel: CompiledKernel, form: AttentionForm) -> None:
    """Scales are read to whole registers: a conversion would be waited for where it is read."""
    if form.format.code_bytes:
        assert re.search(r"ld\.global\.u(8|16)", kernel.ptx)
    assert not re.search(r"ld\.global\.u(?:8|16)\s+(?!\s|%r\d)", kernel.ptx)


def _products_of_v4(kernel: CompiledKernel, form: AttentionForm) -> None:
    _reads_are_not_converted(kernel, form)
    entry, products = form.format, _products_of(kernel)
    # A tile's products are written twice each: before a loop or behind it, and in it.
    halved, columns = facts.halved(entry), facts.columns_at_once(entry)
    assert products.count("m64n64k16") == (2 * 256 // 16 if halved else 0)
    assert products.count("m64n32k16") == (0 if halved else 2 * 512 // 16)
    assert products.count(f"m64n{columns}k16") == 2 * facts.TILE // 16 * 256 // columns
    registers = sorted(map(int, re.findall(r"setmaxnreg\S+ \s*(\d+);", kernel.ptx)))
    assert registers == sorted(facts.registers(entry))


def _products_of_v32(kernel: CompiledKernel, form: AttentionForm) -> None:
    products, columns = _products_of(kernel), facts.columns_at_once(form.format)
    assert products.count("m64n32k16") == 2 * WIDTH // 16
    assert products.count(f"m64n{columns}k16") == 2 * facts.TILE // 16 * 256 // columns


def _products_in_turns(kernel: CompiledKernel, form: AttentionForm) -> None:
    """Warpgroup 0 has its products twice, in a loop and behind it, warpgroup 1 has them once."""
    products, columns = _products_of(kernel), facts.columns_at_once(form.format)
    assert products.count("m64n64k16") == 3 * form.width // 16
    assert products.count(f"m64n{columns}k16") == 3 * 2 * facts.TILE // 16 * 256 // columns
    registers = sorted(map(int, re.findall(r"setmaxnreg\S+ \s*(\d+);", kernel.ptx)))
    assert registers == sorted(facts.registers_in_turns(facts.plan_of(form)))


def _guesses_its_turn(kernel: CompiledKernel, _form: QueryForm) -> None:
    """Cosines and sines of a thread, which nothing writes, of the guessed position."""
    require_early_reads_alone(kernel.ptx, 2, guesses=True)


CODE = [
    *(MachineCode("simt_latent_query", QueryForm(target), 32, fused=0) for target in TARGETS),
    *(
        MachineCode(
            "simt_latent_query", QueryForm(target, few=True), 32, fused=0, reads_early=True,
            more=_guesses_its_turn,
        )
        for target in TARGETS
    ),
    *(
        # Three thread blocks of 128 threads share a processor.
        MachineCode(
            heads_checks.KERNEL, form, 168, reads_early=True, more=_loads_its_matrix_early,
            slow=form.at_once not in {0, 16},
        )
        for form in _heads_forms()
    ),
    *(MachineCode("simt_attention_merge", MergeForm(target)) for target in TARGETS),
    MachineCode("simt_attention_merge", MergeForm("sm_90a", at_once=max(facts.MERGED_AT_ONCE))),
    *(
        MachineCode(
            "sm90_sparse_attention", form, facts.REGISTER_FILE // facts.threads(form.format),
            more=_products_of_v4, slow=(form.entry, form.together) != (next(iter(ENTRIES)), 2),
        )
        for form in (
            AttentionForm(entry, lengths, together, "sm_90a")
            for entry in ENTRIES
            for lengths, together in SHAPES
        )
    ),
    *(
        MachineCode(
            "sm90_sparse_attention", AttentionForm(entry, lengths, together, "sm_90a", WIDTH),
            more=_products_of_v32, slow=(entry, together) != (OF_V32[0], 2),
        )
        for entry in OF_V32[::2]
        for lengths, together in SHAPES[:3]
    ),
    *(
        MachineCode(
            "sm90_sparse_attention",
            AttentionForm(facts.ROWS, lengths, 1, "sm_90a", width, turns=True),
            facts.REGISTER_FILE // 384, more=_products_in_turns, slow=lengths,
        )
        for width in (rows.WIDTH, WIDTH)
        for lengths in (False, True)
    ),
    *(
        MachineCode(
            "sm90_sparse_attention",
            AttentionForm(OF_V32[0], lengths, together, "sm_90a", WIDTH, turns=True),
            facts.REGISTER_FILE // 512, more=_products_in_turns,
            slow=(lengths, together) not in ((False, 2), (True, 0)),
        )
        for lengths in (False, True)
        for together in (0, 1, 2, 3)
    ),
    *(
        MachineCode(
            "sm90_sparse_attention",
            AttentionForm(
                entry, lengths, together, "sm_90a", width, turns=width == WIDTH,
                page=facts.USUAL_PAGE,
            ),
            facts.REGISTER_FILE // 512, more=products, slow=lengths,
        )
        for entry, width, products in (
            ("fp8", rows.WIDTH, _products_of_v4), (OF_V32[0], WIDTH, _products_in_turns)
        )
        for lengths in (False, True)
        for together in (0, 2)
    ),
]  # fmt: skip


def cases_of_v32() -> list[checks.Case]:
    """Return shapes of models, lengths around every constant, and whatever else is special."""
    cases = [
        replace(V32, heads=heads, mode=mode, seed=heads)
        for heads in (128, 64, 16, 8)
        for mode in facts.MODES
    ]
    lengths = (0, 1, 63, 64, 65, 127, 129, 511, 512, 513, 1023, 1025, 2047, 2049)
    cases += [replace(V32, near=near, heads=16, seed=near) for near in lengths]
    for entry in OF_V32:
        cases += [
            replace(V32, entry=entry, pages=(entries, 1), page_bytes=extra, lengths=ragged)
            for entries, extra, ragged in ((64, 0, False), (1, 48, True), (65, 16, True))
        ]
    cases += [replace(V32, heads=heads, near=200) for heads in (1, 9, 63, 65, 127)]
    cases += [replace(V32, gaps=gaps, near=130) for gaps in (0.0, 0.98, 1.0)]
    cases += [replace(V32, splits=n, near=700, lengths=True, seed=n) for n in (1, 2, 3, 9, 32)]
    cases += [replace(V32, spread="flat", mode=mode) for mode in facts.MODES]
    cases += [replace(V32, tokens=9, lengths=True), replace(V32, tokens=300, near=70, heads=24)]
    # Two splits, one token after the other; of lengths that some of them have no tile of.
    cases += [replace(V32, tokens=150, near=1300, heads=100, lengths=n) for n in (False, True)]
    of_prompt = replace(V32, tokens=300, near=300, heads=70, mode="prefill", entry="bf16")
    cases += [of_prompt, replace(of_prompt, lengths=True, gaps=0.4)]
    return cases


def fuzzed_of_v32(seed: int, count: int) -> list[checks.Case]:
    """Return random cases of one entry format, whose kernels are its own."""
    draw, (entry, lengths) = random.Random(seed), KINDS[seed]
    return [
        checks.Case(
            key=WIDTH,
            tokens=draw.randint(1, 8),
            heads=draw.randint(1, 128),
            near=draw.choice((draw.randint(0, 130), draw.randint(0, 2100))),
            far=None,
            entry=entry,
            pages=(draw.randint(1, 130), 1),
            page_bytes=draw.choice((0, 16, 656)),
            gaps=draw.choice((0.0, 0.1, 0.9)),
            lengths=lengths,
            mode=draw.choice(facts.MODES),
            splits=draw.choice((0, 0, 0, 3, 9)),
            spread=draw.choice(sorted(checks.SPREADS)),
            seed=seed * count + i,
        )
        for i in range(count)
    ]


def _with_cut_sums(case: checks.Case) -> str:
    return checks.mismatch(case, LSE_OF_CUT_SUMS)


JUDGED = [
    Judged(
        "simt_latent_query", query_cases(), query_mismatch, fuzzed_queries, 0, 0, launched_query
    ),
    Judged(
        heads_checks.KERNEL, heads_checks.cases(), heads_checks.mismatch, heads_checks.fuzzed, 4,
        50, heads_checks.launched, devices=HOPPER,
    ),
    Judged(
        "sm90_sparse_attention", checks.cases(), checks.mismatch, checks.fuzzed, 10, 50,
        devices=HOPPER,
    ),
    Judged(
        "sm90_sparse_attention-V3.2", cases_of_v32(), checks.mismatch, fuzzed_of_v32, 0, 0,
        devices=HOPPER,
    ),
    Judged(
        "sm90_sparse_attention-V3.2-drawn", (), _with_cut_sums, fuzzed_of_v32, len(KINDS), 40,
        devices=HOPPER,
    ),
    Judged(
        "sm100_sparse_attention", checks.cases(), checks.mismatch, checks.fuzzed, 10, 50,
        devices=BLACKWELL,
    ),
]  # fmt: skip
DETECTIONS = ()


def _replay_attention(case: checks.Case) -> Replay:
    kernel, given = kernels_of("sm90_sparse_attention").KERNEL, checks.drawn(case)
    memory, operands = checks.memory_for(case, given.q.device), checks.operands_of(given)
    rounds = []
    for seed in (4, 5):
        other = replace(case, seed=seed)
        drawn = checks.drawn(other)
        changed = checks.operands_of(drawn)
        rounds.append(
            Round([changed[name] for name in operands], partial(checks.on_device, other, drawn))
        )
    return Replay(
        lambda: kernel.run(case.problem, SETTINGS, **operands, **memory), list(operands.values()),
        [memory["out"], memory["lse"]], rounds,
    )  # fmt: skip


REPLAYS = [
    ReplayCase("simt_latent_query", _replay_queries),
    *(
        ReplayCase(f"{heads_checks.KERNEL}-{case.kind}", partial(_replay_heads, case), HOPPER)
        for case in (
            heads_checks.Case("keys", 2, 16, heads_checks.KEYS),
            heads_checks.Case("merged and decoded", 1, 16, heads_checks.VALUES, 16),
        )
    ),
    *(
        ReplayCase(f"sm90_sparse_attention-{name}-{mode}", partial(_replay_attention, case), HOPPER)
        for name, like in (
            ("V4", checks.Case(tokens=5, far=1024, lengths=True)),
            ("V3.2", replace(V32, tokens=5, lengths=True)),
        )
        for mode in facts.MODES
        for case in (replace(like, mode=mode),)
    ),
]
