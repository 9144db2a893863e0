"""Read and write config.json in three spellings, to one config record and back.

* `released`: config.json as DeepSeek publishes it;
* `transformers`: as transformers 5.20 saves it, with layer_types and rope_parameters in place of
  compress_ratios and rope_scaling;
* `inference`: inference/config.json of the official code.

One dict may mix them. Two keys that state one fact differently are an error, and so are a fact that
no key states, duplicate JSON keys, unknown families, and values that the family never has (a tied
head, biases, another activation). Keys that say nothing about the structure are kept in `other`.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import InvalidArgument, UnknownName, UnreadableFile
from degarble.harness.base.files import read_small_text
from degarble.harness.model.config import rope as config_rope
from degarble.harness.model.config.checks import require
from degarble.harness.model.config.config import LAYER_TYPES, Config, Dspark, V4Config, V32Config
from degarble.harness.model.config.reader import REQUIRED, Reader
from degarble.harness.model.types import LayerType, MlpType

if TYPE_CHECKING:
    from collections.abc import Container, Mapping
    from pathlib import Path

SPELLINGS = ("released", "transformers", "inference")
_LARGEST_FILE = 16 << 20


class Key(NamedTuple):
    """One fact: our field, which is also its key in config.json, and the official code's key."""

    field: str
    inference: str | None = None  # None: spelled alike
    default: object = REQUIRED  # what the code assumes that reads such a file


SHARED_KEYS = (
    Key("vocab_size"),
    Key("hidden_size", "dim"),
    Key("num_hidden_layers", "n_layers"),
    Key("num_attention_heads", "n_heads"),
    Key("q_lora_rank"),
    Key("index_n_heads"),
    Key("index_head_dim"),
    Key("index_topk"),
    Key("moe_intermediate_size", "moe_inter_dim"),
    Key("n_routed_experts"),
    Key("num_experts_per_tok", "n_activated_experts"),
    Key("routed_scaling_factor", "route_scale"),
    Key("rms_norm_eps", "norm_eps", 1e-6),
    Key("max_position_embeddings", None, None),
)
V4_KEYS = (
    *SHARED_KEYS,
    Key("scoring_func", "score_func"),
    Key("head_dim"),
    Key("o_groups"),
    Key("o_lora_rank"),
    Key("sliding_window", "window_size"),
    Key("swiglu_limit"),
    Key("expert_dtype", None, "fp4"),  # absent in the first release; loaders take fp4
    Key("hc_mult"),
    Key("hc_sinkhorn_iters"),
    Key("hc_eps", None, 1e-6),
)
V32_KEYS = (
    *SHARED_KEYS,
    Key("scoring_func", "score_func", "sigmoid"),  # transformers has no other and saves none
    Key("kv_lora_rank"),
    Key("qk_nope_head_dim"),
    Key("qk_rope_head_dim"),
    Key("v_head_dim"),
    Key("intermediate_size", "inter_dim"),
    Key("n_shared_experts"),
    Key("n_group", "n_expert_groups"),
    Key("topk_group", "n_limited_groups"),
    Key("num_nextn_predict_layers", None, 0),  # transformers and the official code have none
)
DSPARK_KEYS = ("target_layer_ids", "markov_rank", "block_size", "noise_token_id")

# What every member of a family has; another value is another architecture.
SHARED_CONSTANTS: dict[str, object] = {
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}
V4_CONSTANTS = SHARED_CONSTANTS | {"num_key_value_heads": 1, "n_shared_experts": 1}
V32_CONSTANTS = SHARED_CONSTANTS | {"moe_layer_freq": 1}
ARCHITECTURES = {
    V4Config.family: "DeepseekV4ForCausalLM",
    V32Config.family: "DeepseekV32ForCausalLM",
}


def config_from_file(path: Path) -> Config:
    """Read one config.json; raise unless it is one JSON object without repeated keys."""
    try:
        text = read_small_text(path, _LARGEST_FILE)
        raw = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(
            "config", f"{path}: {error}", "a JSON file in UTF-8", "Point to a config.json."
        ) from error
    return config_from_dict(raw)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    counts = Counter(key for key, _ in pairs)
    twice = sorted(key for key, count in counts.items() if count > 1)
    require(not twice, ", ".join(twice), "stated twice", "each key once")
    return dict(pairs)


