"""Archives of compiled kernels: carried whole, refused by name where anything is wrong."""

from __future__ import annotations

import json
import os
import stat
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.base.errors import UnreadableFile, UnwritablePath
from degarble.kernels.runtime import archive
from degarble.kernels.runtime.archive import export_cache, import_cache
from degarble.kernels.runtime.compiling import (
    ENTRY_FILES,
    cached_entries,
    digest_of_bytes,
    manifest_of,
    sources_at_import,
    store_entry,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VERSIONS = ("4.8.0 13.0", "cpython-312 x86_64")
ENTRIES = tuple(f"simt_{name}.launch_{name}.sm_90a.{number:024x}" for number, name in
                enumerate(("scale", "embed")))  # fmt: skip


@pytest.fixture(autouse=True)
def _versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "versions", lambda: VERSIONS)


def files_of(name: str, sources: str | None = None) -> dict[str, bytes]:
    told = {"request": None, "sources": sources or sources_at_import()}
    made = {file: f"{file} of {name}".encode() for file in ENTRY_FILES}
    return made | {"request.json": json.dumps(told).encode()}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    for name in ENTRIES:
        store_entry(folder / name, files_of(name))
    store_entry(folder / f"old.launch.sm_90a.{9:024x}", files_of("old", "other sources"))
    return folder


def test_what_is_exported_is_imported_elsewhere(cache: Path, tmp_path: Path) -> None:
    made = export_cache(cache, tmp_path / "out")
    assert made.kernels == 2, "kernels of other sources stay"
    assert export_cache(cache, tmp_path / "out").path == made.path, "equal kernels, equal name"
    other = tmp_path / "other"
    found = import_cache(made.path, other)
    assert (found.kernels, found.known) == (2, 0)
    assert dict(cached_entries(other)) == {name: files_of(name) for name in ENTRIES}
    assert stat.S_IMODE(other.stat().st_mode) == 0o700
    again = import_cache(made.path, other)
    assert (again.kernels, again.known) == (0, 2)
    (other / ENTRIES[0] / "kernel.o").write_bytes(b"damaged")
    assert import_cache(made.path, other).kernels == 1
    assert dict(cached_entries(other)) == {name: files_of(name) for name in ENTRIES}
    assert not [path for path in (tmp_path / "out").iterdir() if path != made.path]


def members(**more: Any) -> dict[str, bytes]:
    """Return what an archive holds; `more` changes its index."""
    digests = {name: digest_of_bytes(manifest_of(files_of(name))) for name in ENTRIES}
    index = {"schema": 1, "versions": list(VERSIONS), "entries": digests} | more
    made = {"index.json": json.dumps(index).encode()}
    for name in ENTRIES:
        made |= {f"{name}/{file}": text for file, text in files_of(name).items()}
    return made


def written(folder: Path, held: dict[str, bytes], kind: int = stat.S_IFREG) -> Path:
    """Write an archive with the digest of its index as name; the last member is of a kind."""
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"kernels-{digest_of_bytes(held.get('index.json', b''))[:32]}.zip"
    with zipfile.ZipFile(path, "w") as made:
        for number, (name, text) in enumerate(held.items()):
            info = zipfile.ZipInfo(name)
            last = number == len(held) - 1
            info.external_attr = ((kind if last else stat.S_IFREG) | 0o600) << 16
            made.writestr(info, text)
    path.chmod(0o600)
    return path


def replaced(name: str, text: bytes) -> Callable[[Path], Path]:
    return lambda folder: written(folder, members() | {name: text})


def renamed(folder: Path) -> Path:
    path = written(folder, members())
    return path.rename(folder / f"kernels-{'0' * 32}.zip")


def cut_short(folder: Path) -> Path:
    path = written(folder, members())
    path.write_bytes(path.read_bytes()[:-40])
    return path


