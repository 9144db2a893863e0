"""Targets: what they claim to convert compiles, what they deny is refused by the compiler."""

from __future__ import annotations

import re
from importlib import import_module

import pytest
import torch

from degarble.harness.base.errors import MissingDevice, UnknownName
from degarble.kernels.runtime import targets
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.targets import SM90A, TARGETS, target, target_of_device


def test_lookup() -> None:
    assert [target(name) for name in TARGETS] == list(TARGETS.values())
    with pytest.raises(UnknownName, match="Did you mean sm_90a"):
        target("sm_90")


@pytest.mark.parametrize("name", TARGETS)
def test_names_are_those_of_the_capability(name: str) -> None:
    major, minor = TARGETS[name].capability
    assert name == f"sm_{major}{minor}a"


def test_devices_are_matched_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a GPU")
    for known in TARGETS.values():
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda _device, known=known: known.capability
        )
        assert target_of_device() is known
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 9))
    with pytest.raises(MissingDevice, match=r"a GPU = \(8, 9\)"):
        target_of_device()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingDevice, match="Compiling needs no GPU"):
        target_of_device()


@pytest.mark.needs("cutlass")
def test_a_target_that_denies_a_conversion_cannot_compile_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = import_module("degarble.suites.support.probes.simt_probe_formats")
    kernels.compile_native(SM90A, CompileSettings())  # as it is, it compiles
    claims = targets.Target(**{**vars(SM90A), "converts_e2m1": True})
    monkeypatch.setattr(kernels, "TARGETS", {"sm_90a": claims})
    with pytest.raises(Exception, match=re.compile("e2m1x2", re.DOTALL)) as refusal:
        kernels.compile_native(claims, CompileSettings())
    assert "ptxas" in str(refusal.value)