def config_from_dict(raw: Mapping[str, Any]) -> Config:
    """Make the record of a config dict in any known spelling."""
    if not isinstance(raw, dict):
        raise InvalidArgument("config", raw, "a JSON object", "Pass what config.json holds.")
    reader = Reader(raw)
    family = _family(reader)
    return _read_v4(reader) if family == V4Config.family else _read_v32(reader)


def _family(reader: Reader) -> str:
    """Name the family, from model_type or, in the official code's file, from its own keys."""
    name = reader.optional("model_type")
    if name is None:
        if "compress_ratios" in reader.raw:
            return V4Config.family
        require(
            "kv_lora_rank" in reader.raw and "index_topk" in reader.raw,
            "model_type",
            "missing",
            "a model_type, or the keys of an official inference config",
        )
        return V32Config.family
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnknownName.among("model_type", name, ARCHITECTURES)
    return name


def _read_v4(reader: Reader) -> V4Config:
    values = reader.fields(V4_KEYS)
    reader.constants(V4_CONSTANTS)
    dspark = _dspark(reader)
    values |= config_rope.read_v4(reader)
    return V4Config(
        **values,
        num_nextn_predict_layers=_mtp_blocks(reader, dspark),
        dspark=dspark,
        compress_ratios=_ratios(reader, values["num_hidden_layers"]),
        num_hash_layers=_leading(
            reader, "num_hash_layers", "n_hash_layers", {MlpType.HASH: True, MlpType.SCORED: False}
        ),
        qk_rope_head_dim=config_rope.rotary_dims(reader, values["head_dim"]),
        quantisation=reader.optional("quantization_config"),
        other=reader.rest(),
    )


def _read_v32(reader: Reader) -> V32Config:
    values = reader.fields(V32_KEYS)
    reader.constants(V32_CONSTANTS | {"num_key_value_heads": values["num_attention_heads"]})
    types = reader.optional("layer_types")
    require(
        types is None
        or (
            _are_among(types, {LayerType.INDEXED.value})
            and len(types) == values["num_hidden_layers"]
        ),
        "layer_types",
        types,
        f"{LayerType.INDEXED} in every layer",
    )
    values |= config_rope.read_v32(reader)
    return V32Config(
        **values,
        first_k_dense_replace=_leading(
            reader,
            "first_k_dense_replace",
            "n_dense_layers",
            {"dense": True, "sparse": False},
            unread=3,  # the default of transformers' DeepseekV32Config
        ),
        quantisation=reader.optional("quantization_config"),
        other=reader.rest(),
    )


def _dspark(reader: Reader) -> Dspark | None:
    """Read the block-parallel drafter's keys: all of them, or none."""
    if not any(key.startswith("dspark_") for key in reader.raw):
        return None
    values = {name: reader.take(f"dspark_{name}") for name in DSPARK_KEYS}
    targets = values["target_layer_ids"]
    require(isinstance(targets, list), "dspark_target_layer_ids", targets, "a list of layers")
    return Dspark(**values | {"target_layer_ids": tuple(targets)})


def _mtp_blocks(reader: Reader, dspark: Dspark | None) -> Any:
    """Read how many MTP blocks there are. With DSpark the two spellings count different things."""
    if dspark is None:
        default = 1 if "n_layers" in reader.raw else REQUIRED  # inference/model.py: ModelArgs
        return reader.take("num_nextn_predict_layers", "n_mtp_layers", default)
    stages = reader.optional("n_mtp_layers", dspark.blocks)
    require(stages == dspark.blocks, "n_mtp_layers", stages, f"{dspark.blocks} target layers")
    return reader.optional("num_nextn_predict_layers", 1)


def _ratios(reader: Reader, layers: object) -> tuple[int, ...]:
    """Read the compress ratios, or translate transformers' layer types; both must agree."""
    ratios, types = reader.optional("compress_ratios"), reader.optional("layer_types")
    rates = reader.optional("compress_rates", {})
    require(isinstance(rates, dict), "compress_rates", rates, "a ratio by layer type")
    by_type = {kind.value: ratio for ratio, kind in LAYER_TYPES.items()}
    for kind, rate in rates.items():
        require(rate == by_type.get(kind), f"compress_rates.{kind}", rate, str(by_type.get(kind)))
    require(
        ratios is not None or types is not None,
        "compress_ratios",
        "missing",
        "a list of ratios, or layer_types",
    )
    if ratios is not None:
        require(isinstance(ratios, list), "compress_ratios", ratios, "a list of integers")
    if types is None:
        return tuple(ratios)
    require(
        _are_among(types, by_type),
        "layer_types",
        types,
        f"a list of {', '.join(by_type)}",
    )
    require(len(types) == layers, "layer_types", types, f"one entry for each of {layers} layers")
    translated = tuple(by_type[kind] for kind in types)
    agree = ratios is None or tuple(ratios[: len(translated)]) == translated
    require(agree, "layer_types", types, f"the types of compress_ratios {ratios}")
    return translated if ratios is None else tuple(ratios)


