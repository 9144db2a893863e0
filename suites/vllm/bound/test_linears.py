"""Our methods in vLLM's own linears: its loader fills them, and a kernel gets what it reads."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, PartnersMismatch
from degarble.kernels.runtime.modules import module_of
from degarble.suites.vllm.bound import stand_ins

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.vllm

INNER, OUTPUTS = 256, (128, 256)


@pytest.fixture
def linears(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with the kernels' definitions in their place."""
    module = import_module("degarble.harness.vllm.bound.linears")
    for name in ("by_nvfp4", "by_w4a16", "by_fp8"):
        monkeypatch.setattr(module, name, getattr(stand_ins, name))
    monkeypatch.setattr(module, "by_bf16", stand_ins.product)
    stand_ins.one_rank(monkeypatch)
    return module


def fused(make: Callable[[str], Any]) -> Any:
    """A MergedColumnParallelLinear of vLLM with one of our methods."""
    base = import_module("vllm.model_executor.layers.quantization.base_config")
    linear = import_module("vllm.model_executor.layers.linear")
    config_of = import_module("vllm.config")
    methods = {
        name: (lambda *_, **__: None) for name in base.QuantizationConfig.__abstractmethods__
    }
    given = type("Given", (base.QuantizationConfig,), {
        **methods, "get_quant_method": lambda _, __, prefix: make(prefix),
    })  # fmt: skip
    cpu = config_of.DeviceConfig(device="cpu")
    with config_of.set_current_vllm_config(config_of.VllmConfig(device_config=cpu)):
        return linear.MergedColumnParallelLinear(
            INNER, list(OUTPUTS), bias=False, quant_config=given(), disable_tp=True,
            prefix="model.layers.0.attn.fused_wqa_wkv", params_dtype=torch.bfloat16,
        )  # fmt: skip


def load(layer: Any, name: str, *parts: torch.Tensor) -> None:
    parameter = getattr(layer, name)
    for slot, part in enumerate(parts):
        parameter.weight_loader(parameter, part, slot)


def rows(count: int = 5) -> torch.Tensor:
    made = torch.Generator().manual_seed(1)
    return torch.randn(count, INNER, generator=made).to(torch.bfloat16)


def test_bf16(linears: Any) -> None:
    layer = fused(linears.Bf16Linear)
    weights = [torch.randn(outputs, INNER).to(torch.bfloat16) for outputs in OUTPUTS]
    load(layer, "weight", *weights)
    layer.quant_method.process_weights_after_loading(layer)
    made, _ = layer(rows())
    assert torch.equal(made, stand_ins.product(rows(), torch.cat(weights)))


def nvfp4(
    linears: Any, scales: tuple[float, float] = (0.25, 0.25), quantises: bool = True
) -> tuple[Any, torch.Tensor]:
    layer = fused(lambda prefix: linears.Nvfp4Linear(prefix, quantises=quantises))
    parts = [stand_ins.random_nvfp4(i, outputs, INNER) for i, outputs in enumerate(OUTPUTS)]
    load(layer, "weight", *(codes for codes, _ in parts))
    load(layer, "weight_scale", *(block for _, block in parts))
    load(layer, "weight_scale_2", *map(torch.tensor, scales))
    if quantises:
        load(layer, "input_scale", torch.tensor(0.5), torch.tensor(2.0))
    wanted = torch.cat(
        [stand_ins.decoded(*part, torch.tensor(s)) for part, s in zip(parts, scales, strict=True)]
    )
    return layer, wanted


def test_nvfp4(linears: Any) -> None:
    layer, wanted = nvfp4(linears)
    layer.quant_method.process_weights_after_loading(layer)
    made, _ = layer(rows().view(1, 5, INNER))
    assert torch.equal(made, stand_ins.product(rows(), wanted).view(1, 5, -1))
    assert layer.input_scale.tolist() == [2.0]  # the larger one: nothing is clipped


def test_nvfp4_with_bf16_activations_goes_in_pieces(linears: Any) -> None:
    layer, wanted = nvfp4(linears, quantises=False)
    assert not hasattr(layer, "input_scale")
    layer.quant_method.process_weights_after_loading(layer)
    made, _ = layer(rows(130))
    assert torch.equal(made, stand_ins.product(rows(130), wanted))


