"""Compare the probe kernel on a GPU with the CPU, byte for byte.

suites/support/probes/test_simt_probe_formats.py runs the checks one by one; for machines without
pytest this is also a script. From the root of the repository, with torch and the CuTe DSL
importable:

    PYTHONPATH=.types:$PYTHONPATH python3 -m degarble.suites.kernels.format_checks

One line a check; the exit status is 1 if any differs, 2 without a GPU that kernels exist for.
Every probe meets all 65,536 samples; the quantiser meets ragged matrices and the edges of its rule.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import DegarbleError
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.layouts import SWIZZLE_128X4, to_layout
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.quantise import quantise
from degarble.harness.formats.scalar_ops import nvfp4_tensor_encode_scale
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.targets import target_of_device
from degarble.suites.support.probes.probes import GROUPS, SAMPLES, Sample, expected

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.kernels.runtime.targets import Target

UNCACHED = CompileSettings()
MATRICES = ((1, 16), (3, 48), (130, 80), (256, 1024), (300, 336))
SPREADS = ("ordinary", "tiny", "huge", "edges")


@dataclass(frozen=True)
class Matrix:
    """A bfloat16 matrix to quantise: extents, and how its values are spread."""

    rows: int
    columns: int
    spread: str

    @property
    def name(self) -> str:
        """One line that finds the matrix again."""
        return f"quantise {self.rows}x{self.columns} {self.spread}"

    def values(self) -> Tensor:
        """Draw the matrix, on the CPU."""
        generator = torch.Generator().manual_seed(self.rows * 7919 + self.columns)
        x_MK = torch.randn(self.rows, self.columns, generator=generator)
        if self.spread == "tiny":
            return (x_MK * 2.0**-120).bfloat16()
        if self.spread == "huge":
            return (x_MK * 2.0**120).bfloat16()
        if self.spread == "edges":
            x_MK[::2] *= torch.logspace(-12, 3, self.columns)  # tiny blocks: scale 0, codes 6
            x_MK[1::5, :16] = -0.0
            x_MK[2::5] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(
                self.columns // 8
            )
        return x_MK.bfloat16()


def matrices() -> Iterator[Matrix]:
    """Yield every matrix."""
    for rows, columns in MATRICES:
        yield from (Matrix(rows, columns, spread) for spread in SPREADS)


def difference(name: str, got: Tensor, want: Tensor) -> str:
    """Describe how unsigned integers differ; empty where they do not."""
    differs = got != want
    if not bool(differs.any()):
        return ""
    at = tuple(differs.nonzero()[0].tolist())
    return (
        f"{name}: {int(differs.sum())} of {differs.numel()} differ (budget 0: the arithmetic is "
        f"exact); first at {at}: got 0x{int(got[at]):02X}, want 0x{int(want[at]):02X}"
    )


def group_on_device(group: str, settings: CompileSettings) -> Tensor:
    """Run a group of probes on the GPU; int64 [N, S] on the CPU."""
    from degarble.suites.support.probes import simt_probe_formats as probe  # noqa: PLC0415  needs the DSL

    kernel = probe.compile_probe(group, target_of_device(), settings)
    return probe.run_samples(kernel, len(GROUPS[group]))


def group_differences(group: str, settings: CompileSettings = UNCACHED) -> list[tuple[str, str]]:
    """Return, for every probe of a group, its name and how GPU and CPU differ."""
    got, want = group_on_device(group, settings), expected(group)
    names = [f"{group}: {probe.name}" for probe in GROUPS[group]]
    return [(name, difference(name, got[i], want[i])) for i, name in enumerate(names)]


def tensor_differences(group: str) -> list[tuple[str, str]]:
    """Return, for every probe of a group, how torch on the GPU and torch on the CPU differ."""
    got, want = expected(group, "cuda").cpu(), expected(group)
    names = [f"torch on the GPU, {group}: {probe.name}" for probe in GROUPS[group]]
    return [(name, difference(name, got[i], want[i])) for i, name in enumerate(names)]


def native_on_device(target: Target) -> Tensor:
    """Run the processor's own conversions; int64 [N, S] on the CPU."""
    from degarble.suites.support.probes import simt_probe_formats as probe  # noqa: PLC0415  needs the DSL

    kernel = probe.compile_native(target, UNCACHED)
    return probe.run_samples(kernel, len(probe.native_probes(target)))


