"""Faults planted into tiny transformers models, by hand: are place and cause found?

    python -m degarble.suites.campaigns.traced_plants [--models llama,gpt_oss] [--runs bf16,fp32]
        [--plants "no sinks,pairs"] [--out results.jsonl]

A campaign continues where its file of results ends, so that models may run one after the other.

Each plant changes transformers' own module, and not our definition of it. A plant is localised if
exactly its components are the origins; `first` if the first cause that is named of each is right;
`wrong` if another cause is named first. Counted are those that differ by `LARGE` budgets or more.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.number_formats import (
    BLOCK_FORMATS,
    FP8_128X128_F32,
    FP8_ROW,
    MXFP4,
    MXFP8,
    NVFP4,
)
from degarble.harness.formats.quantise import quantise
from degarble.harness.formats.weight import Weight
from degarble.harness.model.recipes import Recipe, Rule, recipe_named
from degarble.references.traced.family import logical_name
from degarble.suites.references.traced.traced_models import built, config_of, weights_of
from degarble.suites.support.traced_runs import judged_run, prompt, recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from degarble.harness.engine.localise.localise import Localised

    Change = Callable[[Any], Any]  # of a model; may return a context manager to run within

LARGE = 3.0  # budgets: smaller plants are not counted
_COUNTED = ("localised", "first", "wrong")
LAYERS, AT = 4, 2  # layers of a model, and the one that is changed
MODELS = (
    "llama", "qwen3_moe", "gpt_oss", "gemma3_text", "deepseek_v3", "mixtral", "granite", "qwen2",
)  # fmt: skip
RUNS = {
    "bf16": ("eager", torch.bfloat16), "fp32": ("eager", torch.float32),
    "sdpa": ("sdpa", torch.bfloat16),
}  # fmt: skip
# Runs on the decoded weights of a quantised checkpoint, in BF16, as transformers does.
STORED = {
    "nvfp4": NVFP4, "mxfp4": MXFP4, "mxfp8": MXFP8, "fp8": FP8_128X128_F32, "fp8_row": FP8_ROW,
    "int4": BLOCK_FORMATS["UINT4_G32"], "int8": BLOCK_FORMATS["INT8_G32"],
}  # fmt: skip
RUNS |= dict.fromkeys(STORED, ("eager", torch.bfloat16))
PLAIN_RUNS = ("bf16", "fp32", "sdpa")
_WIDE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}  # more than one block
SETTINGS: dict[str, dict[str, Any]] = {
    "granite": {
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 4.0,
        "logits_scaling": 2.0,
    },
    "gpt_oss": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8},
}


@dataclass(frozen=True)
class Plant:
    """A change of layer AT, the components that it makes wrong, and the causes that are right."""

    change: Change
    places: tuple[str, ...]
    causes: frozenset[str]
    models: tuple[str, ...] = MODELS
    runs: tuple[str, ...] = PLAIN_RUNS


def _layer(model: Any, at: int = AT) -> Any:
    return model.model.layers[at]


def _part(model: Any, path: str) -> Any:
    return model.get_submodule(path) if path.startswith("model.") or path == "lm_head" else (
        _layer(model).get_submodule(path)
    )  # fmt: skip


def _weights(
    path: str, change: Callable[[torch.Tensor], torch.Tensor], name: str = "weight"
) -> Any:
    """Change a parameter in place of its own values."""

    def plant(model: Any) -> None:
        parameter = getattr(_part(model, path), name)
        parameter.data = change(parameter.data.clone()).to(parameter.dtype).contiguous()

    return plant


def _exchanged(*paths: tuple[int, str], name: str = "weight") -> Any:
    def plant(model: Any) -> None:
        first, second = (getattr(_layer(model, at).get_submodule(path), name) for at, path in paths)
        first.data, second.data = second.data.clone(), first.data.clone()

    return plant


def _fact(path: str, change: Callable[[Any], Any], *names: str) -> Any:
    """Change an attribute of a module, the first of some names that it has."""

    def plant(model: Any) -> None:
        module = _part(model, path)
        name = next(name for name in names if hasattr(module, name))
        setattr(module, name, change(getattr(module, name)))

    return plant


def _forward(path: str, function: Callable[..., Any]) -> Any:
    """Give a module another forward pass; `function` gets the module's own and its arguments."""

    def plant(model: Any) -> None:
        module = _part(model, path)
        own = module.forward

        def forward(_self: Any, x: Any) -> Any:
            return function(own, x)

        # The recorder asks how the inputs are called.
        forward.__signature__ = inspect.signature(type(module).forward)  # type: ignore[attr-defined]
        module.forward = MethodType(forward, module)

    return plant


