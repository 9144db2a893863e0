"""Effects of faults around attention, applied to stand-ins: a check names the cause, on any CPU.

The faults themselves are those of cutedsl_faults_attention, in kernels' code. Here a stand-in gets
the operands that such a kernel would have used, so that naming the cause needs no GPU.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from degarble.harness.backends.cutedsl import backend as cutedsl
from degarble.harness.report.verdict import Verdict
from degarble.references.numerics import KeyValueCache
from degarble.suites.backends import cutedsl_cases as cases
from degarble.suites.backends.cutedsl import cutedsl_faults_attention as faults
from degarble.suites.backends.cutedsl_standin import STAND_INS, StandIn

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Made = tuple[torch.Tensor, ...]
    Instead = Callable[[Callable[..., Made], Any, dict[str, Any]], Made]

pytestmark = pytest.mark.slow


def _with(name: str, change: Callable[[Any], Any]) -> Instead:
    return lambda true, problem, given: true(problem, {**given, name: change(given[name])})


def _another_width(true: Callable[..., Made], problem: Any, given: dict[str, Any]) -> Made:
    return true(replace(problem, scale=2 * problem.scale), given)


def _one_fewer(true: Callable[..., Made], problem: Any, given: dict[str, Any]) -> Made:
    (scores,) = true(problem, given)
    seen = (given["positions"] + 1) // problem.ratio - 1
    return (scores.masked_fill(torch.arange(scores.shape[1]) >= seen[:, None], -torch.inf),)


def _spread(name: str, change: Callable[[Any], Any]) -> Instead:
    """Change what a spreading is handed; other parts of mHC are the kernel's as well."""

    def instead(true: Callable[..., Made], problem: Any, given: dict[str, Any]) -> Made:
        handed = _with(name, change) if problem.part == "post" else None
        return handed(true, problem, given) if handed else true(problem, given)

    return instead


def _reversed(true: Callable[..., Made], problem: Any, given: dict[str, Any]) -> Made:
    made = true(problem, given)
    return (made[0].flip(1),) if problem.part == "post" else made


def _smallest(scores: torch.Tensor) -> torch.Tensor:
    return torch.where(scores.isneginf(), scores, -scores)


def _coarse(scores: torch.Tensor) -> torch.Tensor:
    """Scores without their last bits: no key of the kernel's is another one's."""
    code, low = scores.view(torch.int32), (1 << 19) - 1
    bits = torch.where(code < 0, code | low, code & ~low)
    return torch.where(scores.isneginf(), scores, bits.view(torch.float32))


def _as_e4m3(scores: torch.Tensor) -> torch.Tensor:
    coarse = scores.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return torch.where(scores.isneginf(), scores, coarse)


