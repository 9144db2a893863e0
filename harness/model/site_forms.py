"""The form of every site of a model: numbers, integers or codes, and the extents of one row.

The outputs of each role stand in two tables, in the shape letters of parameters.py; an input has
the form of the output that produces it. Drafter blocks have no forms. The number of rows depends
on the run, so a form only says what they count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache, singledispatch
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.formats.number_formats import FP32, block_format
from degarble.harness.model.components import components
from degarble.harness.model.config.config import V4Config, V32Config, unknown_family
from degarble.harness.model.parameters import extents_of, parameter_named, shape_letters

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


class _FormRow(NamedTuple):
    """Outputs of some roles: names with the extents of a row, in letters."""

    roles: str
    row: str
    outputs: str = "out"
    holds: ElementKind = ElementKind.NUMBERS
    counts: RowUnit = RowUnit.TOKENS


_I = ElementKind.INTEGERS
_BOTH = (
    _FormRow("embed", "D"),
    _FormRow("head", "V"),
    _FormRow("attn.wq_a attn.q_norm", "ql"),
    _FormRow("attn.indexer.wq_b", "IH*id"),
    _FormRow("attn.indexer.q", "IH id"),
    _FormRow("attn.indexer.weights_proj", "IH"),
    _FormRow("attn.indexer.scores", ANY),
    _FormRow("attn.indexer.topk", ANY, holds=_I),
    _FormRow("ffn.gate", "E"),
    _FormRow("ffn.topk", "k", "experts", _I),
    _FormRow("ffn.topk", "k", "weights"),
    _FormRow("ffn.experts.w13", "k 2*I"),
    _FormRow("ffn.experts.act_quant", "k I"),
    _FormRow("ffn.experts.w2", "k D"),
    _FormRow("ffn.experts.combine ffn.shared.w2 ffn.moe_sum", "D"),
)
_POOL, _INDEXER_POOL = "attn.compressor.pool", "attn.indexer.compressor.pool"
_V4 = (
    *_BOTH,
    _FormRow("attn.hc_pre ffn.hc_pre attn.norm ffn.norm attn.wo_b hc_head norm", "D"),
    _FormRow("attn.hc_pre ffn.hc_pre", "S", "post"),
    _FormRow("attn.hc_pre ffn.hc_pre", "S S", "mix"),
    _FormRow("attn.hc_post ffn.hc_post", "S D"),
    _FormRow("attn.wq_b attn.inverse_rope", "H*d"),
    _FormRow("attn.q_head_norm_rope attn.attend", "H d"),
    _FormRow("attn.wkv attn.kv_norm_rope attn.kv_write", "d"),
    _FormRow("attn.compressor.proj", "c*d", "latent gate"),
    _FormRow(_POOL, "d", counts=RowUnit.OTHERS),
    _FormRow(_POOL, "m*c c*d", "state_latent state_gate", counts=RowUnit.SEQUENCES),
    _FormRow("attn.compressor.write", "d", counts=RowUnit.OTHERS),
    _FormRow("attn.indexer.compressor.proj", "c*id", "latent gate"),
    _FormRow(_INDEXER_POOL, "id", counts=RowUnit.OTHERS),
    _FormRow(_INDEXER_POOL, "m*c c*id", "state_latent state_gate", counts=RowUnit.SEQUENCES),
    _FormRow(f"{_POOL} {_INDEXER_POOL}", "", "entry_offsets", _I, RowUnit.BOUNDS),
    _FormRow("attn.wo_a", "g*ol"),
    _FormRow("ffn.shared.w13", "2*I"),
    _FormRow("ffn.shared.act", "I"),
)
_V32 = (
    *_BOTH,
    _FormRow("attn.norm ffn.norm norm", "D", "out residual"),
    _FormRow("attn.wo ffn.w2", "D"),
    _FormRow("attn.wq_b", "H*n+H*p"),
    _FormRow("attn.rope", "H n+p", "q"),
    _FormRow("attn.rope", "p", "key"),
    _FormRow("attn.wkv_a attn.kv_write", "kl+p"),
    _FormRow("attn.kv_norm", "kl"),
    _FormRow("attn.wkv_b", "H*n+H*v"),
    _FormRow("attn.indexer.wk attn.indexer.k", "id"),
    _FormRow("attn.attend", "H*v"),
    _FormRow("ffn.w13", "2*F"),
    _FormRow("ffn.act", "F"),
    _FormRow("ffn.shared.w13", "2*X"),
    _FormRow("ffn.shared.act", "X"),
)
_CUT = {"latent": "kl", "rope": "p"}  # columns of V3.2's wkv_a and kv_write
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


@singledispatch
def declared_forms(config: Config, recipe: Recipe) -> Mapping[str, ComponentForms]:
    """Return the forms of every component outside drafters, by its name.

    Plain values may stand wherever codes may: a kernel can quantise its input itself. A family
    registers how, for its class of configs.
    """
    del recipe
    raise unknown_family(config)


@lru_cache(maxsize=8)
def _declared_forms(config: Config, recipe: Recipe) -> Mapping[str, ComponentForms]:
    found: dict[str, ComponentForms] = {}
    for component in (*components(config), *components(config, recipe)):
        if component.block is None or not component.block.is_drafter:
            known = found.get(component.name, ComponentForms({}, {}))
            made = _component_forms(config, component.role, component.block)
            outputs = {name: made[name] for name in component.outputs if name in made}
            inputs = {**known.inputs, **_input_forms(config, component)}
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


declared_forms.register(V4Config, _declared_forms)
declared_forms.register(V32Config, _declared_forms)


def _quantised_forms(config: Config, recipe: Recipe, linear: Component) -> dict[str, SiteForm]:
    """Return the forms of a linear's input as codes; how scales lie is left to the kernel."""
    weight = parameter_named(config, linear.weights[0])
    form = block_format(recipe.format_of(weight).activation)
    holds = ElementKind.NUMBERS if form.scale is FP32 else ElementKind.CODES
    scale = SiteForm(None, holds, RowUnit.OTHERS, dimensions=1)
    found = {"codes": _CODES, "block_scale": scale}
    return {**found, "tensor_scale": _TENSOR_SCALE} if form.tensor_scale else found


