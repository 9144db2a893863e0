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
from dataclasses import replace
from math import nextafter
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import InvalidArgument, UnknownName, UnreadableFile
from degarble.harness.base.files import read_small_text
from degarble.harness.model.config.config import (
    LAYER_TYPES,
    Config,
    Dspark,
    V4Config,
    V32Config,
    require,
    require_yarn,
)
from degarble.harness.model.family import family_of, recognised
from degarble.harness.model.types import LayerType, MlpType, Yarn

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping
    from pathlib import Path


# --------------------------------------------------------------------------------------------------
# A reader of JSON values by key, so that no key is read twice or forgotten
#
# A fact stated under two names must be stated alike; a fact stated nowhere is an error that names
# its key. Keys that were not read remain as provenance.

REQUIRED = object()


class Reader:
    """A config dict, and the keys of it that have been taken."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self._taken: set[str] = set()

    def take(self, name: str, alias: str | None = None, default: object = REQUIRED) -> Any:
        """Return the value of `name`, also known as `alias`; null counts as not stated."""
        stated = [key for key in (name, alias) if key and self.raw.get(key) is not None]
        self._taken.update(key for key in (name, alias) if key)
        if not stated:
            known_as = f" (also called {alias})" if alias else ""
            require(default is not REQUIRED, name, "missing", f"this key{known_as}")
            return default
        value = self.raw[stated[0]]
        if len(stated) == 2:
            other = self.raw[stated[1]]
            require(other == value, name, value, f"{other!r}, as {alias} says")
        return value

    def optional(self, name: str, default: object = None) -> Any:
        """Return the value of `name` or `default`."""
        return self.take(name, None, default)

    def fields(self, keys: Iterable[tuple[str, str | None, object]]) -> dict[str, Any]:
        """Return one value for each (field, alias, default)."""
        return {field: self.take(field, alias, default) for field, alias, default in keys}

    def constants(self, values: Mapping[str, object]) -> None:
        """Refuse a stated value that differs from what the whole family has."""
        for name, value in values.items():
            stated = self.optional(name, value)
            same = stated == value and isinstance(stated, bool) == isinstance(value, bool)
            require(same, name, stated, f"{value!r}: this family has nothing else")

    def rest(self) -> dict[str, Any]:
        """Return the keys that nobody took."""
        return {key: value for key, value in self.raw.items() if key not in self._taken}


# --------------------------------------------------------------------------------------------------
# The RoPE facts (theta, YaRN)
#
# The spellings are rope_scaling (released), rope_parameters (transformers 5.20; for V4 keyed by
# `main` and `compress`) and the flat keys of the official code. V4 applies YaRN to compressed
# layers alone. The scale of cos and sin follows transformers: V4 leaves them alone unless a config
# states an attention_factor, or spells rope_parameters by layer and states none; V3.2 derives the
# factor (`Yarn.rotation_scale`). The official code never scales them.
#
# Only `yarn` and `default` are accepted, and no unknown keys: no release of either family has
# others, and vLLM reads every type but `default` as YaRN.

if TYPE_CHECKING:
    YarnReader = Callable[[Mapping[str, Any], str], Yarn | None]

_YARN_FACTS = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
)
_UNSCALED_ROPE = "mscale_all_dim: the official code never scales cos and sin"
_OTHER_KEYS = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor", "truncate"})


def read_v4_rope(reader: Reader) -> dict[str, Any]:
    """Read both bases and YaRN of a V4 config."""
    nested = reader.optional("rope_parameters", {})
    require(isinstance(nested, dict), "rope_parameters", nested, "an object")
    if "main" in nested or "compress" in nested:
        main, compress = _rope_part(nested, "main"), _rope_part(nested, "compress")
        kind = main.get("rope_type", "default")
        require(kind == "default", "rope_parameters.main.rope_type", kind, "default")
        for name, part in (("main", main), ("compress", compress)):
            _require_fraction(reader, part, f"rope_parameters.{name}.partial_rotary_factor")
        yarn = _yarn_of_v4(compress, "rope_parameters.compress")
        thetas = main.get("rope_theta"), compress.get("rope_theta")
        _require_agreement(reader, yarn, _flat_yarn_of_v4)
    else:
        yarn, thetas = _released_yarn(reader, nested, _flat_yarn_of_v4), (None, None)
    return {
        "rope_theta": _theta(reader, "rope_theta", thetas[0]),
        "compress_rope_theta": _theta(reader, "compress_rope_theta", thetas[1]),
        "yarn": yarn,
    }


def read_v32_rope(reader: Reader) -> dict[str, Any]:
    """Read base and YaRN of a V3.2 config."""
    flat = reader.optional("rope_parameters", {})
    require(isinstance(flat, dict), "rope_parameters", flat, "an object")
    fraction = flat.get("partial_rotary_factor")
    require(fraction in (None, 1), "partial_rotary_factor", fraction, "1: a width of its own turns")
    yarn = _released_yarn(reader, flat, _yarn)
    return {"rope_theta": _theta(reader, "rope_theta", flat.get("rope_theta")), "yarn": yarn}


def _require_fraction(reader: Reader, part: Mapping[str, Any], name: str) -> None:
    """Raise if rotary dims differ by layer."""
    whole = reader.raw.get("partial_rotary_factor")
    own = part.get("partial_rotary_factor", whole)
    require(own == whole, name, own, f"{whole}, as partial_rotary_factor says")


def rotary_dims(reader: Reader, head_dim: object) -> Any:
    """Read the rotary dims, or translate transformers' fraction of a head."""
    fraction = reader.optional("partial_rotary_factor")
    if fraction is None:
        return reader.take("qk_rope_head_dim", "rope_head_dim")
    dims_known = isinstance(head_dim, int) and 0 < head_dim < 1 << 31
    usable = dims_known and isinstance(fraction, int | float) and 0 <= fraction <= 1
    require(usable, "partial_rotary_factor", fraction, "a share of 1, together with a head_dim")
    dims = round(head_dim * fraction)
    # Trap: transformers cuts the product, so 30/47 of a head of 47 turns 29 dims there.
    exact = abs(head_dim * fraction - dims) < 1e-6 and int(head_dim * fraction) == dims
    require(exact, "partial_rotary_factor", fraction, f"a whole number of {head_dim} dims")
    stated = reader.take("qk_rope_head_dim", "rope_head_dim", dims)
    require(stated == dims, "qk_rope_head_dim", stated, f"{dims}, as partial_rotary_factor says")
    return dims


