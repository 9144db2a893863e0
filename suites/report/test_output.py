"""Numbers as text, progress, and files that are written whole or not at all."""

from __future__ import annotations

import errno
import math
import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from degarble.harness.base.errors import UnwritablePath
from degarble.harness.report.files import (
    is_stream,
    require_folder,
    usable_folder,
    whole_file,
    write_text,
)
from degarble.harness.report.number_text import number, share, span, visible
from degarble.harness.report.progress import Progress, ProgressState, duration, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "-0"),
        (1.0, "1.000"),
        (0.09062, "0.09062"),
        (0.000101, "0.0001010"),
        (0.00001, "1.000e-05"),
        (1234.5678, "1,235"),
        (999999.4, "999,999"),
        (1e6, "1.000e+06"),
        (-2.5, "-2.500"),
        (12345678, "12,345,678"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "nan"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


@given(st.floats(-1e300, 1e300, allow_subnormal=False))
def test_numbers_keep_four_digits(value: float) -> None:
    read = float(number(value).replace(",", ""))
    assert math.isclose(read, value, rel_tol=6e-4)


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "100.0 %"), (0.0, "0.0 %"), (0.5, "50.0 %"), (1 - 1e-6, "99.9999 %")],
)
def test_shares(value: float, text: str) -> None:
    assert share(value) == text


@given(st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_only_all_is_100_percent_and_only_none_is_0_percent(value: float) -> None:
    text = share(value)
    assert text not in ("100.0 %", "0.0 %")
    assert not text.startswith("100")


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([0, 1, 2, 3], "0 to 3 (all)"),
        ([2], "2"),
        ([1, 2], "1 to 2"),
        ([0, 3], "2 between 0 and 3"),
    ],
)
def test_spans(indices: list[int], text: str) -> None:
    assert span(indices, 4) == text


def test_what_has_no_look_of_its_own_is_written_as_an_escape() -> None:
    assert visible("a\x1bb\u202ec\ud800d\x00e\u200b") == (
        "a\\u001bb\\u202ec\\ud800d\\u0000e\\u200b"
    )
    assert visible("tab\tand\nline, ≠ and 数 stay") == "tab\tand\nline, ≠ and 数 stay"


@given(st.text(st.characters()))
def test_visible_text_can_be_sent_anywhere(text: str) -> None:
    shown = visible(text)
    assert all(c.isprintable() or c in "\n\t" or c.isspace() for c in shown)
    shown.encode("utf-8")
    assert visible(shown) == shown


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rate_and_time_left_follow_the_last_half_minute() -> None:
    clock = _Clock()
    progress = Progress("audit", 1000, clock=clock)
    for _ in range(100):  # a slow start: 1 a second
        clock.now += 1
        progress.advance(1)
    assert progress.pace.rate == pytest.approx(1)
    for _ in range(40):  # then 10 a second
        clock.now += 1
        progress.advance(10)
    pace = progress.pace
    assert pace.rate == pytest.approx(10)
    assert pace.left == pytest.approx(50)
    assert pace.share == 0.5


def test_earlier_work_counts_as_done_and_not_for_the_rate() -> None:
    clock = _Clock()
    progress = Progress("quantise", 1000, clock=clock)
    progress.skip(900)
    clock.now += 2
    progress.advance(10)
    assert progress.pace.done == 910
    assert progress.pace.rate == pytest.approx(5)


def test_work_that_is_known_late_has_a_rate_of_its_own() -> None:
    clock = _Clock()
    shown: list[str] = []
    progress = Progress("audit", 0, lambda pace: shown.append(pace.text()), clock)
    progress.step("structure")
    clock.now += 20
    progress.expect(100)
    clock.now += 2
    progress.advance(20)
    assert shown == [
        "audit  structure",
        "audit  0 %  0 B of 100 B  structure",
        "audit  20 %  20 B of 100 B  10 B/s  8 s left  structure",
    ]


def test_there_is_no_estimate_before_the_first_measurement() -> None:
    clock = _Clock()
    progress = Progress("audit", 1000, clock=clock)
    clock.now += 0.1
    progress.advance(500)
    assert progress.pace.rate is None
    assert progress.pace.text() == "audit  50 %  500 B of 1.00 kB"
    clock.now += 5
    assert progress.pace.left == pytest.approx(5.1)


def test_a_long_piece_has_a_rate_of_its_own() -> None:
    clock = _Clock()
    progress = Progress("audit", 1000, clock=clock)
    clock.now += 100
    progress.advance(100)
    assert progress.pace.rate == pytest.approx(1)


