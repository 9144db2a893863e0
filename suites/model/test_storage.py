"""What a format makes of a matrix on disk: parts, extents, names, and cuts through scales."""

from __future__ import annotations

import pytest

from degarble.harness.base.errors import LayoutMismatch, ShapeMismatch, UnknownName
from degarble.harness.model.config.config import V4_FLASH, V4_PRO, small_v4
from degarble.harness.model.parameters import parameter_named
from degarble.harness.model.recipes import UNQUANTISED, Formats
from degarble.harness.model.tensors import SUFFIXES, PartKind, parts_of, suffixes_named
from degarble.harness.model.types import Box, Dtype

NVFP4 = Formats("NVFP4", "NVFP4")
MXFP4 = Formats("MXFP4", "FP8_1X128_UE8M0")
FP8 = Formats("FP8_128X128_UE8M0", "FP8_1X128_UE8M0")
W1, W2 = "layers.5.ffn.experts.7.w1", "layers.5.ffn.experts.7.w2"


@pytest.mark.parametrize(
    ("config", "name", "formats", "extents"),
    [
        # deepseek-ai/DeepSeek-V4-Pro shard headers.
        (V4_PRO, W1, MXFP4, [(3072, 3584), (3072, 224)]),
        (V4_PRO, W2, MXFP4, [(7168, 1536), (7168, 96)]),
        (V4_PRO, "layers.5.attn.wq_b", FP8, [(65536, 1536), (512, 12)]),
        (V4_PRO, "layers.5.attn.wo_a", FP8, [(16384, 4096), (128, 32)]),
        (V4_PRO, "layers.4.attn.indexer.wq_b", FP8, [(8192, 1536), (64, 12)]),
        # nvidia/DeepSeek-V4-Pro-NVFP4 and -Flash-NVFP4.
        (V4_PRO, W1, NVFP4, [(3072, 3584), (3072, 448), (), ()]),
        (V4_PRO, W2, NVFP4, [(7168, 1536), (7168, 192), (), ()]),
        (V4_FLASH, W1, NVFP4, [(2048, 2048), (2048, 256), (), ()]),
        (V4_FLASH, W2, NVFP4, [(4096, 1024), (4096, 128), (), ()]),
    ],
)
def test_extents_of_published_tensors(
    config: object, name: str, formats: Formats, extents: list[tuple[int, ...]]
) -> None:
    parts = parts_of(parameter_named(config, name), formats)  # type: ignore[arg-type]
    assert [part.shape for part in parts] == extents


def test_what_is_no_linear_stays_as_it_is() -> None:
    norm = parameter_named(V4_PRO, "layers.0.attn.q_norm")
    sink = parameter_named(V4_PRO, "layers.0.attn.attn_sink")
    assert [(p.part, p.dtype) for p in parts_of(norm, NVFP4)] == [(PartKind.VALUE, Dtype.BF16)]
    assert [(p.part, p.dtype) for p in parts_of(sink, NVFP4)] == [(PartKind.VALUE, Dtype.F32)]


def test_a_weight_alone_has_no_input_scale() -> None:
    linear = parameter_named(V4_PRO, W1)
    parts = [part.part for part in parts_of(linear, Formats("NVFP4", "BF16"))]
    assert parts == [PartKind.CODES, PartKind.BLOCK_SCALE, PartKind.TENSOR_SCALE]


def test_fp8_rounds_up_and_fp4_refuses() -> None:
    config = small_v4(hidden_size=200, q_lora_rank=136)
    linear = parameter_named(config, "layers.0.attn.wq_a")
    assert [part.shape for part in parts_of(linear, FP8)] == [(136, 200), (2, 2)]
    with pytest.raises(ShapeMismatch, match="K for NVFP4 = 200"):
        parts_of(linear, NVFP4)


def test_a_cut_follows_into_every_part() -> None:
    linear = parameter_named(V4_PRO, W2)  # [7168, 3072]: rank 1 of 8 along K
    box = Box(((0, 7168), (384, 768)))
    boxes = {part.part: part.box_of(box, W2).ranges for part in parts_of(linear, NVFP4)}
    assert boxes == {
        PartKind.CODES: ((0, 7168), (192, 384)),
        PartKind.BLOCK_SCALE: ((0, 7168), (24, 48)),
        PartKind.TENSOR_SCALE: (),
        PartKind.INPUT_SCALE: (),
    }


@pytest.mark.parametrize(
    ("formats", "start", "stop"), [(NVFP4, 8, 24), (NVFP4, 0, 24), (MXFP4, 16, 48), (FP8, 64, 192)]
)
def test_a_cut_through_a_scale_is_refused(formats: Formats, start: int, stop: int) -> None:
    linear = parameter_named(V4_PRO, W2)
    scale = parts_of(linear, formats)[1]
    with pytest.raises(ShapeMismatch, match="a cut at a multiple of"):
        scale.box_of(Box(((0, 7168), (start, stop))), W2)


def test_the_last_block_may_be_short() -> None:
    linear = parameter_named(small_v4(hidden_size=200), "layers.0.attn.wq_a")
    scale = parts_of(linear, FP8)[1]
    assert scale.box_of(Box(((0, 128), (128, 200))), "wq_a").ranges == ((0, 1), (1, 2))


@pytest.mark.parametrize(
    ("table", "part", "weight", "suffix"),
    [
        ("deepseek", PartKind.BLOCK_SCALE, "FP8_128X128_UE8M0", ".scale"),
        ("deepseek", PartKind.BLOCK_SCALE, "MXFP4", ".scale"),
        ("deepseek", PartKind.BLOCK_SCALE, "NVFP4", ".weight_scale"),
        ("deepseek", PartKind.TENSOR_SCALE, "NVFP4", ".weight_scale_2"),
        ("huggingface", PartKind.BLOCK_SCALE, "FP8_128X128_F32", ".weight_scale_inv"),
        ("vllm", PartKind.BLOCK_SCALE, "MXFP4", ".weight_scale"),
        ("vllm", PartKind.BLOCK_SCALE, "FP8_128X128_UE8M0", ".weight_scale_inv"),
        ("compressed-tensors", PartKind.CODES, "NVFP4", ".weight_packed"),
        ("compressed-tensors", PartKind.INPUT_SCALE, "NVFP4", ".input_global_scale"),
        ("huggingface", PartKind.VALUE, "BF16", ".weight"),
    ],
)
def test_suffixes(table: str, part: PartKind, weight: str, suffix: str) -> None:
    assert suffixes_named(table).suffix(part, weight) == suffix


def test_a_part_without_a_name_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="block_scale of MXFP4 = 'huggingface'"):
        suffixes_named("huggingface").suffix(PartKind.BLOCK_SCALE, "MXFP4")
    with pytest.raises(UnknownName, match="Did you mean vllm"):
        suffixes_named("vlm")


def test_the_same_bytes_are_typed_otherwise() -> None:
    codes, scale = parts_of(parameter_named(V4_PRO, W1), MXFP4)
    typed = {name: (SUFFIXES[name].dtype(codes, "MXFP4"), SUFFIXES[name].dtype(scale, "MXFP4"))
             for name in ("deepseek", "vllm")}  # fmt: skip
    assert typed == {
        "deepseek": (Dtype.I8, Dtype.F8_E8M0),
        "vllm": (Dtype.U8, Dtype.U8),
    }
    assert parts_of(parameter_named(V4_PRO, W1), UNQUANTISED)[0].dtype is Dtype.BF16
