"""Laws of every kernel, each stated once over what families register: see contract.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from degarble.kernels.runtime.modules import MODULES
from degarble.suites.kernels.attention import contract as attention
from degarble.suites.kernels.cache import contract as cache
from degarble.suites.kernels.contract import (
    POISON,
    Detection,
    Judged,
    MachineCode,
    ReplayCase,
    poison,
    require_early_reads_alone,
    same_bits,
    tensors_of,
)
from degarble.suites.kernels.gemm import contract as gemm
from degarble.suites.kernels.indexer import contract as indexer
from degarble.suites.kernels.moe import contract as moe
from degarble.suites.kernels.quantise import contract as quantise
from degarble.suites.kernels.rows import contract as rows

pytestmark = pytest.mark.needs("cutlass")

FAMILIES = (rows, quantise, cache, indexer, attention, gemm, moe)
CODE = [code for family in FAMILIES for code in family.CODE]
JUDGED = [judged for family in FAMILIES for judged in family.JUDGED]
DETECTIONS = [detection for family in FAMILIES for detection in family.DETECTIONS]
REPLAYS = [replay for family in FAMILIES for replay in family.REPLAYS]


def _id(kernel: str, what: object) -> str:
    return f"{kernel}-{what}".replace(" ", "-")


each_judged = pytest.mark.parametrize("judged", JUDGED, ids=lambda judged: judged.kernel)


def _quick_names() -> set[str]:
    """Names of the forms that every run compiles: of a form for two targets only one, in turn."""
    targets: dict[str, list[MachineCode]] = {}
    for code in CODE:
        if not code.slow:
            targets.setdefault(code.name.replace(code.form.target, ""), []).append(code)
    return {codes[n % len(codes)].name for n, codes in enumerate(targets.values())}


QUICK = _quick_names()


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, id=code.name, marks=[] if code.name in QUICK else [pytest.mark.slow])
        for code in CODE
    ],
)
def test_machine_code_is_as_derived(code: MachineCode) -> None:
    """No register spills, every rounding is stated, and the counts are the derived ones."""
    code.require(code.compile())


TWO_WAITS = """.visible .entry kernel()
{{
ld.global.b32 %r1, [%rd1];
@%p1 bra $L__BB0_2;
{first}
griddepcontrol.wait;
ld.global.b32 %r2, [%rd2];
bra.uni $L__BB0_3;
$L__BB0_2:
{second}
griddepcontrol.wait;
$L__BB0_3:
st.global.b32 [%rd3], %r2;
ret;
}}"""
LOOP = "@p bra ENDED;\nbra AGAIN;\nENDED:\n"  # of inline text
GUESS = "ld.relaxed.gpu.global.b32 %r2, [%rd2];"
NOTHING, READS = "mov.b32 %r3, 0;", "ld.global.b32 %r3, [%rd4];"


def test_what_each_branch_reads_before_its_wait_is_counted() -> None:
    for first, second in ((NOTHING, NOTHING), (READS, NOTHING), (NOTHING, READS), (READS, READS)):
        ptx = TWO_WAITS.format(first=first, second=second)
        require_early_reads_alone(ptx, 1 + (first, second).count(READS))
        with pytest.raises(AssertionError):
            require_early_reads_alone(ptx, 2 + (first, second).count(READS))
    with pytest.raises(AssertionError, match=re.escape("st.global")):
        require_early_reads_alone(
            TWO_WAITS.format(first=NOTHING, second="st.global.b32 [%rd3], %r1;"), 1
        )
    early = TWO_WAITS.format(first=NOTHING, second="bra.uni $L__BB0_3;")
    with pytest.raises(AssertionError, match=re.escape("st.global")):
        require_early_reads_alone(early, 1)
    require_early_reads_alone(TWO_WAITS.format(first=LOOP + READS, second=NOTHING), 2)
    late = TWO_WAITS.format(first=NOTHING, second=NOTHING)
    late = late.replace("ld.global.b32 %r2, [%rd2];", LOOP + GUESS)
    with pytest.raises(AssertionError, match=re.escape("ld.relaxed")):
        require_early_reads_alone(late, 1)


def test_a_night_finds_the_cases_of_each_kernel() -> None:
    """A night selects a kernel's cases by its name, and takes other files as a whole."""
    names = {case.name for case in REPLAYS} | {judged.kernel for judged in JUDGED}
    registered = {name.partition("-")[0] for name in names}
    assert registered <= set(MODULES)
    files = {path.stem.removeprefix("test_") for path in Path(__file__).parent.rglob("test_*.py")}
    assert not registered & files


