"""Baselines of the NVFP4 benches: packages that a user would call today, by their public entries.

They are nvidia-modelopt, compressed-tensors and torchao as installed, the textbook version, and
ml_dtypes. A decoder gets codes, E4M3 scale bytes and the decode scale of the tensor; a quantiser
gets BF16 values and computes every scale itself, as ours does. What can be prepared once (wrapping
the bytes, a scheme, the encode direction) is prepared outside of the measured call. A package that
is absent raises ModuleNotFoundError, and the bench reports it.

The packages warn when they are imported; that is silenced here, and nothing else.
"""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    Decoder = Callable[[Tensor, Tensor, Tensor], Callable[[], Tensor]]
    Quantiser = Callable[[Tensor], Callable[[], tuple[Tensor, Tensor]]]

BLOCK = 16


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings and log lines of the packages while they are imported and warmed up."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def textbook_decoder(codes: Tensor, scales: Tensor, decode_scale: Tensor) -> Callable[[], Tensor]:
    """Nibble index arrays, stack, table, scale, in the order of the definition."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

    def call() -> Tensor:
        low, high = (codes & 0xF).long(), (codes >> 4).long()
        values = table[torch.stack((low, high), dim=-1)].view(*scales.shape, BLOCK)
        block_scale = scales.view(torch.float8_e4m3fn).float().unsqueeze(-1)
        return (values * block_scale * decode_scale).bfloat16().flatten(-2)

    return call


def torchao_decoder(codes: Tensor, scales: Tensor, decode_scale: Tensor) -> Callable[[], Tensor]:
    """NVFP4Tensor.dequantize."""
    torchao = import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    tensor = torchao.NVFP4Tensor(
        codes, scales.view(torch.float8_e4m3fn), BLOCK, torch.bfloat16, decode_scale
    )
    decoded: Callable[[], Tensor] = partial(tensor.dequantize, torch.bfloat16)
    return decoded


def _compressed_tensors() -> tuple[Any, Any]:
    """Return the NVFP4 compressor and the scheme that it takes."""
    compressors = import_module("compressed_tensors.compressors.nvfp4.base")
    schemes = import_module("compressed_tensors.quantization")
    preset = import_module("compressed_tensors.quantization.quant_scheme").NVFP4
    scheme = schemes.QuantizationScheme(targets=["Linear"], **preset)
    return compressors.NVFP4PackedCompressor, scheme


def compressed_tensors_decoder(
    codes: Tensor, scales: Tensor, decode_scale: Tensor
) -> Callable[[], Tensor]:
    """NVFP4PackedCompressor.decompress."""
    compressor, scheme = _compressed_tensors()
    state = {
        "weight_packed": codes,
        "weight_scale": scales.view(torch.float8_e4m3fn),
        "weight_global_scale": decode_scale.reciprocal().reshape(1),
    }
    return lambda: compressor.decompress(state, scheme)["weight"]


def modelopt_decoder(codes: Tensor, scales: Tensor, decode_scale: Tensor) -> Callable[[], Tensor]:
    """NVFP4QTensor.dequantize; its fast=True is a Triton kernel for GPUs."""
    modelopt = import_module("modelopt.torch.quantization.qtensor")
    shape = torch.Size((*codes.shape[:-1], codes.shape[-1] * 2))
    tensor = modelopt.NVFP4QTensor(shape, torch.bfloat16, codes)
    block_scale = scales.view(torch.float8_e4m3fn)

    def call() -> Tensor:
        values: Tensor = tensor.dequantize(
            dtype=torch.bfloat16,
            scale=block_scale,
            double_scale=decode_scale,
            block_sizes={-1: BLOCK},
        )
        return values

    return call


def torchao_quantiser(values: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """Two-level NVFP4Tensor.to_nvfp4, tensor scale from the amax."""
    torchao = import_module("torchao.prototype.mx_formats.nvfp4_tensor")

    def call() -> tuple[Tensor, Tensor]:
        scale = torchao.per_tensor_amax_to_scale(values.abs().max())
        tensor = torchao.NVFP4Tensor.to_nvfp4(values, per_tensor_scale=scale)
        return tensor.qdata, tensor.scale.view(torch.uint8)

    return call


def compressed_tensors_quantiser(values: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """The formulas of its observer, then NVFP4PackedCompressor.compress."""
    compressor, scheme = _compressed_tensors()
    formulas = import_module("compressed_tensors.quantization.utils")

    def call() -> tuple[Tensor, Tensor]:
        encode_scale = formulas.generate_gparam(*torch.aminmax(values))
        lowest, highest = torch.aminmax(values.view(*values.shape[:-1], -1, BLOCK), dim=-1)
        scale, _ = formulas.calculate_qparams(
            lowest, highest, scheme.weights, global_scale=encode_scale
        )
        state = {"weight": values, "weight_scale": scale, "weight_global_scale": encode_scale}
        state = compressor.compress(state, scheme)
        return state["weight_packed"], state["weight_scale"].view(torch.uint8)

    return call


def modelopt_quantiser(values: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """NVFP4QTensor.quantize, nothing given."""
    modelopt = import_module("modelopt.torch.quantization.qtensor")

    def call() -> tuple[Tensor, Tensor]:
        tensor, scale, _ = modelopt.NVFP4QTensor.quantize(values, BLOCK)
        return tensor._quantized_data, scale.view(torch.uint8)

    return call


def ml_dtypes_round_trip(values: Tensor) -> Callable[[], object]:
    """Values to ml_dtypes.float4_e2m1fn and back, in the dtype of the values."""
    ml_dtypes = import_module("ml_dtypes")
    if values.dtype is torch.bfloat16:
        array = values.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    else:
        array = values.numpy()
    return lambda: array.astype(ml_dtypes.float4_e2m1fn).astype(array.dtype)


DECODERS: dict[str, Decoder] = {
    "textbook": textbook_decoder,
    "torchao": torchao_decoder,
    "compressed-tensors": compressed_tensors_decoder,
    "nvidia-modelopt": modelopt_decoder,
}

QUANTISERS: dict[str, Quantiser] = {
    "torchao": torchao_quantiser,
    "compressed-tensors": compressed_tensors_quantiser,
    "nvidia-modelopt": modelopt_quantiser,
}
