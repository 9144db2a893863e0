"""What the sm_90a forms share, where it is arithmetic: a warpgroup's barrier and its pieces."""

from __future__ import annotations

import pytest

from degarble.kernels.gemm import problem as facts

pytestmark = pytest.mark.needs("cutlass")


def test_barriers_of_warpgroups_are_their_own() -> None:
    from degarble.kernels.gemm.wgmma import FIRST_BARRIER  # noqa: PLC0415

    largest = max(
        facts.consumers(facts.GemmForm(operands, "none", target, tactic))
        for (target, operands), tactics in facts.TACTICS.items()
        for tactic in tactics
        if target == "sm_90a"
    )
    assert FIRST_BARRIER >= 2
    assert FIRST_BARRIER + largest <= 16  # PTX ISA 9.1, barrier: sixteen a thread block


def test_pieces_of_neighbouring_tiles_do_not_overlap() -> None:
    tactic = facts.Tactic(1.0, rows=128, columns=256, inner=64)
    seen = [
        (row, column + i)
        for tile in ((0, 0), (0, 1), (1, 0), (1, 1))
        for mine in range(2)
        for row, column in [facts.piece_of(*tile, mine, tactic)]
        for i in range(tactic.columns // facts.PIECE_COLUMNS)
    ]
    assert sorted(seen) == [(row, column) for row in range(4) for column in range(8)]
