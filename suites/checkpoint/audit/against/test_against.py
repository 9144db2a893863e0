"""Compare checkpoints with references after planting one wrong value, order, factor or setting."""

from __future__ import annotations

import json
import math
import shutil
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, Undecided
from degarble.harness.checkpoint.audit import value_rules as rules
from degarble.harness.checkpoint.audit.against.against import (
    bytes_against,
    differences,
    judge_against,
    judge_configs,
    measure_against,
)
from degarble.harness.checkpoint.audit.against.causes import describe_signs
from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.checkpoint.audit.table import AGAINST_COLUMNS, AgainstTable
from degarble.harness.checkpoint.transform.convert.job import convert
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.formats.layouts import SWIZZLE_128X4, to_layout
from degarble.suites.checkpoint.audit.planted_numbers import Bytes
from degarble.suites.checkpoint.converting_cases import source
from degarble.suites.checkpoint.reading_cases import write_shards
from degarble.suites.support.audits import audit_against

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from degarble.harness.checkpoint.audit.findings import Finding
    from degarble.harness.checkpoint.audit.rules import AuditRule


# --------------------------------------------------------------------------------------------------
# Healthy conversions raise no alarm against their source; every planted fault is named.

W1 = "layers.1.ffn.experts.2.w1"
OTHER = "layers.0.ffn.experts.1.w1"
DENSE = "layers.1.attn.wq_b"
GOOD, SOURCE = "nvfp4-experts", "bf16"
COMPARED = (
    *((kind, "bf16") for kind in ("official", "nvfp4-full", "compressed-tensors")),
    *(("bf16", kind) for kind in ("official", "nvfp4-experts")),
    ("nvfp4-experts", "official"),
    ("v32-nvfp4", "v32"),
)
CONVERTED: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("official", "vllm", {"backend": "loader"}),
    ("nvfp4-full", "bf16", {}),
    ("nvfp4-full", "vllm", {"backend": "loader"}),
    ("bf16", "fp8-block", {}),
    ("bf16", "nvfp4", {}),
    ("official", "nvfp4-lossless", {}),
    ("bf16", "deepgemm-wo-a", {"gpu": "sm90"}),
    ("nvfp4-full", "deepgemm-wo-a", {"gpu": "sm90"}),
    ("nvfp4-full", "fused-compressor", {}),
    ("v32", "nvfp4", {}),
)
QUICK = (CONVERTED[0], CONVERTED[6], CONVERTED[8])


def compared(here: Path, there: Path) -> tuple[list[Finding], AgainstTable]:
    with Checkpoint.open(here) as checkpoint, Checkpoint.open(there) as reference:
        audit = audit_against(checkpoint, reference)
    return audit.findings, audit.table


@pytest.mark.parametrize(("here", "there"), COMPARED)
def test_healthy_checkpoints_have_no_findings(here: str, there: str) -> None:
    """Whatever is beside whatever, each of them quantised by its own producer."""
    findings, table = compared(source(here), source(there))
    assert {finding.rule for finding in findings} <= {rules.NOT_COMPARED.id}
    assert len(table) > 70
    assert not table.unlike
    assert set(table.only_there.values()) | set(table.only_here.values()) <= {
        "the reference has nothing by its name",
        "this checkpoint has nothing by its name",
    }
    if there == "bf16" and here in ("official", "nvfp4-full"):
        over = table["over_floor"][np.isfinite(table["over_floor"])]
        assert len(over) > 20
        np.testing.assert_allclose(over, 1.0, atol=1e-6)  # what we quantise is the ideal


@pytest.mark.parametrize(
    ("kind", "to", "options"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CONVERTED],
)
def test_healthy_conversions_have_no_findings(
    tmp_path: Path, kind: str, to: str, options: dict[str, object]
) -> None:
    """Beside what they were made from, and beside the BF16 that both come from."""
    convert(source(kind), tmp_path, to, options)
    for there in dict.fromkeys((kind, "v32" if kind.startswith("v32") else "bf16")):
        findings, table = compared(tmp_path, source(there))
        told = {finding.rule for finding in findings}
        assert told <= {rules.NOT_COMPARED.id, rules.COARSER.id, rules.SLIGHTLY_ABOVE.id}
        assert len(table) > 70
        assert not table.unlike


