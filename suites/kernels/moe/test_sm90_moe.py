"""Experts on Hopper: stages, machine code, refusals, on an H200 equal to one expert at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module
from itertools import product
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
    UnknownName,
)
from degarble.harness.formats.dialects import CANONICAL, DIALECTS
from degarble.harness.formats.layouts import LINEAR, SWIZZLE_128X4, offset_128x4
from degarble.harness.formats.number_formats import NVFP4, ScaleDirection
from degarble.harness.formats.quantise import quantise
from degarble.harness.formats.scalar_ops import ue8m0_decode
from degarble.kernels.gemm import problem as gemm_facts
from degarble.kernels.moe import problem as facts
from degarble.kernels.moe.problem import MoeProblem
from degarble.kernels.runtime.kernel import Kernel
from degarble.kernels.runtime.modules import kernel_named
from degarble.kernels.runtime.targets import TARGETS
from degarble.references import elementary
from degarble.suites.kernels.moe import moe_checks as checks
from degarble.suites.kernels.moe import moe_faults as faults
from degarble.suites.kernels.moe.contract import MODELS, problem_of
from degarble.suites.kernels.moe.moe_checks import Case
from degarble.suites.kernels.runtime import product_cases
from degarble.suites.support.pretended_gpu import META, pretended_gpu

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
# Rows that are decoded once, as arithmetic: which weights a thread reads, and where pairs go.

WARPGROUP = range(128)
DECODED = [
    pytest.param(form.gemm, id=f"{form.gemm.tactic.rows}-{form.gemm.parts}")
    for tactic in facts.DECODED_TACTICS
    for form in facts.forms_of(problem_of("v4-flash", 1), checks.TARGET, tactic)
]


@pytest.fixture
def decoded() -> ModuleType:
    return import_module("degarble.kernels.moe.sm90_moe_decoded")


@pytest.fixture
def decoded_few() -> ModuleType:
    return import_module("degarble.kernels.moe.decoded_few")


@pytest.mark.parametrize("form", DECODED)
def test_each_block_of_weights_is_read_once_with_its_scale(
    decoded: ModuleType, decoded_few: ModuleType, form: Any
) -> None:
    tactic, columns = form.tactic, form.tactic.columns
    spans, part = tactic.inner // 64, columns // form.parts
    swizzle = {1: "K_SW32", 2: "K_SW64", 4: "K_SW128"}[spans]
    lie = staged("Uint32", columns, 8 * spans, swizzle)
    at = {lie[row][2 * b]: divmod(b, 4) for row in range(columns) for b in range(4 * spans)}
    rows = {lie[row][2 * b]: row for row in range(columns) for b in range(4 * spans)}
    tile = 512 * spans * max(1, part // 128)  # bytes of a matrix's scales in a stage
    for column in (0, 1):
        seen: set[int] = set()
        first = column * part % 128
        for mine, within in product(range(columns // 64), WARPGROUP):
            for span in range(spans):
                if spans > 1:
                    place = decoded_few.place_of_weights(within, mine, form)
                    away = place.below
                    codes = [place.codes[span] + i * away[0] for i in range(2)]
                    scales = [place.scales + 512 * span + i * away[1] for i in range(2)]
                else:
                    place = decoded.place_of_weights(within, (mine, column), form)
                    codes = [each * 8 for each in place.codes]
                    scales = [each * 4 for each in place.scales]
                for code, scale in zip(codes, scales, strict=True):
                    assert at[code] == (span, place.block)
                    matrix, row = divmod(rows[code], part)
                    want = offset_128x4(first + row, 4 * span, 4 * spans)
                    assert scale == matrix * tile + want
                    seen.add(code)
                if form.parts == facts.GATE_AND_UP:
                    assert rows[codes[1]] - rows[codes[0]] == part  # gate and its up
        assert seen == set(at)


def test_a_thread_decodes_in_the_order_of_k(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = import_module("degarble.kernels.moe.decoded_rows")
    stages = decoded.stages
    monkeypatch.setattr(stages, "half_pairs", lambda word: [(word, j) for j in range(4)])
    monkeypatch.setattr(stages, "times_half", lambda pair, scale: (*pair, scale))
    monkeypatch.setattr(stages, "scales_of_blocks", lambda word: [(word, b) for b in range(4)])
    codes = [[(block, word) for word in range(2)] for block in range(4)]
    made = [pair for chunk in decoded.decoded_chunks(codes, "scales") for pair in chunk]
    found = []
    for (block, word), j, scale in made:
        assert scale == ("scales", block)
        found += [16 * block + 8 * word + j, 16 * block + 8 * word + j + 4]
    assert found == stages.order_of_k()


def test_pairs_of_two_warpgroups_meet_in_the_order_of_k(decoded_few: ModuleType) -> None:
    stages, order = decoded_few.stages, {}
    for column, mine, block, chunk in product(range(2), range(4), range(2), range(8)):
        word = decoded_few.word_of_pair(column, mine, block) + 4 * chunk
        number = 128 * column + 32 * mine + 16 * block  # of the first output of the block
        first = number + chunk // 4 * 8 + chunk % 4
        assert word not in order
        order[word] = (first, first + 4)
    found = [number for word in sorted(order) for number in order[word]]
    assert found == [64 * group + each for group in range(4) for each in stages.order_of_k()]


@pytest.mark.parametrize("tactic", facts.DECODED_TACTICS, ids=lambda tactic: str(tactic.rows))
def test_stages_of_decoded_rows_fit(tactic: Any) -> None:
    for form in (each.gemm for each in facts.forms_of(problem_of("v4-pro", 1), "sm_90a", tactic)):
        count, output = facts.decoded_stages(form), facts.decoded_output_bytes(form)
        stage = tactic.rows * tactic.inner * 2 + facts.decoded_weight_bytes(form)
        held = count * stage + output + 16 * count
        assert held <= TARGETS["sm_90a"].shared_memory_bytes
        # Of few rows two are multiplied while the next one is loaded; of many rows it is by pairs.
        assert count >= (3 if tactic.inner > gemm_facts.SPAN else 4)
        loading, multiplying = facts.decoded_registers(form)
        threads = 128 * (1 + facts.decoded_groups(form))
        most = gemm_facts.REGISTERS_OF_PROCESSOR // threads // 8 * 8 * threads
        assert 128 * (loading + facts.decoded_groups(form) * multiplying) <= most
        widths = facts.WIDTHS[tactic.rows]
        assert widths[-1] == tactic.rows
        step = math.gcd(*widths)
        assert tactic.rows // step <= 32  # a lane looks at a step


# --------------------------------------------------------------------------------------------------
# Calls that decode rows once, on a pretended GPU: which those are, and what their kernels refuse.

MANY = MoeProblem(1024, 256, 128, 64, 6, 64)  # tiles of 128 rows, or of 192 that are decoded once
FEW = MoeProblem(8, 256, 128, 64, 6, 64)  # tiles of 16 rows either way
BETWEEN = ("rows", "counts", "tiles", "slots", "places", "products")


def on_meta(problem: MoeProblem) -> dict[str, torch.Tensor]:
    """Return the operands of a call, without memory."""
    return {
        name: torch.empty(of.shape, dtype=of.dtype, device=META)
        for name, of in product_cases.moe_operands(problem).items()
    }


def multiplied_by(problem: MoeProblem, *named: str) -> str:
    """Run a call that names some of what it makes; return the module of its products."""
    call: Any = kernel_named("sm90_moe_nvfp4")
    given = on_meta(problem)
    made: dict[str, Any] = {}
    heard: list[str] = []
    for kernel, own in zip(call.kernels, call.problems(problem, None, given), strict=True):
        made |= kernel.allocate(own, torch.device(META))

    def hear(kernel: Any, _form: Any) -> None:
        heard.append(kernel.entry.__module__.rpartition(".")[2])

    with pretended_gpu(heard=hear):
        own = {name: made[name] for name in named}
        result = call.run(problem, checks.SETTINGS, **given, **own)
    assert len(heard) == 5
    assert result["out"] is own.get("out", result["out"])
    assert heard[2] == heard[3]
    return heard[2]


def test_calls_that_name_nothing_between_kernels_decode_rows_once() -> None:
    for problem in (MANY, FEW):
        for named in ((), ("out",)):
            assert multiplied_by(problem, *named) == "sm90_moe_decoded"


@pytest.mark.parametrize("name", ["tiles", "slots", "products", "x_codes", "hidden_scales"])
def test_a_call_that_names_what_other_tiles_shape_otherwise_keeps_its_own(name: str) -> None:
    """Its memory is right, so it is neither refused nor given to kernels that would misread it."""
    for named in ((name,), BETWEEN + ((name,) if name not in BETWEEN else ())):
        assert multiplied_by(MANY, *named) == "sm90_moe_nvfp4"


def test_a_call_that_names_what_has_one_shape_in_all_tiles_decodes_rows_once() -> None:
    assert multiplied_by(MANY, "counts", "places") == "sm90_moe_decoded"
    assert multiplied_by(FEW, *BETWEEN) == "sm90_moe_decoded"
    assert multiplied_by(FEW, "x_codes") == "sm90_moe_nvfp4"


def unheard(kernel: Any, _form: Any) -> None:
    pytest.fail(f"{kernel.entry.__name__} is launched")


@pytest.mark.parametrize(("hidden", "width"), [(192, 192), (256, 192), (192, 256)])
def test_kernels_of_decoded_rows_refuse_parts_of_a_tile_of_scales(
    decoded: ModuleType, hidden: int, width: int
) -> None:
    problem = replace(FEW, hidden=hidden, width=width)
    given = on_meta(problem)
    rows = facts.rows_of_call(problem, checks.TARGET, facts.DECODED_TACTICS[0])
    with pretended_gpu(heard=unheard):
        with pytest.raises(ShapeMismatch, match=r"multiples of 128.*sm90_moe_nvfp4"):
            decoded.KERNEL.run(problem, checks.SETTINGS, **given)
        for kernel in (decoded.GATHER, decoded.FC1, decoded.FC2):
            own = kernel.prepared(rows).operands
            alone = {
                each.name: torch.empty(each.shape, dtype=each.dtype, device=META)
                for each in own if each.present
            }  # fmt: skip
            with pytest.raises(ShapeMismatch, match="hidden, width of decoded experts"):
                kernel.run(rows, checks.SETTINGS, **alone)


@pytest.mark.parametrize(
    "tactic",
    [
        pytest.param(facts.TILES[checks.TARGET][128], id="rows"),
        pytest.param(replace(facts.DECODED_TACTICS[0], columns=128), id="columns"),
        pytest.param(replace(facts.DECODED, inner=128), id="inner"),
        pytest.param(replace(facts.DECODED, cluster_rows=2), id="cluster of rows"),
        pytest.param(replace(facts.DECODED, cluster_columns=2), id="cluster of columns"),
    ],
)
def test_kernels_of_decoded_rows_refuse_other_tiles(decoded: ModuleType, tactic: Any) -> None:
    given = on_meta(FEW)
    with pretended_gpu(heard=unheard), pytest.raises(InvalidArgument, match="tactic of decoded"):
        decoded.KERNEL.run(FEW, checks.SETTINGS, tactic, **given)


@pytest.mark.parametrize("tactic", facts.DECODED_TACTICS, ids=lambda tactic: str(tactic.rows))
def test_kernels_of_decoded_rows_take_every_tile_of_the_table(
    decoded: ModuleType, tactic: Any
) -> None:
    with pretended_gpu():
        made = decoded.KERNEL.run(FEW, checks.SETTINGS, tactic, **on_meta(FEW))
    assert made["out"].shape == (FEW.tokens, FEW.hidden)


def test_a_ring_of_fewer_than_two_pairs_of_stages_is_not_compiled(
    decoded: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads would wait for a stage that is loaded only after they have given one back."""
    form, _ = facts.forms_of(problem_of("v4-pro", 1), checks.TARGET, facts.DECODED)
    monkeypatch.setattr(facts, "decoded_stages", lambda _form: 3)
    with pytest.raises(AssertionError, match="two pairs of stages"):
        decoded.launch_many((), (), form, None)


