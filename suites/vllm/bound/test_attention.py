"""vLLM's attention with our kernels: layer, compressors, indexer, pages, RoPE tables."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from degarble.harness.backends.cutedsl.rows import table_of
from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, LayoutMismatch
from degarble.harness.vllm import parts
from degarble.harness.vllm.parts import PluginOptions
from degarble.harness.vllm.proof import StartProof
from degarble.kernels.primitives.kv_problem import KEY, Pages, WriteProblem
from degarble.kernels.runtime.operands import require_tensor
from degarble.suites.checkpoint.structure_cases import V4
from degarble.suites.kernels import cache_checks
from degarble.suites.kernels.cache import compressor_checks, paged_pool_checks
from degarble.suites.kernels.latent_checks import table_of_turns
from degarble.suites.vllm.bound import stand_ins

pytestmark = pytest.mark.vllm


# --------------------------------------------------------------------------------------------------
# The layer's overrides with the kernels' definitions: right operands, slots, groups and levels.

TOKENS, HEADS, PADDED, LATENT, QUERY, GROUPS, RANK = 5, 4, 64, 512, 96, 2, 32
STRIDE = 584 * 64 + 64  # a page with padding behind it
PREFIX = "model.layers.0.attn"


@pytest.fixture
def module() -> Any:
    return import_module("degarble.harness.vllm.bound.attention")


def start(**said: Any) -> Any:
    of = import_module("degarble.harness.vllm.bound.start")
    return of.Start(PluginOptions(parts=said), StartProof("", "", "", {}, {}), "sm_90a", "x")


def cache(pages: int = 3, entries: int = 64) -> torch.Tensor:
    whole = torch.zeros(pages * STRIDE, dtype=torch.uint8)
    return whole.as_strided((pages, entries, 584), (STRIDE, 584, 1))


@pytest.fixture
def layer(module: Any) -> Any:
    """A layer as vLLM leaves it, without its construction, which needs a GPU."""
    made = module.DeepseekV4FlashMLAAttention.__new__(module.DeepseekV4FlashMLAAttention)
    torch.nn.Module.__init__(made)
    for name, value in {
        "prefix": PREFIX, "kv_cache_dtype": "fp8_ds_mla", "compressor": None, "indexer": None,
        "q_lora_rank": QUERY, "head_dim": LATENT, "eps": 1e-6, "padded_heads": PADDED,
        "n_local_groups": GROUPS, "o_lora_rank": RANK, "compress_ratio": 1, "scale": 0.5,
        "kv_cache": cache(2, 2), "attn_sink": torch.nn.Parameter(torch.zeros(PADDED)),
        "q_norm": SimpleNamespace(weight=torch.nn.Parameter(torch.full((QUERY,), 2.0))),
        "kv_norm": SimpleNamespace(weight=torch.nn.Parameter(torch.full((LATENT,), 3.0))),
        "rotary_emb": SimpleNamespace(cos_sin_cache=torch.zeros(16, 64)),
        "swa_cache_layer": SimpleNamespace(prefix="w", kv_cache=cache(), backend_cls=None),
    }.items():  # fmt: skip
        object.__setattr__(made, name, value)
    return made


def test_adopted_it_is_ours_with_our_builders(module: Any, layer: Any) -> None:
    begun = start()
    module.adopt(layer, begun)
    assert type(layer) is module.DegarbleAttention
    assert (layer.degarble_rows, layer.degarble_attend, layer.degarble_o_proj) == (True,) * 3
    assert layer.get_attn_backend() is module.DegarbleBackend
    assert layer.swa_cache_layer.backend_cls is module.WindowBackend
    assert [(each.part, each.by) for each in begun.running] == [
        ("rows", "degarble"), ("attend", "degarble"),
    ]  # fmt: skip
    assert module.DegarbleBackend.get_name() == "FLASHMLA_SPARSE_DSV4"  # vLLM's warm-up asks for it


def test_parts_are_vllms_where_requested(module: Any, layer: Any) -> None:
    object.__setattr__(layer, "compressor", object())
    object.__setattr__(layer, "indexer", object())
    with pytest.raises(InvalidArgument, match="class of a compressor"):
        module.adopt(layer, start())
    asked = dict.fromkeys(
        ("compressor", "indexer", "attend", "rows", "o_proj", "projections"), "vllm"
    )
    begun = start(**asked)
    module.adopt(layer, begun)
    assert {each.by for each in begun.running} == {"vllm"}
    ours = (layer.degarble_rows, layer.degarble_attend, layer.degarble_o_proj)
    assert ours == (False,) * 3


def test_vllm_026_norms_behind_our_back_no_more(
    module: Any, layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the layer norms both halves itself: our forward hands latent rows on as they are."""
    monkeypatch.setattr(module, "SERIES", "0.26")
    monkeypatch.setattr(module, "normed", lambda values, weight, _: values * weight)
    cache = module.DeepseekV4SWACache.__new__(module.DeepseekV4SWACache)
    torch.nn.Module.__init__(cache)
    object.__setattr__(layer, "swa_cache_layer", cache)
    module.adopt(layer, start())
    assert type(layer) is module.DegarbleAttention026
    assert cache.get_attn_backend() is module.WindowBackend
    qr_kv, seen = torch.randn(TOKENS, QUERY + LATENT), []
    for name, value in {
        "n_local_heads": HEADS,
        "attn_gemm_parallel_execute": lambda _: (qr_kv, "score", None, None),
        "attention_impl": lambda *given: seen.extend(given),
        "_o_proj": lambda heads, _: heads,
    }.items():
        object.__setattr__(layer, name, value)
    hidden, positions = torch.randn(TOKENS, 8), torch.arange(TOKENS)
    assert layer.forward(positions, hidden).shape == (TOKENS, HEADS, LATENT)
    _, qr, kv, *scores, at, heads = seen
    assert torch.equal(qr, qr_kv[:, :QUERY] * 2)
    assert torch.equal(kv, qr_kv[:, QUERY:])
    assert (scores, at.shape, heads.shape) == (
        ["score", None, None], positions.shape, (TOKENS, PADDED, LATENT)
    )  # fmt: skip


