"""Checkpoint and engine layouts: how each spells, splits and stacks the parameters of a model.

The registry covers both families, with the spelling of paths and the tables of fused tensors. Each
layout has a default recipe; `Layout.with_recipe` makes it hold another. A layout lists what it
leaves out (drafters, mostly) with the reason. Parts are placed by tensors.py.

Sources: DeepSeek-V4-Pro shard headers; transformers 5.20 conversion_mapping.py and modelling files;
NVIDIA Model-Optimizer examples/deepseek; vLLM 0.33 models/deepseek_v4 (nvidia/model.py, mtp.py) and
models/deepseek_v32; the first field report for nvfp4-full.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from degarble.harness.base.errors import UnknownName
from degarble.harness.model.config.config import (
    Config,
    V4Config,
    V32Config,
    has_parallel_drafter,
)
from degarble.harness.model.parameters import EXPERT
from degarble.harness.model.recipes import Recipe, recipe_named
from degarble.harness.model.registry import registered_for
from degarble.harness.model.types import Dtype, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.model.parameters import Parameter


class Spelling(StrEnum):
    """Vocabularies for the path of a parameter."""

    DEEPSEEK = "deepseek"
    HUGGINGFACE = "huggingface"
    SAVED = "saved"  # what transformers 5.20 writes for V4: it undoes only a part of its renaming
    VLLM = "vllm"


@dataclass(frozen=True)
class Fusion:
    """Rows of several parameters in one tensor, or, if `stacked`, of every expert in one stack.

    `bare`: the tensor is called by the target alone, without `.weight`.
    """

    target: str
    members: tuple[str, ...]
    stacked: bool = False
    bare: bool = False

    def tensor(self, path: str, suffix: str) -> str:
        """Name the tensor of one part; a stack joins the suffix by an underscore."""
        if self.bare:
            return path
        return path + (suffix.replace(".", "_", 1) if self.stacked else suffix)


@dataclass(frozen=True)
class Layout:
    """The way in which a kind of checkpoint, or an engine's memory, holds a model's parameters."""

    name: str
    family: str
    spelling: Spelling
    suffixes: str
    recipe: str | Recipe  # the name of a built-in one, or a recipe itself
    fusions: tuple[Fusion, ...] = ()
    no_drafter: str = ""  # why the drafter is left out; empty: it is stored
    no_dspark: str = ""  # why the block-parallel drafter is left out
    retyped: tuple[tuple[Kind | str, Dtype], ...] = ()  # by kind or row: unquantised dtype here

    def with_recipe(self, recipe: str | Recipe) -> Layout:
        """Return the same layout, holding what another recipe makes."""
        return replace(self, recipe=recipe)

    def recipe_for(self, config: Config) -> Recipe:
        """Return the recipe in full."""
        if isinstance(self.recipe, Recipe):
            return self.recipe
        return recipe_named(self.recipe, config)

    def omits(self, parameter: Parameter, config: Config) -> str:
        """Return why a parameter has no place here; empty where it has one."""
        if not (parameter.block and parameter.block.is_drafter):
            return ""
        return self.no_drafter or (self.no_dspark if has_parallel_drafter(config) else "")

    def dtype_of(self, parameter: Parameter) -> Dtype:
        """Return the dtype of an unquantised parameter as stored here."""
        row = parameter.row
        retyped = dict(self.retyped)
        return retyped.get(row.name) or retyped.get(row.kind) or row.dtype

    def path_of(self, parameter: Parameter, config: Config, fused: str = "") -> str:
        """Spell the path of a parameter, or of the tensor `fused` in the same block."""
        block = parameter.block
        if self.spelling is Spelling.DEEPSEEK:
            return f"{block.prefix}.{fused}" if fused and block else parameter.name
        is_own: bool = registered_for(config).is_drafters_own(parameter)
        own = fused or self._own_name(parameter, is_drafters_own=is_own)
        if block is None:
            return own if own in {"lm_head", "head"} else f"model.{own}"
        if not block.is_drafter:
            return f"model.layers.{block.index}.{own}"
        number = len(config.layers) + block.index
        inner = self.spelling is Spelling.VLLM and not is_own
        return f"model.layers.{number}.{'mtp_block.' if inner else ''}{own}"

    def _own_name(self, parameter: Parameter, *, is_drafters_own: bool) -> str:
        """Spell what follows the block's prefix."""
        row = parameter.row
        if self.spelling is Spelling.HUGGINGFACE:
            name = row.hf
        else:
            names = _OTHER_NAMES[self.spelling]
            table = _DRAFTER_NAMES if is_drafters_own else names
            name = table.get(row.name, row.name)
        return name if parameter.expert is None else name.replace(EXPERT, str(parameter.expert))


# What vLLM 0.33 (models/deepseek_v4) and transformers 5.20 (save_pretrained) spell unlike DeepSeek.
_OTHER_NAMES = {
    Spelling.VLLM: {
        "embed": "embed_tokens",
        "head": "lm_head",
        "ffn.gate.bias": "ffn.gate.e_score_correction_bias",
        "ffn.shared_experts.w2": "ffn.shared_experts.down_proj",
    },
    Spelling.SAVED: {
        "embed": "embed_tokens",
        "hc_head_fn": "hc_head.hc_fn",
        "hc_head_base": "hc_head.hc_base",
        "hc_head_scale": "hc_head.hc_scale",
        "attn.kv_norm": "attn.norm",
    },
}
_DRAFTER_NAMES = {"norm": "shared_head.norm"}  # vLLM 0.33 models/deepseek_v4/nvidia/mtp.py

