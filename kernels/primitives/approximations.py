"""Approximate float32 instructions of the GPU: exponential, reciprocal and inverse square root.

Device side only. Arithmetic that uses them takes them as primitives, so that it also runs on
tensors.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.primitives.nvfp4_words import emit

LOG2_E, LOG2_E_REST = 1.4426950216293335, 1.9259629911266175e-08  # float32 and what it leaves out
LN_2 = 0.6931471805599453
LARGEST_POWER = 88.0  # of e; what lies outside of it and its negative gives 0 or 1 as a gate


def exponential(number: Any) -> Any:
    """Return e**number, at most two float32 steps off; a NaN stays one."""
    bound = Float32(LARGEST_POWER)
    number = emit("min.NaN.f32 {$w0}, {$r0}, {$r1};", Float32, number, bound)
    number = emit("max.NaN.f32 {$w0}, {$r0}, {$r1};", Float32, number, Float32(-LARGEST_POWER))
    exponent = ops.multiply_rn(number, LOG2_E)
    rest = ops.fma_rn(number, LOG2_E, ops.multiply_rn(exponent, -1.0))
    rest = ops.fma_rn(number, LOG2_E_REST, rest)
    power = emit("ex2.approx.ftz.f32 {$w0}, {$r0};", Float32, exponent)
    return ops.fma_rn(power, ops.multiply_rn(rest, LN_2), power)


def power(number: Any) -> Any:
    """Return e**number of a number not above 0: within 2**-22, plus 2**-23 of the number's size.

    Meant for softmax weights: the error grows only where the weight is next to nothing.
    """
    return emit("ex2.approx.ftz.f32 {$w0}, {$r0};", Float32, ops.multiply_rn(number, LOG2_E))


def reciprocal(number: Any) -> Any:
    """Return the GPU's reciprocal, at most one float32 step off."""
    return emit("rcp.approx.ftz.f32 {$w0}, {$r0};", Float32, number)


def inverse_root(number: Any) -> Any:
    """Return the GPU's inverse square root, at most two float32 steps off."""
    return emit("rsqrt.approx.ftz.f32 {$w0}, {$r0};", Float32, number)
