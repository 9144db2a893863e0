"""Write the smallest case that shows a discrepancy: a safetensors file and a short script.

Few rows are kept, few outputs, and of the summed dimension K the blocks on which the named fault
shows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from math import lcm
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from degarble.harness.base.errors import CANNOT_RUN, UnreadableFile, UnwritablePath
from degarble.harness.engine.budget.budget import LevelFinding, OutputResult
from degarble.harness.engine.budget.judging import judge_outputs
from degarble.harness.engine.budget.rules import JudgeableCall
from degarble.harness.engine.faults.model_faults import ChangedWeights
from degarble.harness.engine.localise.discrepancy import DiscrepancyKind
from degarble.harness.engine.localise.input_reconstruction import alike
from degarble.harness.engine.localise.replay import is_ragged
from degarble.harness.engine.localise.tensor_forms import aligned, same_values, wrong_forms
from degarble.harness.formats.layouts import LINEAR
from degarble.harness.formats.number_formats import BLOCK_FORMATS
from degarble.harness.formats.weight import Weight
from degarble.harness.model.components import component_named
from degarble.harness.model.config.json_file import config_to_dict
from degarble.harness.model.family import family_named
from degarble.harness.model.recipes import Recipe, Rule
from degarble.harness.report.files import usable_folder, whole_file, write_text
from degarble.harness.report.verdict import Verdict
from degarble.references.binding import bind
from degarble.references.numerics import Mode, Numerics, Switches

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import FaultVariant
    from degarble.harness.engine.localise.discrepancy import Discrepancy
    from degarble.harness.model.config.config import Config
    from degarble.references.binding import BoundModel

    Tensors = Mapping[str, Tensor]


# --------------------------------------------------------------------------------------------------
# Shorten the summed dimension K of a reproducer to the blocks on which a named fault shows.
#
# K is halved as long as one half is still beyond the budget. A captured output is a sum over all of
# K, and its parts cannot be recovered. A named fault, proved on every row, can generate them: it is
# applied to the whole operands, these are cut, and the result stands for the captured output.
# Without a named fault K stays whole.
#
# Cuts fall between scale blocks: multiples of the blocks of weight and activation, 16 at least. A
# component that is no product, or weights in another layout, stay as they are.


_LEAST = 16  # of K


@dataclass(frozen=True)
class _Sum:
    """The summed dimension of a product: its length, and the smallest piece of it."""

    length: int
    unit: int
    activation: str | None

    @classmethod
    def from_case(cls, case: Case) -> _Sum | None:
        """Return the summed dimension of a case; None if it is no product of a single length."""
        weights = [weight for weight in case.weights.values() if _held(weight)]
        lengths = {weight.shape[1] for weight in weights if len(weight.shape) == 2}
        if len(lengths) != 1 or any(len(weight.shape) != 2 for weight in weights):
            return None
        (length,) = lengths
        activation = JudgeableCall.from_twin(case.twin, case.component, case.inputs, {}).activation
        operand = case.inputs.get("codes" if activation else "x")
        form = BLOCK_FORMATS[activation] if activation else None
        # Two 4-bit codes share a byte.
        per = 2 if form is not None and form.packed else 1
        if operand is None or operand.shape[-1] * per != length:
            return None
        if any(weight.group_index is not None for weight in weights):
            return None  # columns of one scale lie apart
        blocks = [
            weight.storage.format.block[1] or 1 for weight in weights if weight.storage is not None
        ]
        # No scale block may be cut.
        unit = lcm(_LEAST, *blocks, form.block[1] if form is not None else 1)
        return None if length % unit else cls(length, unit, activation)


def shortest_sum(case: Case, variant: FaultVariant, prefix: str) -> Case:
    """Return the case on the smallest part of K that is still beyond the budget."""
    found = _Sum.from_case(case)
    if found is None:
        return case
    best, low, high = case, 0, found.length // found.unit
    while high - low > 1:
        middle = (low + high) // 2
        # Keep the half with the larger excess; stop when neither shows the fault alone.
        halves = []
        for at in ((low, middle), (middle, high)):
            small = _cut(case, found, variant, prefix, (at[0] * found.unit, at[1] * found.unit))
            ratio = _beyond(small)
            if small is not None and ratio > 1:
                halves.append((ratio, at, small))
        if not halves:
            break
        _, (low, high), best = max(halves, key=lambda each: each[0])
    return best


def _beyond(case: Case | None) -> float:
    """Return the worst difference of a case in budgets; 0 if it agrees or cannot be judged."""
    if case is None:
        return 0.0
    judged = case.judge(case.captured).values()
    return max(
        (result.ratio for result in judged if result.verdict is Verdict.DIFFERS), default=0.0
    )


def _cut(
    case: Case, found: _Sum, variant: FaultVariant, prefix: str, part: tuple[int, int]
) -> Case | None:
    """Return the case on K from `part[0]` to `part[1]`; None where it cannot be made."""
    try:
        weights = {prefix + name: _columns(weight, part) for name, weight in case.weights.items()}
        twin = bind(case.twin.config, case.twin.numerics, weights, case.recipe)
        inputs = _inputs(case.inputs, found, part)
        with torch.inference_mode():
            made = _made(case, twin, found, variant, part)
        captured = {
            name: made[name].to(tensor.dtype).reshape(-1, *tensor.shape[1:])
            for name, tensor in case.captured.items()
        }
    except CANNOT_RUN:
        return None  # the variant or the budget works for the original shape only
    words = f" (K {part[0]}..{part[1] - 1} of {found.length}, made there by the named fault)"
    return replace(case, title=case.title + words, twin=twin, inputs=inputs, captured=captured)


def _made(
    case: Case, twin: BoundModel, found: _Sum, variant: FaultVariant, part: tuple[int, int]
) -> Tensors:
    """Return the fault's outputs on a part of K: damage the whole operands, then cut them.

    A variant that runs other code than the call that it wraps is run on the cut operands.
    """
    asked: list[Tensors] = []
    plain = twin.calls[case.component]

    def cutting(inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        asked.append(inputs)
        cut = ChangedWeights(weights, lambda _, weight: _numbers(weight, part))
        return plain(_inputs(inputs, found, part), cut)

    made = variant.apply(cutting)(case.inputs, case.weights)
    if asked:
        return made
    return variant.apply(plain)(_inputs(case.inputs, found, part), twin.weights_of(case.component))


def _inputs(inputs: Tensors, found: _Sum, part: tuple[int, int]) -> dict[str, Tensor]:
    """Return inputs on a part of K; keep those without that dimension."""
    (begin, end), made = part, dict(inputs)
    pieces = {"x": 1} if "x" in inputs else {}
    if found.activation is not None and "codes" in inputs:
        form = BLOCK_FORMATS[found.activation]
        pieces = {"codes": 2 if form.packed else 1, "block_scale": form.block[1]}
    for name, per in pieces.items():
        made[name] = inputs[name][..., begin // per : end // per].contiguous()
    return made


def _held(weight: Weight) -> bool:
    return weight.is_quantised or weight.value is not None


def _columns(weight: Weight, part: tuple[int, int]) -> Weight:
    """Return a weight on a part of K, in its own codes and scales."""
    begin, end = part
    if not _held(weight):
        return weight
    if weight.storage is None:
        assert weight.value is not None, "held"
        return Weight(value=weight.value[:, begin:end].contiguous(), input_scale=weight.input_scale)
    encoding = weight.storage
    if encoding.layout != LINEAR or weight.codes is None or weight.block_scale is None:
        raise ValueError(encoding.layout.name)
    per, wide = 2 if encoding.format.packed else 1, encoding.format.block[1]
    # A scale of whole rows has a part of them as well.
    own = slice(begin // wide, -(-end // wide)) if wide else slice(None)
    zero_point = weight.zero_point
    return Weight(
        codes=weight.codes[:, begin // per : end // per].contiguous(),
        block_scale=weight.block_scale[:, own].contiguous(),
        zero_point=None if zero_point is None else zero_point[:, own].contiguous(),
        tensor_scale=weight.tensor_scale,
        input_scale=weight.input_scale,
        storage=replace(encoding, shape=(encoding.shape[0], end - begin)),
    )


def _numbers(weight: Weight, part: tuple[int, int]) -> Weight:
    """Return the decoded values of a changed weight on a part of K."""
    values = weight.values(torch.float64)[:, part[0] : part[1]].contiguous()
    return Weight(value=values, input_scale=weight.input_scale)


# --------------------------------------------------------------------------------------------------
# For a component with independent rows, keep the fewest rows that are still beyond the budget; for
# a product, as little of K as shows the named fault (shortest_sum); for a single matrix, the
# fewest of its rows; for a component with sequences, the call that shows most. Weights are stored
# as decoded numbers, so the case needs no checkpoint. The script judges the captured outputs and
# fails while the fault is there; to test a fixed kernel, put its outputs in their place.


FORMAT = "degarble-case-2"
TENSORS, SCRIPT = "case.safetensors", "reproduce.py"
_OUT = "outputs."  # begins the names of recovered outputs
_MOST_BYTES = 256 << 20  # of a case; a larger one is not written

_SCRIPT = '''"""{title}

