"""What host code passes to compiled kernels, and what it refuses, against kernel_cases' file.

Each kernel's part of the file was written before it had a descriptor. Where a change of arguments
is intended, call `kernel_cases.write()` and give the reason in the commit.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, MissingDevice, UnknownName
from degarble.kernels.gemm.gemv_problem import GemvProblem
from degarble.kernels.runtime import kernel as descriptor
from degarble.kernels.runtime.modules import MODULES, kernel_named, module_of
from degarble.kernels.runtime.targets import SM90A, SM100A
from degarble.suites.kernels.runtime import kernel_cases
from degarble.suites.kernels.runtime.kernel_cases import CASES
from degarble.suites.kernels.runtime.launch_case import SETTINGS, LaunchCase
from degarble.suites.support.pretended_gpu import META, pretended_gpu

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.needs("cutlass")

DESCRIBED = (
    "simt_attention_merge",
    "simt_compressor",
    "simt_embed",
    "simt_gemv_bf16",
    "simt_indexer_operand",
    "simt_indexer_topk",
    "simt_inverse_rope",
    "simt_kv_read",
    "simt_kv_write",
    "simt_latent_query",
    "simt_mhc",
    "simt_mhc_norm",
    "simt_mhc_onward",
    "simt_mhc_project",
    "simt_moe_rows.COMBINE",
    "simt_moe_rows.GATHER",
    "simt_moe_rows.PLAN",
    "simt_paged_pool",
    "simt_qnorm_rope",
    "simt_quantise_fp8",
    "simt_quantise_nvfp4",
    "simt_residual_norm",
    "simt_rmsnorm",
    "simt_router",
    "simt_scale",
    "simt_slots",
    "sm100_gemm_bf16",
    "sm100_gemm_fp8_block",
    "sm100_gemm_grouped",
    "sm100_gemm_nvfp4",
    "sm100_indexer_scores",
    "sm100_moe_nvfp4.FC1",
    "sm100_moe_nvfp4.FC2",
    "sm100_sparse_attention",
    "sm90_gemm_bf16",
    "sm90_gemm_fp8_block",
    "sm90_gemm_grouped",
    "sm90_gemm_grouped_fp8",
    "sm90_gemm_nvfp4",
    "sm90_gemm_w4a16",
    "sm90_gemm_w4a16_wgmma",
    "sm90_indexer_scores",
    "sm90_latent_heads",
    "sm90_moe_by_row.FC1",
    "sm90_moe_by_row.FC2",
    "sm90_moe_by_row.GATED",
    "sm90_moe_by_row.ROWS",
    "sm90_moe_by_row.SUM",
    "sm90_moe_decoded.FC1",
    "sm90_moe_decoded.FC2",
    "sm90_moe_decoded.GATHER",
    "sm90_moe_nvfp4.FC1",
    "sm90_moe_nvfp4.FC2",
    "sm90_sparse_attention",
    "sm90_sparse_attention.SPLITS",
)
SEQUENCES = (
    "sm100_moe_nvfp4", "sm100_shared_expert", "sm90_moe_by_row", "sm90_moe_decoded",
    "sm90_moe_nvfp4", "sm90_shared_expert", "sm90_moe_by_row.PRODUCTS",
)  # fmt: skip
# Named for the first target that they had.
ANYWHERE = (
    "sm90_gemm_w4a16", "sm90_moe_by_row",
    *(f"sm90_moe_by_row.{name}" for name in ("FC1", "FC2", "GATED", "ROWS", "SUM", "PRODUCTS")),
)  # fmt: skip
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.key.partition(" with")[0])
each_kernel = pytest.mark.parametrize("name", DESCRIBED)


def described(name: str) -> Any:
    return kernel_named(name)


def test_every_descriptor_has_cases() -> None:
    listed = {*DESCRIBED, *SEQUENCES}
    alone = {name for name in MODULES if hasattr(import_module(module_of(name)), "KERNEL")}
    assert alone == {name for name in listed if "." not in name}
    kernels = [described(name) for name in DESCRIBED]
    assert all(isinstance(kernel, descriptor.Kernel) for kernel in kernels)
    for name in SEQUENCES:
        assert set(map(id, described(name).kernels)) <= set(map(id, kernels))
    assert listed == {case.kernel for case in CASES} == set(kernel_cases.PUBLIC)


@each_case
def test_public_functions_pass_what_is_kept(case: LaunchCase) -> None:
    want = kernel_cases.kept()["arguments"][case.key]
    assert kernel_cases.arguments_of(case, kernel_cases.public(case)) == want


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.kernel in DESCRIBED],
    ids=lambda case: case.key,
)
def test_operands_by_name_pass_the_same(case: LaunchCase) -> None:
    def run(tensors: dict[str, Tensor]) -> Any:
        made = described(case.kernel).run(case.problem, SETTINGS, **tensors)
        return tuple(made.values())

    want, got = kernel_cases.kept()["arguments"][case.key], kernel_cases.arguments_of(case, run)
    for part in ("entry", "target", "compiled", "launched"):
        assert got[part] == want[part]


def test_one_output_is_returned_where_others_are_absent() -> None:
    """The GEMV quantises its sums too, where a problem says so."""
    problem = GemvProblem(2, 131, 776)
    x_MK, weight_NK = (torch.empty(n, 776, dtype=torch.bfloat16, device=META) for n in (2, 131))
    with pretended_gpu():
        made = described("simt_gemv_bf16").run_one(problem, SETTINGS, x=x_MK, weight=weight_NK)
    assert made.shape == (2, 131)


@pytest.mark.parametrize("name", kernel_cases.PUBLIC)
def test_refusals_are_as_kept(name: str) -> None:
    kept = kernel_cases.kept()["refusals"]
    want = {key: text for key, text in kept.items() if key.startswith(f"{name}:")}
    assert kernel_cases.refusals(name) == want


@each_case
def test_operands_in_main_memory_are_refused(case: LaunchCase) -> None:
    with pytest.raises(InvalidArgument, match="one CUDA device"):
        kernel_cases.public(case)(case.tensors())


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in (*DESCRIBED, *SEQUENCES)
        if name.startswith(("sm90_", "sm100_")) and name not in ANYWHERE
    ],
)
def test_a_gpu_of_another_target_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case.kernel == name)
    own, other = (SM90A, SM100A) if name.startswith("sm90_") else (SM100A, SM90A)
    monkeypatch.setattr(descriptor, "require_device", lambda _tensors: 0)
    monkeypatch.setattr(descriptor, "target_of_device", lambda _device: other)
    with pytest.raises(MissingDevice, match=own.name):
        kernel_cases.public(case)(case.tensors())


@pytest.mark.parametrize("name", [*DESCRIBED, *SEQUENCES])
def test_an_unknown_operand_is_refused_by_name(name: str) -> None:
    case = next(case for case in CASES if case.kernel == name)
    with pytest.raises(UnknownName, match="operand"):
        described(name).run(case.problem, SETTINGS, **case.tensors(), nowhere=torch.zeros(1))


@each_kernel
def test_a_swapped_pointer_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two operands of a descriptor change places: the kept arguments are other ones."""
    case, kernel = next(case for case in CASES if case.kernel == name), described(name)
    first, second, *rest = kernel.operands
    swapped = replace(kernel, operands=(second, first, *rest))
    record = name.partition(".")[2] or "KERNEL"
    monkeypatch.setattr(import_module(module_of(name)), record, swapped)
    got = kernel_cases.arguments_of(case, kernel_cases.public(case))
    assert got["launched"] != kernel_cases.kept()["arguments"][case.key]["launched"]
