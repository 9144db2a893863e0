"""Write synthetic checkpoints: any config, layout and recipe, with weights like a trained model's.

A parameter depends only on the seed, the statistics and its logical name. So the same model in
another layout has the same values, each quantised as that layout's producer does (ModelOpt or
compressed-tensors for NVFP4, DeepSeek for FP8 and MXFP4), and any tensor can be made again alone.
Fused partners share their tensor scale and their input scale; dead experts are tiny and take the
input scale of the living.

With `sparse` the heads are real and the data are holes, so a checkpoint of any size takes no disk.

Sources: facts of ModelOpt's exports (input_scale = amax / (6 * 448), shared by w1 and w3; experts
that no token reached take the largest of all layers; V3.2: one for all experts of a layer).
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.checkpoint.view.quantisation_configs import config_files
from degarble.harness.checkpoint.write.plan import (
    SHARD_BYTES,
    PlannedTensor,
    WritePlan,
    shard_bytes_for,
)
from degarble.harness.checkpoint.write.writer import CompanionFiles, write
from degarble.harness.model.config.json_file import config_to_dict
from degarble.harness.model.layouts import Layout, layout_named
from degarble.harness.model.parameters import parameter_named, parameters
from degarble.harness.model.tensors import slots, tensors_of
from degarble.suites.support.synthetic.parts import Parts
from degarble.suites.support.synthetic.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.checkpoint.write.manifest import Manifest, ShardRecord
    from degarble.harness.checkpoint.write.plan import ShardPlan
    from degarble.harness.checkpoint.write.workers import Workers
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.parameters import Parameter
    from degarble.harness.model.recipes import Recipe
    from degarble.harness.model.tensors import Slot

GENERATION = "2"  # of the numbers below: raise it when the same seed gives other bytes


class Synthetic:
    """A model that never was trained. It makes the bytes of any tensor of its layout, by name."""

    def __init__(
        self,
        config: Config,
        layout: Layout | str,
        recipe: Recipe | str | None = None,
        *,
        seed: int = 0,
        statistics: Statistics | None = None,
    ) -> None:
        chosen = layout_named(layout, config) if isinstance(layout, str) else layout
        self.config = config
        self.layout = chosen if recipe is None else chosen.with_recipe(recipe)
        self.seed = seed
        self.statistics = statistics or Statistics()
        if type(seed) is not int or seed < 0:
            raise InvalidArgument("seed", seed, "an integer that is not negative", "Use 0.")
        self._parts = Parts(config, self.layout, seed, self.statistics)
        self._block: tuple[str, dict[str, list[Slot]]] = ("", {})

    def planned(self) -> tuple[PlannedTensor, ...]:
        """List the tensors of the layout; their keys are the parameters that they begin with."""
        keys: dict[str, str] = {}
        for slot in slots(self.config, self.layout):
            keys.setdefault(slot.tensor, slot.parameter.name)
        return tuple(
            PlannedTensor(each.name, str(each.dtype), each.shape, keys[each.name])
            for each in tensors_of(self.config, self.layout)
        )

    def sources(self) -> dict[str, str]:
        """Name all that the bytes depend on."""
        recipe = self.layout.recipe_for(self.config)
        facts = {
            "config": config_to_dict(self.config),
            "layout": [repr(self.layout), repr(recipe)],
            "statistics": asdict(self.statistics),
        }
        hashed = {
            name: hashlib.sha256(json.dumps(fact, sort_keys=True).encode()).hexdigest()
            for name, fact in facts.items()
        }
        return {"synthetic": GENERATION, "seed": str(self.seed), **hashed}

    def __call__(self, tensor: PlannedTensor) -> Iterator[Tensor]:
        """Yield the bytes of one tensor, in chunks of at most 16 MiB or a row of blocks."""
        for slot in self._slots(tensor.key)[tensor.name]:
            yield from self._parts.chunks(slot)

    def chunks(self, name: str) -> Iterator[Tensor]:
        """Yield the bytes of one tensor by its name alone."""
        for tensor in self.planned():
            if tensor.name == name:
                yield from self(tensor)
                return
        raise UnknownName.among("tensor", name, [each.name for each in self.planned()])

    def _slots(self, key: str) -> dict[str, list[Slot]]:
        """Place the parameters of the block that `key` belongs to; tensors with their slots."""
        parameter = parameter_named(self.config, key)
        place = parameter.block.prefix if parameter.block else key
        if self._block[0] != place:
            members = self._members[place] if parameter.block else [parameter]
            found: dict[str, list[Slot]] = defaultdict(list)
            for slot in slots(self.config, self.layout, members):
                found[slot.tensor].append(slot)
            for each in found.values():
                each.sort(key=lambda slot: slot.box.ranges)
            self._block = place, dict(found)
        return self._block[1]

    @property
    def _members(self) -> Mapping[str, list[Parameter]]:
        return _by_block(self.config)


_BY_BLOCK: dict[Config, Mapping[str, list[Parameter]]] = {}


def _by_block(config: Config) -> Mapping[str, list[Parameter]]:
    if config not in _BY_BLOCK:
        found: dict[str, list[Parameter]] = defaultdict(list)
        for parameter in parameters(config):
            if parameter.block:
                found[parameter.block.prefix].append(parameter)
        _BY_BLOCK.clear()
        _BY_BLOCK[config] = found
    return _BY_BLOCK[config]


def write_checkpoint(
    target: Path,
    model: Synthetic,
    *,
    sparse: bool = False,
    shards: int | None = None,
    workers: Workers = 1,
    progress: Callable[[ShardPlan, ShardRecord], None] | None = None,
) -> Manifest:
    """Write a synthetic model; it can be interrupted and resumed like any other output.

    `shards`: at most so many files; by default one for every 5 GB. `sparse`: true heads over holes.
    """
    tensors = model.planned()
    size = SHARD_BYTES if shards is None else shard_bytes_for(tensors, shards)
    plan = WritePlan.of(tensors, shard_bytes=size, sources=model.sources())
    ending = CompanionFiles(config_files(model.config, model.layout))
    return write(
        target, plan, None if sparse else model, ending, workers=workers, progress=progress
    )
