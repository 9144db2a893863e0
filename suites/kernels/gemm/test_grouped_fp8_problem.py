"""Grouped FP8 products as arithmetic: tiles in groups, stages in heads, quotients; refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.kernels.gemm import grouped_fp8_problem as facts
from degarble.kernels.gemm import problem as gemm
from degarble.kernels.gemm.grouped_fp8_problem import GroupedFp8Problem
from degarble.kernels.primitives.fp8_quantise_problem import AMAX_FLOOR, SHARE
from degarble.kernels.runtime.targets import TARGETS

PRO = GroupedFp8Problem(8, 16, 1024, 4096, turned=512, positions=9)


@pytest.mark.parametrize("tokens", [1, 64, 65, 8192])
@pytest.mark.parametrize("shape", [(16, 1024, 4096, 512), (8, 1024, 4096, 512), (4, 128, 256, 128)])
@pytest.mark.parametrize("turned", [True, False])
def test_a_tile_lies_in_one_group_and_under_one_scale(
    tokens: int, shape: tuple[int, int, int, int], turned: bool
) -> None:
    groups, columns, inner, head = shape
    more = (head, 9) if turned else (0, 0)
    problem = GroupedFp8Problem(tokens, groups, columns, inner, "float32", *more)
    form = facts.choose_form(problem)
    tactic, tiles = form.gemm.tactic, facts.tiles_of_group(problem, form)
    assert columns == tiles * tactic.columns
    assert tactic.cluster_columns == 1  # a group's A would be shared with another's
    assert tactic.inner == facts.STEP
    assert facts.STEP % tactic.columns == 0  # of B's rows under one scale
    if turned:
        assert form.steps_of_head * facts.STEP == head
        assert head - 64 >= (form.steps_of_head - 1) * facts.STEP  # what turns: the last stage
    _, all_tiles = gemm.cluster_tiles(problem.gemm, tactic)
    assert all_tiles == groups * tiles


@pytest.mark.parametrize("tokens", [1, 65])
def test_heads_take_twice_the_bytes_of_codes_and_fit(tokens: int) -> None:
    forms = [
        facts.choose_form(replace(PRO, tokens=tokens, turned=head, positions=known)).gemm
        for head, known in ((512, 9), (0, 0))
    ]
    heads, codes = (gemm.bytes_of(form, "a") for form in forms)
    assert heads == 2 * codes
    assert gemm.bytes_of(forms[0], "b") == gemm.bytes_of(forms[1], "b")
    for form in forms:
        held = gemm.footprint(form)
        each = held.total + gemm.ALIGNMENT + gemm.RESERVED_BYTES
        of_processor = TARGETS["sm_90a"].shared_memory_bytes + gemm.RESERVED_BYTES
        assert each * form.tactic.blocks <= of_processor
        kept = gemm.registers_of_roles(form) * form.tactic.blocks
        assert kept <= gemm.REGISTERS_OF_PROCESSOR


def test_numbers_of_a_layer() -> None:
    assert PRO.rows_of_scales == 128
    assert PRO.blocks == 32
    assert PRO.operations == 2 * 8 * 16 * 1024 * 4096
    weight = 16 * 1024 * 4096 + 4 * 128 * 32
    assert PRO.bytes_moved == weight + 8 * (2 * 16 * 4096 + 2 * 16 * 1024 + 264)
    codes = replace(PRO, turned=0, positions=0, scales="ue8m0")
    weight = 16 * 1024 * 4096 + 128 * 32
    assert codes.bytes_moved == weight + 8 * (16 * 4128 + 2 * 16 * 1024)
    narrow = GroupedFp8Problem(700, 3, 64, 256)
    assert facts.choose_form(narrow).gemm.tactic.columns == 64
    assert not facts.turns_first(facts.TURNED_UP_TO)
    assert facts.turns_first(facts.TURNED_UP_TO + 1)


def quotients(*, exact: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return quotients of all significands as the kernel makes them, and as they should be.

    A scale is the largest magnitude, a BF16 number or the floor, times a constant, so it has as
    many significands as BF16.
    """
    significands = torch.arange(128, 256).float()
    largest = torch.cat([significands / 128, torch.tensor([AMAX_FLOOR])])
    scale = (largest * SHARE)[:, None]
    powers = torch.exp2(torch.arange(-20, 9).float())
    number = torch.outer(significands, powers).reshape(1, -1).expand(len(scale), -1)
    inverse = (1 / scale).expand_as(number)
    got = facts.quotient(number, (-scale).expand_as(number), inverse, exact=exact)
    return got, number / scale


def test_every_quotient_is_the_one_that_is_rounded_once() -> None:
    got, want = quotients()
    assert got.numel() == 129 * 128 * 29
    assert torch.equal(got, want)


def test_a_product_with_the_inverse_alone_is_seen() -> None:
    got, want = quotients(exact=True)
    assert not torch.equal(got, want)


def test_the_inverse_of_a_power_of_two_is_exact() -> None:
    for exponent in (-23, 0, 5, 119):
        scale = np.float32(2.0) ** np.float32(exponent)
        made = facts.quotient(np.float32(1.5), -scale, np.float32(1) / scale, exact=True)
        assert float(made) == 1.5 / float(scale)


def test_refuses_by_name() -> None:
    for wrong in ({"inner": 4160}, {"columns": 96}, {"inner": 640}):
        with pytest.raises(ShapeMismatch, match="columns and values of a group"):
            replace(PRO, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ShapeMismatch, match="width of a row"):
        replace(PRO, turned=100)
    with pytest.raises(ShapeMismatch, match="positions of the table"):
        replace(PRO, positions=0)
    with pytest.raises(ShapeMismatch, match="tokens"):
        replace(PRO, tokens=-1)
    with pytest.raises(InvalidArgument, match="format of block scales"):
        replace(PRO, scales="e4m3")
    with pytest.raises(UnknownName, match="target of grouped products in FP8"):
        facts.choose_form(PRO, "sm_100a")
