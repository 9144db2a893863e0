"""Sparse attention on Blackwell (sm_100a): one softmax over listed cache entries and V4's sink.

Operands, problems, definitions (slots, lengths, LSE, tokens without keys), splits, checks and merge
are those of sm90_sparse_attention. Never waits for the GPU. Compiled, never run.
"""

from dataclasses import replace

from degarble.kernels.attention import sm90_sparse_attention as hopper
from degarble.kernels.attention.sm100_attention_kernel import launch_attention
from degarble.kernels.runtime.targets import SM100A

KERNEL = replace(hopper.KERNEL, entry=launch_attention, target=SM100A, before=hopper.rounded)
compile_form = KERNEL.compile_form
