"""Group tensors into modules, and modules into weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import LayoutMismatch, Refused, ShapeMismatch, UnknownName
from degarble.harness.checkpoint.read.types import StoredLayout, TensorEntry
from degarble.harness.checkpoint.view.modules import ModuleTable, NamingConvention
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.checkpoint.view.weight_units import WeightUnits, feeds_of, stored_of, units_of
from degarble.harness.formats.number_formats import NVFP4, NibbleOrder, ScaleDirection
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.tensors import PartKind
from degarble.suites.checkpoint.number_cases import matrix, quantised_parts, write_modules
from degarble.suites.checkpoint.reading_cases import (
    TINY_V4,
    TINY_V32,
    entry,
    make_model,
    write_model,
    write_raw,
)

if TYPE_CHECKING:
    from degarble.suites.support.configs import DeepSeekConfig


# --------------------------------------------------------------------------------------------------
# Each module's form follows from its tensors alone; what no format explains is refused by name.

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def table(tensors: Tensors) -> ModuleTable:
    file = Path("model.safetensors")
    return ModuleTable(
        {name: TensorEntry(name, *what, file, 0, 0) for name, what in tensors.items()}
    )


OFFICIAL_FP8: Tensors = {
    "m.weight": ("F8_E4M3", (256, 384)),
    "m.scale": ("F8_E8M0", (2, 3)),
}
OFFICIAL_FP4: Tensors = {"m.weight": ("I8", (256, 64)), "m.scale": ("F8_E8M0", (256, 4))}
HF_FP8: Tensors = {
    "m.weight": ("F8_E4M3", (200, 384)),
    "m.weight_scale_inv": ("F32", (2, 3)),
}
MODELOPT: Tensors = {
    "m.weight": ("U8", (256, 64)),
    "m.weight_scale": ("F8_E4M3", (256, 8)),
    "m.weight_scale_2": ("F32", ()),
    "m.input_scale": ("F32", ()),
}
COMPRESSED: Tensors = {
    "m.weight_packed": ("U8", (256, 64)),
    "m.weight_scale": ("F8_E4M3", (256, 8)),
    "m.weight_global_scale": ("F32", (1,)),
    "m.input_global_scale": ("F32", (1,)),
}
STACKED: Tensors = {
    "m.w13_weight": ("U8", (4, 256, 64)),
    "m.w13_weight_scale": ("F8_E4M3", (4, 256, 8)),
    "m.w13_weight_scale_2": ("F32", (4, 2)),
    "m.w13_input_scale": ("F32", (4, 2)),
}


@pytest.mark.parametrize(
    ("tensors", "module", "convention", "name", "shape", "dialect"),
    [
        (
            OFFICIAL_FP8, "m", NamingConvention.DEEPSEEK, "FP8_128X128_UE8M0", (256, 384),
            "canonical",
        ),
        (OFFICIAL_FP4, "m", NamingConvention.DEEPSEEK, "MXFP4", (256, 128), "canonical"),
        (HF_FP8, "m", NamingConvention.HUGGINGFACE, "FP8_128X128_F32", (200, 384), "canonical"),
        (MODELOPT, "m", NamingConvention.MODELOPT, "NVFP4", (256, 128), "modelopt"),
        (
            COMPRESSED, "m", NamingConvention.COMPRESSED_TENSORS, "NVFP4", (256, 128),
            "compressed_tensors",
        ),
        (STACKED, "m.w13", NamingConvention.MODELOPT, "NVFP4", (4, 256, 128), "modelopt"),
        (
            {"m.weight": ("F4", (256, 128)), "m.scale": ("F8_E8M0", (256, 4))},
            "m", NamingConvention.DEEPSEEK, "MXFP4", (256, 128), "canonical",
        ),
        (
            {"m.weight": ("U8", (256, 64)), "m.weight_scale": ("U8", (256, 4))},
            "m", NamingConvention.WEIGHT_SCALE, "MXFP4", (256, 128), "canonical",
        ),
        (
            {"m.weight": ("F8_E4M3", (256, 128)), "m.weight_scale": ("BF16", (2, 1))},
            "m", NamingConvention.WEIGHT_SCALE, "FP8_128X128_F32", (256, 128), "canonical",
        ),
        (
            {"m.weight": ("F8_E4M3", (256, 128)), "m.weight_scale": ("U8", (256, 4))},
            "m", NamingConvention.WEIGHT_SCALE, "MXFP8", (256, 128), "canonical",
        ),
    ],
)  # fmt: skip
def test_forms(
    tensors: Tensors,
    module: str,
    convention: NamingConvention,
    name: str,
    shape: tuple[int, ...],
    dialect: str,
) -> None:
    modules = table(tensors)
    assert list(modules.suffixes) == [module]
    assert modules.is_matrix(module)
    form = modules.form(module)
    assert form.format is not None
    assert form.dialect is not None
    assert (form.convention, form.format.name, form.shape) == (convention, name, shape)
    assert form.dialect.name == dialect
    assert form.block == form.format.block
    assert {entry.name for entry in form.parts.values()} == set(tensors)
    divides = convention is NamingConvention.COMPRESSED_TENSORS
    stored = ScaleDirection.ENCODE if divides else ScaleDirection.DECODE
    assert form.direction is (stored if form.format.tensor_scale else None)
    assert form.nibble_order is (NibbleOrder.LOW_EVEN if form.format.packed else None)


def test_plain_modules_and_plain_tensors() -> None:
    modules = table(
        {
            "norm.weight": ("F32", (8,)),
            "up.weight": ("BF16", (8, 8)),
            "up.input_scale": ("F32", ()),
            "attn_hc.scale": ("F32", (3,)),
            "gate.bias": ("F32", (4,)),
            "experts.gate_up_proj": ("BF16", (2, 8, 8)),
        }
    )
    assert sorted(modules.suffixes) == [
        "attn_hc.scale", "experts.gate_up_proj", "gate.bias", "norm", "up",
    ]  # fmt: skip
    assert [name for name in modules.suffixes if modules.is_matrix(name)] == [
        "up", "experts.gate_up_proj",
    ]  # fmt: skip
    form = modules.form("up")
    assert (form.format, form.direction, form.block) == (None, None, None)
    assert set(form.parts) == {PartKind.VALUE, PartKind.INPUT_SCALE}
    assert modules.form("attn_hc.scale").shape == (3,)


FEW = ("F8_E4M3", (256, 128))


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize(
    ("shape", "name", "block"),
    [
        ((), "FP8_TENSOR", (256, 128)),
        ((1,), "FP8_TENSOR", (256, 128)),
        ((1, 1), "FP8_TENSOR", (256, 128)),
        ((256,), "FP8_ROW", (1, 128)),
        ((256, 1), "FP8_1X128_F32", (1, 128)),
        ((2, 1), "FP8_128X128_F32", (128, 128)),
    ],
)
def test_fp8_with_few_scales(
    dtype: str, shape: tuple[int, ...], name: str, block: tuple[int, int]
) -> None:
    form = table({"m.weight": FEW, "m.weight_scale": (dtype, shape)}).form("m")
    assert form.format is not None
    assert (form.format.name, form.block, form.shape) == (name, block, (256, 128))


FP8 = ("F8_E4M3", (256, 256))


@pytest.mark.parametrize(
    ("tensors", "error", "says"),
    [
        # The field report whose notes call the block size 128: the shapes decide, and are told.
        (
            MODELOPT | {"m.weight_scale": ("F8_E4M3", (256, 1))},
            ShapeMismatch,
            "one scale a 1x128 block",
        ),
        ({"m.weight": FP8, "m.weight_scale": ("F32", (2,))}, ShapeMismatch, "no scale a block"),
        ({"m.weight": FP8, "m.weight_scale": ("F32", (128, 1))}, ShapeMismatch, "2x256 block"),
        ({"m.weight": FP8, "m.scale": ("F8_E8M0", (4, 4))}, ShapeMismatch, "64x64 block"),
        ({"m.weight": FP8, "m.scale": ("F8_E4M3", (2, 2))}, ShapeMismatch, "128x128 block"),
        ({"m.weight": FP8}, LayoutMismatch, "without block scales"),
        ({"m.weight": ("U8", (4, 8))}, LayoutMismatch, "without block scales"),
        ({"m.weight": ("I16", (4, 8)), "m.scale": ("F32", (4, 1))}, LayoutMismatch, "left over"),
        ({"m.weight": ("BF16", (4, 8)), "m.scale": ("F32", (4, 1))}, LayoutMismatch, "left over"),
        ({"m.weight": ("U64", (4, 8)), "m.scale": ("F32", (4, 1))}, ShapeMismatch, "U8, I8"),
        ({"m.weight": ("I8", ()), "m.scale": ("F8_E8M0", ())}, ShapeMismatch, "no scale a block"),
        (OFFICIAL_FP8 | {"m.weight_scale": ("F32", (2, 2))}, LayoutMismatch, "one tensor"),
        (MODELOPT | {"m.weight_packed": ("U8", (256, 64))}, LayoutMismatch, "one tensor"),
        (OFFICIAL_FP8 | {"m.weight_scale_2": ("F32", ())}, LayoutMismatch, "no tensor scale"),
    ],
)
def test_what_no_format_explains_is_refused(
    tensors: Tensors, error: type[Refused], says: str
) -> None:
    with pytest.raises(error, match="module m") as refused:
        table(tensors).form("m")
    assert says in str(refused.value)


def test_a_missing_tensor_scale_is_never_assumed() -> None:
    for missing in ("m.weight_scale_2", "m.weight_scale"):
        with pytest.raises(LayoutMismatch, match="module m"):
            table({name: what for name, what in MODELOPT.items() if name != missing}).form("m")


def test_scales_without_codes_are_plain_tensors() -> None:
    modules = table({"m.weight_scale": ("F32", (2, 2)), "m.input_scale": ("F32", ())})
    assert sorted(modules.suffixes) == ["m.input_scale", "m.weight_scale"]


def test_an_unknown_module_is_refused_with_near_names() -> None:
    with pytest.raises(UnknownName, match=r"a\.b\.wq_a"):
        table({"a.b.wq_a.weight": ("BF16", (2, 2)), "x.y.weight": ("BF16", (2, 2))}).form("a.b.wqa")
    with pytest.raises(UnknownName, match="the 0 known names"):
        table({}).form("a")


@pytest.mark.parametrize(
    ("tensors", "layout"),
    [
        ({}, StoredLayout.EMPTY),
        ({"a.weight": ("BF16", (2, 2))}, StoredLayout.BF16),
        ({"a": ("BF16", (2, 2, 2))}, StoredLayout.TRANSFORMERS),
        (OFFICIAL_FP8, StoredLayout.OFFICIAL),
        (HF_FP8, StoredLayout.HF_FP8),
        (MODELOPT, StoredLayout.MODELOPT),
        (COMPRESSED, StoredLayout.COMPRESSED_TENSORS),
        (STACKED, StoredLayout.VLLM),
        # Mixed: NVFP4 experts in an official checkpoint, FP8 in a compressed one.
        (
            MODELOPT | {"n" + name[1:]: what for name, what in OFFICIAL_FP8.items()},
            StoredLayout.MODELOPT,
        ),
        (
            COMPRESSED | {"n.weight": FP8, "n.weight_scale": ("F32", (2, 2))},
            StoredLayout.COMPRESSED_TENSORS,
        ),
    ],
)
def test_layouts(tensors: Tensors, layout: StoredLayout) -> None:
    assert table(tensors).layout() is layout


def test_mixed_checkpoints_are_judged_by_module() -> None:
    modules = table(
        MODELOPT
        | {"fp8" + name[1:]: what for name, what in OFFICIAL_FP8.items()}
        | {"fp4" + name[1:]: what for name, what in OFFICIAL_FP4.items()}
        | {"plain.weight": ("BF16", (4, 4))}
    )
    forms = {name: modules.form(name).format for name in modules.suffixes}
    assert {name: fmt and fmt.name for name, fmt in forms.items()} == {
        "m": "NVFP4", "fp8": "FP8_128X128_UE8M0", "fp4": "MXFP4", "plain": None,
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------
# The walk takes every stored byte once, whatever is fused, stacked, or no weight together.

LAYOUTS = [
    (TINY_V4, name) for name in ("official", "nvfp4-experts", "transformers", "vllm", "bf16")
] + [(TINY_V32, name) for name in ("official", "nvfp4-full", "vllm")]


def covered(checkpoint: Checkpoint, found: WeightUnits) -> None:
    """Check that the boxes of all units tile the tensors."""
    expected = sum(tensor_entry.nbytes for tensor_entry in checkpoint.entries.values())
    assert sum(unit.nbytes for unit in found.units) == expected
    taken: set[tuple[str, tuple[tuple[int, int], ...]]] = set()
    for unit in found.units:
        stored = stored_of(checkpoint, unit)
        for part, stored_entry in stored.form.parts.items():
            box = (stored_entry.name, stored.box(part).ranges)
            assert box not in taken
            taken.add(box)


@pytest.mark.parametrize(("config", "name"), LAYOUTS, ids=lambda v: v if type(v) is str else "")
def test_every_byte_is_walked_once(
    tmp_path: Path, seed: int, config: DeepSeekConfig, name: str
) -> None:
    write_model(tmp_path, make_model(config, layout_named(name, config), seed))
    with Checkpoint.open(tmp_path) as checkpoint:
        weight_units = units_of(checkpoint)
        covered(checkpoint, weight_units)
        assert not weight_units.unread
        positions = [unit.position for unit in weight_units.units]
        assert positions == sorted(positions)
        experts = {unit.expert for unit in weight_units.units if unit.role.endswith("experts.*.w1")}
        assert experts == set(range(config.n_routed_experts))


def test_stacks_without_a_config_are_taken_apart(tmp_path: Path, seed: int) -> None:
    values = torch.stack([matrix(seed + i, 32, 64) for i in range(3)])
    parts = quantised_parts(values, NVFP4)
    parts["weight_scale_2"] = parts["weight_scale_2"].expand(3).clone()
    with write_modules(tmp_path, {"layers.4.experts": parts}) as checkpoint:
        weight_units = units_of(checkpoint)
        assert [(unit.member, unit.expert, unit.layer) for unit in weight_units.units] == [
            (0, 0, 4),
            (1, 1, 4),
            (2, 2, 4),
        ]
        assert {unit.role for unit in weight_units.units} == {"layers.*.experts[*]"}
        weight = stored_of(checkpoint, weight_units.units[1]).weight()
        assert weight.codes is not None
        assert torch.equal(weight.codes, parts["weight"][1])


def test_spoilt_modules_are_walked_tensor_by_tensor(tmp_path: Path) -> None:
    header = {
        "a.weight": entry("U8", [8, 8], 0, 64),
        "a.weight_scale": entry("F8_E4M3", [5], 64, 69),
        "b": entry("F4", [6], 69, 72),
    }
    write_raw(tmp_path / "model.safetensors", header, bytes(72))
    with Checkpoint.open(tmp_path) as checkpoint:
        weight_units = units_of(checkpoint)
        assert [(unit.name, unit.is_bare) for unit in weight_units.units] == [
            ("a.weight", True),
            ("a.weight_scale", True),
        ]
        assert "F4" in weight_units.unread["b"]
        assert stored_of(checkpoint, weight_units.units[1]).weight().shape == (5,)


def test_what_feeds_a_linear_comes_from_the_wiring() -> None:
    feeds = feeds_of(TINY_V4)
    assert feeds["layers.1.ffn.experts.w13"] == "layers.1.ffn.norm.out"
    assert feeds["layers.1.ffn.gate"] == feeds["layers.1.ffn.shared.w13"]
    assert feeds["layers.1.attn.wq_b"] == "layers.1.attn.q_norm.out"
    assert feeds["layers.1.attn.q_norm"] == "layers.1.attn.wq_a.out"