def test_partners_with_two_tensor_scales_are_refused(linears: Any) -> None:
    layer, _ = nvfp4(linears, scales=(0.25, 0.5))
    with pytest.raises(PartnersMismatch, match=r"fused_wqa_wkv\.weight_scale_2"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_2", "input_scale"])
def test_scales_that_never_came_are_refused(linears: Any, name: str) -> None:
    layer, _ = nvfp4(linears)
    fresh = fused(lambda prefix: linears.Nvfp4Linear(prefix, quantises=True))
    setattr(layer, name, getattr(fresh, name))
    with pytest.raises(InvalidArgument, match=rf"{name} = '\d+ of \d+ not finite'"):
        layer.quant_method.process_weights_after_loading(layer)


def fp8(linears: Any, powers_of_two: bool) -> tuple[Any, torch.Tensor]:
    layer = fused(lambda prefix: linears.Fp8Linear(prefix, powers_of_two=powers_of_two))
    codes = [torch.randn(n, INNER).to(torch.float8_e4m3fn) for n in OUTPUTS]
    scales = [torch.tensor([[0.5, 2.0]] * (n // 128)) * (i + 1) for i, n in enumerate(OUTPUTS)]
    if powers_of_two:
        stored = [scale.to(torch.float8_e8m0fnu) for scale in scales]
        assert all(torch.equal(a.float(), b) for a, b in zip(stored, scales, strict=True))
        scales = stored
    load(layer, "weight", *codes)
    load(layer, "weight_scale_inv", *scales)
    whole = torch.cat([scale.float() for scale in scales])
    spread = whole.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return layer, torch.cat([code.float() for code in codes]) * spread


@pytest.mark.parametrize("powers_of_two", [True, False])
def test_fp8(linears: Any, monkeypatch: pytest.MonkeyPatch, powers_of_two: bool) -> None:
    asked = []

    def quantise(x: torch.Tensor, group: int, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append((group, given["use_ue8m0"]))
        return x.to(torch.float8_e4m3fn), torch.full((x.shape[0], INNER // 128), 1.0)

    monkeypatch.setattr(linears, "per_token_group_quant_fp8", quantise)
    layer, wanted = fp8(linears, powers_of_two)
    layer.quant_method.process_weights_after_loading(layer)
    made, _ = layer(rows())
    x = rows().to(torch.float8_e4m3fn).float()
    assert torch.equal(made, stand_ins.product(x, wanted))
    assert asked == [(128, powers_of_two)]


def test_fp8_scales_that_never_came_are_refused(linears: Any) -> None:
    layer, _ = fp8(linears, powers_of_two=False)
    fresh = fused(lambda prefix: linears.Fp8Linear(prefix, powers_of_two=False))
    layer.weight_scale_inv = fresh.weight_scale_inv
    with pytest.raises(InvalidArgument, match="weight_scale_inv"):
        layer.quant_method.process_weights_after_loading(layer)


def test_bias_and_other_dtypes_are_refused(linears: Any) -> None:
    layer = fused(linears.Bf16Linear)
    with pytest.raises(InvalidArgument, match="bias of"):
        layer.quant_method.apply(layer, rows(), torch.zeros(1))
    with pytest.raises(DtypeMismatch, match=r"float16|float32"):
        layer.quant_method.apply(layer, rows().float())


def test_an_inner_extent_that_cuts_a_block_is_refused(linears: Any) -> None:
    method = linears.Nvfp4Linear("m", quantises=True)
    with pytest.raises(InvalidArgument, match="multiple of 32"):
        method.make_parameters(torch.nn.Module(), (48, [16], 48, 16), torch.bfloat16, None)


@pytest.mark.parametrize(("target", "stem"), [("sm_90a", "sm90"), ("sm_100a", "sm100")])
def test_the_gpu_decides_whose_gemm_runs(
    linears: Any, monkeypatch: pytest.MonkeyPatch, target: str, stem: str
) -> None:
    targets = import_module("degarble.kernels.runtime.targets")
    monkeypatch.setattr(targets, "target_of_device", lambda _: targets.TARGETS[target])
    monkeypatch.setattr(linears, "import_module", lambda name: name)
    for gemm in ("gemm_bf16", "gemm_fp8_block", "gemm_nvfp4"):
        name = linears.for_gpu(gemm, torch.zeros(1))
        assert name == module_of(f"{stem}_{gemm}")
        assert find_spec(name), name
