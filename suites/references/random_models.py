"""Random DeepSeek models as arguments of transformers' own configs, for both families.

A case is plain data, so that it travels to the process in which transformers computes and stands
in a report. Extents are small and mostly no powers of two. What a config of transformers may say
and ours does not support is drawn as well, one such word a case, with the name of its refusal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

MISSING = object()
LONGEST = 300  # behind two windows of a compressor of 128 tokens
LAYERS = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


@dataclass(frozen=True)
class RandomModel:
    """A model, the tokens of one sequence, and the calls in which they are computed."""

    family: str
    arguments: dict[str, Any]  # of transformers' config class
    weights_seed: int
    dtype: str  # in which the checkpoint is saved
    calls: tuple[int, ...]  # tokens of each call; the whole sequence is computed in one as well
    refused: str | None = None  # the field that our reader names, if it refuses

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", tuple(self.calls))  # JSON has lists

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return sum(self.calls)


def _even(least: int, most: int) -> SearchStrategy[int]:
    return st.integers(least // 2, most // 2).map(lambda half: 2 * half)


def _extents(unit: int) -> SearchStrategy[int]:
    return st.integers(3, 40) if unit == 1 else st.integers(1, 2).map(lambda count: unit * count)


UNITS = st.sampled_from([1, 1, 32, 128])  # blocks of scales fit the wider ones
EPSILONS = st.sampled_from([1e-6, 1e-5, 1e-3, 0.1])
BASES = st.sampled_from([10000.0, 160000.0, 100.0, 8.0])
MSCALES = st.sampled_from([MISSING, None, 0, 0.7, 1.0, 1.0])
LENGTHS = st.integers(1, 24) | st.integers(25, 140) | st.integers(129, LONGEST)


@st.composite
def yarns(draw: DrawFn) -> dict[str, Any]:
    """Draw YaRN's keys: each present, null, zero or absent where transformers admits it."""
    stated = {
        "factor": draw(st.sampled_from([0.5, 1, 1.5, 4, 40.0])),
        "original_max_position_embeddings": draw(st.sampled_from([4, 16, 64, 4096])),
        "beta_fast": draw(st.sampled_from([MISSING, None, 0, 32, 8.0, 1])),
        "beta_slow": draw(st.sampled_from([MISSING, None, 0, 1, 0.25, 4])),
        "mscale": draw(MSCALES),
        "mscale_all_dim": draw(MSCALES),
        "attention_factor": draw(st.sampled_from([MISSING, MISSING, None, 0.0, 1.0, 1.3])),
    }
    kind = draw(st.sampled_from(["rope_type", "type"]))
    return {kind: "yarn"} | {key: value for key, value in stated.items() if value is not MISSING}


@st.composite
def calls(draw: DrawFn) -> tuple[int, ...]:
    """Draw how a sequence is cut: a prompt, chunks, then single tokens; short ones all single."""
    length = draw(LENGTHS)
    if length <= 24 and draw(st.booleans()):
        return (1,) * length
    parts: list[int] = []
    singles = draw(st.integers(0, min(6, length)))
    left = length - singles
    for _ in range(draw(st.integers(0, 3))):
        if left > 1:
            parts.append(draw(st.integers(1, left - 1)))
            left -= parts[-1]
    return (*parts, *([left] if left else ()), *((1,) * singles))


