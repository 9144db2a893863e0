"""A description is saved as data, read back to the same change, and named from then on."""

from __future__ import annotations

import ast
import json
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.engine.adopted.data import NotStatable, read, written
from degarble.harness.engine.adopted.files import fault_of, stated_fault
from degarble.harness.engine.adopted.statement import statement_of
from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.engine.faults.model_faults import (
    FaultVariant,
    changed_outputs,
    with_config,
    with_facts,
    with_inputs,
    with_outputs,
    with_weights,
)
from degarble.harness.engine.recover import described, numbers
from degarble.harness.engine.recover.stated import OPERATIONS
from degarble.harness.formats.number_formats import BLOCK_FORMATS, E4M3, Rounding
from degarble.suites.engine.recover import test_described as plants
from degarble.suites.engine.recover import test_whole as whole
from degarble.suites.engine.recover.test_described import model, of_outputs, of_weight, told

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.harness.engine.adopted.files import AdoptedFault
    from degarble.harness.engine.recover.described import Described

LINEAR, WEIGHT, NORM = whole.LINEAR, whole.WEIGHT, "layers.1.attn.norm"
CODES = "layers.1.attn.wq_a.act_quant"
RECOVER = Path(described.__file__).parent


def adopted(description: Described, name: str = "adopted.x") -> AdoptedFault:
    """Save a description, and read what was saved."""
    stated = {"degarble_fault": 1, "id": name, "effect": "", "case": {}} | statement_of(description)
    return stated_fault(json.loads(json.dumps(stated, allow_nan=False)), "a file")


def _flip(codes: Tensor, _scales: Tensor) -> None:
    codes[9, 30] = (codes[9, 30] | 6) ^ 8


def _one_scale(_codes: Tensor, scales: Tensor) -> None:
    scales[7, 2] ^= 1 << 3


def _copied(codes: Tensor, scales: Tensor) -> None:
    codes[16:24], scales[16:24] = codes[40:48].clone(), scales[40:48].clone()


def _row_gain(name: str, own: Any) -> Any:
    made = own.values(torch.float64).clone()
    made[5] *= 3.0
    return type(own)(value=made, input_scale=own.input_scale) if name == WEIGHT else own


def _epsilon(facts: Any) -> Any:
    return with_config(facts, rms_norm_eps=0.01)


def _input_scales(inputs: Any) -> Any:
    return {**inputs, "block_scale": inputs["block_scale"].flip(-1)}


def _some_columns(x: Tensor) -> Tensor:
    made = x.clone()
    made[:, 2::8] *= 1.5
    return made


def _added(given: Any, made: Any) -> Any:
    return {**made, "out": made["out"] + given["x"]}


def _smaller_scales(_given: Any, made: Any) -> Any:
    return {**made, "block_scale": made["block_scale"] - 1}


def _marks(test: Any) -> list[Any]:
    return list(test.pytestmark)


def _plants() -> Iterator[tuple[str, str, FaultVariant]]:
    for edit in (
        whole.swapped, whole.transposed, whole.next_rows, whole.six_read_as_four,
        whole.larger_scales, whole.arbitrary, _flip, _one_scale, _copied,
    ):  # fmt: skip
        yield edit.__name__.strip("_"), LINEAR, of_weight(WEIGHT, edit)
    yield "some columns", NORM, of_outputs(_some_columns)
    yield "added", NORM, FaultVariant("", with_outputs(_added))
    yield "row gain", LINEAR, FaultVariant("", with_weights(_row_gain))
    yield "input", LINEAR, FaultVariant("", with_inputs(_input_scales))
    yield "codes", CODES, FaultVariant("", with_outputs(_smaller_scales))
    yield "epsilon", NORM, FaultVariant("", with_facts(model().planting(NORM), _epsilon))
    (others,) = _marks(whole.test_other_components_are_told_by_what_they_computed_with)
    for case in others.args[1]:
        name, variant, words = getattr(case, "values", case)
        yield words, name, FaultVariant("", variant)
    (maps,) = _marks(plants.test_a_map_of_a_norms_outputs_is_read_off)
    for change, words in maps.args[1]:
        yield words, NORM, of_outputs(change)


PLANTS = {label: (name, variant) for label, name, variant in _plants()}
QUICK = ("swapped", "flip", "copied", "epsilon", "signs are lost")
LABELS = [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in PLANTS]


