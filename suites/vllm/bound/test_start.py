"""A start refuses what is not served, notes what runs, and tells it once it has loaded."""

from __future__ import annotations

import json
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.base.errors import InvalidArgument, UnreadableFile
from degarble.harness.vllm import parts
from degarble.harness.vllm.parts import PluginOptions
from degarble.suites.checkpoint.structure_cases import V4, write

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.vllm


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
    start = module.Start.of(config(folder, degarble={"told": str(tmp_path / "told")}))
    start.kernel("model.layers.0.attn.wq_b", "linear", "BF16", "by rows")
    start.tell()
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
        module.Start.of(asked)


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
