"""Quantise a checkpoint to ModelOpt's NVFP4 layout: plan the target, write shards, finish."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import InvalidArgument, LayoutMismatch, ScaleDirectionMismatch
from degarble.harness.base.files import read_small_file
from degarble.harness.checkpoint.read.types import LARGEST_INDEX, shown
from degarble.harness.checkpoint.transform import nvfp4_scales
from degarble.harness.checkpoint.transform.configs import companions, config_files
from degarble.harness.checkpoint.transform.nvfp4_scales import (
    Errors,
    NVFP4Rows,
    ScaleRule,
    quantise_rows,
    tensor_scale,
)
from degarble.harness.checkpoint.transform.pipeline import Transform
from degarble.harness.checkpoint.transform.quantise.calibration import InputScales, partners_of
from degarble.harness.checkpoint.transform.quantise.conversion_report import (
    REPORT,
    GroupScale,
    ShardFacts,
    report_bytes,
)
from degarble.harness.checkpoint.transform.source import row_values
from degarble.harness.checkpoint.view.stored import TORCH_DTYPES
from degarble.harness.checkpoint.view.view import FINGERPRINT_COVERS, fingerprint
from degarble.harness.checkpoint.write.disk import DISK, write_file
from degarble.harness.checkpoint.write.manifest import UNFINISHED
from degarble.harness.checkpoint.write.plan import PlannedTensor
from degarble.harness.checkpoint.write.writer import CompanionFiles, finish, write_shard
from degarble.harness.formats.fast.nvfp4 import largest_finite
from degarble.harness.formats.number_formats import MXFP4, NVFP4, ScaleDirection, block_format
from degarble.harness.formats.quantise import quantise
from degarble.harness.model.family import family_of
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.parameters import parameter_named, parameters
from degarble.harness.model.recipes import (
    BF16,
    Recipe,
    recipe_from_file,
    recipe_named,
)
from degarble.harness.model.tensors import PartKind, slots
from degarble.harness.model.types import RECIPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from degarble.harness.checkpoint.transform.quantise.calibration import Calibration
    from degarble.harness.checkpoint.view.stored import StoredWeight
    from degarble.harness.checkpoint.view.view import LogicalNames
    from degarble.harness.checkpoint.write.manifest import Manifest, ShardRecord
    from degarble.harness.checkpoint.write.plan import ShardPlan, WritePlan
    from degarble.harness.formats.weight import Weight
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.layouts import Layout
    from degarble.harness.model.parameters import Parameter
    from degarble.harness.model.tensors import Slot


# --------------------------------------------------------------------------------------------------
# The bytes, tensor by tensor, streamed from the source.
#
# For each parameter: copy codes that have the wanted format already, convert MXFP4 to NVFP4 exactly
# where that is possible, and quantise everything else from decoded float32 (or stored bfloat16)
# values. NVFP4 follows ModelOpt's dialect; other formats are canonical. Partners that an engine
# fuses share one tensor scale, so all of them are read to find the amax.
#
# Memory is a row block of four million elements and the block scales of one matrix. One thread, so
# that sums, and with them the report, do not depend on the machine.
#
# NaN and infinities in weights, NVFP4 with divisor scales (convert it first), and quantised
# activations without a calibration raise an error.

# Elements of a row block: 16 MiB in float32.
_BLOCK_ELEMENTS = 1 << 22
_PANEL = 128  # rows of the tallest block: every cut is a multiple, in source and target


class QuantisingProducer:
    """The producer of a job's planned tensors; `facts` collects the report."""

    def __init__(self, job: QuantiseJob) -> None:
        self._source = job.checkpoint
        self._job = job
        self._config = job.config
        self._recipe = job.layout.recipe_for(self._config)
        fusions = layout_named("vllm", self._config).fusions
        self._fusions = {member: fusion.members for fusion in fusions for member in fusion.members}
        self._groups: dict[tuple[str, ...], GroupScale] = {}
        self._slots: tuple[str, dict[str, Slot]] = ("", {})
        self._scales: tuple[str, Tensor] | None = None  # of the codes made last
        self._inputs: InputScales | None = None
        self.facts = ShardFacts()

    def check(self, chosen: Iterable[Parameter]) -> None:
        """Raise early for what would otherwise fail in the middle of the work."""
        wanted = []
        for parameter in chosen:
            formats = self._recipe.format_of(parameter)
            stored = self._source.stored(parameter.name)
            divides = stored.form.direction is ScaleDirection.ENCODE
            if divides and formats.weight == NVFP4.name:
                raise ScaleDirectionMismatch(
                    f"tensor scale of {parameter.name}",
                    "a divisor (compressed-tensors)",
                    "a source in ModelOpt's layout, or one that is not NVFP4",
                    "Convert it to BF16 first: `degarble convert --to bf16`.",
                )
            if formats.activation == NVFP4.name and not self._keeps_input_scale(stored):
                wanted.append(parameter)
        if wanted and self._job.calibration is None:
            raise InvalidArgument(
                "calibration",
                f"none, and {len(wanted)} linears such as {wanted[0].name} need input scales",
                "amax records of their inputs",
                "Pass --calibration with a capture, or take weights alone with `degarble convert"
                " --to nvfp4`: engines take uninitialised memory for a missing input_scale.",
            )
        if wanted:
            self._input_scales(wanted)

    def __call__(self, tensor: PlannedTensor) -> Iterator[Tensor]:
        """Yield the bytes of one tensor."""
        if self._slots[0] != tensor.key:
            parameter = parameter_named(self._config, tensor.key)
            found = slots(self._config, self._job.layout, [parameter])
            self._slots = tensor.key, {slot.tensor: slot for slot in found}
        slot = self._slots[1][tensor.name]
        stored = self._source.stored(tensor.key)
        if slot.part is PartKind.VALUE:
            yield from self._plain(slot, stored)
        elif slot.part is PartKind.CODES:
            yield from self._codes(slot.parameter, stored)
        elif slot.part is PartKind.BLOCK_SCALE:
            yield self._block_scales(slot.parameter, stored)
        elif slot.part is PartKind.TENSOR_SCALE:
            yield self._tensor_scale(slot.parameter, stored)
        else:
            yield self._input_scale(slot.parameter, stored)

    def _plain(self, slot: Slot, stored: StoredWeight) -> Iterator[Tensor]:
        """Yield unquantised values; report values that the target's dtype cannot hold."""
        dtype, rounded = TORCH_DTYPES[slot.dtype], 0
        for _, weight in stored.row_blocks(_elements(stored.shape)):
            integers = weight.value is not None and not weight.value.is_floating_point()
            values = weight.value if integers else row_values(weight)
            assert values is not None, "integers are values"
            made = values.to(dtype)
            if made.dtype.itemsize < values.dtype.itemsize:
                rounded += int((made.to(values.dtype) != values).sum())
            yield made
        action = "decoded" if stored.format else "copied"
        value = stored.form.parts.get(PartKind.VALUE)
        before = _name(stored) if value is None else value.dtype
        self.facts.add_plain(slot.parameter.name, action, before, slot.dtype, rounded)

    def _codes(self, parameter: Parameter, stored: StoredWeight) -> Iterator[Tensor]:
        """Yield codes, and keep the block scales that are computed with them."""
        wanted = self._recipe.format_of(parameter).weight
        scales: list[Tensor] = []
        if _name(stored) == wanted:
            for weight in _walk(stored):
                assert weight.codes is not None, "codes were stored"
                assert weight.block_scale is not None, "codes have scales"
                scales.append(weight.block_scale.clone())
                yield weight.codes
            self.facts.add_plain(parameter.name, "copied", wanted, wanted, 0)
        elif wanted == NVFP4.name:
            yield from self._nvfp4(parameter, stored, scales)
        else:
            for weight in _walk(stored):
                made = quantise(row_values(weight), block_format(wanted))
                scales.append(made.block_scale)
                yield made.codes
            self.facts.add_plain(parameter.name, "requantised", _name(stored), wanted, 0)
        self._scales = parameter.name, torch.cat(scales)

    def _nvfp4(
        self, parameter: Parameter, stored: StoredWeight, scales: list[Tensor]
    ) -> Iterator[Tensor]:
        group = self._group(parameter)
        errors, proven, row = Errors(), group.exact, 0
        for weight in _walk(stored):
            if group.exact:
                codes, source_scale = _mxfp4_of(weight)
                block_scale = nvfp4_scales.block_scales_of(source_scale, group.exponents)
                nvfp4_rows = NVFP4Rows(codes.view(torch.uint8), block_scale)
                proven &= nvfp4_scales.is_lossless(codes, source_scale, block_scale, group.scale)
            else:
                values = row_values(weight)
                nvfp4_rows = quantise_rows(values, group.scale, self._job.scale_rule)
                errors.add(row, values, nvfp4_rows, group.scale)
            row += nvfp4_rows.codes.shape[0]
            scales.append(nvfp4_rows.block_scale)
            yield nvfp4_rows.codes
        assert proven is group.exact, "an exact group must decode to the same numbers"
        self.facts.add_nvfp4(parameter.name, _name(stored), prod(stored.shape), group, errors)

    def _block_scales(self, parameter: Parameter, stored: StoredWeight) -> Tensor:
        if self._scales is None or self._scales[0] != parameter.name:
            for _ in self._codes(parameter, stored):
                pass
        assert self._scales is not None, "made with the codes"
        return self._scales[1]

    def _tensor_scale(self, parameter: Parameter, stored: StoredWeight) -> Tensor:
        if _name(stored) == NVFP4.name:
            kept = stored.weight().tensor_scale
            assert kept is not None, "NVFP4 has a tensor scale"
            return kept.clone()
        return torch.tensor(self._group(parameter).scale, dtype=torch.float32)

    def _input_scale(self, parameter: Parameter, stored: StoredWeight) -> Tensor:
        if self._keeps_input_scale(stored):
            kept = stored.weight().input_scale
            assert kept is not None, "asked for above"
            return kept.clone()
        scale = self._input_scales(()).scale_of(parameter)
        self.facts.add_input(parameter.name, scale)
        return torch.tensor(scale.scale, dtype=torch.float32)

    def _keeps_input_scale(self, stored: StoredWeight) -> bool:
        """Return whether the source's own input scale is kept: no calibration replaces it."""
        return PartKind.INPUT_SCALE in stored.form.parts and self._job.calibration is None

    def _input_scales(self, wanted: Iterable[Parameter]) -> InputScales:
        if self._inputs is None:
            assert self._job.calibration is not None, "check() has asked"
            self._inputs = InputScales(self._config, self._job.calibration, wanted)
        return self._inputs

    def _group(self, parameter: Parameter) -> GroupScale:
        """Return the tensor scale that a parameter shares with its partners."""
        # A partner in another format has no tensor scale to share.
        members = tuple(
            name
            for name in partners_of(parameter, self._fusions)
            if self._recipe.format_of(parameter_named(self._config, name)).weight == NVFP4.name
        )
        if members not in self._groups:
            self._groups[members] = self._measured(
                [self._source.stored(member) for member in members]
            )
        return self._groups[members]

    def _measured(self, members: list[StoredWeight]) -> GroupScale:
        why_not = ""
        if all(stored_weight.format == MXFP4 for stored_weight in members) and self._job.lossless:
            parts = [
                nvfp4_scales.exponents_of(*_mxfp4_of(weight))
                for stored_weight in members
                for weight in _walk(stored_weight)
            ]
            exponents = nvfp4_scales.join_exponents(parts)
            if nvfp4_scales.is_exact(exponents):
                scale = nvfp4_scales.tensor_scale_of(exponents)
                return GroupScale(scale, None, True, exponents, "")
            assert exponents is not None, "no exponents fit"
            why_not = f"exponents from {exponents.low} to {exponents.high}: E4M3 holds 18 of them"
        amax = 0.0
        for member in members:
            for weight in _walk(member):
                amax = max(amax, largest_finite(row_values(weight)))
        return GroupScale(tensor_scale(amax, self._job.scale_rule), amax, False, None, why_not)


