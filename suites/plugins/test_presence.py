"""Each probe says what is missing in words that a person can act on."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import UnknownName
from degarble.harness.plugins import presence

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _fresh_probes() -> Iterator[None]:
    """Probes remember their answer; a suite that changes the machine must not leave one behind."""
    presence.missing_device.cache_clear()
    presence.missing_requirement.cache_clear()
    yield
    presence.missing_device.cache_clear()
    presence.missing_requirement.cache_clear()


@pytest.mark.parametrize(
    ("capability", "runs"),
    [((9, 0), {"gpu", "h200"}), ((10, 0), {"gpu", "b200"}), ((8, 0), {"gpu"}), (None, set())],
)
def test_devices(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, runs: set[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    reasons = {marker: presence.missing_device(marker) for marker in presence.DEVICES}
    assert {marker for marker, reason in reasons.items() if reason is None} == runs
    if capability == (9, 0):
        assert reasons["b200"] == "device is sm_90, b200 needs sm_100"
    if capability is None:
        assert all((reason or "").startswith("no CUDA device") for reason in reasons.values())


def test_programs_are_looked_for_in_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert presence.missing_requirement("chromium") == (
        "no chromium or chromium-browser or google-chrome"
        " and no chromedriver or chromium.chromedriver on PATH; .ci/run installs it"
    )
    for name in ("google-chrome", "chromedriver"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    presence.missing_requirement.cache_clear()
    assert presence.missing_requirement("chromium") is None
    assert presence.find_programs("chromium") == [
        str(tmp_path / "google-chrome"),
        str(tmp_path / "chromedriver"),
    ]


def test_packages_are_found_without_importing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "find_spec", lambda _: None)
    assert presence.missing_requirement("torchao") == (
        'package torchao is not installed; pip install "degarble[dev]"'
    )


def test_unknown_requirement_is_refused() -> None:
    with pytest.raises(UnknownName, match="Did you mean postgres"):
        presence.missing_requirement("postgre")
