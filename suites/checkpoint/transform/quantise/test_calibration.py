"""Amax records: the file, and the scales that follow from it for reached and unreached experts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from degarble.harness.base.errors import InvalidArgument, Refused, UnreadableFile
from degarble.harness.checkpoint.transform.quantise.calibration import (
    FILE,
    Amax,
    Calibration,
    InputScales,
    ScaleOrigin,
)
from degarble.harness.model.parameters import Parameter, parameter_named, parameters
from degarble.harness.model.recipes import recipe_named
from degarble.suites.checkpoint.reading_cases import TINY_V4, TINY_V32

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.model.config.config import Config


def wanted(config: Config, recipe: str = "nvfp4-full") -> list[Parameter]:
    chosen = recipe_named(recipe, config)
    return [each for each in parameters(config) if chosen.format_of(each).activation == "NVFP4"]


def records(config: Config) -> dict[str, Amax]:
    return {each.name: Amax(1.0 + i / 8, 10) for i, each in enumerate(wanted(config))}


def test_the_file_comes_back(tmp_path: Path) -> None:
    made = Calibration.of(records(TINY_V4))
    (tmp_path / FILE).write_bytes(made.to_bytes())
    assert Calibration.load(tmp_path) == made
    assert Calibration.load(tmp_path / FILE).fingerprint == made.fingerprint
    raw = json.loads(made.to_bytes())
    assert raw["format"] == "degarble-amax"
    assert raw["linears"]["layers.0.attn.wq_a"] == {"amax": 1.0, "tokens": 10}


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"format": "degarble-amax", "version": 2, "linears": {}}',
        '{"format": "degarble-amax", "version": 1}',
        '{"format": "degarble-amax", "version": 1, "linears": {"a": 3}}',
        '{"format": "degarble-amax", "version": 1, "linears": {"a": {"amax": 1}}}',
        '{"format": "degarble-amax", "version": 1, "linears": {"a": {"amax": true, "tokens": 1}}}',
        '{"format": "degarble-amax", "version": 1, "linears": {"a": {"amax": 1, "tokens": -1}}}',
        '{"format": "degarble-amax", "version": 1, "linears": {"a": {"amax": 0, "tokens": 4}}}',
        '{"format": "degarble-amax", "version": 1, "linears": {"a": {"amax": -1, "tokens": 4}}}',
        '{"format": "degarble-amax", "version": 1, "linears": {"a": {"amax": 1e39, "tokens": 4}}}',
        '{"format": "degarble-amax", "version": 1, "linears": {"a": {"amax": "1", "tokens": 4}}}',
        '{"format": "degarble-amax", "version": 1, "linears": {}} x',
        "not json",
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises((UnreadableFile, InvalidArgument)):
        Calibration.load(tmp_path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="--amax-only"):
        Calibration.load(tmp_path)
    with pytest.raises(Refused):
        Calibration.load(tmp_path / "nowhere")


def test_two_runs_join() -> None:
    one = Calibration.of({"a": Amax(2.0, 3), "b": Amax(1.0, 1)})
    two = Calibration.of({"a": Amax(1.5, 4), "c": Amax(0.0, 0)})
    assert one.merged(two).records == {"a": (2.0, 7), "b": (1.0, 1), "c": (0.0, 0)}


def scale_of(config: Config, given: dict[str, Amax], name: str) -> Any:
    found = InputScales(config, Calibration.of(given), wanted(config))
    return found.of(parameter_named(config, name))


def test_partners_take_the_larger_amax() -> None:
    given = records(TINY_V4)
    given["layers.0.ffn.experts.1.w1"] = Amax(5.0, 9)
    given["layers.0.ffn.experts.1.w3"] = Amax(7.0, 9)
    one = scale_of(TINY_V4, given, "layers.0.ffn.experts.1.w1")
    three = scale_of(TINY_V4, given, "layers.0.ffn.experts.1.w3")
    assert one.scale == three.scale == float(np.float32(7) / np.float32(2688))
    assert (one.origin, three.origin) == (ScaleOrigin.PARTNER, ScaleOrigin.MEASURED)


@pytest.mark.parametrize("absent", [False, True], ids=["no tokens", "no record"])
def test_an_unreached_expert_takes_the_largest_of_its_projection(absent: bool) -> None:
    given = records(TINY_V4)
    names = [f"layers.1.ffn.experts.2.{each}" for each in ("w1", "w3", "w2")]
    for name in names:
        given.pop(name) if absent else given.__setitem__(name, Amax(0.0, 0))
    given["layers.2.ffn.experts.0.w1"] = Amax(96.0, 4)
    given["layers.0.ffn.experts.0.w2"] = Amax(64.0, 4)
    assert [scale_of(TINY_V4, given, name)[1:] for name in names] == [
        (96.0, 0, ScaleOrigin.UNREACHED),
        (96.0, 0, ScaleOrigin.UNREACHED),
        (64.0, 0, ScaleOrigin.UNREACHED),
    ]


def test_the_experts_of_a_v32_layer_share_one() -> None:
    given = records(TINY_V32)
    given["layers.1.ffn.experts.3.w1"] = Amax(50.0, 2)
    given["layers.1.ffn.experts.0.w1"] = Amax(0.0, 0)
    found = [scale_of(TINY_V32, given, f"layers.1.ffn.experts.{e}.w3").amax for e in range(4)]
    assert found == [50.0] * 4
    assert scale_of(TINY_V32, given, "layers.1.ffn.experts.0.w1").origin is ScaleOrigin.LAYER


def test_what_cannot_be_answered_is_refused() -> None:
    given = records(TINY_V4)
    missing = {name: each for name, each in given.items() if name != "layers.0.attn.wq_a"}
    with pytest.raises(InvalidArgument, match=r"layers\.0\.attn\.wq_a"):
        scale_of(TINY_V4, missing, "layers.0.attn.wq_b")
    with pytest.raises(InvalidArgument, match=r"layers\.9\.attn\.wq_a.*with the model that"):
        scale_of(TINY_V4, given | {"layers.9.attn.wq_a": Amax(1.0, 1)}, "layers.0.attn.wq_b")
    with pytest.raises(InvalidArgument, match="no linear"):
        scale_of(TINY_V4, given | {"norm": Amax(1.0, 1)}, "layers.0.attn.wq_b")
    nobody = {name: each for name, each in given.items() if ".experts." not in name}
    with pytest.raises(InvalidArgument, match="no expert in any layer"):
        scale_of(TINY_V4, nobody, "layers.0.ffn.experts.0.w2")