def _codes_of(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 numbers of blocks of 64 and their powers of two, as a cache of FP8 entries has them."""
    blocks = rows[:, :448].float().reshape(len(rows), 7, 64)
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1).clamp(min=1e-4) * (1.0 / 448.0))
    scale = torch.exp2((exponent - (mantissa == 0.5).int()).float())
    return (blocks / scale[..., None]).to(torch.float8_e4m3fn).float(), scale


class Coded(StandIn):
    """Pages of FP8 entries whose blocks are read with each other's scales."""

    def _run(self, kernel: str, problem: Any, tensors: Any) -> Made:
        if kernel == "simt_kv_write" and problem.pages.entry == "fp8":
            self._rows = dict(zip(tensors["slots"].tolist(), tensors["values"], strict=True))
            return (tensors["cache"],)
        if kernel == "simt_kv_read" and problem.pages.entry == "fp8":
            found = [self._rows[slot] for slot in tensors["indices"].tolist()]
            if not found:
                return (torch.empty(0, problem.pages.width, dtype=torch.bfloat16),)
            rows = torch.stack(found)
            codes, scale = _codes_of(rows)
            read = (codes * scale.flip(1)[..., None]).flatten(1).to(rows.dtype)
            return (torch.cat((read, rows[:, 448:]), dim=1),)
        made: Made = super()._run(kernel, problem, tensors)
        return made


def _not_rectified(true: Callable[..., Made], problem: Any, given: dict[str, Any]) -> Made:
    """Every head once more, the other way round."""
    q, weights = given["queries"], given["weights"]
    both = {"queries": torch.cat((q, -q), dim=1), "weights": torch.cat((weights, -weights), dim=1)}
    return true(replace(problem, heads=2 * problem.heads), {**given, **both})


def _one_more(true: Callable[..., Made], problem: Any, given: dict[str, Any]) -> Made:
    return true(problem, {**given, "positions": given["positions"] + problem.ratio})


def _pairs(heads: torch.Tensor) -> torch.Tensor:
    """The dims that are turned, in pairs."""
    tail = heads[..., -64:].unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.cat((heads[..., :-64], tail), dim=-1)


def _neighbours(weights: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = weights.unflatten(1, (-1, 2)).flip(2).flatten(1)
    return made


def _gates_reversed(true: Callable[..., Made], problem: Any, given: dict[str, Any]) -> Made:
    if problem.part != "all":
        return true(problem, given)
    order = [3, 2, 1, 0, *range(4, 24)]
    changed = {name: given[name][..., order].contiguous() for name in ("products", "base")}
    return true(problem, {**given, **changed})


def _oldest_out(slots: torch.Tensor) -> torch.Tensor:
    made = slots.clone()
    made[:, 0] = -1
    return made


INSTEAD: dict[str, Instead] = {
    "positions a place later": _with("positions", lambda x: x + 1),
    "sink counted twice": _with("sink", lambda x: x + math.log(2)),
    "logits scaled by another width": _another_width,
    "window of one less": _with("window_slots", _oldest_out),
    "an entry too late": _one_fewer,
    "smallest scores chosen": _with("scores", _smallest),
    "scores compared as E4M3": _with("scores", _as_e4m3),
    "scores compared coarsely": _with("scores", _coarse),
    "mix the other way round": _spread("mix", lambda x: x.transpose(1, 2).contiguous()),
    "layer without its factor": _spread("post", lambda x: x / 2),
    "streams reversed": _reversed,
    "pairs of queries swapped": _with("heads", _pairs),
    "not transformed": lambda true, problem, given: true(replace(problem, hadamard=False), given),
    "negative products kept": _not_rectified,
    "weights of the neighbouring heads": _with("weights", _neighbours),
    "an entry too early": _one_more,
    "gates of streams reversed": _gates_reversed,
}


class Faulty(StandIn):
    """A stand-in of which one kernel does something else."""

    def __init__(self, kernel: str, instead: Instead) -> None:
        super().__init__()
        self._kernel, self._instead = kernel, instead

    def _run(self, kernel: str, problem: Any, tensors: Any) -> Made:
        if kernel != self._kernel:
            made: Made = super()._run(kernel, problem, tensors)
            return made
        given = {name: each for name, each in tensors.items() if each is not None}
        return self._instead(STAND_INS[kernel], problem, given)


@pytest.mark.parametrize("name", [*INSTEAD, "scales of blocks reversed"])
def test_what_a_planted_fault_does_is_named(tmp_path: Path, name: str) -> None:
    fault = faults.ATTENTION_BY_NAME[name]
    kernels = Faulty(fault.kernel, INSTEAD[name]) if name in INSTEAD else Coded()
    model = cases.write_model(tmp_path, "v4", "nvfp4-full", 1)
    prompts = cases.drawn_prompts(fault.prompts) if fault.prompts else cases.PROMPTS
    conventions = {**cutedsl.CONVENTIONS, "kv_cache": KeyValueCache(fault.cache)}
    with mock.patch.object(cutedsl, "CONVENTIONS", conventions):
        cases.capture_by(
            kernels, model.checkpoint, tmp_path / "run", prompts, new_tokens=2,
            components=f"*{fault.component}",
        )  # fmt: skip
    found = cases.checked(tmp_path / "run", model)
    assert found.verdict is Verdict.DIFFERS
    named = {
        each.id
        for origin in found.origins
        if origin.trouble.component.endswith(fault.component) and origin.diagnosed
        for each in origin.diagnosed.named
    }
    assert fault.cause
    assert any(each.startswith(f"{fault.cause}.") for each in named), named
