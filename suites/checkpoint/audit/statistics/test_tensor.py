"""Statistics in one pass are those of the decoded numbers, whatever the format and the windows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from degarble.harness.checkpoint.audit.statistics import tensor
from degarble.harness.checkpoint.audit.statistics import tensor as scale_statistics
from degarble.harness.checkpoint.audit.statistics import tensor as tensor_statistics
from degarble.harness.checkpoint.audit.statistics.tensor import TensorStatistics, statistics_of
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.formats.dialects import MODELOPT
from degarble.harness.formats.fast.buffers import values_of
from degarble.harness.formats.number_formats import (
    BLOCK_FORMATS,
    E2M1,
    FP8_128X128_F32,
    FP8_128X128_UE8M0,
    MXFP4,
    NVFP4,
)
from degarble.harness.formats.quantise import quantise
from degarble.suites.checkpoint.number_cases import (
    channels,
    generator,
    matrix,
    quantised_parts,
    stored_parts,
    write_modules,
)
from degarble.suites.checkpoint.view.integer_cases import gptq, write

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.formats.number_formats import BlockFormat

FORMATS = (NVFP4, MXFP4, FP8_128X128_UE8M0, FP8_128X128_F32)


def statistics(
    folder: Path, parts: dict[str, Tensor] | Tensor, *, profile: bool = False
) -> TensorStatistics:
    with write_modules(folder, {"m": parts}) as checkpoint:
        return statistics_of(checkpoint.stored("m"), profile=profile)


def decoded(folder: Path) -> Tensor:
    """Values without the tensor scale, in float64."""
    weight = Checkpoint.open(folder).weight("m")
    if weight.tensor_scale is not None:
        weight.tensor_scale = torch.ones(())
    return weight.values(torch.float64)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shape", [(128, 256), (384, 128), (130, 640)], ids=str)
def test_sums_and_extremes_are_those_of_the_values(
    tmp_path: Path, seed: int, fmt: BlockFormat, shape: tuple[int, int]
) -> None:
    values = matrix(seed, *shape)
    values[5] = 0
    values[70:75] = 0
    found = statistics(tmp_path, quantised_parts(values, fmt), profile=True)
    expected = decoded(tmp_path)
    assert (found.elements, found.height) == (expected.numel(), shape[0])
    assert found.amax == float(expected.abs().max())
    assert found.sum_squares == pytest.approx(float(expected.square().sum()), rel=1e-6)
    assert found.zeros == int((expected == 0).sum())
    assert found.zero_rows == 6
    assert found.zero_run == (70, 5)
    assert found.counts.sum() == found.elements
    assert found.not_finite == 0
    sampled = expected[:: max(1, shape[0] // 32)].square().sum(0)
    assert found.columns == pytest.approx(sampled.numpy(), rel=1e-5)
    if fmt.packed:
        assert found.rows == pytest.approx(expected.square().sum(1).numpy(), rel=1e-5)
    assert found.blocks is not None
    rows, columns = fmt.block
    assert found.blocks.scale.count == math.ceil(shape[0] / rows) * math.ceil(shape[1] / columns)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("window", [1 << 23, 24 * 256])
def test_integers_by_group(
    tmp_path: Path,
    seed: int,
    symmetric: bool,
    act_order: bool,
    window: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_statistics, "WINDOW_ELEMENTS", window)
    fmt = BLOCK_FORMATS["INT4_G32" if symmetric else "UINT4_G32"]
    values = matrix(seed, 72, 256)
    values[5] = 0
    made = quantise(values, fmt)
    index = torch.arange(256) // 32
    if act_order:
        index = index[torch.randperm(256, generator=generator(seed))]
    codes = made.element_codes().int()
    zeros = torch.full_like(made.block_scale, 8) if symmetric else made.zero_point
    assert zeros is not None
    codes = codes ^ 8 if symmetric else codes
    scales = made.block_scale.half()
    stated = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
    write(tmp_path, gptq("m", codes, zeros.int(), scales, (4, 0, index)), stated)
    with Checkpoint.open(tmp_path) as checkpoint:
        found = statistics_of(checkpoint.stored("m"), profile=True)
        expected = checkpoint.weight("m").values(torch.float64)
    assert found.amax == float(expected.abs().max())
    assert found.sum_squares == pytest.approx(float(expected.square().sum()), rel=1e-6)
    assert found.zeros == int((expected == 0).sum())
    assert (found.zero_rows, found.zero_run) == (1, (5, 1))
    assert found.counts.sum() == found.elements
    sampled = expected[::2].square().sum(0)
    assert found.columns == pytest.approx(sampled.numpy(), rel=1e-5)
    assert found.rows == pytest.approx(expected.square().sum(1).numpy(), rel=1e-5)
    assert found.blocks is not None
    assert found.blocks.scale.count == 72 * 8


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_windows_change_nothing(
    tmp_path: Path, seed: int, fmt: BlockFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = quantised_parts(matrix(seed, 512, 256), fmt)
    whole = statistics(tmp_path / "a", parts)
    monkeypatch.setattr(tensor_statistics, "WINDOW_ELEMENTS", 128 * 256)
    by_parts = statistics(tmp_path / "b", parts)
    assert by_parts.digest == whole.digest
    assert by_parts.row_digest == whole.row_digest
    assert by_parts.scale_digest == whole.scale_digest
    assert (by_parts.counts == whole.counts).all()
    assert by_parts.sum_squares == pytest.approx(whole.sum_squares, rel=1e-12)
    assert by_parts.blocks is not None
    assert whole.blocks is not None
    assert (by_parts.blocks.tops == whole.blocks.tops).all()
    assert by_parts.blocks.pairing.correlation == pytest.approx(
        whole.blocks.pairing.correlation, rel=1e-9
    )


def test_pairing_of_tall_matrices_is_that_of_evenly_spread_rows(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1,600 rows every third one, wherever windows begin."""
    made = quantise(matrix(seed, 1600, 256), NVFP4, MODELOPT)
    monkeypatch.setattr(tensor_statistics, "WINDOW_ELEMENTS", 100 * 256)
    found = statistics(tmp_path, stored_parts(made))
    codes = values_of(E2M1)[made.element_codes()[::3].numpy()].astype(np.float64)
    wanted = scale_statistics.scale_correlation(
        made.scale_values()[::3].double().numpy(),
        np.square(codes).reshape(len(codes), -1, 16).sum(2),
    )
    assert found.blocks is not None
    assert found.blocks.pairing.freedom == wanted.freedom
    assert found.blocks.pairing.correlation == pytest.approx(wanted.correlation, rel=1e-5)


