"""Runs of tiny transformers models whose linears and experts multiply quantised operands.

The candidate is transformers' own model with decoded weights. Its linears get another forward pass,
written here with torch alone, that rounds what they are given as some engine does.
"""

from __future__ import annotations

from dataclasses import replace
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import linear

from degarble.harness.engine.localise.localise import localise
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.number_formats import BLOCK_FORMATS
from degarble.harness.formats.quantise import quantise
from degarble.harness.formats.weight import Weight
from degarble.harness.model.recipes import Recipe, Rule
from degarble.references.numerics import Numerics
from degarble.references.traced.family import TracedModel, logical_name
from degarble.suites.references.traced.traced_models import built, config_of, weights_of
from degarble.suites.support.traced_runs import prompt, recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from degarble.harness.capture.recorder import MemoryRun
    from degarble.harness.engine.localise.localise import Localised

    Rounds = Callable[[Tensor, "Inputs", Tensor | None], Tensor]

LAYERS = 2  # more where a single wrong one must not be half of them
E4M3 = torch.float8_e4m3fn
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


class Inputs(NamedTuple):
    """A way to quantise inputs: formats of weight and input, and whether a scale is stored."""

    weight: str
    activation: str
    static: bool = False


INPUTS = {
    "FP8 token": Inputs("FP8_ROW", "FP8_ROW"),
    "FP8 tensor": Inputs("FP8_TENSOR", "FP8_ROW", static=True),
    "FP8 block": Inputs("FP8_128X128_F32", "FP8_1X128_F32"),
    "INT8 token": Inputs("INT8_ROW", "INT8_ROW"),
    "INT8 tensor": Inputs("INT8_ROW", "INT8_ROW", static=True),
    "MXFP8": Inputs("MXFP8", "MXFP8"),
    "NVFP4": Inputs("NVFP4", "NVFP4", static=True),
}


# --------------------------------------------------------------------------------------------------
# Emulators. Each returns the numbers that codes stand for, in float32.


def rounded_e2m1(x: Tensor) -> Tensor:
    """Round to the nearest of E2M1's values, ties to even."""
    size = x.abs().clamp(max=6.0)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign(torch.round(size / step) * step, x)


def emulated(x: Tensor, way: Inputs, scale: Tensor | None) -> Tensor:
    """Quantise an input, and decode it, in float32."""
    wide, block = x.float(), BLOCK_FORMATS[way.activation].block[1]
    parts = wide.unflatten(-1, (-1, block or wide.shape[-1]))
    amax = parts.abs().amax(-1, keepdim=True)
    if way.activation == "NVFP4":
        assert scale is not None
        blocks = (amax / 6 / scale).clamp(max=448).to(E4M3).float()
        step = blocks * scale
        made = rounded_e2m1(parts / torch.where(step > 0, step, 1.0)) * step
    elif way.activation == "MXFP8":
        step = torch.exp2(torch.ceil(torch.log2(amax / 448)))
        made = (parts / step).clamp(-448, 448).to(E4M3).float() * step
    elif way.activation == "INT8_ROW":
        step = amax / 127 if scale is None else scale
        made = torch.round(parts / step).clamp(-128, 127) * step
    else:
        step = amax.clamp(min=1e-12) / 448 if scale is None else scale
        made = (parts / step).clamp(-448, 448).to(E4M3).float() * step
    flat: Tensor = made.flatten(-2)
    return flat


def stepwise(x: Tensor, way: Inputs, scale: Tensor | None) -> Tensor:
    """Do the same as compressed-tensors does, every step in the dtype of the input."""
    block = BLOCK_FORMATS[way.activation].block[1]
    parts = x.unflatten(-1, (-1, block or x.shape[-1]))
    amax = parts.abs().amax(-1, keepdim=True)
    if way.activation == "INT8_ROW":
        step = amax / 127.5 if scale is None else scale.to(x.dtype)
        whole: Tensor = torch.round(parts / step).clamp(-128, 127) * step
        return whole.flatten(-2)
    step = amax / 448 if scale is None else scale.to(x.dtype)
    made: Tensor = (parts / step).clamp(-448, 448).to(E4M3).to(x.dtype) * step
    return made.flatten(-2)


