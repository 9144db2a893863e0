"""Compare experts whose rows are decoded once with those that decode them tile by tile.

The oracle is sm90_moe_nvfp4 in tiles of its own, which has a proof of its own. Of each slot, the
numbers in front of a product have to be what its codes and scales stand for, in the order of K; the
products and the sum have to be equal in every bit. Outputs hold poison before; what lies behind a
tile's width stays poison.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.formats import scalar_ops as codecs
from degarble.kernels.gemm.nvfp4_stages import DECODED_EXPONENT, order_of_k
from degarble.kernels.moe import problem as facts
from degarble.kernels.runtime.modules import kernel_named
from degarble.suites.kernels.moe import moe_checks as checks
from degarble.suites.kernels.moe.moe_checks import POISON, SETTINGS, TARGET, Case, drawn_problem

if TYPE_CHECKING:
    from torch import Tensor

    Memory = dict[str, Tensor]

ORACLE = facts.TILES[TARGET][128]
SPAN, BLOCK = 64, 16  # numbers of K
CODES = 16


def tactic_of(case: Case) -> Any:
    """Return the tiles of a case, by the table of decoded rows where it names none."""
    return case.tactic or facts.choose_decoded_tactic(case.problem)


def fuzzed(seed: int, count: int) -> list[Case]:
    """Draw cases."""
    drawn, made = random.Random(f"decoded experts {seed}"), []
    for _ in range(count):
        problem = drawn_problem(drawn, 128, (6, 5), (None, 10.0))
        choice = drawn.choice(("even", "skewed", "one"))
        tactic = drawn.choice((None, *facts.DECODED_TACTICS))
        made.append(Case(problem, choice, drawn.randrange(1 << 30), tactic, drawn.random() < 0.5))
    return made


def steps(case: Case, given: checks.MoeInputs) -> list[tuple[Any, Any]]:
    """Return the kernels of a call, each with its problem."""
    call: Any = kernel_named("sm90_moe_decoded")
    problems = call.problems(case.problem, tactic_of(case), given.operands)
    return list(zip(call.kernels, problems, strict=True))


def poisoned(case: Case, given: checks.MoeInputs) -> Memory:
    """Allocate all that a call makes, full of poison."""
    made: Memory = {}
    for kernel, own in steps(case, given):
        made |= kernel.allocate(own, given.x.device)
    for tensor in made.values():
        tensor.view(torch.uint8).fill_(POISON)
    return made


def launch(case: Case, given: checks.MoeInputs, memory: Memory) -> None:
    """Run a call in memory that is there."""
    call: Any = kernel_named("sm90_moe_decoded")
    call.run(case.problem, SETTINGS, tactic_of(case), **given.operands, **memory)


def on_device(case: Case) -> Memory:
    """Run a case in poisoned memory."""
    given = checks.given_of(case)
    memory = poisoned(case, given)
    launch(case, given, memory)
    return memory


def mismatch(case: Case) -> str:
    """Say how a case differs from its oracle; empty where it does not."""
    given = checks.given_of(case)
    memory = poisoned(case, given)
    launch(case, given, memory)
    return difference(case, given, memory)


def difference(case: Case, given: checks.MoeInputs, memory: Memory) -> str:
    """Compare all that a call left with the oracle."""
    p = case.problem
    other = checks.on_device(replace(case, tactic=ORACLE), given)
    wanted, places = other.workspace, memory["places"][: p.slots].long()
    there = wanted.plan.places[: p.slots].long()
    has = there >= 0
    if not torch.equal(has, places >= 0):
        return f"{case.name}: other slots have rows"
    ours, theirs = places[has], there[has]
    for name, rows, width in (("x", wanted.x, p.hidden), ("hidden", wanted.hidden, p.width)):
        got, want = memory[f"{name}_numbers"][ours], numbers_of(rows, width)[theirs]
        same = (got == want) | (got.isnan() & want.isnan())
        if not bool(same.all()):
            return f"{case.name}: numbers of {name}: {int((~same).sum())} of {same.numel()} differ"
    got, want = memory["products"][ours].view(torch.int16), wanted.out[theirs].view(torch.int16)
    if not torch.equal(got, want):
        return f"{case.name}: products: {int((got != want).sum())} of {got.numel()} differ"
    if not torch.equal(memory["out"], other.out):
        return f"{case.name}: sum: {int((memory['out'] != other.out).sum())} differ"
    behind = ~within_widths(case, memory)
    for name in ("x_numbers", "hidden_numbers", "products"):
        kept = memory[name][behind].view(torch.uint8) == POISON
        if not bool(kept.all()):
            return f"{case.name}: {name} is written behind a tile's width"
    return ""


def within_widths(case: Case, memory: Memory) -> Tensor:
    """Return which rows lie within their tile's width."""
    tile = tactic_of(case).rows
    rows, used = len(memory["slots"]), int(memory["rows"])
    row = torch.arange(rows, device=memory["slots"].device)
    has_slot = (memory["slots"] >= 0) & (row < used)
    counts = has_slot.view(-1, tile).sum(1)
    widths = torch.tensor(facts.WIDTHS[tile], device=row.device)
    width = widths[torch.searchsorted(widths, counts.clamp(min=1))]
    within: Tensor = (row % tile < width[row // tile]) & (row < used)
    return within


def numbers_of(rows: checks.Nvfp4Rows, width: int) -> Tensor:
    """Return what codes and scales stand for, in FP16 and in the order of K."""
    codes, device = rows.codes.int(), rows.codes.device
    values = codecs.e2m1_decode(torch.stack([codes % CODES, codes // CODES], -1))
    scales = checks.scale_codes(rows.scales, (0, len(codes)), width)
    factors = codecs.e4m3_decode(scales.int()).repeat_interleave(BLOCK, 1)
    made = (values.view(len(codes), width) * factors * 2.0**DECODED_EXPONENT).half()
    order = torch.tensor(order_of_k(), device=device)
    placed: Tensor = made.view(len(codes), width // SPAN, SPAN)[:, :, order]
    return placed.reshape(len(codes), width)
