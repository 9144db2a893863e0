"""Type command lines of the documents into a terminal, with a fresh clone of the repository."""

from __future__ import annotations

import http.client
import os
import pty
import re
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass
from threading import Thread
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
        clone, self._programs = folder / "clone", folder / "bin"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        self._programs.mkdir()
        # Trap: a link to the interpreter of a virtual environment does not find its packages.
        self.program("python", f'"{sys.executable}"')
        self.program("degarble", f'"{sys.executable}" -m degarble.harness.cli.main')
        self.variables = os.environ | {
            "PATH": f"{self._programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(clone / ".types"),
            "TERM": "xterm-256color",
        }

    def type(self, line: str) -> Typed:
        """Run a command line to its end."""
        before = _spent()
        process, screen = self._started(line)
        text = _read(screen)
        status = process.wait(HANG_SECONDS)
        return Typed(line, status, text, _spent() - before)

    def program(self, name: str, line: str) -> None:
        """Put a program on PATH that runs `line` with the words that follow its name."""
        file = self._programs / name
        file.write_text(f'#!/bin/sh\nexec {line} "$@"\n')
        file.chmod(0o755)

    def serve(self, line: str, port: int) -> Served:
        """Start a server in a terminal of its own, and wait until it answers."""
        return Served(self, line, port)

    def _started(self, line: str) -> tuple[subprocess.Popen[bytes], int]:
        screen, theirs = pty.openpty()
        process = subprocess.Popen(
            ["bash", "-c", line], stdin=theirs, stdout=theirs, stderr=theirs,
            cwd=self.folder, env=self.variables, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        return process, screen


class Served:
    """A server that runs until the block ends, when Ctrl-C is typed."""

    def __init__(self, terminal: UserTerminal, line: str, port: int) -> None:
        self._terminal, self._line, self._port = terminal, line, port
        self.screen, self.seconds = "", 0.0  # printed, processor time: once the block has ended

    def __enter__(self) -> Self:
        self._process, screen = self._terminal._started(self._line)
        # Trap: a server whose terminal nobody reads stops as soon as the terminal's memory is full.
        self._reader = Thread(target=self._keep, args=(screen,), daemon=True)
        self._reader.start()
        until(lambda: self._process.poll() is not None or self._answers())
        if self._process.poll() is not None:
            self._reader.join(HANG_SECONDS)
            raise AssertionError(self.screen)
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGINT)
        before = _spent()
        self.status = self._process.wait(HANG_SECONDS)
        self.seconds = _spent() - before
        self._reader.join(HANG_SECONDS)

    def _keep(self, screen: int) -> None:
        self.screen = _read(screen)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


def _read(screen: int) -> str:
    """Return what is printed until the last process closes the terminal."""
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
    return _CONTROL.sub("", b"".join(shown).decode("utf-8", "replace"))


def _spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