# --------------------------------------------------------------------------------------------------
# Grouped experts on Hopper: machine code, refusals, on an H200 equal to one expert at a time.

SMALL = MoeProblem(5, 64, 96, 3, 2, 3, 10.0)
TACTICS = tuple(facts.TILES[checks.TARGET].values())


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.moe.sm90_moe_nvfp4")


def test_refuses_by_name(kernels: ModuleType) -> None:
    given = checks.given_of(Case(SMALL), "cpu").operands

    def refused(error: type[Exception], text: str, **other: Any) -> None:
        with pytest.raises(error, match=text):
            kernels.KERNEL.run(SMALL, checks.SETTINGS, **given | other)

    refused(DtypeMismatch, "x", x=given["x"].float())
    refused(ShapeMismatch, "x", x=given["x"][:4])
    refused(LayoutMismatch, "strides of x", x=given["x"].T.contiguous().T)
    refused(DtypeMismatch, "shared expert", shared=given["x"].float())
    refused(DtypeMismatch, "experts of tokens", experts=given["experts"].long())
    refused(ShapeMismatch, "routing weights", weights=given["weights"].T)
    refused(ShapeMismatch, "numbers here", local=torch.zeros(4, dtype=torch.int32))
    for name in ("w13", "w2"):
        codes, scales, decode, of_x = (
            given[f"{name}_{part}"] for part in ("codes", "scales", "decode_scale", "input_scale")
        )
        for what, part, wrong, error in (
            ("codes", "codes", codes[:2], ShapeMismatch),
            ("codes", "codes", codes.view(torch.int8), DtypeMismatch),
            ("scales", "scales", scales[..., :-1], ShapeMismatch),
            ("scales", "scales", scales.view(torch.float8_e4m3fn), DtypeMismatch),
            ("decode scales", "decode_scale", decode.double(), DtypeMismatch),
            ("input scales", "input_scale", of_x[:1], ShapeMismatch),
        ):
            refused(error, f"{what} of {name}", **{f"{name}_{part}": wrong})
    few = replace(SMALL, experts=2)
    with pytest.raises(InvalidArgument, match="experts held here"):
        kernels.KERNEL.run(few, checks.SETTINGS, **given)


