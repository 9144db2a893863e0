"""Compare the parts of mHC on a GPU with the references in float64, and with their stated order.

Cases vary tokens, widths, sizes of logits, and NaN. What has no exponential (collapse, post) has to
be equal to the stated order bit for bit. Gates and mixes may be 4e-6 off: logits of these cases
stay below 32, where float32 has steps of 2**-19, and are rounded twice; a gate passes on a quarter
of that, a mix not more than all. A collapsed value is rounded to BF16 once on top of what its gates
are off.

Shape letters: T tokens, S streams, D width, N coefficients.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from degarble.kernels.rows import mhc_problem as facts
from degarble.kernels.rows.mhc_problem import STREAMS, MhcMixProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import kernel_named
from degarble.references import mixing
from degarble.references.numerics import Numerics
from degarble.suites.kernels import latent_checks as plain
from degarble.suites.kernels.format_checks import difference

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = CompileSettings()
BUDGET = 4e-6
LENGTHS = (1, 3, 4, 5, 127, 128, 129, 257)  # threads of a thread block, and their neighbours
ON_CPU = facts.MhcMixPrimitives(torch.exp, torch.reciprocal, torch.rsqrt)


@dataclass(frozen=True)
class Case:
    """One token batch; `problem.part` says what is done with it."""

    problem: MhcMixProblem
    spread: str = "ordinary"
    sharpness: float = 1.0
    seed: int = 0

    @property
    def name(self) -> str:
        """One line that finds the case again."""
        p = self.problem
        return f"{p.part} {p.tokens}x{p.width} {self.spread} x{self.sharpness} seed={self.seed}"

    def numbers(self, offset: int, *shape: int) -> Tensor:
        """Draw float32 numbers."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.seed + offset))

    @property
    def rows(self) -> int:
        """Rows of the projection."""
        return STREAMS if self.problem.part == "head" else facts.COEFFICIENTS

    @cached_property
    def streams(self) -> Tensor:
        """Draw BF16 streams [T, S, D]."""
        shape = (self.problem.tokens, STREAMS, self.problem.width)
        return plain.drawn(self.spread, shape, self.seed)

    @cached_property
    def layer(self) -> Tensor:
        """Draw a sublayer's output [T, D]."""
        return plain.drawn("ordinary", (self.problem.tokens, self.problem.width), self.seed + 1)

    @cached_property
    def weights(self) -> mixing.MixingWeights:
        """Draw the projection so that logits are of the order of the sharpness."""
        flat = STREAMS * self.problem.width
        scales = 1 if self.problem.part == "head" else 3
        return mixing.MixingWeights(
            fn=self.numbers(2, self.rows, flat) * flat**-0.5,
            base=self.numbers(3, self.rows) / 2,
            scale=self.sharpness * (1 + self.numbers(4, scales).abs() / 4),
        )

    @cached_property
    def projected(self) -> tuple[Tensor, Tensor]:
        """Return products [T, N] and sums of squares [T], rounded to float32 once."""
        flat = self.streams.flatten(1).double()
        return (flat @ self.weights.fn.double().T).float(), flat.square().sum(-1).float()

    @cached_property
    def coefficients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Draw pre, post and mix as the parts read them."""
        tokens = self.problem.tokens
        return (
            self.numbers(5, tokens, STREAMS).sigmoid(),
            2 * self.numbers(6, tokens, STREAMS).sigmoid(),
            mixing.sinkhorn(self.numbers(7, tokens, STREAMS, STREAMS), 20, 1e-6),
        )

    @cached_property
    def mixing_facts(self) -> mixing.MixingFacts:
        """The problem as the references are told it."""
        p = self.problem
        return mixing.MixingFacts(STREAMS, p.iterations, p.epsilon, p.norm_epsilon)


def given(case: Case) -> dict[str, Tensor]:
    """Return the inputs of a part by name, on the CPU."""
    pre, post, mix = case.coefficients
    weights = case.weights
    known = {
        "streams": case.streams,
        "products": case.projected[0],
        "squares": case.projected[1],
        "base": weights.base,
        "scale": weights.scale,
        "pre": pre,
        "post": post,
        "mix": mix,
        "layer": case.layer,
    }
    projected = ("products", "squares", "base", "scale")
    names = {
        "all": ("streams", *projected),
        "coefficients": projected,
        "collapse": ("streams", "pre"),
        "head": ("streams", *projected),
        "post": ("streams", "post", "mix", "layer"),
    }[case.problem.part]
    return {name: known[name] for name in names}


def on_device(case: Case) -> dict[str, Tensor]:
    """Run a part on the GPU; what it wrote comes back by name."""
    kernel = kernel_named("simt_mhc")
    inputs = {name: tensor.cuda() for name, tensor in given(case).items()}
    made = kernel.allocate(case.problem, torch.device("cuda"))
    outputs = {name: each.fill_(7.0) for name, each in made.items() if each is not None}
    kernel.run(case.problem, SETTINGS, **inputs, **outputs)
    return {name: tensor.cpu() for name, tensor in outputs.items()}


def by_stated_order(case: Case, primitives: facts.MhcMixPrimitives = ON_CPU) -> dict[str, Tensor]:
    """Return what a part gives in the order of mhc_problem, on the CPU."""
    p, inputs = case.problem, given(case)
    if p.part == "collapse":
        return {"out": _collapsed(case, list(inputs["pre"].unbind(-1)))}
    if p.part == "post":
        return {"out": _spread_out(case, inputs)}
    share = 1.0 / (STREAMS * p.width)
    factor = facts.norm_factor(inputs["squares"], share, p.norm_epsilon, primitives)
    scale = inputs["scale"].tolist()
    logits = [
        facts.logit(product, factor, scale[min(row // STREAMS, 2)], float(inputs["base"][row]))
        for row, product in enumerate(inputs["products"].unbind(-1))
    ]
    pre = [facts.gate(number, primitives) + p.epsilon for number in logits[:STREAMS]]
    if p.part == "head":
        return {"out": _collapsed(case, pre)}
    post = [2 * facts.gate(number, primitives) for number in logits[STREAMS : 2 * STREAMS]]
    mix = facts.sinkhorn(logits[2 * STREAMS :], p.iterations, p.epsilon, primitives)
    made = {"post": torch.stack(post, -1)}
    made["mix"] = torch.stack([torch.stack(row, -1) for row in mix], 1)
    rest = {"pre": torch.stack(pre, -1)} if p.part == "coefficients" else {}
    return made | (rest or {"out": _collapsed(case, pre)})


def _collapsed(case: Case, gates: list[Tensor]) -> Tensor:
    numbers = list(case.streams.float().unbind(1))
    made = facts.weighted([gate[:, None] for gate in gates], numbers)
    return plain.with_the_machines_nan(made.bfloat16())


def _spread_out(case: Case, inputs: dict[str, Tensor]) -> Tensor:
    numbers = [*case.streams.float().unbind(1), case.layer.float()]
    made = []
    for stream in range(STREAMS):
        weights = [*inputs["mix"][:, :, stream].unbind(1), inputs["post"][:, stream]]
        made.append(facts.weighted([weight[:, None] for weight in weights], numbers))
    return plain.with_the_machines_nan(torch.stack(made, 1).bfloat16())


def by_references(case: Case) -> dict[str, Tensor]:
    """Return what the references make of a part in float64, and what bounds a collapsed value."""
    numerics, inputs, p = Numerics.definition(), given(case), case.problem
    x_TSD = case.streams.double()
    if p.part == "post":
        mix, post = inputs["mix"].double(), inputs["post"].double()
        return {"out": mixing.mixing_post(case.layer.double(), x_TSD, post, mix, numerics)}
    if p.part == "collapse":
        return {"out": torch.einsum("ts,tsd->td", inputs["pre"].double(), x_TSD)}
    if p.part == "head":
        return {"out": mixing.collapse(x_TSD, case.weights, case.mixing_facts, numerics)}
    out, post, mix = mixing.mixing_pre_definition(x_TSD, case.weights, case.mixing_facts, numerics)
    return {"out": out, "post": post, "mix": mix}


def far_from_references(case: Case, got: dict[str, Tensor]) -> str:
    """Say what is beyond its budget; empty where nothing is."""
    want = by_references(case)
    found = []
    for name in sorted(want.keys() & got.keys()):
        apart = (got[name].double() - want[name]).abs()
        allowed: Any = BUDGET
        if name == "out":
            sums = 2 * case.streams.double().abs().sum(1)
            if got[name].ndim == 3:
                sums = (sums + 2 * case.layer.double().abs())[:, None]
            allowed = half_step(want[name]) + BUDGET * sums
        worst = float((apart / allowed).max()) if apart.numel() else 0.0
        if not worst <= 1:
            found.append(f"{case.name}, {name}: {worst:.2f} of its budget")
    return "; ".join(found)


def half_step(x: Tensor) -> Tensor:
    """Return half a step of BF16 at each value, what one rounding may cost."""
    return torch.exp2(torch.floor(torch.log2(x.abs().clamp(min=2.0**-126))) - 8) * 1.001


def mismatch(case: Case) -> str:
    """Say how a part on the GPU differs from what it has to give; empty where it does not."""
    got = on_device(case)
    if case.problem.part in {"collapse", "post"}:
        want = by_stated_order(case)["out"]
        return difference(case.name, plain.bits(got["out"]), plain.bits(want))
    return far_from_references(case, got)


def fusion_mismatch(case: Case) -> str:
    """Say how the fused form differs from its parts in turn; empty where it does not."""
    fused = on_device(case)
    parts = on_device(replace(case, problem=replace(case.problem, part="coefficients")))
    collapse = replace(case, problem=replace(case.problem, part="collapse"))
    collapse.__dict__["coefficients"] = (parts["pre"], parts["post"], parts["mix"])
    parts["out"] = on_device(collapse)["out"]
    found = []
    for name, tensor in fused.items():
        words = torch.int16 if tensor.dtype is torch.bfloat16 else torch.int32
        got, want = (each.view(words).to(torch.int64) for each in (tensor, parts[name]))
        found.append(difference(f"{case.name}, {name}", got, want))
    return "; ".join(filter(None, found))


def cases() -> list[Case]:
    """Return the named cases: every part, lengths, widths of models, sharpness."""
    made = []
    for part in facts.MIX_PARTS:
        made += [Case(MhcMixProblem(tokens, 1032, part), seed=tokens) for tokens in LENGTHS]
        made += [Case(MhcMixProblem(33, width, part), seed=width) for width in (8, 4096, 7168)]
        made += [Case(MhcMixProblem(130, 64, part), sharpness=size) for size in (0.01, 5.0)]
        made.append(Case(MhcMixProblem(130, 64, part, iterations=1), sharpness=3.0))
    many = facts.MOST_WITH_FOUR + 77  # two lanes each
    for part in ("all", "coefficients"):
        made += [Case(MhcMixProblem(many, 8, part), sharpness=size) for size in (1.0, 5.0)]
    for part in ("collapse", "post"):
        made += [Case(MhcMixProblem(21, 512, part), spread) for spread in plain.SPREADS[1:]]
    return made


def fuzzed(seed: int, count: int) -> list[Case]:
    """Draw cases."""
    drawn = random.Random(seed)
    made = []
    for _ in range(count):
        problem = MhcMixProblem(
            drawn.choice((drawn.randint(1, 9), drawn.randint(1, 300))),
            8 * drawn.choice((drawn.randint(1, 40), drawn.randint(1, 260))),
            drawn.choice(facts.MIX_PARTS),
            iterations=drawn.choice((20, 20, 1, 2)),
        )
        size = drawn.choice((0.1, 1.0, 4.0))
        made.append(Case(problem, sharpness=size, seed=drawn.randrange(1 << 30)))
    return made
