"""Experts on Hopper: stages, machine code, refusals, on an H200 equal to one expert at a time."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import (
    DialectMismatch,
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    ScaleDirectionMismatch,
    ShapeMismatch,
)
from degarble.harness.formats.dialects import CANONICAL, DIALECTS
from degarble.harness.formats.layouts import LINEAR, SWIZZLE_128X4, offset_128x4
from degarble.harness.formats.number_formats import NVFP4, ScaleDirection
from degarble.harness.formats.quantise import quantise
from degarble.harness.formats.scalar_ops import ue8m0_decode
from degarble.kernels.gemm import problem as gemm
from degarble.kernels.moe import problem as facts
from degarble.kernels.moe.problem import AFTER_W2, BEFORE_W2, MoeProblem
from degarble.references import elementary
from degarble.suites.kernels import gemm_code as code
from degarble.suites.kernels.moe import moe_checks as checks
from degarble.suites.kernels.moe import moe_faults as faults
from degarble.suites.kernels.moe.moe_checks import Case

if TYPE_CHECKING:
    from types import ModuleType

    from degarble.harness.formats.quantise import QuantisedTensor

pytestmark = pytest.mark.needs("cutlass")


# --------------------------------------------------------------------------------------------------
# Stages of several 64 numbers of K, as arithmetic: where codes, scales and numbers lie.


@pytest.fixture
def spans() -> ModuleType:
    return import_module("degarble.kernels.moe.few_rows")


SWIZZLES = {"K_SW32": 1, "K_SW64": 2, "K_SW128": 3}  # bits of 16 bytes that rows of 128 change


def staged(element: str, rows: int, columns: int, swizzle: str) -> list[list[int]]:
    """Return at which byte CuTe has each element of a stage; PTX ISA 9.1, 5.5.6: its swizzle."""
    cutlass = import_module("cutlass")
    ir = import_module("cutlass._mlir").ir
    wgmma = import_module("degarble.kernels.gemm.mainloop")
    of, width = getattr(cutlass, element), getattr(cutlass, element).width // 8
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            chosen = getattr(wgmma.Swizzle, swizzle)
            layout: Any = wgmma.staged_layout(of, rows, columns, 2, chosen).outer
            places = [[layout((r, c, 0)) for c in range(columns)] for r in range(rows)]
    assert all(type(place) is int for row in places for place in row), "CuTe did not fold it"
    bits = (1 << SWIZZLES[swizzle]) - 1
    return [[place * width ^ (place * width >> 7 & bits) << 4 for place in row] for row in places]


@pytest.mark.parametrize(("count", "swizzle"), [(1, "K_SW32"), (2, "K_SW64"), (4, "K_SW128")])
def test_codes_lie_where_tma_writes_them(spans: ModuleType, count: int, swizzle: str) -> None:
    words = 8 * count
    places = staged("Uint32", 32, words, swizzle)
    for row in range(32):
        for word in range(words):
            chunk = spans.chunk_of_codes(row, word // 4, count)
            assert places[row][word] == chunk * 16 + word % 4 * 4


def test_one_span_is_the_stage_of_other_tiles(spans: ModuleType) -> None:
    stages = import_module("degarble.kernels.gemm.nvfp4_stages")
    for row in range(256):
        assert spans.word_of_scales(row, 0, 1) == stages.word_of_scales(row)
        for chunk in range(2):
            assert spans.chunk_of_codes(row, chunk, 1) == stages.chunk_of_codes(row, chunk)


@pytest.mark.parametrize(("rows", "columns"), [(16, 256), (32, 256), (64, 128)])
def test_decoded_numbers_lie_where_wgmma_reads_them(
    spans: ModuleType, rows: int, columns: int
) -> None:
    places = staged("BFloat16", rows, columns, "K_SW128")
    for row in range(rows):
        for column in range(columns):
            span, within = divmod(column, 64)
            chunk = spans.chunk_of_numbers(row, within // 8, span, rows)
            assert places[row][column] == chunk * 16 + within % 8 * 2


def test_scales_of_a_stage_are_whole_tiles_side_by_side(spans: ModuleType) -> None:
    for row in (0, 7, 31, 32, 100, 127, 128, 200, 255):
        for count in (2, 4):
            for span in range(count):
                want = offset_128x4(row, 4 * span, 4 * count)
                assert spans.word_of_scales(row, span, count) * 4 == want


@pytest.mark.parametrize("count", [1, 2, 4])
def test_what_is_eight_rows_or_a_span_away_lies_where_the_reads_say(
    spans: ModuleType, count: int
) -> None:
    rows = [16 * group + g for group in range(16) for g in range(8)]
    for row in rows:
        of_scales = spans.word_of_scales(row, 0, count)
        for span in range(count):
            for i in range(2):
                got = of_scales + 128 * span + 32 * i
                assert got == spans.word_of_scales(row + 8 * i, span, count)
        for chunk in range(2 * count):
            below = spans.chunk_of_codes(row, chunk, count) + 2 * count * spans.SWIZZLED_ROWS
            assert below == spans.chunk_of_codes(row + 8, chunk, count)


# --------------------------------------------------------------------------------------------------
# Grouped experts on Hopper: machine code, refusals, on an H200 equal to one expert at a time.

V4_PRO, V4_FLASH, V3_2 = (7168, 3072, 384, 6), (4096, 2048, 256, 6), (7168, 2048, 256, 8)
MODELS = {"v4-pro": V4_PRO, "v4-flash": V4_FLASH, "v3.2": V3_2}
SMALL = MoeProblem(5, 64, 96, 3, 2, 3, 10.0)
FUZZED, AT_ONCE = 400, 40
TACTICS = tuple(facts.TILES[checks.TARGET].values())


def problem_of(
    model: tuple[int, ...], tokens: int, weighting: str = AFTER_W2, experts: int = 0
) -> MoeProblem:
    hidden, width, routed, chosen = model
    limit = None if model is V3_2 else 10.0
    return MoeProblem(tokens, hidden, width, experts or routed, chosen, routed, limit, weighting)


def forms() -> list[facts.MoeForm]:
    return [
        form
        for tactic in TACTICS
        for weighting in facts.WEIGHTINGS
        for form in with_shown(facts.forms_of(problem_of(V4_PRO, 1, weighting), "sm_90a", tactic))
    ]


def with_shown(forms: tuple[facts.MoeForm, ...]) -> tuple[facts.MoeForm, ...]:
    return (*forms, replace(forms[0], shown=True))


def named(form: facts.MoeForm) -> str:
    tactic = form.gemm.tactic
    return f"{tactic.rows}x{tactic.columns}-{form.gemm.parts}-{form.weighted}-{form.shown}"


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.moe.sm90_moe_nvfp4")


def require_sound(kernels: ModuleType, form: facts.MoeForm) -> None:
    kernel = kernels.compile_form(form, checks.SETTINGS)
    # FC1 stores no tile by TMA: it leaves as codes.
    few = gemm.has_few_rows(form.gemm)  # FC2 of few rows neither: it leaves in 16 bytes a thread
    stores = 0 if few or form.gemm.parts == facts.GATE_AND_UP else None
    assert not code.complaints(kernel, form.gemm, issued=1 if few else 2, stores=stores)
    assert "cvt.rn.bf16x2.e2m1" not in kernel.ptx


@pytest.mark.slow
def test_machine_code_is_as_derived(kernels: ModuleType) -> None:
    for rows in (16, 256):
        first, second = facts.forms_of(SMALL, checks.TARGET, facts.TILES[checks.TARGET][rows])
        require_sound(kernels, replace(first, weighted=True))
        require_sound(kernels, second)


@pytest.mark.slow
@pytest.mark.parametrize("form", forms(), ids=named)
def test_machine_code_of_every_form(kernels: ModuleType, form: facts.MoeForm) -> None:
    require_sound(kernels, form)


def test_refuses_by_name(kernels: ModuleType) -> None:
    given = checks.given_of(Case(SMALL), "cpu")
    routing, weights = given.routing, given.weights
    w13, w2 = weights

    def refused(error: type[Exception], name: str, **other: Any) -> None:
        x, routed, held, shared = given._replace(**other)
        with pytest.raises(error, match=name):
            kernels.moe_nvfp4(x, routed, held, SMALL, checks.SETTINGS, shared_TD=shared)

    refused(DtypeMismatch, "x", x=given.x.float())
    refused(ShapeMismatch, "x", x=given.x[:4])
    refused(LayoutMismatch, "strides of x", x=given.x.T.contiguous().T)
    refused(DtypeMismatch, "shared expert", shared=given.x.float())
    wide = routing._replace(experts=routing.experts.long())
    refused(DtypeMismatch, "experts of tokens", routing=wide)
    refused(ShapeMismatch, "routing weights", routing=routing._replace(weights=routing.weights.T))
    local = torch.zeros(4, dtype=torch.int32)
    refused(ShapeMismatch, "numbers here", routing=routing._replace(local=local))
    for name, held in (("w13", w13), ("w2", w2)):
        for what, field, wrong, error in (
            ("codes", "codes", held.codes[:2], ShapeMismatch),
            ("codes", "codes", held.codes.view(torch.int8), DtypeMismatch),
            ("scales", "scales", held.scales[..., :-1], ShapeMismatch),
            ("scales", "scales", held.scales.view(torch.float8_e4m3fn), DtypeMismatch),
            ("decode scales", "decode_scale", held.decode_scale.double(), DtypeMismatch),
            ("input scales", "input_scale", held.input_scale[:1], ShapeMismatch),
        ):
            other = weights._replace(**{name: held._replace(**{field: wrong})})
            refused(error, f"{what} of {name}", weights=other)
    few = replace(SMALL, experts=2)
    with pytest.raises(InvalidArgument, match="experts held here"):
        kernels.moe_nvfp4(given.x, routing, weights, few, checks.SETTINGS)


def quantised(seed: int, rows: int = 96, **changes: Any) -> QuantisedTensor:
    values = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))
    made = quantise(values, NVFP4, CANONICAL).with_layout(SWIZZLE_128X4)
    return replace(made, **changes)


def test_weights_of_a_checkpoint_are_stacked_and_others_refused(kernels: ModuleType) -> None:
    experts = [[quantised(2 * e), quantised(2 * e + 1)] for e in range(3)]
    w13 = kernels.expert_weights(experts, torch.ones(3))
    kernels.require_weights("w13", w13, SMALL, (3, 2))
    assert torch.equal(w13.codes[2, 1], experts[2][1].codes)
    assert torch.equal(w13.scales[1, 0], experts[1][0].block_scale)
    assert w13.decode_scale[2, 0] == experts[2][0].decode_scale
    alone = kernels.expert_weights([[expert[0]] for expert in experts], torch.ones(3))
    assert alone.codes.shape == (3, 96, 32)
    linear = quantised(5).with_layout(LINEAR)
    encode = quantised(5).with_direction(ScaleDirection.ENCODE)
    for error, wrong in (
        (LayoutMismatch, [linear, linear]),
        (ScaleDirectionMismatch, [encode, encode]),
        (DialectMismatch, [quantised(5, dialect=DIALECTS["modelopt"]), quantised(6)]),
        (ShapeMismatch, [quantised(5, rows=128), quantised(6, rows=128)]),
        (ShapeMismatch, [quantised(5)]),
    ):
        with pytest.raises(error):
            kernels.expert_weights([experts[0], wrong], torch.ones(2))
    with pytest.raises(LayoutMismatch):
        kernels.expert_weights([[linear, linear]], torch.ones(1))


def test_faults_have_names_of_their_own() -> None:
    assert len(faults.BY_NAME) == len(faults.FAULTS) == 22


def test_a_planted_fault_is_removed() -> None:
    fault = faults.BY_NAME["routing weight left out after"]
    rows = import_module(fault.module)
    form = facts.CombineForm(2, weighted=True, shared=False, target="sm_90a")
    whole = rows.compile_combine(form, checks.SETTINGS).ptx
    with faults.planted(fault):
        assert rows.compile_combine(form, checks.SETTINGS).ptx != whole
    assert rows.compile_combine(form, checks.SETTINGS).ptx == whole


@pytest.mark.slow
@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_changes_the_machine_code(fault: faults.Fault) -> None:
    whole = faults.texts(fault)
    with faults.planted(fault):
        assert faults.texts(fault) != whole


# ---- on an H200 ----------------------------------------------------------------------------------


@pytest.mark.h200
@pytest.mark.parametrize("tactic", TACTICS, ids=lambda t: f"{t.rows}")
@pytest.mark.parametrize("weighting", facts.WEIGHTINGS)
@pytest.mark.parametrize("choice", checks.CHOICES)
def test_choices_of_every_kind(choice: str, weighting: str, tactic: Any) -> None:
    problem = MoeProblem(700, 352, 416, 8, 1, 8, 10.0, weighting)
    assert not checks.mismatch(Case(problem, choice, 3, tactic))


@pytest.mark.h200
@pytest.mark.parametrize("tokens", [1, 17, 400, 2048])
@pytest.mark.parametrize("model", MODELS)
def test_shapes_of_models(model: str, tokens: int) -> None:
    weighting = BEFORE_W2 if tokens == 17 else AFTER_W2
    assert not checks.mismatch(Case(problem_of(MODELS[model], tokens, weighting), "skewed"))
    torch.cuda.empty_cache()


@pytest.mark.h200
def test_the_small_models() -> None:
    for tokens in (1, 8, 300):
        case = Case(MoeProblem(tokens, 256, 256, 8, 2, 8, 10.0), shared=True)
        assert not checks.mismatch(case)


@pytest.mark.h200
@pytest.mark.parametrize("tactic", TACTICS, ids=lambda t: f"{t.rows}")
@pytest.mark.parametrize("weighting", facts.WEIGHTINGS)
def test_fc1_shows_what_its_swiglu_gets(weighting: str, tactic: Any) -> None:
    case = Case(MoeProblem(300, 352, 416, 8, 2, 8, 10.0, weighting), "skewed", 3, tactic)
    given = checks.given_of(case)
    result = checks.on_device(case, given)
    assert not checks.shown(case, given, result)
    other = result._replace(workspace=result.workspace._replace(x=result.workspace.hidden))
    assert checks.shown(case, given, other)


@pytest.mark.h200
def test_experts_that_are_elsewhere() -> None:
    for seed, experts in enumerate((1, 7, 16)):
        problem = MoeProblem(333, 320, 288, experts, 4, 32, 10.0)
        assert not checks.mismatch(Case(problem, "even", seed))


@pytest.mark.h200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed(seed: int) -> None:
    wrong = [why for case in checks.fuzzed(seed, AT_ONCE) if (why := checks.mismatch(case))]
    assert not wrong


@pytest.mark.h200
@pytest.mark.parametrize("weighting", facts.WEIGHTINGS)
@pytest.mark.parametrize("model", MODELS)
def test_is_the_twin_within_its_budget(model: str, weighting: str) -> None:
    from degarble.suites.kernels.moe import moe_twin as twin  # noqa: PLC0415

    hidden, width, _, chosen = MODELS[model]
    problem = MoeProblem(96, hidden, width, 8, chosen, 8, 10.0, weighting)
    case = Case(problem, seed=1)
    given = checks.given_of(case)
    weights = torch.rand_like(given.routing.weights)  # here they need not be powers of two
    given = given._replace(routing=given.routing._replace(weights=weights))
    result = checks.on_device(case, given)
    found = [twin.compared(case, given, result, expert) for expert in (0, 5)]
    assert not [counted.wrong for counted in found if counted.wrong]
    assert max(counted.codes for counted in found) <= twin.MOST_CODES
    assert max(counted.scales for counted in found) <= twin.MOST_SCALES
    other = given._replace(weights=given.weights._replace(w13=rolled(given.weights.w13)))
    assert twin.compared(case, other, result, 0).wrong


def rolled(weights: Any) -> Any:
    return type(weights)(*(weight.roll(1, 0) for weight in weights))


@pytest.mark.h200
def test_rows_are_their_own_and_runs_are_equal() -> None:
    case = Case(problem_of(V4_FLASH, 300, AFTER_W2), seed=4)
    given = checks.given_of(case)
    whole = checks.on_device(case, given)
    assert torch.equal(checks.on_device(case, given).out, whole.out)
    other = torch.full_like(given.x, torch.nan)
    other[::7] = given.x[::7]
    alone = checks.on_device(case, given._replace(x=other))
    assert torch.equal(alone.out[::7], whole.out[::7])


@pytest.mark.h200
def test_a_graph_replays_on_other_tokens_and_other_choices(kernels: ModuleType) -> None:
    case = Case(MoeProblem(200, 512, 384, 16, 4, 16, 10.0), "one", 1, shared=True)
    other = replace(case, choice="skewed", seed=2)
    given, later = checks.given_of(case), checks.given_of(other)
    result = checks.poisoned(case, given)
    kernels.launch(case.job, given, *result)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.launch(case.job, given, *result)
    for old, new in zip(kernels.tensors_of(given), kernels.tensors_of(later), strict=True):
        old.copy_(new)
    graph.replay()
    fresh = checks.on_device(other, later)
    assert torch.equal(result.out, fresh.out)
    assert not checks.difference(other, later, fresh)


@pytest.mark.h200
@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_caught_and_a_whole_call_is_not(fault: faults.Fault) -> None:
    # The oracle is compiled here, before anything is planted in what it shares with the experts.
    assert not faults.verdict_of_whole(fault.case)
    with faults.planted(fault):
        assert checks.mismatch(fault.case)


# --------------------------------------------------------------------------------------------------
# The shared expert on Hopper: refusals, and on an H200 what its kernels make one by one.

SHAPES = ((1, 4096, 2048), (130, 7168, 3072), (37, 256, 256))
NORM_ALLOWED = 0.05  # of FP8 with 128 values a scale, twice: 3 mantissa bits round at 2**-4


@pytest.fixture
def sm90_shared_expert_kernels() -> ModuleType:
    return import_module("degarble.kernels.moe.sm90_shared_expert")


def fp8_weights(kernels: ModuleType, hidden: int, width: int, scales: str, device: str) -> Any:
    generator = torch.Generator(device).manual_seed(hidden + width)

    def codes(n: int, k: int) -> torch.Tensor:
        made = torch.randn(n, k, generator=generator, device=device)
        return made.to(torch.float8_e4m3fn)

    def of_blocks(n: int, k: int) -> torch.Tensor:
        shape = (n // 128, k // 128)
        made = torch.randint(116, 120, shape, generator=generator, device=device)
        return made.to(torch.uint8) if scales == "ue8m0" else ue8m0_decode(made) * 1.37

    sides = ((2 * width, hidden), (hidden, width))
    first, second = ((codes(*side), of_blocks(*side)) for side in sides)
    return kernels.Fp8Weights(*first, *second)


def test_sm90_shared_expert_refuses_by_name(sm90_shared_expert_kernels: ModuleType) -> None:
    problem = sm90_shared_expert_kernels.problem_of(4, 256, 128, 10.0)
    x, weights = (
        torch.zeros(4, 256, dtype=torch.bfloat16),
        fp8_weights(sm90_shared_expert_kernels, 256, 128, "float32", "cpu"),
    )
    run, settings = sm90_shared_expert_kernels.shared_expert_fp8, checks.SETTINGS
    for error, name, values in (
        (DtypeMismatch, "x", x.float()),
        (ShapeMismatch, "x", x[:3]),
        (LayoutMismatch, "strides of x", x.T.contiguous().T),
    ):
        with pytest.raises(error, match=name):
            run(values, weights, problem, settings)
    with pytest.raises(ShapeMismatch, match="hidden and width of an FP8 expert"):
        run(x, weights, replace(problem, width=96), settings)
    case = checks.Case(replace(problem, hidden=64))
    given = checks.given_of(case, "cpu")
    two = replace(case.problem, experts=2, routed=2, chosen=2)
    with pytest.raises(ShapeMismatch, match="experts of a shared expert"):
        sm90_shared_expert_kernels.shared_expert_nvfp4(given.x, given.weights, two, settings)
    w13 = given.weights.w13._replace(codes=given.weights.w13.codes[:, :1])
    broken = given.weights._replace(w13=w13)
    with pytest.raises(ShapeMismatch, match="codes of w13"):
        sm90_shared_expert_kernels.shared_expert_nvfp4(given.x, broken, case.problem, settings)


@pytest.mark.h200
@pytest.mark.parametrize("shape", SHAPES)
def test_nvfp4_is_one_kernel_after_the_other(
    sm90_shared_expert_kernels: ModuleType, shape: tuple[int, int, int]
) -> None:
    case = checks.Case(sm90_shared_expert_kernels.problem_of(*shape, 10.0), seed=2)
    given = checks.given_of(case)
    got = sm90_shared_expert_kernels.shared_expert_nvfp4(
        given.x, given.weights, case.problem, checks.SETTINGS
    )
    slots = torch.arange(shape[0], device="cuda")
    want = checks.wanted(case, given, 0, slots)[2]
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.h200
@pytest.mark.parametrize("scales", ["float32", "ue8m0"])
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_is_near_the_exact_expert(
    sm90_shared_expert_kernels: ModuleType, shape: tuple[int, int, int], scales: str
) -> None:
    tokens, hidden, width = shape
    weights = fp8_weights(sm90_shared_expert_kernels, hidden, width, scales, "cuda")
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    problem = sm90_shared_expert_kernels.problem_of(*shape, 10.0)
    got = sm90_shared_expert_kernels.shared_expert_fp8(x, weights, problem, checks.SETTINGS)
    want = exact(x, weights, 10.0)
    assert float((got.double() - want).norm() / want.norm()) < NORM_ALLOWED
    halves = weights.w13.view(2, width, hidden).flip(0).reshape(2 * width, hidden)
    changed = sm90_shared_expert_kernels.shared_expert_fp8(
        x, weights._replace(w13=halves.contiguous()), problem, checks.SETTINGS
    )
    assert float((changed.double() - want).norm() / want.norm()) > NORM_ALLOWED


def exact(x: torch.Tensor, weights: Any, limit: float) -> torch.Tensor:
    """The expert in float64, without rounding an activation."""

    def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        of_blocks = ue8m0_decode(scales.int()) if scales.dtype is torch.uint8 else scales
        wide = of_blocks.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return codes.double() * wide

    gate, up = (x.double() @ values(*weights[:2]).T).chunk(2, 1)
    return elementary.swiglu(gate, up, limit) @ values(*weights[2:]).T
