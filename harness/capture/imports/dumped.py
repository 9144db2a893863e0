"""Tensors as an engine's hooks dumped them, by module, and their translation to traced tensors.

A dump names tensors by module, side and number. Which of them are tensors of the model follows from
the derived map of the engine (`engine.derived`), with the modules that the dump itself names. Ranks
are joined first: a part by its width, a term where ranks differ though every one has the whole
width.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.capture.engine.derived import EngineTree, derived_maps
from degarble.harness.capture.engine.maps import TERM, CallSide, ShareKind
from degarble.harness.capture.engine.ranks import joined
from degarble.harness.capture.recorded_tensors import RecordedStep
from degarble.references.traced.family import site_name
from degarble.references.traced.graph import name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.capture.engine.maps import ComponentMap, TensorLocation
    from degarble.references.traced.family import TracedConfig

    Place = tuple[str, CallSide, int]  # module, side, number


@dataclass
class DumpedStep:
    """One forward pass: what it was given, and the tensors of each rank by place."""

    tokens: Sequence[int] | None
    positions: Sequence[int] | None
    lengths: Sequence[int] | None  # of each sequence, with its earlier tokens
    owners: Sequence[int] | None  # the engine's slot of each sequence
    ranks: list[dict[Place, Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class ReadDump:
    """A dump in terms of a traced model."""

    steps: Sequence[RecordedStep]
    recorded: Sequence[str]
    unplaced: Sequence[str] = ()  # modules or functions of unknown meaning
    apart: Sequence[str] = ()  # copies that differ between ranks
    unknown: frozenset[str] = frozenset()  # "tokens", "positions": what the dump does not say
    ranks: int = 1


def translated(steps: Sequence[DumpedStep], config: TracedConfig) -> ReadDump:
    """Translate a dump to the tensors of a traced model."""
    if not steps:
        raise InvalidArgument(
            "dump", "no forward pass", "tensors of one at least",
            "Dump a request: see docs/importing.md.",
        )  # fmt: skip
    ranks = len(steps[0].ranks)
    if any(len(step.ranks) != ranks for step in steps):
        raise InvalidArgument(
            "dump", sorted({len(step.ranks) for step in steps}), "every rank in every step",
            "Dump all ranks of one engine again, together.",
        )  # fmt: skip
    paths = dict.fromkeys(place[0] for step in steps for rank in step.ranks for place in rank)
    tree = EngineTree.from_paths(paths, ranks=ranks)
    _require_own(tree, config)
    maps = derived_maps(tree, config.whole)
    names = {site_name(each.name): each.name for each in config.whole.components}
    placed: set[str] = set()
    apart: dict[str, None] = {}
    owners = _Owners()
    found: list[RecordedStep] = []
    for step in steps:
        tokens, positions, sequences = owners.rows(step)
        tensors = _Joined(step, len(tokens), apart).tensors(maps, names, placed)
        found.append(RecordedStep(tokens, positions, sequences, tensors))
    every = Counter(name for step in found for name in step.tensors)
    recorded = tuple(name for name, count in every.items() if count == len(found))
    found = [
        replace(step, tensors={name: step.tensors[name] for name in recorded}) for step in found
    ]
    unplaced = tuple(path for path in paths if path not in placed)
    return ReadDump(found, recorded, unplaced, tuple(apart), ranks=ranks)


_LAYER = re.compile(r"layers\.(\d+)(\.|$)")


def _require_own(tree: EngineTree, config: TracedConfig) -> None:
    """Raise if a dump has layers that the model lacks, or packs matrices that it lacks."""
    own = {name_of(component.module) for component in config.whole.components}
    parents = {path.rpartition(".")[0] for path in own}
    for module in tree.modules:
        path = name_of(module.path)
        layer = _LAYER.match(path)
        parent, _, leaf = path.rpartition(".")
        parts = [f"{parent}.{part}" for part in tree.packed.get(leaf, ())]
        lacking = path not in own and parent in own | parents and not own & {*parts}
        if (layer and int(layer[1]) >= len(config.layers)) or (parts and lacking):
            raise InvalidArgument(
                "module of the dump", module.path,
                f"one of a {config.raw.get('model_type')} of {len(config.layers)} layers",
                "Name the checkpoint that the engine loaded: --model CKPT.",
            )  # fmt: skip


class _Owners:
    """Numbers sequences: a slot of the engine whose positions begin again is a new sequence."""

    def __init__(self) -> None:
        self._next = 0
        self._slots: dict[int, tuple[int, int]] = {}  # slot to sequence and length

    def rows(self, step: DumpedStep) -> tuple[list[int], list[int], list[int]]:
        """Return token, position and sequence of each row."""
        if step.tokens is None or step.positions is None:
            raise InvalidArgument(
                "dump", "no tokens or positions", "input_ids and positions of every pass",
                "Dump them too: SGLang's dumper does, with its filter off.",
            )  # fmt: skip
        tokens, positions = list(step.tokens), list(step.positions)
        begins = [
            at for at, position in enumerate(positions)
            if not at or position != positions[at - 1] + 1
        ]  # fmt: skip
        sequences: list[int] = []
        if step.lengths is not None and sum(_new(begins, len(tokens))) == len(tokens):
            begins = _by_lengths(positions, step.lengths) or begins
        for number, (begin, count) in enumerate(
            zip(begins, _new(begins, len(tokens)), strict=True)
        ):
            slot = step.owners[number] if step.owners is not None else number
            known = self._slots.get(slot)
            if known is None or known[1] != positions[begin]:
                known = self._next, 0
                self._next += 1
            self._slots[slot] = known[0], positions[begin] + count
            sequences += [known[0]] * count
        return tokens, positions, sequences


def _new(begins: Sequence[int], total: int) -> list[int]:
    return [end - begin for begin, end in zip(begins, [*begins[1:], total], strict=True)]


def _by_lengths(positions: Sequence[int], lengths: Sequence[int]) -> list[int] | None:
    """Return where sequences begin, from the length that each has reached."""
    begins, at = [], 0
    for length in lengths:
        if at >= len(positions) or positions[at] >= length:
            return None
        begins.append(at)
        at += length - positions[at]
    return begins if at == len(positions) else None


class _Joined:
    """Reads one step's tensors through the map."""

    def __init__(self, step: DumpedStep, rows: int, apart: dict[str, None]) -> None:
        self._step, self._rows, self._apart = step, rows, apart
        self._paired = {
            place[0] for place in step.ranks[0]
            if place[2] == 1
        }  # fmt: skip

    def tensors(
        self, maps: Iterable[ComponentMap], names: Mapping[str, str], placed: set[str]
    ) -> dict[str, Tensor]:
        """Return the tensors that components make; consumers show what no producer does."""
        found: dict[str, Tensor] = {}
        for component in maps:
            parted = any(each.share.held is ShareKind.PART for each in component.inputs.values())
            for output, location in component.outputs.items():
                maker = names[component.component]
                tensor = self._at(location, placed, may_be_term=parted)
                if tensor is not None:
                    found[maker if output == "out" else f"{maker}.{output}"] = tensor
            for location in component.inputs.values():
                self._at(location, placed)
        return found

    def _at(
        self, location: TensorLocation, placed: set[str], *, may_be_term: bool = False
    ) -> Tensor | None:
        for place in location.alternatives:
            at = 0 if isinstance(place.at, str) else place.at
            if place.paired is not None and place.paired != (place.module in self._paired):
                continue
            tensors = [rank.get((place.module, place.of, at)) for rank in self._step.ranks]
            here = [self._real(each) for each in tensors if each is not None and each.ndim]
            if len(here) == len(tensors):
                placed.add(place.module)
                return self._one(place, here, may_be_term=may_be_term)
        return None

    def _real(self, tensor: Tensor) -> Tensor:
        """Drop the rows by which an engine pads a batch."""
        return tensor[: self._rows].reshape(min(self._rows, tensor.shape[0]), -1)

    def _one(self, place: TensorLocation, tensors: list[Tensor], *, may_be_term: bool) -> Tensor:
        if place.columns is not None:
            begin, end = place.columns
            tensors = [tensor[..., begin:end] for tensor in tensors]
        share = place.share
        if share.held is ShareKind.PART and tensors[0].shape[-1] == share.extents[0]:
            return tensors[0]
        if share.held is ShareKind.PART:
            return joined(place.module, share, tensors)
        if all(torch.equal(tensor, tensors[0]) for tensor in tensors[1:]):
            return tensors[0]
        if may_be_term:  # dumped before the sum over ranks
            return joined(place.module, TERM, tensors)
        self._apart.setdefault(place.module)
        return tensors[0]
