"""The gate: a token, or names of this machine."""

from __future__ import annotations

import pytest

from degarble.harness.serve.admission import OPEN_PATHS, AccessControl
from degarble.harness.serve.messages import ApiError

TOKEN = "0123456789abcdef-secret"


@pytest.mark.parametrize(
    "given",
    ["", "Bearer", "Bearer ", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}",
     "Bearer é\udcff"],
)  # fmt: skip
def test_a_wrong_token_is_refused_and_never_repeated(given: str) -> None:
    gate = AccessControl.of("0.0.0.0", TOKEN, anyone=False)
    with pytest.raises(ApiError) as caught:
        gate.admit("/v1/models", {"authorization": given})
    assert caught.value.status == 401
    assert caught.value.headers() == {"www-authenticate": "Bearer"}
    assert TOKEN not in str(caught.value.document())
    assert TOKEN not in repr(gate)


def test_a_token_opens_whatever_the_host_is_called() -> None:
    gate = AccessControl.of("0.0.0.0", TOKEN, anyone=False)
    for scheme in ("Bearer", "bearer"):
        gate.admit("/metrics", {"authorization": f"{scheme} {TOKEN}", "host": "example.org"})
    for path in OPEN_PATHS:
        gate.admit(path, {})


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8000", "localhost:1", "[::1]:8000", "LOCALHOST"]
)
def test_without_a_token_this_machine_is_answered(host: str) -> None:
    AccessControl.of("127.0.0.1", None, anyone=False).admit("/v1/models", {"host": host})


@pytest.mark.parametrize("host", ["", "example.org", "127.0.0.1.example.org:8000", "[::2]:1"])
def test_a_page_whose_name_was_pointed_here_reads_nothing(host: str) -> None:
    with pytest.raises(ApiError) as caught:
        AccessControl.of("127.0.0.1", None, anyone=False).admit("/v1/models", {"host": host})
    assert caught.value.status == 403
    AccessControl.of("127.0.0.1", None, anyone=True).admit("/v1/models", {"host": host})
