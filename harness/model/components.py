"""List the components of a config under a recipe, and which outputs feed which inputs.

A component is the unit that is replayed and judged. It has a full name, inputs with the sites that
produce them, outputs, and the parameters that it reads. The table of its family is laid out for the
blocks of one config. `<linear>.act_quant` is inserted in front of every linear whose input the
recipe quantises; its codes and scales are then the linear's inputs. A recipe must quantise one
input of two fused weights alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import LayoutMismatch, UnknownName
from degarble.harness.formats.number_formats import block_format
from degarble.harness.model.parameters import WHERE, parameters
from degarble.harness.model.recipes import BF16, Recipe, recipe_named
from degarble.harness.model.registry import registered_for
from degarble.harness.model.sites import Port, Site, parse_site
from degarble.harness.model.types import Block, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from degarble.harness.model.config.config import Config
    from degarble.harness.model.parameters import Parameter


# --------------------------------------------------------------------------------------------------
# The wiring of a family
#
# One line a component: name, inputs with their producers, outputs, and the blocks it is in. A
# producer is an output in the same block (`attn.norm.out`) or a word with an `@`:
#
#     @tokens @positions @offsets @state   from outside: ids, positions, where sequences begin, what
#                                          earlier calls left of every sequence
#     @streams @stream @residual           what enters the block
#     @previous @context @targets          what a drafter takes from the main model
#
# A word after a colon says how the input comes from its producers; without one it is equal:
#
#     :streams   repeated, one a stream      :latent :rope   these columns of it
#
# An input whose producer does not exist in a block is left out there, and its `state_` with it.
# `<linear>.act_quant` follows from the recipe and has no line here; but `ffn.experts.act_quant` has
# one, because it also computes SwiGLU and applies the routing weight.


class ComponentWiring(NamedTuple):
    """One line of a table."""

    name: str
    inputs: str
    outputs: str = "out"
    where: str = "all"
    kind: str = ""  # the word by which it is judged, where that is not its name


# --------------------------------------------------------------------------------------------------
# The components of one config

OUTSIDE = ("tokens", "positions", "offsets", "state")


@dataclass(frozen=True)
class Input:
    """One input of a component: the sites that produce it, and how.

    `via` is empty where the input equals its one source; else a word of the wiring table, or of
    OUTSIDE where no component produces it.
    """

    name: str
    sources: tuple[Site, ...]
    via: str = ""


@dataclass(frozen=True)
class Component:
    """A function between sites. `block` is None for the ends of the model."""

    name: str
    role: str
    block: Block | None
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]  # the plain `.out` is called out
    weights: tuple[str, ...] = ()
    input_scales: tuple[str, ...] = ()  # parameters whose stored input_scale it reads
    kind: str = ""  # what it computes, where the role does not say it

    @property
    def judged_as(self) -> str:
        """Return the word by which rules of rounding and conventions are looked up."""
        return self.kind or self.role

    @property
    def layer(self) -> int | None:
        """Return the decoder layer; None at the ends and in a drafter block."""
        return None if self.block is None or self.block.is_drafter else self.block.index

    @property
    def sites(self) -> tuple[Site, ...]:
        """Return every site of this component, inputs first."""
        ins = (Site(self.name, Port.IN, each.name) for each in self.inputs)
        return (*ins, *(_output(self.name, output) for output in self.outputs))


def components(config: Config, recipe: Recipe | None = None) -> tuple[Component, ...]:
    """List the components in the order in which they run; without a recipe nothing is quantised."""
    chosen = recipe or recipe_named("bf16", config)
    found: tuple[Component, ...] = registered_for(config).components(config, chosen)
    return found


def component_named(config: Config, name: str, recipe: Recipe | None = None) -> Component:
    """Look a component up by its full name."""
    known = _by_name(config, recipe or recipe_named("bf16", config))
    if name not in known:
        raise UnknownName.among("component", name, known)
    return known[name]


def site_named(config: Config, text: str, recipe: Recipe | None = None) -> Site:
    """Parse a site and raise if this config does not have it."""
    site = parse_site(text)
    component = component_named(config, site.component, recipe)
    if site not in component.sites:
        raise UnknownName.among("site", text, (str(each) for each in component.sites))
    return site


@lru_cache(maxsize=8)
def _by_name(config: Config, recipe: Recipe) -> dict[str, Component]:
    return {component.name: component for component in components(config, recipe)}


@dataclass(frozen=True, eq=False)
class Wiring:
    """The lines of a family: the model's ends, its blocks, and the ends of a drafter's block.

    `entering` returns the outputs that the words with an @ stand for, in one block or in the last
    end (None), given the block before.
    """

    first: tuple[ComponentWiring, ...]
    block: tuple[ComponentWiring, ...]
    last: tuple[ComponentWiring, ...]
    entering: Callable[[Any, Block | None, Block | None], Mapping[str, str]]
    drafter_first: tuple[ComponentWiring, ...] = ()
    drafter_last: tuple[ComponentWiring, ...] = ()


@lru_cache(maxsize=8)
def wired_components(config: Any, recipe: Recipe, wiring: Wiring) -> tuple[Component, ...]:
    """Lay the lines of a family out for the blocks of a config, under a recipe."""
    readers: dict[str, list[Parameter]] = {}
    for parameter in parameters(config):
        readers.setdefault(parameter.component, []).append(parameter)
    found: list[Component] = []
    for block, lines in _plan(config, wiring):
        present = {line.name for line in lines}
        before = config.layers[-1] if block is None else _before(config, block)
        outside = wiring.entering(config, block, before)
        for line in lines:
            component = _laid_out(line, block, present, outside)
            read = _read_by(component, readers)
            component = replace(component, weights=tuple(each.name for each in read))
            feeds = readers.get(component.name.replace("experts.act_quant", "experts.w2"), [])
            found.extend(_quantised(component, read, feeds, recipe))
    return tuple(found)


def _read_by(component: Component, readers: Mapping[str, list[Parameter]]) -> Sequence[Parameter]:
    """Return what a component reads, the parameters that it shares with another one included."""
    own = readers.get(component.name, [])
    if not own and component.role in {"embed", "head"}:
        return readers[component.role]  # V4's drafter has none of its own
    if component.role == "attn.attend" and not own:
        # V3.2, absorbed: attention itself multiplies by the expanding matrix.
        return readers.get(component.name.replace("attend", "wkv_b"), [])
    return own


def _plan(config: Config, wiring: Wiring) -> Iterator[tuple[Block | None, list[ComponentWiring]]]:
    """Yield each block with its lines; None is the model's two ends."""
    yield None, list(wiring.first)
    for block in config.layers:
        yield block, _present(wiring.block, block, config)
    yield None, list(wiring.last)
    drafter = (*wiring.drafter_first, *wiring.block, *wiring.drafter_last)
    for block in config.blocks[len(config.layers) :]:
        yield block, _present(drafter, block, config)


