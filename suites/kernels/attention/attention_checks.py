"""Compare sparse attention on a GPU with the formula in float64, over rows that a cache decodes to.

Cases vary tokens, heads, widths of lists, pages, entry formats, gaps, lengths, sinks and spreads.
The limits are the strictest public ones for this kernel (FlashMLA, tests): each number within 1e-3
or 2.01/128 of itself, a cosine distance of 5e-6 over the whole; LSE within 1e-6 or 8.01/65536 of
itself; infinities and NaN where the formula has them. Before a launch, unused slots, padding of
pages, results and workspace hold NaN, and list places past a length hold numbers of poisoned slots.

cache_checks codes and decodes entries without any kernel. Shape letters: T tokens, H heads, L width
of a value (512), K keys of a token, S slots of a cache.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from degarble.kernels.attention.problem import AttentionProblem, KeyList
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.kv_problem import ENTRIES, Pages
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import module_of
from degarble.kernels.runtime.targets import SM90A, SM100A, target_of_device
from degarble.suites.kernels import cache_checks

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = CompileSettings()
MODULES = {SM90A.name: "sm90_sparse_attention", SM100A.name: "sm100_sparse_attention"}
ABSOLUTE, RELATIVE, COSINE = 1e-3, 2.01 / 128, 5e-6  # FlashMLA, tests: sparse decode
LSE_ABSOLUTE, LSE_RELATIVE = 1e-6, 8.01 / 65536
SPREADS = {"flat": 1.0, "peaked": 30.0, "steep": 300.0}  # of queries: logits vary by 0.1, 3, 30
ROW_SIZE = 0.1  # of entries, as public tests have them
SINKS = ("drawn", "none", "all")
SCALE_OF_V32 = 0.1352338  # 192**-0.5 times the square of 0.1 ln 40 + 1
POISONED = 7  # slots of every cache that no list names but behind its length


@dataclass(frozen=True)
class Case:
    """One launch; everything follows from these facts."""

    tokens: int = 2
    heads: int = 64
    near: int = 128  # width of the window's list
    far: int | None = 512  # of the list of entries; None: there is none
    entry: str = "fp8"
    pages: tuple[int, int] = (64, 2)  # entries of a page, of both caches
    page_bytes: int = 0  # added to the stride
    gaps: float = 0.1  # share of -1
    lengths: bool = False
    mode: str = "decode"
    splits: int = 0
    spread: str = "peaked"
    sinks: str = "drawn"
    seed: int = 0
    key: int = rows.WIDTH  # values of a key: 576 in V3.2, which has no sinks

    @property
    def name(self) -> str:
        """One line that finds the case again."""
        what = f"{self.entry} T{self.tokens} H{self.heads} W{self.near} K{self.far} {self.mode}"
        more = f"{self.splits} {self.pages} gaps={self.gaps} {self.spread} {self.sinks}"
        return f"{what} {more}{' lengths' * self.lengths} seed={self.seed} key={self.key}"

    def keys_of(self, width: int, entries: int) -> KeyList:
        """Return a list with a cache of more slots than the widest list names."""
        count = -(-(width + POISONED + 5) // entries) + 1
        plain = Pages(self.entry, entries, count, width=self.key)
        stride = plain.stride + self.page_bytes
        return KeyList(width, Pages(self.entry, entries, count, stride, self.key))

    @cached_property
    def problem(self) -> AttentionProblem:
        """Return what the launch is asked for."""
        far = None if self.far is None else self.keys_of(self.far, self.pages[1])
        near = self.keys_of(self.near, self.pages[0])
        told = (self.tokens, self.heads, near, far, self.mode, self.lengths, self.splits)
        scale = rows.WIDTH**-0.5 if self.key == rows.WIDTH else SCALE_OF_V32
        return AttentionProblem(*told, scale)


@dataclass(frozen=True)
class Drawn:
    """Operands of a case, and the rows [S, L] that each cache decodes to, poison and all."""

    q: Tensor
    sink: Tensor  # -inf where a family has none
    slots: tuple[Tensor, ...]
    caches: tuple[Tensor, ...]
    lengths: tuple[Tensor, ...] | None
    decoded: tuple[Tensor, ...]


def drawn(case: Case, device: str = "cuda") -> Drawn:
    """Draw operands on a device."""
    generator = torch.Generator(device).manual_seed(case.seed + 17)
    problem = case.problem

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    # Logits of V3.2 are multiplied by three times as much.
    size = SPREADS[case.spread] * rows.WIDTH**-0.5 / problem.scale
    q = (normal(case.tokens, case.heads, case.key) * size).bfloat16()
    sink = normal(case.heads) * 2
    if case.sinks != "drawn":
        sink = torch.full_like(sink, -torch.inf if case.sinks == "none" else torch.inf)
        sink[::3] = 1.0
    made = [_cache(key_list, normal, generator, device) for key_list in problem.lists]
    lists = [
        _list(case, key_list, order, generator)
        for key_list, (_, _, order) in zip(problem.lists, made, strict=True)
    ]
    return Drawn(
        q,
        sink if problem.family.sinks else torch.full_like(sink, -torch.inf),
        tuple(slots for slots, _ in lists),
        tuple(cache for cache, _, _ in made),
        tuple(lengths for _, lengths in lists) if case.lengths else None,
        tuple(decoded for _, decoded, _ in made),
    )


def _cache(of: KeyList, normal: Any, generator: Any, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return poisoned pages with entries in all slots but the last ones of an order; that order."""
    pages, entry = of.pages, of.pages.format
    cache = torch.full((pages.count, pages.stride), 0xFF, dtype=torch.uint8, device=device)
    order = torch.randperm(pages.slots, generator=generator, device=device)
    used = order[:-POISONED]
    rows_SL = (normal(len(used), pages.width) * ROW_SIZE).bfloat16().cpu()
    values, scales = cache_checks.coded(rows_SL, entry)
    numbers = cache_checks.decoded(values, scales, entry).to(device)
    values, scales = values.to(device), scales.to(device)
    page, within = used // pages.entries, used % pages.entries
    by_entry = torch.arange(entry.step, device=device)
    cache[page[:, None], within[:, None] * entry.step + by_entry] = values
    of_scales = torch.arange(scales.shape[1], device=device)
    start = pages.entries * entry.value_bytes
    cache[page[:, None], start + within[:, None] * entry.scale_bytes + of_scales] = scales
    decoded = torch.full((pages.slots, pages.width), torch.nan, device=device, dtype=torch.float64)
    decoded[used] = numbers.double()
    return cache, decoded, order


