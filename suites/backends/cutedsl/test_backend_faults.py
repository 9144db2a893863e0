"""Planted faults reach the kernel's code: its machine code differs, and is restored afterwards."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

from degarble.kernels.attention import problem as attention_problem
from degarble.kernels.cache import problem as compressor_problem
from degarble.kernels.gemm import gemv_problem
from degarble.kernels.gemm import problem as gemm_problem
from degarble.kernels.indexer import problem as indexer_problem
from degarble.kernels.moe import problem as moe_problem
from degarble.kernels.primitives import kv_problem, quantise_problem
from degarble.kernels.primitives import kv_problem as attention_rows
from degarble.kernels.rows import mhc_problem, router_problem
from degarble.kernels.rows import mhc_problem as projection_problem
from degarble.kernels.rows import problem as back
from degarble.kernels.rows import problem as heads
from degarble.kernels.rows import problem as rmsnorm_problem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import module_of
from degarble.suites.backends.cutedsl import cutedsl_faults as faults
from degarble.suites.backends.cutedsl import cutedsl_faults_attention as of_attention
from degarble.suites.backends.cutedsl import cutedsl_faults_experts as experts
from degarble.suites.kernels.moe import moe_faults

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.needs("cutlass")
TARGET = "sm_90a"


def _gemm(rows: int, inner: int, operands: str, scales: str) -> Any:
    problem = gemm_problem.GemmProblem(rows, 64, inner, operands, scales)
    return gemm_problem.choose_form(problem, TARGET)


def _write(_: str) -> Any:
    pages = kv_problem.Pages("bf16", 64, 1)
    problem = kv_problem.WriteProblem(9, pages, positions=64)
    return kv_problem.choose_write_form(problem, TARGET)


OF_SPREADING = (
    "streams changed", "mix the other way round", "layer without its factor", "streams reversed",
)  # fmt: skip


def _attention(name: str) -> Any:
    keys = attention_problem.KeyList(128, kv_problem.Pages("bf16", 64, 2))
    splits = 2 if name.startswith("splits") else 0
    problem = attention_problem.AttentionProblem(4, 8, keys, keys, "decode", splits=splits)
    return attention_problem.choose_form(problem, TARGET)


def _scores(_: str) -> Any:
    pages = indexer_problem.KeyPages("bf16", 64, 1)
    problem = indexer_problem.ScoresProblem(4, 8, 64, 1, pages, 4, "stored")
    return indexer_problem.choose_form(problem, TARGET)


FORMS: dict[str, Callable[[str], Any]] = {
    "sm90_gemm_nvfp4": lambda _: _gemm(144, 96, "nvfp4", "e4m3"),
    "sm90_gemm_fp8_block": lambda _: _gemm(144, 256, "fp8_block", "ue8m0"),
    "sm90_gemm_bf16": lambda _: _gemm(144, 512, "bf16", "none"),
    "simt_quantise_nvfp4": lambda name: quantise_problem.choose_form(
        quantise_problem.QuantiseProblem(
            9, 96, "linear", "swiglu" if name == "gate and up" else "values"
        ),
        TARGET,
    ),
    "simt_rmsnorm": lambda _: rmsnorm_problem.choose_norm_form(
        rmsnorm_problem.NormProblem(9, 192), TARGET
    ),
    "simt_qnorm_rope": lambda _: heads.QNormRopeForm(TARGET),
    "simt_inverse_rope": lambda _: back.InverseRopeForm(False, TARGET),
    "simt_kv_write": _write,
    "simt_router": lambda _: router_problem.choose_form(
        router_problem.RouterProblem(9, 8, 2), TARGET
    ),
    "simt_gemv_bf16": lambda _: gemv_problem.choose_form(
        gemv_problem.GemvProblem(8, 8, 192), TARGET
    ),
    "simt_mhc": lambda name: mhc_problem.MhcMixForm(
        "post" if name in OF_SPREADING else "all", TARGET
    ),
    "sm90_sparse_attention": _attention,
    "simt_compressor": lambda _: compressor_problem.PoolForm(4, 512, True, TARGET),
    "simt_indexer_topk": lambda _: indexer_problem.choose_topk_form(
        indexer_problem.TopkProblem(4, 64, 32), TARGET, 132
    ),
    "sm90_indexer_scores": _scores,
    "simt_indexer_operand": lambda _: indexer_problem.choose_operand_form(
        indexer_problem.OperandProblem(4, 8, "none", "exact", True), TARGET
    ),
    "simt_mhc_project": lambda _: projection_problem.choose_form(
        projection_problem.ProjectProblem(4, 192), TARGET
    ),
    "simt_kv_read": lambda _: kv_problem.choose_read_form(
        kv_problem.ReadProblem(4, kv_problem.Pages("fp8", 64, 1)), TARGET
    ),
}


def of_experts(kernel: str) -> str:
    """Compile what the grouped experts launch of a kernel's file."""
    module, settings = import_module(module_of(kernel)), CompileSettings()
    if kernel == "simt_moe_rows":
        form = moe_problem.CombineForm(2, weighted=True, shared=False, target=TARGET)
        of_rows = moe_problem.RowsForm(64, TARGET)
        made = [make(of_rows, settings) for make in (module.compile_plan, module.compile_gather)]
        made.append(module.compile_combine(form, settings))
    else:
        problem = moe_problem.MoeProblem(20, 192, 96, 8, 2, 8, 10.0)
        forms = moe_problem.forms_of(problem, TARGET, moe_faults.OF_64_ROWS)
        forms = (*forms, replace(forms[0], shown=True))
        made = [module.compile_form(form, settings) for form in forms]
    return "".join(str(each.ptx) for each in made)


def ptx(fault: faults.Fault) -> str:
    """Compile the form of a fault as the module has it now."""
    if fault.kernel not in FORMS:
        return of_experts(fault.kernel)
    module = import_module(module_of(fault.kernel))
    form = FORMS[fault.kernel](fault.name)
    # What is launched is what a plain GEMM's entry compiles.
    compile_form = module.ENTRY.compiled if hasattr(module, "ENTRY") else module.compile_form
    return str(compile_form(form, CompileSettings()).ptx)


ALL = (*faults.FAULTS, *of_attention.FAULTS, *experts.FAULTS)


def test_names_are_their_own_and_there_are_enough() -> None:
    assert len({fault.name for fault in ALL}) == len(ALL)
    assert min(map(len, (faults.FAULTS, of_attention.FAULTS, experts.FAULTS))) >= 15
    assert attention_rows.WIDTH == 512


SOME = ("entry of the next slot", "overlap dropped", "scaled without a scale")


def _changes(fault: faults.Fault) -> None:
    whole = ptx(fault)
    kernel = import_module(module_of(fault.kernel))
    with faults.planted(fault):
        assert ptx(fault) != whole
        if hasattr(kernel, "KERNEL"):
            assert kernel.KERNEL.compile_form is kernel.compile_form
    assert ptx(fault) == whole


@pytest.mark.parametrize("name", SOME)
def test_a_planted_fault_changes_the_code_and_goes_away(name: str) -> None:
    _changes(next(fault for fault in ALL if fault.name == name))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name.replace(" ", "-"))
def test_every_planted_fault_does(fault: faults.Fault) -> None:
    _changes(fault)
