"""Quick decoding of rows: the same bits as the definition, for every format a source may have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.checkpoint.transform.source import row_values
from degarble.harness.formats.dialects import CANONICAL, MODELOPT
from degarble.harness.formats.number_formats import FP8_128X128_F32, FP8_128X128_UE8M0, MXFP4, NVFP4
from degarble.harness.formats.quantise import dequantise_definition, quantise
from degarble.harness.formats.weight import Weight

if TYPE_CHECKING:
    from degarble.harness.formats.number_formats import BlockFormat


@pytest.mark.parametrize(
    "fmt", [MXFP4, FP8_128X128_UE8M0, FP8_128X128_F32, NVFP4], ids=lambda fmt: fmt.name
)
def test_rows_are_the_definition(seed: int, fmt: BlockFormat) -> None:
    generator = torch.Generator().manual_seed(seed % 2**63)
    values = torch.randn(200, 320, generator=generator) * torch.arange(1, 201)[:, None]
    made = quantise(values, fmt, MODELOPT if fmt == NVFP4 else CANONICAL)
    expected = dequantise_definition(made, torch.float32)
    found = row_values(Weight.of(made))
    assert found.dtype is torch.float32
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    made.block_scale.view(torch.uint8).reshape(-1)[0] ^= 1  # the planted fault
    assert not torch.equal(row_values(Weight.of(made)), expected)


def test_every_mxfp4_number(seed: int) -> None:
    del seed
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(255, 32, generator=generator)
    made = quantise(values, MXFP4)
    made.block_scale[:, 0] = torch.arange(255).byte()  # all scales but NaN
    made.codes[:] = torch.arange(16).byte() * 17
    found = row_values(Weight.of(made))
    expected = dequantise_definition(made, torch.float32)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_plain_values_keep_their_dtype_where_that_is_exact() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        value = torch.ones(2, 16, dtype=dtype)
        assert row_values(Weight(value=value)) is value
    assert row_values(Weight(value=torch.ones(2, 16).half())).dtype is torch.float32
