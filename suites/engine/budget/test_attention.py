"""Legal kernels of attention are within budget on every kind of input; wrong ones are not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.engine.budget import attention as budget_attention
from degarble.harness.engine.budget import attention as budget_shares
from degarble.harness.engine.budget.attention import attended, keeping_budgets
from degarble.harness.engine.budget.bounded_values import BoundedValue
from degarble.harness.engine.budget.budget import HEADROOM, judge
from degarble.harness.engine.budget.judging import judge_outputs
from degarble.harness.engine.budget.roles import budgets_of
from degarble.harness.engine.budget.rules import JudgeableCall
from degarble.harness.formats.weight import Weight
from degarble.harness.model.config.config import small_v4, small_v32
from degarble.references.attention import softmax_scale
from degarble.references.binding import BoundModel
from degarble.references.numerics import Numerics, switches_of
from degarble.suites.engine import legal_attention as legal

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.engine.budget.budget import Budget, OutputResult


# --------------------------------------------------------------------------------------------------
# Attention by other algorithms: rows in blocks with a running maximum, exponentials to base 2.

V4 = small_v4(num_hidden_layers=3, compress_ratios=(0, 4, 128, 0))
V32 = small_v32(num_hidden_layers=2)
TOKENS = 40
LOG2E = 1.4426950408889634


def random(*shape: int, seed: int, size: float = 1.0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size
    return made.bfloat16()


def call_v4(size: float) -> JudgeableCall:
    """A layer of compressed entries, all visible."""
    numerics = replace(Numerics.twin(switches_of("official-v4")), work=torch.float64)
    twin = BoundModel(V4, numerics, {})
    name = "layers.2.attn.attend"
    what, facts = twin.bound_to(name)
    (local,) = twin.weights_of(name)
    weights = {local: Weight(value=random(V4.num_attention_heads, seed=1).float())}
    start = 130
    inputs = {
        "q": random(TOKENS, V4.num_attention_heads, V4.head_dim, seed=2, size=size),
        "window": random(TOKENS, V4.head_dim, seed=3),
        "state_window": random(min(start, V4.sliding_window - 1), V4.head_dim, seed=4),
        "compressed": random(0, V4.head_dim, seed=5),
        "state_compressed": random(1, V4.head_dim, seed=6),
        "positions": torch.arange(start, start + TOKENS),
        "token_offsets": torch.tensor([0, TOKENS]),
    }
    return JudgeableCall(what.role, inputs, twin.calls[name](inputs, weights), weights, facts=facts)


def in_blocks(q: Tensor, rows: Tensor, scale: float, sink: Tensor | None, width: int) -> Tensor:
    """One token [H, X] over rows [R, X]: shares are BF16 beside the peak so far."""
    logit = (q.float() @ rows.float().T) * (scale * LOG2E)
    peak = torch.full((len(q), 1), -torch.inf)
    total, out = torch.zeros(len(q), 1), torch.zeros(len(q), width)
    for begin in range(0, len(rows), 16):
        part = logit[:, begin : begin + 16]
        higher = torch.maximum(peak, part.amax(1, keepdim=True))
        fade, share = torch.exp2(peak - higher), torch.exp2(part - higher)
        total = total * fade + share.sum(1, keepdim=True)
        values = rows[begin : begin + 16, :width].float()
        out = out * fade + share.bfloat16().float() @ values
        peak = higher
    if sink is not None:
        total = total + torch.exp2(sink[:, None] * LOG2E - peak)
    return out * (1 / total)


def flash_v4(call: JudgeableCall) -> Tensor:
    inputs, (sink,) = (
        call.inputs,
        (weight.values(torch.float32) for weight in call.weights.values()),
    )
    near = torch.cat((inputs["state_window"], inputs["window"]))
    made, reach = [], V4.sliding_window
    for token, position in enumerate(inputs["positions"].tolist()):
        end = len(inputs["state_window"]) + token + 1
        far = inputs["state_compressed"][: (position + 1) // 128]
        rows = torch.cat((near[max(0, end - reach) : end], far)).flip(0)
        made.append(in_blocks(inputs["q"][token], rows, V4.head_dim**-0.5, sink, V4.head_dim))
    return torch.stack(made).bfloat16()


@pytest.mark.parametrize("size", [0.1, 1.0, 5.0])
def test_a_running_peak_is_healthy_in_v4(size: float) -> None:
    call = call_v4(size)
    made = flash_v4(call)
    result = judge_outputs(call, {"out": made})["out"]
    assert not torch.equal(made, call.outputs["out"])
    assert result.ratio <= HEADROOM, str(result.worst)


def test_a_row_that_is_missing_or_not_rescaled_is_caught_in_v4() -> None:
    call = call_v4(1.0)
    less = JudgeableCall(
        call.role,
        dict(call.inputs) | {"window": call.inputs["window"].roll(1, 0)},
        call.outputs,
        call.weights,
        facts=call.facts,
    )
    assert judge_outputs(call, {"out": flash_v4(less)})["out"].ratio > 1
    for gain in (1.02, 0.98):
        made = (flash_v4(call).float() * gain).bfloat16()
        result = judge_outputs(call, {"out": made})["out"]
        assert result.ratio > 1, gain


def call_v32(naive: bool, source: str) -> JudgeableCall:
    numerics = replace(Numerics.twin(switches_of(source)), work=torch.float64)
    twin = BoundModel(V32, numerics, {})
    name = "layers.1.attn.attend"
    what, facts = twin.bound_to(name)
    (local,) = twin.weights_of(name)
    heads, width = V32.num_attention_heads, V32.qk_nope_head_dim + V32.v_head_dim
    wkv_b = random(heads * width, V32.kv_lora_rank, seed=1, size=0.1)
    start = 20
    rows = random(start + TOKENS, V32.kv_lora_rank + V32.qk_rope_head_dim, seed=2)
    chosen = torch.full((TOKENS, V32.index_topk), -1)
    generator = torch.Generator().manual_seed(3)
    for token in range(TOKENS):
        pick = torch.randperm(start + token + 1, generator=generator)[: V32.index_topk]
        chosen[token, : len(pick)] = pick
    inputs = {
        "q": random(TOKENS, heads, V32.qk_head_dim, seed=4),
        "state_rows": rows[:start],
        "rows": rows[start:],
        "chosen": chosen,
        "positions": torch.arange(start, start + TOKENS),
        "token_offsets": torch.tensor([0, TOKENS]),
    }
    if naive:
        wide = (rows[:, : V32.kv_lora_rank].float() @ wkv_b.float().T).bfloat16()
        inputs |= {"state_expanded": wide[:start], "expanded": wide[start:]}
    weights = {local: Weight(value=wkv_b)}
    return JudgeableCall(what.role, inputs, twin.calls[name](inputs, weights), weights, facts=facts)


def flash_v32(call: JudgeableCall) -> Tensor:
    """Absorbed: latents in blocks, beside the peak so far."""
    inputs, (wkv_b,) = (
        call.inputs,
        (weight.values(torch.float32) for weight in call.weights.values()),
    )
    per_head = wkv_b.reshape(V32.num_attention_heads, -1, V32.kv_lora_rank)
    key, value = per_head.split((V32.qk_nope_head_dim, V32.v_head_dim), 1)
    every = torch.cat((inputs["state_rows"], inputs["rows"]))
    made = []
    for token in range(TOKENS):
        nope, rope = (
            inputs["q"][token].float().split((V32.qk_nope_head_dim, V32.qk_rope_head_dim), 1)
        )
        through = torch.einsum("hn,hnc->hc", nope.flip(1), key.flip(1)).bfloat16().float()
        query, listed = torch.cat((through, rope), 1), inputs["chosen"][token]
        rows = every[listed[listed >= 0]]
        mixed = in_blocks(query, rows, softmax_scale(V32), None, V32.kv_lora_rank)
        made.append(torch.einsum("hc,hvc->hv", mixed.bfloat16().float().flip(1), value.flip(2)))
    return torch.stack(made).flatten(1).bfloat16()


def test_a_running_peak_is_healthy_in_v32() -> None:
    call = call_v32(naive=False, source="vllm")
    result = judge_outputs(call, {"out": flash_v32(call)})["out"]
    assert result.ratio <= HEADROOM, str(result.worst)
    gain = (flash_v32(call).float() * 1.05).bfloat16()
    assert judge_outputs(call, {"out": gain})["out"].ratio > 1


@pytest.mark.parametrize("naive", [True, False])
@pytest.mark.parametrize("source", ["official-v32", "vllm"])
def test_float32_is_healthy_and_another_row_is_caught(naive: bool, source: str) -> None:
    call = call_v32(naive, source)
    assert call.facts is not None
    single = BoundModel(V32, Numerics.twin(switches_of(source)), {}).calls["layers.1.attn.attend"]
    made = dict(single(call.inputs, call.weights))
    result = judge_outputs(call, made)["out"]
    assert result.ratio <= HEADROOM, str(result.worst)
    other = call.inputs["chosen"].clone()
    other[TOKENS // 2, 0] = (other[TOKENS // 2, 0] + 1) % 20
    made = dict(single(dict(call.inputs) | {"chosen": other}, call.weights))
    assert judge_outputs(call, made)["out"].ratio > 1


@pytest.mark.parametrize("naive", [True, False])
def test_tokens_that_chose_no_row_are_judged(naive: bool) -> None:
    call = call_v32(naive, "vllm")
    nobody = torch.full_like(call.inputs["chosen"], -1)
    blank = replace(
        call,
        inputs=dict(call.inputs) | {"chosen": nobody},
        outputs={"out": torch.zeros_like(call.outputs["out"])},
    )
    zeros = torch.zeros_like(call.outputs["out"])
    assert judge_outputs(blank, {"out": zeros})["out"].ratio <= 1
    assert judge_outputs(blank, {"out": zeros + 1})["out"].ratio > 1


def test_statistics_of_shares_are_worked_out_for_a_difference_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = []
    real = budget_shares._rows_of

    def counted(*given: Any) -> Any:
        looks.append(given)
        return real(*given)

    monkeypatch.setattr(budget_shares, "_rows_of", counted)
    call = call_v4(1.0)
    budget = attended(call)["out"]
    assert float(budget.slack.min()) > 0
    assert not looks
    judge(flash_v4(call), call.outputs["out"], budget)
    count = len(looks)
    assert count
    judge(flash_v4(call), call.outputs["out"], budget)
    assert len(looks) == count


def test_a_budget_is_kept_while_inputs_and_weights_are_the_same() -> None:
    call = call_v4(1.0)
    gained = replace(call, outputs={"out": call.outputs["out"] * 2})
    other = replace(call, inputs={**call.inputs, "q": call.inputs["q"] * 2})
    wide = replace(call, outputs={"out": call.outputs["out"].float()})
    free = attended(call)["out"]
    assert attended(call)["out"] is not free
    with keeping_budgets():
        kept = attended(call)["out"]
        with keeping_budgets():
            assert attended(gained)["out"] is kept
        assert attended(call)["out"] is kept
        assert torch.equal(kept.slack, free.slack)
        assert attended(wide)["out"].output != kept.output
        assert not torch.equal(attended(other)["out"].slack, kept.slack)
        for size in range(2, 20):
            attended(call_v4(1.0 / size))
        assert attended(call)["out"] is not kept, "as many are kept as a diagnosis needs"
    assert attended(call)["out"] is not kept


# --------------------------------------------------------------------------------------------------
# Legal kernels of attention agree on every kind of input; gains and coarse exponentials differ.

FAMILIES = ("v4", "v32", "v32 naive")
WHOLE_ROW, IN_TILES = legal.KERNELS[:2]
NAMES = [kernel.name for kernel in legal.KERNELS]


@cache
def case(family: str, inputs: str, tokens: int = 24) -> tuple[JudgeableCall, Budget]:
    if family == "v4":
        call = legal.call_v4(inputs, legal.Extents(tokens=tokens), 1)
    else:
        extents = legal.Extents(tokens=tokens, heads=4, entries=40)
        call = legal.call_v32(inputs, extents, 1, naive=family == "v32 naive")
    return call, budgets_of(call)["out"]


def judged(of: tuple[JudgeableCall, Budget], out: Tensor) -> OutputResult:
    call, budget = of
    return judge(out.bfloat16(), call.outputs["out"], budget)


def check_healthy(family: str, inputs: str) -> None:
    of = case(family, inputs)
    for kernel in legal.KERNELS:
        result = judged(of, legal.ran(of[0], kernel))
        assert result.ratio <= HEADROOM, f"{kernel.name}: {result.worst}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("inputs", ["one key", "equal logits"])
def test_every_legal_kernel_agrees(family: str, inputs: str) -> None:
    check_healthy(family, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("inputs", legal.INPUTS)
def test_every_legal_kernel_agrees_on_every_input(family: str, inputs: str) -> None:
    check_healthy(family, inputs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gain", [1.003, 0.997])
def test_a_gain_of_all_heads_is_found(family: str, gain: float) -> None:
    of = case(family, "gauss")
    for kernel in (WHOLE_ROW, IN_TILES):
        worst = judged(of, legal.ran(of[0], kernel) * gain).findings[0]
        assert worst.ratio > 1, kernel.name
        assert worst.level == "gain of all heads"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gain_of_one_head_is_found(family: str) -> None:
    of = case(family, "gauss")
    for gain in (1.01, 0.99):
        out = legal.ran(of[0], IN_TILES)
        heads = out.unflatten(-1, (4, -1)) if out.ndim == 2 else out
        heads[:, 1] *= gain
        worst = judged(of, out).findings[0]
        assert worst.ratio > 1
        assert (worst.level, worst.place) == ("gain of head", (1,))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", legal.COARSE)
def test_a_coarse_exponential_is_found(family: str, how: str) -> None:
    of = case(family, "gauss", 64)
    worst = judged(of, legal.ran(of[0], IN_TILES, legal.coarse(how))).findings[0]
    assert worst.ratio > 1, worst
    assert worst.level.startswith(("weight of keys", "energy", "gain"))


def test_where_all_shares_round_alike_the_bound_is_wide() -> None:
    widths = {}
    for inputs in ("gauss", "equal logits"):
        call, budget = case("v4", inputs)
        result = judge(legal.ran(call, WHOLE_ROW).bfloat16(), call.outputs["out"], budget)
        widths[inputs] = next(
            finding.allowed for finding in result.findings if finding.level == "gain of all heads"
        )
    assert widths["gauss"] < 0.0015
    assert widths["equal logits"] > 0.004, "a constant in place of a peak rounds all shares alike"


def test_a_budget_is_the_same_in_few_and_in_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in FAMILIES:
        call, whole = case(family, "gauss")
        monkeypatch.setattr(budget_attention, "_CHUNK", 1)
        in_steps = budgets_of(call)["out"]
        monkeypatch.undo()
        assert torch.allclose(in_steps.slack, whole.slack, rtol=0.02)
        out = legal.ran(call, IN_TILES).bfloat16() * 1.003
        ratios = [judge(out, call.outputs["out"], budget).ratio for budget in (whole, in_steps)]
        assert ratios[0] == pytest.approx(ratios[1], rel=0.05)


def test_a_tried_fault_may_weigh_keys_that_the_statistics_do_not_know() -> None:
    """Empty slots read as the first row: the same kernel, next to exact sums of the same rows."""
    call, budget = case("v4", "first tokens")
    (sink,) = (weight.values(torch.float32) for weight in call.weights.values())
    q, rows = call.inputs["q"], call.inputs["window"]
    order = torch.arange(len(rows) + 127) - 127
    repeated = torch.cat((rows[:1].expand(127, -1), rows))
    seen = (order <= call.inputs["positions"][:, None]) & (
        order > call.inputs["positions"][:, None] - 128
    )

    def read(kernel: legal.Kernel) -> Tensor:
        logit = legal.logits(q, repeated, q.shape[-1] ** -0.5, seen, kernel)
        return legal.attended(logit, repeated.float(), sink, kernel, None).reshape(
            call.outputs["out"].shape
        )

    exact = read(replace(WHOLE_ROW, rounded=False)).bfloat16()
    assert judge(exact, call.outputs["out"], budget).ratio > 1, "the rows matter"
    for kernel in (WHOLE_ROW, IN_TILES):
        worst = judge(read(kernel).bfloat16(), exact, budget).findings[0]
        assert worst.ratio <= 1, worst
    other = judge((read(IN_TILES) * 1.02).bfloat16(), exact, budget).findings[0]
    assert other.ratio > 1, other


def rows_of(of: tuple[JudgeableCall, Budget], patch: pytest.MonkeyPatch) -> list[Any]:
    """The statistics with which a difference of the call is judged."""
    made, real = [], budget_shares._rows_of

    def kept(*given: Any) -> Any:
        made.append(real(*given))
        return made[-1]

    patch.setattr(budget_shares, "_rows_of", kept)
    call, budget = of[0], budgets_of(of[0])["out"]
    judge(legal.ran(call, IN_TILES).bfloat16(), call.outputs["out"], budget)
    assert made
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_what_keys_weigh_is_no_gain(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows in rows_of(case(family, "gauss"), monkeypatch):
        gain, *others = rows.directions
        assert torch.equal(gain, rows.centre.float())
        lengths = torch.stack([other.norm(dim=-1) for other in others]) * gain.norm(dim=-1)
        shared = torch.stack([(other * gain).sum(-1).abs() for other in others])
        assert bool((shared <= 1e-4 * lengths.clamp(min=1e-6)).all())


def test_where_only_the_output_rounds_its_variance_is_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = legal.call_v4("gauss", legal.Extents(tokens=24), 1, "transformers")
    for rows in rows_of((call, budgets_of(call)["out"]), monkeypatch):
        own = rows.covariance.diagonal(dim1=0, dim2=1).movedim(-1, 0)
        assert torch.allclose(own, rows.proxy)
        assert torch.allclose(own, rows.variance)


def test_keys_in_reverse_have_the_reversed_ensemble() -> None:
    logit = random(3, 2, 200, seed=1, size=4.0).double()

    def members(logit: Tensor) -> list[Tensor]:
        below = budget_shares._below(logit)
        shares = BoundedValue(torch.softmax(logit, -1), torch.zeros(()))
        values = torch.zeros(200, 1)
        given = budget_shares.AttentionShares(shares, values, logit, None, values, rounded=True)
        return [member.expand(logit.shape) for member in budget_shares._offsets(below, given)]

    reverse = members(logit.flip(-1))
    for member in members(logit):
        assert any(torch.allclose(member, other.flip(-1)) for other in reverse)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gain_that_changes_its_sign_is_found_by_its_energy(family: str) -> None:
    of = case(family, "gauss")
    out = legal.ran(of[0], WHOLE_ROW)
    signs = (1 - 2 * (torch.arange(len(out)) % 2)).reshape(-1, *[1] * (out.ndim - 1))
    worst = judged(of, out * (1 + 0.01 * signs)).findings[0]
    assert worst.ratio > 1, worst
    assert worst.level == "energy of shares' errors"


@pytest.mark.parametrize("low", [0.125, 0.5, 0.875])
def test_a_wrong_part_of_an_octave_is_named(low: float) -> None:
    def exp2(x: Tensor) -> Tensor:
        part = -x % 1.0
        return torch.exp2(x) * (1 + 0.04 * ((part >= low) & (part < low + 0.125)))

    of = case("v4", "gauss", 64)
    worst = judged(of, legal.ran(of[0], WHOLE_ROW, exp2)).findings[0]
    assert worst.ratio > 1
    assert f"whole octaves and {low:g} to {low + 0.125:g} below the peak" in worst.level


def test_laws_leave_out_rows_that_are_not_finite() -> None:
    of = case("v4", "gauss")
    out = legal.ran(of[0], IN_TILES) * 1.003
    out[3, 2, 5] = float("nan")
    levels = {finding.level: finding.ratio for finding in judged(of, out).findings}
    assert levels["gain of all heads"] > 1
