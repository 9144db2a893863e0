"""Compare the quantising kernel on a GPU with harness.formats, byte for byte.

Cases vary extents, layouts, spreads of values, given and fitted scales, experts and SwiGLU. Outputs
are filled with 0xAA before, which reveals a byte that is never written, and padding has to be zero.
SwiGLU itself is judged against float64: at most one BF16 step, in few places, because its
exponential is the processor's. Codes are then those of its own values.

Shape letters: M rows, K columns, P = K / 2 bytes, E experts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.formats.codec import value_ulp_distance
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.layouts import LINEAR, to_layout
from degarble.harness.formats.number_formats import NVFP4, NibbleOrder, ScaleDirection
from degarble.harness.formats.quantise import QuantisedTensor, dequantise, quantise
from degarble.kernels.primitives.quantise_problem import LAYOUTS, SWIGLU, VALUES, QuantiseProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import kernel_named
from degarble.suites.kernels.format_checks import difference

if TYPE_CHECKING:
    from torch import Tensor


SETTINGS = CompileSettings()
SPREADS = ("ordinary", "blocks", "tiny", "huge", "ties", "zeros", "special")
SCALES = ("fitting", "small", "large", "one")
LIMIT = 10.0  # DeepSeek-V4 config.json, swiglu_limit
POISON = 0xAA
SHARE_OF_ROUNDED_APART = 2e-3  # numbers whose float32 lies so near a BF16 tie that exp2 decides


@dataclass(frozen=True)
class Case:
    """One launch; everything follows from these facts."""

    problem: QuantiseProblem
    spread: str = "ordinary"
    scale: str = "fitting"
    seed: int = 0

    @property
    def name(self) -> str:
        """One line that finds the case again."""
        p = self.problem
        what = f"{p.source} {p.rows}x{p.columns} {p.layout}"
        what += f" limit={p.limit}" if p.source == SWIGLU.name else ""
        what += " decoded" if p.decoded else ""
        return f"{what} experts={p.experts} {self.spread} {self.scale} seed={self.seed}"

    @cached_property
    def values(self) -> Tensor:
        """Draw what is read, on the CPU."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.problem.rows, self.problem.input_columns)
        x_MK = torch.randn(shape, generator=generator)
        if self.spread == "blocks":
            powers = torch.randint(-12, 4, (shape[0], shape[1] // 16), generator=generator)
            x_MK *= torch.exp2(powers.float()).repeat_interleave(16, -1)
        if self.spread in {"tiny", "huge"}:
            x_MK *= 2.0 ** (-120 if self.spread == "tiny" else 110)
        if self.spread == "ties":
            x_MK = torch.randint(-24, 25, shape, generator=generator) * 0.25
        if self.spread == "zeros":
            x_MK *= x_MK > 1.5
            x_MK[::3] = -0.0
        if self.spread == "special":
            for number in (torch.inf, -torch.inf, torch.nan):
                x_MK[torch.rand(shape, generator=generator) < 0.01] = number
            x_MK[:, :16][::4] = torch.nan  # blocks of nothing else
        return x_MK.bfloat16()

    @cached_property
    def decode_scales(self) -> Tensor:
        """Return float32, one number or one an expert."""
        finite = self.values.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        amax = finite.abs().max() if finite.numel() else torch.tensor(1.0)
        fitting = (amax / 2688).clamp(min=2.0**-120)
        scale = {"fitting": fitting, "small": fitting / 64, "large": fitting * 900}.get(
            self.scale, torch.tensor(1.0)
        )
        share = 1 + torch.arange(max(1, self.problem.experts)) * 0.37
        return (scale * share).float()

    @cached_property
    def offsets(self) -> Tensor | None:
        """Return rows of experts, some empty, ending before the last row."""
        if not self.problem.experts:
            return None
        drawn = random.Random(self.seed)
        last = self.problem.rows - drawn.choice((0, 0, min(3, self.problem.rows)))
        cuts = sorted(drawn.randint(0, last) for _ in range(self.problem.experts - 1))
        return torch.tensor([0, *cuts, last], dtype=torch.int32)


class QuantisedRows(NamedTuple):
    """Requested results: codes, scale bytes in their layout, kept values; or decoded ones."""

    codes: Tensor | None
    scales: Tensor | None
    values: Tensor | None
    decoded: Tensor | None = None


def poisoned(problem: QuantiseProblem, device: str = "cuda") -> dict[str, Tensor | None]:
    """Allocate outputs full of 0xAA."""
    out = kernel_named("simt_quantise_nvfp4").allocate(problem, torch.device(device))
    for tensor in out.values():
        if tensor is not None:
            tensor.view(torch.uint8).fill_(POISON)
    return out


def on_device(case: Case) -> QuantisedRows:
    """Run a case on the GPU; outputs stay there."""
    given = {"values": case.values.cuda(), "decode_scale": case.decode_scales.cuda()}
    if case.offsets is not None:
        given["offsets"] = case.offsets.cuda()
    kernel, out = kernel_named("simt_quantise_nvfp4"), poisoned(case.problem)
    return QuantisedRows(*kernel.run(case.problem, SETTINGS, **given, **out).values())


def by_definition(case: Case, values_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scale storage of these values, on their device."""
    problem, device = case.problem, values_MK.device
    codes_MP = torch.zeros((problem.rows, problem.columns // 2), dtype=torch.uint8, device=device)
    scales_MK = torch.zeros((problem.rows, problem.blocks), dtype=torch.uint8, device=device)
    bounds = [0, problem.rows] if case.offsets is None else case.offsets.tolist()
    for expert, (start, end) in enumerate(pairwise(bounds)):
        if start == end:
            continue
        scale = case.decode_scales[expert].to(device)
        made = quantise(values_MK[start:end], NVFP4, CANONICAL, decode_scale=scale)
        codes_MP[start:end], scales_MK[start:end] = made.codes, made.block_scale
    return codes_MP, to_layout(scales_MK, problem.scale_layout)


def decoded_by_definition(case: Case, values_MK: Tensor) -> Tensor:
    """Return what codes and block scales of these values stand for, in BF16, which is exact."""
    codes_MP, scales = by_definition(case, values_MK)
    tensor = QuantisedTensor(
        codes_MP, scales.reshape(codes_MP.shape[0], -1), torch.ones((), device=codes_MP.device),
        NVFP4, CANONICAL, LINEAR, ScaleDirection.DECODE, NibbleOrder.LOW_EVEN,
        tuple(values_MK.shape),
    )  # fmt: skip
    wide = dequantise(tensor, torch.float32)
    narrow = wide.bfloat16()
    assert torch.equal(narrow.float(), wide), "six significant bits"
    return narrow


def decoded_mismatch(case: Case) -> str:
    """Say how decoded values differ; SwiGLU's own values are those of the form that keeps them."""
    values_MK = case.values.cuda()
    if case.problem.source == SWIGLU.name:
        keeping = replace(case.problem, decoded=False, keeps_values=True)
        kept = on_device(replace(case, problem=keeping)).values
        assert kept is not None, "asked for"
        values_MK = kept
    made = on_device(case).decoded
    assert made is not None, "asked for"
    want = decoded_by_definition(case, values_MK)
    return difference(f"{case.name}, values", made.view(torch.uint8), want.view(torch.uint8))


def mismatch(case: Case) -> str:
    """Say how a case differs from its definition on the GPU; empty where it does not."""
    if case.problem.decoded:
        return decoded_mismatch(case)
    if case.problem.source == SWIGLU.name:
        case = replace(case, problem=replace(case.problem, keeps_values=True))
    out = on_device(case)
    values_MK = case.values.cuda()
    written = case.problem.rows if case.offsets is None else int(case.offsets[-1])
    found = []
    if out.values is not None:
        values_MK = out.values
        if case.problem.source == SWIGLU.name:
            found.append(swiglu_difference(case, values_MK[:written]))
    assert out.codes is not None, "asked for"
    assert out.scales is not None, "asked for"
    codes_MP, scales = by_definition(case, values_MK)
    found.append(difference(f"{case.name}, codes", out.codes[:written], codes_MP[:written]))
    found.append(difference(f"{case.name}, scales", out.scales, scales))
    if written < codes_MP.shape[0]:
        rest = difference(f"{case.name}, rows of nobody", out.codes[written:], codes_MP[written:])
        found.append(rest)
    return "; ".join(filter(None, found))


def swiglu_difference(case: Case, values_MK: Tensor) -> str:
    """Compare what the kernel made of gate and up with float64, rounded once to BF16."""
    rows = values_MK.shape[0]
    gate, up = case.values[:rows].cuda().double().chunk(2, -1)
    if case.problem.limit is not None:
        gate, up = (
            gate.clamp(max=case.problem.limit),
            up.clamp(-case.problem.limit, case.problem.limit),
        )
    want_MK = (torch.nn.functional.silu(gate) * up).bfloat16()
    same = (values_MK == want_MK) | (values_MK.isnan() & want_MK.isnan())
    steps = value_ulp_distance(values_MK[~same].cpu(), want_MK[~same].cpu())
    worst = int(steps.max()) if steps.numel() else 0
    share = float((~same).sum()) / max(1, same.numel())
    if worst <= 1 and share <= SHARE_OF_ROUNDED_APART:
        return ""
    return (
        f"{case.name}, values: {share:.2%} differ (at most {SHARE_OF_ROUNDED_APART:.1%}), "
        f"worst by {worst} steps of BF16 (at most 1)"
    )


def cases() -> list[Case]:
    """Return the named cases: whole tiles, tails, every layout, spread and scale."""
    made = []
    for layout in LAYOUTS:
        for rows, columns in ((1, 16), (7, 48), (130, 528), (256, 1024), (300, 7168)):
            for spread in SPREADS:
                problem = QuantiseProblem(rows, columns, layout)
                made.append(Case(problem, spread, "fitting", rows + columns))
        made += [Case(QuantiseProblem(129, 512, layout), "blocks", scale) for scale in SCALES]
        made += [
            Case(QuantiseProblem(129, 512, layout, experts=experts), "blocks", seed=experts)
            for experts in (1, 5, 384)
        ]
        for limit in (LIMIT, None):
            problem = QuantiseProblem(70, 3072, layout, SWIGLU.name, limit=limit)
            made += [Case(problem, spread, "one") for spread in ("ordinary", "blocks", "zeros")]
    made.append(Case(QuantiseProblem(8192, 7168), "blocks"))
    for rows, columns in ((1, 16), (1, 7168), (16, 4096), (130, 528)):
        problem = QuantiseProblem(rows, columns, LINEAR.name, decoded=True)
        made += [Case(problem, spread, "fitting", rows + columns) for spread in SPREADS[:-1]]
        made += [Case(problem, "blocks", scale) for scale in SCALES]
    for limit in (LIMIT, None):
        problem = QuantiseProblem(16, 2048, LINEAR.name, SWIGLU.name, limit=limit, decoded=True)
        made += [Case(problem, spread, "one") for spread in ("ordinary", "blocks", "zeros")]
    return made


def fuzzed(seed: int, count: int) -> list[Case]:
    """Draw cases."""
    drawn = random.Random(seed)
    made = []
    for _ in range(count):
        source = drawn.choice((VALUES, VALUES, VALUES, SWIGLU)).name
        problem = QuantiseProblem(
            rows=drawn.choice((drawn.randint(1, 20), drawn.randint(1, 600))),
            columns=16 * drawn.choice((drawn.randint(1, 9), drawn.randint(1, 200))),
            layout=drawn.choice(tuple(LAYOUTS)),
            source=source,
            experts=drawn.choice((0, 0, 0, drawn.randint(1, 40))),
            limit=LIMIT if source == SWIGLU.name else None,
        )
        if drawn.random() < 0.2:
            decoded = {"layout": LINEAR.name, "experts": 0, "decoded": True}
            problem = replace(problem, **decoded)  # type: ignore[arg-type]
        spread = drawn.choice(SPREADS[:-3] if source == SWIGLU.name else SPREADS)
        made.append(Case(problem, spread, drawn.choice(SCALES), drawn.randrange(1 << 30)))
    return made