def write_v32_rope(config: V32Config, spelling: str) -> dict[str, Any]:
    """Spell the rotary facts of a V3.2 config."""
    raw: dict[str, Any] = {"rope_theta": config.rope_theta}
    yarn = _yarn_facts(config.yarn)
    if spelling == "inference":
        mscale = {} if config.yarn is None else {"mscale": config.yarn.mscale_all_dim or 0}
        return raw | mscale | _inference_yarn(config.yarn)
    if spelling == "released":
        return raw | {"rope_scaling": {"type": "yarn", **yarn} if yarn else None}
    return raw | {"rope_parameters": {"rope_theta": config.rope_theta, **_with_rope_type(yarn)}}


def write_v4_rope(config: V4Config, spelling: str) -> dict[str, Any]:
    """Spell the rotary facts of a V4 config."""
    raw = {"rope_theta": config.rope_theta} | _second_base(config, spelling)
    yarn = _yarn_facts(config.yarn)
    if spelling == "inference":
        return raw | _inference_yarn(config.yarn)
    if spelling == "released":
        if yarn.get("attention_factor") == 1:
            del yarn["attention_factor"]  # no released V4 states it; 1 is what they mean
        return raw | {"rope_scaling": {"type": "yarn", **yarn} if yarn else None}
    return raw


