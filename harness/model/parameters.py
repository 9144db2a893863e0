"""Every parameter of a model by logical name, shape and reader, before any format or layout.

The two tables have one row a parameter: DeepSeek's own name, transformers' name, the shape in
letters, its kind, how it is stored unquantised, which component reads it, and in which blocks it
exists. Layouts, recipes, name maps and sharding plans derive from these rows, so a name or a shape
is stated here and nowhere else. V4-Pro has 145,116 tensors.

Sources: deepseek-ai/DeepSeek-V4-Pro inference/model.py and shard headers; transformers 5.20
conversion_mapping.py; deepseek-ai/DeepSeek-V3.2-Exp inference/{model,convert}.py.
Shape letters, V4: V vocabulary, D hidden, H heads, d head dim, ql and ol low ranks, g groups,
G features of a group, E experts, I their width, k experts a token, S streams, M mix rows, m ratio,
c windows an entry sees, IH and id indexer heads and head dim, T target layers, r Markov rank.
V3.2 as well: kl KV low rank, n and p nope and rope dims, v value dim, F dense and X shared width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import UnknownName
from degarble.harness.model.config.config import (
    Config,
    V4Config,
    V32Config,
    compressor_windows,
    has_parallel_drafter,
)
from degarble.harness.model.registry import registered_for
from degarble.harness.model.types import Block, Dtype, Kind, LayerType, MlpType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

L, E, N, P = Kind.LINEAR, Kind.EMBEDDING, Kind.NORM, Kind.PLAIN
BF16, F32, I64 = Dtype.BF16, Dtype.F32, Dtype.I64
EXPERT = "{e}"  # stands for the expert's number in a row's names


class Row(NamedTuple):
    """One line of a table. `reader` is the component that reads it, `where` the blocks it is in."""

    name: str
    hf: str
    shape: str
    kind: Kind
    dtype: Dtype
    reader: str
    where: str = "all"


# fmt: off
V4_ENDS = (
    Row("embed",         "embed_tokens",     "V D",   E, BF16, "embed"),
    Row("hc_head_fn",    "hc_head.hc_fn",    "S S*D", P, F32,  "hc_head"),
    Row("hc_head_base",  "hc_head.hc_base",  "S",     P, F32,  "hc_head"),
    Row("hc_head_scale", "hc_head.hc_scale", "1",     P, F32,  "hc_head"),
    Row("norm",          "norm",             "D",     N, BF16, "norm"),
    Row("head",          "lm_head",          "V D",   L, BF16, "head"),
)
_C, _I = "self_attn.compressor", "self_attn.compressor.indexer"
V4_BLOCK = (
    Row("hc_attn_fn",            "attn_hc.fn",         "M S*D",    P, F32,  "attn.hc_pre"),
    Row("hc_attn_base",          "attn_hc.base",       "M",        P, F32,  "attn.hc_pre"),
    Row("hc_attn_scale",         "attn_hc.scale",      "3",        P, F32,  "attn.hc_pre"),
    Row("attn_norm",             "input_layernorm",    "D",        N, BF16, "attn.norm"),
    Row("attn.wq_a",             "self_attn.q_a_proj", "ql D",     L, BF16, "attn.wq_a"),
    Row("attn.q_norm",           "self_attn.q_a_norm", "ql",       N, BF16, "attn.q_norm"),
    Row("attn.wq_b",             "self_attn.q_b_proj", "H*d ql",   L, BF16, "attn.wq_b"),
    Row("attn.wkv",              "self_attn.kv_proj",  "d D",      L, BF16, "attn.wkv"),
    Row("attn.kv_norm",          "self_attn.kv_norm",  "d",        N, BF16, "attn.kv_norm_rope"),
    Row("attn.attn_sink",        "self_attn.sinks",    "H",        P, F32,  "attn.attend"),
    Row("attn.wo_a",             "self_attn.o_a_proj", "g*ol G",   L, BF16, "attn.wo_a"),
    Row("attn.wo_b",             "self_attn.o_b_proj", "D g*ol",   L, BF16, "attn.wo_b"),
    Row("attn.compressor.ape",   f"{_C}.position_bias", "m c*d",   P, F32,
        "attn.compressor.pool", "compressor"),
    Row("attn.compressor.wkv",   f"{_C}.kv_proj",      "c*d D",    L, BF16,
        "attn.compressor.proj", "compressor"),
    Row("attn.compressor.wgate", f"{_C}.gate_proj",    "c*d D",    L, BF16,
        "attn.compressor.proj", "compressor"),
    Row("attn.compressor.norm",  f"{_C}.kv_norm",      "d",        N, BF16,
        "attn.compressor.pool", "compressor"),
    Row("attn.indexer.wq_b",     f"{_I}.q_b_proj",     "IH*id ql", L, BF16,
        "attn.indexer.wq_b", "indexer"),
    Row("attn.indexer.weights_proj", f"{_I}.scorer.weights_proj", "IH D", L, BF16,
        "attn.indexer.weights_proj", "indexer"),
    Row("attn.indexer.compressor.ape",   f"{_I}.position_bias", "m c*id", P, F32,
        "attn.indexer.compressor.pool", "indexer"),
    Row("attn.indexer.compressor.wkv",   f"{_I}.kv_proj",   "c*id D", L, BF16,
        "attn.indexer.compressor.proj", "indexer"),
    Row("attn.indexer.compressor.wgate", f"{_I}.gate_proj", "c*id D", L, BF16,
        "attn.indexer.compressor.proj", "indexer"),
    Row("attn.indexer.compressor.norm",  f"{_I}.kv_norm",   "id",     N, BF16,
        "attn.indexer.compressor.pool", "indexer"),
    Row("hc_ffn_fn",             "ffn_hc.fn",          "M S*D",    P, F32,  "ffn.hc_pre"),
    Row("hc_ffn_base",           "ffn_hc.base",        "M",        P, F32,  "ffn.hc_pre"),
    Row("hc_ffn_scale",          "ffn_hc.scale",       "3",        P, F32,  "ffn.hc_pre"),
    Row("ffn_norm",              "post_attention_layernorm", "D",  N, BF16, "ffn.norm"),
    Row("ffn.gate",              "mlp.gate",           "E D",      L, BF16, "ffn.gate"),
    Row("ffn.gate.bias",         "mlp.gate.e_score_correction_bias", "E", P, F32,
        "ffn.topk", "scored"),
    Row("ffn.gate.tid2eid",      "mlp.gate.tid2eid",   "V k",      P, I64, "ffn.topk", "hash"),
    Row("ffn.experts.{e}.w1",    "mlp.experts.{e}.gate_proj", "I D", L, BF16, "ffn.experts.w13"),
    Row("ffn.experts.{e}.w2",    "mlp.experts.{e}.down_proj", "D I", L, BF16, "ffn.experts.w2"),
    Row("ffn.experts.{e}.w3",    "mlp.experts.{e}.up_proj",   "I D", L, BF16, "ffn.experts.w13"),
    Row("ffn.shared_experts.w1", "mlp.shared_experts.gate_proj", "I D", L, BF16, "ffn.shared.w13"),
    Row("ffn.shared_experts.w2", "mlp.shared_experts.down_proj", "D I", L, BF16, "ffn.shared.w2"),
    Row("ffn.shared_experts.w3", "mlp.shared_experts.up_proj",   "I D", L, BF16, "ffn.shared.w13"),
)
# transformers leaves V4's drafter out, so these rows have no second name.
V4_MTP = (
    Row("enorm",         "", "D",     N, BF16, "enorm",   "mtp"),
    Row("hnorm",         "", "D",     N, BF16, "hnorm",   "mtp"),
    Row("e_proj",        "", "D D",   L, BF16, "e_proj",  "mtp"),
    Row("h_proj",        "", "D D",   L, BF16, "h_proj",  "mtp"),
    Row("main_proj",     "", "D T*D", L, BF16, "main_proj", "dspark first"),
    Row("main_norm",     "", "D",     N, BF16, "main_norm", "dspark first"),
    Row("hc_head_fn",    "", "S S*D", P, F32,  "hc_head", "mtp, dspark last"),
    Row("hc_head_base",  "", "S",     P, F32,  "hc_head", "mtp, dspark last"),
    Row("hc_head_scale", "", "1",     P, F32,  "hc_head", "mtp, dspark last"),
    Row("norm",          "", "D",     N, BF16, "norm",    "mtp, dspark last"),
    Row("markov_head.markov_w1", "", "V r",   E, BF16, "markov",     "dspark last"),
    Row("markov_head.markov_w2", "", "V r",   L, BF16, "markov",     "dspark last"),
    Row("confidence_head.proj",  "", "1 D+r", L, BF16, "confidence", "dspark last"),
)

# Norms are F32 here: with them the sizes add up to the published checkpoint, byte for byte.
V32_ENDS = (
    Row("embed", "embed_tokens", "V D", E, BF16, "embed"),
    Row("norm",  "norm",         "D",   N, F32,  "norm"),
    Row("head",  "lm_head",      "V D", L, BF16, "head"),
)
V32_BLOCK = (
    Row("attn_norm",    "input_layernorm",              "D",           N, F32,  "attn.norm"),
    Row("attn.wq_a",    "self_attn.q_a_proj",           "ql D",        L, BF16, "attn.wq_a"),
    Row("attn.q_norm",  "self_attn.q_a_layernorm",      "ql",          N, F32,  "attn.q_norm"),
    Row("attn.wq_b",    "self_attn.q_b_proj",           "H*n+H*p ql",  L, BF16, "attn.wq_b"),
    Row("attn.wkv_a",   "self_attn.kv_a_proj_with_mqa", "kl+p D",      L, BF16, "attn.wkv_a"),
    Row("attn.kv_norm", "self_attn.kv_a_layernorm",     "kl",          N, F32,  "attn.kv_norm"),
    Row("attn.wkv_b",   "self_attn.kv_b_proj",          "H*n+H*v kl",  L, BF16, "attn.wkv_b"),
    Row("attn.wo",      "self_attn.o_proj",             "D H*v",       L, BF16, "attn.wo"),
    Row("attn.indexer.wq_b", "self_attn.indexer.wq_b",  "IH*id ql",    L, BF16,
        "attn.indexer.wq_b"),
    Row("attn.indexer.wk", "self_attn.indexer.wk",      "id D",        L, BF16,
        "attn.indexer.wk"),
    Row("attn.indexer.k_norm", "self_attn.indexer.k_norm", "id",       N, F32,
        "attn.indexer.k"),
    Row("attn.indexer.k_norm.bias", "self_attn.indexer.k_norm.bias", "id", P, F32,
        "attn.indexer.k"),
    Row("attn.indexer.weights_proj", "self_attn.indexer.weights_proj", "IH D", L, BF16,
        "attn.indexer.weights_proj"),
    Row("ffn_norm",     "post_attention_layernorm",     "D",           N, F32,  "ffn.norm"),
    Row("ffn.w1",       "mlp.gate_proj",                "F D",         L, BF16, "ffn.w13", "dense"),
    Row("ffn.w2",       "mlp.down_proj",                "D F",         L, BF16, "ffn.w2", "dense"),
    Row("ffn.w3",       "mlp.up_proj",                  "F D",         L, BF16, "ffn.w13", "dense"),
    Row("ffn.gate",     "mlp.gate",                     "E D",         L, BF16, "ffn.gate", "moe"),
    Row("ffn.gate.bias", "mlp.gate.e_score_correction_bias", "E",      P, F32, "ffn.topk", "moe"),
    Row("ffn.experts.{e}.w1", "mlp.experts.{e}.gate_proj", "I D", L, BF16,
        "ffn.experts.w13", "moe"),
    Row("ffn.experts.{e}.w2", "mlp.experts.{e}.down_proj", "D I", L, BF16,
        "ffn.experts.w2", "moe"),
    Row("ffn.experts.{e}.w3", "mlp.experts.{e}.up_proj",   "I D", L, BF16,
        "ffn.experts.w13", "moe"),
    Row("ffn.shared_experts.w1", "mlp.shared_experts.gate_proj", "X D", L, BF16,
        "ffn.shared.w13", "moe"),
    Row("ffn.shared_experts.w2", "mlp.shared_experts.down_proj", "D X", L, BF16,
        "ffn.shared.w2", "moe"),
    Row("ffn.shared_experts.w3", "mlp.shared_experts.up_proj",   "X D", L, BF16,
        "ffn.shared.w13", "moe"),
)
# V3.2 stores embedding and head a second time with the drafter.
V32_MTP = (
    Row("embed",   "embed_tokens",     "V D",     E, BF16, "embed"),
    Row("enorm",   "enorm",            "D",       N, F32,  "enorm"),
    Row("hnorm",   "hnorm",            "D",       N, F32,  "hnorm"),
    Row("eh_proj", "eh_proj",          "D D+D",   L, BF16, "eh_proj"),
    Row("norm",    "shared_head.norm", "D",       N, F32,  "norm"),
    Row("head",    "shared_head.head", "V D",     L, BF16, "head"),
)
# fmt: on


@dataclass(frozen=True)
class Parameter:
    """One logical parameter: `layers.3.attn.wq_a`, [1536, 7168].

    `name` is DeepSeek's own without `.weight`, as recipes, plans and components use it.
    """

    name: str
    shape: tuple[int, ...]
    row: Row
    block: Block | None = None
    expert: int | None = None

    @property
    def kind(self) -> Kind:
        """Return its kind; only a LINEAR one can be quantised."""
        return self.row.kind

    @property
    def component(self) -> str:
        """Return the full name of the component that reads it."""
        return f"{self.block.prefix}.{self.row.reader}" if self.block else self.row.reader


def parameters(config: Config) -> tuple[Parameter, ...]:
    """List every parameter of a config, block by block, the ends around them."""
    found: tuple[Parameter, ...] = registered_for(config).parameters(config)
    return found


@dataclass(frozen=True, eq=False)
class ParameterTable:
    """The rows of a family: its ends, every block, and what a drafter's block has besides."""

    ends: tuple[Row, ...]
    block: tuple[Row, ...]
    drafter: tuple[Row, ...] = ()