def test_nothing_is_launched_of_a_call_that_is_refused(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only the last kernels read is refused before the first one runs."""
    launched: list[Any] = []
    monkeypatch.setattr(Kernel, "launch", lambda self, *_given: launched.append(self))
    given = checks.given_of(Case(SMALL), "cpu").operands
    with pytest.raises(ShapeMismatch, match="decode scales of w2"):
        kernels.KERNEL.run(SMALL, checks.SETTINGS, **given | {"w2_decode_scale": torch.ones(4)})
    with pytest.raises(UnknownName, match="operand"):
        kernels.KERNEL.run(SMALL, checks.SETTINGS, **given, w3_codes=given["x"])
    assert not launched


def quantised(seed: int, rows: int = 96, **changes: Any) -> QuantisedTensor:
    values = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))
    made = quantise(values, NVFP4, CANONICAL).with_layout(SWIZZLE_128X4)
    return replace(made, **changes)


def test_weights_of_a_checkpoint_are_stacked_and_others_refused() -> None:
    stacked = import_module("degarble.kernels.moe.entry").stacked
    experts = [[quantised(2 * e), quantised(2 * e + 1)] for e in range(3)]
    given = checks.given_of(Case(SMALL), "cpu").operands
    w13 = stacked("w13", experts, torch.ones(3))
    assert {name: tensor.shape for name, tensor in w13.items()} == {
        name: tensor.shape for name, tensor in given.items() if name.startswith("w13")
    }
    assert torch.equal(w13["w13_codes"][2, 1], experts[2][1].codes)
    assert torch.equal(w13["w13_scales"][1, 0], experts[1][0].block_scale)
    assert w13["w13_decode_scale"][2, 0] == experts[2][0].decode_scale
    alone = stacked("w2", [[expert[0]] for expert in experts], torch.ones(3))
    assert alone["w2_codes"].shape == (3, 96, 32)
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
            stacked("w13", [experts[0], wrong], torch.ones(2))
    with pytest.raises(LayoutMismatch):
        stacked("w13", [[linear, linear]], torch.ones(1))


def test_faults_have_names_of_their_own() -> None:
    assert len(faults.BY_NAME) == len(faults.FAULTS) == 31


def test_a_planted_fault_is_removed() -> None:
    fault = faults.BY_NAME["routing weight left out after"]
    combine = kernel_named("simt_moe_rows.COMBINE")
    form = facts.CombineForm(2, weighted=True, shared=False, target="sm_90a")
    whole = combine.compile_form(form, checks.SETTINGS).ptx
    with faults.planted(fault):
        assert combine.compile_form(form, checks.SETTINGS).ptx != whole
    assert combine.compile_form(form, checks.SETTINGS).ptx == whole


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
def test_fc1_shows_what_its_swiglu_gets(weighting: str, tactic: Any) -> None:
    case = Case(MoeProblem(300, 352, 416, 8, 2, 8, 10.0, weighting), "skewed", 3, tactic)
    given = checks.given_of(case)
    result = checks.on_device(case, given)
    assert not checks.shown(case, given, result)
    x = result.workspace.x
    negated = x._replace(codes=x.codes ^ 0x88)
    other = result._replace(workspace=result.workspace._replace(x=negated))
    assert checks.shown(case, given, other)


@pytest.mark.h200
@pytest.mark.parametrize("weighting", facts.WEIGHTINGS)
@pytest.mark.parametrize("model", MODELS)
def test_is_the_twin_within_its_budget(model: str, weighting: str) -> None:
    from degarble.suites.kernels.moe import moe_twin as twin  # noqa: PLC0415

    hidden, width, _, chosen = MODELS[model]
    case = Case(MoeProblem(96, hidden, width, 8, chosen, 8, 10.0, weighting), seed=1)
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
def test_rows_are_their_own() -> None:
    case = Case(problem_of("v4-flash", 300), seed=4)
    given = checks.given_of(case)
    whole = checks.on_device(case, given)
    other = torch.full_like(given.x, torch.nan)
    other[::7] = given.x[::7]
    alone = checks.on_device(case, given._replace(x=other))
    assert torch.equal(alone.out[::7], whole.out[::7])


@pytest.mark.h200
@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_caught_and_a_whole_call_is_not(fault: faults.Fault) -> None:
    # The oracle is compiled here, before anything is planted in what it shares with the experts.
    assert not faults.verdict_of_whole(fault.case, decoded=fault.decoded)
    with faults.planted(fault):
        assert fault.checks.mismatch(fault.case)


# --------------------------------------------------------------------------------------------------
# The shared expert on Hopper: refusals, and on an H200 what its kernels make one by one.

SHAPES = ((1, 4096, 2048), (130, 7168, 3072), (37, 256, 256))
NORM_ALLOWED = 2**-4  # of three roundings to 3 mantissa bits, of an rms of at most 2**-4 / 3**0.5


@pytest.fixture
def sm90_shared_expert_kernels() -> ModuleType:
    return import_module("degarble.kernels.moe.sm90_shared_expert")


def fp8_weights(hidden: int, width: int, scales: str, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(hidden + width)

    def codes(n: int, k: int) -> torch.Tensor:
        made = torch.randn(n, k, generator=generator, device=device)
        return made.to(torch.float8_e4m3fn)

    def of_blocks(n: int, k: int) -> torch.Tensor:
        shape = (n // 128, k // 128)
        made = torch.randint(116, 120, shape, generator=generator, device=device)
        return made.to(torch.uint8) if scales == "ue8m0" else ue8m0_decode(made) * 1.37

    sides = ((2 * width, hidden), (hidden, width))
    made: dict[str, torch.Tensor] = {}
    for name, side in zip(("w13", "w2"), sides, strict=True):
        made |= {name: codes(*side), f"{name}_scales": of_blocks(*side)}
    return made


def refuses_as_a_shared_expert(kernels: ModuleType, target: str) -> None:
    """Both formats of a target's shared expert refuse by name."""
    problem = checks.one_expert(4, 256, 128, 10.0)
    given = {"x": torch.zeros(4, 256, dtype=torch.bfloat16)}
    given |= fp8_weights(256, 128, "float32", "cpu")
    x = given["x"]
    for error, name, other in (
        (DtypeMismatch, "x", {"x": x.float()}),
        (ShapeMismatch, "x", {"x": x[:3]}),
        (LayoutMismatch, "strides of x", {"x": x.T.contiguous().T}),
        (ShapeMismatch, "w13", {"w13": given["w13"][:128]}),
        (DtypeMismatch, "w2", {"w2": given["w2"].view(torch.uint8)}),
        (DtypeMismatch, "w2_scales", {"w2_scales": given["w2_scales"].to(torch.uint8)}),
    ):
        with pytest.raises(error, match=f"{name} ="):
            kernels.FP8.run(problem, checks.SETTINGS, **given | other)
    with pytest.raises(ShapeMismatch, match="hidden and width of an FP8 expert"):
        kernels.FP8.run(replace(problem, width=96), checks.SETTINGS, **given)
    case = Case(replace(problem, hidden=64), target=target)
    ours = checks.given_of(case, "cpu").operands
    two = replace(case.problem, experts=2, routed=2, chosen=2)
    for kernel, operands in ((kernels.FP8, given), (kernels.KERNEL, ours)):
        with pytest.raises(ShapeMismatch, match="experts of a shared expert"):
            kernel.run(two, checks.SETTINGS, **operands)
    broken = ours | {"w13_codes": ours["w13_codes"][:, :1]}
    with pytest.raises(ShapeMismatch, match="codes of w13"):
        kernels.KERNEL.run(case.problem, checks.SETTINGS, **broken)


def test_sm90_shared_expert_refuses_by_name(sm90_shared_expert_kernels: ModuleType) -> None:
    refuses_as_a_shared_expert(sm90_shared_expert_kernels, checks.TARGET)


@pytest.mark.h200
@pytest.mark.parametrize("shape", SHAPES)
def test_nvfp4_is_one_kernel_after_the_other(shape: tuple[int, int, int]) -> None:
    is_one_kernel_after_the_other(Case(checks.one_expert(*shape, 10.0), seed=2))


def is_one_kernel_after_the_other(case: Case) -> None:
    """The shared expert's kernels make what others make one by one."""
    given = checks.given_of(case)
    got = checks.by_shared_expert(case, given)
    slots = torch.arange(case.problem.tokens, device="cuda")
    want = checks.wanted(case, given, 0, slots)[2]
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.h200
@pytest.mark.parametrize("scales", ["float32", "ue8m0"])
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_is_near_the_exact_expert(
    sm90_shared_expert_kernels: ModuleType, shape: tuple[int, int, int], scales: str
) -> None:
    is_near_the_exact_expert(sm90_shared_expert_kernels, shape, scales)


def is_near_the_exact_expert(kernels: ModuleType, shape: tuple[int, int, int], scales: str) -> None:
    """The kernels are near an expert in float64, and are not with gate in the place of up."""
    tokens, hidden, width = shape
    weights = fp8_weights(hidden, width, scales, "cuda")
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    x = x.cuda()
    want, problem = exact(x, weights, 10.0), checks.one_expert(*shape, 10.0)

    def error(w13: torch.Tensor) -> float:
        got = kernels.FP8.run(problem, checks.SETTINGS, x=x, **weights | {"w13": w13})["out"]
        return float((got.double() - want).norm() / want.norm())

    halves = weights["w13"].view(2, width, hidden).flip(0).reshape(2 * width, hidden)
    assert error(weights["w13"]) < NORM_ALLOWED < error(halves.contiguous())


def exact(x: torch.Tensor, weights: dict[str, torch.Tensor], limit: float) -> torch.Tensor:
    """The expert in float64, without rounding an activation."""

    def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        of_blocks = ue8m0_decode(scales.int()) if scales.dtype is torch.uint8 else scales
        wide = of_blocks.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return codes.double() * wide

    gate, up = (x.double() @ values(weights["w13"], weights["w13_scales"]).T).chunk(2, 1)
    return elementary.swiglu(gate, up, limit) @ values(weights["w2"], weights["w2_scales"]).T
