"""Budgets: legal steps are healthy, more of them are not; sums over ranks; counts of steps."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.engine.budget import budget
from degarble.harness.engine.budget import budget as budget_steps
from degarble.harness.engine.budget.budget import (
    HEADROOM,
    Budget,
    LayerStep,
    LevelFinding,
    OutputResult,
    composed,
    judge,
    nearer_than_the_twin,
    spacing,
)
from degarble.harness.engine.budget.judging import judge_outputs
from degarble.harness.engine.budget.rules import JudgeableCall, normed, summed
from degarble.harness.engine.compare.compare import NamedPlaces
from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.engine.faults.fused_operations import epsilon_variant
from degarble.harness.engine.faults.model_faults import unrounded, with_facts
from degarble.harness.engine.localise.localise import During, localise
from degarble.harness.formats.codec import FORMAT_OF_DTYPE
from degarble.harness.formats.number_formats import BF16, E4M3, FP16, FP32, NVFP4
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.harness.formats.weight import Weight
from degarble.harness.report.verdict import Verdict
from degarble.suites.museum.museum_stages import small_stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from degarble.harness.formats.number_formats import ElementFormat


SHAPE = (256, 512)


def twin_and_budget(slack: float = 1e-4) -> tuple[torch.Tensor, Budget]:
    twin = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).bfloat16()
    return twin, Budget(BF16, torch.tensor(slack), ("given",))


def test_an_identical_candidate_uses_nothing_of_its_budget() -> None:
    twin, budget = twin_and_budget()
    judged = judge(twin, twin, budget)
    assert judged.verdict is Verdict.AGREES
    assert [finding.ratio for finding in judged.findings] == [0.0] * len(judged.findings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_spacing_is_the_distance_of_neighbours(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, 1e-7, 0.7, 1.0, 1.5, 3e4]).to(dtype)
    above = torch.nextafter(values, torch.full_like(values, math.inf))
    expected = (above.double() - values.double()).tolist()
    assert spacing(values.double().numpy(), FORMAT_OF_DTYPE[dtype]).tolist() == expected


def test_spacing_of_fp8() -> None:
    assert spacing(np.array([448.0, 1.0, 0.0]), E4M3).tolist() == [32.0, 0.125, 2.0**-9]


def test_a_step_that_the_slack_allows_is_healthy_and_two_steps_are_not() -> None:
    twin, budget = twin_and_budget()
    step = torch.zeros(SHAPE, dtype=torch.int16)
    step[7, 9] = 1
    one = (twin.view(torch.int16) + step).view(torch.bfloat16)
    judged = judge(one, twin, budget)
    assert 0.5 < judged.ratio <= HEADROOM
    assert judged.findings[0].level == "element"
    assert judged.findings[0].place == (7, 9)
    two = (twin.view(torch.int16) + 2 * step).view(torch.bfloat16)
    assert judge(two, twin, budget).verdict is Verdict.DIFFERS


def test_too_many_allowed_steps_are_too_far() -> None:
    """Each element is within its budget; the row, the tile or the whole is not."""
    twin, budget = twin_and_budget(1e-5)
    generator = torch.Generator().manual_seed(2)
    steps = torch.randint(0, 2, SHAPE, generator=generator, dtype=torch.int16)
    steps *= torch.randint(0, 2, SHAPE, generator=generator, dtype=torch.int16) * 2 - 1
    shifted = (twin.view(torch.int16) + steps).view(torch.bfloat16)
    one_row, one_tile = twin.clone(), twin.clone()
    one_row[3] = shifted[3]
    one_tile[128:, 256:384] = shifted[128:, 256:384]
    for candidate, level, place in (
        (one_row, "length of row", (3,)),
        (one_tile, "length of tile", (1 * 4 + 2,)),
    ):
        judged = judge(candidate, twin, budget)
        element = next(
            level_finding for level_finding in judged.findings if level_finding.level == "element"
        )
        assert element.ratio <= 1
        finding = next(
            level_finding for level_finding in judged.findings if level_finding.level == level
        )
        assert finding.ratio > 1, str(finding)
        assert finding.place == place


def test_named_places_are_judged() -> None:
    twin, budget = twin_and_budget()
    places = NamedPlaces(rows={"expert": np.arange(256) % 4}, columns={"head": 64})
    candidate = twin.clone()
    candidate[:, 64:128] *= 1.01
    judged = judge(candidate, twin, budget, places)
    found = {finding.level: finding for finding in judged.findings}
    assert found["length of head"].place == found["gain of head"].place == (1,)
    assert found["length of head"].ratio > 1
    assert {"length of expert", "gain of expert"} <= set(found)
    assert str(found["gain of head"]).startswith(
        "on average head 1 is too large or too small by 1.0 %"
    )


def test_a_value_of_another_kind_is_beyond_every_budget() -> None:
    twin, budget = twin_and_budget(1.0)
    candidate = twin.clone()
    candidate[5, 6] = math.nan
    judged = judge(candidate, twin, budget)
    assert math.isinf(judged.ratio)
    assert (judged.findings[0].level, judged.findings[0].place) == ("kind of element", (5, 6))
    assert str(judged.worst) == "NaN or infinite on one side only: 1 elements, first 5, 6"
    both = twin.clone()
    both[0, 0] = -math.inf
    assert judge(both, both, budget).verdict is Verdict.AGREES


def test_a_silent_fallback_to_the_unquantised_operands_is_too_good() -> None:
    generator = torch.Generator().manual_seed(4)
    x, w = (torch.randn(n, 512, generator=generator).bfloat16() for n in (64, 128))
    exactly = [dequantise(quantise(side, NVFP4), torch.float64) for side in (x, w)]
    reference = (x.double() @ w.double().T).bfloat16()
    twin = (exactly[0] @ exactly[1].T).bfloat16()
    budget = summed(exactly[0], exactly[1])
    healthy = (exactly[0].float() @ exactly[1].float().T).bfloat16()
    for candidate, caught in ((healthy, False), ((x.float() @ w.float().T).bfloat16(), True)):
        judged = judge(candidate, twin, budget)
        nearer = nearer_than_the_twin(judged, candidate, twin, reference)
        assert (judged.verdict is Verdict.DIFFERS) is caught
        assert (nearer.ratio > 1) is caught
        assert caught or nearer.ratio <= HEADROOM
    half = [x.double(), exactly[1]]  # weights quantised, activations not
    candidate = (half[0] @ half[1].T).bfloat16()
    judged = judge(candidate, twin, budget)
    assert nearer_than_the_twin(judged, candidate, twin, reference).ratio > 1


def test_errors_of_a_layer_add_in_squares() -> None:
    drift, words = composed([LayerStep("attn.wq_a", 3e-3), LayerStep("attn.wo_b", 8e-3, 0.5)])
    assert drift == pytest.approx(5e-3)
    assert "[attn.wo_b]" in words
    assert composed([])[0] == 0


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_slack_that_bounds_nothing_is_refused(value: float) -> None:
    twin, budget = twin_and_budget(value)
    with pytest.raises(InvalidArgument, match="slack"):
        judge(twin, twin, budget)


def test_empty_tensors_agree() -> None:
    _, budget = twin_and_budget()
    for shape in ((0, 8), (8, 0), (0,)):
        empty = torch.zeros(shape).bfloat16()
        assert judge(empty, empty, budget).verdict is Verdict.AGREES


# --------------------------------------------------------------------------------------------------
# Sums over ranks, stored on the way: healthy ones are within, a wrong term of a rank is not.

if TYPE_CHECKING:
    Terms = list[torch.Tensor]
    Made = Callable[[int, int], tuple[JudgeableCall, Terms]]
    Add = Callable[[Terms], torch.Tensor]

T, K, N = 32, 512, 96
EXPERT = "ffn.experts.0.w2"


def terms_of(ranks: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Input, matrix, and what each rank stores of its part of K."""
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(T, K, generator=drawn).bfloat16()
    w = (torch.randn(N, K, generator=drawn) / K**0.5).bfloat16()
    parts = zip(x.tensor_split(ranks, 1), w.tensor_split(ranks, 1), strict=True)
    return x, w, [(a.float() @ b.float().T).bfloat16() for a, b in parts]


