"""Read and write the RoPE facts of a config (theta, YaRN) in three spellings.

The spellings are rope_scaling (released), rope_parameters (transformers 5.20; for V4 keyed by
`main` and `compress`) and the flat keys of the official code. V4 applies YaRN to compressed layers
alone. The scale of cos and sin follows transformers: V4 leaves them alone unless a config states an
attention_factor, or spells rope_parameters by layer and states none; V3.2 derives the factor
(`Yarn.rotation_scale`). The official code never scales them.

Only `yarn` and `default` are accepted, and no unknown keys: no release of either family has others,
and vLLM reads every type but `default` as YaRN.
"""

from __future__ import annotations

from dataclasses import replace
from math import nextafter
from typing import TYPE_CHECKING, Any

from degarble.harness.model.config.checks import require, require_yarn
from degarble.harness.model.config.config import V4Config
from degarble.harness.model.types import Yarn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from degarble.harness.model.config.config import Config
    from degarble.harness.model.config.reader import Reader

    YarnReader = Callable[[Mapping[str, Any], str], Yarn | None]

_FACTS = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
)
_UNSCALED = "mscale_all_dim: the official code never scales cos and sin"
_BESIDE = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor", "truncate"})


def read_v4(reader: Reader) -> dict[str, Any]:
    """Read both bases and YaRN of a V4 config."""
    nested = reader.optional("rope_parameters", {})
    require(isinstance(nested, dict), "rope_parameters", nested, "an object")
    if "main" in nested or "compress" in nested:
        main, compress = _part(nested, "main"), _part(nested, "compress")
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


def read_v32(reader: Reader) -> dict[str, Any]:
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
    require(usable, "partial_rotary_factor", fraction, "a share of 1, with a head_dim beside it")
    dims = round(head_dim * fraction)
    # Trap: transformers cuts the product, so 30/47 of a head of 47 turns 29 dims there.
    exact = abs(head_dim * fraction - dims) < 1e-6 and int(head_dim * fraction) == dims
    require(exact, "partial_rotary_factor", fraction, f"a whole number of {head_dim} dims")
    stated = reader.take("qk_rope_head_dim", "rope_head_dim", dims)
    require(stated == dims, "qk_rope_head_dim", stated, f"{dims}, as partial_rotary_factor says")
    return dims


def write(config: Config, spelling: str) -> dict[str, Any]:
    """Spell the rotary facts of a record."""
    raw: dict[str, Any] = {"rope_theta": config.rope_theta}
    yarn = _facts(config.yarn)
    if isinstance(config, V4Config):
        raw |= _write_v4(config, spelling)
    if spelling == "inference":
        return raw | _inference_yarn(config)
    if spelling == "released":
        if isinstance(config, V4Config) and yarn.get("attention_factor") == 1:
            del yarn["attention_factor"]  # no released V4 states it; 1 is what they mean
        return raw | {"rope_scaling": {"type": "yarn", **yarn} if yarn else None}
    if isinstance(config, V4Config):
        return raw
    return raw | {"rope_parameters": {"rope_theta": config.rope_theta, **_typed(yarn)}}


def _write_v4(config: V4Config, spelling: str) -> dict[str, Any]:
    """Spell what V4 alone has: the second base, and rotary dims that are a part of the head."""
    raw: dict[str, Any] = {"compress_rope_theta": config.compress_rope_theta}
    if spelling != "transformers":
        name = "rope_head_dim" if spelling == "inference" else "qk_rope_head_dim"
        return raw | {name: config.qk_rope_head_dim}
    yarn = _facts(config.yarn)
    fraction = config.qk_rope_head_dim / config.head_dim
    # transformers cuts head_dim * fraction to an int; the next float up keeps all rotary dims.
    if int(config.head_dim * fraction) < config.qk_rope_head_dim:
        fraction = nextafter(fraction, 1.0)
    shared = {"partial_rotary_factor": fraction}
    main = {"rope_type": "default", "rope_theta": config.rope_theta, **shared}
    compress = {**_typed(yarn), "rope_theta": config.compress_rope_theta, **shared}
    return raw | shared | {"rope_parameters": {"main": main, "compress": compress}}


def _typed(yarn: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_type": "yarn", **yarn} if yarn else {"rope_type": "default"}


def _part(nested: Mapping[str, Any], name: str) -> dict[str, Any]:
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
    unknown = sorted(set(raw) - set(_FACTS) - _BESIDE)
    require(not unknown, f"{where} keys", unknown, f"only {', '.join(_FACTS)} beside the type")
    if kind == "default":
        return None
    for name in _FACTS[:2]:
        require(raw.get(name) is not None, f"{where}.{name}", "missing", "this key")
    truncate = raw.get("truncate", True)
    yarn = Yarn(
        # transformers reads null as false here, and a beta of 0 as its default.
        truncate=False if truncate is None else truncate,
        **{name: raw[name] for name in _FACTS if raw.get(name) not in _unstated(name)},
    )
    require_yarn(yarn)
    return yarn


def _unstated(name: str) -> tuple[object, ...]:
    return (None, 0) if name.startswith("beta_") else (None,)


def _facts(yarn: Yarn | None) -> dict[str, Any]:
    if yarn is None:
        return {}
    ramp = {} if yarn.truncate else {"truncate": False}
    facts = {name: value for name in _FACTS if (value := getattr(yarn, name)) is not None}
    return facts | ramp


def _inference_yarn(config: Config) -> dict[str, Any]:
    """Spell YaRN as the official code's flat keys; length 0 stands for none."""
    yarn = config.yarn
    if yarn is None:
        return {"original_seq_len": 0}
    require(yarn.rotation_scale == 1, "mscale", yarn.mscale, _UNSCALED)
    require(yarn.truncate, "truncate", yarn.truncate, "true: the official code has nothing else")
    mscale = {} if isinstance(config, V4Config) else {"mscale": yarn.mscale_all_dim or 0}
    return mscale | {
        "original_seq_len": yarn.original_max_position_embeddings,
        "rope_factor": yarn.factor,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }
