"""A start of the plugin: its options, proof, quantisation method and metrics."""

from __future__ import annotations

import json
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.base.errors import (
    InvalidArgument,
    LayoutMismatch,
    UnknownName,
    UnreadableFile,
)
from degarble.harness.vllm import log_messages, parts
from degarble.harness.vllm.installed import VARIABLE
from degarble.harness.vllm.parts import PluginOptions
from degarble.harness.vllm.proof import StartProof
from degarble.suites.checkpoint.structure_cases import V4, write
from degarble.suites.vllm.test_parts import BANNER, RUNNING

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.vllm


# --------------------------------------------------------------------------------------------------
# A start refuses what cannot be served, records what runs, and logs it after loading.


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = import_module("degarble.harness.vllm.bound.start")
    hopper = SimpleNamespace(
        get_device_capability=lambda: SimpleNamespace(major=9, minor=0), device_type="cuda"
    )
    monkeypatch.setattr(found, "current_platform", hopper)
    monkeypatch.setattr(found, "get_tensor_model_parallel_rank", lambda: 0)
    return found


def config(folder: Path | str, **said: Any) -> Any:
    """What the plugin reads of vLLM's config."""
    parallel = SimpleNamespace(
        tensor_parallel_size=1, data_parallel_size=1, pipeline_parallel_size=1,
        enable_expert_parallel=False, enable_eplb=False, decode_context_parallel_size=1,
    )  # fmt: skip
    model = SimpleNamespace(model=str(folder), dtype="torch.bfloat16", quantization_config=None)
    return SimpleNamespace(
        parallel_config=parallel, model_config=model, speculative_config=None, lora_config=None,
        load_config=SimpleNamespace(load_format="auto"), additional_config=said, instance_id="s",
    )  # fmt: skip


def test_config_has_what_is_read_of_it() -> None:
    of_vllm = import_module("vllm.config")
    names = {
        of_vllm.VllmConfig: ("parallel_config", "model_config", "speculative_config", "lora_config",
                             "load_config", "additional_config", "instance_id", "quant_config"),
        of_vllm.ParallelConfig: tuple(vars(config("x").parallel_config)),
        of_vllm.ModelConfig: ("model", "dtype", "quantization_config"),
        of_vllm.LoadConfig: ("load_format",),
    }  # fmt: skip
    for record, fields in names.items():
        missing = set(fields) - set(record.__dataclass_fields__)
        assert not missing, (record.__name__, missing)


def test_a_start_proves_and_logs(module: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "c", V4, "bf16")
    start = module.Start.from_config(config(folder, degarble={"told": str(tmp_path / "told")}))
    start.kernel("model.layers.0.attn.wq_b", "linear", "BF16", "by rows")
    start.report()
    raw = json.loads((tmp_path / "told" / "rank-0.json").read_text())
    assert raw["banner"]["target"] == "sm_90a"
    assert raw["banner"]["vllm"].startswith("0.33.")
    assert raw["banner"]["kernels"] == ["sm90_gemm_bf16"]
    assert raw["banner"]["graphs"] == "ALWAYS"
    assert raw["running"][0]["kernel"] == "kernels: sm90_gemm_bf16"
    assert {each["part"] for each in raw["running"][1:]} == set(parts.NO_HOOK)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("speculative_config", object(), "speculative decoding"),
        ("lora_config", object(), "LoRA"),
        ("parallel_config.enable_eplb", True, "expert load balancing"),
        ("parallel_config.data_parallel_size", 2, "data parallelism"),
        ("parallel_config.decode_context_parallel_size", 2, "decode context parallelism"),
        ("model_config.quantization_config", object(), "online quantisation"),
        ("load_config.load_format", "dummy", "dummy load format"),
        ("model_config.dtype", "torch.float16", "--dtype bfloat16"),
        ("model_config.model", "owner/name", "local folder"),
    ],
)
def test_what_is_not_served_is_refused(
    module: Any, tmp_path: Path, path: str, value: object, words: str
) -> None:
    asked = config(tmp_path)
    *to, name = path.split(".")
    here = asked
    for step in to:
        here = getattr(here, step)
    setattr(here, name, value)
    with pytest.raises(InvalidArgument, match=words):
        module.Start.from_config(asked)


