"""Bring up sparse attention and the indexer's scores on a Blackwell GPU, in eleven steps.

Steps in order: load only, multiply only, weigh only, one tile, two tiles, pipeline wrap, full; then
the scores: one stage, two, wrap, full. The first step that fails names the part, because the steps
before it hold. A GPU executes them, or the host model in its place. On a GPU each step has a
process of its own, so that one which never ends costs no more than its time limit:

    python -m degarble.suites.support.probes.sm100_attention_minute [STEP]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from degarble.harness.base.errors import MissingDevice
from degarble.kernels.attention import problem as facts
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.kv_problem import ENTRIES
from degarble.kernels.runtime.targets import SM100A, target_of_device
from degarble.suites.kernels import indexer_checks
from degarble.suites.kernels.attention import attention_checks as checks
from degarble.suites.kernels.attention import sm100_attention_model as model
from degarble.suites.kernels.attention.sm100_attention_stages import (
    Numbers,
    image_of,
    numbers_of,
    tiles_of,
)
from degarble.suites.kernels.indexer_checks import ScoresCase
from degarble.suites.support.probes import sm100_first_minute as plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

MODULE = "degarble.suites.support.probes.sm100_attention_minute"
SHARE_STEP, CLOSE = 2.0**-8, 1e-5  # a step of BF16; float32 sums and powers beside float64


class Executor(Protocol):
    """Executor of a part, or of all."""

    def load(self, case: checks.Case, given: checks.Drawn) -> tuple[Any, Any]:
        """Return the bytes of token 0's tiles as they lie [S, bytes], and masks [S, bytes]."""

    def multiply(self, case: checks.Case, numbers: Numbers) -> tuple[Any, Any]:
        """Return logits [S, 64, 64] of queries and tiles, and sums [64, 512] of given shares."""

    def weigh(self, case: checks.Case, numbers: Numbers) -> tuple[Any, Any, Any]:
        """Return shares [S, 64, 64], peaks and totals [64, 2], what ones became [64, 512]."""

    def attend(self, case: checks.Case, given: checks.Drawn) -> tuple[Tensor, Tensor]:
        """Return output and LSE."""

    def scores(self, case: ScoresCase, of: indexer_checks.Sides) -> Tensor:
        """Return the indexer's scores."""


@dataclass(frozen=True)
class Step:
    """One step: its name, what it proves beyond those before, and its judgement."""

    name: str
    proves: str
    judge: Callable[[Executor], str]


def alone(**facts_of: Any) -> checks.Case:
    """Return a case that a part can run: one token, one list, one split."""
    chosen: dict[str, Any] = {"tokens": 1, "far": None, "mode": "prefill", "splits": 1}
    return checks.Case(**(chosen | facts_of))


# ---- what has to come out ------------------------------------------------------------------------


def load_only(executor: Executor) -> str:
    """Check that tcgen05 finds each number of a tile, and that masks mark existing entries."""
    cases = [alone(entry=entry, near=150, gaps=0.2, seed=3) for entry in ENTRIES]
    cases.append(alone(key=facts.V32.key, entry="fp8-v32", near=150, gaps=0.2))
    for case in cases:
        given = checks.drawn(case, "cpu")
        tiles, masks = executor.load(case, given)
        of_tiles, of_masks = tiles_of(case, given, 0)
        wrong = np.argwhere(np.asarray(masks) != of_masks)
        if len(wrong):
            return f"{case.name}: mask of tile {wrong[0][0]}, byte {wrong[0][1]}"
        for step, tile in enumerate(of_tiles):
            wrong = np.argwhere(np.asarray(tiles[step]) != image_of(tile))
            if len(wrong):
                return f"{case.name}: {len(wrong)} bytes of tile {step}, first {int(wrong[0][0])}"
    return ""


def multiply_only(executor: Executor) -> str:
    """Descriptors, both products, lanes of both halves, sums begun: whole numbers, so exactly."""
    for case in (
        alone(near=64),
        alone(near=3 * 64),
        alone(key=facts.V32.key, entry="bf16", near=2 * 64),
    ):
        numbers = numbers_of(case)
        logits, sums = executor.multiply(case, numbers)
        keys = model.of_bits(numbers.tiles).astype(np.float64)
        wanted = model.of_bits(numbers.queries).astype(np.float64) @ keys.transpose(0, 2, 1)
        why = differs("logits", logits, wanted, 0.0)
        of_sums = (numbers.shares.astype(np.float64) @ keys[:, :, : rows.WIDTH]).sum(0)
        why = why or differs("sums", sums, of_sums, 0.0)
        if why:
            return f"{case.name}: {why}"
    return ""