POWERS = {1, 2, 4, *range(8, 127, 8)}  # E4M3 codes of powers of two


def zero_pair(row: int, block: int) -> bool:
    """Whether the byte that fills a block of the next test is a pair of zeros."""
    return (16 * row + block) & 0x77 == 0


def test_every_pair_of_codes_under_every_scale(tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(8).reshape(16, 128)
    codes = codes.repeat(16, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16)
    parts = {
        "weight": codes,
        "weight_scale": scales.contiguous().view(torch.float8_e4m3fn),
        "weight_scale_2": torch.ones(()),
    }
    found = statistics(tmp_path, parts)
    values = decoded(tmp_path)
    finite = values[values.isfinite()]
    assert found.amax == float(finite.abs().max())
    assert found.sum_squares == pytest.approx(float(finite.square().sum()), rel=1e-6)
    assert found.counts.tolist() == [256 * 16] * 16
    assert found.blocks is not None
    scale = found.blocks.scale
    counted = (scale.not_finite, scale.zero, scale.negative)
    assert counted == (2 * 16, 2 * 16, 126 * 16)
    zero_blocks = {(code, b) for code in range(256) for b in range(16) if zero_pair(code % 16, b)}
    used = [(c, b) for c in range(1, 127) for b in range(16) if (c, b) not in zero_blocks]
    assert scale.subnormal == sum(code < 8 for code, _ in used)
    assert scale.at_largest == sum(code == 126 for code, _ in used)
    assert scale.below_largest == sum(code == 125 for code, _ in used)
    assert scale.powers_of_two == sum(code in POWERS for code, _ in used)
    assert (scale.smallest, scale.largest, scale.distinct) == (2.0**-9, 448.0, 126)
    assert found.blocks.zero_blocks == len(zero_blocks)
    tops = [max(b & 7, (b >> 4) & 7) for b in range(256)]
    per_row = [[tops[16 * r + b] for b in range(16)] for r in range(16)]
    ordinary = [top for code in range(256) if 8 < code < 127 for top in per_row[code % 16]]
    assert found.blocks.tops.tolist() == np.bincount(ordinary, minlength=8).tolist()
    under_zero = [top for code in (0, 128) for top in per_row[code % 16]]
    assert found.blocks.underflown == sum(top > 0 for top in under_zero)


def test_mxfp4_blocks_are_two_words(tmp_path: Path) -> None:
    codes = torch.zeros(16, 32, dtype=torch.uint8)
    codes[:, 3] = 0x07  # the first half of the first block
    codes[:, 30] = 0x50  # the second half of the second block
    scale = torch.full((16, 2), 127, dtype=torch.uint8)
    parts = {"weight": codes.view(torch.int8), "scale": scale.view(torch.float8_e8m0fnu)}
    found = statistics(tmp_path, parts)
    assert found.blocks is not None
    assert found.blocks.tops.tolist() == [0, 0, 0, 0, 0, 16, 0, 16]
    assert found.sum_squares == 16 * (36 + 9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_plain_floats_are_counted_by_kind(tmp_path: Path, seed: int, dtype: torch.dtype) -> None:
    values = matrix(seed, 96, 40).to(dtype)
    values[3, 4], values[5, 6], values[7, 8] = math.nan, math.inf, -math.inf
    values[9] = 0
    found = statistics(tmp_path, values, profile=True)
    finite = values[values.isfinite()].double()
    assert (found.not_finite, found.zeros) == (3, int((finite == 0).sum()))
    assert found.amax == float(finite.abs().max())
    assert found.sum_squares == pytest.approx(float(finite.square().sum()), rel=1e-9)
    assert found.counts.sum() == values.numel()
    assert found.counts[255] == 3
    assert found.zero_run == (9, 1)
    assert found.columns is not None
    assert np.isfinite(found.columns).all()


def test_vectors_scalars_and_integers(tmp_path: Path, seed: int) -> None:
    drawn = torch.randn(37, generator=generator(seed))
    vector = statistics(tmp_path / "v", drawn)
    assert (vector.height, vector.elements) == (1, 37)
    assert vector.sum_squares == pytest.approx(float(drawn.double().square().sum()))
    scalar = statistics(tmp_path / "s", torch.tensor(-2.5))
    assert (scalar.amax, scalar.elements) == (2.5, 1)
    ids = statistics(tmp_path / "i", torch.tensor([[4, -1], [0, 7]]))
    assert (ids.extremes, ids.zeros) == ((-1, 7), 1)
    empty = statistics(tmp_path / "e", torch.zeros(0, 16))
    assert (empty.elements, empty.amax, empty.zero_run) == (0, 0.0, (0, 0))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_digests_distinguish_same_permuted_and_other(
    tmp_path: Path, seed: int, fmt: BlockFormat
) -> None:
    values = matrix(seed, 256, 256)
    order = torch.randperm(128, generator=generator(seed))
    mixed = torch.cat([values[:128][order], values[128:]])
    parts = [quantised_parts(v, fmt) for v in (values, values.clone(), mixed)]
    first, same, permuted = (statistics(tmp_path / str(i), p) for i, p in enumerate(parts))
    assert (same.digest, same.row_digest) == (first.digest, first.row_digest)
    assert permuted.digest != first.digest
    assert permuted.row_digest == first.row_digest
    parts[1]["weight"].view(torch.uint8)[200, 77] ^= 0x10
    changed = statistics(tmp_path / "changed", parts[1])
    assert changed.row_digest != first.row_digest
    assert changed.scale_digest == first.scale_digest


def test_signs_of_neighbours_change_a_digest() -> None:
    data = np.zeros((2, 64), np.uint8)
    data[1, [7, 39]] = 0x80  # top bits of two words of one lane: linear digests lose them
    first, second = tensor.digests_of(data)
    assert first != second


@pytest.mark.parametrize(
    ("flags", "expected"),
    [([], (0, 0)), ([0, 0], (0, 0)), ([1, 1, 0, 1], (0, 2)), ([0, 1, 0, 1, 1], (3, 2))],
)
def test_longest_run(flags: list[int], expected: tuple[int, int]) -> None:
    assert tensor.longest_run(np.array(flags, np.bool_)) == expected


def test_entropy_of_bytes(tmp_path: Path, seed: int) -> None:
    noise = torch.randint(0, 256, (512, 256), dtype=torch.uint8, generator=generator(seed))
    scale = torch.full((512, 32), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    parts = {"weight": noise, "weight_scale": scale, "weight_scale_2": torch.ones(())}
    assert statistics(tmp_path / "noise", parts).byte_entropy > 7.98
    parts["weight"] = torch.full_like(noise, 0x77)
    assert statistics(tmp_path / "same", parts).byte_entropy == 0


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_pairing_vanishes_when_scales_are_not_those_of_the_codes(
    tmp_path: Path, seed: int, fmt: BlockFormat
) -> None:
    shape = (256, 512) if fmt.packed else (2560, 2560)
    parts = quantised_parts(matrix(seed, *shape, channels(seed, shape[1])), fmt)
    right = statistics(tmp_path / "right", parts).blocks
    name = "weight_scale" if fmt == NVFP4 else next(n for n in parts if "scale" in n)
    stored = parts[name]
    bits = stored if stored.dtype is torch.float32 else stored.view(torch.uint8)
    order = torch.randperm(bits.numel(), generator=generator(seed))
    parts[name] = bits.reshape(-1)[order].reshape(bits.shape).view(stored.dtype)
    wrong = statistics(tmp_path / "wrong", parts).blocks
    assert right is not None
    assert wrong is not None
    assert right.pairing.freedom >= 300
    assert right.pairing.correlation < -0.25
    assert abs(wrong.pairing.correlation) < 0.15
