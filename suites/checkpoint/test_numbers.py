"""Healthy checkpoints raise no alarm; every planted fault is named by the rule that is meant."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from degarble.harness.checkpoint import numbers, rules_numbers
from degarble.harness.checkpoint.number_table import NumberTable
from degarble.harness.checkpoint.numbers import audit_numbers, judge_numbers, measure_numbers
from degarble.harness.checkpoint.rules import Level, Rule
from degarble.harness.checkpoint.synthetic_statistics import Statistics
from degarble.harness.checkpoint.view import Checkpoint
from degarble.harness.errors import InvalidArgument
from degarble.harness.formats.layouts import SWIZZLE_128X4, to_layout
from degarble.suites.checkpoint.number_cases import matrix, quantised_parts, write_modules
from degarble.suites.checkpoint.planted_numbers import Bytes, Healthy, audit_planted, make_healthy
from degarble.suites.checkpoint.reading_cases import entry, write_raw

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

W1 = "layers.1.ffn.experts.2.w1"
W3 = "layers.1.ffn.experts.2.w3"
W2 = "layers.1.ffn.experts.2.w2"
DRAFTED = "mtp.0.ffn.experts.1.w1"
OTHER = "layers.2.ffn.experts.4.w1"
NOISE = np.random.default_rng(7)


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


def test_without_dead_experts_there_is_nothing_to_say(experts: Healthy) -> None:
    with Checkpoint.open(experts.folder) as checkpoint:
        findings = judge_numbers(checkpoint, experts.table)
    assert {finding.rule for finding in findings} == {rules_numbers.DIALECT.id}
    assert set(experts.table["order"][experts.table.of_format("NVFP4")].tolist()) == {0}


# Planted faults


def _sentinel(files: Bytes) -> None:
    files[f"{W1}.weight_scale_2"].view(np.uint32)[:] = 0x7F7F7F7F


def _one_nan(files: Bytes) -> None:
    files[f"{W1}.weight_scale"][3, 5] = 0x7F


def _one_negative(files: Bytes) -> None:
    files[f"{W1}.weight_scale"][3, 5] |= 0x80


def _noise_scales(files: Bytes) -> None:
    scale = files[f"{DRAFTED}.scale"]
    scale[...] = NOISE.integers(0, 255, scale.shape, np.uint8)


def _noise_codes(files: Bytes) -> None:
    codes = files["embed.weight"]
    codes[...] = NOISE.integers(0, 1 << 16, codes.shape, np.uint16)


def _swizzled(files: Bytes) -> None:
    scale = files[f"{W1}.weight_scale"]
    stored = torch.from_numpy(np.array(scale))
    scale[...] = to_layout(stored, SWIZZLE_128X4).reshape(stored.shape).numpy()


def _foreign_scales(files: Bytes) -> None:
    files[f"{W1}.weight_scale"][...] = files[f"{OTHER}.weight_scale"]


def _swapped_nibbles(name: str) -> Callable[[Bytes], None]:
    def plant(files: Bytes) -> None:
        codes = files[f"{name}.weight"]
        codes[...] = (codes >> 4) | (codes << 4)

    return plant


def _swap_half(files: Bytes) -> None:
    codes = files[f"{W1}.weight"]
    codes[: len(codes) // 2] = (codes[: len(codes) // 2] >> 4) | (codes[: len(codes) // 2] << 4)


def _copied(files: Bytes) -> None:
    for part in ("weight", "weight_scale", "weight_scale_2"):
        files[f"{W1}.{part}"][...] = files[f"{OTHER}.{part}"]


def _permuted(files: Bytes) -> None:
    order = NOISE.permutation(256)
    for part in ("weight", "weight_scale"):
        files[f"{W1}.{part}"][...] = files[f"{OTHER}.{part}"][order]


def _rows(first: int, last: int) -> Callable[[Bytes], None]:
    def plant(files: Bytes) -> None:
        files[f"{W1}.weight"][first:last] = 0

    return plant


def _all(part: str, value: float, name: str = W1) -> Callable[[Bytes], None]:
    return lambda files: files.set(f"{name}.{part}", value)


def _times(part: str, factor: Callable[[float], float], name: str = W1) -> Callable[[Bytes], None]:
    def plant(files: Bytes) -> None:
        scale = files[f"{name}.{part}"]
        scale[...] = factor(float(scale[0]))

    return plant


def _all_reversed(files: Bytes) -> None:
    for layer in range(3):
        for expert in range(6):
            for w in ("w1", "w2", "w3"):
                scale = files[f"layers.{layer}.ffn.experts.{expert}.{w}.weight_scale_2"]
                scale[...] = 1 / scale


def _dead(files: Bytes) -> None:
    for name in (W1, W2, W3):
        files.set(f"{name}.weight_scale_2", 1e-23)


def _clipped(files: Bytes) -> None:
    scale = files[f"{W1}.weight_scale"]
    scale[...] = np.where((scale >> 3) >= 13, 0x7E, scale)


def _some_scales(byte: int, share: float) -> Callable[[Bytes], None]:
    def plant(files: Bytes) -> None:
        scale = files[f"{W1}.weight_scale"]
        scale[NOISE.random(scale.shape) < share] = byte

    return plant


def _wide_amax(files: Bytes) -> None:
    files[f"{W1}.weight_scale"][...] -= 5 << 3
    _times("weight_scale_2", lambda s: s * 32)(files)


def _far_down(files: Bytes) -> None:
    """Block scales 2^11 smaller, the tensor scale as much larger."""
    scale = files[f"{W1}.weight_scale"]
    values = torch.from_numpy(np.array(scale)).view(torch.float8_e4m3fn).float()
    scale[...] = (values * 2.0**-11).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    _times("weight_scale_2", lambda s: s * 2**11)(files)


def _unreached(files: Bytes) -> None:
    names = [
        f"layers.{layer}.ffn.experts.{e}.w1.input_scale" for layer in range(3) for e in range(6)
    ]
    largest = max(float(files[name][0]) for name in names)
    files.set(f"{W1}.input_scale", largest)


def _low_blocks(files: Bytes) -> None:
    files[f"{W1}.weight"][:13] &= 0xBB  # 7 becomes 3, in one row of twenty


def _others_traces(files: Bytes) -> None:
    for layer in range(3):
        for expert in range(6):
            for w in ("w1", "w2", "w3"):
                name = f"layers.{layer}.ffn.experts.{expert}.{w}.weight_scale_2"
                files[name].view(np.uint32)[...] += 77
    files[f"{W1}.weight"][9] = 0
    files[f"{W1}.weight_scale"][9] = 0x20


FAULTS: dict[str, tuple[Callable[[Bytes], None], Rule, str]] = {
    "NaN tensor scale": (_all("weight_scale_2", math.nan), rules_numbers.SCALE_NOT_FINITE, W1),
    "infinite input scale": (_all("input_scale", math.inf), rules_numbers.SCALE_NOT_FINITE, W1),
    "zero input scale": (_all("input_scale", 0.0), rules_numbers.SCALE_NOT_POSITIVE, W1),
    "zero tensor scale": (_all("weight_scale_2", 0.0), rules_numbers.SCALE_NOT_POSITIVE, W1),
    "negative scale": (
        _times("weight_scale_2", lambda s: -s),
        rules_numbers.SCALE_NOT_POSITIVE,
        W1,
    ),
    "one NaN block scale": (_one_nan, rules_numbers.SCALE_NOT_FINITE, W1),
    "one negative block scale": (_one_negative, rules_numbers.SCALE_NOT_POSITIVE, W1),
    "sentinel": (_sentinel, rules_numbers.MAGNITUDE, W1),
    "dead expert": (_dead, rules_numbers.DEAD_EXPERT, W1),
    "tiny scales": (_dead, rules_numbers.SCALE_TINY, W1),
    "one dead matrix": (_all("weight_scale_2", 1e-23), rules_numbers.MAGNITUDE, W1),
    "all ones, E4M3": (_all("weight_scale", 0x38), rules_numbers.SCALE_CONSTANT, W1),
    "all ones, UE8M0": (
        _all("scale", 127, "layers.1.attn.wq_b"),
        rules_numbers.SCALE_IS_ONE,
        "layers.1.attn.wq_b",
    ),
    "noise as UE8M0": (_noise_scales, rules_numbers.SCALE_SCATTERED, DRAFTED),
    "noise as bfloat16": (_noise_codes, rules_numbers.VALUE_SCATTERED, "embed"),
    "scales never written": (_all("weight_scale", 0), rules_numbers.SCALE_VANISHED, W1),
    "divisor stored": (
        _times("weight_scale_2", lambda s: 1 / s),
        rules_numbers.SCALE_DIRECTION,
        W1,
    ),
    "all divisors stored": (_all_reversed, rules_numbers.SCALE_DIRECTION, "layers.0"),
    "scale dropped": (_all("weight_scale_2", 1.0), rules_numbers.SCALE_IS_ONE, W1),
    "scale applied twice": (
        _times("weight_scale_2", lambda s: s * s),
        rules_numbers.SCALE_TWICE,
        W1,
    ),
    "too small": (_times("weight_scale_2", lambda s: s / 2**20), rules_numbers.MAGNITUDE, W1),
    "rather large": (_times("weight_scale_2", lambda s: s * 100), rules_numbers.MAGNITUDE_FAR, W1),
    "input divisor stored": (
        _times("input_scale", lambda s: 1 / s),
        rules_numbers.INPUT_DIRECTION,
        W1,
    ),
    "input outlier": (_times("input_scale", lambda s: s / 1000), rules_numbers.INPUT_OUTLIER, W1),
    "some scales zero": (_some_scales(0, 0.01), rules_numbers.SCALE_UNDERFLOWN, W1),
    "subnormal scales": (_far_down, rules_numbers.SCALE_SUBNORMAL, W1),
    "another tensor's amax": (_wide_amax, rules_numbers.AMAX_UNUSED, W1),
    "unreached expert": (_unreached, rules_numbers.INPUT_FALLBACK, W1),
    "low blocks": (_low_blocks, rules_numbers.BLOCK_MAXIMUM, W1),
    "filled codes": (_all("weight", 0x55), rules_numbers.CODES_CONSTANT, W1),
    "clipped": (_clipped, rules_numbers.AMAX_CLIPPED, W1),
    "swizzled scales": (_swizzled, rules_numbers.SCALE_LAYOUT, W1),
    "scales of another expert": (_foreign_scales, rules_numbers.SCALE_UNRELATED, W1),
    "swapped nibbles": (_swapped_nibbles(W1), rules_numbers.NIBBLE_ORDER, W1),
    "swapped nibbles of w2": (_swapped_nibbles(W2), rules_numbers.NIBBLE_ORDER_LIKELY, W2),
    "nibbles half swapped": (_swap_half, rules_numbers.NIBBLE_ORDER_UNDECIDED, ""),
    "another producer's traces": (_others_traces, rules_numbers.DIALECT_OTHER, ""),
    "zero matrix": (_all("weight", 0), rules_numbers.TENSOR_ZERO, W1),
    "zero norm": (
        _all("weight", 0, "layers.1.attn_norm"),
        rules_numbers.TENSOR_ZERO,
        "layers.1.attn_norm",
    ),
    "unwritten half": (_rows(0, 128), rules_numbers.ROWS_UNWRITTEN, W1),
    "padding": (_rows(250, 256), rules_numbers.ZERO_ROWS, W1),
    "copied": (_copied, rules_numbers.IDENTICAL, OTHER),
    "permuted rows": (_permuted, rules_numbers.PERMUTED, OTHER),
    "expert out of range": (
        _all("tid2eid", 6, "layers.0.ffn.gate"),
        rules_numbers.ID_OUT_OF_RANGE,
        "layers.0.ffn.gate.tid2eid",
    ),
    "NaN weight": (
        _all("weight", 0x7FC0, "layers.1.ffn.gate"),
        rules_numbers.VALUE_NOT_FINITE,
        "layers.1.ffn.gate",
    ),
}


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
    findings = audit_planted(experts, tmp_path / "planted", _all_reversed)
    named = [f for f in findings if f.rule == rules_numbers.SCALE_DIRECTION.id]
    assert sum(finding.count for finding in named) == 3 * 6 * 3


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
        rules_numbers.NOT_READ,
        rules_numbers.DIALECT,  # told of every checkpoint
    }
    assert planted | {rule.id for rule in elsewhere} == {rule.id for rule in rules_numbers.RULES}


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
