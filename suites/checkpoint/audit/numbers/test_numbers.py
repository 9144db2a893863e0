"""Plant every fault of scales, codes and values, and find it by name."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.checkpoint.audit import rules as rules_structure
from degarble.harness.checkpoint.audit import value_rules as rules_numbers
from degarble.harness.checkpoint.audit.numbers import numbers
from degarble.harness.checkpoint.audit.numbers.numbers import (
    judge_numbers,
    measure_numbers,
)
from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.checkpoint.audit.table import NumberTable
from degarble.harness.checkpoint.read.types import DTYPE_BITS
from degarble.harness.checkpoint.view.stored import TORCH_DTYPES
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.formats.layouts import SWIZZLE_128X4, to_layout
from degarble.suites.checkpoint.audit.numbers.number_faults import FAULTS, W1, all_divisors_stored
from degarble.suites.checkpoint.audit.planted_numbers import CONFIG as V4
from degarble.suites.checkpoint.audit.planted_numbers import (
    STATISTICS,
    Bytes,
    Healthy,
    audit_planted,
    make_healthy,
)
from degarble.suites.checkpoint.number_cases import matrix, quantised_parts, write_modules
from degarble.suites.checkpoint.reading_cases import entry, write_raw
from degarble.suites.checkpoint.structure_cases import V32
from degarble.suites.support.audits import audit_numbers
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint
from degarble.suites.support.synthetic.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from degarble.harness.checkpoint.audit.findings import Finding
    from degarble.harness.checkpoint.audit.rules import AuditRule
    from degarble.harness.model.config.config import Config
    from degarble.suites.support.audits import NumbersAudit


# --------------------------------------------------------------------------------------------------
# Healthy checkpoints raise no alarm; every planted fault is named by the rule that is meant.


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Healthy:
    """The layout of NVIDIA's exports: NVFP4 experts, FP8 attention, an MXFP4 drafter."""
    return make_healthy(tmp_path_factory.mktemp("numbers") / "experts", "nvfp4-experts")


# No alarm


@pytest.mark.parametrize(
    "layout", ["nvfp4-experts", "nvfp4-full", "official", "bf16", "compressed-tensors", "vllm"]
)
def test_a_healthy_checkpoint_raises_no_error(tmp_path: Path, layout: str) -> None:
    """Heavy tails, outlier channels, dead experts: over a hundred matrices a layout."""
    healthy = make_healthy(tmp_path / "c", layout, Statistics(dead_share=0.2, dead_exponent=-60))
    with Checkpoint.open(healthy.folder) as checkpoint:
        findings = judge_numbers(checkpoint, healthy.table)
    assert [f for f in findings if f.level is Level.ERROR] == []
    allowed = {rules_numbers.DEAD_EXPERT, rules_numbers.SCALE_TINY, rules_numbers.INPUT_FALLBACK}
    assert {f.rule for f in findings if f.level is Level.WARNING} <= {rule.id for rule in allowed}
    assert len(healthy.table) > 100
    assert sum(healthy.table["nbytes"]) == sum(e.nbytes for e in checkpoint.entries.values())


def test_without_dead_experts_there_is_no_finding(experts: Healthy) -> None:
    with Checkpoint.open(experts.folder) as checkpoint:
        findings = judge_numbers(checkpoint, experts.table)
    assert {finding.rule for finding in findings} == {rules_numbers.DIALECT.id}
    assert set(experts.table["order"][experts.table.of_format("NVFP4")].tolist()) == {0}


# Planted faults


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(experts: Healthy, tmp_path: Path, name: str) -> None:
    plant, rule, where = FAULTS[name]
    findings = audit_planted(experts, tmp_path / "planted", plant)
    named = [finding for finding in findings if finding.rule == rule.id]
    assert named, [(f.rule, f.message) for f in findings]
    assert any(where in f"{finding.module} {finding.message}" for finding in named)
    assert json.dumps([finding.to_json() for finding in findings])
    if rule.level is not Level.ERROR:
        assert not [f for f in findings if f.level is Level.ERROR]


