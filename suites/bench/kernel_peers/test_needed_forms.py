"""The list of forms that are compiled ahead is that of the rows, which ask the cache for them."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from degarble.kernels.runtime.forms import KernelForm
from degarble.kernels.runtime.kernel import Kernel
from degarble.suites.bench.kernel_peers import needed_forms
from degarble.suites.bench.kernel_peers.__main__ import FORMS, GROUPS

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.kernels.runtime.compiling import CompileSettings

pytestmark = pytest.mark.needs("cutlass")

LONG = ("tokens", "layers")  # groups whose steps have hundreds of launches
WITHOUT = {"bits: healthy captures, planted faults"}  # a row that launches nothing


def test_rows_ask_the_cache_for_listed_forms_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    caches, run_checked = set(), Kernel.run_checked

    def noted(kernel: Any, problem: Any, settings: CompileSettings, *told: Any) -> None:
        caches.add(settings.cache_folder)
        run_checked(kernel, problem, settings, *told)

    monkeypatch.setenv("DEGARBLE_KERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Kernel, "run_checked", noted)
    listed = defaultdict[str, set[KernelForm]](set)
    for raw in json.loads(FORMS.read_text())["forms"]:
        for row in raw["rows"]:
            listed[row].add(KernelForm.read(raw))
    found: dict[str, set[KernelForm]] = {}
    for group in (each for each in GROUPS if each not in LONG):
        found |= {row: set(forms) for row, forms in needed_forms.forms_of(group)}
    of_groups = {row for row in listed if row.partition(":")[0] not in LONG}
    assert of_groups == found.keys() - WITHOUT, f"run {needed_forms.__name__}"
    for row in of_groups:
        assert found[row] == listed[row], f"{row}: run {needed_forms.__name__}"
    assert caches == {tmp_path / "cache"}


@pytest.mark.slow
def test_the_list_is_what_the_command_writes() -> None:
    assert needed_forms.text_of(GROUPS) == FORMS.read_text()
