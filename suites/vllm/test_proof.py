"""The proof of vLLM's loader before and after loading."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import LayoutMismatch, PartnersMismatch, ShapeMismatch
from degarble.harness.checkpoint.transform.convert.job import convert, prove
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.recipes import Recipe, Rule, recipe_named
from degarble.harness.vllm import proof
from degarble.harness.vllm.verify_weights import SAMPLES, Readback, sampled
from degarble.suites.checkpoint.audit.loader.loader_cases import inventory_of
from degarble.suites.checkpoint.structure_cases import V4, V32, write
from degarble.suites.hang_guard import HANG_SECONDS
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from degarble.harness.checkpoint.audit.loader.maps import LoaderMap
    from degarble.harness.checkpoint.audit.structure.inventory import Inventory


# --------------------------------------------------------------------------------------------------
# The start's proof: formats as stored, errors refuse, and the stream is what was proven.

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
        parameter = inventory.by_name["layers.0.attn.wkv"]
        other = parameter._replace(check=replace(parameter.check, weight="BF16"))
        inventory.stored[inventory.stored.index(parameter)] = other
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
    start_proof = proof.prove_start(tmp_path / "c", (2, 2, 1))
    assert start_proof.summary.startswith("2 ranks, ")
    assert start_proof.summary.endswith(" 0 elements unwritten")


# --------------------------------------------------------------------------------------------------
# Shards of experts that the loader put elsewhere are named; where they belong, nothing is.

EXPERTS, WIDTH, HIDDEN = 3, 8, 32


def stored() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(7)
    shapes = {"w1": (WIDTH, HIDDEN), "w3": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH)}
    return {
        f"layers.1.ffn.experts.{n}.{part}.{kind}": torch.randint(
            0, 256, shape, generator=made, dtype=torch.uint8
        )
        for n in range(EXPERTS)
        for part, shape in shapes.items()
        for kind in ("weight", "weight_scale")
    }


def loaded(tensors: dict[str, torch.Tensor], rank: int = 0, ranks: int = 1) -> Any:
    """Fused parameters as vLLM's loader leaves them."""

    def of(n: int, part: str, kind: str) -> torch.Tensor:
        whole = tensors[f"layers.1.ffn.experts.{n}.{part}.{kind}"]
        return whole.chunk(ranks, dim=1 if part == "w2" else 0)[rank]

    fused = {}
    for kind in ("weight", "weight_scale"):
        both = [torch.cat((of(n, "w1", kind), of(n, "w3", kind))) for n in range(EXPERTS)]
        fused[f"w13_{kind}"] = torch.nn.Parameter(torch.stack(both), requires_grad=False)
        down = torch.stack([of(n, "w2", kind) for n in range(EXPERTS)])
        fused[f"w2_{kind}"] = torch.nn.Parameter(down, requires_grad=False)
    return SimpleNamespace(**fused)


HELD = [(n, n) for n in range(EXPERTS)]


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_what_is_where_it_belongs_passes(rank: int, ranks: int) -> None:
    tensors, readback = stored(), Readback(rank, ranks)
    assert list(readback.watched(tensors.items())) == list(tensors.items())
    assert readback.require(1, loaded(tensors, rank, ranks), HELD) == 18
    assert readback.require(2, loaded(tensors, rank, ranks), HELD) == 0  # nobody handed any


