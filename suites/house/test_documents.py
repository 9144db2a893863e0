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

README = ROOT / "README.md"
EVERYWHERE = {"--json", "--quiet", "--cluster", "--version"}
KINDS = ("added", "changed", "fixed", "removed", "security")

# The contract: scripts rely on these names.
CONTRACT = {
    *("demo", "capture", "check", "compare", "audit", "quantise", "convert", "generate"),
    *("serve", "faults", "history", "import", "bisect", "probe", "doctor"),
}


def command_lines(text: str) -> list[str]:
    """Return the lines of code blocks, outside Python, that start degarble."""
    blocks = re.findall(r"^```(?!python)\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split(" #")[0] for line in lines if re.match(r"(\$ )?degarble [a-z]", line)]


def wrong_words(line: str) -> list[str]:
    """Return what a line names and the command line does not have."""
    real = dict(commands())
    words = line.removeprefix("$ ").split()
    name = next((n for k in (3, 2) if (n := " ".join(words[:k])) in real), "")
    if not name:
        return [f"{line}: no such command"]
    known = {o for p in parameters(name, real[name]) for o in (*p.opts, *p.secondary_opts)}
    own = re.sub(r'"[^"]*"|\'[^\']*\'|-- .*', "", line)  # not what another program is given
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", own))
    return [f"{line}: no {option}" for option in sorted(named - known - EVERYWHERE - {"--help"})]


def test_documents_show_the_command_line_as_it_is() -> None:
    lines = [line for page in documents() for line in command_lines(page.read_text("utf-8"))]
    assert len(lines) > 50
    assert [wrong for line in lines for wrong in wrong_words(line)] == []


def test_every_command_of_the_contract_exists() -> None:
    assert {name.split()[1] for name, _ in commands() if name != "degarble"} == CONTRACT


def test_every_value_has_a_name_and_every_option_a_sentence() -> None:
    for name, command in commands():
        assert (command.help or "").strip().endswith("."), name
        for parameter in parameters(name, command):
            assert parameter.help, (name, parameter.name)
            assert parameter.metavar or parameter.is_flag, (name, parameter.name)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("degarble audit CKPT --loader vllm --only structure", []),
        ("degarble sell CKPT", ["no such command"]),
        ("degarble convert SRC DST --to bf16 --trust", ["no --trust"]),
        ('degarble doctor CKPT --engine "vllm serve CKPT --port 8000"', []),
    ],
)
def test_a_line_that_does_not_exist_is_found(line: str, wrong: list[str]) -> None:
    assert command_lines(f"```\n{line}\n```\n") == [line]
    assert wrong_words(line) == [f"{line}: {word}" for word in wrong]


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


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", site.__name__, tmp_path], check=True)  # it warns itself
    assert "How it judges" in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert (tmp_path / "docs" / "design-notes" / "comparing.html").exists()
