"""The comparison that proofs rest on: compiled loops against their definition, and its edges."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.checkpoint.transform.convert.job import parts_of, prove
from degarble.harness.checkpoint.transform.proof.bounds import (
    BFLOAT16_BOUND,
    FACTOR_BOUND,
    NO_BOUND,
    ErrorBound,
    PanelScales,
    element_bound,
)
from degarble.harness.checkpoint.transform.proof.compare import (
    BlockMagnitudes,
    PanelComparison,
    compare_rows,
    defined_values,
    exact_values,
    rows_exactly,
)
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.formats.number_formats import FP8_128X128_F32, NVFP4
from degarble.suites.checkpoint.converting_cases import converted, damage, source

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

BOUNDS = {
    "nothing": NO_BOUND,
    "bfloat16": BFLOAT16_BOUND,
    "factor": FACTOR_BOUND,
    "nvfp4": element_bound(NVFP4),
    "fp8": element_bound(FP8_128X128_F32),
}
EDGES = [0.0, -0.0, 1.0, -1.0, 2.0**-140, 448.0, 1e300, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("kind", ["official", "nvfp4-full", "compressed-tensors", "bf16", "v32"])
def test_decoding_is_the_definition(kind: str) -> None:
    formats = set()
    with Checkpoint.open(source(kind)) as checkpoint:
        for module in checkpoint.modules():
            stored = checkpoint.stored(module)
            if len(stored.shape) != 2 or (stored.format in formats and stored.format):
                continue
            if stored.format is None and not stored.weight().value.is_floating_point():  # type: ignore[union-attr]
                continue
            formats.add(stored.format)
            values, steps = exact_values(stored.weight())
            wanted, step = defined_values(stored.weight())
            assert torch.equal(values, wanted)
            if steps is not None and step is not None:
                assert torch.equal(steps.full(tuple(values.shape)), step)
            row = 0
            for begin, panel, _ in rows_exactly(stored):
                assert begin == row
                row += panel.shape[0]
                assert torch.equal(panel, wanted[begin:row])
            assert row == stored.shape[0]
    assert formats


def defined_counts(x: Tensor, y: Tensor, steps: PanelScales, bound: ErrorBound) -> tuple[int, int]:
    same = (x == y) | (x.isnan() & y.isnan())
    gap = (x - y).abs()
    within = (gap <= bound.allowed(x, steps.full(tuple(x.shape)))) & gap.isfinite()
    return int((~same).sum()), int((~(same | within)).sum())


@pytest.mark.parametrize("name", list(BOUNDS))
@pytest.mark.parametrize("block", [(1, 16), (128, 128), (1, 24)])
def test_counting_is_the_definition(name: str, block: tuple[int, int], seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    rows, columns, bound = 300, 144, BOUNDS[name]
    scales = torch.rand(-(-rows // block[0]), -(-columns // block[1]), generator=chance)
    steps = PanelScales(scales.double() + 0.01, block)
    x = torch.randn(rows, columns, generator=chance, dtype=torch.float64)
    x *= torch.exp2(torch.randint(-8, 8, x.shape, generator=chance).double())
    allowed = bound.allowed(x, steps.full((rows, columns)))
    signs = torch.randint(-1, 2, x.shape, generator=chance)
    y = (
        x
        + signs
        * allowed
        * torch.tensor([0.5, 0.999999, 1.000001, 3.0])[
            torch.randint(0, 4, x.shape, generator=chance)
        ]
    )
    for index, (a, b) in enumerate(product(EDGES, EDGES)):
        x.view(-1)[7 * index], y.view(-1)[7 * index] = a, b
    compared = PanelComparison(bound)
    for begin in range(0, rows, 70):  # cuts that no block respects
        cut = slice(begin, min(begin + 70, rows))
        compared.add(x[cut], y[cut], steps.cut(cut.start, cut.stop))
    assert (compared.different, compared.beyond) == defined_counts(x, y, steps, bound)
    assert 0 < compared.beyond <= compared.different < compared.elements
    assert compared.worst is not None
    assert abs(compared.worst.source - compared.worst.output) > compared.worst.bound or (
        math.isnan(compared.worst.output) or math.isinf(compared.worst.source)
    )


def test_the_worst_element_is_found_wherever_panels_are_cut() -> None:
    x, y = torch.zeros(50, 16, dtype=torch.float64), torch.zeros(50, 16, dtype=torch.float64)
    x[31, 5], y[31, 5], x[7, 3], y[7, 3] = 1.0, 3.0, 1.0, 1.25
    cuts = iter([x[:20], x[20:33], x[33:]])
    comparison, faults = compare_rows(cuts, iter([(y[:30], None), (y[30:], None)]), BFLOAT16_BOUND)
    assert faults == []
    assert comparison.worst is not None
    assert comparison.worst[:3] == ((31, 5), 1.0, 3.0)
    assert (comparison.different, comparison.beyond) == (2, 2)


@pytest.mark.parametrize(("extra", "told"), [(1, "output has more"), (-1, "source has more")])
def test_rows_without_a_partner_are_reported(extra: int, told: str) -> None:
    x, y = torch.zeros(9, 4, dtype=torch.float64), torch.zeros(9 + extra, 4, dtype=torch.float64)
    _, faults = compare_rows(iter([x]), iter([(y, None)]), NO_BOUND)
    assert told in faults[0]


def test_magnitudes_of_blocks_do_not_depend_on_the_cuts(seed: int) -> None:
    x = torch.randn(300, 200, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    largest = BlockMagnitudes((300, 200), (128, 128))
    for _ in largest.watching(iter([x[:50], x[50:51], x[51:260], x[260:]])):
        pass
    for i, j in product(range(3), range(2)):
        block = x[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
        assert largest.found[i, j] == block.abs().max()


def test_several_workers_find_what_one_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from degarble.harness.checkpoint.transform.convert import job as proving  # noqa: PLC0415
    from degarble.harness.checkpoint.transform.convert.job import job_of  # noqa: PLC0415

    assert converted("nvfp4-full", tmp_path / "new", "bf16").holds
    monkeypatch.setattr(proving, "_LEAST_PART", 1 << 20)
    job = job_of(source("nvfp4-full"), tmp_path / "new")
    parts = parts_of(job)
    assert len(parts) > 2
    assert sum(end - begin for (begin, end), _, _ in parts) == len(job.units)
    assert sum(end - begin for _, (begin, end), _ in parts) == len(job.copied)
    job.checkpoint.close()
    damage(tmp_path / "new", "norm.weight", lambda values: -values)
    damage(tmp_path / "new", "layers.1.attn.wq_a.weight", lambda v: v * 2)
    heard: list[int] = []
    proofs = [
        prove(
            source("nvfp4-full"),
            tmp_path / "new",
            workers=workers,
            progress=lambda nbytes, _: heard.append(nbytes),
        )
        for workers in (1, 2)
    ]
    assert proofs[0] == proofs[1]
    assert len(proofs[0].broken) == 2
    assert len(heard) == 2 * len(parts)
