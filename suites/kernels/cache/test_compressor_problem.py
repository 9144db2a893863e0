"""Windows as arithmetic: which tokens close them, rings in the references' order, refusals."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.kernels.cache import problem as facts
from degarble.kernels.cache.problem import PoolForm, PoolProblem


@pytest.mark.parametrize("ratio", facts.RATIOS)
def test_windows_close_where_their_last_token_is(ratio: int) -> None:
    starts, counts = [0, 3, ratio - 1, 5 * ratio, 1], [ratio, 2 * ratio, 1, ratio - 1, 1]
    closing, owners = facts.windows_of(starts, counts, ratio)
    want, begin = [], 0
    for number, (start, count) in enumerate(zip(starts, counts, strict=True)):
        ends = [t for t in range(count) if (start + t + 1) % ratio == 0]
        want += [(begin + t, number) for t in ends]
        begin += count
    assert list(zip(closing.tolist(), owners.tolist(), strict=True)) == want
    assert closing.dtype == owners.dtype == torch.int32


def test_a_ring_has_the_last_whole_window_and_the_rest() -> None:
    ring = torch.zeros(8, 1)
    for position in range(10):
        ring[position % 8] = position + 1
    # Behind 10 tokens windows 0 and 1 are whole; 4 to 7 are the last, 8 and 9 the rest.
    assert facts.as_references_have_it(ring, 10, 4)[:, 0].tolist() == [5, 6, 7, 8, 9, 10, 0, 0]
    assert facts.as_references_have_it(ring, 3, 4)[:, 0].tolist()[:4] == [0, 0, 0, 0]
    assert facts.as_references_have_it(torch.ones(128, 1), 130, 128).sum() == 2


def test_forms_have_a_thread_for_every_channel_and_row() -> None:
    for ratio in facts.RATIOS:
        for width in (512, 128):
            for few in (False, True):
                form = PoolForm(ratio, width, alone=few, target="sm_90a", few=few)
                assert (
                    form.parts * facts.ROWS_AT_ONCE == form.ring_rows == facts.rows_of_ring(ratio)
                )
                assert form.threads * facts.CHANNELS_OF_THREAD == form.parts * form.channels
                assert form.groups * form.channels == width
                assert form.threads % 32 == 0
    assert facts.choose_pool_form(PoolProblem(3, 3, 3, 5, 4), "sm_90a").alone
    assert not facts.choose_pool_form(PoolProblem(4, 3, 3, 5, 4), "sm_90a").alone
    many = facts.FEW_SEQUENCES + 1
    alone = [PoolProblem(n, n, n, 1, 128) for n in (many - 1, many)]
    assert [facts.choose_pool_form(each, "sm_90a").few for each in alone] == [True, False]
    assert PoolProblem(8192, 1, 2048, 1, 4).bytes_moved == 8 * 1024 * 8200 + 2048 * 1040


def test_refuses_by_name() -> None:
    for extents, error, name in (
        ((4, 1, 1, 1, 3), InvalidArgument, "compress ratio"),
        ((4, 1, 1, 1, 4, 256), ShapeMismatch, "width of a row"),
        ((1, 2, 1, 1, 4), ShapeMismatch, "tokens"),
        ((-1, 0, 1, 1, 4), ShapeMismatch, "tokens"),
        ((1, 1, 1, 0, 4), ShapeMismatch, "rings"),
        ((1, 1, 1, 1 << 30, 4), ShapeMismatch, "rows of all rings"),
        ((1, 1, 1 << 30, 1, 4), ShapeMismatch, "pairs of channels of all windows"),
    ):
        with pytest.raises(error, match=name):
            PoolProblem(*extents)
