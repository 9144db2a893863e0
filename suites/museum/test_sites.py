"""Where faults can be, told without a model being run."""

from __future__ import annotations

from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.museum.plants import roles_of


def test_every_fault_can_be_somewhere() -> None:
    nowhere = [name for name, fault in MODEL_FAULTS.items() if not roles_of(fault)]
    assert not nowhere


def test_roles_are_those_of_both_families() -> None:
    found = roles_of(MODEL_FAULTS["M10.nibble_order"])
    assert {"ffn.experts.w2", "attn.wo_b", "attn.wo"} <= set(found)
    assert len(found) == len(set(found))
    assert "attn.norm" not in found
