"""One tensor into one slot: cuts, extents, types and identities, one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from degarble.harness.checkpoint.audit.loader.findings import (
    NO_SLOT,
    fits,
    judge_dtype,
    judge_write,
    piece,
)
from degarble.harness.checkpoint.audit.loader.maps import Split
from degarble.harness.checkpoint.audit.loader.sources import SourceTensor
from degarble.harness.checkpoint.audit.loader.targets import ExpectedContent, Member, cover
from degarble.harness.model.parameters import parameter_named
from degarble.harness.model.storage import Part
from degarble.harness.model.types import Box
from degarble.suites.checkpoint.structure_cases import V4

if TYPE_CHECKING:
    from degarble.harness.model.parameters import Parameter


@given(
    st.integers(0, 300), st.integers(1, 9), st.integers(1, 130), st.sampled_from([(), (3,), (2, 5)])
)
def test_pieces_tile_a_tensor(
    extent: int, ranks: int, multiple: int, rest: tuple[int, ...]
) -> None:
    shape = (*rest, extent)
    split = Split("x", len(rest), multiple)
    pieces = tuple(piece(shape, split, ranks, rank) for rank in range(ranks))
    assert cover(shape, pieces) == ((), ())
    inner = [each.ranges[len(rest)][0] for each in pieces if each.count]
    assert all(begin % multiple == 0 for begin in inner)


def test_what_has_no_such_dimension_is_repeated() -> None:
    for split in (None, Split("x", 1), Split("x", 2)):
        assert piece((8,), split, 4, 3) == Box.whole((8,))
    assert piece((), Split("x", 0), 4, 3) == Box(())


@pytest.mark.parametrize(
    ("taken", "slot", "expected"),
    [
        ((4, 2), (4, 2), True),
        ((4, 2), (1, 4, 2), True),  # an expert's rows in a stack
        ((4, 2), (2, 4, 2), False),
        ((4, 2), (2, 4), False),
        ((), (1,), True),
        ((), (1, 1), True),
        ((), (2,), False),
        ((1,), (), True),
        ((1, 1), (1,), True),
        ((2,), (), False),
        ((4, 1), (4,), False),
    ],
)
def test_pieces_fit_slots_of_their_extents(
    taken: tuple[int, ...], slot: tuple[int, ...], expected: bool
) -> None:
    assert fits(Box.whole(taken), Box.whole(slot)) is expected


def parameter(name: str) -> Parameter:
    return parameter_named(V4, name)


def source(name: str, part: Part, dtype: str, shape: tuple[int, ...]) -> SourceTensor:
    return SourceTensor(f"{name}.x", dtype, shape, parameter(name), part)


WQ_B = "layers.1.attn.wq_b"
E1 = "layers.1.ffn.experts.1"
INPUT_SCALE = "loader.input_scale_in_weight"
CODES = (Part.CODES, "F8_E4M3", (8, 4))


def rule(
    given: SourceTensor, wanted: str, part: Part, dtype: str, box: Box | None = None
) -> str | None:
    """Judge the write of a whole tensor to a slot of its own extents."""
    whole = Box.whole(given.shape)
    truth = ExpectedContent(parameter(wanted), part, box or whole)
    wrong = judge_write(given, whole, dtype, Member(whole), truth)
    return None if wrong is None else wrong.rule.id


def test_what_belongs_there_is_right() -> None:
    assert rule(source(WQ_B, *CODES), WQ_B, Part.CODES, "F8_E4M3") is None
    assert rule(source(WQ_B, *CODES)._replace(parameter=None), WQ_B, Part.CODES, "F8_E4M3") is None


@pytest.mark.parametrize(
    ("mine", "part", "wanted", "wanted_part", "expected"),
    [
        (f"{E1}.w1", Part.CODES, f"{E1}.w3", Part.CODES, "loader.swapped_partners"),
        (f"{E1}.w1", Part.CODES, f"{E1}.w2", Part.CODES, "loader.wrong_parameter"),
        (f"{E1}.w1", Part.CODES, "layers.1.ffn.experts.2.w1", Part.CODES, "loader.wrong_parameter"),
        (WQ_B, Part.CODES, "layers.2.attn.wq_b", Part.CODES, "loader.wrong_parameter"),
        (f"{E1}.w1", Part.TENSOR_SCALE, f"{E1}.w1", Part.BLOCK_SCALE, "loader.wrong_part"),
        (
            f"{E1}.w1",
            Part.INPUT_SCALE,
            f"{E1}.w1",
            Part.TENSOR_SCALE,
            INPUT_SCALE,
        ),
        (
            f"{E1}.w1",
            Part.INPUT_SCALE,
            f"{E1}.w2",
            Part.TENSOR_SCALE,
            INPUT_SCALE,
        ),
        (f"{E1}.w1", Part.INPUT_SCALE, f"{E1}.w2", Part.INPUT_SCALE, "loader.wrong_parameter"),
        (
            "layers.1.attn.compressor.wkv",
            Part.VALUE,
            "layers.1.attn.indexer.compressor.wkv",
            Part.VALUE,
            "loader.prefix",
        ),
        (
            "layers.1.attn.indexer.compressor.wgate",
            Part.VALUE,
            "layers.1.attn.compressor.wgate",
            Part.VALUE,
            "loader.prefix",
        ),
    ],
)
def test_what_belongs_elsewhere_is_told(
    mine: str, part: Part, wanted: str, wanted_part: Part, expected: str
) -> None:
    assert rule(source(mine, part, "F32", ()), wanted, wanted_part, "F32") == expected


def test_wrong_rows_are_told_although_the_shape_fits() -> None:
    given = source(WQ_B, Part.CODES, "F8_E4M3", (4, 4))
    other = Box(((4, 8), (0, 4)))
    assert rule(given, WQ_B, Part.CODES, "F8_E4M3", other) == "loader.wrong_rows"


@pytest.mark.parametrize(
    ("stored", "built", "part", "expected", "written"),
    [
        ("F8_E8M0", "U8", Part.BLOCK_SCALE, None, True),
        ("I8", "U8", Part.CODES, None, True),
        ("I64", "I32", Part.VALUE, None, True),
        ("BF16", "F32", Part.VALUE, None, True),
        ("F16", "F32", Part.VALUE, None, True),
        ("F32", "BF16", Part.VALUE, "loader.narrowed", True),
        ("F16", "BF16", Part.VALUE, "loader.narrowed", True),
        ("BF16", "F16", Part.VALUE, "loader.narrowed", True),
        ("F32", "BF16", Part.TENSOR_SCALE, "loader.narrowed", True),
        ("F8_E4M3", "BF16", Part.CODES, "loader.dtype", False),
        ("U8", "BF16", Part.CODES, "loader.dtype", False),
        ("F8_E4M3", "U8", Part.CODES, "loader.dtype", False),
        ("F8_E4M3", "F32", Part.BLOCK_SCALE, "loader.scale_dtype", False),
        ("F8_E8M0", "F32", Part.BLOCK_SCALE, "loader.scale_dtype", False),
        ("F32", "F8_E8M0", Part.BLOCK_SCALE, "loader.scale_dtype", False),
    ],
)
def test_types_that_cannot_be_copied_are_told(
    stored: str, built: str, part: Part, expected: str | None, written: bool
) -> None:
    wrong = judge_dtype(source(WQ_B, part, stored, (4, 4)), built, None)
    if expected is None:
        assert wrong is None
    else:
        assert wrong is not None
        assert (wrong.rule.id, wrong.written) == (expected, written)
        assert stored in wrong.told
        assert built in wrong.told


def test_a_slot_that_is_not_there_takes_nothing() -> None:
    given = source(WQ_B, *CODES)
    wrong = judge_write(given, Box.whole(given.shape), "F8_E4M3", NO_SLOT, None)
    assert wrong is not None
    assert (wrong.rule.id, wrong.written) == ("loader.shape", False)


def test_extents_are_told_and_so_is_the_rank_of_a_scale() -> None:
    slot = Member(Box.whole((8, 4)))
    for part, shape, expected in (
        (Part.CODES, (2, 4), "loader.shape"),
        (Part.BLOCK_SCALE, (2, 4), "loader.shape"),
        (Part.BLOCK_SCALE, (8,), "loader.scale_rank"),
        (Part.BLOCK_SCALE, (), "loader.scale_rank"),
    ):
        given = source(WQ_B, part, "F32", shape)
        wrong = judge_write(given, Box.whole(shape), "F32", slot, None)
        assert wrong is not None
        assert (wrong.rule.id, wrong.written) == (expected, False)
        assert str(list(shape)) in wrong.told
        assert "[8, 4]" in wrong.told


def test_of_two_wrongs_the_tensor_itself_is_told_first() -> None:
    given = source(f"{E1}.w1", Part.CODES, "U8", (2, 4))
    truth = ExpectedContent(parameter(f"{E1}.w3"), Part.CODES, Box.whole((8, 4)))
    wrong = judge_write(given, Box.whole((2, 4)), "BF16", Member(Box.whole((8, 4))), truth)
    assert wrong is not None
    assert wrong.rule.id == "loader.swapped_partners"
    assert not wrong.written  # its type and extents keep it out
