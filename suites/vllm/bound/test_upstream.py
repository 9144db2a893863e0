"""Names of vLLM that the plugin imports."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from degarble.harness.base.errors import UnknownName
from degarble.harness.checkpoint.audit.loader.maps import NameOutcome, NameRules
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.model.tensors import tensors_of
from degarble.harness.vllm import contract
from degarble.harness.vllm.proof import EXPERTS_INSIDE, as_stored
from degarble.suites.checkpoint.audit.loader.loader_cases import inventory_of
from degarble.suites.checkpoint.structure_cases import V4, write

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.vllm


# --------------------------------------------------------------------------------------------------
# vLLM as it is installed against the record: a change turns this suite red with its name.

RECORD = contract.read_record()
BUILD = "vllm.v1.attention.backend:AttentionMetadataBuilder.build"


@pytest.mark.parametrize("name", sorted(RECORD))
def test_vllm_is_as_recorded(name: str) -> None:
    assert contract.differences(name, RECORD[name], contract.observe(name)) == []


def test_a_planted_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = import_module("vllm.v1.attention.backend")

    def build(self: object, common_attn_metadata: object, fast_build: bool = False) -> None: ...

    monkeypatch.setattr(backend.AttentionMetadataBuilder, "build", build)
    (text,) = contract.differences(BUILD, RECORD[BUILD], contract.observe(BUILD))
    assert text == f"{BUILD}: parameters gone or changed: ['common_prefix_len'], new: []"


def test_a_planted_abstract_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm.model_executor.layers.quantization.base_config:QuantizationConfig"
    base = import_module(name.partition(":")[0]).QuantizationConfig
    monkeypatch.setattr(base, "__abstractmethods__", base.__abstractmethods__ | {"get_new"})
    (text,) = contract.differences(name, RECORD[name], contract.observe(name))
    assert text.startswith(f"{name}: abstract was ")


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


# --------------------------------------------------------------------------------------------------
# vLLM's own loader of DeepSeek-V4, run on names: each goes where the loader proof says it goes.
#
# The real DeepseekV4ForCausalLM.load_weights, its mapper and DeepseekV4Model.load_weights run on a
# module that has the parameters' names and records who writes to them.

SLOTS = {"w1": 0, "w3": 1, "w2": 0}
FUSED = ("fused_wqa_wkv", "fused_wkv_wgate", "gate_up_proj", "w13_weight", "w2_weight")


class Named(nn.Module):
    """A tree of modules with the parameters of an engine; each records what is written to it."""

    def __init__(self, names: list[str], written: list[tuple[int, str, Any, Any]]) -> None:
        super().__init__()
        for name in names:
            *path, leaf = name.split(".")
            here: nn.Module = self
            for part in path:
                if part not in here._modules:
                    here.add_module(part, nn.Module())
                here = here._modules[part]  # type: ignore[assignment]
            parameter: Any = nn.Parameter(torch.zeros(1), requires_grad=False)
            parameter.weight_loader = self._recorder(name, written)
            here.register_parameter(leaf, parameter)

    @staticmethod
    def _recorder(name: str, written: list[tuple[int, str, Any, Any]]) -> Any:
        def load(
            _: nn.Parameter, weight: torch.Tensor, *given: Any, shard_id: Any = None,
            expert_id: int | None = None, return_success: bool = False,
        ) -> bool:  # fmt: skip
            slot = given[0] if given and expert_id is None else shard_id
            written.append((int(weight.item()), name, SLOTS.get(slot, slot), expert_id))
            return return_success

        return load


def loaded_by_vllm(names: list[str], parameters: list[str], config: Any, expert_dtype: str) -> Any:
    """Run vLLM's loader; return what was written to which parameter, by stored name."""
    vllm = import_module("vllm.models.deepseek_v4.nvidia.model")
    written: list[tuple[int, str, Any, Any]] = []
    inside = [re.sub(r"\.experts\.", f".experts{EXPERTS_INSIDE}.", name) for name in parameters]
    whole: Any = Named(inside, written)
    model: Any = whole._modules["model"]
    layers = nn.ModuleList(model._modules["layers"]._modules.values())
    layer: Any
    for layer in layers:
        layer.ffn.use_native_mega_moe, layer.ffn.n_redundant_experts = False, 0
    model._modules["layers"] = layers
    model.start_layer, model.end_layer = 0, len(layers)
    model.config, model.quant_config, model.use_sequence_parallel = config, None, False
    of_model = vllm.DeepseekV4Model
    cls = type(model.__class__.__name__, (nn.Module,), {
        name: getattr(of_model, name)
        for name in ("load_weights", "get_expert_mapping", "_pad_shared_expert_weight")
    })  # fmt: skip
    model.__class__ = cls
    whole_cls: Any = type(
        "Whole", (Named,), {"load_weights": vllm.DeepseekV4ForCausalLM.load_weights}
    )
    whole.__class__ = whole_cls
    whole.hf_to_vllm_mapper = vllm._make_deepseek_v4_weights_mapper(expert_dtype)
    whole.process_weights_after_loading = lambda: None
    stream = ((name, torch.tensor([float(i)])) for i, name in enumerate(names))
    whole.load_weights(stream)
    return {
        names[number]: (name.replace(EXPERTS_INSIDE, ""), slot, expert)
        for number, name, slot, expert in written
    }


@pytest.fixture(params=["official", "bf16", "nvfp4-experts"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path / "c", V4, request.param)


def test_names_go_where_the_proof_says(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        inventory = inventory_of(checkpoint)
        loader_map = as_stored(inventory, (1, 1, 1))
        engine: Any = loader_map.parameters
        known = sorted(tensor.name for tensor in tensors_of(inventory.config, engine.layout))
        rules, names = NameRules(loader_map, set(known)), sorted(checkpoint.entries)
    config = SimpleNamespace(n_routed_experts=V4.n_routed_experts)
    found = loaded_by_vllm(names, known, config, "fp4")
    reached = set()
    for name in names:
        resolved = rules.resolve(name)
        if resolved.outcome is not NameOutcome.PLACED:
            assert name.startswith("mtp."), name
            assert name not in found, name
            continue
        target, slot, expert = found[name]
        assert target == resolved.target, name
        assert expert == resolved.expert, name
        assert (slot or 0) == (resolved.slot or 0), name
        reached.add(target)
    assert reached == set(known)  # every parameter of the engine is written by somebody
    assert {each for each in FUSED if any(each in name for name in reached)} == set(FUSED)


def test_a_changed_mapping_is_detected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = import_module("vllm.models.deepseek_v4.nvidia.model")
    make = vllm._make_deepseek_v4_weights_mapper

    def planted(expert_dtype: str) -> Any:
        mapper = make(expert_dtype)
        mapper.orig_to_new_substr[".shared_experts.w2"] = ".shared_experts.down"
        return mapper

    monkeypatch.setattr(vllm, "_make_deepseek_v4_weights_mapper", planted)
    with pytest.raises(KeyError, match=r"shared_experts\.down"):
        test_names_go_where_the_proof_says(folder)
