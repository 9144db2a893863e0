"""vLLM's parameters: names, stacks, orders of backends, the fused compressor, stated orders."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, LayoutMismatch
from degarble.harness.checkpoint.audit import value_rules as rules_numbers
from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.checkpoint.transform.convert import vllm
from degarble.harness.checkpoint.transform.convert.job import convert, prove
from degarble.harness.checkpoint.transform.convert.vllm_parameters import (
    BACKENDS,
    ExpertArrangement,
    is_arranged,
    stated_backend,
)
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.formats.layouts import AS_STORED, LINEAR
from degarble.suites.checkpoint.converting_cases import V4, broken, converted, damage, source
from degarble.suites.checkpoint.reading_cases import write_shards
from degarble.suites.support.audits import audit_numbers
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.checkpoint.audit.findings import Finding


ATTN = "model.layers.0.attn"
W13 = "model.layers.0.ffn.experts.w13"
ARRANGED = [name for name in BACKENDS if name != "loader"]


@pytest.mark.parametrize(
    "kind",
    ["nvfp4-full", "official", "nvfp4-experts", "bf16", "compressed-tensors", "v32", "v32-nvfp4"],
)
def test_every_source_gets_vllms_names(kind: str, tmp_path: Path) -> None:
    proof = converted(kind, tmp_path / "out", "vllm")
    assert proof.holds, list(proof.lines())
    with Checkpoint.open(tmp_path / "out") as after:
        assert str(after.layout) == "vllm" or kind == "bf16"
        assert after.names is not None
        assert after.names.layout.name == "vllm"


def test_what_is_stacked_and_what_is_decoded(tmp_path: Path) -> None:
    """Origin, part A: q_a + kv, shared gate + up, compressors; wo_a FP8; experts packed."""
    converted("nvfp4-full", tmp_path / "out", "vllm")
    with (
        Checkpoint.open(tmp_path / "out") as after,
        Checkpoint.open(source("nvfp4-full")) as before,
    ):
        fused = after.tensor(f"{ATTN}.fused_wqa_wkv.weight")
        parts = [before.stored(f"layers.0.attn.{name}") for name in ("wq_a", "wkv")]
        expected = torch.cat([part.weight().values(torch.bfloat16) for part in parts])
        assert torch.equal(fused, expected)
        assert after.entry(f"{ATTN}.wo_a.weight").dtype == "F8_E4M3"
        assert after.entry(f"{ATTN}.wo_a.weight_scale_inv").dtype == "F8_E8M0"
        # Fault 7 of the report: scales of linears that are not fused must not be skipped.
        assert after.entry(f"{ATTN}.wo_b.weight").dtype == "BF16"
        assert f"{ATTN}.compressor.fused_wkv_wgate.weight" in after.entries
        assert f"{ATTN}.indexer.compressor.fused_wkv_wgate.weight" in after.entries
        experts, rows, width = V4.n_routed_experts, V4.moe_intermediate_size, V4.hidden_size
        assert after.entry(f"{W13}_weight").shape == (experts, 2 * rows, width // 2)
        assert after.entry(f"{W13}_weight_scale").shape == (experts, 2 * rows, width // 16)
        assert after.entry(f"{W13}_weight_scale_2").shape == (experts, 2)
        assert after.entry(f"{W13}_input_scale").shape == (experts, 2)


def test_partners_that_would_share_a_row_of_scales_are_decoded(tmp_path: Path) -> None:
    """64 rows of wq_a in front of wkv: no whole row of 128, as in the small trained model."""
    narrow = Synthetic(replace(V4, q_lora_rank=64), "nvfp4-experts", seed=11)
    write_checkpoint(tmp_path / "in", narrow, shards=1)
    convert(tmp_path / "in", tmp_path / "out", "vllm")
    assert prove(tmp_path / "in", tmp_path / "out").holds
    converted("nvfp4-experts", tmp_path / "whole", "vllm")
    for folder, dtype in (("out", "BF16"), ("whole", "F8_E4M3")):
        with Checkpoint.open(tmp_path / folder) as after:
            assert after.entry(f"{ATTN}.fused_wqa_wkv.weight").dtype == dtype
            assert after.entry(f"{W13}_weight").dtype == "U8"


@pytest.mark.parametrize("backend", ARRANGED)
@pytest.mark.parametrize("kind", ["nvfp4-full", "nvfp4-experts"])
def test_each_backend_finds_every_expert_again(kind: str, backend: str, tmp_path: Path) -> None:
    proof = converted(kind, tmp_path / "out", "vllm", backend=backend)
    assert proof.holds, list(proof.lines())


def _halves(stack: Tensor) -> Tensor:
    return torch.cat(stack.chunk(2, 1)[::-1], 1)


DAMAGE: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "swapped halves": ("weight", _halves),
    "wrong nibble": ("weight", lambda codes: codes // 16 + codes % 16 * 16),
    "experts mixed up": ("weight", lambda codes: codes.roll(1, 0)),
    "scales of the other half": ("weight_scale", lambda s: _halves(s.view(torch.uint8))),
    "all-ones scale": ("weight_scale", lambda s: torch.full_like(s.view(torch.uint8), 0x38)),
    "input scale multiplied in": ("weight_scale_2", lambda scale: scale * 0.0002),
}


@pytest.mark.parametrize("backend", ["loader", "trtllm"])
@pytest.mark.parametrize("fault", DAMAGE)
def test_damage_is_detected(fault: str, backend: str, tmp_path: Path) -> None:
    converted("nvfp4-full", tmp_path / "out", "vllm", backend=backend)
    suffix, change = DAMAGE[fault]
    damage(tmp_path / "out", f"{W13}_{suffix}", change)
    found = broken("nvfp4-full", tmp_path / "out")
    assert len(found) >= V4.n_routed_experts
    assert all("experts" in name for name in found)


@pytest.mark.parametrize("backend", ARRANGED)
@pytest.mark.parametrize("missing", ["rows", "swizzle"])
def test_a_missing_step_of_the_arrangement_is_detected(
    missing: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leave one step out in the code that writes; the proof has a way back of its own."""
    honest = BACKENDS[backend]
    order = BACKENDS["flashinfer-cutlass"].w13 if honest.w13 == AS_STORED else AS_STORED
    wrong = replace(honest, w13=order) if missing == "rows" else _Unswizzled(**vars(honest))
    with monkeypatch.context() as planted:
        planted.setattr(vllm, "BACKENDS", {backend: wrong})
        convert(source("nvfp4-full"), tmp_path / "out", "vllm", {"backend": backend})
    assert broken("nvfp4-full", tmp_path / "out")


