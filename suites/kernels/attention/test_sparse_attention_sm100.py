"""Sparse attention on Blackwell: machine code as derived, refusals; asked of a B200.

No B200 is here. What is marked b200 was never run; what is not marked says nothing about a chip.
"""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

import pytest

from degarble.kernels.attention import problem as facts
from degarble.kernels.attention.problem import AttentionForm
from degarble.kernels.primitives.kv_problem import ENTRIES
from degarble.kernels.runtime.compiling import CompileSettings, cubin_facts, unstated_roundings
from degarble.kernels.runtime.targets import SM90A, SM100A
from degarble.suites.kernels import gemm_code, tcgen05_words
from degarble.suites.kernels.attention import attention_checks as checks
from degarble.suites.kernels.tcgen05_words import Product

if TYPE_CHECKING:
    from types import ModuleType

    from degarble.kernels.runtime.compiling import CompiledKernel

pytestmark = pytest.mark.needs("cutlass")

TARGET = SM100A.name
SETTINGS = CompileSettings()
OF_V32 = ("fp8-v32", "fp8-v32-ue8m0", "bf16")
SHAPES = [(True, 2), (False, 1), (True, 0), (False, 8)]
FORMS = [
    AttentionForm(entry, lengths, together, TARGET, family.key)
    for family, entries in ((facts.V4, ENTRIES), (facts.V32, OF_V32))
    for entry in entries
    for lengths, together in SHAPES
]
IN_CI = AttentionForm("bf16", lengths=False, together=1, target=TARGET)
ROW_BYTES, CORE_STRIDE = 128, 1024  # of swizzled rows, and of eight of them
UNIT, TRANSPOSED = tcgen05_words.ATOM, 1 << 16  # of B: PTX ISA 9.1, instruction descriptor
KEYS_OF_STEP = facts.INSTRUCTION_K


def _named(form: AttentionForm) -> str:
    return f"{form.width}-{form.entry}{'-lengths' * form.lengths}-{form.together}"


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.attention.sm100_sparse_attention")


