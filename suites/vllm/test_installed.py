"""Which vLLM is served, and when the plugin was asked for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from degarble.harness.base.errors import InvalidArgument, MissingDependency
from degarble.harness.vllm import installed


def test_without_vllm_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(installed, "version", absent)
    with pytest.raises(MissingDependency, match="make vllm-env"):
        installed.require_vllm()


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "version", lambda _: "0.34.1")
    with pytest.raises(InvalidArgument, match=r"0\.34\.1.*0\.33\.x"):
        installed.require_vllm()
    monkeypatch.setattr(installed, "version", lambda _: "0.33.2")
    assert installed.require_vllm() == "0.33.2"


@pytest.mark.parametrize(
    ("listed", "named"), [(None, False), ("", False), ("degarble2,x", False), ("x,degarble", True)]
)
def test_the_plugin_is_active_only_if_named(
    monkeypatch: pytest.MonkeyPatch, listed: str | None, named: bool
) -> None:
    monkeypatch.delenv(installed.VARIABLE, raising=False)
    if listed is not None:
        monkeypatch.setenv(installed.VARIABLE, listed)
    assert installed.is_named() == named
