"""Grouped experts, latent attention and RoPE tables of the backend."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from degarble.harness.backends.cutedsl import attention as cutedsl_latent
from degarble.harness.backends.cutedsl import backend as cutedsl
from degarble.harness.backends.cutedsl import kernels as steps
from degarble.harness.backends.cutedsl.backend import CONVENTIONS, use_kernels
from degarble.harness.backends.cutedsl.kernels import NoKernelError
from degarble.harness.backends.cutedsl.rows import RopeTables, table_of
from degarble.harness.base.errors import InvalidArgument
from degarble.harness.capture.files.reader import Capture
from degarble.harness.inference.model import open_model
from degarble.harness.model.types import Rope, RopeEnd, RopePairing, Yarn
from degarble.harness.report.verdict import Verdict
from degarble.references.elementary import rotation_table
from degarble.references.numerics import KeyValueCache, Numerics
from degarble.references.tiny.configs import TINY_V4, TINY_V32
from degarble.suites.backends import cutedsl_cases as cases
from degarble.suites.backends.cutedsl_standin import StandIn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.backends.cutedsl.kernels import ComponentPart
    from degarble.references.binding import BoundModel


# --------------------------------------------------------------------------------------------------
# Routed experts as steps of one call: what arrives is what a step left, or is laid out anew.
#
# The stand-in poisons what a launch does not write. Wrong arguments of every step are found in the
# component that launches it.

LAYER = "layers.0.ffn.experts"
SHOWN, TOTAL = "FC1 that shows gate and up", "sum with the shared expert"
EXPERTS = torch.tensor([[1, 6], [6, 2], [1, 0], [6, 7], [2, 6]])


class Ran(NamedTuple):
    """A bound model by stand-ins, and the steps that they were told."""

    bound: BoundModel
    told: list[str]

    def call(self, role: str, **inputs: Tensor) -> dict[str, Tensor]:
        made = self.bound(f"{LAYER}.{role}" if role else LAYER, **inputs)
        return dict(made)


def name_of(kernel: str, problem: Any) -> str:
    """Name a launch; FC1 that shows gate and up and the sum with a shared expert have own names."""
    if getattr(problem, "shown", False) and kernel == steps.FC1:
        return SHOWN
    return TOTAL if kernel == steps.SUM and problem.shared else kernel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grouped")


@pytest.fixture
def ran(folder: Path) -> Iterator[Ran]:
    model, told = cases.write_model(folder, "v4", "nvfp4-full"), []

    def seen(kernel: str, problem: Any, _given: dict[str, Any]) -> None:
        told.append(name_of(kernel, problem))

    with open_model(model.checkpoint, switches=CONVENTIONS) as opened, torch.inference_mode():
        bound = opened.logits_model.bound
        use_kernels(bound, opened.recipe, StandIn(seen))
        yield Ran(bound, told)


def drawn(tokens: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(tokens, 192, generator=generator).to(torch.bfloat16)


def through(ran: Ran, between: Callable[[dict[str, Tensor]], None]) -> list[dict[str, Tensor]]:
    """Run all components of a layer's experts; `between` may change what is handed on."""
    weights = torch.rand(EXPERTS.shape, generator=torch.Generator().manual_seed(2))
    x = ran.call("w13.act_quant", x=drawn(), experts=EXPERTS)
    between(x)
    both = ran.call("w13", **x, experts=EXPERTS)
    between(both)
    hidden = ran.call("act_quant", x=both["out"], experts=EXPERTS, weights=weights)
    between(hidden)
    down = ran.call("w2", **hidden, experts=EXPERTS)
    between(down)
    routed = ran.call("combine", x=down["out"], weights=weights)
    between(routed)
    name = f"{LAYER.removesuffix('experts')}moe_sum"
    total = ran.bound(name, routed=routed["out"], shared=drawn())
    return [x, both, hidden, down, routed, dict(total)]


