from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import UnwritablePath
from degarble.harness.checkpoint.write.disk import free_bytes, require_space

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def thousand_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk of which root could write 4,000 bytes more than everybody else."""
    told = SimpleNamespace(f_bavail=10, f_bfree=50, f_frsize=100, f_bsize=4096)
    monkeypatch.setattr("degarble.harness.checkpoint.write.disk.os.statvfs", lambda _: told)


@pytest.mark.usefixtures("thousand_free")
def test_room_is_what_everybody_may_write(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) == 1000
    require_space(tmp_path, 1000)
    with pytest.raises(UnwritablePath, match=r"1000 bytes free'.*1001 bytes of room"):
        require_space(tmp_path, 1001)


def test_a_place_that_is_not_there_yet_has_its_parents_room(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "a" / "b") > 0
