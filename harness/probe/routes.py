"""Checks that reach one distribution in two ways: repeats, batches, prefill, chunks, caches.

p(next token | tokens before it) is one thing, however a server comes to it. Each check here asks
for it twice, and differs in one circumstance alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from degarble.harness.base.errors import UnusableServer
from degarble.harness.probe.answers import slope
from degarble.harness.probe.judging import ProbedCheck, ProbedComparison, ProbeFinding, compare
from degarble.harness.probe.server import Ask, RefusedRequest
from degarble.harness.probe.session import add_answer
from degarble.harness.probe.vocabulary import same_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from degarble.harness.probe.answers import Answer, Position
    from degarble.harness.probe.server import Prompt
    from degarble.harness.probe.session import Session

BATCHES = (3, 8, 16)
_FILLER_TOKENS = 24  # of the others in a batch: they are still decoded when the answers end
_LONG_RUN = 160  # new tokens after a short prompt: any border of chunks among them is crossed
_BORDERS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_BEFORE = 4  # tokens before a border, where decoding begins
_SALTED = 4  # prompts of the cache's checks
_DECODED, _AHEAD = 12, 4  # tokens that become part of a prompt, and that are compared after it
_EQUAL = 1e-9
# First words or tokens of a long prompt that are left out, so that no cached prefix moves the
# borders at which prefill cuts it: two prompts have equal digits only with equal borders.
_LEFT_OUT = (7, 13)


def repeats(session: Session, result: ProbedCheck) -> None:
    """Ask the same alone, again and again."""
    _ask_again(session, result, "at once")


def repeat_at_end(session: Session, result: ProbedCheck) -> None:
    """Ask once more at the end, after all other requests."""
    _ask_again(session, result, "after all other requests")


def _ask_again(session: Session, result: ProbedCheck, when: str) -> None:
    for number, ask in enumerate(session.asks()):
        add_answer(session, result, (number, ask), session.server.complete(ask), when)


def batches(session: Session, result: ProbedCheck) -> None:
    """Ask alone, and at the same time as others."""
    asks = session.asks()
    for size in BATCHES:
        members = asks[:size]
        others = [
            Ask(asks[n % len(asks)].prompt, _FILLER_TOKENS) for n in range(size - len(members))
        ]
        # Others first: they are in the batch when the members join.
        answers = session.server.together([*others, *members])[len(others) :]
        for number, (ask, answer) in enumerate(zip(members, answers, strict=True)):
            add_answer(session, result, (number, ask), answer, f"with {size} at once")
    _name_exchanged(session, result)


def _name_exchanged(session: Session, result: ProbedCheck) -> None:
    """Say where an answer is not merely wrong, but another prompt's."""
    bodies = Counter(
        number
        for number, comparison in enumerate(result.comparisons)
        if comparison.size > 1.0 and _whose(session, comparison) is not None
    )
    if len(bodies) >= 2:
        result.notes.append(f"{len(bodies)} answers are those of other prompts")


def _whose(session: Session, comparison: ProbedComparison) -> int | None:
    """Return the prompt whose answer came in place of this one's."""
    for body, answer in reversed(session.server.seen):
        if body == comparison.body and answer.positions:
            for number, base in enumerate(session.base):
                if number != comparison.prompt and base.positions:
                    made = compare(base.positions, answer.positions, number)
                    if made.parted is None and made.size < _EQUAL:
                        return number
    return None


def prefill(session: Session, result: ProbedCheck) -> None:
    """Score the tokens of the first answers as prompts."""
    result.unit = "prompts"
    slopes: list[float] = []
    for number, (prompt, answer) in enumerate(zip(session.prompts, session.cold, strict=True)):
        session.tail = ()
        _add_prefilled(session, result, prompt, answer, (number, ""))
        found = slope(answer.positions, session.tail)
        if found is not None and result.comparisons:
            slopes.append(found)
    _judge_slopes(result, slopes)


