"""Integers by group from every exporter that is read: every code with every zero point."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from degarble.harness.base.errors import InvalidArgument, LayoutMismatch, Refused, ShapeMismatch
from degarble.harness.checkpoint.view.packing import unpack_words
from degarble.harness.checkpoint.view.schemes import SCHEMES
from degarble.harness.checkpoint.view.stored import PositionedReader
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.suites.checkpoint.view.integer_cases import AWQ_ORDER, awq, gptq, words, write

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

GPTQ_CONFIG: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
# Every class of a float16 scale: subnormal, smallest normal, a power, an odd one, largest.
SCALES = (2.0**-24, 2.0**-14, 0.5, 0.0117, 65504.0)


def every_pair(bits: int, rows: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [N, 128 G], zero points and scales [N, G] in which every pair of codes occurs.

    Row and group choose the zero point, the columns of a group run through the codes.
    """
    count = 1 << bits
    groups = 2 * count // rows if count >= rows else 2
    zeros = torch.arange(rows * groups).reshape(rows, groups) % count
    codes = (torch.arange(128 * groups)[None, :] + torch.arange(rows)[:, None]) % count
    if count > 128:  # a group of 128 holds half of the codes: the second half of the groups others
        codes = codes.reshape(rows, groups, 128)
        codes[:, groups // 2 :] = (codes[:, : groups // 2] + 128) % count
        zeros[:, groups // 2 :] = zeros[:, : groups // 2]
        codes = codes.reshape(rows, -1)
    scales = torch.tensor(SCALES)[torch.arange(rows * groups) % len(SCALES)]
    return codes, zeros, scales.reshape(rows, groups).half()


def by_hand(codes: Tensor, zeros: Tensor, scales: Tensor, index: Tensor | None = None) -> Tensor:
    index = (
        torch.arange(codes.shape[1]) // (codes.shape[1] // scales.shape[1])
        if index is None
        else index
    )
    return (codes - zeros[:, index]).double() * scales.double()[:, index]


def values(folder: Path, module: str = "a") -> Tensor:
    with Checkpoint.open(folder) as checkpoint:
        return checkpoint.weight(module).values(torch.float64).clone()


@pytest.mark.needs("modelopt")
@pytest.mark.parametrize("factors", [False, True])
def test_modelopt_int4(tmp_path: Path, factors: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what ModelOpt imports
        package = import_module("modelopt.torch.export.quant_utils")
    codes, _, scales = every_pair(4)
    codes = codes - 8
    wide = scales.float()
    weight = codes * wide.repeat_interleave(128, 1)
    tensors = {"a.weight": package.pack_int4_in_uint8(weight, wide, 128), "a.weight_scale": wide}
    # W4A8's second scale changes no value.
    tensors |= {"a.weight_scale_2": torch.tensor(0.125), "a.input_scale": torch.tensor(0.5)}
    expected = by_hand(codes, torch.zeros_like(scales).long(), wide)
    # Bytes hold two neighbouring rows, so every code has to occur in either of them.
    for row in (0, 1):
        assert set(codes[row::2].flatten().tolist()) == set(range(-8, 8))
    own = torch.linspace(0.25, 4.0, codes.shape[1]).bfloat16()
    if factors:
        tensors["a.pre_quant_scale"] = own
        expected = expected * own.double()
    folder = write(tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"})
    assert torch.equal(values(folder), expected)
    with Checkpoint.open(folder) as checkpoint:
        held = checkpoint.weight("a")
        assert torch.equal(held.rows(slice(2, 5), torch.float64), expected[2:5])
        assert held.input_scale is not None
        assert (held.channel_scale is not None) is factors
        rows = [each.values(torch.float64) for _, each in checkpoint.stored("a").row_blocks(256)]
        assert torch.equal(torch.cat(rows), expected)


def test_factors_of_another_width_are_refused(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.zeros(8, 128, dtype=torch.uint8),
        "a.weight_scale": torch.ones(16, 1),
        "a.pre_quant_scale": torch.ones(64),
    }
    with pytest.raises(ShapeMismatch, match="factors of the input of a"):
        values(write(tmp_path, tensors, None))


def compressor(name: str) -> Any:
    """Return compressed-tensors' own packer of a format."""
    package = import_module(f"compressed_tensors.compressors.{name}.base")
    if name == "pack_quantized":
        return package.PackedQuantizationCompressor
    return package.IntQuantizationCompressor


def scheme_of(bits: int, strategy: str, group: int | None, *, symmetric: bool) -> Any:
    package = import_module("compressed_tensors.quantization")
    weights = package.QuantizationArgs(
        num_bits=bits, type="int", strategy=strategy, group_size=group, symmetric=symmetric
    )
    return package.QuantizationScheme(targets=["Linear"], weights=weights)


# --------------------------------------------------------------------------------------------------
# Every code with every zero point, against each exporter's own arithmetic.


def test_awq(tmp_path: Path) -> None:
    codes, zeros, scales = every_pair(4)
    tensors = awq("a", codes, zeros, scales)
    found = values(write(tmp_path, tensors, {"quant_method": "awq", "bits": 4}))
    assert torch.equal(found, by_hand(codes, zeros, scales))
    # AutoAWQ's own way back: unpack in order, then pick by reverse_awq_tensor's index.
    shifts = torch.arange(0, 32, 4)
    back = torch.tensor((0, 4, 1, 5, 2, 6, 3, 7))
    opened = [
        ((tensors[f"a.{name}"][:, :, None] >> shifts) & 15)[:, :, back].flatten(1)
        for name in ("qweight", "qzeros")
    ]
    wide = opened[1].repeat_interleave(128, 0)
    published = (opened[0] - wide).double() * scales.T.double().repeat_interleave(128, 0)
    assert torch.equal(found, published.T)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq(tmp_path: Path, bits: int, version: str, act_order: bool, seed: int) -> None:
    codes, zeros, scales = every_pair(bits)
    less = 1 if version == "gptq" else 0
    zeros = zeros + less  # v1 cannot store 0, and stores 1 to 16 as 0 to 15
    index = torch.arange(codes.shape[1]) // 128
    if act_order:
        index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(seed))]
    tensors = gptq("a", codes, zeros, scales, (bits, less, index))
    stated = {**GPTQ_CONFIG, "bits": bits, "checkpoint_format": version, "desc_act": act_order}
    found = values(write(tmp_path, tensors, stated))
    assert torch.equal(found, by_hand(codes, zeros, scales, index))
    # AutoGPTQ's own way back (qlinear_cuda: dequantize_weight).
    shifts = torch.arange(0, 32, bits)
    mask = (1 << bits) - 1
    weight = ((tensors["a.qweight"][:, None, :] >> shifts[None, :, None]) & mask).flatten(0, 1)
    zero = ((tensors["a.qzeros"][:, :, None] >> shifts) & mask).flatten(1) + less
    published = tensors["a.scales"].double()[index] * (weight - zero[index]).double()
    assert torch.equal(found, published.T)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("strategy", "group"), [("group", 32), ("group", 128), ("channel", None)])
def test_compressed_tensors_packed(
    tmp_path: Path, bits: int, symmetric: bool, strategy: str, group: int | None
) -> None:
    scheme = scheme_of(bits, strategy, group, symmetric=symmetric)
    state, grid = grid_of(bits, 128 if group is None else group, symmetric)
    if strategy == "channel":
        state = {name: each[:, :1] if name != "weight" else each for name, each in state.items()}
    made = compressor("pack_quantized").compress(dict(state), scheme)
    folder = write(tmp_path, {f"a.{name}": each for name, each in made.items()}, None)
    theirs = compressor("pack_quantized").decompress(made, scheme)["weight"]
    found = values(folder)
    assert torch.equal(found.to(theirs.dtype), theirs)
    assert set(grid.flatten().tolist()) == set(range(1 << bits))


def grid_of(bits: int, group: int, symmetric: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Return float32 weights whose codes are all codes under every zero point."""
    count, half = 1 << bits, 1 << (bits - 1)
    rows, groups = 24, 2 * max(count // group, 1)
    codes = (torch.arange(groups * group)[None, :] + torch.arange(rows)[:, None]) % count
    zeros = torch.arange(rows * groups).reshape(rows, groups) % count - half
    zeros = torch.zeros_like(zeros) if symmetric else zeros
    scales = torch.tensor([2.0**-12, 0.5, 0.0117, 3.0])[torch.arange(rows) % 4][:, None]
    scales = scales.expand(rows, groups).contiguous()
    wide = zeros.repeat_interleave(group, 1)
    weight = (codes - half - wide) * scales.repeat_interleave(group, 1)
    state = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros.to(torch.int8)}
    return state, codes


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_compressed_tensors_bytes(tmp_path: Path, symmetric: bool, strategy: str) -> None:
    scheme = scheme_of(8, strategy, None, symmetric=symmetric)
    state, _ = grid_of(8, 256, symmetric)
    cut = (slice(None), slice(0, 1)) if strategy == "channel" else (0, slice(0, 1))
    state = {name: each[cut] if name != "weight" else each for name, each in state.items()}
    made = compressor("naive_quantized").compress(dict(state), scheme)
    folder = write(tmp_path, {f"a.{name}": each for name, each in made.items()}, None)
    theirs = compressor("naive_quantized").decompress(made, scheme)["weight"]
    assert torch.equal(values(folder).float(), theirs)


def test_torchao(tmp_path: Path, seed: int) -> None:
    exported = import_module("torchao.prototype.safetensors.safetensors_support")
    torchao = import_module("torchao.quantization")
    four_bits: Any = torch.__dict__["int4"]
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(seed))
    tensors = {
        "rows.weight": torchao.Int8Tensor.from_hp(weight, torchao.PerRow()),
        "groups.weight": torchao.IntxUnpackedToInt8Tensor.from_hp(weight, (1, 32), four_bits),
    }
    flat, metadata = exported.flatten_tensor_state_dict(tensors)
    save_file(flat, tmp_path / "m.safetensors", metadata=metadata)
    for name, tensor in tensors.items():
        found = values(tmp_path, name.removesuffix(".weight"))
        assert torch.equal(found.float(), tensor.dequantize().float())


# --------------------------------------------------------------------------------------------------
# Rows, blocks of rows and reused buffers give the same numbers.


@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_rows_are_those_of_the_whole(tmp_path: Path, name: str) -> None:
    codes, zeros, scales = every_pair(4)
    index = torch.arange(codes.shape[1]) // 128
    tensors = (
        awq("a", codes, zeros, scales)
        if name == "awq"
        else gptq("a", codes, zeros + 1, scales, (4, 1, index))
    )
    whole = values(write(tmp_path, tensors, None))
    with Checkpoint.open(tmp_path) as checkpoint:
        stored = checkpoint.stored("a")
        assert torch.equal(stored.rows(3, 9).values(torch.float64), whole[3:9])
        reader = PositionedReader({file.file: file.file_size for file in checkpoint.shards})
        for source in (stored, reader.over(stored)):
            pieces = dict(source.row_blocks(5 * codes.shape[1]))
            assert list(pieces) == [0, 5, 10, 15]
            joined = torch.cat([piece.values(torch.float64) for piece in pieces.values()])
            assert torch.equal(joined, whole)


# --------------------------------------------------------------------------------------------------
# Bad input: refused by name, with the tensor.


def damaged(change: str) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    codes, zeros, scales = every_pair(4)
    index = torch.arange(codes.shape[1]) // 128
    tensors = gptq("a", codes, zeros, scales, (4, 0, index))
    stated: dict[str, Any] | None = None
    if change.startswith("no "):
        del tensors[f"a.{change.removeprefix('no ')}"]
    elif change == "scales of another module":
        tensors["a.scales"] = tensors["a.scales"].repeat(2, 1)
    elif change == "zero points of another module":
        tensors["a.qzeros"] = tensors["a.qzeros"][:, :1]
    elif change == "a group that has no scale":
        tensors["a.g_idx"][7] = 9
    elif change == "an index of another width":
        tensors["a.g_idx"] = tensors["a.g_idx"][:-1]
    elif change == "a repacked format":
        stated = {**GPTQ_CONFIG, "checkpoint_format": "marlin"}
    elif change == "integer scales":
        tensors["a.scales"] = tensors["a.scales"].int()
    return tensors, stated


REFUSALS: dict[str, tuple[type[Refused], str]] = {
    "no scales": (LayoutMismatch, r"a\.scales, as gptq stores it"),
    "no qzeros": (LayoutMismatch, r"a\.qzeros, as gptq stores it"),
    "scales of another module": (ShapeMismatch, r"zero_point a\.qzeros of gptq"),
    "zero points of another module": (ShapeMismatch, r"zero_point a\.qzeros of gptq"),
    "a group that has no scale": (InvalidArgument, r"a\.g_idx\[7\] = 9.*a group from 0 to 1"),
    "an index of another width": (ShapeMismatch, r"group_index a\.g_idx of gptq.*I32 \[256\]"),
    "a repacked format": (LayoutMismatch, "checkpoint_format of a = 'marlin'"),
    "integer scales": (Refused, r"scales of a = 'I32'.*BF16, F16, F32"),
}


@pytest.mark.parametrize("change", REFUSALS)
def test_what_does_not_fit_is_refused(tmp_path: Path, change: str) -> None:
    error, text = REFUSALS[change]
    folder = write(tmp_path, *damaged(change))
    with pytest.raises(error, match=text):
        values(folder)


def test_stated_shape_and_words_must_agree(tmp_path: Path) -> None:
    state, _ = grid_of(4, 32, symmetric=True)
    scheme = scheme_of(4, "group", 32, symmetric=True)
    made = compressor("pack_quantized").compress(dict(state), scheme)
    made["weight_shape"] = torch.tensor([24, 999])
    folder = write(tmp_path, {f"a.{name}": each for name, each in made.items()}, None)
    with pytest.raises(ShapeMismatch, match=r"a\.weight_shape = \[24, 999\]"):
        values(folder)


# --------------------------------------------------------------------------------------------------
# Words.


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("order", [None, AWQ_ORDER])
def test_words_open_as_they_were_packed(bits: int, order: tuple[int, ...] | None) -> None:
    order = order if bits == 4 else None
    codes = torch.arange(4 * 256).reshape(4, -1) % (1 << bits)
    assert torch.equal(unpack_words(words(codes, bits, order), bits, 1, order).int(), codes.int())
    along_rows = unpack_words(words(codes, bits, order).T.contiguous(), bits, 0, order)
    assert torch.equal(along_rows.T.int(), codes.int())


def test_schemes_are_registered_by_their_names() -> None:
    assert all(scheme.name == name for name, scheme in SCHEMES.items())