@pytest.mark.parametrize("plant", ["w2 of two experts", "gate and up", "another rank's columns"])
def test_exchanged_shards_are_named(plant: str) -> None:
    tensors, readback = stored(), Readback(0, 2)
    list(readback.watched(tensors.items()))
    experts = loaded(tensors, 0, 2)
    if plant == "w2 of two experts":
        experts.w2_weight.data[[0, 2]] = experts.w2_weight.data[[2, 0]]
        words = r"2 of 18 .*layers\.1\.ffn\.experts\.0\.w2\.weight, .*experts\.2\.w2\.weight"
    elif plant == "gate and up":
        experts.w13_weight_scale.data[1] = experts.w13_weight_scale.data[1].roll(WIDTH // 2, 0)
        words = r"experts\.1\.w1\.weight_scale, .*experts\.1\.w3\.weight_scale"
    else:
        experts = loaded(tensors, 1, 2)
        words = "18 of 18"
    with pytest.raises(LayoutMismatch, match=words):
        readback.require(1, experts, HELD)


def test_samples_reach_the_end_of_a_large_matrix() -> None:
    matrix = torch.zeros(1024, 1024, dtype=torch.uint8)
    changed = matrix.clone()
    changed[-1, -1] = 1
    assert not torch.equal(sampled(matrix), sampled(changed))
    assert SAMPLES // 2 < len(sampled(matrix)) < 2 * SAMPLES


# --------------------------------------------------------------------------------------------------
# vLLM's own loaders take what `convert` and `quantise` write for them: each name, each parameter.
#
# Real extents matter here (blocks of 128), so the sources are synthetic; the trained small models
# are loaded by the campaign suites/campaigns/consumers.py.

CONFIGS: dict[str, Any] = {
    "v4": replace(V4, head_dim=512, index_head_dim=128, num_nextn_predict_layers=0),
    "v32": replace(V32, num_nextn_predict_layers=0),
}
# (family, layout of the source): what it is converted to; an empty word: as it is.
READ = {
    ("v4", "bf16"): ("", "fp8-block", "fused-compressor"),
    ("v4", "official"): ("", "bf16", "fp8-block", "fused-compressor"),
    ("v4", "nvfp4-experts"): ("", "bf16", "fp8-block", "fused-compressor"),
    ("v4", "nvfp4-full"): ("bf16", "fp8-block"),
    ("v32", "bf16"): ("", "fp8-block", "nvfp4"),
    ("v32", "official"): ("", "bf16", "fp8-block"),
    ("v32", "nvfp4-experts"): ("bf16", "fp8-block"),
    ("v32", "nvfp4-full"): ("", "bf16", "fp8-block"),
}
_NO_COMPRESSORS = (Rule("*.compressor.*", "BF16"),)


@pytest.mark.vllm
def test_vllm_reads_what_is_written_for_it(tmp_path: Path) -> None:
    folders = []
    for (family, layout), targets in READ.items():
        source = tmp_path / f"{family}-{layout}"
        write_checkpoint(source, Synthetic(CONFIGS[family], layout, seed=5))
        for to in targets:
            folders.append(tmp_path / f"{family}-{layout}-{to}" if to else source)
            if to:
                convert(source, folders[-1], to)
                assert prove(source, folders[-1]).holds
    told = installed_loaders_loaded(tmp_path / "out", folders)
    assert {each["checkpoint"] for each in told} == {folder.name for folder in folders}
    assert [each for each in told if "error" in each or each["missing"] or each["unexpected"]] == []
    assert all(each["parameters"] > 30 for each in told)


@pytest.mark.vllm
def test_compressors_alone_keep_vllm_from_v4_in_nvfp4(tmp_path: Path) -> None:
    """vLLM 0.33 builds them unquantised: models/deepseek_v4/compressor.py, quant_config=None."""
    config = CONFIGS["v4"]
    rules = _NO_COMPRESSORS + recipe_named("nvfp4-full", config).rules
    released = replace(layout_named("official", config), recipe="nvfp4-full")
    full, without = tmp_path / "full", tmp_path / "without"
    write_checkpoint(full, Synthetic(config, released, seed=5))
    write_checkpoint(without, Synthetic(config, released, Recipe("without", rules), seed=5))
    stopped, read = installed_loaders_loaded(tmp_path / "out", [full, without])
    assert "compressor.fused_wkv_wgate" in stopped["error"]
    assert (read["missing"], read["unexpected"]) == ([], [])


@pytest.mark.vllm
def test_nvfp4_that_is_not_declared_to_vllm_does_not_load_in_it(tmp_path: Path) -> None:
    """Where one of these loads, harness/checkpoint/view/consumers.py may name vLLM for it."""
    experts, beside_fp8, lossless = (tmp_path / name for name in ("experts", "fp8", "lossless"))
    write_checkpoint(experts, Synthetic(CONFIGS["v32"], "nvfp4-experts", seed=5))
    write_checkpoint(tmp_path / "v32", Synthetic(CONFIGS["v32"], "official", seed=5))
    write_checkpoint(tmp_path / "v4", Synthetic(CONFIGS["v4"], "official", seed=5))
    convert(tmp_path / "v32", beside_fp8, "nvfp4")
    convert(tmp_path / "v4", lossless, "nvfp4-lossless")
    told = installed_loaders_loaded(tmp_path / "out", [experts, beside_fp8, lossless])
    assert [each["checkpoint"] for each in told if "error" in each] == [
        "experts",
        "fp8",
        "lossless",
    ]
    assert "size of tensor" in told[2]["error"]


def installed_loaders_loaded(out: Path, folders: list[Path]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "degarble.suites.vllm.loading_model", str(out)]
    done = subprocess.run(
        [*command, *map(str, folders)],
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_SECONDS,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check')]
