"""Steps of the engine proof: send requests to a running server and judge the replies.

Answers of the references are read from the file that `prepare` writes.
"""

from __future__ import annotations

import http.client
import json
import math
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.vllm import capture as vllm_capture
from degarble.harness.vllm.engine.server import BATCH, CONTEXT, SEQUENCES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from degarble.harness.vllm.engine.server import Caller


# --------------------------------------------------------------------------------------------------
# Answers of the references: texts, questions, margins of certainty. `prepare` writes the file.


@dataclass(frozen=True)
class ReferenceText:
    """A prompt, the references' greedy ids, and of each place the largest logits: ids, values."""

    prompt: list[int]
    ids: list[int]
    best: list[list[int]]
    logits: list[list[float]]

    def gap(self, place: int, token: int) -> float:
        """Return how far a token is below the references' best; unknown ones are below all kept."""
        ids, values = self.best[place], self.logits[place]
        other = values[ids.index(token)] if token in ids else values[-1]
        return values[0] - other


@dataclass(frozen=True)
class Answers:
    """The references' answers for a checkpoint. `moves`: of logits, if a rounding is moved."""

    texts: list[ReferenceText]
    questions: list[ReferenceText]
    moves: float
    steady: int

    @classmethod
    def read(cls, path: Path) -> Answers:
        """Read what `prepare` wrote."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            texts, questions = (
                [ReferenceText(**each) for each in raw[k]] for k in ("texts", "questions")
            )
            return cls(texts, questions, raw["moves"], raw["steady"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UnreadableFile(
                str(path), f"{type(error).__name__}: {error}", "answers that prepare wrote",
                "Write them anew.",
            ) from error  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Steps of the engine proof: send requests to a running server and judge the replies.
#
# A text may differ from the references' where the references are no surer than a moved rounding
# moves them. The answer to a question, of which they are sure, may not differ. Shares without a
# bound are reported and not judged.

NEAR = 5  # likeliest tokens that are asked for
TIE = 0.1  # of logits: company may change the last bits of a sum, and then the word
DROPPED = 96  # streams
CAPTURED, CAPTURED_TOKENS, CAPTURED_PROMPT = 3, 6, 60  # requests, new tokens, ids of a prompt
# What a server that answers otherwise, or ends, makes of a step.
BREAKS = (
    OSError, http.client.HTTPException, subprocess.SubprocessError, LookupError, ValueError,
    TypeError,
)  # fmt: skip
_DROPS_AT = (40, 90, 140, 190, 240)  # bytes of a stream that are read before it is dropped
_QUIET = 2.0  # seconds until dropped requests are gone
_CHECK = 240  # seconds
_HITS = "vllm:prefix_cache_hits_total"
_AT_WORK = ("vllm:num_requests_running", "vllm:num_requests_waiting{")


class StepOutcome(NamedTuple):
    """Result of a step. `passed` None: reported, and not judged."""

    step: str
    passed: bool | None
    told: str

    def line(self) -> str:
        """Say it."""
        sign = {True: "passed", False: "FAILED", None: "told"}[self.passed]
        return f"{sign:7} {self.step}: {self.told}"


@dataclass
class EngineSession:
    """A server, what the references answer, where things go; what was answered so far."""

    caller: Caller
    answers: Answers
    checkpoint: Path
    captures: Path
    out: Path
    blamed: tuple[str, str] = ("", "")
    alone: list[Any] = field(default_factory=list)  # the texts, asked one by one

    def choices(self) -> list[Any]:
        """Return the server's texts, each requested alone and once, with the likeliest tokens."""
        if not self.alone:
            self.alone = [
                self.caller.complete(
                    text.prompt, len(text.ids), logprobs=NEAR, return_tokens_as_token_ids=True
                )
                for text in self.answers.texts
            ]
            ids = json.dumps([each["token_ids"] for each in self.alone])
            (self.out / "texts.json").write_text(ids, encoding="utf-8")
        return self.alone

    def texts(self) -> list[list[int]]:
        """Return their ids."""
        return [choice["token_ids"] for choice in self.choices()]

    def gap(self, text: int, place: int, token: int) -> float:
        """Return how far a token is below the server's own best, alone; infinite if not listed."""
        near = self.choices()[text]["logprobs"]["top_logprobs"][place]
        return float(max(near.values()) - near.get(f"token_id:{token}", -math.inf))


