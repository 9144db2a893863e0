"""The plain GEMMs on Hopper: machine code, refusals, and on an H200 the exact product."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm.problem import OPERANDS, GemmForm
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.references import tensor_core
from degarble.suites.kernels import gemm_checks as checks
from degarble.suites.kernels import gemm_code as code

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")


# --------------------------------------------------------------------------------------------------
# The BF16 GEMM on Hopper: machine code, refusals, and on an H200 the exact product of operands.

FORMS = checks.forms("bf16")
INNER = {
    "bf16": (8, 64, 104, 1096),
    "fp8_block": (32, 128, 160, 1056),
    "nvfp4": (32, 64, 96, 160, 1056),
}


def named(form: GemmForm) -> str:
    return f"{form.tactic.rows}x{form.tactic.columns}" + "-swapped" * form.tactic.swapped


each_form = pytest.mark.parametrize("form", FORMS, ids=named)


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.gemm.sm90_gemm_bf16")


def test_another_number_in_the_code_is_detected(kernels: ModuleType) -> None:
    form = FORMS[-1]
    kernel = kernels.compile_form(form, CompileSettings())
    wrong = replace(kernel, ptx=kernel.ptx.replace(", 49152;", ", 49136;"))
    assert code.complaints(wrong, form, issued=1) == ["expected bytes: got {49136}, want {49152}"]
    assert code.complaints(kernel, form, issued=2) == ["loads: got 2, want 4"]


def test_the_second_process_takes_it_from_disk(kernels: ModuleType, tmp_path: Path) -> None:
    settings = CompileSettings(cache_folder=tmp_path)
    compiled = [kernels.compile_form.__wrapped__(FORMS[0], settings) for _ in range(2)]
    assert [kernel.from_cache for kernel in compiled] == [False, True]


def exact(case: checks.Case, sides: checks.Sides) -> torch.Tensor:
    """What a whole kernel would leave: D rounded once, NaN behind it."""
    out = torch.full((case.problem.rows + checks.ROWS_BEHIND, case.problem.columns), torch.nan)
    out[: case.problem.rows] = (sides.a @ sides.b.T).float()
    return out.bfloat16()


@pytest.mark.parametrize("operands", checks.SIDES)
def test_damage_is_detected(operands: str) -> None:
    scales = OPERANDS[operands].scales[0]
    case = checks.table_case(operands, (5, 72, 96), scales, seed=3)
    sides = checks.SIDES[operands](case, "cpu")
    whole = exact(case, sides)
    assert not checks.difference(case, whole, sides)
    for row, value in ((4, torch.nan), (0, torch.inf), (2, 1e30), (5, 0.0)):
        damaged = whole.clone()
        damaged[row, 71] = value
        why = checks.difference(case, damaged, sides)
        assert ("1 of 360" in why) or ("1 numbers written behind D" in why)
    assert "over all" in checks.difference(case, whole * 1.01, sides)


@pytest.mark.parametrize("operands", checks.SIDES)
def test_tails_have_names_of_their_own(operands: str) -> None:
    tails = [
        case
        for form in checks.forms(operands)
        for inner in INNER[operands]
        for case in checks.tails(form, inner)
    ]
    assert len({case.name for case in tails}) == len(tails)


@pytest.mark.h200
@pytest.mark.parametrize(
    ("form", "inner"),
    [
        pytest.param(form, inner, id=f"{operands}-{form.scales}-{named(form)}-{inner}")
        for operands, lengths in INNER.items()
        for form in checks.forms(operands)
        for inner in lengths
    ],
)
def test_tails(form: GemmForm, inner: int) -> None:
    assert not [why for case in checks.tails(form, inner) if (why := checks.mismatch(case))]


@pytest.mark.h200
@pytest.mark.parametrize(
    ("operands", "scales"),
    [("bf16", "none"), ("fp8_block", "float32"), ("fp8_block", "ue8m0"), ("nvfp4", "e4m3")],
)
@pytest.mark.parametrize("extents", [(4096, 7168, 4096), (4096, 4096, 7168), (33, 7168, 18432)])
def test_shapes_of_models(extents: tuple[int, int, int], operands: str, scales: str) -> None:
    assert not checks.mismatch(checks.table_case(operands, extents, scales))


@pytest.mark.h200
@each_form
def test_every_bit_is_that_of_the_steps_in_their_order(form: GemmForm) -> None:
    """Tiles and clusters change no bit: all forms give what the model of wgmma gives."""
    for seed, extents in enumerate([(70, 72, 128), (130, 264, 328)]):
        case = checks.with_form(form, extents, "ordinary", seed)
        sides = checks.bf16_sides(case, "cuda")
        got = checks.on_device(case, sides)[: extents[0]]
        # Whole steps: zeros that TMA brings change no sum, but they do count as products.
        padded = [torch.nn.functional.pad(x, (0, -extents[2] % 64)) for x in sides.given]
        want = tensor_core.dense_gemm(*padded).bfloat16()
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.h200
@each_form
def test_a_row_is_its_own(form: GemmForm) -> None:
    case = checks.with_form(form, (150, 136, 520), "ordinary", 5)
    assert not checks.rows_alone_differ(case)


# --------------------------------------------------------------------------------------------------
# The block FP8 GEMM on Hopper: machine code, refusals, and on an H200 the exact product.


@pytest.mark.h200
@pytest.mark.parametrize("scales", ["float32", "ue8m0"])
def test_scales_that_are_one_are_left_out(scales: str) -> None:
    """A tensor core sums 128 integers without a loss: D is then the product, rounded once."""
    case = checks.table_case("fp8_block", (130, 264, 128), scales, seed=4)
    sides = checks.fp8_sides(case, "cuda")
    (given,) = sides.given
    integers = [
        torch.randint(-2, 3, x.shape, device="cuda").to(x.dtype) for x in (given.a, given.b)
    ]
    one = 1.0 if scales == "float32" else 127
    of_a, of_b = (torch.full_like(x, one) for x in (given.a_scales, given.b_scales))
    plain = type(given)(integers[0], of_a, integers[1], of_b)
    got = checks.multiply(checks.hopper("fp8_block"), plain, case.problem)
    want = (integers[0].double() @ integers[1].double().T).bfloat16()
    assert torch.equal(got, want)


SECOND_TILES = (4352, 1288, 672)  # more tiles than processors, each of an odd number of slots


def test_tiles_of_many_rows_are_more_than_processors() -> None:
    case = checks.table_case("fp8_block", SECOND_TILES, "float32", seed=6)
    tactic = case.form.tactic
    tiles = ceil_div(SECOND_TILES[0], tactic.rows) * ceil_div(SECOND_TILES[1], tactic.columns)
    assert (tactic.rows, tactic.columns) == (256, 128)
    assert tiles > 132


@pytest.mark.h200
@pytest.mark.parametrize("scales", ["float32", "ue8m0"])
def test_factors_of_a_second_tile_are_its_own(scales: str) -> None:
    assert not checks.mismatch(checks.table_case("fp8_block", SECOND_TILES, scales, seed=6))


# --------------------------------------------------------------------------------------------------
# The NVFP4 GEMM on Hopper: machine code, refusals, and on an H200 the decoded product.

SM90_GEMM_NVFP4_FORMS = checks.forms("nvfp4")


each_nvfp4_form = pytest.mark.parametrize("form", SM90_GEMM_NVFP4_FORMS, ids=named)


@pytest.mark.h200
@each_nvfp4_form
def test_every_bit_is_that_of_the_bf16_form_on_decoded_operands(form: GemmForm) -> None:
    from degarble.kernels.gemm.nvfp4_stages import order_of_k  # noqa: PLC0415

    for extents in ((70, 72, 128), (333, 520, 1984), (1024, 2048, 4096)):
        case = checks.with_form(form, extents, "ordinary", 9)
        sides = checks.nvfp4_sides(case, "cuda")
        one = torch.ones(1, device="cuda")
        plain = sides._replace(given=tuple(s._replace(decode_scale=one) for s in sides.given))
        got = checks.on_device(case, plain)[: extents[0]]
        starts = torch.arange(0, extents[2], 64, device="cuda")[:, None]
        order = (starts + torch.tensor(order_of_k(), device="cuda")).flatten()
        values = (
            (x / s.decode_scale.double()).bfloat16()[:, order].contiguous()
            for x, s in zip((sides.a, sides.b), sides.given, strict=True)
        )
        bf16 = checks.table_case("bf16", extents, "none")
        want = checks.multiply(checks.hopper("bf16"), tuple(values), bf16.problem)
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.h200
def test_a_scale_that_is_nan_reaches_its_row_alone() -> None:
    case = checks.table_case("nvfp4", (200, 136, 160), "e4m3", seed=1)
    sides = checks.nvfp4_sides(case, "cuda")
    a, b = sides.given
    scales = a.scales.clone()
    scales[16 * 5 + 2] = checks.NAN_SCALE  # row 5, block 2
    out = checks.on_device(case, sides._replace(given=(a._replace(scales=scales), b)))
    assert out[5].isnan().all()
    assert not out[:5].isnan().any()
    assert not out[6:200].isnan().any()
