"""What is particular to a quantising kernel: canonical bytes, fused sources, planted faults."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.number_formats import FP8_1X128_F32, FP8_1X128_UE8M0
from degarble.harness.formats.quantise import quantise
from degarble.kernels.primitives import quantise_problem as facts
from degarble.kernels.primitives.quantise_problem import (
    SWIGLU,
    Fp8Problem,
    QuantiseProblem,
    choose_form,
)
from degarble.kernels.rows.problem import InverseRopeProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import kernel_named
from degarble.kernels.runtime.targets import SM90A, SM100A
from degarble.suites.kernels.contract import SETTINGS, kernels_of, poison, same_bits
from degarble.suites.kernels.quantise import quantise_checks as checks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.needs("cutlass")


# ---- to FP8, scales of 128 values ----------------------------------------------------------------

FORMATS = {"float32": FP8_1X128_F32, "ue8m0": FP8_1X128_UE8M0}
SHAPES = ((1, 128), (3, 256), (7, 2048), (33, 7168), (1000, 1536))


def drawn(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator, device="cuda")
    x *= torch.exp2(torch.randint(-30, 20, (rows, 1), generator=generator, device="cuda"))
    x[::3, ::5] = 0
    x[1::4, :128] = 0  # blocks of nothing
    return x.bfloat16()


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("scales", facts.SCALES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_byte_is_canonical(shape: tuple[int, int], scales: str) -> None:
    kernel, x, problem = (
        kernel_named("simt_quantise_fp8"),
        drawn(*shape),
        Fp8Problem(*shape, scales),
    )
    out = kernel.allocate(problem, x.device)
    poison(out, 0xFF)
    made = kernel.run(problem, SETTINGS, values=x, **out)
    want = quantise(x.float(), FORMATS[scales], CANONICAL)
    assert same_bits(made, {"codes": want.codes, "scales": want.block_scale})
    codes = made["codes"].view(torch.uint8)
    assert not torch.equal(codes.roll(1, 1), want.codes.view(torch.uint8))


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("limit", [None, 10.0])
def test_swiglu_is_that_of_the_nvfp4_kernel(limit: float | None) -> None:
    kernel, other = map(kernel_named, ("simt_quantise_fp8", "simt_quantise_nvfp4"))
    halves = (torch.randn(65, 1024, device="cuda") * 6).bfloat16()
    problem = QuantiseProblem(65, 512, source="swiglu", limit=limit, keeps_values=True)
    one = torch.ones(1, device="cuda")
    values = other.run(problem, SETTINGS, values=halves, decode_scale=one)["kept"]
    for scales in facts.SCALES:
        given = Fp8Problem(65, 512, scales, "swiglu", limit)
        fused = kernel.run(given, SETTINGS, values=halves)
        plain = kernel.run(Fp8Problem(65, 512, scales), SETTINGS, values=values)
        assert same_bits(fused, plain)


def test_sixteens_that_turn_are_the_last_of_a_head() -> None:
    for width in (128, 512):
        found = [facts.group_of(part, width) for part in range(2 * width // 16)]
        assert found[: width // 16] == list(range(4 - width // 16, 4))
        assert found[width // 16 :] == found[: width // 16]


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("scales", facts.SCALES)
@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 8, 512), (7, 8, 128), (333, 16, 512)])
def test_heads_are_turned_back_first(tokens: int, heads: int, width: int, scales: str) -> None:
    kernel, rope = map(kernel_named, ("simt_quantise_fp8", "simt_inverse_rope"))
    values, known = drawn(tokens, heads * width), 50
    turns = torch.randn(known, 64, device="cuda")
    positions = torch.randint(known, (tokens,), device="cuda")
    positions[3:4] = known  # outside of the table: NaN
    back = InverseRopeProblem(tokens, heads, known, width=width)
    given = values.view(tokens, heads, width)
    turning = {"turns": turns, "positions": positions}
    turned = rope.run_one(back, SETTINGS, heads=given, **turning).flatten(1)
    plain = Fp8Problem(tokens, heads * width, scales)
    problem = replace(plain, turned=width, positions=known)
    made = kernel.run(problem, SETTINGS, values=values, **turning)
    assert same_bits(made, kernel.run(plain, SETTINGS, values=turned))
    other = kernel.run(plain, SETTINGS, values=values)
    assert not same_bits(made["codes"], other["codes"])


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("fault", ["forth instead of back", "another sixteen", "another head"])
def test_planted_faults_of_turned_heads_are_caught(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    kernels = kernels_of("simt_quantise_fp8")
    values, turns = drawn(33, 1024), torch.randn(9, 64, device="cuda")
    given = {"values": values, "turns": turns}
    given["positions"] = torch.randint(9, (33,), device="cuda")
    problem = Fp8Problem(33, 1024, turned=512, positions=9)
    whole = kernels.KERNEL.run(problem, SETTINGS, **given)
    if fault == "forth instead of back":
        true = kernels.turned_words
        monkeypatch.setattr(
            kernels, "turned_words", lambda numbers, turn, **_: true(numbers, turn, back=False)
        )
    else:
        step, of = (4 if fault == "another head" else 1), facts.group_of
        monkeypatch.setattr(facts, "group_of", lambda part, width: of(part + step, width))
    uncached = kernels.compile_form.__wrapped__
    monkeypatch.setitem(vars(kernels.KERNEL), "compile_form", uncached)
    made = kernels.KERNEL.run(problem, SETTINGS, **given)
    assert not same_bits(made["codes"], whole["codes"])


# ---- to NVFP4, fused or not ---------------------------------------------------------------------


def test_the_second_process_takes_it_from_disk(tmp_path: Path) -> None:
    kernels = kernels_of("simt_quantise_nvfp4")
    settings = CompileSettings(cache_folder=tmp_path)
    form = choose_form(QuantiseProblem(1, 16), "sm_90a")
    compiled = [kernels.compile_form.__wrapped__(form, settings) for _ in range(2)]
    assert [kernel.from_cache for kernel in compiled] == [False, True]
    other = kernels.compile_form(choose_form(QuantiseProblem(1, 16, "8x4"), "sm_90a"), settings)
    assert not other.from_cache


def test_nothing_is_launched_for_no_rows() -> None:
    kernel = kernel_named("simt_quantise_nvfp4")
    out = kernel.allocate(QuantiseProblem(0, 32), torch.device("cpu"))
    assert [tuple(out[name].shape) for name in ("codes", "scales")] == [(0, 16), (0,)]


@pytest.mark.h200
@pytest.mark.b200
def test_the_fused_form_gives_what_two_launches_give() -> None:
    kernel = kernel_named("simt_quantise_nvfp4")
    problem = QuantiseProblem(333, 2048, source=SWIGLU.name, limit=10.0, keeps_values=True)
    case = checks.Case(problem, "blocks", "one", seed=5)
    fused = checks.on_device(case)
    again = replace(problem, source="values", limit=None, keeps_values=False)
    given = {"values": fused.values, "decode_scale": case.decode_scales.cuda()}
    plain = kernel.run(again, SETTINGS, **given, **checks.poisoned(again))
    assert same_bits([plain["codes"], plain["scales"]], [fused.codes, fused.scales])


def test_targets_are_those_that_the_table_of_conversions_knows() -> None:
    assert (SM90A.converts_e2m1, SM100A.converts_e2m1) == (False, True)
