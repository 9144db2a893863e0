"""A form is written as JSON and read back as the same form; nothing else is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.kernels.runtime.forms import KernelForm
from degarble.kernels.runtime.kernel import place_of, renamed, request_of
from degarble.kernels.runtime.modules import MODULES, kernel_named
from degarble.suites.kernels.runtime.kernel_cases import kernels_in
from degarble.suites.kernels.test_contract import CODE

pytestmark = pytest.mark.needs("cutlass")


def test_every_registered_form_comes_back() -> None:
    for code in CODE:
        kernel: Any = kernel_named(code.kernel)
        found = kernels_in(kernel)[0] if kernels_in(kernel) else kernel
        form = KernelForm(place_of(found), code.form)
        assert KernelForm.read(json.loads(json.dumps(form.plain()))) == form, code.name


def test_every_kernel_has_a_place() -> None:
    for name in MODULES:
        module_kernels = [
            kernel
            for value in vars(__import__(MODULES[name], fromlist=["x"])).values()
            for kernel in kernels_in(value)
        ]
        assert all(place_of(kernel) for kernel in module_kernels), name
    kernel = kernel_named("simt_scale")
    assert place_of(kernel) == "degarble.kernels.rows.simt_scale:KERNEL"
    assert place_of(renamed(kernel, values="others")) == ""


def test_a_form_that_is_no_record_of_ours_is_not_described() -> None:
    assert request_of(kernel_named("simt_scale"), object()) is None


ROOM = "degarble.kernels.rows"
SCALE = {"kernel": f"{ROOM}.simt_scale:KERNEL"}


@pytest.mark.parametrize(
    "raw",
    [
        None,
        {},
        {"kernel": "os:system", "form": "true"},
        SCALE | {"form": {"record": "os:system", "fields": {"command": "true"}}},
        SCALE | {"form": {"record": "degarble.kernels.runtime.kernel:sys", "fields": {}}},
        SCALE | {"form": {"record": "degarble.kernels.rows.problem:ScaleForm", "fields": {"x": 1}}},
        SCALE | {"form": {"record": f"{ROOM}.gone:Form", "fields": {}}},
        SCALE | {"form": ["sm_90a"]},
        {"kernel": "degarble.kernels.rows.simt_scale:launch_scale", "form": "sm_90a"},
    ],
)
def test_what_is_no_form_of_ours_is_refused(raw: Any) -> None:
    with pytest.raises(InvalidArgument, match="form of a kernel"):
        KernelForm.read(raw)
