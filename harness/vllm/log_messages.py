"""Messages at the start of vLLM: the banner, a line for each part of each layer, one record a rank.

The record rank-N.json in the start's folder is read by the process that serves /metrics. It holds
names alone: no path, no host.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.base.version import VERSION
from degarble.harness.vllm.parts import RunningPart

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SCHEMA = 1
NO_COMMIT = "no commit known"
_LARGEST_RECORD = 64 << 20  # 61 layers, 384 experts as one module each: some MB at most


@dataclass(frozen=True)
class Banner:
    """Which code runs which checkpoint. `known`: entries of the ledger of known failures."""

    manifest: str
    recipe: str
    target: str
    kernels: tuple[str, ...]
    graphs: str
    proof: str
    known: tuple[str, ...] = ()
    commit: str = NO_COMMIT
    version: str = VERSION
    vllm: str = ""

    def lines(self) -> list[str]:
        """Say it in lines of a log."""
        return [
            f"degarble {self.version} ({self.commit}) in vLLM {self.vllm} on {self.target}",
            f"checkpoint {self.manifest}, recipe {self.recipe}",
            f"loader proof: {self.proof}",
            f"kernels: {', '.join(self.kernels) or 'none of degarble'}; CUDA graphs: {self.graphs}",
            *(f"known failure: {entry}" for entry in self.known or ("none in the ledger",)),
        ]


def commit_of(version_text: str) -> str:
    """Take the commit out of a local version such as 0.1.0+g1a2b3c4; our own tree has none."""
    _, plus, local = version_text.partition("+g")
    return f"commit {local}" if plus and local.isalnum() else NO_COMMIT


def folder_of(instance: str, asked: str | None) -> Path:
    """Return where the ranks of one start of vLLM leave their records."""
    if asked is not None:
        return Path(asked)
    kept = "".join(sign for sign in instance if sign.isalnum()) or "one"
    return Path(tempfile.gettempdir()) / f"degarble-vllm-{os.getuid()}-{kept}"


def leave(folder: Path, rank: int, banner: Banner, running: Sequence[RunningPart]) -> Path:
    """Write a rank's record, whole or not at all."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = json.dumps(
        {
            "schema": SCHEMA,
            "rank": rank,
            "banner": asdict(banner),
            "running": [part._asdict() for part in running],
        }
    )
    path = folder / f"rank-{rank}.json"
    beside = path.with_suffix(".part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
    return path


def read_records(folder: Path) -> dict[int, list[RunningPart]]:
    """Read what the ranks left so far."""
    found = {}
    for path in sorted(folder.glob("rank-*.json")):
        try:
            if path.stat().st_size > _LARGEST_RECORD:
                raise ValueError(f"larger than {_LARGEST_RECORD} bytes")  # noqa: TRY301
            raw = json.loads(path.read_text(encoding="utf-8"))
            if raw["schema"] != SCHEMA:
                raise ValueError(f"schema {raw['schema']}")  # noqa: TRY301
            found[int(raw["rank"])] = [RunningPart(**each) for each in raw["running"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UnreadableFile(
                f"record {path.name}", str(error), "a rank's record", "Remove it, start again."
            ) from error
    return found


def labels(rank: int, running: Iterable[RunningPart]) -> list[dict[str, str]]:
    """Return the labels of degarble_part_info for a rank."""
    return [{"rank": str(rank), **part._asdict()} for part in running]


def lines(running: Sequence[RunningPart]) -> list[str]:
    """Say what runs where, and how much of it is whose."""
    mine = sum(part.by == "degarble" for part in running)
    head = f"{len(running)} parts: {mine} by degarble, {len(running) - mine} by vllm"
    return [head, *(part.line() for part in running)]
