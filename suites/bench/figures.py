"""`python -m degarble.suites.bench.figures`: measure, and rewrite the sections of docs/figures.md.

A section lies between two marker lines and is replaced as a whole; text outside of the markers is
written by hand and stays. Each section has the date, machine and command of its measurement,
because sections may come from different machines. The file is replaced in one step, after
everything was measured.

Exit status 0 when every target was met, 1 otherwise; the page says which.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import EXIT_AGREES, EXIT_DIFFERS, DegarbleError, UnknownName
from degarble.suites.bench.timing import Section, Settings, Table, Target, machine, pin

if TYPE_CHECKING:
    from collections.abc import Sequence

BENCHES = {  # key to module, imported when run
    "formats": "degarble.suites.bench.bench_formats",
    "checkpoint-quantise": "degarble.suites.bench.bench_checkpoint_quantise",
    "checkpoint-large": "degarble.suites.bench.bench_quantise_large",
    "capture": "degarble.suites.bench.bench_capture",
    "check": "degarble.suites.bench.bench_check",
    "compare": "degarble.suites.bench.bench_compare",
    "peers": "degarble.suites.bench.bench_peers",
    "full-size": "degarble.suites.bench.bench_full_size",
    "audit": "degarble.suites.bench.bench_audit",
    "museum": "degarble.suites.bench.bench_museum",
    "references": "degarble.suites.bench.bench_references",
    "streaming": "degarble.suites.bench.bench_streaming",
    "tiny": "degarble.suites.bench.bench_tiny",
    "history": "degarble.suites.bench.bench_history",
}

PAGE = Path(__file__).resolve().parents[2] / "docs" / "figures.md"

HEADING = """# Figures

Measured by `make figures`, which rewrites the sections below; nothing between the markers is typed
by hand. A figure counts for the machine that stands beside it. Arms run side by side in one
process, in turns. Times are medians, ratios are medians of the ratios within a round; quartiles
stand in brackets.
"""


def measure(key: str, settings: Settings) -> Section:
    """Run one bench."""
    if key not in BENCHES:
        raise UnknownName.among("--only", key, BENCHES)
    section: Section = import_module(BENCHES[key]).run(settings)
    return section


def rendered(section: Section, origin: Sequence[str]) -> str:
    """Return a section as Markdown; `origin` says date, machine and command."""
    parts = [f"## {section.title}", "\n".join(f"- {line}" for line in (*origin, *section.notes))]
    parts.append(_table(_target_table(section.targets)))
    parts += [_table(table) for table in section.tables]
    return "\n\n".join(parts) + "\n"


def replaced(page: str, key: str, text: str) -> str:
    """Return `page` with the section `key` exchanged, or with it at the end."""
    begin, end = f"<!-- figures: {key} -->", f"<!-- end of figures: {key} -->"
    block = f"{begin}\n{text}{end}\n"
    if begin not in page:
        return f"{page.rstrip()}\n\n{block}"
    before, rest = page.split(begin, 1)
    if end not in rest:
        raise UnknownName(
            "docs/figures.md", begin, f"the line {end} after it", "Restore the marker."
        )
    return before + block + rest.split(end, 1)[1].lstrip("\n")


def _target_table(targets: Sequence[Target]) -> Table:
    rows = tuple(
        (
            target.claim,
            f"{'>=' if target.at_least else '<='} {target.wanted:g}",
            f"{target.measured:.2f}",
            "met" if target.met else "MISSED",
        )
        for target in targets
    )
    return Table("Targets", ("claim", "wanted", "measured", ""), rows)


def _table(table: Table) -> str:
    lines = [table.header, ("---",) * len(table.header), *table.rows]
    body = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return f"**{table.title}**\n\n{body}"


def _origin(settings: Settings, packages: Sequence[str], arguments: Sequence[str]) -> list[str]:
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    command = " ".join(["make figures", *([f'ARGS="{" ".join(arguments)}"'] if arguments else [])])
    return [
        f"{today}, `{command}`",
        machine(packages),
        f"pinned to {settings.threads} cores, load average before {os.getloadavg()[0]:.2f}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the benches that were asked for and rewrite their sections."""
    arguments = sys.argv[1:] if arguments is None else arguments
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="make figures", description="Measure docs/figures.md.")
    parser.add_argument("--only", action="append", metavar="KEY", help=f"of {', '.join(BENCHES)}")
    parser.add_argument("--size", type=int, default=defaults.size)
    parser.add_argument("--rounds", type=int, default=defaults.rounds)
    parser.add_argument("--threads", type=int, default=defaults.threads)
    parser.add_argument("--no-peers", action="store_true", help="leave outside packages out")
    parser.add_argument("--page", type=Path, default=PAGE)
    asked: Any = parser.parse_args(arguments)
    settings = Settings(asked.size, asked.rounds, asked.threads, not asked.no_peers)
    met = True
    try:
        for key in asked.only or BENCHES:
            pin(settings.threads)
            origin = _origin(settings, _packages(key), arguments)
            section = measure(key, settings)
            sys.stdout.write(rendered(section, origin))
            _keep(asked.page, key, rendered(section, origin))
            met = met and all(target.met for target in section.targets)
    except DegarbleError as error:
        sys.stderr.write(f"REFUSED: {error}\n")
        return error.exit_status
    return EXIT_AGREES if met else EXIT_DIFFERS


def _keep(page: Path, key: str, text: str) -> None:
    """Put a section into the page as it is now: others may have written while this one measured."""
    whole = replaced(page.read_text() if page.exists() else HEADING, key, text)
    draft = page.with_suffix(f".md.{os.getpid()}")
    draft.write_text(whole)
    draft.replace(page)


def _packages(key: str) -> tuple[str, ...]:
    if key not in BENCHES:
        raise UnknownName.among("--only", key, BENCHES)
    packages: tuple[str, ...] = import_module(BENCHES[key]).PACKAGES
    return packages


if __name__ == "__main__":
    raise SystemExit(main())