@pytest.mark.parametrize("label", LABELS)
def test_what_was_described_is_named_once_it_is_adopted(label: str) -> None:
    name, variant = PLANTS[label]
    description = told(name, variant)
    assert description is not None
    fault = fault_of(adopted(description))
    context, records = model().naming(name), model().sights(name, variant)
    (again,) = fault.variants(context)
    for record in records:  # the same bits, of everything
        with torch.inference_mode():
            calls = (each.apply(context.call) for each in (description.variant, again))
            one, other = (dict(call(record.inputs, context.weights)) for call in calls)
        assert one.keys() == other.keys()
        assert all(same(one[each], other[each]) for each in one)
    found = diagnose(context, records, [fault])
    assert [each.id for each in found.named] == ["adopted.x"]
    assert found.sentence.startswith(fault.title)
    assert found.described is None


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    shown = [each.reshape(-1).view(torch.uint8) for each in (one, other)]
    return one.dtype == other.dtype and torch.equal(*shown)


def test_an_adopted_fault_is_named_in_another_layer_and_no_healthy_one() -> None:
    description = told(LINEAR, of_weight(WEIGHT, whole.swapped))
    assert description is not None
    fault = fault_of(adopted(description))
    name = "layers.2.attn.wq_a"
    found = diagnose(
        model().naming(name), model().sights(name, of_weight(WEIGHT, whole.swapped)), [fault]
    )
    assert [each.id for each in found.named] == ["adopted.x"]
    assert "layers.2.attn.wq_a" in found.named[0].evidence
    other = "layers.1.attn.wq_b"
    assert not fault.applies_to(model().naming(other))
    unlike = diagnose(
        model().naming(name), model().sights(name, of_weight(WEIGHT, whole.next_rows)), [fault]
    )
    assert not unlike.named


def test_rules_for_columns_are_kept_as_rules() -> None:
    description = told(NORM, of_outputs(plants.rotated))
    assert description is not None
    stated = json.dumps(statement_of(description)["change"])
    assert "numbers.rolled" in stated
    assert "tensor" not in stated
    (variant,) = fault_of(adopted(description)).variants(model().naming(NORM))
    x = torch.arange(48.0).reshape(2, 24)  # other extents than those that were seen
    made = variant.apply(lambda _inputs, _weights: {"out": x})({}, {})
    assert torch.equal(made["out"], x.roll(3, -1))


def test_a_table_of_places_is_a_rule_or_none() -> None:
    own = torch.arange(24)
    for table in (own.roll(7), own ^ 1, own.flip(0), own.reshape(4, 6).T.reshape(-1)):
        rule = numbers.rule_of(table)
        assert rule is not None
        assert torch.equal(rule(24), table)
    assert numbers.rule_of(own[[0, 2, 1, *range(3, 24)]]) is None


# ---- every kind of change ------------------------------------------------------------------------

# Functions of recover that are passed on and are no part of a change: they search.
SEARCH = {
    "distance", "unrounded", "unrounded_output", "cache", "_scaled_input", "_config_variant",
    "_scaled_and_stored", "_looked_at", "_written_by", "by_lists", "without",
    "_filled", "_moved_part", "_moved_rows", "_moved_columns", "_gains", "_clamped", "_cut",
    "_signs", "height", "_alone", "_unquantised", "_ruled_output", "_ruled_input", "holding",
    "multiplied", "shifted", "bounded", "_variant", "_ruled_weight", "_ruled_numbers_given",
    "columns_of_weight", "_sums_by_code", "_sums_over", "_explained",
}  # fmt: skip


def _passed_on(tree: ast.Module) -> set[str]:
    """Return names of functions that are values and not called, and lambdas among arguments."""
    of_module = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    imported = {
        each.asname or each.name
        for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
        for each in node.names if (each.asname or each.name).lstrip("_")[:1].islower()
    }  # fmt: skip
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    decorators = {
        id(each) for node in ast.walk(tree) for each in getattr(node, "decorator_list", ())
    }
    called = {id(node.func) for node in calls} | decorators
    found = set()
    for node in ast.walk(tree):
        if id(node) in called:
            continue
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
            held = getattr(torch, node.attr)
            found |= {ast.unparse(node)} if callable(held) and type(held) is not type else set()
        if not isinstance(node, ast.Name):
            continue
        if node.id in of_module | imported and isinstance(node.ctx, ast.Load):
            found.add(node.id)
    given = [each for call in calls for each in call.args if _name(call) != "least"]
    return found | {f"a lambda in line {each.lineno}" for each in given if type(each) is ast.Lambda}


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def test_every_kind_of_change_is_registered() -> None:
    """A new function of a change is `operation`, or it searches; closures no file can state."""
    registered = set(map(id, OPERATIONS.values()))
    missing: dict[str, set[str]] = {}
    for path in sorted(RECOVER.glob("*.py")):
        held = vars(import_module(f"{described.__package__}.{path.stem}"))
        left = {
            name for name in _passed_on(ast.parse(path.read_text()))
            if id(held.get(name)) not in registered and name not in {*SEARCH, *OPERATIONS}
        }  # fmt: skip
        missing |= {path.name: left} if left else {}
    assert not missing, "mark them as operation (recover/stated.py), or add them to SEARCH"


