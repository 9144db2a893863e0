"""Plant each fault that the audit of numbers has to name, with its rule and its location."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from degarble.harness.checkpoint.audit import value_rules as rules_numbers
from degarble.harness.formats.layouts import SWIZZLE_128X4, to_layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.harness.checkpoint.audit.rules import AuditRule
    from degarble.suites.checkpoint.audit.planted_numbers import Bytes

W1 = "layers.1.ffn.experts.2.w1"
W3 = "layers.1.ffn.experts.2.w3"
W2 = "layers.1.ffn.experts.2.w2"
DRAFTED = "mtp.0.ffn.experts.1.w1"
OTHER = "layers.2.ffn.experts.4.w1"
NOISE = np.random.default_rng(7)


def _sentinel(files: Bytes) -> None:
    files[f"{W1}.weight_scale_2"].view(np.uint32)[:] = 0x7F7F7F7F


def _one_nan(files: Bytes) -> None:
    files[f"{W1}.weight_scale"][3, 5] = 0x7F


def _one_negative(files: Bytes) -> None:
    files[f"{W1}.weight_scale"][3, 5] |= 0x80


def _noise_scales(files: Bytes) -> None:
    scale = files[f"{DRAFTED}.scale"]
    scale[...] = NOISE.integers(0, 255, scale.shape, np.uint8)


def _noise_codes(files: Bytes) -> None:
    codes = files["embed.weight"]
    codes[...] = NOISE.integers(0, 1 << 16, codes.shape, np.uint16)


def _swizzled(files: Bytes) -> None:
    scale = files[f"{W1}.weight_scale"]
    stored = torch.from_numpy(np.array(scale))
    scale[...] = to_layout(stored, SWIZZLE_128X4).reshape(stored.shape).numpy()


def _foreign_scales(files: Bytes) -> None:
    files[f"{W1}.weight_scale"][...] = files[f"{OTHER}.weight_scale"]


def _swapped_nibbles(name: str) -> Callable[[Bytes], None]:
    def plant(files: Bytes) -> None:
        codes = files[f"{name}.weight"]
        codes[...] = (codes >> 4) | (codes << 4)

    return plant


def _swap_half(files: Bytes) -> None:
    codes = files[f"{W1}.weight"]
    codes[: len(codes) // 2] = (codes[: len(codes) // 2] >> 4) | (codes[: len(codes) // 2] << 4)


def _copied(files: Bytes) -> None:
    for part in ("weight", "weight_scale", "weight_scale_2"):
        files[f"{W1}.{part}"][...] = files[f"{OTHER}.{part}"]


def _permuted(files: Bytes) -> None:
    order = NOISE.permutation(256)
    for part in ("weight", "weight_scale"):
        files[f"{W1}.{part}"][...] = files[f"{OTHER}.{part}"][order]


def _rows(first: int, last: int) -> Callable[[Bytes], None]:
    def plant(files: Bytes) -> None:
        files[f"{W1}.weight"][first:last] = 0

    return plant


def _all(part: str, value: float, name: str = W1) -> Callable[[Bytes], None]:
    return lambda files: files.set(f"{name}.{part}", value)


def _times(part: str, factor: Callable[[float], float], name: str = W1) -> Callable[[Bytes], None]:
    def plant(files: Bytes) -> None:
        scale = files[f"{name}.{part}"]
        scale[...] = factor(float(scale[0]))

    return plant


def all_divisors_stored(files: Bytes) -> None:
    for layer in range(3):
        for expert in range(6):
            for w in ("w1", "w2", "w3"):
                scale = files[f"layers.{layer}.ffn.experts.{expert}.{w}.weight_scale_2"]
                scale[...] = 1 / scale


def _dead(files: Bytes) -> None:
    for name in (W1, W2, W3):
        files.set(f"{name}.weight_scale_2", 1e-23)


def _clipped(files: Bytes) -> None:
    scale = files[f"{W1}.weight_scale"]
    scale[...] = np.where((scale >> 3) >= 13, 0x7E, scale)


def _some_scales(byte: int, share: float) -> Callable[[Bytes], None]:
    def plant(files: Bytes) -> None:
        scale = files[f"{W1}.weight_scale"]
        scale[NOISE.random(scale.shape) < share] = byte

    return plant


def _wide_amax(files: Bytes) -> None:
    files[f"{W1}.weight_scale"][...] -= 5 << 3
    _times("weight_scale_2", lambda s: s * 32)(files)


def _far_down(files: Bytes) -> None:
    """Block scales 2^11 smaller, the tensor scale as much larger."""
    scale = files[f"{W1}.weight_scale"]
    values = torch.from_numpy(np.array(scale)).view(torch.float8_e4m3fn).float()
    scale[...] = (values * 2.0**-11).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    _times("weight_scale_2", lambda s: s * 2**11)(files)


def _unreached(files: Bytes) -> None:
    names = [
        f"layers.{layer}.ffn.experts.{e}.w1.input_scale" for layer in range(3) for e in range(6)
    ]
    largest = max(float(files[name][0]) for name in names)
    files.set(f"{W1}.input_scale", largest)


def _all_inputs_one(files: Bytes) -> None:
    for layer in range(3):
        for expert in range(6):
            for w in ("w1", "w3"):
                files.set(f"layers.{layer}.ffn.experts.{expert}.{w}.input_scale", 1.0)


def _half_of_the_columns(files: Bytes) -> None:
    codes = files["layers.1.attn.wo_b.weight"]
    codes[:, codes.shape[1] // 2 :] = 0


def _low_blocks(files: Bytes) -> None:
    files[f"{W1}.weight"][:13] &= 0xBB  # 7 becomes 3, in one row of twenty


def _others_traces(files: Bytes) -> None:
    for layer in range(3):
        for expert in range(6):
            for w in ("w1", "w2", "w3"):
                name = f"layers.{layer}.ffn.experts.{expert}.{w}.weight_scale_2"
                files[name].view(np.uint32)[...] += 77
    files[f"{W1}.weight"][9] = 0
    files[f"{W1}.weight_scale"][9] = 0x20


FAULTS: dict[str, tuple[Callable[[Bytes], None], AuditRule, str]] = {
    "NaN tensor scale": (_all("weight_scale_2", math.nan), rules_numbers.SCALE_NOT_FINITE, W1),
    "infinite input scale": (_all("input_scale", math.inf), rules_numbers.SCALE_NOT_FINITE, W1),
    "zero input scale": (_all("input_scale", 0.0), rules_numbers.SCALE_NOT_POSITIVE, W1),
    "zero tensor scale": (_all("weight_scale_2", 0.0), rules_numbers.SCALE_NOT_POSITIVE, W1),
    "negative scale": (
        _times("weight_scale_2", lambda s: -s),
        rules_numbers.SCALE_NOT_POSITIVE,
        W1,
    ),
    "one NaN block scale": (_one_nan, rules_numbers.SCALE_NOT_FINITE, W1),
    "one negative block scale": (_one_negative, rules_numbers.SCALE_NOT_POSITIVE, W1),
    "sentinel": (_sentinel, rules_numbers.MAGNITUDE, W1),
    "dead expert": (_dead, rules_numbers.DEAD_EXPERT, W1),
    "tiny scales": (_dead, rules_numbers.SCALE_TINY, W1),
    "one dead matrix": (_all("weight_scale_2", 1e-23), rules_numbers.MAGNITUDE, W1),
    "all ones, E4M3": (_all("weight_scale", 0x38), rules_numbers.SCALE_CONSTANT, W1),
    "all ones, UE8M0": (
        _all("scale", 127, "layers.1.attn.wq_b"),
        rules_numbers.SCALE_IS_ONE,
        "layers.1.attn.wq_b",
    ),
    "noise as UE8M0": (_noise_scales, rules_numbers.SCALE_SCATTERED, DRAFTED),
    "noise as bfloat16": (_noise_codes, rules_numbers.VALUE_SCATTERED, "embed"),
    "scales never written": (_all("weight_scale", 0), rules_numbers.SCALE_VANISHED, W1),
    "divisor stored": (
        _times("weight_scale_2", lambda s: 1 / s),
        rules_numbers.SCALE_DIRECTION,
        W1,
    ),
    "all divisors stored": (all_divisors_stored, rules_numbers.SCALE_DIRECTION, "layers.0"),
    "scale dropped": (_all("weight_scale_2", 1.0), rules_numbers.SCALE_IS_ONE, W1),
    "scale applied twice": (
        _times("weight_scale_2", lambda s: s * s),
        rules_numbers.SCALE_TWICE,
        W1,
    ),
    "too small": (_times("weight_scale_2", lambda s: s / 2**20), rules_numbers.MAGNITUDE, W1),
    "rather large": (_times("weight_scale_2", lambda s: s * 100), rules_numbers.MAGNITUDE_FAR, W1),
    "input divisor stored": (
        _times("input_scale", lambda s: 1 / s),
        rules_numbers.INPUT_DIRECTION,
        W1,
    ),
    "input outlier": (_times("input_scale", lambda s: s / 1000), rules_numbers.INPUT_OUTLIER, W1),
    "some scales zero": (_some_scales(0, 0.01), rules_numbers.SCALE_UNDERFLOWN, W1),
    "subnormal scales": (_far_down, rules_numbers.SCALE_SUBNORMAL, W1),
    "another tensor's amax": (_wide_amax, rules_numbers.AMAX_UNUSED, W1),
    "unreached expert": (_unreached, rules_numbers.INPUT_FALLBACK, W1),
    "input scales never measured": (_all_inputs_one, rules_numbers.INPUT_IS_ONE, "layers.0"),
    "unwritten columns": (
        _half_of_the_columns,
        rules_numbers.COLUMNS_UNWRITTEN,
        "layers.1.attn.wo_b",
    ),
    "low blocks": (_low_blocks, rules_numbers.BLOCK_MAXIMUM, W1),
    "filled codes": (_all("weight", 0x55), rules_numbers.CODES_CONSTANT, W1),
    "clipped": (_clipped, rules_numbers.AMAX_CLIPPED, W1),
    "swizzled scales": (_swizzled, rules_numbers.SCALE_LAYOUT, W1),
    "scales of another expert": (_foreign_scales, rules_numbers.SCALE_UNRELATED, W1),
    "swapped nibbles": (_swapped_nibbles(W1), rules_numbers.NIBBLE_ORDER, W1),
    "swapped nibbles of w2": (_swapped_nibbles(W2), rules_numbers.NIBBLE_ORDER_LIKELY, W2),
    "nibbles half swapped": (_swap_half, rules_numbers.NIBBLE_ORDER_UNDECIDED, ""),
    "another producer's traces": (_others_traces, rules_numbers.DIALECT_OTHER, ""),
    "zero matrix": (_all("weight", 0), rules_numbers.TENSOR_ZERO, W1),
    "zero norm": (
        _all("weight", 0, "layers.1.attn_norm"),
        rules_numbers.TENSOR_ZERO,
        "layers.1.attn_norm",
    ),
    "unwritten half": (_rows(0, 128), rules_numbers.ROWS_UNWRITTEN, W1),
    "padding": (_rows(250, 256), rules_numbers.ZERO_ROWS, W1),
    "copied": (_copied, rules_numbers.IDENTICAL, OTHER),
    "permuted rows": (_permuted, rules_numbers.PERMUTED, OTHER),
    "expert out of range": (
        _all("tid2eid", 6, "layers.0.ffn.gate"),
        rules_numbers.ID_OUT_OF_RANGE,
        "layers.0.ffn.gate.tid2eid",
    ),
    "NaN weight": (
        _all("weight", 0x7FC0, "layers.1.ffn.gate"),
        rules_numbers.VALUE_NOT_FINITE,
        "layers.1.ffn.gate",
    ),
}
