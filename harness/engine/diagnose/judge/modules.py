"""Judge the modules of any torch model one by one, each on its own recorded inputs.

Weights stay in their stored format. They are decoded for every call where that is fast, else once,
as long as the decoded values fit into memory. Errors of earlier modules do not count, because each
module is replayed on its own inputs. A value that was not finite before a module ran is reported
for the module that made it.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.base.sums import all_finite
from degarble.harness.capture.files.records import BIASES
from degarble.harness.engine.adopted.statement import statement_of
from degarble.harness.engine.conventions.learned import (
    ConventionEvidence,
    ConventionFit,
    conventions_used,
)
from degarble.harness.engine.conventions.registry import GEMM, LEARNED, OPERANDS
from degarble.harness.engine.diagnose.judge.bare import (
    BareCall,
    BareProduct,
    product_causes,
    stored_weight,
)
from degarble.harness.engine.diagnose.judge.gemm import agrees_at_once, judge_product
from degarble.harness.engine.diagnose.judge.operations import by_callable, judge_defined
from degarble.harness.engine.diagnose.judge.product import (
    OUTPUTS,
    MatrixOperand,
    Product,
)
from degarble.harness.engine.diagnose.judge.report import Causes
from degarble.harness.engine.localise.recorded_run import same_bits
from degarble.harness.formats.quantise import has_fast_decoder
from degarble.harness.formats.weight import Weight
from degarble.harness.report.blocks import Code
from degarble.harness.report.cards import Card, ShownAsCard
from degarble.harness.report.number_text import shortened
from degarble.harness.report.verdict import SCHEMA, Origin, Verdict
from degarble.references.numerics import DecodedOperands

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.capture.files.records import CapturedCall
    from degarble.harness.engine.conventions.registry import ConventionUsed
    from degarble.harness.engine.diagnose.judge.gemm import Search
    from degarble.harness.engine.diagnose.judge.report import JudgedKernel
    from degarble.harness.engine.localise.recorded_run import RecordedRun

HELD_VALUES = 1 << 28  # decoded values of weights that are kept: 1 GiB
_REMEMBERED = 4  # agreeing calls of a component that are cached
_WEIGHT, _BIAS, _IN, _OUT = "w", "bias", "x", "out"
OTHER_MODULE = "O07.other_module"
_MORE = 7  # calls besides the worst that a cause has to explain
_CARD_TEXT = 20_000  # characters of the answer in a notebook
_SEARCHED = 2  # components of one form, at most, whose causes are searched in vain
_NARROW = (torch.bfloat16, torch.float16)  # weights that are multiplied as they are


class ModuleCall(NamedTuple):
    """One call of a component under values of conventions; of a product only `rows`."""

    component: str
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    values: Mapping[str, Any]
    rows: Tensor | None = None  # all of them where None


class Twin:
    """The definition of every component: weights of products by component, and callables.

    A weight is a tensor, a QuantisedTensor, a Weight, or a dict of `w` and `bias`; a bias may also
    stand under its own name, as in a checkpoint (`m0.weight`, `m0.bias`). A definition is a
    callable of the component's captured inputs, in their order.

    >>> import torch
    >>> from degarble import Twin
    >>> Twin({"m0": torch.ones(4, 8)}, definitions={"m1": torch.nn.GELU()}).names
    ('m0', 'm1')
    """

    def __init__(
        self, weights: Mapping[str, Any], definitions: Mapping[str, Any] | None = None
    ) -> None:
        self._weights = {name: _parts(name, held) for name, held in _joined(weights).items()}
        self._definitions = dict(definitions or {})
        for name, definition in self._definitions.items():
            if not callable(definition) or name in self._weights:
                raise InvalidArgument(
                    f"definition of {name}", type(definition).__name__,
                    "a callable, for a component without a weight",
                    "Pass a function of its captured inputs.",
                )  # fmt: skip
        self._held: dict[str, MatrixOperand] = {}
        self._agreed: dict[str, deque[_Agreed]] = {}
        self._room = HELD_VALUES

    def __repr__(self) -> str:
        return f"Twin({len(self._weights):,} weights, {len(self._definitions):,} definitions)"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the components with a definition."""
        return (*self._weights, *self._definitions)

    def lacks_bias(self, component: str) -> bool:
        """Tell whether a weight was given for a component, and nothing said of a bias."""
        return _BIAS not in self._weights.get(component, {_BIAS: None})

    def rename(self, names: Mapping[str, str]) -> None:
        """Give components other names; two of one name are refused."""
        new = Counter(names.get(name, name) for name in self.names)
        twice = next((name for name, count in new.items() if count > 1), None)
        if twice is not None:
            raise InvalidArgument(
                "names of the twin", [old for old in self.names if names.get(old, old) == twice],
                f"one name for {twice}", "Leave out all but one.",
            )  # fmt: skip
        for held in (self._weights, self._definitions, self._held, self._agreed):
            _rename(held, names)

    def judge_call(
        self,
        run: RecordedRun,
        call: CapturedCall,
        values: Mapping[str, Any],
        rows: Tensor | None,
        search: Search | None = None,
    ) -> JudgedKernel | None:
        """Judge one call of a run; of a product only `rows`, all of which are finite.

        Calls that agreed in an earlier run are cached while that run exists. Runs of one model
        share much: with a fault in layer 7, all of layers 0 to 6.
        """
        inputs, outputs = run.inputs(call), run.outputs(call)
        for known in () if values else self._agreed.get(call.component, ()):
            earlier = known.run()
            if earlier is not None and known.equals(earlier, inputs, outputs):
                return known.judged
        kernel = self._judge(ModuleCall(call.component, inputs, outputs, values, rows), search)
        if kernel is not None and kernel.verdict is Verdict.AGREES and not values:
            kept = self._agreed.setdefault(call.component, deque(maxlen=_REMEMBERED))
            kept.append(_Agreed(weakref.ref(run), call, kernel))
        return kernel

    def multiplies(self, component: str) -> bool:
        """Tell whether a component is a product whose weight is not stored in BF16."""
        held = self._weights.get(component, {}).get(_WEIGHT)
        return held is not None and getattr(held, "dtype", None) not in _NARROW

    def finite_rows(self, component: str, inputs: Mapping[str, Tensor]) -> Tensor | None:
        """Return which rows are finite, for a component that computes each row by itself."""
        known = component in self._weights and component not in self._definitions
        if not known or set(inputs) != {_IN} or not inputs[_IN].dtype.is_floating_point:
            return None
        return inputs[_IN].isfinite().all(-1)

    def judge(
        self,
        component: str,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        values: Mapping[str, Any] = MappingProxyType({}),
        *,
        explain: bool = True,
    ) -> JudgedKernel | None:
        """Judge one call, by conventions; None where the component has no definition."""
        rows = None if _all_finite(inputs) else self.finite_rows(component, inputs)
        search = self.search(component) if explain else None
        return self._judge(ModuleCall(component, inputs, outputs, values, rows), search)

    def _judge(self, call: ModuleCall, search: Search | None) -> JudgedKernel | None:
        name = call.component
        if name in self._definitions:
            made = by_callable(self._definitions[name], tuple(call.inputs.values()), None)
            return judge_defined(name, made, dict(call.outputs), search=search is not None)
        made_of = self.product(call)
        if made_of is None:
            return None
        product, out = made_of
        at_once = agrees_at_once(name, product, out)
        return at_once or judge_product(name, product, out, search=search)

    def product(self, call: ModuleCall) -> tuple[Product, Tensor] | None:
        """Return a call as a product, and what came out; None where it is none."""
        names = set(call.inputs), set(call.outputs)
        if call.component not in self._weights or names != ({_IN}, {_OUT}):
            return None
        x, out, rows = call.inputs[_IN], call.outputs[_OUT], call.rows
        if out.dtype not in OUTPUTS:
            return None
        if rows is not None and x.shape[:-1] == out.shape[:-1]:
            x, out = x[rows], out[rows]  # a product gives each row by itself
        bias = self._weights[call.component].get(_BIAS)
        # Trap: x may hold gigabytes, and each check of it costs as much as a product of few rows.
        operand = MatrixOperand.from_value(_IN, x, finite=True)
        product = Product.from_operands(operand, self._operand(call.component), out.dtype, bias)
        if call.values:
            product = replace(product, operands=call.values.get(OPERANDS, DecodedOperands.EXACT))
        return product, out

    def search(
        self,
        component: str,
        only: frozenset[str] | None = None,
        more: Sequence[tuple[Product, Tensor]] = (),
    ) -> Search:
        """Return the search for causes in a component, which may have taken another's weight."""

        def search(call: BareCall, reference: Mapping[str, Tensor]) -> Causes:
            others = {
                name: BareProduct(
                    stored_weight(MatrixOperand(self._operand(name).stored)),
                    None if parts.get(_BIAS) is None else Weight(value=parts[_BIAS]),
                    call.product.dtype,
                )
                for name, parts in self._weights.items()
                if name != component
            }
            return product_causes(call, reference, others, more, only)

        return search

    def form(self, component: str) -> Hashable:
        """Return what causes depend on: a weight's format and shape, and whether it has a bias."""
        parts = self._weights.get(component)
        if parts is None:
            return component
        held = self._operand(component)
        kind = held.quantised.format.name if held.quantised is not None else _dtype_of(held)
        return kind, tuple(held.stored.shape), _BIAS in parts

    def _operand(self, component: str) -> MatrixOperand:
        """Return the weight as an operand that was checked once.

        A weight that decodes as fast as memory is read is decoded for every call, into reused
        memory: fresh memory for all weights costs ten times the decoding.
        """
        known = self._held.get(component)
        if known is not None:
            return known if "values" in vars(known) else MatrixOperand(known.stored)
        known = MatrixOperand.from_value(
            f"weight of {component}", self._weights[component][_WEIGHT]
        )
        tensor, size = known.quantised, known.values.numel()
        if tensor is not None and has_fast_decoder(tensor, torch.float32):
            self._held[component] = MatrixOperand(known.stored)
        # Slow to decode: keep the values, up to HELD_VALUES in total.
        elif size <= self._room:
            self._room -= size
            self._held[component] = known
        return known