def test_a_named_fault_says_what_to_read(experts: Healthy, tmp_path: Path) -> None:
    findings = audit_planted(experts, tmp_path / "a", FAULTS["swizzled scales"][0])
    (layout,) = [f for f in findings if f.rule == rules_numbers.SCALE_LAYOUT.id]
    assert "`128x4`" in layout.message
    assert layout.tensor == f"{W1}.weight_scale"
    findings = audit_planted(experts, tmp_path / "b", FAULTS["swapped nibbles"][0])
    (order,) = [f for f in findings if f.rule == rules_numbers.NIBBLE_ORDER.id]
    assert "`high_even`" in order.message
    findings = audit_planted(experts, tmp_path / "c", FAULTS["sentinel"][0])
    assert [f.module for f in findings if f.level is Level.ERROR] == [W1]


def test_all_tensors_of_one_fault_are_named(experts: Healthy, tmp_path: Path) -> None:
    """Where every scale is reversed, siblings agree, and it is told all the same."""
    findings = audit_planted(experts, tmp_path / "planted", all_divisors_stored)
    named = [f for f in findings if f.rule == rules_numbers.SCALE_DIRECTION.id]
    assert sum(finding.count for finding in named) == 3 * 6 * 3


def test_a_scale_that_is_no_number_is_reported_once(experts: Healthy, tmp_path: Path) -> None:
    """A NaN is no zero, so its block has not vanished."""

    def plant(files: Bytes) -> None:
        files["layers.1.attn.wq_b.scale"][0, 0] = 0xFF

    findings = audit_planted(experts, tmp_path / "planted", plant)
    lines = [f.rule for f in findings if f.module == "layers.1.attn.wq_b"]
    assert lines == [rules_numbers.SCALE_NOT_FINITE.id]


def test_an_unreached_expert_is_named_once_and_alone(experts: Healthy, tmp_path: Path) -> None:
    """Who set the largest scale of one projection did not set that of the others."""

    def plant(files: Bytes) -> None:
        everyone = [f"layers.{layer}.ffn.experts.{e}" for layer in range(3) for e in range(6)]
        for w in ("w1", "w2", "w3"):
            scales = [files[f"{name}.{w}.input_scale"] for name in everyone]
            largest = max(float(scale[0]) for scale in scales)
            files.set(f"layers.1.ffn.experts.2.{w}.input_scale", largest)

    findings = audit_planted(experts, tmp_path / "planted", plant)
    (finding,) = [f for f in findings if f.rule == rules_numbers.INPUT_FALLBACK.id]
    assert (finding.count, finding.module) == (1, W1)
    assert len(finding.evidence["projections"]) == 3


