"""Products of integers by group: every way to compute them right agrees, planted faults do not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.engine.diagnose.judge.judge import judge
from degarble.harness.formats.number_formats import BLOCK_FORMATS, WHOLE, TableFormat
from degarble.harness.formats.quantise import QuantisedTensor, dequantise, quantise, spread_blocks
from degarble.harness.report.verdict import Verdict
from degarble.suites.engine.weights import heavy_tailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

FORMATS = [
    fmt
    for fmt in BLOCK_FORMATS.values()
    if isinstance(fmt.element, TableFormat) or WHOLE in fmt.block
]


def decoded_first(x_MK: Tensor, w: QuantisedTensor) -> Tensor:
    """Transformers, and every emulation: weights in BF16, a BF16 product."""
    return (x_MK.float() @ dequantise(w, torch.bfloat16).float().T).bfloat16()


def multiplied_as_stored(x_MK: Tensor, w: QuantisedTensor) -> Tensor:
    """Kernels that scale in float32 before they multiply."""
    return (x_MK.float() @ dequantise(w, torch.float32).T).bfloat16()


def scaled_after_the_sum(x_MK: Tensor, w: QuantisedTensor) -> Tensor:
    """Marlin and Machete by group: integer sums, each scaled; zero points folded into sums of x."""
    bare = replace(w, block_scale=torch.ones_like(w.block_scale))
    scale_NK = spread_blocks(w, w.scale_values())
    wide = w.format.extents(*w.shape)[1]
    total = torch.zeros(len(x_MK), w.shape[0])
    for begin in range(0, w.shape[1], wide):
        columns = slice(begin, begin + wide)
        part = x_MK[:, columns].float() @ dequantise(bare, torch.float32)[:, columns].T
        total += part * scale_NK[:, begin]
    return total.bfloat16()


WAYS = (decoded_first, multiplied_as_stored, scaled_after_the_sum)


def drawn(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(24, 256, generator=generator).bfloat16(), heavy_tailed(64, 256, seed)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_conventions_are_no_faults(
    fmt: object, way: Callable[[Tensor, QuantisedTensor], Tensor], seed: int
) -> None:
    x_MK, weight_NK = drawn(seed)
    w = quantise(weight_NK, fmt)  # type: ignore[arg-type]
    kernel = judge("gemm", {"x": x_MK}, w, way(x_MK, w))
    assert kernel.verdict is Verdict.AGREES, str(kernel)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(
            name, way, id=f"{name}-{way.__name__}", marks=pytest.mark.slow if n + m else ()
        )
        for n, name in enumerate(("UINT4_G128", "UINT4_G32", "UINT8_G64"))
        for m, way in enumerate(WAYS)
    ],
)
def test_a_zero_point_off_by_one_differs(
    name: str, way: Callable[[Tensor, QuantisedTensor], Tensor], seed: int
) -> None:
    x_MK, weight_NK = drawn(seed)
    w = quantise(weight_NK, BLOCK_FORMATS[name])
    assert w.zero_point is not None
    wrong = replace(w, zero_point=w.zero_point - 1)
    kernel = judge("gemm", {"x": x_MK}, w, way(x_MK, wrong))
    assert kernel.verdict is Verdict.DIFFERS, str(kernel)