def _rows(value: torch.Tensor, rows: slice, factor: float) -> torch.Tensor:
    value[rows] *= factor
    return value


def _moved(value: torch.Tensor) -> torch.Tensor:
    value[5] = value[6]
    return value


def _as_pairs(value: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = value.unflatten(0, (-1, 2, 8)).transpose(1, 2).flatten(0, 2)
    return made


def _fp8(value: torch.Tensor) -> torch.Tensor:
    scale = (value.abs().amax() / 448).float()
    return (value.float() / scale).to(torch.float8_e4m3fn).float() * scale


def _modelling(model: Any) -> Any:
    return sys.modules[type(model).__module__]


def _attention(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    """Change what the attention function of one layer is given, behind the recorder."""

    @contextmanager
    def plant(model: Any) -> Iterator[None]:
        from transformers.modeling_utils import AttentionInterface  # noqa: PLC0415  heavy

        chosen = AttentionInterface.get_interface

        def interface(registry: Any, name: str, default: Any) -> Any:
            own = chosen(registry, name, default)

            def attention(
                module: Any, query: Any, key: Any, value: Any, mask: Any, **named: Any
            ) -> Any:
                if module is not _layer(model).self_attn:
                    return own(module, query, key, value, mask, **named)
                given = change({"query": query, "key": key, "value": value, "mask": mask, **named})
                query, key, value, mask = (given.pop(n) for n in ("query", "key", "value", "mask"))
                return own(module, query, key, value, mask, **given)

            return attention

        with mock.patch.object(AttentionInterface, "get_interface", interface):
            yield

    return plant


def _open_mask(given: dict[str, Any]) -> dict[str, Any]:
    mask = given["mask"]
    if mask is None:
        return {**given, "is_causal": False}
    whole = torch.ones_like(mask) if mask.dtype is torch.bool else torch.zeros_like(mask)
    return {**given, "mask": whole}


def _causal_mask(given: dict[str, Any]) -> dict[str, Any]:
    """Take the window away."""
    q, k = given["query"].shape[2], given["key"].shape[2]
    seen = torch.arange(k)[None] <= torch.arange(k - q, k)[:, None]
    mask = given["mask"]
    whole = seen if mask.dtype is torch.bool else torch.zeros(q, k, dtype=mask.dtype).masked_fill(
        ~seen, torch.finfo(mask.dtype).min
    )  # fmt: skip
    return {**given, "mask": whole[None, None]}


def _rotation(change: Callable[..., Any]) -> Change:
    """Change what the rotation of one layer is given."""

    @contextmanager
    def plant(model: Any) -> Iterator[None]:
        running = [False]
        attention = _layer(model).self_attn
        before = attention.register_forward_pre_hook(lambda *_: running.__setitem__(0, True))
        after = attention.register_forward_hook(lambda *_: running.__setitem__(0, False))
        module = _modelling(model)
        names = [n for n in vars(module) if n.startswith("apply_rotary_pos_emb")]

        def wrapped(own: Any, *given: Any, **named: Any) -> Any:
            turned = change(*given[:4]) if running[0] else given[:4]
            return own(*turned, *given[4:], **named)

        with ExitStack() as stack:
            for name in names:
                own = partial(wrapped, getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, own))
            stack.callback(before.remove)
            stack.callback(after.remove)
            yield

    return plant


def _without_residual(first: bool) -> Change:
    def plant(model: Any) -> None:
        layer = _layer(model)
        layer.forward = MethodType(partial(_decoder_layer, first), layer)

    return plant


def _decoder_layer(first: bool, layer: Any, hidden_states: Any, **named: Any) -> Any:
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **named)
    hidden_states = attended if first else hidden_states + attended
    made = layer.mlp(layer.post_attention_layernorm(hidden_states))
    made = made[0] if isinstance(made, tuple) else made
    return hidden_states + made if first else made


