"""DeepSeek-V3.2: MLA over latents, tokens chosen by an indexer, a residual beside the norms."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from degarble.harness.families.deepseek_v32.tables import (
    V32_BLOCK,
    V32_BLOCK_WIRING,
    V32_DRAFTER_FIRST_WIRING,
    V32_DRAFTER_LAST_WIRING,
    V32_ENDS,
    V32_FIRST_WIRING,
    V32_FORMS,
    V32_LAST_WIRING,
    V32_MTP,
    V32_SHARDING,
    entering_v32,
    v32_letters,
    v32_rules,
)
from degarble.harness.model.components import Wiring
from degarble.harness.model.config.json_file import read_v32, write_v32
from degarble.harness.model.family import TabledFamily
from degarble.harness.model.layouts import V32_LAYOUTS, Spelling
from degarble.harness.model.parameters import ParameterTable
from degarble.harness.model.recipes import BF16, Recipe, Rule
from degarble.harness.model.site_forms import FormTable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.capture.captured_size import SequenceTokens, ValueCounts
    from degarble.harness.capture.modules import ModulePlace
    from degarble.harness.engine.budget.attention import ShareStatistics
    from degarble.harness.engine.budget.rules import JudgeableCall
    from degarble.harness.model.components import Component
    from degarble.harness.model.config.config import V32Config
    from degarble.harness.model.parameters import Parameter
    from degarble.harness.model.types import Block, Yarn
    from degarble.references.binding import BoundModel
    from degarble.references.facts import ReferenceTable
    from degarble.references.model import ModelV32

# It is fused with weights_proj, which is BF16: vLLM 0.33 models/deepseek_v32 (wk_weights_proj).
_DECODED_IN_VLLM = "attn.indexer.wk"


class DeepSeekV32(TabledFamily):
    """The family of V3.2-Exp and V3.2."""

    name = "deepseek_v32"

    # ---- config.json -----------------------------------------------------------------------------

    model_types = ("deepseek_v32",)

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        """Recognise the official code's own file too, which states no model_type."""
        inference = raw.get("model_type") is None and "compress_ratios" not in raw
        own = inference and "kv_lora_rank" in raw and "index_topk" in raw
        return own or super().recognises(raw)

    def read(self, raw: Mapping[str, Any]) -> V32Config:
        """Read any of three spellings."""
        return read_v32(raw)

    def write(self, config: V32Config, spelling: str) -> dict[str, Any]:
        """Write any of three spellings."""
        return write_v32(config, spelling)

    def without_drafters(self, config: V32Config) -> V32Config:
        """Return the main model, without MTP."""
        return replace(config, num_nextn_predict_layers=0)

    # ---- structure -------------------------------------------------------------------------------

    rows = ParameterTable(V32_ENDS, V32_BLOCK, V32_MTP)
    wiring = Wiring(
        V32_FIRST_WIRING,
        V32_BLOCK_WIRING,
        V32_LAST_WIRING,
        entering_v32,
        V32_DRAFTER_FIRST_WIRING,
        V32_DRAFTER_LAST_WIRING,
    )
    # Columns of wkv_a and kv_write.
    form_table = FormTable(V32_FORMS, {"latent": "kl", "rope": "p"})

    def letters(self, config: V32Config) -> dict[str, int]:
        """Return the letters of tables.py."""
        return v32_letters(config)

    # ---- checkpoints -----------------------------------------------------------------------------

    layouts = V32_LAYOUTS
    sharding = V32_SHARDING
    spelling_in_vllm = Spelling.HUGGINGFACE
    input_scale_of_layer = True

    def rules(self, recipe: str, config: V32Config) -> tuple[Rule, ...]:
        """Return the rules of a recipe."""
        del config
        return v32_rules(recipe)

    def recipe_in_vllm(
        self,
        config: V32Config,
        linears: Sequence[tuple[Parameter, str | None]],
        stored: Recipe,
        suffixes: str,
    ) -> tuple[Recipe, tuple[str, ...]]:
        """Return what the config says of each module, with the indexer's wk decoded."""
        del config, suffixes
        keys = {weight for parameter, weight in linears if parameter.row.name == _DECODED_IN_VLLM}
        if keys <= {BF16}:
            return stored, ()
        rule = Rule(f"*.{_DECODED_IN_VLLM}", BF16)
        recipe = Recipe(f"{stored.name}, wk dequantised", (rule, *stored.rules))
        return recipe, (r"\.indexer\.wk$",)

    # ---- references ------------------------------------------------------------------------------

    def reference(self) -> ReferenceTable:
        """Return the functions of references/components/v32.py."""
        from degarble.references.components.v32 import REFERENCE  # noqa: PLC0415  heavy

        return REFERENCE

    def forward(self, bound: BoundModel, *, absorbed: bool = True) -> ModelV32:
        """Return the forward pass: attention to latents, or to expanded keys and values."""
        from degarble.references.model import ModelV32  # noqa: PLC0415  heavy

        config: Any = bound.config
        return ModelV32(bound, config, absorbed=absorbed)

    # ---- facts for judging -----------------------------------------------------------------------

    def arrived(self, config: V32Config, via: str, made: Tensor) -> Tensor | None:
        """Return the latent columns of a row, or the rotated ones."""
        width = config.kv_lora_rank
        return {"latent": made[..., :width], "rope": made[..., width:]}.get(via)

    def named_positions(self, config: V32Config, component: Component) -> dict[int, str]:
        """Return where tokens are too many to be all chosen."""
        del component
        return {config.index_topk: f"index_topk = {config.index_topk}"}

    norms_add_residual = True

    def expert_groups(self, config: V32Config) -> tuple[int, int]:
        """Return the groups of the config."""
        return config.n_group, config.topk_group

    def logit_yarn(self, config: V32Config) -> Yarn | None:
        """Return the config's YaRN: its mscale_all_dim scales logits."""
        return config.yarn

    def head_widths(self, config: V32Config) -> tuple[int, set[int]]:
        """Return the head, its part without rotation, the value, and a row in both its parts."""
        latent = config.kv_lora_rank
        others = {config.qk_nope_head_dim, latent, config.v_head_dim}
        return config.qk_head_dim, others | {latent + config.qk_rope_head_dim}

    def cached_latent(self, config: V32Config) -> tuple[int, int]:
        """Return the latent columns."""
        return config.kv_lora_rank, 128

    def attention_error(
        self, call: JudgeableCall, laws: ShareStatistics
    ) -> tuple[Tensor, bool, tuple[str, ...]]:
        """Return the derivation of budgets.py."""
        from degarble.harness.families.deepseek_v32.budgets import (  # noqa: PLC0415  heavy
            attention_error,
        )

        return attention_error(call, laws)

    # ---- runs ------------------------------------------------------------------------------------

    def value_counts(self, config: V32Config) -> Mapping[str, ValueCounts]:
        """Return the table of values.py."""
        from degarble.harness.families.deepseek_v32.values import (  # noqa: PLC0415  heavy
            value_counts,
        )

        return value_counts(config)

    def remembered(
        self, config: V32Config, block: Block, role: str, step: Collection[SequenceTokens]
    ) -> int:
        """Return cached rows and the indexer's scores."""
        from degarble.harness.families.deepseek_v32.values import (  # noqa: PLC0415  heavy
            remembered,
        )

        return remembered(config, block, role, step)

    def cached_values(self, config: V32Config, tokens: int, piece: int) -> int:
        """Return the values of latents, rotated keys and the indexer's keys."""
        del piece
        width = config.kv_lora_rank + config.qk_rope_head_dim + config.index_head_dim
        return tokens * config.num_hidden_layers * width

    def chat_encoder(self) -> Any:
        """Return the encoder of V3.2's releases."""
        from degarble.harness.chat import encode_v32  # noqa: PLC0415  heavy

        return encode_v32

    def module_places(self, config: V32Config) -> list[ModulePlace]:
        """Return the map of transformers' deepseek_v32."""
        from degarble.harness.capture.modules import v32_places  # noqa: PLC0415  heavy

        return v32_places(config)

    def kernel_pairings(self) -> Mapping[str, Any]:
        """Return the norms, rows and attention of V3.2."""
        from degarble.harness.backends.cutedsl.backend import V32_PAIRINGS  # noqa: PLC0415  heavy

        return V32_PAIRINGS

    def graph_decoder(self, kernels: Any, bound: BoundModel, recipe: Recipe, size: Any) -> Any:
        """Return V3.2's layers, prompts in pieces."""
        from degarble.harness.backends.graph.decoder import Decoder  # noqa: PLC0415  heavy

        return Decoder.of_v32(kernels, bound, recipe, size)


FAMILY = DeepSeekV32()
