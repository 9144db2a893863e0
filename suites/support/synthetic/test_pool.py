from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.formats.dialects import CANONICAL, COMPRESSED_TENSORS, MODELOPT, Dialect
from degarble.harness.formats.number_formats import MXFP4, NVFP4
from degarble.harness.formats.quantise import quantise
from degarble.suites.support.synthetic.pool import BASE_ROWS, RowPool
from degarble.suites.support.synthetic.statistics import Numbers, Statistics

if TYPE_CHECKING:
    from degarble.harness.formats.number_formats import BlockFormat


def pool(seed: int, columns: int = 256, **changes: float) -> RowPool:
    return RowPool(Numbers(seed), Statistics(**changes), columns)  # type: ignore[arg-type]


def everything(rows: RowPool) -> torch.Tensor:
    return rows.values(torch.arange(rows.rows), 0)


@pytest.mark.parametrize(
    ("fmt", "dialect"),
    [(NVFP4, MODELOPT), (NVFP4, COMPRESSED_TENSORS), (NVFP4, CANONICAL), (MXFP4, CANONICAL)],
)
@pytest.mark.parametrize("exponent", [-15, 0, 3])
def test_picked_rows_are_what_quantising_them_gives(
    fmt: BlockFormat, dialect: Dialect, exponent: int, seed: int
) -> None:
    rows = pool(seed)
    picked = torch.cat([torch.tensor([rows.peak, 9, 9]), torch.arange(3, rows.rows, 17)])
    made = quantise(rows.values(picked, exponent), fmt, dialect)
    pooled = rows.quantised(fmt, dialect)
    assert torch.equal(pooled.codes[picked], made.codes.view(torch.uint8))
    scales, stored = pooled.block_scale[picked], made.block_scale.view(torch.uint8)
    if fmt == MXFP4:
        assert torch.equal(scales + exponent % 256, stored)
    else:
        assert torch.equal(scales, stored)
        assert made.tensor_scale is not None
        assert pooled.tensor_scale is not None
        factor = 2.0**-exponent if dialect is COMPRESSED_TENSORS else 2.0**exponent
        assert made.tensor_scale == pooled.tensor_scale * factor


def test_without_the_peak_the_tensor_scale_would_be_another(seed: int) -> None:
    """Planted fault: a matrix that lacks the pool's largest value is not what quantising gives."""
    rows = pool(seed)
    picked = torch.arange(BASE_ROWS, rows.rows)  # the rows of smaller gains
    made = quantise(rows.values(picked, 0), NVFP4, MODELOPT)
    assert made.tensor_scale is not None
    assert made.tensor_scale != rows.quantised(NVFP4, MODELOPT).tensor_scale


def test_the_peak_is_the_largest(seed: int) -> None:
    rows = pool(seed)
    assert everything(rows)[rows.peak].abs().max() == everything(rows).abs().max()


def test_rows_have_gains_and_channels_have_outliers(seed: int) -> None:
    made = everything(pool(seed, 2048, outlier_share=0.05, outlier_gain=8)).float()
    spread = made[:BASE_ROWS].std() / made[-BASE_ROWS:].std()
    assert spread == pytest.approx(2**3.5, rel=0.01)
    channels = made[:BASE_ROWS].std(0)
    loud = channels > 4 * channels.median()
    assert 60 < int(loud.sum()) < 150
    assert channels[loud].mean() / channels[~loud].mean() == pytest.approx(8, rel=0.1)


def test_tails_are_heavy(seed: int) -> None:
    made = everything(pool(seed, 1024, outlier_share=0.0, row_spread=1)).double().flatten()
    kurtosis = float(((made - made.mean()) / made.std()).pow(4).mean())
    assert kurtosis > 4.5, "a normal distribution has 3, Student's t of 6 degrees has 6"


def test_pools_differ_by_columns_and_seed(seed: int) -> None:
    one, two = everything(pool(seed)), everything(pool(seed + 1))
    assert torch.equal(one, everything(pool(seed)))
    assert not torch.equal(one, two)
    assert not torch.equal(one[:, :128], everything(pool(seed, 128)))