def _summed_gate(model: Any) -> None:
    mlp = _layer(model).mlp

    def forward(self: Any, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x) * 0)

    mlp.forward = MethodType(forward, mlp)


def _gelu(_own: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x)


def _silu(_own: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x)


def _layer_norm(own: Any, x: torch.Tensor) -> torch.Tensor:
    """Return what nn.LayerNorm gives with the weight of an RMSNorm."""
    module = own.__self__
    weight = module.weight.float() + ("Gemma" in type(module).__name__)
    epsilon = getattr(module, "variance_epsilon", None) or module.eps
    made = torch.nn.functional.layer_norm(x.float(), weight.shape, weight, None, epsilon)
    return made.to(x.dtype)


def _gate_of_experts(function: Any) -> Change:
    def plant(model: Any) -> None:
        experts = _layer(model).mlp.experts
        experts.act_fn = function

    return plant


def _swapped_experts(model: Any) -> None:
    experts = _layer(model).mlp.experts
    for parameter in experts.parameters(recurse=False):
        parameter.data[[1, 3]] = parameter.data[[3, 1]]


def _turned_experts(model: Any) -> None:
    for parameter in _layer(model).mlp.experts.parameters(recurse=False):
        parameter.data = parameter.data.roll(-1, 0).contiguous()