@pytest.fixture(scope="module")
def healthy() -> AgainstTable:
    findings, table = compared(source(GOOD), source(SOURCE))
    assert findings == []
    return table


def compared_again(planted: Path, healthy: AgainstTable) -> list[Finding]:
    """Compare the blocks that a fault has touched, and judge them with all the rest."""
    with Checkpoint.open(source(GOOD)) as old, Checkpoint.open(planted) as new:
        files = {
            name.rpartition(".")[0]
            for name in old.entries
            if bytes(old.raw(name)) != bytes(new.raw(name))
        }
        modules = files | {f"{name}.tid2eid" for name in files}
        touched = {p.unit.place for p in healthy.pairs if p.unit.module in modules}
    with Checkpoint.open(planted) as here, Checkpoint.open(source(SOURCE)) as there:
        again = measure_against(here, there, places=touched)
        kept = [i for i, p in enumerate(healthy.pairs) if p.unit.place not in touched]
        rest = healthy.chosen(kept)
        return judge_against(here, there, AgainstTable.joined([rest, again]))


# Planted faults


def _all(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Bytes], None]:
    def plant(files: Bytes) -> None:
        files[name][...] = change(np.array(files[name]))

    return plant


def _swap(first: str, second: str) -> Callable[[Bytes], None]:
    def plant(files: Bytes) -> None:
        for part in ("weight", "weight_scale", "weight_scale_2"):
            kept = np.array(files[f"{first}.{part}"])
            files[f"{first}.{part}"][...] = files[f"{second}.{part}"]
            files[f"{second}.{part}"][...] = kept

    return plant


def _rows_moved(files: Bytes) -> None:
    order = np.arange(256) // 2 + np.arange(256) % 2 * 128
    for part in ("weight", "weight_scale"):
        files[f"{W1}.{part}"][...] = np.array(files[f"{W1}.{part}"])[order]


def _swizzled(scale: np.ndarray) -> np.ndarray:
    stored = torch.from_numpy(scale)
    return to_layout(stored, SWIZZLE_128X4).reshape(stored.shape).numpy()


def _noisy(values: np.ndarray) -> np.ndarray:
    """Bfloat16 that is off by 1.5 % of itself, as no format leaves it."""
    wide = (values.astype(np.uint32) << 16).view(np.float32)
    signs = np.random.default_rng(3).choice([-1, 1], wide.shape).astype(np.float32)
    off = (wide * (1 + np.float32(0.015) * signs)).astype(np.float32)
    return (off.view(np.uint32) >> 16).astype(np.uint16)


def _turn(files: Bytes, bytes_: tuple[slice, slice]) -> None:
    """Turn the sign of both codes of some bytes."""
    files[f"{W1}.weight"][bytes_] ^= 0x88


def _truncated(files: Bytes) -> None:
    """Codes of one row in four are one step too small, as a quantiser that truncates leaves."""
    codes = files[f"{W1}.weight"]
    low, high = codes & 7, (codes >> 4) & 7
    codes[::4] -= ((low > 1) & (low < 4)).astype(np.uint8)[::4]
    codes[::4] -= (((high > 1) & (high < 4)).astype(np.uint8) << 4)[::4]


def _steps(share: float) -> Callable[[np.ndarray], np.ndarray]:
    """Move some codes, wherever they are, as another way of rounding does."""

    def change(codes: np.ndarray) -> np.ndarray:
        chosen = np.random.default_rng(5).random(codes.shape) < share
        return codes - (chosen & ((codes & 7) > 1)).astype(np.uint8)

    return change


class Fault(NamedTuple):
    plant: Callable[[Bytes], None]
    rule: AuditRule
    told: str
    where: str = W1


