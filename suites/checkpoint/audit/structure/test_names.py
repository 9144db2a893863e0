"""Names that no known loader reads are told, and those of every layout that one reads are not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from degarble.harness.checkpoint.audit.structure.structure import audit_structure
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.model.config.config import V4Config
from degarble.harness.model.layouts import LAYOUTS, layout_named, with_fused_compressors
from degarble.suites.checkpoint.structure_cases import V4, V32
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.checkpoint.audit.findings import Finding
    from degarble.harness.model.layouts import Layout

UNREAD = {"nvfp4-full": "names.unread_quantised", "compressed-tensors": "names.unread_quantised"}


def names_told(folder: Path) -> list[Finding]:
    with Checkpoint.survey(folder) as checkpoint:
        return [each for each in audit_structure(checkpoint) if each.rule.startswith("names.")]


@pytest.mark.parametrize(("family", "layout"), LAYOUTS)
def test_a_layout_is_told_where_nobody_reads_it(family: str, layout: str, tmp_path: Path) -> None:
    config = V4 if family == V4Config.family else V32
    write_checkpoint(tmp_path / "c", Synthetic(config, layout, seed=5))
    wanted = UNREAD.get(layout) if config is V4 else None
    assert [each.rule for each in names_told(tmp_path / "c")] == ([wanted] if wanted else [])


def test_decoded_under_names_of_nobody_is_an_error(tmp_path: Path) -> None:
    """What `convert --to bf16` wrote: transformers computes with experts at random."""
    layout = layout_named("nvfp4-full", V4).with_recipe("bf16")
    (told,) = written_and_told(tmp_path / "c", layout)
    experts = 3 * V4.n_routed_experts * V4.num_hidden_layers
    assert (told.rule, told.level) == ("names.unread", "error")
    assert told.evidence["modules"] == experts
    assert all(".mlp.experts." in name for name in told.evidence["examples"])
    assert "transformers leaves them at random" in told.message


def test_compressors_fused_under_names_of_nobody_are_told(tmp_path: Path) -> None:
    fused = with_fused_compressors(layout_named("official", V4)).with_recipe("bf16")
    assert not written_and_told(tmp_path / "read", fused)
    other = with_fused_compressors(layout_named("transformers-saved", V4)).with_recipe("bf16")
    (told,) = written_and_told(tmp_path / "unread", other)
    assert all(name.endswith(".fused_wkv_wgate") for name in told.evidence["examples"])


def written_and_told(folder: Path, layout: Layout) -> list[Finding]:
    write_checkpoint(folder, Synthetic(V4, layout, seed=5))
    return names_told(folder)
