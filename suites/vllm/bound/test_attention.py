"""The layer's overrides with the kernels' definitions: right operands, slots, groups and levels."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, LayoutMismatch
from degarble.harness.vllm import parts
from degarble.harness.vllm.parts import PluginOptions
from degarble.harness.vllm.proof import StartProof
from degarble.suites.vllm.bound import stand_ins

pytestmark = pytest.mark.vllm

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
