"""Compare the layers and experts that the config counts with those in the tensors' names.

An engine never runs a layer beyond the config's count. Drafter layers are numbered after the
decoder's; they are recognised by tensors that only drafters have.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from degarble.harness.checkpoint.audit import rules
from degarble.harness.checkpoint.audit.findings import FindingLocation
from degarble.harness.checkpoint.read.types import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.checkpoint.audit.findings import Findings
    from degarble.harness.checkpoint.view.view import Checkpoint

_LAYER = re.compile(r"^(.*?\b)layers\.(\d{1,6})\.")
_EXPERT = re.compile(r"\bexperts\.(\d{1,6})\.")
# Prefixes of stacks that num_hidden_layers does not count.
_OTHER_TOWERS = re.compile(r"vision|visual|audio|encoder|decoder|tower|mtp|draft|perceiver")
# Modules that only drafter layers have (DeepSeek's multi-token prediction).
_DRAFTER = re.compile(r"\.(eh_proj|e_proj|h_proj|enorm|hnorm|shared_head|embed_tokens|mtp\w*)\.")
# Spellings of the number of layers, and of experts, in configs of different families.
_LAYERS = ("num_hidden_layers", "n_layers", "num_layers", "n_layer")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Where the config of a multimodal model nests that of its language model.
_TEXT = ("text_config", "llm_config", "language_config")


def report_counts(checkpoint: Checkpoint, findings: Findings) -> None:
    """Report layers beyond the config's count, and in unknown families absent layers too."""
    config = next(
        (checkpoint.config[key] for key in _TEXT if isinstance(checkpoint.config.get(key), dict)),
        checkpoint.config,
    )
    stacks: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in checkpoint.entries:
        found = _LAYER.match(name)
        if found and not _OTHER_TOWERS.search(found[1]):
            stacks[found[1]][int(found[2])].append(name)
    if not stacks:
        return
    # The decoder is the stack with the most tensors.
    prefix = max(stacks, key=lambda each: sum(map(len, stacks[each].values())))
    layers, count = stacks[prefix], _count(config, _LAYERS)
    if count is not None:
        _report_uncounted(layers, count, prefix, findings)
    if checkpoint.model is None and not checkpoint.problems.found:
        _report_absent(layers, count, prefix, findings)
        _report_experts(layers, _count(config, _EXPERTS), findings)


def _count(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    # Not isinstance: a JSON `true` would count as 1.
    found = next((config[key] for key in keys if type(config.get(key)) is int), None)
    return found if found is None or found > 0 else None


def _report_uncounted(
    layers: Mapping[int, list[str]], count: int, prefix: str, findings: Findings
) -> None:
    for number in sorted(layers):
        names = layers[number]
        if number < count or any(_DRAFTER.search(name) for name in names):
            continue
        findings.add(
            rules.UNCOUNTED,
            FindingLocation(names[0], f"{prefix}layers.{number}", None),
            f"{shown(prefix)}layers.{number} has {len(names)} tensors, and config.json counts"
            f" {count} layers: engines leave it out.",
            "Correct num_hidden_layers, or find out why the layer is there.",
            counted=count,
            tensors=len(names),
        )


def _report_absent(
    layers: Mapping[int, list[str]], count: int | None, prefix: str, findings: Findings
) -> None:
    for number in range(count or max(layers) + 1):
        if number not in layers:
            findings.add(
                rules.MISSING_BLOCK,
                FindingLocation(None, f"{prefix}layers.{number}", number),
                f"{shown(prefix)}layers.{number} has no tensors, the config counts {count} layers.",
                "Look for a missing shard.",
            )


def _report_experts(layers: Mapping[int, list[str]], count: int | None, findings: Findings) -> None:
    for number, names in layers.items():
        there = {int(found[1]): name for name in names if (found := _EXPERT.search(name))}
        if not there or count is None:
            continue
        for expert in sorted(there.keys() - set(range(count))):
            findings.add(
                rules.UNCOUNTED,
                FindingLocation(there[expert], None, number),
                f"{shown(there[expert])} is of expert {expert}, the config counts {count}.",
                "Correct the config's number of experts, or find out why it is there.",
                counted=count,
            )
        front = next(iter(there.values())).partition("experts.")[0]
        for expert in sorted(set(range(count)) - there.keys()):
            findings.add(
                rules.MISSING_EXPERT,
                FindingLocation(None, f"{front}experts.{expert}", number),
                f"Expert {expert} of {shown(front)}experts has no tensors; the config counts"
                f" {count} experts.",
                "Look for a missing shard, or for experts that were pruned.",
            )
