"""Compare wgmma on a Hopper GPU with references.tensor_core, bit for bit.

pytest runs the checks one by one; this script is for machines without pytest. From the root of the
repository, with torch and the CuTe DSL importable:

    PYTHONPATH=.types:$PYTHONPATH python3 -m degarble.suites.support.probes.wgmma_checks [FOLDER]

One line a check; the exit status is 1 if any differs, 2 without a Hopper GPU. Two things must hold:
the model's constants reproduce the device, and neighbouring constants do not. FOLDER receives the
device's codes of every case that differs, as NumPy files.
"""

from __future__ import annotations

import sys
import zlib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from degarble.harness.base.errors import DegarbleError
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.targets import target_of_device
from degarble.references import tensor_core as tc
from degarble.suites.references.tensor_core_cases import (
    DENSE,
    DenseCase,
    Draw,
    bit_mismatch,
    bits,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
TILES = (16, 24, 64, 128, 256)
DRAWS = 4  # of each family, beside the first


@dataclass(frozen=True)
class Case:
    """Which operands meet which instruction: extents, N of the instruction, C read or not."""

    operand: str
    family: str
    seed: int
    tile_n: int = 16
    reads_c: bool = True
    m: int = 128
    n: int = 64
    k: int = 256

    @property
    def name(self) -> str:
        """One line that finds the case again."""
        c = "C" if self.reads_c else "no C"
        extents = f"{self.m}x{self.n}x{self.k}"
        return f"{self.operand} {self.family} {extents} n{self.tile_n} {c} seed {self.seed}"

    def operands(self) -> DenseCase:
        """Draw the operands, on the CPU."""
        generator = torch.Generator().manual_seed(self.seed)
        draw = Draw(generator, m=self.m, n=self.n, k=self.k, dtype=DTYPES[self.operand])
        return DENSE[self.family](draw)


@dataclass(frozen=True)
class Wrong:
    """A rule that the device must contradict, and the family that shows it."""

    rule: tc.StepRule
    operand: str
    family: str


def cases() -> Iterator[Case]:
    """Yield every comparison: all families, all tile widths, with and without C."""
    for operand in DTYPES:
        for family in DENSE:
            first = zlib.crc32(f"{operand} {family}".encode())
            for seed in range(first, first + 1 + DRAWS):
                yield Case(operand, family, seed)
            yield Case(operand, family, first, reads_c=False)
            yield Case(operand, family, first, k=16)
        for tile_n in TILES:
            yield Case(operand, "spread", tile_n, tile_n=tile_n, n=768, k=128)
        yield Case(operand, "normal", 1, tile_n=128, m=256, n=256, k=2048)


def _rule(name: str, fraction_bits: int = 0, zero_exponent: int = 0) -> tc.StepRule:
    rule = tc.WGMMA_F16
    return replace(
        rule,
        name=name,
        fraction_bits=rule.fraction_bits + fraction_bits,
        zero_exponent=rule.zero_exponent + zero_exponent,
    )


WRONG = (
    Wrong(_rule("24 fraction bits", fraction_bits=-1), "bf16", "cancelling"),
    Wrong(_rule("26 fraction bits", fraction_bits=1), "bf16", "cancelling"),
    Wrong(_rule("24 fraction bits", fraction_bits=-1), "f16", "cancelling"),
    Wrong(_rule("26 fraction bits", fraction_bits=1), "f16", "cancelling"),
    Wrong(_rule("zero at -132", zero_exponent=1), "bf16", "zero_exponent"),
    Wrong(_rule("zero at -134", zero_exponent=-1), "bf16", "zero_exponent"),
)


@cache
def on_device(case: Case) -> Tensor:
    """Run a case on the GPU and bring the result back."""
    from degarble.suites.support.probes.sm90_probe_wgmma import probe_gemm  # noqa: PLC0415  needs the DSL

    a, b, c = (x.cuda() for x in case.operands())
    return probe_gemm(a, b, c if case.reads_c else None, case.tile_n, CompileSettings()).cpu()


def by_model(case: Case, rule: tc.StepRule = tc.WGMMA_F16) -> Tensor:
    """Compute a case with the model, on the CPU."""
    a, b, c = case.operands()
    return tc.dense_gemm(a, b, c if case.reads_c else None, rule=rule)


def mismatch(case: Case) -> str:
    """Describe how device and model differ; empty if they do not."""
    return bit_mismatch(on_device(case), by_model(case))


def contradicted(wrong: Wrong) -> int:
    """Count the results by which the device contradicts a wrong rule."""
    case = Case(wrong.operand, wrong.family, seed=1)
    return int((bits(on_device(case)) != bits(by_model(case, wrong.rule))).sum())


def model_mismatch_on_device(case: Case) -> str:
    """Describe how the model on the GPU differs from itself on the CPU; empty is expected."""
    a, b, c = (x.cuda() for x in case.operands())
    return bit_mismatch(tc.dense_gemm(a, b, c).cpu(), by_model(case))


def report(folder: Path | None) -> Iterator[tuple[bool, str]]:
    """Run every check; yield whether it passed and a line about it."""
    for case in cases():
        why = mismatch(case)
        if why and folder:
            folder.mkdir(parents=True, exist_ok=True)
            np.save(folder / f"{case.name.replace(' ', '_')}.npy", bits(on_device(case)).numpy())
        yield not why, f"{'DIFFERS' if why else 'equal  '} {case.name} {why}"
    for wrong in WRONG:
        seen = contradicted(wrong)
        word = "refuted" if seen else "NOT REFUTED"
        yield seen > 0, f"{word} {wrong.rule.name}, {wrong.operand} {wrong.family}: {seen} differ"
    for operand in DTYPES:
        why = model_mismatch_on_device(Case(operand, "all_codes", seed=2))
        yield not why, f"{'DIFFERS' if why else 'equal  '} {operand} model on GPU and CPU {why}"


def main(folder: Path | None = None) -> int:
    """Print one line a check and a summary."""
    try:
        target_of_device()
        lines = []
        for line in report(folder):
            print(line[1], flush=True)  # noqa: T201  a script
            lines.append(line)
    except DegarbleError as error:
        print(f"REFUSED: {error}", file=sys.stderr)  # noqa: T201  a script
        return error.exit_status
    failed = sum(not passed for passed, _ in lines)
    results = sum(case.m * case.n for case in cases())
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    summary = f"{len(lines)} checks, {failed} failed; {results} results of wgmma; {where}"
    print(summary)  # noqa: T201  a script
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:2])))
