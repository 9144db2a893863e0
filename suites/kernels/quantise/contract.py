"""What the quantising kernels register: forms with derived figures, cases, replays."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from degarble.kernels.primitives.quantise_problem import (
    LAYOUTS,
    SCALES,
    SOURCES,
    SWIGLU,
    Fp8Form,
    QuantiseProblem,
    choose_form,
    registers_allowed,
    resident_blocks,
)
from degarble.kernels.runtime.modules import kernel_named
from degarble.kernels.runtime.targets import TARGETS
from degarble.suites.kernels.contract import (
    SETTINGS,
    Detection,
    Judged,
    MachineCode,
    Replay,
    ReplayCase,
    Round,
)
from degarble.suites.kernels.quantise import quantise_checks as checks

if TYPE_CHECKING:
    from collections.abc import Iterator


def _code(target: str) -> Iterator[MachineCode]:
    for scales in SCALES:
        yield MachineCode("simt_quantise_fp8", Fp8Form(scales, "swiglu", 10.0, target))
        yield MachineCode("simt_quantise_fp8", Fp8Form(scales, "values", None, target, 512))
    yield _nvfp4_code(QuantiseProblem(1, 16), target)
    yield _nvfp4_code(QuantiseProblem(1, 16, source=SWIGLU.name, limit=10.0), target)
    yield _nvfp4_code(QuantiseProblem(1, 16, "linear", decoded=True), target)
    yield _nvfp4_code(
        QuantiseProblem(1, 16, "linear", SWIGLU.name, limit=10.0, decoded=True), target, slow=True
    )
    for layout, source, experts, keeps in product(LAYOUTS, SOURCES, (0, 8), (False, True)):
        problem = QuantiseProblem(1, 16, layout, source, experts=experts, keeps_values=keeps)
        if problem != QuantiseProblem(1, 16):
            yield _nvfp4_code(problem, target, slow=True)


def _nvfp4_code(problem: QuantiseProblem, target: str, *, slow: bool = False) -> MachineCode:
    form, native = choose_form(problem, target), TARGETS[target].converts_e2m1
    # One addition a value rounds it to a code, one belongs to SwiGLU; nothing else is contracted.
    fused = 16 * (not native) + 16 * (problem.source == SWIGLU.name)
    return MachineCode(
        "simt_quantise_nvfp4", form, registers_allowed(resident_blocks(form)), 1024, fused=fused,
        has={"cvt.rn.satfinite.e2m1x2.f32": native, "cvt.rn.satfinite.e4m3x2.f32": True},
        slow=slow,
    )  # fmt: skip


CODE = [code for target in TARGETS for code in _code(target)]
JUDGED = [
    Judged(
        "simt_quantise_nvfp4", checks.cases(), checks.mismatch, checks.fuzzed, 8, 50,
        checks.on_device, 20,
    )
]  # fmt: skip


def _results(case: checks.Case) -> Any:
    codes, scales = checks.by_definition(case, case.values)
    return checks.QuantisedRows(codes, scales, None)


def _decoded_results(case: checks.Case) -> Any:
    return checks.QuantisedRows(None, None, None, checks.decoded_by_definition(case, case.values))


DETECTIONS = [
    Detection(
        "simt_quantise_nvfp4", checks, "on_device", checks.mismatch,
        checks.Case(QuantiseProblem(5, 80), "blocks"), _results,
    ),
    Detection(
        "simt_quantise_nvfp4-decoded", checks, "on_device", checks.mismatch,
        checks.Case(QuantiseProblem(5, 80, "linear", decoded=True), "blocks"), _decoded_results,
    ),
]  # fmt: skip


def _replay(source: str, *, decoded: bool = False) -> Replay:
    limit = 10.0 if source == SWIGLU.name else None
    problem = QuantiseProblem(257, 1056, source=source, limit=limit)
    if decoded:
        problem = replace(problem, layout="linear", decoded=True)
    cases = [checks.Case(problem, "blocks", seed=seed) for seed in range(4)]
    values, scale = torch.zeros_like(cases[0].values).cuda(), torch.ones(1, device="cuda")
    out, kernel = checks.poisoned(problem), kernel_named("simt_quantise_nvfp4")
    given = {"values": values, "decode_scale": scale}
    rounds = [
        Round([case.values, case.decode_scales], partial(checks.on_device, case)) for case in cases
    ]
    return Replay(
        lambda: kernel.run(problem, SETTINGS, **given, **out),
        [values, scale],
        out,
        rounds,
    )


REPLAYS = [
    ReplayCase(f"simt_quantise_nvfp4-{source}{'-decoded' * decoded}",
               partial(_replay, source, decoded=decoded))
    for source, decoded in product(SOURCES, (False, True))
]  # fmt: skip
