"""What is particular to a row kernel: refusals of its own, relations to others, special numbers."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import LINEAR
from degarble.kernels.primitives.quantise_problem import LAYOUTS, QuantiseProblem
from degarble.kernels.rows.mhc_problem import MIX_PARTS, MhcMixProblem, ProjectProblem, split_weight
from degarble.kernels.rows.problem import (
    ID_DTYPES,
    LANES,
    MOST_WARPS,
    NORM_WEIGHTS,
    SCALE_KINDS,
    EmbedProblem,
    NormProblem,
    ResidualProblem,
    ScaleProblem,
)
from degarble.kernels.rows.router_problem import RouterProblem
from degarble.kernels.runtime import operands
from degarble.kernels.runtime.modules import kernel_named
from degarble.references import experts
from degarble.suites.kernels import latent_checks, mhc_checks, row_checks
from degarble.suites.kernels.contract import SETTINGS, kernels_of, same_bits
from degarble.suites.kernels.row_checks import bits_differ
from degarble.suites.kernels.rows import (
    head_checks,
    mhc_project_checks,
    residual_checks,
    router_checks,
)

pytestmark = pytest.mark.needs("cutlass")
WHOLE_ROWS = "degarble.kernels.rows.whole_rows"


# ---- RMSNorm, fused or not -----------------------------------------------------------------------


def test_values_that_are_not_kept_are_refused() -> None:
    problem, norm = NormProblem(4, 64, layout="8x4"), kernel_named("simt_rmsnorm")
    x, weight = torch.zeros(4, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    out = norm.allocate(problem, x.device) | {"normed": x, "decode_scale": torch.ones(1)}
    with pytest.raises(InvalidArgument, match="normed values"):
        norm.run(problem, SETTINGS, values=x, weight=weight, **out)


@pytest.mark.parametrize("warps", range(2, MOST_WARPS + 1))
def test_whole_rows_are_read_once_and_by_the_lanes_of_the_norm(warps: int) -> None:
    whole_rows = import_module(WHOLE_ROWS)
    places, lanes = whole_rows.places_of(warps), warps * LANES
    chunks = [
        [whole_rows.first_chunk(thread) + place // whole_rows.CHUNK_BYTES for place in places]
        for thread in range(lanes)
    ]
    read = sorted(chunk for own in chunks for chunk in own)
    assert read == list(range(whole_rows.row_bytes(warps) // whole_rows.CHUNK_BYTES))
    for thread, own in enumerate(chunks):
        # A pair of threads has a block's halves; a thread's are of lanes 16 apart, in both slots.
        assert [chunk % 2 for chunk in own] == [thread % 2] * 4
        lane = thread // LANES * LANES + thread % LANES // 2
        of_slot = [lane, lane + LANES // 2]
        assert [chunk // 2 for chunk in own] == of_slot + [each + lanes for each in of_slot]


@pytest.mark.parametrize("warps", range(2, MOST_WARPS + 1))
def test_what_a_thread_keeps_in_shared_memory_no_other_thread_has(warps: int) -> None:
    whole_rows, lanes = import_module(WHOLE_ROWS), warps * LANES
    parts = 2 * whole_rows.CHUNKS  # of float32 weights; a row's chunks are the first half of them
    own = [
        [whole_rows.place_of(part, lane, warps) for lane in range(lanes)] for part in range(parts)
    ]
    assert sorted(place for of_part in own for place in of_part) == list(range(parts * lanes))
    # A quarter of a warp reads 128 bytes side by side: all banks, each once.
    assert all(of_part == list(range(of_part[0], of_part[0] + lanes)) for of_part in own)
    assert max(own[whole_rows.CHUNKS - 1]) * whole_rows.CHUNK_BYTES < whole_rows.row_bytes(warps)


def test_absent_warps_change_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_rows = import_module(WHOLE_ROWS)
    monkeypatch.setattr(ops, "add_rn", lambda left, right: f"({left} {right})")
    stated = [f"{number}" for number in range(MOST_WARPS)]
    for distance in (8, 4, 2, 1):
        stated = [f"({stated[at]} {stated[at + distance]})" for at in range(distance)]
    assert whole_rows.folded([f"{number}" for number in range(MOST_WARPS)]) == stated[0]
    assert whole_rows.folded(list("0123456")) == "(((0 4) (2 6)) ((1 5) 3))"
    assert whole_rows.folded(list("01")) == "(0 1)"


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_are_those_that_two_launches_give(layout: str) -> None:
    quantiser = kernel_named("simt_quantise_nvfp4")
    for rows, columns, kind in ((8192, 7168, "ordinary"), (333, 4096, "rows"), (70, 512, "zeros")):
        problem = NormProblem(rows, columns, layout=layout)
        case = row_checks.NormCase(problem, kind, seed=5)
        fused = row_checks.norm_on_device(case)
        plain = row_checks.norm_on_device(replace(case, problem=replace(problem, layout=None)))
        again = QuantiseProblem(rows, columns, layout)
        assert case.decode_scale is not None
        assert plain.values is not None
        given = {"values": plain.values, "decode_scale": case.decode_scale.cuda()}
        two = quantiser.run(again, SETTINGS, **given)
        for mine, theirs in ((fused.codes, two["codes"]), (fused.scales, two["scales"])):
            assert mine is not None
            assert torch.equal(mine, theirs)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("weight", NORM_WEIGHTS)
def test_decoded_rows_are_those_that_two_launches_give(weight: str) -> None:
    quantiser = kernel_named("simt_quantise_nvfp4")
    for rows, columns, kind in ((1, 1024, "ordinary"), (4, 1536, "rows"), (3, 512, "zeros")):
        problem = NormProblem(rows, columns, weight=weight)
        case = row_checks.NormCase(problem, kind, seed=5)
        plain = row_checks.norm_on_device(case).values
        assert plain is not None
        of_both = {"values": case.values.cuda(), "weight": case.weight.cuda()}
        scale = torch.full((1,), 5 / 2688, device="cuda")
        joined = kernel_named("simt_rmsnorm").run(
            replace(problem, decoded=True), SETTINGS, **of_both, decode_scale=scale
        )
        again = QuantiseProblem(rows, columns, LINEAR.name, decoded=True)
        decoded = quantiser.run_one(again, SETTINGS, values=plain, decode_scale=scale)
        assert same_bits(joined["normed"], plain)
        assert same_bits(joined["decoded"], decoded)


@pytest.mark.h200
@pytest.mark.b200
def test_other_rows_change_no_normed_row() -> None:
    case = row_checks.NormCase(NormProblem(64, 7168), "rows")
    whole = row_checks.norm_on_device(case).values
    assert whole is not None
    for row in (0, 1, 63):
        given = {"values": case.values[row : row + 1].cuda(), "weight": case.weight.cuda()}
        alone = kernel_named("simt_rmsnorm").run(NormProblem(1, 7168), SETTINGS, **given)
        assert torch.equal(alone["normed"][0], whole[row])


# ---- a residual in front of a norm ---------------------------------------------------------------


@pytest.mark.h200
@pytest.mark.b200
def test_fused_equals_an_addition_and_the_norm_one_by_one() -> None:
    norm = kernel_named("simt_rmsnorm")
    for columns, weight in ((7168, "fp32"), (7168, "bf16"), (512, "bf16")):
        problem = ResidualProblem(333, columns, 1e-6, weight, rounded=True)
        case = residual_checks.Case(problem, "rows", 9)
        fused = residual_checks.on_device(case)
        x, residual, of_norm = (operand.cuda() for operand in case.operands)
        total = x + residual
        plain = norm.run(case.problem.norm, SETTINGS, values=total, weight=of_norm)["normed"]
        assert not bits_differ("sum", fused.total, total)
        assert not bits_differ("normed", fused.normed, plain)


@pytest.mark.h200
@pytest.mark.b200
def test_a_residual_alone_and_in_place_has_the_same_bits() -> None:
    kernel, problem = kernel_named("simt_residual_norm"), ResidualProblem(300, 7168, weight="fp32")
    case = residual_checks.Case(problem, "rows", 1)
    x, residual, weight = (operand.cuda() for operand in case.operands)
    want = residual_checks.on_device(case)
    one = ResidualProblem(1, 7168, weight="fp32")
    alone = kernel.run(one, SETTINGS, values=x[7:8], residual=residual[7:8], weight=weight)
    assert torch.equal(alone["normed"][0], want.normed[7])
    assert torch.equal(alone["total"][0], want.total[7])
    given = {"values": x, "residual": residual, "weight": weight}
    kernel.run(problem, SETTINGS, **given, normed=x, total=residual)
    assert torch.equal(x, want.normed)
    assert torch.equal(residual, want.total)


# ---- heads: normed and turned, turned back -------------------------------------------------------


@pytest.mark.h200
@pytest.mark.b200
def test_normed_heads_may_lie_where_the_heads_were() -> None:
    for case in head_checks.fuzzed("norm", 99, 10):
        first = head_checks.on_device(case)
        x, positions = case.values.cuda(), case.positions.cuda()
        turns = latent_checks.table_of_turns(head_checks.POSITIONS).cuda()
        head_checks.run(case, (x, turns, positions), x)
        assert torch.equal(x.view(torch.int16), first.view(torch.int16))


@pytest.mark.h200
@pytest.mark.b200
def test_turning_back_undoes_turning() -> None:
    case = head_checks.Case("back", 60, 16)
    turned = head_checks.on_device(head_checks.Case("norm", 60, 16))
    x, positions = turned, head_checks.Case("norm", 60, 16).positions.cuda()
    turns = latent_checks.table_of_turns(head_checks.POSITIONS).cuda()
    back = head_checks.run(case, (x, turns, positions), torch.empty_like(x)).float().cpu()
    want = latent_checks.normed_rows(case.values.reshape(-1, 512), None, 1e-6).view_as(back)
    assert float((back - want).abs().max()) <= 2.0**-6 * float(want.abs().max())


# ---- rows of the embedding, scaling --------------------------------------------------------------


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("ids", ID_DTYPES)
@pytest.mark.parametrize(("tokens", "columns"), [(1, 8), (7, 264), (300, 7168), (33, 20_000)])
def test_equal_to_indexing_and_zeros_outside(ids: str, tokens: int, columns: int) -> None:
    problem, kernel = EmbedProblem(tokens, 1000, columns, ids), kernel_named("simt_embed")
    table = torch.randn(1000, columns, device="cuda").bfloat16()
    id_T = torch.randint(-40, 1040, (tokens,), device="cuda").to(operands.DTYPES[ids])
    id_T[0] = 999
    out = torch.full((tokens, columns), torch.nan, dtype=torch.bfloat16, device="cuda")
    kernel.run(problem, SETTINGS, ids=id_T, table=table, out=out)
    inside = (id_T >= 0) & (id_T < 1000)
    want = torch.where(inside[:, None], table[torch.where(inside, id_T, 0).long()], 0.0)
    assert torch.equal(out, want)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("factor", [1.0, 8192**-0.5, -3.0, 2.0**-5])
@pytest.mark.parametrize("source", SCALE_KINDS)
@pytest.mark.parametrize("out", SCALE_KINDS)
def test_every_bit_is_one_product_and_one_rounding(factor: float, source: str, out: str) -> None:
    of_source, of_out = operands.DTYPES[source], operands.DTYPES[out]
    for rows, kind in ((1, "ordinary"), (37, "special"), (64, "rows"), (16, "tiny")):
        x = row_checks.spread((rows, 64), kind, rows).float().cuda()
        x = (x * 1.0009765).to(of_source) if kind != "special" else x.to(of_source)
        problem = ScaleProblem(x.numel(), factor, source, out)
        made = kernel_named("simt_scale").run_one(problem, SETTINGS, values=x)
        want = (x.float() * torch.tensor(factor, device="cuda")).to(of_out)
        assert not bits_differ(f"{kind} by {factor}", made, want)


# ---- the router ----------------------------------------------------------------------------------


@pytest.mark.h200
@pytest.mark.b200
def test_chooses_as_the_reference_does_on_the_cpu() -> None:
    case = router_checks.RouterCase(RouterProblem(8192, **router_checks.V4_PRO), "ordinary", 3)
    biased = experts.sqrt_softplus(case.logits) + case.bias
    found = router_checks.on_device(case).experts.cpu().long()
    moved = (found != experts.largest_experts(biased, 6)).any(-1)
    assert int(moved.sum()) <= 8  # scores within a few units of each other, among 8192 x 6


# ---- mHC without its projection ------------------------------------------------------------------


@pytest.mark.parametrize("part", MIX_PARTS)
def test_every_part_knows_its_tensors(part: str) -> None:
    kernels, case = kernels_of("simt_mhc"), mhc_checks.Case(MhcMixProblem(3, 16, part))
    kinds, inputs = kernels.wanted(case.problem), mhc_checks.given(case)
    made = kernels.KERNEL.allocate(case.problem, torch.device("cpu"))
    kernels.KERNEL.require(case.problem, inputs | made)
    stated = mhc_checks.by_stated_order(case)
    for name in kinds.keys() - inputs.keys():
        got = made[name]
        assert (got.dtype, tuple(got.shape)) == kinds[name]
        assert (stated[name].dtype, tuple(stated[name].shape)) == kinds[name]


@pytest.mark.parametrize("part", MIX_PARTS)
def test_errors_of_a_part_are_detected(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = mhc_checks.Case(MhcMixProblem(3, 16, part))
    out = mhc_checks.by_stated_order(case)
    monkeypatch.setattr(mhc_checks, "on_device", lambda _case: out)
    assert not mhc_checks.mismatch(case)
    for tensor in (out[name] for name in out if name != "pre"):
        kept = tensor.view(-1)[-1].clone()
        tensor.view(-1)[-1] = kept * 1.01 + 1e-4
        assert mhc_checks.mismatch(case)
        tensor.view(-1)[-1] = kept


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("tokens", mhc_checks.LENGTHS)
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 5.0])
def test_fused_is_unfused_bit_for_bit(tokens: int, sharpness: float) -> None:
    for width in (8, 1032, 4096):
        case = mhc_checks.Case(MhcMixProblem(tokens, width), sharpness=sharpness, seed=tokens)
        assert not mhc_checks.fusion_mismatch(case)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize(("tokens", "width"), [(200, 512), (4300, 64)])
def test_other_tokens_change_no_token(tokens: int, width: int) -> None:
    whole = mhc_checks.Case(MhcMixProblem(tokens, width))
    alone = mhc_checks.Case(MhcMixProblem(1, width))
    out = mhc_checks.on_device(whole)
    alone.__dict__["weights"] = whole.weights
    for token in (0, 77, tokens - 1):
        here = slice(token, token + 1)
        alone.__dict__["streams"] = whole.streams[here]
        alone.__dict__["projected"] = tuple(each[here] for each in whole.projected)
        for name, tensor in mhc_checks.on_device(alone).items():
            assert torch.equal(tensor, out[name][here])


@pytest.mark.h200
@pytest.mark.b200
def test_a_nan_is_detected_everywhere_it_reaches() -> None:
    kernel, case = kernel_named("simt_mhc"), mhc_checks.Case(MhcMixProblem(4, 64))
    inputs = {name: tensor.cuda() for name, tensor in mhc_checks.given(case).items()}
    inputs["products"][1] = torch.nan
    made = kernel.run(case.problem, SETTINGS, **inputs)
    for tensor in (made["out"], made["post"], made["mix"]):
        assert bool(tensor[1].isnan().all())
        assert not bool(tensor[[0, 2, 3]].isnan().any())


@pytest.mark.h200
@pytest.mark.b200
def test_streams_may_be_written_where_they_were_read() -> None:
    kernel, case = kernel_named("simt_mhc"), mhc_checks.Case(MhcMixProblem(100, 4096, "post"))
    inputs = {name: tensor.cuda() for name, tensor in mhc_checks.given(case).items()}
    kernel.run(case.problem, SETTINGS, **inputs, out=inputs["streams"])
    assert same_bits(inputs["streams"], mhc_checks.by_stated_order(case)["out"])


# ---- mHC's projection ----------------------------------------------------------------------------


def test_errors_of_the_projection_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    for spread in ("ordinary", "integers"):
        case = mhc_project_checks.Case(4, 64, spread=spread)
        products, squares, _ = mhc_project_checks.definition(case)
        tensors = [products.float(), squares.float()]
        monkeypatch.setattr(mhc_project_checks, "on_device", lambda _case, made=tensors: made)
        assert not mhc_project_checks.mismatch(case)
        tensors[0][2, 3] += 1e-4
        assert "1 of products, first [2, 3]" in mhc_project_checks.mismatch(case)
        tensors[0][2, 3] -= 1e-4
        tensors[1][1] = torch.nan
        assert "of squares, first [1]" in mhc_project_checks.mismatch(case)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("kind", ["layer", "head"])
def test_repeats_and_other_tokens_change_no_bit(kind: str) -> None:
    many = mhc_project_checks.Case(mhc_project_checks.FEW + 70, 1032, kind, "wide")
    whole = mhc_project_checks.on_device(many)
    assert all(map(torch.equal, whole, mhc_project_checks.on_device(many)))
    few, least = mhc_project_checks.FEW, mhc_project_checks.LEAST
    for count in (1, 16, least, least + 1, 50, few):
        fewer = replace(many, tokens=count)
        fewer.__dict__["streams"] = many.streams[-count:]
        fewer.__dict__["fn"] = many.fn
        tensors = mhc_project_checks.on_device(fewer)
        assert all(map(torch.equal, tensors, (tensor[-count:] for tensor in whole)))


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("part", ["all", "head", "coefficients"])
@pytest.mark.parametrize("width", [256, 4096, 7168])
def test_projection_and_mixing_in_turn_are_near_the_references(part: str, width: int) -> None:
    for tokens in (1, 130):
        case = mhc_checks.Case(MhcMixProblem(tokens, width, part), seed=tokens)
        given, streams = case.weights, case.streams.cuda()
        project = ProjectProblem(tokens, width, "head" if part == "head" else "layer")
        found = kernel_named("simt_mhc_project").run(
            project, SETTINGS, streams=streams, split=split_weight(given.fn).cuda()
        )
        found |= {"base": given.base.cuda(), "scale": given.scale.cuda()}
        found |= {} if part == "coefficients" else {"streams": streams}
        mixed = kernel_named("simt_mhc").run(case.problem, SETTINGS, **found)
        made = {name: each.cpu() for name, each in mixed.items() if each is not None}
        assert not mhc_checks.far_from_references(case, made)