Put what your own kernel makes of case.inputs and case.weights in place of case.captured.
"""
import sys
from pathlib import Path

from degarble.harness.engine.diagnose.minimal_reproducer import Case

case = Case.read(Path(__file__).parent)
lines, wrong = case.told(case.captured)
print(*lines, sep="\\n")
sys.exit(wrong)
'''


@dataclass(frozen=True, eq=False)
class Case:
    """One component on few inputs: the captured tensors and the right ones.

    On an edge `captured` is what arrived and `inputs` what should have arrived. `recovered` holds
    what the component computed with where that was described: weights and inputs in place of its
    own, or outputs where neither differs; keys are `weights.NAME`, `inputs.NAME`, `outputs.NAME`.
    """

    component: str
    title: str
    edge: bool
    twin: BoundModel
    recipe: Recipe
    inputs: Tensors
    captured: Tensors
    recovered: Tensors = field(default_factory=dict)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """Return the decoded weights by their names within the block."""
        return self.twin.weights_of(self.component)

    def judge(self, outputs: Tensors) -> dict[str, OutputResult]:
        """Judge outputs of this component on these inputs; on an edge, inputs that arrived."""
        if self.edge:
            return {n: _arrived(n, output, self.inputs[n]) for n, output in outputs.items()}
        with torch.inference_mode():
            made = self.twin.calls[self.component](self.inputs, self.weights)
        wrong = wrong_forms(outputs, made, self.twin.numerics.store)
        if wrong:
            return wrong
        both = aligned(outputs, made)
        call = JudgeableCall.from_twin(
            self.twin, self.component, self.inputs, {n: p[1] for n, p in both.items()}
        )
        return judge_outputs(call, {name: pair[0] for name, pair in both.items()})

    def judge_recovered(self, outputs: Tensors) -> dict[str, OutputResult]:
        """Judge outputs against the component that runs on what was recovered."""
        inputs, weights = dict(self.inputs), dict(self.weights)
        for key, value in self.recovered.items():
            side, _, name = key.partition(".")
            if side == "inputs":
                inputs[name] = value
            elif side == "weights":
                weights[name] = Weight(value=value, input_scale=weights[name].input_scale)
        with torch.inference_mode():
            made = dict(self.twin.calls[self.component](inputs, weights))
        made |= {n.partition(".")[2]: t for n, t in self.recovered.items() if n.startswith(_OUT)}
        call = JudgeableCall.from_twin(self.twin, self.component, inputs, made)
        return judge_outputs(replace(call, weights=weights), {**made, **outputs})

    def told(self, outputs: Tensors) -> tuple[list[str], bool]:
        """Return the judgement in lines, and whether something differs."""
        judged = self.judge(outputs)
        lines = [self.title]
        for name, result in judged.items():
            rows = list(outputs[name].shape) if name in outputs else []
            lines.append(f"  {name} {rows}: {result.verdict}, {result.worst or 'equal'}")
        if self.recovered:
            lines.append(f"  computed with the recovered {', '.join(self.recovered)}:")
            for name, result in self.judge_recovered(outputs).items():
                lines.append(f"    {name}: {result.verdict}, {result.worst or 'equal'}")
        return lines, any(
            output_result.verdict is Verdict.DIFFERS for output_result in judged.values()
        )

    def write(self, folder: Path) -> Path:
        """Write the case; return the path of the script."""
        usable_folder("reproducer", folder)
        tensors = {f"inputs.{n}": t for n, t in self.inputs.items()}
        tensors |= {f"captured.{n}": t for n, t in self.captured.items()}
        tensors |= {f"recovered.{n}": t for n, t in self.recovered.items()}
        for name, weight in self.weights.items() if not self.edge else ():
            for part, tensor in _plain(weight).items():
                tensors[f"weights.{name}.{part}"] = tensor
        facts = {
            "format": FORMAT,
            "component": self.component,
            "title": self.title,
            "edge": self.edge,
            "family": self.twin.config.family,
            "config": config_to_dict(self.twin.config),
            "recorded": list(getattr(self.twin.config, "recorded", ())),
            "numerics": _numerics_told(self.twin.numerics),
            "recipe": [[rule.match, rule.weight, rule.activation] for rule in self.recipe.rules],
        }
        kept = {name: each.detach().clone().contiguous() for name, each in tensors.items()}
        try:
            with whole_file(folder / TENSORS) as file:
                save_file(kept, file, {"case": json.dumps(facts)})
        except SafetensorError as error:  # raised where the disk is full
            raise UnwritablePath(
                str(folder / TENSORS), str(error), "a place with room for the reproducer",
                "Make room there.",
            ) from error  # fmt: skip
        # The title is put into a string literal of the script.
        words = self.title.replace("\\", "/").replace('"', "'")
        write_text(folder / SCRIPT, _SCRIPT.replace("{title}", words))
        return folder / SCRIPT

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a case that write() wrote."""
        path = folder / TENSORS
        try:
            with safe_open(path, "pt") as stored:
                facts = json.loads((stored.metadata() or {}).get("case", "{}"))
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        except (OSError, ValueError, SafetensorError) as error:
            raise _unreadable(path, str(error)) from error
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            raise _unreadable(path, f"format {facts.get('format') if facts else None}")
        recipe = Recipe("as stored", tuple(Rule(*rule) for rule in facts["recipe"]))
        config = family_named(facts["family"]).read(facts["config"])
        twin = bind(config, _numerics_of(facts["numerics"]), _Some({}), recipe)
        if facts["recorded"]:
            twin = twin.coarsened(facts["recorded"])
        prefix = _prefix(twin.config, facts["component"], recipe)
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("weights."):
                local, _, part = name.removeprefix("weights.").rpartition(".")
                parts.setdefault(prefix + local, {})[part] = tensor
        twin.weights = _Some(
            {
                name: Weight(value=held.get("value"), input_scale=held.get("input_scale"))
                for name, held in parts.items()
            }
        )
        sides = (
            {n.partition(".")[2]: t for n, t in tensors.items() if n.startswith(f"{side}.")}
            for side in ("inputs", "captured", "recovered")
        )
        made = (facts["component"], facts["title"], bool(facts["edge"]))
        return cls(*made, twin, recipe, *sides)


