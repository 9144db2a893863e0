"""Registry of arithmetic conventions: choices in which correct implementations differ.

Real engines choose differently and no definition forbids it: where a fused kernel rounds, in which
format logits are kept, whether decoded weights become BF16. The twin and its budget are always
those of one value. That value comes from one of three sources:

* **declared**: `conventions` of a capture's manifest, of a backend, or `--convention NAME=VALUE`;
* **learned**: not declared, and one value fits every component that it concerns
  (conventions/learned.py);
* otherwise the official code of the family.

How to add one:

(1) Add a switch in references/numerics.py, read by the references where they round, and by the
    budget of the component; cover both sides in suites/references/test_numerics_switches.py.
(2) Add a row under the switch's name: its subject, each value in plain words, and the roles of the
    components whose numbers it changes. It goes into _ROUNDINGS where the values differ in
    roundings alone, into _MEANINGS where a fault could look like the other value.
(3) Nothing else: declaring, validation, learning, reports and
    suites/engine/conventions/test_conventions.py iterate over the registry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.formats.number_formats import BLOCK_FORMATS, E4M3, FP8_1X128_F32, WHOLE
from degarble.harness.model.config.config import V4Config, V32Config
from degarble.references.numerics import (
    BlockScaleUse,
    CodeSums,
    DecodedOperands,
    HeadNorm,
    IndexerFormat,
    InputQuantisation,
    KeyValueCache,
    Switches,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from degarble.references.numerics import Numerics

KEY = "conventions"
OPERANDS = "decoded_operands"
INPUTS = "quantised_inputs"
GEMM = "gemm"  # the role of any product of a plain model
DECLARED, LEARNED, CONTRADICTED = "declared", "learned", "contradicted"
OF_CAPTURE = "of the capture"
_REMEDY = "docs/checking.md lists the conventions and their values."


@dataclass(frozen=True)
class Convention:
    """One choice: `values` maps each legal value to plain words; without values it is a number.

    `roles` are those of the components whose numbers it changes. `by_family` is what the official
    code does where the switch is None.
    """

    name: str
    subject: str
    values: Mapping[Any, str]
    roles: frozenset[str]
    learned: bool = True
    witnesses: int = 2  # components required; 1 where no fault looks like it
    by_family: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    leans: float = 2.0  # factor by which a witness's squared distance has to be smaller
    habit: str = ""  # of the code that computes; conventions of one habit support each other
    formats: frozenset[str] = frozenset()  # of the recipe that it concerns; empty: any
    idle: frozenset[str] = frozenset()  # where another value of these is followed, it says nothing
    of_codes: bool = False  # it says nothing where no operand is stored or multiplied in codes
    of_ranks: bool = False  # its values are numbers of ranks, which divide those of the run

    def assumed(self, numerics: Numerics, family: str) -> Any:
        """Return the value by which a twin computes."""
        value = getattr(numerics.switches, self.name, None)
        return self.by_family.get(family) if value is None else value

    def among_ranks(self, ranks: int) -> Convention:
        """Return the convention with the values that a run on so many ranks may follow."""
        if not self.of_ranks:
            return self
        return replace(self, values={n: w for n, w in self.values.items() if ranks % n == 0})

    def words(self, value: Any) -> str:
        """Describe one value in plain words."""
        known = self.values.get(value)
        return f"{self.subject}: {value if known is None else known}"

    def read(self, value: Any, where: str) -> Any:
        """Return a stated value as the references take it; raise if it is invalid."""
        if not self.values:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not (math.isfinite(value) and value >= 0):
                raise InvalidArgument(
                    f"{self.name} {where}", value, "a finite number that is not negative", _REMEDY
                )
            return value
        for legal in self.values:
            same_kind = isinstance(legal, bool) == isinstance(value, bool)
            if same_kind and (legal is value or legal == value):
                return legal
        if value is None and getattr(Switches(), self.name, "") is None:
            return None  # as the official code of the family
        raise UnknownName.among(f"{self.name} {where}", value, [_spelt(v) for v in self.values])


@dataclass(frozen=True)
class ConventionUsed:
    """A convention other than the official one by which a run was judged.

    `source` is declared, learned or contradicted (declared, but the numbers fit `fits` instead).
    `components` counts those that tell the values apart; it is 0 for a declared value that nothing
    contradicts.
    """

    name: str
    value: Any
    source: str
    words: str
    components: int = 0
    fits: Any = None

    @property
    def sentence(self) -> str:
        """Describe it in one sentence."""
        if self.source == LEARNED:
            count = self.components
            shown = "1 component shows it" if count == 1 else f"{count} components show it"
            return f"{self.words} ({self.name}: {_spelt(self.value)}, learned: {shown})"
        if self.source == CONTRADICTED:
            return (
                f"{self.words} ({self.name}: {_spelt(self.value)}) was declared, but the numbers "
                f"of {self.components} components fit {_spelt(self.fits)}"
            )
        return f"{self.words} ({self.name}: {_spelt(self.value)}, declared)"

    def document(self) -> dict[str, Any]:
        """Return the JSON form."""
        found = {"name": self.name, "value": _plain(self.value), "source": self.source}
        found |= {"words": self.words, "components": self.components}
        return found | ({"fits": _plain(self.fits)} if self.source == CONTRADICTED else {})


def _roles(names: str) -> frozenset[str]:
    return frozenset(names.split())


_EAGER = "eager code stores every result"
_STORED = {True: "stored in BF16", False: "kept in float32"}
_COMPUTED = {True: "in BF16", False: "in float32"}
_NORMS = "norm enorm hnorm attn.norm attn.q_norm attn.kv_norm ffn.norm"
_POOLS = "attn.compressor.pool attn.indexer.compressor.pool"
_CACHED = "attn.kv_write attn.compressor.write"
_INDEXED = "attn.indexer.q attn.indexer.k attn.indexer.compressor.pool"
_LINEARS = (
    "head e_proj h_proj eh_proj attn.wq_a attn.wq_b attn.wkv attn.wkv_a attn.wkv_b attn.wo"
    " attn.wo_a attn.wo_b attn.indexer.wq_b attn.indexer.wk attn.indexer.weights_proj"
    " attn.compressor.proj attn.indexer.compressor.proj ffn.gate ffn.w13 ffn.w2"
    " ffn.shared.w13 ffn.shared.w2 ffn.experts.w13 ffn.experts.w2"
)

_BLOCK_SCALES = {
    BlockScaleUse.STATED: "as the checkpoint has them",
    BlockScaleUse.INPUTS: "rounded up to powers of two for inputs",
    BlockScaleUse.BOTH: (
        "rounded up to powers of two, and weights quantised again, as DeepGEMM asks for"
    ),
}

# Values that differ in roundings alone: learned where nobody declares them.
_ROUNDINGS = (
    Convention(
        OPERANDS,
        "quantised operands of a product",
        {
            DecodedOperands.EXACT: "multiplied as they are, scales included",
            DecodedOperands.WEIGHTS: "weights rounded to BF16 once decoded (models in FP16: FP16)",
            DecodedOperands.BOTH: (
                "weights and activations rounded to BF16 once decoded (models in FP16: FP16)"
            ),
        },
        _roles(f"{GEMM} {_LINEARS} traced.linear traced.experts"),
        witnesses=1,
        of_codes=True,
    ),
    Convention(
        INPUTS,
        "inputs that the checkpoint has quantised",
        {
            InputQuantisation.STATED: "quantised as it states",
            InputQuantisation.STEPWISE: (
                "quantised step by step in the model's dtype, as compressed-tensors emulates it"
            ),
            InputQuantisation.NONE: "left as they are",
        },
        _roles("traced.linear traced.experts"),
        of_codes=True,
    ),
    Convention(
        "input_factors_applied",
        "factors of an input (pre_quant_scale)",
        {True: "multiplied into the input", False: "decoded into the weight"},
        _roles("traced.linear"),
        of_codes=True,
    ),
    Convention(
        "code_sums",
        "products of FP8 codes",
        {
            CodeSums.FLOAT32: "summed in float32",
            CodeSums.HOPPER: "summed by Hopper's tensor core, which keeps 13 fraction bits",
            CodeSums.HOPPER_IN_STAGES: (
                "summed by Hopper's tensor core, and in float32 after every 128"
            ),
            CodeSums.ADA: "summed by Ada's tensor core, which keeps 13 fraction bits",
            CodeSums.ADA_IN_STAGES: "summed by Ada's tensor core, and in float32 after every 128",
        },
        _roles(f"{GEMM} {_LINEARS} traced.linear traced.experts"),
        formats=frozenset(name for name, form in BLOCK_FORMATS.items() if form.element is E4M3),
        idle=frozenset({OPERANDS, "input_factors_applied"}),
        of_codes=True,
    ),
    Convention(
        "block_scales",
        "scales of FP8 blocks in linears",
        _BLOCK_SCALES,
        _roles("traced.linear"),
        formats=frozenset({FP8_1X128_F32.name}),
        idle=frozenset({OPERANDS}),
    ),
    Convention(
        "expert_block_scales",
        "scales of FP8 blocks in routed experts",
        _BLOCK_SCALES,
        _roles("traced.experts"),
        formats=frozenset({FP8_1X128_F32.name}),
        idle=frozenset({OPERANDS}),
    ),
    Convention(
        "expert_input_scale_shared",
        "the input scale of quantised experts",
        {True: "the largest of the layer", False: "each expert's own"},
        _roles("traced.experts"),
        of_codes=True,
    ),
    Convention(
        "expert_width_parts",
        "routed experts whose width ranks share, so that each quantises its own part of a token",
        {1: "none"} | {parts: f"{parts} ranks" for parts in (2, 3, 4, 6, 8, 12, 16, 32)},
        _roles("traced.experts"),
        witnesses=1,
        formats=frozenset(name for name, form in BLOCK_FORMATS.items() if form.block[1] == WHOLE),
        of_codes=True,
        of_ranks=True,
    ),
    Convention(
        "cache_quantised",
        "keys and values that the checkpoint has quantised in its cache",
        {True: "cached as it states", False: "cached as they are"},
        _roles("traced.cache"),
    ),
    Convention(
        "operations_stored",
        "results on the way inside a component",
        {True: "every operation's, stored as eager code does", False: "kept in float32"},
        _roles(
            "traced.norm traced.activation traced.rotary traced.router traced.topk"
            " traced.module traced.rotation traced.residual traced.gated"
            " traced.stretch traced.choice"
        ),
        habit=_EAGER,
    ),
    Convention(
        "attention_operations_stored",
        "logits and shares on the way inside attention",
        {True: "stored after every operation, as eager code does", False: "kept in float32"},
        _roles("traced.attention"),
        habit=_EAGER,
    ),
    Convention(
        "expert_operations_stored",
        "results on the way inside routed experts",
        {True: "every operation's, stored as eager code does", False: "kept in float32"},
        _roles("traced.experts"),
        habit=_EAGER,
    ),
    Convention(
        "expert_sums_stored",
        "the sum over a token's experts",
        {True: "stored after every expert, as eager code does", False: "stored once"},
        _roles("traced.experts"),
        habit=_EAGER,
    ),
    Convention(
        "attention_in_storage_dtype",
        "attention's logits and normalised probabilities",
        _STORED,
        _roles("attn.attend"),
        by_family={V4Config.family: False, V32Config.family: True},
        # Each kernel rounds its shares in its own way, which dominates any distance. Measured: a
        # healthy kernel is 1.06 to 1.3 times nearer, an official one with a gain that still agrees
        # 0.65.
        leans=0.8,
    ),
    Convention(
        "head_norm",
        "the norm of query heads",
        {
            HeadNorm.EACH_STEP: "square, mean, root and product rounded to BF16",
            HeadNorm.FACTOR: "factor and product rounded to BF16",
            HeadNorm.ONCE: "fused with the rotation, rounded once after it",
        },
        _roles("attn.q_head_norm_rope"),
    ),
    Convention(
        "rotation_in_storage_dtype",
        "cosines and sines of the rotation",
        _COMPUTED,
        _roles(
            "attn.q_head_norm_rope attn.kv_norm_rope attn.inverse_rope attn.rope attn.indexer.q"
            f" attn.indexer.k {_POOLS}"
        ),
    ),
    Convention(
        "indexer_in_storage_dtype",
        "the indexer's products and sums (V4)",
        _STORED,
        _roles("attn.indexer.scores"),
    ),
    Convention(
        "indexer_weights_in_storage_dtype",
        "the indexer's head weights (V4)",
        _STORED,
        _roles("attn.indexer.weights_proj"),
    ),
    Convention(
        "pooling_in_storage_dtype",
        "the compressor's projections and pooled products",
        _STORED,
        _roles(f"attn.compressor.proj attn.indexer.compressor.proj {_POOLS}"),
    ),
    Convention(
        "mixing_in_storage_dtype",
        "post and mix of the residual streams",
        {True: "rounded to BF16 before they are applied", False: "applied in float32"},
        _roles("attn.hc_post ffn.hc_post"),
    ),
    Convention("router_in_storage_dtype", "the router's logits", _STORED, _roles("ffn.gate")),
    Convention(
        "residual_rounded_before_norm",
        "the residual sum in front of a norm (V3.2)",
        {True: "rounded to BF16 before the norm", False: "normed in float32"},
        _roles("norm attn.norm ffn.norm"),
    ),
    Convention(
        "latent_rounded_before_rotation",
        "V4's latent row between its norm and its rotation",
        {True: "rounded to BF16", False: "kept in float32, as a fused kernel does"},
        _roles("attn.kv_norm_rope"),
    ),
    Convention(
        "entry_rounded_in_between",
        "a compressed entry after pooling and after its norm",
        {True: "rounded to BF16", False: "kept in float32 up to the rotation"},
        _roles(_POOLS),
    ),
    Convention(
        "indexer_operand_rounded_in_between",
        "the indexer's operands after rotation and Hadamard",
        {True: "rounded to BF16", False: "kept in float32 up to their codes"},
        _roles(_INDEXED),
    ),
    Convention(
        "indexer_sum_in_storage_dtype",
        "the sum over the indexer's heads (V4, where products are stored)",
        _STORED,
        _roles("attn.indexer.scores"),
    ),
    Convention(
        "norm_rounded_before_weight",
        "the rows of a norm in front of its weight",
        {True: "rounded to BF16, as Llama's norm does", False: "kept in float32"},
        _roles(f"{_NORMS} attn.kv_norm_rope {_POOLS}"),
    ),
    Convention(
        "gate_rounded_before_product",
        "SiLU of the gate in front of its product with up",
        {True: "rounded to BF16", False: "kept in float32"},
        _roles("ffn.shared.act ffn.act ffn.experts.act_quant"),
    ),
    Convention(
        "activation_rounded_before_codes",
        "the routed experts' activation in front of its quantisation",
        {True: "rounded to BF16", False: "quantised out of float32, as a fused kernel does"},
        _roles("ffn.experts.act_quant"),
    ),
)

# Values that differ in meaning: a fault could look like the other value, so declared only.
_MEANINGS = (
    Convention(
        "latent_norm_epsilon",
        "the epsilon of q_norm and kv_norm (V3.2), where it is not the config's",
        {},
        _roles("attn.q_norm attn.kv_norm"),
    ),
    Convention(
        "kv_cache",
        "rows of the cache",
        {
            KeyValueCache.EXACT: "BF16",
            KeyValueCache.FP8: "FP8 with power-of-two scales",
            KeyValueCache.FP8_F32: "FP8 with float32 scales",
            KeyValueCache.NVFP4: "NVFP4",
        },
        _roles(_CACHED),
    ),
    Convention(
        "cache_scale_floored",
        "the least scale of a cached row",
        {True: "1e-4 of the scale", False: "1e-4 of the largest magnitude"},
        _roles(_CACHED),
    ),
    Convention(
        "indexer_format",
        "the indexer's queries and keys",
        {
            IndexerFormat.EXACT: "BF16",
            IndexerFormat.FP8: "FP8, a scale per 128",
            IndexerFormat.MXFP4: "MXFP4",
        },
        _roles(_INDEXED),
    ),
    Convention(
        "indexer_hadamard",
        "the Hadamard transform of the indexer's operands",
        {True: "applied", False: "left out of queries and keys"},
        _roles(_INDEXED),
    ),
    Convention(
        "routing_epsilon",
        "what is added to the sum of the chosen router scores",
        {},
        _roles("ffn.topk"),
    ),
    Convention(
        "routing_weight_before_w2",
        "the router's weight of an expert",
        {True: "multiplied in front of w2", False: "multiplied after w2"},
        _roles("ffn.experts.act_quant ffn.experts.combine"),
    ),
    Convention(
        "shared_expert_clamped",
        "the clamp of SwiGLU in the shared expert",
        {True: "applied", False: "left out"},
        _roles("ffn.shared.act ffn.act"),
    ),
    Convention(
        "input_scale_shared",
        "the NVFP4 input scale of routed experts",
        {True: "the largest of the layer", False: "each expert's own"},
        _roles("ffn.experts.w13.act_quant ffn.experts.act_quant"),
    ),
    Convention(
        "wo_a_follows_recipe",
        "the input of wo_a (V4)",
        {True: "quantised as the recipe says", False: "left in BF16"},
        _roles("attn.wo_a attn.wo_a.act_quant"),
    ),
    Convention(
        "reduction_in_storage_dtype",
        "sums over ranks",
        _COMPUTED,
        _roles("attn.wo attn.wo_b ffn.shared.w2 ffn.w2 ffn.experts.w2"),
    ),
    Convention(
        "first_draft_embedding_zeroed",
        "the drafter's embedding at position 0",
        {True: "zeroed", False: "read from the table"},
        _roles("embed"),
    ),
)

REGISTRY: Mapping[str, Convention] = MappingProxyType(
    {convention.name: convention for convention in _ROUNDINGS}
    | {convention.name: replace(convention, learned=False) for convention in _MEANINGS}
)


# These were one switch at first, and older captures state only that one.
_IMPLIED = {"indexer_weights_in_storage_dtype": "indexer_in_storage_dtype"}


def convention_named(name: str, where: str = OF_CAPTURE) -> Convention:
    """Return the convention of a name; raise if unknown."""
    if name not in REGISTRY:
        raise UnknownName.among(f"convention {where}", name, REGISTRY)
    return REGISTRY[name]


def read_conventions(stated: Any, where: str = OF_CAPTURE) -> dict[str, Any]:
    """Return stated conventions as switches of the references; raise for unknown ones."""
    if not isinstance(stated, Mapping):
        raise InvalidArgument(f"{KEY} {where}", type(stated).__name__, "values by name", _REMEDY)
    found = {name: convention_named(name, where).read(stated[name], where) for name in stated}
    for name, other in _IMPLIED.items():
        if other in found:
            found.setdefault(name, found[other])
    return found


def conventions_in(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the conventions stated in a capture's facts; empty where all are official."""
    return read_conventions(facts.get(KEY, {}))


def read_options(words: Iterable[str], where: str = "of --convention") -> dict[str, Any]:
    """Parse `NAME=VALUE` options of the command line."""
    stated: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise InvalidArgument(
                "--convention", word, "NAME=VALUE", "Such as --convention head_norm=once."
            )
        stated[name] = _value_of_text(convention_named(name, where), value)
    return read_conventions(stated, where)


def _value_of_text(convention: Convention, text: str) -> Any:
    if not convention.values:
        try:
            return float(text)
        except ValueError:
            return text
    return next((legal for legal in convention.values if _spelt(legal) == text.lower()), text)


def stored_conventions(conventions: Mapping[str, Any]) -> dict[str, Any]:
    """Return conventions as a manifest states them."""
    return {name: _plain(conventions[name]) for name in sorted(conventions)}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, StrEnum) else value


def _spelt(value: Any) -> str:
    return str(value).lower()
