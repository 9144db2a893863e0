"""DeepSeek-V4's indexer of vLLM with our kernels: quantise queries, score keys, select top-k.

Queries are rotated and rounded to FP8 with one scale a row, then scored against the paged cache of
keys. The compressor wrote the keys, ours or vLLM's: FP8 without a Hadamard transform, unlike
DeepSeek's own code, so queries have none either. The builder keeps the batch's block table and each
token's request, because vLLM's metadata splits them by decode and prefill. The buffer that
attention reads holds the chosen entries in ascending order, padded with -1.

Shape letters: T tokens, H heads, W entries, S sequences, K chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.vllm import parts
from degarble.harness.vllm.bound.linears import settings
from degarble.harness.vllm.bound.pages import PagedView
from degarble.harness.vllm.bound.upstream import (
    AttentionCGSupport,
    DeepseekV4Indexer,
    DeepseekV4IndexerBackend,
    DeepseekV4IndexerCache,
    DeepseekV32IndexerMetadataBuilder,
    get_forward_context,
)

if TYPE_CHECKING:
    from torch import Tensor

WIDTH = 128  # of a key, which has four bytes of scale behind its page's rows


class IndexerBuilder(DeepseekV32IndexerMetadataBuilder):
    """vLLM's builder, which also keeps the whole batch's table and requests."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return the lowest level of vLLM's own and our kernels'.

        Trap: the host says how many entries are scored. While a graph is recorded, vLLM says the
        model's whole context, so a replay scores all that may be there, and sees what is.
        """
        theirs = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        kernels = vllm_config.quant_config.start.kernels
        return AttentionCGSupport[parts.graph_level(kernels, theirs.name)]

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Build vLLM's metadata, and note what our kernels read."""
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        kept = self.__dict__.setdefault("degarble_requests", torch.zeros(
            self.vllm_config.scheduler_config.max_num_batched_tokens, dtype=torch.int32,
            device=self.device,
        ))  # fmt: skip
        made.degarble_table = common_attn_metadata.block_table_tensor
        made.degarble_requests = common_attn_metadata.token_to_req_indices(kept)
        return made


class IndexerBackend(DeepseekV4IndexerBackend):
    """vLLM's backend with our builder."""

    @staticmethod
    def get_builder_cls() -> type[IndexerBuilder]:
        """Return our builder."""
        return IndexerBuilder


class IndexerCache(DeepseekV4IndexerCache):
    """vLLM's cache of keys with our backend."""

    def get_attn_backend(self) -> type[IndexerBackend]:
        """Return ours."""
        return IndexerBackend


class DegarbleIndexer(DeepseekV4Indexer):
    """A layer's indexer; made by vLLM, adopted by `adopt_indexer`."""

    def forward(
        self, hidden_states: Tensor, qr: Tensor, *given: Any, **named: Any
    ) -> tuple[None, None, None]:
        """Write keys, score, choose; vLLM scores nothing where it gets nothing back."""
        del hidden_states
        kv_score, indexer_weights, positions, rotary_emb, *more = given
        if not named.get("skip_compressor", more[1] if more[1:] else False):  # 0.33 alone
            self.compressor(kv_score, positions, rotary_emb)
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return None, None, None
        own = metadata[self.k_cache.prefix]
        tokens = own.num_decode_tokens + own.num_prefill_tokens
        buffer = self.topk_indices_buffer[:tokens]
        buffer.fill_(-1)
        entries = own.max_seq_len // self.compress_ratio
        if entries:
            queries, _ = self.wq_b(qr[:tokens])
            heads = queries.view(tokens, self.n_head, self.head_dim)
            turning = (rotary_emb.cos_sin_cache, positions[:tokens])
            factor = float((self.head_dim * self.n_head) ** -0.5)
            weights = indexer_weights[:tokens].float() * factor
            scores = scored(self, own, (heads, weights), turning, entries)
            count = min(self.topk_tokens, entries)
            buffer[:, :count] = chosen(scores, count)
        return None, None, None


def adopt_indexer(indexer: Any) -> None:
    """Make a layer's indexer ours; refuse what the kernels do not read."""
    if indexer.use_fp4_kv:
        raise InvalidArgument(
            "keys of the indexer", "MXFP4", "FP8, with degarble's indexer",
            "Leave use_fp4_indexer_cache out, or give it to vLLM: parts.indexer = vllm.",
        )  # fmt: skip
    if indexer.head_dim != WIDTH:
        raise InvalidArgument(
            f"width of heads of {indexer.prefix}", indexer.head_dim, str(WIDTH),
            "Give it to vLLM: parts.indexer = vllm.",
        )  # fmt: skip
    indexer.__class__ = DegarbleIndexer
    indexer.k_cache.__class__ = IndexerCache


def scored(
    indexer: Any,
    own: Any,
    queries: tuple[Tensor, Tensor],
    turning: tuple[Tensor, Tensor],
    entries: int,
) -> Tensor:
    """Return float32 scores [T, W] by our kernels, -inf where a token sees nothing."""
    from degarble.kernels.indexer.problem import (  # noqa: PLC0415
        KeyPages,
        OperandProblem,
        ScoresProblem,
    )
    from degarble.kernels.indexer.simt_indexer_operand import RopeOperands, indexer_operand  # noqa: PLC0415
    from degarble.kernels.indexer.sm90_indexer_scores import ScoresOperands, indexer_scores  # noqa: PLC0415

    (heads, weights), (turns, positions) = queries, turning
    tokens, count, _ = heads.shape
    view: Any = PagedView(indexer.k_cache.prefix, indexer.k_cache.kv_cache)
    pages = KeyPages("fp8", view.entries, *view.shape)
    table = own.degarble_table
    asked = OperandProblem(
        tokens, count, "interleaved", "fp8", coded=True, positions=turns.shape[0]
    )
    codes = indexer_operand(
        heads.contiguous(), asked, settings(), turning=RopeOperands(turns, positions)
    )
    problem = ScoresProblem(tokens, count, entries, table.shape[0], pages, indexer.compress_ratio)
    given = ScoresOperands(
        codes.values, weights.contiguous(), positions, own.degarble_requests[:tokens],
        table[:, : problem.pages_of_sequence].contiguous(), view, codes.scales,
    )  # fmt: skip
    return indexer_scores(given, problem, settings())


def chosen(scores_TW: Tensor, count: int) -> Tensor:
    """Return the entries of the largest scores by our kernel, ascending, then -1."""
    from degarble.kernels.indexer.problem import TopkProblem  # noqa: PLC0415  needs the DSL
    from degarble.kernels.indexer.simt_indexer_topk import indexer_topk  # noqa: PLC0415

    rows, entries = scores_TW.shape
    return indexer_topk(scores_TW, TopkProblem(rows, entries, count), settings())