@st.composite
def v32_models(draw: DrawFn) -> RandomModel:
    """Draw a DeepSeek-V3.2."""
    extents = _extents(draw(UNITS))
    layers, groups = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    in_group = draw(st.integers(2, 4))
    kept = draw(st.integers(1, groups))
    rotated = draw(_even(2, 16))
    heads = draw(st.integers(1, 4))
    dense = draw(st.integers(0, layers))
    arguments: dict[str, Any] = {
        "vocab_size": draw(st.integers(20, 90)),
        "hidden_size": draw(extents),
        "intermediate_size": draw(extents),
        "moe_intermediate_size": draw(extents),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_shared_experts": draw(st.integers(1, 3)),
        "n_routed_experts": groups * in_group,
        "n_group": groups,
        "topk_group": kept,
        "num_experts_per_tok": draw(st.integers(1, kept * in_group)),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5, 0.5])),
        "kv_lora_rank": draw(extents),
        "q_lora_rank": draw(extents),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": draw(st.integers(1, 20)),
        "v_head_dim": draw(st.integers(1, 20)),
        "index_head_dim": rotated + draw(st.integers(0, 20)),
        "index_n_heads": draw(st.integers(1, 5)),
        "index_topk": draw(st.integers(1, 12) | st.integers(13, 400)),
        "rms_norm_eps": draw(EPSILONS),
        "max_position_embeddings": draw(st.sampled_from([512, 4096])),
    }
    if draw(st.booleans()):
        arguments["first_k_dense_replace"] = dense
    else:
        arguments["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (layers - dense)
    arguments |= draw(_v32_rope())
    return draw(_finished("deepseek_v32", arguments))


@st.composite
def _v32_rope(draw: DrawFn) -> dict[str, Any]:
    base = draw(BASES)
    if draw(st.integers(0, 3)) == 0:
        return {} if draw(st.booleans()) else {"rope_theta": base}
    yarn = draw(yarns())
    truncate = draw(st.sampled_from([MISSING, MISSING, True, False, None]))
    yarn |= {} if truncate is MISSING else {"truncate": truncate}
    if draw(st.booleans()):
        return {"rope_theta": base, "rope_scaling": yarn}
    return {"rope_parameters": {"rope_theta": base} | yarn}


@st.composite
def v4_models(draw: DrawFn) -> RandomModel:
    """Draw a DeepSeek-V4."""
    extents = _extents(draw(UNITS))
    layers, groups = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    experts = draw(st.integers(2, 6))
    rotated = draw(_even(2, 16))
    types = draw(st.lists(st.sampled_from(sorted(LAYERS)), min_size=layers, max_size=layers))
    hashed = draw(st.integers(0, layers))
    head = rotated + draw(st.integers(0, 20))
    if int(head * (rotated / head)) != rotated:
        head = rotated  # transformers would cut the product of the two
    arguments: dict[str, Any] = {
        "vocab_size": draw(st.integers(20, 90)),
        "hidden_size": draw(extents),
        "moe_intermediate_size": draw(extents),
        "num_hidden_layers": layers,
        "num_attention_heads": groups * draw(st.integers(1, 3)),
        "head_dim": head,
        "q_lora_rank": draw(extents),
        "o_groups": groups,
        "o_lora_rank": draw(extents),
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "n_routed_experts": experts,
        "routed_scaling_factor": draw(st.sampled_from([1.0, 1.5, 0.5])),
        "index_n_heads": draw(st.integers(1, 5)),
        "index_head_dim": rotated + draw(st.integers(0, 20)),
        "index_topk": draw(st.integers(1, 12) | st.integers(13, 80)),
        "sliding_window": draw(st.integers(2, 20) | st.integers(21, 200)),
        "hc_mult": draw(st.integers(1, 4)),
        "hc_sinkhorn_iters": draw(st.integers(1, 20)),
        "hc_eps": draw(EPSILONS),
        "swiglu_limit": draw(st.sampled_from([10.0, 0.5, 2.0])),
        "rms_norm_eps": draw(EPSILONS),
        "max_position_embeddings": draw(st.sampled_from([512, 4096])),
        "num_nextn_predict_layers": draw(st.integers(0, 1)),
    }
    if draw(st.booleans()):
        arguments["compress_ratios"] = [LAYERS[kind] for kind in types]
    else:
        arguments["layer_types"] = types
    if draw(st.booleans()):
        arguments["num_hash_layers"] = hashed
    else:
        arguments["mlp_layer_types"] = ["hash_moe"] * hashed + ["moe"] * (layers - hashed)
    arguments |= draw(_v4_rope(rotated, head))
    return draw(_finished("deepseek_v4", arguments))


@st.composite
def _v4_rope(draw: DrawFn, rotated: int, head: int) -> dict[str, Any]:
    theta, compressed = draw(BASES), draw(BASES)
    yarn = draw(st.none() | yarns())
    shared: dict[str, Any] = {"partial_rotary_factor": rotated / head}
    if draw(st.booleans()):
        nested = {
            "main": {"rope_type": "default", "rope_theta": theta} | shared,
            "compress": (yarn or {"rope_type": "default"}) | {"rope_theta": compressed} | shared,
        }
        thetas = {"rope_theta": theta, "compress_rope_theta": compressed}
        return shared | {"rope_parameters": nested} | thetas
    name = draw(st.sampled_from(["rope_scaling", "rope_parameters"]))
    flat = {"rope_theta": theta, "compress_rope_theta": compressed}
    sized: dict[str, Any] = draw(st.sampled_from([shared, {"qk_rope_head_dim": rotated}]))
    return flat | sized | ({name: yarn} if yarn else {})


# What transformers computes and nobody here: changed arguments, and the field that is refused.
UNSUPPORTED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "deepseek_v32": [
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "rope_parameters.rope_type"),
    ],
    "deepseek_v4": [
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        (
            {
                "compress_rates": {
                    "compressed_sparse_attention": 8,
                    "heavily_compressed_attention": 128,
                }
            },
            "compress_rates",
        ),
    ],
}


@st.composite
def _finished(draw: DrawFn, family: str, arguments: dict[str, Any]) -> RandomModel:
    refused = None
    if draw(st.integers(0, 7)) == 7:
        changes, refused = draw(st.sampled_from(UNSUPPORTED[family]))
        if "rope_scaling" in changes:
            arguments.pop("rope_parameters", None)
        arguments |= changes
    return RandomModel(
        family,
        arguments,
        weights_seed=draw(st.integers(0, 1 << 30)),
        dtype=draw(st.sampled_from(["bfloat16", "float32"])),
        calls=draw(calls()),
        refused=refused,
    )


MODELS: dict[str, SearchStrategy[RandomModel]] = {
    "deepseek_v4": v4_models(),
    "deepseek_v32": v32_models(),
}


def drawn(family: str, number: int) -> RandomModel:
    """Draw the model of this number: the same one each time."""
    models: list[RandomModel] = []

    @seed(number)
    @settings(
        max_examples=2,  # Hypothesis begins with the least of all; later ones resemble the second
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(MODELS[family])
    def keep(model: RandomModel) -> None:
        models.append(model)

    keep()
    return models[-1]
