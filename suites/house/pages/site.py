"""Build the documents as a site: `make docs` writes it to out/site.

    python -m degarble.suites.house.pages.site [FOLDER]

The pages are Markdown that also reads well in a checkout, so they are copied as they are; the
index's two lists give the site its navigation. A link that leads nowhere ends the build.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from degarble.harness.base.version import VERSION
from degarble.suites.house.repository import ROOT

OUT = ROOT / "out" / "site"
_INDEX = "docs/README.md"
_LINK = re.compile(r"\]\(([^)#\s]+\.md)\)")
_COPIED = {".md", ".svg", ".png", ".ipynb"}
_PROJECT = (
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "changelog.d/README.md",
    "suites/golden/README.md",
)
_TEXTS = ("LICENSE", "NOTICE")  # linked as they are
_CAPTION = re.compile(r"^(For [^\n]*):\n\n((?:- .*\n(?:  .*\n)*)+)", re.MULTILINE)
_SETTINGS: dict[str, Any] = {
    "project": "degarble",
    "version": VERSION,
    "release": VERSION,
    "copyright": "the degarble contributors",
    "extensions": ["myst_parser"],
    "myst_heading_anchors": 4,
    "root_doc": "README",
    "html_theme": "furo",
    "html_title": "degarble",
    "html_show_sphinx": False,
    "html_copy_source": False,
}


def navigation(index: str) -> str:
    """Return the index's lists, and the project's own pages, as tables of contents."""
    lists = {"Contents": ["docs/README"]}
    for caption, entries in _CAPTION.findall(index):
        targets = _LINK.findall(entries)
        lists[caption] = [f"docs/{t}".removesuffix(".md") for t in targets if t[0] != "."]
    lists["The project"] = [name.removesuffix(".md") for name in _PROJECT]
    return "".join(
        "\n```{toctree}\n:hidden:\n:caption: " + caption + "\n\n" + "\n".join(pages) + "\n```\n"
        for caption, pages in lists.items()
    )


def stage(folder: Path) -> None:
    """Copy every page and picture into `folder`; the README is the front page."""
    inside = (path for path in (ROOT / "docs").rglob("*") if path.suffix in _COPIED)
    for path in (*inside, *(ROOT / name for name in ("README.md", *_PROJECT, *_TEXTS))):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    index = (ROOT / _INDEX).read_text(encoding="utf-8")
    with (folder / "README.md").open("a", encoding="utf-8") as front:
        front.write(navigation(index))


def build(out: Path) -> int:
    """Write the site to `out`; return 0, or 1 where Sphinx warns."""
    from sphinx.application import Sphinx  # noqa: PLC0415  a second of imports

    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        source.mkdir()
        stage(source)
        site = Sphinx(
            source, None, out, Path(name) / "doctrees", "html", _SETTINGS,
            status=None, warningiserror=True,
        )  # fmt: skip
        site.build()
    shutil.copyfile(out / "README.html", out / "index.html")
    return site.statuscode


def main() -> int:
    """Build into the folder that the command line names."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    status = build(out)
    sys.stdout.write(f"{out / 'index.html'}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
