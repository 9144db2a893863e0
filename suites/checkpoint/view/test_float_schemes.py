"""FP8 with few scales and MXFP8, as exporters store them: every code under every class of scale."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.suites.checkpoint.view.integer_cases import write

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

# Subnormal in BF16 and float32, smallest normal, a power of two, odd ones, large.
SCALES = (2.0**-130, 2.0**-126, 2.0**-9, 0.5, 0.01171875, 1.0, 3.140625, 2.0**60)
CODES = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)


def stored(folder: Path, tensors: dict[str, Tensor]) -> Tensor:
    write(folder, {f"a.{name}": each for name, each in tensors.items()}, None)
    with Checkpoint.open(folder) as checkpoint:
        return checkpoint.weight("a").values(torch.float64).clone()


def every_code(rows: int) -> Tensor:
    """Each row holds all codes that are numbers, in 256 columns."""
    return torch.cat([CODES, CODES[:2]]).expand(rows, -1).contiguous().view(torch.float8_e4m3fn)


def by_gfloat(codes: Tensor, name: str = "format_info_ocp_e4m3") -> Tensor:
    form = getattr(import_module("gfloat.formats"), name)
    octets = codes.view(torch.uint8).numpy()
    return torch.from_numpy(import_module("gfloat").decode_ndarray(form, octets))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["rows", "column", "one", "scalar"])
def test_fp8_by_row_and_by_tensor(tmp_path: Path, dtype: torch.dtype, shape: str) -> None:
    package = import_module("compressed_tensors.compressors.naive_quantized.base")
    stated = import_module("compressed_tensors.quantization")
    scales = torch.tensor(SCALES).to(dtype)
    codes = every_code(len(SCALES))
    for number in range(1 if shape in {"rows", "column"} else len(SCALES)):
        scale = {
            "rows": scales,
            "column": scales[:, None],
            "one": scales[number : number + 1],
            "scalar": scales[number],
        }[shape]
        found = stored(tmp_path / str(number), {"weight": codes, "weight_scale": scale})
        wide = scale.double().reshape(-1, 1)
        assert torch.equal(found, by_gfloat(codes) * wide)
        if shape in {"column", "one"}:
            strategy = "channel" if shape == "column" else "tensor"
            weights = stated.QuantizationArgs(num_bits=8, type="float", strategy=strategy)
            scheme = stated.QuantizationScheme(targets=["Linear"], weights=weights)
            state = {"weight": codes, "weight_scale": scale}
            theirs = package.FloatQuantizationCompressor.decompress(state, scheme)["weight"]
            assert torch.equal(found.to(theirs.dtype), theirs)


def test_fp8_blocks_with_the_axes_that_modelopt_leaves_in(tmp_path: Path) -> None:
    codes, scales = every_code(192), torch.tensor([[0.5], [3.140625]])
    found = stored(
        tmp_path, {"weight": codes, "weight_scale": scales.expand(2, 2)[:, None, :, None]}
    )
    expected = by_gfloat(codes) * scales.double().repeat_interleave(128, 0)[:192]
    assert torch.equal(found, expected)
    with Checkpoint.open(tmp_path) as checkpoint:
        rows = checkpoint.stored("a").rows(128, 192).values(torch.float64)
    assert torch.equal(rows, expected[128:])


def test_torchao_rows(tmp_path: Path, seed: int) -> None:
    exported = import_module("torchao.prototype.safetensors.safetensors_support")
    torchao = import_module("torchao.quantization")
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(seed))
    tensor: Any = torchao.Float8Tensor.from_hp(weight, granularity=torchao.PerRow())
    flat, _ = exported.flatten_tensor_state_dict({"a.weight": tensor})
    found = stored(tmp_path, {name.removeprefix("a."): each for name, each in flat.items()})
    assert torch.equal(found.float(), tensor.dequantize().float())


def test_mxfp8(tmp_path: Path) -> None:
    """Every byte of a scale over every code, against gfloat; 0xFF is NaN."""
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, 8).contiguous()
    codes = every_code(256)
    found = stored(tmp_path, {"weight": codes, "weight_scale": scales})
    factors = by_gfloat(scales, "format_info_ocp_e8m0")
    expected = by_gfloat(codes) * factors.repeat_interleave(32, 1)
    assert torch.equal(found[:255], expected[:255])
    assert found[255].isnan().all()
    package = import_module("compressed_tensors.compressors.mxfp8.base")
    stated = import_module("compressed_tensors.quantization")
    weights = stated.QuantizationArgs(
        num_bits=8, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
    )
    scheme = stated.QuantizationScheme(targets=["Linear"], weights=weights)
    # Their power of two is rounded to subnormals of BF16 or flushed below 2^-126, so not compared.
    state = {"weight": codes[1:250], "weight_scale": scales[1:250]}
    theirs = package.MXFP8QuantizationCompressor.decompress(state, scheme)["weight"]
    kept = theirs.isfinite() & (found[1:250].abs() >= 2.0**-126)
    assert torch.equal(found[1:250].to(theirs.dtype)[kept], theirs[kept])
    assert kept.double().mean() > 0.9