def test_columns_of_padding_are_no_fault(experts: Healthy, tmp_path: Path) -> None:
    def plant(files: Bytes) -> None:
        codes = files["layers.1.attn.wo_b.weight"]
        codes[:, codes.shape[1] * 7 // 8 :] = 0

    assert not [
        finding
        for finding in audit_planted(experts, tmp_path / "planted", plant)
        if finding.level is Level.ERROR
    ]


def test_a_disabled_check_misses_its_fault(
    experts: Healthy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numbers, "CHECKS", numbers.CHECKS[:1])
    findings = audit_planted(experts, tmp_path / "planted", FAULTS["swizzled scales"][0])
    assert findings == []


# Without a config


def test_modules_of_an_unknown_model_are_judged_by_themselves(tmp_path: Path, seed: int) -> None:
    good = quantised_parts(matrix(seed, 512, 512))
    noise = quantised_parts(matrix(seed + 1, 1024, 1024))
    noise["weight"] = torch.randint(0, 256, (1024, 512), dtype=torch.uint8)
    signs = quantised_parts(torch.sign(matrix(seed + 2, 256, 512)), input_scale=None)
    table = matrix(seed + 3, 64, 256)
    modules = {
        "blocks.0.up": good,
        "blocks.1.up": noise,
        "blocks.2.up": signs,
        "embed_tokens": {"weight": table},
        "lm_head": {"weight": table},
    }
    with write_modules(tmp_path, modules) as checkpoint:
        audit = audit_numbers(checkpoint)
    found = {finding.rule: finding for finding in audit.findings}
    assert found[rules_numbers.CODES_RANDOM.id].module == "blocks.1.up"
    assert found[rules_numbers.INPUT_ABSENT.id].module == "blocks.2.up"
    assert found[rules_numbers.IDENTICAL_TIED.id].level is Level.NOTE
    assert "1 matrices, blocks.2.up" in found[rules_numbers.SCALE_UNDECIDED.id].message


@pytest.mark.parametrize(
    ("rows", "rule"),
    [(128, rules_numbers.SCALE_LAYOUT), (64, rules_numbers.SCALE_UNDECIDED)],
)
def test_scales_out_of_order_in_a_small_matrix_are_reported(
    tmp_path: Path, seed: int, rows: int, rule: AuditRule
) -> None:
    parts = quantised_parts(matrix(seed, rows, 256))
    scale = parts["weight_scale"].view(torch.uint8)
    made = to_layout(scale, SWIZZLE_128X4).reshape(scale.shape) if rows == 128 else scale.flip(0, 1)
    modules = {"blocks.0.up": {**parts, "weight_scale": made.view(torch.float8_e4m3fn)}}
    with write_modules(tmp_path, modules) as checkpoint:
        found = {finding.rule for finding in audit_numbers(checkpoint).findings}
    assert found == {rule.id, rules_numbers.DIALECT.id}


def test_tensors_that_are_no_weight_together_are_judged_one_by_one(tmp_path: Path) -> None:
    header = {
        "a.weight": entry("U8", [64, 64], 0, 4096),
        "a.weight_scale_2": entry("F32", [3], 4096, 4108),
        "b": entry("F6_E2M3", [16], 4108, 4120),
    }
    data = bytes(4096) + np.array([1.0, math.inf, math.nan], np.float32).tobytes() + bytes(12)
    write_raw(tmp_path / "model.safetensors", header, data)
    with Checkpoint.open(tmp_path) as checkpoint:
        findings = audit_numbers(checkpoint).findings
    assert {finding.rule: finding.module or finding.tensor for finding in findings} == {
        rules_numbers.VALUE_NOT_FINITE.id: "a.weight_scale_2",
        rules_numbers.NOT_READ.id: "b",
    }


def test_every_rule_has_its_fault() -> None:
    planted = {rule.id for _, rule, _ in FAULTS.values()}
    elsewhere = {
        rules_numbers.CODES_RANDOM,
        rules_numbers.INPUT_ABSENT,
        rules_numbers.IDENTICAL_TIED,
        rules_numbers.SCALE_UNDECIDED,
        rules_numbers.SCALE_LAYOUT_STATED,  # test_stated_order.py
        rules_numbers.NOT_READ,
        rules_numbers.DIALECT,  # told of every checkpoint
    }
    assert planted | {rule.id for rule in elsewhere} == {
        rule.id for rule in rules_numbers.VALUE_RULES if rule.id.startswith("numbers.")
    }


# The walk


def test_workers_and_parts_make_the_same_table(experts: Healthy) -> None:
    with Checkpoint.open(experts.folder) as checkpoint:
        done: list[int] = []
        table = measure_numbers(checkpoint, workers=2, progress=done.append)
        assert sum(done) == sum(table["nbytes"])
        places = sorted({unit.place for unit in table.units})
        parts = [measure_numbers(checkpoint, places=places[i::3]) for i in range(3)]
    by_name = {unit.name: i for i, unit in enumerate(experts.table.units)}
    for other in (table, NumberTable.joined(parts)):
        order = [by_name[unit.name] for unit in other.units]
        assert sorted(order) == list(range(len(experts.table)))
        expected = experts.table.data[order]
        for column in other.data.dtype.names or ():
            # sums over profiles are taken in the order in which threads end
            near = 1e-9 if column == "order_lead" else 0
            np.testing.assert_allclose(other[column], expected[column], rtol=near)


def test_no_worker_is_refused(experts: Healthy) -> None:
    with (
        Checkpoint.open(experts.folder) as checkpoint,
        pytest.raises(InvalidArgument, match="workers"),
    ):
        measure_numbers(checkpoint, workers=0)


def test_the_table_is_plain_data(experts: Healthy) -> None:
    with Checkpoint.open(experts.folder) as checkpoint:
        audit = audit_numbers(checkpoint)
    rows = list(audit.table.rows())
    assert json.loads(json.dumps(rows)) == rows
    (row,) = [row for row in rows if row["name"] == W1]
    assert (row["format"], row["convention"], row["layer"], row["expert"]) == (
        "NVFP4",
        "modelopt",
        1,
        2,
    )
    assert audit.findings == judge_numbers(checkpoint, audit.table)


# --------------------------------------------------------------------------------------------------
# Tensors of every dtype and of odd shapes are counted or told as unread; nothing crashes.

SHAPES: tuple[list[int], ...] = ([], [0], [3], [64, 64], [64, 0], [2, 4, 8], [2, 2, 4, 4])


def audit_of(folder: Path, dtype: str, shape: list[int], data: bytes) -> NumbersAudit:
    """Audit one tensor alone."""
    header = {"layers.0.a.weight": entry(dtype, shape, 0, len(data))}
    write_raw(folder / "model.safetensors", header, data)
    with Checkpoint.open(folder) as checkpoint:
        return audit_numbers(checkpoint)


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_in_every_shape(tmp_path: Path, dtype: str, seed: int) -> None:
    unreadable = dtype not in TORCH_DTYPES or dtype in ("C64", "F4")
    for number, shape in enumerate(SHAPES):
        bits = prod(shape) * DTYPE_BITS[dtype]
        if bits % 8:
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        noise = np.random.default_rng(seed).integers(0, 256, bits // 8, np.uint8)
        audit = audit_of(folder, dtype, list(shape), noise.tobytes())
        told = {finding.rule for finding in audit.findings}
        assert (rules_numbers.NOT_READ.id in told) == unreadable, shape
        if not unreadable:
            assert audit.table["elements"].sum() == prod(shape)


def test_a_vector_that_comes_in_pieces(tmp_path: Path) -> None:
    """Longer than a window: counted in full, by every kind of number."""
    count = (1 << 23) + 8
    values = np.zeros(count, np.float32)
    values[-1] = 3.0
    row = audit_of(tmp_path, "F32", [count], values.tobytes()).table.row(0)
    assert (row["height"], row["zeros"], row["zero_rows"], row["amax"]) == (1, count - 1, 0, 3.0)
    whole = np.arange(count, dtype=np.int32)
    row = audit_of(tmp_path, "I32", [count], whole.tobytes()).table.row(0)
    assert (row["lowest"], row["highest"], row["zeros"]) == (0, count - 1, 1)


@pytest.mark.parametrize("shape", [[1 << 40, 0], [1 << 40, 2, 0], [0, 1 << 40]])
def test_many_rows_of_nothing_take_no_time(tmp_path: Path, shape: list[int]) -> None:
    audit = audit_of(tmp_path, "BF16", shape, b"")
    assert len(audit.table) == 1
    assert audit.findings == []


def test_a_stack_of_very_many_counts_as_rows(tmp_path: Path) -> None:
    values = np.ones(40_000 * 4, np.float32)
    audit = audit_of(tmp_path, "F32", [40_000, 2, 2], values.tobytes())
    assert audit.table["height"].tolist() == [80_000]


# --------------------------------------------------------------------------------------------------
# Faults of a whole checkpoint at once, where no sibling is healthy: each is named all the same.


def planted(
    folder: Path,
    made: tuple[Config, str],
    change: Callable[[Bytes, list[str]], None],
    statistics: Statistics = STATISTICS,
) -> list[Finding]:
    """Write a checkpoint, change its bytes, audit its numbers."""
    config, layout = made
    write_checkpoint(folder, Synthetic(config, layout, seed=5, statistics=statistics))
    with Checkpoint.open(folder) as checkpoint:
        names = list(checkpoint.entries)
    change(Bytes(folder), names)
    with Checkpoint.open(folder) as checkpoint:
        return audit_numbers(checkpoint).findings


def fold(files: Bytes, names: list[str]) -> None:
    for name in names:
        if name.endswith(".weight_scale_2"):
            files[name][...] *= files[name.replace("weight_scale_2", "input_scale")]


def invert(*suffixes: str) -> Callable[[Bytes, list[str]], None]:
    def change(files: Bytes, names: list[str]) -> None:
        for name in names:
            if name.endswith(suffixes):
                files[name][...] = 1 / files[name]

    return change


def count(findings: list[Finding], rule: str) -> int:
    return sum(finding.count for finding in findings if finding.rule == rule)


@pytest.mark.parametrize(
    ("config", "layout", "modules"),
    [
        (replace(V32, n_routed_experts=8), "nvfp4-full", 32),
        (replace(V32, n_routed_experts=8), "nvfp4-experts", 24),
        (V4, "nvfp4-experts", 54),
    ],
    ids=["V3.2, full", "V3.2, experts", "V4, experts"],
)
def test_input_scales_inside_all_weight_scales(
    tmp_path: Path, config: Config, layout: str, modules: int
) -> None:
    findings = planted(tmp_path / "c", (config, layout), fold)
    rule = rules_structure.INPUT_SCALE_INSIDE.id
    assert {f.rule for f in findings if f.level is Level.ERROR} == {rule}
    assert count(findings, rule) == modules
    assert count(findings, rules_numbers.DEAD_EXPERT.id) == 0


@pytest.mark.parametrize(
    ("layout", "suffix"),
    [("nvfp4-experts", ".weight_scale_2"), ("compressed-tensors", ".weight_global_scale")],
)
def test_dead_experts_among_reversed_scales(tmp_path: Path, layout: str, suffix: str) -> None:
    config = replace(V4, n_routed_experts=24)
    findings = planted(tmp_path / "c", (config, layout), invert(suffix), Statistics())
    assert count(findings, rules_numbers.SCALE_DIRECTION.id) >= 24 * 3 * 3
    assert count(findings, rules_numbers.MAGNITUDE.id) == 0


def test_reversed_block_scales_of_one_module(tmp_path: Path) -> None:
    name = "layers.1.attn.wo"
    findings = planted(
        tmp_path / "c", (V32, "official"), invert("layers.1.self_attn.o_proj.weight_scale_inv")
    )
    (finding,) = [each for each in findings if each.level is Level.ERROR]
    assert (finding.rule, finding.module) == (rules_numbers.SCALE_DIRECTION.id, name)
    assert (finding.tensor or "").endswith("self_attn.o_proj.weight_scale_inv")


def test_most_experts_of_a_layer_are_never_dead(tmp_path: Path) -> None:
    def shrink(files: Bytes, names: list[str]) -> None:
        for name in names:
            if name.endswith(".weight_scale_2") and ".experts.5." not in name:
                files[name][...] *= 2.0**-20

    findings = planted(tmp_path / "c", (V4, "nvfp4-experts"), shrink)
    assert count(findings, rules_numbers.MAGNITUDE.id) == 3 * 5 * 3
    assert count(findings, rules_numbers.DEAD_EXPERT.id) == 0
