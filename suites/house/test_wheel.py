"""The wheel holds exactly the files of the five folders, under the one import package."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from email.parser import Parser
from typing import TYPE_CHECKING
from zipfile import ZipFile

from degarble.suites.house.repository import FOLDERS, ROOT, ROOT_PACKAGE, package_files, shown

if TYPE_CHECKING:
    from pathlib import Path

BUILD = "from setuptools import build_meta; build_meta.build_wheel('dist')"
PLANTED = "harness/planted_attic/planted.py"


def copied(destination: Path) -> None:
    """A copy without caches: a build leaves traces in the folder where it runs."""
    unwanted = shutil.ignore_patterns("__pycache__", "*.pyc")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, destination / folder, ignore=unwanted)
    types = ROOT_PACKAGE.relative_to(ROOT)
    shutil.copytree(ROOT_PACKAGE, destination / types, symlinks=True, ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, destination / name)


def test_wheel_contents_equal_the_folders(tmp_path: Path) -> None:
    copied(tmp_path)
    planted = tmp_path / PLANTED
    planted.parent.mkdir()
    planted.write_text('"""In a folder that pyproject.toml does not list."""\n')
    before = {shown(path) for path in package_files()} | {"__init__.py", "py.typed"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        headers = Parser().parsestr(archive.read(metadata).decode())
    inside = {name.removeprefix("degarble/") for name in names if name.startswith("degarble/")}
    assert {name for name in names if not name.startswith("degarble")} == set()
    assert before - inside == set(), "missing from the wheel: list their folders in pyproject.toml"
    assert inside <= before
    assert PLANTED not in inside  # so a folder that is not listed would have been seen
    assert headers["License-Expression"] == "Apache-2.0"
    assert {"LICENSE", "NOTICE"} <= set(headers.get_all("License-File", []))


def test_every_folder_with_files_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    folders = {path.parent for path in package_files()}
    wanted = {".".join(["degarble", *folder.relative_to(ROOT).parts]) for folder in folders}
    wanted |= {"degarble", *(f"degarble.{folder}" for folder in FOLDERS)}
    assert sorted(listed) == sorted(wanted)
    assert list(listed) == list(dict.fromkeys(listed))
