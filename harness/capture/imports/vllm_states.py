"""Read the hidden states that vLLM extracts: one safetensors file a request.

`--speculative-config '{"method": "extract_hidden_states", ...}'` and ExampleHiddenStatesConnector
write `hidden_states` [tokens, layers, width] and `token_ids` [tokens] of each request's prompt
(vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py). The layers are
those of `eagle_aux_hidden_state_layer_ids`, which the file does not name: the user does. State N is
the residual stream before layer N; that after the last layer has the number of layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from safetensors.torch import load_file

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.harness.capture.imports.dumped import ReadDump
from degarble.harness.capture.recorded_tensors import RecordedStep
from degarble.harness.checkpoint.read.safetensors_files import read_header

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from degarble.references.traced.family import TracedConfig

_REMEDY = "Name the file, or the folder, that shared_storage_path received."


def read_vllm_states(path: Path, config: TracedConfig, layers: Sequence[int]) -> ReadDump:
    """Read a step for each request."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise InvalidArgument(str(path), "no *.safetensors", "a file for each request", _REMEDY)
    names = [stream_before(config, layer) for layer in layers]
    steps = []
    for number, file in enumerate(files):
        read_header(file)  # refuses a hostile file by name
        tensors = load_file(file)
        states, ids = (tensors.get(name) for name in ("hidden_states", "token_ids"))
        if states is None or ids is None:
            raise InvalidArgument(
                str(file), sorted(tensors)[:5], "hidden_states and token_ids", _REMEDY
            )
        if states.ndim != 3 or ids.shape != states.shape[:1] or states.shape[1] != len(layers):
            raise ShapeMismatch(
                f"{file.name}: hidden_states", list(states.shape),
                f"{len(ids)} tokens of {len(layers)} layers",
                "Name the layers of eagle_aux_hidden_state_layer_ids: --layers 1,2,3.",
            )  # fmt: skip
        count = len(ids)
        steps.append(
            RecordedStep(
                ids.tolist(), range(count), [number] * count,
                {name: states[:, at].contiguous() for at, name in enumerate(names)},
            )
        )  # fmt: skip
    return ReadDump(steps, tuple(dict.fromkeys(names)))


def stream_before(config: TracedConfig, layer: int) -> str:
    """Return the traced tensor that is the residual stream before a layer."""
    graph, count = config.whole, len(config.layers)
    if not 0 <= layer <= count:
        raise InvalidArgument(
            "--layers", layer, f"0 to {count}, which is after the last layer",
            "Name the layers of eagle_aux_hidden_state_layer_ids.",
        )  # fmt: skip
    of_layer = [c for c in graph.components if c.layer == min(layer, count - 1)]
    first = of_layer[0].inputs["x"]
    if layer == count:
        first = of_layer[-1].outputs["out"]
    edge = graph.edges.get(first.number)
    maker, output = graph.makers[first.number if edge is None else edge.sources[0].number]
    return maker if output == "out" else f"{maker}.{output}"
