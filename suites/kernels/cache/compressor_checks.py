"""Compare the compressor on a GPU with a float64 pooling of whole sequences, call by call.

Ragged sequences come in chunks, with rings and pages in mixed order. Before the first call rings
are full of NaN, projections past the end are NaN and outputs are poisoned. Some windows close
nothing, and some requested ones are -1. A pooled value may be half a step of BF16 off, and 4e-6 of
the weighted magnitudes (powers are good to two steps, sums of 128 to some ten). Carried rows,
positions and slots have to be exact, the rows in the references' order; stored entries
have to be kv_write's of the pooled values, byte for byte.

Where there is no GPU a walk on the CPU stands in. Shape letters as in kernels/cache/problem.py.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.kernels.cache import problem as facts
from degarble.kernels.cache.problem import PoolProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import kernel_named
from degarble.references import sparse_attention
from degarble.references.numerics import Numerics
from degarble.suites.kernels import latent_checks as plain
from degarble.suites.kernels.mhc_checks import half_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SETTINGS = CompileSettings()
BUDGET = 4e-6
PAGE = 3  # entries
WINDOWS = ("closing", "owners", "starts", "offsets", "ring_of", "table")
POISON = 7.0
SPREADS = ("ordinary", "sharp", "equal")


class Call(NamedTuple):
    """What a call is given, on the CPU; `rings` is what it carries on."""

    problem: PoolProblem
    projected: Tensor
    ape: Tensor
    rings: Tensor
    windows: tuple[Tensor, ...]


class Made(NamedTuple):
    """What a call gives."""

    values: Tensor
    positions: Tensor
    slots: Tensor
    rings: Tensor


@dataclass(frozen=True)
class Case:
    """Sequences that grow: `steps` has the new tokens of each in each call, 0 for none."""

    ratio: int
    width: int
    steps: tuple[tuple[int, ...], ...]
    spread: str = "ordinary"
    seed: int = 0

    @property
    def name(self) -> str:
        """One line that finds the case again."""
        text = " ".join(",".join(map(str, counts)) for counts in self.steps)
        short = text if len(text) < 40 else f"{text[:30]}... {len(self.steps)} calls"
        return f"{self.ratio} {self.width} [{short}] {self.spread} seed={self.seed}"

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence in the end."""
        return [sum(counts) for counts in zip(*self.steps, strict=True)]

    @property
    def columns(self) -> int:
        """Columns of latents, and of gates."""
        return PoolProblem(0, 0, 0, 1, self.ratio, self.width).columns

    def drawn(self, offset: int, *shape: int) -> Tensor:
        """Draw float32 numbers."""
        generator = torch.Generator().manual_seed(self.seed * 64 + offset)
        return torch.randn(shape, generator=generator)

    @cached_property
    def ape(self) -> Tensor:
        """Draw the gates' bias."""
        return self.drawn(0, self.ratio, self.columns) / 2

    @cached_property
    def rows(self) -> list[Tensor]:
        """Draw the projections of each sequence [L, 2 F]."""
        factor = {"ordinary": 1.0, "sharp": 12.0, "equal": 0.0}[self.spread]
        made = []
        for number, length in enumerate(self.lengths):
            rows = self.drawn(number + 1, length, 2 * self.columns)
            rows[:, self.columns :] *= factor
            made.append(rows)
        return made

    @cached_property
    def ring_of(self) -> list[int]:
        """Whose ring is which; there is one that is nobody's."""
        return torch.randperm(
            len(self.lengths) + 1, generator=torch.Generator().manual_seed(self.seed)
        ).tolist()[:-1]

    @cached_property
    def table(self) -> Tensor:
        """Draw pages [B, N]; the last one of every sequence is missing."""
        longest = max(self.lengths) // self.ratio // PAGE + 2
        generator = torch.Generator().manual_seed(self.seed + 1)
        count = len(self.lengths) * longest
        table = torch.randperm(count, generator=generator).to(torch.int32).view(-1, longest)
        table[:, -1] = -1
        return table