def one_bit(folder: Path) -> Path:
    path = written(folder, members())
    text = bytearray(path.read_bytes())
    text[text.index(b"kernel.o of")] ^= 1  # the sum of the ZIP member does not fit
    path.write_bytes(text)
    return path


def writable_by_others(folder: Path) -> Path:
    path = written(folder, members())
    path.chmod(0o666)
    return path


def in_an_open_folder(folder: Path) -> Path:
    path = written(folder, members())
    folder.chmod(0o777)
    return path


def by_a_link(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    path = written(folder / "there", members())
    link = folder / path.name
    link.symlink_to(path)
    return link


def a_pipe(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    os.mkfifo(path := folder / f"kernels-{'1' * 32}.zip", 0o600)
    return path


def twice(folder: Path) -> Path:
    path = written(folder, members())
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as made:
        made.writestr(f"{ENTRIES[0]}/kernel.o", files_of(ENTRIES[0])["kernel.o"])
    return path


FIRST = f"{ENTRIES[0]}/kernel.o"
HOSTILE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "other code": (replaced(FIRST, b"other code"), rf"other bytes in {ENTRIES[0]}"),
    "one bit": (one_bit, "Bad CRC-32|other bytes"),
    "another name": (renamed, "the digest of its name"),
    "no digest in the name": (
        lambda folder: written(folder, members()).rename(folder / "kernels.zip"),
        "a name with its digest",
    ),
    "absolute path": (replaced("/etc/kernel.o", b"x"), "'/etc/kernel.o'"),
    "path above": (replaced("../x/kernel.o", b"x"), r"'\.\./x/kernel\.o'"),
    "a file more": (replaced(f"{ENTRIES[0]}/extra.so", b"x"), "exactly the files of its index"),
    "a file less": (
        lambda folder: written(folder, {n: t for n, t in members().items() if n != FIRST}),
        "exactly the files of its index",
    ),
    "a link": (
        lambda folder: written(folder, members(), stat.S_IFLNK), "a link or no file"
    ),
    "a file twice": (twice, "twice"),
    "other versions": (
        lambda folder: written(folder, members(versions=["4.9.0 13.1", VERSIONS[1]])),
        r"versions 4\.9\.0 13\.1.*expected schema 1, versions 4\.8\.0 13\.0",
    ),
    "other schema": (lambda folder: written(folder, members(schema=2)), "schema 2"),
    "no index": (lambda folder: written(folder, {"x": b""}), "no index.json"),
    "index of something else": (
        lambda folder: written(folder, {"index.json": b"[]"}), "index.json that is none"
    ),
    "names of other entries": (
        lambda folder: written(folder, members(entries={"..": ""})), "names of other entries"
    ),
    "cut short": (cut_short, "a ZIP archive of kernels"),
    "writable by others": (writable_by_others, "mode 666"),
    "in an open folder": (in_an_open_folder, "mode 777|anybody may write"),
    "by a link": (by_a_link, "symbolic links"),
    "a pipe": (a_pipe, "a regular file"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_archive_is_refused_by_name_and_nothing_is_written(
    what: str, tmp_path: Path
) -> None:
    make, said = HOSTILE[what]
    path, cache = make(tmp_path / "given"), tmp_path / "cache"
    with pytest.raises(UnreadableFile, match=f"(?s){said}") as raised:
        import_cache(path, cache)
    assert raised.value.exit_status == 2
    assert not cache.exists()


def test_more_or_larger_files_than_ours_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "given", members())
    monkeypatch.setattr(archive, "LARGEST_FILE", 10)
    with pytest.raises(UnreadableFile, match="at most 10"):
        import_cache(path, tmp_path / "cache")
    monkeypatch.setattr(archive, "MOST_FILES", 3)
    with pytest.raises(UnreadableFile, match="9 files"):
        import_cache(path, tmp_path / "cache")


def test_a_folder_that_cannot_be_written_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnwritablePath, match="folder of the kernel archive"):
        export_cache(cache, tmp_path / "file")
