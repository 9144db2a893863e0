from __future__ import annotations

import numpy as np
import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.suites.support.synthetic import statistics as synthetic_statistics
from degarble.suites.support.synthetic.statistics import Numbers, Statistics, words


def splitmix64(state: int, count: int) -> list[int]:
    """Return the published sequence, in Python's integers."""
    found, mask = [], (1 << 64) - 1
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        found.append(z ^ (z >> 31))
    return found


@pytest.mark.parametrize("key", [0, 1, (1 << 64) - 1])
def test_words_are_splitmix64(key: int) -> None:
    assert words(key, 9).tolist() == splitmix64(key, 9)
    assert words(key, 4, first=5).tolist() == splitmix64(key, 9)[5:]


def test_the_first_numbers_stay_as_they_are() -> None:
    """Another machine, another numpy: the same bytes. Change them only with GENERATION."""
    numbers = Numbers(7)
    assert numbers.word("a") == 0x681EBD31F1942012
    assert numbers.below("a", 1000, 4).tolist() == [491, 268, 734, 716]
    assert numbers.normal("a", 2).tolist() == [1.870452880859375, -1.071136474609375]
    assert [x.hex() for x in numbers.student("a", 2, 6)] == [
        "0x1.90aac9d82ef10p+0",
        "-0x1.192d0cd99ff54p+1",
    ]


def test_what_a_name_yields_depends_on_seed_and_name_alone(seed: int) -> None:
    first, other = Numbers(seed), Numbers(seed + 1)
    assert first.word("a") == Numbers(seed).word("a")
    assert len({first.word("a"), first.word("b"), other.word("a")}) == 3
    longer = first.student("a", 1000, 5)
    assert (first.student("a", 10, 5) == longer[:10]).all()


def test_pieces_do_not_show(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = Numbers(seed)
    whole = numbers.normal("a", 1000), numbers.student("a", 1000, 4)
    monkeypatch.setattr(synthetic_statistics, "_PIECE", 7)
    cut = numbers.normal("a", 1000), numbers.student("a", 1000, 4)
    for one, other in zip(whole, cut, strict=True):
        assert (one == other).all()


def test_normal_numbers_have_their_moments(seed: int) -> None:
    drawn = Numbers(seed).normal("n", 1 << 18)
    assert abs(drawn.mean()) < 0.01
    assert abs(drawn.var() - 1) < 0.02
    assert abs(np.quantile(drawn, 0.975) - 1.960) < 0.03


# Two-sided 90 %, 98 % and 99.8 % points of Student's t, from the tables in any textbook.
@pytest.mark.parametrize(
    ("degrees", "points"), [(5, (2.015, 3.365, 5.893)), (10, (1.812, 2.764, 4.144))]
)
def test_student_numbers_have_their_tails(
    degrees: int, points: tuple[float, ...], seed: int
) -> None:
    drawn = np.abs(Numbers(seed).student("t", 1 << 19, degrees))
    found = np.quantile(drawn, [0.9, 0.98, 0.998])
    # Sums of four for the squares are a little short of a normal's tails: 7 % at the far end.
    assert found == pytest.approx(points, rel=0.07)


def test_integers_are_even(seed: int) -> None:
    counts = np.bincount(Numbers(seed).below("i", 37, 37 * 4000), minlength=37)
    assert len(counts) == 37
    assert abs(counts - 4000).max() < 6 * 4000**0.5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("degrees_of_freedom", 2),
        ("degrees_of_freedom", 6.0),
        ("outlier_share", 1.5),
        ("outlier_gain", 0.5),
        ("row_spread", 0),
        ("dead_share", -0.1),
        ("dead_exponent", 1),
        ("input_amax", float("nan")),
    ],
)
def test_impossible_statistics_are_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidArgument, match=rf"statistics\.{field}"):
        Statistics(**{field: value})  # type: ignore[arg-type]
