"""What one rank of test_capture.py runs: the stand-in on some ranks, captured on each.

`python -m degarble.suites.vllm.vllm_ranks CHECKPOINT FOLDER` is started by torchrun; FOLDER gets
`healthy/rank-0000` and so on, and `faulty/...` with every fault of the stand-in planted at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import distributed

from degarble.harness.capture.engine.maps import vllm_component_maps
from degarble.harness.capture.engine.session import EngineCapture, Scheduled
from degarble.harness.capture.options import CaptureRequest
from degarble.harness.inference.model import open_model
from degarble.harness.model.sharding import plan
from degarble.references.model import Sequence, TokenBatch
from degarble.references.sharded import ShardedModel, Teams
from degarble.suites.vllm.vllm_stand_in import FAULTS, StandIn

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Several

PROMPTS = {
    "cmpl-mine-0": list(range(5, 19)),
    "cmpl-another-0": [40, 41, 42],
    "cmpl-and-mine-1": [3, 1, 4, 1, 5, 9, 2, 6],
}
ASKED = CaptureRequest(requests=("mine",), count=2)
STEPS = 2


def drive(engine: StandIn, capture: EngineCapture) -> dict[str, list[int]]:
    """Requests side by side: their prompts, then tokens one by one, greedily."""
    sequences = {name: Sequence() for name in PROMPTS}
    pieces: dict[str, Several[int]] = dict(PROMPTS)
    said: dict[str, list[int]] = {name: [] for name in PROMPTS}
    for _ in range(STEPS):
        batch = [Scheduled(n, sequences[n].length, piece) for n, piece in pieces.items()]
        capture.batch(batch)
        starts = [scheduled.start for scheduled in batch]
        step = TokenBatch.from_sequences(starts, [torch.tensor(piece) for piece in pieces.values()])
        with torch.inference_mode():
            logits = engine.run(list(sequences.values()), step)
        for name, row in zip(said, logits, strict=True):
            said[name].append(int(row.argmax()))
            pieces[name] = said[name][-1:]
    return said


def captured(
    checkpoint: Path, folder: Path, faults: Iterable[str], request: CaptureRequest = ASKED
) -> None:
    """Capture the stand-in on this rank; the world is its tensor parallelism."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    with open_model(checkpoint) as model:
        sharding_plan = plan(model.config, tp=world)
        teams = Teams.from_plan(sharding_plan)
        assert teams is not None
        bound = model.logits_model.bound
        engine = StandIn(
            ShardedModel(sharding_plan, teams, bound.numerics, bound.weights), rank, faults
        )
        places = vllm_component_maps(model.config, world)
        capture = EngineCapture(folder / f"rank-{rank:04}", engine.tree, places, request)
        drive(engine, capture)
        assert capture.close()["unseen"] == []


def main() -> None:
    """Capture the healthy engine and the faulty one."""
    checkpoint, folder = map(Path, sys.argv[1:])
    distributed.init_process_group("gloo")
    for name, faults in (("healthy", ()), ("faulty", FAULTS)):
        captured(checkpoint, folder / name, faults)
        distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