def parts(session: EngineSession) -> StepOutcome:
    """Return who runs which part, as /metrics reports it."""
    found = session.caller.gauges("degarble_part_info")
    mine = sum('by="degarble"' in each for each in found)
    return StepOutcome("parts", mine > 0, f"{len(found)} parts, {mine} by degarble")


def texts(session: EngineSession) -> StepOutcome:
    """Greedy texts: the references', up to a place where they are no surer than a rounding."""
    pairs = list(zip(session.texts(), session.answers.texts, strict=True))
    first = [_apart(got, reference_text.ids) for got, reference_text in pairs]
    same = sum(at is None for at in first)
    gaps = [
        reference_text.gap(at, got[at])
        for at, (got, reference_text) in zip(first, pairs, strict=True)
        if at is not None and at < len(got)
    ]
    wrong = sum(gap > session.answers.moves for gap in gaps) + len(pairs) - same - len(gaps)
    text = f"{same} of {len(pairs)} texts of {len(pairs[0][1].ids)} tokens are the references'"
    if gaps:
        text += (
            f"; the others leave them at {', '.join(str(at) for at in first if at is not None)},"
            f" where the references have the two tokens {', '.join(f'{gap:.2f}' for gap in gaps)}"
            f" apart (a moved rounding: up to {session.answers.moves:.2f})"
        )
    return StepOutcome("texts", not wrong, text)


def forced(session: EngineSession) -> StepOutcome:
    """Send the references' texts as prompts; count where their token is the likeliest."""
    gaps: list[float] = []
    for text in session.answers.texts:
        made = session.caller.complete(text.prompt + text.ids, 1, prompt_logprobs=1)
        for place, token in enumerate(text.ids):
            known = made["prompt_logprobs"][len(text.prompt) + place]
            best = max(known, key=lambda one: known[one]["logprob"])
            gaps.append(0.0 if int(best) == token else text.gap(place, int(best)))
    sentence = (
        f"{sum(not gap for gap in gaps)} of {len(gaps)} places, with a moved rounding the"
        f" references' own {session.answers.steady}; where it is another, they have the two"
        f" {max(gaps):.2f} apart at most"
    )
    return StepOutcome("forced", None, sentence)


def questions(session: EngineSession) -> StepOutcome:
    """Questions of whose answers the references are sure, prompts in chunks among them."""
    asked = session.answers.questions
    right = [
        session.caller.complete(reference_text.prompt, len(reference_text.ids))["token_ids"]
        == reference_text.ids
        for reference_text in asked
    ]
    long = sum(len(reference_text.prompt) > BATCH for reference_text in asked)
    words = sum(len(reference_text.ids) for reference_text in asked)
    text = f"{sum(right)} of {len(asked)} as the references answer, {long} in chunks, {words} ids"
    return StepOutcome("questions", all(right) and bool(long), text)


def prefix(session: EngineSession) -> StepOutcome:
    """A long prompt again: from the cache, and the same text."""
    text = max(session.answers.texts, key=lambda one: len(one.prompt))
    before = sum(session.caller.gauges(_HITS).values())
    new = min(16, len(text.ids))
    got = [session.caller.complete(text.prompt, new)["token_ids"] for _ in range(2)]
    hits = sum(session.caller.gauges(_HITS).values()) - before
    same = got[0] == got[1] == session.texts()[session.answers.texts.index(text)][:new]
    sentence = f"{len(text.prompt)} tokens twice: {hits:.0f} from the cache, texts the same: {same}"
    return StepOutcome("prefix", same and hits > 0, sentence)


def many(session: EngineSession) -> StepOutcome:
    """As many requests at once as the server takes: each as alone, up to words that tie."""
    alone, asked = session.texts(), session.answers.texts

    def one(number: int) -> float:
        which = number % len(asked)
        got = session.caller.complete(asked[which].prompt, len(alone[which]))["token_ids"]
        at = _apart(got, alone[which])
        if at is None:
            return 0.0
        return session.gap(which, at, got[at]) if at < len(got) else math.inf

    begin = time.perf_counter()
    with ThreadPoolExecutor(SEQUENCES) as pool:
        gaps = list(pool.map(one, range(SEQUENCES)))
    seconds = time.perf_counter() - begin
    same = sum(not gap for gap in gaps)
    text = f"{len(gaps)} at once answered in {seconds:.1f} s, {same} as alone"
    if any(gaps):
        text += f"; the others left where, alone, two words were {max(gaps):.3f} apart at most"
    return StepOutcome("many", max(gaps) <= TIE, text)