def _judge_slopes(result: ProbedCheck, slopes: list[float]) -> None:
    """Find log-probabilities that are scaled: rounding moves them to both sides."""
    if len(slopes) < 5:
        return
    typical = median(slopes)
    all_one_way = all((s > 1) == (typical > 1) and abs(s - 1) > 0.05 for s in slopes)
    if all_one_way and abs(typical - 1) > 0.1:
        result.findings.append(
            ProbeFinding(
                "prefill", "log-probabilities of decoding and of prefill are at two temperatures",
                f"Prefill's differences between tokens are {typical:.3g} times those of decoding, "
                f"in all {len(slopes)} prompts ({min(slopes):.3g} to {max(slopes):.3g}).",
                remedy="Look at where the server takes log-probabilities: before or after "
                "temperature, and with which one.",
                measured=typical, limit=1.0,
            )
        )  # fmt: skip


def _add_prefilled(
    session: Session, result: ProbedCheck, prompt: Prompt, answer: Answer, place: tuple[int, str]
) -> None:
    number, condition = place
    try:
        found = session.prefilled(prompt, answer, number)
    except UnusableServer as error:
        if not session.server.client.reached:
            raise
        result.notes.append(f"a prompt with its answer was refused: {error.shown_value}")
        return
    if found is None:
        result.notes.append("tokens of a prompt and its answer are not the answer's; left out")
    else:
        result.comparisons.append(replace(found, condition=condition))


def chunks(session: Session, result: ProbedCheck) -> None:
    """Decode over the borders at which prefill may cut a prompt, and prefill the same whole."""
    server = session.server
    result.unit = "prompts"
    lengths: list[tuple[Position, ...]] = []
    for number in range(2):
        # As nothing in the session asked it before: a cached beginning would be cut as well.
        prompt = session.exact(session.longer(session.options.texts[number], number + 2))
        answer = server.complete(Ask(prompt, _LONG_RUN))
        _add_prefilled(session, result, prompt, answer, (number, f"over {_LONG_RUN} new tokens"))
    for border in _BORDERS:
        if border + session.options.new_tokens > session.most_tokens:
            break
        try:
            cut = session.cut(border - _BEFORE)
            if cut is None:
                result.notes.append(f"no prompt of {border - _BEFORE} tokens could be made")
                break
            answer = server.complete(Ask(cut, session.options.new_tokens))
        except RefusedRequest as error:  # more than the model's context, which nothing stated
            result.notes.append(_too_long(border - _BEFORE, error))
            break
        _add_prefilled(session, result, cut, answer, (border, f"over token {border}"))
        lengths.append(session.scored)
    pairs = [compare(a[1:], b[1:], 0).size for a, b in pairwise(lengths)]
    result.shape_noise = median(pairs) if pairs else None


def cached(session: Session, result: ProbedCheck) -> None:
    """Ask for prompts whose beginning was computed before, and for others that look like them."""
    server = session.server
    for number, (cold, ask) in enumerate(zip(session.cold, session.asks(), strict=True)):
        warm = session.base[number].positions
        made = compare(cold.positions, warm, number, "asked a second time")
        result.comparisons.append(replace(made, body=server.call(ask).body))
    for number in range(min(_SALTED, len(session.options.texts))):
        text = session.longer(session.options.texts[number], number)
        prompt = session.exact(text)
        cold = server.complete(Ask(prompt, _DECODED + _AHEAD))
        # A chat's answer is the assistant's: in the user's message it is another prompt.
        decoded = 0 if server.chat_only else _DECODED
        longer = prompt if server.chat_only else server.continued(prompt, cold, decoded)
        if longer is None or len(cold.positions) <= decoded:
            result.notes.append("an answer ended before its tokens could become a prompt")
            continue
        expected = cold.positions[decoded:]
        _ask_cached(session, result, (number, longer), expected)
        for where, similar in _similar(session, prompt, number):
            _ask_similar(session, result, (number, similar, where), cold)
        _ask_cached(session, result, (number, longer), expected, "after similar prompts")


