"""Planted faults reach the kernel's code: its machine code differs, and is restored afterwards.

Forms are those that the backends' suites take, so that a fault in a function that none of them uses
any more is seen without a GPU.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from importlib import import_module

import pytest

from degarble.kernels.moe import problem as moe_problem
from degarble.kernels.primitives import kv_problem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.forms import KernelForm
from degarble.kernels.runtime.modules import module_of
from degarble.suites.backends.cutedsl import cutedsl_faults as faults
from degarble.suites.backends.cutedsl import cutedsl_faults_attention as of_attention
from degarble.suites.backends.cutedsl import cutedsl_faults_experts as experts
from degarble.suites.backends.needed_forms import KEPT, TARGET
from degarble.suites.kernels.moe import moe_faults

pytestmark = pytest.mark.needs("cutlass")
ALL = (*faults.FAULTS, *of_attention.FAULTS, *experts.FAULTS)


@cache
def needed() -> tuple[KernelForm, ...]:
    """Return the forms that runs of the backends' suites take."""
    return tuple(map(KernelForm.read, json.loads(KEPT.read_text())["forms"]))


@cache
def of_64_rows(module: str) -> list[KernelForm]:
    """Return the forms of the experts' products that runs with a fault take in place of theirs."""
    problem = moe_problem.MoeProblem(20, 192, 96, 8, 2, 8, 10.0)
    first, second = moe_problem.forms_of(problem, TARGET, moe_faults.OF_64_ROWS)
    named = (("FC1", first), ("FC1", replace(first, shown=True)), ("FC2", second))
    return [KernelForm(f"{module}:{name}", form) for name, form in named]


def forms_of(fault: faults.Fault) -> list[KernelForm]:
    """Return the forms of all that runs with a fault launch of its kernel."""
    module = module_of(fault.kernel)
    if fault.kernel == "sm90_moe_nvfp4":
        return of_64_rows(module)
    return [form for form in needed() if form.kernel.partition(":")[0] == module]


def ptx(form: KernelForm) -> str:
    """Compile a form as its module has it now."""
    return str(form.compile(CompileSettings()).ptx)


def test_names_are_their_own_and_there_are_enough() -> None:
    assert len({fault.name for fault in ALL}) == len(ALL)
    assert min(map(len, (faults.FAULTS, of_attention.FAULTS, experts.FAULTS))) >= 15
    assert kv_problem.WIDTH == 512


def test_every_fault_replaces_a_function_that_there_is() -> None:
    places = {(fault.module, fault.function) for fault in ALL}
    places |= {(module, name) for fault in ALL for module, name, _ in fault.beside}
    missing = [place for place in sorted(places) if not hasattr(import_module(place[0]), place[1])]
    assert not missing
    assert not [fault.name for fault in ALL if not forms_of(fault)]


def _changes(fault: faults.Fault) -> None:
    """Some needed form has other code with the fault, and its own again without."""
    forms, traced = forms_of(fault), False
    for form in forms:
        whole = ptx(form)
        try:
            with faults.planted(fault):
                planted = ptx(form)
        except AssertionError as error:
            assert "never compiled with it" in str(error)  # noqa: PT017  other forms may use it
            continue
        traced = True
        if planted != whole:
            assert ptx(form) == whole
            return
    state = "the code of none changes" if traced else "none uses the function"
    pytest.fail(f"{fault.name}: {len(forms)} needed forms, {state}")


SOME = ("entry of the next slot", "overlap dropped", "scaled without a scale")


@pytest.mark.parametrize("name", SOME)
def test_a_planted_fault_changes_the_code_and_goes_away(name: str) -> None:
    _changes(next(fault for fault in ALL if fault.name == name))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name.replace(" ", "-"))
def test_every_planted_fault_does(fault: faults.Fault) -> None:
    _changes(fault)
