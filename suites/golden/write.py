"""Write the golden set anew: `python -m degarble.suites.golden.write [PART ...]`; see README.md."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from degarble.suites.golden import checkpoints, documents, identifiers, ptx, store, verdicts


def main(parts: list[str]) -> int:
    """Write the parts that are named, or all."""
    known = ("identifiers", "documents", "checkpoints", *verdicts.JUDGED, "ptx")
    unknown = sorted(set(parts) - set(known))
    if unknown:
        print(f"no part {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)  # noqa: T201
        return 2
    for part in parts or known:
        with TemporaryDirectory(prefix="degarble-golden-") as folder:
            _write(part, Path(folder))
        print(f"wrote {part}", flush=True)  # noqa: T201  a command
    return 0


def _write(part: str, folder: Path) -> None:
    if part == "identifiers":
        store.write("data/identifiers.json", identifiers.data())
        store.write("texts/identifiers.json", identifiers.texts())
    elif part == "ptx":
        ptx.add_found()
    elif part == "documents":
        store.write("data/documents.json", documents.data(folder))
    elif part == "checkpoints":
        store.write("data/checkpoints.json", checkpoints.data(folder))
    else:
        for file, value in verdicts.as_files(part, verdicts.JUDGED[part](folder)).items():
            store.write(file, value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