class _Unswizzled(ExpertArrangement):
    """Writes scales of the right extents row by row."""

    def block_scales(self, members: Sequence[Tensor], *, gated: bool) -> Tensor:
        linear = replace(BACKENDS[self.name], scales=LINEAR)
        return linear.block_scales(members, gated=gated)


def test_padding_is_zero_and_cut_off_again() -> None:
    backend = BACKENDS["trtllm"]
    members = [torch.randint(1, 255, (96, 64), dtype=torch.uint8) for _ in range(2)]
    made = backend.codes(members, gated=True)
    assert made.shape == (256, 128), "I from 96 to 128, D from 128 to 256"
    assert int(made.count_nonzero()) == 2 * 96 * 64
    scales = backend.block_scales([torch.ones(96, 8, dtype=torch.uint8)] * 2, gated=True)
    assert scales.shape == (256, 16)
    assert int(scales.sum()) == 2 * 96 * 8


def test_mxfp4_experts_take_no_shuffle(tmp_path: Path) -> None:
    with pytest.raises(DtypeMismatch, match="for backend trtllm"):
        convert(source("official"), tmp_path / "out", "vllm", {"backend": "trtllm"})


def test_different_tensor_scales_of_partners_are_refused(tmp_path: Path) -> None:
    copy = tmp_path / "in"
    copy.mkdir()
    for path in source("nvfp4-full").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    name = "model.layers.0.mlp.experts.1.up_proj.weight_scale_2"
    damage(copy, name, lambda scale: scale * 2)
    with pytest.raises(InvalidArgument, match="kernels use the first for both"):
        convert(copy, tmp_path / "out", "vllm")


def test_a_fused_source_is_refused(tmp_path: Path) -> None:
    convert(source("nvfp4-full"), tmp_path / "vllm", "vllm")
    with pytest.raises(LayoutMismatch, match="one module a linear"):
        convert(tmp_path / "vllm", tmp_path / "out", "bf16")


