"""Cached code is read and written only in folders that no other user can write."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numba
import pytest

from degarble.harness.base.compiled_loops import compiled
from degarble.harness.base.errors import UnreadableFile
from degarble.harness.base.files import make_private, read_private
from degarble.harness.engine.compare.loops import loops_of
from degarble.harness.formats.number_formats import BF16
from degarble.suites.house.repository import modules, shown

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


# --------------------------------------------------------------------------------------------------
# Cached code is read from folders that no other user can write; others are refused by name.

SOMEBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache with one entry of one file, under a folder of its own."""
    folder = tmp_path / "above" / "kernels"
    make_private(folder)
    (folder / "entry").mkdir(mode=0o700)
    (folder / "entry" / "code").write_bytes(b"code")
    return folder


def read(folder: Path) -> bytes:
    files = read_private(folder, "entry", ("code",))
    assert files is not None
    return files["code"]


def given_away(name: str) -> Callable[[Path], None]:
    return lambda folder: os.chown(folder / name, SOMEBODY, SOMEBODY)


def opened_up(name: str, mode: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).chmod(mode)


def linked_elsewhere(folder: Path) -> None:
    (folder / "entry").rename(folder.parent / "moved")
    (folder / "entry").symlink_to(folder.parent / "moved")


def file_linked(folder: Path) -> None:
    (folder / "entry" / "code").rename(folder.parent / "moved")
    (folder / "entry" / "code").symlink_to(folder.parent / "moved")


def a_pipe(folder: Path) -> None:
    (folder / "entry" / "code").unlink()
    os.mkfifo(folder / "entry" / "code")


def readable_entry_of_shared_files(folder: Path) -> None:
    (folder / "entry").chmod(0o755)
    (folder / "entry" / "code").chmod(0o664)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(given_away("."), marks=as_root, id="folder of another user"),
        pytest.param(given_away("entry"), marks=as_root, id="entry of another user"),
        pytest.param(given_away("entry/code"), marks=as_root, id="file of another user"),
        pytest.param(opened_up(".", 0o770), id="group may write"),
        pytest.param(opened_up(".", 0o1777), id="anybody may write, sticky"),
        pytest.param(opened_up("entry", 0o757), id="anybody may write an entry"),
        pytest.param(opened_up("..", 0o777), id="anybody may write above"),
        readable_entry_of_shared_files,
        linked_elsewhere,
        file_linked,
        a_pipe,
    ],
)
def test_what_others_could_have_written_is_refused(
    change: Callable[[Path], None], folder: Path
) -> None:
    assert read(folder) == b"code"
    change(folder)
    with pytest.raises(UnreadableFile, match=r"cache of compiled kernels .*DEGARBLE_KERNEL_CACHE"):
        read(folder)


@pytest.mark.parametrize(
    "change",
    [
        opened_up("..", 0o1777),
        opened_up(".", 0o755),
        opened_up("entry/code", 0o664),  # by a umask of 002, in an entry that is closed
    ],
)
def test_what_only_its_owner_can_write_is_read(
    change: Callable[[Path], None], folder: Path
) -> None:
    change(folder)
    assert read(folder) == b"code"


def test_a_link_to_a_private_folder_is_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert read(tmp_path / "link") == b"code"