def _present(
    lines: Sequence[ComponentWiring], block: Block, config: Config
) -> list[ComponentWiring]:
    places = {name: exists(block, config) for name, exists in WHERE.items()}
    return [line for line in lines if any(places[each] for each in line.where.split(", "))]


def _before(config: Config, block: Block) -> Block | None:
    at = config.blocks.index(block)
    return config.blocks[at - 1] if at else None


def _laid_out(
    line: ComponentWiring, block: Block | None, present: set[str], outside: Mapping[str, str]
) -> Component:
    """Lay one line out in its block: full names, and the inputs that exist there."""
    prefix = f"{block.prefix}." if block else ""
    words = line.inputs.split()
    if words == ["@targets"]:
        words = [f"{name}=@{name}" for name in outside if name.startswith("target_")]
    inputs: list[Input] = []
    for word in words:
        name, _, text = word.partition("=")
        producers, _, via = text.partition(":")
        entering = producers.removeprefix("@")
        if entering in OUTSIDE:
            # What earlier calls left of an input falls away with it.
            if entering != "state" or name.removeprefix("state_") in {i.name for i in inputs}:
                inputs.append(Input(name, (), entering))
        elif producers.startswith("@"):
            if entering in outside:
                producer, _, via = outside[entering].partition(":")
                inputs.append(Input(name, (_site(producer),), via))
        elif producers.rpartition(".")[0] in present:
            inputs.append(Input(name, (_site(prefix + producers),), via))
    outputs = tuple(line.outputs.split())
    name = prefix + line.name
    return Component(name, line.name, block, tuple(inputs), outputs, kind=line.kind)


def _site(producer: str) -> Site:
    """Turn `attn.hc_pre.post` into the site attn.hc_pre.out.post."""
    component, _, name = producer.rpartition(".")
    return _output(component, name)


def _output(component: str, name: str) -> Site:
    return Site(component, Port.OUT, "" if name == "out" else name)


def _quantised(
    component: Component, read: Sequence[Parameter], feeds: Sequence[Parameter], recipe: Recipe
) -> Iterator[Component]:
    """Yield the component under the recipe, after an act_quant where one is needed."""
    if component.role == "ffn.experts.act_quant":
        activation = _activation(component.name, feeds, recipe)
        if activation != BF16:
            scales = tuple(feed.name for feed in feeds) if _is_static(activation) else ()
            outputs = _parts(activation)
            component = replace(component, outputs=outputs, input_scales=scales)
        yield component
        return
    yield from quantised_input(component, read, recipe)


def quantised_input(
    component: Component, read: Sequence[Parameter], recipe: Recipe
) -> Iterator[Component]:
    """Yield the component whose weights these are, after an act_quant where the recipe has one."""
    activation = _activation(component.name, read, recipe)
    x = next((each for each in component.inputs if each.name == "x"), None)
    if activation == BF16 or x is None:
        yield component
        return
    maker = f"{component.name}.act_quant"
    if component.role == "ffn.experts.w2":
        maker = x.sources[0].component
    else:
        kept = (x.name, "experts") if _is_static(activation) else (x.name,)
        yield replace(
            component,
            name=maker,
            role=f"{component.role}.act_quant",
            kind=f"{component.kind}.act_quant" if component.kind else "",
            inputs=tuple(each for each in component.inputs if each.name in kept),
            outputs=_parts(activation),
            weights=(),
            input_scales=tuple(each.name for each in read) if _is_static(activation) else (),
        )
    codes = tuple(Input(part, (_output(maker, part),)) for part in _parts(activation))
    rest = tuple(each for each in component.inputs if each is not x)
    yield replace(component, inputs=(*codes, *rest))


def _is_static(activation: str) -> bool:
    """Return whether a format takes a calibrated scale from the checkpoint."""
    return block_format(activation).tensor_scale


def _parts(activation: str) -> tuple[str, ...]:
    """Name the outputs of an act_quant."""
    return ("codes", "block_scale", *(("tensor_scale",) if _is_static(activation) else ()))


def _activation(component: str, read: Sequence[Parameter], recipe: Recipe) -> str:
    """Return the one format of a component's input, or refuse two."""
    found: dict[str, str] = {}
    for parameter in read:
        if parameter.kind is Kind.LINEAR:
            found.setdefault(recipe.format_of(parameter).activation, parameter.name)
    if len(found) > 1:
        raise LayoutMismatch(
            f"activations of {component}",
            ", ".join(f"{name}: {form}" for form, name in found.items()),
            "one format for all weights that share the input",
            f"Make the rules of recipe {recipe.name} agree.",
        )
    return next(iter(found), BF16)