def test_functions_and_rules_for_places_are_read_back_to_what_they_do() -> None:
    context = model().naming(LINEAR)
    x = torch.linspace(-3, 3, 24).double()
    for each in numbers.functions():
        again = read(json.loads(json.dumps(written(each.apply, context))), context)
        assert same(each.apply(x), again(x)), each.words
    for rule in numbers.places(24):
        again = read(json.loads(json.dumps(written(rule.of, context))), context)
        assert torch.equal(rule.of(24), again(24)), rule.words
    for grid in numbers.grids():
        again = read(json.loads(json.dumps(written(grid.of, context))), context)
        assert torch.equal(grid.of(128, 8), again(128, 8)), grid.words
    for reading in numbers.readings(E4M3):
        again = read(json.loads(json.dumps(written(reading.apply, context))), context)
        codes = torch.arange(256)
        assert same(reading.apply(codes), again(codes)), reading.words


@pytest.mark.parametrize(
    "value",
    [
        0.1, -0.0, float("inf"), 7, True, None, "text", (1, "b"), [2.5], frozenset({"a", "b"}),
        {3: 0.5}, torch.float16, E4M3, BLOCK_FORMATS["NVFP4"], Rounding.UP,
    ],
    ids=lambda value: type(value).__name__,  # the order of a set is another in every process
)  # fmt: skip
def test_values_are_read_back_as_they_were(value: Any) -> None:
    context = model().naming(LINEAR)
    again = read(json.loads(json.dumps(written(value, context), allow_nan=False)), context)
    assert again == value
    assert type(again) is type(value)
    assert str(again) == str(value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_are_read_back_bit_by_bit(dtype: torch.dtype, seed: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    x = (torch.randn(3, 5, generator=drawn, dtype=torch.float64) * 10).to(dtype)
    if dtype.is_floating_point:
        x[0, 0], x[1, 1], x[2, 2] = -0.0, float("inf"), float("nan")
    context = model().naming(LINEAR)
    again = read(json.loads(json.dumps(written(x, context), allow_nan=False)), context)
    assert again.shape == x.shape
    assert same(x.nan_to_num(7.0) if dtype.is_floating_point else x,
                again.nan_to_num(7.0) if dtype.is_floating_point else again)  # fmt: skip
    if dtype.is_floating_point:
        assert torch.equal(x.isnan(), again.isnan())


def test_what_no_file_can_state_is_refused_by_name() -> None:
    context = model().naming(LINEAR)
    closure: Any = of_outputs
    with pytest.raises(NotStatable, match="of_outputs"):
        written(partial(changed_outputs, closure), context)
    with pytest.raises(NotStatable, match="5,000 numbers"):
        written(torch.arange(5000), context)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"do": "os.system", "with": {"command": "true"}}, "change.do"),
        ({"do": "numbers.rolled", "with": {"steps": 1}}, "change.steps"),
        ({"do": "numbers.rolled", "with": {"step": "1"}}, "change.step"),
        ({"do": "weights.Element"}, "change.do"),
        ({"is": "weights.Element", "column": 1}, "change"),
        ({"is": "numbers.rolled"}, "change.is"),
        ({"tensor": "float64", "shape": [2], "runs": [[1.0, 1]]}, "change"),
        ({"tensor": "float64", "shape": [-2], "runs": []}, "change"),
        ({"tensor": "complex64", "shape": [], "runs": []}, "change.tensor"),
        ({"dtype": "object"}, "change.dtype"),
        ({"choice": "Popen", "value": 1}, "change.choice"),
        ({"choice": "Rounding", "value": "sideways"}, "change.value"),
        ({"number": "1e3"}, "change"),
        ({"map": [[1]]}, "change"),
        ({"python": "1"}, "change"),
        ({"do": "torch.abs", "and": 1}, "change"),
    ],
)
def test_data_of_another_form_are_refused_with_their_place(data: Any, words: str) -> None:
    with pytest.raises((InvalidArgument, UnknownName)) as refused:
        read(data, None)
    assert refused.value.name == words
    assert refused.value.remedy


def test_operations_within_each_other_have_a_bound() -> None:
    data: Any = 1.0
    for _ in range(60):
        data = {"tuple": [data]}
    with pytest.raises(InvalidArgument, match="within each other"):
        read(data, None)