def linear(ranks: int, seed: int) -> tuple[JudgeableCall, list[torch.Tensor]]:
    x, w, terms = terms_of(ranks, seed)
    out = (x.double() @ w.double().T).bfloat16()
    weights = {"attn.wo_b": Weight(value=w)}
    return JudgeableCall("attn.wo_b", {"x": x}, {"out": out}, weights, ranks=ranks), terms


def routed(ranks: int, seed: int) -> tuple[JudgeableCall, list[torch.Tensor]]:
    x, w, terms = terms_of(ranks, seed)
    inputs = {"x": x[:, None], "experts": torch.zeros(T, 1, dtype=torch.int64)}
    out = (x.double() @ w.double().T).bfloat16()[:, None]
    call = JudgeableCall(
        "ffn.experts.w2", inputs, {"out": out}, {EXPERT: Weight(value=w)}, ranks=ranks
    )
    return call, terms


def ring(terms: list[torch.Tensor]) -> torch.Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = (total.float() + term.float()).bfloat16()
    return total


def joined(terms: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([term.double() for term in terms]).sum(0).float()[:, None]


CASES: list[tuple[Made, Add]] = [(linear, ring), (routed, joined)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("made", "add"), CASES, ids=["stored on the way", "joined here"])
def test_terms_of_healthy_ranks_are_within(made: Made, add: Add, ranks: int, seed: int) -> None:
    call, terms = made(ranks, seed)
    [result] = judge_outputs(call, {"out": add(terms)}).values()
    assert result.ratio <= HEADROOM


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("made", "add"), CASES, ids=["stored on the way", "joined here"])
@pytest.mark.parametrize("fault", ["missing", "doubled", "of rank 0"])
def test_a_wrong_term_is_outside(made: Made, add: Add, fault: str, ranks: int, seed: int) -> None:
    call, terms = made(ranks, seed)
    wrong = {"missing": terms[1] * 0, "doubled": terms[1] * 2, "of rank 0": terms[0]}[fault]
    [result] = judge_outputs(call, {"out": add([terms[0], wrong, *terms[2:]])}).values()
    assert result.ratio > 1.5


