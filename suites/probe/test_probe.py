"""`degarble probe` on stand-ins: planted server faults are found, healthy servers stay silent."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.cli.commands.probing import read_prompts
from degarble.harness.probe.against import against, judge_against, local_side
from degarble.harness.probe.client import Client, RequestLimits
from degarble.harness.probe.judging import ProbedCheck, Status, limit_of
from degarble.harness.probe.local import LocalSide
from degarble.harness.probe.passages import PASSAGES
from degarble.harness.probe.probe import CHECKS, ProbeResult, probe
from degarble.harness.probe.report import sentence_of
from degarble.harness.probe.routes import long_context
from degarble.harness.probe.server import NO_TOKENIZER, Ask, ProbedServer, explore
from degarble.harness.probe.session import DEFAULT, OWN_IDS, ProbeOptions, Session
from degarble.harness.report.verdict import Verdict
from degarble.suites.campaigns.servers.probed_servers import healthy, session
from degarble.suites.commands.calls import call
from degarble.suites.probe.faults import FAULTS, ServerFault
from degarble.suites.probe.small_model import SmallConfig
from degarble.suites.probe.stand_in import Manner, ScoringEngine, opened, serving, texts
from degarble.suites.serve.talking_cases import write_speaker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from degarble.harness.inference.model import OpenModel
    from degarble.harness.probe.against import Against

TOKEN = "a-token-that-nobody-may-see"
SMALL = SmallConfig(3, width=32, arithmetic="exact")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenModel]:
    with opened(tmp_path_factory.mktemp("probe") / "model") as made:
        yield made


def fault(name: str) -> ServerFault:
    return next(each for each in FAULTS if each.name == name)


def quick(url: str, **limits: Any) -> ProbeResult:
    """Probe with few short prompts."""
    client = Client(url, None, RequestLimits(rate=1e6, **limits))
    return probe(client, ProbeOptions(texts(3)[:4], max_prompt_tokens=140, new_tokens=4))


def test_the_command_finds_a_planted_fault_and_writes_all(
    model: OpenModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "prompts").write_text("\n".join(texts(3)[:4]))
    out = tmp_path / "out"
    with serving(model, SMALL, fault("stops ignored").manner) as url:
        done = call(
            capsys, "probe", url, "--prompts", tmp_path / "prompts", "--report", out,
            "--token-file", tmp_path / "token", "--rate", "1000", "--max-prompt-tokens", "140",
            f"--json={tmp_path / 'probe.json'}",
        )  # fmt: skip
    assert done.status == 1, done.out
    document = json.loads((tmp_path / "probe.json").read_text())
    assert document["verdict"] == "DIFFERS"
    assert document["findings"][0]["check"] == "stops"
    assert document["traffic"]["requests"] < 400
    assert document["next"][-1].startswith("degarble check")
    assert json.loads((out / "request-1.json").read_text())["stop"]
    page = next(out.glob("*.html")).read_text()
    assert "A text does not end at its stop" in page
    assert "Does the server give the same in every way?" in page
    assert f"degarble probe {url} --prompts " in page
    assert "--max-prompt-tokens 140" in page
    written = [file.read_text() for file in out.iterdir()]
    assert TOKEN not in "".join([done.out, done.err, json.dumps(document), *written])


def by_ids(model: OpenModel, planted: Manner, **limits: Any) -> ProbeResult:
    """Probe a server without a tokenizer, with the default prompts."""
    manner = replace(planted, ids=True, tokenizer=False)
    with serving(model, SMALL, manner) as url:
        options = ProbeOptions(PASSAGES, max_prompt_tokens=140, new_tokens=4, prompts=DEFAULT)
        return probe(Client(url, None, RequestLimits(rate=1e6, **limits)), options)


def test_a_server_without_a_tokenizer_is_asked_ids_that_it_drew(model: OpenModel) -> None:
    result = by_ids(model, Manner(engine=ScoringEngine), requests=75)
    assert (result.options.prompts, result.findings) == (OWN_IDS, [])
    assert "75 requests" in result.ended
    assert result.server.lacks["chat"] == NO_TOKENIZER


def test_prompts_may_be_lists_of_ids(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("[1, 5, 9]\n" * 4)
    assert read_prompts(file) == ((1, 5, 9),) * 4
    file.write_text('"a text"\n' * 4)
    assert read_prompts(file) == ("a text",) * 4
    for line, told in (("[1, true]", "line 5"), ("[]", "line 5"), ("[7]", "texts and token ids")):
        file.write_text('"a text"\n' * 4 + line)
        with pytest.raises(InvalidArgument, match=told):
            read_prompts(file)


@pytest.mark.slow
def test_a_server_without_a_tokenizer_is_judged(model: OpenModel) -> None:
    result = by_ids(model, Manner(engine=ScoringEngine))
    assert (result.verdict, result.options.prompts) == (Verdict.AGREES, OWN_IDS), result.findings
    status = {check.name: check.status for check in result.checks}
    skipped = {name for name, value in status.items() if value is Status.SKIPPED}
    assert skipped == {"stops", "chat"}  # both need texts
    found = by_ids(model, fault("batch-dependent kernel").manner)
    assert found.verdict is not Verdict.AGREES


def _without_scores(body: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    for choice in found["choices"] if "prompt" in body else ():
        choice["logprobs"] = None
    return found


@pytest.mark.parametrize(
    ("manner", "why"),
    [
        (Manner(engine=ScoringEngine, refused=("prompt",)), "chats alone are served"),
        (
            Manner(engine=ScoringEngine, answer=_without_scores),
            "chats alone show log-probabilities",
        ),
    ],
    ids=["no completions", "completions without log-probabilities"],
)
def test_a_healthy_server_of_chats_raises_no_alarm(
    model: OpenModel, manner: Manner, why: str
) -> None:
    with serving(model, SMALL, manner) as url:
        result = quick(url)
    assert result.verdict is Verdict.AGREES, result.findings
    assert result.server.lacks["prompts as ids"] == why
    by_name = {check.name: check for check in result.checks}
    assert by_name["cache"].positions
    assert any("similar" in c.condition for c in by_name["cache"].comparisons)


def test_a_context_that_is_not_stated_is_no_failure(model: OpenModel) -> None:
    def short(_path: str, body: dict[str, Any]) -> dict[str, Any]:
        words = len(str(body.get("prompt", "")).split())
        return {**body, "prompt": None} if words > 100 else body

    with serving(model, SMALL, Manner(engine=ScoringEngine, request=short)) as url:
        result = quick(url)
    assert result.verdict is Verdict.AGREES, result.findings
    assert any("no prompt of about" in n for check in result.checks for n in check.notes)


def test_a_chat_that_ends_at_once_is_asked_with_another_text(model: OpenModel) -> None:
    asked: list[str] = []

    def ended(body: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
        if "messages" in body and len(asked) < 3:
            asked.append(body["messages"][0]["content"])
            found["choices"][0] |= {"message": {"content": ""}, "logprobs": {"content": []}}
        return found

    with serving(model, SMALL, Manner(engine=ScoringEngine, answer=ended)) as url:
        server = explore(Client(url, None, RequestLimits(rate=1e6)), None, texts(3)[:4])
    assert (len(asked), len(set(asked))) == (3, 2)  # the first is sent without scores too
    assert server.offers("chat log-probabilities")


def test_nothing_else_begins_as_long_prompts_do(model: OpenModel) -> None:
    """A cached prefix would move the borders at which they are cut."""
    options = ProbeOptions(texts(3), max_prompt_tokens=140, new_tokens=4)
    with serving(model, SMALL, Manner(engine=ScoringEngine)) as url:
        server = explore(Client(url, None, RequestLimits(rate=1e6)), None, options.texts)
        server.seen.clear()
        long_context(Session(server, options), ProbedCheck("long"))
    asked = [body["prompt"] for body, _ in server.seen if not body.get("echo")]
    begun = {" ".join(prompt.split()[:4]) for prompt in asked}
    assert len(begun) > 1
    assert begun.isdisjoint(" ".join(text.split()[:4]) for text in texts(3))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["window of a few tokens", "chat by another template"])
def test_a_fault_is_found_on_a_model_that_hides_it(model: OpenModel, name: str) -> None:
    """Of another alignment of cached prefixes, and with a chat that ends at once."""
    seed = 4003 + [each.name for each in FAULTS].index(name)
    result = session(model, SmallConfig(seed, experts=seed % 2 == 0), fault(name).manner)
    assert {finding.check for finding in result.findings} & set(fault(name).found_by)


def test_what_was_gathered_stays_when_the_limit_is_reached(model: OpenModel) -> None:
    with serving(model, SMALL, Manner(engine=ScoringEngine)) as url:
        result = quick(url, requests=45)
    assert result.verdict is Verdict.UNDECIDED
    assert "45 requests" in result.ended
    assert [check.name for check in result.checks[:10]] == [check.name for check in CHECKS]
    assert result.checks[9].reason == "not begun"
    assert "chat" in sentence_of(result).partition("Not judged: ")[2]
    assert result.checks[0].comparisons
    (cut,) = (check for check in result.checks if check.status is Status.CUT and check.requests)
    assert cut.comparisons, "what the check that was cut had gathered"
    assert f"Not finished: {cut.name}. Not judged: " in sentence_of(result)


def test_a_fault_counts_that_a_cut_check_had_seen(
    model: OpenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, sizes = ProbedServer.together, list[int]()

    def interrupted(self: ProbedServer, asks: Sequence[Ask]) -> Any:
        sizes.append(len(asks))
        if len(sizes) == 3:
            raise KeyboardInterrupt
        return together(self, asks)

    def flat_in_eight(_body: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
        """Give other scores to what is asked by eights, however the engine groups them."""
        for choice in found.get("choices", []) if sizes[-1:] == [8] else []:
            scores = choice["logprobs"]
            scores["token_logprobs"] = [value and value / 2 for value in scores["token_logprobs"]]
            scores["top_logprobs"] = [
                top and {token: value / 2 for token, value in top.items()}
                for top in scores["top_logprobs"]
            ]
        return found

    monkeypatch.setattr(ProbedServer, "together", interrupted)
    with serving(model, SMALL, Manner(engine=ScoringEngine, answer=flat_in_eight)) as url:
        result = quick(url)
    assert sizes == [3, 8, 16]
    (cut,) = (check for check in result.checks if check.reason == "interrupted")
    assert (cut.name, cut.status) == ("batch", Status.DIFFERS)
    assert result.verdict is Verdict.DIFFERS


def test_what_was_gathered_stays_after_ctrl_c(
    model: OpenModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask = Client.ask

    def interrupted(self: Client, *given: Any) -> Any:
        if self.traffic.requests == 45:
            raise KeyboardInterrupt
        return ask(self, *given)

    monkeypatch.setattr(Client, "ask", interrupted)
    (tmp_path / "prompts").write_text("\n".join(texts(3)[:4]))
    with serving(model, SMALL, Manner(engine=ScoringEngine)) as url:
        done = call(
            capsys, "probe", url, "--prompts", tmp_path / "prompts", "--report", tmp_path,
            "--rate", "1000", "--max-prompt-tokens", "140", f"--json={tmp_path / 'probe.json'}",
        )  # fmt: skip
    document = json.loads((tmp_path / "probe.json").read_text())
    assert (done.status, document["verdict"]) == (130, "UNDECIDED")
    assert document["ended"] == "it was interrupted"
    assert document["checks"][0]["compared"]
    assert list(tmp_path.glob("*.html"))


@pytest.mark.slow
@pytest.mark.parametrize("planted", FAULTS, ids=lambda planted: planted.name)
def test_planted_fault_is_found(model: OpenModel, planted: ServerFault) -> None:
    result = session(model, SmallConfig(FAULTS.index(planted)), planted.manner)
    assert result.verdict in (Verdict.DIFFERS, Verdict.UNSTABLE)
    assert {finding.check for finding in result.findings} & set(planted.found_by)
    assert result.server.client.traffic.requests <= 400


@pytest.mark.slow
@pytest.mark.parametrize("number", range(0, 72, 9))
def test_healthy_server_stays_silent(model: OpenModel, number: int) -> None:
    config, manner = next(islice(healthy(), number, None))
    result = session(model, config, manner)
    assert result.verdict is Verdict.AGREES, result.findings


@contextmanager
def two(model: OpenModel, one: SmallConfig, other: SmallConfig) -> Iterator[tuple[str, str]]:
    manner = Manner(engine=ScoringEngine)
    with serving(model, one, manner) as first, serving(model, other, manner) as second:
        yield first, second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "status"),
    [({}, 0), ({"arithmetic": "fp8"}, 1), ({"seed": 8}, 1)],
    ids=["the same", "other arithmetic", "another model"],
)
def test_two_servers(
    model: OpenModel, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    changed: dict[str, Any], status: int,
) -> None:  # fmt: skip
    (tmp_path / "prompts").write_text("\n".join(texts(3)))
    one = SmallConfig(3, arithmetic="exact")
    with two(model, one, replace(one, **changed)) as (first, second):
        done = call(
            capsys, "probe", first, "--against", second, "--prompts", tmp_path / "prompts",
            "--rate", "1000", "--max-prompt-tokens", "140", "--rounding", "bf16", "--json",
        )  # fmt: skip
    found = done.document["against"]
    assert done.status == status, done.document["findings"]
    assert found["texts"] == len(texts(3))
    # McNemar's p says nothing here: another arithmetic may be right about the same tokens.
    assert (found["distance"] > found["limit"]) == bool(changed)


@contextmanager
def beside(model: OpenModel, folder: Path) -> Iterator[list[Against]]:
    """Serve a checkpoint's own model, and compare two texts with a checkpoint at the end."""
    kept: list[Against] = []
    options = ProbeOptions(texts(3)[:2])
    with serving(model, SMALL, Manner(engine=ScoringEngine, logits=model.logits_model)) as url:
        server = explore(Client(url, None, RequestLimits(rate=1e6)), None, options.texts)
        yield kept
        with local_side(folder) as side:
            against(Session(server, options), side, lambda _step: None, kept.append)


