"""Single and fused modules against the parameters that they should hold."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from degarble.harness.checkpoint.audit.structure.inventory import (
    ModuleCheck,
    ModuleChecks,
    check_fused,
)
from degarble.harness.checkpoint.read.types import DTYPE_BITS, TensorEntry
from degarble.harness.checkpoint.view.modules import ModuleTable
from degarble.harness.checkpoint.view.view import Checkpoint, logical_names
from degarble.harness.model.parameters import parameter_named
from degarble.suites.checkpoint.structure_cases import V4, replant, write

Seen = dict[str, tuple[str, tuple[int, ...]]]
WQ_A = parameter_named(V4, "layers.1.attn.wq_a")  # 128 x 128
W2 = parameter_named(V4, "layers.1.ffn.experts.0.w2")  # 128 x 256
NORM = parameter_named(V4, "layers.1.attn.q_norm")


def judged(tensors: Seen, name: str = "layers.1.attn.wq_a") -> ModuleCheck:
    entries = {
        f"m{suffix}": TensorEntry(
            f"m{suffix}", dtype, shape, Path("f"), 0, prod(shape) * DTYPE_BITS[dtype] // 8
        )
        for suffix, (dtype, shape) in tensors.items()
    }
    return ModuleChecks(ModuleTable(entries)).check(parameter_named(V4, name), "m")


NVFP4: Seen = {
    ".weight": ("U8", (128, 128)),
    ".weight_scale": ("F8_E4M3", (128, 16)),
    ".weight_scale_2": ("F32", ()),
    ".input_scale": ("F32", ()),
}


@pytest.mark.parametrize(
    ("tensors", "weight"),
    [
        ({".weight": ("BF16", (128, 256))}, "BF16"),
        ({".weight": ("F32", (128, 256))}, "BF16"),
        (NVFP4, "NVFP4"),
        ({**NVFP4, ".weight_scale_2": ("F32", (1,))}, "NVFP4"),
        ({".weight": ("I8", (128, 128)), ".scale": ("F8_E8M0", (128, 8))}, "MXFP4"),
        ({".weight": ("U8", (128, 128)), ".weight_scale": ("U8", (128, 8))}, "MXFP4"),
        (
            {".weight": ("F8_E4M3", (128, 256)), ".weight_scale_inv": ("F32", (1, 2))},
            "FP8_128X128_F32",
        ),
        ({".weight": ("F8_E4M3", (128, 256)), ".scale": ("F8_E8M0", (1, 2))}, "FP8_128X128_UE8M0"),
        (
            {
                ".weight_packed": ("U8", (128, 128)),
                ".weight_scale": ("F8_E4M3", (128, 16)),
                ".weight_global_scale": ("F32", (1,)),
            },
            "NVFP4",
        ),
    ],
)
def test_every_known_form_is_told_without_an_issue(tensors: Seen, weight: str) -> None:
    check = judged(tensors, W2.name)
    assert (check.weight, check.issues) == (weight, [])
    assert check.has_input_scale == (".input_scale" in tensors)


@pytest.mark.parametrize(
    ("tensors", "rule", "words"),
    [
        ({".weight": ("BF16", (256, 128))}, "structure.shape", "expected [128, 256]"),
        ({".weight": ("F16", (128, 256))}, "structure.narrowed", "published as BF16"),
        ({".weight": ("I32", (128, 256))}, "structure.dtype", "expected BF16"),
        ({**NVFP4, ".weight": ("U8", (128, 64))}, "structure.shape", "two codes a byte"),
        ({**NVFP4, ".weight_scale": ("F8_E4M3", (2048,))}, "scales.rank", "2 dimensions expected"),
        ({**NVFP4, ".weight_scale": ("F32", (128, 16))}, "scales.dtype", "F8_E4M3 expected"),
        ({**NVFP4, ".weight_scale": ("F8_E4M3", (128, 8))}, "scales.from_packed", "16 bytes"),
        ({**NVFP4, ".weight_scale": ("F8_E4M3", (128, 2))}, "scales.block", "a 1x128 block"),
        ({**NVFP4, ".weight_scale_2": ("F32", (128,))}, "scales.rank", "one number expected"),
        ({**NVFP4, ".weight_scale_2": ("BF16", ())}, "scales.dtype", "read its bits as fp32"),
        ({**NVFP4, ".input_scale": ("F16", ())}, "scales.dtype", "F32 expected"),
        (
            {".weight": ("F8_E4M3", (128, 256)), ".scale": ("F8_E4M3", (1, 2))},
            "scales.dtype",
            "F32 or BF16 or F8_E8M0 or U8 expected",
        ),
        (
            {
                ".weight": ("F8_E4M3", (128, 256)),
                ".scale": ("F32", (1, 2)),
                ".weight_scale_2": ("F32", ()),
            },
            "scales.left_over",
            "which has none",
        ),
        (
            {
                ".weight": ("F8_E4M3", (128, 256)),
                ".scale": ("F32", (1, 2)),
                ".weight_scale_inv": ("F32", (1, 2)),
            },
            "structure.unreadable_module",
            "two tensors for one part",
        ),
        ({".weight": ("F8_E5M2", (128, 256))}, "structure.unreadable_module", "no known format"),
    ],
)
def test_every_other_form_breaks_a_rule(tensors: Seen, rule: str, words: str) -> None:
    issues = [each for each in judged(tensors, W2.name).issues if each.rule.id == rule]
    assert issues, judged(tensors, W2.name).issues
    assert words in issues[0].told


def test_scales_that_were_padded_for_a_kernel_are_recognised() -> None:
    name = "layers.1.attn.indexer.weights_proj"  # 4 x 128
    tensors: Seen = {**NVFP4, ".weight": ("U8", (4, 64)), ".weight_scale": ("F8_E4M3", (128, 8))}
    (issue,) = judged(tensors, name).issues
    assert issue.rule.id == "scales.block"
    assert "128x4 layout of a kernel" in issue.told


def test_modules_that_are_alike_are_judged_once() -> None:
    entries = {
        f"{m}.weight": TensorEntry(f"{m}.weight", "BF16", (128, 128), Path("f"), 0, 32768)
        for m in ("a", "b")
    }
    checks = ModuleChecks(ModuleTable(entries))
    assert checks.check(WQ_A, "a") is checks.check(WQ_A, "b")
    assert checks.check(NORM, "a") is not checks.check(WQ_A, "a")


def test_a_fused_module_is_compared_with_all_its_members(tmp_path: Path) -> None:
    healthy = write(tmp_path / "a", V4, "vllm")
    module = "model.layers.1.attn.fused_wqa_wkv"

    def shorter(tensors: dict[str, object]) -> None:
        for suffix in (".weight", ".weight_scale_inv"):
            tensor = tensors[module + suffix]
            rows = tensor.shape[0] - (128 if suffix == ".weight" else 1)  # type: ignore[attr-defined]
            tensors[module + suffix] = tensor[:rows].clone()  # type: ignore[index]

    folder = replant(healthy, tmp_path / "b", shorter)  # type: ignore[arg-type]
    members = [parameter_named(V4, f"layers.1.attn.{name}") for name in ("wq_a", "wkv")]
    for path, rules in ((healthy, set()), (folder, {"structure.shape"})):
        with Checkpoint.open(path) as checkpoint:
            names = logical_names(V4, checkpoint.table)
            assert names is not None
            check = check_fused(names, module, members)
            assert {each.rule.id for each in check.issues} == rules
            assert check.weight == "FP8_128X128_UE8M0"