@lru_cache(maxsize=8)
def tabled_parameters(config: Any, table: ParameterTable) -> tuple[Parameter, ...]:
    """List the parameters that the rows of a table have under a config."""
    common = shape_letters(config)
    # In the order of the forward pass: the embedding, the blocks, then final norm and head.
    ends = table.ends
    first, last = [r for r in ends if r.name == "embed"], [r for r in ends if r.name != "embed"]
    found = [Parameter(row.name, extents_of(row.shape, common), row) for row in first]
    for block in config.blocks:
        letters = common | _block_letters(block)
        rows = (*table.drafter, *table.block) if block.is_drafter else table.block
        present = [row for row in rows if _is_in(row, block, config)]
        found.extend(_spread(present, block, letters, letters.get("E", 0)))
    found.extend(Parameter(row.name, extents_of(row.shape, common), row) for row in last)
    return tuple(found)


def parameter_named(config: Config, name: str) -> Parameter:
    """Look one parameter up by its logical name."""
    known = _by_name(config)
    if name not in known:
        raise UnknownName.among("parameter", name, known)
    return known[name]


@lru_cache(maxsize=8)
def _by_name(config: Config) -> dict[str, Parameter]:
    return {parameter.name: parameter for parameter in parameters(config)}


def _spread(
    rows: list[Row], block: Block, letters: Mapping[str, int], experts: int
) -> Iterator[Parameter]:
    """Yield one parameter a row, or one an expert: all rows of one expert, then the next."""
    routed = [(row, extents_of(row.shape, letters)) for row in rows if EXPERT in row.name]
    for row in rows:
        if EXPERT not in row.name:
            yield Parameter(
                f"{block.prefix}.{row.name}", extents_of(row.shape, letters), row, block
            )
        # All experts are yielded where the first expert row stands in the table.
        elif row is routed[0][0]:
            for expert, (each, shape) in product(range(experts), routed):
                name = f"{block.prefix}.{each.name.replace(EXPERT, str(expert))}"
                yield Parameter(name, shape, each, block, expert)


