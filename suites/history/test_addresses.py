"""What may name a store: no address becomes a file, and no refusal shows a password."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

import pytest

from degarble.harness.base.errors import Refused
from degarble.harness.history.store import address_of
from degarble.suites.base.test_masking import SPELLINGS

if TYPE_CHECKING:
    from pathlib import Path

OTHERS = (
    "me:secret@host", "me/secret@host/db", "secret@host", "host=db password=secret",
    "sqlite://me:secret@host/db", "sqlite:///me:secret@host/db", "postgresql:///me:secret@host/db",
    "postgresql://host/db:secret", "mysql://me:secret@host/db", "secret://me:secret@host",
    "me:secret@host://db", "postgresql;//me:secret@host/db", "host=db",
)  # fmt: skip


def _said_of(text: str, *, create: bool) -> str:
    try:
        address = address_of(text, create=create)
    except Refused as error:
        return str(error)
    assert address.engine.dialect.name == "postgresql"  # what can be read as an address is one
    return address.name


@pytest.mark.parametrize("create", [False, True])
def test_an_address_is_never_a_file_and_never_shown(
    create: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in (*SPELLINGS, *OTHERS):
        assert "cret" not in _said_of(text, create=create), text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("password", ["secret", "se:cret", "se/cret", "se%40cret", "se%2Fcr%25et"])
def test_what_a_driver_says_has_no_password(password: str) -> None:
    url = f"postgresql://me:{password}@host/db?options=-cx%3Dhidden"
    address = address_of(url, create=False)
    plain = unquote(password)
    for said in (url, f"no entry for {plain}", f"{plain!r} and {password}", "hidden -cx=hidden"):
        shown = address.without_secrets(f"connection failed: {said}")
        assert shown.startswith("connection failed")
        assert not any(each in shown for each in (password, plain, "-cx=hidden"))
    assert "me" not in address.name


@pytest.mark.parametrize("name", ["h.sqlite", "a b.db", "me@work.sqlite", "x:y.sqlite", "run=3"])
def test_ordinary_names_are_files(name: str, tmp_path: Path) -> None:
    (tmp_path / "me@work").mkdir()
    assert address_of(str(tmp_path / name), create=True).engine.dialect.name == "sqlite"
    assert address_of(str(tmp_path / "me@work" / "h"), create=True).name == "h"


def test_a_short_password_hides_the_whole_line() -> None:
    address = address_of("postgresql://me:ab@host/db", create=False)
    assert address.without_secrets("a cable broke") == "an address that is not shown"
    assert address.without_secrets("no route") == "no route"
