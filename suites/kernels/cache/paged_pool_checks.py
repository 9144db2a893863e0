"""Compare pooling from paged states on a GPU with a float64 pooling of whole sequences.

Sequences are those of compressor_checks. Rows of states lie in pages of mixed order, far apart,
with foreign bytes after each; pages are full of NaN before the first call. Pooled values have
compressor_checks' budget. States have to be the rows of that sequence, bit for bit, and nothing
else may be written; positions and slots have to be exact, and tokens that close nothing have no
slot. Tokens without a slot come before the others, where there are several.

Where there is no GPU a walk on the CPU stands in. Shape letters as in kernels/cache/problem.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.kernels.cache.problem import PagedPoolProblem, StatePages
from degarble.kernels.runtime.modules import kernel_named
from degarble.suites.kernels.cache import compressor_checks
from degarble.suites.kernels.cache.compressor_checks import (
    BUDGET,
    POISON,
    SETTINGS,
    Case,
    pooled_rows,
)
from degarble.suites.kernels.mhc_checks import half_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

ROWS = {4: 4, 128: 8}  # of a page of states, as vLLM has them
GAP = 576  # bytes of others between pages
OTHERS = 0x55
PAGE = 3  # entries of a page of the cache of entries
PADDING = 3  # tokens without a slot in front of each call of several tokens


OPERANDS = ("projected", "ape", "requests", "positions", "slots", "table", "entries")


class Call(NamedTuple):
    """What a call is given, on the CPU; `states` [N, stride bytes] is what it carries on."""

    problem: PagedPoolProblem
    tensors: tuple[Tensor, ...]
    states: Tensor


class Made(NamedTuple):
    """What a call gives."""

    values: Tensor
    positions: Tensor
    slots: Tensor
    states: Tensor


def pages_of(case: Case) -> tuple[StatePages, Tensor]:
    """Draw which page of states is whose [B, pages]: one more than is needed is nobody's."""
    rows = ROWS[case.ratio]
    longest = -(-max(case.lengths) // rows)
    count = len(case.lengths) * longest + 1
    generator = torch.Generator().manual_seed(case.seed + 2)
    table = torch.randperm(count, generator=generator)[1:].to(torch.int32).view(-1, longest)
    stride = rows * 8 * case.columns + GAP
    return StatePages(rows, count, case.columns, stride), table


def empty_states(case: Case) -> Tensor:
    """Return pages full of NaN, with bytes of others behind each."""
    pages, _ = pages_of(case)
    states = torch.full((pages.count, pages.stride), OTHERS, dtype=torch.uint8)
    states[:, : pages.stride - GAP] = 0xFF
    return states


def rows_of(states: Tensor, pages: StatePages) -> Tensor:
    """View the rows of all pages [N, rows, 2 F]."""
    used = states[:, : pages.rows * pages.row_bytes]
    made: Tensor = used.view(torch.float32).unflatten(1, (pages.rows, 2 * pages.columns))
    return made


def call_of(case: Case, part: tuple[list[int], list[int], list[int]], states: Tensor) -> Call:
    """Lay a call's tokens side by side behind some without slots."""
    pages, table = pages_of(case)
    active, starts, counts = part
    padding = PADDING if sum(counts) > 1 else 0  # one token alone has a kernel of its own
    pieces = [torch.full((padding, 2 * case.columns), torch.nan)]
    requests: list[int] = []
    positions: list[int] = []
    for b, (sequence, start, count) in enumerate(zip(active, starts, counts, strict=True)):
        pieces.append(case.rows[sequence][start : start + count])
        requests += [b] * count
        positions += range(start, start + count)
    of_token, at = torch.tensor(requests), torch.tensor(positions)
    page = table[active].long()[of_token, at // pages.rows]
    entry = at // case.ratio
    held = case.table[active].long()[of_token, entry // PAGE]
    slots, entries = page * pages.rows + at % pages.rows, held * PAGE + entry % PAGE
    entries[(at + 1) % case.ratio != 0] = -1
    before = torch.full((padding,), -1)
    last = torch.full((padding,), case.ratio - 1)  # a position that would close a window
    problem = PagedPoolProblem(padding + len(positions), len(active), case.ratio, pages, case.width)
    tensors = (
        torch.cat(pieces), case.ape, torch.cat((before * 0, of_token)).int(),
        torch.cat((last, at)), torch.cat((before, slots)), table[active].contiguous(),
        torch.cat((before * 0, entries)),
    )  # fmt: skip
    return Call(problem, tensors, states)


def call_on_one_page(position: int) -> Call:
    """Lay out one token, ratio 4, of a sequence all of whose rows lie in the only page."""
    case = Case(4, 512, ((1,),), seed=7)
    pages, numbers = StatePages(ROWS[4], 1, case.columns), torch.tensor([position])
    nobody, table = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    entries = torch.full((1,), -1) if (position + 1) % 4 else numbers // 4
    tensors = (case.rows[0], case.ape, nobody, numbers, numbers % pages.rows, table, entries)
    states = torch.full((1, pages.stride), 0xFF, dtype=torch.uint8)
    return Call(PagedPoolProblem(1, 1, 4, pages), tensors, states)


def on_device(call: Call) -> Made:
    """Run a call on the GPU."""
    kernel, given = kernel_named("simt_paged_pool"), operands_of(call)
    out = kernel.allocate(call.problem, torch.device("cuda"))
    for tensor in out.values():
        tensor.fill_(POISON)
    kernel.run(call.problem, SETTINGS, **given, **out)
    return Made(*(tensor.cpu() for tensor in (*out.values(), given["states"])))


def operands_of(call: Call, device: str = "cuda") -> dict[str, Tensor]:
    """Return the operands by name."""
    given = dict(zip(OPERANDS, call.tensors, strict=True), states=call.states)
    return {name: tensor.to(device) for name, tensor in given.items()}


def by_stated_order(call: Call) -> Made:
    """Do a call as the kernels state it, token by token, on the CPU."""
    problem, pages = call.problem, call.problem.pages
    projected, ape, requests, positions, slots, table, entries = call.tensors
    states = call.states.clone()
    rows = rows_of(states, pages)
    of_window = 2 * problem.ratio if problem.ratio == 4 else problem.ratio
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            row = projected[token].clone()
            row[problem.columns :] += ape[int(positions[token]) % problem.ratio]
            rows[slot // pages.rows, slot % pages.rows] = row
    values = torch.full((problem.tokens, problem.width), POISON).bfloat16()
    firsts, told = torch.zeros_like(positions), torch.full_like(positions, -1)
    for token, slot in enumerate(slots.tolist()):
        last, picked = int(positions[token]), []
        if slot < 0 or (last + 1) % problem.ratio:
            continue
        for number, position in enumerate(range(last - of_window + 1, last + 1)):
            row = torch.zeros(2 * problem.columns)
            row[problem.columns :] = -torch.inf
            if position >= 0:
                page = int(table[requests[token], position // pages.rows])
                row = rows[page, position % pages.rows]
            later = number // problem.ratio * problem.width
            parts = row[later:], row[problem.columns + later :]
            picked.append([part[: problem.width] for part in parts])
        values[token], told[token] = pooled_rows(picked), entries[token]
        firsts[token] = last - problem.ratio + 1
    return Made(values, firsts, told, states)


def mismatch(case: Case, run: Callable[[Call], Made] = on_device) -> str:
    """Say what is beyond its budget or not exact in any call; empty where nothing is."""
    states = empty_states(case)
    wanted = [compressor_checks.definition(case, b) for b in range(len(case.lengths))]
    for number, part in enumerate(compressor_checks.calls(case)):
        call = call_of(case, part, states)
        made, exact = run(call), by_stated_order(call)
        for name in ("positions", "slots", "states"):
            if not torch.equal(getattr(made, name), getattr(exact, name)):
                return f"{case.name}, call {number}: {name}"
        why = _wrong_values(case, call, made, wanted, part[0])
        if why:
            return f"{case.name}, call {number}: {why}"
        states = made.states
    return ""


def _wrong_values(
    case: Case, call: Call, made: Made, wanted: list[tuple[Tensor, Tensor]], active: list[int]
) -> str:
    _, _, requests, positions, slots, _, _ = call.tensors
    for token, slot in enumerate(slots.tolist()):
        last = int(positions[token])
        if slot < 0 or (last + 1) % case.ratio:
            if not bool((made.values[token] == POISON).all()):
                return f"token {token} closes nothing and was written"
            continue
        sequence = active[int(requests[token])]
        want, sizes = (tensor[last // case.ratio] for tensor in wanted[sequence])
        allowed = half_step(want) + BUDGET * sizes + 2.0**-126
        worst = float(((made.values[token].double() - want).abs() / allowed).max())
        if not worst <= 1:
            return f"entry {last // case.ratio} of sequence {sequence}: {worst:.2f} of its budget"
    return ""


def cases() -> list[Case]:
    """Return the compressor's cases, as vLLM has them, one token a launch, and many tokens."""
    served = [case for case in compressor_checks.cases() if case.width == 512 or case.ratio == 4]
    served += [  # windows of 128 with 128 columns as well, which no model has
        Case(ratio, width, ((2 * ratio - 3,), *((1,),) * 9), spread, seed=5)
        for ratio, width in ((4, 512), (4, 128), (128, 512), (128, 128))
        for spread in compressor_checks.SPREADS
    ]
    return [*served, Case(4, 512, ((1100, 3),), seed=9), Case(128, 512, ((1100, 3),), seed=9)]


def fuzzed(seed: int, count: int) -> list[Case]:
    """Draw cases."""
    drawn = compressor_checks.fuzzed(seed, 2 * count)
    return [case for case in drawn if case.width == 512 or case.ratio == 4][:count]
