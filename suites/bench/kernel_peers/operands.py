"""Operands of our kernels by name, and float64 results of sampled rows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.cli.values import settings_here
from degarble.harness.formats.codec import decode_array, decode_pairs
from degarble.harness.formats.number_formats import E2M1, E4M3, NibbleOrder
from degarble.suites.bench import gpu
from degarble.suites.bench.kernel_peers.contest import OURS, Call, Contender

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

SAMPLED = 8  # rows of a large output that float64 computes


def sample(rows: int, most: int = SAMPLED) -> list[int]:
    """Return evenly spread rows, the first and the last among them."""
    if rows <= most:
        return list(range(rows))
    return [round(place * (rows - 1) / (most - 1)) for place in range(most)]


def ours(
    kernel: str,
    problem: Any,
    given: Callable[[int], Mapping[str, Any]],
    result: Callable[[Mapping[str, Any]], Tensor] = lambda tensors: tensors["out"],
    name: str = OURS,
) -> Contender:
    """Return our kernel as its descriptor launches it: operands that are not given are drawn."""

    def make(number: int) -> Call:
        of = gpu.module(kernel).KERNEL
        tensors = gpu.drawn(of, problem, given(number))
        return Call(partial(of.run, problem, settings_here(), **tensors), lambda: result(tensors))

    return Contender(name, make)


def nvfp4(codes: Tensor, scales: Tensor) -> Tensor:
    """Return codes times linear block scales in float64."""
    values = decode_pairs(codes, E2M1, NibbleOrder.LOW_EVEN, torch.float64)
    return values * decode_array(scales, E4M3).double().repeat_interleave(16, -1)


def fp8_blocks(codes: Tensor, scales: Tensor, rows: int) -> Tensor:
    """Return E4M3 codes times the scales of blocks of `rows` rows and 128 columns, in float64."""
    factors = scales.double().repeat_interleave(rows, 0).repeat_interleave(128, 1)
    return codes.double() * factors[: codes.shape[0], : codes.shape[1]]
