"""Smoke-test a server's text: known answers, an echo, a likelihood, and a measure of garbage.

`python -m degarble.harness.serve.smoke URL --answers FILE` queries a server with OpenAI's
interface: its models, completions and a chat. The answers are the reference's own, made once by
`... smoke --make CKPT --prompts FILE --answers FILE`: its greedy continuations, and how likely it
finds the prompts. A garbled server fails the answers. A server that only rounds differently may
leave an answer late, so a share of its characters is required, not all.

Status 1: a check failed, listed one by one. Status 2: unreadable files, or no server. A token is
read from a variable, never from the command line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import zlib
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from degarble.harness.base.errors import DegarbleError, InvalidArgument, UnreadableFile
from degarble.harness.base.files import read_small_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TOKEN_VARIABLE = "DEGARBLE_SMOKE_TOKEN"  # noqa: S105  the name of a variable
NEW_TOKENS = 24
LEAST_ALIKE = 0.5  # of an answer's characters, from its beginning
LIKELIHOOD_SLACK = 0.5  # nats a token that a text may be less likely than to the reference
_STRANGE = 0.02  # characters that are no text
_ONE_WORD = 0.6  # of all words
_SQUEEZED = 0.08  # bytes left by zlib: a loop
_SECONDS = 120.0
_LARGEST = 64 << 20


@dataclass(frozen=True)
class SmokeCheck:
    """One check: its name, its result, and what was observed."""

    name: str
    holds: bool | None  # None: the server has no such thing
    observed: str

    def line(self) -> str:
        """Return it as a line of text."""
        word = {True: "ok", False: "FAILED", None: "not requested"}[self.holds]
        return f"{word:9} {self.name}: {self.observed}"


class Server:
    """A server with OpenAI's interface, queried sequentially."""

    def __init__(self, url: str, token: str | None = None, seconds: float = _SECONDS) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidArgument("URL", url, "http://HOST:PORT", "Give the server's address.")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._token, self._seconds = token, seconds

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Request a path; return the status and the document."""
        data = None if body is None else json.dumps(body).encode()
        head = {"content-type": "application/json"}
        if self._token:
            head["authorization"] = f"Bearer {self._token}"
        asked = Request(self._url + path, data, head)  # noqa: S310  http or https, see above
        try:
            with urlopen(asked, timeout=self._seconds) as answer:  # noqa: S310  as above
                return answer.status, _document(answer.read())
        except HTTPError as error:
            return error.code, _document(error.read())
        except (URLError, OSError) as error:
            raise InvalidArgument(
                "URL", self._url, f"a server that answers ({error})", "Start it, or wait for it."
            ) from error


def smoke(server: Server, answers: dict[str, Any]) -> Iterator[SmokeCheck]:
    """Run every check, one after the other."""
    status, found = server.ask("/v1/models")
    names = [each.get("id") for each in found.get("data", []) if isinstance(each, dict)]
    yield SmokeCheck(
        "models", status == 200 and bool(names), f"{status}: {', '.join(map(str, names))}"
    )
    if not names:
        return
    model = str(names[0])
    for each in answers["answers"]:
        yield from _answered(server, model, each)
    first = answers["answers"][0]["prompt"]
    yield _echoed(server, model, first)
    for each in answers["answers"]:
        yield _likely(server, model, each)
    yield _chat(server, model)


def _answered(server: Server, model: str, known: dict[str, Any]) -> Iterator[SmokeCheck]:
    body = {"model": model, "prompt": known["prompt"], "temperature": 0, "max_tokens": NEW_TOKENS}
    status, found = server.ask("/v1/completions", body)
    if status != 200:
        yield SmokeCheck("known answer", False, f"{status}: {_error(found)}")
        return
    text, expected = str(found["choices"][0]["text"]), known["answer"]
    share = alike(text, expected)
    message = f"{share:.0%} of {_shown(expected)} to {_shown(known['prompt'])}; {_shown(text)}"
    yield SmokeCheck("known answer", share >= LEAST_ALIKE, message)
    reason = garbage(text)
    yield SmokeCheck("text", not reason, reason or f"{len(text.split())} words")


def alike(text: str, expected: str) -> float:
    """Return the share of an answer that a text begins with; spaces at the ends do not count."""
    said, wanted = text.strip(), expected.strip()
    if not wanted:
        return float(not said)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(said, wanted, strict=False))
    return sum(1 for _ in same) / len(wanted)


def garbage(text: str) -> str:
    """Return why a text is garbage by its form alone; empty where it is not."""
    if not text.strip():
        return "no text at all"
    strange = sum(1 for c in text if c == "\ufffd" or not (c.isprintable() or c.isspace()))
    if strange > _STRANGE * len(text):
        return f"{strange} of {len(text)} characters are no text"
    words = text.split()
    most, count = Counter(words).most_common(1)[0]
    if len(words) >= 8 and count > _ONE_WORD * len(words):
        return f"{_shown(most)} is {count} of {len(words)} words"
    raw = text.encode("utf-8", "surrogatepass")
    left = len(zlib.compress(raw, 9)) / len(raw)
    if len(raw) >= 256 and left < _SQUEEZED:
        return f"it repeats itself: {left:.0%} of it says all"
    return ""


def _echoed(server: Server, model: str, prompt: str) -> SmokeCheck:
    body = {"model": model, "prompt": prompt, "echo": True, "max_tokens": 1, "temperature": 0}
    status, found = server.ask("/v1/completions", body)
    if status != 200:
        return SmokeCheck("echo", None, f"{status}: {_error(found)}")
    text = str(found["choices"][0]["text"])
    holds = text.strip().startswith(prompt.strip())
    return SmokeCheck("echo", holds, f"{_shown(prompt)} came back as {_shown(text)}")


def _likely(server: Server, model: str, known: dict[str, Any]) -> SmokeCheck:
    """Compare how likely a server finds a text with the reference."""
    body = {"model": model, "prompt": known["prompt"], "echo": True, "max_tokens": 1}
    status, found = server.ask("/v1/completions", body | {"logprobs": 1, "temperature": 0})
    if status != 200:
        return SmokeCheck("likelihood", None, f"{status}: {_error(found)}")
    scores = (found["choices"][0].get("logprobs") or {}).get("token_logprobs") or []
    known_scores = [score for score in scores[:-1] if isinstance(score, (int, float))]
    if not known_scores:
        return SmokeCheck("likelihood", None, "no log-probabilities came back")
    mean, least = sum(known_scores) / len(known_scores), known["mean"] - LIKELIHOOD_SLACK
    message = f"{mean:.2f} nats a token of {_shown(known['prompt'])}, {known['mean']:.2f} expected"
    return SmokeCheck("likelihood", mean >= least, message)


def _chat(server: Server, model: str) -> SmokeCheck:
    talk = [{"role": "user", "content": "Say one short sentence about a tree."}]
    body = {"model": model, "messages": talk, "temperature": 0, "max_tokens": NEW_TOKENS}
    status, found = server.ask("/v1/chat/completions", body)
    if status == 400 and (found.get("error") or {}).get("code") == "chat_unavailable":
        return SmokeCheck("chat", None, "the tokenizer has no marks of a conversation")
    if status != 200:
        return SmokeCheck("chat", False, f"{status}: {_error(found)}")
    said = found["choices"][0]["message"]
    text = str(said.get("content") or said.get("reasoning_content") or "")
    reason = garbage(text)
    return SmokeCheck("chat", not reason, reason or _shown(text))


def read_answers(path: Path) -> dict[str, Any]:
    """Read a file of known answers; raise if it holds none."""
    try:
        found = json.loads(read_small_text(path, _LARGEST))
        answers = found["answers"]
        sound = bool(answers) and all(
            isinstance(answer["prompt"], str)
            and isinstance(answer["answer"], str)
            and isinstance(answer["mean"], (int, float))
            for answer in answers
        )
    except (ValueError, KeyError, TypeError) as error:
        raise _no_answers(path, str(error)) from error
    if not sound:
        raise _no_answers(path, "prompt, answer and mean of each")
    return {"answers": answers}


def _no_answers(path: Path, why: str) -> UnreadableFile:
    return UnreadableFile(
        "--answers", str(path), f"known answers ({why[:200]})",
        "Make them: smoke --make CKPT --prompts FILE --answers FILE; see docs/container.md.",
    )  # fmt: skip


def make_answers(checkpoint: Path, prompts: Sequence[str]) -> dict[str, Any]:
    """Return the reference's greedy answers, and how likely it finds each prompt."""
    # Imports torch, which asking a server does without.
    from degarble.harness.generate.generate import GenerationOptions, TextGenerator  # noqa: PLC0415
    from degarble.harness.inference.generation import Limits  # noqa: PLC0415
    from degarble.harness.inference.model import open_model  # noqa: PLC0415

    made = []
    with open_model(checkpoint) as model:
        generator = TextGenerator(model, GenerationOptions(limits=Limits(NEW_TOKENS)))
        for prompt, continuation in zip(
            prompts, generator.speak(list(prompts)).speeches, strict=True
        ):
            mean = -generator.surprise(prompt).loss
            made.append({"prompt": prompt, "answer": continuation.text, "mean": mean})
    return {"model": checkpoint.resolve().name, "answers": made}