def storm(session: EngineSession) -> StepOutcome:
    """Streams dropped in their middle: nothing of them stays, and texts are what they were."""
    asked = session.answers.texts
    workers = [
        threading.Thread(target=_drop, args=(session.caller, asked[n % len(asked)].prompt, n))
        for n in range(DROPPED)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    time.sleep(_QUIET)
    left = sum(session.caller.gauges(*_AT_WORK).values())
    got = session.caller.complete(asked[0].prompt, len(asked[0].ids))["token_ids"]
    same = got == session.texts()[0]
    text = f"{DROPPED} streams dropped: {left:.0f} requests left, the text as before: {same}"
    return StepOutcome("storm", same and not left, text)


def _drop(caller: Caller, prompt: list[int], number: int) -> None:
    body = {
        "model": caller.model, "prompt": prompt, "max_tokens": CONTEXT - len(prompt) - 1,
        "temperature": 0, "stream": True, "ignore_eos": True,
    }  # fmt: skip
    link = http.client.HTTPConnection("127.0.0.1", caller.port, timeout=60)
    head = {"content-type": "application/json"}
    link.request("POST", "/v1/completions", json.dumps(body), head)
    link.getresponse().read(_DROPS_AT[number % len(_DROPS_AT)])
    link.close()


def capture(session: EngineSession) -> StepOutcome:
    """A capture of three requests from the running server, and what check says of it."""
    names = [f"proof{n}" for n in range(CAPTURED)]
    opened = session.caller.call(vllm_capture.PATH, {"requests": names}, "POST")
    if opened.status != 200:
        return StepOutcome("capture", False, f"not opened: {opened.status} {opened.body[:300]!r}")
    for name, text in zip(names, session.answers.texts, strict=False):
        session.caller.complete(text.prompt[:CAPTURED_PROMPT], CAPTURED_TOKENS, name)
    closed = session.caller.call(vllm_capture.PATH, None, "DELETE", wait=_CHECK)
    if closed.status != 200:
        return StepOutcome("capture", False, f"not closed: {closed.status} {closed.body[:300]!r}")
    place = session.captures / closed.json()["capture"]
    kept = session.out / "capture"
    shutil.copytree(place, kept)
    return judged(kept, session)


def judged(place: Path, session: EngineSession) -> StepOutcome:
    """Let degarble check judge a capture; a planted fault has to be named."""
    made = session.out / "check.json"
    done = subprocess.run(  # noqa: S603  our own command
        [sys.executable, "-m", "degarble.harness.cli.main", "check", str(place), "--reference",
         str(session.checkpoint), "--json", str(made)],
        capture_output=True, text=True, timeout=_CHECK, check=False,
    )  # fmt: skip
    (session.out / "check.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    if not made.exists():
        return StepOutcome(
            "capture", False, f"check ended with {done.returncode}: {done.stderr[:300]}"
        )
    found = json.loads(made.read_text(encoding="utf-8"))
    where = [each["site"].rpartition(".")[0] for each in found["origins"]]
    causes = [each["fault"] for each in found["origins"]]
    text = f"{found['verdict']}: {found['sentence']}"
    component, cause = session.blamed
    if not component:
        return StepOutcome("capture", found["verdict"] == "AGREES", text)
    named = any(
        a == component and str(b or "").startswith(cause)
        for a, b in zip(where, causes, strict=True)
    )
    alone = set(where) <= {component}
    return StepOutcome("capture", named and alone, f"{text} Blamed: {', '.join(where)}; {causes}")


def _apart(got: list[int], wanted: list[int]) -> int | None:
    """Return the first place that differs; an answer that is too short differs where it ends."""
    if got == wanted:
        return None
    same = (n for n, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b)
    return next(same, min(len(got), len(wanted)))


STEPS: dict[str, Callable[[EngineSession], StepOutcome]] = {
    each.__name__: each for each in (parts, questions, texts, forced, prefix, many, storm, capture)
}


def taken(name: str, session: EngineSession) -> StepOutcome:
    """Take a step; what goes wrong on the way is its outcome."""
    try:
        return STEPS[name](session)
    except BREAKS as error:
        return StepOutcome(name, False, f"{type(error).__name__}: {str(error)[:300]}")


def told_of(outcomes: list[StepOutcome]) -> list[dict[str, Any]]:
    """Give them as data."""
    return [outcome._asdict() for outcome in outcomes]
