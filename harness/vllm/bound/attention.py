"""DeepSeek-V4's attention of vLLM with our kernels: layer, compressors, indexer, pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, LayoutMismatch
from degarble.harness.vllm import parts
from degarble.harness.vllm.bound.linears import by_bf16, launched, projected
from degarble.harness.vllm.bound.upstream import (
    SERIES,
    AttentionCGSupport,
    DeepseekCompressor,
    DeepseekSparseSWAFlashMLABackend,
    DeepseekSparseSWAFlashMLAMetadataBuilder,
    DeepseekV4FlashMLAAttention,
    DeepseekV4FlashMLABackend,
    DeepseekV4FlashMLAMetadataBuilder,
    DeepseekV4Indexer,
    DeepseekV4IndexerBackend,
    DeepseekV4IndexerCache,
    DeepseekV4SWACache,
    DeepseekV32IndexerMetadataBuilder,
    compute_global_topk_indices_and_lens,
    get_forward_context,
)
from degarble.harness.vllm.parts import OURS, RunningPart

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.vllm.bound.start import Start


# --------------------------------------------------------------------------------------------------
# View pages of vLLM's caches as operands of our kernels: strided rows of bytes.
#
# vLLM interleaves the pages of all layers of a block, so a layer's pages are far apart and its last
# one ends before a whole stride does. No torch tensor may have such rows, so this class describes
# them to the kernels, which read and write entries alone and never the gaps. Shape letters: N
# pages.


class PagedView:
    """A cache [N, entries, bytes] as [N, stride]: what kernels/runtime/operands.py asks for."""

    def __init__(self, name: str, cache: Tensor) -> None:
        _, entries, nbytes = cache.shape
        if cache.element_size() != 1 or cache.stride()[1:] != (nbytes, 1):
            raise LayoutMismatch(
                f"cache of {name}", f"{cache.dtype}, strides {cache.stride()}",
                f"bytes, entries of {nbytes} close together", "Start with --kv-cache-dtype fp8.",
            )  # fmt: skip
        self._cache = cache
        self.entries = entries
        self.stride_bytes = cache.stride(0)
        self.shape = (cache.shape[0], self.stride_bytes)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the cache."""
        return self._cache.dtype

    @property
    def device(self) -> torch.device:
        """Device of the cache."""
        return self._cache.device

    def stride(self) -> tuple[int, int]:
        """Bytes from page to page, and from byte to byte."""
        return self.stride_bytes, 1

    def is_contiguous(self) -> bool:
        """Return True: a row is a whole stride, the gap after its entries included."""
        return True

    def data_ptr(self) -> int:
        """Return the address of the first page."""
        return self._cache.data_ptr()


# --------------------------------------------------------------------------------------------------
# Compare the RoPE table of each layer of vLLM with the model's own config.
#
# vLLM 0.26 rotates layers without compression by YaRN, which their rope does not have; 0.33 does
# not. There the table is replaced, and logged; anywhere else a difference stops the start.

LOOKED_AT = 1024  # positions; a rope of another kind differs from the first turns on
CLOSE = 2e-3  # float32 angles at those positions are off by 1e-4 at most
MENDED = ("0.26",)


def require_turns(attention: Any, start: Start, series: str) -> None:
    """Compare a layer's table; mend it where vLLM is known to err, refuse it elsewhere."""
    from degarble.harness.backends.cutedsl.rows import table_of  # noqa: PLC0415  imports torch

    config = start.proven.config
    if config is None:
        return
    number = int(attention.prefix.split(".layers.")[1].split(".")[0])
    rope = config.rope(config.layers[number])
    cache = attention.rotary_emb.cos_sin_cache
    count = min(LOOKED_AT, cache.shape[0])
    with torch.device("cpu"):  # vLLM builds its model with the GPU as the default device
        table = table_of(rope, cache.shape[0])
    off = float((cache[:count].cpu().float() - table[:count]).abs().max())
    if off <= CLOSE:
        return
    if series not in MENDED:
        raise LayoutMismatch(
            f"turns of {attention.prefix}", f"off by {off:.3f}",
            f"theta {rope.theta:g}, {'YaRN' if rope.yarn else 'no YaRN'}, as config.json has it",
            "Look for rope_scaling and rope_parameters: vLLM read them another way.",
        )  # fmt: skip
    cache.copy_(table.to(cache))
    text = f"vLLM {series}'s own were off by {off:.3f}"
    start.running.append(
        RunningPart(attention.prefix, "turns", "", OURS, "table of the config", text)
    )


