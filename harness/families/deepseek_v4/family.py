"""DeepSeek-V4: residual streams, a sliding window, and compressed entries chosen by an indexer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from degarble.harness.families.deepseek_v4.tables import (
    V4_BLOCK,
    V4_BLOCK_WIRING,
    V4_DRAFTER_FIRST_WIRING,
    V4_DRAFTER_LAST_WIRING,
    V4_ENDS,
    V4_FIRST_WIRING,
    V4_FORMS,
    V4_LAST_WIRING,
    V4_MTP,
    V4_SHARDING,
    entering_v4,
    v4_letters,
    v4_rules,
    with_fused_compressors,
)
from degarble.harness.formats.number_formats import FP8_128X128_F32, FP8_128X128_UE8M0
from degarble.harness.model.components import Wiring
from degarble.harness.model.config.json_file import read_v4, write_v4
from degarble.harness.model.family import TabledFamily
from degarble.harness.model.layouts import V4_LAYOUTS, Spelling
from degarble.harness.model.parameters import ParameterTable
from degarble.harness.model.recipes import BF16, Recipe, Rule, recipe_named
from degarble.harness.model.site_forms import FormTable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.capture.captured_size import SequenceTokens, ValueCounts
    from degarble.harness.capture.engine.maps import ComponentMap
    from degarble.harness.capture.modules import ModulePlace
    from degarble.harness.engine.budget.attention import ShareStatistics
    from degarble.harness.engine.budget.rules import JudgeableCall
    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.harness.model.components import Component
    from degarble.harness.model.config.config import V4Config
    from degarble.harness.model.layouts import Layout
    from degarble.harness.model.parameters import Parameter
    from degarble.harness.model.types import Block
    from degarble.references.binding import BoundModel
    from degarble.references.facts import ReferenceTable
    from degarble.references.model import ModelV4

_NVFP4 = "NVFP4"


class DeepSeekV4(TabledFamily):
    """The family of V4-Pro, V4-Flash and their drafters."""

    name = "deepseek_v4"

    # ---- config.json -----------------------------------------------------------------------------

    model_types = ("deepseek_v4",)
    transformers_config = frozenset({Spelling.HUGGINGFACE})

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        """Recognise the official code's own file too, which states no model_type."""
        inference = raw.get("model_type") is None and "compress_ratios" in raw
        return inference or super().recognises(raw)

    def read(self, raw: Mapping[str, Any]) -> V4Config:
        """Read any of three spellings."""
        return read_v4(raw)

    def write(self, config: V4Config, spelling: str) -> dict[str, Any]:
        """Write any of three spellings."""
        return write_v4(config, spelling)

    def without_drafters(self, config: V4Config) -> V4Config:
        """Return the main model, without MTP and DSpark."""
        return replace(config, num_nextn_predict_layers=0, dspark=None)

    # ---- structure -------------------------------------------------------------------------------

    rows = ParameterTable(V4_ENDS, V4_BLOCK, V4_MTP)
    wiring = Wiring(
        V4_FIRST_WIRING,
        V4_BLOCK_WIRING,
        V4_LAST_WIRING,
        entering_v4,
        V4_DRAFTER_FIRST_WIRING,
        V4_DRAFTER_LAST_WIRING,
    )
    form_table = FormTable(V4_FORMS, {"streams": "S D"})

    def letters(self, config: V4Config) -> dict[str, int]:
        """Return the letters of tables.py."""
        return v4_letters(config)

    # ---- checkpoints -----------------------------------------------------------------------------

    layouts = V4_LAYOUTS
    sharding = V4_SHARDING
    spelling_in_vllm = Spelling.DEEPSEEK

    def rules(self, recipe: str, config: V4Config) -> tuple[Rule, ...]:
        """Return the rules of a recipe; they depend on the experts of the release."""
        return v4_rules(recipe, config)

    def with_engine_fusions(self, layout: Layout) -> Layout:
        """Return the layout with fused compressors, the form in which vLLM holds them."""
        return with_fused_compressors(layout)

    def head_groups(self, config: V4Config) -> tuple[int, str]:
        """Return the output groups: wo_a multiplies the heads of one at once."""
        return config.o_groups, "output groups"

    def recipe_in_vllm(
        self,
        config: V4Config,
        linears: Sequence[tuple[Parameter, str | None]],
        stored: Recipe,
        suffixes: str,
    ) -> tuple[Recipe, tuple[str, ...]]:
        """Return FP8 linears whatever is stored, with the drafter's experts like the others."""
        if suffixes == "compressed-tensors":
            return stored, ()
        if {weight for _, weight in linears} == {BF16}:
            return recipe_named("bf16", config), ()
        routed = {
            weight
            for parameter, weight in linears
            if parameter.expert is not None and not (parameter.block and parameter.block.is_drafter)
        }
        if _NVFP4 not in routed:
            return recipe_named("official", config), ()
        like = Rule("mtp.*.ffn.experts.*", _NVFP4, _NVFP4)
        rules = recipe_named("nvfp4-experts", config).rules
        return Recipe("nvfp4-experts, the drafter's too", (like, *rules)), ()

    def format_in_vllm(self, parameter: Parameter, weight: str) -> str:
        """Return FP8 for wo_a and BF16 for other NVFP4 linears: vLLM has NVFP4 experts alone."""
        if parameter.expert is not None:
            return weight
        if parameter.row.name == "attn.wo_a" and not weight.startswith("FP8"):
            return FP8_128X128_UE8M0.name
        return BF16 if weight == _NVFP4 else weight

    def modelopt_fields(
        self, groups: Mapping[str, Any], ignored: list[str], fused: list[str]
    ) -> dict[str, Any]:
        """Return groups as well, and the names of the checkpoint alone."""
        del fused
        return {"config_groups": groups, "ignore": ignored}

    def fp8_scales(self, parameter: Parameter, chosen: BlockFormat) -> BlockFormat:
        """Return fp32 scales for experts: engines read no others with `expert_dtype` fp8."""
        return chosen if parameter.expert is None else FP8_128X128_F32

    def stated_experts(self, weights: Collection[str]) -> Mapping[str, str]:
        """Return the key of the config by which loaders know FP8 experts."""
        return {"expert_dtype": "fp8"} if FP8_128X128_F32.name in weights else {}

    def omitted_drafter(self, recipe: str) -> str:
        """Return that NVFP4 throughout has no format for the drafter."""
        return "the recipe nvfp4-full says nothing of the drafter" if recipe == "nvfp4-full" else ""

    # ---- references ------------------------------------------------------------------------------

    def reference(self) -> ReferenceTable:
        """Return the functions of references/components/v4.py."""
        from degarble.references.components.v4 import REFERENCE  # noqa: PLC0415  heavy

        return REFERENCE

    def forward(self, bound: BoundModel, *, absorbed: bool = True) -> ModelV4:
        """Return the forward pass; V4 has no other form of attention."""
        from degarble.references.model import ModelV4  # noqa: PLC0415  heavy

        del absorbed
        config: Any = bound.config
        return ModelV4(bound, config)

    # ---- facts for judging -----------------------------------------------------------------------

    stores_indexer = True

    def earlier_window(self, config: V4Config) -> int:
        """Return the window without the token itself."""
        return config.sliding_window - 1

    def arrived(self, config: V4Config, via: str, made: Tensor) -> Tensor | None:
        """Repeat the embedded tokens, once a stream."""
        if via != "streams":
            return None
        return made.unsqueeze(1).expand(-1, config.hc_mult, *made.shape[1:])

    def named_positions(self, config: V4Config, component: Component) -> dict[int, str]:
        """Return the window, and where entries begin and are too many to be all chosen."""
        known = {config.sliding_window: f"the sliding window of {config.sliding_window}"}
        block = component.block
        if block is None or not block.ratio:
            return known
        ratio = block.ratio
        known[ratio - 1] = f"the first entry of {ratio} tokens"
        known[ratio] = f"the compress ratio {ratio}"
        # Layers of the smallest ratio have the indexer.
        smallest = min(each.ratio for each in config.layers if each.ratio)
        if component.role.startswith("attn.indexer") or ratio == smallest:
            top = config.index_topk * ratio
            known.setdefault(top + ratio - 1, f"after index_topk = {config.index_topk}")
            known.setdefault(top, f"index_topk = {config.index_topk} entries")
        return known

    def rope_bases(self, config: V4Config) -> tuple[float, ...]:
        """Return the base of windows, and that of layers with entries."""
        return config.rope_theta, config.compress_rope_theta

    def head_widths(self, config: V4Config) -> tuple[int, set[int]]:
        """Return the head, and its two parts."""
        return config.head_dim, {config.nope_head_dim, config.qk_rope_head_dim}

    def cached_latent(self, config: V4Config) -> tuple[int, int]:
        """Return the dims without rotation."""
        return config.nope_head_dim, 64

    def attention_error(
        self, call: JudgeableCall, laws: ShareStatistics
    ) -> tuple[Tensor, bool, tuple[str, ...]]:
        """Return the derivation of budgets.py."""
        from degarble.harness.families.deepseek_v4.budgets import (  # noqa: PLC0415  heavy
            attention_error,
        )

        return attention_error(call, laws)

    # ---- runs ------------------------------------------------------------------------------------

    last_token_roles = frozenset({"hc_head", "norm", "head"})

    def value_counts(self, config: V4Config) -> Mapping[str, ValueCounts]:
        """Return the table of value_counts.py."""
        from degarble.harness.families.deepseek_v4.values import value_counts  # noqa: PLC0415  heavy

        return value_counts(config)

    def remembered(
        self, config: V4Config, block: Block, role: str, step: Collection[SequenceTokens]
    ) -> int:
        """Return rows of the window, entries, scores and pools."""
        from degarble.harness.families.deepseek_v4.values import remembered  # noqa: PLC0415  heavy

        return remembered(config, block, role, step)

    def cached_values(self, config: V4Config, tokens: int, piece: int) -> int:
        """Return the values of windows, entries and the indexer's keys."""
        values = 0
        for block in config.layers:
            values += min(tokens, config.sliding_window + piece) * config.head_dim
            if block.ratio:
                entries = tokens // block.ratio + 1
                values += entries * (config.head_dim + config.index_head_dim)
        return values

    def chat_encoder(self) -> Any:
        """Return the encoder of V4's releases."""
        from degarble.harness.chat import encode_v4  # noqa: PLC0415  heavy

        return encode_v4

    def module_places(self, config: V4Config) -> list[ModulePlace]:
        """Return the map of transformers' deepseek_v4."""
        from degarble.harness.capture.modules import v4_places  # noqa: PLC0415  heavy

        return v4_places(config)

    def vllm_maps(self, config: V4Config, ranks: int) -> list[ComponentMap]:
        """Return the maps of vLLM's deepseek_v4."""
        from degarble.harness.capture.engine.maps import v4_component_maps  # noqa: PLC0415  heavy

        return v4_component_maps(config, ranks)

    def kernel_pairings(self) -> Mapping[str, Any]:
        """Return the norms, rows and attention of V4."""
        from degarble.harness.backends.cutedsl.backend import V4_PAIRINGS  # noqa: PLC0415  heavy

        return V4_PAIRINGS

    def graph_decoder(self, kernels: Any, bound: BoundModel, recipe: Recipe, size: Any) -> Any:
        """Return V4's layers, one token a lane."""
        from degarble.harness.backends.graph.decoder import Decoder  # noqa: PLC0415  heavy

        return Decoder.of_v4(kernels, bound, recipe, size)


FAMILY = DeepSeekV4()
