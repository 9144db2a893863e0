"""V3.2's attention in the backend: what is by kernels, exact weights, wrong tensors, reasons."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.backends.cutedsl import attention as cutedsl_latent
from degarble.harness.backends.cutedsl import backend as cutedsl
from degarble.harness.backends.cutedsl.kernels import NoKernelError
from degarble.harness.capture.files.reader import Capture
from degarble.harness.inference.model import open_model
from degarble.harness.report.verdict import Verdict
from degarble.references.numerics import KeyValueCache
from degarble.suites.backends import cutedsl_cases as cases
from degarble.suites.backends.cutedsl_standin import StandIn

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from degarble.harness.backends.cutedsl.kernels import ComponentPart

KERNELS_OF_ATTENTION = ["sm90_gemm_grouped", "simt_kv_write", "sm90_sparse_attention"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


WRONG: dict[str, tuple[str, Callable[[Any, dict[str, Any]], None]]] = {
    "matrices of heads": ("sm90_gemm_grouped", _rolled("b")),
    "keys one to the left": ("sm90_sparse_attention", _further),
    "turned part left out": ("sm90_sparse_attention", _without_key),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", WRONG)
def test_a_tensor_at_the_wrong_argument_is_found_in_attention(
    folder: Path, tmp_path: Path, what: str
) -> None:
    at, change = WRONG[what]

    def seen(kernel: str, problem: Any, given: dict[str, Any]) -> None:
        if kernel == at:
            change(problem, given)

    model = cases.write_model(folder, "v32", "nvfp4-full")
    stand_in = StandIn(seen)
    role = "*attn.attend"
    cases.capture_by(stand_in, model.checkpoint, tmp_path / "run", components=role, new_tokens=1)
    table = Capture.open(tmp_path / "run").facts["kernels"]["kernels"]
    launched = [each["kernel"] for each in table["layers.0.attn.attend"]]
    assert set(launched) == set(KERNELS_OF_ATTENTION)
    found = cases.checked(tmp_path / "run", model)
    assert found.verdict is Verdict.DIFFERS, what
    assert {each.trouble.component.partition(".attn.")[2] for each in found.origins} == {"attend"}


def test_what_has_no_kernel_has_a_reason(folder: Path) -> None:
    model = cases.write_model(folder, "v32", "bf16")
    with open_model(model.checkpoint, switches=cutedsl.CONVENTIONS) as opened:
        bound, recipe = opened.speaker.bound, opened.recipe
        parts = {each.component.name: each for each in cutedsl.parts_of(bound, recipe, "sm_90a")}
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
