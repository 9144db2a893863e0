"""The rotary part of a config, in its three spellings.

Owns the translation between rope_scaling (released), rope_parameters (transformers 5.20; for V4
keyed by `main` and `compress`) and the flat keys of the official code, and the facts theta and
YaRN of the record. V4 applies YaRN to compressed layers alone and never scales cos and sin, so an
attention factor other than 1 is refused, as is any key of YaRN that is not known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from degarble.harness.anatomy.config import V4Config
from degarble.harness.anatomy.config_checks import require
from degarble.harness.anatomy.types import Yarn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.anatomy.config import Config
    from degarble.harness.anatomy.config_reader import Reader

_FACTS = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
_BESIDE = frozenset(
    {"type", "rope_type", "rope_theta", "partial_rotary_factor", "attention_factor"}
)


def read_v4(reader: Reader) -> dict[str, Any]:
    """Read both bases and YaRN of a V4 config."""
    nested = reader.optional("rope_parameters", {})
    require(isinstance(nested, dict), "rope_parameters", nested, "an object")
    if "main" in nested or "compress" in nested:
        main, compress = _part(nested, "main"), _part(nested, "compress")
        kind = main.get("rope_type", "default")
        require(kind == "default", "rope_parameters.main.rope_type", kind, "default")
        yarn = _yarn(compress, "rope_parameters.compress")
        thetas = main.get("rope_theta"), compress.get("rope_theta")
        _require_agreement(reader, yarn)
    else:
        yarn, thetas = _released_yarn(reader, nested), (None, None)
    return {
        "rope_theta": _theta(reader, "rope_theta", thetas[0]),
        "compress_rope_theta": _theta(reader, "compress_rope_theta", thetas[1]),
        "yarn": yarn,
    }


def read_v32(reader: Reader) -> dict[str, Any]:
    """Read base and YaRN of a V3.2 config."""
    flat = reader.optional("rope_parameters", {})
    require(isinstance(flat, dict), "rope_parameters", flat, "an object")
    yarn = _released_yarn(reader, flat)
    return {"rope_theta": _theta(reader, "rope_theta", flat.get("rope_theta")), "yarn": yarn}


def rotary_dims(reader: Reader, head_dim: object) -> Any:
    """Read the rotary dims, or translate transformers' fraction of a head."""
    fraction = reader.optional("partial_rotary_factor")
    if fraction is None:
        return reader.take("qk_rope_head_dim", "rope_head_dim")
    dims_known = isinstance(head_dim, int) and 0 < head_dim < 1 << 31
    usable = dims_known and isinstance(fraction, int | float) and 0 <= fraction <= 1
    require(usable, "partial_rotary_factor", fraction, "a share of 1, with a head_dim beside it")
    dims = round(head_dim * fraction)
    exact = abs(head_dim * fraction - dims) < 1e-6
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
        return raw | _inference_yarn(yarn)
    if spelling == "released":
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
    shared = {"partial_rotary_factor": config.qk_rope_head_dim / config.head_dim}
    main = {"rope_type": "default", "rope_theta": config.rope_theta, **shared}
    compress = {**_typed(yarn), "rope_theta": config.compress_rope_theta, **shared}
    if yarn:
        compress["attention_factor"] = 1.0
    return raw | shared | {"rope_parameters": {"main": main, "compress": compress}}


def _typed(yarn: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_type": "yarn", **yarn} if yarn else {"rope_type": "default"}


def _part(nested: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = nested.get(name)
    require(isinstance(part, dict), f"rope_parameters.{name}", part, "an object")
    assert isinstance(part, dict)
    return part


def _theta(reader: Reader, name: str, nested: object) -> Any:
    """Take a base that may be stated at the top, in rope_parameters, or in both alike."""
    if nested is None:
        return reader.take(name)
    stated = reader.optional(name, nested)
    require(stated == nested, name, stated, f"{nested!r}, as rope_parameters says")
    return nested


def _released_yarn(reader: Reader, flat: Mapping[str, Any]) -> Yarn | None:
    """Read YaRN from flat rope_parameters, from rope_scaling, or from the official code's keys."""
    if flat:
        yarn = _yarn(flat, "rope_parameters")
        _require_agreement(reader, yarn)
        return yarn
    if "rope_scaling" in reader.raw:
        return _scaling(reader)
    length = reader.take("original_seq_len")
    if length == 0:
        return None
    mscale = reader.optional("mscale")
    return Yarn(
        factor=reader.take("rope_factor"),
        original_max_position_embeddings=length,
        beta_fast=reader.optional("beta_fast", 32),
        beta_slow=reader.optional("beta_slow", 1),
        mscale=mscale,
        mscale_all_dim=mscale,
    )


def _scaling(reader: Reader) -> Yarn | None:
    scaling = reader.optional("rope_scaling")
    if scaling is None:
        return None
    require(isinstance(scaling, dict), "rope_scaling", scaling, "an object or null")
    return _yarn(scaling, "rope_scaling")


def _require_agreement(reader: Reader, yarn: Yarn | None) -> None:
    """Refuse rope_scaling that differs from rope_parameters beside it."""
    if reader.raw.get("rope_scaling") is not None:
        beside = _scaling(reader)
        require(beside == yarn, "rope_scaling", beside, f"{yarn}, as rope_parameters says")


def _yarn(raw: Mapping[str, Any], where: str) -> Yarn | None:
    """Read YaRN's facts; None where the rope type is the default one."""
    kind = raw.get("rope_type", raw.get("type"))
    require(kind in ("yarn", "default"), f"{where}.rope_type", kind, "yarn or default")
    unknown = sorted(set(raw) - set(_FACTS) - _BESIDE)
    require(not unknown, f"{where} keys", unknown, f"only {', '.join(_FACTS)} beside the type")
    factor = raw.get("attention_factor")
    require(factor in (None, 1), f"{where}.attention_factor", factor, "1: cos and sin are unscaled")
    if kind == "default":
        return None
    for name in _FACTS[:2]:
        require(raw.get(name) is not None, f"{where}.{name}", "missing", "this key")
    return Yarn(**{name: raw[name] for name in _FACTS if raw.get(name) is not None})


def _facts(yarn: Yarn | None) -> dict[str, Any]:
    if yarn is None:
        return {}
    return {name: value for name in _FACTS if (value := getattr(yarn, name)) is not None}


def _inference_yarn(yarn: Mapping[str, Any]) -> dict[str, Any]:
    """Spell YaRN as the official code's flat keys; length 0 stands for none."""
    if not yarn:
        return {"original_seq_len": 0}
    flat = {
        "original_seq_len": yarn["original_max_position_embeddings"],
        "rope_factor": yarn["factor"],
    }
    return flat | {
        name: yarn[name] for name in ("beta_fast", "beta_slow", "mscale") if name in yarn
    }
