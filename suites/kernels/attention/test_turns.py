"""Sparse attention in turns: its barriers in a host model, its registers and shared memory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.kernels.attention import problem as facts
from degarble.kernels.attention.problem import AttentionProblem, KeyList
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.kv_problem import ENTRIES, EntryFormat, Pages, entry_format
from degarble.kernels.runtime.kernel import LaunchContext
from degarble.kernels.runtime.targets import SM90A, SM100A
from degarble.suites.kernels.attention import turns_model as model
from degarble.suites.kernels.contract import kernels_of

ALL = [*ENTRIES.values(), *(entry_format(name, 576) for name in ("fp8-v32", "bf16"))]


def test_every_interleaving_reads_what_it_means() -> None:
    for seed in range(300):
        drawn = random.Random(seed)
        model.run([drawn.randint(0, 5) for _ in range(drawn.randint(1, 4))], seed)


@pytest.mark.parametrize("fault", model.FAULTS)
def test_a_fault_of_the_barriers_is_found(fault: str) -> None:
    found = 0
    for seed in range(40):
        try:
            model.run([3, 1, 2], seed, fault)
        except AssertionError:
            found += 1
    assert found


def test_every_interleaving_of_two_splits_reads_what_it_means() -> None:
    for seed in range(60):
        drawn = random.Random(seed)
        count = drawn.randint(1, 4)
        first, second = ([drawn.randint(1, 4) for _ in range(count)] for _ in range(2))
        model.run_pairs((first, second), seed)


@pytest.mark.parametrize("fault", model.FAULTS_OF_PAIRS)
def test_a_fault_of_two_splits_is_found(fault: str) -> None:
    found = 0
    for seed in range(20):
        try:
            model.run_pairs(([2, 1], [1, 2]), seed, fault)
        except AssertionError:
            found += 1
    assert found


@pytest.mark.parametrize("entry", ALL, ids=lambda entry: f"{entry.name}-{entry.width}")
def test_a_thread_block_in_turns_has_room(entry: EntryFormat) -> None:
    held = facts.memory_in_turns(entry)
    assert held.total <= SM90A.shared_memory_bytes
    # Shares of both tiles of a pair have places: V3.2's first ones lie over the turned key.
    shares = 2 * facts.HEADS * facts.TILE
    assert held.shares + facts.shares_over_keys(entry) * shares == 2 * shares


@pytest.mark.parametrize("entry", ALL, ids=lambda entry: f"{entry.name}-{entry.width}")
def test_warpgroups_divide_what_the_thread_block_was_launched_with(entry: EntryFormat) -> None:
    """Trap: one that asks for more waits forever, although the register file has it."""
    count, bringing = facts.threads(entry), facts.gather_plan(entry).warpgroups
    several = [facts.registers(entry)]
    if entry.name == facts.ROWS or entry.inside:
        several.append(facts.registers_in_turns(facts.plan_in_turns(entry)))
    for consumer, producer in several:
        divided = (facts.CONSUMERS * consumer + bringing * producer) * facts.WARPGROUP
        assert divided <= facts.launched_registers(count)


def problem_of(entry: str, slots: int, mode: str = "prefill", splits: int = 0) -> AttentionProblem:
    keys = KeyList(128, Pages(entry, 64, slots // 64))
    return AttentionProblem(3, 64, keys, mode=mode, splits=splits)


def test_a_prompt_goes_in_turns_and_codes_are_read_first() -> None:
    most = facts.MOST_READ // 2 // rows.WIDTH
    for entry, slots, turns, reads in (
        ("bf16", 64, True, False),
        ("bf16", 2 * most, True, False),
        ("fp8", most, True, True),
        ("nvfp4", 64, True, True),
        ("fp8", most + 64, False, False),
    ):
        form = facts.choose_form(problem_of(entry, slots), SM90A.name)
        assert (form.turns, form.stays, form.reads) == (turns, turns, reads)
        assert form.entry == (facts.ROWS if reads else entry)
        for other in (problem_of(entry, slots, "decode"), problem_of(entry, slots, splits=2)):
            form = facts.choose_form(other, SM90A.name)
            assert (form.entry, form.turns, form.reads) == (entry, False, False)
        form = facts.choose_form(problem_of(entry, slots), SM100A.name)
        assert (form.entry, form.turns, form.reads) == (entry, False, False)


def test_the_number_of_tokens_chooses_nothing() -> None:
    for slots in (64, 1 << 20):
        forms = {
            facts.choose_form(replace(problem_of("fp8", slots), tokens=tokens), SM90A.name)
            for tokens in (1, 70, 4096)
        }
        assert len(forms) == 1


def decoding(tokens: int, heads: int, splits: int = 0) -> AttentionProblem:
    keys = KeyList(2048, Pages("fp8-v32", 64, 64, width=rows.WITH_KEY))
    return AttentionProblem(tokens, heads, keys, mode="decode", splits=splits, scale=0.1)


def test_decoding_of_v32_goes_in_turns_by_whole_pairs() -> None:
    for heads, splits, together, each in ((64, 0, 2, 16), (128, 3, 3, 12), (16, 5, 0, 8)):
        problem = decoding(7, heads, splits)
        form = facts.choose_form(problem, SM90A.name)
        assert (form.turns, form.stays, form.together) == (True, False, together)
        assert form.pairs_stay == (together == facts.PAIR)
        assert facts.tiles_each(problem) == each
        assert facts.choose_form(replace(problem, tokens=4096), SM90A.name) == form
        assert not facts.choose_form(problem, SM100A.name).turns


@pytest.mark.needs("cutlass")
def test_a_form_that_reads_otherwise_is_refused() -> None:
    kernels = kernels_of("sm90_sparse_attention")
    small, large = problem_of("fp8", 64), problem_of("fp8", 1 << 20)
    forms = [facts.choose_form(problem, SM90A.name) for problem in (small, large)]
    assert kernels.KERNEL.numbers(LaunchContext(large, forms[1], None, 0, {}))
    for problem, form in zip((small, large), forms[::-1], strict=True):
        with pytest.raises(InvalidArgument, match="form of attention"):
            kernels.KERNEL.numbers(LaunchContext(problem, form, None, 0, {}))
    usual = decoding(1, 64, 3)
    chosen = facts.choose_form(usual, SM90A.name)
    assert chosen.page == usual.window.pages.entries == facts.USUAL_PAGE
    other = KeyList(2048, Pages("fp8-v32", 32, 64, width=rows.WITH_KEY))
    assert facts.choose_form(replace(usual, window=other), SM90A.name).page == 0
    assert kernels.KERNEL.numbers(LaunchContext(usual, replace(chosen, page=0), None, 0, {}))
    context = LaunchContext(replace(usual, window=other), chosen, None, 0, {})
    with pytest.raises(InvalidArgument, match="form of attention"):
        kernels.KERNEL.numbers(context)


@pytest.mark.needs("cutlass")
def test_a_form_whose_blocks_stay_is_refused_where_there_are_splits() -> None:
    kernels = kernels_of("sm90_sparse_attention")
    problem = replace(problem_of("bf16", 64), mode="decode", splits=2)
    chosen = facts.choose_form(problem, SM90A.name)
    assert kernels.KERNEL.numbers(LaunchContext(problem, chosen, None, 0, {}))
    staying = replace(chosen, turns=True)
    assert staying.stays
    with pytest.raises(InvalidArgument, match="turns=False for this problem"):
        kernels.KERNEL.numbers(LaunchContext(problem, staying, None, 0, {}))
