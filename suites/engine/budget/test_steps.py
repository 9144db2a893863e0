"""The level in steps: outliers hide nothing, and what rounds alike raises no alarm."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from degarble.harness.engine.budget import budget
from degarble.harness.engine.budget import budget as budget_steps
from degarble.harness.engine.budget.budget import HEADROOM, Budget, LevelFinding, judge
from degarble.harness.engine.budget.rules import normed
from degarble.harness.engine.compare.compare import NamedPlaces
from degarble.harness.formats.number_formats import BF16, FP32
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.engine.budget.budget import BudgetResult

SHAPE = (256, 512)
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


def steps(judged: BudgetResult) -> dict[str, LevelFinding]:
    return {each.level: each for each in judged.findings if each.level.startswith("steps")}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("outliers", [True, False])
def test_a_slack_that_is_used_up_everywhere_is_healthy(sign: int, *, outliers: bool) -> None:
    """The worst that a correct kernel may do: every error as large as can be, all of one sign."""
    pair = with_gain(values(1, outliers=outliers), 1 + sign * SLACK)
    judged = judge(*pair)
    assert judged.verdict is Verdict.AGREES
    assert 0.1 < max(each.ratio for each in steps(judged).values()) <= HEADROOM


def test_outliers_hide_no_share_of_stepped_elements() -> None:
    """Each element within its budget, lengths and gains as well: one in 30 stepped."""
    judged = judge(*with_gain(values(2), 1 + 6 * SLACK))
    others = [each for each in judged.findings if not each.level.startswith("steps")]
    assert max(each.ratio for each in others) <= 1
    assert judged.verdict is Verdict.DIFFERS
    assert judged.worst.level == "steps of whole"
    assert judged.worst.ratio > 2
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
        found = steps(judge(candidate, twin, given))[f"steps of {level}"]
        assert found.ratio == pytest.approx(share, rel=0.2), level
        assert (found.ratio > 1) is (share > 1)


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
    candidate, twin = (each.repeat(1024, 1) for each in (made, twin))
    return candidate, twin, normed(twin, 64, BF16)


def test_equal_rows_round_alike_and_are_healthy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    candidate, twin, given = _one_token()
    judged = judge(candidate, twin, given)
    assert judged.worst.ratio <= HEADROOM, str(judged.worst)
    monkeypatch.setattr(
        budget_steps.AlikeRows, "members", lambda self: np.ones(self._digests.shape)
    )
    alone = judge(candidate, twin, given)
    over = {each.level for each in alone.findings if each.ratio > 1}
    assert {"length of whole", "steps of whole"} <= over, "the case needs groups"


def test_equal_elements_of_a_row_round_alike_and_are_healthy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """512 columns of one number of 8 bits, times a factor of each row."""
    generator = torch.Generator().manual_seed(10)
    exact = torch.rand(256, 1, generator=generator, dtype=torch.float64).expand(256, 512) + 1
    given = Budget(BF16, exact * 2.0**-20, ("given",))
    judged = judge((exact * (1 + 2.0**-15)).bfloat16(), exact.bfloat16(), given)
    assert max(each.ratio for each in steps(judged).values()) <= HEADROOM
    monkeypatch.setattr(budget, "alike_in_row", lambda _values, _output: None)
    alone = judge((exact * (1 + 2.0**-15)).bfloat16(), exact.bfloat16(), given)
    assert max(each.ratio for each in steps(alone).values()) > 1, "the case needs groups"


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
    assert judged.worst.ratio <= HEADROOM, str(judged.worst)
    assert steps(judged)["steps of whole"].allowed > 512 * 9  # all of a class of all rows, L / 3
    alone = judge(candidate, twin, replace(given, repeats=(1, 1)))
    assert alone.worst.ratio > HEADROOM, "the case needs repeats"


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
