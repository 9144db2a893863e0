"""Drills: a new format, fault, kernel and model family, made in a copy of the tree and put to work.

The files that a drill edits are those that docs/architecture.md names.
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
    _SIGN.fault(
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

FAMILY = (
    Edit(
        "pyproject.toml",
        'traced = "degarble.harness.families.traced:FAMILY"\n',
        'traced = "degarble.harness.families.traced:FAMILY"\n'
        'plain = "degarble.harness.families.plain.family:FAMILY"\n',
    ),
)
CHECKPOINT = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from degarble.harness.model.config.json_file import config_from_dict, config_to_dict
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.parameters import parameters
from degarble.references.weights import random_weights

folder = Path(sys.argv[1])
folder.mkdir()
config = config_from_dict({
    "model_type": "plain", "vocab_size": 96, "hidden_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 256,
})
(folder / "config.json").write_text(json.dumps(config_to_dict(config)))
weights = random_weights(config, 1, torch.bfloat16)
layout = layout_named("official", config)
save_file(
    {
        layout.path_of(each, config) + ".weight": weights[each.name].values(torch.bfloat16)
        for each in parameters(config)
    },
    folder / "model.safetensors",
)
letters = {chr(code): code - 32 for code in range(32, 127)}
words = Tokenizer(models.WordLevel(letters, unk_token=" "))
words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
words.save(str(folder / "tokenizer.json"))
"""
PATCH = """
def patch(candidate):
    call = candidate.components["layers.1.attn.attend"]

    def louder(inputs, weights):
        return {"out": call(inputs, weights)["out"] * 1.25}

    candidate.components["layers.1.attn.attend"] = louder
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


def run(copy: Path, *line: str, status: int = 0) -> str:
    """Run Python in the copy; return what it prints, refusals last."""
    done = subprocess.run(
        [sys.executable, *line],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy / ".types"), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


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


def test_a_model_family_is_a_folder_and_an_entry_point(copy: Path) -> None:
    edit(copy, FAMILY)
    new = copy / "harness" / "families" / "plain"
    shutil.move(copy / "suites" / "house" / "plain_family", new)
    for path in new.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace("suites.house.plain_family", "harness.families.plain"))
    (copy / "patch.py").write_text(PATCH, encoding="utf-8")
    command, checkpoint = ("-m", "degarble.harness.cli.main"), str(copy / "checkpoint")
    run(copy, "-c", CHECKPOINT, checkpoint)
    asked = (*command, "capture", checkpoint, "--prompt", "the quick brown fox", "--out")
    run(copy, *asked, "healthy")
    said = run(copy, *command, "check", "healthy", "--reference", checkpoint)
    assert "NO ERRORS FOUND" in said
    assert "judged       27 components, 108 calls" in said
    run(copy, *asked, "louder", "--patch", "patch.py")
    said = run(copy, *command, "check", "louder", "--reference", checkpoint, status=1)
    assert "layers.1.attn.attend" in said
