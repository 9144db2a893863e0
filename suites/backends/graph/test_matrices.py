"""wo_a in FP8 by stand-ins: whole or group by group, turned within or before: one answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from degarble.harness.backends.cutedsl.linears import LinearKernel
from degarble.harness.backends.graph import matrices as layer_matrices
from degarble.harness.backends.graph.matrices import CodedGroups, coded_product
from degarble.kernels.gemm.problem import GemmProblem
from degarble.suites.backends.cutedsl_standin import StandIn

GROUPS, RANK, INNER, HEAD, POSITIONS = 2, 64, 1024, 512, 40
PRODUCT, CODES = "sm90_gemm_grouped_fp8", "simt_quantise_fp8"


def whole_groups(kind: str) -> CodedGroups:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randn(GROUPS * RANK, INNER, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(1, INNER // 128, generator=generator) + 0.5
    if kind == "ue8m0":
        scales = (127 + 4 * scales).to(torch.uint8)
    way = LinearKernel("sm90_gemm_fp8_block", GemmProblem(1, RANK, INNER, "fp8_block", kind))
    return CodedGroups(way, ((codes, scales),), GROUPS, whole=True)


def one_by_one(groups: CodedGroups) -> CodedGroups:
    ((codes, scales),) = groups.parts
    parts = tuple((each.contiguous(), scales) for each in codes.chunk(GROUPS))
    return replace(groups, parts=parts, whole=False)


def said(groups: CodedGroups, tokens: int, launched: list[str] | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    heads = torch.randn(tokens, GROUPS * INNER // HEAD, HEAD, generator=generator).bfloat16()
    turns = torch.randn(POSITIONS, 64, generator=generator)
    positions = torch.randint(POSITIONS, (tokens,), generator=generator)

    def seen(kernel: str, _problem: Any, _given: dict[str, Any]) -> None:
        if launched is not None:
            launched.append(kernel)

    return coded_product(StandIn(seen), groups, heads, (turns, positions))


@pytest.mark.parametrize("kind", ["float32", "ue8m0"])
def test_every_way_gives_the_same_result(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, launched = whole_groups(kind), list[str]()
    made = said(groups, 3, launched)
    assert made.shape == (3, GROUPS * RANK)
    assert launched == [CODES, PRODUCT]
    launched.clear()
    assert torch.equal(said(one_by_one(groups), 3, launched), made)
    assert launched == [CODES, *GROUPS * ["sm90_gemm_fp8_block"]]
    launched.clear()
    monkeypatch.setattr(layer_matrices, "turns_first", lambda _: False)
    assert torch.equal(said(groups, 3, launched), made)
    assert launched == [PRODUCT]


def test_other_weights_give_another_result() -> None:
    groups = whole_groups("float32")
    ((codes, scales),) = groups.parts
    other = replace(groups, parts=((codes.flip(0).contiguous(), scales),))
    assert not torch.equal(said(other, 3), said(groups, 3))