def test_components_are_the_steps_of_one_call(ran: Ran) -> None:
    made = through(ran, lambda _: None)
    assert ran.told == [
        steps.ORDER, steps.GATHER, SHOWN, steps.FC1, steps.FC2, steps.SUM, TOTAL
    ]  # fmt: skip
    assert torch.equal(made[-1]["out"], (made[-2]["out"] + drawn().float()).to(torch.bfloat16))
    assert [tuple(each["out"].shape) for each in made if "out" in each] == [
        (5, 2, 192), (5, 2, 192), (5, 192), (5, 192)
    ]  # fmt: skip

    def elsewhere(made: dict[str, Tensor]) -> None:
        del made
        ran.bound(f"{LAYER.replace('0', '1')}.w13.act_quant", x=drawn(), experts=EXPERTS)

    ran.told.clear()
    again = through(ran, elsewhere)  # another layer's call takes the workspace each time
    assert ran.told.count(steps.ORDER) == 5, "three elsewhere, and again for w13 and for w2"
    assert ran.told[-1] == TOTAL
    assert steps.FC1 not in ran.told
    assert "simt_quantise_nvfp4" in ran.told
    for first, second in zip(made, again, strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_was_changed_on_its_way_is_laid_out_anew(ran: Ran) -> None:
    whole = through(ran, lambda _: None)

    def changed(made: dict[str, Tensor]) -> None:
        for name in ("codes", "out"):
            if name in made:
                made[name] = made[name].clone()
                made[name][1] = made[name][3]
        if "block_scale" in made:
            made["block_scale"] = made["block_scale"].clone()

    ran.told.clear()
    other = through(ran, changed)
    assert steps.FC1 not in ran.told, "gate and up are not those of FC1"
    assert TOTAL not in ran.told, "nor is the sum the kernel's"
    for role in range(1, 6):
        (name,) = {"out", "codes"} & set(whole[role])
        assert not torch.equal(whole[role][name], other[role][name])
    assert torch.equal(whole[3]["out"][0], other[3]["out"][0]), "rows are their own"


def test_choices_without_an_expert_add_nothing(ran: Ran) -> None:
    experts = torch.tensor([[-1, 3], [-1, -1]])
    x = ran.call("w13.act_quant", x=drawn(2), experts=experts)
    both = ran.call("w13", **x, experts=experts)["out"]
    assert both[0, 1].any()
    assert not both[0, 0].any()
    assert not both[1].any()
    assert float(x["tensor_scale"][1, 0]) == 1.0


def test_rows_of_an_expert_have_one_scale(ran: Ran) -> None:
    x = ran.call("w13.act_quant", x=drawn(), experts=EXPERTS)
    x["tensor_scale"] = x["tensor_scale"] * torch.rand(EXPERTS.shape)
    with pytest.raises(InvalidArgument, match="rows of one expert"):
        ran.call("w13", **x, experts=EXPERTS)


def _at(step: str, name: str, make: Callable[[Any], Any]) -> Any:
    def seen(kernel: str, problem: Any, given: dict[str, Any]) -> None:
        if name_of(kernel, problem) == step:
            given[name] = make(given[name]).contiguous()

    return seen


def _next(x: Tensor) -> Tensor:
    return x.roll(1, 0)


WRONG: dict[str, tuple[str, Any]] = {
    "numbers of experts here": ("w13.act_quant", _at(steps.ORDER, "local", _next)),
    "input scales": ("w13.act_quant", _at(steps.GATHER, "w13_input_scale", lambda x: x * 2)),
    "gate beside up": ("w13", _at(SHOWN, "w13_codes", lambda x: x.flip(1))),
    "decode scales of a matrix": ("w13", _at(SHOWN, "w13_decode_scale", lambda x: x * 2)),
    "another expert's w13": ("experts.act_quant", _at(steps.FC1, "w13_codes", _next)),
    "scales behind": ("experts.act_quant", _at(steps.FC1, "w2_input_scale", lambda x: x * 2)),
    "another expert's w2": ("w2", _at(steps.FC2, "w2_codes", _next)),
    "scales of w2": ("w2", _at(steps.FC2, "w2_scales", _next)),
    "places of slots": ("combine", _at(steps.SUM, "places", _next)),
}
IN_CI = ("another expert's w13",)
CASES = [pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow) for name in WRONG]


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_argument_is_found_where_it_is_launched(
    folder: Path, tmp_path: Path, name: str
) -> None:
    component, change = WRONG[name]
    model = cases.write_model(folder, "v4", "nvfp4-full")
    cases.capture_by(
        StandIn(change), model.checkpoint, tmp_path / "run", ((7, 8, 9),),
        components="*experts*", new_tokens=1,
    )  # fmt: skip
    table = Capture.open(tmp_path / "run").facts["kernels"]["kernels"]
    assert table[f"{LAYER}.act_quant"][0]["tactic"].startswith("FC1, 16x256x256")
    result = cases.checked(tmp_path / "run", model)
    assert result.verdict is Verdict.DIFFERS, name
    assert any(origin.discrepancy.component.endswith(component) for origin in result.origins)


# --------------------------------------------------------------------------------------------------
# V3.2's attention in the backend: what is by kernels, exact weights, wrong tensors, reasons.

KERNELS_OF_ATTENTION = ["sm90_gemm_grouped", "simt_kv_write", "sm90_sparse_attention"]


@pytest.fixture(scope="module")
def latent_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("latent")


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_parts_side_by_side_add_up_to_the_weight(kind: str) -> None:
    weight = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1))
    weight = weight.bfloat16().float() if kind == "bf16" else weight
    made = cutedsl_latent.side_by_side(weight)
    assert made.dtype is torch.bfloat16
    assert made.shape == (12, 8 if kind == "bf16" else 24)
    assert torch.equal(made.double().reshape(3, 4, -1, 8).sum(2), weight.double())


def _rolled(name: str) -> Callable[[Any, dict[str, Any]], None]:
    def change(_problem: Any, given: dict[str, Any]) -> None:
        given[name] = given[name].roll(1, 0).contiguous()

    return change


def _further(_problem: Any, given: dict[str, Any]) -> None:
    given["window_slots"] = (given["window_slots"] - 1).clamp(min=-1)


def _without_key(_problem: Any, given: dict[str, Any]) -> None:
    given["q"] = given["q"].clone()
    given["q"][..., 512:] = 0