def _list(case: Case, of: KeyList, order: Tensor, generator: Any) -> tuple[Tensor, Tensor]:
    """Return slots [T, width] and lengths [T]; poisoned slots and nonsense lie behind lengths."""
    shape, device = (case.tokens, of.width), order.device
    drawn_at = torch.rand(
        case.tokens, max(1, len(order) - POISONED), generator=generator, device=device
    )
    chosen = order[drawn_at.argsort(-1)[:, : of.width]].int()
    gap = torch.rand(shape, generator=generator, device=device) < case.gaps
    slots = chosen.masked_fill(gap, -1)
    lengths = torch.full((case.tokens,), of.width, dtype=torch.int32, device=device)
    if case.lengths:
        draw = torch.rand(case.tokens, generator=generator, device=device)
        lengths = (draw * (of.width + 1)).int()
        lengths[0] = 0
        behind = torch.arange(of.width, device=device) >= lengths[:, None]
        poison = order[-1:].int().expand(shape).clone()
        poison[:, ::2] = 1 << 30
        slots = torch.where(behind, poison, slots)
    return slots.contiguous(), lengths


def formula(case: Case, given: Drawn) -> tuple[Tensor, Tensor]:
    """Return output [T, H, L] and LSE [T, H] in float64; a token at a time."""
    outs, lses = [], []
    for token in range(case.tokens):
        parts = []
        for i, slots in enumerate(given.slots):
            kept = (
                slots[token] if given.lengths is None else slots[token, : given.lengths[i][token]]
            )
            kept = kept[kept >= 0].long()
            decoded = given.decoded[i]
            exists = kept < len(decoded)
            found = decoded[torch.where(exists, kept, 0)]
            parts.append(found.masked_fill(~exists[:, None], torch.nan))
        keys = torch.cat(parts)
        logits = given.q[token].double() @ keys.T * case.problem.scale
        lse = torch.logsumexp(logits, -1)
        peak = logits.amax(-1) if len(keys) else torch.zeros_like(lse)
        share = torch.exp(logits - peak[:, None])
        total = share.sum(-1) + torch.exp(given.sink.double() - peak)
        values = keys[:, : rows.WIDTH]
        made = torch.where(total[:, None] == 0, 0.0, share / total[:, None]) @ values
        outs.append(made)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def memory_for(case: Case, device: Any) -> dict[str, Tensor]:
    """Return outputs full of NaN, and a workspace where the case has one."""
    kernels = import_module("degarble.kernels.attention.sm90_sparse_attention")
    made = kernels.KERNEL.allocate(case.problem, device)
    return {name: each.fill_(torch.nan) for name, each in made.items() if each is not None}


