"""Patterns that no file may contain: unfinished marks, machine paths, unsafe loading, spelling.

Each pattern has its reason. This file and its suite are exempt from the patterns.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# pattern to reason
FORBIDDEN: dict[str, str] = {
    r"\b(TODO|FIXME|XXX|HACK)\b": "finish it, or refuse it by name with a suite",
    r"(?i)\bplaceholder\b|\blorem ipsum\b": "nothing unfinished is shipped",
    r"(?i)(?<!type )\bstub(s|bed)?\b": "nothing unfinished is shipped",
    r"(?i)\bkeep (this |it |them )?in sync\b": "state the fact once and call it twice",
    r"(?<![\w.~*])/(work|home|root|Users|mnt|data)/\w": "no path of somebody's machine",
    r"(?i)\b(ground truth|culprit)\b": "not a word of this project; see docs/words.md",
    r"https?://(?!127\.0\.0\.1|localhost|www\.w3\.org/|www\.apache\.org/)\S*\b(index|simple)/": (
        "no registry host: the user's own pip settings decide"
    ),
}

AMERICAN = re.compile(r"(?i)(quantiz|normaliz|initializ|behavior|localiz|serializ)")

_PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
_UNSAFE_CALLS = {
    "torch.load": "reads pickles",
    "torch.save": "writes pickles",
    "pd.read_pickle": "reads pickles",
    "pandas.read_pickle": "reads pickles",
    "yaml.load": "builds any object; use yaml.safe_load",
    "yaml.unsafe_load": "builds any object; use yaml.safe_load",
    "eval": "runs what it reads",
    "exec": "runs what it reads",
}


def forbidden_in(file: str, text: str) -> Iterator[str]:
    """Yield every forbidden word with its place and reason."""
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, reason in FORBIDDEN.items():
            match = re.search(pattern, line)
            if match:
                yield f"{file}:{number}: {match.group()!r}: {reason}"


def american_names(file: str, source: ast.Module) -> Iterator[str]:
    """Yield names that we define in American spelling; names that we only call keep theirs."""
    for node in ast.walk(source):
        name = None
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = node.name
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        if name and AMERICAN.search(name):
            yield f"{file}:{getattr(node, 'lineno', 0)}: {name}: British spelling in our own names"


def unsafe_in(file: str, source: ast.Module) -> Iterator[str]:
    """Yield every use of a pickle, and every call that runs what it reads."""
    for node in ast.walk(source):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module.split(".")[0]]
        for name in names:
            if name in _PICKLES:
                yield f"{file}:{getattr(node, 'lineno', 0)}: import of {name}: unpickling runs code"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in _UNSAFE_CALLS:
                yield f"{file}:{node.lineno}: {called}: {_UNSAFE_CALLS[called]}"
            if any(keyword.arg == "allow_pickle" for keyword in node.keywords):
                yield f"{file}:{node.lineno}: allow_pickle: unpickling executes code"
