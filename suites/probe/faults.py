"""Faults of a server, planted in the small model, in the engine, or in what passes over HTTP."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from degarble.harness.inference.generation import Sampler, Sampling
from degarble.harness.serve.engine import Scoring
from degarble.suites.probe.small_model import SmallModel, State
from degarble.suites.probe.stand_in import Manner, ScoringEngine

if TYPE_CHECKING:
    from torch import Tensor

# --------------------------------------------------------------------------------------------------
# In the model


class LeakingState(SmallModel):
    """Every third sequence begins with keys and values that an earlier one left."""

    def _state(self, sequence: Any) -> State:
        new = "small" not in vars(sequence)
        state = super()._state(sequence)
        self.begun = getattr(self, "begun", 0) + new
        if new and self.begun % 3 == 0 and hasattr(self, "left"):
            state.keys = [key.copy() for key in self.left.keys]
            state.values = [value.copy() for value in self.left.values]
        return state

    def forward(self, states: Any, pieces: Any) -> Any:
        rows = super().forward(states, pieces)
        self.left = states[0].copy(12)
        return rows


class StaleCache(SmallModel):
    """Blocks are stored under their own tokens, without those before them."""

    def key(self, ids: list[int]) -> Any:
        return len(ids), tuple(ids[-16:])


class CacheOfLength(SmallModel):
    """Blocks are stored under the first block and their number: the middle is not looked at."""

    def key(self, ids: list[int]) -> Any:
        return len(ids), tuple(ids[:16])


class WrongPlaceAfterCache(SmallModel):
    """Positions after a cached prefix begin one block too early."""

    def resume(self, state: State, known: State, new: list[int]) -> None:
        super().resume(state, known, new)
        state.shift = -16


class WrongChunkBorder(SmallModel):
    """A later chunk of a prompt does not attend to the last block of the one before."""

    def visible(self, state: State, number: int, new: int) -> Any:
        keys, values = super().visible(state, number, new)
        old = len(keys) - new
        if new > 1 and old >= self.small.chunk:
            keys, values = keys.copy(), values.copy()
            keys[old - 16 : old], values[old - 16 : old] = 0, 0
        return keys, values


class BatchKernel(SmallModel):
    """Of more than 4 decoded rows, those after the fourth lose a quarter of a product's K."""

    def product(self, x: Any, weight: Any) -> Any:
        if 4 < len(x) <= 16:
            x = x.copy()
            x[4:, -x.shape[1] // 4 :] = 0
        return super().product(x, weight)


class SwappedSlots(SmallModel):
    """Where 6 sequences and more decode together, two get each other's states."""

    def forward(self, states: Any, pieces: Any) -> Any:
        rows = super().forward(states, pieces)
        if len(rows) >= 6 and len(rows[0]) == len(rows[5]) == 1:
            rows[0], rows[5] = rows[5].copy(), rows[0].copy()
        return rows


class WrongDecodingPlace(SmallModel):
    """Decoding rotates by positions that are a block too large."""

    def places(self, state: State, piece: list[int]) -> Any:
        return super().places(state, piece) + 16 * (len(piece) == 1)


class ShortWindow(SmallModel):
    """Only the last tokens are attended to: 24 before those of a step."""

    def visible(self, state: State, number: int, new: int) -> Any:
        keys, values = super().visible(state, number, new)
        return keys[-(new + 24) :], values[-(new + 24) :]


class DecayingWeights(SmallModel):
    """After 600 steps a matrix is overwritten in part."""

    def hidden(self, sequences: Any, tokens: Any) -> Tensor:
        if self.steps == 600:
            self.layers[1]["o"][:, :24] = 0
        return super().hidden(sequences, tokens)


class CoarseCache(SmallModel):
    """Decoding reads keys and values with the scale of another tensor."""

    def visible(self, state: State, number: int, new: int) -> Any:
        keys, values = super().visible(state, number, new)
        return (keys, values * np.float32(2)) if new == 1 else (keys, values)


# --------------------------------------------------------------------------------------------------
# In the engine


class BadSpeculation(ScoringEngine):
    """Every fourth decoded token is the draft's: the second likeliest, taken without a check."""

    def _take_result(self, line: Any, start: int, hidden: Any, logits: Any) -> bool:
        taken = logits
        if line.running_prompt.ready and len(line.continuation.ids) % 4 == 3:
            taken = logits.clone()
            taken[int(logits.argmax())] -= 100
            scoring, line.scoring = line.scoring, None
            told = super()._take_result(line, start, hidden, taken)
            line.scoring = scoring
            if scoring is not None and line.continuation.ids:
                line._unsent.append(scoring.token(line.continuation.ids[-1], logits))
            return told
        return super()._take_result(line, start, hidden, logits)


class HotSampler(ScoringEngine):
    """Temperature 0 is taken for 1."""

    draw = random.Random(5)

    def _take_result(self, line: Any, *rest: Any) -> bool:
        if line.sequence_request.sampling.temperature == 0:
            seed = self.draw.getrandbits(60)
            line.running_prompt._sampler = Sampler(Sampling(1.0, 1.0, seed))
        return super()._take_result(line, *rest)


class NoSeeds(ScoringEngine):
    """The seed of a request is not used."""

    draw = random.Random(6)

    def _take_result(self, line: Any, *rest: Any) -> bool:
        sampling = line.sequence_request.sampling
        if sampling.temperature and not line.continuation.ids:
            seed = self.draw.getrandbits(60)
            line.running_prompt._sampler = Sampler(replace(sampling, seed=seed))
        return super()._take_result(line, *rest)


class ColdSampler(ScoringEngine):
    """Temperature is not used: all is greedy."""

    def _take_result(self, line: Any, *rest: Any) -> bool:
        line.running_prompt._sampler = Sampler(Sampling(0.0))
        return super()._take_result(line, *rest)


class NarrowSampler(ScoringEngine):
    """top_p is 0.3 whatever a request says."""

    def _take_result(self, line: Any, *rest: Any) -> bool:
        sampler = line.running_prompt._sampler
        sampler._how = replace(sampler._how, top_p=0.3)
        return super()._take_result(line, *rest)


class ScaledScores(Scoring):
    """Decoded tokens have the scores of a temperature of 1.4."""

    def token(self, number: int, logits_V: Tensor) -> Any:
        return super().token(number, logits_V / 1.4)


class OtherScores(Scoring):
    """A token has the log-probability of the next id."""

    def token(self, number: int, logits_V: Tensor) -> Any:
        made = super().token(number, logits_V)
        other = float(logits_V.double().log_softmax(-1)[(number + 1) % len(logits_V)])
        return replace(made, log_probability=other)


class LateScores(Scoring):
    """A token has the distribution of the token before it."""

    def token(self, number: int, logits_V: Tensor) -> Any:
        before = getattr(self, "before", logits_V)
        self.before = logits_V
        return super().token(number, before)


def _with_scores(kind: type[Scoring]) -> type[ScoringEngine]:
    class Rescored(ScoringEngine):
        def _take_result(self, line: Any, *rest: Any) -> bool:
            if line.scoring is not None and not line.sequence_request.scores_prompt:
                line.scoring.__class__ = kind
            return super()._take_result(line, *rest)

    return Rescored


class NoEnds(ScoringEngine):
    """The end token does not end a text, and is shown."""

    def _take_result(self, line: Any, *rest: Any) -> bool:
        line.running_prompt._ends = frozenset()
        return super()._take_result(line, *rest)


class NoStops(ScoringEngine):
    """Stops are ignored."""

    def _take_result(self, line: Any, *rest: Any) -> bool:
        line.running_prompt._stops._stops = ()
        return super()._take_result(line, *rest)


# --------------------------------------------------------------------------------------------------
# Over HTTP


def _last_message(_path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The template writes the last message alone."""
    return body | {"messages": body["messages"][-1:]} if "messages" in body else body


def _no_system(_path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The template leaves the system message out."""
    messages = body.get("messages")
    if not messages:
        return body
    return body | {"messages": [m for m in messages if m["role"] != "system"]}


def _wrong_marks(_path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The template ends with a message that nobody sent."""
    if "messages" not in body:
        return body
    return body | {"messages": [*body["messages"], {"role": "user", "content": "w9"}]}


def _truncating(_path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A front end cuts prompts to their last 300 tokens."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return body | {"prompt": " ".join(prompt.split()[-300:])}
    return body | {"prompt": prompt[-300:]} if prompt else body


def _dropping_pieces(body: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """A streamed text loses its blanks."""
    if body.get("stream"):
        for choice in found.get("choices", []):
            if "text" in choice:
                choice["text"] = choice["text"].replace(" ", "")
    return found


def _lying_usage(_body: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Counts are twice what was made."""
    if found.get("usage"):
        found["usage"]["completion_tokens"] *= 2
        found["usage"]["completion_tokens"] += 3
    return found


def _longer(_path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Two more tokens than were asked for."""
    return (
        body | {"max_tokens": (body.get("max_tokens") or 1) + 2} if not body.get("echo") else body
    )


@dataclass(frozen=True)
class ServerFault:
    """One fault: what is planted, and the checks of which one has to find it."""

    name: str
    manner: Manner
    found_by: tuple[str, ...]


def _model(kind: type[SmallModel]) -> Manner:
    return Manner(kind, ScoringEngine)


def _engine(kind: type[ScoringEngine]) -> Manner:
    return Manner(engine=kind)


def _http(**how: Any) -> Manner:
    return Manner(engine=ScoringEngine, **how)


FAULTS = (
    ServerFault("state leaks between requests", _model(LeakingState), ("repeats",)),
    ServerFault("stale prefix cache", _model(StaleCache), ("cache",)),
    ServerFault("prefix cache by first block", _model(CacheOfLength), ("cache",)),
    ServerFault("wrong position after a cached prefix", _model(WrongPlaceAfterCache), ("cache",)),
    ServerFault("wrong chunk border", _model(WrongChunkBorder), ("chunks",)),
    ServerFault("batch-dependent kernel", _model(BatchKernel), ("batch",)),
    ServerFault("slots exchanged in a batch", _model(SwappedSlots), ("batch",)),
    ServerFault("wrong position in decoding", _model(WrongDecodingPlace), ("prefill", "chunks")),
    ServerFault("wrong scale of the cache", _model(CoarseCache), ("prefill", "chunks")),
    ServerFault("window of a few tokens", _model(ShortWindow), ("long",)),
    ServerFault("long prompts truncated", _http(request=_truncating), ("long", "usage")),
    ServerFault("weights overwritten while serving", _model(DecayingWeights), ("repeats",)),
    ServerFault("bad speculative step", _engine(BadSpeculation), ("numbers",)),
    ServerFault("temperature 0 ignored", _engine(HotSampler), ("numbers", "repeats")),
    ServerFault("seed ignored", _engine(NoSeeds), ("sampling",)),
    ServerFault("temperature ignored", _engine(ColdSampler), ("sampling",)),
    ServerFault("top_p always 0.3", _engine(NarrowSampler), ("sampling",)),
    ServerFault("scores scaled", _engine(_with_scores(ScaledScores)), ("prefill",)),
    ServerFault("scores of another token", _engine(_with_scores(OtherScores)), ("numbers",)),
    ServerFault("scores of the position before", _engine(_with_scores(LateScores)), ("prefill",)),
    ServerFault("end token ignored", _engine(NoEnds), ("numbers",)),
    ServerFault("stops ignored", _engine(NoStops), ("stops",)),
    ServerFault("streamed text differs", _http(answer=_dropping_pieces), ("stream",)),
    ServerFault("usage lies", _http(answer=_lying_usage), ("usage",)),
    ServerFault("longer than max_tokens", _http(request=_longer), ("stops", "usage")),
    ServerFault("chat drops its history", _http(request=_last_message), ("chat",)),
    ServerFault("chat drops the system message", _http(request=_no_system), ("chat",)),
    ServerFault("chat by another template", _http(request=_wrong_marks, ids=True), ("chat",)),
)
