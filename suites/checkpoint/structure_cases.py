"""Write small checkpoints for the suites of structure and loading, and plant faults in them.

The generator writes a tiny model of each family in every layout. `replant` writes such a checkpoint
again with tensors changed, left out or added by hand.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from degarble.harness.checkpoint.audit.structure.structure import audit_structure
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.suites.checkpoint.reading_cases import TINY_V4, TINY_V32
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.checkpoint.audit.findings import Finding
    from degarble.harness.model.config.config import Config

    Tensors = dict[str, Tensor]

# Head dims differ, so that the two compressors differ in shape; four experts, for two ranks.
V4 = replace(TINY_V4, n_routed_experts=4, moe_intermediate_size=256, head_dim=256)
V32 = replace(TINY_V32, moe_intermediate_size=256)


def write(folder: Path, config: Config, layout: str, recipe: str | None = None) -> Path:
    """Write a healthy checkpoint."""
    write_checkpoint(folder, Synthetic(config, layout, recipe), shards=2)
    return folder


def replant(source: Path, target: Path, change: Callable[[Tensors], None]) -> Path:
    """Write a checkpoint again as one file without an index, after `change` worked on it."""
    with Checkpoint.open(source) as checkpoint:
        tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.entries}
    change(tensors)
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "hf_quant_config.json"):
        if (source / name).exists():
            (target / name).write_bytes((source / name).read_bytes())
    return target


def reconfigure(folder: Path, file: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change one of the configs of a checkpoint in place."""
    raw = json.loads((folder / file).read_text())
    change(raw)
    (folder / file).write_text(json.dumps(raw))


def audited(folder: Path) -> list[Finding]:
    """Audit the structure of a folder."""
    with Checkpoint.survey(folder) as checkpoint:
        return audit_structure(checkpoint)


def told(findings: Iterable[Finding], rule: str) -> list[Finding]:
    """Return the findings of one rule."""
    return [finding for finding in findings if finding.rule == rule]


def errors(findings: Iterable[Finding]) -> set[str]:
    """Return the ids of the rules of level error among findings."""
    return {finding.rule for finding in findings if finding.level == "error"}


def zeros(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros, of any dtype."""
    return torch.zeros(tuple(shape), dtype=torch.float32).to(dtype)
