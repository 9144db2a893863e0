"""Type command lines of the documents into a terminal, with a fresh clone of the repository."""

from __future__ import annotations

import os
import pty
import re
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from degarble.suites.hang_guard import HANG_SECONDS, until
from degarble.suites.house.repository import ROOT

if TYPE_CHECKING:
    from pathlib import Path

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
_READ = 1 << 16


@dataclass(frozen=True)
class Typed:
    """What a command line left on the screen, and what it cost."""

    line: str
    status: int
    screen: str  # without colours and repainting
    seconds: float  # of processor time, children included


class UserTerminal:
    """A folder to work in, and the commands of a clone on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        clone, programs = folder / "clone", folder / "bin"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        programs.mkdir()
        # Trap: a link to the interpreter of a virtual environment does not find its packages.
        for name, words in (("python", ""), ("degarble", " -m degarble.harness.cli.main")):
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{words} "$@"\n')
            (programs / name).chmod(0o755)
        self._environment = os.environ | {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(clone / ".types"),
            "TERM": "xterm-256color",
        }

    def type(self, line: str) -> Typed:
        """Run a command line to its end."""
        before = _spent()
        process, screen = self._started(line)
        shown = []
        while True:
            try:
                part = os.read(screen, _READ)
            except OSError:  # Linux: the last process has closed the terminal
                break
            if not part:
                break
            shown.append(part)
        os.close(screen)
        status = process.wait(HANG_SECONDS)
        text = b"".join(shown).decode("utf-8", "replace")
        return Typed(line, status, _CONTROL.sub("", text), _spent() - before)

    def serve(self, line: str, port: int) -> Served:
        """Start a server in a terminal of its own, and wait until it answers."""
        return Served(self, line, port)

    def _started(self, line: str) -> tuple[subprocess.Popen[bytes], int]:
        screen, theirs = pty.openpty()
        process = subprocess.Popen(
            ["bash", "-c", line], stdin=theirs, stdout=theirs, stderr=theirs,
            cwd=self.folder, env=self._environment, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        return process, screen


class Served:
    """A server that runs until the block ends, when Ctrl-C is typed."""

    def __init__(self, terminal: UserTerminal, line: str, port: int) -> None:
        self._terminal, self._line, self._port = terminal, line, port

    def __enter__(self) -> Self:
        self._process, self._screen = self._terminal._started(self._line)
        until(lambda: self._process.poll() is not None or self._answers())
        assert self._process.poll() is None, self.screen()
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGINT)
        self.status = self._process.wait(HANG_SECONDS)
        os.close(self._screen)

    def screen(self) -> str:
        """Return what the server has printed since the last call."""
        return _CONTROL.sub("", os.read(self._screen, _READ).decode("utf-8", "replace"))

    def _answers(self) -> bool:
        import http.client  # noqa: PLC0415  only for a server

        try:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False


def _spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
