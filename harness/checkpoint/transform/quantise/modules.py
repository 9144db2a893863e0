"""Quantise chosen modules of any checkpoint to NVFP4, as ModelOpt's export writes them.

No table of the model is needed: a module that is chosen becomes codes, block scales, a tensor scale
that it shares with its partners, and an input scale where its inputs are quantised. Every other
tensor is copied as it is.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.base.version import VERSION
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.transform.nvfp4_scales import Errors, quantise_rows, tensor_scale
from degarble.harness.checkpoint.transform.quantise.calibration import (
    FULL_SCALE,
    InputScale,
    ScaleOrigin,
)
from degarble.harness.checkpoint.transform.quantise.conversion_report import (
    GroupScale,
    ShardFacts,
)
from degarble.harness.checkpoint.transform.quantise.job import QuantiseJob
from degarble.harness.checkpoint.transform.source import largest_magnitude, row_values, rows_of
from degarble.harness.checkpoint.view.quantisation_configs import json_files
from degarble.harness.checkpoint.view.view import fingerprint
from degarble.harness.checkpoint.write.plan import PlannedTensor
from degarble.harness.formats.fast.nvfp4 import largest_finite
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.model.recipes import BF16

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

_WEIGHT, _CODES, _SCALE = ".weight", 2, NVFP4.block[1]
_GROUP = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": _SCALE}


class ChosenModule(NamedTuple):
    """A module that is quantised. `partners`: with itself, those that share its tensor scale.

    `amax`: the largest input of these, seen in so many tokens; None: inputs stay as they are.
    `stacked`: one tensor [E, K, N] of experts, which share one tensor scale; its codes lie [E, K/2,
    N], as ModelOpt exports gpt-oss and Llama 4.
    """

    name: str
    partners: tuple[str, ...]
    amax: float | None = None
    tokens: int = 0
    origin: ScaleOrigin = ScaleOrigin.MEASURED
    stacked: bool = False

    @property
    def tensor(self) -> str:
        """Return the name of the tensor of values, and of codes."""
        return self.name if self.stacked else f"{self.name}{_WEIGHT}"

    @property
    def scale(self) -> str:
        """Return the name of the block scales."""
        return f"{self.name}_weight_scale" if self.stacked else f"{self.name}.weight_scale"

    @property
    def input_scale(self) -> str:
        """Return the name of the input scale."""
        return f"{self.name}{'_' if self.stacked else '.'}input_scale"


@dataclass(frozen=True)
class ModuleQuantiseJob(QuantiseJob):
    """The quantisation of some modules of one source; `ignored` are the linears that stay."""

    chosen: tuple[ChosenModule, ...] = ()
    ignored: tuple[str, ...] = ()

    @cached_property
    def by_name(self) -> dict[str, ChosenModule]:
        """Return the chosen modules by name."""
        return {module.name: module for module in self.chosen}

    @cached_property
    def producer(self) -> Any:
        """The producer of this process, kept between shards."""
        return _Producer(self)

    @cached_property
    def left_out(self) -> tuple[tuple[str, str], ...]:
        """Return nothing: every tensor is quantised or copied."""
        return ()

    @cached_property
    def unclaimed(self) -> tuple[str, ...]:
        """Return nothing, as above."""
        return ()

    def planned(self) -> list[PlannedTensor]:
        """List the tensors of the target; raise for a source that is quantised."""
        if self.checkpoint.quantisation:
            raise InvalidArgument(
                f"source of quantise, {shown(self.source.name)}", "quantised already",
                "BF16, F16 or F32 weights",
                f"Decode it first: degarble convert {shown(str(self.source))} DST --to bf16",
            )  # fmt: skip
        tensors = []
        for name, entry in self.checkpoint.entries.items():
            module = self.by_name.get(name.removesuffix(_WEIGHT))
            if module is None or name != module.tensor:
                tensors.append(PlannedTensor(name, entry.dtype, tuple(entry.shape), name))
                continue
            shapes = [
                tuple(
                    extent // part if axis == 1 else extent
                    for axis, extent in enumerate(entry.shape)
                )
                for part in (_CODES, _SCALE)
            ]
            tensors += [
                PlannedTensor(name, "U8", shapes[0], module.name),
                PlannedTensor(module.scale, "F8_E4M3", shapes[1], module.name),
                PlannedTensor(f"{module.scale}_2", "F32", (), module.name),
            ]
            if module.amax is not None:
                tensors.append(PlannedTensor(module.input_scale, "F32", (), module.name))
        return tensors

    def plan_sources(self) -> dict[str, str]:
        """Return source and parameters, each with a fingerprint."""
        return {
            "quantise": "modules 1",
            "source": fingerprint(self.checkpoint),
            "layout": hashlib.sha256(repr((self.chosen, self.ignored)).encode()).hexdigest(),
            "scale_rule": str(self.scale_rule),
            "calibration": "none" if self.calibration is None else self.calibration.fingerprint,
        }

    @cached_property
    def _configs(self) -> dict[str, bytes]:
        """Write config.json and hf_quant_config.json as ModelOpt does."""
        plain = all(module.amax is None for module in self.chosen)
        group = {"weights": _GROUP, "targets": ["Linear"]}
        group |= {} if plain else {"input_activations": _GROUP}
        algorithm = "W4A16_NVFP4" if plain else "NVFP4"
        producer = {"name": "degarble", "version": VERSION}
        stated = {
            "config_groups": {"group_0": group}, "ignore": list(self.ignored),
            "quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": _SCALE,
            "producer": producer, "quant_method": "modelopt",
        }  # fmt: skip
        beside = {
            "producer": producer,
            "quantization": {
                "quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": _SCALE,
                "exclude_modules": list(self.ignored),
            },
        }  # fmt: skip
        return json_files(dict(self.checkpoint.config), stated, beside)


class _Producer:
    """Makes the bytes of planned tensors; `facts` collects the report."""

    def __init__(self, job: ModuleQuantiseJob) -> None:
        self._job, self._source = job, job.checkpoint
        self._groups: dict[tuple[str, ...], GroupScale] = {}
        self._made: tuple[str, Tensor] | None = None  # block scales of the codes made last
        self.facts = ShardFacts()

    def __call__(self, tensor: PlannedTensor) -> Iterator[Tensor]:
        """Yield the bytes of one tensor."""
        module = self._job.by_name.get(tensor.key)
        if module is None:
            entry = self._source.entries[tensor.name]
            yield self._source.tensor(tensor.name)
            self.facts.add_plain(tensor.name, "copied", entry.dtype, entry.dtype, 0)
        elif tensor.name == module.tensor:
            yield from self._codes(module)
        elif tensor.name == f"{module.scale}_2":
            yield torch.tensor(self._group(module).scale, dtype=torch.float32)
        elif tensor.name == module.input_scale:
            yield self._input_scale(module)
        else:
            yield self._block_scales(module)

    def _codes(self, module: ChosenModule) -> Iterator[Tensor]:
        group, errors, scales, first = self._group(module), Errors(), list[Any](), 0
        for values in self._values(module):
            rows = quantise_rows(values, group.scale, self._job.scale_rule)
            errors.add(first, values, rows, group.scale)
            first += len(values)
            scales.append(rows.block_scale.T.contiguous() if module.stacked else rows.block_scale)
            yield rows.codes.T.contiguous() if module.stacked else rows.codes
        self._made = module.name, torch.cat(scales)
        elements = self._source.entries[module.tensor].elements
        self.facts.add_nvfp4(module.name, BF16, elements, group, errors)

    def _values(self, module: ChosenModule) -> Iterator[Tensor]:
        """Yield rows along the inputs: those of a matrix in panels, of a stack by experts."""
        if not module.stacked:
            for _, weight in rows_of(self._source.stored(module.name)):
                yield row_values(weight)
            return
        for expert in self._source.tensor(module.tensor):
            values = expert.T.contiguous()
            yield values if values.dtype in (torch.bfloat16, torch.float32) else values.float()
            self._source.release(module.tensor)

    def _block_scales(self, module: ChosenModule) -> Tensor:
        if self._made is None or self._made[0] != module.name:
            for _ in self._codes(module):
                pass
        assert self._made is not None, "made with the codes"
        return self._made[1]

    def _input_scale(self, module: ChosenModule) -> Tensor:
        assert module.amax is not None, "planned only with one"
        scale = float(np.float32(module.amax) / FULL_SCALE)
        self.facts.add_input(
            module.name, InputScale(scale, module.amax, module.tokens, module.origin)
        )
        return torch.tensor(scale, dtype=torch.float32)

    def _group(self, module: ChosenModule) -> GroupScale:
        """Return the tensor scale that a module shares with its partners."""
        if module.partners not in self._groups:
            if module.stacked:
                amax = max(largest_finite(values) for values in self._values(module))
            else:
                amax = float(largest_magnitude(map(self._source.stored, module.partners)))
            scale = tensor_scale(amax, self._job.scale_rule)
            self._groups[module.partners] = GroupScale(scale, amax, False, None, "")
        return self._groups[module.partners]
