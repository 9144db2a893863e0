"""Define the config records of DeepSeek-V4 and V3.2, check every field, and give the released ones.

Every record checks itself, however it was made: types, ranges, and contradictions (heads that no
group count divides, a list of ratios of the wrong length). Compress ratios are 0, 4 or 128, and are
read, never assumed: layer 60 of V4-Pro was once believed to be 0 and is 4. Provenance
(`quantisation`, `other`) is kept unchanged and takes no part in equality.

Sources: deepseek-ai/DeepSeek-V4-Pro and -Flash config.json and inference/model.py;
deepseek-ai/DeepSeek-V3.2-Exp inference/config_671B_v3.2.json.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import isfinite
from sys import float_info
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.model.types import Block, LayerType, MlpType, Rope, RopeEnd, RopePairing, Yarn

if TYPE_CHECKING:
    from collections.abc import Mapping


# --------------------------------------------------------------------------------------------------
# Checks of type and range, by the annotation of a field
#
# An int is an int (not a bool, not a string of digits), a float is finite and not negative, a name
# is one of the known ones. Errors name the field.

_MAY_BE_ZERO = ("mscale", "mscale_all_dim", "attention_factor")
REMEDY = "Correct the model's config.json; no value is assumed in its place."


def require(ok: bool, name: str, value: object, expectation: str) -> None:
    """Refuse the field `name` unless `ok`."""
    if not ok:
        raise InvalidArgument(name, value, expectation, REMEDY)


def require_fields(
    record: Any, lowest: Mapping[str, int], names: Mapping[str, frozenset[str]]
) -> None:
    """Check each field of a frozen record against its annotation.

    Integers start at 1 unless `lowest` says otherwise; strings come from `names`.
    """
    for entry in fields(record):
        value = getattr(record, entry.name)
        optional = str(entry.type).endswith(" | None")
        if optional and value is None:
            continue
        match str(entry.type).removesuffix(" | None"):
            case "int":
                _require_int(entry.name, value, lowest.get(entry.name, 1))
            case "float":
                _require_real(entry.name, value, lowest.get(entry.name))
            case "str":
                if not isinstance(value, str) or value not in names[entry.name]:
                    raise UnknownName.among(entry.name, value, names[entry.name])
            case "tuple[int, ...]":
                require(isinstance(value, tuple), entry.name, value, "a list of integers")
                for item in value:
                    _require_int(entry.name, item, 0)
            case "bool":
                require(isinstance(value, bool), entry.name, value, "true or false")
            case "Yarn":
                require(isinstance(value, Yarn), entry.name, value, "YaRN parameters")
                require_yarn(value)
            case _:
                pass  # provenance, or a record that checks itself


def require_yarn(yarn: Yarn) -> None:
    """Refuse YaRN whose facts are out of range, each or together."""
    require_fields(yarn, dict.fromkeys(_MAY_BE_ZERO, 0), {})
    length = yarn.original_max_position_embeddings
    require(length < 1 << 63, "original_max_position_embeddings", length, "below 2^63")
    for name in ("beta_fast", "beta_slow"):
        turns = getattr(yarn, name)
        require(turns > length / float_info.max, name, turns, f"more turns within {length} tokens")
    for name, scale in (("mscale", yarn.rotation_scale), ("mscale_all_dim", yarn.logit_scale)):
        require(isfinite(scale), name, getattr(yarn, name), "a number whose scale is finite")


def _require_int(name: str, value: object, lowest: int) -> None:
    require(type(value) is int, name, value, "an integer")
    assert isinstance(value, int)
    require(value >= lowest, name, value, f"at least {lowest}")


def _require_real(name: str, value: object, lowest: int | None) -> None:
    # Trap: math.isfinite raises for an int beyond the largest float; NaN compares false.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    require(number, name, value, "a number")
    assert isinstance(value, int | float)
    finite = abs(value) <= float_info.max
    if lowest is None:
        require(finite and value > 0, name, value, "a finite number above 0")
    else:
        require(finite and value >= lowest, name, value, f"a finite number from {lowest}")


# --------------------------------------------------------------------------------------------------
# The records

# DeepSeek-V4 inference/model.py: ratio 4 alone overlaps and has an indexer.
LAYER_TYPES: Mapping[int, LayerType] = MappingProxyType(
    {0: LayerType.SLIDING, 4: LayerType.SPARSE, 128: LayerType.HEAVY}
)
INDEXER_NORM_EPSILON = 1e-6  # of V3.2's LayerNorm: official code, transformers and vLLM fix it
SCORING = frozenset({"sqrtsoftplus", "softmax", "sigmoid"})


@dataclass(frozen=True, kw_only=True)
class Dspark:
    """The block-parallel drafter of V4-Flash-0731 and V4-Pro-0813 instead of the MTP block."""

    target_layer_ids: tuple[int, ...]
    markov_rank: int
    block_size: int
    noise_token_id: int

    @property
    def blocks(self) -> int:
        """Return the number of drafter blocks: one a target layer (observed in Flash-0731 only)."""
        return len(self.target_layer_ids)


@dataclass(frozen=True, kw_only=True)
class V4Config:
    """DeepSeek-V4. Constant for the family: one KV head, one shared expert, untied head."""

    family: ClassVar[str] = "deepseek_v4"

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int | None = None

    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    # Tokens, the attending one included.
    sliding_window: int
    compress_ratios: tuple[int, ...]  # one a layer; a drafter block's 0 may follow
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn | None

    index_n_heads: int
    index_head_dim: int
    index_topk: int

    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    # The first layers choose experts by a table of token ids, not by scores.
    num_hash_layers: int
    scoring_func: str
    routed_scaling_factor: float
    swiglu_limit: float  # 0: no clamp
    expert_dtype: str = "fp4"

    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float = 1e-6

    num_nextn_predict_layers: int
    dspark: Dspark | None = None
    quantisation: Mapping[str, Any] | None = field(default=None, compare=False)
    other: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        lowest = {"num_hash_layers": 0, "num_nextn_predict_layers": 0, "swiglu_limit": 0}
        names = {"scoring_func": SCORING, "expert_dtype": frozenset({"fp4", "fp8"})}
        require_fields(self, lowest, names)
        if self.dspark is not None:
            require_fields(self.dspark, {"noise_token_id": 0}, {})
        self._require_agreement()

    def _require_agreement(self) -> None:
        """Raise if fields that are valid alone contradict each other."""
        layers, ratios = self.num_hidden_layers, self.compress_ratios
        lengths = sorted({layers, layers + self.num_nextn_predict_layers, layers + self.drafters})
        length = (
            f"{' or '.join(map(str, lengths))} entries: one a layer, or one a drafter block more"
        )
        require(len(ratios) in lengths, "compress_ratios", len(ratios), length)
        for layer, ratio in enumerate(ratios):
            known = LAYER_TYPES if layer < layers else {0: None}
            place = f"compress_ratios[{layer}]"
            require(ratio in known, place, ratio, f"one of {', '.join(map(str, known))}")
        heads = self.num_attention_heads
        require(
            heads % self.o_groups == 0, "o_groups", self.o_groups, f"a divisor of {heads} heads"
        )
        require(
            self.num_hash_layers <= layers,
            "num_hash_layers",
            self.num_hash_layers,
            f"at most num_hidden_layers = {layers}",
        )
        require_experts(self.num_experts_per_tok, self.n_routed_experts)
        narrowest = min(self.head_dim, self.index_head_dim)
        require_rotary(self.qk_rope_head_dim, narrowest, "head_dim and index_head_dim")
        for layer in self.dspark.target_layer_ids if self.dspark else ():
            require(layer < layers, "dspark_target_layer_ids", layer, f"a layer below {layers}")
        if self.yarn is not None:
            require_base(self.compress_rope_theta, "compress_rope_theta")
            require(self.yarn.truncate, "truncate", False, "true: nothing else is read for V4")
            if self.yarn.attention_factor is None:  # unstated: V4 does not scale cos and sin
                object.__setattr__(self, "yarn", replace(self.yarn, attention_factor=1.0))
        # Drafter blocks have no compressor; what the list says of them is checked, then left out.
        object.__setattr__(self, "compress_ratios", ratios[:layers])

    @property
    def drafters(self) -> int:
        """Return the number of drafter blocks `mtp.0`, `mtp.1`, ..."""
        return self.dspark.blocks if self.dspark else self.num_nextn_predict_layers

    @cached_property
    def layers(self) -> tuple[Block, ...]:
        """Return the decoder layers of the main model."""
        count = self.num_hidden_layers
        return tuple(self._block("layers", i, self.compress_ratios[i]) for i in range(count))

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Return decoder layers, then drafter blocks. These have no compressor (ratio 0)."""
        return self.layers + tuple(self._block("mtp", i, 0) for i in range(self.drafters))

    def _block(self, scope: str, index: int, ratio: int) -> Block:
        hashed = scope == "layers" and index < self.num_hash_layers
        mlp = MlpType.HASH if hashed else MlpType.SCORED
        return Block(scope, index, LAYER_TYPES[ratio], mlp, ratio)

    def layer_type(self, layer: int) -> LayerType:
        """Return what kind of attention decoder layer `layer` has."""
        return self.layers[layer].layer_type

    def has_indexer(self, layer: int) -> bool:
        """Return whether `layer` chooses among its compressed entries."""
        return self.layer_type(layer) is LayerType.SPARSE

    def coff(self, layer: int) -> int:
        """Return how many windows an entry covers: 2 if they overlap, else 1; 0 without entries."""
        return compressor_windows(self.layers[layer])

    def rope(self, block: Block) -> Rope:
        """Return the RoPE of `block`, which q, window KV, compressed KV and the indexer share."""
        # A layer with compressed entries rotates everything by the second base, with YaRN.
        compressed = block.ratio > 0
        return Rope(
            theta=self.compress_rope_theta if compressed else self.rope_theta,
            dims=self.qk_rope_head_dim,
            pairing=RopePairing.INTERLEAVED,
            end=RopeEnd.LAST,
            yarn=self.yarn if compressed else None,
        )

    def indexer_rope(self, block: Block) -> Rope:
        """Return the RoPE of the indexer, that of its block."""
        return self.rope(block)

    @property
    def nope_head_dim(self) -> int:
        """Return the dims of a head without rotation; these come first."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def heads_per_group(self) -> int:
        """Return how many consecutive heads share one output group."""
        return self.num_attention_heads // self.o_groups

    @property
    def group_features(self) -> int:
        """Return the number of inputs of one block of wo_a."""
        return self.heads_per_group * self.head_dim

    @property
    def hc_rows(self) -> int:
        """Return the rows of a hyper-connection: pre, post, and the mix, row-major."""
        return (2 + self.hc_mult) * self.hc_mult


@dataclass(frozen=True, kw_only=True)
class V32Config:
    """DeepSeek-V3.2. Constant for the family: MoE after the dense layers, untied head."""

    family: ClassVar[str] = "deepseek_v32"
    dspark: ClassVar[None] = None

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int | None = None

    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float
    yarn: Yarn | None

    index_n_heads: int
    index_head_dim: int
    index_topk: int

    intermediate_size: int
    # So many leading layers have a dense MLP of width `intermediate_size`.
    first_k_dense_replace: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    # Routing chooses `topk_group` of `n_group` expert groups first, then experts inside them.
    n_group: int
    topk_group: int
    scoring_func: str
    routed_scaling_factor: float

    num_nextn_predict_layers: int
    quantisation: Mapping[str, Any] | None = field(default=None, compare=False)
    other: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        lowest = {"first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
        require_fields(self, lowest, {"scoring_func": SCORING})
        layers, groups, experts = self.num_hidden_layers, self.n_group, self.n_routed_experts
        require(
            self.first_k_dense_replace <= layers,
            "first_k_dense_replace",
            self.first_k_dense_replace,
            f"at most num_hidden_layers = {layers}",
        )
        require(experts % groups == 0, "n_group", groups, f"a divisor of {experts} experts")
        require(
            self.topk_group <= groups, "topk_group", self.topk_group, f"at most {groups} groups"
        )
        require_experts(self.num_experts_per_tok, experts // groups * self.topk_group)
        require_rotary(self.qk_rope_head_dim, self.index_head_dim, "index_head_dim")
        if self.yarn is not None:
            require_base(self.rope_theta, "rope_theta")

    @property
    def drafters(self) -> int:
        """Return the number of drafter blocks, stored after the decoder layers."""
        return self.num_nextn_predict_layers

    @cached_property
    def layers(self) -> tuple[Block, ...]:
        """Return the decoder layers of the main model."""
        return tuple(self._block("layers", i) for i in range(self.num_hidden_layers))

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Return decoder layers, then drafter blocks."""
        return self.layers + tuple(self._block("mtp", i) for i in range(self.drafters))

    def _block(self, scope: str, index: int) -> Block:
        dense = scope == "layers" and index < self.first_k_dense_replace
        mlp = MlpType.DENSE if dense else MlpType.SCORED
        return Block(scope, index, LayerType.INDEXED, mlp, 0)

    def layer_type(self, layer: int) -> LayerType:
        """Return the kind of attention of `layer`: sparse by the indexer, everywhere."""
        return self.layers[layer].layer_type

    def has_indexer(self, layer: int) -> bool:
        """Return whether `layer` chooses tokens; in V3.2 every layer does."""
        return self.layer_type(layer) is LayerType.INDEXED

    def rope(self, block: Block) -> Rope:
        """Return the RoPE of the separate rotary dims of q and k, in every block."""
        del block
        return self._rope(RopePairing.INTERLEAVED, RopeEnd.LAST)

    def indexer_rope(self, block: Block | None = None) -> Rope:
        """Return the indexer's RoPE; the code released before 2025-11-17 paired dims wrongly."""
        del block
        return self._rope(RopePairing.HALVES, RopeEnd.FIRST)

    def _rope(self, pairing: RopePairing, end: RopeEnd) -> Rope:
        dims = self.qk_rope_head_dim
        return Rope(theta=self.rope_theta, dims=dims, pairing=pairing, end=end, yarn=self.yarn)

    @property
    def qk_head_dim(self) -> int:
        """Return the dims of one query head: nope, then rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Return the width of the shared experts, which are stored as one."""
        return self.moe_intermediate_size * self.n_shared_experts


