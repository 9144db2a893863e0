"""DeepSeek-V4's compressors of vLLM with our kernels: store states, pool windows, write entries.

Overrides the forward of a layer's compressor (ratio 4 or 128, into its fp8_ds_mla pages) and of the
indexer's (into pages of FP8 keys with a float32 scale each, without a Hadamard transform, like
vLLM's queries). States stay in vLLM's own pages, slots, block tables and layout. So cached
prefixes, chunked prompts and preempted requests work as with vLLM's kernels, and either side reads
what the other wrote.

Shape letters: T tokens, F columns of latents and of gates, E width of an entry, P positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import InvalidArgument, LayoutMismatch
from degarble.harness.vllm.bound.linears import settings
from degarble.harness.vllm.bound.pages import PagedView
from degarble.harness.vllm.bound.upstream import DeepseekCompressor, get_forward_context

if TYPE_CHECKING:
    from torch import Tensor

# By width of an entry: its format and bytes. vLLM's fp8_ds_mla, and its indexer's FP8 keys.
ENTRIES = {512: ("fp8", 584), 128: ("fp8-key", 132)}
_WAY_OUT = "Give it to vLLM: parts.compressor = vllm."


class DegarbleCompressor(DeepseekCompressor):
    """A compressor; made by vLLM, adopted by `adopt_compressor`."""

    def forward(self, kv_score: Tensor, positions: Tensor, rotary_emb: Any) -> None:
        """Keep each token's state, pool windows that close, write their entries by slot."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):  # vLLM measures its memory
            return
        own, of_entries = metadata[self.state_cache.prefix], metadata[self.k_cache_prefix]
        cache = self._static_forward_context[self.k_cache_prefix].kv_cache
        require_entries(self, cache)
        slots = (own.slot_mapping, of_entries.slot_mapping)
        requests = own.token_to_req_indices
        # Trap: each is cut or padded by its own builder; behind the shortest is padding alone.
        tokens = min(len(each) for each in (*slots, requests, positions, kv_score))
        batch = [each[:tokens] for each in (kv_score, requests, positions, *slots)]
        compressed(self, batch, own.block_table, rotary_emb.cos_sin_cache, cache)


def adopt_compressor(compressor: Any) -> None:
    """Make a compressor ours; refuse what the kernels do not write."""
    if type(compressor) is not DeepseekCompressor:
        raise InvalidArgument(
            "class of a compressor", type(compressor).__name__, DeepseekCompressor.__name__,
            _WAY_OUT,
        )  # fmt: skip
    if compressor.use_fp4_cache:
        raise InvalidArgument(
            "keys of the indexer", "MXFP4", "FP8, with degarble's compressor",
            "Leave use_fp4_indexer_cache out, or give it to vLLM: parts.compressor = vllm.",
        )  # fmt: skip
    if compressor.head_dim not in ENTRIES:
        raise InvalidArgument(
            f"width of entries of {compressor.prefix}", compressor.head_dim,
            " or ".join(map(str, ENTRIES)), _WAY_OUT,
        )  # fmt: skip
    compressor.__class__ = DegarbleCompressor


def require_entries(compressor: Any, cache: Tensor) -> None:
    """Refuse pages of entries that vLLM's readers would not read as our writer fills them."""
    _, nbytes = ENTRIES[compressor.head_dim]
    if cache.dtype is not torch.uint8 or cache.shape[-1] != nbytes:
        raise LayoutMismatch(
            f"cache of {compressor.k_cache_prefix}", f"{cache.dtype} {tuple(cache.shape)}",
            f"uint8 [pages, entries, {nbytes}]", "Start with --kv-cache-dtype fp8.",
        )  # fmt: skip


def compressed(
    compressor: Any, batch: list[Tensor], table: Tensor, turns_P: Tensor, cache: Tensor
) -> None:
    """Keep, pool and write by our kernels; `batch`: projections, requests, positions, slots."""
    from degarble.kernels.cache.problem import PagedPoolProblem, StatePages  # noqa: PLC0415
    from degarble.kernels.primitives.kv_problem import Pages, WriteProblem  # noqa: PLC0415

    projected_TF, *of_tokens, of_entries = batch
    own = compressor.state_cache
    states = PagedView(own.prefix, own.kv_cache.view(torch.uint8))
    tokens, columns, width = len(projected_TF), projected_TF.shape[1] // 2, compressor.head_dim
    pages = StatePages(states.entries, states.shape[0], columns, states.shape[1])
    problem = PagedPoolProblem(tokens, len(table), compressor.compress_ratio, pages, width)
    ape = compressor.ape.data
    given = (projected_TF.contiguous(), ape, *of_tokens, table.contiguous(), of_entries)
    values, firsts, slots = pooled(given, states, problem)
    view = PagedView(compressor.k_cache_prefix, cache)
    held = Pages(ENTRIES[width][0], view.entries, *view.shape, width)
    rows = (values, compressor.norm.weight.data, turns_P, firsts, slots)
    written(rows, view, WriteProblem(tokens, held, len(turns_P), compressor.rms_norm_eps))


def pooled(given: tuple[Tensor, ...], states: Any, problem: Any) -> tuple[Tensor, ...]:
    """Keep states and return pooled entries, what each is turned by, and its slot."""
    from degarble.kernels.cache.simt_paged_pool import PagedOperands, paged_pool  # noqa: PLC0415  the DSL

    return paged_pool(PagedOperands(*given), states, problem, settings())


def written(rows: tuple[Tensor, ...], view: Any, problem: Any) -> None:
    """Norm, turn, quantise and write entries by slot."""
    from degarble.kernels.cache.simt_kv_write import WriteOperands, kv_write  # noqa: PLC0415  the DSL

    kv_write(WriteOperands(*rows), view, problem, settings())
