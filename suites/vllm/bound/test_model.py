"""The model and its layers under vLLM, built and loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, LayoutMismatch
from degarble.harness.vllm.parts import PluginOptions
from degarble.harness.vllm.proof import StartProof, StoredTensorFacts
from degarble.suites.hang_guard import HANG_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.vllm


# --------------------------------------------------------------------------------------------------
# vLLM's plugin loader makes our method and model known, only where asked; the load is guarded.

LOOK = """
from vllm.plugins import load_general_plugins
load_general_plugins()
load_general_plugins()
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from vllm.model_executor.models.registry import ModelRegistry
known = "degarble" in QUANTIZATION_METHODS
model = ModelRegistry.models["DeepseekV4ForCausalLM"]
print(known, get_quantization_config("degarble").__name__ if known else "-", model.class_name)
"""


def loaded(plugins: str | None) -> list[str]:
    import os  # noqa: PLC0415  a process of its own, with an environment of its own

    environment = {key: value for key, value in os.environ.items() if key != "VLLM_PLUGINS"}
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    done = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, check=True, env=environment,
        timeout=HANG_SECONDS,
    )  # fmt: skip
    return done.stdout.split()[-3:]


def test_named_vllm_knows_us() -> None:
    assert loaded("degarble") == ["True", "DegarbleConfig", "DegarbleDeepseekV4"]


def test_unnamed_vllm_does_not() -> None:
    assert loaded(None) == ["False", "-", "DeepseekV4ForCausalLM"]


@pytest.fixture
def module() -> Any:
    return import_module("degarble.harness.vllm.bound.model")


def test_another_quantisation_method_is_refused(module: Any) -> None:
    config = SimpleNamespace(quant_config=SimpleNamespace())
    with pytest.raises(InvalidArgument, match="--quantization degarble"):
        module.DegarbleDeepseekV4(vllm_config=config)


class Told:
    """A start that counts how often it told."""

    def __init__(self) -> None:
        stored = {
            name: StoredTensorFacts((1,), 4, expert=False, drafter=False) for name in ("a", "b")
        }
        self.proven = StartProof("", "", "", {}, stored)
        self.told = 0

    def tell(self) -> None:
        self.told += 1


@pytest.mark.parametrize(
    ("comes", "parameters", "words"),
    [
        (("a", "b"), ("a", "b"), None),
        (("a",), ("a",), "never came"),
        (("a", "b", "c"), ("a",), "not in the checkpoint's index"),
        (("a", "b"), ("a", "b", "left"), "nothing was written to"),
    ],
)
def test_the_load_is_guarded(
    module: Any, monkeypatch: pytest.MonkeyPatch, comes: tuple[str, ...],
    parameters: tuple[str, ...], words: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(
        module.DeepseekV4ForCausalLM, "load_weights", lambda _, stream: {name for name, _ in stream}
    )
    made = module.DegarbleDeepseekV4.__new__(module.DegarbleDeepseekV4)
    torch.nn.Module.__init__(made)
    for name in parameters:
        made.register_parameter(name, torch.nn.Parameter(torch.zeros(1)))
    begun = Told()
    made.degarble_config, made.degarble_spread = SimpleNamespace(start=begun), False
    made.degarble_ranks, made.degarble_mixes = (1, 1, 1), False
    made.model = SimpleNamespace(start_layer=0, end_layer=0)
    monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
    stream = ((name, torch.zeros(1)) for name in comes)
    if words is None:
        assert made.load_weights(stream) == {"a", "b"}
    else:
        with pytest.raises(LayoutMismatch, match=words):
            made.load_weights(stream)
    assert begun.told == (words is None)


# --------------------------------------------------------------------------------------------------
# Layers take streams and give streams; stand-ins for the kernels show who gets what, in order.

TOKENS, STREAMS, WIDTH = 3, 4, 8


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


# --------------------------------------------------------------------------------------------------
# vLLM's real DeepSeek-V4 with the plugin: built, loaded whole, and it says what runs.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from degarble.suites.vllm.built_model import write_served  # noqa: PLC0415  needs vLLM

    return write_served(tmp_path_factory.mktemp("built") / "c")


def built(folder: Path, *dropped: str) -> Any:
    command = [sys.executable, "-m", "degarble.suites.vllm.built_model"]
    done = subprocess.run(
        [*command, str(folder), *dropped], capture_output=True, text=True, check=True,
        timeout=HANG_SECONDS, env=os.environ | {"VLLM_PLUGINS": "degarble"},
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def test_it_is_built_loaded_and_logged(folder: Path) -> None:
    found = built(folder)
    assert (found["model"], found["attention"]) == ("DegarbleDeepseekV4", ["DegarbleAttention"])
    assert found["loaded"] == found["parameters"] > 100
    assert found["layers"] == ["DegarbleDecoderLayer"]
    assert "DegarbleIndexer" in found["indexers"]
    served = {"DegarbleCompressor 4 512", "DegarbleCompressor 4 128", "DegarbleCompressor 128 512"}
    assert set(found["compressors"]) == served
    assert found["records"] == ["rank-0.json"]
    assert found["banner"][0].endswith("in vLLM 0.33.0 on sm_90a")
    assert "recipe 24 modules BF16, 6 modules NVFP4" in found["banner"][1]
    assert found["banner"][2].endswith(" 0 elements unwritten")
    running = found["running"]
    for line in (
        "model.layers.0.attn.fused_wqa_wkv linear [BF16]: degarble kernels: sm90_gemm_bf16 ",
        "model.layers.0.attn.wo_b linear [NVFP4]: degarble kernels: sm90_gemm_nvfp4 ",
        "model.layers.0.attn.wo_b act_quant [NVFP4]: degarble kernels: simt_quantise_nvfp4",
        "model.layers.0.attn.wo_a o_proj [BF16]: degarble kernels: simt_inverse_rope, ",
        "model.layers.0.attn attend [fp8_ds_mla]: degarble kernels: sm90_sparse_attention",
        "model.layers.1.attn indexer [fp8_ds_mla]: degarble kernels: simt_indexer_operand, ",
        "model.layers.0 mhc [BF16]: degarble kernels: simt_mhc_project, ",
        "model.layers.0.ffn.gate gate [BF16]: degarble kernels: sm90_gemm_grouped",
        "model.layers.1.attn projections [BF16]: degarble kernels: sm90_gemm_grouped, ",
        "model head [BF16]: degarble kernels: simt_rmsnorm, sm90_gemm_grouped",
        "model.layers.0.ffn.gate router [sqrtsoftplus]: degarble kernels: simt_router",
        "model.layers.0.ffn.shared_experts act [BF16]: degarble kernels: simt_quantise_nvfp4",
        "model.layers.2.attn compressor [fp8_ds_mla]: degarble kernels: simt_paged_pool, ",
        "model.layers.2.ffn.experts experts [NVFP4]: degarble kernels: simt_moe_",
    ):
        assert sum(each.startswith(line) for each in running) == 1, line


def test_two_ranks_hold_their_shares(folder: Path, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "degarble.suites.vllm.built_model", str(folder)]
    running = [
        subprocess.Popen(
            [*line, "--rank", str(rank), "--store", str(tmp_path / "met")],
            stdout=subprocess.PIPE, text=True, env=os.environ | {"VLLM_PLUGINS": "degarble"},
        )
        for rank in range(2)
    ]  # fmt: skip
    alone = built(folder)["shapes"]
    for rank, each in enumerate(running):
        found = json.loads(each.communicate(timeout=HANG_SECONDS)[0].splitlines()[-1])
        assert found["banner"][2].startswith("loader proof: 2 ranks, ")
        assert found["records"] == [f"rank-{rank}.json"]
        assert found["loaded"] == found["parameters"]
        shapes, experts = found["shapes"], "model.layers.0.ffn.experts.routed_experts.w13_weight"
        assert shapes[experts][0] * 2 == alone[experts][0]
        assert shapes["lm_head.weight"][0] * 2 == alone["lm_head.weight"][0]
        assert any("experts [NVFP4]: degarble" in each for each in found["running"])


def test_a_tensor_that_does_not_come_ends_the_start(folder: Path) -> None:
    found = built(folder, "layers.1.ffn.experts.2.w3.input_scale")
    assert "weights that never came = '1, as layers.1.ffn.experts.2.w3" in found["refused"]
