"""Print measurements of the source tree as one table: `make house`.

Every figure is read from the sources. A number is a by-product of readable code: where it and good
sense disagree, good sense wins.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from degarble.suites.house.floors import cycle, violations
from degarble.suites.house.repository import modules, name_of, shown, tree
from degarble.suites.house.walks import (
    CAPTURE_TO_PAGE,
    MOST_FILES,
    MOST_RECORDS,
    RECORDS,
    files_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

FORMULAS = ("Owns", "Kept honest by", "Refuses nothing")
# file to reason: these have to name the formulas
FORMULAS_EXEMPT = {
    "suites/house/table.py": "holds the list",
    "suites/house/test_table.py": "plants offences",
}
_DIRECTIVE = re.compile(r"#\s*(noqa|type:|fmt:|pragma|!)")
_TEST_TREE = re.compile(r"\bdegarble\.suites\b|\bsuites/")


@dataclass(frozen=True)
class Figure:
    """One row: what is counted, what it is now, what it should be."""

    what: str
    now: str
    wanted: str


def is_product(path: Path) -> bool:
    """Return whether a file is part of the product."""
    return shown(path).startswith(("harness/", "references/", "kernels/", "reports/"))


def is_suite(path: Path) -> bool:
    """Return whether a file belongs to the test tree."""
    return shown(path).startswith("suites/")


def text_of(path: Path) -> str:
    """Return a file's text."""
    return path.read_text(encoding="utf-8")


def lines_of(text: str) -> int:
    """Count the lines of a file."""
    return len(text.splitlines())


def head_lines(text: str) -> int:
    """Count the lines of a module's docstring and imports, those for type checkers included."""
    source = ast.parse(text)
    heads = [node for node in source.body if _is_head(node, source)]
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in heads)


def _is_head(node: ast.stmt, source: ast.Module) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return True
    return node is source.body[0] and ast.get_docstring(source) is not None


def comment_lines(text: str) -> int:
    """Count lines with a comment for readers: directives to tools are none."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    return len({token.start[0] for token in comments if not _DIRECTIVE.match(token.string)})


def public_classes(text: str) -> list[str]:
    """Return the names of a module's public classes."""
    return [
        node.name
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def repeated_classes(texts: Iterable[str]) -> list[str]:
    """Return the public names of more than one class."""
    counts = Counter(name for text in texts for name in public_classes(text))
    return [name for name, count in counts.items() if count > 1]


def lines_in_tests(text: str) -> int:
    """Count the lines of test functions, with their decorators."""
    return sum(
        (node.end_lineno or node.lineno)
        - min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        + 1
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    )


def formulas(text: str) -> int:
    """Count the old formulas of docstrings and comments, those that a line break divides too."""
    joined = re.sub(r"\s*\n[\s#]*", " ", text)
    return sum(len(re.findall(rf"\b{formula}\b", joined)) for formula in FORMULAS)


def formulas_by_file(paths: Iterable[Path]) -> dict[str, int]:
    """Return each file with old formulas and their count, exempt files left out."""
    counts = {shown(path): formulas(text_of(path)) for path in paths}
    return {file: count for file, count in counts.items() if count and file not in FORMULAS_EXEMPT}


def names_test_tree(text: str) -> bool:
    """Return whether a string that is no docstring names the test tree."""
    source = ast.parse(text)
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(source)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    return any(
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
        and _TEST_TREE.search(node.value)
        for node in ast.walk(source)
    )


def _total(paths: Iterable[Path], count: Callable[[str], int]) -> int:
    return sum(count(text_of(path)) for path in paths)


def figures() -> Iterator[Figure]:
    """Yield every row."""
    product = [path for path in modules() if is_product(path)]
    suites = [path for path in modules() if is_suite(path)]
    lines, suite_lines = _total(product, lines_of), _total(suites, lines_of)
    tests = [path for path in suites if path.name.startswith("test_")]
    yield Figure("product lines; files", f"{lines:,}; {len(product)}", "<= 103,000; <= 330")
    yield Figure("suite lines; test files", f"{suite_lines:,}; {len(tests)}", "<= 84,000; <= 200")
    heads = _total(product, head_lines) / lines
    yield Figure("file heads, share of product lines", f"{heads:.1%}", "<= 9 %")
    comments = _total(product, comment_lines) / lines
    yield Figure("lines with a comment, share of product lines", f"{comments:.1%}", ">= 4 %")
    yield Figure("fullest folder", _fullest(product), "<= 25")
    repeated = repeated_classes(map(text_of, product))
    yield Figure("public names of more than one class", f"{len(repeated)}", "0")
    said = ", ".join(f'"{formula}"' for formula in FORMULAS)
    count = sum(formulas_by_file(modules()).values())
    yield Figure(said, f"{count:,}", "0")
    sources = {name_of(path): tree(path) for path in modules()}
    texts = [shown(path) for path in product if names_test_tree(text_of(path))]
    found = f"{len(violations(sources))}, {len(cycle(sources))}; {len(texts)}"
    yield Figure(
        "upward imports, modules in a cycle; product names the test tree", found, "0, 0; 0"
    )
    inside = _total(suites, lines_in_tests) / suite_lines
    yield Figure("suite lines inside test functions", f"{inside:.0%}", ">= 55 %")
    yield Figure(
        "files on the walk capture to page; record types of one number",
        f"{len(files_of(CAPTURE_TO_PAGE))}; {len(RECORDS)}",
        f"<= {MOST_FILES}; <= {MOST_RECORDS}",
    )


def _fullest(paths: Iterable[Path]) -> str:
    counts = Counter(path.parent for path in paths if path.name != "__init__.py")
    folder, count = counts.most_common(1)[0]
    return f"{count} ({shown(folder)})"


def table(rows: Iterable[Figure]) -> str:
    """Return the table in Markdown."""
    lines = [f"| {row.what} | {row.now} | {row.wanted} |" for row in rows]
    return "\n".join(["| what | now | wanted |", "|---|---|---|", *lines]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table(figures()))