def test_ranks_are_those_of_the_start(module: Any) -> None:
    asked = config("x")
    asked.parallel_config.tensor_parallel_size = 8
    assert module.ranks_of(asked) == (8, 1, 1)
    asked.parallel_config.enable_expert_parallel = True
    assert module.ranks_of(asked) == (8, 8, 1)


def test_known_failures_are_those_of_the_ledger(module: Any, tmp_path: Path) -> None:
    assert list(module.known_failures(None)) == []
    with pytest.raises(UnreadableFile):
        list(module.known_failures(str(tmp_path / "no.yaml")))


def test_nvfp4_is_multiplied_as_requested(module: Any) -> None:
    for activations, wanted in (("quantised", parts.NVFP4), ("bf16", parts.NVFP4_A16)):
        start = module.Start(PluginOptions(nvfp4_activations=activations), None, "sm_90a", "x")
        assert start.linear_format(parts.NVFP4) == wanted
        assert start.linear_format(parts.BF16) == parts.BF16


# --------------------------------------------------------------------------------------------------
# Each module gets the method of its stored format, vLLM's own where requested, or a refusal.

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
def config_module() -> Any:
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


def test_linears_get_the_method_of_their_format(config_module: Any) -> None:
    config = made(config_module, parts=ACT)
    found = {
        name: method(config_module, config, f"{LAYER}{name}")
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


def test_nvfp4_linears_quantise_or_not_as_requested(config_module: Any) -> None:
    name = f"{LAYER}attn.fused_wqa_wkv"
    assert method(config_module, made(config_module), name).quantises
    for target in ("sm_90a", "sm_100a"):
        config = made(config_module, target, nvfp4_activations="bf16")
        assert not method(config_module, config, name).quantises
        assert [each.part for each in config.start.running] == ["linear"]
    with pytest.raises(InvalidArgument, match="other padding"):
        method(config_module, made(config_module, parts=ACT), name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{LAYER}attn.wq_b", "part act_quant"),
        ("model.layers.1.attn.wo_a", "part o_proj"),
        ("model.layers.1.attn.wq_b", "part linear"),
    ],
)
def test_what_has_no_kernel_is_refused(config_module: Any, name: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        method(config_module, made(config_module), name)


def test_unknown_modules_are_refused(config_module: Any) -> None:
    with pytest.raises(UnknownName, match=r"layers\.9"):
        method(config_module, made(config_module), "model.layers.9.attn.wq_b")


def test_linears_requested_from_vllm_are_vllms(
    config_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = import_module("vllm.models.deepseek_v4.quant_config").DeepseekV4FP8Config
    monkeypatch.setattr(theirs, "get_quant_method", lambda *_: "their FP8")
    config = made(config_module, parts={"linear": "vllm", "o_proj": "vllm"})
    plain = type(method(config_module, config, f"{LAYER}ffn.shared_experts.down_proj")).__name__
    assert plain == "UnquantizedLinearMethod"
    assert method(config_module, config, f"{LAYER}attn.wq_b") == "their FP8"
    assert method(config_module, config, "model.layers.1.attn.wo_a") == "their FP8"
    with pytest.raises(InvalidArgument, match="no NVFP4 linear"):
        method(config_module, config, f"{LAYER}attn.fused_wqa_wkv")
    assert {each.by for each in config.start.running} == {"vllm"}


def test_vllms_experts_are_those_that_are_stored(
    config_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM chooses by keys of config.json; what the file holds may be something else."""
    theirs = import_module("vllm.models.deepseek_v4.quant_config").DeepseekV4FP8Config
    built = type("Mxfp4MoEMethod", (), {})
    monkeypatch.setattr(theirs, "get_quant_method", lambda *_: built())
    monkeypatch.setattr(config_module, "UnquantizedFusedMoEMethod", lambda _: "plain")
    routed = config_module.RoutedExperts.__new__(config_module.RoutedExperts)
    object.__setattr__(routed, "moe_config", None)
    config = made(config_module, parts={"experts": "vllm"})
    assert type(config.get_quant_method(routed, "model.layers.1.ffn.experts")) is built
    assert config.get_quant_method(routed, "model.layers.2.ffn.experts") == "plain"
    with pytest.raises(LayoutMismatch, match="expert_dtype and moe_quant_algo"):
        config.get_quant_method(routed, f"{LAYER}ffn.experts")


def test_experts_get_our_method_or_a_refusal(config_module: Any) -> None:
    routed = config_module.RoutedExperts.__new__(config_module.RoutedExperts)
    object.__setattr__(routed, "moe_config", SimpleNamespace())
    found = made(config_module).get_quant_method(routed, f"{LAYER}ffn.experts.routed_experts")
    assert type(found).__name__ == "ModelOptOfDegarble"
    with pytest.raises(InvalidArgument, match=r"part experts.*MXFP4"):
        made(config_module).get_quant_method(routed, "model.layers.1.ffn.experts")


def test_what_is_no_linear_is_left_alone(config_module: Any) -> None:
    assert made(config_module).get_quant_method(object(), "model.embed_tokens") is None


def test_vllm_pads_shared_experts_to_our_blocks(config_module: Any) -> None:
    assert made(config_module).weight_block_size == [128, 128]
    config = made(config_module)
    config.start.proven = StartProof("", "", "", {"m": parts.BF16}, {})
    assert config.weight_block_size is None
    before = config_module.DegarbleConfig({"weight_block_size": [128, 128]})
    assert before.weight_block_size == [128, 128]  # asked before anything could be proven


def test_a_config_that_names_no_quantisation_is_taken(config_module: Any) -> None:
    assert config_module.DegarbleConfig().raw == {}  # as vLLM makes it for a checkpoint in BF16


def test_only_v4_is_taken_and_only_where_requested(config_module: Any) -> None:
    take = config_module.DegarbleConfig.override_quantization_method
    v4, other = SimpleNamespace(model_type="deepseek_v4"), SimpleNamespace(model_type="llama")
    assert take({}, "degarble", v4) == "degarble"
    assert take({}, None, v4) is None
    assert take({}, "fp8", other) is None
    with pytest.raises(InvalidArgument, match="llama"):
        take({}, "degarble", other)


# --------------------------------------------------------------------------------------------------
# What the ranks recorded appears in Prometheus' text, if the plugin is active.


def logger(folder: Path) -> Any:
    module = import_module("degarble.harness.vllm.bound.metrics")
    asked = {"degarble": {"told": str(folder)}}
    return module.PartInfo(SimpleNamespace(additional_config=asked, instance_id="x"), 0)


def text() -> str:
    client = import_module("prometheus_client")
    made: str = client.generate_latest().decode()
    return made


def test_nothing_is_shown_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    log_messages.leave(tmp_path, 0, BANNER, RUNNING)
    made = logger(tmp_path)
    made.log_engine_initialized()
    assert made.shown == 0


def test_every_part_of_every_rank_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "degarble")
    for rank in range(2):
        log_messages.leave(tmp_path, rank, BANNER, RUNNING)
    made = logger(tmp_path)
    made.log_engine_initialized()
    made.log_engine_initialized()  # an engine that starts again
    made.record(None, None)
    lines = [line for line in text().splitlines() if line.startswith("degarble_part_info{")]
    assert len(lines) == 4
    assert all(line.endswith(" 1.0") for line in lines)
    assert sum('by="vllm"' in line and 'part="attend"' in line for line in lines) == 2
