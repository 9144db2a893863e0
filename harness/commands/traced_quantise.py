"""Choose what `degarble quantise` quantises in a model that transformers alone describes.

The recipes are ModelOpt's: `nvfp4-full` takes every linear but the head and routers,
`nvfp4-experts` the routed experts alone; a YAML file names parameters by patterns. Linears that
engines fuse share a tensor scale, and the largest input.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, LayoutMismatch
from degarble.harness.capture.engine.derived import PACKED
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.transform.nvfp4_scales import ScaleRule
from degarble.harness.checkpoint.transform.quantise.calibration import ScaleOrigin
from degarble.harness.checkpoint.transform.quantise.modules import (
    ChosenModule,
    ModuleQuantiseJob,
)
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.inference.traced import TracedWeights, meta_model, traced_config
from degarble.harness.model.layouts import Layout, Spelling
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import BF16, Recipe, Rule, recipe_from_file
from degarble.harness.model.types import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from degarble.harness.checkpoint.transform.quantise.calibration import Calibration
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.model.parameters import Parameter

# nvidia-modelopt 0.47 torch/quantization/config.py: what every default recipe leaves out.
_LEFT_OUT = re.compile(
    r"(^|\.)(lm_head|output_layer|proj_out|output)$|router|\.(gate|shared_expert_gate)$"
    r"|conv1d$|\.in_proj_[ab]$"
)
_EXPERT = re.compile(r"\.experts\.(\d+)\.([^.]+)$")
_PARTNERS = (*PACKED.values(), ("w1", "w3"))
# Stacks [E, K, N] of classes that do not say so themselves.
_TRANSPOSED = frozenset({"Llama4TextExperts"})
_WEIGHT, _MATRIX = ".weight", 2
_RECIPES = ("nvfp4-full", "nvfp4-experts")


def traced_job(
    checkpoint: Checkpoint, recipe: str, scale_rule: str, calibration: Calibration | None
) -> ModuleQuantiseJob:
    """Return the job for a checkpoint whose family has no tables."""
    config: Any = traced_config(checkpoint)
    chosen = _Chosen(checkpoint, config, _recipe(recipe, config))
    layout = Layout("modelopt", config.family, Spelling.HUGGINGFACE, "modelopt", chosen.recipe)
    return ModuleQuantiseJob(
        checkpoint.root, layout, ScaleRule(scale_rule), calibration=calibration,
        chosen=tuple(chosen.modules(calibration)), ignored=chosen.ignored,
    )  # fmt: skip


def _recipe(name: str, config: Any) -> Recipe:
    if name.endswith((".yaml", ".yml")):
        return recipe_from_file(Path(name), config)
    if name not in _RECIPES:
        raise InvalidArgument(
            "--recipe", name, f"{' or '.join(_RECIPES)}, or a YAML file",
            "The other built-in recipes are DeepSeek's own; see docs/families.md.",
        )  # fmt: skip
    return Recipe(name, (Rule("*", NVFP4.name, NVFP4.name),))


class _Chosen:
    """The modules that a recipe reaches."""

    def __init__(self, checkpoint: Checkpoint, config: Any, recipe: Recipe) -> None:
        self.recipe, self._family = recipe, config.raw.get("model_type", "model")
        self._built_in = recipe.name in _RECIPES
        weights = TracedWeights(checkpoint, config)
        self._parameters: dict[str, Parameter] = {}
        self._stacks, self._model = set[str](), meta_model(config)
        for parameter in parameters(config):
            of_experts = len(parameter.shape) > _MATRIX and ".experts." in parameter.row.hf
            if parameter.kind is not Kind.LINEAR and not of_experts:
                continue
            own = weights.single(parameter.name)
            if own is not None and len(parameter.shape) > _MATRIX:
                self._require_transposed(checkpoint, parameter)
                self._stacks.add(own)
            row = parameter.row._replace(kind=Kind.LINEAR)
            for module in [own] if own else weights.modules(parameter.name):
                self._parameters[module] = replace(parameter, row=row)
        reached = {module for module in self._parameters if self._weight(module) == NVFP4.name}
        self._reached = reached
        matrices = (
            name.removesuffix(_WEIGHT)
            for name, entry in checkpoint.entries.items()
            if name.endswith(_WEIGHT) and len(entry.shape) > 1
        )
        # Routers and embeddings as well: a loader that looks for linears meets them all.
        self.ignored = tuple(sorted({*matrices, *self._parameters} - reached))
        if not reached:
            raise InvalidArgument(
                f"recipe {recipe.name}", "no linear", "a linear whose width 16 divides",
                "Check its patterns against the parameters that `degarble audit --json` lists.",
            )  # fmt: skip

    def _require_transposed(self, checkpoint: Checkpoint, parameter: Parameter) -> None:
        """Raise for a stack [E, N, K], which ModelOpt parts into modules of other names."""
        owner = self._model.get_submodule(parameter.row.hf.rpartition(".")[0])
        if getattr(owner, "is_transposed", type(owner).__name__ in _TRANSPOSED):
            return
        raise LayoutMismatch(
            f"experts of {shown(checkpoint.root.name)}",
            f"one stack [experts, outputs, inputs] a layer, such as {shown(parameter.row.hf)}",
            "a module for every expert, or a stack [experts, inputs, outputs] as gpt-oss has",
            "Save the model with one module an expert, or leave its experts to ModelOpt.",
        )

    def _weight(self, module: str) -> str:
        parameter = self._parameters[module]
        if parameter.shape[1 if module in self._stacks else -1] % NVFP4.block[1]:
            return BF16
        if self._built_in and (_LEFT_OUT.search(module) or not self._is_meant(module)):
            return BF16
        weight = self.recipe.format_of(parameter).weight
        if weight not in {NVFP4.name, BF16}:
            raise InvalidArgument(
                f"recipe {self.recipe.name}: {parameter.name}", weight, "NVFP4 or BF16",
                "Write only these formats for this family.",
            )  # fmt: skip
        return weight

    def _is_meant(self, module: str) -> bool:
        routed = module in self._stacks or _EXPERT.search(module) is not None
        return self.recipe.name == "nvfp4-full" or routed

    def _partners(self, module: str) -> tuple[str, ...]:
        parent, _, leaf = module.rpartition(".")
        for leaves in _PARTNERS:
            members = tuple(f"{parent}.{each}" for each in leaves)
            if leaf in leaves and self._reached.issuperset(members):
                return members
        return (module,)

    def modules(self, calibration: Calibration | None) -> Iterator[ChosenModule]:
        """Yield the modules, with the ranges of their inputs where these are quantised."""
        missing = []
        records = {} if calibration is None else calibration.records
        self._require_known(records)
        for module in sorted(self._reached):
            partners = self._partners(module)
            if self.recipe.format_of(self._parameters[module]).activation == BF16:
                yield ChosenModule(module, partners, stacked=module in self._stacks)
                continue
            own = self._record(module, records)
            seen = [self._record(each, records) for each in partners]
            amax, tokens = max(seen)[0], own[1]
            if module in records and not tokens and _EXPERT.search(module):
                # No token reached it: the largest input of the same projection in any layer.
                amax = self._largest_of_experts(module, records)
                if amax:
                    yield ChosenModule(module, partners, amax, 0, ScaleOrigin.UNREACHED)
                    continue
            if not tokens or not amax:
                missing.append(module)
                continue
            origin = ScaleOrigin.PARTNER if amax > own[0] else ScaleOrigin.MEASURED
            stacked = module in self._stacks
            yield ChosenModule(module, partners, amax, tokens, origin, stacked)
        if missing:
            raise InvalidArgument(
                "calibration", f"none of {len(missing)} linears, such as {missing[0]}",
                "the largest input of every linear whose inputs are quantised",
                "Record them: degarble capture CKPT --amax-only; or pass a recipe in YAML without"
                " `activation`.",
            )  # fmt: skip

    def _require_known(self, records: Mapping[str, Any]) -> None:
        """Raise for records of linears that this model lacks: they were taken from another one."""
        known = set(self._parameters)
        for parameter in self._parameters.values():
            known.add(parameter.name)
            if len(parameter.shape) > _MATRIX:
                prefix, _, leaf = parameter.name.rpartition(".")
                known |= {f"{prefix}.{number}.{leaf}" for number in range(parameter.shape[0])}
        unknown = sorted(records.keys() - known)
        if unknown:
            raise InvalidArgument(
                f"amax record of {shown(unknown[0])}", "no linear",
                f"a linear of this {self._family}",
                "Calibrate with the model that is quantised, or remove the record.",
            )  # fmt: skip

    def _largest_of_experts(self, module: str, records: Mapping[str, Any]) -> float:
        leaves = {each.rpartition(".")[2] for each in self._partners(module)}
        alike = (
            self._record(each, records)[0]
            for each in self._reached
            if _EXPERT.search(each) and each.rpartition(".")[2] in leaves
        )
        return max(alike, default=0.0)

    def _record(self, module: str, records: Mapping[str, Any]) -> tuple[float, int]:
        """Return the record of a module: by its own name, or that of its parameter."""
        parameter = self._parameters[module]
        # A stack of experts has one parameter, and every expert inputs of its own.
        alone = module in self._stacks or len(parameter.shape) == _MATRIX
        for name in (module, parameter.name) if alone else (module,):
            if name in records:
                return records[name].amax, records[name].tokens
        if module not in self._stacks:
            return 0.0, 0
        prefix, _, leaf = parameter.name.rpartition(".")
        experts = (f"{prefix}.{number}.{leaf}" for number in range(parameter.shape[0]))
        seen = [records[name] for name in experts if name in records]
        return max((each.amax for each in seen), default=0.0), sum(each.tokens for each in seen)
