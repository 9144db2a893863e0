"""Three drills: a new format, fault and kernel, each made in a copy of the tree and put to work.

The files that a drill edits are those that docs/architecture.md names. A new model family touches
too many places to be a drill.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

import pytest

from degarble.suites.hang_guard import HANG_SECONDS
from degarble.suites.house.repository import FOLDERS, ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

FORMATS = "harness/formats/number_formats.py"
CODES = "harness/engine/faults/codes.py"
KERNELS = "kernels/runtime/modules.py"


class Edit(NamedTuple):
    """A text of a file, and what stands there instead."""

    file: str
    old: str
    new: str


FORMAT = (
    Edit(
        FORMATS,
        "ELEMENT_FORMATS: Mapping",
        """E3M2 = ElementFormat(
    name="E3M2",
    bits=6,
    exponent_bits=3,
    mantissa_bits=2,
    bias=3,
    signed=True,
    subnormals=True,
    infinities=False,
    nan_codes=(),
)
ELEMENT_FORMATS: Mapping""",
    ),
    Edit(FORMATS, "for fmt in (E2M1, E4M3,", "for fmt in (E2M1, E3M2, E4M3,"),
)
TABLE = (
    Edit(
        FORMATS,
        "ELEMENT_FORMATS: Mapping",
        """NF4 = TableFormat(
    "NF4",
    4,
    (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453)
    + (-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0)
    + (0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224)
    + (0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
ELEMENT_FORMATS: Mapping""",
    ),
    Edit(FORMATS, "(INT4, INT8, UINT4, UINT8)", "(INT4, INT8, UINT4, UINT8, NF4)"),
    Edit(
        FORMATS,
        "BLOCK_FORMATS: Mapping",
        """NF4_G64 = BlockFormat(
    name="NF4_G64",
    element=NF4,
    scale=FP32,
    block=(1, 64),
    tensor_scale=False,
    packed=True,
    ragged=True,
)
BLOCK_FORMATS: Mapping""",
    ),
    Edit(FORMATS, "            *_INTEGERS,\n", "            *_INTEGERS,\n            NF4_G64,\n"),
)
# What follows from the registry alone: a quantiser, decoded weights, rows for the search of faults.
TABLE_SUITES = (
    "suites/formats/test_table_formats.py",
    "suites/engine/faults/test_weight_faults.py",
    "suites/engine/diagnose/test_packing_diagnosis.py",
)
FAULT = (
    Edit(
        CODES,
        "LOST_SIGN_FAULTS = (\n",
        """LOST_SIGN_FAULTS = (
    _sign_fault(
        "positive_lost", "Positive values become zero", "positive values cut to zero on",
        of_elements(lambda _tensor, element: element.clamp(max=0)), has_codes,
    ),
""",
    ),
)
KERNEL = (Edit(KERNELS, '"simt_scale",', '"simt_scale",\n        "simt_shift",'),)
COMPILE = """
from importlib import import_module
from degarble.kernels.rows.problem import ScaleProblem, choose_scale_form
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import module_of

kernel = import_module(module_of("simt_shift")).KERNEL
form = choose_scale_form(ScaleProblem(64, 0.5), "sm_90a")
print("add.rn.f32" in kernel.compile_form(form, CompileSettings()).ptx)
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the tree that imports as the package."""
    links = tmp_path / ".types" / "degarble"
    links.mkdir(parents=True)
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
        (links / folder).symlink_to(tmp_path / folder)
    for name in ("pyproject.toml", "conftest.py"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def edit(copy: Path, edits: tuple[Edit, ...]) -> None:
    for each in edits:
        text = (copy / each.file).read_text(encoding="utf-8")
        assert text.count(each.old) == 1, f"{each.file} has not one {each.old!r}"
        (copy / each.file).write_text(text.replace(each.old, each.new), encoding="utf-8")


def run(copy: Path, *line: str) -> str:
    """Run Python in the copy; return what it prints."""
    done = subprocess.run(
        [sys.executable, *line],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy / ".types"), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_a_number_format_is_one_record(copy: Path) -> None:
    edit(copy, FORMAT)
    line = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "suites/formats/test_codec.py")
    said = run(copy, *line, "-k", "E3M2")
    assert " passed" in said
    assert "failed" not in said


def test_a_format_of_listed_values_is_one_record(copy: Path) -> None:
    edit(copy, TABLE)
    line = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *TABLE_SUITES)
    said = run(copy, *line, "-k", "NF4")
    assert " passed" in said
    assert "failed" not in said


def test_a_known_fault_is_one_record(copy: Path) -> None:
    edit(copy, FAULT)
    line = ("-m", "degarble.harness.cli.main", "demo", "--fault", "O01.positive_lost")
    assert "O01.positive_lost" in run(copy, *line, "--out", str(copy / "out"))


@pytest.mark.needs("cutlass")
def test_a_kernel_is_a_module_and_a_row(copy: Path) -> None:
    edit(copy, KERNEL)
    text = (copy / "kernels" / "rows" / "simt_scale.py").read_text(encoding="utf-8")
    shifted = text.replace("multiply_rn", "add_rn").replace("scale_kernel", "shift_kernel")
    shifted = shifted.replace("launch_scale", "launch_shift").replace("def scale(", "def shift(")
    (copy / "kernels" / "rows" / "simt_shift.py").write_text(shifted, encoding="utf-8")
    assert run(copy, "-c", COMPILE).strip() == "True"