@each_judged
def test_cases_have_names_of_their_own_and_fuzzed_ones_differ(judged: Judged) -> None:
    names = [case.name for case in judged.cases]
    assert len(set(names)) == len(names)
    assert judged.fuzzed(1, 20) == judged.fuzzed(1, 20) != judged.fuzzed(2, 20)


@pytest.mark.parametrize("detection", DETECTIONS, ids=lambda detection: detection.name)
def test_a_wrong_bit_and_an_unwritten_byte_are_detected(
    detection: Detection, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def whole(*given: Any) -> Any:
        made[:] = [detection.definition(*given)]
        return made[0]

    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(detection.checks, detection.launch, whole)
    assert not detection.mismatch(detection.case)
    monkeypatch.setattr(detection.checks, detection.launch, lambda *_given: made[0])
    for tensor in tensors_of(made):
        flat = tensor.view(-1).view(torch.uint8)
        for place in (0, -1):  # the last byte of scales is padding
            kept = flat[place].clone()
            for wrong in {int(kept) ^ 1, POISON} - {int(kept)}:
                flat[place] = wrong
                assert "1 of" in detection.mismatch(detection.case)
            flat[place] = kept


@pytest.mark.usefixtures("kernel_cache")
@pytest.mark.parametrize(
    ("judged", "case"),
    [
        pytest.param(judged, case, id=_id(judged.kernel, case.name), marks=judged.devices)
        for judged in JUDGED
        for case in judged.cases
    ],
)
def test_a_case_is_as_defined(judged: Judged, case: Any) -> None:
    assert not judged.mismatch(case)


@pytest.mark.usefixtures("kernel_cache")
@pytest.mark.parametrize(
    ("judged", "seed"),
    [
        pytest.param(judged, seed, id=_id(judged.kernel, seed), marks=judged.devices)
        for judged in JUDGED
        for seed in range(judged.seeds)
    ],
)
def test_fuzzed_cases_are_as_defined(judged: Judged, seed: int) -> None:
    cases = judged.fuzzed(seed, judged.at_once)
    assert not [why for case in cases if (why := judged.mismatch(case))]


@pytest.mark.usefixtures("kernel_cache")
@pytest.mark.parametrize(
    "judged",
    [
        pytest.param(judged, id=judged.kernel, marks=judged.devices)
        for judged in JUDGED
        if judged.launch is not None
    ],
)
def test_two_runs_are_equal_bit_for_bit(judged: Judged) -> None:
    assert judged.launch is not None
    for case in judged.fuzzed(judged.repeat_seed, judged.repeated):
        assert same_bits(judged.launch(case), judged.launch(case)), case.name


@pytest.mark.usefixtures("kernel_cache")
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=case.devices) for case in REPLAYS]
)
def test_a_graph_replays_on_changed_data(case: ReplayCase) -> None:
    replay = case.make()
    replay.launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replay.launch()
    for inputs, wanted, mismatch in replay.rounds:
        for mine, theirs in zip(replay.inputs, inputs, strict=True):
            mine.copy_(theirs)
        if not replay.in_place:
            poison([replay.outputs, replay.scratch], replay.poison)
        graph.replay()
        torch.cuda.synchronize()
        if mismatch is None:
            assert same_bits(replay.outputs, wanted())
        else:
            assert not mismatch()
