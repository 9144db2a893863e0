from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import LayoutMismatch
from degarble.harness.checkpoint.transform.convert.back import InverseJob, convert_back
from degarble.harness.checkpoint.transform.convert.job import convert
from degarble.harness.checkpoint.transform.convert.prove import prove
from degarble.harness.checkpoint.transform.convert.vllm_parameters import BACKENDS
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.suites.checkpoint.converting_cases import converted, damage, source

if TYPE_CHECKING:
    from pathlib import Path

CASES = [
    ("official", "vllm", {}),
    ("bf16", "fused-compressor", {}),
    ("official", "fused-compressor", {}),
    ("official", "deepgemm-wo-a", {"gpu": "sm90"}),
    ("official", "deepgemm-wo-a", {"gpu": "sm100"}),
    ("official", "deepgemm-wo-a", {"gpu": "sm100", "direction": "encode"}),
    ("official", "nvfp4-lossless", {}),
    *(("nvfp4-experts", "vllm", {"backend": backend}) for backend in BACKENDS),
]


@pytest.mark.parametrize(("kind", "to", "options"), CASES)
def test_there_and_back_yields_the_same_bytes(
    kind: str, to: str, options: dict[str, object], tmp_path: Path
) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    converted(kind, there, to, **options)
    convert_back(there, back)
    with Checkpoint.open(source(kind)) as before, Checkpoint.open(back) as after:
        assert {e.name: (e.dtype, e.shape) for e in before.entries.values()} == {
            e.name: (e.dtype, e.shape) for e in after.entries.values()
        }
        differing = [name for name in before.entries if before.raw(name) != after.raw(name)]
    assert not differing
    assert (back / "config.json").read_bytes() == (source(kind) / "config.json").read_bytes()
    assert prove(back, there).holds


def test_a_fault_on_the_way_back_is_seen(tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    converted("nvfp4-experts", there, "vllm", backend="cutedsl")
    convert_back(there, back)
    damage(back, "layers.1.ffn.experts.2.w3.weight", lambda codes: codes.roll(64, 0))
    assert [each.sources for each in prove(back, there).broken] == [("layers.1.ffn.experts.2.w3",)]


@pytest.mark.parametrize(
    ("kind", "to", "options", "lost"),
    [
        ("nvfp4-full", "vllm", {}, "q_a_proj"),
        ("nvfp4-full", "fused-compressor", {}, "compressor"),
        ("bf16", "deepgemm-wo-a", {}, "wo_a"),
        ("official", "deepgemm-wo-a", {"per": "tensor"}, "wo_a"),
        ("v32", "vllm", {}, "indexer.wk.weight"),
    ],
)
def test_what_was_rounded_or_left_out_has_no_way_back(
    kind: str, to: str, options: dict[str, object], lost: str, tmp_path: Path
) -> None:
    convert(source(kind), tmp_path / "there", to, options)
    with pytest.raises(LayoutMismatch, match=lost):
        convert_back(tmp_path / "there", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_rounding_conversions_have_none_at_all(tmp_path: Path) -> None:
    convert(source("official"), tmp_path / "there", "bf16")
    with pytest.raises(LayoutMismatch, match="no way back"):
        convert_back(tmp_path / "there", tmp_path / "back")
    assert InverseJob(tmp_path / "there").source.name == "there"