class Config(Protocol):
    """What the config of every family states, as a frozen record; its own record states more."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __hash__(self) -> int:
        """Return the hash of a frozen record."""
        ...

    @property
    def family(self) -> str:
        """Return the name of the family."""
        ...

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens."""
        ...

    @property
    def hidden_size(self) -> int:
        """Return the width of the residual stream."""
        ...

    @property
    def max_position_embeddings(self) -> int | None:
        """Return the longest context; None where it is not stated."""
        ...

    @property
    def layers(self) -> tuple[Block, ...]:
        """Return the decoder layers of the main model."""
        ...

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Return decoder layers, then drafter blocks."""
        ...

    @property
    def drafters(self) -> int:
        """Return the number of drafter blocks."""
        ...


def has_parallel_drafter(config: object) -> bool:
    """Return whether the drafter is a block-parallel one, DSpark."""
    return getattr(config, "dspark", None) is not None


def compressor_windows(block: Block) -> int:
    """Return how many windows one compressed entry of `block` sees; ratio 4 overlaps."""
    return {0: 0, 4: 2, 128: 1}[block.ratio]


def require_experts(chosen: int, available: int) -> None:
    """Refuse a top-k that exceeds what it chooses from."""
    require(chosen <= available, "num_experts_per_tok", chosen, f"at most {available} experts")


def require_base(theta: float, name: str) -> None:
    """Refuse a base whose powers are all alike: YaRN divides by its logarithm."""
    require(theta != 1, name, theta, "another base than 1, with YaRN")


def require_rotary(dims: int, width: int, of: str) -> None:
    """Refuse rotary dims that cannot be paired or do not fit."""
    fits = dims % 2 == 0 and dims <= width
    require(fits, "qk_rope_head_dim", dims, f"an even number up to {width} ({of})")


# --------------------------------------------------------------------------------------------------
# Released geometries, and makers of small models of the same families
#
# The small ones hold every layer type and keep extents at multiples of 128, so that every format
# and every fused layout can hold them; pass other fields by name.

V4_PRO = V4Config(
    vocab_size=129280,
    hidden_size=7168,
    num_hidden_layers=61,
    max_position_embeddings=1048576,
    num_attention_heads=128,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1536,
    o_groups=16,
    o_lora_rank=1024,
    sliding_window=128,
    compress_ratios=(128, 128, *(4, 128) * 29, 4, 0),  # the last entry is the MTP block's
    rope_theta=10000,
    compress_rope_theta=160000,
    yarn=Yarn(factor=16, original_max_position_embeddings=65536),
    index_n_heads=64,
    index_head_dim=128,
    index_topk=1024,
    moe_intermediate_size=3072,
    n_routed_experts=384,
    num_experts_per_tok=6,
    num_hash_layers=3,
    scoring_func="sqrtsoftplus",
    routed_scaling_factor=2.5,
    swiglu_limit=10.0,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    num_nextn_predict_layers=1,
)

V4_FLASH = replace(
    V4_PRO,
    hidden_size=4096,
    num_hidden_layers=43,
    num_attention_heads=64,
    q_lora_rank=1024,
    o_groups=8,
    compress_ratios=(0, 0, *(4, 128) * 20, 4, 0),
    index_topk=512,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    routed_scaling_factor=1.5,
)

V3_2 = V32Config(
    vocab_size=129280,
    hidden_size=7168,
    num_hidden_layers=61,
    max_position_embeddings=163840,
    num_attention_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope_theta=10000,
    yarn=Yarn(factor=40, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0),
    index_n_heads=64,
    index_head_dim=128,
    index_topk=2048,
    intermediate_size=18432,
    first_k_dense_replace=3,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    scoring_func="sigmoid",
    routed_scaling_factor=2.5,
    num_nextn_predict_layers=1,
)


def small_v4(**changes: Any) -> V4Config:
    """Make a V4 model of five layers, one of each layer type at least, with one MTP block."""
    small = replace(
        V4_PRO,
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=5,
        num_attention_heads=8,
        head_dim=128,
        q_lora_rank=128,
        o_groups=4,
        o_lora_rank=128,
        compress_ratios=(0, 4, 128, 4, 128, 0),
        index_n_heads=4,
        index_topk=8,
        moe_intermediate_size=256,
        n_routed_experts=8,
        num_experts_per_tok=2,
        num_hash_layers=2,
    )
    return replace(small, **changes)


def small_v32(**changes: Any) -> V32Config:
    """Make a V3.2 model of three layers, the first dense, with one MTP block."""
    small = replace(
        V3_2,
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        v_head_dim=64,
        index_n_heads=4,
        index_topk=8,
        intermediate_size=512,
        first_k_dense_replace=1,
        moe_intermediate_size=256,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
    )
    return replace(small, **changes)
