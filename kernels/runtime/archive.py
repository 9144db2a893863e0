"""Carry the cache of compiled kernels to another machine as one archive.

An archive is a ZIP file with an index: versions, and the digest of every entry's manifest, which
has the digests of the entry's files. Its name is the digest of the index, so a changed byte makes
another name. Code in an archive is run by whoever imports it: a digest says that it is whole, not
that it is harmless. So the file and its folder are held to the cache's own rule: owned by the
caller or root, writable by nobody else.

Nothing is written before the whole archive is verified, and every entry is verified again as it is
written.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zipfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from degarble.harness.base.errors import UnreadableFile, UnwritablePath, printable
from degarble.harness.base.files import CachedCode, make_private, opened_private_file, sync_folder
from degarble.kernels.runtime.compiling import (
    ENTRY_FILES,
    REQUEST,
    cached_entries,
    digest_of_bytes,
    manifest_of,
    sources_at_import,
    store_entry,
    versions,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

SCHEMA = 1
INDEX = "index.json"
CODE_OF_ARCHIVES = CachedCode("archived kernels", "Copy the archive into a folder of your own.")
LARGEST_FILE = 64 << 20  # bytes of one file; ours have below 4 MB
LARGEST_ARCHIVE = 4 << 30  # bytes of all files
MOST_FILES = 40_000
_NAME = re.compile(r"kernels-([0-9a-f]{32})\.zip")
_ENTRY = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*\.[0-9a-f]{24}")
_OWN_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_DATE = (1980, 1, 1, 0, 0, 0)  # equal entries make equal archives
# What zipfile raises for damage, for encryption and for methods that it lacks.
_UNREADABLE = (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, zlib.error)
_REMEDY = "Remove it; kernels are compiled anew without it, or exported on a machine like this one."


@dataclass(frozen=True)
class ArchivedKernels:
    """What was exported or imported; `known` were in the cache already."""

    path: Path
    kernels: int
    known: int = 0


def export_cache(cache: Path, folder: Path) -> ArchivedKernels:
    """Write the kernels of these sources and versions to an archive in `folder`; return it."""
    sources = sources_at_import()
    chosen = {
        name: files
        for name, files in cached_entries(cache)
        if json.loads(files[REQUEST]).get("sources") == sources
    }
    index = _index({name: digest_of_bytes(manifest_of(files)) for name, files in chosen.items()})
    path = folder / f"kernels-{digest_of_bytes(index)[:32]}.zip"
    try:
        make_private(folder)
        draft = folder / f".{path.name}.{os.getpid()}"
        with (
            os.fdopen(os.open(draft, _OWN_FILE, 0o600), "wb") as out,
            zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        ):
            _write(archive, INDEX, index)
            for name, files in chosen.items():
                for file, text in files.items():
                    _write(archive, f"{name}/{file}", text)
        draft.rename(path)
        sync_folder(folder)
    except OSError as error:
        raise UnwritablePath(
            "folder of the kernel archive", str(folder), "a folder that can be written",
            f"Name another one: {error.strerror}.",
        ) from error  # fmt: skip
    return ArchivedKernels(path, len(chosen))


def import_cache(path: Path, cache: Path) -> ArchivedKernels:
    """Verify an archive and add its kernels to a cache; refuse it whole if anything is wrong."""
    with (
        opened_private_file(path, CODE_OF_ARCHIVES) as descriptor,
        os.fdopen(os.dup(descriptor), "rb") as file,
    ):
        try:
            with zipfile.ZipFile(file) as archive:
                return _imported(archive, path, cache)
        except _UNREADABLE as error:
            _refuse(path, str(error) or type(error).__name__, "a ZIP archive of kernels")


def _imported(archive: zipfile.ZipFile, path: Path, cache: Path) -> ArchivedKernels:
    entries = _require_index(archive, path)
    for name in entries:
        _files(archive, path, name, entries[name])
    known = {name for name, _ in cached_entries(cache)} & entries.keys()
    for name in sorted(entries.keys() - known):
        store_entry(cache / name, _files(archive, path, name, entries[name]))
    return ArchivedKernels(path, len(entries) - len(known), len(known))


def _index(entries: Mapping[str, str]) -> bytes:
    document = {"schema": SCHEMA, "versions": list(versions()), "entries": dict(entries)}
    return json.dumps(document, sort_keys=True, indent=1).encode()


def _write(archive: zipfile.ZipFile, name: str, text: bytes) -> None:
    info = zipfile.ZipInfo(name, _DATE)
    info.external_attr = (stat.S_IFREG | 0o600) << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, text)


def _require_index(archive: zipfile.ZipFile, path: Path) -> dict[str, str]:
    """Check names, kinds and sizes of all members, then the index; return its entries."""
    named = _NAME.fullmatch(path.name)
    if named is None:
        _refuse(path, path.name, "a name with its digest, kernels-DIGEST.zip, as export gives it")
    members = _require_members(archive, path)
    if INDEX not in members:
        _refuse(path, f"no {INDEX}", "an archive that export wrote")
    text = _read(archive, path, INDEX)
    if digest_of_bytes(text)[:32] != named[1]:
        _refuse(path, f"digest {digest_of_bytes(text)[:32]}", "the digest of its name")
    try:
        found: Any = json.loads(text)
        schema, wanted, entries = found["schema"], found["versions"], found["entries"]
    except (ValueError, KeyError, TypeError):
        _refuse(path, f"{INDEX} that is none", "an archive that export wrote")
    if schema != SCHEMA or wanted != list(versions()):
        there = f"schema {schema}, versions {', '.join(map(str, wanted))}"
        _refuse(path, there, f"schema {SCHEMA}, versions {', '.join(versions())}, as here")
    if not isinstance(entries, dict) or not all(_ENTRY.fullmatch(name) for name in entries):
        _refuse(path, "names of other entries", "entries of the kernel cache")
    listed = {f"{name}/{file}" for name in entries for file in ENTRY_FILES} | {INDEX}
    if members != listed:
        _refuse(path, min(members ^ listed), "exactly the files of its index")
    return {str(name): str(digest) for name, digest in entries.items()}


def _require_members(archive: zipfile.ZipFile, path: Path) -> set[str]:
    infos = archive.infolist()
    if len(infos) > MOST_FILES or sum(info.file_size for info in infos) > LARGEST_ARCHIVE:
        size = sum(info.file_size for info in infos)
        _refuse(path, f"{len(infos)} files, {size} bytes", "an archive that export wrote")
    names: set[str] = set()
    for info in infos:
        kind = stat.S_IFMT(info.external_attr >> 16)
        if info.filename.startswith("/") or "\\" in info.filename or ".." in info.filename:
            _refuse(path, info.filename, "files within the archive's own entries")
        if kind not in (0, stat.S_IFREG) or info.is_dir():
            _refuse(path, f"{info.filename}, a link or no file", "ordinary files")
        if info.filename in names:
            _refuse(path, f"{info.filename}, twice", "each file once")
        if info.file_size > LARGEST_FILE:
            _refuse(path, f"{info.filename}, {info.file_size} bytes", f"at most {LARGEST_FILE}")
        names.add(info.filename)
    return names


def _files(archive: zipfile.ZipFile, path: Path, name: str, digest: str) -> dict[str, bytes]:
    """Return an entry's files; refuse the archive where they are not those of the index."""
    files = {file: _read(archive, path, f"{name}/{file}") for file in ENTRY_FILES}
    if digest_of_bytes(manifest_of(files)) != digest:
        _refuse(path, f"other bytes in {name}", "files with the digests of its index")
    return files


def _read(archive: zipfile.ZipFile, path: Path, name: str) -> bytes:
    with archive.open(name) as file:
        # Trap: a member may unpack to more than it says.
        text = file.read(LARGEST_FILE + 1)
    if len(text) > LARGEST_FILE:
        _refuse(path, f"{name}, more bytes than it says", f"at most {LARGEST_FILE}")
    return text


def _refuse(path: Path, found: str, expected: str) -> NoReturn:
    raise UnreadableFile(
        f"kernel archive {printable(path.name, 80)}", printable(found, 120), expected, _REMEDY
    )


def archives_in(folder: Path) -> Iterator[Path]:
    """Yield the archives of a folder by name."""
    if folder.is_dir():
        yield from sorted(each for each in folder.iterdir() if _NAME.fullmatch(each.name))