FUSED_COMPRESSOR = ".fused_wkv_wgate"

_W13 = ("ffn.experts.{e}.w1", "ffn.experts.{e}.w3")
_W2 = ("ffn.experts.{e}.w2",)
_SHARED_W13 = ("ffn.shared_experts.w1", "ffn.shared_experts.w3")
_TRANSFORMERS_FUSIONS = (
    Fusion("mlp.experts.gate_up_proj", _W13, stacked=True, bare=True),
    Fusion("mlp.experts.down_proj", _W2, stacked=True, bare=True),
)
_VLLM_V4_FUSIONS = (
    Fusion("attn.fused_wqa_wkv", ("attn.wq_a", "attn.wkv")),
    Fusion("attn.compressor.fused_wkv_wgate", ("attn.compressor.wkv", "attn.compressor.wgate")),
    Fusion(
        "attn.indexer.compressor.fused_wkv_wgate",
        ("attn.indexer.compressor.wkv", "attn.indexer.compressor.wgate"),
    ),
    Fusion("ffn.shared_experts.gate_up_proj", _SHARED_W13),
    Fusion("ffn.experts.w13", _W13, stacked=True),
    Fusion("ffn.experts.w2", _W2, stacked=True),
)
_VLLM_V32_FUSIONS = (
    Fusion("self_attn.fused_qkv_a_proj", ("attn.wq_a", "attn.wkv_a")),
    Fusion("self_attn.indexer.wk_weights_proj", ("attn.indexer.wk", "attn.indexer.weights_proj")),
    Fusion("mlp.gate_up_proj", ("ffn.w1", "ffn.w3")),
    Fusion("mlp.shared_experts.gate_up_proj", _SHARED_W13),
    Fusion("mlp.experts.w13", _W13, stacked=True),
    Fusion("mlp.experts.w2", _W2, stacked=True),
)
_IGNORED = "transformers ignores the drafter when it loads"
_UNKNOWN_DSPARK = "no verified source says how vLLM spells the block-parallel drafter"

# transformers keeps V4's norms in fp32, and makes V3.2's bf16 although they are published in fp32.
_V4_NORMS = ((Kind.NORM, Dtype.F32),)
_V32_NORMS = ((Kind.NORM, Dtype.BF16), ("attn.indexer.k_norm.bias", Dtype.BF16))

_V4 = Layout("official", V4Config.family, Spelling.DEEPSEEK, "deepseek", "official")
# nvfp4-full: no source states the dtype of its norms; transformers exported it, so take its dtype.
_V4_HF = Layout(
    "nvfp4-full",
    V4Config.family,
    Spelling.HUGGINGFACE,
    "huggingface",
    "nvfp4-full",
    no_drafter=_IGNORED,
    retyped=_V4_NORMS,
)
_V4_VLLM = Layout(
    "vllm",
    V4Config.family,
    Spelling.VLLM,
    "vllm",
    "official",
    _VLLM_V4_FUSIONS,
    no_dspark=_UNKNOWN_DSPARK,
    retyped=(("ffn.gate.tid2eid", Dtype.I32),),
)
_V32 = Layout("official", V32Config.family, Spelling.HUGGINGFACE, "huggingface", "official")
_V32_HF = replace(
    _V32, name="transformers-saved", recipe="bf16", no_drafter=_IGNORED, retyped=_V32_NORMS
)

V4_LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        layout.name: layout
        for layout in (
            _V4,
            replace(_V4, name="bf16", recipe="bf16"),
            replace(_V4, name="nvfp4-experts", recipe="nvfp4-experts"),
            _V4_HF,
            replace(_V4_HF, name="compressed-tensors", suffixes="compressed-tensors"),
            replace(_V4_HF, name="transformers", recipe="bf16", fusions=_TRANSFORMERS_FUSIONS),
            replace(_V4_HF, name="transformers-saved", recipe="bf16", spelling=Spelling.SAVED),
            _V4_VLLM,
        )
    }
)
V32_LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        layout.name: layout
        for layout in (
            _V32,
            replace(_V32, name="bf16", recipe="bf16"),
            replace(_V32, name="nvfp4-experts", recipe="nvfp4-experts"),
            replace(_V32, name="nvfp4-full", recipe="nvfp4-full"),
            replace(
                _V32, name="compressed-tensors", suffixes="compressed-tensors", recipe="nvfp4-full"
            ),
            replace(
                _V32,
                name="inference",
                spelling=Spelling.DEEPSEEK,
                suffixes="deepseek",
                no_drafter="the official convert.py drops the drafter",
            ),
            replace(_V32_HF, name="transformers", fusions=_TRANSFORMERS_FUSIONS),
            _V32_HF,
            replace(
                _V32,
                name="vllm",
                suffixes="vllm",
                recipe="nvfp4-full",
                fusions=_VLLM_V32_FUSIONS,
                no_drafter="vLLM holds V3.2's drafter in a model of its own",
            ),
        )
    }
)


def layouts_of(config: Config) -> Mapping[str, Layout]:
    """Return the layouts of the config's family, by name."""
    family = registered_for(config)
    known: Mapping[str, Layout] = family.layouts
    if not known:
        raise family.lacks("a checkpoint layout", "Audit it: `degarble audit` needs none.")
    return known


def layout_named(name: str, config: Config) -> Layout:
    """Return the layout of the config's family called `name`."""
    known = layouts_of(config)
    if name not in known:
        raise UnknownName.among("layout", name, known)
    return known[name]
