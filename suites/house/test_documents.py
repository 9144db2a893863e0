"""Documents match the code: the command line, links, the index, fragments of the changelog."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from degarble.suites.house.pages import audit_rules, site
from degarble.suites.house.pages.command_line import PAGE, commands, page, parameters
from degarble.suites.house.repository import ROOT, documents, shown

if TYPE_CHECKING:
    from pathlib import Path

KINDS = ("added", "changed", "fixed", "removed", "security")

# The contract: scripts rely on these names.
CONTRACT = {
    *("demo", "capture", "check", "compare", "audit", "quantise", "convert", "generate"),
    *("serve", "faults", "history", "import", "bisect", "probe", "doctor"),
}


def test_every_command_of_the_contract_exists() -> None:
    assert {name.split()[1] for name, _ in commands() if name != "degarble"} == CONTRACT


def test_every_value_has_a_name_and_every_option_a_sentence() -> None:
    for name, command in commands():
        assert (command.help or "").strip().endswith("."), name
        for parameter in parameters(name, command):
            assert parameter.help, (name, parameter.name)
            assert parameter.metavar or parameter.is_flag, (name, parameter.name)


def test_cli_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: make docs"


def test_rules_of_the_audit_are_current() -> None:
    text = audit_rules.PAGE.read_text(encoding="utf-8")
    assert text == audit_rules.with_rules(text), "run: make docs"
    planted = text.replace("` | error |", "` | note |", 1)
    assert audit_rules.with_rules(planted) == text != planted


def dead_links(place: str, text: str) -> list[str]:
    folder = (ROOT / place).parent
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    return [
        f"{place}: {target}"
        for target in targets
        if not re.match(r"[a-z]+:", target) and not (folder / target).exists()
    ]


def test_links_lead_somewhere() -> None:
    dead = [d for p in documents() for d in dead_links(shown(p), p.read_text(encoding="utf-8"))]
    assert dead == []
    assert dead_links("docs/x.md", "[a](README.md) [b](nowhere.md)") == ["docs/x.md: nowhere.md"]


def test_index_lists_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    listed = set(re.findall(r"\]\(([^)#\s]+)\)", index.read_text(encoding="utf-8")))
    pages = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    assert pages - listed == {"README.md"}


def fragment_faults(name: str, text: str) -> list[str]:
    """What is wrong with a fragment of the changelog."""
    found = []
    if not re.fullmatch(rf"[a-z0-9]+(-[a-z0-9]+)*\.({'|'.join(KINDS)})\.md", name):
        found.append("name is not <what>.<kind>.md")
    if "\n\n" in text.strip() or not text.strip():
        found.append("not one paragraph")
    if not text.strip().endswith("."):
        found.append("no full stop")
    if len(text) > 400:
        found.append("longer than 400 characters")
    if "additionally" in text.lower():
        found.append("two changes in one")
    return found


def test_fragments_have_their_form() -> None:
    folder = ROOT / "changelog.d"
    fragments = [path for path in folder.iterdir() if path.name != "README.md"]
    assert fragments
    for path in fragments:
        assert fragment_faults(path.name, path.read_text(encoding="utf-8")) == [], path.name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Formats.added.md", "A."),
        ("formats.new.md", "A."),
        ("formats.added.md", "A.\n\nB."),
        ("formats.added.md", ""),
        ("formats.added.md", "No stop"),
        ("formats.added.md", "A" * 400 + "."),
        ("formats.added.md", "One; additionally, another."),
    ],
)
def test_planted_fault_in_a_fragment_is_found(name: str, text: str) -> None:
    assert fragment_faults(name, text)


def test_the_site_has_every_page_in_its_navigation(tmp_path: Path) -> None:
    site.stage(tmp_path)
    front = (tmp_path / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^([\w./-]+)$", front.partition("```{toctree}")[2], re.MULTILINE))
    pages = {p.relative_to(tmp_path).with_suffix("").as_posix() for p in tmp_path.rglob("*.md")}
    assert pages - listed == {"README"}
    assert (tmp_path / "docs" / "notebook.ipynb").exists()  # pages link to it


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", site.__name__, tmp_path], check=True)  # it warns itself
    assert "How it judges" in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert (tmp_path / "docs" / "design-notes" / "comparing.html").exists()
