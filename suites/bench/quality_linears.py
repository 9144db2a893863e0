"""How near NVFP4 linears and experts come to BF16: by our kernels, and by the twin.

Inputs are what the small trained model (outlier channels included) passes to its linears, shared
expert and experts, and layers of V4-Pro's shapes with outlier channels, heavy tails and matrices
whose rows differ in size. `Reference` multiplies BF16 values in float64 and rounds every output to
BF16. `Twin` does the same with weights and activations in canonical NVFP4: its cosine is the
ceiling of an input, which kernels have to reach to within 1e-5. `Stack` is our kernels, with the
same codes of weights and the same scales. Scales of activations are calibrated on the inputs.
Shape letters: T tokens, K chosen, D hidden, F width, N outputs, E experts
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.layouts import SWIZZLE_128X4
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.harness.generate.generate import GenerationOptions, TextGenerator
from degarble.harness.inference.generation import Limits
from degarble.harness.inference.model import open_model
from degarble.kernels.gemm.problem import GemmProblem
from degarble.kernels.moe.problem import MoeProblem
from degarble.kernels.primitives.quantise_problem import QuantiseProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import kernel_named
from degarble.references import elementary, tiny
from degarble.references.tiny import language
from degarble.suites.bench.runner import Bench, Part, Table, Target

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.formats.quantise import QuantisedTensor

_LARGEST = 6.0 * 448.0  # of a code times a block scale


class Expert(NamedTuple):
    """An expert's matrices in BF16."""

    w1: Tensor  # [F, D]
    w3: Tensor
    w2: Tensor  # [D, F]


@dataclass(frozen=True, eq=False)
class Layer:
    """One input of one component: a linear has one matrix, experts have routing."""

    name: str
    kind: str  # linear, shared expert, experts
    x: Tensor  # [T, D]
    matrix: Tensor | None = None
    experts: tuple[Expert, ...] = ()
    chosen: Tensor | None = None  # [T, K]
    weights: Tensor | None = None  # [T, K]
    limit: float | None = None


def bf16(x: Tensor) -> Tensor:
    """Round once to BF16, and go on in float64."""
    return x.to(torch.bfloat16).double()


def decode_scale(x: Tensor) -> Tensor:
    """The tensor scale by which the largest number is the largest code."""
    return (x.float().abs().amax() / _LARGEST).clamp(min=2.0**-60)


def coded(x: Tensor, scale: Tensor) -> QuantisedTensor:
    """Canonical NVFP4 codes."""
    return quantise(x.float(), NVFP4, CANONICAL, decode_scale=scale)


class Reference:
    """BF16 weights and activations, exact sums."""

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x W^T, rounded once."""
        return bf16(x.double() @ weight.double().T)

    def hidden(self, x: Tensor, expert: Expert, limit: float | None) -> Tensor:
        """What w2 multiplies."""
        gate, up = (self.product(x, tensor) for tensor in (expert.w1, expert.w3))
        return bf16(elementary.swiglu(gate, up, limit))

    def expert(self, x: Tensor, expert: Expert, limit: float | None) -> Tensor:
        """One expert."""
        return self.product(self.hidden(x, expert, limit), expert.w2)

    def through(self, layer: Layer) -> Tensor:
        """The component's output, float64 [T, .]."""
        if layer.matrix is not None:
            return self.product(layer.x, layer.matrix)
        if layer.chosen is None or layer.weights is None:
            return self.expert(layer.x, layer.experts[0], layer.limit)
        out = torch.zeros_like(layer.x, dtype=torch.float64)
        for number, expert in enumerate(layer.experts):
            token, slot = (layer.chosen == number).nonzero(as_tuple=True)
            if len(token):
                made = self.expert(layer.x[token], expert, layer.limit)
                out.index_add_(0, token, made * layer.weights[token, slot, None].double())
        return out


