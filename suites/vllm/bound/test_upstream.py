"""vLLM as it is installed against the record: a change turns this suite red with its name."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from degarble.harness.base.errors import UnknownName
from degarble.harness.vllm import contract

pytestmark = pytest.mark.vllm

RECORD = contract.read_record()
BUILD = "vllm.v1.attention.backend:AttentionMetadataBuilder.build"


@pytest.mark.parametrize("name", sorted(RECORD))
def test_vllm_is_as_recorded(name: str) -> None:
    assert contract.differences(name, RECORD[name], contract.observe(name)) == []


def test_a_planted_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = import_module("vllm.v1.attention.backend")

    def build(self: object, common_attn_metadata: object, fast_build: bool = False) -> None: ...

    monkeypatch.setattr(backend.AttentionMetadataBuilder, "build", build)
    (told,) = contract.differences(BUILD, RECORD[BUILD], contract.observe(BUILD))
    assert told == f"{BUILD}: parameters gone or changed: ['common_prefix_len'], new: []"


def test_a_planted_abstract_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm.model_executor.layers.quantization.base_config:QuantizationConfig"
    base = import_module(name.partition(":")[0]).QuantizationConfig
    monkeypatch.setattr(base, "__abstractmethods__", base.__abstractmethods__ | {"get_new"})
    (told,) = contract.differences(name, RECORD[name], contract.observe(name))
    assert told.startswith(f"{name}: abstract was ")


def test_an_object_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = import_module("vllm.models.deepseek_v4.nvidia.model")
    name = "vllm.models.deepseek_v4.nvidia.model:_select_dsv4_attn_cls"
    monkeypatch.delattr(model, "_select_dsv4_attn_cls")
    with pytest.raises(UnknownName, match="_select_dsv4_attn_cls"):
        contract.observe(name)


def test_our_classes_can_be_made() -> None:
    bound = "degarble.harness.vllm.bound"
    for module, name in (
        ("config", "DegarbleConfig"), ("linears", "Bf16Linear"), ("linears", "Fp8Linear"),
        ("linears", "Nvfp4Linear"), ("attention", "DegarbleAttention"),
        ("attention", "DegarbleBackend"),
        ("attention", "MetadataBuilder"), ("attention", "WindowMetadataBuilder"),
        ("model", "DegarbleDeepseekV4"), ("metrics", "PartInfo"),
    ):  # fmt: skip
        made = getattr(import_module(f"{bound}.{module}"), name)
        assert not inspect.isabstract(made), name
    # vLLM never makes an object of this one, and leaves get_impl_cls open itself.
    window = import_module(f"{bound}.attention").WindowBackend
    assert window.__abstractmethods__ == window.__base__.__abstractmethods__
