"""Layers take streams and give streams; stand-ins for the kernels show who gets what, in order."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.vllm.parts import PluginOptions
from degarble.harness.vllm.proof import StartProof

pytestmark = pytest.mark.vllm

TOKENS, STREAMS, WIDTH = 3, 4, 8


@pytest.fixture
def module() -> Any:
    return import_module("degarble.harness.vllm.bound.model")


def start(**said: str) -> Any:
    made = import_module("degarble.harness.vllm.bound.start").Start
    return made(PluginOptions(parts=said), StartProof("", "", "", {}, {}), "sm_90a", "x")


def bare(kind: Any, **attributes: Any) -> Any:
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made


def model(module: Any) -> Any:
    layers = [
        bare(
            module.DeepseekV4DecoderLayer,
            attn=lambda positions, x, _: x + positions[:, None],
            ffn=lambda x, ids: x * ids[:, None],
            attn_norm="attn norm", ffn_norm="ffn norm",
        )
        for _ in range(2)
    ]  # fmt: skip
    return bare(
        module.DeepseekV4Model, layers=layers, start_layer=0, end_layer=2, hc_mult=STREAMS,
        embed_input_ids=lambda ids: torch.ones(len(ids), WIDTH), norm=lambda x: x * 10,
    )  # fmt: skip


def test_streams_pass_every_block(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, norms = model(module), []
    assert module.adopt_model(made, start())
    for layer in made.layers:
        layer.degarble_mixing = {"attn": "a", "ffn": "f"}
    object.__setattr__(made, "degarble_head", "head")
    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(module, "get_pp_group", lambda: group)

    def collapsed(streams: Any, mixing: str, norm: str) -> Any:
        norms.append((mixing, norm))
        return streams.mean(1), "post", "mix"

    monkeypatch.setattr(module, "collapsed", collapsed)
    monkeypatch.setattr(module, "spread", lambda out, streams, *_: streams + out[:, None])
    monkeypatch.setattr(module, "headed", lambda streams, _: streams.sum(1))
    ids, positions = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 2.0])
    out = made.forward(ids, positions, None)
    wanted = torch.ones(TOKENS)
    for _ in range(2):
        wanted = wanted + (wanted + positions)
        wanted = wanted + wanted * ids
    assert torch.equal(out, (wanted * STREAMS * 10)[:, None].expand(-1, WIDTH))
    assert norms == [("a", "attn norm"), ("f", "ffn norm")] * 2
    group.is_last_rank = False
    handed = made.forward(ids, positions, None).tensors["hidden_states"]
    group.is_first_rank = False
    assert handed.shape == (TOKENS, STREAMS, WIDTH)  # a stage goes on where another ended


def test_weights_are_split_once_loaded(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"hc_eps": 1e-6, "rms_norm_eps": 1e-5, "hc_sinkhorn_iters": 20}
    fn = torch.randn(24, STREAMS * WIDTH)
    hc = {
        f"hc_{place}_{end}": torch.nn.Parameter(value, requires_grad=False)
        for place in ("attn", "ffn")
        for end, value in (("fn", fn), ("base", torch.ones(24)), ("scale", torch.ones(3)))
    }
    made = module.mixing_of(SimpleNamespace(**numbers, **hc), "hc_attn")
    assert (made.iterations, made.epsilon, made.norm_epsilon) == (20, 1e-6, 1e-5)
    split = made.weights[0]
    assert torch.equal(split.double().sum(0)[:24].float(), fn)
    del monkeypatch


def test_left_to_vllm_or_of_another_class(module: Any) -> None:
    made = model(module)
    assert not module.adopt_model(made, start(mhc="vllm"))
    assert type(made) is module.DeepseekV4Model
    made.layers[1] = SimpleNamespace()
    with pytest.raises(InvalidArgument, match=r"parts\.mhc = vllm"):
        module.adopt_model(made, start())
    made = model(module)
    object.__setattr__(made, "use_sequence_parallel", True)
    with pytest.raises(InvalidArgument, match="use_sequence_parallel"):
        module.adopt_model(made, start())
