"""Any torch model through its modules: a clean one agrees, a fault is blamed on its own module."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from degarble.harness import api
from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.engine.diagnose.judge import modules as single_modules
from degarble.suites.engine.diagnose.judge.decoder_toy import FAULTS, PLACE, Toy, toy

if TYPE_CHECKING:
    from pathlib import Path

LINEARS = 7


@pytest.fixture(scope="module")
def small() -> Toy:
    return toy(layers=9, width=128, wide=256, tokens=48)


@pytest.fixture(scope="module")
def twin(small: Toy) -> api.Twin:
    return api.Twin(small.weights)


def test_a_clean_model_agrees_in_every_linear(small: Toy, twin: api.Twin) -> None:
    found = api.check(api.capture(small.model, small.tokens), twin)
    assert found.verdict is api.Verdict.AGREES
    assert len(found.judged) == 9 * LINEARS
    assert found.discrepancies == ()
    assert found.origins == ()
    assert {name.rpartition(".")[2] for name in found.unjudged} >= {"embed", "input_layernorm"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported_for_its_module_alone(small: Toy, twin: api.Twin, fault: str) -> None:
    change, named = FAULTS[fault]
    small.put(PLACE, change(small.weights[PLACE]))
    try:
        found = api.check(api.capture(small.model, small.tokens), twin)
    finally:
        small.put(PLACE, small.weights[PLACE])
    assert found.verdict is api.Verdict.DIFFERS
    assert [trouble.component for trouble in found.discrepancies] == [PLACE]
    (origin,) = found.origins
    assert (origin.layer, origin.component, origin.fault) == (7, "mlp.down_proj", named)
    document = json.loads(json.dumps(found.document()))
    assert (document["schema"], document["verdict"]) == (1, "DIFFERS")
    assert PLACE in str(found)


def test_bfloat16_models_are_judged_by_the_budget(small: Toy) -> None:
    """Not bit for bit our own product, so each output goes through the exact twin."""
    run = api.capture(small.model.bfloat16(), small.tokens)
    small.model.float()
    for name, tensor in small.weights.items():
        small.put(name, tensor)
    found = api.check(
        run, {name: w for name, w in _rounded(small).items() if name[:8] < "layers.2"}
    )
    assert found.verdict is api.Verdict.AGREES, str(found)
    assert max(kernel.ratio for kernel in found.judged.values()) <= 0.7


def _rounded(small: Toy) -> dict[str, torch.Tensor]:
    return {
        name: api.dequantise(weight, torch.float32).bfloat16()
        for name, weight in small.weights.items()
    }


def test_calls_that_agreed_are_not_judged_again(
    small: Toy, twin: api.Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [api.capture(small.model, small.tokens) for _ in range(2)]
    assert api.check(runs[0], twin).verdict is api.Verdict.AGREES
    monkeypatch.setattr(single_modules, "agrees_at_once", lambda *_: pytest.fail("judged again"))
    assert api.check(runs[1], twin).verdict is api.Verdict.AGREES


def test_captures_on_disk_are_judged_alike(small: Toy, tmp_path: Path) -> None:
    api.capture(small.model, small.tokens, folder=tmp_path / "run", components="mlp.*")
    found = api.check(tmp_path / "run", {n: w for n, w in small.weights.items() if ".mlp." in n})
    assert found.verdict is api.Verdict.AGREES
    assert len(found.judged) == 9 * 3


def test_definitions_and_values_that_are_not_finite() -> None:
    first, last = nn.Linear(8, 8), nn.Linear(8, 4)
    model = nn.Sequential(first, nn.GELU(), last)
    run = api.capture(model, torch.randn(5, 8))
    weights = {
        "m0": {"w": first.weight.detach().clone(), "bias": first.bias.detach().clone()},
        "m2": {"w": last.weight.detach().clone(), "bias": last.bias.detach().clone()},
    }
    gelu = {"m1": nn.GELU()}
    found = api.check(run, weights, gelu)
    assert (found.verdict, len(found.judged)) == (api.Verdict.AGREES, 3), str(found)
    tanh = {"m1": lambda x: nn.functional.gelu(x, approximate="tanh")}
    assert [e.component for e in api.check(run, weights, tanh).discrepancies] == ["m1"]
    with torch.no_grad():
        first.weight[3, 3] = math.nan
    found = api.check(api.capture(model, torch.randn(5, 8)), weights, gelu)
    assert [trouble.component for trouble in found.discrepancies] == ["m0"]
    assert found.inherited == ("m1", "m2")
    assert found.first_not_finite == "m0 in step 0"


def test_a_row_that_is_not_finite_hides_no_fault_of_the_others() -> None:
    torch.manual_seed(5)
    linear = nn.Linear(64, 32, bias=False)
    stored = {"linear": linear.weight.detach().clone()}
    x = torch.randn(20, 64)
    x[7] = math.nan
    healthy = api.check(api.capture(linear, x), stored)
    assert (healthy.discrepancies, healthy.inherited) == ((), ("linear",)), str(healthy)
    with torch.no_grad():
        linear.weight.mul_(2)
    found = api.check(api.capture(linear, x), stored)
    assert [trouble.cause and trouble.cause.fault for trouble in found.discrepancies] == [
        "M43.whole"
    ]
    x[:] = math.nan
    assert api.check(api.capture(linear, x), stored).verdict is api.Verdict.UNDECIDED


class _Looks(TorchDispatchMode):
    """The operations that read a tensor, besides products and views of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is not typed
        self._place = tensor.data_ptr()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note an operation."""
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.data_ptr() == self._place:
            self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_inputs_of_a_product_are_looked_at_once() -> None:
    torch.manual_seed(5)
    linear = nn.Linear(64, 32, bias=False)
    run = api.capture(linear, torch.randn(20, 64))
    twin = api.Twin({"linear": linear.weight.detach().clone()})
    (call,) = run.calls
    with _Looks(run.inputs(call)["x"]) as looks:
        assert api.check(run, twin).verdict is api.Verdict.AGREES
    asked = [name for name in looks.seen if name in ("sum", "eq", "ne", "abs", "isfinite")]
    assert asked == ["sum"], looks.seen


def test_what_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    run = api.capture(model, torch.randn(5, 8))
    weight = torch.zeros(8, 8)
    with pytest.raises(UnknownName, match="Did you mean m0"):
        api.check(run, {"m0_": weight})
    with pytest.raises(InvalidArgument, match="Name the parts"):
        api.check(run, {"m0": {"weight": weight}})
    with pytest.raises(InvalidArgument, match="a callable"):
        api.check(run, {}, {"m0": 3})
    with pytest.raises(InvalidArgument, match="weight of m0"):
        api.check(run, {"m0": "x"})
    with pytest.raises(InvalidArgument, match="none together with a Twin"):
        api.check(run, api.Twin({}), {})
    with pytest.raises(InvalidArgument, match="a torch module"):
        api.capture(lambda x: x, weight)  # type: ignore[call-overload]
    with pytest.raises(UnknownName, match="components"):
        api.capture(model, torch.randn(5, 8), components="nothing")
    assert api.check(run, {}).verdict is api.Verdict.UNDECIDED


def test_what_decodes_quickly_is_decoded_for_every_call_and_not_held() -> None:
    torch.manual_seed(5)
    stored = api.quantise(torch.randn(256, 512), api.NVFP4)  # 65,536 bytes: the compiled decoder
    twin, x = api.Twin({"one": stored}), torch.randn(4, 512)
    weight = api.dequantise(stored, torch.float32)
    for _ in range(3):
        kernel = twin.judge("one", {"x": x}, {"out": x @ weight.T})
        assert kernel is not None
        assert kernel.verdict is api.Verdict.AGREES
    assert "values" not in vars(twin._held["one"])
    kernel = twin.judge("one", {"x": x}, {"out": x @ weight.T * 2})
    assert kernel is not None
    assert kernel.verdict is api.Verdict.DIFFERS


def test_a_lone_module_is_a_component_and_a_call_without_rows_is_passed_over() -> None:
    model = nn.Linear(32, 16, bias=False)
    weight = model.weight.detach().clone()
    run = api.capture(model, torch.randn(4, 32))
    assert [call.component for call in run.calls] == ["linear"]
    assert api.check(run, {"linear": weight}).verdict is api.Verdict.AGREES
    assert api.check(run, {"linear": weight * 2}).verdict is api.Verdict.DIFFERS
    none = api.capture(model, torch.randn(0, 32))
    assert api.check(none, {"linear": weight}).verdict is api.Verdict.UNDECIDED
    with pytest.raises(InvalidArgument, match="what capture\\(\\) gave"):
        api.check(None, {"linear": weight})  # type: ignore[arg-type]


def test_a_bfloat16_model_on_decoded_weights_agrees_and_its_convention_is_reported() -> None:
    made = toy(layers=2, width=128, wide=256, tokens=48)
    run = api.capture(made.model.to(torch.bfloat16), made.tokens)
    found = api.check(run, made.weights)
    assert found.verdict is api.Verdict.AGREES, str(found)
    (used,) = found.conventions
    assert (used.value, used.source, used.components) == ("weights_bf16", "learned", 14)
    assert "weights rounded to BF16 once decoded" in str(found)
    assert found.document()["conventions"][0]["source"] == "learned"
    stated = api.check(run, made.weights, conventions={"decoded_operands": "weights_bf16"})
    assert stated.verdict is api.Verdict.AGREES
    assert [convention.source for convention in stated.conventions] == ["declared"]
    exact = api.check(run, made.weights, conventions={"decoded_operands": "exact"})
    assert exact.verdict is api.Verdict.DIFFERS
    assert [convention.source for convention in exact.conventions] == ["contradicted"]
    assert {trouble.cause for trouble in exact.discrepancies} == {None}, (
        "M40.short_sums is not the cause"
    )
    with pytest.raises(UnknownName, match=r"of check\(\)"):
        api.check(run, made.weights, conventions={"decoded_operands": "fp16"})


def test_one_linear_on_rounded_weights_among_exact_ones_is_named() -> None:
    made = toy(layers=1, width=128, wide=256, tokens=48)
    place = "layers.0.mlp.down_proj"
    linear = made.model.get_submodule(place)
    assert isinstance(linear, nn.Linear)
    with torch.no_grad():
        linear.weight.copy_(linear.weight.to(torch.bfloat16).float())
    found = api.check(api.capture(made.model, made.tokens), made.weights)
    (trouble,) = found.discrepancies
    assert trouble.component == place
    assert trouble.cause is None
    assert "weights rounded to BF16 once decoded" in trouble.sentence
    assert not found.conventions


def _checked(small: Toy, twin: api.Twin, changed: dict[str, Any]) -> api.CheckedModules:
    """Check a run in which some modules hold other weights."""
    for name, tensor in changed.items():
        small.put(name, tensor)
    try:
        return api.check(api.capture(small.model, small.tokens), twin)
    finally:
        for name in changed:
            small.put(name, small.weights[name])


def test_exchanged_weights_are_named_with_both_modules(small: Toy, twin: api.Twin) -> None:
    gate, up = "layers.3.mlp.gate_proj", "layers.3.mlp.up_proj"
    found = _checked(small, twin, {gate: small.weights[up], up: small.weights[gate]})
    assert [origin.fault for origin in found.origins] == ["O07.other_module"] * 2
    assert f"The weights of {gate} and {up} are exchanged" in str(found)
    assert "the same in 2 components" in str(found)


def test_a_weight_of_another_layer_is_named_with_its_module(small: Toy, twin: api.Twin) -> None:
    here, there = "layers.3.self_attn.q_proj", "layers.5.self_attn.k_proj"
    found = _checked(small, twin, {here: small.weights[there]})
    (trouble,) = found.discrepancies
    assert trouble.component == here
    assert trouble.cause is not None
    assert f"the weights of {there}" in trouble.cause.evidence


def test_equal_discrepancies_are_searched_once_and_told_once(
    small: Toy, twin: api.Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[str] = []
    own = api.Twin.search

    def counted(
        self: api.Twin, component: str, only: frozenset[str] | None = None, more: Any = ()
    ) -> Any:
        searched.extend([component] if only is None else [])
        return own(self, component, only, more)

    monkeypatch.setattr(api.Twin, "search", counted)
    doubled, swapped = (FAULTS[name][0] for name in ("global scale x2", "nibble swap"))
    changed = {
        f"layers.{layer}.mlp.down_proj": (swapped if layer == 4 else doubled)(
            small.weights[f"layers.{layer}.mlp.down_proj"]
        )
        for layer in range(9)
    }
    found = _checked(small, twin, changed)
    named = {trouble.component: trouble.cause.fault for trouble in found.discrepancies
             if trouble.cause}  # fmt: skip
    assert named == {
        name: "M10.nibble_order" if name == "layers.4.mlp.down_proj" else "M43.whole"
        for name in changed
    }
    assert searched == ["layers.0.mlp.down_proj", "layers.4.mlp.down_proj"]
    assert "the same in 8 components: also in layers.1.mlp.down_proj" in str(found)


@pytest.mark.slow
def test_what_nothing_explains_is_searched_twice_at_most(small: Toy, twin: api.Twin) -> None:
    made = torch.Generator().manual_seed(3)
    changed = {
        f"layers.{layer}.mlp.down_proj": api.quantise(
            torch.randn(128, 256, generator=made) / 16, api.NVFP4
        )
        for layer in range(4)
    }
    found = _checked(small, twin, changed)
    assert {trouble.cause for trouble in found.discrepancies} == {None}
    assert [bool(trouble.tried) for trouble in found.discrepancies] == [True, True, False, False]
    assert "explains layers.0.mlp.down_proj or layers.1.mlp.down_proj" in str(found)