def products_of(form: AttentionForm) -> list[Product]:
    """Return the instructions of a tile: queries with keys, then shares with both halves."""
    of_logits = tcgen05_words.dense_word(facts.HEADS, facts.TILE)
    of_sums = tcgen05_words.dense_word(facts.HEADS, facts.COLUMNS) | TRANSPOSED
    step_bytes = 2 * KEYS_OF_STEP
    made = []
    for k in range(facts.instructions(form.width)[0]):
        block, within = divmod(k, ROW_BYTES // step_bytes)
        at = (block * facts.TILE * ROW_BYTES + within * step_bytes) // UNIT
        made.append(Product("kind::f16", of_logits, at, at, adds=k > 0))
    for _ in range(facts.CONSUMERS):
        for k in range(facts.TILE // KEYS_OF_STEP):
            shares, values = k * step_bytes // UNIT, k * KEYS_OF_STEP * ROW_BYTES // UNIT
            adds = True if k else None  # the first tile's are known at run time
            made.append(Product("kind::f16", of_sums, shares, values, adds))
    return made


def operand_words() -> set[int]:
    """Return the descriptors' words: rows of 64 numbers along K, and the same rows turned."""
    plain = tcgen05_words.operand_word(0, CORE_STRIDE, ROW_BYTES)
    of_columns = facts.TILE * ROW_BYTES // UNIT  # from 64 columns of values to the next
    return {plain, plain & ~(0x3FFF << 16) | of_columns << 16}


def constants(ptx: str, instruction: str) -> list[int]:
    """Return the constants of an instruction, in ascending order."""
    return sorted(map(int, re.findall(rf"{instruction}\S* \s*(?:%r\d+, %r\d+, )?(\d+);", ptx)))


def places_of(ptx: str, begin: int) -> set[int]:
    """Return the places in shared memory that the text computes, behind all tiles."""
    found = constants(ptx, r"add\.s32")
    return {at for at in found if begin <= at < SM100A.shared_memory_bytes}


def complaints(kernel: CompiledKernel, form: AttentionForm) -> list[str]:
    """Say what differs from the derived facts."""
    (code,), ptx = cubin_facts(kernel.cubin), kernel.ptx
    held = facts.REGISTERS[form.width]
    pieces = facts.COLUMNS // (facts.REPEATS_AT_ONCE * facts.REPEAT_COLUMNS)
    shapes = [read.shape for read in tcgen05_words.reads(ptx)]
    at = facts.places(form.format)
    places = places_of(ptx, at["shares"])
    plan = facts.sm100_gather_plan(form.format)
    codes = {at["codes"] + turn * plan.turn_bytes for turn in range(plan.turns_ahead)}
    barriers = {at[name] for name in at if name.startswith("barrier")}
    of_sums = f"16x256b.x{facts.REPEATS_AT_ONCE}"
    figures = {
        "spills": (code.spills, False),
        "registers at launch": (code.registers <= facts.LAUNCH_REGISTERS, True),
        "registers of roles": (constants(ptx, "setmaxnreg"), sorted(held)),
        "roundings unstated": (unstated_roundings(ptx), ()),
        "products": (tcgen05_words.products(ptx), products_of(form)),
        "operands": (tcgen05_words.operand_words(ptx), operand_words()),
        "arrivals behind products": (ptx.count("tcgen05.commit.cta_group::1"), 3),
        "reads": (
            sorted(shapes),
            sorted([f"16x256b.x{facts.repeats(facts.KEYS)}", *[of_sums] * 2 * pieces]),
        ),
        "writes": (ptx.count(f"tcgen05.st.sync.aligned.{of_sums}.b32"), pieces),
        "numbers used before they are there": (tcgen05_words.early_uses(ptx), []),
        "columns": (gemm_code.columns_allocated(ptx), facts.columns_allocated()),
        "upper lanes": (
            [n for n in constants(ptx, r"add\.s32") if n >= facts.LANE * 4],
            [facts.UPPER_LANES * facts.LANE],
        ),
        "places": (places - set(at.values()) - codes, set()),
        "barriers are placed": (barriers - places, set()),
        "barriers": (
            ptx.count("mbarrier.init."),
            2 * facts.STAGES + facts.BARRIERS,
        ),
        "threads": (f".reqntid {facts.SM100_THREADS}, 1, 1" in ptx, True),
    }
    return [
        f"{name}: got {got}, want {want}" for name, (got, want) in figures.items() if got != want
    ]


def test_machine_code_is_as_derived(kernels: ModuleType) -> None:
    kernel = kernels.compile_form(IN_CI, SETTINGS)
    assert not complaints(kernel, IN_CI)
    last = products_of(IN_CI)[-1]
    at = facts.places(IN_CI.format)["barriers of logits"]
    for name, old, new in (
        ("products", f", {last.word};", f", {last.word ^ TRANSPOSED};"),
        ("products", f", {last.b};", f", {last.b - 128};"),
        ("operands", f", {max(operand_words())};", f", {max(operand_words()) ^ 1 << 20};"),
        ("upper lanes", ", 1048576;", ", 2097152;"),
        ("places", f", {at};", f", {at - 8};"),
        ("arrivals", "tcgen05.commit.cta_group::1", "tcgen05.commit.cta_group::2"),
        ("registers of", "setmaxnreg.inc", "setmaxnreg.sync"),
    ):
        damaged = kernel.ptx.replace(old, new)
        assert damaged != kernel.ptx, name
        if name != "registers of":
            assert [w for w in complaints(replace(kernel, ptx=damaged), IN_CI) if name in w], name
    assert "products" in " ".join(complaints(kernel, replace(IN_CI, width=facts.V32.key)))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=_named)
def test_machine_code_of_every_form(kernels: ModuleType, form: AttentionForm) -> None:
    assert not complaints(kernels.compile_form(form, SETTINGS), form)


@pytest.mark.slow
def test_models_and_ranks_have_forms_among_these() -> None:
    for heads, far, mode in ((128, 1024, "decode"), (64, 512, "prefill"), (8, 32, "decode")):
        problem = checks.Case(heads=heads, far=far, mode=mode).problem
        assert facts.choose_form(problem, TARGET).together in range(9)


def test_a_gpu_has_the_module_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for target, name in ((SM90A, "sm90"), (SM100A, "sm100")):
        monkeypatch.setattr(checks, "target_of_device", lambda target=target: target)
        assert checks.kernels_here().__name__.endswith(f"{name}_sparse_attention")


@pytest.mark.b200
@pytest.mark.parametrize("entry", OF_V32)
def test_keys_of_v32_are_within_the_gates(entry: str) -> None:
    for near, heads in ((2048, 128), (65, 8), (0, 16)):
        case = checks.Case(key=facts.V32.key, entry=entry, near=near, far=None, heads=heads)
        assert not checks.mismatch(case, 36 * 2.0**-24)  # as LSE_OF_CUT_SUMS of contract.py
