"""Compare two configs: every number and choice that changes what a model computes.

Two spellings of one known family are compared as records. Other configs are compared as JSON, key
by key, with rotary keys brought to one spelling. Tools that save a config again add keys with their
defaults, so a key that only the checkpoint states is no difference.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from degarble.harness.checkpoint.audit import value_rules as rules
from degarble.harness.checkpoint.audit.findings import NOWHERE, Findings
from degarble.harness.checkpoint.read.types import ProblemKind, shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from degarble.harness.checkpoint.audit.findings import Finding
    from degarble.harness.checkpoint.view.view import Checkpoint

    Difference = tuple[str, object, object]  # key, here, in the reference

_ABSENT = "not stated"
# Of records: a checkpoint may leave its drafter out, and its experts' format is its own.
_DRAFTER = frozenset({"num_nextn_predict_layers", "dspark"})
_FREE = frozenset({"expert_dtype", "max_position_embeddings", "quantisation", "other"})
# Words inside of keys that say how something is computed, in any family's config.
_COMPUTES = re.compile(
    r"eps|theta|scal|top_?k|^num_|^n_|_num_|_size$|_dim|rank|window|heads|layers|^hidden_act"
    r"|activation|bias|softcap|clip|limit|norm_topk|tie_word|group|ratio|rope|rotary|partial"
    r"|scoring|alpha|multiplier|experts|freq|step|sink|^model_type$|^architectures$"
)
_NEVER = re.compile(
    r"initializer|loss|dropout|max_position|quant|_attn_implementation|num_labels|id2label"
    r"|num_return|num_beams|chunk_size|pretraining|top_k$|_token|max_window_layers|transformers"
)
_ROPE = ("rope_parameters", "rope_scaling")
# Values that mean the same as a key that is absent.
_NEUTRAL: tuple[object, ...] = (None, False, 0, 1, 10000, 1e-6, [], {}, "", "default", "silu")


def judge_configs(checkpoint: Checkpoint, reference: Checkpoint) -> list[Finding]:
    """Report the keys that two configs state differently."""
    findings = Findings()
    unread = checkpoint.problems.counts[ProblemKind.UNREADABLE_CONFIG]
    if not checkpoint.config or not reference.config:
        return []  # without one there is a finding of its own
    for key, here, there in differences(checkpoint, reference):
        if unread and there == _ABSENT:
            continue
        findings.add(
            rules.CONFIG,
            NOWHERE,
            f"config.json: {shown(key)} is {shown(str(here))}, in the reference"
            f" {shown(str(there))}.",
            f"Set {shown(key)} to {shown(str(there))}, if this checkpoint was made from it.",
            key=shown(key),
            here=shown(str(here)),
            reference=shown(str(there)),
        )
    return findings.sorted()


def differences(checkpoint: Checkpoint, reference: Checkpoint) -> Iterator[Difference]:
    """Yield each key that two configs state differently, with both values."""
    here, there = checkpoint.model, reference.model
    if here is None or there is None or type(here) is not type(there):
        yield from _of_json(checkpoint.config, reference.config)
        return
    free = _FREE | (_DRAFTER if here.drafters < there.drafters else frozenset())
    ours, theirs = asdict(here), asdict(there)
    for key in ours.keys() - free:
        yield from _of_values(key, ours[key], theirs[key])
    classes = checkpoint.config.get("architectures"), reference.config.get("architectures")
    if all(classes) and classes[0] != classes[1]:
        yield ("architectures", *classes)


def _of_values(key: str, here: object, there: object) -> Iterator[Difference]:
    if here == there:
        return
    if isinstance(here, dict) and isinstance(there, dict):
        for name in here:
            yield from _of_values(f"{key}.{name}", here[name], there.get(name))
        return
    yield key, here, there


def _of_json(here: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[Difference]:
    ours, theirs = _flat(here), _flat(there)
    for key, value in theirs.items():
        last = key.rpartition(".")[2]
        if not _COMPUTES.search(last) or _NEVER.search(last):
            continue
        stated = ours.get(key, _ABSENT)
        if stated == value or (stated in (None, _ABSENT) and _is_neutral(value)):
            continue
        if value is None and stated == _ABSENT:
            continue
        if value is None:  # the same as silence: the tool that saved it again wrote its default
            continue
        yield key, stated, value


def _is_neutral(value: object) -> bool:
    return any(value is each or value == each for each in _NEUTRAL)


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Return a config as one level of keys, with rotary keys in one spelling."""
    found: dict[str, object] = {}
    for key, value in config.items():
        if key in _ROPE:
            inner = value if isinstance(value, dict) else {}
            named = {("rope_type" if k == "type" else k): v for k, v in inner.items()}
            for name, each in named.items():
                told = name if name.startswith("rope") else f"rope_{name}"
                found.setdefault(prefix + told, each)
        elif key in {"text_config", "llm_config", "language_config"} and isinstance(value, dict):
            found |= _flat(value, f"{key}.")
        elif not isinstance(value, dict):
            found[prefix + key] = value
    return found