def test_without_ranks_their_terms_alarm(seed: int) -> None:
    """The allowance is needed: one rank's budget is narrower than the terms of eight."""
    for made, add in CASES:
        call, terms = made(8, seed)
        alone = JudgeableCall(call.role, call.inputs, call.outputs, call.weights)
        [result] = judge_outputs(alone, {"out": add(terms)}).values()
        assert result.ratio > 1


# --------------------------------------------------------------------------------------------------
# The level in steps: outliers hide nothing, and what rounds alike raises no alarm.

SLACK = 2.0**-16  # of the value: one element in about 200 may step


def values(seed: int, *, outliers: bool = True) -> Tensor:
    """What exact arithmetic has, in float64; a few elements own every sum of squares."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    if outliers:
        x[:, 7] *= 3000
        x[11, 100::57] *= 1e5
    return x


def with_gain(exact: Tensor, gain: float) -> tuple[Tensor, Tensor, Budget]:
    """Candidate, twin, and a budget that allows a gain of 1 + SLACK at most."""
    slack = exact.abs() * SLACK
    return (exact * gain).bfloat16(), exact.bfloat16(), Budget(BF16, slack, ("given",))


def steps(judged: OutputResult) -> dict[str, LevelFinding]:
    return {
        finding.level: finding for finding in judged.findings if finding.level.startswith("steps")
    }


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("outliers", [True, False])
def test_a_slack_that_is_used_up_everywhere_is_healthy(sign: int, *, outliers: bool) -> None:
    """The worst that a correct kernel may do: every error as large as can be, all of one sign."""
    pair = with_gain(values(1, outliers=outliers), 1 + sign * SLACK)
    judged = judge(*pair)
    assert judged.verdict is Verdict.AGREES
    assert 0.1 < max(step.ratio for step in steps(judged).values()) <= HEADROOM


def test_outliers_hide_no_share_of_stepped_elements() -> None:
    """Each element within its budget, lengths and gains as well: one in 30 stepped."""
    judged = judge(*with_gain(values(2), 1 + 6 * SLACK))
    others = [finding for finding in judged.findings if not finding.level.startswith("steps")]
    assert max(finding.ratio for finding in others) <= 1
    assert judged.verdict is Verdict.DIFFERS
    assert judged.findings[0].level == "steps of whole"
    assert judged.ratio > 2
    assert str(judged.worst).startswith("steps of whole 0: ")


@pytest.mark.parametrize("share", [0.6, 1.5])
def test_so_many_steps_are_allowed_and_not_half_as_many_again(share: float) -> None:
    """Steps are planted up to a share of what each place allows, at that place alone."""
    twin = values(3).bfloat16()
    given = Budget(BF16, twin.double().abs() * SLACK, ("given",))
    parts = {"row": (slice(5, 6), slice(None)), "tile": (slice(128, 256), slice(256, 384))}
    for level, place in (*parts.items(), ("whole", (slice(None), slice(None)))):
        one, candidate = twin.clone(), twin.clone()
        one[place] = _up(twin[place])
        every = steps(judge(one, twin, given))[f"steps of {level}"]
        drawn = torch.rand(SHAPE, generator=torch.Generator().manual_seed(4))[place]
        stepped = drawn < share * every.allowed / every.measured
        candidate[place] = torch.where(stepped, _up(twin[place]), twin[place])
        finding = steps(judge(candidate, twin, given))[f"steps of {level}"]
        assert finding.ratio == pytest.approx(share, rel=0.2), level
        assert (finding.ratio > 1) is (share > 1)


def _up(x: Tensor) -> Tensor:
    """The next larger magnitude of BF16."""
    return (x.contiguous().view(torch.int16) + 1).view(torch.bfloat16)


def test_named_places_count_their_own_steps() -> None:
    exact = values(5)
    candidate, twin, given = with_gain(exact, 1.0)
    wrong = (exact * (1 + 2.0**-9)).bfloat16()
    candidate = twin.clone()
    candidate[3::4, 64:128] = wrong[3::4, 64:128]
    places = NamedPlaces(rows={"expert": np.arange(256) % 4}, columns={"head": 64})
    found = steps(judge(candidate, twin, given, places))
    assert found["steps of head"].place == (1,)
    assert found["steps of expert"].place == (3,)
    assert found["steps of head"].ratio > 1
    assert found["steps of expert"].ratio > 1


def test_an_element_counts_one_at_most_and_nothing_where_none_may_step() -> None:
    twin = values(6).bfloat16()
    given = Budget(BF16, twin.double().abs() * SLACK, ("given",))
    far = twin.clone()
    far[0, :100] *= 1000
    assert steps(judge(far, twin, given))["steps of row"].measured <= 100
    nothing = replace(given, slack=torch.zeros(()))
    assert steps(judge(far, twin, nothing))["steps of row"].measured == 0
    assert judge(far, twin, nothing).verdict is Verdict.DIFFERS


def _one_token() -> tuple[Tensor, Tensor, Budget]:
    """A norm over one token that stands there 1024 times, where one element rounds otherwise."""
    for seed in range(1000):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(1, 64, generator=generator).bfloat16().double()
        exact = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        twin, made = exact.bfloat16(), (exact * (1 + 2.0**-20)).bfloat16()
        if int((twin != made).sum()) == 1 and bool((twin != made)[twin.abs() > 1].any()):
            break
    candidate, twin = (tensor.repeat(1024, 1) for tensor in (made, twin))
    return candidate, twin, normed(twin, 64, BF16)


def test_equal_rows_round_alike_and_are_healthy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    candidate, twin, given = _one_token()
    judged = judge(candidate, twin, given)
    assert judged.ratio <= HEADROOM, str(judged.worst)
    monkeypatch.setattr(
        budget_steps.AlikeRows, "members", lambda self: np.ones(self._digests.shape)
    )
    alone = judge(candidate, twin, given)
    over = {finding.level for finding in alone.findings if finding.ratio > 1}
    assert {"length of whole", "steps of whole"} <= over, "the case needs groups"


def test_equal_elements_of_a_row_round_alike_and_are_healthy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """512 columns of one number of 8 bits, times a factor of each row."""
    generator = torch.Generator().manual_seed(10)
    exact = torch.rand(256, 1, generator=generator, dtype=torch.float64).expand(256, 512) + 1
    given = Budget(BF16, exact * 2.0**-20, ("given",))
    judged = judge((exact * (1 + 2.0**-15)).bfloat16(), exact.bfloat16(), given)
    assert max(step.ratio for step in steps(judged).values()) <= HEADROOM
    monkeypatch.setattr(budget, "alike_in_row", lambda _values, _output: None)
    monkeypatch.setattr(budget, "_has_loop", lambda _output, _block: False)
    alone = judge((exact * (1 + 2.0**-15)).bfloat16(), exact.bfloat16(), given)
    assert max(step.ratio for step in steps(alone).values()) > 1, "the case needs groups"


@pytest.mark.parametrize("output", [BF16, FP16, FP32, E4M3], ids=lambda each: each.name)
@pytest.mark.parametrize(
    ("rows", "width", "block"), [(1, 1, 1), (3, 63, 7), (5, 71, 64), (9, 130, 2), (20, 1536, 64)]
)
def test_the_loop_returns_the_bits_of_the_definition(
    rows: int, width: int, block: int, output: ElementFormat, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    shape = rows, width
    t = generator.standard_normal(shape) * 10.0 ** generator.integers(-60, 30, shape)
    t[generator.random(shape) < 0.2] = 0.0
    # Few different mantissas, as numbers of few bits have.
    t = np.where(generator.random(shape) < 0.5, t, np.ldexp(1.0, np.frexp(t)[1]))
    e = np.abs(t) * generator.random(shape) * 1e-3
    e[generator.random(shape) < 0.1] = 0.0
    off = generator.random(shape) < 0.3
    for c in (np.where(off & (e > 0), t * 1.01, t), np.where(off, t * 1.01 + 1e-9, t), t):
        starts = np.arange(0, width, block)
        assert budget._has_loop(output, block)
        worst, found = budget._panel_sums((c, t, e), output, starts)
        expected = budget.panel_definition((c, t, e), output, starts)
        assert worst == expected[0]
        assert np.array_equal(found.stack.view(np.int64), expected[1].stack.view(np.int64))


def test_rows_far_below_epsilon_have_one_factor_and_are_healthy() -> None:
    generator = torch.Generator().manual_seed(8)
    x = (torch.randn(512, 64, generator=generator) * 2.0**-40).bfloat16().double()
    factors = (1000.0 + k for k in range(1000))
    off = 1 + 2.0**-20
    factor = next(f for f in factors if _steps_of_large(x * f, x * f * off))
    twin = (x * factor).bfloat16()
    given = normed(twin, 64, BF16)
    assert given.repeats == (512, 1)
    assert "512" in given.derivation[-1]
    candidate = (x * factor * off).bfloat16()
    judged = judge(candidate, twin, given)
    assert judged.ratio <= HEADROOM, str(judged.worst)
    assert steps(judged)["steps of whole"].allowed > 512 * 9  # all of a class of all rows, L / 3
    alone = judge(candidate, twin, replace(given, repeats=(1, 1)))
    assert alone.ratio > HEADROOM, "the case needs repeats"


def _steps_of_large(exact: Tensor, made: Tensor) -> bool:
    """Whether one class of equal numbers steps, and a few per cent of the elements with it."""
    return 0.003 < float((exact.bfloat16() != made.bfloat16()).double().mean()) < 0.02


def test_rows_are_alike_by_blocks_but_for_sign_and_powers_of_two() -> None:
    generator = np.random.default_rng(9)
    t = generator.standard_normal((5, 128))
    t[3, :64], t[4] = -4 * t[1, :64], t[2]
    seen = budget_steps.AlikeRows((5, 128))
    seen.add(slice(0, 2), t[:2])
    seen.add(slice(2, 5), t[2:])
    assert seen.members().tolist() == [[1, 1], [2, 1], [2, 2], [2, 1], [2, 2]]
    zeros = budget_steps.AlikeRows((3, 64))
    zeros.add(slice(0, 3), np.zeros((3, 64)))
    assert zeros.members().tolist() == [[1], [1], [1]]


def test_elements_of_a_row_are_alike_but_for_sign_and_powers_of_two() -> None:
    t = np.array([[1.0, -2.0, 1.5, 0.0], [3.0, 1.0, 1.0078125, 0.75]])
    found = budget_steps.alike_in_row(t, BF16)
    assert found is not None
    assert found.tolist() == [[3, 3, 1, 3], [2, 1, 1, 2]]  # 0 with the powers of two
    assert budget_steps.alike_in_row(t, FP32) is None


# --------------------------------------------------------------------------------------------------
# Small systematic errors in a trained model: every element is within its budget, the share not.

Q_NORM = "layers.1.attn.q_norm"


def judged(component: str, change: Callable[[Tensor], Tensor]) -> OutputResult:
    """The first call of a component whose exact output goes through `change` and is rounded."""
    stage = small_stage()
    context, inputs = stage.context(component), stage.healthy.inputs(stage.first(component))
    with torch.inference_mode():
        known = context.call(inputs, context.weights)
        exact = with_facts(context, unrounded)(context.call)(inputs, context.weights)
        made = {**known, "out": change(exact["out"].double()).to(known["out"].dtype)}
        return judge_outputs(JudgeableCall.from_twin(stage.twin, component, inputs), made)["out"]


def toward_zero(x: Tensor) -> Tensor:
    return (x.float().view(torch.int32) & -65536).view(torch.float32).double()


def twice(x: Tensor, bits: int) -> Tensor:
    """Rounded to so many bits of mantissa on the way."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2.0 ** (bits + 1)).round() / 2.0 ** (bits + 1), exponent)


