"""Lines of progress from within a test: on the terminal at once, and in a file that stays."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime
from threading import current_thread, main_thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def tell(config: pytest.Config, log: Path, text: str) -> None:
    """Print a line although output of tests is captured, and append it to a file.

    Capturing belongs to the main thread: what another thread tells is in the file alone.
    """
    with log.open("a", encoding="utf-8") as file:
        file.write(f"{datetime.now(UTC):%H:%M:%S} {text.strip()}\n")
    plugins = config.pluginmanager
    terminal, capture = map(plugins.get_plugin, ("terminalreporter", "capturemanager"))
    if terminal is None or current_thread() is not main_thread():
        return
    with capture.global_and_fixture_disabled() if capture is not None else nullcontext():
        terminal.write_line(text)
