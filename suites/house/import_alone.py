"""Import each named module without our other modules loaded, and with warnings as errors.

Run as `python -m degarble.suites.house.import_alone LIGHT ... -- MODULE ...`. A light module is
imported in a fork of a bare interpreter and may not load a package of HEAVY. Then the packages of
PRELOADED are loaded, and before each other module all of ours are removed from sys.modules, so that
torch is loaded only once. Output: one JSON object, module to error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from contextlib import redirect_stdout, suppress
from io import StringIO

PRELOADED = ("torch", "numba", "pandas", "matplotlib", "hypothesis", "pytest", "typer", "cutlass")
HEAVY = ("torch", "numba", "pandas", "matplotlib", "hypothesis", "cutlass", "transformers")


def main(light: list[str], others: list[str]) -> None:
    """Print which of the modules cannot be imported alone."""
    failures = {name: _light_error(name) for name in light}
    for package in PRELOADED:
        with suppress(ImportError):
            importlib.import_module(package)
    for name in others:
        for ours in [module for module in sys.modules if module.split(".")[0] == "degarble"]:
            del sys.modules[ours]
        with warnings.catch_warnings():
            failures[name] = _import_error(name)
    print(json.dumps({name: error for name, error in failures.items() if error}))  # noqa: T201


def _light_error(name: str) -> str:
    """Import `name` in a fork, which has only what Python itself needs."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        error = _import_error(name)
        brought = [package for package in HEAVY if package in sys.modules]
        with os.fdopen(writer, "w") as pipe:
            pipe.write(error or (f"brings {', '.join(brought)} at import" if brought else ""))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        message = pipe.read()
    _, status = os.waitpid(child, 0)
    return f"ended with status {os.waitstatus_to_exitcode(status)}" if status else message


def _import_error(name: str) -> str:
    """Import `name`; tell what went wrong, or nothing."""
    warnings.simplefilter("error")
    printed = StringIO()
    try:
        with redirect_stdout(printed):
            importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001  whatever it is, it is the finding
        return f"{type(error).__name__}: {error}"
    return f"prints on import: {printed.getvalue()[:80]!r}" if printed.getvalue() else ""


if __name__ == "__main__":
    border = sys.argv.index("--")
    main(sys.argv[1:border], sys.argv[border + 1 :])