class Twin(Reference):
    """NVFP4 on both sides, exact sums."""

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x W^T of what NVFP4 makes of both, rounded once."""
        values = (
            dequantise(coded(tensor, decode_scale(tensor)), torch.float64) for tensor in (x, weight)
        )
        a, b = values
        return bf16(a @ b.T)


def expert_rows(layer: Layer, number: int) -> Tensor:
    """The tokens that visit an expert; all of them visit a shared one."""
    if layer.chosen is None:
        return layer.x
    return layer.x[(layer.chosen == number).any(1)]


def calibrated(layer: Layer, number: int) -> tuple[Tensor, Tensor]:
    """The scales in front of w13 and of w2 of one expert, as the twin has them."""
    twin, rows = Twin(), expert_rows(layer, number)
    if not len(rows):
        return (torch.ones((), device=rows.device),) * 2
    hidden = twin.hidden(rows, layer.experts[number], layer.limit)
    return decode_scale(rows), decode_scale(hidden)


class Stack:
    """Our kernels."""

    settings = CompileSettings()

    def through(self, layer: Layer) -> Tensor:
        """The component's output, float64 [T, .]."""
        if layer.matrix is not None:
            return self.linear(layer.x, layer.matrix).double()
        stacked = import_module("degarble.kernels.moe.entry").stacked
        scales = [calibrated(layer, number) for number in range(len(layer.experts))]
        of_first, of_second = (torch.stack(each) for each in zip(*scales, strict=True))
        w13 = [[_in_128x4(expert.w1), _in_128x4(expert.w3)] for expert in layer.experts]
        w2 = [[_in_128x4(expert.w2)] for expert in layer.experts]
        given = stacked("w13", w13, of_first) | stacked("w2", w2, of_second)
        chosen, weights, name = layer.chosen, layer.weights, "sm90_moe_nvfp4"
        if chosen is None or weights is None:
            weights, name = torch.ones(len(layer.x), 1, device=layer.x.device), "sm90_shared_expert"
            chosen = torch.zeros_like(weights)
        given |= {"experts": chosen.int(), "weights": weights.float()}
        made = kernel_named(name).run(problem_of(layer), self.settings, x=layer.x, **given)
        out: Tensor = made["out"].double()
        return out

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Quantise and multiply."""
        gemm: Any = import_module("degarble.kernels.gemm.sm90_gemm_nvfp4")
        quantiser = import_module("degarble.kernels.quantise.simt_quantise_nvfp4").KERNEL
        scale, of = decode_scale(x).reshape(1), QuantiseProblem(*x.shape)
        made = quantiser.run(of, self.settings, values=x, decode_scale=scale)
        codes, scales = made["codes"], made["scales"]
        b = _in_128x4(weight)
        columns, inner = weight.shape
        problem = GemmProblem(x.shape[0], columns, inner, "nvfp4", "e4m3")
        out: Tensor = gemm.KERNEL.run_one(
            problem, self.settings, a=codes, a_scales=scales, a_decode_scale=scale,
            b=b.codes, b_scales=b.block_scale, b_decode_scale=b.decode_scale.reshape(1).float(),
        )  # fmt: skip
        return out


def problem_of(layer: Layer) -> MoeProblem:
    """Return the problem of experts; a shared expert is one that every token visits."""
    (width, hidden), count = layer.experts[0].w1.shape, len(layer.experts)
    chosen = 1 if layer.chosen is None else layer.chosen.shape[1]
    return MoeProblem(len(layer.x), hidden, width, count, chosen, count, layer.limit)


def _in_128x4(weight: Tensor) -> QuantisedTensor:
    """A weight's codes as kernels read them."""
    made = coded(weight, decode_scale(weight)).with_layout(SWIZZLE_128X4)
    there = weight.device
    return replace(made, codes=made.codes.to(there), block_scale=made.block_scale.to(there))


# ---- inputs ------------------------------------------------------------------------------------

ALLOWED = 1e-5
EARLIER = {"linear": 0.994, "experts": 0.988, "shared expert": 0.990}  # as its authors wrote
TINY = Path(tiny.__file__).parent / "v1" / "v4"
LINEARS = ("attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_b")
WIDE = {"wq_a": (1536, 7168), "wq_b": (8192, 1536), "wo_b": (7168, 16384)}  # of V4-Pro
HIDDEN, WIDTH, EXPERTS, CHOSEN, LIMIT = 7168, 3072, 16, 6, 10.0


def cosine(a: Tensor, b: Tensor) -> float:
    """Of all numbers at once, in float64; 1 for equal ones."""
    one, two = a.double().flatten().cpu(), b.double().flatten().cpu()
    return 1.0 if torch.equal(one, two) else float(one @ two / (one.norm() * two.norm()))


# ---- inputs of the small model -------------------------------------------------------------------