def weigh_only(executor: Executor) -> str:
    """Reads of tensor memory, masks, peaks over both warpgroups, shares, what was added before."""
    case = alone(near=5 * 64)
    numbers = numbers_of(case)
    shares, stats, ones = executor.weigh(case, numbers)
    wanted, peaks, totals = weighed(numbers)
    ones = np.asarray(ones)
    return (
        differs("shares", shares, wanted, SHARE_STEP)
        or differs("peaks and totals", stats, np.stack([peaks[-1], totals], 1), CLOSE)
        or differs("ones", ones, np.exp2(peaks[0] - peaks[-1])[:, None] + 0 * ones, CLOSE)
    )


def weighed(numbers: Numbers) -> tuple[Any, Any, Any]:
    """Return shares and running peaks, the peaks by tile, and the last totals, in float64."""
    present = np.unpackbits(numbers.masks[:, : facts.TILE // 8], axis=1, bitorder="little")
    logits = np.where(present[:, None] == 1, numbers.logits.astype(np.float64), -np.inf)
    peaks = np.maximum.accumulate(logits.max(2) * model.LOG2_E, 0)
    shares = np.exp2(logits * model.LOG2_E - peaks[..., None])
    totals = (shares.sum(2) * np.exp2(peaks - peaks[-1])).sum(0)
    return shares, peaks, totals


def differs(name: str, got: Any, wanted: Any, share: float) -> str:
    """Describe where numbers differ by more than a share of themselves."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    with np.errstate(invalid="ignore"):
        fine = (got == wanted) | (np.abs(got - wanted) <= share * np.abs(wanted))
    wrong = np.argwhere(~fine)
    if not len(wrong):
        return ""
    at = tuple(int(i) for i in wrong[0])
    return f"{len(wrong)} {name}, first {at}: got {got[at]}, want {wanted[at]}"


def answers(*cases: checks.Case) -> Callable[[Executor], str]:
    """Judge whole launches by the gates of attention_checks."""

    def judge(executor: Executor) -> str:
        for case in cases:
            given = checks.drawn(case, "cpu")
            why = checks.complaint(executor.attend(case, given), checks.formula(case, given))
            if why:
                return f"{case.name}: {why}"
        return ""

    return judge


def scored(*cases: ScoresCase) -> Callable[[Executor], str]:
    """Judge whole launches of the indexer's scores by the budgets of indexer_checks."""

    def judge(executor: Executor) -> str:
        for case in cases:
            of = indexer_checks.sides(case, "cpu")
            why = indexer_checks.difference(case, executor.scores(case, of), of)
            if why:
                return why
        return ""

    return judge


ONE = alone(near=64, gaps=0.0)
ALL = (
    checks.Case(tokens=2, heads=70, near=128, far=130, lengths=True, seed=1),
    checks.Case(tokens=1, heads=8, far=640, splits=3, entry="bf16"),
    checks.Case(tokens=1, heads=8, far=600, splits=9, entry="nvfp4"),
    checks.Case(tokens=1, heads=8, near=0, far=3, gaps=1.0),
    checks.Case(key=facts.V32.key, entry="fp8-v32", tokens=1, heads=16, near=300, far=None),
)
SCORED = ScoresCase("bf16", 64, (128,), (4,), 1)
SCORED_ALL = (
    ScoresCase("bf16", 64, (129, 63), (3, 1), 4),
    ScoresCase("fp8", 8, (300, 70), (9, 2), 1, arithmetic="stored"),
    ScoresCase("bf16", 4, (40,), (1,), 1, page=16),
    ScoresCase("fp8", 128, (65, 129), (1, 1), 4),
)
STEPS = (
    Step("load only", "slots, decoding, swizzle, masks", load_only),
    Step("multiply only", "descriptors, lanes and columns of tensor memory", multiply_only),
    Step("weigh only", "fragments, peaks, shares, new peaks", weigh_only),
    Step("one tile", "barriers between the roles", answers(ONE)),
    Step("two tiles", "a tile ahead, two buffers", answers(alone(near=128, gaps=0.0))),
    Step("pipeline wrap", "parities where rings begin anew", answers(alone(near=450))),
    Step("full", "lists, lengths, heads, clusters, merge, formats", answers(*ALL)),
    Step("scores: one stage", "TMA, one product, weighing", scored(SCORED)),
    Step("scores: two", "two sums by turns", scored(ScoresCase("bf16", 64, (256,), (4,), 1))),
    Step("scores: wrap", "rings begin anew", scored(ScoresCase("fp8", 64, (2000,), (4,), 1))),
    Step("scores: full", "sequences, heads, formats", scored(*SCORED_ALL)),
)
BY_NAME = {step.name: step for step in STEPS}


def first_failure(executor: Executor) -> tuple[str, str] | None:
    """Run the steps in their order; return the first that fails, and why."""
    return plain.first_failure(executor, STEPS)


class Gpu:
    """A B200: sm100_probe_attention.py for the parts, the kernels for the rest."""

    def __init__(self) -> None:
        target = target_of_device()
        if target is not SM100A:
            raise MissingDevice("target", target.name, SM100A.name, "Run it on a B200.")

    def load(self, case: checks.Case, given: checks.Drawn) -> tuple[Any, Any]:
        """See Executor."""
        images = self._part("load", case, (None, given.slots[0].cuda(), given.caches[0].cuda()))
        return images["tiles"], images["masks"]

    def multiply(self, case: checks.Case, numbers: Numbers) -> tuple[Any, Any]:
        """See Executor."""
        tiles = np.stack([image_of(tile) for tile in numbers.tiles])
        shares = model.to_bits(numbers.shares).view(np.int16)
        q = torch.from_numpy(numbers.queries.view(np.int16)).view(torch.bfloat16).cuda()
        images = self._part("multiply", case, (q, None, None), tiles=tiles, shares=shares)
        return images["logits"], images["sums"]

    def weigh(self, case: checks.Case, numbers: Numbers) -> tuple[Any, Any, Any]:
        """See Executor."""
        nothing = (None, None, None)
        images = self._part("weigh", case, nothing, logits=numbers.logits, masks=numbers.masks)
        tiles = images["shares"].view(np.uint16).reshape(len(numbers.masks), -1)
        places = model.lines(facts.HEADS, facts.TILE, 0) // 2
        return model.of_bits(tiles[:, places]), images["stats"], images["sums"]

    def attend(self, case: checks.Case, given: checks.Drawn) -> tuple[Tensor, Tensor]:
        """See Executor."""
        moved = [
            None if each is None else tuple(t.cuda() for t in each)
            for each in (given.slots, given.caches, given.lengths)
        ]
        q, sink = given.q.cuda(), given.sink.cuda()
        drawn = checks.Drawn(q, sink, moved[0], moved[1], moved[2], given.decoded)  # type: ignore[arg-type]
        out, lse = checks.on_device(case, drawn)
        return out.cpu(), lse.cpu()

    def scores(self, case: ScoresCase, of: indexer_checks.Sides) -> Tensor:
        """See Executor."""
        given = {name: x.cuda() for name, x in of.given.items()}
        return indexer_checks.on_device(case, given).cpu()

    def _part(self, part: str, case: checks.Case, operands: Any, **held: Any) -> dict[str, Any]:
        """Run a part on images, some of which are given; return them all."""
        probe, p = (
            import_module("degarble.suites.support.probes.sm100_probe_attention"),
            case.problem,
        )
        steps, heads = p.tiles, facts.HEADS
        shapes = {
            "tiles": ((steps, facts.TILE * p.family.key * 2), torch.uint8),
            "masks": ((steps, model.MASKS), torch.uint8),
            "logits": ((steps, heads, facts.TILE), torch.float32),
            "shares": ((steps, heads, facts.TILE), torch.int16),
            "sums": ((heads, rows.WIDTH), torch.float32),
            "stats": ((heads, 2), torch.float32),
        }
        images = {n: torch.zeros(shape, dtype=kind) for n, (shape, kind) in shapes.items()}
        images |= {name: torch.from_numpy(x.copy()) for name, x in held.items()}
        on_gpu = {name: x.cuda() for name, x in images.items()}
        kernel = probe.compile_part(part, facts.choose_form(p, SM100A.name), checks.SETTINGS)
        probe.launch(kernel, p, operands, probe.Images(**on_gpu))
        torch.cuda.synchronize()
        return {name: x.cpu().numpy() for name, x in on_gpu.items()}


def main() -> int:
    """Run steps on the GPU."""
    return plain.run_steps(STEPS, MODULE, Gpu)


if __name__ == "__main__":
    sys.exit(main())
