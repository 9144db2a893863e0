from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.serve import smoke as smoking
from degarble.harness.serve.smoke import Server, SmokeCheck, alike, garbage, main, smoke
from degarble.suites.serve import proven_cases as cases
from degarble.suites.serve.serving_cases import running
from degarble.suites.serve.talking_cases import write_speaker

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.suites.serve.serving_cases import Running


class InProcess(Server):
    """A server without a socket."""

    def __init__(self, client: Any) -> None:
        super().__init__("http://127.0.0.1")
        self._client = client

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        found = self._client.get(path) if body is None else self._client.post(path, json=body)
        return found.status_code, found.json()


def checks(server: Running, known: dict[str, Any]) -> list[SmokeCheck]:
    return list(smoke(InProcess(server.client), known))


def test_a_healthy_server_is_coherent_and_another_model_is_not(tmp_path: Path) -> None:
    known = cases.answers(cases.TINY, tmp_path / "answers.json")
    assert smoking.read_answers(tmp_path / "answers.json")["answers"] == known["answers"]
    with running(cases.TINY) as server:
        found = checks(server, known)
    assert {each.name: each.holds for each in found} == {
        "models": True, "known answer": True, "text": True, "echo": True, "likelihood": True,
        "chat": None,
    }  # fmt: skip
    spoilt = {"answers": [each | {"mean": 0.0, "answer": "zebra"} for each in known["answers"]]}
    with running(cases.TINY) as server:
        found = checks(server, spoilt)
    wrong = [each.name for each in found if each.holds is False]
    assert wrong == ["known answer", "known answer", "likelihood", "likelihood"]
    assert found[1].line().startswith("FAILED    known answer: 0% of 'zebra'")


def test_a_server_that_refuses_is_told(tmp_path: Path) -> None:
    known = {"answers": [{"prompt": "no such words", "answer": "a", "mean": -1.0}]}
    with running(write_speaker(tmp_path / "model")) as server:
        found = checks(server, known)
    assert found[1].name == "known answer"
    assert found[1].holds is False
    assert found[1].told.startswith("400: ")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no text"),
        ("   \n", "no text"),
        ("a tree \ufffd\ufffd stands", "2 of 16 characters are no text"),
        ("a tree \x00\x07 stands", "2 of 16 characters are no text"),
        ("the the the the the the tree the", "'the' is 7 of 8 words"),
        ("one two three four five " * 40, "it repeats itself"),
        ("The old fox sees a tree, and anna paints it blue.", ""),
        ("Ein Fuchs saß am Fluss. 狐は木を見る。", ""),
    ],
)
def test_garbage_is_seen_by_its_form(text: str, told: str) -> None:
    found = garbage(text)
    assert found.startswith(told) if told else not found


def test_answers_are_alike_from_their_beginning() -> None:
    assert alike(" blue . yes", "blue . yes ") == 1
    assert alike("blue . no", "blue . yes") == 0.7
    assert alike("red", "blue") == 0
    assert alike("", "") == 1


def test_addresses_and_files_that_are_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.json").write_text("{}")
    known = tmp_path / "answers.json"
    known.write_text('{"answers": [{"prompt": "a", "answer": "b", "mean": -1}]}')
    for url, file, told in (
        ("ftp://x", known, "URL = 'ftp://x'"),
        ("http://127.0.0.1:9", known, "a server that answers"),
        ("http://127.0.0.1:9", tmp_path / "empty.json", "--answers"),
    ):
        assert main([url, "--answers", str(file)]) == 2
        assert told in capsys.readouterr().err