def _are_among(types: object, known: Container[str]) -> bool:
    """Return whether a value is a list of known names and of nothing else."""
    return isinstance(types, list) and all(
        isinstance(each, str) and each in known for each in types
    )


def _leading(
    reader: Reader,
    name: str,
    official: str,
    kinds: Mapping[str, bool],
    unread: int | None = None,
) -> int:
    """Read how many leading layers are special: a count, or transformers' list of MLP types.

    `unread` is the count that transformers saves beside any list and reads only without one.
    """
    types = reader.optional("mlp_layer_types")
    if types is None:
        return reader.take(name, official)  # type: ignore[no-any-return]  # the record checks it
    require(_are_among(types, kinds), "mlp_layer_types", types, f"a list of {', '.join(kinds)}")
    layers = reader.take("num_hidden_layers", "n_layers")
    require(
        len(types) == layers, "mlp_layer_types", types, f"one entry for each of {layers} layers"
    )
    flags = [kinds[kind] for kind in types]
    count = sum(flags)
    require(all(flags[:count]), "mlp_layer_types", types, "the special layers first")
    stated = reader.take(name, official, count)
    require(stated in (count, unread), name, stated, f"{count}, as mlp_layer_types says")
    return count


def config_to_dict(config: Config, spelling: str = "released") -> dict[str, Any]:
    """Spell a record as a config.json, for vLLM and transformers, or as the official code reads."""
    if spelling not in SPELLINGS:
        raise UnknownName.among("spelling", spelling, SPELLINGS)
    official = spelling == "inference"
    keys = V4_KEYS if isinstance(config, V4Config) else V32_KEYS
    raw = {
        (official and key.inference) or key.field: getattr(config, key.field)
        for key in keys
        if not (official and key.field in {"max_position_embeddings", "num_nextn_predict_layers"})
    }
    raw |= config_rope.write(config, spelling)
    raw |= _layers_spelled(config, spelling)
    if not official:
        raw |= _constants(config)
        raw["model_type"] = config.family
        raw["num_nextn_predict_layers"] = config.num_nextn_predict_layers
        if config.quantisation is not None:
            raw["quantization_config"] = dict(config.quantisation)
    named = {} if official else {"architectures": [ARCHITECTURES[config.family]]}
    return named | dict(config.other) | raw


def _constants(config: Config) -> dict[str, object]:
    if isinstance(config, V4Config):
        return V4_CONSTANTS
    return V32_CONSTANTS | {"num_key_value_heads": config.num_attention_heads}


def _layers_spelled(config: Config, spelling: str) -> dict[str, Any]:
    """Spell what differs by layer, and the drafter."""
    if isinstance(config, V32Config):
        if spelling == "transformers":
            dense = [block.mlp_type is MlpType.DENSE for block in config.layers]
            return {
                "mlp_layer_types": ["dense" if flag else "sparse" for flag in dense],
                "layer_types": [block.layer_type.value for block in config.layers],
            }
        name = "n_dense_layers" if spelling == "inference" else "first_k_dense_replace"
        return {name: config.first_k_dense_replace}
    raw: dict[str, Any] = {}
    if config.dspark:
        raw = {f"dspark_{name}": getattr(config.dspark, name) for name in DSPARK_KEYS}
        raw["dspark_target_layer_ids"] = list(config.dspark.target_layer_ids)
    if spelling == "transformers":
        rates = {kind.value: ratio for ratio, kind in LAYER_TYPES.items() if ratio}
        return raw | {
            "layer_types": [block.layer_type.value for block in config.layers],
            "mlp_layer_types": [block.mlp_type.value for block in config.layers],
            "compress_rates": rates,
        }
    raw["compress_ratios"] = [block.ratio for block in config.blocks]
    if spelling == "inference":
        return raw | {"n_hash_layers": config.num_hash_layers, "n_mtp_layers": config.drafters}
    return raw | {"num_hash_layers": config.num_hash_layers}
