"""No password in a message, and no ordinary text masked."""

from __future__ import annotations

import itertools

import pytest

from degarble.harness.base.errors import InvalidArgument, looks_like_address, masked

SECRETS = ("secret", "se@cret", "se:cret", "se/cret", "se%40cret", "se#cret?")
SCHEMES = ("postgresql://", "postgresql:/", "postgresql:", "postgres//", "://", "//", "",
           "http:", "postgresql+psycopg:", "jdbc:postgresql://", "POSTGRESQL:")  # fmt: skip
PAIRS = (
    "host=db user=me password=secret", "password=secret", "dbname=x PASSWORD = 'secret'",
    "postgresql://host/db?password=secret", "PGPASSWORD=secret psql", "Server=db;Pwd=secret;",
)  # fmt: skip
SPELLINGS = [
    f"{scheme}me:{secret}@host/db" for scheme, secret in itertools.product(SCHEMES, SECRETS)
]
SPELLINGS += [f"{scheme}me%3Asecret%40host/db" for scheme in SCHEMES]
SPELLINGS += PAIRS
ORDINARY = (
    "history.sqlite", "/tmp/a b/h.sqlite", "x:y.sqlite", "./run=3/h.sqlite", "C:/folder/h.sqlite",
    "/srv/me@work/h.sqlite", "layers.3.attn.wq_b", "my_kernels:make_backend", "bypass=1",
    "bos_token=5", "2026-11-22T01:00:00", "M10: wq_b @ layer 3",
)  # fmt: skip


@pytest.mark.parametrize("text", SPELLINGS)
def test_a_password_is_masked_wherever_it_is_refused(text: str) -> None:
    assert looks_like_address(text) or text.startswith("//")
    for shown in (masked(text), masked(f"could not read '{text}'"), masked(f"--store={text}")):
        assert "cret" not in shown
    error = InvalidArgument(text, [text], f"no {text}", f"Leave {text} out.")
    for shown in (str(error), error.name, error.shown_value, error.expectation, error.remedy):
        assert "cret" not in shown


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_stays(text: str) -> None:
    assert masked(text) == text


@pytest.mark.parametrize("path", [each for each in ORDINARY if each.endswith("sqlite")])
def test_a_path_is_no_address(path: str) -> None:
    assert not looks_like_address(path)


def test_the_example_of_a_remedy_stays() -> None:
    text = "Write --store postgresql://USER:PASSWORD@HOST/DATABASE with @, : and / as %40."
    assert masked(text) == text
