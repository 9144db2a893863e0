"""Read FlashInfer's flight recorder (`FLASHINFER_LOGLEVEL=10`): a folder for each call of its API.

A folder `<time>_pid<n>_<function>_call<n>` holds `metadata.jsonl`, whose last line is the most
complete, and the tensors as `inputs.safetensors` or `inputs.pt`, `outputs` likewise
(flashinfer/api_logging.py; docs.flashinfer.ai/logging.html). A call says nothing of its layer. A
norm does by its weight, which is a tensor of the checkpoint; what lies between two norms follows
from its order. `fused_add_rmsnorm` shows the branch that joins and the stream before it; the sum is
what the next one is given.

FlashInfer never sees tokens, and positions only where it rotates (`apply_rope*` with `pos_ids`).
Without these, spans that attend are left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from degarble.harness.base.errors import InvalidArgument, UnreadableFile
from degarble.harness.base.files import regular_file
from degarble.harness.capture.imports.dumped import ReadDump
from degarble.harness.capture.imports.torch_files import read_saved
from degarble.harness.capture.recorded_tensors import RecordedStep
from degarble.harness.checkpoint.read.safetensors_files import read_header
from degarble.references.traced.graph import StretchKind
from degarble.references.traced.trace import BoundaryKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from degarble.references.traced.family import TracedConfig
    from degarble.references.traced.graph import Graph, TracedComponent
    from degarble.references.traced.trace import Ref

_NORMS = frozenset({"rmsnorm", "gemma_rmsnorm"})
_ADDED = frozenset({"fused_add_rmsnorm", "gemma_fused_add_rmsnorm"})
_GATED = frozenset({"silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"})
_LARGEST_METADATA = 64 << 20


@dataclass(frozen=True)
class RecordedCall:
    """One call of FlashInfer's API: arguments by number or name, and results by number."""

    function: str
    order: str
    given: Mapping[str, Tensor]
    made: Mapping[str, Tensor]

    def argument(self, at: int, *names: str) -> Tensor | None:
        """Return an argument that was passed by position or by name."""
        keys = (f"arg_{at}", *(f"kwarg_{name}" for name in names))
        return next((self.given[key] for key in keys if key in self.given), None)

    @property
    def result(self) -> Tensor | None:
        """Return its first result."""
        return self.made.get("result", self.made.get("result_0"))


@dataclass
class _Pass:
    """One forward pass: tensors by their traced names."""

    rows: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    positions: list[int] | None = None


def read_flashinfer(folder: Path, config: TracedConfig, norms: Mapping[str, Tensor]) -> ReadDump:
    """Read a dump; `norms` are the checkpoint's weights of norms, by the component's name."""
    calls = _calls(folder)
    placer = _Placer(config.whole, norms)
    for call in calls:
        placer.add(call)
    passes = [each for each in placer.passes if each.tensors]
    if not passes:
        raise InvalidArgument(
            str(folder), f"{len(calls)} calls, such as {calls[0].function}",
            "a call of rmsnorm or fused_add_rmsnorm with a weight of this checkpoint",
            "Dump the norms as well: FLASHINFER_DUMP_INCLUDE='*rmsnorm*,*_and_mul,*rope*'.",
        )  # fmt: skip
    unknown = {"tokens"} | (set() if all(each.positions for each in passes) else {"positions"})
    recorded = [name for name in passes[0].tensors if all(name in p.tensors for p in passes)]
    steps, sequence = [], 0
    for each in passes:
        positions = each.positions or list(range(each.rows))
        owners = []
        for at, position in enumerate(positions):
            sequence += bool(at and position != positions[at - 1] + 1)
            owners.append(sequence)
        sequence += 1
        steps.append(
            RecordedStep(
                [0] * each.rows, positions, owners, {name: each.tensors[name] for name in recorded}
            )
        )
    return ReadDump(steps, recorded, sorted(placer.unplaced), unknown=frozenset(unknown))


def norm_weights(config: TracedConfig, read: Callable[[str], Tensor | None]) -> dict[str, Tensor]:
    """Return the weights of a model's norms that the checkpoint has, by component."""
    found = {
        component.name: read(component.parameters[0])
        for component in config.whole.components
        if component.kind is BoundaryKind.NORM and component.parameters
    }
    return {name: weight for name, weight in found.items() if weight is not None}


def _calls(folder: Path) -> list[RecordedCall]:
    found = [
        _call(each) for each in sorted(folder.iterdir()) if (each / "metadata.jsonl").is_file()
    ]
    if not found:
        raise InvalidArgument(
            str(folder), "no call", "folders with metadata.jsonl, as FLASHINFER_DUMP_DIR has",
            "Set FLASHINFER_LOGLEVEL=10 FLASHINFER_DUMP_DIR=DIR FLASHINFER_DUMP_SAFETENSORS=1.",
        )  # fmt: skip
    return sorted(found, key=lambda call: call.order)


