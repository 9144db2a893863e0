"""Kernels in a night: known answers against the formats, and their rate beside a copy's.

Owns the cases of the quantising kernel (every layout of scales, tails, a scale that divides and one
that does not) and its rate over copy bandwidth in the same run, which goes into the history as
`speed`. Both need a GPU: where none was asked for they say so and are UNDECIDED, never green.
Refuses as the kernels do. The other kernels of this repository have suites of their own, marked for
their device. Kept honest by suites/runs/test_night_kernels.py; on a GPU it has not run yet.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.formats.block_formats import NVFP4
from degarble.harness.formats.layouts import to_layout
from degarble.harness.formats.quantise import quantise
from degarble.harness.history.ledger import Failure
from degarble.harness.history.records import SPEED
from degarble.harness.record.verdict import Verdict
from degarble.harness.record.wording import share
from degarble.harness.runs.night_record import Asked, StepResult
from degarble.kernels.common.quantise_problem import LAYOUTS, QuantiseProblem
from degarble.kernels.common.settings import CompileSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

NAME = "quantise_nvfp4"
EXTENTS = ((1, 16), (130, 528), (300, 7168))
SCALES = (1.0, 0.0123)
SPEED_EXTENT = (8192, 7168)
_SETS, _ROUNDS = 8, 7  # buffers that leave nothing in the cache; timings of which the median counts


def kernels(asked: Asked, _: Mapping[str, StepResult]) -> StepResult:
    """Run the kernels on values whose bytes the formats tell."""
    if not asked.gpu:
        return _without(NAME)
    wrong = []
    cases = [(each, rows, columns, scale) for each in LAYOUTS for rows, columns in EXTENTS
             for scale in SCALES]  # fmt: skip
    for layout, rows, columns, scale in cases:
        problem = QuantiseProblem(rows, columns, layout)
        count = mismatches(problem, values_of(rows, columns), scale, _on_device)
        if count:
            wrong.append(f"{rows} x {columns}, {layout}, scale {scale}: {count:,} bytes differ")
    judged = (f"kernels.{NAME}",)
    if not wrong:
        sentence = f"{NAME} gives every byte of the formats in {len(cases)} cases."
        return StepResult(Verdict.AGREES, sentence, judged=judged)
    told = Failure(f"kernels.{NAME}", Verdict.DIFFERS, None, wrong[0])
    sentence = f"{NAME} differs from the formats in {len(wrong)} of {len(cases)} cases: {wrong[0]}."
    lines = tuple(wrong)
    return StepResult(Verdict.DIFFERS, sentence, failures=(told,), judged=judged, lines=lines)


def figures(asked: Asked, _: Mapping[str, StepResult]) -> StepResult:
    """Measure what the kernels reach of a copy's bandwidth."""
    if not asked.gpu:
        return _without("speed")
    problem = QuantiseProblem(*SPEED_EXTENT)
    source = [values_of(*SPEED_EXTENT).cuda() for _ in range(_SETS)]
    target = [torch.empty_like(each) for each in source]
    copied = _seconds([lambda n=n: target[n].copy_(source[n]) for n in range(_SETS)])  # type: ignore[misc]
    scale = torch.ones(1, device="cuda")
    ran = _seconds([lambda n=n: _launch(source[n], scale, problem) for n in range(_SETS)])  # type: ignore[misc]
    bandwidth = 2 * source[0].nbytes / copied
    reached = problem.bytes_moved / ran / bandwidth
    sentence = f"{NAME} reaches {share(reached)} of copy bandwidth, {bandwidth / 1e12:.2f} TB/s."
    return StepResult(Verdict.AGREES, sentence, values={SPEED.name: {f"kernels.{NAME}": reached}})


def _without(what: str) -> StepResult:
    return StepResult(
        Verdict.UNDECIDED, f"{what} was not run: no GPU was asked for (-m b200, -m h200).",
        asked=False,
    )  # fmt: skip


def values_of(rows: int, columns: int) -> Tensor:
    """Values of many magnitudes, the same every night."""
    generator = torch.Generator().manual_seed(rows * columns)
    x_MK = torch.randn(rows, columns, generator=generator)
    powers = torch.randint(-8, 4, (rows, columns // 16), generator=generator)
    return (x_MK * torch.exp2(powers.float()).repeat_interleave(16, -1)).bfloat16()


def mismatches(
    problem: QuantiseProblem,
    values: Tensor,
    scale: float,
    computed: Callable[[Tensor, float, QuantiseProblem], tuple[Tensor, Tensor]],
) -> int:
    """How many bytes of codes and scales are not those of the formats."""
    wanted = quantise(values, NVFP4, decode_scale=torch.tensor(scale))
    codes, scales = computed(values, scale, problem)
    place = to_layout(wanted.block_scale, problem.scale_layout)
    pairs = ((codes, wanted.codes), (scales.flatten(), place.flatten()))
    return sum(int((mine.cpu() != theirs).sum()) for mine, theirs in pairs)


def _on_device(values: Tensor, scale: float, problem: QuantiseProblem) -> tuple[Tensor, Tensor]:
    made = _launch(values.cuda(), torch.full((1,), scale, device="cuda"), problem)
    return made.codes, made.scales


def _launch(values: Tensor, scale: Tensor, problem: QuantiseProblem) -> Any:
    # Imports the DSL, which no CPU machine needs.
    from degarble.kernels.simt_quantise_nvfp4 import quantise_nvfp4  # noqa: PLC0415

    return quantise_nvfp4(values, scale, problem, CompileSettings())


def _seconds(launches: list[Callable[[], object]]) -> float:
    """Seconds of one launch: the median over rounds of events around all of them."""
    for launch in launches:
        launch()
    found: list[float] = []
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for launch in launches:
            launch()
        end.record()
        end.synchronize()
        found.append(float(begin.elapsed_time(end)) / 1e3 / len(launches))
    return statistics.median(found)
