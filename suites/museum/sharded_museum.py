"""What one rank of test_sharded_museum.py runs, started by torchrun: a damaged model.

Experts are spread (ep = 2), the rest is repeated. Every case plants a fault where ranks exchange
something, or into what a rank loads; each rank writes all that its components saw.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import distributed

from degarble.harness.capture.files.records import CapturedStep, Phase
from degarble.harness.engine.localise.recorded_run import InMemoryRun
from degarble.harness.model.parameters import routed_experts
from degarble.harness.model.sharding import plan
from degarble.harness.museum.cases import ModelKey, MuseumModel, prompt_ids
from degarble.references.model import Sequence
from degarble.references.numerics import Numerics
from degarble.references.sharded import ShardedModel, Teams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.formats.weight import Weight

KEY = ModelKey("v32", "nvfp4-experts")
LAYER = "layers.1.ffn.experts"
LENGTHS = (40, 7)
# fault, and the component that is to be blamed; nothing in a healthy run
CASES = {
    "healthy": ("", ""),
    "summed again": ("M21.summed_again", f"{LAYER}.combine"),
    "one rank alone": ("", f"{LAYER}.combine"),
    "another expert's rows": ("M16.next_expert", f"{LAYER}.w2"),
}


def loaded(case: str, weights: Mapping[str, Weight], experts: int) -> Mapping[str, Weight]:
    """What a rank loads: w2 of the next expert, where that is the fault."""
    if case != "another expert's rows":
        return weights
    changed = {
        f"{LAYER}.{number}.w2": weights[f"{LAYER}.{(number + 1) % experts}.w2"]
        for number in range(experts)
    }
    return {name: changed.get(name, weights[name]) for name in weights}


def damage(case: str, model: ShardedModel, numerics: Numerics) -> None:
    """Plant a fault of the exchange."""
    name = f"{LAYER}.combine"
    call: Any = model.bound.calls[name]
    if case == "one rank alone":
        model.bound.calls[name] = call.args[0]
    if case == "summed again":
        team = model.teams.experts

        def again(inputs: Any, weights: Any) -> Any:
            return {"out": team.sum(call(inputs, weights)["out"], numerics, kept=True)}

        model.bound.calls[name] = again


def recorded(case: str, model: MuseumModel) -> InMemoryRun:
    """Run a case on this rank."""
    sharding_plan = plan(model.config, ep=2)
    teams = Teams.from_plan(sharding_plan)
    assert teams is not None, "two ranks run"
    numerics = Numerics.twin(model.switches, products=torch.float32)
    weights = loaded(case, model.weights, routed_experts(model.config))
    sharded = ShardedModel(sharding_plan, teams, numerics, weights, model.recipe)
    damage(case, sharded, numerics)
    run, sequences = InMemoryRun(), [Sequence() for _ in LENGTHS]
    tokens = [torch.tensor(prompt_ids(n, length)) for n, length in enumerate(LENGTHS)]
    with run._recording(sharded.bound, {}), torch.inference_mode():
        for number in range(2):
            run.steps.append(step_of(number, sequences, tokens))
            sharded.forward(sequences, tokens)
            tokens = [torch.tensor([number + 3])] * len(LENGTHS)
    return run


def step_of(number: int, sequences: list[Sequence], tokens: list[Tensor]) -> CapturedStep:
    ids = [token for tensor in tokens for token in tensor.tolist()]
    owners = [n for n, token in enumerate(tokens) for _ in token]
    spans = zip(sequences, tokens, strict=True)
    positions = [p for s, tensor in spans for p in range(s.length, s.length + len(tensor))]
    phase = Phase.DECODE if number else Phase.PREFILL
    return CapturedStep(number, phase, tuple(ids), tuple(positions), tuple(owners))


def write(run: InMemoryRun, target: Path) -> None:
    """Write tensors, and beside them which call had which."""
    tensors = {
        f"{call.number}/{side}/{name}": tensor.contiguous().clone()
        for call in run.calls
        for side, found in (("in", run.inputs(call)), ("out", run.outputs(call)))
        for name, tensor in found.items()
    }
    save_file(tensors, target.with_suffix(".safetensors"))
    target.with_suffix(".json").write_text(json.dumps([(c.step, c.component) for c in run.calls]))


def main() -> None:
    """Run every case, one after the other."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    try:
        root, target = Path(sys.argv[1]), Path(sys.argv[2])
        model = MuseumModel.open(KEY, root)
        for case in CASES:
            name = f"{case.replace(' ', '_')}_{distributed.get_rank()}"
            write(recorded(case, model), target / name)
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
