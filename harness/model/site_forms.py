"""The form of every site of a model: numbers, integers or codes, and the extents of one row.

The outputs of each role stand in two tables, in the shape letters of parameters.py; an input has
the form of the output that produces it. Drafter blocks have no forms. The number of rows depends
on the run, so a form only says what they count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.formats.number_formats import FP32, block_format
from degarble.harness.model.components import components
from degarble.harness.model.config.config import V4Config
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


class Holds(StrEnum):
    """Kinds of element that a site may have."""

    NUMBERS = "numbers"
    INTEGERS = "integers"
    CODES = "codes"


class Rows(StrEnum):
    """What the first extent of a site may count."""

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    BOUNDS = "bounds"  # one more than sequences
    OTHERS = "others"  # entries, or what earlier calls left


_FLOATS = frozenset({"BF16", "F16", "F32", "F64"})
_COUNTS = frozenset({"I64", "I32", "I16", "I8", "U32", "U16", "U8"})
_BYTES = frozenset({"U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"})
_DTYPES: Mapping[Holds, frozenset[str]] = {
    Holds.NUMBERS: _FLOATS,
    Holds.INTEGERS: _COUNTS,
    Holds.CODES: _BYTES,
}


@dataclass(frozen=True)
class SiteForm:
    """The form of one site. `row` are the extents of one row; None where they may be any."""

    row: tuple[int | None, ...] | None
    holds: Holds = Holds.NUMBERS
    counts: Rows = Rows.TOKENS
    dimensions: int = 0  # at least, where the extents of a row may be any

    def takes(self, dtype: str) -> bool:
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


class _Line(NamedTuple):
    """Outputs of some roles: names with the extents of a row, in letters."""

    roles: str
    row: str
    outputs: str = "out"
    holds: Holds = Holds.NUMBERS
    counts: Rows = Rows.TOKENS


_I = Holds.INTEGERS
_BOTH = (
    _Line("embed", "D"),
    _Line("head", "V"),
    _Line("attn.wq_a attn.q_norm", "ql"),
    _Line("attn.indexer.wq_b", "IH*id"),
    _Line("attn.indexer.q", "IH id"),
    _Line("attn.indexer.weights_proj", "IH"),
    _Line("attn.indexer.scores", ANY),
    _Line("attn.indexer.topk", ANY, holds=_I),
    _Line("ffn.gate", "E"),
    _Line("ffn.topk", "k", "experts", _I),
    _Line("ffn.topk", "k", "weights"),
    _Line("ffn.experts.w13", "k 2*I"),
    _Line("ffn.experts.act_quant", "k I"),
    _Line("ffn.experts.w2", "k D"),
    _Line("ffn.experts.combine ffn.shared.w2 ffn.moe_sum", "D"),
)
_POOL, _INDEXER_POOL = "attn.compressor.pool", "attn.indexer.compressor.pool"
_V4 = (
    *_BOTH,
    _Line("attn.hc_pre ffn.hc_pre attn.norm ffn.norm attn.wo_b hc_head norm", "D"),
    _Line("attn.hc_pre ffn.hc_pre", "S", "post"),
    _Line("attn.hc_pre ffn.hc_pre", "S S", "mix"),
    _Line("attn.hc_post ffn.hc_post", "S D"),
    _Line("attn.wq_b attn.inverse_rope", "H*d"),
    _Line("attn.q_head_norm_rope attn.attend", "H d"),
    _Line("attn.wkv attn.kv_norm_rope attn.kv_write", "d"),
    _Line("attn.compressor.proj", "c*d", "latent gate"),
    _Line(_POOL, "d", counts=Rows.OTHERS),
    _Line(_POOL, "m*c c*d", "state_latent state_gate", counts=Rows.SEQUENCES),
    _Line("attn.compressor.write", "d", counts=Rows.OTHERS),
    _Line("attn.indexer.compressor.proj", "c*id", "latent gate"),
    _Line(_INDEXER_POOL, "id", counts=Rows.OTHERS),
    _Line(_INDEXER_POOL, "m*c c*id", "state_latent state_gate", counts=Rows.SEQUENCES),
    _Line(f"{_POOL} {_INDEXER_POOL}", "", "entry_offsets", _I, Rows.BOUNDS),
    _Line("attn.wo_a", "g*ol"),
    _Line("ffn.shared.w13", "2*I"),
    _Line("ffn.shared.act", "I"),
)
_V32 = (
    *_BOTH,
    _Line("attn.norm ffn.norm norm", "D", "out residual"),
    _Line("attn.wo ffn.w2", "D"),
    _Line("attn.wq_b", "H*n+H*p"),
    _Line("attn.rope", "H n+p", "q"),
    _Line("attn.rope", "p", "key"),
    _Line("attn.wkv_a attn.kv_write", "kl+p"),
    _Line("attn.kv_norm", "kl"),
    _Line("attn.wkv_b", "H*n+H*v"),
    _Line("attn.indexer.wk attn.indexer.k", "id"),
    _Line("attn.attend", "H*v"),
    _Line("ffn.w13", "2*F"),
    _Line("ffn.act", "F"),
    _Line("ffn.shared.w13", "2*X"),
    _Line("ffn.shared.act", "X"),
)
_CUT = {"latent": "kl", "rope": "p"}  # columns of V3.2's wkv_a and kv_write
_OUTSIDE = {
    "tokens": SiteForm((), _I),
    "positions": SiteForm((), _I),
    "offsets": SiteForm((), _I, Rows.BOUNDS),
}
_CODES = SiteForm(None, Holds.CODES, dimensions=2)
_TENSOR_SCALE = SiteForm(None, Holds.NUMBERS, Rows.OTHERS)  # one for all, or one a row


class Forms(NamedTuple):
    """The forms of one component's inputs and outputs, by name."""

    inputs: Mapping[str, SiteForm]
    outputs: Mapping[str, SiteForm]


