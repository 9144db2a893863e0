"""The projection of mHC as arithmetic: the split is exact, K is cut once, refusals."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.base.errors import ShapeMismatch, UnknownName
from degarble.kernels.rows import mhc_problem as facts
from degarble.kernels.rows.mhc_problem import InnerCut, ProjectProblem


def test_three_parts_are_the_weight() -> None:
    fn = torch.randn(24, 640, generator=torch.Generator().manual_seed(1)) / 50
    fn[0, :3] = torch.tensor([0.0, 1.0 + 2.0**-23, -3.0000002])
    split = facts.split_weight(fn)
    assert split.shape == (3, 24, 640)
    assert torch.equal(split.double().sum(0), fn.double())
    assert not torch.equal(split[:2].double().sum(0), fn.double())
    head = facts.split_weight(fn[:4])
    assert head.shape == (3, 8, 640)
    assert torch.equal(head.double().sum(0)[:4], fn[:4].double())
    assert not head[:, 4:].any()


@pytest.mark.parametrize("width", [8, 64, 256, 1032, 4096, 5120, 7168, 65536])
def test_every_step_of_k_is_in_one_piece_and_every_piece_in_one_group(width: int) -> None:
    cut = InnerCut(4 * width)
    pieces = [
        range(n * cut.per_piece, min((n + 1) * cut.per_piece, cut.steps)) for n in range(cut.pieces)
    ]
    assert [step for piece in pieces for step in piece] == list(range(cut.steps))
    assert all(pieces)
    assert 0 <= cut.steps * facts.STEP - 4 * width < facts.STEP
    groups = [n // cut.per_group for n in range(cut.pieces)]
    assert sorted(set(groups)) == list(range(cut.groups))
    assert cut.pieces <= facts.MOST_PIECES
    assert cut.groups <= facts.MOST_GROUPS
    assert (cut.spans - 1) * facts.SPAN < cut.groups <= cut.spans * facts.SPAN
    assert cut.spans <= facts.MOST_SPANS


def test_tokens_choose_who_computes_and_nothing_else() -> None:
    forms = [
        facts.choose_form(ProjectProblem(tokens, 7168), "sm_90a")
        for tokens in (facts.LEAST_TOKENS, facts.FEW_TOKENS, facts.FEW_TOKENS + 1)
    ]
    assert [(form.few, form.lines) for form in forms] == [
        (True, "pieces"), (True, "groups"), (False, "groups")
    ]  # fmt: skip
    assert [form.tokens_of_block for form in forms] == [16, 16, 128]
    grids = {1: (448, 1), 33: (16, 3), 600: (16, 5), 8064: (16, 63), 8192: (4, 64)}
    for tokens, grid in grids.items():
        problem = ProjectProblem(tokens, 7168)
        form = facts.choose_form(problem, "sm_90a")
        assert facts.project_grid(problem, form) == grid
    assert ProjectProblem(2, 4096).bytes_moved == 2 * (32768 + 100) + 6 * 24 * 16384


def test_two_thread_blocks_fit_and_every_bank_is_read_once() -> None:
    for kind in facts.WEIGHTS:
        form = facts.ProjectForm(kind, few=False, target="sm_90a")
        assert 2 * (form.shared_bytes + 2048) <= 228 * 1024
        for each in (form, facts.ProjectForm(kind, few=True, target="sm_90a")):
            # Chunks keep their place from row to row, or have two by turns, 64 bytes apart.
            assert each.rows_at_once % 8 in {0, 4}
            assert each.tokens_of_block % each.rows_at_once == 0
    for chunk in range(8):
        assert {facts.chunk_place(row, chunk) for row in range(8, 16)} == set(range(8))
        assert facts.chunk_place(4, chunk) == facts.chunk_place(0, chunk) ^ 4
    places = {facts.chunk_place(3, chunk) for chunk in range(8)}
    assert places == set(range(8))


def test_refuses_by_name() -> None:
    for wrong, error, name in (
        (lambda: ProjectProblem(3, 12), ShapeMismatch, "width of a stream"),
        (lambda: ProjectProblem(-1, 16), ShapeMismatch, "lanes of all tokens"),
        (lambda: ProjectProblem(1 << 23, 16), ShapeMismatch, "partial sums"),
        (lambda: ProjectProblem(3, 16, "tail"), UnknownName, "projection of mHC"),
        (lambda: facts.split_weight(torch.zeros(23, 8)), UnknownName, "rows of mHC"),
    ):
        with pytest.raises(error, match=name):
            wrong()