def kernels_here() -> Any:
    """Return the module of the GPU that is installed."""
    return import_module(module_of(MODULES[target_of_device().name]))


def on_device(case: Case, given: Drawn) -> tuple[Tensor, Tensor]:
    """Run the kernel."""
    memory = memory_for(case, given.q.device)
    made = kernels_here().KERNEL.run(case.problem, SETTINGS, **operands_of(given), **memory)
    return made["out"], made["lse"]


def operands_of(given: Drawn) -> dict[str, Tensor]:
    """Return the operands by name."""
    made = {"q": given.q} | ({"sink": given.sink} if given.q.shape[-1] == rows.WIDTH else {})
    for n, name in zip(range(len(given.slots)), ("window", "entries"), strict=False):
        made |= {f"{name}_slots": given.slots[n], f"{name}_cache": given.caches[n]}
        made |= {f"{name}_lengths": given.lengths[n]} if given.lengths else {}
    return made


def of_token(given: Drawn, token: int, **more: int) -> dict[str, Tensor]:
    """Return the operands of one token; `more` says by how much each of its lists is wider."""
    made = operands_of(given)
    made["q"] = made["q"][token : token + 1]
    for name, wider in more.items():
        slots = made[f"{name}_slots"][token : token + 1]
        made[f"{name}_slots"] = torch.nn.functional.pad(slots, (0, wider), value=-1).contiguous()
        made[f"{name}_lengths"] = made[f"{name}_lengths"][token : token + 1].clone()
    return made


def complaint(
    got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], lse_absolute: float = LSE_ABSOLUTE
) -> str:
    """Say what is beyond the gates; empty where nothing is."""
    said = [
        _beyond("output", got[0], wanted[0], (ABSOLUTE, RELATIVE)),
        _beyond("LSE", got[1], wanted[1], (lse_absolute, LSE_RELATIVE)),
    ]
    finite = wanted[0].isfinite()
    a, b = (torch.where(finite, tensor.double(), 0.0) for tensor in (got[0], wanted[0]))
    squares = (a * a).sum() + (b * b).sum()
    distance = 1 - float(2 * (a * b).sum() / squares) if squares > 0 else 0.0
    if not distance <= COSINE:
        said.append(f"cosine distance {distance:.2e}, at most {COSINE}")
    return "; ".join(filter(None, said))


def _beyond(name: str, got: Tensor, wanted: Tensor, gates: tuple[float, float]) -> str:
    got = got.double()
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    away = (got - wanted).abs()
    near = (away <= gates[0]) | (away <= gates[1] * wanted.abs())
    wrong = ~(same | (near & wanted.isfinite()))
    if not wrong.any():
        return ""
    first = tuple(wrong.nonzero()[0].tolist())
    worst = torch.where(wrong & away.isfinite(), away, 0.0).max()
    return (
        f"{name}: {int(wrong.sum())} of {wrong.numel()} beyond the gates, first {first}: "
        f"{float(got[first])!r} for {float(wanted[first])!r}, worst {float(worst):.3g} away"
    )


def mismatch(case: Case, lse_absolute: float = LSE_ABSOLUTE) -> str:
    """Run a case; say what is wrong with it."""
    given = drawn(case)
    why = complaint(on_device(case, given), formula(case, given), lse_absolute)
    return f"{case.name}: {why}" if why else ""


