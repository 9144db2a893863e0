"""Match the parameters that a config implies with the stored modules and their formats.

Every part of the structure audit starts from this inventory, as does the recipe of formats that a
checkpoint follows as it is stored. A fused module (several parameters in one tensor) is checked as
a whole; its members have the module's format.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.checkpoint.audit.structure.fused_checks import check_fused
from degarble.harness.checkpoint.audit.structure.module_checks import ModuleCheck, ModuleChecks
from degarble.harness.checkpoint.read.types import StoredLayout
from degarble.harness.model.parameters import EXPERT, parameters
from degarble.harness.model.recipes import BF16, Formats, Recipe, Rule
from degarble.harness.model.types import Kind

if TYPE_CHECKING:
    from degarble.harness.checkpoint.view.view import LogicalNames
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.layouts import Layout
    from degarble.harness.model.parameters import Parameter

NVFP4 = "NVFP4"


class Found(NamedTuple):
    """A parameter that is present, with the module that holds it."""

    parameter: Parameter
    module: str
    check: ModuleCheck

    @property
    def weight(self) -> str | None:
        """Name of its format; None where it could not be determined."""
        return self.check.weight


@dataclass
class Inventory:
    """The parameters of a config that a checkpoint has and lacks. Made by `take_inventory`."""

    config: Config
    layout: Layout  # spells the names; its suffixes are those that the checkpoint has
    found: list[Found] = field(default_factory=list)
    missing: list[tuple[Parameter, str]] = field(default_factory=list)
    fused: dict[str, list[Parameter]] = field(default_factory=dict)

    @cached_property
    def modules(self) -> frozenset[str]:
        """Stored modules that hold parameters."""
        return frozenset(each.module for each in self.found)

    @cached_property
    def by_name(self) -> dict[str, Found]:
        """Present parameters by logical name."""
        return {each.parameter.name: each for each in self.found}

    @property
    def linears(self) -> list[Found]:
        """Linears whose format could be determined."""
        kind = Kind.LINEAR
        return [each for each in self.found if each.parameter.kind is kind and each.weight]

    def path_of(self, found: Found) -> str:
        """Return a linear's unfused path in the layout, as configs name it."""
        if found.module not in self.fused:
            return found.module
        return self.layout.path_of(found.parameter, self.config)

    def layer_of(self, parameter: Parameter) -> int | None:
        """Return the number of a parameter's layer; drafters follow the decoder."""
        block = parameter.block
        if block is None:
            return None
        return block.index + (self.config.num_hidden_layers if block.is_drafter else 0)


def take_inventory(names: LogicalNames) -> Inventory:
    """Find every parameter for which the layout has a name, and check its module."""
    layout = names.layout
    if names.table.layout() is StoredLayout.COMPRESSED_TENSORS:
        layout = replace(layout, suffixes="compressed-tensors")
    inventory = Inventory(names.config, layout)
    checks = ModuleChecks(names.table)
    present = names.table.suffixes
    fused: dict[str, list[Parameter]] = defaultdict(list)
    for parameter in parameters(names.config):
        if names.layout.omits(parameter, names.config):
            continue
        module = names.module_of(parameter)
        if module not in present:
            inventory.missing.append((parameter, module))
        elif names.is_fused(parameter):
            fused[module].append(parameter)
        else:
            inventory.found.append(Found(parameter, module, checks.check(parameter, module)))
    for module, members in fused.items():
        check = check_fused(names, module, members)
        inventory.found.extend(Found(each, module, check) for each in members)
    inventory.fused = dict(fused)
    return inventory


def stored_recipe(inventory: Inventory) -> Recipe:
    """Return the recipe that a checkpoint follows as it is stored.

    It has one rule for each row of the parameter table, and one more for each block where the row
    differs. Where experts of one block differ, the most frequent format counts, because engines
    stack them.
    """
    counts: dict[str, dict[str, Counter[Formats]]] = defaultdict(lambda: defaultdict(Counter))
    for each in inventory.linears:
        block, name = each.parameter.block, each.parameter.row.name.replace(EXPERT, "*")
        everywhere = f"{block.scope}.*.{name}" if block else name
        here = f"{block.prefix}.{name}" if block else name
        counts[everywhere][here][_formats(each)] += 1
    rules, exceptions = [], []
    for everywhere, places in counts.items():
        common = sum(places.values(), Counter()).most_common(1)[0][0]
        rules.append(Rule(everywhere, *common))
        for here, found in places.items():
            formats = found.most_common(1)[0][0]
            if formats != common:
                exceptions.append(Rule(here, *formats))
    # Exceptions come first: the first rule that matches decides.
    return Recipe("as stored", (*exceptions, *rules))


def _formats(found: Found) -> Formats:
    weight = found.weight or BF16
    quantised = weight == NVFP4 and found.check.has_input_scale
    return Formats(weight, weight if quantised else BF16)