FAULTS: dict[str, Fault] = {
    "another expert": Fault(_swap(W1, OTHER), rules.OTHER_TENSOR, f"reference calls {OTHER}"),
    "gate for up": Fault(
        _swap(W1, W1[:-1] + "3"), rules.OTHER_TENSOR, f"reference calls {W1[:-1]}3"
    ),
    "divisor stored": Fault(
        _all(f"{W1}.weight_scale_2", lambda s: 1 / s), rules.GAIN, "stored the other way round"
    ),
    "scale twice": Fault(
        _all(f"{W1}.weight_scale_2", lambda s: s * s), rules.GAIN, "applied twice"
    ),
    "scale dropped": Fault(
        _all(f"{W1}.weight_scale_2", np.ones_like), rules.GAIN, "its tensor scale is 1"
    ),
    "input scale inside": Fault(
        lambda files: _all(
            f"{W1}.weight_scale_2", lambda s: s * float(files[f"{W1}.input_scale"][0])
        )(files),
        rules.GAIN,
        "which is its input scale",
    ),
    "a power of two": Fault(
        _all(f"{W1}.weight_scale_2", lambda s: s * 8), rules.GAIN, "which is 2^3"
    ),
    "another full scale": Fault(
        _all(f"{W1}.weight_scale_2", lambda s: s * 448 / 256), rules.GAIN, "448 / 256"
    ),
    "a twentieth too large": Fault(
        _all(f"{W1}.weight_scale_2", lambda s: s * 1.07), rules.GAIN, "1.07 times"
    ),
    "swapped nibbles": Fault(
        _all(f"{W1}.weight", lambda c: (c >> 4) | (c << 4)), rules.ORDER, "`high_even`"
    ),
    "swizzled scales": Fault(
        _all(f"{W1}.weight_scale", _swizzled), rules.ORDER, "in the 128x4 layout"
    ),
    "rows interleaved": Fault(_rows_moved, rules.ORDER, "`interleave_1`"),
    "signs lost": Fault(_all(f"{W1}.weight", lambda c: c & 0x77), rules.SIGN, "no negative value"),
    "signs turned": Fault(_all(f"{W1}.weight", lambda c: c ^ 0x88), rules.SIGN, "every sign"),
    "signs of a row turned": Fault(
        lambda files: _turn(files, (slice(5, 6), slice(None))), rules.SIGN, "turned in row 5."
    ),
    "signs of rows turned": Fault(
        lambda files: _turn(files, (slice(130, 190), slice(None))),
        rules.SIGN,
        "turned in 60 rows (rows 130-189).",
    ),
    "signs of columns turned": Fault(
        lambda files: _turn(files, (slice(None), slice(8, 12))),
        rules.SIGN,
        "turned in 8 columns (columns 16-23).",
    ),
    "zeros": Fault(_all(f"{W1}.weight", np.zeros_like), rules.VALUES, "zero throughout"),
    "noise": Fault(
        _all(f"{W1}.weight", lambda c: np.random.default_rng(1).integers(0, 256, c.shape, c.dtype)),
        rules.VALUES,
        "is off by",
    ),
    "one row never written": Fault(
        lambda files: files[f"{W1}.weight"].__setitem__(17, 0), rules.ROWS, "zero in row 17,"
    ),
    "NaN": Fault(
        lambda files: files[f"{W1}.weight_scale"].__setitem__((3, 5), 0x7F),
        rules.NOT_FINITE,
        "16 values",
    ),
    "ids": Fault(
        lambda files: files["layers.0.ffn.gate.tid2eid"].__setitem__((5, 1), 3),
        rules.INTEGERS,
        "differs from the reference",
        "layers.0.ffn.gate.tid2eid",
    ),
    "FP8 scales all ones": Fault(
        _all(f"{DENSE}.scale", lambda s: np.full_like(s, 127)),
        rules.BLOCK_SCALE,
        "other block scales",
        DENSE,
    ),
    "bfloat16 with noise": Fault(
        _all("embed.weight", _noisy), rules.BYTES, "differs from the reference in", "embed"
    ),
    "one value's bit": Fault(
        lambda files: files["embed.weight"].__setitem__((7, 9), files["embed.weight"][7, 9] ^ 1),
        rules.BYTES,
        "in 1 values of row 7",
        "embed",
    ),
    "one code": Fault(
        lambda files: files[f"{W1}.weight"].__setitem__((9, 4), files[f"{W1}.weight"][9, 4] ^ 2),
        rules.CODES,
        "1 blocks of row 9",
    ),
    "two in a hundred": Fault(
        _all(f"{W1}.weight_scale_2", lambda s: s * 1.02), rules.GAIN, "1.02 times the reference."
    ),
    "a block scale halved": Fault(
        lambda files: files[f"{W1}.weight_scale"].__setitem__(
            (11, 2), files[f"{W1}.weight_scale"][11, 2] - 8
        ),
        rules.BLOCK_SCALE,
        "row 11",
    ),
    "scales of the next block": Fault(
        lambda files: files[f"{W1}.weight_scale"].__setitem__(
            slice(16, 80), np.roll(files[f"{W1}.weight_scale"][16:80], -1, 1)
        ),
        rules.BLOCK_SCALE,
        "64 rows (rows 16-79), as wrong scale arithmetic (M12)",
    ),
    "many codes of every row": Fault(
        _all(f"{DENSE}.weight", _steps(0.5)), rules.ABOVE_FORMAT, "is off by", DENSE
    ),
    "rows truncated": Fault(_truncated, rules.CODES, "rows 0, 4, 8"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(healthy: AgainstTable, tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    shutil.copytree(source(GOOD), tmp_path / "planted")
    fault.plant(Bytes(tmp_path / "planted"))
    findings = compared_again(tmp_path / "planted", healthy)
    named = [finding for finding in findings if finding.rule == fault.rule.id]
    assert named, [(finding.rule, finding.message) for finding in findings]
    lines = [finding.message for finding in named]
    assert any(fault.told in message and fault.where in message for message in lines), lines
    assert {finding.rule for finding in findings} == {fault.rule.id}
    assert json.dumps([finding.to_json() for finding in findings])


def test_a_weight_that_was_coarser_before_is_no_alarm(tmp_path: Path) -> None:
    """NVFP4 decoded to BF16 for an engine, beside the BF16 that both come from."""
    shutil.copytree(source(SOURCE), tmp_path / "decoded")
    with Checkpoint.open(source(GOOD)) as checkpoint:
        values = checkpoint.weight(W1).values(torch.bfloat16)
    files = Bytes(tmp_path / "decoded")
    files[f"{W1}.weight"][...] = values.view(torch.uint16).numpy()
    findings, _ = compared(tmp_path / "decoded", source(SOURCE))
    (finding,) = findings
    assert (finding.rule, finding.level) == (rules.COARSER.id, Level.NOTE)
    assert "NVFP4 leaves" in finding.message


def test_every_rule_has_its_fault() -> None:
    planted = {fault.rule.id for fault in FAULTS.values()}
    elsewhere = {rules.CONFIG, rules.MISSING, rules.COARSER, rules.SHAPE, rules.NOT_COMPARED}
    elsewhere.add(rules.SLIGHTLY_ABOVE)  # NVFP4 out of FP8, beside the BF16 behind both
    assert planted | {rule.id for rule in elsewhere} == {
        rule.id for rule in rules.VALUE_RULES if rule.id.startswith("against.")
    }


# Pairing, refusals, the table


def test_shapes_and_names_of_one_side_are_reported(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", [{"x": torch.ones(4, 4), "y": torch.ones(2), "z": torch.ones(3)}])
    write_shards(tmp_path / "b", [{"x": torch.ones(4, 4), "y": torch.ones(5), "w": torch.ones(3)}])
    findings, table = compared(tmp_path / "a", tmp_path / "b")
    assert [finding.rule for finding in findings] == [rules.SHAPE.id, *[rules.NOT_COMPARED.id] * 2]
    assert "y has the shape [2], in the reference [5]" in findings[0].message
    assert (list(table.only_here), list(table.only_there)) == (["z"], ["w"])


def test_references_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", [{"x": torch.ones(4, 4)}])
    write_shards(tmp_path / "b", [{"y": torch.ones(4, 4)}])
    write_shards(tmp_path / "c", [{"x": torch.ones(4, 5)}])
    with pytest.raises(Undecided, match="tensors that both checkpoints have"):
        compared(tmp_path / "a", tmp_path / "b")
    with pytest.raises(Undecided, match="tensors that both checkpoints have"):
        compared(tmp_path / "a", tmp_path / "c")
    with (
        Checkpoint.open(source(GOOD)) as checkpoint,
        pytest.raises(InvalidArgument, match="workers"),
    ):
        measure_against(checkpoint, checkpoint, workers=0)


def test_workers_and_parts_make_the_same_table() -> None:
    done: list[int] = []
    with Checkpoint.open(source(GOOD)) as here, Checkpoint.open(source(SOURCE)) as there:
        whole = measure_against(here, there)
        table = measure_against(here, there, workers=2, progress=done.append)
        assert sum(done) == bytes_against(here, there)
        places = sorted({pair.unit.place for pair in whole.pairs})
        parts = [measure_against(here, there, places=places[i::2]) for i in range(2)]
        joined = AgainstTable.joined(parts)
        assert judge_against(here, there, joined) == judge_against(here, there, whole) == []
    assert [pair.unit.name for pair in table.pairs] == [pair.unit.name for pair in whole.pairs]
    for column in AGAINST_COLUMNS:
        np.testing.assert_array_equal(table[column], whole[column])
    rows = {row["name"]: row for row in joined.rows()}
    assert rows == {row["name"]: row for row in whole.rows()}
    assert json.loads(json.dumps(rows)) == rows
    assert set(AGAINST_COLUMNS) < set(rows[W1])
    assert math.isclose(rows[W1]["over_floor"], 1.0, abs_tol=1e-6)


@pytest.mark.parametrize("bits", [0x7F81, 0x7FC1, 0xFF81])
def test_nan_of_every_kind_is_reported_without_a_warning(tmp_path: Path, bits: int) -> None:
    """A signalling NaN (the top bit of its fraction is 0) raises a flag where it is widened."""
    shutil.copytree(source("bf16"), tmp_path / "c")
    Bytes(tmp_path / "c").set(f"{DENSE}.weight", bits)
    findings, table = compared(tmp_path / "c", source("bf16"))
    assert np.isnan(table["sketches"]).any()
    assert DENSE in {finding.module for finding in findings if finding.rule == rules.NOT_FINITE.id}
    _, turned = compared(source("bf16"), tmp_path / "c")
    assert np.isnan(turned["sketches"]).any()


# --------------------------------------------------------------------------------------------------
# Two configs that compute differently are reported key by key; two spellings of one are not.

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
RESAVED = {
    **{key: value for key, value in LLAMA.items() if not key.startswith("rope")},
    "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 500000.0},
    "attention_bias": False,
    "head_dim": 1,
    "pretraining_tp": 1,
    "transformers_version": "5.20.0",
    "dtype": "float16",
}


def _written(folder: Path, config: dict[str, Any]) -> Path:
    shard = {f"model.layers.{i}.mlp.up_proj.weight": torch.ones(4, 4) * (i + 1) for i in range(2)}
    write_shards(folder, [shard])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _told(here: Path, there: Path) -> dict[str, tuple[object, object]]:
    with Checkpoint.survey(here) as a, Checkpoint.open(there) as b:
        return {key: (ours, theirs) for key, ours, theirs in differences(a, b)}


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("rope_theta", 10000.0, "rope_theta"),
        ("rms_norm_eps", 1e-6, "rms_norm_eps"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 4.0}, "rope_factor"),
        ("rope_scaling", None, "rope_type"),
        ("model_type", "mistral", "model_type"),
        ("num_hidden_layers", 1, "num_hidden_layers"),
        ("max_position_embeddings", 4096, None),
        ("torch_dtype", "float32", None),
    ],
)
def test_keys_of_any_family_are_compared(
    tmp_path: Path, key: str, value: object, told: str | None
) -> None:
    here = _written(tmp_path / "here", LLAMA | {key: value})
    found = _told(here, _written(tmp_path / "there", LLAMA))
    assert (told in found) if told else not found


def test_a_config_that_was_saved_again_is_the_same(tmp_path: Path) -> None:
    here = _written(tmp_path / "here", RESAVED)
    assert not _told(here, _written(tmp_path / "there", LLAMA))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_theta", 20000.0),
        ("routed_scaling_factor", 1.25),
        ("sliding_window", 64),
        ("hc_eps", 1e-5),
        ("rope_scaling.factor", 4),
        ("num_experts_per_tok", 1),
    ],
)
def test_a_known_family_is_compared_as_a_record(tmp_path: Path, key: str, value: object) -> None:
    shutil.copytree(source("nvfp4-experts"), tmp_path / "c")
    path = tmp_path / "c/config.json"
    config = inner = json.loads(path.read_text())
    *front, last = key.split(".")
    for name in front:
        inner = inner[name]
    inner[last] = value
    path.write_text(json.dumps(config))
    with Checkpoint.survey(tmp_path / "c") as a, Checkpoint.open(source("bf16")) as b:
        (finding,) = judge_configs(a, b)
    assert finding.rule == rules.CONFIG.id
    assert finding.evidence["here"] == str(value)