def _input_forms(config: Config, component: Component) -> Mapping[str, SiteForm]:
    found: dict[str, SiteForm] = {}
    for each in component.inputs:
        form = _form_of_input(config, component, each, found)
        if form is not None:
            found[each.name] = form
    return found


def _form_of_input(
    config: Config, component: Component, each: Input, earlier: Mapping[str, SiteForm]
) -> SiteForm | None:
    if each.via in _OUTSIDE:
        return _OUTSIDE[each.via]
    if each.via == "state":
        own = _component_forms(config, component.role, component.block).get(each.name)
        kept = earlier.get(each.name.removeprefix(_STATE))
        return own or (kept and replace(kept, counts=RowUnit.OTHERS))
    if len(each.sources) != 1:
        return None
    source = each.sources[0]
    form = _component_forms(config, source.role, _block_of(config, source)).get(
        source.name or "out"
    )
    if form is None or not each.via:
        return form
    letters = shape_letters(config)
    if each.via in _CUT:
        return replace(form, row=extents_of(_CUT[each.via], letters))
    return SiteForm(extents_of("S D", letters))


def _block_of(config: Config, site: Site) -> Block | None:
    return next((block for block in config.blocks if block.prefix == site.block), None)


@lru_cache(maxsize=1024)
def _component_forms(config: Config, role: str, block: Block | None) -> Mapping[str, SiteForm]:
    """Return the forms of what a role puts out where nothing is quantised."""
    if block is not None and block.is_drafter:
        return {}
    letters = shape_letters(config, block)
    return {
        name: SiteForm(_row(line.row, letters), line.holds, line.counts)
        for line in (_V4 if isinstance(config, V4Config) else _V32)
        if role in line.roles.split()
        for name in line.outputs.split()
    }


def _row(text: str, letters: Mapping[str, int]) -> tuple[int | None, ...]:
    return (None,) if text == ANY else extents_of(text, letters)
