"""The computing thread: batching, capacity, disconnects, failures, scores."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, UnreadableFile
from degarble.harness.inference.generation import (
    MOST_CONCURRENT,
    Continuation,
    Finish,
    Generation,
    Limits,
    Sampling,
)
from degarble.harness.inference.model import LogitsModel
from degarble.harness.serve.engine import Engine, Scoring
from degarble.harness.serve.messages import (
    ApiError,
    FailedSequence,
    SequenceRequest,
    SequenceResult,
    TextPiece,
)
from degarble.harness.serve.metrics import Metrics
from degarble.suites.hang_guard import HANG_SECONDS, until
from degarble.suites.inference.speaking_cases import Letters, ids, speaker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor


class Held(LogitsModel):
    """A model whose steps wait until they are let go, and fail where they are told to."""

    def __init__(self) -> None:
        super().__init__(speaker("v4").bound)
        self.go = threading.Event()
        self.go.set()
        self.broken: Exception | None = None
        self.infinite = False
        self.widths: list[int] = []

    def hidden(self, sequences: list[Any], tokens: list[Tensor]) -> Tensor:
        assert self.go.wait(HANG_SECONDS)
        self.widths.append(len(sequences))
        if self.broken is not None:
            raise self.broken
        return super().hidden(sequences, tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        made = super().logits(hidden)
        if self.infinite:
            self.infinite, made = False, made.clone()
            made[0, 3] = torch.nan
        return made


class Heap:
    """What is heard of one request."""

    def __init__(self) -> None:
        self.heard: list[SequenceResult] = []

    def __call__(self, heard: SequenceResult) -> None:
        self.heard.append(heard)

    def ended(self, count: int = 1) -> bool:
        return count == sum(
            isinstance(h, FailedSequence) or h.finish is not None for h in self.heard
        )

    def text(self, place: int = 0) -> str:
        return "".join(h.text for h in self.heard if isinstance(h, TextPiece) and h.place == place)

    def tokens(self) -> list[Any]:
        return [t for h in self.heard if isinstance(h, TextPiece) for t in h.tokens]


@pytest.fixture
def model() -> Held:
    return Held()


@pytest.fixture
def engine(model: Held) -> Iterator[Engine]:
    letters: Any = Letters()
    made = Engine(model, letters, 40, Metrics())
    made.start()
    until(lambda: made.ready or made.failure is not None)
    yield made
    model.go.set()
    made.stop()
    made.join()


def ask(prompt: Sequence[int], tokens: int = 6, **more: Any) -> SequenceRequest:
    return SequenceRequest(tuple(prompt), more.pop("sampling", Sampling()), Limits(tokens), **more)


def alone(prompt: list[int], tokens: int, sampling: Sampling) -> str:
    letters: Any = Letters()
    continuation = Continuation(prompt)
    Generation(speaker("v4"), letters, sampling, Limits(tokens)).run([continuation])
    return continuation.text


def test_batching_changes_no_token(engine: Engine, model: Held) -> None:
    cases = [
        (ids(n, 1 + 17 * (n % 5)), 2 + n % 5, Sampling(float(n % 2), 0.9, n)) for n in range(22)
    ]
    heaps = [Heap() for _ in cases]
    model.go.clear()
    for (prompt, tokens, sampling), heap in zip(cases, heaps, strict=True):
        engine.submit([ask(prompt, tokens, sampling=sampling)], heap)
    model.go.set()
    until(lambda: all(heap.ended() for heap in heaps))
    for case, heap in zip(cases, heaps, strict=True):
        assert heap.text() == alone(*case)
    assert max(model.widths) == MOST_CONCURRENT  # a full step, and nobody beyond it


def test_more_than_may_wait_are_refused_whole(engine: Engine, model: Held) -> None:
    model.go.clear()
    heap = Heap()
    engine.submit([ask([1])] * 38, heap)
    with pytest.raises(ApiError) as caught:
        engine.submit([ask([1])] * 3, Heap())
    assert (caught.value.status, caught.value.retry_after) == (429, 1)
    engine.submit([ask([1])] * 2, heap)
    with pytest.raises(ApiError, match="choices in one request") as caught:
        engine.submit([ask([1])] * 41, Heap())  # would never fit
    assert caught.value.status == 400
    model.go.set()
    until(lambda: heap.ended(40))
    engine.submit([ask([1])] * 3, heap)  # there is room again


def test_who_goes_away_makes_room(engine: Engine, model: Held) -> None:
    heap, other = Heap(), Heap()
    ticket = engine.submit([ask([1], 300)] * 30, heap)
    engine.submit([ask([2], 4)], other)
    until(lambda: bool(heap.heard))
    assert not other.heard  # 16 run, the rest waits in the order of arrival
    engine.drop(ticket)
    until(other.ended)
    heard = len(heap.heard)
    assert not heap.ended(1)
    until(lambda: engine.load == (0, 0))
    assert len(heap.heard) == heard
    assert model.widths[-1] == 1


@pytest.mark.parametrize(
    "error", [UnreadableFile("shard", "x", "y", "z"), RuntimeError("no memory")]
)
def test_a_step_that_fails_ends_its_sequences_and_no_other(
    engine: Engine, model: Held, error: Exception
) -> None:
    heap, later = Heap(), Heap()
    model.go.clear()
    model.broken = error
    engine.submit([ask([1]), ask([2])], heap)
    model.go.set()
    until(lambda: heap.ended(2))
    assert [h.error for h in heap.heard if isinstance(h, FailedSequence)] == [error, error]
    model.broken = None
    engine.submit([ask([1])], later)
    until(later.ended)
    assert later.text() == alone([1], 6, Sampling())


def test_logits_that_are_not_finite_end_their_own_sequence(engine: Engine, model: Held) -> None:
    heap = Heap()
    model.go.clear()
    model.infinite = True  # in the first row of one step
    engine.submit([ask([1], 3), ask([2], 3)], heap)
    model.go.set()
    until(lambda: heap.ended(2))
    (failed,) = [h for h in heap.heard if isinstance(h, FailedSequence)]
    assert failed.place == 0
    assert isinstance(failed.error, InvalidArgument)


def test_a_model_that_cannot_begin_is_no_server(model: Held) -> None:
    letters: Any = Letters()
    model.infinite = True
    ended = threading.Event()
    made = Engine(model, letters, 4, Metrics())
    made.start(ended.set)
    assert ended.wait(HANG_SECONDS)
    made.join()
    assert isinstance(made.failure, InvalidArgument)
    assert not made.ready
    with pytest.raises(ApiError, match="stopping"):
        made.submit([ask([1])], Heap())


def test_stopping_ends_every_request(engine: Engine, model: Held) -> None:
    heap = Heap()
    model.go.clear()
    engine.submit([ask([1], 300)] * 20, heap)
    engine.stop()
    model.go.set()
    engine.join()
    assert heap.ended(20)
    assert {h.error.status for h in heap.heard if isinstance(h, FailedSequence)} == {503}  # type: ignore[attr-defined]


def test_scores_are_those_of_a_whole_forward_pass(engine: Engine) -> None:
    prompt, heap = ids(3, 40), Heap()
    engine.submit([ask(prompt, 5, top=3, scores_prompt=True)], heap)
    until(heap.ended)
    tokens, whole = heap.tokens(), speaker("v4")
    continuation = Continuation(list(prompt))
    Generation(whole, None, Sampling(), Limits(5)).run([continuation])
    assert [t.number for t in tokens] == continuation.all_ids
    sequence = Continuation([1]).sequence
    hidden = whole.hidden([sequence], [torch.tensor(continuation.all_ids)])
    rows = whole.logits(hidden).double().log_softmax(-1)
    assert tokens[0].log_probability is None
    assert tokens[0].likeliest == ()
    for place, token in enumerate(tokens[1:]):
        assert token.log_probability == pytest.approx(float(rows[place, token.number]), abs=1e-9)
        best = rows[place].topk(3)
        assert [n for n, _, _ in token.likeliest] == best.indices.tolist()
        assert [v for _, _, v in token.likeliest] == pytest.approx(best.values.tolist(), abs=1e-9)
    letters = Letters()
    assert "".join(t.text for t in tokens) == letters.decode(continuation.all_ids)


def test_of_equally_likely_tokens_the_lower_ids_are_reported() -> None:
    letters: Any = Letters()
    scored = Scoring(letters, 3).token(5, torch.tensor([0.0, 1.0, 2.0, 1.0, 1.0, 1.0]))
    assert [number for number, _, _ in scored.likeliest] == [2, 1, 3]
    assert Scoring(letters, 20).token(0, torch.zeros(4)).likeliest[3][0] == 3
    assert Scoring(letters, 0).token(0, torch.zeros(4)).likeliest == ()


def test_a_prompt_alone_can_be_scored(engine: Engine) -> None:
    heap = Heap()
    engine.submit([ask([5, 6, 7], 0, top=0, scores_prompt=True, silent_begin=True)], heap)
    until(heap.ended)
    assert [t.number for t in heap.tokens()] == [6, 7]  # the begin token is not told
    assert all(t.log_probability is not None for t in heap.tokens())
    last = heap.heard[-1]
    assert isinstance(last, TextPiece)
    assert (last.finish, last.new_tokens) == (Finish.LENGTH, 0)
