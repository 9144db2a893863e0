"""Shares of ranks: the bytes of a sharding plan, against anatomy's own list of a rank."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import pytest

from degarble.harness.checkpoint.audit.loader.engine_maps import Ranks
from degarble.harness.checkpoint.audit.loader.proof import (
    KINDS,
    SHARE_HEADER,
    RankShare,
    rank_shares,
    share_rows,
)
from degarble.harness.checkpoint.read.types import DTYPE_BITS
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.sharding import plan, rank_tensors
from degarble.suites.checkpoint.audit.loader.loader_cases import proven
from degarble.suites.checkpoint.structure_cases import V4, write

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("shares") / "c", V4, "official")


@pytest.mark.parametrize("ranks", [Ranks(), Ranks(tp=2), Ranks(tp=2, ep=4), Ranks(2, 2, 3)])
def test_a_share_has_the_bytes_that_anatomy_lists(official: Path, ranks: Ranks) -> None:
    shares = rank_shares(proven(official, {"base": "vllm", **ranks._asdict()}))
    made = plan(V4, *ranks)
    assert [each.rank for each in shares] == list(range(made.ranks))
    for share in shares:
        listed = rank_tensors(made, layout_named("vllm", V4), share.rank)
        assert share.parameters == len(listed)
        assert share.nbytes == sum(
            prod(each.shape) * DTYPE_BITS[str(each.dtype)] // 8 for each in listed
        )
        assert range(*share.experts) == made.experts_of(share.rank)


def test_kinds_are_told_apart(official: Path) -> None:
    whole, *_ = rank_shares(proven(official, {"base": "vllm"}))
    halves = rank_shares(proven(official, {"base": "vllm", "tp": 1, "ep": 2}))
    assert set(whole.by_kind) == set(KINDS)
    assert all(whole.by_kind.values())
    for share in halves:  # experts are spread, and nothing else is
        assert share.by_kind["routed experts"] * 2 == whole.by_kind["routed experts"]
        assert share.by_kind["attention"] == whole.by_kind["attention"]


def test_a_list_of_parameters_has_experts_and_the_rest(official: Path) -> None:
    raw = {
        "ep": 2,
        "parameters": {
            "a.w2": {"dtype": "U8", "shape": [2, 4, 6], "experts": True},
            "b.weight": {"dtype": "BF16", "shape": [3, 5]},
        },
    }
    first, second = rank_shares(proven(official, raw))
    assert first.by_kind == {**dict.fromkeys(KINDS, 0), "routed experts": 48, "other": 30}
    assert (first.experts, second.experts) == ((0, 2), (2, 4))
    assert first.to_json()["bytes"] == 78


def test_ranks_alike_are_one_row() -> None:
    kinds = dict(zip(KINDS, (4_000_000_000, 3, 2, 1), strict=True))
    one = RankShare(0, (0, 48), 1200, kinds)
    rows = share_rows([one, one._replace(rank=1, experts=(48, 96)), one._replace(rank=5)])
    assert rows == (("0-1, 5", "48 each", "1,200", "4.000", "0.000", "0.000", "0.000", "4.000"),)
    assert len(rows[0]) == len(SHARE_HEADER)
    other = one._replace(rank=2, experts=(0, 0))
    assert [row[1] for row in share_rows([one, other])] == ["0-47", "none"]
