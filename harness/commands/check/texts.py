"""The text panel of a check: the model's answers and its twin's answers to the same prompts.

A few short prompts are shown. Tokens come from the capture's own record of prompts and answers if
it has one, else from its steps. The twin continues the same token ids greedily, for as many tokens.
With streamed weights the twin generates nothing: each token would read the whole checkpoint from
disk. What cannot be shown becomes a note.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import DegarbleError
from degarble.harness.capture.files.records import Phase
from degarble.harness.chat.tokenizer import IncrementalDecoder, Tokenizer
from degarble.harness.inference.generation import Continuation, Generation, Limits
from degarble.harness.report.replay_record import PromptTexts, TextRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from degarble.harness.engine.localise.recorded_run import RecordedRun
    from degarble.harness.inference.model import OpenModel

PROMPTS = 4  # shown at most
LENGTH = 2048  # tokens of a prompt at most, so that the twin's answer stays cheap
NEW_TOKENS = 64


def texts_of(run: RecordedRun, model: OpenModel) -> TextRecord:
    """Return the texts of candidate and twin."""
    spoken = spoken_in(run)
    notes = []
    if len(spoken) > PROMPTS:
        notes.append(f"The first {PROMPTS} of {len(spoken):,} prompts.")
    short = [pair for pair in spoken[:PROMPTS] if len(pair[0]) <= LENGTH]
    if len(short) < len(spoken[:PROMPTS]):
        notes.append(f"Prompts of more than {LENGTH:,} tokens are left out.")
    checkpoint = model.checkpoint
    try:
        vocabulary = model.config.vocab_size
        tokenizer = Tokenizer.of_checkpoint(checkpoint.root, checkpoint.config, vocabulary)
    except DegarbleError:
        tokenizer = None
        notes.append("The checkpoint has no tokenizer: tokens are told by their numbers.")
    if model.streamed is not None:
        notes.append("The weights are streamed, so the twin was not asked what it says.")
    said = [_said(pair, model, tokenizer) for pair in short]
    return TextRecord(tuple(said), tuple(notes))


def spoken_in(run: RecordedRun) -> list[tuple[list[int], list[int]]]:
    """Return each sequence's prompt and the tokens after it."""
    stated = run.facts.get("sequences")
    if isinstance(stated, list):
        pairs = [_stated(each) for each in stated]
        return [pair for pair in pairs if pair is not None]
    prompts: dict[int, list[int]] = {}
    behind: dict[int, list[int]] = {}
    for step in run.steps:
        side = prompts if step.phase is Phase.PREFILL else behind
        for token, owner in zip(step.tokens, step.sequences, strict=True):
            side.setdefault(owner, []).append(token)
    return [(ids, behind.get(owner, [])) for owner, ids in prompts.items()]


def _stated(raw: Any) -> tuple[list[int], list[int]] | None:
    """Return a capture's own record of one sequence; None without one."""
    if not isinstance(raw, dict):
        return None
    sides = raw.get("prompt"), raw.get("new")
    if not all(isinstance(side, list) and all(type(n) is int for n in side) for side in sides):
        return None
    return list(sides[0] or []), list(sides[1] or [])


def _said(
    pair: tuple[list[int], list[int]], model: OpenModel, tokenizer: Tokenizer | None
) -> PromptTexts:
    prompt, new = pair
    voices = [("Candidate", pieces(new, tokenizer))]
    if model.streamed is None and prompt and new:
        speech = Continuation(list(prompt))
        limits = Limits(min(len(new), NEW_TOKENS))
        try:
            Generation(model.speaker, None, None, limits).run([speech])
            voices.insert(0, ("Twin", pieces(speech.ids, tokenizer)))
        except (DegarbleError, RuntimeError, ValueError, IndexError):
            pass  # ids that the model cannot take: the candidate's words stand alone
    return PromptTexts("".join(pieces(prompt, tokenizer)), tuple(voices))


def pieces(ids: Sequence[int], tokenizer: Tokenizer | None) -> tuple[str, ...]:
    """Return a piece of text for each token; its number if there is no tokenizer."""
    if tokenizer is None:
        return tuple(f"{number} " for number in ids)
    growing = IncrementalDecoder(tokenizer)
    try:
        found = [growing.add(number) for number in ids]
        rest = growing.rest()
    except (OverflowError, ValueError, TypeError):
        return tuple(f"{number} " for number in ids)
    return (*found[:-1], found[-1] + rest) if found else ()
