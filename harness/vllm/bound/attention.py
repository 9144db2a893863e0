"""DeepSeek-V4's attention layer of vLLM with our row kernels and output projection.

Overridden: norms of query and latent rows; RoPE of the query heads; latent rows normed, rotated,
quantised and written to the paged cache by slot; sparse attention over the window's and the
compressed caches; inverse RoPE and wo_a. Slots, block tables and the split of a batch are vLLM's
metadata, read as they are. The builders declare the level of CUDA graphs that all parts allow.

vLLM 0.33 chooses the attention class of V4 from a fixed table and ignores a registered backend. So
vLLM makes the layer, and `adopt` converts it, object by object.
Shape letters: T tokens, H heads, L latent width (512), P positions, G groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, LayoutMismatch
from degarble.harness.vllm import parts
from degarble.harness.vllm.bound.compressor import adopt_compressor
from degarble.harness.vllm.bound.fp32_linears import projected
from degarble.harness.vllm.bound.indexer import adopt_indexer
from degarble.harness.vllm.bound.linears import by_bf16, settings
from degarble.harness.vllm.bound.pages import PagedView
from degarble.harness.vllm.bound.rope_tables import require_turns
from degarble.harness.vllm.bound.upstream import (
    SERIES,
    AttentionCGSupport,
    DeepseekSparseSWAFlashMLABackend,
    DeepseekSparseSWAFlashMLAMetadataBuilder,
    DeepseekV4FlashMLAAttention,
    DeepseekV4FlashMLABackend,
    DeepseekV4FlashMLAMetadataBuilder,
    DeepseekV4SWACache,
    compute_global_topk_indices_and_lens,
    get_forward_context,
)
from degarble.harness.vllm.options import OURS

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.vllm.bound.start import Start

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


class Backend(DeepseekV4FlashMLABackend):
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

    backend_cls = Backend
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
        made = [by_bf16(parts_TGK[:, i].contiguous(), weights[i]) for i in range(groups)]
        return self.wo_b(torch.cat(made, dim=-1))  # type: ignore[no-any-return]


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
    from degarble.kernels.attention import sm90_sparse_attention as ours  # noqa: PLC0415  needs the DSL
    from degarble.kernels.primitives.kv_problem import Pages  # noqa: PLC0415

    def keys(listed: tuple[Tensor, Tensor], cache: Tensor) -> tuple[Any, Any]:
        slots, lengths = listed
        view: Any = PagedView(layer.prefix, cache)
        pages = Pages("fp8", view.entries, *view.shape)
        given = ours.Keys(slots.contiguous(), view, lengths.contiguous())
        return given, facts.KeyList(slots.shape[1], pages)

    q_THL, out_THL = heads
    tokens, count, _ = q_THL.shape
    near, of_near = keys(window, layer.swa_cache_layer.kv_cache)
    far, of_far = (None, None) if entries is None else keys(entries, layer.kv_cache)
    problem = facts.AttentionProblem(
        tokens, count, of_near, of_far, mode=mode, lengths=True, scale=layer.scale
    )
    lse = torch.empty(tokens, count, dtype=torch.float32, device=q_THL.device)
    given = ours.AttentionOperands(q_THL, layer.attn_sink.data, near, far)
    ours.sparse_attention(given, problem, settings(), results=ours.Results(out_THL, lse))


def write_latent(
    latent: tuple[Tensor, Tensor, float],
    turns_P: Tensor,
    positions_T: Tensor,
    metadata: Any,
    cache: Tensor,
) -> None:
    """Norm, turn, quantise and write latent rows by slot; slots below 0 are skipped."""
    from degarble.kernels.cache.simt_kv_write import WriteOperands, kv_write  # noqa: PLC0415
    from degarble.kernels.primitives.kv_problem import Pages, WriteProblem  # noqa: PLC0415  the DSL

    kv_TL, weight_L, epsilon = latent
    slots = metadata.slot_mapping
    tokens = slots.shape[0]
    view: Any = PagedView("the window", cache)
    problem = WriteProblem(
        tokens, Pages("fp8", view.entries, *view.shape), turns_P.shape[0], epsilon
    )
    given = WriteOperands(kv_TL[:tokens], weight_L, turns_P, positions_T[:tokens], slots)
    kv_write(given, view, problem, settings())


def normed(values_MK: Tensor, weight_K: Tensor, epsilon: float) -> Tensor:
    """Return BF16 rows normed by our kernel."""
    from degarble.kernels.rows.problem import NormProblem  # noqa: PLC0415  the DSL
    from degarble.kernels.rows.simt_rmsnorm import rmsnorm  # noqa: PLC0415

    rows, columns = values_MK.shape
    problem = NormProblem(rows, columns, epsilon=epsilon)
    made = rmsnorm(values_MK, weight_K, problem, settings()).values
    assert made is not None, "a problem without a layout has values"
    return made


def turned(heads_THL: Tensor, turns_P: Tensor, positions_T: Tensor, epsilon: float) -> Tensor:
    """Return heads normed without a weight and turned, by our kernel."""
    from degarble.kernels.rows.problem import HeadsProblem  # noqa: PLC0415  the DSL
    from degarble.kernels.rows.simt_qnorm_rope import qnorm_rope  # noqa: PLC0415

    problem = HeadsProblem(heads_THL.shape[0], heads_THL.shape[1], turns_P.shape[0], epsilon)
    return qnorm_rope(heads_THL.contiguous(), turns_P, positions_T, problem, settings())


def turned_back(heads_THL: Tensor, turns_P: Tensor, positions_T: Tensor) -> Tensor:
    """Return heads turned back, by our kernel."""
    from degarble.kernels.rows.problem import BackProblem  # noqa: PLC0415  the DSL
    from degarble.kernels.rows.simt_inverse_rope import inverse_rope  # noqa: PLC0415

    problem = BackProblem(heads_THL.shape[0], heads_THL.shape[1], turns_P.shape[0])
    return inverse_rope(heads_THL, turns_P, positions_T, problem, settings())
