"""What conversion.json states about experts, and what the audit of numbers makes of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.checkpoint.audit import value_rules as rules_numbers
from degarble.harness.checkpoint.audit.numbers.numbers import audit_numbers
from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.checkpoint.transform.convert.job import convert
from degarble.harness.checkpoint.transform.convert.vllm_parameters import (
    BACKENDS,
    is_arranged,
    stated_backend,
)
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.suites.checkpoint.converting_cases import source
from degarble.suites.checkpoint.reading_cases import write_shards

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.checkpoint.audit.findings import Finding

TRTLLM = {"to": "vllm", "options": {"backend": "trtllm"}}


def errors_of(folder: Path) -> tuple[list[Finding], list[Finding]]:
    with Checkpoint.open(folder) as checkpoint:
        findings = audit_numbers(checkpoint).findings
    return findings, [each for each in findings if each.level is Level.ERROR]


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "loader"])
def test_experts_in_a_stated_order_are_no_error(tmp_path: Path, backend: str) -> None:
    convert(source("nvfp4-experts"), tmp_path, "vllm", {"backend": backend})
    findings, errors = errors_of(tmp_path)
    assert errors == []
    (told,) = [f for f in findings if f.rule == rules_numbers.SCALE_LAYOUT_STATED.id]
    assert "`128x4`, as conversion.json states" in told.message
    assert told.evidence["matrices"] == 2 * 3 * 3  # layers, experts, matrices


def test_a_broken_promise_is_an_error(tmp_path: Path) -> None:
    """Swizzled without a word of it, and row-major where a swizzle is stated."""
    convert(source("nvfp4-experts"), tmp_path / "a", "vllm", {"backend": "vllm-cutlass"})
    (tmp_path / "a" / "conversion.json").unlink()
    convert(source("nvfp4-experts"), tmp_path / "b", "vllm", {"backend": "loader"})
    (tmp_path / "b" / "conversion.json").write_text(json.dumps(TRTLLM))
    for name, told in (("a", "lies in the order `128x4`"), ("b", "conversion.json states `128x4`")):
        _, errors = errors_of(tmp_path / name)
        assert {each.rule for each in errors} == {rules_numbers.SCALE_LAYOUT.id}
        assert all(told in each.message for each in errors)


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        (json.dumps(TRTLLM), "trtllm"),
        (json.dumps({"to": "vllm", "options": {"backend": "loader"}}), None),
        (json.dumps({"to": "bf16", "options": {}}), None),
        (json.dumps({"to": "vllm", "options": {"backend": ["trtllm"]}}), None),
        (json.dumps({"to": "vllm", "options": {"backend": "nobody's"}}), None),
        ("[]", None),
        ("{", None),
    ],
)
def test_what_cannot_be_read_states_nothing(tmp_path: Path, text: str, backend: str | None) -> None:
    write_shards(tmp_path, [{"a": torch.zeros(4)}])
    with Checkpoint.open(tmp_path) as checkpoint:
        assert stated_backend(checkpoint) is None
        (tmp_path / "conversion.json").write_text(text)
        found = stated_backend(checkpoint)
    assert (found.name if found else None) == backend


def test_stacked_experts_alone_are_arranged() -> None:
    assert is_arranged("model.layers.0.ffn.experts.w13")
    assert is_arranged("model.layers.0.mlp.experts.w2")
    assert not is_arranged("model.layers.0.ffn.shared_experts.gate_up_proj")
