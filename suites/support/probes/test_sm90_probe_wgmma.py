"""The wgmma probe: compiled anywhere, refusals, and on an H200 equal to the model bit for bit."""

from __future__ import annotations

import re

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch
from degarble.kernels.runtime.compiling import CompileSettings, cubin_facts, fused_instructions
from degarble.suites.references.tensor_core_cases import DENSE
from degarble.suites.support.probes import wgmma_checks as checks

pytestmark = pytest.mark.needs("cutlass")

SMALL = {"m": 64, "k": 32}


@pytest.mark.parametrize("reads_c", [True, False], ids=["C", "no_C"])
@pytest.mark.parametrize("tile_n", [16, 256])
@pytest.mark.parametrize(("element", "ptx"), [("BF16", "bf16"), ("FP16", "f16")])
def test_compiles_to_one_wgmma_and_no_other_arithmetic(
    element: str, ptx: str, tile_n: int, reads_c: bool
) -> None:
    from degarble.suites.support.probes.sm90_probe_wgmma import WgmmaProbe, compile_probe  # noqa: PLC0415

    probe = WgmmaProbe(element, n=2 * tile_n, tile_n=tile_n, reads_c=reads_c, **SMALL)
    kernel = compile_probe(probe, CompileSettings())
    issued = re.findall(r"wgmma\.mma_async\S+", kernel.ptx)
    assert issued == [f"wgmma.mma_async.sync.aligned.m64n{tile_n}k16.f32.{ptx}.{ptx}"]
    assert not fused_instructions(kernel.ptx)
    assert not re.search(r"\b(?:add|sub|mul|cvt|neg|max|min)\.\S*f(?:16|32)", kernel.ptx)
    assert not any(facts.spills for facts in cubin_facts(kernel.cubin))


def test_operands_become_an_instruction() -> None:
    from degarble.suites.support.probes.sm90_probe_wgmma import WgmmaProbe, choose_probe  # noqa: PLC0415

    a, b = torch.zeros(128, 48, dtype=torch.float16), torch.zeros(96, 48, dtype=torch.float16)
    want = WgmmaProbe("FP16", m=128, n=96, k=48, tile_n=32, reads_c=False)
    assert choose_probe(a, b, None, 32) == want
    assert want.grid == (2, 3, 1)
    assert choose_probe(a, b, torch.zeros(128, 96), 32).reads_c


def test_refuses_by_name() -> None:
    from degarble.suites.support.probes.sm90_probe_wgmma import choose_probe, probe_gemm  # noqa: PLC0415

    x = torch.zeros(64, 32, dtype=torch.bfloat16)
    with pytest.raises(InvalidArgument, match="tile_n = 8"):
        choose_probe(x, x, None, 8)
    with pytest.raises(InvalidArgument, match="tile_n = 264"):
        choose_probe(x, x, None, 264)
    with pytest.raises(DtypeMismatch, match="dtypes of A, B, C"):
        choose_probe(x, x.half(), None, 16)
    with pytest.raises(DtypeMismatch, match="float8"):
        choose_probe(x.to(torch.float8_e4m3fn), x.to(torch.float8_e4m3fn), None, 16)
    with pytest.raises(DtypeMismatch, match="float16"):
        choose_probe(x, x, torch.zeros(64, 64, dtype=torch.float16), 16)
    ragged = ((x[:60], x, None), (x[:, :24], x[:, :24], None), (x, x[:24], None), (x, x[:0], None))
    for a, b, c in (*ragged, (x, x[0], None), (x, x, torch.zeros(64, 32)), (x, x[:, :16], None)):
        with pytest.raises(ShapeMismatch, match="shapes of A, B, C"):
            choose_probe(a, b, c, 16)
    with pytest.raises(InvalidArgument, match="one CUDA device"):
        probe_gemm(x, x, None, 16, CompileSettings())


def test_a_wrong_rule_would_be_contradicted_and_a_wrong_bit_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "on_device", checks.by_model)
    assert all(checks.contradicted(wrong) for wrong in checks.WRONG)
    case = checks.Case("bf16", "normal", seed=3)
    assert not checks.mismatch(case)

    def one_bit_wrong(case: checks.Case) -> torch.Tensor:
        out = checks.by_model(case)
        out.view(torch.int32)[127, 63] ^= 1
        return out

    monkeypatch.setattr(checks, "on_device", one_bit_wrong)
    assert checks.mismatch(case).startswith("1 of 8192 differ")


def test_every_check_can_be_drawn_and_has_a_name_of_its_own() -> None:
    cases = list(checks.cases())
    assert len({case.name for case in cases}) == len(cases)
    assert {case.family for case in cases} == set(DENSE)


@pytest.mark.h200
@pytest.mark.parametrize("case", list(checks.cases()), ids=lambda case: case.name.replace(" ", "-"))
def test_wgmma_equals_the_model(case: checks.Case) -> None:
    assert not checks.mismatch(case)


@pytest.mark.h200
@pytest.mark.parametrize(
    "wrong", checks.WRONG, ids=lambda wrong: f"{wrong.rule.name} {wrong.operand}"
)
def test_wgmma_contradicts_a_wrong_rule(wrong: checks.Wrong) -> None:
    assert checks.contradicted(wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("operand", checks.DTYPES)
def test_the_model_gives_the_same_bits_on_a_gpu(operand: str) -> None:
    assert not checks.model_mismatch_on_device(checks.Case(operand, "all_codes", seed=2))
