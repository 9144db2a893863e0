"""NVFP4 experts: vLLM's own loader fills our parameters, and the kernels get what they read."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.suites.vllm.bound import stand_ins

pytestmark = pytest.mark.vllm

EXPERTS, HIDDEN, WIDTH, GLOBAL = 3, 128, 64, 4
LOCAL = {0: 0, 1: -1, 2: 1, 3: 2}  # expert 1 lives elsewhere


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A RoutedExperts of vLLM, without its own construction, with our method's parameters."""
    of_vllm = import_module("vllm.model_executor.layers.fused_moe.routed_experts").RoutedExperts
    experts = import_module("degarble.harness.vllm.bound.experts")
    stand_ins.one_rank(monkeypatch)
    made = of_vllm.__new__(of_vllm)
    torch.nn.Module.__init__(made)
    made.quant_config = None
    made._fused_shared_expert_quantizer = None
    made.moe_config = SimpleNamespace(
        tp_rank=0, tp_size=1, is_act_and_mul=True, tp_shard_with_padding=False,
        num_logical_experts=GLOBAL, moe_parallel_config=SimpleNamespace(tp_size=1),
    )  # fmt: skip
    made.expert_map_manager = SimpleNamespace(map_global_to_local=LOCAL.__getitem__)
    made.quant_method = experts.ModelOptOfDegarble("model.layers.0.ffn.experts", made.moe_config)
    made.quant_method.create_weights(
        layer=made, num_experts=EXPERTS, hidden_size=HIDDEN, unpadded_hidden_size=HIDDEN,
        intermediate_size_per_partition=WIDTH, params_dtype=torch.bfloat16,
        weight_loader=made.weight_loader, global_num_experts=GLOBAL,
    )  # fmt: skip
    return made


def stored(expert: int, name: str) -> dict[str, torch.Tensor]:
    rows, inner = (HIDDEN, WIDTH) if name == "w2" else (WIDTH, HIDDEN)
    number = expert * 3 + int(name[1])
    codes, scales = stand_ins.random_nvfp4(number, rows, inner)
    return {
        "weight": codes,
        "weight_scale": scales,
        "weight_scale_2": torch.tensor(0.125 * number),
        "input_scale": torch.tensor(0.5 * number),
    }


def load(layer: Any, without: tuple[int, str, str] | None = None) -> None:
    for expert, here in LOCAL.items():
        for name in ("w1", "w2", "w3"):
            for part, tensor in stored(expert, name).items():
                fused = ("w2_" if name == "w2" else "w13_") + part
                parameter = getattr(layer, fused)
                if (expert, name, part) != without:
                    done = parameter.weight_loader(
                        parameter, tensor, f"experts.{fused}", shard_id=name, expert_id=expert,
                        return_success=True,
                    )  # fmt: skip
                    assert done == (here >= 0)


def test_what_vllm_loads_is_what_the_kernels_read(layer: Any) -> None:
    load(layer)
    layer.quant_method.process_weights_after_loading(layer)
    for expert, here in LOCAL.items():
        if here < 0:
            continue
        for name, slot in (("w1", 0), ("w3", 1), ("w2", 0)):
            fused, part = (
                ("w2", stored(expert, name)) if name == "w2" else ("w13", stored(expert, name))
            )
            rows, inner = part["weight"].shape[0], part["weight"].shape[1] * 2
            codes = getattr(layer, f"{fused}_weight").data[here]
            storage = getattr(layer, f"{fused}_weight_scale").data[here]
            scale = getattr(layer, f"{fused}_weight_scale_2").data[here]
            if fused == "w13":
                codes, storage, scale = codes.view(2, rows, -1)[slot], storage[slot], scale[slot]
            linear = stand_ins.linear_order(storage, rows, inner // stand_ins.BLOCK)
            found = stand_ins.decoded(codes, linear, scale)
            wanted = stand_ins.decoded(part["weight"], part["weight_scale"], part["weight_scale_2"])
            assert torch.equal(found, wanted), (expert, name)
        both = torch.stack([stored(expert, name)["input_scale"] for name in ("w1", "w3")])
        assert layer.w13_input_scale.data[here] == both.max()
        assert layer.w2_input_scale.data[here] == stored(expert, "w2")["input_scale"]


@pytest.mark.parametrize("part", ["weight_scale", "weight_scale_2", "input_scale"])
@pytest.mark.parametrize("name", ["w1", "w2", "w3"])
def test_a_scale_that_never_came_is_refused(layer: Any, name: str, part: str) -> None:
    load(layer, without=(2, name, part))
    with pytest.raises(InvalidArgument, match=rf"{part} = '\d+ of \d+ not finite'"):
        layer.quant_method.process_weights_after_loading(layer)


def test_vllm_reads_the_name_of_our_class(layer: Any) -> None:
    """Without "ModelOpt" in it, the scale of w3 would overwrite the one of w1, in silence."""
    kind = type(layer.quant_method)
    renamed = type("Renamed", (kind,), {})
    layer.quant_method.__class__ = renamed
    load(layer)
    assert len(set(layer.w13_input_scale.data[0].tolist())) == 1


def test_routing_weights_on_the_input_are_refused(layer: Any) -> None:
    layer.apply_router_weight_on_input = True
    x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
    with pytest.raises(InvalidArgument, match="behind w2"):
        layer.quant_method.apply(layer, x, x, x, None, None)
