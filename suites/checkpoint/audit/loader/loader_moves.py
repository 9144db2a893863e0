"""The moves of a loader proof, carried out on numbered elements, for the suites of loading.

Every stored element gets a number of its own. What lies where after the moves, and what is left
over on either side, is compared with what the proof says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from degarble.harness.checkpoint.audit.loader.proof import LoaderProof
    from degarble.harness.model.types import Box

    Numbered = NDArray[np.int64]

NOWHERE = -1


def numbered(proof: LoaderProof) -> dict[str, Numbered]:
    """Give every stored element a number."""
    found, first = {}, 0
    for name, entry in proof.entries.items():
        count = int(np.prod(entry.shape, dtype=np.int64))
        found[name] = np.arange(first, first + count).reshape(entry.shape)
        first += count
    return found


def sliced(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*each) for each in box.ranges)


def moved(proof: LoaderProof, stored: dict[str, Numbered]) -> dict[tuple[int, str], Numbered]:
    """Carry out what the proof claims, in its order."""
    found = {}
    for held in proof.held():
        for target in held.targets.values():
            memory = np.full(target.shape, NOWHERE)
            for move in proof.fills(target.name, held.rank):
                there = sliced(move.target_box)
                if move.made_from:
                    memory[there] = 0  # computed: it has no number of its own
                else:
                    taken = stored[move.source][sliced(move.source_box)]
                    memory[there] = taken.reshape(memory[there].shape)
            found[held.rank, target.name] = memory
    return found


def painted(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> NDArray[np.bool_]:
    found = np.zeros(shape, dtype=bool)
    for box in boxes:
        found[sliced(box)] = True
    return found


def require_claims(proof: LoaderProof, *, sources: bool = True) -> None:
    """Compare what the moves leave over with what the proof says of it, element by element."""
    stored = numbered(proof)
    memories = moved(proof, stored)
    for key, memory in memories.items():
        claimed = painted(memory.shape, proof.unwritten.get(key, ()))
        np.testing.assert_array_equal(memory == NOWHERE, claimed, err_msg=str(key))
    assert set(proof.unwritten) <= set(memories)
    if not sources:
        return
    arrived = np.zeros(sum(each.size for each in stored.values()), dtype=bool)
    for memory in memories.values():
        arrived[memory[memory >= 0]] = True
    made_from = {
        name
        for rank, target in memories
        for move in proof.fills(target, rank)
        for name in move.made_from
    }
    for name, outcome in proof.outcomes.items():
        here = arrived[stored[name]]
        if outcome == "placed" and name not in made_from:
            claimed = painted(stored[name].shape, proof.unread.get(name, ()))
            np.testing.assert_array_equal(~here, claimed, err_msg=name)
        elif outcome != "converted":
            assert not here[stored[name] > 0].any(), name  # zero stands for what is computed