def one_row(x: Tensor, row: int) -> Tensor:
    made = x.clone()
    made[row] *= 1 + 2.0**-8
    return made


STEPS_MODELS_CASES: Mapping[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "a gain": ("layers.1.ffn.shared.act", lambda x: x * (1 + 2.0**-10), "tile"),
    "a gain of a sum": ("layers.1.ffn.moe_sum", lambda x: x * (1 + 2.0**-11), "tile"),
    "toward zero": ("layers.1.ffn.shared.act", toward_zero, "tile"),
    "rounded twice": (Q_NORM, partial(twice, bits=10), "tile"),
    "one row": ("layers.1.attn.norm", partial(one_row, row=31), "row"),
}


@pytest.mark.parametrize("name", STEPS_MODELS_CASES)
def test_only_the_share_of_steps_detects_it(name: str) -> None:
    component, change, place = STEPS_MODELS_CASES[name]
    result = judged(component, change)
    others = [finding for finding in result.findings if not finding.level.startswith("steps")]
    assert max(finding.ratio for finding in others) <= 1, str(others[0])
    assert result.verdict is Verdict.DIFFERS
    assert result.findings[0].level == f"steps of {place}"


def test_a_healthy_model_takes_little_of_it() -> None:
    stage = small_stage()
    shares: list[float] = []

    def looked(_replay: Any, outputs: Mapping[str, OutputResult]) -> None:
        for output in outputs.values():
            shares.extend(f.ratio for f in output.findings if f.level.startswith("steps"))

    found = localise(stage.twin, stage.model.recipe, stage.healthy, during=During(looked=looked))
    assert found.verdict is Verdict.AGREES
    assert shares
    assert max(shares) <= HEADROOM / 3


def test_a_norm_with_another_epsilon_is_localised_and_named() -> None:
    stage = small_stage()
    candidate = stage.taped()
    plain = stage.candidate()
    variant = epsilon_variant(stage.context(Q_NORM, plain), 1e-2)
    candidate.calls[Q_NORM] = variant.apply(plain.calls[Q_NORM])
    found = localise(stage.twin, stage.model.recipe, stage.rest(stage.run(candidate)))
    assert [origin.component for origin in found.origins] == [Q_NORM]
    (discrepancy,) = found.origins
    assert "steps of" in discrepancy.sentence
    assert discrepancy.record is not None
    said = diagnose(discrepancy.context, (discrepancy.record, *discrepancy.more))
    assert said.named[0].id == "M24.epsilon", said.sentence
    assert "0.01 under the root" in said.named[0].evidence
