"""The probe kernel: compiled for every target, its instructions, and on a GPU equal to the CPU."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, ShapeMismatch
from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.runtime.compiling import (
    CompileSettings,
    cubin_facts,
    fused_instructions,
    unstated_roundings,
)
from degarble.kernels.runtime.targets import SM90A, SM100A, TARGETS, Target
from degarble.suites.kernels import format_checks as checks
from degarble.suites.support.probes.probes import (
    CODEC_PROBES,
    GROUPS,
    SAMPLES,
    Probe,
    Sample,
    dense,
    expected,
    number,
    swapped,
)

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from degarble.kernels.runtime.compiling import CompiledKernel

pytestmark = pytest.mark.needs("cutlass")

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)


@pytest.fixture
def kernels() -> ModuleType:
    from degarble.suites.support.probes import simt_probe_formats  # noqa: PLC0415  needs the DSL

    return simt_probe_formats


def all_compiled(kernels: ModuleType, target: Target) -> dict[str, CompiledKernel]:
    settings = CompileSettings()
    compiled = {group: kernels.compile_probe(group, target, settings) for group in GROUPS}
    compiled["native"] = kernels.compile_native(target, settings)
    shape = kernels.MatrixShape(130, 64)
    compiled["quantise"] = kernels.compile_quantise(shape, target, settings)
    return compiled


@each_target
def test_compiles_without_spills_and_with_every_rounding_stated(
    kernels: ModuleType, target: Target
) -> None:
    fused = {}
    for name, kernel in all_compiled(kernels, target).items():
        assert f".target {target.name}\n" in kernel.ptx
        (facts,) = cubin_facts(kernel.cubin)
        assert not facts.spills, facts
        assert facts.registers <= 64, facts
        assert facts.shared_bytes <= 1024, facts  # what the system reserves on sm_100a
        assert unstated_roundings(kernel.ptx) == ()
        assert ".ftz" not in kernel.ptx
        assert not re.search(r"\.approx|\.full\.f32", kernel.ptx)
        fused[name] = len(fused_instructions(kernel.ptx))
    assert {name: count for name, count in fused.items() if count} == {"arithmetic": 2}


def test_the_two_fma_are_those_requested(kernels: ModuleType) -> None:
    probes = [probe for probe in GROUPS["arithmetic"] if probe.name.startswith("fma")]
    assert len(probes) == 2
    kernel = kernels.compile_probe("rotation", SM90A, CompileSettings())
    assert kernel.ptx.count("mul.rn.f32") == 4
    assert len(re.findall(r"(?:add|sub)\.rn\.f32", kernel.ptx)) == 2


def _plain_rotation(sample: Sample) -> Any:
    """What an author writes who does not know the trap."""
    plain = number(sample) * dense(sample, 40503) - swapped(sample) * dense(sample, 60493)
    return ops.bits_of(plain)


def test_a_rotation_with_plain_operators_is_detected(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = {**GROUPS, "planted": (Probe("plain", _plain_rotation),)}
    monkeypatch.setattr(kernels, "GROUPS", planted)
    kernel = kernels.compile_probe("planted", SM90A, CompileSettings())
    found = unstated_roundings(kernel.ptx)
    assert [line.split()[0] for line in found] == ["mul.f32", "mul.f32", "sub.f32"]


def test_conversions_are_the_processors_own(kernels: ModuleType) -> None:
    for target, wanted in ((SM90A, False), (SM100A, True)):
        kernel = kernels.compile_native(target, CompileSettings())
        assert "cvt.rn.satfinite.e4m3x2.f32" in kernel.ptx
        assert ("cvt.rn.satfinite.e2m1x2.f32" in kernel.ptx) is wanted
        assert ("cvt.rp.satfinite.ue8m0x2.f32" in kernel.ptx) is wanted
    for group in ("codecs", "rotation", "arithmetic"):
        kernel = kernels.compile_probe(group, SM100A, CompileSettings())
        assert not re.search(r"cvt\.\S*(e4m3|e2m1|ue8m0|bf16)", kernel.ptx)


def test_refuses_by_name(kernels: ModuleType) -> None:
    for rows, columns in ((4, 24), (0, 16), (4, 0), (-1, 16)):
        with pytest.raises(ShapeMismatch, match="matrix to quantise"):
            kernels.MatrixShape(rows, columns)
    shape = kernels.MatrixShape(4, 16)
    kernel = kernels.compile_quantise(shape, SM90A, CompileSettings())
    scale = torch.ones(1)
    for wrong in (torch.zeros(4, 16), torch.zeros(16, 4, dtype=torch.bfloat16).T):
        with pytest.raises(DtypeMismatch, match="contiguous"):
            kernels.run_quantise(kernel, shape, wrong, scale)
    with pytest.raises(ShapeMismatch, match="compiled for"):
        kernels.run_quantise(kernel, shape, torch.zeros(5, 16, dtype=torch.bfloat16), scale)


def test_a_wrong_byte_from_the_device_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_bit_wrong(group: str, _settings: CompileSettings) -> torch.Tensor:
        values_NS = expected(group)
        values_NS[3, 65_535] ^= 1
        return values_NS

    monkeypatch.setattr(checks, "group_on_device", one_bit_wrong)
    found = [name for name, why in checks.group_differences("codecs") if why]
    assert found == [f"codecs: {CODEC_PROBES[3].name}"]
    (why,) = (why for _, why in checks.group_differences("codecs") if why)
    assert "1 of 65536 differ" in why
    assert "first at (65535,)" in why


def test_a_wrong_scale_from_the_device_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = checks.Matrix(130, 80, "edges")
    codes, scales = checks.quantised_by_definition(matrix)
    monkeypatch.setattr(checks, "quantised_on_device", lambda _matrix: (codes, scales))
    assert checks.quantise_difference(matrix) == ""
    wrong = scales.clone()
    wrong[512:1024] = scales[:512]
    monkeypatch.setattr(checks, "quantised_on_device", lambda _matrix: (codes, wrong))
    assert "scales" in checks.quantise_difference(matrix)
    monkeypatch.setattr(checks, "quantised_on_device", lambda _matrix: (codes ^ 8, scales))
    assert "codes" in checks.quantise_difference(matrix)


def test_the_matrices_hold_the_edges_that_they_promise() -> None:
    scales = checks.quantised_by_definition(checks.Matrix(256, 1024, "edges"))[1]
    assert {0, 0x7E} <= set(scales.tolist())
    names = [matrix.name for matrix in checks.matrices()]
    assert len(set(names)) == len(names)


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
def test_a_gpu_returns_the_same_bytes(group: str) -> None:
    differing = [why for _, why in checks.group_differences(group) if why]
    assert not differing, "\n".join(differing)


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
def test_tensors_on_a_gpu_return_the_same_bytes(group: str) -> None:
    differing = [why for _, why in checks.tensor_differences(group) if why]
    assert not differing, "\n".join(differing)


@pytest.mark.gpu
def test_the_processors_own_conversions_agree() -> None:
    differing = [why for _, why in checks.native_differences() if why]
    assert not differing, "\n".join(differing)


@pytest.mark.gpu
@pytest.mark.parametrize("matrix", list(checks.matrices()), ids=lambda m: m.name.replace(" ", "-"))
def test_a_gpu_quantises_as_the_canonical_dialect_says(matrix: checks.Matrix) -> None:
    assert not checks.quantise_difference(matrix)


@pytest.mark.gpu
def test_a_kernel_from_the_cache_returns_the_same_bytes(tmp_path: Path) -> None:
    differing = [why for _, why in checks.cached_differences(tmp_path) if why]
    assert not differing, "\n".join(differing)


def test_samples_fill_whole_blocks_of_threads(kernels: ModuleType) -> None:
    assert SAMPLES % kernels.THREADS == 0


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that computes as the CPU does, to run the script where there is none."""
    index = torch.arange(SAMPLES)
    sample = Sample(index, index % 256, index // 256)

    def native(target: Target) -> torch.Tensor:
        from degarble.suites.support.probes import simt_probe_formats  # noqa: PLC0415  needs the DSL

        return torch.stack([p.formula(sample) for p in simt_probe_formats.native_probes(target)])

    monkeypatch.setattr(checks, "target_of_device", lambda: SM100A)
    monkeypatch.setattr(checks, "group_on_device", lambda group, _settings: expected(group))
    monkeypatch.setattr(checks, "expected", lambda group, _device="cpu": expected(group))
    monkeypatch.setattr(checks, "native_on_device", native)
    monkeypatch.setattr(checks, "quantised_on_device", checks.quantised_by_definition)
    from_disk = [("from disk: all", "")]
    monkeypatch.setattr(checks, "cached_differences", lambda _folder: from_disk)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no GPU at all")


@pytest.mark.usefixtures("pretended_gpu")
def test_the_script_prints_a_line_a_check_and_says_by_its_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checks.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("equal   ") for line in lines[:-1])
    assert lines[-1].startswith(f"{len(lines) - 1} checks, 0 failed; no GPU at all (sm_100a)")
    for part in (*GROUPS, "torch on the GPU", "native", "quantise", "from disk"):
        assert any(line.startswith(f"equal   {part}") for line in lines), part

    monkeypatch.setattr(checks, "MATRICES", ((3, 48),))
    monkeypatch.setattr(checks, "GROUPS", {"rotation": GROUPS["rotation"]})
    monkeypatch.setattr(checks, "quantised_on_device", wrong_scales)
    assert checks.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("DIFFERS quantise 3x48") for line in lines) == 4
    assert " 4 failed;" in lines[-1]


def wrong_scales(matrix: checks.Matrix) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = checks.quantised_by_definition(matrix)
    return codes, scales.roll(1)


def test_the_script_without_a_gpu_refuses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert checks.main() == 2
    assert capsys.readouterr().err.startswith("REFUSED: CUDA device")
