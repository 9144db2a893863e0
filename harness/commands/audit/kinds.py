"""Classify tensors by kind and layer from their names, for grouping the findings of an audit.

Patterns match what all known spellings have in common, so that a checkpoint of an unknown model
gets a map too. The order of the kinds is that of the map.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from degarble.harness.checkpoint.audit.findings import Finding

# The first pattern that matches decides; `#` stands for any number.
_KINDS = (
    ("experts", r"\bexperts\b|\bw13_|\bw2_weight"),
    ("shared experts", r"shared_experts?"),
    ("router", r"\bgate\.|\bgate$|tid2eid|correction_bias"),
    ("indexer", r"indexer"),
    ("compressor", r"compressor"),
    ("mixing", r"\bhc_|(attn|ffn|head)_hc|\bhc\b"),
    ("norms", r"norm"),
    ("dense MLP", r"\bmlp\.(gate|up|down|gate_up)_proj\b|\bffn\.w#\b"),
    ("drafter input", r"\b(eh|e|h)_proj\b"),
    ("attention", r"\b(attn|self_attn|mla_attn)\b"),
    ("embedding, head", r"\b(embed|embed_tokens|head|lm_head|shared_head)\b"),
)
OTHER = "other"
WHOLE = "checkpoint"
KINDS = (*(kind for kind, _ in _KINDS), OTHER, WHOLE)
_NUMBER = re.compile(r"\d+")
_LAYER = re.compile(r"\b(layers|mtp)\.(\d+)\b")


def kind_of_name(name: str) -> str:
    """Return the kind of a tensor, module or parameter by its name."""
    return _kind_of_pattern(_NUMBER.sub("#", name))


@lru_cache(maxsize=4096)
def _kind_of_pattern(name: str) -> str:
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name)), OTHER)


def kind_of(finding: Finding) -> str:
    """Return the kind of tensor that a finding concerns; without a name it concerns all of them."""
    name = finding.tensor or finding.module
    return kind_of_name(name) if name else WHOLE


def layer_of_name(name: str, layers: int) -> int | None:
    """Return the layer of a name; a drafter's number follows those of the decoder's `layers`."""
    found = _LAYER.search(name)
    if found is None:
        return None
    number = int(found[2])
    return number + layers if found[1] == "mtp" else number
