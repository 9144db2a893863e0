"""The list of forms that a night compiles ahead is that of the runs it is for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from degarble.harness.backends.graph.matrices import FEW_ROWS
from degarble.kernels.runtime.forms import KernelForm
from degarble.suites.backends import needed_forms
from degarble.suites.backends.needed_forms import KEPT, forms_of_layers

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.needs("cutlass")


def listed(*parts: str) -> set[KernelForm]:
    document = json.loads(KEPT.read_text())
    return {KernelForm.read(raw) for part in parts for raw in document[part]}


def test_whole_layers_ask_for_listed_forms_alone(tmp_path: Path) -> None:
    found = forms_of_layers(tmp_path, "v32", "nvfp4-full", FEW_ROWS)
    names = {form.name for form in found}
    assert {"sm90_gemm_w4a16", "sm90_sparse_attention", "simt_kv_write"} <= names
    assert set(found) <= listed("forms"), "run: python -m degarble.suites.backends.needed_forms"


def test_a_contract_that_processes_share_asks_for_listed_forms_alone() -> None:
    found = needed_forms.forms_of_cases(needed_forms.SHARED)
    assert len(found) > 50
    assert set(found) <= listed("forms", "of_contracts"), "as above"
    assert not listed("forms") & listed("of_contracts")


@pytest.mark.slow
def test_the_list_is_what_the_command_writes(tmp_path: Path) -> None:
    assert needed_forms.text_of(needed_forms.every_form(tmp_path)) == KEPT.read_text()
