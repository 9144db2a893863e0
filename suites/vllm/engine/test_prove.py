"""The proof starts the requested servers, judges starts and refusals, and reports what held."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from degarble.harness.base.errors import UnknownName
from degarble.harness.vllm.engine import prove, server
from degarble.harness.vllm.engine.server import ServerCase
from degarble.harness.vllm.engine.steps import STEPS
from degarble.suites.hang_guard import HANG_SECONDS
from degarble.suites.vllm.engine import stand_in

if TYPE_CHECKING:
    from pathlib import Path

STAND_IN = [sys.executable, "-m", "degarble.suites.vllm.engine.stand_in"]
REFUSES = "import sys; print('degarble.harness.base.errors.LayoutMismatch: it lacks'); sys.exit(1)"


class Served(ServerCase):
    """A server that stands in."""

    def line(self, checkpoint: Path, port: int, told: Path) -> list[str]:
        del checkpoint, told
        return [*STAND_IN, str(port)]


class Ended(ServerCase):
    """One that refuses to start."""

    def line(self, checkpoint: Path, port: int, told: Path) -> list[str]:
        del checkpoint, port, told
        return [sys.executable, "-c", REFUSES]


class Hangs(ServerCase):
    """One that neither answers nor ends."""

    def line(self, checkpoint: Path, port: int, told: Path) -> list[str]:
        del checkpoint, port, told
        return [sys.executable, "-c", "import time; time.sleep(86_400)"]


def free_ports(count: int) -> int:
    """Return the first of neighbouring ports that nobody listens on, other than for each worker.

    Other cases of this module may run at the same time, so a fixed port may be theirs.
    """
    for first in range(20_000 + os.getpid() % 1000 * 10, 32_000, 10):
        with ExitStack() as bound:
            try:
                for port in range(first, first + count):
                    bound.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    pytest.fail("no neighbouring ports are free on 127.0.0.1")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> prove.ProofPaths:
    monkeypatch.setattr(prove, "FIRST_PORT", free_ports(5))
    (tmp_path / "in" / "small").mkdir(parents=True)
    text = json.dumps(asdict(stand_in.answers()))
    (tmp_path / "in" / "small.json").write_text(text, encoding="utf-8")
    return prove.ProofPaths(tmp_path / "in", tmp_path / "out", HANG_SECONDS)


def test_servers_are_queried_in_parallel(place: prove.ProofPaths) -> None:
    found = prove.prove(place, [
        Served("one", "small", ("parts", "questions", "texts")), Ended("lacking", "small",
        refused="it lacks"), Ended("other", "small", refused="another word"),
        Ended("ended", "small", ("parts",)), Served("up", "small", refused="it lacks"),
    ])  # fmt: skip
    assert [outcome.passed for outcome in found["one"]] == [True] * 4
    starts = {name: found[name][0][1:] for name in ("lacking", "other", "ended", "up")}
    ended = "never answered: degarble.harness.base.errors.LayoutMismatch: it lacks"
    assert starts == {
        "lacking": (True, "LayoutMismatch: it lacks"), "other": (False, "not said"),
        "ended": (False, ended), "up": (False, "it answered"),
    }  # fmt: skip
    assert json.loads((place.out / "one" / "texts.json").read_text())[0] == stand_in.following(
        [0, 1, 2], 8
    )


@pytest.mark.parametrize(
    ("log", "passed", "told"),
    [
        ("Capturing CUDA graphs (decode, FULL): 1\nGraph capturing finished", True, "decode, FULL"),
        ("Capturing CUDA graphs (decode, FULL): 1", False, "decode, FULL"),
        ("Graph capturing finished", False, "none"),
    ],
)
def test_recorded_graphs_are_read_from_the_log(log: str, passed: bool, told: str) -> None:
    assert prove.graphs(log)[1:] == (passed, f"recorded: {told}")


def test_a_tensor_is_left_out_of_a_copy(tmp_path: Path) -> None:
    made = tmp_path / "ck"
    made.mkdir()
    tensors = {"a": torch.ones(2), "b": torch.zeros(1)}
    save_file(tensors, made / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (made / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    copy = prove.lacking(made, tmp_path / "copy", "a")
    assert list(load_file(next(copy.glob("*.safetensors")))) == ["b"]
    assert list(json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"]) == [
        "b"
    ]
    assert len(load_file(next(made.glob("*.safetensors")))) == 2


def test_servers_are_chosen_by_name_and_by_gpus() -> None:
    assert {server_case.ranks for server_case in prove.chosen((), 1)} == {1}
    assert {server_case.ranks for server_case in prove.chosen((), 2)} == {1, 2}
    assert [server_case.name for server_case in prove.chosen(("bf16", "full", "bf16"), 1)] == [
        "bf16",
        "full",
    ]
    with pytest.raises(UnknownName, match="fulll"):
        prove.chosen(("fulll",), 1)
    for case in prove.SERVERS:
        assert set(case.steps) <= set(STEPS)
        assert bool(case.steps) != bool(case.refused)


def test_status_says_whether_all_held(
    place: prove.ProofPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Served("right", "small", ("parts",))
    wrong = replace(right, name="wrong", steps=("capture",))
    monkeypatch.setattr(prove, "SERVERS", (right, wrong))
    line = [str(place.prepared), str(place.out), "--only", "right"]
    assert prove.main(line) == 2  # no vLLM here, or no GPU
    assert "REFUSED" in capsys.readouterr().err
    assert not place.out.exists()
    monkeypatch.setattr(prove, "require_engine", lambda _: "0.26.0")
    assert prove.main(line) == 0
    assert "passed  parts: 2 parts, 1 by degarble" in capsys.readouterr().out
    assert prove.main(line) == 2  # that folder is there now
    line[1] += "-again"
    assert prove.main([*line, "--only", "wrong"]) == 1
    told = json.loads((place.out.parent / "out-again" / "proof.json").read_text())
    assert told["servers"]["wrong"][1]["passed"] is False


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--gpus", "0"], "--gpus = 0"),
        (["--seconds", "nan"], "--seconds = nan"),
        (["--only", "nobody"], "server = 'nobody'"),
        (["--only", "elsewhere"], "a folder with other"),
        (["--only", "damaged"], "answers that prepare wrote"),
        (["--only", "one"], "port = "),
    ],
)
def test_what_would_break_off_later_is_refused_before_anything_is_written(
    place: prove.ProofPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    options: list[str], told: str,
) -> None:  # fmt: skip
    (place.prepared / "broken").mkdir()
    (place.prepared / "broken.json").write_text('{"texts": [{}]}', encoding="utf-8")
    servers = [Served("one", "small"), Served("elsewhere", "other"), Served("damaged", "broken")]
    monkeypatch.setattr(prove, "SERVERS", servers)
    monkeypatch.setattr(prove, "require_engine", lambda _: "0.26.0")
    with stand_in.Server(prove.FIRST_PORT):  # somebody else's
        assert prove.main([str(place.prepared), str(place.out), *options]) == 2
    assert told in capsys.readouterr().err
    assert not place.out.exists()


def test_a_place_that_cannot_be_written_is_refused(
    place: prove.ProofPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prove, "SERVERS", [Served("one", "small")])
    monkeypatch.setattr(prove, "require_engine", lambda _: "0.26.0")
    assert prove.main([str(place.prepared), str(place.prepared / "small.json" / "out")]) == 2
    assert "OUT" in capsys.readouterr().err


def test_a_start_that_neither_answers_nor_ends_is_reported(
    place: prove.ProofPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prove, "END_SECONDS", 0.1)
    found = prove.prove(replace(place, seconds=0.1), [Hangs("one", "small", refused="a word")])
    assert found["one"][0][1:] == (False, "it neither answered nor ended")


def test_an_interrupted_proof_ends_its_servers(place: prove.ProofPaths) -> None:
    class Interrupts(ServerCase):
        def line(self, checkpoint: Path, port: int, told: Path) -> list[str]:
            del checkpoint, port, told
            while not server._OPEN:
                time.sleep(0.01)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # the start that hangs is not waited for
        prove.prove(place, [Interrupts("stop", "small"), Hangs("one", "small", ("parts",))])
    assert not server._OPEN
