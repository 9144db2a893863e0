"""Lets compressed-tensors write and decode weights, in a process of its own.

Owns the calls into the installed package: its observer formulas and its compressor make a state
with the names that its checkpoints have, and its own decoder says what the values are. (ModelOpt
decodes in the suites of formats; its names are of its exporter, which needs a whole model.)
Started as `python -m degarble.suites.checkpoint.view.reading_oracles VALUES STATE DECODED`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from torch import Tensor

    State = dict[str, Tensor]


def compressed_tensors(values_MK: Tensor) -> tuple[State, Tensor]:
    """The state that NVFP4PackedCompressor.compress returns, and what decompress makes of it."""
    compressor = import_module("compressed_tensors.compressors.nvfp4.base").NVFP4PackedCompressor
    schemes = import_module("compressed_tensors.quantization.quant_scheme")
    formulas = import_module("compressed_tensors.quantization.utils")
    scheme = schemes.QuantizationScheme(targets=["Linear"], **schemes.NVFP4)
    encode_scale = formulas.generate_gparam(*torch.aminmax(values_MK))
    blocks = values_MK.reshape(*values_MK.shape[:-1], -1, 16)
    scale, _ = formulas.calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=encode_scale
    )
    state = {
        "weight": values_MK.clone(),
        "weight_scale": scale,
        "weight_global_scale": encode_scale,
        "input_global_scale": torch.tensor([4.0]),
    }
    state = compressor.compress(state, scheme)
    return state, compressor.decompress(dict(state), scheme)["weight"]


def main(source: str, target: str, decoded: str) -> None:
    """Write one checkpoint of all modules, and the package's own values beside it."""
    torch.set_num_threads(1)
    states: State = {}
    values: State = {}
    for module, values_MK in load_file(source).items():
        state, values[module] = compressed_tensors(values_MK)
        states |= {f"{module}.{name}": each.contiguous() for name, each in state.items()}
    save_file(states, target)
    save_file({name: each.float().contiguous() for name, each in values.items()}, decoded)


if __name__ == "__main__":
    main(*sys.argv[1:])
