"""Load weights whole, by rows and by position, and compare them with independent readers."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    ShapeMismatch,
    UnreadableFile,
)
from degarble.harness.checkpoint.read.types import DTYPE_BITS, StoredLayout, TensorEntry
from degarble.harness.checkpoint.view.modules import NamingConvention
from degarble.harness.checkpoint.view.stored import TORCH_DTYPES, PositionedReader, tensor_over
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.formats.dialects import CANONICAL, MODELOPT
from degarble.harness.formats.number_formats import (
    FP8_128X128_F32,
    FP8_128X128_UE8M0,
    MXFP4,
    NVFP4,
    ScaleDirection,
)
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.suites.checkpoint.number_cases import matrix, quantised_parts, write_modules
from degarble.suites.checkpoint.reading_cases import entry, write_raw

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.harness.formats.quantise import QuantisedTensor
    from degarble.harness.formats.weight import Weight


# --------------------------------------------------------------------------------------------------
# Tensors over mapped bytes equal what the safetensors package loads, without needless copies.

CASES = [
    (dtype, shape)
    for dtype in TORCH_DTYPES
    for shape in ([4, 6], [0, 2], [])
    if shape or dtype != "F4"  # half a byte: the header refuses it
]


@pytest.mark.parametrize(("dtype", "shape"), CASES)
def test_equals_what_the_package_loads(
    tmp_path: Path, dtype: str, shape: list[int], seed: int
) -> None:
    elements = 24 if shape == [4, 6] else len(shape) == 0
    size = elements * DTYPE_BITS[dtype] // 8
    data = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(seed))
    path = tmp_path / "model.safetensors"
    write_raw(path, {"a": entry(dtype, shape, 0, size)}, bytes(data.tolist()))
    with Checkpoint.open(path) as checkpoint:
        found, oracle = checkpoint.tensor("a"), load_file(path)["a"]
        assert found.dtype is oracle.dtype
        assert found.shape == oracle.shape
        assert bytes(found.flatten().view(torch.uint8).tolist()) == bytes(data.tolist())


def test_shares_memory_where_bytes_lie_well_and_copies_where_not() -> None:
    raw = memoryview(bytearray(range(16)))
    shared = tensor_over(TensorEntry("a", "F32", (2,), None, 0, 8), raw[:8])  # type: ignore[arg-type]
    copied = tensor_over(TensorEntry("a", "F32", (2,), None, 1, 9), raw[1:9])  # type: ignore[arg-type]
    before = shared.clone(), copied.clone()
    raw[:9] = bytes(9)
    assert torch.equal(shared, torch.zeros(2))
    assert not torch.equal(before[0], shared)
    assert torch.equal(before[1], copied)


@pytest.mark.parametrize("dtype", sorted(set(DTYPE_BITS) - set(TORCH_DTYPES)))
def test_refuses_what_torch_cannot_hold(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "model.safetensors"
    write_raw(path, {"a": entry(dtype, [4], 0, 3)}, b"abc")
    with Checkpoint.open(path) as checkpoint:
        with pytest.raises(DtypeMismatch, match=dtype):
            checkpoint.tensor("a")
        assert bytes(checkpoint.raw("a")) == b"abc"


def test_refuses_an_odd_number_of_packed_codes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_raw(path, {"a": entry("F4", [2, 3], 0, 3)}, b"abc")
    with Checkpoint.open(path) as checkpoint, pytest.raises(ShapeMismatch, match="even"):
        checkpoint.tensor("a")


# --------------------------------------------------------------------------------------------------
# Let compressed-tensors write and decode weights, in a process of its own.
#
# The installed package's observer formulas and compressor make a state with the names that its
# checkpoints have, and its own decoder returns the values. (ModelOpt decodes in the suites of
# formats; its names are of its exporter, which needs a whole model.)
# Started as `python -m degarble.suites.checkpoint.view.test_stored VALUES STATE DECODED`.

if TYPE_CHECKING:
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
        states |= {f"{module}.{name}": tensor.contiguous() for name, tensor in state.items()}
    save_file(states, target)
    save_file({name: value.float().contiguous() for name, value in values.items()}, decoded)


# --------------------------------------------------------------------------------------------------
# Weights have the values that their producers decode, whole, by rows, and out of stacks.


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# The producer itself


def test_values_are_those_of_compressed_tensors(tmp_path: Path, seed: int) -> None:
    values = {"a.up": drawn(seed, 32, 64).bfloat16(), "a.down": drawn(seed + 1, 48, 32) * 300}
    names = ("values", "model", "decoded")
    source, state, decoded = (tmp_path / f"{name}.safetensors" for name in names)
    save_file(values, source)
    command = [sys.executable, "-m", "degarble.suites.checkpoint.view.test_stored"]
    subprocess.run([*command, *map(str, (source, state, decoded))], check=True, capture_output=True)
    oracle = load_file(decoded)
    with Checkpoint.open(state) as checkpoint:
        assert checkpoint.layout is StoredLayout.COMPRESSED_TENSORS
        assert sorted(checkpoint.modules()) == sorted(values)
        for module, values_MK in oracle.items():
            weight = checkpoint.weight(module)
            found = weight.values(torch.float32)
            torch.testing.assert_close(found, values_MK, rtol=2.0**-7, atol=0)  # bfloat16 there
            assert weight.input_scale is not None
            assert weight.input_scale.item() == 0.25, "a decode scale, though a divisor is stored"
            assert weight.storage is not None
            assert weight.storage.direction is ScaleDirection.ENCODE


@pytest.mark.parametrize("planted", [False, True])
def test_a_divisor_is_read_as_one(tmp_path: Path, seed: int, planted: bool) -> None:
    made = quantise(drawn(seed, 16, 64), NVFP4, MODELOPT)
    divisor = made.decode_scale if planted else made.encode_scale
    save_file(
        {
            "m.weight_packed": made.codes,
            "m.weight_scale": made.block_scale.view(torch.float8_e4m3fn),
            "m.weight_global_scale": divisor.reshape(1),
            "m.input_global_scale": torch.tensor([8.0]),
        },
        tmp_path / "model.safetensors",
    )
    weight = Checkpoint.open(tmp_path).weight("m")
    found, whole = weight.values(torch.float32), dequantise(made)
    assert torch.allclose(found, whole, rtol=1e-6, atol=0) is not planted
    assert weight.input_scale == 0.125


# Row blocks and stacks

FORMATS = [
    (NVFP4, MODELOPT),
    (MXFP4, CANONICAL),
    (FP8_128X128_UE8M0, CANONICAL),
    (FP8_128X128_F32, CANONICAL),
]


def save_quantised(path: Path, made: QuantisedTensor, fmt: BlockFormat) -> None:
    e4m3, e8m0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
    tensors = {"m.weight": made.codes if fmt.packed else made.codes.view(e4m3)}
    if fmt == NVFP4:
        assert made.tensor_scale is not None
        tensors["m.weight_scale"] = made.block_scale.view(e4m3)
        tensors["m.weight_scale_2"] = made.tensor_scale
    elif fmt == FP8_128X128_F32:
        tensors["m.weight_scale_inv"] = made.block_scale
    else:
        tensors["m.scale"] = made.block_scale.view(e8m0)
        tensors["m.weight"] = (
            tensors["m.weight"].view(torch.int8) if fmt.packed else tensors["m.weight"]
        )
    save_file(tensors, path)


@pytest.mark.parametrize(("fmt", "dialect"), FORMATS, ids=lambda each: each.name)
@pytest.mark.parametrize("elements", [1, 40_000, 10**9])
def test_row_blocks_are_the_whole(
    tmp_path: Path, seed: int, fmt: BlockFormat, dialect: object, elements: int
) -> None:
    made = quantise(drawn(seed, 300, 256), fmt, dialect)  # type: ignore[arg-type]
    save_quantised(tmp_path / "model.safetensors", made, fmt)
    with Checkpoint.open(tmp_path) as checkpoint:
        stored = checkpoint.stored("m")
        assert stored.format == fmt
        pieces = [
            (row, weight.values(torch.float32)) for row, weight in stored.row_blocks(elements)
        ]
        whole = dequantise(made)
        assert torch.equal(stored.values(), whole)
        assert torch.equal(torch.cat([piece for _, piece in pieces]), whole)
        for row, piece in pieces:
            assert torch.equal(piece, whole[row : row + len(piece)])
        unit = fmt.block[0]
        assert len(pieces) == -(-300 // max(unit, elements // 256 // unit * unit))


@pytest.mark.parametrize(("fmt", "dialect"), FORMATS, ids=lambda each: each.name)
def test_cuts_through_scale_blocks_are_refused(
    tmp_path: Path, seed: int, fmt: BlockFormat, dialect: object
) -> None:
    made = quantise(drawn(seed, 300, 256), fmt, dialect)  # type: ignore[arg-type]
    save_quantised(tmp_path / "model.safetensors", made, fmt)
    stored, whole = Checkpoint.open(tmp_path).stored("m"), dequantise(made)
    assert torch.equal(stored.rows(128, 300).values(torch.float32), whole[128:])
    wrong = [(0, 0), (-128, 128), (256, 384), (300, 300)]
    wrong += [(0, 100), (64, 128)] if fmt.block[0] == 128 else []
    for begin, end in wrong:
        with pytest.raises(ShapeMismatch, match="rows of m"):
            stored.rows(begin, end)


def test_plain_values_by_rows_and_vectors(tmp_path: Path, seed: int) -> None:
    matrix, vector = drawn(seed, 10, 4), drawn(seed, 9)
    tensors = {"m.weight": matrix, "n.weight": vector, "s": torch.tensor(3.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    blocks = list(checkpoint.stored("m").row_blocks(12))
    assert [row for row, _ in blocks] == [0, 3, 6, 9]
    assert torch.equal(torch.cat([weight.values(torch.float32) for _, weight in blocks]), matrix)
    assert torch.equal(checkpoint.stored("n").rows(2, 5).values(torch.float32), vector[2:5])
    assert [
        weight.values(torch.float32).item() for _, weight in checkpoint.stored("s").row_blocks()
    ] == [3.0]
    with pytest.raises(InvalidArgument, match="member of m"):
        checkpoint.stored("m").member(0)


@pytest.mark.parametrize("per_member", [True, False])
def test_stacks_are_walked_by_member(tmp_path: Path, seed: int, per_member: bool) -> None:
    tensors = [quantise(drawn(seed + i, 32, 64), NVFP4, MODELOPT) for i in range(3)]
    scales = [tensor.tensor_scale for tensor in tensors if tensor.tensor_scale is not None]
    save_file(
        {
            "e.w2_weight": torch.stack([tensor.codes for tensor in tensors]),
            "e.w2_weight_scale": torch.stack([e.block_scale for e in tensors]).view(
                torch.float8_e4m3fn
            ),
            "e.w2_weight_scale_2": torch.stack(scales) if per_member else scales[0],
        },
        tmp_path / "model.safetensors",
    )
    stored = Checkpoint.open(tmp_path).stored("e.w2")
    assert stored.shape == (3, 32, 64)
    expected = [dequantise(tensor) for tensor in tensors]
    if per_member:
        assert torch.equal(stored.member(1).values(), expected[1])
        assert torch.equal(stored.values(), torch.stack(expected))
    assert torch.equal(stored.member(0).values(), expected[0])
    blocks = list(stored.row_blocks(16 * 64))
    assert [row for row, _ in blocks] == [0, 16, 32, 48, 64, 80]
    with pytest.raises(InvalidArgument, match="an index into a stack"):
        stored.member(3)
    with pytest.raises(ShapeMismatch, match=r"rows of e\.w2"):
        stored.rows(0, 16)


def test_scales_that_do_not_fit_a_stack_are_refused(tmp_path: Path, seed: int) -> None:
    made = quantise(drawn(seed, 32, 64), NVFP4, MODELOPT)
    save_file(
        {
            "e.w13_weight": torch.stack([made.codes] * 2),
            "e.w13_weight_scale": torch.stack([made.block_scale] * 2).view(torch.float8_e4m3fn),
            "e.w13_weight_scale_2": torch.ones(2, 2),  # one for w1 and one for w3
        },
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ShapeMismatch, match="nothing is broadcast"):
        Checkpoint.open(tmp_path).weight("e.w13")


def test_fields_share_memory_with_the_file(tmp_path: Path, seed: int) -> None:
    made = quantise(drawn(seed, 128, 256), NVFP4, MODELOPT)
    save_quantised(tmp_path / "model.safetensors", made, NVFP4)
    checkpoint = Checkpoint.open(tmp_path)
    one, other = checkpoint.weight("m"), checkpoint.weight("m")
    assert one is not other
    assert one.codes is not None
    assert other.codes is not None
    assert one.codes.data_ptr() == other.codes.data_ptr()
    assert checkpoint.form("m").convention is NamingConvention.MODELOPT


def test_memory_stays_bounded_while_a_large_weight_is_walked(tmp_path: Path) -> None:
    rows, columns = 1 << 15, 4096
    path = tmp_path / "model.safetensors"
    code = (
        "import sys, torch\n"
        "from degarble.harness.checkpoint.view.view import Checkpoint\n"
        "def resident():\n"
        "    line = next(l for l in open('/proc/self/status') if l.startswith('VmRSS'))\n"
        "    return int(line.split()[1]) // 1024\n"
        "stored = Checkpoint.open(sys.argv[1]).stored('m')\n"
        "first, highest = resident(), 0\n"
        "for row, weight in stored.row_blocks():\n"
        "    assert not weight.value[::7].any()\n"
        "    highest = max(highest, resident() - first)\n"
        "print(highest)\n"
    )
    size = rows * columns * 2
    write_raw(path, {"m.weight": entry("BF16", [rows, columns], 0, size)})
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + size)
    text = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    ).stdout
    assert int(text) < 64, "256 MB were read"


# --------------------------------------------------------------------------------------------------
# Reading by position gives what a mapping gives, from buffers that are used again.


def reader(checkpoint: Checkpoint) -> PositionedReader:
    return PositionedReader({shard.file: shard.file_size for shard in checkpoint.shards})


def fields(weight: Weight) -> list[torch.Tensor]:
    parts = (weight.value, weight.codes, weight.block_scale, weight.tensor_scale)
    return [part.clone() for part in (*parts, weight.input_scale) if part is not None]


def test_rows_are_those_of_the_mapping(tmp_path: Path, seed: int) -> None:
    modules: dict[str, dict[str, torch.Tensor] | torch.Tensor] = {
        "a": quantised_parts(matrix(seed, 384, 256), NVFP4),
        "b": quantised_parts(matrix(seed + 1, 384, 256), FP8_128X128_F32),
        "c.weight": matrix(seed + 2, 384, 256),
        "d": torch.tensor([1.0, 2.0, 3.0]),
    }
    with write_modules(tmp_path, modules) as checkpoint, reader(checkpoint) as read:
        for name in ("a", "b", "c", "d", "a"):
            stored = checkpoint.stored(name)
            expected = [fields(weight) for _, weight in stored.row_blocks(128 * 256)]
            pieces = read.over(stored).row_blocks(128 * 256)
            found = [fields(weight) for _, weight in pieces]
            assert len(found) == (1 if name == "d" else 3)
            for ours, theirs in zip(found, expected, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_memory_is_used_again_and_aligned(tmp_path: Path, seed: int) -> None:
    modules = {name: {"weight": matrix(seed, 512, 256)} for name in ("a", "b")}
    with write_modules(tmp_path, modules) as checkpoint, reader(checkpoint) as read:
        places = set()
        for name in modules:
            for _, weight in read.over(checkpoint.stored(name)).row_blocks(128 * 256):
                assert weight.value is not None
                places.add(weight.value.data_ptr())
        (place,) = places
        assert place % 64 == 0


@pytest.mark.parametrize("opened", [False, True])
def test_a_file_that_shrinks_is_refused(tmp_path: Path, seed: int, opened: bool) -> None:
    checkpoint = write_modules(tmp_path, {"a": {"weight": matrix(seed, 512, 256)}})
    stored = checkpoint.stored("a")
    with reader(checkpoint) as read:
        if opened:
            read.ahead(checkpoint.shards[0].file, 0, 1 << 30)
        file = checkpoint.shards[0].file
        with file.open("rb+") as shard:
            shard.truncate(100_000)
        with pytest.raises(UnreadableFile, match="whose header was read"):
            list(read.over(stored).row_blocks())


if __name__ == "__main__":
    main(*sys.argv[1:])