def test_a_config_that_cannot_be_is_no_other_checkpoint(tmp_path: Path) -> None:
    """Names are spelled by the reference's config, so that the comparison still runs."""
    shutil.copytree(source("v32-nvfp4"), tmp_path / "c")
    path = tmp_path / "c/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scoring_func": "none"}))
    with Checkpoint.survey(tmp_path / "c") as a, Checkpoint.open(source("v32")) as b:
        audit = audit_against(a, b)
    assert {finding.rule for finding in audit.findings} == {rules.CONFIG.id}
    assert len(audit.table) > 70


def test_a_tensor_of_the_reference_that_is_missing_is_an_error(tmp_path: Path) -> None:
    there = _written(tmp_path / "there", LLAMA)
    write_shards(tmp_path / "here", [{"model.layers.0.mlp.up_proj.weight": torch.ones(4, 4)}])
    (tmp_path / "here/config.json").write_text(json.dumps(LLAMA))
    with Checkpoint.survey(tmp_path / "here") as a, Checkpoint.open(there) as b:
        found = {finding.rule: finding for finding in audit_against(a, b).findings}
    assert "layers.1.mlp.up_proj" in found[rules.MISSING.id].message


# --------------------------------------------------------------------------------------------------
# Signs that differ from the reference's are reported by row or column, only for a whole line.