def captured(tokens: int, device: str) -> list[Layer]:
    """What the small trained model hands to its second block's linears and experts."""
    seen: dict[str, Mapping[str, Tensor]] = {}

    def look(component: str, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        del outputs
        seen.setdefault(component, {name: tensor.clone() for name, tensor in inputs.items()})

    drawn = torch.randint(
        len(language.SPECIALS), language.SIZE, (tokens,), generator=_seeded("cpu", 5)
    )
    known = {number: word for word, number in language.IDS.items()}
    with open_model(TINY) as opened, torch.inference_mode():
        bound = opened.logits_model.bound
        bound.observer = look
        TextGenerator(opened, GenerationOptions(limits=Limits(1))).speak(
            [" ".join(known[int(n)] for n in drawn)]
        )
        layers = list(_of_block(bound, seen, "layers.2."))
    return [_there(layer, device) for layer in layers]


def _of_block(bound: Any, seen: Mapping[str, Mapping[str, Tensor]], prefix: str) -> Iterator[Layer]:
    def weight(name: str) -> Tensor:
        values: Tensor = bound.weights[prefix + name].values(torch.bfloat16)
        return values

    def expert(name: str) -> Expert:
        return Expert(*(weight(f"ffn.{name}.{part}") for part in ("w1", "w3", "w2")))

    for name in LINEARS:
        x = seen[prefix + name]["x"].to(torch.bfloat16)
        yield Layer(f"tiny {name.partition('.')[2]}", "linear", x, weight(name))
    config, experts = bound.config, seen[f"{prefix}ffn.experts.w13"]
    x, limit = experts["x"].to(torch.bfloat16), config.swiglu_limit
    yield Layer("tiny", "shared expert", x, experts=(expert("shared_experts"),), limit=limit)
    weights = seen[f"{prefix}ffn.experts.act_quant"]["weights"]
    every = tuple(expert(f"experts.{number}") for number in range(config.n_routed_experts))
    yield Layer("tiny", "experts", x, None, every, experts["experts"], weights, limit)


def _there(layer: Layer, device: str) -> Layer:
    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.clone().to(device)
        if isinstance(value, tuple):
            return (
                type(value)(*map(moved, value))
                if hasattr(value, "_fields")
                else tuple(map(moved, value))
            )
        return value

    return Layer(**{name: moved(value) for name, value in vars(layer).items()})


# ---- inputs of V4-Pro's shapes -------------------------------------------------------------------


def _seeded(device: str, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def activations(tokens: int, width: int, generator: torch.Generator) -> Tensor:
    """Draw what a norm puts out: channels of unequal size, a hundredth 8 to 32 times larger."""
    device = generator.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    size = torch.exp(0.4 * normal(width))
    outlier = torch.rand(width, generator=generator, device=device) < 0.01
    exponent = 3 + 2 * torch.rand(width, generator=generator, device=device)
    size = torch.where(outlier, torch.exp2(exponent), size)
    heavy = normal(tokens, width) / (0.3 + 0.7 * normal(tokens, width).abs())
    return (normal(tokens, width) * size + 0.2 * heavy).bfloat16()


def matrix(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Draw a matrix whose rows differ in size, with a few large numbers."""
    shape, device = (rows, columns), generator.device
    made = torch.randn(shape, generator=generator, device=device)
    made *= 1 + 4 * (torch.rand(shape, generator=generator, device=device) < 1e-3)
    size = torch.exp(0.3 * torch.randn(rows, 1, generator=generator, device=device))
    scaled: Tensor = made * size * columns**-0.5
    return scaled.bfloat16()


def drawn_layers(tokens: int, device: str, scale: int = 1) -> Iterator[Layer]:
    """Layers of V4-Pro's shapes, or of that part of them; 16 of the 384 experts."""
    generator = _seeded(device, 20261122)
    hidden, width = HIDDEN // scale, WIDTH // scale
    for name, extents in WIDE.items():
        rows, columns = (extent // scale for extent in extents)
        x = activations(tokens, columns, generator)
        yield Layer(f"V4-Pro {name}", "linear", x, matrix(rows, columns, generator))
    x = activations(tokens, hidden, generator)
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    every = tuple(Expert(*(matrix(*shape, generator) for shape in shapes)) for _ in range(EXPERTS))
    yield Layer("V4-Pro", "shared expert", x, experts=every[:1], limit=LIMIT)
    score = torch.rand(tokens, EXPERTS, generator=generator, device=device)
    weights, chosen = score.topk(CHOSEN)
    weights = 2.5 * weights / weights.sum(1, keepdim=True)
    yield Layer("V4-Pro", "experts", x, None, every, chosen, weights, LIMIT)


# ---- the table -----------------------------------------------------------------------------------


def judged(layers: Iterable[Layer], ours: Reference | Stack) -> tuple[Table, list[Target]]:
    """Compare a way of computing with BF16 and with the twin, whose cosine is the most there is."""
    rows, targets = [], []
    for layer in layers:
        reference = Reference().through(layer)
        twin, got = (cosine(way.through(layer), reference) for way in (Twin(), ours))
        rows.append((
            layer.name, layer.kind, f"{twin:.6f}", f"{got:.6f}", f"{got - twin:+.1e}",
            f"{EARLIER[layer.kind]:.3f}",
        ))  # fmt: skip
        claim = f"{layer.name}, {layer.kind}: kernels less the twin"
        targets.append(Target(claim, got - twin, -ALLOWED))
    header = ("input", "component", "twin", "kernels", "kernels - twin", "earlier stack")
    return Table("Cosines with BF16", header, tuple(rows)), targets


def cosines(options: Any) -> Iterator[Part]:
    """Layers of the small trained model, and of V4-Pro's shapes; the ceilings alone on a CPU."""
    ours: Reference | Stack = Twin() if options.ceilings else Stack()
    device = "cpu" if options.ceilings else "cuda"
    layers = chain(captured(options.tokens, device), drawn_layers(options.tokens, device))
    table, targets = judged(layers, ours)
    yield table
    if not options.ceilings:
        yield from targets


BENCHES = {
    "cosines": Bench(
        "cosines of the NVFP4 linears and experts with BF16, beside the twin's", cosines,
        needs=lambda options: "" if options.ceilings else "gpu",
        options={"tokens": 64, "ceilings": False},
    ),
}  # fmt: skip
