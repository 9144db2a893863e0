"""Reproducers: few rows, outputs and blocks of K, no checkpoint; they fail with the fault."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.engine.diagnose.minimal_reproducer import SCRIPT, TENSORS, Case, shrunk
from degarble.harness.engine.faults.model_faults import FaultVariant, with_outputs, with_weights
from degarble.harness.formats.weight import Weight
from degarble.harness.model.recipes import recipe_named
from degarble.harness.report.verdict import Verdict
from degarble.suites.engine.localise_cases import (
    ATTN,
    FFN,
    V4,
    V32,
    bound,
    localised,
    replaced,
    run_of,
    scaled,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.model.config.config import Config


# --------------------------------------------------------------------------------------------------
# Reproducers: few rows, few outputs, no checkpoint; they fail while the fault is there.


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
    (discrepancy,) = localised(run_of(name, way, edge)).origins
    case = shrunk(discrepancy)
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
    (discrepancy,) = localised(run_of(f"{ATTN}kv_norm_rope", scaled("out", 1.5))).origins
    case = shrunk(discrepancy)
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


# --------------------------------------------------------------------------------------------------
# Sums that are cut along K: a named fault shows on few blocks, and mends as before.


def with_codes(weight: Weight, codes: Tensor) -> Weight:
    return Weight(
        codes=codes, block_scale=weight.block_scale, tensor_scale=weight.tensor_scale,
        input_scale=weight.input_scale, storage=weight.storage,
    )  # fmt: skip


def swapped(name: str, weight: Weight) -> Weight:
    """The nibbles of one block of codes, the third along K, the other way round."""
    assert weight.codes is not None, name
    codes = weight.codes.clone()
    part = codes[:, 16:24]
    codes[:, 16:24] = (part >> 4) | (part << 4)
    return with_codes(weight, codes)


def all_swapped(name: str, weight: Weight) -> Weight:
    assert weight.codes is not None, name
    return with_codes(weight, (weight.codes >> 4) | (weight.codes << 4))


@pytest.mark.parametrize(
    ("config", "recipe", "name"),
    [
        (V4, "nvfp4-full", f"{ATTN}wo_b"),
        (V4, "nvfp4-experts", f"{FFN}experts.w2"),
        pytest.param(V4, "nvfp4-experts", f"{FFN}experts.w13", marks=pytest.mark.slow),
        pytest.param(V32, "nvfp4-full", "layers.0.attn.wo", marks=pytest.mark.slow),
    ],
)
def test_a_fault_of_one_block_is_shown_on_that_block(
    config: Config, recipe: str, name: str, tmp_path: Path
) -> None:
    variant = FaultVariant("nibbles of a block", with_weights(swapped))
    run = run_of(name, variant.apply, config=config, recipe=recipe)
    (discrepancy,) = localised(run, config, recipe).origins
    whole, case = shrunk(discrepancy), shrunk(discrepancy, variant)
    assert whole is not None
    assert case is not None
    assert case.inputs["codes"].shape[-1] < whole.inputs["codes"].shape[-1]
    assert case.inputs["codes"].shape[-1] == 8, "sixteen codes: one block"
    assert "K 32..47 of" in case.title
    script = case.write(tmp_path / "case")
    again = Case.read(tmp_path / "case")
    with torch.inference_mode():
        healthy = dict(again.twin.calls[name](again.inputs, again.weights))
    assert not again.told(healthy)[1]
    if config is V4 and recipe == "nvfp4-full":
        ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
        assert ran.returncode == 1, ran.stderr
        assert name in ran.stdout


def one_bit(_name: str, weight: Weight) -> Weight:
    """One code with another bit, which no known fault flips."""
    assert weight.codes is not None
    codes = weight.codes.clone()
    codes[3, 5] ^= 4
    return with_codes(weight, codes)


def columns_moved(_inputs: object, outputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    out = outputs["out"]
    return {**outputs, "out": out[:, torch.arange(out.shape[1]) ^ 3]}


@pytest.mark.parametrize(
    ("way", "held"),
    [
        (with_weights(one_bit), "weights."),
        pytest.param(with_outputs(columns_moved), "outputs.", marks=pytest.mark.slow),
    ],
)
def test_a_case_carries_what_was_recovered_and_agrees_with_it(
    way: Any, held: str, tmp_path: Path
) -> None:
    name = f"{ATTN}wq_b"
    (discrepancy,) = localised(run_of(name, way)).origins
    assert discrepancy.record is not None
    told = diagnose(discrepancy.context, [discrepancy.record, *discrepancy.more])
    assert told.described is not None
    case = shrunk(discrepancy, described=told.described.variant)
    assert case is not None
    case.write(tmp_path / "case")
    again = Case.read(tmp_path / "case")
    assert [key.startswith(held) for key in again.recovered] == [True]
    lines, wrong = again.told(again.captured)
    assert wrong
    assert "computed with the recovered" in lines[-2]
    assert "AGREES" in lines[-1]
    other = {n: t * 1.5 for n, t in again.captured.items()}
    assert all(each.verdict is Verdict.DIFFERS for each in again.judge_recovered(other).values())


def test_what_diagnosing_names_cuts_the_sum_and_what_it_does_not_leaves_it_whole() -> None:
    name = f"{ATTN}wq_b"
    (discrepancy,) = localised(run_of(name, with_weights(all_swapped))).origins
    assert discrepancy.record is not None
    named = diagnose(discrepancy.context, [discrepancy.record, *discrepancy.more]).named
    assert named
    case, whole = shrunk(discrepancy, named[0].variant), shrunk(discrepancy)
    assert case is not None
    assert whole is not None
    assert case.inputs["codes"].shape[-1] == 8 < whole.inputs["codes"].shape[-1]
    assert case.captured["out"].numel() <= whole.captured["out"].numel()


def test_a_fault_that_only_the_whole_sum_shows_leaves_it_whole() -> None:
    """Sums that saturate: what half of K sums to lies within, so that no half shows it."""
    name = f"{ATTN}wo_b"
    seen = run_of()
    call = next(captured_call for captured_call in seen.calls if captured_call.component == name)
    most = 0.97 * float(seen.outputs(call)["out"].abs().max())

    def saturated(_inputs: object, outputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {**outputs, "out": outputs["out"].clamp(-most, most)}

    variant = FaultVariant("saturated sums", with_outputs(saturated))
    (discrepancy,) = localised(run_of(name, variant.apply)).origins
    whole, case = shrunk(discrepancy), shrunk(discrepancy, variant)
    assert whole is not None
    assert case is not None
    assert case.inputs["codes"].shape[-1] == whole.inputs["codes"].shape[-1]
    assert "by the named fault" not in case.title


def test_unquantised_products_are_cut_too_and_other_components_stay() -> None:
    variant = FaultVariant("half", scaled("out", 1.5))
    (discrepancy,) = localised(run_of("head", variant.apply)).origins
    case = shrunk(discrepancy, variant)
    assert case is not None
    assert case.inputs["x"].shape[-1] == 16
    (discrepancy,) = localised(run_of(f"{ATTN}q_norm", variant.apply)).origins
    case = shrunk(discrepancy, variant)
    assert case is not None
    assert "by the named fault" not in case.title