def test_a_folder_that_is_made_is_the_callers_alone(folder: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert read_private(folder, "other", ("code",)) is None
    assert read_private(folder, "entry", ("code", "more")) is None
    assert read_private(folder / "none", "entry", ("code",)) is None


# --------------------------------------------------------------------------------------------------
# Compiled loops come from a cache that no other user can write, or are compiled again.


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that NUMBA_CACHE_DIR names."""
    folder = tmp_path / "named"
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder))
    return folder


def loop(x: Any) -> Any:
    return x + 1


def test_a_loop_is_cached_for_the_caller_alone(named: Path) -> None:
    made: Any = compiled(loop)
    assert made(1) == 2
    assert vars(numba.config)["CACHE_DIR"] == str(named)
    assert stat.S_IMODE((named / "degarble").stat().st_mode) == 0o700
    assert {path.suffix for path in named.rglob("*loop*.*")} == {".nbi", ".nbc"}
    again: Any = compiled(loop)
    assert again(1) == 2
    assert sum(again.stats.cache_hits.values()) == 1


def an_entry_by_a_usual_umask(folder: Path) -> None:
    folder.chmod(0o700)
    (folder / "entry" / "code").chmod(0o664)


@pytest.fixture
def cached(named: Path) -> Path:
    """A cache with a file in it, readable by everybody."""
    folder = named / "degarble"
    (folder / "entry").mkdir(parents=True)
    (folder / "entry" / "code").write_bytes(b"code")
    for path in (folder / "entry" / "code", folder / "entry", folder):
        path.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(given_away("."), marks=as_root, id="folder of another user"),
        pytest.param(given_away("entry"), marks=as_root, id="entry of another user"),
        pytest.param(given_away("entry/code"), marks=as_root, id="file of another user"),
        pytest.param(opened_up(".", 0o770), id="group may write"),
        pytest.param(opened_up("entry", 0o757), id="anybody may write an entry"),
        pytest.param(opened_up("entry/code", 0o666), id="anybody may write a file"),
        pytest.param(opened_up("..", 0o777), id="anybody may write above"),
        linked_elsewhere,
    ],
)
def test_a_cache_that_others_could_have_written_is_refused(
    change: Callable[[Path], None], cached: Path
) -> None:
    change(cached)
    with pytest.raises(UnreadableFile, match=r"cache of compiled loops .*NUMBA_CACHE_DIR"):
        loops_of.__wrapped__(BF16)


@pytest.mark.parametrize("change", [lambda _folder: None, an_entry_by_a_usual_umask])
def test_a_cache_that_only_its_owner_can_write_is_used(
    change: Callable[[Path], None], cached: Path
) -> None:
    change(cached)
    made: Any = compiled(loop)
    assert made.stats.cache_path.startswith(str(cached))


LOOPS = """
from typing import NamedTuple
from degarble.harness.base.compiled_loops import compiled

class {name}(NamedTuple):
    low: int
    high: int

@compiled
def total(pair):
    return pair.low + pair.high

def run():
    return total({name}(1, 2)), sum(total.stats.cache_hits.values())
"""


def test_an_index_that_names_a_class_of_an_older_source_is_not_read(tmp_path: Path) -> None:
    module = tmp_path / "loops.py"
    environment = dict(os.environ, NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    said = []
    for name in ("Tally", "Tally", "Totals"):
        text = LOOPS.format(name=name)
        if not module.exists() or module.read_text() != text:
            module.write_text(text)
        done = subprocess.run(
            [sys.executable, "-c", "import loops; print(*loops.run())"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        said.append(done.stdout.strip() or done.stderr)
    assert said == ["3 0", "3 1", "3 0"]


def test_without_a_place_every_process_compiles_anew(named: Path) -> None:
    named.write_text("a file")
    made: Any = compiled(loop)
    assert made.stats.cache_path is None
    assert made(1) == 2


def test_every_loop_is_cached_this_way() -> None:
    direct = [shown(path) for path in modules() if "numba.njit" in path.read_text()]
    assert direct == ["harness/base/compiled_loops.py", "suites/base/test_compiled_loops.py"]


def test_a_function_that_numba_cannot_cache_is_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []

    def njit(*, nogil: bool, cache: bool = False) -> Callable[[object], object]:
        assert nogil
        asked.append(cache)

        def compile_it(function: object) -> object:
            if cache:
                message = "cannot cache function: no locator available"
                raise RuntimeError(message)
            return function

        return compile_it

    monkeypatch.setattr(numba, "njit", njit)
    assert compiled(loop) is loop
    assert asked == [True, False]