# --------------------------------------------------------------------------------------------------


def rounded_up(x: Tensor, way: Inputs, scale: Tensor | None) -> Tensor:
    """Quantise an input by a power of two for every 128 columns, as DeepGEMM's callers do."""
    del way, scale
    parts = x.float().unflatten(-1, (-1, 128))
    step = torch.exp2(torch.ceil(torch.log2(parts.abs().amax(-1, keepdim=True) / 448)))
    made: Tensor = ((parts / step).to(E4M3).float() * step).flatten(-2)
    return made


def quantised_again(w: Tensor) -> Tensor:
    """Quantise a weight by a power of two for every 128 x 128, where DeepGEMM takes its shape."""
    if len(w) % 64:
        return w
    bands = []
    for band in w.float().split(128):
        parts = band.unflatten(1, (-1, 128))
        step = torch.exp2(torch.ceil(torch.log2(parts.abs().amax((0, 2), keepdim=True) / 448)))
        bands.append(((parts / step).to(E4M3).float() * step).flatten(1))
    return torch.cat(bands)


def short_sums(x: Tensor, w: Tensor, stage: int, step: int = 32) -> Tensor:
    """Return x w^T of numbers of FP8, in float64: each step's terms are cut, then its sum.

    A term keeps 13 bits below the largest exponent of its step, a sum its 13 leading fraction bits.
    """

    def cut(value: Tensor, exponent: Tensor) -> Tensor:
        unit = torch.exp2(exponent - 13)
        return torch.trunc(value / unit) * unit

    def exponents(value: Tensor) -> Tensor:
        # Subnormal numbers have the least exponent of a normal one.
        return torch.where(value == 0, -99.0, (torch.frexp(value).exponent - 1).clamp(min=-6))

    out = torch.zeros(len(x), len(w), dtype=torch.float64)
    total = torch.zeros_like(out)
    for begin in range(0, x.shape[1], step):
        if begin % stage == 0:
            out, total = out + total, torch.zeros_like(total)
        a, b = x[:, None, begin : begin + step].double(), w[None, :, begin : begin + step].double()
        nominal = exponents(a) + exponents(b)
        own = torch.where(total == 0, -99.0, torch.frexp(total).exponent - 1.0)
        largest = torch.maximum(nominal.amax(-1), own)
        sums = cut(a * b, largest[..., None]).sum(-1) + cut(total, largest)
        total = cut(sums, torch.frexp(sums).exponent - 1.0)
    return out + total


class Emulation(NamedTuple):
    """What an engine does: its rounding of inputs, and whether operands become BF16.

    `stage` is the extent of K after which a tensor core's short sums are added to float32; `fused`
    experts store their activation and the sum over experts alone. `again`: weights are quantised
    once more. `ranks` share what attention returns and the width of each expert, and quantise their
    own parts of a token.
    """

    rounds: Rounds | None = emulated
    decoded: bool = True
    stage: int | None = None
    fused: bool = False
    again: bool = False
    ranks: int = 1


EXACT = Emulation(decoded=False)
DECODED = Emulation()
PLAIN = Emulation(rounds=None)
STEPWISE = Emulation(stepwise)
FUSED = Emulation(decoded=False, fused=True)
SHORT = Emulation(decoded=False, stage=1 << 20)
DEEPGEMM = Emulation(rounded_up, decoded=False, again=True)
STAGED = Emulation(decoded=False, stage=128)


def _scales(x: Tensor, way: Inputs) -> Tensor | None:
    """Calibrate a stored input scale."""
    if not way.static:
        return None
    largest = {"NVFP4": 6.0 * 448, "INT8_ROW": 127.0}.get(way.activation, 448.0)
    return (x.float().abs().amax() / largest).reshape(())


