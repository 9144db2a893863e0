"""Run the checks of a probe, and put what they found together.

The order matters: first answers come before anything is cached, and the last repeats after all
other requests. What was gathered stays, whatever ends a session.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from degarble.harness.base.errors import Undecided, UnusableServer
from degarble.harness.probe import routes, rules
from degarble.harness.probe.against import judge_against
from degarble.harness.probe.client import LimitReached
from degarble.harness.probe.judging import (
    Cause,
    ProbedCheck,
    ProbeFinding,
    ProbeLevel,
    Status,
    judge,
    limit_of,
    rounding_distance,
)
from degarble.harness.probe.paired_tests import mcnemar
from degarble.harness.probe.server import explore, within_limits
from degarble.harness.probe.session import DEFAULT, OWN, OWN_IDS, Session
from degarble.harness.probe.vocabulary import ids_of_model, known_texts, texts_from_ids
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.harness.probe.against import Against
    from degarble.harness.probe.client import Client
    from degarble.harness.probe.server import ProbedServer, Prompt
    from degarble.harness.probe.session import ProbeOptions


@dataclass(frozen=True)
class Check:
    """A check: what it needs, and what it says where rounding does not explain a difference."""

    name: str
    run: Callable[[Session, ProbedCheck], None]
    needs: tuple[str, ...]
    cause: Cause


_SCORES = "log-probabilities"
_PROMPT_SCORES = "prompt log-probabilities"
_NOTHING = "nothing could be compared"
_REPEATS = Cause(
    "the same request gets other answers",
    "Look for state that is kept between requests: caches that are not cleared, buffers of CUDA "
    "graphs, races. Run once with --enforce-eager and without prefix caching.",
    ProbeLevel.UNSTABLE,
)
CHECKS = (
    Check("repeats", routes.repeats, (), _REPEATS),
    Check(
        "cache", routes.cached, (_SCORES,),
        Cause(
            "a cached prefix gives other numbers than a cold one",
            "Start the server without prefix caching and probe it again: vLLM "
            "--no-enable-prefix-caching, SGLang --disable-radix-cache.",
        ),
    ),
    Check(
        "prefill", routes.prefill, (_SCORES, _PROMPT_SCORES),
        Cause(
            "prefill and decoding give different log-probabilities",
            "Two kernels compute one thing here. Run without speculation, then with another "
            "attention backend, and capture both phases.",
        ),
    ),
    Check(
        "chunks", routes.chunks, (_SCORES, _PROMPT_SCORES),
        Cause(
            "a prompt gives other numbers in pieces than whole",
            "Start the server without chunked prefill, or with larger chunks (vLLM "
            "--max-num-batched-tokens), and probe it again.",
        ),
    ),
    Check(
        "batch", routes.batches, (),
        Cause(
            "an answer depends on what is computed with it",
            "Find the smallest batch that shows it (--max-num-seqs), and capture one request in "
            "that batch: kernels chosen by size, padding, and slots are the suspects.",
        ),
    ),
    Check(
        "stream", routes.streamed, ("stream",),
        Cause(
            "a streamed answer is not the one that comes whole",
            "Look at the server's two ways to write an answer.",
        ),
    ),
    Check(
        "long", routes.long_context, (_SCORES,),
        Cause("a long prompt is not read whole", "Look for truncation."),
    ),
    Check(
        "sampling", rules.sampling, (),
        Cause("sampling is wrong", "Look at the sampler."),
    ),
    Check("stops", rules.stops, (), Cause("stops are wrong", "Look at the detokeniser.")),
    Check(
        "chat", rules.chats, ("chat", "chat log-probabilities"),
        Cause(
            "a chat is not written by the server's own template",
            "Compare the ids of /tokenize with tokenizer_config.json, and look at "
            "--chat-template, the begin token and add_generation_prompt.",
        ),
    ),
)  # fmt: skip


@dataclass
class ProbeResult:
    """What a probe found."""

    server: ProbedServer
    options: ProbeOptions
    checks: list[ProbedCheck] = field(default_factory=list)
    ended: str = ""  # why it ended early
    interrupted: bool = False  # by Ctrl-C
    against: Against | None = None

    def keep(self, against: Against) -> None:
        """Keep a comparison with another side, which is filled while the probe runs."""
        self.against = against

    @property
    def findings(self) -> list[ProbeFinding]:
        """Return all findings, those that decide first."""
        found = [finding for check in self.checks for finding in check.findings]
        if self.against is not None:
            found += self.against.findings
        order = [ProbeLevel.UNSTABLE, ProbeLevel.DIFFERS, ProbeLevel.NOTE]
        return sorted(found, key=lambda finding: order.index(finding.level))

    @property
    def verdict(self) -> Verdict:
        """Return the verdict: what was found, and whether enough was compared to say more."""
        levels = {finding.level for finding in self.findings}
        if ProbeLevel.DIFFERS in levels:
            return Verdict.DIFFERS
        if ProbeLevel.UNSTABLE in levels:
            return Verdict.UNSTABLE
        cut = any(check.status is Status.CUT for check in self.checks)
        if self.ended or cut or not self.server.offers(_SCORES):
            return Verdict.UNDECIDED
        return Verdict.AGREES

    @property
    def compared(self) -> int:
        """Return how many positions were compared."""
        return sum(check.positions for check in self.checks)

    @property
    def noise(self) -> float | None:
        """Return the largest typical distance of all checks, in nats."""
        return max((c.typical for c in self.checks if c.typical is not None), default=None)


def probe(
    client: Client,
    options: ProbeOptions,
    model: str | None = None,
    tell: Callable[[str], None] = lambda _step: None,
    beside: Callable[[Session, Callable[[Against], None]], None] | None = None,
) -> ProbeResult:
    """Probe a server; `tell` hears each step, `beside` compares with another side at the end."""
    tell("what the server offers")
    # From the last text on: the first ones have to be cold when the checks ask for them.
    try:
        server = explore(client, model, options.texts[::-1])
    except UnusableServer:
        with within_limits(client):
            own, source = _own_prompts(client, model) if options.prompts == DEFAULT else ((), "")
        if not own:
            raise
        options = replace(options, texts=own, prompts=source)
        server = explore(client, model, own[::-1])
    result = ProbeResult(server, options)
    session = Session(server, options)
    try:
        result.options = session.options = _in_known_words(server, options)
        tell("first answers")
        session.cold = [server.complete(ask) for ask in session.asks()]
        session.base = [server.complete(ask) for ask in session.asks()]
        _require_answers(session)
        for check in CHECKS:
            tell(check.name)
            _run(check, session, result)
        tell("last repeats")
        _repeat_at_end(session, result)
        if beside is not None:
            tell("the other side")
            beside(session, result.keep)
    except LimitReached as limit:
        result.ended = _words_of(limit)
    except KeyboardInterrupt:
        result.ended, result.interrupted = "it was interrupted", True
    except (UnusableServer, Undecided) as error:
        result.ended = f"{error.name}: {error.shown_value}"
    if result.ended:
        _cut(result)
        result.checks += _not_begun(result)
    _judge(session, result)
    return result


def _words_of(limit: LimitReached) -> str:
    return f"the limit of {limit.args[0]} was reached"


def _cut(result: ProbeResult) -> None:
    """Say of a comparison with another side that it is not whole."""
    if result.against is not None:
        result.against.result.status = Status.CUT
        result.against.result.reason = result.ended


def _not_begun(result: ProbeResult) -> list[ProbedCheck]:
    begun = {check.name for check in result.checks}
    names = [check.name for check in CHECKS if check.name not in begun]
    return [ProbedCheck(name, status=Status.CUT, reason="not begun") for name in names]


def _own_prompts(client: Client, model: str | None) -> tuple[tuple[Prompt, ...], str]:
    """Return prompts that the model makes where it refuses the default ones, and what they are."""
    texts = texts_from_ids(client, model)
    return (texts, OWN) if texts else (ids_of_model(client, model), OWN_IDS)


def _in_known_words(server: ProbedServer, options: ProbeOptions) -> ProbeOptions:
    """Return the options with texts in words that the model knows."""
    if options.gives_ids:
        return options
    given = options.prompts != DEFAULT
    texts = known_texts(server, options.plain_texts, given=given)
    return options if texts == options.texts else replace(options, texts=texts, prompts=OWN)


def _require_answers(session: Session) -> None:
    if not any(answer.positions or answer.text for answer in session.base):
        raise Undecided(
            session.server.name, "empty answers", "new tokens to compare",
            "Give prompts that the model continues: --prompts FILE.",
        )  # fmt: skip


def _run(check: Check, session: Session, result: ProbeResult) -> None:
    """Run one check, or leave it out by the name of what the server lacks."""
    server = session.server
    missing = [feature for feature in check.needs if not server.offers(feature)]
    if missing:
        reason = f"needs {missing[0]}; {server.lacks[missing[0]]}"
        skipped = ProbedCheck(check.name, status=Status.SKIPPED)
        skipped.reason = reason
        result.checks.append(skipped)
        return
    before = server.client.traffic.requests
    made = ProbedCheck(check.name)
    result.checks.append(made)
    try:
        check.run(session, made)
    except (LimitReached, KeyboardInterrupt, UnusableServer) as error:
        # What it gathered until then is judged as well.
        made.status, made.reason = Status.CUT, _reason_of(error)
        if isinstance(error, UnusableServer) and server.client.reached:
            return  # a refused request ends its check, a dead server the session
        raise
    finally:
        made.requests = server.client.traffic.requests - before
    if not (made.positions or made.looked_at or made.findings):
        made.status = Status.SKIPPED
        made.reason = f"nothing could be compared; {made.notes[0]}" if made.notes else _NOTHING


def _reason_of(error: LimitReached | KeyboardInterrupt | UnusableServer) -> str:
    if isinstance(error, LimitReached):
        return _words_of(error)
    return error.shown_value if isinstance(error, UnusableServer) else "interrupted"


def _repeat_at_end(session: Session, result: ProbeResult) -> None:
    repeated = next((check for check in result.checks if check.name == "repeats"), None)
    if repeated is not None:
        routes.repeat_at_end(session, repeated)
        repeated.requests += len(session.prompts)


def _judge(session: Session, result: ProbeResult) -> None:
    """Judge every check by the noise of the others; look at all answers once more."""
    causes = {check.name: check.cause for check in CHECKS}
    rounding = result.options.rounding
    for check in result.checks:
        if check.status is not Status.SKIPPED:
            limits = (limit_of(check.name, result.checks, r) for r in (rounding, "bf16"))
            limit, tight = limits
            judge(check, limit, causes[check.name], tight if rounding is None else None)
    _judge_texts(session, result)
    if result.against is not None:
        judge_against(result.against, result.checks, rounding)
    general = limit_of("numbers", result.checks, rounding)
    for made in (rules.numbers(session, general), rules.usage(session)):
        judge(made, general, _REPEATS)
        result.checks.append(made)


def _judge_texts(session: Session, result: ProbeResult) -> None:
    """Without log-probabilities, hold differing texts against those of repeats: McNemar's test."""
    if session.server.offers(_SCORES):
        return
    apart = {check.name: check.texts_apart for check in result.checks}
    for check in result.checks:
        p = mcnemar(check.texts_apart, apart.get("repeats", 0))
        if check.name != "repeats" and check.texts_apart > apart.get("repeats", 0) and p < 0.01:
            cause = next(known.cause for known in CHECKS if known.name == check.name)
            evidence = (
                f"{check.texts_apart} texts differ, {apart.get('repeats', 0)} of the repeats; "
                f"McNemar's test gives p = {p:.2g}."
            )
            check.findings.append(
                ProbeFinding(check.name, cause.cause, evidence, remedy=cause.remedy)
            )
            check.status = Status.DIFFERS


def rounding_alone(options: ProbeOptions) -> tuple[float, float]:
    """Return what one rounding of the logits gives: a distance, and a KL divergence, in nats."""
    moved = rounding_distance(options.rounding or "bf16")
    return moved, moved * moved / 2
