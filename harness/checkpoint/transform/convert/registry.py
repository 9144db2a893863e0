"""Registry of conversions: what `degarble convert --to` offers, with promise and options."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from degarble.harness.base.errors import UnknownName
from degarble.harness.checkpoint.transform.convert.bf16 import to_bf16
from degarble.harness.checkpoint.transform.convert.deepgemm_wo_a import to_deepgemm_wo_a
from degarble.harness.checkpoint.transform.convert.fp8_block import to_fp8_block
from degarble.harness.checkpoint.transform.convert.fused_compressor import to_fused_compressor
from degarble.harness.checkpoint.transform.convert.nvfp4 import to_nvfp4
from degarble.harness.checkpoint.transform.convert.nvfp4_lossless import to_nvfp4_lossless
from degarble.harness.checkpoint.transform.convert.vllm import to_vllm
from degarble.harness.checkpoint.transform.units import Conversion

if TYPE_CHECKING:
    from collections.abc import Mapping

CONVERSIONS: Mapping[str, Conversion] = MappingProxyType(
    {
        each.name: each
        for each in (
            Conversion("bf16", "quantised linears decoded to BF16", ("only",), to_bf16),
            Conversion(
                "fp8-block",
                "linears in FP8, a decode scale for each 128x128 block",
                ("only", "scale"),
                to_fp8_block,
            ),
            Conversion(
                "nvfp4",
                "linears in NVFP4, weights alone (W4A16: no input scales)",
                ("only",),
                to_nvfp4,
            ),
            Conversion(
                "nvfp4-lossless",
                "MXFP4 linears as NVFP4, bit for bit, weights alone",
                ("only",),
                to_nvfp4_lossless,
                returns=True,
            ),
            Conversion(
                "deepgemm-wo-a",
                "wo_a in FP8 [g, r, d] with DeepGEMM's block scales",
                ("only", "gpu", "per", "direction"),
                to_deepgemm_wo_a,
                returns=True,
            ),
            Conversion(
                "fused-compressor",
                "each compressor's kv and gate projections in one BF16 tensor",
                ("only",),
                to_fused_compressor,
                returns=True,
            ),
            Conversion(
                "vllm",
                "vLLM's fused parameters, uncut (its loader splits them over ranks), experts as a"
                " backend's kernels read them",
                ("backend",),
                to_vllm,
                returns=True,
                whole=True,
            ),
        )
    }
)


def conversion_named(name: str) -> Conversion:
    """Return a conversion by name; an unknown name raises with the nearest known ones."""
    if name not in CONVERSIONS:
        raise UnknownName.among("conversion", name, CONVERSIONS)
    return CONVERSIONS[name]