def _rename(held: dict[str, Any], names: Mapping[str, str]) -> None:
    renamed = {names.get(name, name): value for name, value in held.items()}
    held.clear()
    held.update(renamed)


def _dtype_of(operand: MatrixOperand) -> str:
    return str(getattr(operand.stored, "dtype", ""))


@dataclass(frozen=True, eq=False)
class _Agreed:
    """A call that agreed; its tensors belong to the run, and last as long as it does."""

    run: weakref.ref[RecordedRun]
    call: CapturedCall
    judged: JudgedKernel

    def equals(
        self, run: RecordedRun, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> bool:
        """Tell whether another call received and returned the same bits."""
        for ours, theirs in ((run.inputs(self.call), inputs), (run.outputs(self.call), outputs)):
            if set(ours) != set(theirs):
                return False
            if not all(same_bits(ours[name], tensor) for name, tensor in theirs.items()):
                return False
        return True


@dataclass(frozen=True, eq=False, repr=False)
class CheckedModules(ShownAsCard):
    """The result of a run: the worst call of every judged component, in the order of the run."""

    verdict: Verdict
    judged: Mapping[str, JudgedKernel] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)  # of the reported call
    unjudged: tuple[str, ...] = ()
    inherited: tuple[str, ...] = ()  # components given NaN or infinity
    first_not_finite: str = ""
    conventions: tuple[ConventionUsed, ...] = ()  # that are not the exact ones
    without_bias: tuple[str, ...] = ()  # of `unjudged`: the model adds a bias, the twin has none

    @property
    def discrepancies(self) -> tuple[JudgedKernel, ...]:
        """Return the components that differ, the first of the run first."""
        return tuple(e for e in self.judged.values() if e.verdict is Verdict.DIFFERS)

    troubles = discrepancies  # its name in the first versions of the API

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Return the differing components in the form of `--json`."""
        return tuple(
            _origin(trouble, self.steps[trouble.component]) for trouble in self.discrepancies
        )

    @property
    def sentence(self) -> str:
        """Return the result in a sentence."""
        count = len(self.judged)
        if self.verdict is Verdict.AGREES:
            if count == 1:
                return "1 component agrees with its twin."
            return f"{count} components agree with their twins."
        if self.verdict is Verdict.UNDECIDED and self.without_bias:
            return f"Nothing was judged: {self._lacking_bias()}"
        if self.verdict is Verdict.UNDECIDED:
            return "Nothing was judged: no weight and no definition fits a captured component."
        names = ", ".join(trouble.component for trouble in self.discrepancies)
        one = len(self.discrepancies) == 1
        differ = "differs from its twin" if one else "differ from their twins"
        components = "component" if count == 1 else "components"
        return f"{len(self.discrepancies)} of {count} {components} {differ}: {names}."

    def lines(self) -> list[str]:
        """Return the full result, line by line."""
        lines = [f"{self.verdict}: {self.sentence}"]
        lines += [f"Convention: {convention.sentence}" for convention in self.conventions]
        if self.first_not_finite:
            lines.append(f"The first value that is not finite comes from {self.first_not_finite}")
        alike: dict[Hashable, list[JudgedKernel]] = {}
        for trouble in self.discrepancies:
            alike.setdefault(_cause_of(trouble), []).append(trouble)
        for first, *others in alike.values():
            lines += first.lines()
            if others:
                names = ", ".join(kernel.component for kernel in others)
                lines.append(f"  the same in {len(others) + 1} components: also in {names}")
        if self.inherited:
            names = ", ".join(self.inherited)
            lines.append(
                f"Rows that were given values that are not finite were not judged: {names}"
            )
        undefined = [name for name in self.unjudged if name not in self.without_bias]
        if undefined:
            lines.append(f"Not judged, without a definition: {', '.join(undefined)}")
        if self.without_bias and self.verdict is not Verdict.UNDECIDED:
            lines.append(f"Not judged: {self._lacking_bias()}")
        return lines

    def _lacking_bias(self) -> str:
        first, *others = self.without_bias
        who = f"{', '.join(self.without_bias)} add" if others else f"{first} adds"
        return (
            f"{who} a bias that the twin does not have. Give it under its own name "
            f'("{first}.bias"), or write {{"w": ..., "bias": None}} if there should be none.'
        )

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return shortened(str(self))

    def card(self) -> Card:
        """Return what a notebook shows: the first component that differs, and the full result."""
        first = [block for kernel in self.discrepancies[:1] for block in kernel.card().blocks[:-1]]
        text = shortened(str(self), _CARD_TEXT)
        return Card(self.verdict, self.sentence, (*first, Code(text)))

    def document(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "schema": SCHEMA,
            "verdict": str(self.verdict),
            "origins": [
                vars(origin) | {"where": dict(origin.where), "changes": list(origin.changes)}
                for origin in self.origins
            ],
            "cosines": [
                {"component": name, "cosine": _cosine(kernel), "ratio": kernel.ratio}
                for name, kernel in self.judged.items()
            ],
            "unjudged": list(self.unjudged),
            "without_bias": list(self.without_bias),
            "inherited": list(self.inherited),
            "conventions": [convention.document() for convention in self.conventions],
        } | self._descriptions()

    def _descriptions(self) -> dict[str, Any]:
        """Return what was described as data, by the number of its origin; empty without any."""
        stated = [
            {"origin_number": number, **statement_of(kernel.causes.described)}
            for number, kernel in enumerate(self.discrepancies)
            if kernel.causes.described is not None and not kernel.named
        ]
        return {"descriptions": stated} if stated else {}


def check_modules(
    run: RecordedRun, twin: Twin, declared: Mapping[str, Any] = MappingProxyType({})
) -> CheckedModules:
    """Judge every call of a captured run that the twin knows; `declared` are its conventions."""
    seen = {call.component for call in run.calls}
    for name in twin.names:
        if name not in seen:
            raise UnknownName.among("component of the twin", name, seen)
    work = _Judging(run, twin, declared)
    for call in run.calls:
        work.take(call)
    aside = work.set_aside(run.facts.get(BIASES) or ())
    used = conventions_used(declared, work.evidence())
    learned = {
        convention_used.name: convention_used.value
        for convention_used in used
        if convention_used.source == LEARNED
    }
    if learned:
        work = _Judging(run, twin, {**declared, **learned})
        for call in run.calls:
            work.take(call)
        aside = work.set_aside(run.facts.get(BIASES) or ())
    worst = work.explained()
    verdict = Verdict.AGREES if worst else Verdict.UNDECIDED
    if any(kernel.verdict is Verdict.DIFFERS for kernel in worst.values()):
        verdict = Verdict.DIFFERS
    steps = {name: each.call.step for name, each in work.worst.items()}
    told = tuple(work.unjudged), tuple(work.inherited), work.first
    return CheckedModules(verdict, worst, steps, *told, used, aside)


class _Worst(NamedTuple):
    """The call of a component that differs most."""

    call: CapturedCall
    judged: JudgedKernel
    rows: Tensor | None  # rows that were judged, where others are not finite


class _Judging:
    """The judging of a run under some conventions."""

    def __init__(self, run: RecordedRun, twin: Twin, values: Mapping[str, Any]) -> None:
        self._run, self._twin, self._values = run, twin, values
        self.worst: dict[str, _Worst] = {}
        self.unjudged: dict[str, bool] = {}
        self.inherited: dict[str, bool] = {}
        self.first = ""
        self._lengths: dict[str, float] = defaultdict(float)  # squared lengths of all differences

    def take(self, call: CapturedCall) -> None:
        """Judge one call; causes are searched later, and only for the worst."""
        inputs, outputs = self._run.inputs(call), self._run.outputs(call)
        if _is_without_rows(inputs) and _is_without_rows(outputs):
            return  # such as an expert that no token is routed to
        name = call.component
        rows, spoilt = None, not _all_finite(inputs)
        if not spoilt and not self.first and not _all_finite(outputs):
            self.first = f"{name} in step {call.step}"
        if spoilt:
            self.inherited[name] = True
            rows = self._twin.finite_rows(name, inputs)
            if rows is None or not bool(rows.any()):
                return
        kernel = self._twin.judge_call(self._run, call, self._values, rows)
        if kernel is None:
            self.unjudged[name] = True
            return
        self._lengths[name] += kernel.distance
        if name not in self.worst or kernel.ratio > self.worst[name].judged.ratio:
            self.worst[name] = _Worst(call, kernel, rows)

    def set_aside(self, biased: Collection[str]) -> tuple[str, ...]:
        """Take back what differs because the module adds a bias that nobody gave the twin.

        A weight alone says nothing about a bias, so the difference proves no fault.
        """
        found = tuple(
            name
            for name, worst in self.worst.items()
            if name in biased
            and self._twin.lacks_bias(name)
            and worst.judged.verdict is Verdict.DIFFERS
        )
        for name in found:
            del self.worst[name]
            self.unjudged[name] = True
        return found

    def explained(self) -> dict[str, JudgedKernel]:
        """Return the worst call of each component, with its causes where it differs.

        What explains one component is tried first on others of its form; of those that nothing
        explains a few are searched.
        """
        found: dict[str, JudgedKernel] = {}
        causes: dict[Hashable, set[str]] = defaultdict(set)
        unexplained: dict[Hashable, list[str]] = defaultdict(list)
        for name, worst in self.worst.items():
            found[name] = worst.judged
            if worst.judged.verdict is not Verdict.DIFFERS:
                continue
            form = self._twin.form(name)
            known, vain = frozenset(causes[form]), unexplained[form]
            kernel = self._searched(worst, known | {OTHER_MODULE})
            if kernel.cause is None and kernel.follows is None:
                if len(vain) < _SEARCHED:
                    kernel = self._searched(worst, None)
                    vain += [] if kernel.cause is not None else [name]
                else:
                    words = f"no known fault explains {' or '.join(vain)}, which are of its form"
                    kernel = replace(kernel, causes=Causes(), note=words)
            causes[form] |= {cause.fault for cause in kernel.named[:1]}
            found[name] = kernel
        return _in_pairs(found)

    def _searched(self, worst: _Worst, only: frozenset[str] | None) -> JudgedKernel:
        search = self._twin.search(worst.call.component, only, self._others(worst))
        kernel = self._twin.judge_call(self._run, worst.call, self._values, worst.rows, search)
        return worst.judged if kernel is None else kernel

    def _others(self, worst: _Worst) -> list[tuple[Product, Tensor]]:
        """Return further calls of a component, which a cause has to explain as well."""
        found = []
        for call in self._run.calls:
            if call.component != worst.call.component or call is worst.call:
                continue
            inputs, outputs = self._run.inputs(call), self._run.outputs(call)
            if not _is_without_rows(outputs) and _all_finite(inputs):
                made = self._twin.product(ModuleCall(call.component, inputs, outputs, self._values))
                found += [] if made is None else [made]
            if len(found) == _MORE:
                break
        return found

    def evidence(self) -> ConventionEvidence:
        """Return how the products of the run fit under given values."""
        names = [name for name in self.worst if self._twin.multiplies(name)]
        calls: dict[str, list[CapturedCall]] = {name: [] for name in names}
        for call in self._run.calls:
            if call.component in calls:
                calls[call.component].append(call)
        assumed = {OPERANDS: DecodedOperands.EXACT, **self._values}

        def fit(name: str, values: Mapping[str, Any]) -> ConventionFit:
            if not values:
                return self._fit(name)
            work = _Judging(self._run, self._twin, {**self._values, **values})
            for call in calls[name]:
                work.take(call)
            return work._fit(name)

        return ConventionEvidence(dict.fromkeys(names, GEMM), fit, assumed)

    def _fit(self, name: str) -> ConventionFit:
        worst = self.worst.get(name)
        verdict = None if worst is None else worst.judged.verdict
        agrees, differs = verdict is Verdict.AGREES, verdict is Verdict.DIFFERS
        return ConventionFit(agrees, differs, self._lengths[name])


def _in_pairs(judged: Mapping[str, JudgedKernel]) -> dict[str, JudgedKernel]:
    """Say of two components that have each other's weight that these are exchanged."""
    found = dict(judged)
    for name, kernel in judged.items():
        other = kernel.cause.other if kernel.cause else ""
        there = judged[other].cause if other in judged else None
        if kernel.cause and there is not None and there.other == name:
            first, second = (each for each in judged if each in {name, other})
            title = f"The weights of {first} and {second} are exchanged"
            cause = replace(kernel.cause, title=title, words=title)
            causes = replace(kernel.causes, named=(cause, *kernel.named[1:]))
            found[name] = replace(kernel, causes=causes)
    return found


