"""Map logical parameter names to stored modules: find each parameter of the model in a checkpoint.

Chooses the layout (spelling and fusion) that finds most of a checkpoint's names, and locates every
parameter: a module of its own, or a box in each tensor of a fused one. Formats and scales come from
the stored modules, not from a recipe. A missing parameter, and a shape other than the config
implies, raises an error. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.checkpoint.read.types import shown, unknown_name
from degarble.harness.model.layouts import LAYOUTS
from degarble.harness.model.parameters import EXPERT, parameter_named, parameters
from degarble.harness.model.recipes import BF16, Recipe, Rule
from degarble.harness.model.storage import Part
from degarble.harness.model.tensors import slots

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from degarble.harness.checkpoint.view.modules import ModuleTable, StoredForm
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.layouts import Fusion, Layout
    from degarble.harness.model.parameters import Parameter
    from degarble.harness.model.types import Box


class Placed(NamedTuple):
    """The location of a parameter: the module that holds it, and its box of each part.

    `boxes` is None where the module holds nothing else.
    """

    parameter: Parameter
    form: StoredForm
    boxes: Mapping[Part, Box] | None


@dataclass(frozen=True)
class LogicalNames:
    """The parameters of `config` found in the modules of `table`, as `layout` names them."""

    config: Config
    table: ModuleTable
    layout: Layout

    @cached_property
    def present(self) -> Mapping[str, Parameter]:
        """The parameters that have a tensor here, by logical name."""
        return MappingProxyType(
            {
                each.name: each
                for each in parameters(self.config)
                if not self.layout.omits(each, self.config)
                and self.module_of(each) in self.table.suffixes
            }
        )

    def module_of(self, parameter: Parameter) -> str:
        """Return the name of a parameter's module in this layout, whether it is present or not."""
        fusion = self._fusions.get(parameter.row.name)
        return self.layout.path_of(parameter, self.config, fusion.target if fusion else "")

    def is_fused(self, parameter: Parameter) -> bool:
        """Return whether this layout stores a parameter in a module that it shares with others."""
        return parameter.row.name in self._fusions

    def place(self, name: str) -> Placed:
        """Locate one parameter, with its shape checked against the config."""
        if name not in self.present:
            raise unknown_name("parameter in the checkpoint", name, self.present)
        parameter = self.present[name]
        form = self.table.form(self.module_of(parameter))
        fusion = self._fusions.get(parameter.row.name)
        boxes = None if fusion is None else self._boxes(parameter, fusion, form)
        if boxes is None and form.shape != parameter.shape:
            raise _shape_refused(parameter, form)
        return Placed(parameter, form, boxes)

    @cached_property
    def _fusions(self) -> Mapping[str, Fusion]:
        return {member: each for each in self.layout.fusions for member in each.members}

    def _boxes(self, parameter: Parameter, fusion: Fusion, form: StoredForm) -> Mapping[Part, Box]:
        """Locate a member in a fused module by the layout's boxes for the format that was found."""
        block = parameter.block
        assert block is not None, "nothing outside blocks is fused"
        names = (member.replace(EXPERT, str(parameter.expert)) for member in fusion.members)
        members = [parameter_named(self.config, f"{block.prefix}.{name}") for name in names]
        weight = BF16 if form.format is None else form.format.name
        activation = weight if Part.INPUT_SCALE in form.parts and weight == "NVFP4" else BF16
        layout = self.layout.with_recipe(Recipe("as stored", (Rule("*", weight, activation),)))
        found = {}
        for slot in slots(self.config, layout, members):
            if slot.parameter.name == parameter.name and slot.part in form.parts:
                entry = form.parts[slot.part]
                inside = len(slot.box.ranges) == len(entry.shape) and all(
                    stop <= extent
                    for (_, stop), extent in zip(slot.box.ranges, entry.shape, strict=True)
                )
                if not inside:
                    raise _shape_refused(parameter, form)
                found[slot.part] = slot.box
        return MappingProxyType(found)


def _shape_refused(parameter: Parameter, form: StoredForm) -> ShapeMismatch:
    stored = {str(part): list(entry.shape) for part, entry in form.parts.items()}
    return ShapeMismatch(
        f"{parameter.name}, stored as {shown(form.module)}",
        f"{list(form.shape)}, stored {stored}",
        f"{list(parameter.shape)}, as the config implies",
        "Check that config and shards are of one model, and that no prefix was mixed up.",
    )


def logical_names(config: Config, table: ModuleTable) -> LogicalNames | None:
    """Choose the layout that finds most names; None where it finds less than half."""
    best, best_hits, asked = None, 0, 0
    # One expert stands for all: their names differ by number only.
    sample = [each for each in parameters(config) if each.expert in (None, 0)]
    for layout in _spellings(config):
        names = LogicalNames(config, table, layout)
        wanted = [each for each in sample if not layout.omits(each, config)]
        hits = sum(names.module_of(each) in table.suffixes for each in wanted)
        if hits > best_hits:
            best, best_hits, asked = names, hits, len(wanted)
    return best if best_hits * 2 > asked else None


def _spellings(config: Config) -> Iterator[Layout]:
    """Yield one layout for each combination of spelling and fusion."""
    seen = set()
    for (family, _), layout in LAYOUTS.items():
        way = (layout.spelling, layout.fusions)
        if family == config.family and way not in seen:
            seen.add(way)
            yield layout