def _ask_cached(
    session: Session, result: ProbedCheck, asked: tuple[int, Prompt],
    expected: Sequence[Position], condition: str = "after its beginning",
) -> None:  # fmt: skip
    number, prompt = asked
    ask = Ask(prompt, _AHEAD)
    answer = session.server.complete(ask)
    made = compare(expected, answer.positions, number, condition)
    result.comparisons.append(replace(made, body=session.server.call(ask).body))


def _similar(session: Session, prompt: Prompt, number: int) -> list[tuple[str, Prompt]]:
    """Return a prompt with another first token, and one with another token in the middle."""
    made: list[tuple[str, Prompt]] = []
    for where, share in (("first", 0.0), ("middle", 0.5)):
        if isinstance(prompt, tuple):
            other = session.prompt(number + 1)
            at = int(share * len(prompt))
            assert isinstance(other, tuple), "all prompts are ids, or none is"
            token = next((n for n in other if n != prompt[at]), other[0])
            made.append((where, (*prompt[:at], token, *prompt[at + 1 :])))
        else:
            words = prompt.split(" ")
            at = int(share * len(words))
            texts = session.options.plain_texts
            other_words = texts[(number + 1) % len(texts)].split()
            words[at] = next((w for w in other_words if w != words[at]), words[at])
            made.append((where, " ".join(words)))
    return made


def _ask_similar(
    session: Session, result: ProbedCheck, asked: tuple[int, Prompt, str], cold: Answer
) -> None:
    """Ask a prompt that differs in one token; the other one's numbers are a stale cache's."""
    number, prompt, where = asked
    ask = Ask(prompt, _AHEAD)
    answer = session.server.complete(ask)
    if session.server.offers("prompt log-probabilities"):
        found = session.prefilled(prompt, answer, number)
        if found is not None:
            condition = f"where the {where} token is another one"
            result.comparisons.append(replace(found, condition=condition))
    made = compare(cold.positions, answer.positions, number)
    result.looked_at += 1
    if made.distances and made.parted is None and made.size < _EQUAL:
        whole = session.exact(session.longer(session.options.texts[number], number))
        if same_tokens(session.server, whole, prompt):
            result.notes.append(f"two words are one token to the server, {where} of a prompt")
            return
        result.findings.append(
            ProbeFinding(
                "cache", "a prompt gets the numbers of another prompt",
                f"Two prompts of which the {where} token differs have equal log-probabilities in "
                f"all {len(made.distances)} new tokens, to the last digit.",
                remedy="Start the server without prefix caching and probe it again: "
                "vLLM --no-enable-prefix-caching, SGLang --disable-radix-cache.",
                body=session.server.call(ask).body,
            )
        )  # fmt: skip


def long_context(session: Session, result: ProbedCheck) -> None:
    """Exchange a quarter of a long prompt: every quarter has to matter."""
    longest = session.most_tokens - _AHEAD
    for length, left_out in zip(sorted({min(512, longest), longest}), _LEFT_OUT, strict=False):
        try:
            _ask_long(session, result, length, left_out)
        except RefusedRequest as error:
            result.notes.append(_too_long(length, error))


def _ask_long(session: Session, result: ProbedCheck, length: int, left_out: int) -> None:
    ids, other = session.cut(length), session.cut(session.most_tokens - _AHEAD, first=1)
    if isinstance(ids, tuple) and isinstance(other, tuple):
        ids, other = ids[left_out:], other[left_out:]
        _ask_quarters(session, result, ids, _quarters(ids, other))
    else:
        whole, text = session.about(length), session.about(session.most_tokens, first=1)
        whole, text = (" ".join(each.split(" ")[left_out:]) for each in (whole, text))
        _ask_quarters(session, result, whole, _word_quarters(whole, text))


def _too_long(tokens: int, error: RefusedRequest) -> str:
    return f"no prompt of about {tokens} tokens was answered: {error.shown_value}"


