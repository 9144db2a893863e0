"""The definition on a CUDA device returns the bytes of the CPU: every dialect, every format.

Division, reciprocal and conversion are IEEE operations on both, and no constant is a Python number
(torch would divide by one through its reciprocal on CUDA), so anything but equality is a finding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import Refused
from degarble.harness.formats.dialects import DIALECTS
from degarble.harness.formats.number_formats import BLOCK_FORMATS, NVFP4
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.suites.formats.block_cases import edge_cases, implementation, ordinary_cases

if TYPE_CHECKING:
    from degarble.harness.formats.number_formats import BlockFormat

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_on_the_device(name: str, seed: int) -> None:
    for case, values in {**ordinary_cases(seed), **edge_cases()}.items():
        try:
            ours = quantise(values, NVFP4, DIALECTS[name])
        except Refused as refusal:
            with pytest.raises(type(refusal)):
                quantise(values.cuda(), NVFP4, DIALECTS[name])
            continue
        theirs = quantise(values.cuda(), NVFP4, DIALECTS[name])
        assert torch.equal(theirs.codes.cpu(), ours.codes), case
        assert torch.equal(theirs.block_scale.cpu(), ours.block_scale), case
        assert ours.tensor_scale is not None
        assert theirs.tensor_scale is not None
        scales = (ours.tensor_scale, theirs.tensor_scale.cpu())
        assert torch.equal(*(scale.nan_to_num(nan=-1.0) for scale in scales)), case


@pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_format_round_trips(fmt: BlockFormat, dtype: torch.dtype, seed: int) -> None:
    values = torch.randn(256, 1024, generator=torch.Generator().manual_seed(seed))
    with implementation("definition"):
        ours = quantise(values, fmt)
        theirs = quantise(values.cuda(), fmt)
        assert torch.equal(theirs.codes.cpu(), ours.codes)
        assert torch.equal(theirs.block_scale.cpu(), ours.block_scale)
        assert torch.equal(dequantise(theirs, dtype).cpu(), dequantise(ours, dtype))