LATENT_WRONG: dict[str, tuple[str, Callable[[Any, dict[str, Any]], None]]] = {
    "matrices of heads": ("sm90_gemm_grouped", _rolled("b")),
    "keys one to the left": ("sm90_sparse_attention", _further),
    "turned part left out": ("sm90_sparse_attention", _without_key),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", LATENT_WRONG)
def test_a_tensor_at_the_wrong_argument_is_found_in_attention(
    latent_folder: Path, tmp_path: Path, what: str
) -> None:
    at, change = LATENT_WRONG[what]

    def seen(kernel: str, problem: Any, given: dict[str, Any]) -> None:
        if kernel == at:
            change(problem, given)

    model = cases.write_model(latent_folder, "v32", "nvfp4-full")
    stand_in = StandIn(seen)
    role = "*attn.attend"
    cases.capture_by(stand_in, model.checkpoint, tmp_path / "run", components=role, new_tokens=1)
    table = Capture.open(tmp_path / "run").facts["kernels"]["kernels"]
    launched = [each["kernel"] for each in table["layers.0.attn.attend"]]
    assert set(launched) == set(KERNELS_OF_ATTENTION)
    result = cases.checked(tmp_path / "run", model)
    assert result.verdict is Verdict.DIFFERS, what
    assert {origin.discrepancy.component.partition(".attn.")[2] for origin in result.origins} == {
        "attend"
    }


def test_what_has_no_kernel_has_a_reason(latent_folder: Path) -> None:
    model = cases.write_model(latent_folder, "v32", "bf16")
    with open_model(model.checkpoint, switches=cutedsl.CONVENTIONS) as opened:
        bound, recipe = opened.logits_model.bound, opened.recipe
        parts = {
            component_part.component.name: component_part
            for component_part in cutedsl.parts_of(bound, recipe, "sm_90a")
        }
    attend, write = parts["layers.0.attn.attend"], parts["layers.0.attn.kv_write"]
    assert not isinstance(cutedsl.decided(attend), str)
    for part, switches, reason in (
        (attend, {"attention_in_storage_dtype": None}, "softmax is float32"),
        (write, {"kv_cache": KeyValueCache.NVFP4}, "no kernel writes such nvfp4 entries"),
        (write, {"cache_scale_floored": True}, "no kernel writes such"),
    ):
        assert reason in str(cutedsl.decided(_with(part, switches)))
    other = replace(attend, target="sm_100a")
    assert "written for sm_90a" in str(cutedsl.decided(other))
    narrow = replace(attend.facts, config=replace(attend.config, kv_lora_rank=256))
    with pytest.raises(NoKernelError, match="rows of 256 and 64"):
        cutedsl_latent.attend_latent(replace(attend, facts=narrow))
    for kind in (KeyValueCache.FP8, KeyValueCache.FP8_F32, KeyValueCache.EXACT):
        assert not isinstance(cutedsl.decided(_with(write, {"kv_cache": kind})), str)


def _with(part: ComponentPart, switches: dict[str, Any]) -> ComponentPart:
    facts = part.facts
    return replace(part, facts=replace(facts, numerics=facts.numerics.with_switches(**switches)))


# --------------------------------------------------------------------------------------------------
# The table of turns: equal to the references' angles, which have a formula of their own.

ROPES = [TINY_V4.rope(block) for block in TINY_V4.blocks[:2]]
ROPES += [TINY_V32.rope(TINY_V32.blocks[0])]
ROPES += [Rope(theta=1e6, dims=64, pairing=RopePairing.INTERLEAVED, end=RopeEnd.LAST, yarn=None)]
YARN = Yarn(factor=40, original_max_position_embeddings=4096)
ROPES += [
    replace(ROPES[-1], yarn=replace(YARN, **changes))
    for changes in (
        {},
        {"attention_factor": 1.3, "truncate": False},
        {"original_max_position_embeddings": 4, "beta_slow": 4},  # the ramp runs backwards
        {"mscale": 1.0, "mscale_all_dim": 0.7},
    )
]


@pytest.mark.parametrize("rope", ROPES, ids=range(len(ROPES)))
def test_cosines_and_sines_are_those_of_the_references(rope: Rope) -> None:
    positions = torch.tensor([0, 1, 2, 127, 128, 4095])
    twin = rotation_table(rope, positions, Numerics.definition())
    table = table_of(rope, 4096)
    assert table.dtype is torch.float32
    assert table.shape == (4096, 64)
    expected = torch.cat((twin.cos, twin.sin), dim=1)
    assert float((table[positions].double() - expected).abs().max()) < 2**-24 * rope.scale


def test_a_table_grows_and_is_kept() -> None:
    turns = RopeTables()
    first = turns.covering(ROPES[0], torch.tensor([3]))
    assert turns.covering(ROPES[0], torch.tensor([1023])) is first
    longer = turns.covering(ROPES[0], torch.tensor([1024, 5]))
    assert len(longer) == 2048
    assert torch.equal(longer[:1024], first)
    assert turns.covering(ROPES[0], torch.tensor([7])) is longer