def shrunk(
    discrepancy: Discrepancy,
    variant: FaultVariant | None = None,
    described: FaultVariant | None = None,
) -> Case | None:
    """Return the smallest case of a discrepancy; None where no call shows it.

    `variant` is the named fault that explains it; with one, the summed dimension is cut as well.
    `described` is what was recovered of it: the case carries that too, where it holds there.
    """
    record, context = discrepancy.record, discrepancy.context
    if record is None:
        return None
    title = f"{discrepancy.site}: {discrepancy.sentence}"[:600]
    if discrepancy.kind is DiscrepancyKind.EDGE:
        wrong = {
            name: tensor
            for name, tensor in record.inputs.items()
            if name in record.implied and not alike(record.implied[name], tensor)
        }
        implied = {name: record.implied[name] for name in wrong}
        if not wrong:
            return None
        return Case(context.name, title, True, context.bound, context.recipe, implied, wrong)
    case = Case(
        context.name, title, False, context.bound, context.recipe, record.inputs, record.outputs
    )
    try:
        if is_ragged(context.component):
            return _small_enough(_with_recovered(case, described))
        # What was recovered may depend on the places of rows, so that a few do not show it.
        few = _with_recovered(_fewest_experts(_fewest_rows(case)), described)
        case = few if few.recovered or described is None else _with_recovered(case, described)
        case = case if case.recovered else few
        if variant is not None:
            prefix = _prefix(context.bound.config, context.name, context.recipe)
            case = shortest_sum(case, variant, prefix)
        return _small_enough(_fewest_columns(case))
    except CANNOT_RUN:
        return None  # the twin cannot run on these shapes


