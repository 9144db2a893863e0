"""Sparse attention on Blackwell: one softmax over listed cache entries and, in V4, a sink.

    out_THL, lse_TH = sparse_attention(Operands(...), AttentionProblem(...), settings)

Owns the sm_100a form of sm90_sparse_attention, with its operands, problems, definitions, splits,
refusals and merge: what is said there of slots, lengths, LSE and tokens without keys holds here.
The wrapper checks and launches, and never waits for the GPU. Refuses what it would misread, by
name. Compiled, never run: kept honest by suites/kernels/attention/test_sm100_sparse_attention.py as
far as that reaches. T tokens, H heads, L 512, W, K list widths.
"""

from functools import cache

from degarble.kernels.attention import sm90_sparse_attention as hopper
from degarble.kernels.attention.problem import AttentionForm, AttentionProblem
from degarble.kernels.attention.sm90_sparse_attention import Operands, Results, Workspace
from degarble.kernels.attention.sm100_attention_kernel import launch_attention
from degarble.kernels.runtime.compiling import CompiledKernel
from degarble.kernels.runtime.settings import CompileSettings
from degarble.kernels.runtime.targets import SM100A


@cache
def compile_form(form: AttentionForm, settings: CompileSettings) -> CompiledKernel:
    """Compile a form; needs no GPU."""
    return hopper.compiled(launch_attention, form, settings)


def sparse_attention(
    operands: Operands,
    problem: AttentionProblem,
    settings: CompileSettings,
    *,
    results: Results | None = None,
    workspace: Workspace | None = None,
) -> Results:
    """Attend, on the GPU that holds the operands; memory that is not given is allocated."""
    entry = compile_form, SM100A
    return hopper.attended(entry, operands, problem, settings, (results, workspace))