def _quarters(whole: tuple[int, ...], other: tuple[int, ...]) -> list[Prompt]:
    made: list[Prompt] = []
    ends = [len(whole) * n // 4 for n in range(5)]
    for begin, end in pairwise(ends):
        made.append((*whole[:begin], *other[: end - begin], *whole[end:]))
    return made


def _word_quarters(whole: str, other: str) -> list[Prompt]:
    made: list[Prompt] = []
    words, others = whole.split(" "), other.split(" ")
    ends = [len(words) * n // 4 for n in range(5)]
    for begin, end in pairwise(ends):
        made.append(" ".join([*words[:begin], *others[: end - begin], *words[end:]]))
    return made


def _ask_quarters(
    session: Session, result: ProbedCheck, whole: Prompt, variants: list[Prompt]
) -> None:
    server = session.server
    # Three times, because a cold and a cached prompt may differ in rounding.
    known = [server.complete(Ask(whole, _AHEAD)) for _ in range(3)]
    moved = []
    for variant in variants:
        answer = server.complete(Ask(variant, _AHEAD))
        moved.append(min(compare(k.positions, answer.positions, 0).size for k in known))
        result.looked_at += 1
    # A healthy server never gives equal digits for two prompts, however little a quarter matters.
    silent = [
        n
        for n, size in enumerate(moved)
        if size <= _EQUAL and _stays_silent(session, whole, variants[n])
    ]
    words = len(whole.split(" ")) if isinstance(whole, str) else len(whole)
    length = known[0].prompt_tokens or words
    if 0 < len(silent) < 4 and 3 not in silent and known[0].positions:
        named = " and ".join(("first", "second", "third")[n] for n in silent)
        result.findings.append(
            ProbeFinding(
                "long", f"the {named} quarter of a long prompt has no influence",
                f"In a prompt of {length} tokens its words were exchanged, and every "
                f"log-probability stayed equal to the last digit; the last quarter moves them by "
                f"{moved[3]:.2g} nats.",
                remedy="Look for truncation (the length a proxy or a front end allows), the "
                "sliding window, and the length of RoPE's scaling.",
                body=server.call(Ask(whole, _AHEAD)).body, measured=moved[silent[0]],
            )
        )  # fmt: skip


def _stays_silent(session: Session, whole: Prompt, variant: Prompt) -> bool:
    """Return whether two prompts give equal numbers after other endings as well."""
    for number in range(2):
        words = session.beginning(number)
        ending = session.exact(words)
        pair = []
        for prompt in (whole, variant):
            if isinstance(prompt, tuple) and isinstance(ending, tuple):
                longer: Prompt = (*prompt, *ending)
            else:
                longer = f"{prompt} {words}"
            # Twice: a cold and a cached prompt may differ in rounding.
            pair.append([session.server.complete(Ask(longer, _AHEAD)) for _ in range(2)])
        sizes = [compare(a.positions, b.positions, 0).size for a in pair[0] for b in pair[1]]
        if min(sizes) > _EQUAL:
            return False
    return True


def streamed(session: Session, result: ProbedCheck) -> None:
    """Ask for the same as a stream."""
    server = session.server
    parted = []
    for number, ask in enumerate(session.asks()[:4]):
        base = session.base[number]
        wanted = replace(ask, fields={"stream": True})
        try:
            answer = server.complete(wanted)
        except UnusableServer as error:
            result.notes.append(f"no whole stream: {error.shown_value}")
            continue
        made = replace(
            compare(base.positions, answer.positions, number), body=server.call(wanted).body
        )
        if made.distances:
            result.comparisons.append(made)
        result.looked_at += 1
        if answer.text != base.text and made.distances and base.tokens == answer.tokens:
            parted.append((base.text, answer.text, made))
    if len(parted) >= 2:
        whole, pieces, made = parted[0]
        result.findings.append(
            ProbeFinding(
                "stream", "a streamed text is not the text that comes whole",
                f"{len(parted)} of {result.looked_at} texts differ, though their tokens are the "
                f"same; {whole[:60]!r} was streamed as {pieces[:60]!r}.",
                remedy="Look at the detokeniser and at what the server holds back for stops.",
                body=made.body,
            )
        )  # fmt: skip
