from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import LayoutMismatch
from degarble.harness.checkpoint.transform.convert.job import convert
from degarble.harness.checkpoint.transform.convert.prove import prove
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.suites.checkpoint.converting_cases import broken, converted, damage, source

if TYPE_CHECKING:
    from pathlib import Path

MAIN = "layers.0.attn.compressor"
INDEXER = "layers.0.attn.indexer.compressor"


@pytest.mark.parametrize("kind", ["nvfp4-full", "official", "bf16", "compressed-tensors"])
def test_both_compressors_are_fused_from_their_own_prefixes(kind: str, tmp_path: Path) -> None:
    proof = converted(kind, tmp_path / "out", "fused-compressor")
    assert proof.holds, list(proof.lines())
    with Checkpoint.open(source(kind)) as before, Checkpoint.open(tmp_path / "out") as after:
        assert before.names is not None
        for stem in ("layers.0.attn.compressor", "layers.0.attn.indexer.compressor"):
            parts = [before.stored(f"{stem}.{part}") for part in ("wkv", "wgate")]
            fused = f"{stem}.fused_wkv_wgate"
            expected = torch.cat([each.weight().values(torch.bfloat16) for each in parts])
            assert torch.equal(after.tensor(f"{fused}.weight"), expected)
            gone = [entry.name for each in parts for entry in each.form.parts.values()]
            assert not after.entries.keys() & set(gone)


def test_swapped_halves_are_seen(tmp_path: Path) -> None:
    converted("nvfp4-full", tmp_path / "out", "fused-compressor")
    fused = f"{MAIN}.fused_wkv_wgate"
    damage(tmp_path / "out", f"{fused}.weight", lambda t: torch.cat(t.chunk(2)[::-1]))
    assert broken("nvfp4-full", tmp_path / "out") == [fused]


def test_the_main_compressor_in_place_of_the_indexers_is_seen(tmp_path: Path) -> None:
    """Origin, fault 4: where the shapes are the same, the values alone tell."""
    converted("nvfp4-full", tmp_path / "out", "fused-compressor")
    with Checkpoint.open(tmp_path / "out") as after:
        main = after.tensor(f"{MAIN}.fused_wkv_wgate.weight").clone()
        own = after.tensor(f"{INDEXER}.fused_wkv_wgate.weight")
        assert main.shape == own.shape, "the small model is the silent case"
    damage(tmp_path / "out", f"{INDEXER}.fused_wkv_wgate.weight", lambda _: main)
    assert broken("nvfp4-full", tmp_path / "out") == [f"{INDEXER}.fused_wkv_wgate"]


def test_a_source_without_compressors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutMismatch, match="Only V4 has compressors"):
        convert(source("v32"), tmp_path / "out", "fused-compressor")


def test_uninitialised_memory_is_seen(tmp_path: Path) -> None:
    """Origin: a loader that skips in silence leaves zeros, or anything."""
    converted("bf16", tmp_path / "out", "fused-compressor")
    name = "layers.0.attn.compressor.fused_wkv_wgate.weight"
    damage(tmp_path / "out", name, torch.zeros_like)
    (found,) = prove(source("bf16"), tmp_path / "out").broken
    assert found.beyond > found.elements * 0.9