def _document(raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _error(found: dict[str, Any]) -> str:
    error = found.get("error")
    return _shown(error.get("message") if isinstance(error, dict) else found)


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a server, or make the expected answers."""
    parser = argparse.ArgumentParser(prog="python -m degarble.harness.serve.smoke")
    parser.add_argument("url", nargs="?", help="http://HOST:PORT")
    parser.add_argument("--answers", type=Path, required=True, metavar="FILE")
    parser.add_argument("--make", type=Path, metavar="CKPT", help="write FILE by the reference")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="one a line, for --make")
    asked = parser.parse_args(arguments)
    try:
        if asked.make is not None and asked.prompts is not None:
            lines = read_small_text(asked.prompts, _LARGEST).splitlines()
            made = make_answers(asked.make, [line for line in lines if line.strip()])
            asked.answers.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
            return 0
        if asked.url is None:
            parser.error("a URL, or --make CKPT with --prompts FILE")
        known = read_answers(asked.answers)
        checks = list(smoke(Server(asked.url, os.environ.get(TOKEN_VARIABLE)), known))
    except (DegarbleError, OSError) as error:
        sys.stderr.write(f"smoke: {error}\n")
        return 2
    sys.stdout.write("".join(f"{check.line()}\n" for check in checks))
    return int(any(check.holds is False for check in checks))


if __name__ == "__main__":
    sys.exit(main())