def _second_base(config: V4Config, spelling: str) -> dict[str, Any]:
    """Spell what V4 alone has: the second base, and rotary dims that are a part of the head."""
    raw: dict[str, Any] = {"compress_rope_theta": config.compress_rope_theta}
    if spelling != "transformers":
        name = "rope_head_dim" if spelling == "inference" else "qk_rope_head_dim"
        return raw | {name: config.qk_rope_head_dim}
    yarn = _yarn_facts(config.yarn)
    fraction = config.qk_rope_head_dim / config.head_dim
    # transformers cuts head_dim * fraction to an int; the next float up keeps all rotary dims.
    if int(config.head_dim * fraction) < config.qk_rope_head_dim:
        fraction = nextafter(fraction, 1.0)
    shared = {"partial_rotary_factor": fraction}
    main = {"rope_type": "default", "rope_theta": config.rope_theta, **shared}
    compress = {**_with_rope_type(yarn), "rope_theta": config.compress_rope_theta, **shared}
    return raw | shared | {"rope_parameters": {"main": main, "compress": compress}}


def _with_rope_type(yarn: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_type": "yarn", **yarn} if yarn else {"rope_type": "default"}


def _rope_part(nested: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = nested.get(name)
    require(isinstance(part, dict), f"rope_parameters.{name}", part, "an object")
    assert isinstance(part, dict)
    return part


def _theta(reader: Reader, name: str, nested: object) -> Any:
    """Return a base that may be stated at the top, in rope_parameters, or in both alike."""
    if nested is None:
        return reader.take(name)
    stated = reader.optional(name, nested)
    require(stated == nested, name, stated, f"{nested!r}, as rope_parameters says")
    return nested


def _released_yarn(reader: Reader, flat: Mapping[str, Any], read: YarnReader) -> Yarn | None:
    """Read YaRN from flat rope_parameters, from rope_scaling, or from the official code's keys."""
    if flat:
        yarn = read(flat, "rope_parameters")
        _require_agreement(reader, yarn, read)
        return yarn
    if "rope_scaling" in reader.raw:
        return _scaling(reader, read)
    length = reader.take("original_seq_len")
    if length == 0:
        return None
    return Yarn(
        factor=reader.take("rope_factor"),
        original_max_position_embeddings=length,
        beta_fast=reader.optional("beta_fast", 32),
        beta_slow=reader.optional("beta_slow", 1),
        **({} if read is _flat_yarn_of_v4 else _official_mscale(reader)),
    )


def _official_mscale(reader: Reader) -> dict[str, Any]:
    """Read what V3.2's official code scales logits by; it never scales cos and sin."""
    mscale = reader.optional("mscale", 1.0)  # inference/model.py: ModelArgs
    return {"mscale": mscale, "mscale_all_dim": mscale} if mscale else {"attention_factor": 1.0}


def _scaling(reader: Reader, read: YarnReader) -> Yarn | None:
    scaling = reader.optional("rope_scaling")
    if scaling is None:
        return None
    require(isinstance(scaling, dict), "rope_scaling", scaling, "an object or null")
    return read(scaling, "rope_scaling")


def _require_agreement(reader: Reader, yarn: Yarn | None, read: YarnReader) -> None:
    """Raise if rope_scaling differs from rope_parameters in the same config."""
    if reader.raw.get("rope_scaling") is not None:
        beside = _scaling(reader, read)
        require(beside == yarn, "rope_scaling", beside, f"{yarn}, as rope_parameters says")


def _flat_yarn_of_v4(raw: Mapping[str, Any], where: str) -> Yarn | None:
    """Read YaRN as transformers does before it spells it by layer: 1 is put where no key is."""
    stated = raw if "attention_factor" in raw else {**raw, "attention_factor": 1.0}
    return _yarn_of_v4(stated, where)


def _yarn_of_v4(raw: Mapping[str, Any], where: str) -> Yarn | None:
    """Read YaRN of compressed layers; what is null or missing by now is derived."""
    yarn = _yarn(raw, where)
    return yarn and replace(yarn, attention_factor=yarn.rotation_scale)


def _yarn(raw: Mapping[str, Any], where: str) -> Yarn | None:
    """Read YaRN's facts; None where the rope type is the default one."""
    kind = raw.get("rope_type", raw.get("type"))
    require(kind in ("yarn", "default"), f"{where}.rope_type", kind, "yarn or default")
    unknown = sorted(set(raw) - set(_YARN_FACTS) - _OTHER_KEYS)
    require(not unknown, f"{where} keys", unknown, f"only {', '.join(_YARN_FACTS)} and the type")
    if kind == "default":
        return None
    for name in _YARN_FACTS[:2]:
        require(raw.get(name) is not None, f"{where}.{name}", "missing", "this key")
    truncate = raw.get("truncate", True)
    yarn = Yarn(
        # transformers reads null as false here, and a beta of 0 as its default.
        truncate=False if truncate is None else truncate,
        **{name: raw[name] for name in _YARN_FACTS if raw.get(name) not in _unstated(name)},
    )
    require_yarn(yarn)
    return yarn


def _unstated(name: str) -> tuple[object, ...]:
    return (None, 0) if name.startswith("beta_") else (None,)


def _yarn_facts(yarn: Yarn | None) -> dict[str, Any]:
    if yarn is None:
        return {}
    ramp = {} if yarn.truncate else {"truncate": False}
    facts = {name: value for name in _YARN_FACTS if (value := getattr(yarn, name)) is not None}
    return facts | ramp


def _inference_yarn(yarn: Yarn | None) -> dict[str, Any]:
    """Spell YaRN as the official code's flat keys; length 0 stands for none."""
    if yarn is None:
        return {"original_seq_len": 0}
    require(yarn.rotation_scale == 1, "mscale", yarn.mscale, _UNSCALED_ROPE)
    require(yarn.truncate, "truncate", yarn.truncate, "true: the official code has nothing else")
    return {
        "original_seq_len": yarn.original_max_position_embeddings,
        "rope_factor": yarn.factor,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }


# --------------------------------------------------------------------------------------------------
# The whole file

SPELLINGS = ("released", "transformers", "inference")
_LARGEST_FILE = 16 << 20


class ConfigKey(NamedTuple):
    """One fact: our field, which is also its key in config.json, and the official code's key."""

    field: str
    inference: str | None = None  # None: spelled alike
    default: object = REQUIRED  # what the code assumes that reads such a file


SHARED_KEYS = (
    ConfigKey("vocab_size"),
    ConfigKey("hidden_size", "dim"),
    ConfigKey("num_hidden_layers", "n_layers"),
    ConfigKey("num_attention_heads", "n_heads"),
    ConfigKey("q_lora_rank"),
    ConfigKey("index_n_heads"),
    ConfigKey("index_head_dim"),
    ConfigKey("index_topk"),
    ConfigKey("moe_intermediate_size", "moe_inter_dim"),
    ConfigKey("n_routed_experts"),
    ConfigKey("num_experts_per_tok", "n_activated_experts"),
    ConfigKey("routed_scaling_factor", "route_scale"),
    ConfigKey("rms_norm_eps", "norm_eps", 1e-6),
    ConfigKey("max_position_embeddings", None, None),
)
V4_KEYS = (
    *SHARED_KEYS,
    ConfigKey("scoring_func", "score_func"),
    ConfigKey("head_dim"),
    ConfigKey("o_groups"),
    ConfigKey("o_lora_rank"),
    ConfigKey("sliding_window", "window_size"),
    ConfigKey("swiglu_limit"),
    ConfigKey("expert_dtype", None, "fp4"),  # absent in the first release; loaders take fp4
    ConfigKey("hc_mult"),
    ConfigKey("hc_sinkhorn_iters"),
    ConfigKey("hc_eps", None, 1e-6),
)
V32_KEYS = (
    *SHARED_KEYS,
    ConfigKey("scoring_func", "score_func", "sigmoid"),  # transformers has no other and saves none
    ConfigKey("kv_lora_rank"),
    ConfigKey("qk_nope_head_dim"),
    ConfigKey("qk_rope_head_dim"),
    ConfigKey("v_head_dim"),
    ConfigKey("intermediate_size", "inter_dim"),
    ConfigKey("n_shared_experts"),
    ConfigKey("n_group", "n_expert_groups"),
    ConfigKey("topk_group", "n_limited_groups"),
    ConfigKey("num_nextn_predict_layers", None, 0),  # transformers and the official code have none
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


def config_from_file(path: Path) -> Any:
    """Read one config.json, which is one JSON object without repeated keys, as its family's."""
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


def config_from_dict(raw: Mapping[str, Any]) -> Any:
    """Make its family's record of a config dict in any known spelling."""
    if not isinstance(raw, dict):
        raise InvalidArgument("config", raw, "a JSON object", "Pass what config.json holds.")
    config: Config = recognised(raw).read(raw)
    return config


def read_v4(raw: Mapping[str, Any]) -> V4Config:
    """Read a V4 config in any spelling."""
    reader = Reader(raw)
    reader.optional("model_type")
    values = reader.fields(V4_KEYS)
    reader.constants(V4_CONSTANTS)
    dspark = _dspark(reader)
    values |= read_v4_rope(reader)
    return V4Config(
        **values,
        num_nextn_predict_layers=_mtp_blocks(reader, dspark),
        dspark=dspark,
        compress_ratios=_ratios(reader, values["num_hidden_layers"]),
        num_hash_layers=_leading(
            reader, "num_hash_layers", "n_hash_layers", {MlpType.HASH: True, MlpType.SCORED: False}
        ),
        qk_rope_head_dim=rotary_dims(reader, values["head_dim"]),
        quantisation=reader.optional("quantization_config"),
        other=reader.rest(),
    )


def read_v32(raw: Mapping[str, Any]) -> V32Config:
    """Read a V3.2 config in any spelling."""
    reader = Reader(raw)
    reader.optional("model_type")
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
    values |= read_v32_rope(reader)
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
    """Spell a record as a config.json, for vLLM and transformers, or as the official code reads.

    A family with records of its own registers how, for its class of configs.
    """
    if spelling not in SPELLINGS:
        raise UnknownName.among("spelling", spelling, SPELLINGS)
    return family_of(config).write(config, spelling)


def write_v4(config: V4Config, spelling: str) -> dict[str, Any]:
    """Spell a V4 config."""
    own = write_v4_rope(config, spelling) | _v4_layers_spelled(config, spelling)
    return _written(config, spelling, V4_KEYS, own, V4_CONSTANTS)


def write_v32(config: V32Config, spelling: str) -> dict[str, Any]:
    """Spell a V3.2 config."""
    own = write_v32_rope(config, spelling) | _v32_layers_spelled(config, spelling)
    constants = V32_CONSTANTS | {"num_key_value_heads": config.num_attention_heads}
    return _written(config, spelling, V32_KEYS, own, constants)


def _written(
    config: Any,
    spelling: str,
    keys: Iterable[ConfigKey],
    own: Mapping[str, Any],
    constants: Mapping[str, object],
) -> dict[str, Any]:
    """Spell what both families have, and the constants that the official code does not state."""
    official = spelling == "inference"
    raw = {
        (official and key.inference) or key.field: getattr(config, key.field)
        for key in keys
        if not (official and key.field in {"max_position_embeddings", "num_nextn_predict_layers"})
    }
    raw |= own
    if not official:
        raw |= constants
        raw["model_type"] = config.family
        raw["num_nextn_predict_layers"] = config.num_nextn_predict_layers
        if config.quantisation is not None:
            raw["quantization_config"] = dict(config.quantisation)
    named = {} if official else {"architectures": [ARCHITECTURES[config.family]]}
    return named | dict(config.other) | raw


def _v32_layers_spelled(config: V32Config, spelling: str) -> dict[str, Any]:
    """Spell what differs by layer."""
    if spelling == "transformers":
        dense = [block.mlp_type is MlpType.DENSE for block in config.layers]
        return {
            "mlp_layer_types": ["dense" if flag else "sparse" for flag in dense],
            "layer_types": [block.layer_type.value for block in config.layers],
        }
    name = "n_dense_layers" if spelling == "inference" else "first_k_dense_replace"
    return {name: config.first_k_dense_replace}


def _v4_layers_spelled(config: V4Config, spelling: str) -> dict[str, Any]:
    """Spell what differs by layer, and the drafter."""
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