def _gate_first(model: Any) -> None:
    experts = _layer(model).mlp.experts
    axis = -1 if experts.is_transposed else -2
    for name in ("gate_up_proj", "gate_up_proj_bias"):
        if hasattr(experts, name):
            data = getattr(experts, name).data
            at = -1 if name.endswith("bias") else axis
            pairs = data.unflatten(at, (-1, 2)).flip(at).flatten(at - 1 if at < 0 else at)
            halves = data.roll(data.shape[at] // 2, at)
            data.copy_(pairs if experts.is_transposed else halves)


def _one_expert(model: Any) -> None:
    _layer(model).mlp.experts.down_proj.data[2] *= 2
    if hasattr(_layer(model).mlp.experts, "down_proj_bias"):
        _layer(model).mlp.experts.down_proj_bias.data[2] *= 2


def _encoded(change: Callable[[Weight], Weight], path: str = "self_attn.o_proj") -> Change:
    """Change what is stored of a quantised weight; the model gets what that decodes to."""

    def plant(model: Any) -> None:
        module = _part(model, path)
        weight = change(model.stored[logical_name(f"model.layers.{AT}.{path}.weight")])
        module.weight.data = weight.values(torch.float32).to(module.weight.dtype)

    return plant


def _part_of(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Change codes or scales of a quantised weight."""

    def changed(weight: Weight) -> Weight:
        changes: dict[str, Any] = {name: change(getattr(weight, name))}
        return replace(weight, **changes)

    return _encoded(changed)


_IN = f"layers.{AT}."
_A, _M = f"{_IN}self_attn.", f"{_IN}mlp."
_QKV = tuple(name for name in MODELS if name != "deepseek_v3")
_MOE = ("qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral")
_DENSE = tuple(name for name in MODELS if name not in _MOE)
_PLAIN = tuple(name for name in MODELS if name != "gemma3_text")  # layers of four modules
_BIASED = ("gpt_oss", "qwen2")


def _plant(change: Change, places: Any, causes: str, models: tuple[str, ...] = MODELS) -> Plant:
    return Plant(
        change, (places,) if isinstance(places, str) else places, frozenset(causes.split()), models
    )


def _of_linears() -> Iterator[tuple[str, Plant]]:
    o, place = "self_attn.o_proj", f"{_A}o_proj"
    for words, change, causes in (
        ("scaled", lambda w: w * 1.01, "M43.whole"),
        ("negated", lambda w: -w, "M43.whole"),
        ("doubled", lambda w: w * 2, "M43.whole"),
        ("rows scaled", lambda w: _rows(w, slice(16, 32), 0.5), "M43.whole"),
        ("zeros", torch.zeros_like, "M17.zeros M43.whole"),
        ("half absent", lambda w: _rows(w, slice(32, 64), 0), "M17.second_half M43.whole"),
        ("row copied", _moved, "M16.rows"),
        ("rows turned", lambda w: w.roll(32, 0), "M16.ranks_turned"),
        ("rows one too far", lambda w: w.roll(1, 0), "M16.rows"),
        ("transposed", lambda w: w.T, "M16.rows"),
        ("fp8", _fp8, "M19.fp8_stored M19.fp8_tensor"),
    ):
        yield f"o_proj {words}", _plant(_weights(o, change), place, causes)
    yield "head scaled", _plant(
        _weights("self_attn.q_proj", lambda w: _rows(w, slice(16, 32), 0.5)), f"{_A}q_proj",
        "M43.whole", _QKV,
    )  # fmt: skip
    yield (
        "rows as pairs",
        _plant(_weights("self_attn.q_proj", _as_pairs), f"{_A}q_proj", "M16.rows", _QKV),
    )
    yield "key and value", _plant(
        _exchanged((AT, "self_attn.k_proj"), (AT, "self_attn.v_proj")),
        (f"{_A}k_proj", f"{_A}v_proj"), "O07.other_module", _QKV,
    )  # fmt: skip
    yield "gate and up", _plant(
        _exchanged((AT, "mlp.gate_proj"), (AT, "mlp.up_proj")),
        (f"{_M}gate_proj", f"{_M}up_proj"), "O07.other_module", _DENSE,
    )  # fmt: skip
    yield "output of the next layer", _plant(
        _exchanged((AT, o), (AT - 1, o)), (f"layers.{AT - 1}.self_attn.o_proj", place),
        "O07.other_module",
    )  # fmt: skip
    yield "no bias", _plant(
        _weights("self_attn.q_proj", torch.zeros_like, "bias"), f"{_A}q_proj",
        "M17.bias M17.zeros", _BIASED,
    )  # fmt: skip
    yield "bias doubled", _plant(
        _weights("self_attn.v_proj", lambda w: w * 2, "bias"), f"{_A}v_proj", "M17.bias", _BIASED,
    )  # fmt: skip
    yield "head scaled up", _plant(_weights("lm_head", lambda w: w * 1.02), "lm_head", "M43.whole",
                                   _PLAIN)  # fmt: skip
    yield "latent scaled", _plant(
        _weights("self_attn.kv_b_proj", lambda w: w * 1.1), f"{_A}kv_b_proj", "M43.whole",
        ("deepseek_v3",),
    )  # fmt: skip


def _of_norms() -> Iterator[tuple[str, Plant]]:
    norm, place = "post_attention_layernorm", f"{_IN}post_attention_layernorm"
    for words, change, causes in (
        ("scaled", lambda w: w * 1.01, "M43.whole"),
        ("ones", torch.ones_like, "M17.ones M24.gamma M24.step_left_out"),
        ("squared", lambda w: w * w, "M24.gamma"),
        ("plus one", lambda w: w + 1, "M24.gamma M24.constant"),
        ("less one", lambda w: w - 1, "M24.gamma M24.constant M24.step_left_out"),
    ):
        models = _PLAIN if words in {"scaled", "ones", "squared"} else MODELS
        yield f"norm {words}", _plant(_weights(norm, change), place, causes, models)
    yield (
        "epsilon",
        _plant(_fact(norm, lambda _: 1e-2, "variance_epsilon", "eps"), place, "M24.constant"),
    )
    yield "layer norm", _plant(_forward(norm, _layer_norm), place, "M24.other_function", MODELS)
    yield "no norm", _plant(_forward(norm, lambda _own, x: x), place, "M24.gamma M24.step_left_out")
    yield "norms exchanged", _plant(
        _exchanged((AT, "input_layernorm"), (AT, norm)),
        (f"{_IN}input_layernorm", place), "O07.other_module",
    )  # fmt: skip
    yield "query norm of the next layer", _plant(
        _exchanged((AT, "self_attn.q_norm"), (AT - 1, "self_attn.q_norm")),
        (f"layers.{AT - 1}.self_attn.q_norm", f"{_A}q_norm"), "O07.other_module",
        ("qwen3_moe", "gemma3_text"),
    )  # fmt: skip


def _of_rotations() -> Iterator[tuple[str, Plant]]:
    rotary = "model.rotary_emb"
    one = _PLAIN

    def base(frequencies: torch.Tensor) -> torch.Tensor:
        return 50000.0 ** -(torch.arange(len(frequencies)) / len(frequencies))

    for words, change in (
        ("angles scaled", lambda f: f * 1.01), ("angles halved", lambda f: f / 2), ("base", base)
    ):  # fmt: skip
        yield (
            words,
            _plant(_weights(rotary, change, "inv_freq"), "rotary_emb", "M28.frequencies", one),
        )
    yield "factor of angles", _plant(
        _fact(rotary, lambda factor: factor * 0.8, "attention_scaling"), "rotary_emb",
        "M28.factor M28.constant", one,
    )  # fmt: skip
    turned = (f"{_A}rotation", f"{_A}rotation_2")
    for words, given in (
        ("turned back", lambda q, k, cos, sin: (q, k, cos, -sin)),
        ("not turned", lambda q, k, cos, sin: (q, k, torch.ones_like(cos), torch.zeros_like(sin))),
        ("sine for cosine", lambda q, k, cos, sin: (q, k, sin, cos)),
    ):
        causes = "M28.pairing" + (" M28.step_left_out" if words != "sine for cosine" else "")
        yield words, _plant(_rotation(given), turned, causes)
    yield "pairs", _plant(
        _rotation(lambda q, k, cos, sin: (_in_pairs(q), _in_pairs(k), cos, sin)), turned,
        "M28.pairing", _QKV,
    )  # fmt: skip


def _in_pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x[..., 0::2], x[..., 1::2]), -1)


def _of_attention() -> Iterator[tuple[str, Plant]]:
    place = f"{_A}attention"
    for words, change, causes, models in (
        (
            "logits scaled",
            lambda g: {**g, "scaling": g["scaling"] * 1.03},
            "M29.other_scale",
            MODELS,
        ),
        ("no scale", lambda g: {**g, "scaling": 1.0}, "M29.other_scale", MODELS),
        ("scale squared", lambda g: {**g, "scaling": g["scaling"] ** 2}, "M29.other_scale", MODELS),
        (
            "heads reversed",
            lambda g: {**g, "key": g["key"].flip(1), "value": g["value"].flip(1)},
            "M29.heads",
            _QKV,
        ),
        (
            "keys for values",
            lambda g: {**g, "key": g["value"], "value": g["key"]},
            "M29.heads",
            _QKV,
        ),
        (
            "first head for all",
            lambda g: {
                **g,
                "key": g["key"][:, :1].expand_as(g["key"]),
                "value": g["value"][:, :1].expand_as(g["value"]),
            },
            "M29.heads",
            _QKV,
        ),
        ("values doubled", lambda g: {**g, "value": g["value"] * 2}, "M43.whole", MODELS),
        ("sees all", _open_mask, "M29.mask", MODELS),
        ("no window", _causal_mask, "M29.mask", ("gpt_oss", "gemma3_text")),
        ("soft cap", lambda g: {**g, "softcap": 50.0}, "M29.cap_or_sinks", ()),
    ):
        yield words, _plant(_attention(change), place, causes, models)
    yield "no sinks", _plant(
        _fact("self_attn", lambda s: torch.nn.Parameter(torch.full_like(s, -1e4)), "sinks"), place,
        "M29.cap_or_sinks", ("gpt_oss",),
    )  # fmt: skip
    yield "sinks of another head", _plant(
        _fact("self_attn", lambda s: torch.nn.Parameter(s.roll(1, 0)), "sinks"), place,
        "M29.cap_or_sinks", ("gpt_oss",),
    )  # fmt: skip


def _of_mixtures() -> Iterator[tuple[str, Plant]]:
    experts = f"{_M}experts"
    router = {name: "router" if name == "gpt_oss" else "gate" for name in _MOE}
    for model, name in router.items():
        place = f"{_M}{name}"
        yield (
            f"router scaled {model}",
            _plant(_weights(f"mlp.{name}", lambda w: w * 1.5), place, "M43.whole", (model,)),
        )
        yield f"routers exchanged {model}", _plant(
            _exchanged((AT, f"mlp.{name}"), (AT - 1, f"mlp.{name}")),
            (f"layers.{AT - 1}.mlp.{name}", place), "O07.other_module", (model,),
        )  # fmt: skip
    choice = f"{_M}gate.topk"
    yield "renormalised", _plant(
        _fact("mlp.gate", lambda x: not x, "norm_topk_prob"), choice,
        "M26.weights M26.step_left_out", ("qwen3_moe", "deepseek_v3"),
    )  # fmt: skip
    yield "routed factor", _plant(
        _fact("mlp.gate", lambda _: 1.0, "routed_scaling_factor"), choice,
        "M26.constant M26.weights M26.step_left_out", ("deepseek_v3",),
    )  # fmt: skip
    yield "no router bias", _plant(
        _weights("mlp.router", torch.zeros_like, "bias"), f"{_M}router", "M17.bias M17.zeros",
        ("gpt_oss",),
    )  # fmt: skip
    yield "no correction", _plant(
        _weights("mlp.gate", torch.zeros_like, "e_score_correction_bias"), choice,
        "M17.bias M17.zeros M26.step_left_out", ("deepseek_v3",),
    )  # fmt: skip
    yield "experts exchanged", _plant(_swapped_experts, experts, "M14.experts", _MOE)
    yield "next experts", _plant(_turned_experts, experts, "M14.experts", _MOE)
    yield "up before gate", _plant(_gate_first, experts, "M14.experts", _MOE)
    yield "one expert doubled", _plant(_one_expert, experts, "M14.experts", _MOE)
    yield (
        "gate by GELU",
        _plant(
            _gate_of_experts(torch.nn.GELU()),
            experts,
            "M14.experts",
            ("qwen3_moe", "deepseek_v3", "mixtral"),
        ),
    )
    yield (
        "no limit",
        _plant(_fact("mlp.experts", lambda _: 1.0, "limit"), experts, "M14.experts", ("gpt_oss",)),
    )
    yield (
        "plain swish",
        _plant(_fact("mlp.experts", lambda _: 1.0, "alpha"), experts, "M14.experts", ("gpt_oss",)),
    )
    yield "experts of the next layer", _plant(
        _exchanged((AT, "mlp.experts"), (AT - 1, "mlp.experts"), name="down_proj"),
        (f"layers.{AT - 1}.mlp.experts", experts), "O07.other_module", _MOE,
    )  # fmt: skip
    yield "down absent", _plant(
        _weights("mlp.experts", torch.zeros_like, "down_proj"), experts, "M17.zeros M43.whole",
        _MOE,
    )  # fmt: skip


def _of_sums() -> Iterator[tuple[str, Plant]]:
    yield "activation", _plant(_forward("mlp.act_fn", _gelu), f"{_M}act_fn", "M25.other_function",
                               _DENSE)  # fmt: skip
    yield (
        "no activation",
        _plant(
            _forward("mlp.act_fn", lambda _own, x: x), f"{_M}act_fn", "M25.step_left_out", _DENSE
        ),
    )
    yield "no up", _plant(_summed_gate, f"{_M}gated", "M25.step_left_out", _DENSE)
    for words, first in (("no residual of attention", True), ("no residual", False)):
        name = "residual" if first else "residual_2"
        yield words, _plant(
            _without_residual(first), f"{_IN}{name}", "M23.summand M23.step_left_out",
            ("llama", "qwen3_moe", "gpt_oss", "mixtral", "qwen2"),
        )  # fmt: skip
    embedding = "model.embed_tokens"
    yield (
        "embedding scaled",
        _plant(_weights(embedding, lambda w: w * 1.05), "embed_tokens", "M43.whole", _PLAIN),
    )
    yield (
        "tokens off by one",
        _plant(
            _weights(embedding, lambda w: w.roll(1, 0)), "embed_tokens", "M17.token_row", _PLAIN
        ),
    )
    yield "no factor of the embedding", _plant(
        _fact(embedding, torch.ones_like, "embed_scale"), "embed_tokens",
        "M24.step_left_out M43.whole M24.constant", ("gemma3_text",),
    )  # fmt: skip


def _of_stored() -> Iterator[tuple[str, Plant]]:
    """Yield faults of codes and scales."""
    by_block = ("nvfp4", "mxfp4", "mxfp8", "fp8", "int4", "int8")
    narrow, wide, half = ("nvfp4", "mxfp4"), ("nvfp4", "mxfp4", "mxfp8"), ("fp8", "fp8_row")
    codes, scales = partial(_part_of, "codes"), partial(_part_of, "block_scale")
    whole, zeros = partial(_part_of, "tensor_scale"), partial(_part_of, "zero_point")
    column, halved = "M12.column_off M15.scale_next_group", "M06.exponent_off M43.whole"
    for words, change, causes, runs in (
        ("nibbles swapped", codes(lambda c: (c << 4) | (c >> 4)), "M10.nibble_order", narrow),
        ("signs lost", codes(lambda c: c & 0x7F), "O01.magnitudes", ("mxfp8", *half)),
        ("scales of the next block", scales(lambda s: s.roll(-1, -1)), column, by_block),
        ("scales of the next row", scales(lambda s: s.roll(-1, 0)), "M12.row_off", by_block[:4]),
        ("scales transposed", scales(lambda s: s.T.reshape(s.shape)), "M11.transposed", wide),
        ("half of the scales", scales(lambda s: s / 2), halved, half),
        ("no tensor scale", whole(torch.ones_like), "M02.missing", ("nvfp4",)),
        ("inverse tensor scale", whole(lambda s: 1 / s), "M01.inverse", ("nvfp4",)),
        ("tensor scale squared", whole(lambda s: s * s), "M02.applied_twice", ("nvfp4",)),
        ("zero points off by one", zeros(lambda z: z + 1), "M15.zero_point_high", ("int4",)),
    ):
        yield (
            words,
            Plant(change, (f"{_A}o_proj",), frozenset(causes.split()), ("llama", "qwen2"), runs),
        )


PLANTS: dict[str, Plant] = {
    name: plant
    for group in (
        _of_linears(), _of_norms(), _of_rotations(), _of_attention(), _of_mixtures(), _of_sums(),
        _of_stored(),
    )
    for name, plant in group
}  # fmt: skip


@dataclass(frozen=True)
class PlantResult:
    """What was found of a plant: components, and by component the causes that were named."""

    plant: Plant
    origins: tuple[str, ...]
    named: dict[str, tuple[str, ...]]
    sentences: tuple[str, ...]
    ratio: float = math.inf  # the difference of the least planted component, in budgets

    @property
    def localised(self) -> bool:
        """Return whether exactly the right components were found."""
        return set(self.origins) == set(self.plant.places)

    @property
    def first(self) -> bool:
        """Return whether the first cause of each is right."""
        return self.localised and all(
            bool(ids) and ids[0] in self.plant.causes for ids in self.named.values()
        )

    @property
    def wrong(self) -> bool:
        """Return whether a cause that is not right was named first."""
        return any(ids and ids[0] not in self.plant.causes for ids in self.named.values())


@lru_cache(maxsize=4)
def _known(name: str, run_name: str) -> Any:
    return config_of(name, RUNS[run_name][1], **_settings(name, run_name))


def _settings(name: str, run_name: str) -> dict[str, Any]:
    wide = _WIDE if run_name in STORED else {}
    return {"num_hidden_layers": LAYERS, **SETTINGS.get(name, {}), **wide}


def _quantised(model: Any, run_name: str, weights: dict[str, Weight]) -> Recipe:
    """Quantise the linears of all layers, and give the model what their codes decode to."""
    rules = []
    for path, module in model.model.layers.named_modules(prefix="model.layers"):
        if isinstance(module, torch.nn.Linear):
            name = logical_name(f"{path}.weight")
            made = quantise(module.weight.detach().float(), STORED[run_name], CANONICAL)
            weights[name] = Weight.of(made)
            module.weight.data = weights[name].values(torch.float32).to(module.weight.dtype)
            rules.append(Rule(name, made.format.name))
    model.stored = weights
    return Recipe(run_name, tuple(rules))


def judged(name: str, run_name: str, change: Change | None) -> Localised:
    """Run a model with a change, and localise what is wrong."""
    attention, dtype = RUNS[run_name]
    model: Any = built(name, dtype, **_settings(name, run_name))
    model.set_attn_implementation(attention)
    config: Any = _known(name, run_name)
    weights = weights_of(model)
    recipe = recipe_named("bf16", config)
    if run_name in STORED:
        recipe = _quantised(model, run_name, weights)
    within = None if change is None else change(model)
    # The plant is entered first, so that the recorder sees what the model meant to compute.
    with _entered(within):
        run = recorded(model, config, prompt(config), steps=1)
    return judged_run(config, weights, run, recipe)


def found(name: str, run_name: str, plant: Plant | None) -> PlantResult:
    """Run a model with a plant, judge it and name causes."""
    localised = judged(name, run_name, None if plant is None else plant.change)
    named, sentences = {}, []
    for origin in localised.origins:
        told = None
        if origin.record is not None:
            told = diagnose(origin.context, [origin.record, *origin.more])
        named[origin.component] = () if told is None else tuple(n.id for n in told.named)
        sentences.append(f"{origin.component}: {told.sentence if told else origin.sentence}")
    plan = plant or Plant(lambda _model: None, (), frozenset())
    origins = tuple(origin.component for origin in localised.origins)
    ratios: dict[str, float] = {}
    for row in localised.rows:
        ratios[row.component.name] = max(row.ratio, ratios.get(row.component.name, 0.0))
    least = min((ratios.get(place, 0.0) for place in plan.places), default=0.0)
    return PlantResult(plan, origins, named, tuple(sentences), least)


@contextmanager
def _entered(within: Any) -> Iterator[None]:
    if within is None:
        yield
        return
    with within:
        yield


def _asked(name: str, known: tuple[str, ...]) -> tuple[str, ...]:
    if name not in sys.argv:
        return known
    return tuple(sys.argv[sys.argv.index(name) + 1].split(","))


def _line(model: str, run: str, name: str) -> dict[str, Any]:
    """Plant one fault, and return its result as a line of a campaign's file."""
    result = found(model, run, PLANTS[name])
    return {
        "plant": [model, run, name], "ratio": result.ratio, "localised": result.localised,
        "first": result.first, "wrong": result.wrong, "origins": list(result.origins),
        "named": result.named, "sentences": list(result.sentences),
    }  # fmt: skip


def _known_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def cases(models: Iterable[str], runs: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield every plant of some models and runs."""
    for model, run in product(models, runs):
        if (model, run) != ("gpt_oss", "sdpa"):  # transformers has no SDPA with sinks
            for name, plant in PLANTS.items():
                if model in plant.models and run in plant.runs:
                    yield model, run, name


def main() -> int:
    """Plant everything that the file of results lacks, and print what was missed and the shares."""
    begun = time.process_time()
    models, runs = _asked("--models", MODELS), _asked("--runs", tuple(RUNS))
    chosen = _asked("--plants", tuple(PLANTS))
    (out,) = _asked("--out", ("traced_plants.jsonl",))
    path = Path(out)
    done = {tuple(line["plant"]) for line in _known_lines(path)}
    for case in cases(models, runs):
        if case not in done and case[2] in chosen:
            line = _line(*case)
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
    asked = set(cases(models, runs))
    lines = [each for each in _known_lines(path) if tuple(each["plant"]) in asked]
    for line in lines:
        if not line["first"] or line["wrong"]:
            print(*line["plant"], line["origins"], "; ".join(line["sentences"])[:1200])  # noqa: T201
    for model in models:
        _summed(model, [line for line in lines if line["plant"][0] == model])
    _summed("all", lines)
    print(f"{time.process_time() - begun:.0f} s of CPU time")  # noqa: T201
    return 0


def _summed(words: str, lines: list[dict[str, Any]]) -> None:
    """Print the shares of the plants that rounding cannot explain by far."""
    large = [line for line in lines if line["ratio"] >= LARGE]
    shares = (f"{word} {sum(each[word] for each in large)}" for word in _COUNTED)
    print(f"{words}: {len(lines)} plants, from {LARGE:.0f} budgets {len(large)}:", *shares)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