class QuantisedRun:
    """A model, its quantised weights, and an emulated engine that runs it."""

    def __init__(
        self,
        name: str,
        way: Inputs,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        self.way, self.dtype = way, dtype
        settings = {"num_hidden_layers": LAYERS, **settings}
        self.model: Any = built(name, dtype, seed=seed, **settings)
        self.config: Any = config_of(name, dtype, **settings)
        self.ids = prompt(self.config)
        self.weights = weights_of(self.model)
        self.scales: dict[str, Tensor | None] = {}
        self.rules: list[Rule] = []
        self._calibrate()

    def _calibrate(self) -> None:
        """Quantise every linear of the layers."""
        seen: dict[str, Tensor] = {}
        hooks = [
            module.register_forward_pre_hook(
                lambda _m, given, path=path: seen.__setitem__(path, given[0])
            )
            for path, module in self.linears()
        ]
        with torch.no_grad():
            self.model(input_ids=self.ids)
        for hook in hooks:
            hook.remove()
        fmt = BLOCK_FORMATS[self.way.weight]
        for path, module in self.experts():
            for part in ("gate_up_proj", "down_proj"):
                weight = getattr(module, part).detach().float()
                count = len(weight)
                # Every expert has a scale of its own, as if other tokens had come to each.
                own = None if self.way.static is False else 0.004 + 0.001 * torch.arange(count)
                own = own / 8 if own is not None and self.way.activation == "NVFP4" else own
                self.scales[f"{path}.{part}"] = own
                name = logical_name(f"{path}.{part}")
                self.weights[name] = Weight.of(quantise(weight, fmt, CANONICAL), own)
                self.rules.append(Rule(name, self.way.weight, self.way.activation))
        for path, module in self.linears():
            self.scales[path] = _scales(seen[path], self.way)
            made = quantise(module.weight.detach().float(), fmt, CANONICAL)
            name = logical_name(f"{path}.weight")
            self.weights[name] = Weight.of(made, self.scales[path])
            self.rules.append(Rule(name, self.way.weight, self.way.activation))

    def linears(self) -> list[tuple[str, Any]]:
        """Return the linears of the layers that are whole blocks wide, with their paths."""
        block = BLOCK_FORMATS[self.way.weight].block[1] or 1
        return [
            (path, module)
            for path, module in self.model.named_modules()
            if isinstance(module, torch.nn.Linear) and ".layers." in path
            and module.in_features % block == 0
        ]  # fmt: skip

    def experts(self) -> list[tuple[str, Any]]:
        """Return the banks of gated experts without biases, with their paths."""
        block = BLOCK_FORMATS[self.way.weight].block[1] or 1
        return [
            (path, module)
            for path, module in self.model.named_modules()
            if hasattr(module, "gate_up_proj") and hasattr(module, "_apply_gate")
            and not (module.has_bias or module.is_transposed)
            and not (module.gate_up_proj.shape[-1] % block or module.down_proj.shape[-1] % block)
        ]  # fmt: skip

    @property
    def recipe(self) -> Recipe:
        """Return the recipe that the checkpoint would state."""
        return Recipe("as stored", tuple(self.rules))

    def emulate(self, way: Emulation, only: Callable[[str], bool] = lambda _path: True) -> None:
        """Let linears and experts multiply what the engine does; others what weights decode to."""
        for path, module in self.linears():
            weight = self.weights[logical_name(f"{path}.weight")]
            values = weight.values(torch.float32)
            made = _forward(
                quantised_again(values) if way.again and only(path) else values,
                self.way,
                self.scales[path],
                way._replace(rounds=None if not only(path)
                             else _by_parts(way) if path.endswith("o_proj") else way.rounds),
            )  # fmt: skip
            if way.stage is not None and only(path):
                made = _short_forward(weight, self.way, self.scales[path], way.stage)
            module.forward = MethodType(made, module)
        for path, module in self.experts():
            chosen = way if only(path) else way._replace(rounds=None)
            module.forward = MethodType(self._experts_forward(path, chosen), module)

    def _experts_forward(self, path: str, way: Emulation) -> Any:
        """Return a loop over experts, as transformers' eager one or as fused kernels compute."""
        parts = ("gate_up_proj", "down_proj")
        weights = [
            self.weights[logical_name(f"{path}.{part}")].values(torch.float32) for part in parts
        ]
        scales = [self.scales[f"{path}.{part}"] for part in parts]

        def product(at: int, number: int, x: Tensor) -> Tensor:
            scale = scales[at]
            own = None if scale is None else scale[number]
            rounds = _by_parts(way) if at else way.rounds
            given = x if rounds is None else rounds(x, self.way, own)
            dtype = x.dtype if way.decoded else torch.float32
            made = linear(given.to(dtype), weights[at][number].to(x.device, dtype))
            return made if way.fused else made.to(x.dtype)

        def forward(
            module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
        ) -> Tensor:
            held = torch.float32 if way.fused else hidden_states.dtype
            out = torch.zeros_like(hidden_states, dtype=held)
            for number in top_k_index.unique().tolist():
                token, slot = (top_k_index == number).nonzero(as_tuple=True)
                made = module._apply_gate(product(0, number, hidden_states[token]))
                made = made.to(hidden_states.dtype)
                made = product(1, number, made) * top_k_weights[token, slot, None]
                out.index_add_(0, token, made.to(out.dtype))
            return out.to(hidden_states.dtype)

        return forward

    def run(self, tokens: Tensor | None = None) -> MemoryRun:
        """Record a prefill and one token after it."""
        return recorded(self.model, self.config, self.ids if tokens is None else tokens, steps=1)

    def twin(self, **switches: Any) -> TracedModel:
        """Bind the twin."""
        numerics = replace(
            Numerics.twin(), work=torch.float64, products=torch.float64, store=self.dtype
        ).with_switches(**switches)
        return TracedModel(self.config, numerics, self.weights, self.recipe)

    def judged(self, run: MemoryRun | None = None) -> Localised:
        """Localise what is wrong with a run."""
        return localise(self.twin(), self.recipe, run or self.run())


def _by_parts(engine: Emulation) -> Rounds | None:
    """Return the rounding of what each rank has of an input."""
    rounds = engine.rounds
    if rounds is None or engine.ranks == 1:
        return rounds

    def made(x: Tensor, way: Inputs, scale: Tensor | None) -> Tensor:
        return torch.cat([rounds(part, way, scale) for part in x.chunk(engine.ranks, -1)], -1)

    return made


def _short_forward(
    weight: Weight, way: Inputs, scale: Tensor | None, stage: int
) -> Callable[..., Tensor]:
    codes, scales = weight.codes, weight.block_scale
    assert codes is not None and scales is not None, "quantised"  # noqa: PT018
    numbers = codes.view(E4M3).double()
    form = BLOCK_FORMATS[way.weight].block
    wide = scales.repeat_interleave(form[0] or len(codes), 0)[: len(codes)]

    def forward(_module: Any, input: Tensor) -> Tensor:  # noqa: A002  torch's own name
        width = BLOCK_FORMATS[way.activation].block[1] or input.shape[-1]
        parts = input.flatten(0, -2).float().unflatten(-1, (-1, width))
        step = parts.abs().amax(-1, keepdim=True) / 448 if scale is None else scale
        coded = (parts / step).clamp(-448, 448).to(E4M3).double()
        step = step.expand_as(parts[..., :1])
        made = torch.zeros(len(coded), len(numbers), dtype=torch.float64)
        for part in range(coded.shape[1]):
            columns = slice(part * width, (part + 1) * width)
            sums = short_sums(coded[:, part], numbers[:, columns], stage)
            made += sums * step[:, part].double() * wide[:, part]
        whole: Tensor = made.to(input.dtype).unflatten(0, input.shape[:-1])
        return whole

    return forward


def _forward(
    weight: Tensor, way: Inputs, scale: Tensor | None, engine: Emulation
) -> Callable[..., Tensor]:
    def forward(module: Any, input: Tensor) -> Tensor:  # noqa: A002  torch's own name
        x = input if engine.rounds is None else engine.rounds(input, way, scale)
        dtype = input.dtype if engine.decoded else torch.float32
        bias = None if module.bias is None else module.bias.to(dtype)
        return linear(x.to(dtype), weight.to(x.device, dtype), bias).to(input.dtype)

    return forward


def learned(found: Localised) -> Mapping[str, Any]:
    """Return the conventions that a run was judged by."""
    return {each.name: each.value for each in found.conventions}