def foreign_cache(pages: Pages) -> Tensor:
    """Return random bytes on the CPU: BF16 values that are numbers, NaN codes in some entries."""
    generator, entry = torch.Generator().manual_seed(3), pages.format
    cache = torch.randint(256, (pages.count, pages.stride), generator=generator).to(torch.uint8)
    for slot in range(pages.slots):
        values, scales = cache_checks.places(pages, slot)
        row = cache[slot // pages.entries]
        codes, rest = row[values][: entry.code_bytes], row[values][entry.rest_at :]
        if entry.inside and slot % 8:
            factors = row[values][entry.code_bytes : entry.rest_at].view(torch.float32)
            factors.copy_(torch.randn(entry.scales, generator=generator).exp())
        rest.view(torch.bfloat16).copy_(torch.randn(len(rest) // 2, generator=generator))
        if not entry.quantised:
            rest[1] = 0xFF if slot % 8 == 0 else 0x3F
            rest[0] = 0xFF
        if entry.code_bits == 8 and slot % 8:
            codes[codes % 128 == 127] = 0x55
            row[scales] = row[scales] % 240
        if entry.code_bits == 4:
            row[scales] = row[scales] % (128 if slot % 8 == 0 else 127)
    return cache


def rows_as_outputs(entry: str, key: int = rows.WIDTH) -> tuple[str, float]:
    """Attend to one key a token: say how outputs differ from rows; the share of rows with NaN."""
    pages = Pages(entry, 64, 4, width=key)
    cache = foreign_cache(pages)
    slots = torch.arange(pages.slots, dtype=torch.int32)
    rows_SL = cache_checks.read_by_definition(cache, slots, pages)
    lost = ~rows_SL.isfinite().all(-1)
    problem = AttentionProblem(pages.slots, 1, KeyList(1, pages), scale=1.0)
    q = torch.zeros(pages.slots, 1, key, dtype=torch.bfloat16, device="cuda")
    given = {"window_slots": slots[:, None].cuda(), "window_cache": cache.cuda()}
    if problem.family.sinks:
        given["sink"] = torch.full((1,), -torch.inf, device="cuda")
    out = kernels_here().KERNEL.run(problem, SETTINGS, q=q, **given)["out"][:, 0].cpu()
    same = (out == rows_SL[:, : rows.WIDTH]) | (lost[:, None] & out.isnan())
    wrong = (~same).nonzero()
    said = f"{len(wrong)} values, first {wrong[0].tolist()}" if len(wrong) else ""
    return said, float(lost.float().mean())


def cases() -> list[Case]:
    """Return shapes of models, lengths around every constant, and whatever else is special."""
    made = [
        Case(heads=heads, far=far, mode=mode, seed=heads + far)
        for heads, far in ((128, 1024), (64, 512), (8, 32))  # V4-Pro, V4-Flash, the tiny model
        for mode in ("decode", "prefill")
    ]
    lengths = (0, 1, 3, 4, 5, 63, 64, 65, 127, 128, 129, 192, 193, 511, 512, 513, 640, 641)
    made += [Case(far=far, heads=16, seed=far, near=128) for far in lengths]
    made += [Case(near=near, far=65, heads=8, seed=near) for near in (0, 1, 63, 64, 65, 127, 129)]
    made += [Case(near=near, far=None, heads=8) for near in (0, 1, 128, 700)]
    for entry in ENTRIES:
        made += [
            Case(entry=entry, pages=pages, page_bytes=extra, lengths=lengths, mode=mode, seed=extra)
            for pages, extra, lengths in (((64, 64), 0, False), ((1, 3), 48, True))
            for mode in ("decode", "prefill")
        ]
    made += [Case(heads=heads, far=100) for heads in (1, 7, 9, 63, 65, 127)]
    made += [Case(sinks=sinks, gaps=gaps, far=70) for sinks in SINKS for gaps in (0.0, 0.98, 1.0)]
    made += [Case(splits=splits, far=400, seed=splits, lengths=True) for splits in (1, 2, 3, 9, 32)]
    made += [
        Case(spread=spread, far=1024, mode=mode)
        for spread in ("flat", "steep")
        for mode in ("decode", "prefill")
    ]
    made += [Case(tokens=9, lengths=True, far=1024, heads=64), Case(tokens=300, far=40, heads=24)]
    made += [Case(far=1024, pages=(64, 64), lengths=True, seed=3, splits=n) for n in (0, 9)]
    # More of them than thread blocks that run at a time.
    of_prompt = Case(tokens=300, far=200, heads=100, mode="prefill", entry="bf16")
    made += [of_prompt, replace(of_prompt, lengths=True, gaps=0.4), replace(of_prompt, entry="fp8")]
    return made


def fuzzed(seed: int, count: int) -> list[Case]:
    """Return random cases."""
    draw = random.Random(seed)
    return [
        Case(
            tokens=draw.randint(1, 5),
            heads=draw.randint(1, 128),
            near=draw.choice((draw.randint(0, 130), draw.randint(0, 300))),
            far=draw.choice((None, draw.randint(0, 70), draw.randint(0, 1100))),
            entry=draw.choice(sorted(ENTRIES)),
            pages=(draw.randint(1, 130), draw.randint(1, 130)),
            page_bytes=draw.choice((0, 16, 576)),
            gaps=draw.choice((0.0, 0.1, 0.9)),
            lengths=draw.random() < 0.5,
            mode=draw.choice(("decode", "prefill")),
            splits=draw.choice((0, 0, 0, 3, 9)),
            spread=draw.choice(sorted(SPREADS)),
            sinks=draw.choice(SINKS),
            seed=seed * count + i,
        )
        for i in range(count)
    ]
