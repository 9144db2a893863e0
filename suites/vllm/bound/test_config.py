"""Each module gets the method of its stored format, vLLM's own where asked for, or a refusal."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from degarble.harness.base.errors import InvalidArgument, LayoutMismatch, UnknownName
from degarble.harness.vllm import parts
from degarble.harness.vllm.parts import PluginOptions
from degarble.harness.vllm.proof import StartProof

pytestmark = pytest.mark.vllm

LAYER = "model.layers.0."
FORMATS = {
    f"{LAYER}attn.wq_b": parts.FP8_E8M0,
    f"{LAYER}attn.wo_b": parts.FP8_F32,
    f"{LAYER}attn.fused_wqa_wkv": parts.NVFP4,
    f"{LAYER}attn.wo_a": parts.BF16,
    f"{LAYER}ffn.shared_experts.down_proj": parts.BF16,
    f"{LAYER}ffn.experts": parts.NVFP4,
    "model.layers.1.ffn.experts": "MXFP4",
    "model.layers.2.ffn.experts": parts.BF16,
    "model.layers.1.attn.wo_a": parts.FP8_E8M0,
    "model.layers.1.attn.wq_b": "MXFP8",
}
ACT = {"act_quant": "vllm"}


@pytest.fixture
def module() -> Any:
    return import_module("degarble.harness.vllm.bound.config")


def made(module: Any, target: str = "sm_90a", **said: Any) -> Any:
    config = module.DegarbleConfig({"quant_method": "fp8", "activation_scheme": "dynamic",
                                    "weight_block_size": [128, 128]})  # fmt: skip
    proven = StartProof("manifest 0", "", "", FORMATS, {})
    config._start = module.Start(PluginOptions(**said), proven, target, "x")
    return config


def linear(module: Any) -> Any:
    return module.LinearBase.__new__(module.LinearBase)


def method(module: Any, config: Any, name: str) -> Any:
    return config.get_quant_method(linear(module), name)


def test_linears_get_the_method_of_their_format(module: Any) -> None:
    config = made(module, parts=ACT)
    found = {
        name: method(module, config, f"{LAYER}{name}")
        for name in ("attn.wq_b", "attn.wo_b", "attn.wo_a", "ffn.shared_experts.down_proj")
    }
    assert found["attn.wq_b"].powers_of_two
    assert not found["attn.wo_b"].powers_of_two
    names = [type(each).__name__ for each in found.values()]
    assert names == ["Fp8Linear", "Fp8Linear", "Bf16Linear", "Bf16Linear"]
    noted = [(each.part, each.by) for each in config.start.running]
    assert noted == [
        ("linear", "degarble"), ("act_quant", "vllm"), ("linear", "degarble"),
        ("act_quant", "vllm"), ("o_proj", "degarble"), ("linear", "degarble"),
    ]  # fmt: skip
    assert all(each.tactic for each in config.start.running if each.part == "linear")


def test_nvfp4_linears_quantise_or_not_as_requested(module: Any) -> None:
    name = f"{LAYER}attn.fused_wqa_wkv"
    assert method(module, made(module), name).quantises
    for target in ("sm_90a", "sm_100a"):
        config = made(module, target, nvfp4_activations="bf16")
        assert not method(module, config, name).quantises
        assert [each.part for each in config.start.running] == ["linear"]
    with pytest.raises(InvalidArgument, match="other padding"):
        method(module, made(module, parts=ACT), name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{LAYER}attn.wq_b", "part act_quant"),
        ("model.layers.1.attn.wo_a", "part o_proj"),
        ("model.layers.1.attn.wq_b", "part linear"),
    ],
)
def test_what_has_no_kernel_is_refused(module: Any, name: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        method(module, made(module), name)


def test_unknown_modules_are_refused(module: Any) -> None:
    with pytest.raises(UnknownName, match=r"layers\.9"):
        method(module, made(module), "model.layers.9.attn.wq_b")


def test_linears_requested_from_vllm_are_vllms(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = import_module("vllm.models.deepseek_v4.quant_config").DeepseekV4FP8Config
    monkeypatch.setattr(theirs, "get_quant_method", lambda *_: "their FP8")
    config = made(module, parts={"linear": "vllm", "o_proj": "vllm"})
    plain = type(method(module, config, f"{LAYER}ffn.shared_experts.down_proj")).__name__
    assert plain == "UnquantizedLinearMethod"
    assert method(module, config, f"{LAYER}attn.wq_b") == "their FP8"
    assert method(module, config, "model.layers.1.attn.wo_a") == "their FP8"
    with pytest.raises(InvalidArgument, match="no NVFP4 linear"):
        method(module, config, f"{LAYER}attn.fused_wqa_wkv")
    assert {each.by for each in config.start.running} == {"vllm"}


def test_vllms_experts_are_those_that_are_stored(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM chooses by keys of config.json; what the file holds may be something else."""
    theirs = import_module("vllm.models.deepseek_v4.quant_config").DeepseekV4FP8Config
    built = type("Mxfp4MoEMethod", (), {})
    monkeypatch.setattr(theirs, "get_quant_method", lambda *_: built())
    monkeypatch.setattr(module, "UnquantizedFusedMoEMethod", lambda _: "plain")
    routed = module.RoutedExperts.__new__(module.RoutedExperts)
    object.__setattr__(routed, "moe_config", None)
    config = made(module, parts={"experts": "vllm"})
    assert type(config.get_quant_method(routed, "model.layers.1.ffn.experts")) is built
    assert config.get_quant_method(routed, "model.layers.2.ffn.experts") == "plain"
    with pytest.raises(LayoutMismatch, match="expert_dtype and moe_quant_algo"):
        config.get_quant_method(routed, f"{LAYER}ffn.experts")


def test_experts_get_our_method_or_a_refusal(module: Any) -> None:
    routed = module.RoutedExperts.__new__(module.RoutedExperts)
    object.__setattr__(routed, "moe_config", SimpleNamespace())
    found = made(module).get_quant_method(routed, f"{LAYER}ffn.experts.routed_experts")
    assert type(found).__name__ == "ModelOptOfDegarble"
    with pytest.raises(InvalidArgument, match=r"part experts.*MXFP4"):
        made(module).get_quant_method(routed, "model.layers.1.ffn.experts")


def test_what_is_no_linear_is_left_alone(module: Any) -> None:
    assert made(module).get_quant_method(object(), "model.embed_tokens") is None


def test_vllm_pads_shared_experts_to_our_blocks(module: Any) -> None:
    assert made(module).weight_block_size == [128, 128]
    config = made(module)
    config.start.proven = StartProof("", "", "", {"m": parts.BF16}, {})
    assert config.weight_block_size is None
    before = module.DegarbleConfig({"weight_block_size": [128, 128]})
    assert before.weight_block_size == [128, 128]  # asked before anything could be proven


def test_a_config_that_names_no_quantisation_is_taken(module: Any) -> None:
    assert module.DegarbleConfig().raw == {}  # as vLLM makes it for a checkpoint in BF16


def test_only_v4_is_taken_and_only_where_requested(module: Any) -> None:
    take = module.DegarbleConfig.override_quantization_method
    v4, other = SimpleNamespace(model_type="deepseek_v4"), SimpleNamespace(model_type="llama")
    assert take({}, "degarble", v4) == "degarble"
    assert take({}, None, v4) is None
    assert take({}, "fp8", other) is None
    with pytest.raises(InvalidArgument, match="llama"):
        take({}, "degarble", other)
