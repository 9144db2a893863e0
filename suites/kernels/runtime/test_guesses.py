"""Kernels that guess before their wait what they read behind it (runtime/pdl).

Each is compiled anew with guesses that are wrong: its results have the bits of the definition all
the same. As a fault a wrong guess is believed, and the results differ.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from degarble.kernels.attention.problem import QueryProblem
from degarble.kernels.primitives.kv_problem import TOKENS_GUESSED
from degarble.kernels.runtime.modules import module_of
from degarble.suites.kernels.attention import contract as attention
from degarble.suites.kernels.cache import compressor_checks, paged_pool_checks
from degarble.suites.kernels.memory_checks import WRONG_GUESSES
from degarble.suites.kernels.rows import head_checks

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.needs("cutlass"), pytest.mark.h200, pytest.mark.b200]

DEVICE_WORDS = "degarble.kernels.primitives.device_words"


class Guessing(NamedTuple):
    """A kernel, the module in which it guesses, and the comparison of a case that it decides."""

    kernel: str
    module: str
    mismatch: Callable[[], str]


def decoding(checks: Any, ratio: int) -> Guessing:
    """Steps of one token, the third of which closes a window."""
    kernel = "simt_compressor" if checks is compressor_checks else "simt_paged_pool"
    case = compressor_checks.Case(ratio, 512, ((2 * ratio - 3,), *((1,),) * 5), seed=5)
    return Guessing(kernel, module_of(kernel), lambda: checks.mismatch(case))


def turned(kernel: str) -> Guessing:
    """Few tokens, whose turns are read by guesses of their positions."""
    if kernel == "simt_qnorm_rope":
        heads = head_checks.Case("norm", TOKENS_GUESSED, 5, seed=3)
        return Guessing(kernel, DEVICE_WORDS, lambda: head_checks.mismatch(heads))
    problem = QueryProblem(TOKENS_GUESSED, 5, 192, attention.POSITIONS)
    query = attention.QueryCase(problem, seed=3)
    return Guessing(kernel, DEVICE_WORDS, lambda: attention.query_mismatch(query))


ALL = {
    f"{checks.__name__.rpartition('.')[2]}-{ratio}": decoding(checks, ratio)
    for checks in (compressor_checks, paged_pool_checks)
    for ratio in (4, 128)
} | {kernel: turned(kernel) for kernel in ("simt_qnorm_rope", "simt_latent_query")}


def guess(
    monkeypatch: pytest.MonkeyPatch, of: Guessing, wrongly: str, *, believed: bool = False
) -> None:
    """Compile a kernel anew whose guesses are wrong, and believed or not."""
    module, kernels = import_module(of.module), import_module(module_of(of.kernel))
    monkeypatch.setattr(module, "guessed", partial(WRONG_GUESSES[wrongly], module.guessed))
    if believed:
        monkeypatch.setattr(module, "wrong_guess", lambda number, guess: (number != guess) & False)
    monkeypatch.setattr(kernels, "KERNEL", replace(kernels.KERNEL))


@pytest.mark.parametrize("wrongly", WRONG_GUESSES)
@pytest.mark.parametrize("name", ALL)
def test_a_wrong_guess_changes_nothing(
    name: str, wrongly: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    guess(monkeypatch, ALL[name], wrongly)
    assert not ALL[name].mismatch()


@pytest.mark.parametrize("name", ALL)
def test_a_wrong_guess_that_is_believed_is_detected(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    guess(monkeypatch, ALL[name], "one more", believed=True)
    assert ALL[name].mismatch()
