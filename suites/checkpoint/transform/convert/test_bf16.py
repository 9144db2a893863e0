from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.checkpoint.transform import recode
from degarble.harness.checkpoint.transform import source as reading
from degarble.harness.checkpoint.transform.convert.job import convert
from degarble.harness.checkpoint.transform.convert.prove import prove
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.formats.codec import pack_nibbles, unpack_nibbles
from degarble.harness.formats.number_formats import NibbleOrder
from degarble.harness.formats.weight import Weight
from degarble.suites.checkpoint.converting_cases import broken, converted, damage, source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from degarble.harness.checkpoint.view.stored import StoredWeight

MODULE = "layers.0.attn.wq_a"  # renamed: transformers reads released names
HF = "model.layers.0.self_attn.q_a_proj"


@pytest.mark.parametrize(
    "kind", ["official", "nvfp4-full", "nvfp4-experts", "compressed-tensors", "v32", "v32-nvfp4"]
)
def test_every_dialect_is_decoded_in_its_own_direction(kind: str, tmp_path: Path) -> None:
    proof = converted(kind, tmp_path / "out", "bf16")
    assert proof.holds, list(proof.lines())
    with Checkpoint.open(source(kind)) as before, Checkpoint.open(tmp_path / "out") as after:
        assert not after.quantisation
        assert before.names is not None
        for name in before.names.present:
            values = before.stored(name).weight().values(torch.bfloat16)
            assert after.stored(name).format is None
            assert torch.equal(after.stored(name).weight().values(torch.bfloat16), values), name


def test_fp8_and_mxfp4_of_power_of_two_scales_lose_nothing(tmp_path: Path) -> None:
    proof = converted("official", tmp_path / "out", "bf16")
    assert proof.exact == len(proof.tensors)


def test_some_modules_alone(tmp_path: Path) -> None:
    """Origin, part A: fused_wqa_wkv, wo_b, shared experts and compressors, and no other."""
    only = ("*.attn.wq_a", "*.attn.wkv", "*.attn.wo_b", "*shared_experts*", "*.compressor.*")
    proof = converted("nvfp4-full", tmp_path / "out", "bf16", only=only)
    assert proof.holds
    with Checkpoint.open(tmp_path / "out") as after:
        formats = {
            name: after.stored(name).format
            for name in ("layers.0.attn.wo_b", "layers.0.attn.wq_b", "layers.1.ffn.experts.2.w1")
        }
        assert [fmt and fmt.name for fmt in formats.values()] == [None, "NVFP4", "NVFP4"]
        ignored = after.quantisation["config.json"]["ignore"]
    assert "layers.0.attn.wo_b" in ignored
    assert "layers.0.attn.wq_b" not in ignored


def test_input_scales_end_here_and_are_told(tmp_path: Path) -> None:
    proof = converted("nvfp4-full", tmp_path / "out", "bf16")
    assert f"{HF}.input_scale" in proof.left_out
    told = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert sum(told["left_out"].values()) == len(proof.left_out)
    with Checkpoint.open(tmp_path / "out") as after:
        assert not any(name.endswith("input_scale") for name in after.entries)


def _swapped_nibbles(record: Weight) -> Weight:
    assert record.codes is not None
    wrong = pack_nibbles(unpack_nibbles(record.codes), NibbleOrder.HIGH_EVEN)
    return _with(record, codes=wrong)


def _with(record: Weight, **fields: object) -> Weight:
    parts = {
        name: getattr(record, name)
        for name in ("codes", "block_scale", "tensor_scale", "input_scale", "storage")
    }
    return Weight(**(parts | fields))


FAULTS: dict[str, Callable[[Weight], Weight]] = {
    "wrong nibble": _swapped_nibbles,
    "scale inverted": lambda w: _with(w, tensor_scale=w.tensor_scale.reciprocal()),  # type: ignore[union-attr]
    "input scale multiplied in": lambda w: _with(w, tensor_scale=w.tensor_scale * w.input_scale),  # type: ignore[operator]
    "all-ones scale": lambda w: _with(w, block_scale=torch.full_like(w.block_scale, 0x38)),  # type: ignore[arg-type]
    "sign lost": lambda w: _with(w, codes=w.codes & 0x77),  # type: ignore[operator]
    "code 7 read as 4": lambda w: _with(w, codes=_edge(w.codes)),  # type: ignore[arg-type]
}


def _edge(packed: torch.Tensor) -> torch.Tensor:
    codes = unpack_nibbles(packed)
    return pack_nibbles(torch.where(codes & 7 == 7, codes - 1, codes))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_decoder_is_seen(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(weight: StoredWeight) -> Iterator[tuple[int, Weight]]:
        for begin, record in honest(weight):
            yield begin, FAULTS[fault](record) if record.is_quantised else record

    honest = reading.rows_of
    with monkeypatch.context() as planted:
        planted.setattr(recode, "rows_of", wrong)
        convert(source("nvfp4-full"), tmp_path / "out", "bf16", {"only": (MODULE,)})
    assert broken("nvfp4-full", tmp_path / "out") == [MODULE]


def test_one_wrong_element_is_seen_and_placed(tmp_path: Path) -> None:
    converted("nvfp4-full", tmp_path / "out", "bf16")

    def wrong(values: torch.Tensor) -> torch.Tensor:
        values[100, 7] += 1.0
        return values

    damage(tmp_path / "out", f"{MODULE}.weight", wrong)
    (found,) = prove(source("nvfp4-full"), tmp_path / "out").broken
    assert (found.tensor, found.beyond) == (MODULE, 1)
    assert found.worst is not None
    assert found.worst.coordinate == (100, 7)


def test_a_damaged_copy_is_seen(tmp_path: Path) -> None:
    converted("nvfp4-full", tmp_path / "out", "bf16")
    damage(tmp_path / "out", "norm.weight", lambda values: values * 2)
    assert broken("nvfp4-full", tmp_path / "out") == ["norm.weight"]


def test_nothing_to_do_and_unreached_patterns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="nothing"):
        convert(source("bf16"), tmp_path / "out", "bf16")
    with pytest.raises(InvalidArgument, match="patterns that reach a linear"):
        convert(source("official"), tmp_path / "out", "bf16", {"only": ("*.q_proj",)})
    assert not (tmp_path / "out").exists()
