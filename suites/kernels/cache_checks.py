"""Compare the kernels of the latent cache on a GPU with an encoder and a decoder in plain torch.

Cases vary tokens, page sizes, entry formats, spreads, and slots with gaps, repeats and numbers
beyond the cache. Caches are full of 0xAA before a launch, which reveals a byte written by mistake
and a byte left out. Blocks are coded by harness.formats and references.numerics, which know nothing
of kernels; addresses are counted entry by entry.

Entries of V3.2 have their scales inside: those bytes count as values here, and none as scales.
Shape letters: T tokens, L width (512, 128 or 576), N pages, B bytes of a page.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from degarble.harness.formats import scalar_ops as codecs
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.kv_problem import (
    ENTRIES,
    KEY,
    KEY_WIDTH,
    SOURCES,
    EntryFormat,
    Pages,
    ReadProblem,
    WriteProblem,
)
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import kernel_named
from degarble.references import numerics
from degarble.suites.kernels import latent_checks as plain
from degarble.suites.kernels.format_checks import difference

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = CompileSettings()
POISON = 0xAA
WITH_KEY = ("fp8-v32", "fp8-v32-ue8m0", "bf16")  # entries of rows of 576
LENGTHS = (1, 3, 4, 5, 63, 64, 65, 127, 128, 129, 257)  # ratio, page, window, and their neighbours
SLOT_KINDS = ("spread", "in a row", "repeated")


OPERANDS = ("values", "weight", "turns", "positions", "slots")


@dataclass(frozen=True)
class Case:
    """One launch; everything follows from these facts."""

    problem: WriteProblem
    spread: str = "ordinary"
    slots_are: str = "spread"
    seed: int = 0

    @property
    def name(self) -> str:
        """One line that finds the case again."""
        p, c = self.problem, self.problem.pages
        what = f"{c.entry} {c.width} {c.count}x{c.entries} stride={c.stride} {p.source} {p.weight}"
        return f"{what} T={p.tokens} {self.spread} {self.slots_are} seed={self.seed}"

    @cached_property
    def values(self) -> Tensor:
        """Draw rows."""
        return plain.drawn(self.spread, (self.problem.tokens, self.problem.pages.width), self.seed)

    @cached_property
    def weight(self) -> Tensor | None:
        """Draw a norm's weight."""
        if self.problem.source != "latent":
            return None
        generator = torch.Generator().manual_seed(self.seed + 1)
        width = min(self.problem.pages.width, rows.WIDTH)
        drawn = 1 + torch.randn(width, generator=generator) / 4
        return drawn.to({"bf16": torch.bfloat16, "fp32": torch.float32}[self.problem.weight])

    @cached_property
    def turns(self) -> Tensor | None:
        """Return the table of turns."""
        return plain.table_of_turns(self.problem.positions) if self.problem.positions else None

    @cached_property
    def positions(self) -> Tensor | None:
        """Draw positions; the last token of many lies outside of the table."""
        if not self.problem.positions:
            return None
        generator = torch.Generator().manual_seed(self.seed + 2)
        extents = (self.problem.tokens,)
        positions_T = torch.randint(self.problem.positions, extents, generator=generator)
        if self.problem.tokens > 100:
            positions_T[-1] = self.problem.positions
        return positions_T

    @cached_property
    def slots(self) -> Tensor:
        """Draw slots: distinct ones unless repeated; of many some are skipped."""
        tokens, capacity = self.problem.tokens, self.problem.pages.slots
        generator = torch.Generator().manual_seed(self.seed + 3)
        if self.slots_are == "repeated":
            return torch.randint(-1, min(capacity, 1 + tokens // 2), (tokens,), generator=generator)
        order = torch.randperm(capacity, generator=generator)
        slots_T = torch.arange(capacity) if self.slots_are == "in a row" else order
        slots_T = torch.cat((slots_T, torch.full((tokens,), -1)))[:tokens]
        if tokens > 2:
            slots_T[1], slots_T[2] = -1, capacity
        return slots_T

    def rows(self) -> Tensor:
        """Return BF16 rows as they are quantised."""
        if self.problem.source == "row":
            return self.values
        assert self.turns is not None
        assert self.positions is not None
        width = min(self.problem.pages.width, rows.WIDTH)  # V3.2's key is not normed
        latent, key = self.values[:, :width], self.values[:, width:]
        made = plain.normed_rows(latent, self.weight, self.problem.epsilon).bfloat16()
        made = torch.cat((made, key), 1)
        turns = plain.turns_at(self.turns, self.positions)
        return plain.with_the_machines_nan(plain.turned_tail(made.float(), turns))

    def cache(self) -> Tensor:
        """Return poisoned pages on the CPU."""
        pages = self.problem.pages
        return torch.full((pages.count, pages.stride), POISON, dtype=torch.uint8)


def coded(rows_TL: Tensor, entry: EntryFormat) -> tuple[Tensor, Tensor]:
    """Return the bytes of codes and BF16 values, and of scales, of each row."""
    tokens = rows_TL.shape[0]
    rest = rows_TL[:, entry.quantised :].contiguous().view(torch.uint8)
    if not entry.quantised:
        return rest, torch.zeros(tokens, 0, dtype=torch.uint8)
    blocks = rows_TL[:, : entry.quantised].float().unflatten(1, (-1, entry.block))
    amax = blocks.abs().amax(-1, keepdim=True)
    if entry.inside:
        codes, scales = _fp8_with_key(blocks, amax, entry)
        parts = (codes.flatten(1), scales.flatten(1).view(torch.uint8), rest)
        return torch.cat(parts, 1), torch.zeros(tokens, 0, dtype=torch.uint8)
    if entry.numbers:
        codes, scales = _fp8_with_key(blocks, amax, entry)
        return codes.flatten(1), scales.flatten(1).view(torch.uint8)
    codes, scales = _fp8(blocks, amax) if entry.code_bits == 8 else _nvfp4(blocks, amax)
    padding = torch.zeros(tokens, entry.scale_bytes - entry.scales, dtype=torch.uint8)
    return torch.cat((codes.flatten(1), rest), 1), torch.cat((scales.flatten(1), padding), 1)


def _fp8(blocks: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    lost = ~amax.isfinite()
    scale = numerics.power_of_two_above(
        amax.masked_fill(lost, 1.0).clamp(min=numerics.FP8_FLOOR) * (1.0 / numerics.E4M3_LARGEST)
    )
    codes = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    exponents = (scale.view(torch.int32) >> 23).to(torch.uint8)
    return codes.masked_fill(lost, 0x7F), exponents.masked_fill(lost, 255)


def _fp8_with_key(blocks: Tensor, amax: Tensor, entry: EntryFormat) -> tuple[Tensor, Tensor]:
    lost = ~amax.isfinite()
    amax = amax.masked_fill(lost, 1.0).clamp(min=numerics.FP8_FLOOR)
    scale = amax / torch.tensor(numerics.E4M3_LARGEST)  # a number would be inverted first
    if entry.powers:
        scale = numerics.power_of_two_above(amax * (1.0 / numerics.E4M3_LARGEST))
    codes = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(lost, 0x7F), scale.masked_fill(lost, torch.nan)


def _nvfp4(blocks: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    lost = amax.isnan()
    raw = amax.masked_fill(lost, 1.0).clamp(min=6.0 * numerics.NVFP4_SCALE_FLOOR) / 6.0
    scale = numerics.round_e4m3(raw)
    nibbles = codecs.e2m1_encode(blocks / scale).masked_fill(lost, 0)
    codes = (nibbles[..., 0::2] + nibbles[..., 1::2] * 16).to(torch.uint8)
    scales = scale.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, scales.masked_fill(lost, 0x7F)


def decoded(values_T: Tensor, scales_T: Tensor, entry: EntryFormat) -> Tensor:
    """Return the BF16 rows of the bytes of entries."""
    rest = values_T[:, entry.rest_at :].contiguous().view(torch.bfloat16)
    if not entry.quantised:
        return rest
    codes = values_T[:, : entry.code_bytes].contiguous()
    scales = scales_T[:, : entry.scales].contiguous()
    if entry.numbers:
        numbers = codes.view(torch.float8_e4m3fn).float()
        held = values_T[:, entry.code_bytes : entry.rest_at] if entry.inside else scales_T
        factors = held.contiguous().view(torch.float32)
    elif entry.code_bits == 8:
        numbers = codes.view(torch.float8_e4m3fn).float()
        factors = codecs.ue8m0_decode(scales.to(torch.int64))
    else:
        nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
        numbers = codecs.e2m1_decode(nibbles.to(torch.int64))
        factors = scales.view(torch.float8_e4m3fn).float()
    made = numbers.reshape(len(codes), -1, entry.block) * factors[..., None]
    made = plain.with_the_machines_nan(made.flatten(1).bfloat16())
    return torch.cat((made, rest), -1)


def places(pages: Pages, slot: int) -> tuple[slice, slice]:
    """Return where in its page the values and the scales of a slot lie."""
    entry, within = pages.format, slot % pages.entries
    if entry.inside:
        return slice(within * entry.step, (within + 1) * entry.step), slice(0, 0)
    value = within * entry.value_bytes
    scale = pages.entries * entry.value_bytes + within * entry.scale_bytes
    return slice(value, value + entry.value_bytes), slice(scale, scale + entry.scale_bytes)


def by_definition(case: Case) -> Tensor:
    """Return the cache that a launch has to leave: tokens in order, the last one stays."""
    pages, cache_NB = case.problem.pages, case.cache()
    values, scales = coded(case.rows(), pages.format)
    for token, slot in enumerate(case.slots.tolist()):
        if 0 <= slot < pages.slots:
            of_values, of_scales = places(pages, slot)
            cache_NB[slot // pages.entries, of_values] = values[token]
            cache_NB[slot // pages.entries, of_scales] = scales[token]
    return cache_NB


def read_by_definition(cache_NB: Tensor, indices_R: Tensor, pages: Pages) -> Tensor:
    """Return the rows of indices: zeros below 0, NaN beyond the cache."""
    nan = torch.tensor([0x7FC0], dtype=torch.int16).view(torch.bfloat16)
    out_RL = torch.zeros(len(indices_R), pages.width, dtype=torch.bfloat16)
    for row, slot in enumerate(indices_R.tolist()):
        if slot >= pages.slots:
            out_RL[row] = nan
        elif slot >= 0:
            page = cache_NB[slot // pages.entries]
            of_values, of_scales = places(pages, slot)
            out_RL[row] = decoded(page[None, of_values], page[None, of_scales], pages.format)[0]
    return out_RL


def on_device(case: Case) -> Tensor:
    """Run a case on the GPU; the cache comes back."""
    from degarble.kernels.cache import simt_kv_write as kernels  # noqa: PLC0415  needs the DSL

    given = operands_of(case, "cuda")
    if case.problem.duplicates == "last":
        given["claims"] = kernels.empty_claims(case.problem, torch.device("cuda"))
    cache_NB = kernels.KERNEL.run_one(case.problem, SETTINGS, **given, cache=case.cache().cuda())
    if "claims" in given:
        assert bool((given["claims"] == -1).all()), "claims are left clear"
    return cache_NB.cpu()


def operands_of(case: Case, device: str) -> dict[str, Tensor]:
    """Return the operands by name, without cache and claims."""
    found = {name: getattr(case, name) for name in OPERANDS}
    return {name: each.to(device) for name, each in found.items() if each is not None}


def read_on_device(cache_NB: Tensor, indices_R: Tensor, problem: ReadProblem) -> Tensor:
    """Gather on the GPU; rows come back."""
    shape = (problem.count, problem.pages.width)
    out = torch.full(shape, 7.0, dtype=torch.bfloat16, device="cuda")
    given = {"indices": indices_R.cuda(), "cache": cache_NB.cuda(), "out": out}
    kernel_named("simt_kv_read").run(problem, SETTINGS, **given)
    return out.cpu()


def mismatch(case: Case) -> str:
    """Say how a case differs from its definition on the GPU; empty where it does not."""
    return difference(case.name, on_device(case), by_definition(case))


def read_mismatch(case: Case) -> str:
    """Say how reading what a case writes differs, gaps and numbers beyond the cache included."""
    pages, cache_NB = case.problem.pages, by_definition(case)
    drawn = torch.Generator().manual_seed(case.seed + 4)
    asked = torch.randint(-2, pages.slots + 1, (case.problem.tokens,), generator=drawn)
    asked = torch.cat((case.slots, asked)).to(torch.int32)
    got = read_on_device(cache_NB, asked, ReadProblem(len(asked), pages))
    want = read_by_definition(cache_NB, asked, pages)
    return difference(f"read, {case.name}", plain.bits(got), plain.bits(want))


def write_problem(entry: str, tokens: int, entries: int = 64, **more: object) -> WriteProblem:
    """Return a problem whose cache holds a third more than the tokens."""
    count = max(1, -(-(tokens + tokens // 3) // entries))
    source = more.pop("source", "latent")
    stride = int(str(more.pop("stride", 0)))
    positions = 300 if source == "latent" else 0
    pages = Pages(entry, entries, count, stride, int(str(more.pop("width", rows.WIDTH))))
    return WriteProblem(tokens, pages, positions, source=source, **more)  # type: ignore[arg-type]


def cases() -> list[Case]:
    """Return the named cases: every format, lengths around every constant, spreads, slots."""
    made = []
    for entry in ENTRIES:
        made += [Case(write_problem(entry, n), "wide", seed=n) for n in LENGTHS]
        for entries in (1, 2, 64, 256):
            problem = write_problem(entry, 131, entries, weight="fp32")
            made.append(Case(problem, "wide", "in a row", entries))
        for spread in plain.SPREADS:
            of_both = [write_problem(entry, 130, source=source) for source in SOURCES]
            made += [Case(problem, spread) for problem in of_both]
        last = write_problem(entry, 700, duplicates="last")
        made += [Case(last, "wide", kind) for kind in SLOT_KINDS]
        made.append(Case(write_problem(entry, 9, 3, stride=1024 * 9), "wide"))
        small = [write_problem(entry, 130, 64, source=source, width=128) for source in SOURCES]
        made += [Case(problem, spread) for problem in small for spread in plain.SPREADS]
        made.append(Case(write_problem(entry, 4097, 64, width=128), "wide"))
        made.append(Case(write_problem(entry, 8191, 256), "wide"))  # the last warp has one token
    return made + cases_of_keys() + cases_with_key()


def cases_of_keys() -> list[Case]:
    """Return the named cases of an indexer's keys, which share one scale a row."""
    made = []
    for source in SOURCES:
        problem = write_problem(KEY, 130, source=source, width=KEY_WIDTH)
        made += [Case(problem, spread) for spread in plain.SPREADS]
    for tokens, entries, stride in (
        (1, 64, 0),
        (5, 8, 0),
        (131, 64, 132 * 64 + 576),
        (8191, 64, 0),
    ):
        problem = write_problem(KEY, tokens, entries, stride=stride, width=KEY_WIDTH)
        made.append(Case(problem, "wide", "in a row", tokens))
    last = write_problem(KEY, 70, weight="fp32", duplicates="last", width=KEY_WIDTH)
    return [*made, Case(last, "wide", "repeated")]


def cases_with_key() -> list[Case]:
    """Return the named cases of V3.2's rows."""
    made = []
    for entry in WITH_KEY:
        made += [Case(write_problem(entry, n, width=rows.WITH_KEY), "wide", seed=n) for n in (1, 5)]
        for entries in (1, 64):
            more = {"weight": "fp32", "duplicates": "last", "width": rows.WITH_KEY}
            problem = write_problem(entry, 131, entries, **more)
            made += [Case(problem, "wide", kind, entries) for kind in SLOT_KINDS]
        for spread in plain.SPREADS:
            of_both = [
                write_problem(entry, 130, source=source, width=rows.WITH_KEY) for source in SOURCES
            ]
            made += [Case(problem, spread) for problem in of_both]
        stride = 1152 * 9  # more than nine entries of every format need
        made.append(Case(write_problem(entry, 9, 3, stride=stride, width=rows.WITH_KEY), "wide"))
        made.append(Case(write_problem(entry, 8191, 64, width=rows.WITH_KEY), "wide"))
    return made


def fuzzed(seed: int, count: int) -> list[Case]:
    """Draw cases."""
    drawn = random.Random(seed)
    made = []
    for _ in range(count):
        duplicates = drawn.choice(("absent", "absent", "last"))
        width = drawn.choice((512, 512, 128, rows.WITH_KEY))
        problem = write_problem(
            drawn.choice(WITH_KEY if width == rows.WITH_KEY else tuple(ENTRIES)),
            drawn.choice((drawn.randint(1, 20), drawn.randint(1, 400))),
            drawn.choice((1, 2, 64, 256, drawn.randint(1, 300))),
            source=drawn.choice(("latent", "latent", "row")),
            weight=drawn.choice(("bf16", "fp32")),
            duplicates=duplicates,
            width=width,
        )
        kinds = SLOT_KINDS if duplicates == "last" else SLOT_KINDS[:2]
        spread, kind = drawn.choice(plain.SPREADS), drawn.choice(kinds)
        made.append(Case(problem, spread, kind, drawn.randrange(1 << 30)))
    return made
