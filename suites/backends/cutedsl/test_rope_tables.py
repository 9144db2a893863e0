"""The table of turns: equal to the references' angles, which have a formula of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from degarble.harness.backends.cutedsl.rows import RopeTables, table_of
from degarble.harness.model.types import Rope, RopeEnd, RopePairing, Yarn
from degarble.references.elementary import rotation_table
from degarble.references.numerics import Numerics
from degarble.references.tiny.configs import TINY_V4, TINY_V32

ROPES = [TINY_V4.rope(block) for block in TINY_V4.blocks[:2]]
ROPES += [TINY_V32.rope(TINY_V32.blocks[0])]
ROPES += [Rope(theta=1e6, dims=64, pairing=RopePairing.INTERLEAVED, end=RopeEnd.LAST, yarn=None)]
YARN = Yarn(factor=40, original_max_position_embeddings=4096)
ROPES += [
    replace(ROPES[-1], yarn=replace(YARN, **changes))
    for changes in (
        {},
        {"attention_factor": 1.3, "truncate": False},
        {"original_max_position_embeddings": 4, "beta_slow": 4},  # the ramp runs backwards
        {"mscale": 1.0, "mscale_all_dim": 0.7},
    )
]


@pytest.mark.parametrize("rope", ROPES, ids=range(len(ROPES)))
def test_cosines_and_sines_are_those_of_the_references(rope: Rope) -> None:
    positions = torch.tensor([0, 1, 2, 127, 128, 4095])
    twin = rotation_table(rope, positions, Numerics.definition())
    table = table_of(rope, 4096)
    assert table.dtype is torch.float32
    assert table.shape == (4096, 64)
    expected = torch.cat((twin.cos, twin.sin), dim=1)
    assert float((table[positions].double() - expected).abs().max()) < 2**-24 * rope.scale


def test_a_table_grows_and_is_kept() -> None:
    turns = RopeTables()
    first = turns.reaching(ROPES[0], torch.tensor([3]))
    assert turns.reaching(ROPES[0], torch.tensor([1023])) is first
    longer = turns.reaching(ROPES[0], torch.tensor([1024, 5]))
    assert len(longer) == 2048
    assert torch.equal(longer[:1024], first)
    assert turns.reaching(ROPES[0], torch.tensor([7])) is longer