@lru_cache(maxsize=8)
def declared_forms(config: Config, recipe: Recipe) -> Mapping[str, Forms]:
    """Return the forms of every component outside drafters, by its name.

    Plain values may stand wherever codes may: a kernel can quantise its input itself.
    """
    found: dict[str, Forms] = {}
    for each in (*components(config), *components(config, recipe)):
        if each.block is None or not each.block.is_drafter:
            known = found.get(each.name, Forms({}, {}))
            made = _made(config, each.role, each.block)
            outputs = {name: made[name] for name in each.outputs if name in made}
            inputs = {**known.inputs, **_input_forms(config, each)}
            found[each.name] = Forms(inputs, {**known.outputs, **outputs})
    for each in components(config, recipe):
        codes = next((one for one in each.inputs if one.name == "codes"), None)
        if codes is not None and each.name in found:
            forms = _quantised_forms(config, recipe, each)
            maker = codes.sources[0].component
            found[each.name] = Forms({**found[each.name].inputs, **forms}, found[each.name].outputs)
            found[maker] = Forms(found[maker].inputs, {**found[maker].outputs, **forms})
    return found


def _quantised_forms(config: Config, recipe: Recipe, linear: Component) -> dict[str, SiteForm]:
    """Return the forms of a linear's input as codes; how scales lie is left to the kernel."""
    weight = parameter_named(config, linear.weights[0])
    form = block_format(recipe.format_of(weight).activation)
    holds = Holds.NUMBERS if form.scale is FP32 else Holds.CODES
    scale = SiteForm(None, holds, Rows.OTHERS, dimensions=1)
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
        own = _made(config, component.role, component.block).get(each.name)
        kept = earlier.get(each.name.removeprefix(_STATE))
        return own or (kept and replace(kept, counts=Rows.OTHERS))
    if len(each.sources) != 1:
        return None
    source = each.sources[0]
    made = _made(config, source.role, _block_of(config, source)).get(source.name or "out")
    if made is None or not each.via:
        return made
    letters = shape_letters(config)
    if each.via in _CUT:
        return replace(made, row=extents_of(_CUT[each.via], letters))
    return SiteForm(extents_of("S D", letters))


def _block_of(config: Config, site: Site) -> Block | None:
    return next((each for each in config.blocks if each.prefix == site.block), None)


@lru_cache(maxsize=1024)
def _made(config: Config, role: str, block: Block | None) -> Mapping[str, SiteForm]:
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
