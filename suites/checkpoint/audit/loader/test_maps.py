"""Records of loader maps: what is refused, by name, before a proof begins."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import InvalidArgument, Refused, UnknownName
from degarble.harness.checkpoint.audit.loader.maps import (
    Convert,
    Elsewhere,
    EngineLayout,
    Fill,
    ListedParameter,
    LoaderMap,
    Rename,
    Split,
    Stack,
    compiled,
)

if TYPE_CHECKING:
    from collections.abc import Callable

ONE = ListedParameter("a.weight", "BF16", (4, 4))

BAD_PATTERNS = {
    "does not compile": "(",
    "unknown escape": r"\q",
    "set that Python will read otherwise": "[[a]",
    "exponential": "(a+)+$",
    "exponential by alternatives": "(a|a)*$",
    "counted group": "(a*){20}",
    "many repeats": ".*a.*b.*c.*d",
    "open counts": "a{1,}b{2,}c{3,}d{4,}",
    "too long": "a" * 501,
    "deep": "(" * 200 + ")" * 200 + "(" * 101,
}


@pytest.mark.parametrize("why", BAD_PATTERNS)
@pytest.mark.parametrize(
    "make",
    [
        lambda pattern: Rename(pattern, "x"),
        lambda pattern: Stack(pattern, "x"),
        lambda pattern: Split(pattern, 0),
        lambda pattern: Fill(pattern, 1.0),
        lambda pattern: Elsewhere(pattern, "x"),
        lambda pattern: Convert(pattern, "BF16"),
        lambda pattern: LoaderMap("m", (ONE,), skip=(pattern,)),
    ],
    ids=["rename", "stack", "split", "fill", "elsewhere", "convert", "skip"],
)
def test_a_bad_pattern_is_refused_by_every_rule(
    why: str, make: Callable[[str], object], request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.id.partition("-")[0]
    with pytest.raises(InvalidArgument, match=rf"^{kind} = ") as refused:
        make(BAD_PATTERNS[why])
    assert refused.value.value in (BAD_PATTERNS[why], f"{BAD_PATTERNS[why]} -> x")


def test_patterns_that_are_accepted_end_soon() -> None:
    hostile = "layers." + "a" * 249
    for pattern in (".*a.*b.*c", "a*a*a*b", r"(x|y)?\d+\.\d+\.", "[)*+{]a*", r"\)*\(+\{"):
        start = time.process_time()
        compiled("skip", pattern).search(hostile)
        assert time.process_time() - start < 10


@pytest.mark.parametrize("to", [r"\2", r"\g<name>", r"\g<1", "x" * 501])
def test_a_replacement_that_cannot_be_made_is_refused(to: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^rename = "):
        Rename("(a)", to)
    with pytest.raises(InvalidArgument, match=r"^stack = "):
        Stack("(a)", to)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "tp of zero": (lambda: LoaderMap("m", (ONE,), tp=0), "tp = 0: expected an integer from 1"),
    "tp of True": (lambda: LoaderMap("m", (ONE,), tp=True), "tp = True"),
    "too many ranks": (lambda: LoaderMap("m", (ONE,), tp=4096, pp=2), "all ranks.* = 8192"),
    "rank": (lambda: LoaderMap("m", (ONE,), tp=2, ep=4, rank=4), "rank = 4: .* from 0 to 3"),
    "parameter twice": (lambda: LoaderMap("m", (ONE, ONE)), r"parameters = \['a.weight'\]"),
    "no parameter": (lambda: LoaderMap("m", ()), "parameters = "),
    "rules": (lambda: LoaderMap("m", (ONE,), skip=("a",) * 1001), "kind skip = 1001"),
    "slot": (lambda: Stack("a", "b", -1), "stack: slot = -1"),
    "dim": (lambda: Split("a", -1), "split: dim = -1"),
    "multiple": (lambda: Split("a", 0, 0), "split: multiple = 0"),
    "block": (lambda: Convert("a", "FP8", block=(0, 128)), "convert: block = 0"),
    "extent": (lambda: ListedParameter("a", "BF16", (-1,)), "shape of a = -1"),
    "fraction": (lambda: ListedParameter("a", "BF16", (1.5,)), "shape of a = 1.5"),  # type: ignore[arg-type]
    "dimensions": (lambda: ListedParameter("a", "BF16", (1,) * 9), "dimensions of a = 9"),
    "experts": (
        lambda: ListedParameter("a", "U8", (1 << 20, 2), experts=True),
        "experts of a = 1048576",
    ),
    "experts of a scalar": (lambda: ListedParameter("a", "U8", (), experts=True), "slots of a"),
    "slots": (lambda: ListedParameter("a", "U8", (4, 2), (3, 2)), r"slots of a = \[3, 2\]"),
    "slots of a stack": (
        lambda: ListedParameter("a", "U8", (2, 4), (2,), experts=True),
        "slots of a",
    ),
    "slots of a scalar": (lambda: ListedParameter("a", "F32", (), (1,)), "slots of a"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_numbers_out_of_range_are_refused(what: str) -> None:
    make, message = REFUSED[what]
    with pytest.raises(InvalidArgument, match=message):
        make()


def test_unknown_words_are_refused() -> None:
    with pytest.raises(UnknownName, match="convert: to = 'FP4'"):
        Convert("a", "FP4")  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match="dtype of a = 'bfloat16'"):
        ListedParameter("a", "bfloat16", (1,))


def test_every_refusal_has_a_remedy() -> None:
    for make, _ in REFUSED.values():
        with pytest.raises(Refused) as refused:
            make()
        assert refused.value.remedy


def test_an_engine_has_the_name_of_its_layout() -> None:
    assert EngineLayout("vllm").name == "vllm"
