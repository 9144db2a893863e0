"""A small family, made by a drill: a pre-norm decoder with full attention and no positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from degarble.harness.model.components import ComponentWiring, Wiring
from degarble.harness.model.config.config import require_fields
from degarble.harness.model.family import TabledFamily
from degarble.harness.model.layouts import Layout, Spelling
from degarble.harness.model.parameters import ParameterTable, Row
from degarble.harness.model.site_forms import FormRow, FormTable
from degarble.harness.model.types import Block, Dtype, Kind, LayerType, MlpType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.references.binding import BoundModel
    from degarble.references.facts import ReferenceTable
    from degarble.suites.house.plain_family.reference import PlainModel

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)


@dataclass(frozen=True, kw_only=True)
class PlainConfig:
    """The sizes of a model."""

    family: ClassVar[str] = "plain"
    drafters: ClassVar[int] = 0
    rms_norm_eps: ClassVar[float] = 1e-6
    max_position_embeddings: ClassVar[int | None] = None

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    other: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        require_fields(self, {}, {})

    @cached_property
    def layers(self) -> tuple[Block, ...]:
        """Return the decoder layers."""
        count = range(self.num_hidden_layers)
        return tuple(Block("layers", i, LayerType.FULL, MlpType.DENSE, 0) for i in count)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Return the decoder layers: nothing drafts."""
        return self.layers

    @property
    def head_dim(self) -> int:
        """Return the width of a head."""
        return self.hidden_size // self.num_attention_heads


def _linear(name: str, hf: str, shape: str, reader: str) -> Row:
    return Row(name, hf, shape, Kind.LINEAR, Dtype.BF16, reader)


def _norm(name: str, hf: str, reader: str) -> Row:
    return Row(name, hf, "D", Kind.NORM, Dtype.BF16, reader)


def _entering(config: PlainConfig, block: Block | None, before: Block | None) -> Mapping[str, str]:
    del config, block
    return {"stream": f"{before.prefix}.ffn.add.out" if before else "embed.out"}


class Plain(TabledFamily):
    """The family: a table of parameters, one of components, and functions in reference.py."""

    name = "plain"
    model_types = ("plain",)

    rows = ParameterTable(
        ends=(
            Row("embed", "embed_tokens", "V D", Kind.EMBEDDING, Dtype.BF16, "embed"),
            _norm("norm", "norm", "norm"),
            _linear("head", "lm_head", "V D", "head"),
        ),
        block=(
            _norm("attn_norm", "input_layernorm", "attn.norm"),
            _linear("attn.wq", "self_attn.q_proj", "D D", "attn.wq"),
            _linear("attn.wk", "self_attn.k_proj", "D D", "attn.wk"),
            _linear("attn.wv", "self_attn.v_proj", "D D", "attn.wv"),
            _linear("attn.wo", "self_attn.o_proj", "D D", "attn.wo"),
            _norm("ffn_norm", "post_attention_layernorm", "ffn.norm"),
            _linear("ffn.w1", "mlp.gate_proj", "F D", "ffn.w13"),
            _linear("ffn.w2", "mlp.down_proj", "D F", "ffn.w2"),
            _linear("ffn.w3", "mlp.up_proj", "F D", "ffn.w13"),
        ),
    )
    wiring = Wiring(
        first=(ComponentWiring("embed", "tokens=@tokens"),),
        block=(
            ComponentWiring("attn.norm", "x=@stream"),
            ComponentWiring("attn.wq", "x=attn.norm.out", kind="attn.wq_a"),
            ComponentWiring("attn.wk", "x=attn.norm.out", kind="attn.wq_a"),
            ComponentWiring("attn.wv", "x=attn.norm.out", kind="attn.wq_a"),
            ComponentWiring(
                "attn.attend",
                "q=attn.wq.out key=attn.wk.out value=attn.wv.out state_key=@state"
                " state_value=@state positions=@positions token_offsets=@offsets",
                kind="plain.attention",
            ),
            ComponentWiring("attn.wo", "x=attn.attend.out"),
            ComponentWiring("attn.add", "x=attn.wo.out stream=@stream", kind="plain.sum"),
            ComponentWiring("ffn.norm", "x=attn.add.out"),
            ComponentWiring("ffn.w13", "x=ffn.norm.out"),
            ComponentWiring("ffn.act", "x=ffn.w13.out"),
            ComponentWiring("ffn.w2", "x=ffn.act.out"),
            ComponentWiring("ffn.add", "x=ffn.w2.out stream=attn.add.out", kind="plain.sum"),
        ),
        last=(ComponentWiring("norm", "x=@stream"), ComponentWiring("head", "x=norm.out")),
        entering=_entering,
    )
    form_table = FormTable(
        (
            FormRow("embed norm attn.norm attn.wq attn.wk attn.wv attn.attend attn.wo", "D"),
            FormRow("attn.add ffn.norm ffn.w2 ffn.add", "D"),
            FormRow("ffn.w13", "2*F"),
            FormRow("ffn.act", "F"),
            FormRow("head", "V"),
        )
    )
    layouts = {  # noqa: RUF012  as its base has it
        "official": Layout("official", "plain", Spelling.HUGGINGFACE, "huggingface", "official")
    }

    def read(self, raw: Mapping[str, Any]) -> PlainConfig:
        """Read the sizes."""
        rest = {name: value for name, value in raw.items() if name not in _COUNTS}
        sizes: dict[str, Any] = {name: raw.get(name) for name in _COUNTS}
        return PlainConfig(**sizes, other=rest)

    def write(self, config: PlainConfig, spelling: str) -> dict[str, Any]:
        """Write the sizes: there is one spelling."""
        del spelling
        sizes = {name: getattr(config, name) for name in _COUNTS}
        return {**config.other, "model_type": self.name, **sizes}

    def letters(self, config: PlainConfig) -> dict[str, int]:
        """Return vocabulary, hidden size, heads and width of the MLP."""
        sizes = config.vocab_size, config.hidden_size, config.num_attention_heads
        return dict(zip("VDHF", (*sizes, config.intermediate_size), strict=True))

    def reference(self) -> ReferenceTable:
        """Return the functions of reference.py."""
        from degarble.suites.house.plain_family.reference import REFERENCE  # noqa: PLC0415  heavy

        return REFERENCE

    def forward(self, bound: BoundModel, *, absorbed: bool = True) -> PlainModel:
        """Return the forward pass."""
        from degarble.suites.house.plain_family.reference import PlainModel  # noqa: PLC0415  heavy

        del absorbed
        return PlainModel(bound, bound.config)

    def budget_rules(self) -> Mapping[str, Any]:
        """Return how far rounding may change attention, and sums."""
        from degarble.suites.house.plain_family.reference import BUDGETS  # noqa: PLC0415  heavy

        return BUDGETS


FAMILY = Plain()
