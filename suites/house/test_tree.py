"""The shape of the repository: one import package, links for type checkers, mirrored suites."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from itertools import chain

from degarble.harness.base import errors
from degarble.suites.house.repository import (
    FOLDERS,
    ROOT,
    ROOT_PACKAGE,
    modules,
    shown,
    tree,
)

# Folders of suites that stand for themselves.
ALONE = (
    "house",
    "bench",
    "campaigns",
    "documents",
    "golden",
    "mutation",
    "nights",
    "real",
    "support",
)
# A folder of more files is several rooms. Suites are to be merged: their numbers only fall.
FULLEST = 25
FULLER: dict[str, int] = {}


def test_top_folders_are_namespaces() -> None:
    """A top-level import name `kernels` would shadow the distribution of that name."""
    assert [f for f in FOLDERS if (ROOT / f / "__init__.py").exists()] == []


def test_subfolders_with_modules_are_packages_with_a_docstring_only() -> None:
    folders = {path.parent for path in modules()} - {
        ROOT,
        ROOT_PACKAGE,
        *(ROOT / f for f in FOLDERS),
    }
    for folder in folders - set((ROOT / "suites").rglob("*")):
        package = tree(folder / "__init__.py")
        assert len(package.body) == 1, folder
        assert ast.get_docstring(package), folder


def test_folders_of_suites_are_no_packages() -> None:
    """With an __init__.py, pytest would import suites/kernels as `kernels`, over the real one."""
    assert [shown(path) for path in (ROOT / "suites").rglob("__init__.py")] == []


def test_link_tree_leads_type_checkers_to_the_folders() -> None:
    """Files besides the links are those of the root package, which the wheel takes from here."""
    found = {path.name: path for path in ROOT_PACKAGE.iterdir() if path.name != "__pycache__"}
    links = {name: path for name, path in found.items() if name in FOLDERS}
    assert found.keys() - links.keys() == {"__init__.py", "py.typed"}
    assert set(links) == set(FOLDERS)
    for name, link in links.items():
        assert link.is_symlink(), name
        assert link.resolve() == ROOT / name
        assert not link.readlink().is_absolute()


def test_suites_mirror_what_they_judge() -> None:
    """suites/formats/test_codec.py lies there because harness/formats is a package."""
    orphans = []
    for path in modules():
        parts = path.relative_to(ROOT).parts
        if parts[0] != "suites" or not path.name.startswith("test_") or parts[1] in ALONE:
            continue
        inner = "/".join(parts[1:-1])
        homes = [ROOT / top / inner for top in (".", "harness")]
        if not any(home.is_dir() for home in homes):
            orphans.append(shown(path))
    assert not orphans, "\n" + "\n".join(orphans)


def test_no_folder_is_too_full() -> None:
    files = Counter(
        shown(path.parent) for path in modules() if path.name not in ("__init__.py", "conftest.py")
    )
    full = {folder: count for folder, count in files.items() if count > FULLEST}
    assert {f: n for f, n in full.items() if n > FULLER.get(f, FULLEST)} == {}
    assert all(folder.startswith("suites/") for folder in FULLER)
    assert set(FULLER) <= set(full), "an exception is no longer needed"


def test_every_family_of_faults_is_registered() -> None:
    """Suites over the registry fail where a family that is listed has no case."""
    home = ROOT / "harness/engine/faults"
    listed = (home / "registry.py").read_text(encoding="utf-8")
    families = {
        name
        for path in home.rglob("*.py")
        for name in re.findall(
            r"^([A-Z0-9_]+_FAULTS)\b.* = ", path.read_text("utf-8"), re.MULTILINE
        )
        if path.name != "registry.py"
    }
    assert len(families) >= 40
    assert [name for name in sorted(families) if f"            {name},\n" not in listed] == []
    over_all = ("engine/diagnose/test_diagnose.py", "engine/faults/test_registry.py")
    assert all((ROOT / "suites" / name).exists() for name in over_all)


def error_tree(docstring: str) -> dict[str, str]:
    """Class to parent, as drawn at the top of errors.py."""
    drawn: dict[str, str] = {}
    path: list[str] = []
    for line in docstring.splitlines():
        match = re.match(r"([│├└─ ]+)([A-Z]\w+) |()([A-Z]\w+)$", line)
        if match:
            depth = len(match[1] or "") // 4
            name = match[2] or match[4]
            path = [*path[:depth], name]
            drawn[name] = path[-2] if depth else "Exception"
    return drawn


def test_error_tree_is_drawn_as_it_is() -> None:
    classes = {
        name: value.__bases__[0].__name__
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert error_tree(errors.__doc__ or "") == classes


def test_a_missing_branch_of_the_error_tree_is_found() -> None:
    drawn = (errors.__doc__ or "").replace("│   ├── ShapeMismatch", "│   ├── Shape")
    assert "ShapeMismatch" not in error_tree(drawn)
    assert error_tree("Base\n└── Leaf  text\n") == {"Base": "Exception", "Leaf": "Base"}


def test_every_error_states_cause_and_remedy() -> None:
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.DegarbleError):
            assert value.__doc__, name


def test_constraints_pin_every_requirement_exactly() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    assert pins == list(dict.fromkeys(pins))
    pinned = {canonical(pin.partition("==")[0]) for pin in pins}
    wanted = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    names = {canonical(re.split(r"[^\w.-]", line)[0]) for line in wanted}
    assert names - pinned == set()


def canonical(name: str) -> str:
    """PEP 503: case, dots, dashes and underscores do not tell distributions apart."""
    return re.sub(r"[-_.]+", "-", name).lower()


_SUITE = re.compile(r"suites/[a-z0-9_/]+\.py")


def suites_named(text: str) -> list[str]:
    """Files of suites that a module's docstring names."""
    docstring = ast.get_docstring(ast.parse(text)) or ""
    return _SUITE.findall(docstring)


def test_suites_named_in_docstrings_exist() -> None:
    missing = [
        f"{shown(path)} names {name}"
        for path in modules()
        for name in suites_named(path.read_text(encoding="utf-8"))
        if not (ROOT / name).is_file()
    ]
    assert missing == []
    assert suites_named('"""Checked by suites/a/test_b.py."""') == ["suites/a/test_b.py"]
