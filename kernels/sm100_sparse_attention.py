"""Sparse attention on Blackwell: one softmax over listed cache entries and, in V4, a sink.

    out_THL, lse_TH = sparse_attention(Operands(...), AttentionProblem(...), settings)

Owns the sm_100a form of sm90_sparse_attention, with its operands, problems, definitions, splits,
refusals and merge: what is said there of slots, lengths, LSE and tokens without keys holds here.
The wrapper checks and launches, and never waits for the GPU. Refuses what it would misread, by
name. Compiled, never run: kept honest by suites/kernels/test_sm100_sparse_attention.py as far as
that reaches. T tokens, H heads, L 512, W, K list widths.
"""

from functools import cache

from cutlass import Float32, Int32, Uint8

from degarble.harness.errors import MissingDevice
from degarble.kernels import simt_attention_merge as merging
from degarble.kernels import sm90_attention_experiment as experiment
from degarble.kernels import sm90_sparse_attention as hopper
from degarble.kernels.common import sparse_attention_problem as facts
from degarble.kernels.common.compiling import CompiledKernel, any_stream, compile_kernel
from degarble.kernels.common.operands import pointer, require_device
from degarble.kernels.common.settings import CompileSettings
from degarble.kernels.common.sparse_attention_problem import (
    AttentionForm,
    AttentionProblem,
    MergeForm,
)
from degarble.kernels.common.targets import SM100A, TARGETS, target_of_device
from degarble.kernels.sm90_attention_kernel import Addresses
from degarble.kernels.sm90_sparse_attention import Operands, Results, Workspace
from degarble.kernels.sm100_attention_kernel import launch_attention


@cache
def compile_form(form: AttentionForm, settings: CompileSettings) -> CompiledKernel:
    """Compile a form; needs no GPU."""
    pointers = tuple(pointer(Uint8, None, 4) for _ in Addresses._fields)
    extents = tuple(Int32(1) for _ in range(13))
    arguments = (pointers, extents, Float32(1.0), form, any_stream())
    return compile_kernel(launch_attention, arguments, TARGETS[form.target], settings)


def sparse_attention(
    operands: Operands,
    problem: AttentionProblem,
    settings: CompileSettings,
    *,
    results: Results | None = None,
    workspace: Workspace | None = None,
) -> Results:
    """Attend, on the GPU that holds the operands; memory that is not given is allocated."""
    device = operands.q.device
    results = results or hopper.empty_results(problem, device)
    workspace = workspace or hopper.empty_workspace(problem, device)
    hopper.require_operands(problem, operands, results, workspace)
    lists = [*operands.window, *(operands.entries or ())]
    others = [operands.q, operands.sink, *results, *(workspace or ())]
    number = require_device([*others, *lists])
    if problem.tokens:
        target = target_of_device(number)
        if target != SM100A:
            raise MissingDevice(
                "target of sparse attention",
                target.name,
                SM100A.name,
                "sm90_sparse_attention has the form of Hopper.",
            )
        if problem.products == facts.EXPERIMENT:
            operands = operands._replace(q=experiment.queries_in_nvfp4(operands.q, settings))
        kernel = compile_form(facts.choose_form(problem, target.name), settings)
        merge = None
        if workspace:
            merge = merging.compile_form(MergeForm(target.name, problem.family.sinks), settings)
        hopper.launch((kernel, merge), problem, operands, results, workspace)
    return results
