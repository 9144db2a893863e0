"""Compare the RoPE table of each layer of vLLM with the model's own config.

vLLM 0.26 rotates layers without compression by YaRN, which their rope does not have; 0.33 does not.
There the table is replaced, and logged; anywhere else a difference stops the start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import LayoutMismatch
from degarble.harness.vllm.options import OURS
from degarble.harness.vllm.parts import Running

if TYPE_CHECKING:
    from degarble.harness.vllm.bound.start import Start

LOOKED_AT = 1024  # positions; a rope of another kind differs from the first turns on
CLOSE = 2e-3  # float32 angles at those positions are off by 1e-4 at most
MENDED = ("0.26",)


def require_turns(attention: Any, start: Start, series: str) -> None:
    """Compare a layer's table; mend it where vLLM is known to err, refuse it elsewhere."""
    from degarble.harness.backends.cutedsl.rope_tables import table_of  # noqa: PLC0415  imports torch

    config = start.proven.config
    if config is None:
        return
    number = int(attention.prefix.split(".layers.")[1].split(".")[0])
    rope = config.rope(config.layers[number])
    cache = attention.rotary_emb.cos_sin_cache
    count = min(LOOKED_AT, cache.shape[0])
    with torch.device("cpu"):  # vLLM builds its model with the GPU as the default device
        table = table_of(rope, cache.shape[0])
    off = float((cache[:count].cpu().float() - table[:count]).abs().max())
    if off <= CLOSE:
        return
    if series not in MENDED:
        raise LayoutMismatch(
            f"turns of {attention.prefix}", f"off by {off:.3f}",
            f"theta {rope.theta:g}, {'YaRN' if rope.yarn else 'no YaRN'}, as config.json has it",
            "Look for rope_scaling and rope_parameters: vLLM read them another way.",
        )  # fmt: skip
    cache.copy_(table.to(cache))
    told = f"vLLM {series}'s own were off by {off:.3f}"
    start.running.append(Running(attention.prefix, "turns", "", OURS, "table of the config", told))
