"""Share tensors, implementations and small measures among the suites of block formats.

Cases come from a seed, from Hypothesis and from the edges. Canonical NVFP4 has three
implementations here: definition, compiled twin, scalar codecs. E4M3 has two NaN codes, 0x7F and
0xFF, and which one a library stores is the sign of its machine's NaN, so NaN bytes have a
comparison of their own.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from degarble.harness.formats import quantise as quantise_module
from degarble.harness.formats import scalar_ops
from degarble.harness.formats.codec import pack_nibbles
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.quantise import dequantise, quantise

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.harness.formats.number_formats import BlockFormat

IMPLEMENTATIONS = ("definition", "fast", "scalar")
_THRESHOLD = {"definition": 1 << 62, "fast": 0}


@contextmanager
def implementation(name: str) -> Iterator[None]:
    """Let quantise and dequantise take one path whatever the size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantise_module, "_FAST_FROM_ELEMENTS", _THRESHOLD[name])
        yield


def encode_nvfp4(
    name: str, values_MK: Tensor, encode_scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes, scale bytes and decode scale of the canonical dialect."""
    if name == "scalar":
        return _encode_by_scalars(values_MK.float(), encode_scale)
    with implementation(name):
        q = quantise(values_MK, NVFP4, CANONICAL, encode_scale=encode_scale)
    return q.codes, q.block_scale, q.decode_scale


def roundtrip_nvfp4(name: str, values_MK: Tensor, encode_scale: Tensor) -> Tensor:
    """Quantise and decode on the path of one implementation."""
    with implementation(name):
        return dequantise(quantise(values_MK, NVFP4, encode_scale=encode_scale))


def _encode_by_scalars(
    values_MK: Tensor, encode_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The text that runs inside kernels, here on tensors."""
    x_MCc = values_MK.reshape(*values_MK.shape[:-1], values_MK.shape[-1] // 16, 16)
    magnitude = torch.where(x_MCc.isnan(), 0.0, x_MCc.abs())
    if encode_scale is None:
        encode_scale = scalar_ops.nvfp4_tensor_encode_scale(magnitude.max())
    encode_MC = encode_scale.expand(x_MCc.shape[:-1])
    byte_MC = scalar_ops.nvfp4_block_scale(magnitude.amax(-1), encode_MC)
    factor_MC = scalar_ops.nvfp4_block_encode_scale(byte_MC, encode_MC)
    code_MCc = scalar_ops.nvfp4_encode(x_MCc, factor_MC[..., None].expand(x_MCc.shape))
    codes_MK = code_MCc.flatten(-2).to(torch.uint8)
    return pack_nibbles(codes_MK), byte_MC.to(torch.uint8), encode_scale.reciprocal()


def ordinary_cases(seed: int) -> dict[str, Tensor]:
    """Finite tensors of normal scale, by name, in bfloat16 and float32."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    spread = torch.exp(3 * normal(48, 16)).repeat_interleave(16, dim=-1)
    power = normal(48, 256)
    power[0, 0] = 10.5  # 2688 / 10.5 is a power of two
    outlier = 1e-2 * normal(16, 64)
    outlier[3, 5] = 3e4
    ties = torch.randint(-12, 13, (16, 64), generator=generator) * 0.25
    sparse = normal(16, 64) * (normal(16, 64) > 1)
    sparse[4] = 0.0
    sparse[5] = -0.0
    cases = {
        "normal": normal(48, 256),
        "small": 0.02 * normal(48, 256),
        "large": 300 * normal(48, 256),
        "spread": normal(48, 256) * spread,
        "power_of_two": power.clamp(-10.5, 10.5),
        "outlier": outlier,
        "ties": ties,
        "sparse": sparse,
    }
    return {
        f"{name}_{suffix}": values.to(dtype).contiguous()
        for name, values in cases.items()
        for suffix, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
    }


@st.composite
def rows_of(draw: st.DrawFn, blocks: int, width: int, *, top: int = 20) -> Tensor:
    """`blocks` blocks in one row: block magnitudes 2**-20 to 2**top, zeros of both signs, ties.

    The bulk comes from a drawn seed; what matters most (sizes, zeros, single values) is drawn.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    exponents = draw(st.lists(st.integers(-20, top), min_size=blocks, max_size=blocks))
    density = draw(st.sampled_from([0.0, 0.3, 1.0]))
    coarse = draw(st.booleans())
    spread = draw(st.sampled_from([0, 3, 12]))
    values = rng.uniform(-6, 6, (blocks, width))
    if coarse:
        values = np.round(values * 4) / 4  # ties and exact values are then common
    values *= np.exp2(rng.integers(-spread, 1, (blocks, width)))
    values *= rng.random((blocks, width)) < density
    values *= np.exp2(np.array(exponents))[:, None]
    row = values.astype(np.float32).reshape(1, -1)
    single = st.tuples(st.integers(0, blocks * width - 1), st.floats(-8, 8, width=16))
    for position, number in draw(st.lists(single, max_size=4)):
        row[0, position] = number * 2.0 ** exponents[position // width]
    return torch.from_numpy(row)


def blocks_for(fmt: BlockFormat, blocks: int = 3) -> st.SearchStrategy[Tensor]:
    return rows_of(blocks, fmt.block[1])


def edge_cases() -> dict[str, Tensor]:
    """Tensors that the producers treat differently, in float32."""
    ramp = torch.linspace(-1, 1, 64).reshape(2, 32)
    with_nan, with_infinity = ramp.clone(), ramp.clone()
    with_nan[0, 3] = torch.nan
    with_infinity[0, 3], with_infinity[1, 20] = torch.inf, -torch.inf
    lone = torch.zeros(2, 32)
    lone[0, 0] = 1.0
    return {
        "zeros": torch.zeros(2, 32),
        "negative_zeros": -torch.zeros(2, 32),
        "lone": lone,
        "nan": with_nan,
        "infinity": with_infinity,
        "tiny": ramp * 1e-37,
        "subnormal": ramp * 1e-40,
        "huge": ramp * torch.finfo(torch.float32).max,
    }


def merged_nan(scale_bytes: Tensor) -> Tensor:
    """Give both NaN codes of E4M3 one byte."""
    return torch.where(scale_bytes == 0xFF, 0x7F, scale_bytes)
