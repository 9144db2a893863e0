"""The form of every site of a model: numbers, integers or codes, and the extents of one row.

The outputs of each role stand in a table of the family, in its shape letters; an input has
the form of the output that produces it. Drafter blocks have no forms. The number of rows depends
on the run, so a form only says what they count.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.formats.number_formats import FP32, block_format
from degarble.harness.model.components import components
from degarble.harness.model.parameters import extents_of, parameter_named, shape_letters
from degarble.harness.model.registry import registered_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.model.components import Component, Input
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.recipes import Recipe
    from degarble.harness.model.sites import Site
    from degarble.harness.model.types import Block

_STATE = "state_"
ANY = "*"  # an extent that depends on the run, such as the number of keys


class ElementKind(StrEnum):
    """Kinds of element that a site may have."""

    NUMBERS = "numbers"
    INTEGERS = "integers"
    CODES = "codes"


class RowUnit(StrEnum):
    """What the first extent of a site may count."""

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    BOUNDS = "bounds"  # one more than sequences
    OTHERS = "others"  # entries, or what earlier calls left


_FLOATS = frozenset({"BF16", "F16", "F32", "F64"})
_COUNTS = frozenset({"I64", "I32", "I16", "I8", "U32", "U16", "U8"})
_BYTES = frozenset({"U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"})
_DTYPES: Mapping[ElementKind, frozenset[str]] = {
    ElementKind.NUMBERS: _FLOATS,
    ElementKind.INTEGERS: _COUNTS,
    ElementKind.CODES: _BYTES,
}


@dataclass(frozen=True)
class SiteForm:
    """The form of one site. `row` are the extents of one row; None where they may be any."""

    row: tuple[int | None, ...] | None
    holds: ElementKind = ElementKind.NUMBERS
    counts: RowUnit = RowUnit.TOKENS
    dimensions: int = 0  # at least, where the extents of a row may be any

    def accepts(self, dtype: str) -> bool:
        """Return whether a tensor of this dtype (as safetensors names it) can be there."""
        return dtype in _DTYPES[self.holds]

    def laid_out(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the declared shape of a tensor with as many elements a row; None of any other.

        Others keep heads, groups or a dimension of one apart, or put them together.
        """
        if self.row is None:
            return shape if len(shape) >= self.dimensions else None
        known = [each for each in self.row if each is not None]
        if len(known) == len(self.row):
            fits = bool(shape) and prod(shape[1:]) == prod(known)
            return (shape[0], *known) if fits else None
        if len(shape) != len(self.row) + 1:
            return None
        same = all(a in {None, b} for a, b in zip(self.row, shape[1:], strict=True))
        return shape if same else None

    def __str__(self) -> str:
        if self.row is None:
            return f"{self.holds} in {self.dimensions} dimensions or more"
        inner = "".join(f", {'any' if each is None else each}" for each in self.row)
        return f"{self.holds} [{self.counts}{inner}]"


class FormRow(NamedTuple):
    """Outputs of some roles: names with the extents of a row, in letters."""

    roles: str
    row: str
    outputs: str = "out"
    holds: ElementKind = ElementKind.NUMBERS
    counts: RowUnit = RowUnit.TOKENS


_I = ElementKind.INTEGERS
_OUTSIDE = {
    "tokens": SiteForm((), _I),
    "positions": SiteForm((), _I),
    "offsets": SiteForm((), _I, RowUnit.BOUNDS),
}
_CODES = SiteForm(None, ElementKind.CODES, dimensions=2)
_TENSOR_SCALE = SiteForm(None, ElementKind.NUMBERS, RowUnit.OTHERS)  # one for all, or one a row


class ComponentForms(NamedTuple):
    """The forms of one component's inputs and outputs, by name."""

    inputs: Mapping[str, SiteForm]
    outputs: Mapping[str, SiteForm]


@dataclass(frozen=True, eq=False)
class FormTable:
    """The outputs of a family's roles, and the extents of inputs by how they come about (`via`)."""

    outputs: tuple[FormRow, ...]
    arriving: Mapping[str, str] = field(default_factory=dict)


