"""Reproducers: few rows, few outputs, no checkpoint; they fail while the fault is there."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.engine.diagnose.minimal_reproducer import SCRIPT, TENSORS, Case, shrunk
from degarble.harness.model.recipes import recipe_named
from degarble.suites.engine.localise_cases import (
    ATTN,
    FFN,
    V4,
    bound,
    localised,
    replaced,
    run_of,
    scaled,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("name", "way", "edge", "shape"),
    [
        (f"{ATTN}wq_b", scaled("out", 1.5), None, (1, 1)),
        (f"{ATTN}wo_a", scaled("out", 1.5), None, None),
        (f"{FFN}experts.w2", scaled("out", 1.5), None, None),
        (f"{ATTN}attend", scaled("out", 1.5), None, None),
        (f"{ATTN}wq_a.act_quant", replaced("x", lambda x: x.roll(1, -1)), None, None),
        (f"{ATTN}q_norm", None, replaced("x", lambda x: x.roll(1, 0)), None),
    ],
)
def test_a_case_is_small_reads_back_and_fails_until_it_is_mended(
    name: str, way: Any, edge: Any, shape: tuple[int, ...] | None, tmp_path: Path
) -> None:
    (trouble,) = localised(run_of(name, way, edge)).origins
    case = shrunk(trouble)
    assert case is not None
    if shape is not None:
        assert tuple(case.captured["out"].shape) == shape
    script = case.write(tmp_path / "case")
    again = Case.read(tmp_path / "case")
    lines, wrong = again.told(again.captured)
    assert wrong, lines
    assert name in lines[0]
    healthy = again.inputs
    if edge is None:
        with torch.inference_mode():
            healthy = dict(again.twin.calls[name](again.inputs, again.weights))
    assert not again.told(healthy)[1]
    assert script.name == SCRIPT
    assert (tmp_path / "case" / TENSORS).stat().st_size < 8 << 20


def test_a_case_of_a_weight_that_the_drafter_shares_reads_back(tmp_path: Path) -> None:
    """V4's drafter has no head of its own."""
    name, recipe, twin = "mtp.0.head", recipe_named("nvfp4-full", V4), bound(V4, "nvfp4-full")
    inputs = {"x": torch.ones(2, V4.hidden_size, dtype=torch.bfloat16)}
    with torch.inference_mode():
        made = dict(twin.calls[name](inputs, twin.weights_of(name)))
    Case(name, "as it should be", False, twin, recipe, inputs, made).write(tmp_path)
    again = Case.read(tmp_path)
    lines, wrong = again.told(made)
    assert not wrong, lines


def test_the_script_fails_by_itself(tmp_path: Path) -> None:
    (trouble,) = localised(run_of(f"{ATTN}kv_norm_rope", scaled("out", 1.5))).origins
    case = shrunk(trouble)
    assert case is not None
    script = case.write(tmp_path / "case")
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stderr
    assert f"{ATTN}kv_norm_rope" in ran.stdout
    assert len(script.read_text().splitlines()) <= 15


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile, match=TENSORS):
        Case.read(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / TENSORS)
    with pytest.raises(UnreadableFile, match="a case that degarble wrote"):
        Case.read(tmp_path)
