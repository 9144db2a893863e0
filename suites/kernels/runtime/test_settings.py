"""Settings are read from the environment that is passed, and from nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from degarble.kernels.runtime.compiling import CompileSettings, read_settings


@pytest.mark.parametrize(
    ("environment", "cache", "keep"),
    [
        ({}, Path.home() / ".cache/degarble/kernels", None),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/degarble/kernels"), None),
        ({"DEGARBLE_KERNEL_CACHE": "off", "XDG_CACHE_HOME": "/x"}, None, None),
        ({"DEGARBLE_KERNEL_CACHE": "/c", "XDG_CACHE_HOME": "/x"}, Path("/c"), None),
        ({"DEGARBLE_KERNEL_CACHE": "off", "DEGARBLE_KEEP_KERNELS": "/k"}, None, Path("/k")),
        ({"DEGARBLE_KERNEL_CACHE": "off", "DEGARBLE_KEEP_KERNELS": ""}, None, None),
    ],
)
def test_reads_two_variables(
    environment: dict[str, str], cache: Path | None, keep: Path | None
) -> None:
    assert read_settings(environment) == CompileSettings(cache, keep)


def test_settings_of_the_dsl_are_recorded() -> None:
    environment = {"CUTE_DSL_LINEINFO": "1", "CUTE_DSL_ARCH": "sm_90a", "HOME": "/h"}
    told = read_settings(environment).dsl_environment
    assert told == ("CUTE_DSL_ARCH=sm_90a", "CUTE_DSL_LINEINFO=1")


def test_the_process_environment_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEGARBLE_KERNEL_CACHE", "/planted")
    assert read_settings({"DEGARBLE_KERNEL_CACHE": "off"}) == CompileSettings()