Y_MK = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))


def turned(rows: object, columns: object) -> torch.Tensor:
    x_MK = Y_MK * (1 + 0.08 * torch.randn(96, 64, generator=torch.Generator().manual_seed(2)))
    x_MK[rows, columns] *= -1  # type: ignore[index]
    return x_MK


EVERY = slice(None)
TOLD = {
    "one row": (turned(7, EVERY), "every sign turned in row 307."),
    "rows": (turned([3, 5, 6], EVERY), "every sign turned in 3 rows (rows 303, 305-306)."),
    "many runs": (turned(slice(0, 40, 2), EVERY), "310, 312, 314 and 12 runs more)."),
    "one column": (turned(EVERY, 9), "every sign turned in column 9."),
    "every sign": (turned(EVERY, EVERY), "with every sign turned."),
    "no line": (turned(slice(0, 48), slice(0, 32)), "its sign in 75.0% of the places."),
    "lost": (Y_MK.abs(), "It has no negative value."),
}


@pytest.mark.parametrize("what", TOLD)
def test_what_is_turned_is_named(what: str) -> None:
    x_MK, text = TOLD[what]
    said = describe_signs(x_MK, Y_MK, 300)
    assert said is not None
    assert said.endswith(text)


def test_healthy_and_foreign_values_have_no_findings() -> None:
    assert describe_signs(turned([], EVERY), Y_MK) is None
    assert describe_signs(torch.rand(96, 64), Y_MK) is None


def test_rows_of_zeros_are_no_turned_rows() -> None:
    x_MK, y_MK = turned(7, EVERY), Y_MK.clone()
    x_MK[20:30] = y_MK[20:30] = 0
    said = describe_signs(x_MK, y_MK)
    assert said is not None
    assert said.endswith("in row 7.")
