"""Run one external quantiser over all cases at once, in a process of its own.

The quantisers are nvidia-modelopt, compressed-tensors and torchao as installed. They import widely
and warn, so suites start `python -m degarble.suites.formats.dialect_oracles NAME IN OUT` once and
read codes, scales and decoded values from a safetensors file. Nothing is corrected here: what the
package returns is the fact.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Result = dict[str, Tensor]


TORCHAO_NVFP4 = "torchao.prototype.mx_formats.nvfp4_tensor"


def modelopt(values_MK: Tensor) -> Result:
    """ModelOpt's weight path: NVFP4QTensor.quantize, nothing given."""
    package = import_module("modelopt.torch.quantization.qtensor")
    quantised, block_scale, tensor_scale = package.NVFP4QTensor.quantize(values_MK.clone(), 16)
    values = quantised.dequantize(
        dtype=torch.float32, scale=block_scale, double_scale=tensor_scale, block_sizes={-1: 16}
    )
    return {
        "codes": quantised._quantized_data,
        "block_scale": block_scale.view(torch.uint8),
        "tensor_scale": tensor_scale,
        "values": values,
    }


def compressed_tensors(values_MK: Tensor) -> Result:
    """Eager weight path of compressed-tensors: observer formulas, then the NVFP4 compressor."""
    compressor = import_module("compressed_tensors.compressors.nvfp4.base").NVFP4PackedCompressor
    schemes = import_module("compressed_tensors.quantization.quant_scheme")
    formulas = import_module("compressed_tensors.quantization.utils")
    scheme = schemes.QuantizationScheme(targets=["Linear"], **schemes.NVFP4)
    lowest, highest = torch.aminmax(values_MK)
    encode_scale = formulas.generate_gparam(lowest, highest)
    blocks = values_MK.reshape(*values_MK.shape[:-1], -1, 16)
    block_scale, _ = formulas.calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=encode_scale
    )
    state = {
        "weight": values_MK.clone(),
        "weight_scale": block_scale,
        "weight_global_scale": encode_scale,
    }
    state = compressor.compress(state, scheme)
    decoded = compressor.decompress(dict(state), scheme)["weight"]
    return {
        "codes": state["weight_packed"],
        "block_scale": state["weight_scale"].view(torch.uint8),
        "tensor_scale": encode_scale.reshape(()),
        "values": decoded,
    }


def _torchao(values_MK: Tensor, tensor_scale: Tensor | None) -> Result:
    tensor_class = import_module(TORCHAO_NVFP4).NVFP4Tensor
    quantised = tensor_class.to_nvfp4(values_MK.contiguous(), per_tensor_scale=tensor_scale)
    return {
        "codes": quantised.qdata,
        "block_scale": quantised.scale.view(torch.uint8),
        "tensor_scale": torch.ones(()) if tensor_scale is None else tensor_scale,
        "values": quantised.dequantize(torch.float32),
    }


def torchao(values_MK: Tensor) -> Result:
    """Two-level scaling of torchao, tensor scale from the amax as its workflow computes it."""
    formulas = import_module(TORCHAO_NVFP4)
    return _torchao(values_MK, formulas.per_tensor_amax_to_scale(values_MK.abs().max()))


def torchao_one_level(values_MK: Tensor) -> Result:
    """One-level scaling of torchao: no per-tensor scale."""
    return _torchao(values_MK, None)


def _torchao_mx(values_MK: Tensor, dtype: torch.dtype) -> Result:
    mode = import_module("torchao.prototype.mx_formats.config").ScaleCalculationMode.RCEIL
    package = import_module("torchao.prototype.mx_formats.mx_tensor")
    scale, codes = package.to_mx(values_MK.contiguous(), dtype, 32, mode)
    values = package.to_dtype(codes, scale, dtype, 32, torch.float32)
    return {
        "codes": codes.view(torch.uint8),
        "block_scale": scale.view(torch.uint8),
        "tensor_scale": torch.ones(()),
        "values": values,
    }


def torchao_mxfp4(values_MK: Tensor) -> Result:
    """MXFP4 of torchao, scales rounded up."""
    return _torchao_mx(values_MK, torch.float4_e2m1fn_x2)


def torchao_mxfp8(values_MK: Tensor) -> Result:
    """MXFP8 of torchao, scales rounded up."""
    return _torchao_mx(values_MK, torch.float8_e4m3fn)


ORACLES: dict[str, dict[str, Callable[[Tensor], Result]]] = {
    "nvidia-modelopt": {"modelopt": modelopt},
    "compressed-tensors": {"compressed_tensors": compressed_tensors},
    "torchao": {
        "torchao": torchao,
        "torchao_one_level": torchao_one_level,
        "torchao_mxfp4": torchao_mxfp4,
        "torchao_mxfp8": torchao_mxfp8,
    },
}


def main(package: str, source: str, target: str) -> None:
    """Run every path of one package over every case and save what it returned."""
    torch.set_num_threads(1)
    cases = load_file(source)
    results: dict[str, Tensor] = {}
    for path, quantise in ORACLES[package].items():
        for case, values_MK in cases.items():
            for field, tensor in quantise(values_MK).items():
                results[f"{path}/{case}/{field}"] = tensor.detach().contiguous().clone()
    save_file(results, target, metadata={"version": version(package)})


if __name__ == "__main__":
    main(*sys.argv[1:])