def _call(folder: Path) -> RecordedCall:
    path = folder / "metadata.jsonl"
    with regular_file(path) as (_, status):
        if status.st_size > _LARGEST_METADATA:
            raise UnreadableFile(
                str(path), f"{status.st_size} bytes", "64 MiB at most", "Name another dump."
            )
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        described = json.loads(lines[-1])
        function = str(described["function_name"])
        order = f"{described.get('timestamp', folder.name)}_{described.get('call_sequence', 0):08}"
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise UnreadableFile(
            str(path), f"{type(error).__name__}: {error}"[:200],
            "a line of JSON that names the function", "Dump it again.",
        ) from error  # fmt: skip
    return RecordedCall(
        function.rpartition(".")[2] if "." in function else function, order,
        _tensors(folder, "inputs"), _tensors(folder, "outputs"),
    )  # fmt: skip


def _tensors(folder: Path, side: str) -> dict[str, Tensor]:
    plain, saved = folder / f"{side}.safetensors", folder / f"{side}.pt"
    if plain.is_file():
        read_header(plain)  # refuses a hostile file by name
        return load_file(plain)
    found = read_saved(saved) if saved.is_file() else {}
    return {str(name): tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}


class _Placer:
    """Places calls: norms by weight, activations by the norm before them."""

    def __init__(self, graph: Graph, norms: Mapping[str, Tensor]) -> None:
        self._graph = graph
        self._norms = {c.name: c for c in graph.components if c.kind is BoundaryKind.NORM}
        self._weights = {
            name: weight.float() for name, weight in norms.items() if name in self._norms
        }
        order = {component.name: at for at, component in enumerate(graph.components)}
        self._order = order
        self._gated = [c for c in graph.components if c.kind is StretchKind.GATED]
        self._last = -1
        self.passes: list[_Pass] = []
        self.unplaced: set[str] = set()

    def add(self, call: RecordedCall) -> None:
        """Place one call."""
        if call.function in _NORMS | _ADDED:
            self._norm(call)
        elif call.function in _GATED and self.passes:
            self._activation(call)
        elif "rope" in call.function:
            self._rotation(call)
        else:
            self.unplaced.add(call.function)

    def _rotation(self, call: RecordedCall) -> None:
        positions = call.argument(2, "pos_ids", "positions")
        if positions is None or positions.is_floating_point() or not self.passes:
            self.unplaced.add(call.function)
        elif len(positions) == self.passes[-1].rows:
            self.passes[-1].positions = positions.tolist()

    def _norm(self, call: RecordedCall) -> None:
        added = call.function in _ADDED
        x, weight = call.argument(0, "input"), call.argument(2 if added else 1, "weight")
        norm = None if x is None or weight is None else self._of(weight)
        if norm is None or x is None:
            self.unplaced.add(call.function)
            return
        if self._order[norm.name] <= self._last or not self.passes:
            self.passes.append(_Pass(x.shape[0]))
        self._last = self._order[norm.name]
        residual = call.argument(1, "residual") if added else None
        source = norm.inputs["x"]
        if residual is None:
            self._keep(source, x)
        else:
            total = self._made_by(source)
            if total is not None and total.kind is StretchKind.RESIDUAL:
                self._keep(total.inputs["x"], x)
                self._keep(total.inputs["residual"], residual)
        if call.result is not None and not added:
            self._keep(norm.outputs["out"], call.result)

    def _of(self, weight: Tensor) -> TracedComponent | None:
        """Return the norm with this weight; of equal ones, the next in the order of the model."""
        alike = [
            name for name, known in self._weights.items()
            if known.shape == weight.shape and torch.equal(known, weight.float())
        ]  # fmt: skip
        after = [name for name in alike if self._order[name] > self._last]
        names = after or alike
        return self._norms[min(names, key=self._order.__getitem__)] if names else None

    def _activation(self, call: RecordedCall) -> None:
        x = call.argument(0, "input")
        product = next((c for c in self._gated if self._order[c.name] > self._last), None)
        if x is None or product is None or x.shape[0] != self.passes[-1].rows:
            self.unplaced.add(call.function)
            return
        gate, up = x.chunk(2, -1)
        activated = self._made_by(product.inputs["gate"])
        if activated is not None:
            self._keep(activated.inputs["x"], gate)
        self._keep(product.inputs["up"], up)
        if call.result is not None:
            self._keep(product.outputs["out"], call.result)

    def _made_by(self, ref: Ref) -> TracedComponent | None:
        maker = self._graph.makers.get(self._source(ref).number, ("", ""))[0]
        return next((c for c in self._graph.components if c.name == maker), None)

    def _source(self, ref: Ref) -> Ref:
        edge = self._graph.edges.get(ref.number)
        return ref if edge is None else edge.sources[0]

    def _keep(self, ref: Ref, tensor: Tensor) -> None:
        maker, output = self._graph.makers.get(self._source(ref).number, ("", ""))
        if maker and tensor.shape[0] == self.passes[-1].rows:
            name = maker if output == "out" else f"{maker}.{output}"
            self.passes[-1].tensors.setdefault(name, tensor.clone())