def test_no_work_is_done_work() -> None:
    assert Progress("audit", 0).pace.share == 1.0


def test_threads_lose_nothing() -> None:
    shown: list[ProgressState] = []
    progress = Progress("audit", 8000, shown.append)

    def advance() -> None:
        for _ in range(1000):
            progress.advance(1)

    threads = [threading.Thread(target=advance) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert progress.pace.done == 8000
    assert [pace.done for pace in shown] == list(range(1, 8001))


PACE = ProgressState("audit", 412_300_000_000, 881_200_000_000, 300, 1.31e9, "layers.17")


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (100, "audit  46 %  412 GB of 881 GB  1.31 GB/s  5 min 58 s left  layers.17"),
        (60, "audit  46 %  412 GB of 881 GB  1.31 GB/s  5 min 58 s left"),
        (40, "audit  46 %  5 min 58 s left"),
        (12, "audit  46 %"),
        (4, "46 %"),
        (0, ""),
    ],
)
def test_a_narrow_screen_keeps_what_matters(width: int, text: str) -> None:
    assert PACE.text(width) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9_996_000, "10.0 MB"), (99_960_000, "100 MB"),
     (999_600_000, "1.00 GB"), (881_000_000_000, "881 GB"), (5.5e12, "5.50 TB")],
)  # fmt: skip
def test_sizes(nbytes: float, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (3599, "59 min 59 s"),
     (7260, "2 h 01 min")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_text_is_written_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old", encoding="utf-8")
    write_text(target, "new ≠\n")
    assert target.read_bytes() == "new ≠\n".encode()
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    target = tmp_path / "a.txt"
    write_text(target, "old")
    monkeypatch.setattr("degarble.harness.report.files.os.fsync", full)
    with pytest.raises(UnwritablePath, match="No space left on device"):
        write_text(target, "new")
    assert target.read_text(encoding="utf-8") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_name_is_durable_before_a_text_counts_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[list[str]] = []
    genuine = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            assert os.fstat(descriptor).st_ino == tmp_path.stat().st_ino
            synced.append([path.name for path in tmp_path.iterdir()])
        genuine(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_text(tmp_path / "a.txt", "new")
    assert synced == [["a.txt"]]


def test_a_folder_without_read_permission_takes_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = os.open

    def hidden(path: Path, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECTORY:
            raise PermissionError(errno.EACCES, "Permission denied")
        return genuine(path, flags, *rest)

    monkeypatch.setattr("degarble.harness.base.files.os.open", hidden)
    write_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "new"


def test_a_file_of_a_library_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "a.bin"
    with whole_file(target) as temporary:
        temporary.write_bytes(b"old")
        assert target.exists() is False
    with pytest.raises(UnwritablePath), whole_file(target) as temporary:
        temporary.with_name("none").read_bytes()
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


def test_a_pipe_takes_the_text_and_stays_a_pipe(tmp_path: Path) -> None:
    """Renaming a file over /dev/null would break the machine of who runs as root."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "new\n")
    assert os.read(reader, 100) == b"new\n"
    os.close(reader)
    assert is_stream(pipe)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_full_device_is_refused_and_stays_a_device() -> None:
    full = Path("/dev/full")
    if not is_stream(full):
        pytest.skip("a system without /dev/full")
    with pytest.raises(UnwritablePath, match="No space left on device"):
        write_text(full, "x")
    assert is_stream(full)


def test_what_a_link_leads_to_is_replaced_and_not_the_link(tmp_path: Path) -> None:
    target, link = tmp_path / "a.txt", tmp_path / "link"
    target.write_text("old", encoding="utf-8")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text(encoding="utf-8") == "new"


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnwritablePath):
        write_text(tmp_path / "none" / "a.txt", "x")


def test_a_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    folder = usable_folder("--out", tmp_path / "a" / "b")
    assert folder.is_dir()
    assert list(folder.iterdir()) == []


def test_a_folder_that_is_only_probed_is_not_created(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    require_folder("--report", tmp_path / "there" / "b" / "c")
    assert list((tmp_path / "there").iterdir()) == []
    require_folder("--report", tmp_path / "there")
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(UnwritablePath, match="--report"):
        require_folder("--report", tmp_path / "file" / "c")


def test_a_file_in_the_way_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x", encoding="utf-8")
    with pytest.raises(UnwritablePath, match=r"--out = .*File exists"):
        usable_folder("--out", tmp_path / "a")


def test_a_place_that_takes_no_files_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.open", read_only)
    with pytest.raises(UnwritablePath, match=r"--out = .*Read-only file system"):
        usable_folder("--out", tmp_path)