@pytest.mark.parametrize(("layout", "agrees"), [("bf16", True), ("nvfp4-full", False)])
def test_a_server_beside_a_checkpoint(
    model: OpenModel, tmp_path: Path, layout: str, agrees: bool
) -> None:
    """What is served is computed here from the same files, or from a quantised copy."""
    with beside(model, write_speaker(tmp_path / "beside", layout=layout)) as kept:
        pass
    (found,) = kept
    judge_against(found, [], "bf16")
    assert (found.name, found.texts, found.result.limit) == ("beside", 2, limit_of("", [], "bf16"))
    assert found.result.largest is not None
    assert (found.result.status is Status.AGREES) == agrees, found.result


def test_texts_that_were_compared_stay_after_ctrl_c(
    model: OpenModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score, scored = LocalSide.score_text, list[str]()

    def interrupted(self: LocalSide, text: str, *, ids: bool) -> Any:
        scored.append(text)
        if len(scored) == 2:
            raise KeyboardInterrupt
        return score(self, text, ids=ids)

    monkeypatch.setattr(LocalSide, "score_text", interrupted)
    with pytest.raises(KeyboardInterrupt), beside(model, write_speaker(tmp_path / "b")) as kept:
        pass
    assert [found.texts for found in kept] == [1]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "status"), [("bf16", 0), ("nvfp4-full", 1)])
def test_the_command_compares_with_a_checkpoint(
    model: OpenModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str, status: int
) -> None:
    folder = write_speaker(tmp_path / "beside", layout=layout)
    (tmp_path / "prompts").write_text("\n".join(texts(3)[:4]))
    with serving(model, SMALL, Manner(engine=ScoringEngine, logits=model.logits_model)) as url:
        done = call(
            capsys, "probe", url, "--against", folder, "--prompts", tmp_path / "prompts", "--rate",
            "1000", "--max-prompt-tokens", "140", "--rounding", "bf16", "--json",
        )  # fmt: skip
    assert done.status == status, done.document["findings"]
    assert done.document["against"]["texts"] == 4