def _elements(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a row block, so that blocks end at whole panels."""
    width = prod(shape[1:])
    return max(width, 1) * _PANEL * max(1, _BLOCK_ELEMENTS // (max(width, 1) * _PANEL))


def _walk(stored: StoredWeight) -> Iterator[Weight]:
    for _, weight in stored.row_blocks(_elements(stored.shape)):
        yield weight


def _mxfp4_of(weight: Weight) -> tuple[Tensor, Tensor]:
    assert weight.codes is not None, "MXFP4 has codes"
    assert weight.block_scale is not None, "MXFP4 has scales"
    return weight.codes, weight.block_scale


def _name(stored: StoredWeight) -> str:
    return BF16 if stored.format is None else stored.format.name


# --------------------------------------------------------------------------------------------------
# The job.
#
# Quantised activations need input scales, from a calibration or from a source that has them.
# Without either the job raises an error, because an engine would run such a checkpoint with
# uninitialised scales. `weight_only` leaves activations in BF16. The source must have every
# parameter (the drafter excepted), in names that a layout spells, and no NVFP4 of another producer.

GENERATION = "2"  # of the bytes below: raise it when the same job gives other ones
_NVFP4 = "NVFP4"


def recipe_for(name: str, config: Config) -> Recipe:
    """Return a built-in recipe, or read a custom one from a YAML file."""
    if name in RECIPE_NAMES or not name.endswith((".yaml", ".yml")):
        return recipe_named(name, config)
    return recipe_from_file(Path(name), config)


def weight_only(recipe: Recipe) -> Recipe:
    """Return the recipe with BF16 activations before NVFP4 weights."""
    rules = tuple(
        replace(rule, activation=BF16) if rule.activation == _NVFP4 else rule
        for rule in recipe.rules
    )
    return Recipe(recipe.name, rules)


def target_layout(config: Config, recipe: Recipe) -> Layout:
    """Return the names of a recipe's checkpoints: those of the release, which engines read.

    No loader reads V4 in transformers' own names: it stacks experts in its memory and has no
    names for single ones. V4 with NVFP4 throughout has no format for the drafter.
    """
    layout = layout_named("official", config).with_recipe(recipe)
    omitted = family_of(config).omitted_drafter(recipe.name)
    return replace(layout, no_drafter=omitted) if omitted else layout


@dataclass(frozen=True)
class QuantiseJob(Transform):
    """The quantisation of one source."""

    layout: Layout  # of the target, with its recipe
    scale_rule: ScaleRule = ScaleRule.AMAX
    lossless: bool = True  # take MXFP4 over exactly wherever its exponents allow
    calibration: Calibration | None = None

    @cached_property
    def config(self) -> Config:
        """The model's config; raise where no layout spells the source's names."""
        config = self.checkpoint.model
        if config is None or self.checkpoint.names is None:
            raise LayoutMismatch(
                f"names of {shown(str(self.source))}",
                "a config or names that no layout spells",
                "a DeepSeek-V4 or V3.2 checkpoint in a known spelling, with its config.json",
                "Convert its names first; `degarble audit` lists the unknown ones.",
            )
        return config

    @cached_property
    def names(self) -> LogicalNames:
        """The logical names of the source."""
        _ = self.config
        assert self.checkpoint.names is not None, "asked for with the config"
        return self.checkpoint.names

    @cached_property
    def producer(self) -> QuantisingProducer:
        """The producer of this process, kept between shards."""
        return QuantisingProducer(self)

    @cached_property
    def left_out(self) -> tuple[tuple[str, str], ...]:
        """The parameters that the target leaves out, with the reason.

        A source may only lack a drafter.
        """
        left_out, missing = [], []
        for parameter in parameters(self.config):
            reason = self.layout.omits(parameter, self.config)
            if parameter.name not in self.names.present:
                if parameter.block and parameter.block.is_drafter:
                    reason = reason or "the source has no drafter"
                else:
                    missing.append(parameter.name)
            if reason:
                left_out.append((parameter.name, reason))
        if missing:
            raise InvalidArgument(
                f"parameters in {shown(str(self.source))}",
                f"{len(missing)} missing, such as {missing[0]}",
                "every parameter that the config implies",
                "Run `degarble audit` on it; a part of a model cannot be quantised.",
            )
        return tuple(left_out)

    @cached_property
    def unclaimed(self) -> tuple[str, ...]:
        """The stored tensors that no parameter explains; nothing is made of them."""
        names = self.names
        modules = {names.module_of(parameter) for parameter in names.present.values()}
        claimed = {
            entry.name
            for module in modules
            for entry in self.checkpoint.form(module).parts.values()
        }
        return tuple(sorted(self.checkpoint.entries.keys() - claimed))

    def planned(self) -> list[PlannedTensor]:
        """List the tensors of the target; raise where the source lacks what the recipe needs."""
        absent = {name for name, _ in self.left_out}
        chosen = [
            parameter for parameter in parameters(self.config) if parameter.name not in absent
        ]
        tensors = [
            PlannedTensor(slot.tensor, str(slot.dtype), slot.shape, slot.parameter.name)
            for slot in slots(self.config, self.layout, chosen)
        ]
        self.producer.check(chosen)
        return tensors

    def plan_sources(self) -> dict[str, str]:
        """Return source and parameters, each with a fingerprint."""
        calibration = self.calibration
        return {
            "quantise": GENERATION,
            "source": fingerprint(self.checkpoint),
            "layout": hashlib.sha256(repr(self.layout).encode()).hexdigest(),
            "scale_rule": str(self.scale_rule),
            "lossless": str(self.lossless),
            "calibration": "none" if calibration is None else calibration.fingerprint,
        }

    def produce(self, tensor: PlannedTensor) -> Iterator[Tensor]:
        """Yield the bytes of one planned tensor."""
        return self.producer(tensor)

    def make_shard(self, target: Path, shard: ShardPlan) -> ShardRecord:
        """Write one shard, and its facts for the report next to it."""
        self.producer.facts = ShardFacts()
        last = shard.tensors[-1].name

        def produce(tensor: PlannedTensor) -> Iterator[Tensor]:
            yield from self.producer(tensor)
            if tensor.name == last:  # durable before the shard appears, so a shard is never without
                write_file(_facts_file(target, shard), self.producer.facts.to_bytes(), DISK)

        return write_shard(target, shard, produce)

    @cached_property
    def companions(self) -> CompanionFiles:
        """Configs, and the files that are copied; `finish` adds the report."""
        return CompanionFiles({**self._copied[0], **self._configs})

    @cached_property
    def _configs(self) -> dict[str, bytes]:
        return config_files(self.config, self.layout, self.checkpoint.config)

    @cached_property
    def _copied(self) -> tuple[dict[str, bytes], dict[str, str]]:
        return companions(self.source, taken=self._configs)

    def finish(self, target: Path, plan: WritePlan) -> Manifest:
        """Write report, configs and companions, and declare the checkpoint complete."""
        path = target / REPORT
        self.state.require_unchanged()
        files = self.companions.files
        if path.exists():
            report = read_small_file(path, LARGEST_INDEX)
        else:
            report = report_bytes(
                self._report_head(plan), [self._facts_of(target, shard) for shard in plan.shards]
            )
        self.state.require_unchanged()  # configs and lost facts may have been read just now
        if not path.exists():
            write_file(path, report, DISK)
        for shard in plan.shards:
            _facts_file(target, shard).unlink(missing_ok=True)
        return finish(target, plan, CompanionFiles({**files, REPORT: report}))

    def _facts_of(self, target: Path, shard: ShardPlan) -> ShardFacts:
        """Read the facts that make_shard wrote; compute them again if missing or changed."""
        path = _facts_file(target, shard)
        if path.exists():
            known = ShardFacts.from_bytes(read_small_file(path, LARGEST_INDEX))
            if known is not None:
                return known
        self.producer.facts = ShardFacts()
        for tensor in shard.tensors:
            for _ in self.producer(tensor):
                pass
        return self.producer.facts

    def _report_head(self, plan: WritePlan) -> dict[str, Any]:
        recipe = self.layout.recipe
        return {
            "source": self.source.name,
            "source_fingerprint": plan.sources["source"],
            "source_fingerprint_covers": FINGERPRINT_COVERS,
            "recipe": recipe.name if isinstance(recipe, Recipe) else recipe,
            "scale_rule": str(self.scale_rule),
            "dialect": "modelopt",
            "calibration": plan.sources["calibration"],
            "bytes": plan.data_bytes,
            "tensors": plan.tensors,
            "left_out": [{"parameter": name, "reason": reason} for name, reason in self.left_out],
            "unclaimed": list(self.unclaimed),
            "files_not_copied": self._copied[1],
        }


def _facts_file(target: Path, shard: ShardPlan) -> Path:
    return target / UNFINISHED / f"{shard.file}.facts"