WHERE: Mapping[str, Callable[[Block, Config], bool]] = {
    "all": lambda _block, _config: True,
    "compressor": lambda block, _config: block.ratio > 0,
    "indexer": lambda block, _config: block.layer_type is LayerType.SPARSE,
    "hash": lambda block, _config: block.mlp_type is MlpType.HASH,
    "scored": lambda block, _config: block.mlp_type is MlpType.SCORED,
    "dense": lambda block, _config: block.mlp_type is MlpType.DENSE,
    "moe": lambda block, _config: block.mlp_type is not MlpType.DENSE,
    "mtp": lambda _block, config: not has_parallel_drafter(config),
    "dspark first": lambda block, config: has_parallel_drafter(config) and block.index == 0,
    "dspark last": lambda block, config: (
        has_parallel_drafter(config) and block.index == config.drafters - 1
    ),
}


def _is_in(row: Row, block: Block, config: Config) -> bool:
    return any(WHERE[place](block, config) for place in row.where.split(", "))


def shape_letters(config: Config, block: Block | None = None) -> dict[str, int]:
    """Return all shape letters that have a number, those of one block included."""
    letters: dict[str, int] = registered_for(config).letters(config)
    return letters | (_block_letters(block) if block is not None else {})


def routed_experts(config: Config) -> int:
    """Return how many routed experts a layer has; 0 where there are none."""
    return shape_letters(config).get("E", 0)


