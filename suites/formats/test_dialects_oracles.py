"""The dialects against the packages that speak them, and canonical against each of them.

One process a package (they warn and import widely) runs all cases; one test a package, so that no
run pays for the imports twice. Package and dialect must agree in every bit. Canonical and package
must agree in scale bytes and codes but for numbers at a rounding boundary, and each is looked at.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.formats.codec import decode_array, unpack_nibbles
from degarble.harness.formats.dialects import CANONICAL, DIALECTS, Dialect
from degarble.harness.formats.number_formats import E4M3, MXFP4, MXFP8, NVFP4
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.suites.formats.block_cases import edge_cases, merged_nan, ordinary_cases
from degarble.suites.formats.dialect_oracles import ORACLES
from degarble.suites.formats.test_dialects import edge_tensor

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

# The boundaries between E2M1 magnitudes; a tie belongs to the even code.
MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)

# Edge cases that a dialect refuses, because the package leaves them to the machine's NaN.
REFUSED = {
    "modelopt": set[str](),
    "compressed_tensors": {"nan", "infinity"},
    "torchao": {"nan", "infinity", "zeros", "negative_zeros", "tiny", "subnormal"},
    "torchao_one_level": {"nan", "infinity"},
}


@dataclass(frozen=True)
class Answer:
    """What a package returned for one case."""

    codes: Tensor
    block_scale: Tensor
    tensor_scale: Tensor
    values: Tensor


@dataclass(frozen=True)
class Oracle:
    """Everything that one process returned: (path, case) to answer, and the package's version."""

    version: str
    answers: dict[tuple[str, str], Answer]