def definition(case: Case, sequence: int) -> tuple[Tensor, Tensor]:
    """Return every pooled entry of a sequence in float64, and what bounds its error."""
    rows, ratio = case.rows[sequence], case.ratio
    whole = rows.shape[0] // ratio * ratio
    latent, gate = rows[:whole, : case.columns], rows[:whole, case.columns :]
    if not whole:
        return latent.new_zeros(0, case.width).double(), latent.new_zeros(0, case.width).double()
    gate = gate + case.ape.repeat(whole // ratio, 1)
    pool = sparse_attention.PoolFacts(ratio, facts.overlaps(ratio), case.width, 1e-6, plain.ROPE)
    nothing = sparse_attention.PoolState(latent[:0], gate[:0])
    before = sparse_attention.PoolState(
        *(part.new_zeros(pool.state_rows, case.columns) for part in nothing.__dict__.values())
    )
    latents, gates = sparse_attention.slots_of(
        (latent.double(), gate.double()), _double(before), 0, pool
    )
    weights = torch.softmax(gates, dim=1)
    return (weights * latents).sum(1), (weights * latents.abs()).sum(1)


def _double(state: sparse_attention.PoolState) -> sparse_attention.PoolState:
    return sparse_attention.PoolState(state.latent.double(), state.gate.double())


def calls(case: Case) -> list[tuple[list[int], list[int], list[int]]]:
    """Return whose tokens each call has, where they begin and how many they are."""
    seen, made = [0] * len(case.lengths), []
    for counts in case.steps:
        active = [b for b, count in enumerate(counts) if count]
        made.append((active, [seen[b] for b in active], [counts[b] for b in active]))
        seen = [length + count for length, count in zip(seen, counts, strict=True)]
    return made


def call_of(case: Case, part: tuple[list[int], list[int], list[int]], rings: Tensor) -> Call:
    """Lay a call's tokens side by side; a token that closes nothing and -1 are asked for too."""
    active, starts, counts = part
    tokens = sum(counts)
    closing, owners = facts.windows_of(starts, counts, case.ratio)
    if tokens == len(active):  # one token a sequence: all of them
        closing = owners = torch.arange(len(active), dtype=torch.int32)
    else:
        more = torch.tensor([-1, 0], dtype=torch.int32)
        closing, owners = torch.cat((more, closing)), torch.cat((torch.zeros_like(more), owners))
        if (starts[0] + 1) % case.ratio == 0:
            closing[1] = -1  # a window is not asked for twice
    pieces = [case.rows[b][s : s + n] for b, s, n in zip(active, starts, counts, strict=True)]
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    counts_of = (tokens, len(active), len(closing), rings.shape[0])
    problem = PoolProblem(*counts_of, case.ratio, case.width, page_entries=PAGE)
    ring_of = torch.tensor([case.ring_of[b] for b in active], dtype=torch.int32)
    windows = (
        *(closing, owners, torch.tensor(starts), offsets, ring_of),
        case.table[active].contiguous(),
    )
    return Call(problem, torch.cat(pieces), case.ape, rings, windows)


def operands_of(call: Call) -> dict[str, Tensor]:
    """Return a call's operands by name, on the GPU."""
    made = {"projected": call.projected, "ape": call.ape, "rings": call.rings}
    made |= dict(zip(WINDOWS, call.windows, strict=True))
    return {name: tensor.cuda() for name, tensor in made.items()}


def on_device(call: Call) -> Made:
    """Run a call on the GPU."""
    kernel, given = kernel_named("simt_compressor"), operands_of(call)
    out = kernel.allocate(call.problem, torch.device("cuda"))
    for tensor in out.values():
        tensor.fill_(POISON)
    kernel.run(call.problem, SETTINGS, **given, **out)
    return Made(*(tensor.cpu() for tensor in (*out.values(), given["rings"])))


def by_stated_order(call: Call) -> Made:
    """Do a call as the kernel states it, window by window, on the CPU."""
    problem, ratio = call.problem, call.problem.ratio
    closing, owners, starts, offsets, ring_of, table = call.windows
    values = torch.full((problem.windows, problem.width), POISON).bfloat16()
    positions, slots = torch.zeros(problem.windows, dtype=torch.int64), closing.long() * 0 - 1
    rings, biased = call.rings.clone(), call.projected.clone()
    for b in range(problem.sequences):
        for token in range(int(offsets[b]), int(offsets[b + 1])):
            position = int(starts[b]) + token - int(offsets[b])
            biased[token, problem.columns :] += call.ape[position % ratio]
            rings[int(ring_of[b]), position % problem.ring_rows] = biased[token]
    for window, (token, b) in enumerate(zip(closing.tolist(), owners.tolist(), strict=True)):
        last = int(starts[b]) + token - int(offsets[b])
        if token < 0 or (last + 1) % ratio:
            continue
        picked = []
        for number in range(problem.ring_rows):
            position = last - problem.ring_rows + 1 + number
            row = torch.zeros(2 * problem.columns)
            if position >= int(starts[b]):
                row = biased[int(offsets[b]) + position - int(starts[b])]
            elif position >= 0:
                row = call.rings[int(ring_of[b]), position % problem.ring_rows]
            else:
                row[problem.columns :] = -torch.inf
            later = number // ratio * problem.width
            parts = row[later:], row[problem.columns + later :]
            picked.append([part[: problem.width] for part in parts])
        values[window] = pooled_rows(picked)
        entry = last // ratio
        page = int(table[b, entry // PAGE])
        positions[window] = last - ratio + 1
        slots[window] = page * PAGE + entry % PAGE if page >= 0 else -1
    return Made(values, positions, slots, rings)


def pooled_rows(picked: list[list[Tensor]]) -> Tensor:
    """Return the mean of a window, from the latents and gates of its rows."""
    latents, gates = zip(*picked, strict=True)
    peak = facts.peak_of(gates)
    sums = [
        facts.part_sums(gates[at : at + 8], latents[at : at + 8], peak, torch.exp)
        for at in range(0, len(gates), facts.ROWS_AT_ONCE)
    ]
    made: Tensor = facts.pooled(*(list(each) for each in zip(*sums, strict=True)))
    return made.bfloat16()


def mismatch(case: Case, run: Callable[[Call], Made] = on_device) -> str:
    """Say what is beyond its budget or not exact in any call; empty where nothing is."""
    rings = torch.full((len(case.lengths) + 1, *_ring(case)), torch.nan)
    wanted = [definition(case, b) for b in range(len(case.lengths))]
    for number, part in enumerate(calls(case)):
        call = call_of(case, part, rings)
        made = run(call)
        why = _wrong_windows(case, call, made, wanted, part) or _wrong_rings(case, made, part)
        if why:
            return f"{case.name}, call {number}: {why}"
        rings = made.rings
    return ""


def _ring(case: Case) -> tuple[int, int]:
    return facts.rows_of_ring(case.ratio), 2 * case.columns


def _wrong_windows(
    case: Case,
    call: Call,
    made: Made,
    wanted: list[tuple[Tensor, Tensor]],
    part: tuple[list[int], list[int], list[int]],
) -> str:
    exact = by_stated_order(call)
    if not torch.equal(made.positions[exact.slots >= 0], exact.positions[exact.slots >= 0]):
        return f"positions {made.positions.tolist()[:9]}, not {exact.positions.tolist()[:9]}"
    if not torch.equal(made.slots, exact.slots):
        return f"slots {made.slots.tolist()[:9]}, not {exact.slots.tolist()[:9]}"
    owners = call.windows[1].tolist()
    for window, (token, of_call) in enumerate(zip(call.windows[0].tolist(), owners, strict=True)):
        sequence, start = part[0][of_call], part[1][of_call]
        last = start + token - int(call.windows[3][of_call])
        if token < 0 or (last + 1) % case.ratio:
            if not bool((made.values[window] == POISON).all()):
                return f"window {window} closes nothing and was written"
            continue
        want, sizes = (each[last // case.ratio] for each in wanted[sequence])
        allowed = half_step(want) + BUDGET * sizes + 2.0**-126
        worst = float(((made.values[window].double() - want).abs() / allowed).max())
        if not worst <= 1:
            return f"entry {last // case.ratio} of sequence {sequence}: {worst:.2f} of its budget"
    return ""


def _wrong_rings(case: Case, made: Made, part: tuple[list[int], list[int], list[int]]) -> str:
    """Compare rings with what references.sparse_attention carries."""
    pool = sparse_attention.PoolFacts(
        case.ratio, facts.overlaps(case.ratio), case.width, 1e-6, plain.ROPE
    )
    weight = torch.ones(case.width, dtype=torch.bfloat16)
    for sequence, start, count in zip(*part, strict=True):
        length = start + count
        rows = case.rows[sequence][:length]
        bias = case.ape.repeat(-(-length // case.ratio), 1)[:length]
        new = rows[:, : case.columns], rows[:, case.columns :] + bias
        empty = torch.zeros(pool.state_rows, case.columns)
        state = sparse_attention.PoolState(empty, empty)
        _, kept = sparse_attention.pool_windows(new, state, 0, weight, pool, Numerics.bf16())
        ring = made.rings[case.ring_of[sequence]]
        got = facts.as_references_have_it(ring, length, case.ratio)
        if not torch.equal(got, torch.cat((kept.latent, kept.gate), 1)):
            return f"the ring of sequence {sequence} behind {length} tokens"
        if not bool(ring[length:].isnan().all()):  # rows that no position has reached yet
            return f"the ring of sequence {sequence} holds more than its {length} tokens"
    return ""


def cases() -> list[Case]:
    """Return the named cases: lengths around window and ring, chunks, decode, ragged."""
    made = []
    for ratio in facts.RATIOS:
        sizes = (1, ratio - 1, ratio, ratio + 1, 2 * ratio - 1, 2 * ratio, 2 * ratio + 1, 129)
        for width in (512, 128):
            made.append(Case(ratio, width, (sizes,), seed=1))
            chunks = (sizes, sizes[::-1], (3, 0, 1, 0, 0, 2, ratio, 1), (1,) * len(sizes))
            made.append(Case(ratio, width, chunks, seed=2))
            made += [Case(ratio, width, ((300, 7), (5, 130)), s, seed=3) for s in SPREADS]
            lone = ((2 * ratio - 3, 1),) + ((1, 1),) * 9
            made.append(Case(ratio, width, lone, seed=4))
    return made


def fuzzed(seed: int, count: int) -> list[Case]:
    """Draw cases."""
    drawn = random.Random(seed)
    made = []
    for _ in range(count):
        ratio, sequences = drawn.choice(facts.RATIOS), drawn.randint(1, 5)
        steps = []
        for _ in range(drawn.randint(1, 4)):
            kind = drawn.choice(("decode", "few", "chunk"))
            top = {"decode": 1, "few": 9, "chunk": 2 * ratio + 9}[kind]
            counts = [drawn.randint(0 if kind != "decode" else 1, top) for _ in range(sequences)]
            counts[drawn.randrange(sequences)] = max(1, counts[0])
            steps.append(tuple(counts))
        spread = drawn.choice(SPREADS)
        width = drawn.choice((512, 128))
        made.append(Case(ratio, width, tuple(steps), spread, drawn.randrange(1 << 16)))
    return made