def extents_of(text: str, letters: Mapping[str, int]) -> tuple[int, ...]:
    """Evaluate a shape in letters: extents are split by blanks, then come sums, then products."""
    return tuple(
        sum(prod(_number(factor, letters) for factor in term.split("*")) for term in terms)
        for terms in (extent.split("+") for extent in text.split())
    )


def _shared_letters(config: Any) -> dict[str, int]:
    return {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "H": config.num_attention_heads,
        "ql": config.q_lora_rank,
        "E": config.n_routed_experts,
        "I": config.moe_intermediate_size,
        "k": config.num_experts_per_tok,
        "IH": config.index_n_heads,
        "id": config.index_head_dim,
    }


def v32_letters(config: V32Config) -> dict[str, int]:
    """Return the numbers of V3.2's letters."""
    return _shared_letters(config) | {
        "kl": config.kv_lora_rank,
        "n": config.qk_nope_head_dim,
        "p": config.qk_rope_head_dim,
        "v": config.v_head_dim,
        "F": config.intermediate_size,
        "X": config.shared_intermediate_size,
    }


def v4_letters(config: V4Config) -> dict[str, int]:
    """Return the numbers of V4's letters."""
    dspark = config.dspark
    return _shared_letters(config) | {
        "d": config.head_dim,
        "g": config.o_groups,
        "G": config.group_features,
        "ol": config.o_lora_rank,
        "S": config.hc_mult,
        "M": config.hc_rows,
        "T": dspark.blocks if dspark else 0,
        "r": dspark.markov_rank if dspark else 0,
    }


def _block_letters(block: Block) -> dict[str, int]:
    return {"m": block.ratio, "c": compressor_windows(block)}


def _number(factor: str, letters: Mapping[str, int]) -> int:
    return int(factor) if factor.isdigit() else letters[factor]