def ask(package: str, cases: dict[str, Tensor], folder: Path) -> Oracle:
    """Run a package over all cases in a process of its own."""
    source, target = folder / "cases.safetensors", folder / "answers.safetensors"
    save_file(cases, source)
    command = [sys.executable, "-m", "degarble.suites.formats.dialect_oracles", package]
    done = subprocess.run(
        [*command, str(source), str(target)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with safe_open(target, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  no mapping
        version = file.metadata()["version"]
    answers: dict[tuple[str, str], dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        path, case, field = key.split("/")
        answers.setdefault((path, case), {})[field] = tensor
    return Oracle(version, {key: Answer(**fields) for key, fields in answers.items()})


def all_cases(seed: int) -> dict[str, Tensor]:
    """Ordinary and edge tensors; the edge tensor of the dialects' table is one of them."""
    return {**ordinary_cases(seed), **edge_cases(), "edge_table": edge_tensor().repeat(1, 2)}


def differences(answer: Answer, values: Tensor, dialect: Dialect) -> dict[str, int]:
    """Count differing codes, scale bytes and tensor scales between a package and its dialect."""
    q = quantise(values, NVFP4, dialect)
    assert q.tensor_scale is not None
    given, ours = answer.tensor_scale.float(), q.tensor_scale
    same_scale = torch.equal(given.nan_to_num(nan=-1.0), ours.nan_to_num(nan=-1.0))
    return {
        "codes": int((unpack_nibbles(answer.codes) != q.element_codes()).sum()),
        "scale bytes": int((merged_nan(answer.block_scale) != merged_nan(q.block_scale)).sum()),
        "tensor scale": int(not same_scale),
    }


def assert_the_dialect_is_the_package(name: str, oracle: Oracle, cases: dict[str, Tensor]) -> None:
    dialect = DIALECTS[name]
    for case, values in cases.items():
        if case in REFUSED[name]:
            with pytest.raises(InvalidArgument):
                quantise(values, NVFP4, dialect)
            continue
        found = differences(oracle.answers[name, case], values, dialect)
        message = f"{name} {oracle.version}, {case}: facts were read in {dialect.source}"
        assert found == {"codes": 0, "scale bytes": 0, "tensor scale": 0}, message


def assert_decoded_alike(name: str, oracle: Oracle, cases: dict[str, Tensor]) -> None:
    """Packages multiply scale by scale first: one rounding away, in the dtype that they return."""
    for case in ordinary_cases(0):
        answer = oracle.answers[name, case]
        ours = dequantise(quantise(cases[case], NVFP4, DIALECTS[name]), answer.values.dtype)
        ulp = torch.finfo(answer.values.dtype).eps
        error = (ours.double() - answer.values.double()).abs()
        assert bool((error <= 1.01 * ulp * ours.double().abs()).all()), case


def boundary_distance(scaled: Tensor) -> Tensor:
    """Distance of each value from the nearest boundary, in float32 ulps of that boundary."""
    gap = (scaled.abs()[..., None] - MIDPOINTS).abs()
    ulp = torch.exp2(MIDPOINTS.log2().floor() - 23)
    return (gap / ulp).amin(-1)


def code_mismatches_off_boundaries(answer: Answer, values: Tensor) -> tuple[int, int]:
    """Compare with canonical where scale bytes agree: (mismatches, those beyond 2 ulp)."""
    q = quantise(values, NVFP4, CANONICAL)
    same_scale = (answer.block_scale == q.block_scale).repeat_interleave(16, -1)
    differ = (unpack_nibbles(answer.codes) != q.element_codes()) & same_scale
    # A zero carries no distance: its sign is a fact of the dialect, in the edge table.
    differ &= values != 0
    step = q.scale_values().double().repeat_interleave(16, -1) * q.decode_scale.double()
    scaled = (values.double() / step)[differ]
    return int(differ.sum()), int((boundary_distance(scaled) > 2).sum())


def moved_scale_bytes(answer: Answer, values: Tensor, encode_scale: Tensor, reach: float) -> int:
    """Count scale bytes that differ from canonical; each lies within `reach` of a boundary."""
    q = quantise(values, NVFP4, encode_scale=encode_scale)
    differ = answer.block_scale != q.block_scale
    assert int((answer.block_scale.int() - q.block_scale.int()).abs().max()) <= 1
    pair = torch.stack([answer.block_scale[differ], q.block_scale[differ]])
    middle = decode_array(pair, E4M3).double().mean(0)
    amax = values.double().abs().reshape(*q.block_scale.shape, 16).amax(-1)[differ]
    exact = amax / 6 * encode_scale.double()
    assert bool(((exact / middle - 1).abs() <= reach).all())
    return int(differ.sum())


def assert_canonical_and_package_agree(
    name: str, oracle: Oracle, cases: dict[str, Tensor], *, most: float
) -> None:
    moved = mismatches = total = 0
    for case in ordinary_cases(0):
        if case.startswith(("outlier", "sparse", "spread")):
            continue  # blocks below the scale range differ by rule: the edge table shows how
        answer, values = oracle.answers[name, case], cases[case]
        encode_scale = quantise(values, NVFP4).encode_scale
        moved += moved_scale_bytes(answer, values, encode_scale, reach=2.0**-21)
        count, beyond = code_mismatches_off_boundaries(answer, values)
        assert beyond == 0, f"{name} {oracle.version}, {case}"
        mismatches, total = mismatches + count, total + values.numel()
    assert mismatches <= most * total, f"{mismatches} of {total} codes"
    assert moved <= most * total / 16, f"{moved} of {total // 16} scale bytes"


@pytest.mark.slow
def test_modelopt(seed: int, tmp_path: Path) -> None:
    cases = all_cases(seed)
    oracle = ask("nvidia-modelopt", cases, tmp_path)
    assert_the_dialect_is_the_package("modelopt", oracle, cases)
    assert_decoded_alike("modelopt", oracle, cases)
    assert_canonical_and_package_agree("modelopt", oracle, cases, most=5e-3)


def test_torchao(seed: int, tmp_path: Path) -> None:
    cases = all_cases(seed)
    oracle = ask("torchao", cases, tmp_path)
    for name in ("torchao", "torchao_one_level"):
        assert_the_dialect_is_the_package(name, oracle, cases)
        assert_decoded_alike(name, oracle, cases)
    assert_canonical_and_package_agree("torchao", oracle, cases, most=5e-3)
    assert_torchao_writes_canonical_mx(oracle, cases)


def assert_torchao_writes_canonical_mx(oracle: Oracle, cases: dict[str, Tensor]) -> None:
    """Scales rounded up, as canonical has them; only the byte of a zero MXFP4 block differs."""
    for path, fmt in (("torchao_mxfp4", MXFP4), ("torchao_mxfp8", MXFP8)):
        for case in ordinary_cases(0):
            answer, q = oracle.answers[path, case], quantise(cases[case], fmt)
            assert torch.equal(answer.codes, q.codes), f"{path} {case}"
            is_zero = (cases[case].float().reshape(len(q.codes), -1, 32) == 0).all(-1)
            floor = torch.where(is_zero & (fmt == MXFP4), 1, answer.block_scale)
            assert torch.equal(floor, q.block_scale), f"{path} {case}"
            assert torch.equal(answer.values, dequantise(q)), f"{path} {case}"


@pytest.mark.slow
def test_compressed_tensors(seed: int, tmp_path: Path) -> None:
    cases = all_cases(seed)
    oracle = ask("compressed-tensors", cases, tmp_path)
    name = "compressed_tensors"
    assert_the_dialect_is_the_package(name, oracle, cases)
    assert_decoded_alike(name, oracle, cases)
    # float32 inputs and an exact G: nothing is rounded to bfloat16, so it agrees with canonical.
    answer, values = oracle.answers[name, "power_of_two_fp32"], cases["power_of_two_fp32"]
    assert torch.equal(answer.block_scale, quantise(values, NVFP4).block_scale)
    assert code_mismatches_off_boundaries(answer, values)[1] == 0
    moved = blocks = 0
    for case in ("normal_bf16", "small_bf16", "large_bf16"):
        answer, values = oracle.answers[name, case], cases[case]
        moved += moved_scale_bytes(answer, values, answer.tensor_scale.float(), reach=2.0**-8)
        blocks += answer.block_scale.numel()
    assert 0.002 * blocks < moved < 0.06 * blocks, f"{moved} of {blocks} scale bytes"


@pytest.mark.parametrize("name", ["flashinfer_exact", "flashinfer_fast", "vllm_fast"])
def test_the_models_of_kernels_leave_canonical_at_boundaries_only(name: str, seed: int) -> None:
    cases = ordinary_cases(seed)
    answers = {(name, case): answer_of(DIALECTS[name], cases[case]) for case in cases}
    assert_canonical_and_package_agree(name, Oracle("model", answers), cases, most=5e-3)


# Planted faults: the same comparisons on answers that a wrong producer would give


def answer_of(dialect: Dialect, values: Tensor) -> Answer:
    q = quantise(values, NVFP4, dialect)
    assert q.tensor_scale is not None
    return Answer(q.codes, q.block_scale, q.tensor_scale, dequantise(q))


@pytest.mark.parametrize("field", ["codes", "block_scale", "tensor_scale"])
def test_one_changed_bit_is_detected(seed: int, field: str) -> None:
    values = ordinary_cases(seed)["normal_fp32"]
    answer = answer_of(CANONICAL, values)
    assert set(differences(answer, values, CANONICAL).values()) == {0}
    tensor = getattr(answer, field).clone()
    bits = tensor.view(torch.int32) if tensor.dtype is torch.float32 else tensor
    bits.view(-1)[0] ^= 1
    found = differences(replace(answer, **{field: tensor}), values, CANONICAL)
    expected = {"codes": "codes", "block_scale": "scale bytes", "tensor_scale": "tensor scale"}
    assert {name for name, count in found.items() if count} == {expected[field]}


def test_a_code_off_a_boundary_is_detected(seed: int) -> None:
    values = ordinary_cases(seed)["normal_fp32"]
    answer = answer_of(CANONICAL, values)
    assert code_mismatches_off_boundaries(answer, values) == (0, 0)
    codes = answer.codes.clone()
    codes[7, 9] ^= 0x01
    assert code_mismatches_off_boundaries(replace(answer, codes=codes), values) == (1, 1)


def test_a_scale_byte_off_a_boundary_is_detected(seed: int) -> None:
    values = ordinary_cases(seed)["normal_fp32"]
    answer = answer_of(CANONICAL, values)
    encode_scale = quantise(values, NVFP4).encode_scale
    assert moved_scale_bytes(answer, values, encode_scale, reach=2.0**-21) == 0
    moved = answer.block_scale.clone()
    moved[3, 5] ^= 1
    with pytest.raises(AssertionError):
        moved_scale_bytes(replace(answer, block_scale=moved), values, encode_scale, reach=2.0**-21)


def test_neighbours_of_a_boundary_are_forgiven_and_nothing_else() -> None:
    for midpoint in MIDPOINTS.float():
        ulp = torch.nextafter(midpoint, torch.tensor(torch.inf)) - midpoint
        offsets = torch.tensor([-3.0, -2.0, 0.0, 2.0, 3.0]) * ulp
        near = boundary_distance((midpoint + offsets).double()) <= 2
        # Below a power of two the spacing halves, and no midpoint is one but 0.25.
        assert near.tolist() == [False, True, True, True, False]
        assert (boundary_distance(-(midpoint + offsets).double()) <= 2).tolist() == near.tolist()


def test_every_package_of_the_dialects_has_refusals() -> None:
    paths = {path for package in ORACLES.values() for path in package}
    assert set(REFUSED) == paths & set(DIALECTS)
    assert {"modelopt", "compressed_tensors", "torchao", "torchao_one_level"} == set(REFUSED)