def test_another_attention_class_is_refused(module: Any) -> None:
    other = SimpleNamespace(prefix=PREFIX)
    with pytest.raises(InvalidArgument, match="Do not choose an attention backend"):
        module.adopt(other, start())


def test_latent_rows_are_left_for_the_writer(
    module: Any, layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.adopt(layer, start())
    monkeypatch.setattr(module, "normed", lambda values, weight, _: values * weight)
    qr_kv = torch.randn(TOKENS, QUERY + LATENT)
    qr, scale, kv = layer._split_qkv_and_norm(qr_kv)
    assert torch.equal(qr, qr_kv[:, :QUERY] * 2)
    assert scale is None
    assert torch.equal(kv, qr_kv[:, QUERY:])
    assert kv.is_contiguous()


def test_heads_are_padded_and_latents_written(
    module: Any, layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.adopt(layer, start())
    seen: dict[str, Any] = {}

    def write(*given: Any) -> None:
        seen.update(zip(("latent", "turns", "positions", "metadata"), given, strict=False))
        seen["pages"] = module.PagedView("w", given[-1])

    monkeypatch.setattr(module, "write_latent", write)
    monkeypatch.setattr(module, "turned", lambda heads, *_: heads + 1)
    metadata = {"w": SimpleNamespace(block_size=64, slot_mapping=torch.tensor([3, -1, 70]))}
    q, kv = torch.zeros(TOKENS, HEADS, LATENT), torch.ones(TOKENS, LATENT)
    positions = torch.arange(TOKENS)
    made = layer._fused_qnorm_rope_kv_insert(q, kv, positions, metadata)
    assert made.shape == (TOKENS, PADDED, LATENT)
    assert bool((made[:, :HEADS] == 1).all())
    assert not bool(made[:, HEADS:].any())
    assert seen["metadata"] is metadata["w"]
    assert torch.equal(seen["latent"][1], torch.full((LATENT,), 3.0))
    assert seen["pages"].shape == (3, STRIDE)
    with pytest.raises(DtypeMismatch, match="int64"):
        layer._fused_qnorm_rope_kv_insert(q, kv, positions.int(), metadata)
    metadata["w"].block_size = 32
    with pytest.raises(LayoutMismatch, match="fp8_ds_mla"):
        layer._fused_qnorm_rope_kv_insert(q, kv, positions, metadata)


def batch(decodes: int, prefills: int) -> Any:
    both = decodes + prefills
    return SimpleNamespace(
        block_size=64, num_decode_tokens=decodes, num_prefill_tokens=prefills,
        decode_swa_indices=torch.full((decodes, 1, 8), 1, dtype=torch.int32),
        decode_swa_lens=torch.full((both,), 8, dtype=torch.int32),
        prefill_swa_indices=torch.full((prefills, 1, 9), 2, dtype=torch.int32),
        prefill_swa_lens=torch.full((prefills,), 9, dtype=torch.int32),
        token_to_req_indices=torch.arange(both), is_valid_token=torch.ones(both, dtype=torch.bool),
    )  # fmt: skip


@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize(("decodes", "prefills"), [(2, 3), (5, 0), (0, 5)])
def test_each_token_attends_to_its_own_slots(
    module: Any, layer: Any, monkeypatch: pytest.MonkeyPatch, ratio: int, decodes: int,
    prefills: int,
) -> None:  # fmt: skip
    module.adopt(layer, start())
    object.__setattr__(layer, "compress_ratio", ratio)
    object.__setattr__(layer, "topk_indices_buffer", torch.arange(16).view(16, 1).repeat(1, 4))
    own = SimpleNamespace(
        block_size=256, block_table=torch.zeros(5, 2),
        c128a_global_decode_topk_indices=torch.full((decodes, 1, 6), 7),
        c128a_decode_topk_lens=torch.full((TOKENS,), 6),
        c128a_prefill_topk_indices=torch.arange(16).view(16, 1).repeat(1, 4) + 100,
    )  # fmt: skip
    metadata = {"w": batch(decodes, prefills), PREFIX: own}
    calls = []

    def place(chosen: Any, requests: Any, table: Any, entries: int, valid: Any) -> Any:
        assert len(chosen) == len(requests) == len(valid)
        assert table is own.block_table
        assert entries == 256 // ratio
        return chosen, requests

    def attend(_: Any, mode: str, heads: Any, window: Any, entries: Any) -> None:
        calls.append((mode, len(heads[0]), window, entries))
        heads[1].fill_(len(calls))

    monkeypatch.setattr(module, "compute_global_topk_indices_and_lens", place)
    monkeypatch.setattr(module, "attend", attend)
    context = SimpleNamespace(attn_metadata=metadata)
    monkeypatch.setattr(module, "get_forward_context", lambda: context)
    out = torch.zeros(TOKENS, PADDED, LATENT)
    layer.forward_mqa(out.clone(), None, None, out)
    wanted = [each for each in (("decode", decodes), ("prefill", prefills)) if each[1]]
    assert [(mode, count) for mode, count, *_ in calls] == wanted
    assert bool(out.all())  # every token was given to somebody
    for mode, count, window, entries in calls:
        begin = 0 if mode == "decode" else decodes
        assert window[0].shape == (count, 8 if mode == "decode" else 9)
        assert bool((window[0] == (1 if mode == "decode" else 2)).all())
        if ratio == 1:
            assert entries is None
        elif ratio == 4:
            assert entries[0][:, 0].tolist() == list(range(begin, begin + count))
            assert entries[1].tolist() == list(range(begin, begin + count))
        elif mode == "decode":
            assert entries[0].shape == (count, 6)
        else:
            assert entries[0][:, 0].tolist() == list(range(100, 100 + count))
            assert entries[1].tolist() == list(range(begin, begin + count))


def test_groups_of_heads_meet_their_part_of_wo_a(
    module: Any, layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.adopt(layer, start())
    inner = HEADS // GROUPS * LATENT
    weight = torch.randn(GROUPS * RANK, inner).to(torch.bfloat16)
    wo_a = SimpleNamespace(weight=torch.nn.Parameter(weight, requires_grad=False))
    object.__setattr__(layer, "wo_a", wo_a)
    object.__setattr__(layer, "wo_b", lambda z: z)
    monkeypatch.setattr(module, "turned_back", lambda heads, *_: heads)
    monkeypatch.setattr(module, "by_bf16", stand_ins.product)
    heads = torch.randn(TOKENS, PADDED, LATENT).to(torch.bfloat16)[:, :HEADS]
    made = layer._o_proj(heads, torch.arange(TOKENS))
    grouped = heads.reshape(TOKENS, GROUPS, inner).double()
    parts_of_wo_a = weight.view(GROUPS, RANK, inner).double()
    wanted = torch.einsum("tgk,grk->tgr", grouped, parts_of_wo_a).to(torch.bfloat16)
    assert torch.equal(made, wanted.flatten(1))


def test_the_level_of_graphs_is_the_lowest(module: Any) -> None:
    begun = start()
    config = SimpleNamespace(quant_config=SimpleNamespace(start=begun))
    levels = module.AttentionCGSupport
    for builder in (module.MetadataBuilder, module.WindowMetadataBuilder):
        assert builder.get_cudagraph_support(config, None) is levels.ALWAYS
    begun.kernels.append(parts.KERNELS["linear", parts.BF16]._replace(graphs="UNIFORM_BATCH"))
    for builder in (module.MetadataBuilder, module.WindowMetadataBuilder):
        assert builder.get_cudagraph_support(config, None) is levels.UNIFORM_BATCH


def test_vllm_passes_a_registered_backend_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why the plugin adopts: choosing CUSTOM gives FlashMLA, and nobody says so."""
    model = import_module("vllm.models.deepseek_v4.nvidia.model")
    enum = import_module("vllm.v1.attention.backends.registry").AttentionBackendEnum
    monkeypatch.setattr(
        model, "current_platform", SimpleNamespace(get_device_capability=lambda: None)
    )
    config = SimpleNamespace(attention_config=SimpleNamespace(backend=enum.CUSTOM))
    assert model._select_dsv4_attn_cls(config).__name__ == "DeepseekV4FlashMLAAttention"


# --------------------------------------------------------------------------------------------------
# A compressor hands its kernels a batch's tokens, vLLM's states and pages, and refuses others.

SERVED = [(4, 512), (128, 512), (4, 128)]
ENTRIES, COMPRESSOR_PADDED = 64, 4  # entries of a page; tokens of padding behind a batch
OFFSET, BETWEEN = 1152, 4608  # of a layer's page in a block, and bytes of other layers behind it


def bare(module: Any, ratio: int, width: int) -> Any:
    """A compressor as vLLM leaves it, without its construction, which needs a GPU."""
    made = module.DeepseekCompressor.__new__(module.DeepseekCompressor)
    torch.nn.Module.__init__(made)
    for name, value in {
        "prefix": "c", "k_cache_prefix": "k", "head_dim": width, "compress_ratio": ratio,
        "use_fp4_cache": False, "rms_norm_eps": 1e-6,
        "norm": SimpleNamespace(weight=torch.nn.Parameter(torch.ones(width).bfloat16())),
    }.items():  # fmt: skip
        object.__setattr__(made, name, value)
    return made


def packed(pages: int, used: int) -> torch.Tensor:
    """Pages of a layer that lie in blocks beside other layers' [N, used]."""
    block = OFFSET + used + BETWEEN
    whole = torch.full((pages * block,), 0x55, dtype=torch.uint8)
    return whole.as_strided((pages, used), (block, 1), OFFSET)


# Operands, in the order in which definitions take them.
POOLED = ("projected", "ape", "requests", "positions", "slots", "table", "entries")
WRITTEN = ("values", "weight", "turns", "positions", "slots")


class Stood:
    """Definitions that stand in for the kernels, on what the kernels would be handed."""

    def __init__(self, views: list[Any]) -> None:
        self.views, self.written = views, 0

    def launched(self, kernel: str, problem: Any, **given: Any) -> dict[str, Any]:
        """What the kernels of a compressor do."""
        return {"simt_paged_pool": self.pooled, "simt_kv_write": self.write}[kernel](problem, given)

    def pooled(self, problem: Any, named: dict[str, Any]) -> dict[str, Any]:
        """What simt_paged_pool does."""
        states = named.pop("states")
        given = tuple(named[name] for name in POOLED)
        assert all(each.is_contiguous() for each in given)
        kinds = [str(each.dtype).removeprefix("torch.") for each in given]
        assert kinds == ["float32"] * 2 + ["int32"] + ["int64"] * 2 + ["int32", "int64"]
        assert {len(given[at]) for at in (0, 2, 3, 4, 6)} == {problem.tokens}
        pages = self.bytes_of(states)
        assert pages.shape == (problem.pages.count, problem.pages.stride)
        made = paged_pool_checks.by_stated_order(paged_pool_checks.Call(problem, given, pages))
        self.put(states, made.states)
        return dict(zip(("pooled", "firsts", "places"), made[:3], strict=True))

    def write(self, problem: Any, named: dict[str, Any]) -> dict[str, Any]:
        """What simt_kv_write does."""
        view = named.pop("cache")
        rows = tuple(named[name] for name in WRITTEN)
        pages = self.bytes_of(view)
        assert pages.shape == (problem.pages.count, problem.pages.stride)
        self.put(view, filled(pages, rows, problem))
        self.written += int((rows[-1] >= 0).sum())
        return {}

    def of(self, view: Any) -> torch.Tensor:
        """The tensor that a view of pages is of."""
        tensors: list[torch.Tensor] = [x for x in self.views if x.data_ptr() == view.data_ptr()]
        assert len(tensors) == 1
        return tensors[0]

    def bytes_of(self, view: Any) -> torch.Tensor:
        """A view's pages with what lies behind each, as the kernel addresses them."""
        found = self.of(view)
        assert (view.shape[0], view.stride()) == (len(found), (found.stride(0), 1))
        pages = torch.full(view.shape, 0x55, dtype=torch.uint8)
        pages[:, : found.shape[1]] = found
        return pages

    def put(self, view: Any, pages: torch.Tensor) -> None:
        """Write back what a layer may write; the rest has to be as it was."""
        found = self.of(view)
        assert bool((pages[:, found.shape[1] :] == 0x55).all())
        found.copy_(pages[:, : found.shape[1]])


def filled(pages: torch.Tensor, rows: Any, problem: Any) -> torch.Tensor:
    """Pages with what rows leave there: values, weight, turns, positions, slots."""
    case = cache_checks.Case(problem)
    case.__dict__.update(zip(WRITTEN, rows, strict=True))
    case.__dict__["cache"] = pages.clone
    return cache_checks.by_definition(case)


def context_of(call: paged_pool_checks.Call) -> Any:
    """What vLLM says of a batch: padding behind its slots, each list as its own builder cuts it."""
    _, _, requests, _, slots, table, entries = call.tensors
    padded = torch.cat((slots, torch.full((COMPRESSOR_PADDED,), -1)))
    own = SimpleNamespace(slot_mapping=padded, token_to_req_indices=requests, block_table=table)
    return SimpleNamespace(attn_metadata={"s": own, "k": SimpleNamespace(slot_mapping=entries)})


@pytest.mark.parametrize(("ratio", "width"), SERVED)
def test_entries_are_the_definitions_call_by_call(
    module: Any, monkeypatch: pytest.MonkeyPatch, ratio: int, width: int
) -> None:
    """Two sequences, a prompt in chunks and steps of decoding, on packed pages."""
    case = compressor_checks.Case(ratio, width, ((ratio + 2, 0), (ratio - 3, 5), (1, 1)), seed=2)
    pages, _ = paged_pool_checks.pages_of(case)
    of_states = packed(pages.count, pages.rows * pages.row_bytes)
    of_states.fill_(0xFF)
    rows = of_states.view(torch.float32).unflatten(1, (pages.rows, -1))
    entry, nbytes = module.ENTRIES[width]
    held = Pages(entry, ENTRIES, 4, width=width)
    whole = packed(4, held.stride)
    cache = whole[:, : ENTRIES * nbytes].unflatten(1, (ENTRIES, nbytes))
    compressor = bare(module, ratio, width)
    for name, value in {
        "ape": torch.nn.Parameter(case.ape),
        "state_cache": SimpleNamespace(prefix="s", kv_cache=rows),
        "_static_forward_context": {"k": SimpleNamespace(kv_cache=cache)},
    }.items():
        object.__setattr__(compressor, name, value)
    module.adopt_compressor(compressor)
    assert type(compressor) is module.DegarbleCompressor
    stood = Stood([of_states, whole])
    monkeypatch.setattr(module, "launched", stood.launched)
    rotary = SimpleNamespace(cos_sin_cache=table_of_turns(2 * ratio + 9))
    states = paged_pool_checks.empty_states(case)
    wanted = torch.full((4, held.stride), 0x55, dtype=torch.uint8)
    for part in compressor_checks.calls(case):
        call = paged_pool_checks.call_of(case, part, states)
        made = paged_pool_checks.by_stated_order(call)
        states = made.states
        told = (rotary.cos_sin_cache, made.positions, made.slots)
        problem = WriteProblem(len(made.slots), held, len(told[0]))
        wanted = filled(wanted, (made.values, torch.ones(width).bfloat16(), *told), problem)
        context = context_of(call)
        monkeypatch.setattr(module, "get_forward_context", lambda context=context: context)
        projected, positions = call.tensors[0], call.tensors[3]
        padding = torch.full((COMPRESSOR_PADDED, projected.shape[1]), torch.nan)
        compressor.forward(
            torch.cat((projected, padding)), torch.cat((positions, positions[:1])), rotary
        )
        assert torch.equal(whole, wanted)
    assert stood.written == sum(length // ratio for length in case.lengths) > 0
    used = states[:, : of_states.shape[1]]
    assert torch.equal(of_states, used)


def test_nothing_runs_while_vllm_measures_its_memory(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compressor = bare(module, 4, 512)
    module.adopt_compressor(compressor)
    context = SimpleNamespace(attn_metadata=None)
    monkeypatch.setattr(module, "get_forward_context", lambda: context)
    compressor.forward(torch.zeros(3, 4096), torch.arange(3), None)


def test_what_is_not_written_is_refused(module: Any) -> None:
    for name, value in (("use_fp4_cache", True), ("head_dim", 64)):
        compressor = bare(module, 4, 128)
        object.__setattr__(compressor, name, value)
        with pytest.raises(InvalidArgument, match=r"parts\.compressor = vllm"):
            module.adopt_compressor(compressor)
    with pytest.raises(InvalidArgument, match="class of a compressor"):
        module.adopt_compressor(SimpleNamespace())
    for cache in (torch.zeros(2, 64, 584), torch.zeros(2, 64, 132, dtype=torch.uint8)):
        with pytest.raises(LayoutMismatch, match="kv-cache-dtype fp8"):
            module.require_entries(bare(module, 4, 512), cache)
    assert module.ENTRIES[128][0] == KEY


# --------------------------------------------------------------------------------------------------
# The indexer hands its kernels a batch's own tokens, and fills what attention reads.

INDEXER_TOKENS, INDEXER_HEADS, WIDTH, INDEXER_RANK, TOPK = 5, 4, 128, 16, 3


@pytest.fixture
def indexer(module: Any) -> Any:
    made = module.DeepseekV4Indexer.__new__(module.DeepseekV4Indexer)
    torch.nn.Module.__init__(made)
    cache = module.DeepseekV4IndexerCache.__new__(module.DeepseekV4IndexerCache)
    torch.nn.Module.__init__(cache)
    object.__setattr__(cache, "prefix", "k")
    for name, value in {
        "prefix": "model.layers.1.attn.indexer", "use_fp4_kv": False, "head_dim": WIDTH,
        "n_head": INDEXER_HEADS, "topk_tokens": TOPK, "compress_ratio": 4, "k_cache": cache,
        "topk_indices_buffer": torch.full((8, TOPK), 77, dtype=torch.int32),
        "wq_b": lambda x: (x.repeat(1, INDEXER_HEADS * WIDTH // INDEXER_RANK), None),
        "compressor": lambda *given: written.append(given),
    }.items():  # fmt: skip
        object.__setattr__(made, name, value)
    written.clear()
    return made


written: list[Any] = []


def call(indexer: Any, module: Any, monkeypatch: pytest.MonkeyPatch, longest: int) -> list[Any]:
    """Call it on a batch of three decoded and two prompt tokens; return what was scored."""
    own = SimpleNamespace(num_decode_tokens=3, num_prefill_tokens=2, max_seq_len=longest)
    context = SimpleNamespace(attn_metadata={"k": own})
    monkeypatch.setattr(module, "get_forward_context", lambda: context)
    asked: list[Any] = []

    def scored(_: Any, metadata: Any, queries: Any, turning: Any, entries: int) -> Any:
        asked.extend((metadata, queries, turning, entries))
        return torch.zeros(INDEXER_TOKENS, entries)

    monkeypatch.setattr(module, "scored", scored)
    monkeypatch.setattr(
        module, "chosen", lambda scores, count: torch.arange(count).expand(len(scores), -1).int()
    )
    rotary = SimpleNamespace(cos_sin_cache=torch.zeros(16, 64))
    rows = torch.randn(6, INDEXER_RANK)  # one more than tokens: padding of a batch
    made = indexer.forward(
        None, rows, "score", torch.ones(6, INDEXER_HEADS), torch.arange(6), rotary
    )
    assert made == (None, None, None)  # vLLM 0.33 then scores nothing itself
    return asked


def test_what_is_chosen_lies_in_the_buffer(
    module: Any, indexer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.adopt_indexer(indexer)
    assert indexer.k_cache.get_attn_backend() is module.IndexerBackend
    assert module.IndexerBackend.get_builder_cls() is module.IndexerBuilder
    metadata, (heads, weights), (turns, positions), entries = call(indexer, module, monkeypatch, 9)
    assert metadata.max_seq_len == 9
    assert (heads.shape, turns.shape, len(positions), entries) == (
        (INDEXER_TOKENS, INDEXER_HEADS, WIDTH), (16, 64), INDEXER_TOKENS, 2
    )  # fmt: skip
    assert torch.allclose(
        weights, torch.full((INDEXER_TOKENS, INDEXER_HEADS), (WIDTH * INDEXER_HEADS) ** -0.5)
    )
    buffer = indexer.topk_indices_buffer
    assert buffer[:INDEXER_TOKENS].tolist() == [[0, 1, -1]] * INDEXER_TOKENS
    assert bool((buffer[INDEXER_TOKENS:] == 77).all())  # nobody's rows
    assert len(written) == 1  # keys were written first


def test_without_entries_nothing_is_scored(
    module: Any, indexer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.adopt_indexer(indexer)
    assert call(indexer, module, monkeypatch, 3) == []
    assert bool((indexer.topk_indices_buffer[:INDEXER_TOKENS] == -1).all())


@pytest.mark.parametrize(("name", "value"), [("use_fp4_kv", True), ("head_dim", 64)])
def test_keys_that_the_kernels_do_not_read_are_refused(
    module: Any, indexer: Any, name: str, value: Any
) -> None:
    object.__setattr__(indexer, name, value)
    with pytest.raises(InvalidArgument, match=r"parts\.indexer = vllm"):
        module.adopt_indexer(indexer)


# --------------------------------------------------------------------------------------------------
# Pages of a layer among those of others: operands have the address and strides that kernels need.

PAGES, PAGES_ENTRIES, NBYTES, PAGES_OFFSET = 3, 64, 584, 576


@pytest.fixture
def view() -> Any:
    return import_module("degarble.harness.vllm.bound.attention").PagedView


def pages_packed(stride: int = 2 * PAGES_ENTRIES * NBYTES) -> torch.Tensor:
    """A layer's pages in vLLM's packed layout: others' lie between, the last stride is cut off."""
    backing = torch.zeros(PAGES * stride, dtype=torch.uint8)
    inner = backing.view(PAGES, stride)[:, PAGES_OFFSET : PAGES_OFFSET + PAGES_ENTRIES * NBYTES]
    return inner.view(PAGES, PAGES_ENTRIES, NBYTES)


def test_kernels_take_pages_that_no_tensor_could_hold(view: Any) -> None:
    cache = pages_packed()
    with pytest.raises(RuntimeError, match="out of bounds"):
        cache.as_strided((PAGES, cache.stride(0)), (cache.stride(0), 1))
    made = view("own", cache)
    shape = (PAGES, 2 * PAGES_ENTRIES * NBYTES)
    require_tensor("cache", made, torch.uint8, shape, 16 if cache.data_ptr() % 16 == 0 else 1)
    assert (made.entries, made.data_ptr(), made.device) == (64, cache.data_ptr(), cache.device)


def test_entries_with_gaps_are_refused(view: Any) -> None:
    gaps = torch.zeros(PAGES, PAGES_ENTRIES, 2 * NBYTES, dtype=torch.uint8)[..., :NBYTES]
    for cache in (gaps, torch.zeros(PAGES, PAGES_ENTRIES, NBYTES)):
        with pytest.raises(LayoutMismatch, match="close together"):
            view("own", cache)


# --------------------------------------------------------------------------------------------------
# A layer's table of turns is its config's own, is mended where vLLM errs, or refuses the start.


@pytest.fixture
def require() -> Any:
    return import_module("degarble.harness.vllm.bound.attention").require_turns


def rope_tables_start() -> Any:
    return SimpleNamespace(proven=StartProof("", "", "", {}, {}, V4), running=[])


def attention(number: int, table: torch.Tensor) -> Any:
    rotary = SimpleNamespace(cos_sin_cache=table)
    return SimpleNamespace(prefix=f"model.layers.{number}.attn", rotary_emb=rotary)


def plain() -> int:
    return next(n for n, block in enumerate(V4.layers) if not block.ratio)


def test_what_the_config_says_passes(require: Any) -> None:
    for number, block in enumerate(V4.layers):
        begun = rope_tables_start()
        require(attention(number, table_of(V4.rope(block), 2048)), begun, "0.33")
        assert begun.running == []


def test_a_gpu_as_the_default_device_changes_nothing(require: Any) -> None:
    """So vLLM builds its model there: a table made beside it would be of another device."""
    begun, layer = (
        rope_tables_start(),
        attention(plain(), table_of(V4.rope(V4.layers[plain()]), 2048)),
    )
    with torch.device("meta"):
        require(layer, begun, "0.33")
    assert begun.running == []


def test_yarn_where_there_is_none_is_mended_in_026_alone(require: Any) -> None:
    own = V4.rope(V4.layers[plain()])
    compressed = next(V4.rope(block) for block in V4.layers if block.ratio)
    wrong = replace(own, yarn=compressed.yarn)
    layer, begun = attention(plain(), table_of(wrong, 2048)), rope_tables_start()
    with pytest.raises(LayoutMismatch, match="no YaRN, as config"):
        require(layer, begun, "0.33")
    require(layer, begun, "0.26")
    assert torch.equal(layer.rotary_emb.cos_sin_cache, table_of(own, 2048))
    assert [(each.part, each.by) for each in begun.running] == [("turns", "degarble")]
