"""Capture an engine's run of any model of transformers: the map derived, ranks joined, one capture.

Each rank records what its modules show, and states its tree of modules. Joined, the tensors are
those of a traced model, some of them unknown; the capture is coarsened to what every step has.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from degarble.harness.capture.engine.derived import EngineTree, derived_maps
from degarble.harness.capture.engine.ranks import join_ranks
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.writer import CaptureWriter
from degarble.harness.capture.imports.importing import traced_facts
from degarble.harness.capture.recorded_tensors import RecordedStep, TensorRun
from degarble.harness.capture.recorder import Recorder
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.references.traced.family import TracedConfig, site_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from degarble.harness.capture.engine.maps import ComponentMap

ENGINE = "engine"  # the fact of a rank's capture that holds the tree of modules
_OWN = (
    "requests",
    "ended",
    "replayed",
    "ranks",
    "ranks_apart",
)  # facts of the joined capture that stay


def maps_of_model(
    model: nn.Module, raw: Mapping[str, Any], ranks: int
) -> tuple[list[ComponentMap], dict[str, Any]]:
    """Return the map of a running engine's model, and the facts that a rank states."""
    tree = EngineTree.from_model(model, ranks)
    return derived_maps(tree, TracedConfig.of(raw).whole), {ENGINE: tree.document()}


def join_traced(ranks: Sequence[Path], checkpoint: Path, out: Path) -> list[str]:
    """Write one capture from those of all ranks; return the sites that differ between them."""
    with Checkpoint.open(checkpoint) as opened:
        whole = TracedConfig.of(opened.config)
        tree = EngineTree.of_json(Capture.open(ranks[0]).facts[ENGINE])
        joined = out / "joined"
        apart = join_ranks(ranks, derived_maps(tree, whole.whole), joined, {})
        capture = Capture.open(joined)
        steps = _steps(capture, whole)
        every = Counter(name for step in steps for name in step.tensors)
        recorded = tuple(name for name, count in every.items() if count == len(steps))
        config = TracedConfig(whole.text, whole.dtype, recorded)
        own = {name: capture.facts[name] for name in _OWN if name in capture.facts}
        with CaptureWriter(out, traced_facts(opened, config, "vllm")) as writer:
            run = TensorRun(config, Recorder(writer))
            for step in steps:
                kept = {name: step.tensors[name] for name in recorded}
                run.step(
                    RecordedStep(step.tokens, step.positions, step.sequences, kept, step.given)
                )
            writer.finish(**own, left_out=sorted(run.left_out))
    return apart


def _steps(capture: Capture, whole: TracedConfig) -> list[RecordedStep]:
    """Return the steps of joined ranks, by traced tensors."""
    names = {site_name(each.name): each.name for each in whole.whole.components}
    made: dict[int, dict[str, Tensor]] = defaultdict(dict)
    given: dict[int, dict[str, dict[str, Tensor]]] = defaultdict(dict)
    for call in capture.calls:
        maker = names[call.component]
        for output, tensor in capture.outputs(call).items():
            made[call.step][maker if output == "out" else f"{maker}.{output}"] = _flat(tensor)
        given[call.step][call.component] = {
            name: _flat(tensor) for name, tensor in capture.inputs(call).items()
        }
    return [
        RecordedStep(
            step.tokens, step.positions, step.sequences, made[step.number], given[step.number]
        )
        for step in capture.steps
    ]


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1) if tensor.ndim else tensor
