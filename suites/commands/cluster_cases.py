"""A cluster that is played by the calling process, so that commands are shown without one."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from degarble.harness.checkpoint.write import workers

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


class PlayedCluster:
    """Does every task here, and notes its name."""

    description = "A cluster that is played."

    def __init__(self, asked: list[str | None]) -> None:
        self._asked = asked

    def run_each(
        self, work: Any, tasks: Any, name: Any, again: int = 0, /
    ) -> Iterator[tuple[Any, Any]]:
        del again
        for task in tasks:
            self._asked.append(name(task))
            yield task, work(task)


def played_cluster(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Play a cluster; the list takes in the address that was asked for, and every task."""
    asked: list[str | None] = []

    @contextmanager
    def joined(address: str | None, _cores: int) -> Iterator[PlayedCluster]:
        asked.append(address)
        yield PlayedCluster(asked)

    monkeypatch.setattr(workers, "ray_cluster", joined)
    return asked