# --------------------------------------------------------------------------------------------------
# DeepSeek-V4's compressors of vLLM with our kernels: store states, pool windows, write entries.
#
# Overrides the forward of a layer's compressor (ratio 4 or 128, into its fp8_ds_mla pages) and of
# the indexer's (into pages of FP8 keys with a float32 scale each, without a Hadamard transform,
# like vLLM's queries). States stay in vLLM's own pages, slots, block tables and layout. So cached
# prefixes, chunked prompts and preempted requests work as with vLLM's kernels, and either side
# reads what the other wrote.
#
# Shape letters: T tokens, F columns of latents and of gates, E width of an entry, P positions.

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
        batch = [tensor[:tokens] for tensor in (kv_score, requests, positions, *slots)]
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
    requests, positions, slots = of_tokens
    values, firsts, places = launched(
        "simt_paged_pool", problem, projected=projected_TF.contiguous(), ape=ape,
        requests=requests, positions=positions, slots=slots, table=table.contiguous(),
        entries=of_entries, states=states,
    ).values()  # fmt: skip
    view = PagedView(compressor.k_cache_prefix, cache)
    held = Pages(ENTRIES[width][0], view.entries, *view.shape, width)
    written = WriteProblem(tokens, held, len(turns_P), compressor.rms_norm_eps)
    launched(
        "simt_kv_write", written, values=values, weight=compressor.norm.weight.data, turns=turns_P,
        positions=firsts, slots=places, cache=view,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# DeepSeek-V4's indexer of vLLM with our kernels: quantise queries, score keys, select top-k.
#
# Queries are rotated and rounded to FP8 with one scale a row, then scored against the paged cache
# of keys. The compressor wrote the keys, ours or vLLM's: FP8 without a Hadamard transform, unlike
# DeepSeek's own code, so queries have none either. The builder keeps the batch's block table and
# each token's request, because vLLM's metadata splits them by decode and prefill. The buffer that
# attention reads holds the chosen entries in ascending order, padded with -1.
#
# Shape letters: T tokens, H heads, W entries, S sequences, K chosen.

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

    (heads, weights), (turns, positions) = queries, turning
    tokens, count, _ = heads.shape
    view: Any = PagedView(indexer.k_cache.prefix, indexer.k_cache.kv_cache)
    pages = KeyPages("fp8", view.entries, *view.shape)
    table = own.degarble_table
    operand_problem = OperandProblem(
        tokens, count, "interleaved", "fp8", coded=True, positions=turns.shape[0]
    )
    codes = launched(
        "simt_indexer_operand",
        operand_problem,
        rows=heads.contiguous(),
        turns=turns,
        positions=positions,
    )
    problem = ScoresProblem(tokens, count, entries, table.shape[0], pages, indexer.compress_ratio)
    made = launched(
        "sm90_indexer_scores", problem, queries=codes["values"], scales=codes["scales"],
        weights=weights.contiguous(), positions=positions,
        sequences=own.degarble_requests[:tokens],
        table=table[:, : problem.pages_of_sequence].contiguous(), pages=view,
    )  # fmt: skip
    scores: Tensor = made["out"]
    return scores


def chosen(scores_TW: Tensor, count: int) -> Tensor:
    """Return the entries of the largest scores by our kernel, ascending, then -1."""
    from degarble.kernels.indexer.problem import TopkProblem  # noqa: PLC0415  needs the DSL

    rows, entries = scores_TW.shape
    problem = TopkProblem(rows, entries, count)
    found: Tensor = launched("simt_indexer_topk", problem, scores=scores_TW)["out"]
    return found


# --------------------------------------------------------------------------------------------------
# DeepSeek-V4's attention layer of vLLM with our row kernels and output projection.
#
# Overridden: norms of query and latent rows; RoPE of the query heads; latent rows normed, rotated,
# quantised and written to the paged cache by slot; sparse attention over the window's and the
# compressed caches; inverse RoPE and wo_a. Slots, block tables and the split of a batch are vLLM's
# metadata, read as they are. The builders declare the level of CUDA graphs that all parts allow.
#
# vLLM 0.33 chooses the attention class of V4 from a fixed table and ignores a registered backend.
# So vLLM makes the layer, and `adopt` converts it, object by object. Shape letters: T tokens, H
# heads, L latent width (512), P positions, G groups.

ENTRY_BYTES = 584  # of an fp8_ds_mla entry: 448 codes, 64 BF16 values, 7 scales and padding


class MetadataBuilder(DeepseekV4FlashMLAMetadataBuilder):
    """vLLM's builder of V4, with the level of CUDA graphs of all that runs."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return the lowest level of vLLM's own and our kernels'."""
        return graph_support(vllm_config, super().get_cudagraph_support(vllm_config, kv_cache_spec))


class WindowMetadataBuilder(DeepseekSparseSWAFlashMLAMetadataBuilder):
    """Metadata builder for the cache of the sliding window, otherwise the same."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return the lowest level of vLLM's own and our kernels'."""
        return graph_support(vllm_config, super().get_cudagraph_support(vllm_config, kv_cache_spec))


class DegarbleBackend(DeepseekV4FlashMLABackend):
    """vLLM's backend of V4 with our builder; its name stays, because its attention runs."""

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        """Return our builder."""
        return MetadataBuilder


class WindowBackend(DeepseekSparseSWAFlashMLABackend):
    """Attention backend for the cache of the sliding window, otherwise the same."""

    @staticmethod
    def get_builder_cls() -> type[WindowMetadataBuilder]:
        """Return our builder."""
        return WindowMetadataBuilder


def graph_support(vllm_config: Any, theirs: AttentionCGSupport) -> AttentionCGSupport:
    """Return the level that vLLM's builder and the start's kernels allow together."""
    kernels = vllm_config.quant_config.start.kernels
    return AttentionCGSupport[parts.graph_level(kernels, theirs.name)]


class DegarbleAttention(DeepseekV4FlashMLAAttention):
    """A layer's attention; made by vLLM, adopted by `adopt`."""

    backend_cls = DegarbleBackend
    swa_backend_cls = WindowBackend
    degarble_rows: bool
    degarble_attend: bool
    degarble_o_proj: bool
    degarble_projects: bool

    def _run_parallel_input_projections(self, hidden_states: Tensor) -> tuple[Any, ...]:
        """Multiply the projections other than the queries' by our kernels."""
        if not self.degarble_projects:
            return super()._run_parallel_input_projections(hidden_states)  # type: ignore[no-any-return]
        return self._fused_wqa_wkv_gemm(hidden_states), *projected(self, hidden_states)

    def _split_qkv_and_norm(self, qr_kv: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Norm query rows by our kernel; latent rows are normed where they are written."""
        if not self.degarble_rows:
            return super()._split_qkv_and_norm(qr_kv)  # type: ignore[no-any-return]
        qr, kv = qr_kv.split([self.q_lora_rank, self.head_dim], dim=-1)
        return normed(qr.contiguous(), self.q_norm.weight.data, self.eps), None, kv.contiguous()

    def _fused_qnorm_rope_kv_insert(
        self, q: Tensor, kv: Tensor, positions: Tensor, attn_metadata: Any
    ) -> Tensor:
        """Norm and turn heads, write latent rows to the window's cache; pad heads as vLLM does."""
        if not self.degarble_rows or not isinstance(attn_metadata, dict):
            return super()._fused_qnorm_rope_kv_insert(q, kv, positions, attn_metadata)  # type: ignore[no-any-return]
        window = self.swa_cache_layer
        metadata = attn_metadata[window.prefix]
        require_cache(window.prefix, window.kv_cache, metadata.block_size)
        if positions.dtype is not torch.int64:
            raise DtypeMismatch("positions", positions.dtype, "torch.int64", "vLLM 0.33 has these.")
        turns = self.rotary_emb.cos_sin_cache
        latent = (kv, self.kv_norm.weight.data, self.eps)
        write_latent(latent, turns, positions, metadata, window.kv_cache)
        heads = turned(q, turns, positions, self.eps)
        return functional.pad(heads, (0, 0, 0, self.padded_heads - q.shape[1]))

    def forward_mqa(self, q: Tensor, kv: Tensor, positions: Tensor, output: Any) -> None:
        """Attend straight to the paged caches: decoded tokens, then those of prompts."""
        metadata = get_forward_context().attn_metadata
        if not self.degarble_attend or not isinstance(metadata, dict):
            super().forward_mqa(q, kv, positions, output)
            return
        near, own = metadata[self.swa_cache_layer.prefix], metadata.get(self.prefix)
        require_cache(self.prefix, self.swa_cache_layer.kv_cache, near.block_size)
        first = near.num_decode_tokens
        for mode, begin, count, slots, lengths in (
            ("decode", 0, first, near.decode_swa_indices, near.decode_swa_lens),
            ("prefill", first, near.num_prefill_tokens, near.prefill_swa_indices,
             near.prefill_swa_lens),
        ):  # fmt: skip
            if count:
                end = begin + count
                window = (slots[:count].reshape(count, -1), lengths[:count])
                entries = self._entries(near, own, (begin, end))
                attend(self, mode, (q[begin:end], output[begin:end]), window, entries)

    def _entries(self, near: Any, own: Any, tokens: tuple[int, int]) -> Any:
        """Return slots and lengths of the compressed entries that some tokens attend to."""
        if own is None or self.compress_ratio <= 1:
            return None
        begin, end = tokens
        if self.compress_ratio == 4:  # the indexer's choice, filled in by the layer
            chosen = self.topk_indices_buffer[begin:end]
        elif begin == 0 and near.num_decode_tokens:  # all of them, made with the metadata
            slots = own.c128a_global_decode_topk_indices
            return slots.reshape(end, -1), own.c128a_decode_topk_lens[:end]
        else:
            chosen = own.c128a_prefill_topk_indices[: end - begin]
        return compute_global_topk_indices_and_lens(
            chosen,
            near.token_to_req_indices[begin:end],
            own.block_table,
            own.block_size // self.compress_ratio,
            near.is_valid_token[begin:end],
        )

    def _o_proj(self, o: Any, positions: Tensor) -> Tensor:
        """Turn heads back, multiply each group by its part of wo_a, then wo_b."""
        if not self.degarble_o_proj:
            return super()._o_proj(o, positions)  # type: ignore[no-any-return]
        back = turned_back(o.contiguous(), self.rotary_emb.cos_sin_cache, positions)
        groups = self.n_local_groups
        parts_TGK = back.view(back.shape[0], groups, -1)
        weights = self.wo_a.weight.data.view(groups, self.o_lora_rank, -1)
        tensors = [by_bf16(parts_TGK[:, i].contiguous(), weights[i]) for i in range(groups)]
        return self.wo_b(torch.cat(tensors, dim=-1))  # type: ignore[no-any-return]


class DegarbleAttention026(DegarbleAttention):
    """The layer for vLLM 0.26, whose layer norms both halves itself, before every hook."""

    def forward(
        self, positions: Tensor, hidden_states: Tensor, llama_4_scaling: Tensor | None = None
    ) -> Tensor:
        """As vLLM's, with our norm of query rows; latent rows are normed where they are written."""
        if not self.degarble_rows:
            return super().forward(positions, hidden_states, llama_4_scaling)  # type: ignore[no-any-return]
        qr_kv, *scores = self.attn_gemm_parallel_execute(hidden_states)
        qr, _, kv = self._split_qkv_and_norm(qr_kv)
        shape = (hidden_states.shape[0], self.padded_heads, self.head_dim)
        heads = hidden_states.new_empty(shape)
        self.attention_impl(hidden_states, qr, kv, *scores, positions, heads)
        return self._o_proj(heads[:, : self.n_local_heads], positions)

    def attn_gemm_parallel_execute(self, hidden_states: Tensor) -> tuple[Any, ...]:
        """Multiply the projections other than the queries' by our kernels."""
        if not self.degarble_projects:
            return super().attn_gemm_parallel_execute(hidden_states)  # type: ignore[no-any-return]
        qr_kv, _ = self.fused_wqa_wkv(hidden_states)
        return qr_kv, *projected(self, hidden_states)


class WindowCache026(DeepseekV4SWACache):
    """vLLM 0.26's cache of the window, which names its backend in a method."""

    def get_attn_backend(self) -> type[WindowBackend]:
        """Return ours."""
        return WindowBackend


def _name_backend(cache: Any) -> None:
    cache.backend_cls = WindowBackend


def _become_026(cache: Any) -> None:
    cache.__class__ = WindowCache026


# By series of vLLM: the class that a layer becomes, and how its window's cache gets our builder.
ATTENTION = {
    "0.33": (DegarbleAttention, _name_backend),
    "0.26": (DegarbleAttention026, _become_026),
}


def adopt(attention: Any, start: Start) -> None:
    """Make a layer's attention ours; refuse another class than the one on record."""
    kind, of_window = ATTENTION[SERIES]
    if type(attention) is not DeepseekV4FlashMLAAttention:
        raise InvalidArgument(
            f"attention of {attention.prefix}", type(attention).__name__,
            DeepseekV4FlashMLAAttention.__name__,
            "Do not choose an attention backend: the plugin's builds on vLLM's default.",
        )  # fmt: skip
    module = attention.prefix
    require_turns(attention, start, SERIES)
    rows = start.kernel(module, "rows", attention.kv_cache_dtype)
    o_proj = start.options.side("o_proj") == OURS  # noted where wo_a asked for its method
    attend = start.kernel(module, "attend", attention.kv_cache_dtype)
    projects = None
    if attention.compressor is not None:
        if start.kernel(module, "compressor", attention.kv_cache_dtype):
            adopt_compressors(attention)
        projects = start.kernel(module, "projections", parts.BF16)
    if attention.indexer is not None and start.kernel(module, "indexer", attention.kv_cache_dtype):
        adopt_indexer(attention.indexer)
    attention.__class__ = kind
    attention.degarble_rows, attention.degarble_o_proj = rows is not None, o_proj
    attention.degarble_attend = attend is not None
    attention.degarble_projects = projects is not None
    of_window(attention.swa_cache_layer)


def adopt_compressors(attention: Any) -> None:
    """Make a layer's compressor ours, and its indexer's."""
    adopt_compressor(attention.compressor)
    if attention.indexer is not None:
        adopt_compressor(attention.indexer.compressor)


def require_cache(name: str, cache: Tensor, entries: int) -> None:
    """Refuse pages that our writer would not fill as vLLM's attention reads them."""
    if cache.dtype is not torch.uint8 or tuple(cache.shape[1:]) != (entries, ENTRY_BYTES):
        raise LayoutMismatch(
            f"cache of {name}", f"{cache.dtype} {tuple(cache.shape)}",
            f"uint8 [pages, {entries}, {ENTRY_BYTES}]: fp8_ds_mla",
            "Start with --kv-cache-dtype fp8.",
        )  # fmt: skip


def attend(
    layer: Any,
    mode: str,
    heads: tuple[Tensor, Tensor],
    window: tuple[Tensor, Tensor],
    entries: tuple[Tensor, Tensor] | None,
) -> None:
    """Attend by our kernel, all heads with their padding, whose sinks are -inf."""
    from degarble.kernels.attention import problem as facts  # noqa: PLC0415
    from degarble.kernels.primitives.kv_problem import Pages  # noqa: PLC0415

    given: dict[str, Any] = {}

    def keys(name: str, listed: tuple[Tensor, Tensor], cache: Tensor) -> facts.KeyList:
        slots, lengths = listed
        view: Any = PagedView(layer.prefix, cache)
        given[f"{name}_slots"], given[f"{name}_lengths"] = slots.contiguous(), lengths.contiguous()
        given[f"{name}_cache"] = view
        return facts.KeyList(slots.shape[1], Pages("fp8", view.entries, *view.shape))

    q_THL, out_THL = heads
    tokens, count, _ = q_THL.shape
    near = keys("window", window, layer.swa_cache_layer.kv_cache)
    far = None if entries is None else keys("entries", entries, layer.kv_cache)
    problem = facts.AttentionProblem(
        tokens, count, near, far, mode=mode, lengths=True, scale=layer.scale
    )
    sink = layer.attn_sink.data
    launched("sm90_sparse_attention", problem, q=q_THL, sink=sink, out=out_THL, **given)


def write_latent(
    latent: tuple[Tensor, Tensor, float],
    turns_P: Tensor,
    positions_T: Tensor,
    metadata: Any,
    cache: Tensor,
) -> None:
    """Norm, turn, quantise and write latent rows by slot; slots below 0 are skipped."""
    from degarble.kernels.primitives.kv_problem import Pages, WriteProblem  # noqa: PLC0415  the DSL

    kv_TL, weight_L, epsilon = latent
    slots = metadata.slot_mapping
    tokens = slots.shape[0]
    view: Any = PagedView("the window", cache)
    problem = WriteProblem(
        tokens, Pages("fp8", view.entries, *view.shape), turns_P.shape[0], epsilon
    )
    launched(
        "simt_kv_write", problem, values=kv_TL[:tokens], weight=weight_L, turns=turns_P,
        positions=positions_T[:tokens], slots=slots, cache=view,
    )  # fmt: skip


def normed(values_MK: Tensor, weight_K: Tensor, epsilon: float) -> Tensor:
    """Return BF16 rows normed by our kernel."""
    from degarble.kernels.rows.problem import NormProblem  # noqa: PLC0415  the DSL

    rows, columns = values_MK.shape
    problem = NormProblem(rows, columns, epsilon=epsilon)
    made: Tensor = launched("simt_rmsnorm", problem, values=values_MK, weight=weight_K)["normed"]
    return made


def turned(heads_THL: Tensor, turns_P: Tensor, positions_T: Tensor, epsilon: float) -> Tensor:
    """Return heads normed without a weight and turned, by our kernel."""
    from degarble.kernels.rows.problem import QNormRopeProblem  # noqa: PLC0415  the DSL

    problem = QNormRopeProblem(heads_THL.shape[0], heads_THL.shape[1], turns_P.shape[0], epsilon)
    given = {"heads": heads_THL.contiguous(), "turns": turns_P, "positions": positions_T}
    made: Tensor = launched("simt_qnorm_rope", problem, **given)["out"]
    return made


def turned_back(heads_THL: Tensor, turns_P: Tensor, positions_T: Tensor) -> Tensor:
    """Return heads turned back, by our kernel."""
    from degarble.kernels.rows.problem import InverseRopeProblem  # noqa: PLC0415  the DSL

    problem = InverseRopeProblem(heads_THL.shape[0], heads_THL.shape[1], turns_P.shape[0])
    given = {"heads": heads_THL, "turns": turns_P, "positions": positions_T}
    made: Tensor = launched("simt_inverse_rope", problem, **given)["out"]
    return made