def declared_forms(config: Config, recipe: Recipe) -> Mapping[str, ComponentForms]:
    """Return the forms of every component outside drafters, by its name.

    Plain values may stand wherever codes may: a kernel can quantise its input itself.
    """
    found: Mapping[str, ComponentForms] = registered_for(config).forms(config, recipe)
    return found


@lru_cache(maxsize=8)
def tabled_forms(config: Any, recipe: Recipe, table: FormTable) -> Mapping[str, ComponentForms]:
    """Return the forms that the rows of a table have under a config and a recipe."""
    found: dict[str, ComponentForms] = {}
    for component in (*components(config), *components(config, recipe)):
        if component.block is None or not component.block.is_drafter:
            known = found.get(component.name, ComponentForms({}, {}))
            made = _component_forms(config, table, component.role, component.block)
            outputs = {name: made[name] for name in component.outputs if name in made}
            inputs = {**known.inputs, **_input_forms(config, table, component)}
            found[component.name] = ComponentForms(inputs, {**known.outputs, **outputs})
    for component in components(config, recipe):
        codes = next((one for one in component.inputs if one.name == "codes"), None)
        if codes is not None and component.name in found:
            forms = _quantised_forms(config, recipe, component)
            maker = codes.sources[0].component
            found[component.name] = ComponentForms(
                {**found[component.name].inputs, **forms}, found[component.name].outputs
            )
            found[maker] = ComponentForms(found[maker].inputs, {**found[maker].outputs, **forms})
    return found


def _quantised_forms(config: Config, recipe: Recipe, linear: Component) -> dict[str, SiteForm]:
    """Return the forms of a linear's input as codes; how scales lie is left to the kernel."""
    weight = parameter_named(config, linear.weights[0])
    form = block_format(recipe.format_of(weight).activation)
    holds = ElementKind.NUMBERS if form.scale is FP32 else ElementKind.CODES
    scale = SiteForm(None, holds, RowUnit.OTHERS, dimensions=1)
    found = {"codes": _CODES, "block_scale": scale}
    return {**found, "tensor_scale": _TENSOR_SCALE} if form.tensor_scale else found


def _input_forms(config: Config, table: FormTable, component: Component) -> Mapping[str, SiteForm]:
    found: dict[str, SiteForm] = {}
    for each in component.inputs:
        form = _form_of_input(config, table, component, each, found)
        if form is not None:
            found[each.name] = form
    return found


def _form_of_input(
    config: Config,
    table: FormTable,
    component: Component,
    each: Input,
    earlier: Mapping[str, SiteForm],
) -> SiteForm | None:
    if each.via in _OUTSIDE:
        return _OUTSIDE[each.via]
    if each.via == "state":
        own = _component_forms(config, table, component.role, component.block).get(each.name)
        kept = earlier.get(each.name.removeprefix(_STATE))
        return own or (kept and replace(kept, counts=RowUnit.OTHERS))
    if len(each.sources) != 1:
        return None
    source = each.sources[0]
    made = _component_forms(config, table, source.role, _block_of(config, source))
    form = made.get(source.name or "out")
    if form is None or not each.via:
        return form
    return replace(form, row=extents_of(table.arriving[each.via], shape_letters(config)))


def _block_of(config: Config, site: Site) -> Block | None:
    return next((block for block in config.blocks if block.prefix == site.block), None)


@lru_cache(maxsize=1024)
def _component_forms(
    config: Config, table: FormTable, role: str, block: Block | None
) -> Mapping[str, SiteForm]:
    """Return the forms of what a role puts out where nothing is quantised."""
    if block is not None and block.is_drafter:
        return {}
    letters = shape_letters(config, block)
    return {
        name: SiteForm(_row(line.row, letters), line.holds, line.counts)
        for line in table.outputs
        if role in line.roles.split()
        for name in line.outputs.split()
    }


def _row(text: str, letters: Mapping[str, int]) -> tuple[int | None, ...]:
    return (None,) if text == ANY else extents_of(text, letters)
