"""Tampers of stored numbers: values, codes, scales, and whose they are.

Each function changes one thing and returns the names that it touched. Its rules are those that tell
its cause, decided from what it does: never from what an audit says about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from degarble.harness.formats.layouts import SWIZZLE_128X4, offset_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.suites.campaigns.tamper_world import World

    Plant = Callable[[World], list[str]]


@dataclass(frozen=True)
class Tamper:
    """One way to damage a checkpoint. `rules`: each tells its cause rightly.

    `effect`: whether values or names that an engine reads are others. `compared`: whether the
    reference can show it; what the reference lacks (input scales) is judged by the audit alone.
    """

    name: str
    plant: Plant
    rules: frozenset[str]
    effect: bool = True


TAMPERS: list[Tamper] = []
BYTES = "against.bytes"
CODES = "against.codes"
BLOCK = "against.block_scale"
GAIN = "against.gain"
ORDER = "against.order"
OTHER = "against.other_tensor"
ROWS = "against.rows"
VALUES = "against.values"
SIGN = "against.sign"
NAN = ("against.not_finite", "numbers.value_not_finite", "numbers.scale_not_finite")


def tamper(name: str, *rules: str, effect: bool = True) -> Callable[[Plant], Plant]:
    """Add a tamper to the list."""

    def add(plant: Plant) -> Plant:
        TAMPERS.append(Tamper(name, plant, frozenset(rules), effect))
        return plant

    return add


def _place(world: World, name: str) -> tuple[int, ...]:
    """Choose an element of a matrix or vector."""
    shape = world[name].shape
    return tuple(int(world.rng.integers(extent)) for extent in shape)


def _live(world: World, name: str) -> tuple[int, ...]:
    """Choose an element that is not zero."""
    places = np.argwhere(world[name] != 0)
    return tuple(int(each) for each in places[int(world.rng.integers(len(places)))])


def _half_live(world: World, module: str) -> tuple[tuple[int, int], int]:
    """Choose a byte of packed codes and a half of it that holds no zero."""
    codes = world[f"{module}.weight"]
    for _ in range(1000):
        row, column = (int(world.rng.integers(extent)) for extent in codes.shape)
        shift = 4 * int(world.rng.integers(2))
        if (codes.view(np.uint8)[row, column] >> shift) & 7:
            return (row, column), shift
    raise LookupError


# Plain values


def _plain(name: str, change: Callable[[World, str], object], *rules: str) -> None:
    def plant(world: World) -> list[str]:
        chosen = world.pick(world.linears)
        change(world, chosen)
        return [chosen]

    tamper(name, *rules)(plant)


def _flip(bit: int) -> Callable[[World, str], object]:
    def change(world: World, name: str) -> None:
        world[name][_live(world, name)] ^= np.uint16(1 << bit)

    return change


def _wide(world: World, name: str) -> np.ndarray:
    array = world[name]
    return (
        (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array
    ).copy()


def _put(world: World, name: str, values: np.ndarray) -> None:
    array = world[name]
    if array.dtype == np.uint16:
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        array[...] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    else:
        array[...] = values


def _valued(change: Callable[[np.ndarray, np.random.Generator], np.ndarray]) -> Callable[..., None]:
    def apply(world: World, name: str) -> None:
        _put(world, name, change(_wide(world, name), world.rng))

    return apply


def _permuted(axis: int) -> Callable[..., np.ndarray]:
    def change(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.take(values, rng.permutation(values.shape[axis]), axis)

    return change


def _part_zero(axis: int, share: int) -> Callable[..., np.ndarray]:
    def change(values: np.ndarray, _rng: np.random.Generator) -> np.ndarray:
        kept = values.copy()
        cut = slice(-max(1, values.shape[axis] // share), None)
        kept[(cut, slice(None)) if axis == 0 else (slice(None), cut)] = 0
        return kept

    return change


_plain("a low bit of one BF16 value", _flip(0), BYTES)
_plain("the sign of one BF16 value", _flip(15), BYTES, SIGN, "against.rows")
_plain("an exponent bit of one BF16 value", _flip(8), BYTES, VALUES)
_plain("one BF16 value NaN", lambda w, n: w[n].__setitem__(_place(w, n), 0x7FC1), *NAN)
_plain("one BF16 value infinite", lambda w, n: w[n].__setitem__(_place(w, n), 0x7F80), *NAN)
_plain("a linear 2 % too large", _valued(lambda v, _: v * np.float32(1.02)), GAIN)
_plain("a linear doubled", _valued(lambda v, _: v * 2), GAIN)
_plain("a linear negated", _valued(lambda v, _: -v), SIGN)
_plain("a linear without signs", _valued(lambda v, _: abs(v)), SIGN)
_plain("a linear without its mean", _valued(lambda v, _: v - 3 * v.std()), BYTES, VALUES)
_plain(
    "a linear with 1 % noise",
    _valued(lambda v, r: v * (1 + np.float32(0.01) * r.standard_normal(v.shape))),
    BYTES, "against.above_format",
)  # fmt: skip
_plain(
    "a linear transposed in its shape",
    _valued(lambda v, _: np.ascontiguousarray(v.T).reshape(v.shape)), ORDER,
)  # fmt: skip
_plain("rows of a linear permuted", _valued(_permuted(0)), ORDER, "numbers.permuted")
_plain("columns of a linear permuted", _valued(_permuted(1)), ORDER)
_plain("rows of a linear reversed", _valued(lambda v, _: v[::-1]), ORDER)
_plain("a linear all zeros", _valued(lambda v, _: v * 0), VALUES, "numbers.tensor_zero")
_plain("the last eighth of rows zero", _valued(_part_zero(0, 8)), ROWS, "numbers.rows_unwritten")
_plain("one row zero", _valued(_part_zero(0, 1 << 30)), ROWS)
_plain(
    "the last quarter of columns zero", _valued(_part_zero(1, 4)),
    "numbers.columns_unwritten", "against.columns",
)  # fmt: skip
_plain(
    "bytes of a linear in the other order",
    lambda w, n: w[n].__setitem__(..., w[n].byteswap()),
    ORDER, VALUES, "numbers.value_scattered", *NAN,
)  # fmt: skip


@tamper("FP16 bits read as BF16", VALUES, "numbers.value_scattered", "numbers.magnitude", GAIN)
def _fp16_bits(world: World) -> list[str]:
    name = world.pick(world.linears)
    world[name][...] = _wide(world, name).astype(np.float16).view(np.uint16)
    return [name]


def _norm(name: str, change: Callable[..., np.ndarray], *rules: str) -> None:
    def plant(world: World) -> list[str]:
        chosen = world.pick(world.norms)
        _put(world, chosen, change(_wide(world, chosen), world.rng))
        return [chosen]

    tamper(name, *rules)(plant)


def _one(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    kept = values.copy()
    kept[int(rng.integers(len(kept)))] *= np.float32(1.0625)
    return kept


_norm("one weight of a norm", _one, BYTES)
_norm("a norm all ones", lambda v, _: v * 0 + 1, BYTES, VALUES, GAIN)
_norm("a norm all zeros", lambda v, _: v * 0, VALUES, "numbers.tensor_zero")
_norm("a norm 2 % too large", lambda v, _: v * np.float32(1.02), GAIN)
_norm("a norm negated", lambda v, _: -v, SIGN)
_norm("a norm less one", lambda v, _: v - 1, BYTES, VALUES, GAIN)
_norm("a norm reversed", lambda v, _: v[::-1], ORDER, BYTES)


def _row_swap(name: str, ending: str) -> None:
    @tamper(name, ORDER, ROWS)
    def plant(world: World) -> list[str]:
        chosen = world.pick(world.named(ending))
        rows = world.rng.permutation(len(world[chosen]))[:2]
        world[chosen][rows] = world[chosen][rows[::-1]]
        return [chosen]


_row_swap("two rows of the embedding swapped", "embed_tokens.weight")
_row_swap("two rows of the V4 embedding swapped", "embed.weight")
_row_swap("two rows of the head swapped", "head.weight")


@tamper("the head is the embedding", OTHER, "numbers.identical")
def _head(world: World) -> list[str]:
    (head,) = world.named("head.weight")
    (embed,) = world.named("embed_tokens.weight", "embed.weight")
    world[head][...] = world[embed]
    return [head]


@tamper("router bias all zeros", VALUES, "numbers.tensor_zero", BYTES)
def _bias_zero(world: World) -> list[str]:
    name = world.pick(world.named(".e_score_correction_bias", ".gate.bias"))
    world[name][...] = 0
    return [name]


@tamper("router bias reversed", BYTES, ORDER)
def _bias_reversed(world: World) -> list[str]:
    name = world.pick(world.named(".e_score_correction_bias", ".gate.bias"))
    world[name][...] = world[name][::-1].copy()
    return [name]


@tamper("router bias through BF16", BYTES, "structure.narrowed", "against.coarser_values")
def _bias_rounded(world: World) -> list[str]:
    name = world.pick(world.named(".e_score_correction_bias", ".gate.bias"))
    bits = world[name].view(np.uint32)
    if not (bits & 0xFFFF).any():
        raise LookupError
    bits &= np.uint32(0xFFFF0000)
    return [name]


@tamper("rows of the router swapped", ORDER, ROWS)
def _router(world: World) -> list[str]:
    name = world.pick(world.named(".gate.weight"))
    world[name][[0, 1]] = world[name][[1, 0]]
    return [name]


@tamper("an expert id changed", "against.integers")
def _expert_id(world: World) -> list[str]:
    name = world.pick(world.named("tid2eid"))
    world[name][3, 0] = (world[name][3, 0] + 1) % 8
    return [name]


@tamper("an expert id out of range", "against.integers", "numbers.id_out_of_range")
def _expert_far(world: World) -> list[str]:
    name = world.pick(world.named("tid2eid"))
    world[name][3, 0] = 1000
    return [name]


@tamper("attention sinks zero", VALUES, "numbers.tensor_zero", BYTES)
def _sinks(world: World) -> list[str]:
    name = world.pick(world.named("attn_sink", "sinks"))
    world[name][...] = 0
    return [name]


@tamper("hyper-connection doubled", GAIN)
def _hyper(world: World) -> list[str]:
    name = world.pick([n for n in world.tensors if "hc_" in n and world.tensors[n].dtype == "F32"])
    world[name][...] *= 2
    return [name]


# NVFP4


def _packed(
    name: str, change: Callable[[World, str], object], *rules: str, kind: str = "nvfp4"
) -> None:
    def plant(world: World) -> list[str]:
        module = world.pick(getattr(world, kind))
        change(world, module)
        return [f"{module}.weight"]

    tamper(f"{kind}: {name}", *rules)(plant)


def _code(change: Callable[[int], int]) -> Callable[[World, str], object]:
    def apply(world: World, module: str) -> None:
        place, shift = _half_live(world, module)
        codes = world[f"{module}.weight"].view(np.uint8)
        old = int(codes[place] >> shift) & 15
        codes[place] = (int(codes[place]) & ~(15 << shift)) | (change(old) << shift)

    return apply


def _codes(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[World, str], object]:
    def apply(world: World, module: str) -> None:
        codes = world[f"{module}.weight"].view(np.uint8)
        codes[...] = change(codes.copy())

    return apply


def _row_codes(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[World, str], object]:
    def apply(world: World, module: str) -> None:
        codes = world[f"{module}.weight"].view(np.uint8)
        row = int(world.rng.integers(len(codes)))
        codes[row] = change(codes[row].copy())

    return apply


def _rows_reversed(world: World, module: str) -> None:
    for name in (f"{module}.weight", next(n for n in world.parts(module) if n.endswith("scale"))):
        world[name][...] = world[name][::-1].copy()


def _nibbles(codes: np.ndarray) -> np.ndarray:
    return (codes >> 4) | (codes << 4)


for _kind in ("nvfp4", "mxfp4"):
    _packed("low bit of a code", _code(lambda c: c ^ 1), CODES, kind=_kind)
    _packed("sign of a code", _code(lambda c: c ^ 8), CODES, SIGN, kind=_kind)
    _packed("a code zeroed", _code(lambda _: 0), CODES, kind=_kind)
    _packed("nibbles swapped", _codes(_nibbles), ORDER, "numbers.nibble_order", kind=_kind)
    _packed("nibbles of a row swapped", _row_codes(_nibbles), ORDER, kind=_kind)
    _packed("codes of a row zero", _row_codes(np.zeros_like), ROWS, CODES, kind=_kind)
    _packed("signs lost", _codes(lambda c: c & 0x77), SIGN, kind=_kind)
    _packed("signs turned", _codes(lambda c: c ^ 0x88), SIGN, kind=_kind)
    _packed("rows reversed", _rows_reversed, ORDER, kind=_kind)
    _packed("codes reversed in rows", _codes(lambda c: _nibbles(c[:, ::-1])), ORDER, kind=_kind)
    _packed(
        "codes all zero", _codes(np.zeros_like), VALUES, "numbers.tensor_zero",
        "numbers.codes_constant", kind=_kind,
    )  # fmt: skip


@tamper("nvfp4: a block of codes zero", CODES, BLOCK)
def _block_zero(world: World) -> list[str]:
    name = f"{world.pick(world.nvfp4)}.weight"
    world[name][3, 8:16] = 0
    return [name]


@tamper("nvfp4: random codes", VALUES, "numbers.codes_random", CODES)
def _random(world: World) -> list[str]:
    name = f"{world.pick(world.nvfp4)}.weight"
    world[name][...] = world.rng.integers(0, 256, world[name].shape, np.uint8)
    return [name]


@tamper("nvfp4: rows shifted by one", ORDER, ROWS)
def _rows_shifted(world: World) -> list[str]:
    module = world.pick(world.nvfp4)
    for part in ("weight", "weight_scale"):
        world[f"{module}.{part}"][...] = np.roll(world[f"{module}.{part}"], 1, 0)
    return [f"{module}.weight"]


@tamper("nvfp4: codes shifted by one row", ORDER, VALUES, CODES)
def _codes_shifted(world: World) -> list[str]:
    name = f"{world.pick(world.nvfp4)}.weight"
    world[name][...] = np.roll(world[name], 1, 0)
    return [name]


def _scale(name: str, change: Callable[[World, np.ndarray], object], *rules: str) -> None:
    @tamper(f"nvfp4: {name}", *rules)
    def plant(world: World) -> list[str]:
        module = world.pick(world.nvfp4)
        before = world[f"{module}.weight_scale"].copy()
        change(world, world[f"{module}.weight_scale"])
        if (before == world[f"{module}.weight_scale"]).all():
            raise LookupError
        return [f"{module}.weight_scale"]


def _at(step: int) -> Callable[[World, np.ndarray], object]:
    def change(world: World, scale: np.ndarray) -> None:
        large = np.argwhere((scale > 16) & (scale < 118))
        row, column = large[int(world.rng.integers(len(large)))]
        scale[row, column] = int(scale[row, column]) + step

    return change


def _to(value: int) -> Callable[[World, np.ndarray], object]:
    def change(world: World, scale: np.ndarray) -> None:
        scale[int(world.rng.integers(len(scale))), 0] = value

    return change


def _swizzled(_world: World, scale: np.ndarray) -> None:
    rows, columns = scale.shape
    if rows % 128 or columns % 4:
        raise LookupError
    places = offset_table(SWIZZLE_128X4, rows, columns).numpy()
    linear = scale.copy()
    scale.reshape(-1)[places] = linear


def _of_rows(
    first: int, count: int, change: Callable[[np.ndarray], np.ndarray]
) -> Callable[..., None]:
    def apply(_world: World, scale: np.ndarray) -> None:
        rows = slice(min(first, len(scale) - 1), first + count)
        scale[rows] = change(scale[rows].copy())

    return apply


def _next(scale: np.ndarray) -> np.ndarray:
    return np.roll(scale, -1, 1)


_scale("block scale halved", _at(-8), BLOCK)
_scale("block scale doubled", _at(8), BLOCK)
_scale("block scale a step larger", _at(1), BLOCK)
_scale("block scale zero", _to(0), BLOCK, ROWS, "numbers.scale_underflown")
_scale("block scale NaN", _to(0x7F), *NAN)
_scale("block scale negative", _to(0xB8), "numbers.scale_not_positive", BLOCK)
_scale("all block scales halved", lambda _w, s: np.subtract(s, 8, out=s, where=s > 16), GAIN, BLOCK)
_scale("block scales of the next block", lambda _w, s: s.__setitem__(..., _next(s)), BLOCK, ORDER)
_scale(
    "block scales of the next row",
    lambda _w, s: s.__setitem__(..., np.roll(s, -1, 0)), BLOCK, ORDER,
)  # fmt: skip
_scale("64 rows with the next block's scales", _of_rows(16, 64, _next), BLOCK, ORDER)
_scale("block scales swizzled", _swizzled, ORDER, "numbers.scale_layout")
_scale(
    "block scales transposed",
    lambda _w, s: s.__setitem__(..., np.ascontiguousarray(s.T).reshape(s.shape)), ORDER, BLOCK,
)  # fmt: skip
_scale("block scales reversed", lambda _w, s: s.__setitem__(..., s[:, ::-1].copy()), ORDER, BLOCK)
_scale(
    "block scales all one", lambda _w, s: s.__setitem__(..., 0x38), "numbers.scale_constant", BLOCK
)
_scale("scales of a row doubled", _of_rows(5, 1, lambda s: s + 8), BLOCK, GAIN, "against.row_gain")
_scale("scales of a row a step larger", _of_rows(5, 1, lambda s: s + 1), BLOCK, "against.row_gain")
_scale(
    "scales of a column a step larger",
    lambda _w, s: s.__setitem__((slice(None), 1), s[:, 1] + 1),
    BLOCK,
)
_scale(
    "scales of a row random",
    lambda w, s: s.__setitem__(2, w.rng.integers(8, 120, s.shape[1], np.uint8)), BLOCK,
)  # fmt: skip


@tamper("nvfp4: block scales of the next expert", BLOCK, ORDER, OTHER, "numbers.scale_unrelated")
def _foreign(world: World) -> list[str]:
    module = world.pick([name for name in world.nvfp4 if ".experts." in name])
    world[f"{module}.weight_scale"][...] = world[f"{world.expert_of(module)}.weight_scale"]
    return [f"{module}.weight_scale"]


def _tensor_scale(name: str, change: Callable[[float, World, str], float], *rules: str) -> None:
    @tamper(f"nvfp4: tensor scale {name}", *rules)
    def plant(world: World) -> list[str]:
        module = world.pick(world.nvfp4)
        stored = world[f"{module}.weight_scale_2"]
        stored[...] = change(float(stored.reshape(-1)[0]), world, module)
        return [f"{module}.weight_scale_2"]


def _input(world: World, module: str) -> float:
    return float(world[f"{module}.input_scale"].reshape(-1)[0])


_DIRECTION = "numbers.scale_direction"
_POSITIVE = "numbers.scale_not_positive"
_tensor_scale("2 % larger", lambda s, *_: s * 1.02, GAIN)
_tensor_scale("2 % smaller", lambda s, *_: s * 0.98, GAIN)
_tensor_scale("doubled", lambda s, *_: s * 2, GAIN)
_tensor_scale("of another full scale", lambda s, *_: s * 448 / 256, GAIN)
_tensor_scale("reciprocal", lambda s, *_: 1 / s, GAIN, _DIRECTION, "numbers.magnitude")
_tensor_scale("squared", lambda s, *_: s * s, GAIN, "numbers.scale_twice")
_tensor_scale("one", lambda *_: 1.0, GAIN, "numbers.scale_is_one")
_tensor_scale("zero", lambda *_: 0.0, _POSITIVE, VALUES)
_tensor_scale("NaN", lambda *_: float("nan"), *NAN)
_tensor_scale("negative", lambda s, *_: -s, _POSITIVE, SIGN)
_tensor_scale("times the input scale", lambda s, w, m: s * _input(w, m), GAIN)


def _input_scale(name: str, change: Callable[[float], float], *rules: str) -> None:
    @tamper(f"nvfp4: input scale {name}", *rules)
    def plant(world: World) -> list[str]:
        module = world.pick(world.nvfp4)
        stored = world[f"{module}.input_scale"]
        stored[...] = change(float(stored.reshape(-1)[0]))
        return [f"{module}.input_scale"]


_input_scale("zero", lambda _: 0.0, _POSITIVE)
_input_scale("NaN", lambda _: float("nan"), *NAN)
_input_scale("negative", lambda s: -s, _POSITIVE)
_input_scale("reciprocal", lambda s: 1 / s, "numbers.input_scale_direction")


# FP8 and MXFP4 scales


def _fp8(name: str, change: Callable[[World, str], object], *rules: str) -> None:
    _packed(name, change, *rules, kind="fp8")


def _fp8_code(change: Callable[[int], int]) -> Callable[[World, str], object]:
    def apply(world: World, module: str) -> None:
        codes = world[f"{module}.weight"]
        large = np.argwhere((codes & 0x7F) > 24)
        place = tuple(large[int(world.rng.integers(len(large)))])
        codes[place] = change(int(codes[place]))

    return apply


def _fp8_scales(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[World, str], object]:
    def apply(world: World, module: str) -> None:
        stored = world.scale_of(module)
        array, before = stored.array, stored.array.copy()
        array[...] = change(array.copy())
        if (array == before).all():
            raise LookupError

    return apply


def _halved(scale: np.ndarray, where: Any) -> np.ndarray:
    scale[where] = scale[where] / 2 if scale.dtype == np.float32 else scale[where] - 1
    return scale


def _transposed(scale: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(scale.T).reshape(scale.shape)


_fp8("low bit of a code", _fp8_code(lambda c: c ^ 1), CODES)
_fp8("sign of a code", _fp8_code(lambda c: c ^ 0x80), CODES, SIGN)
_fp8("an exponent bit of a code", _fp8_code(lambda c: c ^ 0x08), CODES)
_fp8("a code NaN", _fp8_code(lambda _: 0x7F), *NAN)
_fp8("a block scale halved", _fp8_scales(lambda s: _halved(s, (0, 0))), BLOCK, GAIN)
_fp8("all block scales halved", _fp8_scales(lambda s: _halved(s, ...)), GAIN, BLOCK)
_fp8("block scales transposed", _fp8_scales(_transposed), BLOCK, ORDER)
_fp8("block scales of the next block row", _fp8_scales(lambda s: np.roll(s, 1, 0)), BLOCK, ORDER)
_fp8(
    "block scales all one",
    _fp8_scales(lambda s: s * 0 + (1 if s.dtype == np.float32 else 127)),
    BLOCK, GAIN, "numbers.scale_constant", "numbers.magnitude",
)  # fmt: skip
_fp8("codes negated", lambda w, m: w[f"{m}.weight"].__ixor__(0x80), SIGN)
_packed(
    "a block exponent larger", lambda w, m: w.scale_of(m).array.__setitem__(
        (0, 0), w.scale_of(m).array[0, 0] + 1
    ), BLOCK, kind="mxfp4",
)  # fmt: skip
_packed(
    "all exponents larger", lambda w, m: w.scale_of(m).array.__iadd__(1), GAIN, BLOCK, kind="mxfp4"
)
_packed(
    "exponents of the next block",
    lambda w, m: w.scale_of(m).array.__setitem__(..., _next(w.scale_of(m).array)),
    BLOCK, ORDER, kind="mxfp4",
)  # fmt: skip


# Whose values they are


@tamper("two experts swapped", OTHER)
def _experts(world: World) -> list[str]:
    module = world.pick(world.experts)
    world.swap(module, world.expert_of(module))
    return [f"{module}.weight"]


@tamper("one expert for another", OTHER, "numbers.identical")
def _expert_copied(world: World) -> list[str]:
    module = world.pick(world.experts)
    world.take(module, world.expert_of(module))
    return [f"{module}.weight"]


@tamper("gate and up swapped", OTHER)
def _gate_up(world: World) -> list[str]:
    module = world.pick([n for n in world.experts if n.endswith((".w1", ".gate_proj"))])
    other = module.replace(".w1", ".w3").replace(".gate_proj", ".up_proj")
    world.swap(module, other)
    return [f"{module}.weight"]


@tamper("a linear of another layer", OTHER, "numbers.identical")
def _layers(world: World) -> list[str]:
    chosen = world.pick([n for n in world.tensors if ".wq_b.weight" in n or ".q_b_proj.weight" in n
                         if n.endswith(".weight") and "indexer" not in n])  # fmt: skip
    others = [
        n
        for n in world.tensors
        if n != chosen
        and n.rpartition("layers.")[2].partition(".")[2]
        == chosen.rpartition("layers.")[2].partition(".")[2]
    ]
    world.take(chosen.removesuffix(".weight"), world.pick(others).removesuffix(".weight"))
    return [chosen]


@tamper("norms of two layers swapped", OTHER)
def _norms_swapped(world: World) -> list[str]:
    names = world.named("post_attention_layernorm.weight", "ffn_norm.weight")
    a, b = names[0], names[1]
    if world.tensors[a].data == world.tensors[b].data:
        raise LookupError
    world.tensors[a], world.tensors[b] = world.tensors[b], world.tensors[a]
    return [a]


@tamper("two norms of one layer swapped", OTHER)
def _norm_roles(world: World) -> list[str]:
    first = world.pick(world.named("post_attention_layernorm.weight", "ffn_norm.weight"))
    other = first.replace("post_attention_layernorm", "input_layernorm")
    other = other.replace("ffn_norm", "attn_norm")
    world.tensors[first], world.tensors[other] = world.tensors[other], world.tensors[first]
    return [first]


@tamper("halves of a query projection swapped", ORDER)
def _halves(world: World) -> list[str]:
    name = world.pick([n for n in world.tensors if n.endswith(("wq_b.weight", "q_b_proj.weight"))])
    module = name.removesuffix(".weight")
    for part in world.parts(module):
        array = world[part]
        if array.ndim == 2 and len(array) % 2 == 0:
            array[...] = np.roll(array, len(array) // 2, 0)
    return [name]


@tamper("rotary rows of a query projection interleaved", ORDER)
def _rotary(world: World) -> list[str]:
    chosen = world.named("wkv.weight", "kv_a_proj_with_mqa.weight")
    name = world.pick(chosen)
    module = name.removesuffix(".weight")
    order = np.arange(len(world[name]))
    order[-64:] = order[-64:].reshape(2, 32).T.reshape(-1)
    parts = [p for p in world.parts(module) if world[p].ndim == 2]
    if any(len(world[p]) != len(order) for p in parts):
        world[name][...] = world[name][order]
        if world.tensors[name].dtype == "F8_E4M3":
            return [name]  # its blocks of 128 rows hold all of them
        raise LookupError
    for part in parts:
        world[part][...] = world[part][order]
    return [name]
