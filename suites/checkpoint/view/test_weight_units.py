"""The walk takes every stored byte once, whatever is fused, stacked, or no weight together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.checkpoint.view.weight_units import WeightUnits, feeds_of, stored_of, units_of
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.model.layouts import layout_named
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
    from pathlib import Path

    from degarble.harness.model.config.config import Config

LAYOUTS = [
    (TINY_V4, name) for name in ("official", "nvfp4-experts", "transformers", "vllm", "bf16")
] + [(TINY_V32, name) for name in ("official", "nvfp4-full", "vllm")]


def covered(checkpoint: Checkpoint, found: WeightUnits) -> None:
    """Check that the boxes of all units tile the tensors."""
    expected = sum(each.nbytes for each in checkpoint.entries.values())
    assert sum(unit.nbytes for unit in found.units) == expected
    taken: set[tuple[str, tuple[tuple[int, int], ...]]] = set()
    for unit in found.units:
        stored = stored_of(checkpoint, unit)
        for part, stored_entry in stored.form.parts.items():
            box = (stored_entry.name, stored.box(part).ranges)
            assert box not in taken
            taken.add(box)


@pytest.mark.parametrize(("config", "name"), LAYOUTS, ids=lambda v: v if type(v) is str else "")
def test_every_byte_is_walked_once(tmp_path: Path, seed: int, config: Config, name: str) -> None:
    write_model(tmp_path, make_model(config, layout_named(name, config), seed))
    with Checkpoint.open(tmp_path) as checkpoint:
        found = units_of(checkpoint)
        covered(checkpoint, found)
        assert not found.unread
        positions = [unit.position for unit in found.units]
        assert positions == sorted(positions)
        experts = {unit.expert for unit in found.units if unit.role.endswith("experts.*.w1")}
        assert experts == set(range(config.n_routed_experts))


def test_stacks_without_a_config_are_taken_apart(tmp_path: Path, seed: int) -> None:
    values = torch.stack([matrix(seed + i, 32, 64) for i in range(3)])
    parts = quantised_parts(values, NVFP4)
    parts["weight_scale_2"] = parts["weight_scale_2"].expand(3).clone()
    with write_modules(tmp_path, {"layers.4.experts": parts}) as checkpoint:
        found = units_of(checkpoint)
        assert [(unit.member, unit.expert, unit.layer) for unit in found.units] == [
            (0, 0, 4),
            (1, 1, 4),
            (2, 2, 4),
        ]
        assert {unit.role for unit in found.units} == {"layers.*.experts[*]"}
        weight = stored_of(checkpoint, found.units[1]).weight()
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
        found = units_of(checkpoint)
        assert [(unit.name, unit.is_bare) for unit in found.units] == [
            ("a.weight", True),
            ("a.weight_scale", True),
        ]
        assert "F4" in found.unread["b"]
        assert stored_of(checkpoint, found.units[1]).weight().shape == (5,)


def test_what_feeds_a_linear_comes_from_the_wiring() -> None:
    feeds = feeds_of(TINY_V4)
    assert feeds["layers.1.ffn.experts.w13"] == "layers.1.ffn.norm.out"
    assert feeds["layers.1.ffn.gate"] == feeds["layers.1.ffn.shared.w13"]
    assert feeds["layers.1.attn.wq_b"] == "layers.1.attn.q_norm.out"
    assert feeds["layers.1.attn.q_norm"] == "layers.1.attn.wq_a.out"
