"""List the components of a config under a recipe, and which outputs feed which inputs.

A component is the unit that is replayed and judged. It has a full name, inputs with the sites that
produce them, outputs, and the parameters that it reads. The tables of each family come first; then
they are laid out for the blocks of one config. `<linear>.act_quant` is inserted in front of every
linear whose input the recipe quantises; its codes and scales are then the linear's inputs. A recipe
must quantise one input of two fused weights alike.
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
from degarble.harness.model.types import Block, Kind, MlpType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from degarble.harness.model.config.config import Config, V4Config, V32Config
    from degarble.harness.model.parameters import Parameter


# --------------------------------------------------------------------------------------------------
# The wiring of each family
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


_X = "x=attn.norm.out"
_POS = "positions=@positions"
# Inputs and outputs of a pooling component.
_POOLED = (
    f"{_POS} token_offsets=@offsets state_latent=@state state_gate=@state",
    "out entry_offsets state_latent state_gate",
)
_RAGGED = f"{_POS} token_offsets=@offsets"
_SCORED = f"{_RAGGED} state_keys=@state"
_ROUTED = "experts=ffn.topk.experts"

V4_BLOCK_WIRING = (
    ComponentWiring("attn.hc_pre", "streams=@streams", "out post mix"),
    ComponentWiring("attn.norm", "x=attn.hc_pre.out"),
    ComponentWiring("attn.wq_a", _X),
    ComponentWiring("attn.q_norm", "x=attn.wq_a.out"),
    ComponentWiring("attn.wq_b", "x=attn.q_norm.out"),
    ComponentWiring("attn.q_head_norm_rope", f"x=attn.wq_b.out {_POS}"),
    ComponentWiring("attn.wkv", f"{_X} context=@context"),
    ComponentWiring("attn.kv_norm_rope", f"x=attn.wkv.out {_POS}"),
    ComponentWiring("attn.kv_write", "x=attn.kv_norm_rope.out"),
    ComponentWiring("attn.compressor.proj", _X, "latent gate", "compressor"),
    ComponentWiring(
        "attn.compressor.pool",
        f"latent=attn.compressor.proj.latent gate=attn.compressor.proj.gate {_POOLED[0]}",
        _POOLED[1],
        "compressor",
    ),
    ComponentWiring("attn.compressor.write", "x=attn.compressor.pool.out", "out", "compressor"),
    ComponentWiring("attn.indexer.wq_b", "x=attn.q_norm.out", "out", "indexer"),
    ComponentWiring("attn.indexer.q", f"x=attn.indexer.wq_b.out {_POS}", "out", "indexer"),
    ComponentWiring("attn.indexer.weights_proj", _X, "out", "indexer"),
    ComponentWiring("attn.indexer.compressor.proj", _X, "latent gate", "indexer"),
    ComponentWiring(
        "attn.indexer.compressor.pool",
        "latent=attn.indexer.compressor.proj.latent gate=attn.indexer.compressor.proj.gate"
        f" {_POOLED[0]}",
        _POOLED[1],
        "indexer",
    ),
    ComponentWiring(
        "attn.indexer.scores",
        "q=attn.indexer.q.out weights=attn.indexer.weights_proj.out"
        f" keys=attn.indexer.compressor.pool.out {_SCORED}",
        "out",
        "indexer",
    ),
    ComponentWiring("attn.indexer.topk", "scores=attn.indexer.scores.out", "out", "indexer"),
    ComponentWiring(
        "attn.attend",
        "q=attn.q_head_norm_rope.out window=attn.kv_write.out state_window=@state"
        " compressed=attn.compressor.write.out chosen=attn.indexer.topk.out"
        f" state_compressed=@state {_RAGGED}",
    ),
    ComponentWiring("attn.inverse_rope", f"x=attn.attend.out {_POS}"),
    ComponentWiring("attn.wo_a", "x=attn.inverse_rope.out"),
    ComponentWiring("attn.wo_b", "x=attn.wo_a.out"),
    ComponentWiring(
        "attn.hc_post",
        "x=attn.wo_b.out streams=@streams post=attn.hc_pre.post mix=attn.hc_pre.mix",
    ),
    ComponentWiring("ffn.hc_pre", "streams=attn.hc_post.out", "out post mix"),
    ComponentWiring("ffn.norm", "x=ffn.hc_pre.out"),
    ComponentWiring("ffn.gate", "x=ffn.norm.out"),
    ComponentWiring("ffn.topk", "logits=ffn.gate.out tokens=@tokens", "experts weights", "hash"),
    ComponentWiring("ffn.topk", "logits=ffn.gate.out", "experts weights", "scored"),
    ComponentWiring("ffn.experts.w13", f"x=ffn.norm.out {_ROUTED}"),
    ComponentWiring(
        "ffn.experts.act_quant", f"x=ffn.experts.w13.out {_ROUTED} weights=ffn.topk.weights"
    ),
    ComponentWiring("ffn.experts.w2", f"x=ffn.experts.act_quant.out {_ROUTED}"),
    ComponentWiring("ffn.experts.combine", "x=ffn.experts.w2.out weights=ffn.topk.weights"),
    ComponentWiring("ffn.shared.w13", "x=ffn.norm.out"),
    ComponentWiring("ffn.shared.act", "x=ffn.shared.w13.out"),
    ComponentWiring("ffn.shared.w2", "x=ffn.shared.act.out"),
    ComponentWiring("ffn.moe_sum", "routed=ffn.experts.combine.out shared=ffn.shared.w2.out"),
    ComponentWiring(
        "ffn.hc_post",
        "x=ffn.moe_sum.out streams=attn.hc_post.out post=ffn.hc_pre.post mix=ffn.hc_pre.mix",
    ),
)
# The ends of the model: lines before the first block and after the last.
V4_FIRST_WIRING = (ComponentWiring("embed", "tokens=@tokens"),)
V4_LAST_WIRING = (
    ComponentWiring("hc_head", "streams=@streams"),
    ComponentWiring("norm", "x=hc_head.out"),
    ComponentWiring("head", "x=norm.out"),
)
# `mtp` lines exist in MTP blocks; DSpark's drafter has several blocks, so its ends differ.
V4_DRAFTER_FIRST_WIRING = (
    ComponentWiring("embed", f"tokens=@tokens {_POS}", "out", "mtp, dspark first"),
    ComponentWiring("enorm", "x=embed.out", "out", "mtp"),
    ComponentWiring("hnorm", "x=@previous", "out", "mtp"),
    ComponentWiring("e_proj", "x=enorm.out", "out", "mtp"),
    ComponentWiring("h_proj", "x=hnorm.out", "out", "mtp"),
    ComponentWiring("join", "e=e_proj.out h=h_proj.out", "out", "mtp"),
    ComponentWiring("main_mean", "@targets", "out", "dspark first"),
    ComponentWiring("main_proj", "x=main_mean.out", "out", "dspark first"),
    ComponentWiring("main_norm", "x=main_proj.out", "out", "dspark first"),
)
V4_DRAFTER_LAST_WIRING = (
    ComponentWiring("hc_head", "streams=ffn.hc_post.out", "out", "mtp, dspark last"),
    ComponentWiring("norm", "x=hc_head.out", "out", "mtp, dspark last"),
    ComponentWiring("head", "x=norm.out", "out", "mtp, dspark last"),
    ComponentWiring("markov", "tokens=@tokens", "out hidden", "dspark last"),
    ComponentWiring("confidence", "x=norm.out markov=markov.hidden", "out", "dspark last"),
)

# The residual is a stream of its own: each norm adds its input to it and puts out both.
V32_BLOCK_WIRING = (
    ComponentWiring("attn.norm", "x=@stream residual=@residual", "out residual"),
    ComponentWiring("attn.wq_a", _X),
    ComponentWiring("attn.q_norm", "x=attn.wq_a.out"),
    ComponentWiring("attn.wq_b", "x=attn.q_norm.out"),
    ComponentWiring("attn.wkv_a", _X),
    ComponentWiring("attn.rope", f"q=attn.wq_b.out key=attn.wkv_a.out:rope {_POS}", "q key"),
    ComponentWiring("attn.kv_norm", "x=attn.wkv_a.out:latent"),
    ComponentWiring("attn.kv_write", "latent=attn.kv_norm.out key=attn.rope.key"),
    ComponentWiring("attn.wkv_b", "x=attn.kv_write.out:latent"),
    ComponentWiring("attn.indexer.wq_b", "x=attn.q_norm.out"),
    ComponentWiring("attn.indexer.q", f"x=attn.indexer.wq_b.out {_POS}"),
    ComponentWiring("attn.indexer.wk", _X),
    ComponentWiring("attn.indexer.k", f"x=attn.indexer.wk.out {_POS}"),
    ComponentWiring("attn.indexer.weights_proj", _X),
    ComponentWiring(
        "attn.indexer.scores",
        "q=attn.indexer.q.out weights=attn.indexer.weights_proj.out"
        f" keys=attn.indexer.k.out {_SCORED}",
    ),
    ComponentWiring("attn.indexer.topk", "scores=attn.indexer.scores.out"),
    ComponentWiring(
        "attn.attend",
        "q=attn.rope.q rows=attn.kv_write.out expanded=attn.wkv_b.out chosen=attn.indexer.topk.out"
        f" state_rows=@state state_expanded=@state {_RAGGED}",
    ),
    ComponentWiring("attn.wo", "x=attn.attend.out"),
    ComponentWiring("ffn.norm", "x=attn.wo.out residual=attn.norm.residual", "out residual"),
    ComponentWiring("ffn.w13", "x=ffn.norm.out", "out", "dense"),
    ComponentWiring("ffn.act", "x=ffn.w13.out", "out", "dense"),
    ComponentWiring("ffn.w2", "x=ffn.act.out", "out", "dense"),
    ComponentWiring("ffn.gate", "x=ffn.norm.out", "out", "moe"),
    ComponentWiring("ffn.topk", "logits=ffn.gate.out", "experts weights", "moe"),
    ComponentWiring("ffn.experts.w13", f"x=ffn.norm.out {_ROUTED}", "out", "moe"),
    ComponentWiring(
        "ffn.experts.act_quant",
        f"x=ffn.experts.w13.out {_ROUTED} weights=ffn.topk.weights",
        "out",
        "moe",
    ),
    ComponentWiring("ffn.experts.w2", f"x=ffn.experts.act_quant.out {_ROUTED}", "out", "moe"),
    ComponentWiring(
        "ffn.experts.combine", "x=ffn.experts.w2.out weights=ffn.topk.weights", "out", "moe"
    ),
    ComponentWiring("ffn.shared.w13", "x=ffn.norm.out", "out", "moe"),
    ComponentWiring("ffn.shared.act", "x=ffn.shared.w13.out", "out", "moe"),
    ComponentWiring("ffn.shared.w2", "x=ffn.shared.act.out", "out", "moe"),
    ComponentWiring(
        "ffn.moe_sum", "routed=ffn.experts.combine.out shared=ffn.shared.w2.out", "out", "moe"
    ),
)
V32_FIRST_WIRING = (ComponentWiring("embed", "tokens=@tokens"),)
V32_LAST_WIRING = (
    ComponentWiring("norm", "x=@stream residual=@residual", "out residual"),
    ComponentWiring("head", "x=norm.out"),
)
V32_DRAFTER_FIRST_WIRING = (
    ComponentWiring("embed", "tokens=@tokens"),
    ComponentWiring("enorm", "x=embed.out"),
    ComponentWiring("hnorm", "x=@previous"),
    ComponentWiring("join", "e=enorm.out h=hnorm.out"),
    ComponentWiring("eh_proj", "x=join.out"),
)
V32_DRAFTER_LAST_WIRING = (
    ComponentWiring("norm", "x=ffn.moe_sum.out residual=ffn.norm.residual", "out residual"),
    ComponentWiring("head", "x=norm.out"),
)


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


def entering_v32(config: V32Config, block: Block | None, before: Block | None) -> Mapping[str, str]:
    """Return what enters a block of V3.2: the stream and its residual."""
    del config
    if block is not None and block.is_drafter:
        # The drafter continues the normed stream (as vLLM's V3 drafter does; no primary source).
        previous = f"mtp.{block.index - 1}.norm.out" if block.index else "norm.out"
        return {"previous": previous, "stream": f"{block.prefix}.eh_proj.out"}
    if before is None:
        return {"stream": "embed.out"}
    last = "ffn.w2.out" if before.mlp_type is MlpType.DENSE else "ffn.moe_sum.out"
    return {
        "stream": f"{before.prefix}.{last}",
        "residual": f"{before.prefix}.ffn.norm.residual",
    }


def entering_v4(config: V4Config, block: Block | None, before: Block | None) -> Mapping[str, str]:
    """Return what enters a block of V4: the residual streams."""
    streams = f"{before.prefix}.ffn.hc_post.out" if before else "embed.out:streams"
    if block is None or not block.is_drafter:
        return {"streams": streams}
    if config.dspark is None:
        return {"previous": streams, "streams": f"{block.prefix}.join.out"}
    behind = enumerate(config.dspark.target_layer_ids)
    return {
        "streams": streams if block.index else f"{block.prefix}.embed.out:streams",
        "context": "mtp.0.main_norm.out",
        **{f"target_{i}": f"layers.{layer}.ffn.hc_post.out" for i, layer in behind},
    }


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