def native_differences() -> list[tuple[str, str]]:
    """Return, for every conversion instruction, how it and our formula differ."""
    from degarble.suites.support.probes import simt_probe_formats as probe  # noqa: PLC0415  needs the DSL

    target = target_of_device()
    got = native_on_device(target)
    index = torch.arange(SAMPLES, dtype=torch.int64)
    sample = Sample(index, index % 256, index // 256)
    return [
        (f"native: {p.name}", difference(f"native: {p.name}", got[i], p.formula(sample)))
        for i, p in enumerate(probe.native_probes(target))
    ]


def quantised_on_device(matrix: Matrix) -> tuple[Tensor, Tensor]:
    """Quantise a matrix on the GPU; codes and scale storage on the CPU."""
    from degarble.suites.support.probes import simt_probe_formats as probe  # noqa: PLC0415  needs the DSL

    values_MK = matrix.values()
    encode_scale = nvfp4_tensor_encode_scale(values_MK.float().abs().max().reshape(1))
    shape = probe.MatrixShape(matrix.rows, matrix.columns)
    kernel = probe.compile_quantise(shape, target_of_device(), UNCACHED)
    codes_MP, scales = probe.run_quantise(kernel, shape, values_MK.cuda(), encode_scale.cuda())
    return codes_MP.cpu(), scales.cpu()


def quantised_by_definition(matrix: Matrix) -> tuple[Tensor, Tensor]:
    """Quantise a matrix as the canonical dialect says; codes, and scales in 128x4 order."""
    definition = quantise(matrix.values(), NVFP4, CANONICAL)
    return definition.codes, to_layout(definition.block_scale, SWIZZLE_128X4)


def quantise_difference(matrix: Matrix) -> str:
    """Say how the GPU's codes and scales differ from the canonical dialect; empty if not."""
    codes_MP, scales = quantised_on_device(matrix)
    want_codes_MP, want_scales = quantised_by_definition(matrix)
    found = (
        difference(f"{matrix.name}, scales", scales, want_scales),
        difference(f"{matrix.name}, codes", codes_MP, want_codes_MP),
    )
    return "; ".join(filter(None, found))


def cached_differences(folder: Path) -> list[tuple[str, str]]:
    """Run the codecs twice, compiled and then loaded from `folder`."""
    from degarble.suites.support.probes import simt_probe_formats as probe  # noqa: PLC0415  needs the DSL

    settings, target = CompileSettings(cache_folder=folder), target_of_device()
    compiled = probe.compile_probe("codecs", target, settings)
    loaded = probe.compile_probe("codecs", target, settings)
    if compiled.from_cache or not loaded.from_cache:
        return [("cache", f"cache: first from disk {compiled.from_cache}, then not")]
    return [(f"from disk: {name}", why) for name, why in group_differences("codecs", settings)]


def report() -> Iterator[tuple[str, str]]:
    """Run every check; yield its name and how it differs."""
    for group in GROUPS:
        yield from group_differences(group)
        yield from tensor_differences(group)
    yield from native_differences()
    for matrix in matrices():
        yield matrix.name, quantise_difference(matrix)
    with tempfile.TemporaryDirectory() as folder:
        yield from cached_differences(Path(folder))


def main() -> int:
    """Print one line a check and a summary."""
    failed = total = 0
    try:
        target = target_of_device()
        for name, why in report():
            print(f"DIFFERS {why}" if why else f"equal   {name}", flush=True)  # noqa: T201  a script
            total += 1
            failed += bool(why)
    except DegarbleError as error:
        print(f"REFUSED: {error}", file=sys.stderr)  # noqa: T201  a script
        return error.exit_status
    where = f"{torch.cuda.get_device_name()} ({target.name}), torch {torch.__version__}"
    print(f"{total} checks, {failed} failed; {where}")  # noqa: T201  a script
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
