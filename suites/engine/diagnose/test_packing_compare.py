from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from degarble.harness.engine.diagnose.packing_compare import MIDPOINT_ULPS, compare_parts
from degarble.harness.engine.faults.tensor_faults import TensorPart
from degarble.harness.formats.dialects import MODELOPT
from degarble.harness.formats.number_formats import FP8_128X128_F32, MXFP8, NVFP4
from degarble.harness.formats.quantise import quantise
from degarble.suites.engine.weights import heavy_tailed

# One block whose largest value 6 and tensor amax 6 * 448 * 2^-8 make both scales powers of two, so
# that a value of the row is its own scaled value times SCALE.
SCALE = 2.0**-3


def _row(*scaled: float) -> torch.Tensor:
    """A row of two blocks: the first pins the scales, the second holds the values in question."""
    pin = torch.zeros(16)
    pin[0] = 6.0 * 448 * SCALE
    values = torch.zeros(16)
    values[0] = 6.0 * SCALE
    values[1 : 1 + len(scaled)] = torch.tensor(scaled) * SCALE
    return torch.cat([pin, values])[None]


@pytest.mark.parametrize(
    ("ulps", "agrees"), [(0, True), (1, True), (4, True), (5, False), (64, False)]
)
def test_the_other_neighbour_is_excused_on_the_midpoint_only(ulps: int, agrees: bool) -> None:
    """1.25 lies between codes 2 (1.0) and 3 (1.5)."""
    scaled = 1.25 * (1 + ulps * 2.0**-23)
    reference = _row(scaled)
    twin = quantise(reference, NVFP4, MODELOPT)
    own = int(twin.element_codes()[0, 17])
    assert own in (2, 3)
    codes = twin.element_codes().clone()
    codes[0, 17] = 5 - own
    suspect = replace(twin, codes=codes[:, 0::2] | codes[:, 1::2] << 4)
    found = compare_parts(suspect, twin, reference)
    assert (found == ()) is agrees
    assert MIDPOINT_ULPS == 4


def test_a_step_further_is_never_excused() -> None:
    reference = _row(1.25)
    twin = quantise(reference, NVFP4, MODELOPT)
    codes = twin.codes.clone()
    codes[0, 8] = (codes[0, 8] & 0x0F) | 0x40  # 2.0 where 1.0 or 1.5 would be right
    (found,) = compare_parts(replace(twin, codes=codes), twin, reference)
    assert found.part is TensorPart.CODES
    assert (found.differing, found.total, found.where) == (1, 32, "0 to 0 (all)")
    assert found.sentence.startswith("1 of 32 codes differ, in rows 0 to 0 (all); first at [0, 17]")
    assert "0x4 (2), expected 0x2 (1)" in found.sentence


def test_the_sign_of_zero_is_no_difference() -> None:
    reference = _row(0.0)
    twin = quantise(reference, NVFP4, MODELOPT)
    codes = twin.codes.clone()
    codes[0, 8] |= 0x80
    assert compare_parts(replace(twin, codes=codes), twin, reference) == ()


@pytest.mark.parametrize(("bits", "agrees"), [(0, True), (2, True), (-2, True), (3, False)])
def test_tensor_scales_may_be_two_roundings_apart(bits: int, agrees: bool, seed: int) -> None:
    reference = heavy_tailed(4, 32, seed)
    twin = quantise(reference, NVFP4)
    assert twin.tensor_scale is not None
    moved = (twin.tensor_scale.view(torch.int32) + bits).view(torch.float32)
    found = compare_parts(replace(twin, tensor_scale=moved), twin, reference)
    assert (found == ()) is agrees


def test_a_difference_says_where_and_how_much(seed: int) -> None:
    reference = heavy_tailed(8, 64, seed)
    twin = quantise(reference, NVFP4)
    scales = twin.block_scale.clone()
    scales[3, 1] ^= 0x08
    scales[5, 2] ^= 0x7F
    (found,) = compare_parts(replace(twin, block_scale=scales), twin, reference)
    assert found.part is TensorPart.BLOCK_SCALE
    assert found.rows.nonzero().flatten().tolist() == [3, 5]
    assert found.sentence.startswith(
        "2 of 32 block scales differ, in rows 2 between 3 and 5; first at [3, 1]: 0x"
    )


def test_float_scales_and_unpacked_codes_are_compared_as_well(seed: int) -> None:
    reference = heavy_tailed(130, 256, seed)
    for fmt in (FP8_128X128_F32, MXFP8):
        twin = quantise(reference, fmt)
        assert compare_parts(twin, twin, reference) == ()
        codes = twin.codes.clone()
        codes[129, 7] ^= 0x80 if int(codes[129, 7]) & 0x7F else 0x30
        scales = twin.block_scale.clone()
        scales[1, 1] = 100
        found = compare_parts(replace(twin, codes=codes, block_scale=scales), twin, reference)
        assert [difference.part for difference in found] == [
            TensorPart.CODES,
            TensorPart.BLOCK_SCALE,
        ]
        rows = found[1].rows.nonzero().flatten().tolist()
        assert rows == ([128, 129] if fmt is FP8_128X128_F32 else [1])
