"""Linears with and without codes, and the quantisation in front of them, by recipe format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import UnknownName
from degarble.harness.formats.number_formats import BLOCK_FORMATS, NVFP4
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.harness.formats.weight import Weight
from degarble.references import linears
from degarble.references.numerics import Numerics

if TYPE_CHECKING:
    from torch import Tensor

FORMATS = ("NVFP4", "MXFP8", "FP8_1X128_UE8M0", "FP8_1X128_F32")


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_codes_stand_for_the_values_of_the_format(name: str, dtype: torch.dtype, seed: int) -> None:
    x = noise(6, 256, seed=seed).bfloat16()
    scale = torch.tensor(0.003) if name == "NVFP4" else None
    made = linears.quantise_activations(x, name, scale)
    given = {"decode_scale": scale} if scale is not None else {}
    expected = dequantise(quantise(x, BLOCK_FORMATS[name], **given), dtype)  # type: ignore[arg-type]
    assert torch.equal(linears.activation_values(made, name, dtype), expected)
    assert made["codes"].dtype is torch.uint8


def test_without_input_scale_every_token_has_its_own(seed: int) -> None:
    x = noise(5, 64, seed=seed) * torch.tensor([1.0, 1e-3, 1e3, 0.0, 1.0])[:, None]
    made = linears.quantise_activations(x, "NVFP4", None)
    for token in range(5):
        alone = linears.quantise_activations(x[token : token + 1], "NVFP4", None)
        for part, tensor in made.items():
            assert torch.equal(tensor[token : token + 1], alone[part])
    own = x.abs().amax(-1)[:3] / (6 * 448)
    assert torch.allclose(made["tensor_scale"][:3], own, rtol=1e-6)
    values = linears.activation_values(made, "NVFP4", torch.float32)
    error = (values - x).norm(dim=-1)[:3] / x.norm(dim=-1)[:3]
    assert (error < 0.15).all()
    shared = linears.quantise_activations(x, "NVFP4", x.abs().amax() / (6 * 448))
    lost = linears.activation_values(shared, "NVFP4", torch.float32)
    assert not lost[1].any()  # one scale for all would lose the small token


def test_scales_may_belong_to_slots(seed: int) -> None:
    x, scales = noise(3, 2, 32, seed=seed), torch.rand(3, 2) + 0.01
    made = linears.quantise_activations(x, "NVFP4", scales)
    for t in range(3):
        for k in range(2):
            one = quantise(x[t, k][None], NVFP4, decode_scale=scales[t, k])
            assert torch.equal(made["codes"][t, k], one.codes[0])
            assert torch.equal(made["tensor_scale"][t, k], scales[t, k])


def test_product_of_codes_is_exact_and_rounded_once(seed: int) -> None:
    x, w = noise(4, 128, seed=seed), noise(16, 128, seed=seed + 1)
    weight = Weight.of(quantise(w, NVFP4))
    made = linears.quantise_activations(x, "NVFP4", torch.tensor(0.002))
    numerics = Numerics.twin()
    values = linears.activation_values(made, "NVFP4", numerics.products)
    out = linears.matmul(values, weight, numerics)
    exact = values.double() @ weight.values(torch.float64).T
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, exact.bfloat16())
    double = torch.matmul(values.bfloat16(), weight.values(torch.bfloat16).T)
    assert not torch.equal(out, double)  # operands rounded on the way are seen


def test_shared_input_scale_is_the_largest() -> None:
    def weight(scale: float | None) -> Weight:
        return Weight(input_scale=None if scale is None else torch.tensor([scale]))

    assert float(linears.largest_scale([weight(0.1), weight(0.3)]) or 0) == pytest.approx(0.3)
    assert linears.largest_scale([weight(0.1), weight(None)]) is None
    assert linears.largest_scale([]) is None


def test_large_weights_are_converted_in_pieces(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    x, value = noise(3, 8, seed=seed), noise(20, 8, seed=seed + 1).bfloat16()
    whole = linears.product(x, Weight(value=value), torch.float64)
    monkeypatch.setattr(linears, "_CHUNK", 24)
    weight = Weight(value=value)
    assert (linears.product(x, weight, torch.float64) - whole).abs().max() < 1e-15
    assert not weight._decoded  # nothing of it is kept
    rows = linears.table_rows(weight, torch.tensor([3, 0, 3]), torch.float32)
    assert torch.equal(rows, value[[3, 0, 3]].float())
    assert not weight._decoded


def test_unknown_activation_formats_are_refused() -> None:
    with pytest.raises(UnknownName, match="NVFP4"):
        linears.quantise_activations(torch.zeros(2, 16), "NVFP5", None)
