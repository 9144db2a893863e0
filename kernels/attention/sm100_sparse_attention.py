"""Sparse attention on Blackwell (sm_100a): one softmax over listed cache entries and V4's sink.

    out_THL, lse_TH = sparse_attention(AttentionOperands(...), AttentionProblem(...), settings)

Operands, problems, definitions (slots, lengths, LSE, tokens without keys), splits, checks and merge
are those of sm90_sparse_attention. Never waits for the GPU. Compiled, never run. T tokens, H heads,
L 512, W, K list widths.
"""

from functools import cache

from degarble.kernels.attention import sm90_sparse_attention as hopper
from degarble.kernels.attention.problem import AttentionForm, AttentionProblem
from degarble.kernels.attention.sm90_sparse_attention import (
    AttentionOperands,
    AttentionWorkspace,
    Results,
)
from degarble.kernels.attention.sm100_attention_kernel import launch_attention
from degarble.kernels.runtime.compiling import CompiledKernel, CompileSettings
from degarble.kernels.runtime.targets import SM100A


@cache
def compile_form(form: AttentionForm, settings: CompileSettings) -> CompiledKernel:
    """Compile a form; needs no GPU."""
    return hopper.compiled(launch_attention, form, settings)


def sparse_attention(
    operands: AttentionOperands,
    problem: AttentionProblem,
    settings: CompileSettings,
    *,
    results: Results | None = None,
    workspace: AttentionWorkspace | None = None,
) -> Results:
    """Attend, on the GPU that holds the operands; allocate memory that is not given."""
    entry = compile_form, SM100A
    return hopper.attended(entry, operands, problem, settings, (results, workspace))
