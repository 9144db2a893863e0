"""The indexer hands its kernels a batch's own tokens, and fills what attention reads."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument

pytestmark = pytest.mark.vllm

TOKENS, HEADS, WIDTH, RANK, TOPK = 5, 4, 128, 16, 3


@pytest.fixture
def module() -> Any:
    return import_module("degarble.harness.vllm.bound.attention")


@pytest.fixture
def indexer(module: Any) -> Any:
    made = module.DeepseekV4Indexer.__new__(module.DeepseekV4Indexer)
    torch.nn.Module.__init__(made)
    cache = module.DeepseekV4IndexerCache.__new__(module.DeepseekV4IndexerCache)
    torch.nn.Module.__init__(cache)
    object.__setattr__(cache, "prefix", "k")
    for name, value in {
        "prefix": "model.layers.1.attn.indexer", "use_fp4_kv": False, "head_dim": WIDTH,
        "n_head": HEADS, "topk_tokens": TOPK, "compress_ratio": 4, "k_cache": cache,
        "topk_indices_buffer": torch.full((8, TOPK), 77, dtype=torch.int32),
        "wq_b": lambda x: (x.repeat(1, HEADS * WIDTH // RANK), None),
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
        return torch.zeros(TOKENS, entries)

    monkeypatch.setattr(module, "scored", scored)
    monkeypatch.setattr(
        module, "chosen", lambda scores, count: torch.arange(count).expand(len(scores), -1).int()
    )
    rotary = SimpleNamespace(cos_sin_cache=torch.zeros(16, 64))
    rows = torch.randn(6, RANK)  # one more than tokens: padding of a batch
    made = indexer.forward(None, rows, "score", torch.ones(6, HEADS), torch.arange(6), rotary)
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
        (TOKENS, HEADS, WIDTH), (16, 64), TOKENS, 2
    )  # fmt: skip
    assert torch.allclose(weights, torch.full((TOKENS, HEADS), (WIDTH * HEADS) ** -0.5))
    buffer = indexer.topk_indices_buffer
    assert buffer[:TOKENS].tolist() == [[0, 1, -1]] * TOKENS
    assert bool((buffer[TOKENS:] == 77).all())  # nobody's rows
    assert len(written) == 1  # keys were written first


def test_without_entries_nothing_is_scored(
    module: Any, indexer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.adopt_indexer(indexer)
    assert call(indexer, module, monkeypatch, 3) == []
    assert bool((indexer.topk_indices_buffer[:TOKENS] == -1).all())


@pytest.mark.parametrize(("name", "value"), [("use_fp4_kv", True), ("head_dim", 64)])
def test_keys_that_the_kernels_do_not_read_are_refused(
    module: Any, indexer: Any, name: str, value: Any
) -> None:
    object.__setattr__(indexer, name, value)
    with pytest.raises(InvalidArgument, match=r"parts\.indexer = vllm"):
        module.adopt_indexer(indexer)
