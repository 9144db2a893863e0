"""Estimate the bytes of a capture before anything is written, and choose what a budget allows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.capture.options import ENDS, CaptureFilter, span_text
from degarble.harness.inference.generation import PREFILL_TOKENS
from degarble.harness.model.components import component_named, components
from degarble.harness.model.family import family_of
from degarble.harness.model.parameters import parameter_named, parameters
from degarble.harness.model.recipes import recipe_named
from degarble.harness.model.site_forms import ElementKind, RowUnit, declared_forms
from degarble.harness.model.sites import Port, Site
from degarble.harness.report.progress import size
from degarble.references.traced.family import TracedModel, keeps_state, traced_pairs
from degarble.references.traced.trace import TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from degarble.references.binding import BoundModel
    from degarble.references.traced.graph import Graph, TracedComponent

# --------------------------------------------------------------------------------------------------
# Estimate the size of a capture of our references.
#
# One table holds how many values of which dtype a component returns for a token. An input was the
# output of another component and is stored once. State from earlier calls (windows, entries, rows)
# counts for each step that reads it. The estimate ignores tensors that happen to be equal, and a
# filter of tokens counts as if it kept its share of everything.

_INTEGER = 8  # ids, experts, positions: int64
_ACT_QUANT = ".act_quant"


class ValueCounts(NamedTuple):
    """Values for a token, by what holds them: stored ones, working ones, integers."""

    store: int = 0
    work: int = 0
    integers: int = 0


class SequenceTokens(NamedTuple):
    """What one sequence brings to a step: tokens, and how many it had before."""

    tokens: int
    before: int


def captured_bytes(
    bound: BoundModel, steps: Iterable[Sequence[SequenceTokens]], wanted: CaptureFilter
) -> int:
    """Bytes of tensors that a capture of these steps stores."""
    by_block = _bytes_by_block(bound, wanted)
    return sum(by_block(step).total() for step in steps)


def _bytes_by_block(
    bound: BoundModel, wanted: CaptureFilter
) -> Callable[[Sequence[SequenceTokens]], Counter[str]]:
    """Return a function that says how many bytes each block adds in one step."""
    names = [name for name in bound.calls if wanted.includes(name) and not name.startswith("mtp.")]
    if isinstance(bound, TracedModel):
        bytes_of = _traced_bytes(bound, names)
    else:
        table = family_of(bound.config).value_counts(bound.config) or declared_counts(bound)
        bytes_of = {name: _bytes_of(bound, name, table) for name in names}
    blocks = {name: Site(name, Port.OUT).block or ENDS for name in names}

    def by_block(step: Sequence[SequenceTokens]) -> Counter[str]:
        found: Counter[str] = Counter()
        if not wanted.keeps_step(max(each.before + each.tokens - 1 for each in step)):
            return found
        fed = [SequenceTokens(_among(wanted, each), each.before) for each in step]
        fed = [each for each in fed if each.tokens]
        if fed:
            found[ENDS] += 2 * _INTEGER * sum(each.tokens for each in fed)  # ids and positions
            for name in names:
                found[blocks[name]] += bytes_of[name](fed)
        return found

    return by_block


def _traced_bytes(
    bound: TracedModel, names: Sequence[str]
) -> dict[str, Callable[[list[SequenceTokens]], int]]:
    """Return the same for components of a traced model; an input was returned before."""
    graph: Graph = bound.config.graph
    # For a token of a step, and for one that its sequence had before.
    found: dict[str, tuple[int, int]] = dict.fromkeys(names, (0, 0))
    for component, traced in traced_pairs(bound.config, bound.recipe):
        if traced is None or component.name not in found:
            continue
        tensors = [graph.trace.tensors[ref.number] for ref in traced.outputs.values()]
        values = sum(
            prod(tensor.shape) // (TOKENS if tensor.token_axis is not None else 1)
            * tensor.dtype.itemsize
            for tensor in tensors
        )  # fmt: skip
        found[component.name] = values, values if keeps_state(traced) else 0

    def bytes_of(new: int, earlier: int, step: list[SequenceTokens]) -> int:
        return sum(new * each.tokens + earlier * each.before for each in step)

    return {name: partial(bytes_of, *values) for name, values in found.items()}


def declared_counts(bound: BoundModel) -> dict[str, ValueCounts]:
    """Return the values of each role that forms declare, of a family without a table of its own."""
    found: dict[str, ValueCounts] = {}
    for name, forms in declared_forms(bound.config, recipe_named("bf16", bound.config)).items():
        sizes = {ElementKind.NUMBERS: 0, ElementKind.INTEGERS: 0}
        for form in forms.outputs.values():
            if form.row is not None and form.counts is RowUnit.TOKENS:
                sizes[form.holds] += prod(extent or 0 for extent in form.row)
        numbers, integers = sizes.values()
        found[Site(name, Port.OUT).role] = ValueCounts(numbers, integers=integers)
    return found


def steps_of(prompts: Sequence[int], new_tokens: int, piece: int) -> list[list[SequenceTokens]]:
    """Return the steps of prompts of these lengths, in pieces, and of the tokens after them."""
    found = [
        [SequenceTokens(min(piece, count - begin), begin) for count in prompts if count > begin]
        for begin in range(0, max(prompts), piece)
    ]
    return found + [
        [SequenceTokens(1, count + at) for count in prompts] for at in range(new_tokens - 1)
    ]


def _among(wanted: CaptureFilter, fed: SequenceTokens) -> int:
    rows = wanted.rows(range(fed.before, fed.before + fed.tokens))
    return fed.tokens if rows is None else len(rows)


def _bytes_of(
    bound: BoundModel, name: str, table: Mapping[str, ValueCounts]
) -> Callable[[list[SequenceTokens]], int]:
    """Return a function that says how many bytes one component adds in one step."""
    config, numerics, role = bound.config, bound.numerics, Site(name, Port.OUT).role
    family = family_of(config)
    if role.endswith(_ACT_QUANT) and role != "ffn.experts.act_quant":
        # Codes, a byte each at most; scales are few.
        linear = component_named(config, name.removesuffix(_ACT_QUANT))
        width = parameter_named(config, linear.weights[0]).shape[-1]
        return lambda step: width * sum(each.tokens for each in step)
    value_counts = table.get(role, ValueCounts())
    block = component_named(config, name).block
    store = value_counts.store * numerics.store.itemsize + value_counts.integers * _INTEGER

    def bytes_of(step: list[SequenceTokens]) -> int:
        # Logits are those behind each sequence's last token.
        ends = role in family.last_token_roles
        tokens = len(step) if ends else sum(each.tokens for each in step)
        remembered = 0 if block is None else family.remembered(config, block, role, step)
        return tokens * store + (tokens * value_counts.work + remembered) * numerics.work.itemsize

    return bytes_of


# --------------------------------------------------------------------------------------------------
# Choose layers and steps of a run within a budget of bytes: `degarble capture --budget 10GB`.
#
# What is kept is whole, so that it is judged as in a complete capture: layers with all of their
# components, and steps with all of their rows. First come one layer of each type and the ends of
# the model, in the last piece of the longest prompt and in decoding, where contexts are longest;
# then its first piece, then further layers, then further pieces, far from those that are kept.

# The estimate leaves out scales, the index, and inputs of a layer whose neighbour is not kept.
_MARGIN = 0.9
_LEAST_LAST = PREFILL_TOKENS // 2  # of a last piece that is kept without the one before it


@dataclass(frozen=True)
class BudgetChoice:
    """What a budget keeps of a run, and what it leaves out."""

    wanted: CaptureFilter
    budget: int
    estimate: int
    whole: int  # bytes of a capture without a budget
    layers_left_out: tuple[range, ...]
    tokens_left_out: tuple[range, ...]

    def document(self) -> dict[str, Any]:
        """Return what a capture states about it."""
        return {
            "bytes": self.budget, "estimate": self.estimate, "whole": self.whole,
            "layers_left_out": list(map(span_text, self.layers_left_out)),
            "tokens_left_out": list(map(span_text, self.tokens_left_out)),
        }  # fmt: skip


def choose_within(
    bound: BoundModel, lengths: Sequence[int], new_tokens: int, wanted: CaptureFilter, budget: int
) -> BudgetChoice:
    """Choose layers and pieces of prompts of these lengths whose capture fits into a budget."""
    longest = max(lengths)
    pieces = _in_order(longest, new_tokens)
    by_block = _bytes_by_block(bound, wanted)
    costs: dict[range, Counter[str]] = {piece: Counter() for piece in pieces}
    for step in steps_of(lengths, new_tokens, PREFILL_TOKENS):
        last = max(each.before + each.tokens - 1 for each in step)
        costs[next(piece for piece in pieces if last in piece)] += by_block(step)
    blocks = list(dict.fromkeys(name for cost in costs.values() for name in cost))
    first = _one_of_each_type(bound, blocks)

    def bytes_of(names: Iterable[str], spans: Iterable[range]) -> int:
        names = list(names)
        return sum(costs[span][name] for span in spans for name in names)

    whole, least = bytes_of(blocks, pieces), bytes_of(first, pieces[:1])
    if least > _MARGIN * budget:
        raise _too_small(budget, int(least / _MARGIN) + 1, len(first))
    names, spans = list(first), pieces[:1]
    further = [(name, None) for name in blocks if name not in first]
    for name, span in [(None, p) for p in pieces[1:2]] + further + [(None, p) for p in pieces[2:]]:
        more = [*names, name] if name else names, [*spans, span] if span else spans
        if bytes_of(*more) <= _MARGIN * budget:
            names, spans = more
    left = (name for name in blocks if name not in names)
    return BudgetChoice(
        replace(wanted, blocks=frozenset(names), pieces=_joined(spans)),
        budget, bytes_of(names, spans), whole,
        _joined(map(_number, left)), _joined(piece for piece in pieces if piece not in spans),
    )  # fmt: skip


def _number(block: str) -> range:
    number = int(block.rpartition(".")[2])
    return range(number, number + 1)


def _joined(spans: Iterable[range]) -> tuple[range, ...]:
    """Return spans in order, neighbours as one."""
    found: list[range] = []
    for span in sorted(spans, key=lambda each: each.start):
        if found and found[-1].stop == span.start:
            span = range(found.pop().start, span.stop)  # noqa: PLW2901
        found.append(span)
    return tuple(found)


def _in_order(longest: int, new_tokens: int) -> list[range]:
    """Return the spans of positions that are kept together, those to be kept first in front."""
    starts = list(range(0, longest, PREFILL_TOKENS))
    if len(starts) > 1 and longest - starts[-1] < _LEAST_LAST:
        starts.pop()
    spans = [range(begin, begin + PREFILL_TOKENS) for begin in starts]
    found, rest = [range(starts[-1], longest + new_tokens)], spans[:-1]
    while rest:
        # The first piece has all distances beyond it on one side only, so it comes second.
        found.append(max(rest, key=lambda span: min(abs(span.start - f.start) for f in found)))
        rest.remove(found[-1])
    return found


def _one_of_each_type(bound: BoundModel, blocks: Iterable[str]) -> list[str]:
    """Return the ends and the first block of each type."""
    types: dict[str, list[object]] = {name: [] for name in blocks}
    known = {each.name: each for each in parameters(bound.config)}
    recipe = bound.recipe or recipe_named("bf16", bound.config)
    traced = isinstance(bound, TracedModel) and {
        component.name: each for component, each in traced_pairs(bound.config, bound.recipe)
    }
    for component in components(bound.config, bound.recipe):
        block = component.block
        if block is None or block.prefix not in types:
            continue
        weights = (known[name] for name in component.weights if name in known)
        formats = frozenset((recipe.format_of(each), each.shape) for each in weights)
        part = traced[component.name] if traced else None
        types[block.prefix].append(
            (component.role, component.kind, replace(block, index=0), formats, _traced_type(part))
        )
    first = {tuple(parts): name for name, parts in reversed(types.items()) if name != ENDS}
    return [name for name in types if name == ENDS or name in first.values()]


def _traced_type(traced: TracedComponent | None) -> object:
    if traced is None:
        return None
    facts = sorted((name, str(fact)) for name, fact in traced.facts.items() if name != "layer")
    return tuple(facts), len(traced.operations), traced.is_rectangular


def _too_small(budget: int, least: int, blocks: int) -> InvalidArgument:
    # Rounded up in the unit that is printed, so that what the remedy says is enough.
    units = (("kB", 1000), ("MB", 10**6), ("GB", 10**9))
    word, unit = next(each for each in reversed(units) if least >= each[1] or each is units[0])
    text = f"{-(-least * 100 // unit) / 100:.2f}{word}"
    return InvalidArgument(
        "--budget", size(budget),
        f"{text} at least, for one layer of each type ({blocks} with the ends) in one piece",
        f"Pass --budget {text}.",
    )  # fmt: skip
