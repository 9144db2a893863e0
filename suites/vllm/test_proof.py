"""The start's proof: formats as stored, errors refuse, and the stream is what was proven."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import LayoutMismatch, PartnersMismatch, ShapeMismatch
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.model.recipes import Recipe, Rule
from degarble.harness.vllm import proof
from degarble.suites.checkpoint.audit.loader.loader_cases import inventory_of
from degarble.suites.checkpoint.structure_cases import V4, write
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from degarble.harness.checkpoint.audit.loader.maps import LoaderMap
    from degarble.harness.checkpoint.audit.structure.inventory import Inventory

FP8 = "FP8_128X128_UE8M0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("proof") / "c", V4, "nvfp4-experts")


@pytest.fixture(scope="module")
def proven(folder: Path) -> proof.StartProof:
    return proof.prove_start(folder)


def stream(proven: proof.StartProof) -> Iterator[tuple[str, torch.Tensor]]:
    for name, stored in proven.stored.items():
        elements = torch.Size(stored.shape).numel()
        yield (
            name,
            torch.empty(stored.nbytes, dtype=torch.uint8, device="meta")
            .view(
                {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.int64}[
                    stored.nbytes // elements
                ]
            )
            .view(stored.shape),
        )


def test_modules_have_the_formats_that_are_stored(proven: proof.StartProof) -> None:
    formats = proven.formats
    assert formats["model.layers.0.ffn.experts"] == "NVFP4"
    assert formats["model.layers.0.attn.fused_wqa_wkv"] == FP8
    assert formats["model.layers.1.attn.compressor.fused_wkv_wgate"] == "BF16"
    assert not any("mtp" in module for module in formats)
    assert proven.recipe.endswith("3 modules NVFP4")
    assert proven.manifest.startswith("manifest ")
    assert proven.summary.endswith(" 0 elements unwritten")


def test_spread_over_ranks_it_is_proven_for_each(folder: Path) -> None:
    assert proof.prove_start(folder, (2, 2, 1)).summary.startswith("2 ranks")


def test_a_finding_of_level_error_refuses_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = proof.as_stored

    def planted(inventory: Inventory, ranks: tuple[int, int, int]) -> LoaderMap:
        whole = made(inventory, ranks)
        return replace(whole, skip=(r"attn\.wq_b\.scale$",))

    monkeypatch.setattr(proof, "as_stored", planted)
    with pytest.raises(LayoutMismatch, match=r"loader\.\w+: .*wq_b"):
        proof.prove_start(folder)


def test_partners_of_two_formats_are_refused(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        inventory = inventory_of(checkpoint)
        loader_map = proof.as_stored(inventory, (1, 1, 1))
        found = inventory.by_name["layers.0.attn.wkv"]
        other = found._replace(check=replace(found.check, weight="BF16"))
        inventory.found[inventory.found.index(found)] = other
        with pytest.raises(PartnersMismatch, match="fused_wqa_wkv"):
            proof.formats_of(inventory, loader_map)


def test_what_vllm_builds_plain_must_be_stored_plain() -> None:
    proof.require_plain({"model.layers.1.attn.compressor.fused_wkv_wgate": "BF16", "m": FP8})
    with pytest.raises(LayoutMismatch, match=r"compressor\.fused_wkv_wgate = 'NVFP4'"):
        proof.require_plain({"model.layers.1.attn.compressor.fused_wkv_wgate": "NVFP4"})


def test_a_stream_that_is_the_checkpoint_passes(proven: proof.StartProof) -> None:
    assert len(list(proof.guarded(stream(proven), proven, spread=False))) == len(proven.stored)


def test_what_is_strange_in_a_stream_is_refused(proven: proof.StartProof) -> None:
    whole = list(stream(proven))
    name, tensor = next(each for each in whole if each[0].endswith("wq_b.weight"))

    def refused(weights: list[tuple[str, torch.Tensor]], *, spread: bool = False) -> str:
        with pytest.raises((LayoutMismatch, ShapeMismatch)) as error:
            list(proof.guarded(weights, proven, spread=spread))
        return str(error.value)

    assert "not in the checkpoint's index" in refused([("layers.0.attn.wq_c.weight", tensor)])
    assert "a second time" in refused([(name, tensor), (name, tensor)])
    assert "as the file's head says" in refused([(name, tensor[:-1])])
    assert "as the file's head says" in refused([(name, tensor.float())])
    assert "1, as" in refused([each for each in whole if each[0] != name])
    experts = [each for each in whole if ".experts.1." not in each[0]]
    assert "never came" in refused(experts)
    assert len(list(proof.guarded(experts, proven, spread=True))) == len(experts)


def test_drafters_are_left_to_nobody(proven: proof.StartProof) -> None:
    main = [each for each in stream(proven) if not each[0].startswith("mtp.")]
    assert len(main) < len(proven.stored)
    assert len(list(proof.guarded(main, proven, spread=False))) == len(main)


def test_parameters_that_nothing_reached_are_refused() -> None:
    proof.require_filled(["a", "b"], {"a", "b", "c"})
    with pytest.raises(LayoutMismatch, match="1, as b"):
        proof.require_filled(["a", "b"], {"a"})


def test_ranks_are_proven_in_the_formats_that_are_stored(tmp_path: Path) -> None:
    """vLLM would build these linears in FP8, whose blocks of 128 no two ranks can share here."""
    rule = Rule("layers.*.ffn.experts.*", "NVFP4", "NVFP4")
    model = Synthetic(V4, "nvfp4-experts", Recipe("experts alone", (rule,)))
    write_checkpoint(tmp_path / "c", model)
    found = proof.prove_start(tmp_path / "c", (2, 2, 1))
    assert found.summary.startswith("2 ranks, ")
    assert found.summary.endswith(" 0 elements unwritten")
