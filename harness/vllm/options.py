"""Options of the plugin: the mapping `degarble` in vLLM's --additional-config.

`parts` chooses vLLM or degarble for a part of a layer where both have a kernel, or where degarble
has none: nothing falls back by itself. Unknown keys, parts and values are errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from degarble.harness.base.errors import InvalidArgument, UnknownName

KEY = "degarble"
OURS, THEIRS = "degarble", "vllm"
SIDES = (OURS, THEIRS)
# Parts of a layer that the plugin has a hook for; parts.py says what runs each.
# `rows`: norms of query and latent rows, heads normed and turned, latent rows written to the cache;
# `o_proj`: heads turned back, and wo_a; `mhc`: four streams mixed, and the norm before a block;
# `act`: the shared expert's SwiGLU; `gate`: the router's logits; `projections`: the compressors'
# scores and the indexer's weights; `head`: logits, and the norm in front of them. vLLM fuses what
# is inside of each, so nobody shares one.
PARTS = (
    "linear", "act_quant", "experts", "gate", "router", "act", "rows", "attend", "o_proj", "mhc",
    "projections", "compressor", "indexer", "head",
)  # fmt: skip
ACTIVATIONS = ("quantised", "bf16")
_KEYS = ("parts", "nvfp4_activations", "ledger", "told")


@dataclass(frozen=True)
class Options:
    """Choice of who runs each part, and where records are written."""

    parts: Mapping[str, str] = field(default_factory=dict)
    nvfp4_activations: str = ACTIVATIONS[0]
    ledger: str | None = None
    told: str | None = None

    def side(self, part: str) -> str:
        """Return who runs a part; degarble by default."""
        return self.parts.get(part, OURS)


def read_options(additional_config: object) -> Options:
    """Read the plugin's part of vLLM's additional config."""
    if not isinstance(additional_config, Mapping):
        raise _refused("additional_config", additional_config, "a mapping")
    raw = additional_config.get(KEY, {})
    if not isinstance(raw, Mapping):
        raise _refused(KEY, raw, "a mapping")
    for key in raw:
        if key not in _KEYS:
            raise UnknownName.among(f"additional_config: {KEY}: key", key, _KEYS)
    activations = raw.get("nvfp4_activations", ACTIVATIONS[0])
    if activations not in ACTIVATIONS:
        raise UnknownName.among(f"{KEY}.nvfp4_activations", activations, ACTIVATIONS)
    return Options(
        _parts(raw.get("parts", {})), str(activations), _text(raw, "ledger"), _text(raw, "told")
    )


def _parts(raw: object) -> Mapping[str, str]:
    if not isinstance(raw, Mapping):
        raise _refused("parts", raw, 'a mapping of parts, as {"attend": "vllm"}')
    for part, side in raw.items():
        if part not in PARTS:
            raise UnknownName.among(f"{KEY}.parts", part, PARTS)
        if side not in SIDES:
            raise UnknownName.among(f"{KEY}.parts.{part}", side, SIDES)
    return dict(raw)


def _text(raw: Mapping[str, object], key: str) -> str | None:
    value = raw.get(key)
    if value is not None and not isinstance(value, str):
        raise _refused(key, value, "a path")
    return value


def _refused(name: str, value: object, expectation: str) -> InvalidArgument:
    return InvalidArgument(f"{KEY}: {name}", value, expectation, "See docs/vllm.md.")
