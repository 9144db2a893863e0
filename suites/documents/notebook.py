"""Run the cells of a notebook in order, as a kernel does, and return what they show.

`python -m degarble.suites.documents.notebook FILE` prints it.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any


def cells(path: Path) -> list[str]:
    """Return the code cells."""
    held = json.loads(path.read_text(encoding="utf-8"))
    assert held["nbformat"] == 4, path
    return ["".join(cell["source"]) for cell in held["cells"] if cell["cell_type"] == "code"]


def run_notebook(path: Path) -> list[Any]:
    """Run every cell; return the value of the last expression of each, None without one."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    return [_run(source, f"{path.name}[{number}]", namespace)
            for number, source in enumerate(cells(path))]  # fmt: skip


def _run(source: str, name: str, namespace: dict[str, Any]) -> Any:
    body = ast.parse(source, name)
    last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
    exec(compile(body, name, "exec"), namespace)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    return eval(compile(ast.Expression(last.value), name, "eval"), namespace)


if __name__ == "__main__":
    for value in run_notebook(Path(sys.argv[1])):
        if value is not None:
            sys.stdout.write(f"{value!r}\n")