def _cause_of(kernel: JudgedKernel) -> Hashable:
    """Return what equal discrepancies have in common; without a cause each stands alone."""
    cause = kernel.cause
    if cause is not None:
        return cause.fault, cause.words
    return kernel.note if kernel.note and not kernel.tried else kernel.component


def _is_without_rows(tensors: Mapping[str, Tensor]) -> bool:
    return any(tensor.ndim and not tensor.shape[0] for tensor in tensors.values())


def _all_finite(tensors: Mapping[str, Tensor]) -> bool:
    return all(all_finite(tensor) for tensor in tensors.values() if tensor.dtype.is_floating_point)


def _joined(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Join weights with biases that stand under names of their own."""
    found = dict(weights)
    for name in weights:
        base = name.removesuffix(".bias")
        for owner in () if base == name else (base, f"{base}.weight"):
            if owner in found and name in found:
                found[owner] = {**_parts(owner, found[owner]), _BIAS: found.pop(name)}
    return found


def _parts(name: str, held: Any) -> dict[str, Any]:
    if not isinstance(held, dict):
        return {_WEIGHT: held}
    if _WEIGHT not in held or not set(held) <= {_WEIGHT, _BIAS}:
        raise InvalidArgument(
            f"weight of {name}", sorted(held), "w, and bias where there is one", "Name the parts."
        )
    return dict(held)


def _cosine(judged: JudgedKernel) -> float | None:
    for output in judged.outputs.values():
        if output.comparison is not None:
            return float(output.comparison.total.cosine)
    return None if judged.verdict is not Verdict.AGREES else 1.0


def _origin(judged: JudgedKernel, step: int) -> Origin:
    cause, described = judged.cause, judged.causes.described
    output, result = next((name, e) for name, e in judged.outputs.items() if e.findings)
    comparison = result.comparison
    length = float(comparison.total.relative_l2) if comparison is not None else None
    name = judged.component
    layer = name.split(".")[1] if name.startswith("layers.") else ""
    worst = result.findings[0]
    where: dict[str, str | int | float] = {"step": step}
    where |= {"level": worst.level, "place": ", ".join(map(str, worst.place))}
    return Origin(
        layer=int(layer) if layer.isdigit() else None,
        component=name.split(".", 2)[2] if layer.isdigit() else name,
        site=f"{name}.out" if output == _OUT else f"{name}.out.{output}",
        where=where,
        fault=cause.fault if cause else None,
        cosine=_cosine(judged),
        difference=length,
        budget=_allowed(judged),
        confidence=judged.causes.confidence,
        evidence=cause.evidence if cause else described.evidence if described else str(worst),
        level=judged.level,
        changes=() if described is None else described.table,
    )


def _allowed(judged: JudgedKernel) -> float | None:
    """Return the largest length of the whole difference, relative to the twin."""
    for output in judged.outputs.values():
        if output.comparison is not None and float(output.comparison.total.rr) > 0:
            return output.allowed_length / math.sqrt(float(output.comparison.total.rr))
    return None