def test_what_stays_bf16_among_fp8_is_named_fused(tmp_path: Path) -> None:
    """vLLM built FP8 where only the members of a fused parameter were said to stay."""
    converted("bf16", tmp_path / "out", "vllm")
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    for name in ("attn.fused_wqa_wkv", "ffn.shared_experts.gate_up_proj"):
        assert f"model.layers.0.{name}" in stated["modules_to_not_convert"]


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
            expected = torch.cat([part.weight().values(torch.bfloat16) for part in parts])
            assert torch.equal(after.tensor(f"{fused}.weight"), expected)
            gone = [entry.name for part in parts for entry in part.form.parts.values()]
            assert not after.entries.keys() & set(gone)


def test_swapped_halves_are_detected(tmp_path: Path) -> None:
    converted("nvfp4-full", tmp_path / "out", "fused-compressor")
    fused = f"{MAIN}.fused_wkv_wgate"
    damage(tmp_path / "out", f"{fused}.weight", lambda t: torch.cat(t.chunk(2)[::-1]))
    assert broken("nvfp4-full", tmp_path / "out") == [fused]


def test_the_main_compressor_in_place_of_the_indexers_is_detected(tmp_path: Path) -> None:
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


def test_uninitialised_memory_is_detected(tmp_path: Path) -> None:
    """Origin: a loader that skips in silence leaves zeros, or anything."""
    converted("bf16", tmp_path / "out", "fused-compressor")
    name = "layers.0.attn.compressor.fused_wkv_wgate.weight"
    damage(tmp_path / "out", name, torch.zeros_like)
    (proof,) = prove(source("bf16"), tmp_path / "out").broken
    assert proof.beyond > proof.elements * 0.9


# --------------------------------------------------------------------------------------------------
# What conversion.json states about experts, and what the audit of numbers makes of it.

TRTLLM = {"to": "vllm", "options": {"backend": "trtllm"}}


def errors_of(folder: Path) -> tuple[list[Finding], list[Finding]]:
    with Checkpoint.open(folder) as checkpoint:
        findings = audit_numbers(checkpoint).findings
    return findings, [finding for finding in findings if finding.level is Level.ERROR]


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "loader"])
def test_experts_in_a_stated_order_are_no_error(tmp_path: Path, backend: str) -> None:
    convert(source("nvfp4-experts"), tmp_path, "vllm", {"backend": backend})
    findings, errors = errors_of(tmp_path)
    assert errors == []
    (finding,) = [f for f in findings if f.rule == rules_numbers.SCALE_LAYOUT_STATED.id]
    assert "`128x4`, as conversion.json states" in finding.message
    assert finding.evidence["matrices"] == 2 * 3 * 3  # layers, experts, matrices


def test_a_broken_promise_is_an_error(tmp_path: Path) -> None:
    """Swizzled without a word of it, and row-major where a swizzle is stated."""
    convert(source("nvfp4-experts"), tmp_path / "a", "vllm", {"backend": "vllm-cutlass"})
    (tmp_path / "a" / "conversion.json").unlink()
    convert(source("nvfp4-experts"), tmp_path / "b", "vllm", {"backend": "loader"})
    (tmp_path / "b" / "conversion.json").write_text(json.dumps(TRTLLM))
    for name, text in (("a", "is in the order `128x4`"), ("b", "conversion.json states `128x4`")):
        _, errors = errors_of(tmp_path / name)
        assert {error.rule for error in errors} == {rules_numbers.SCALE_LAYOUT.id}
        assert all(text in error.message for error in errors)


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        (json.dumps(TRTLLM), "trtllm"),
        (json.dumps({"to": "vllm", "options": {"backend": "loader"}}), None),
        (json.dumps({"to": "bf16", "options": {}}), None),
        (json.dumps({"to": "vllm", "options": {"backend": ["trtllm"]}}), None),
        (json.dumps({"to": "vllm", "options": {"backend": "nobody's"}}), None),
        ("[]", None),
        ("{", None),
    ],
)
def test_what_cannot_be_read_states_nothing(tmp_path: Path, text: str, backend: str | None) -> None:
    write_shards(tmp_path, [{"a": torch.zeros(4)}])
    with Checkpoint.open(tmp_path) as checkpoint:
        assert stated_backend(checkpoint) is None
        (tmp_path / "conversion.json").write_text(text)
        arrangement = stated_backend(checkpoint)
    assert (arrangement.name if arrangement else None) == backend


def test_stacked_experts_alone_are_arranged() -> None:
    assert is_arranged("model.layers.0.ffn.experts.w13")
    assert is_arranged("model.layers.0.mlp.experts.w2")
    assert not is_arranged("model.layers.0.ffn.shared_experts.gate_up_proj")
