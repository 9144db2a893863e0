"""Checks of what needs no second way: choices, seeds, stops, counts, chats, the numbers themselves.

Each compares a server with what its interface promises, or with its own log-probabilities.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import UnusableServer
from degarble.harness.probe.answers import slope
from degarble.harness.probe.judging import (
    ProbedCheck,
    ProbeFinding,
    ProbeLevel,
    compare,
    rounding_distance,
)
from degarble.harness.probe.paired_tests import binomial_tail
from degarble.harness.probe.server import Ask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from degarble.harness.probe.answers import Answer, Position
    from degarble.harness.probe.session import Session

_DRAWS, _DRAW_REQUESTS = 16, 3  # choices of one request, requests
_IMPROBABLE = 1e-6  # what a healthy sampler shows once in a million sessions
_OTHER_SEEDS = 4  # prompts that are asked with a second seed
_MOVED, _RARE = 0.1, 1e-4  # share of draws that noise may move, and the chance that decides
_EQUAL = 1e-9
_SUM_SLACK = 0.01  # probabilities of the likeliest tokens may add up to so much over one
_END_TOKENS = frozenset(
    (
        *("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>"),
        *("<end_of_turn>", "<|end|>", "<|return|>", "<｜end▁of▁sentence｜>"),
    )
)


def _greedy(body: dict[str, Any]) -> bool:
    return body.get("temperature") == 0


def numbers(session: Session, tie: float) -> ProbedCheck:
    """Look at every answer so far: its log-probabilities, and whether they are of its tokens.

    `tie` is how far two tokens may be apart and still be exchanged by rounding.
    """
    result = ProbedCheck("numbers")
    wrong: dict[str, list[str]] = {}
    refused: list[tuple[dict[str, Any], str]] = []
    for body, answer in session.server.seen:
        for position in answer.positions:
            if position.logprob is None:
                continue
            result.looked_at += 1
            for cause, words in _faults(position):
                wrong.setdefault(cause, []).append(words)
        if _greedy(body) and not body.get("echo"):
            refused += [(body, words) for words in _not_likeliest(answer, tie)]
    for cause, seen in wrong.items():
        if len(seen) >= 2:
            evidence = f"{len(seen)} of {result.looked_at:,} tokens; the first: {seen[0]}."
            result.findings.append(ProbeFinding("numbers", cause, evidence))
    if len(refused) >= 2:
        result.findings.append(
            ProbeFinding(
                "numbers", "temperature 0 does not take the likeliest token",
                f"{len(refused)} tokens of greedy answers, by their own log-probabilities; the "
                f"first: {refused[0][1]}.",
                remedy="Look at the sampler (penalties and biases of a default generation config "
                "too) and at the acceptance of speculative tokens: run once without speculation.",
                body=refused[0][0],
            )
        )  # fmt: skip
    _look_for_ends(session, result)
    return result


def _faults(position: Position) -> list[tuple[str, str]]:
    value, made = position.logprob, []
    listed = position.log_probability_of(position.token)
    values = [*position.top.values(), value if value is not None else 0.0]
    if any(math.isnan(each) or each > 1e-3 for each in values):
        made.append(
            ("a log-probability is no number below zero", f"{position.token!r}: {values[-1]}")
        )
        return made
    total = math.fsum(math.exp(each) for each in position.top.values())
    if total > 1 + _SUM_SLACK:
        words = f"those before {position.token!r} add up to {total:.4g}"
        made.append(("probabilities of one position add up to more than one", words))
    if listed is not None and value is not None and abs(listed - value) > 0.01:
        words = f"{position.token!r} has {value:.4g}, and {listed:.4g} in the list"
        made.append(("the log-probability of a token is that of another one", words))
    return made


def _not_likeliest(answer: Answer, tie: float) -> list[str]:
    made = []
    for position in answer.positions:
        best = max(position.top.values(), default=None)
        own = position.log_probability_of(position.token)
        own = position.logprob if own is None else own
        if best is not None and own is not None and best - own > tie:
            made.append(
                f"{position.token!r} at {own:.3g} where {position.likeliest!r} has {best:.3g}"
            )
    return made


def _look_for_ends(session: Session, result: ProbedCheck) -> None:
    """Find answers that go on after a token that ends a text."""
    passed = [
        (body, position.token)
        for body, answer in session.server.seen
        if not body.get("echo")
        for position in answer.positions[:-1]
        if position.token.strip() in _END_TOKENS
    ]
    if len(passed) >= 2:
        result.findings.append(
            ProbeFinding(
                "numbers", "a text goes on after its end token",
                f"{len(passed)} times; the first was {passed[0][1]!r}.",
                remedy="Look at eos_token_id in config.json and generation_config.json, and at "
                "ignore_eos.",
                body=passed[0][0],
            )
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Sampling


def sampling(session: Session, result: ProbedCheck) -> None:
    """Draw at temperature 1: by the stated probabilities, and by the seed."""
    if session.server.offers("seed"):
        _ask_seeds(session, result)
    else:
        result.notes.append(f"seed: {session.server.lacks['seed']}")
    if session.server.offers("log-probabilities", "several choices", "seed"):
        _ask_draws(session, result)
    if session.server.offers("log-probabilities"):
        _ask_temperature(session, result)


def _ask_seeds(session: Session, result: ProbedCheck) -> None:
    """Ask with the same seed twice, and with another one."""
    other_text, kept, parted = [], 0, 0
    moved: list[float] = []
    for number, ask in enumerate(session.asks()):
        fields = {"temperature": 1, "top_p": 1}
        seeds = (11, 11, 12) if number < _OTHER_SEEDS else (11, 11)
        answers = [
            session.server.complete(replace(ask, fields=fields | {"seed": seed})) for seed in seeds
        ]
        result.looked_at += 1
        same = list(zip(answers[0].tokens, answers[1].tokens, strict=False))
        alike = next((n for n, (a, b) in enumerate(same) if a != b), len(same))
        kept, parted = kept + alike, parted + (alike < len(same))
        moved += compare(answers[0].positions, answers[1].positions, number).distances
        if number < _OTHER_SEEDS:
            # Tokens too: a server without a tokenizer gives no text.
            first, _, third = ((answer.text, answer.tokens) for answer in answers)
            differs = first != third
            other_text.append((differs, _chance_of_equal(answers[0])))
    # Rounding moves a draw over its border now and then; without the seed most draws part.
    chance = binomial_tail(parted, kept + parted, _MOVED)
    noise, bound = median(moved) if moved else 0.0, rounding_distance("bf16")
    if noise > bound:
        # Where many tokens are about as likely, noise this size alone moves most draws.
        result.notes.append(
            f"seed: not judged; equal contexts, alone, are {noise:.2g} nats apart, and more than "
            f"{bound:.2g} moves draws of a fixed seed."
        )
    elif parted >= 3 and chance < _RARE:
        result.findings.append(
            ProbeFinding(
                "sampling", "the same seed gives other texts",
                f"{parted} of {result.looked_at} prompts were continued in two ways with the same "
                f"seed, alone, after {kept} equal tokens in all.",
                remedy="Look at how the server makes its random numbers: one generator a request.",
            )
        )  # fmt: skip
    chance = math.prod(p for _, p in other_text)
    if not any(differs for differs, _ in other_text) and chance < _IMPROBABLE:
        result.findings.append(
            ProbeFinding(
                "sampling", "temperature 1 draws nothing",
                f"{len(other_text)} prompts were continued alike with two seeds; the chance of "
                f"that is {chance:.1e} by the stated probabilities.",
                remedy="Look at which sampling fields the server ignores, and at its default "
                "generation config.",
            )
        )  # fmt: skip


def _chance_of_equal(answer: Answer) -> float:
    """Return an upper bound of the chance that a second draw takes the same tokens."""
    made = [max(position.top.values(), default=0.0) for position in answer.positions]
    return math.exp(min(0.0, math.fsum(made)))


def _ask_draws(session: Session, result: ProbedCheck) -> None:
    """Draw first tokens, and hold their number against the stated probability."""
    candidates = [
        (abs(math.exp(max(base.positions[0].top.values())) - 0.5), number)
        for number, base in enumerate(session.base)
        if base.positions and base.positions[0].top
    ]
    if not candidates:
        return
    number = min(candidates)[1]
    position, prompt = session.base[number].positions[0], session.prompts[number]
    share = math.exp(position.top[position.likeliest])
    drawn: Counter[str] = Counter()
    for seed in range(_DRAW_REQUESTS):
        fields = {"temperature": 1, "top_p": 1, "n": _DRAWS, "seed": 1000 * (seed + 1)}
        try:
            answers = session.server.choices(Ask(prompt, 1, fields))
        except UnusableServer as error:
            result.notes.append(f"n = {_DRAWS}: {error.shown_value}")
            return
        drawn.update(a.positions[0].token.strip() for a in answers if a.positions)
    total, hits = drawn.total(), drawn[position.likeliest.strip()]
    result.looked_at += total
    chance = min(binomial_tail(hits, total, share), binomial_tail(total - hits, total, 1.0 - share))
    if chance < _IMPROBABLE:
        result.findings.append(
            ProbeFinding(
                "sampling", "draws do not follow the stated probabilities",
                f"{position.likeliest!r} has a probability of {share:.3g}, and came {hits} times "
                f"in {total} draws at temperature 1; the chance of that is {chance:.1e}.",
                remedy="Look at temperature, top_p and top_k of the server's default generation "
                "config, and at the sampler.",
                body=session.server.call(Ask(prompt, 1)).body, measured=hits / total, limit=share,
            )
        )  # fmt: skip


def _ask_temperature(session: Session, result: ProbedCheck) -> None:
    """Say where log-probabilities are those after temperature: a convention, and not a fault."""
    slopes = []
    for number, ask in enumerate(session.asks(1)[:3]):
        fields = {"temperature": 0.5, "top_p": 1}
        answer = session.server.complete(replace(ask, fields=fields))
        base = session.base[number].positions
        if base and answer.positions:
            slopes.append(slope(base[:1], answer.positions[:1]))
    known = [found for found in slopes if found is not None]
    if known and abs(median(known) - 2.0) < 0.1:
        result.findings.append(
            ProbeFinding(
                "sampling", "log-probabilities are those after temperature",
                "At temperature 0.5 their differences are twice those at temperature 0.",
                ProbeLevel.NOTE,
                "Compare only answers of temperature 1 or 0 with another server. OpenAI's are the "
                "model's own: vLLM --logprobs-mode raw_logprobs.",
            )
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Stops and counts


def stops(session: Session, result: ProbedCheck) -> None:
    """Ask for a stop in the middle of a known answer."""
    wrong = []
    for number, ask in enumerate(session.asks()):
        base = session.base[number]
        stop = _stop_in(base)
        if stop is None or result.looked_at >= 4:
            continue
        answer = session.server.complete(replace(ask, fields={"stop": [stop]}))
        result.looked_at += 1
        expected = base.text.split(stop)[0]
        if not base.text.startswith(answer.text) and not answer.text.startswith(expected):
            continue  # another continuation: repeats judge that
        if answer.text.rstrip() != expected.rstrip() or answer.finish == "length":
            words = f"{stop!r} in {base.text[:60]!r} gave {answer.text[:60]!r} ({answer.finish})"
            wrong.append((words, session.server.call(replace(ask, fields={"stop": [stop]})).body))
    long = [
        (body, answer)
        for body, answer in session.server.seen
        if not body.get("echo") and len(answer.positions) > int(body.get("max_tokens") or 1 << 30)
    ]
    if len(wrong) >= 2:
        evidence = f"{len(wrong)} of {result.looked_at} stops were not kept: {wrong[0][0]}."
        result.findings.append(
            ProbeFinding("stops", "a text does not end at its stop", evidence, body=wrong[0][1])
        )
    if len(long) >= 2:
        most, count = long[0][0]["max_tokens"], len(long[0][1].positions)
        result.findings.append(
            ProbeFinding(
                "stops", "an answer is longer than max_tokens",
                f"{len(long)} answers; the first has {count} tokens, {most} were allowed.",
                body=long[0][0],
            )
        )  # fmt: skip


def _stop_in(base: Answer) -> str | None:
    """Return a word in the middle of a text that does not occur in it before."""
    words = base.text.split()
    for place in range(2, len(words) - 1):
        word = words[place]
        if base.text.count(word) == 1 and word.isascii() and len(word) > 1:
            return word
    return None


def usage(session: Session) -> ProbedCheck:
    """Hold the stated counts against what was sent and came back."""
    result = ProbedCheck("usage")
    notes = session.server.usage_notes
    result.looked_at = len(session.server.seen)
    if len(notes) >= 2:
        evidence = f"{len(notes)} of {result.looked_at} answers; the first: {notes[0]}."
        result.findings.append(
            ProbeFinding("usage", "the stated counts of tokens are wrong", evidence)
        )
    return result


# --------------------------------------------------------------------------------------------------
# Chats


def chats(session: Session, result: ProbedCheck) -> None:
    """Change one message at a time: each must matter; and hold the template against its own ids."""
    texts = session.options.plain_texts
    one, two, three = (texts[n % len(texts)] for n in range(3))
    talk = [_said("user", one), _said("assistant", two), _said("user", three)]
    changed = {
        "the user's message": [[_said("user", one)], [_said("user", two)]],
        "the first turn": [talk, [_said("user", three), *talk[1:]]],
        "the assistant's turn": [talk, [talk[0], _said("assistant", one), talk[2]]],
        "the system message": [
            [_said("system", one), _said("user", three)],
            [_said("system", two), _said("user", three)],
        ],
    }
    for name, (first, second) in changed.items():
        try:
            answers = [session.server.chat(messages, 4) for messages in (first, second)]
        except UnusableServer as error:
            result.notes.append(f"{name}: {error.shown_value}")
            continue
        result.looked_at += 1
        made = compare(answers[0].positions, answers[1].positions, 0)
        if made.distances and made.parted is None and made.size < _EQUAL:
            result.findings.append(
                ProbeFinding(
                    "chat", f"{name} does not reach the model",
                    f"Two conversations that differ in {name} alone have equal log-probabilities "
                    f"in all {len(made.distances)} tokens.",
                    remedy="Look at the chat template, and at --chat-template.",
                    body={"model": session.server.model, "messages": first, "max_tokens": 4},
                )
            )  # fmt: skip
    _ask_templates(session, result, [[_said("user", one)], talk])


def _said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def _ask_templates(
    session: Session, result: ProbedCheck, conversations: Sequence[list[dict[str, Any]]]
) -> None:
    """Ask for a conversation as a chat, and as the ids that the server's own tokenizer makes."""
    server = session.server
    if not server.offers("completions", "log-probabilities", "tokenize", "prompts as ids"):
        result.notes.append(
            "the template was not compared: that needs completions, /tokenize and prompts as ids"
        )
        return
    counts = []
    for number, messages in enumerate(conversations):
        try:
            ids = server.tokenize(messages)
        except UnusableServer as error:
            result.notes.append(f"/tokenize of messages: {error.shown_value}")
            return
        chat = server.chat(messages, session.options.new_tokens)
        text = server.complete(Ask(ids, session.options.new_tokens))
        made = compare(text.positions, chat.positions, number, "as ids")
        body = {"model": server.model, "messages": messages}
        result.comparisons.append(replace(made, body=body))
        if chat.prompt_tokens not in (None, len(ids)):
            counts.append((len(ids), chat.prompt_tokens, body))
    if len(counts) == len(conversations):
        made_ids, used, body = counts[0]
        result.findings.append(
            ProbeFinding(
                "chat", "a chat has other tokens than the server's own template",
                f"/tokenize makes {made_ids} ids of a conversation, of which the chat says that it "
                f"read {used}; so in {len(counts)} of {len(counts)} conversations.",
                remedy="Look at --chat-template, the begin token and add_generation_prompt.",
                body=body,
            )
        )  # fmt: skip
