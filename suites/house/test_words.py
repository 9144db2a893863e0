"""No unfinished marks, machine paths, pickles or American names; each check detects one.

Each pattern has its reason. This file is exempt from them.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from degarble.suites.house.repository import modules, nodes, shown, texts, tree

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

# (file, reason) with text that has to name what is forbidden
EXEMPT = {
    "suites/house/test_words.py": "holds the patterns, and plants the offences",
}

# Methods that somebody else calls by this name: (file, name) to reason
THEIRS = {
    ("harness/vllm/bound/config.py", "override_quantization_method"): "vLLM's hook",
    ("harness/vllm/bound/metrics.py", "log_engine_initialized"): "vLLM's hook",
}

# Calls that are needed: (file, call) to reason
_CELLS = "the cells of our own notebook"
OWN_FILE = "between two processes of one suite, in its own temporary folder"
NEEDED = {
    ("suites/references/transformers_cases.py", "torch.save"): OWN_FILE,
    ("suites/references/transformers_cases.py", "torch.load"): OWN_FILE,
    ("suites/references/transformers_oracle.py", "torch.save"): OWN_FILE,
    ("suites/references/transformers_oracle.py", "torch.load"): OWN_FILE,
    ("suites/documents/notebook.py", "exec"): _CELLS,
    ("suites/documents/notebook.py", "eval"): _CELLS,
    ("suites/capture/imports/dumps.py", "torch.save"): "as the engines write their dumps",
    ("suites/capture/imports/test_torch_files.py", "torch.save"): "what the reader has to read",
    (
        "suites/model/config/test_config.py",
        "import of pickle",
    ): "own records travel between processes",
}


def forbidden_in(file: str, text: str) -> Iterator[str]:
    """Yield every forbidden word with its place and reason."""
    near = {
        each: reason for each, reason in FORBIDDEN.items() if re.search(each, text, re.MULTILINE)
    }
    for number, line in enumerate(text.splitlines() if near else (), 1):
        for pattern, reason in near.items():
            match = re.search(pattern, line)
            if match:
                yield f"{file}:{number}: {match.group()!r}: {reason}"


def american_names(file: str, source: ast.Module) -> Iterator[str]:
    """Yield names that we define in American spelling; names that we only call keep theirs."""
    defined = nodes(source, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    named: list[tuple[ast.AST, str]] = [(node, node.name) for node in defined]
    named += [(node, node.arg) for node in nodes(source, ast.arg)]
    names = nodes(source, ast.Name)
    named += [(node, node.id) for node in names if isinstance(node.ctx, ast.Store)]
    for node, name in named:
        if AMERICAN.search(name):
            yield f"{file}:{getattr(node, 'lineno', 0)}: {name}: British spelling in our own names"


def unsafe_in(file: str, source: ast.Module) -> Iterator[str]:
    """Yield every use of a pickle, and every call that runs what it reads."""
    imports = [(n.lineno, alias.name) for n in nodes(source, ast.Import) for alias in n.names]
    imports += [(n.lineno, n.module) for n in nodes(source, ast.ImportFrom) if n.module]
    for line, module in imports:
        name = module.split(".")[0]
        if name in _PICKLES:
            yield f"{file}:{line}: import of {name}: unpickling runs code"
    last = {called.rpartition(".")[2] for called in _UNSAFE_CALLS}
    for node in nodes(source, ast.Call):
        if getattr(node.func, "attr", getattr(node.func, "id", "")) in last:
            called = ast.unparse(node.func)
            if called in _UNSAFE_CALLS:
                yield f"{file}:{node.lineno}: {called}: {_UNSAFE_CALLS[called]}"
        if any(keyword.arg == "allow_pickle" for keyword in node.keywords):
            yield f"{file}:{node.lineno}: allow_pickle: unpickling executes code"


def listed(lines: list[str]) -> str:
    return "\n" + "\n".join(lines)


def test_no_forbidden_words() -> None:
    found: list[str] = []
    for path in texts():
        if shown(path) in EXEMPT:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # weights and pictures
        found += forbidden_in(shown(path), text)
    assert not found, listed(found)


def test_our_own_names_are_british() -> None:
    found = [line for path in modules() for line in american_names(shown(path), tree(path))]
    theirs = [
        line
        for line in found
        if any(line.startswith(file) and f": {name}: " in line for file, name in THEIRS)
    ]
    assert len(theirs) == len(THEIRS), "an exception is no longer needed"
    rest = [line for line in found if line not in theirs]
    assert not rest, listed(rest)


def test_nothing_is_unpickled_or_evaluated() -> None:
    found = [line for path in modules() for line in unsafe_in(shown(path), tree(path))]
    excused = {
        key: [line for line in found if line.startswith(key[0]) and f": {key[1]}:" in line]
        for key in NEEDED
    }
    assert all(excused.values()), "an exception is no longer needed"
    assert all(file.startswith("suites/") for file, _ in NEEDED)
    rest = [line for line in found if not any(line in lines for lines in excused.values())]
    assert not rest, listed(rest)


@pytest.mark.parametrize(
    "line",
    [
        "# TODO: later",
        "# FIXME",
        "x = 1  # a placeholder",
        "def f(): ...  # stub",
        "# keep in sync with y.py",
        'open("/home/somebody/file")',
        "the ground truth",
        "pip install --index-url https://example.org/simple/",
    ],
)
def test_planted_word_is_found(line: str) -> None:
    assert [text.split(":")[0] for text in forbidden_in("planted.py", line)] == ["planted.py"]


@pytest.mark.parametrize(
    "line",
    ["methods", "/usr/bin/env sh", "http://127.0.0.1:8000/v1/", "stubborn", "type stubs", "# XXXL"],
)
def test_harmless_text_passes(line: str) -> None:
    assert list(forbidden_in("planted.py", line)) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import yaml\nyaml.load('x')",
        "eval('1')",
    ],
)
def test_planted_unsafe_call_is_found(text: str) -> None:
    assert len(list(unsafe_in("planted.py", ast.parse(text)))) == 1


@pytest.mark.parametrize(
    "text",
    ["def quantize(): ...", "def f(normalized): ...", "behavior = 1", "class Serializer: ..."],
)
def test_planted_american_name_is_found(text: str) -> None:
    assert len(list(american_names("planted.py", ast.parse(text)))) == 1


def test_upstream_names_may_be_called() -> None:
    assert list(american_names("x.py", ast.parse("import a\na.quantize(normalized=a.b)"))) == []