def _with_recovered(case: Case, variant: FaultVariant | None) -> Case:
    """Return the case with what was recovered, where it gives what was captured."""
    if variant is None:
        return case
    given: list[tuple[Tensors, Mapping[str, Any]]] = []
    plain = case.twin.calls[case.component]

    def asked(inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        given.append((inputs, weights))
        return plain(inputs, weights)

    try:
        with torch.inference_mode():
            made = variant.apply(asked)(case.inputs, case.weights)
            found = _unlike(case, *given[-1]) if given else {}
            if not found:
                found = {f"{_OUT}{n}": made[n].to(t.dtype) for n, t in case.captured.items()}
        told = replace(case, recovered=found)
        judged = told.judge_recovered(case.captured).values()
    except CANNOT_RUN:
        return case
    return told if all(each.verdict is Verdict.AGREES for each in judged) else case


def _unlike(case: Case, inputs: Tensors, weights: Mapping[str, Weight]) -> dict[str, Tensor]:
    """Return the operands of a call that are not those of the case."""
    found = {
        f"inputs.{name}": tensor
        for name, tensor in inputs.items()
        if name not in case.inputs or not same_values(tensor, case.inputs[name])
    }
    for name, own in case.weights.items():
        used = weights[name]
        if used is not own and _held(used) and _held(own):
            value = used.values(torch.float64)
            if not torch.equal(value, own.values(torch.float64)):
                found[f"weights.{name}"] = value
    return found


def _fewest_rows(case: Case) -> Case:
    """Keep the rows that differ most, as few as are still beyond the budget."""
    with torch.inference_mode():
        made = case.twin.calls[case.component](case.inputs, case.weights)
    if wrong_forms(case.captured, made, case.twin.numerics.store):
        return case
    count = next(iter(made.values())).shape[0]
    apart = torch.zeros(count, dtype=torch.float64)
    for candidate, twin in aligned(case.captured, made).values():
        if twin.ndim and twin.shape[0] == count:
            differs = _apart(candidate, twin).reshape(count, -1)
            apart = torch.maximum(apart, differs.amax(1))
    # Double the number of rows until they alone are beyond the budget.
    order, size = apart.argsort(descending=True, stable=True), 1
    while size < count:
        small = _rows_of(case, order[:size].sort().values, count)
        if any(
            result.verdict is Verdict.DIFFERS for result in small.judge(small.captured).values()
        ):
            return small
        size *= 2
    return case


def _apart(candidate: Tensor, twin: Tensor) -> Tensor:
    if not twin.is_floating_point() or twin.dtype.itemsize == 1:
        return (candidate.view(torch.uint8) != twin.view(torch.uint8)).double() if (
            twin.dtype.itemsize == 1
        ) else (candidate != twin).double()  # fmt: skip
    far = (candidate.double() - twin.double()).abs() / twin.double().abs().clamp(min=1e-30)
    return far.nan_to_num(1e30, 1e30, 1e30)


def _fewest_columns(case: Case) -> Case:
    """Keep the rows of a single matrix whose outputs differ most."""
    weights = dict(case.weights)
    out = case.captured.get("out")
    if len(weights) != 1 or out is None or len(case.captured) != 1 or out.ndim != 2:
        return case
    ((name, weight),) = weights.items()
    if tuple(weight.shape)[:1] != (out.shape[1],) or len(weight.shape) != 2:
        return case  # a table, or another use of the matrix
    if case.component.endswith(".attn.wo_a"):
        return case  # its rows belong to groups of heads of equal size
    with torch.inference_mode():
        made = case.twin.calls[case.component](case.inputs, case.weights)["out"]
    if made.shape != out.shape:
        return case
    order = _apart(*aligned(case.captured, {"out": made})["out"]).amax(0)
    order, size = order.argsort(descending=True, stable=True), 1
    values, prefix = _plain(weight)["value"], _prefix(case.twin.config, case.component, case.recipe)
    while size < len(order):
        rows = order[:size].sort().values
        cut = Weight(value=values[rows], input_scale=weight.input_scale)
        twin = bind(case.twin.config, case.twin.numerics, {prefix + name: cut}, case.recipe)
        recovered = {
            key: value[rows] if key.startswith("weights.") else value
            for key, value in case.recovered.items()
        }
        recovered |= {k: v[:, rows] for k, v in recovered.items() if k.startswith(_OUT)}
        small = replace(case, twin=twin, captured={"out": out[:, rows]}, recovered=recovered)
        if any(
            result.verdict is Verdict.DIFFERS for result in small.judge(small.captured).values()
        ):
            return small
        size *= 2
    return case


def _prefix(config: Config, name: str, recipe: Recipe) -> str:
    component = component_named(config, name, recipe)
    prefix = f"{component.block.prefix}." if component.block else ""
    # A drafter's embedding and head may be the model's, which lie outside its block.
    return prefix if all(weight.startswith(prefix) for weight in component.weights) else ""


def _small_enough(case: Case) -> Case | None:
    sides = [*case.inputs.values(), *case.captured.values()]
    sides += [tensor for weight in case.weights.values() for tensor in _plain(weight).values()]
    size = sum(side.numel() * side.element_size() for side in sides)
    return case if size <= _MOST_BYTES else None


def _rows_of(case: Case, rows: Tensor, count: int) -> Case:
    def cut(side: Tensors) -> dict[str, Tensor]:
        return {n: t[rows] if t.ndim and t.shape[0] == count else t for n, t in side.items()}

    return replace(case, inputs=cut(case.inputs), captured=cut(case.captured))


def _fewest_experts(case: Case) -> Case:
    """Keep only the experts that tokens are routed to."""
    experts = case.inputs.get("experts")
    shared = case.twin.numerics.switches.input_scale_shared  # needs all experts, visited or not
    if experts is None or ".experts." not in case.component or shared:
        return case
    visited = set(experts.unique().tolist())
    kept = {
        name: weight
        for name, weight in case.weights.items()
        if ".experts." not in name or int(name.split(".experts.")[1].split(".")[0]) in visited
    }
    prefix = _prefix(case.twin.config, case.component, case.recipe)
    named = {prefix + name: weight for name, weight in kept.items()}
    twin = bind(case.twin.config, case.twin.numerics, _Some(named), case.recipe)
    return replace(case, twin=twin)


class _Some(dict[str, Weight]):
    """The weights of a few experts; any other expert is an empty weight."""

    def __missing__(self, name: str) -> Weight:
        return Weight()


def _plain(weight: Weight) -> dict[str, Tensor]:
    """Return a weight as exact numbers in the narrowest dtype that holds them."""
    found: dict[str, Tensor] = {}
    if weight.value is not None:
        found["value"] = weight.value
    elif weight.is_quantised:
        wide = weight.values(torch.float64)
        # float32 only if it is exact.
        narrow = wide.float()
        found["value"] = narrow if torch.equal(narrow.double(), wide) else wide
    if weight.input_scale is not None:
        found["input_scale"] = weight.input_scale
    return found


def _arrived(name: str, arrived: Tensor, implied: Tensor) -> OutputResult:
    if alike(implied, arrived):
        return OutputResult(name, Verdict.AGREES)
    if implied.shape != arrived.shape:
        return OutputResult(name, Verdict.DIFFERS, (LevelFinding("shape", (), 1.0, 0.0),))
    same = same_values(arrived, implied)
    apart = float((arrived.double() - implied.double()).norm()) if not same else 0.0
    return OutputResult(name, Verdict.DIFFERS, (LevelFinding("what arrived", (), apart, 0.0),))


def _numerics_told(numerics: Numerics) -> dict[str, Any]:
    names = {
        n: str(getattr(numerics, n)).removeprefix("torch.") for n in ("work", "store", "products")
    }
    switches = {n: getattr(numerics.switches, n) for n in numerics.switches.__dataclass_fields__}
    return {"mode": str(numerics.mode), **names, "switches": switches}


def _numerics_of(raw: Mapping[str, Any]) -> Numerics:
    work, store, products = (getattr(torch, raw[name]) for name in ("work", "store", "products"))
    known = Switches()
    switches = {
        name: type(getattr(known, name))(each) if isinstance(each, str) else each
        for name, each in raw["switches"].items()
    }
    return Numerics(Mode(raw["mode"]), work, store, products, Switches(**switches))


def _unreadable(path: Path, value: str) -> UnreadableFile:
    return UnreadableFile(
        str(path),
        value[:200],
        f"a case that degarble wrote ({FORMAT})",
        "Run degarble check again.",
    )
