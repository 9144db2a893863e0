"""Round query heads to NVFP4 for `experiment-nvfp4`, which nothing chooses by default.

Queries are rounded to E2M1 with an E4M3 scale for 16 values by the kernels that write and read
cache entries of nvfp4-v41, in which the whole key is NVFP4. A product of two such numbers, scales
included, is exact in float32. So BF16 wgmma gives the logits of NVFP4 products with float32 sums,
but for the order of sums. docs/design-notes/attention_kernel.md says what it loses, and why it is
no choice.

Allocates what it rounds through; never waits for the GPU; may be captured in a graph. Shape
letters: T tokens, H heads, L width (512).
"""

import torch
from torch import Tensor

from degarble.kernels.attention.problem import EXPERIMENT_ENTRY
from degarble.kernels.cache import simt_kv_read as reading
from degarble.kernels.cache import simt_kv_write as writing
from degarble.kernels.primitives.kv_problem import Pages, ReadProblem, WriteProblem
from degarble.kernels.runtime.settings import CompileSettings

ENTRIES_OF_PAGE = 64


def queries_in_nvfp4(q_THL: Tensor, settings: CompileSettings) -> Tensor:
    """Return BF16 query heads rounded to what NVFP4 codes and scales represent."""
    rows = q_THL.flatten(0, 1)
    count = rows.shape[0]
    pages = Pages(EXPERIMENT_ENTRY, ENTRIES_OF_PAGE, -(-count // ENTRIES_OF_PAGE))
    written = WriteProblem(count, pages, source="row")
    cache = writing.empty_cache(written, q_THL.device)
    slots = torch.arange(count, device=q_THL.device)
    operands = writing.Operands(rows, None, None, None, slots)
    writing.kv_write(operands, cache, written, settings)
    made = reading.kv_read(slots.int(), cache, ReadProblem(count, pages), settings)
    return made.reshape(q_THL.shape)
