"""Compare what vLLM's source says of loading with our packing table, architecture by architecture.

    python -m degarble.suites.campaigns.servers.vllm_maps [--vllm-source DIR] [--models llama,qwen3]

Each model is built tiny, saved by transformers, and proven twice on one rank: by the class that
vLLM has for it, and by the table. A line says how many tensors both place alike, how many
otherwise, which the source leaves open, and what the proof finds. Without DIR the installed vLLM is
read; nothing of it runs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from degarble.harness.capture.engine.derived import PACKED
from degarble.harness.checkpoint.audit.loader.derived_maps import DerivedEngine, derived_map
from degarble.harness.checkpoint.audit.loader.engine_maps import ONE_RANK
from degarble.harness.checkpoint.audit.loader.engine_sources import EngineSource
from degarble.harness.checkpoint.audit.loader.proof import prove
from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.commands.audit.audit import PACKING_TABLE, derived_loader
from degarble.harness.inference.traced import naming_rules, traced_config
from degarble.suites.campaigns.architectures import kinds, settings
from degarble.suites.references.traced.traced_models import built


class Compared(NamedTuple):
    """Stored tensors of one model by what source and table say; alarms of the proof."""

    origin: str
    alike: int = 0
    differ: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()
    alarms: tuple[str, ...] = ()

    @property
    def own_class(self) -> bool:
        """Whether vLLM has a class for the architecture."""
        return PACKING_TABLE not in self.origin


def compared(folder: Path, source: Path | None) -> Compared:
    """Compare both maps of a checkpoint."""
    with Checkpoint.open(folder) as checkpoint:
        read = derived_loader(checkpoint, "vllm", ONE_RANK, source)
        config = traced_config(checkpoint)
        engine = DerivedEngine("vllm", PACKED, ("w13", "w2"))
        table = derived_map(checkpoint, config, naming_rules(config), engine, ONE_RANK)
        assert read.derived is not None, "of a traced family"
        assert table.derived is not None, "of a traced family"
        mine, other = read.derived.resolved, table.derived.resolved
        differ = [
            f"{name}: {mine[name].target} slot {mine[name].slot} ({mine[name].outcome}),"
            f" table {other[name].target} slot {other[name].slot}"
            for name in other
            if name in mine and mine[name] != other[name]
        ]
        findings = prove(checkpoint, read).findings
        alarms = {each.rule for each in findings if each.level is not Level.NOTE}
        return Compared(
            read.derived.origin, sum(mine.get(name) == other[name] for name in other),
            tuple(differ), read.derived.undecided, tuple(sorted(alarms)),
        )  # fmt: skip


def main() -> int:
    """Print a line for each architecture, the differences below it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-source", type=Path)
    parser.add_argument("--models", default="")
    given = parser.parse_args()
    if given.vllm_source is None and EngineSource.installed() is None:
        parser.error("no vLLM is installed: pass --vllm-source DIR")
    for model in given.models.split(",") if given.models else kinds():
        try:
            with tempfile.TemporaryDirectory() as folder:
                made: Any = built(model, settings=settings(model))
                made.save_pretrained(folder)
                found = compared(Path(folder), given.vllm_source)
        except Exception:  # noqa: BLE001  a model that cannot be built is a line as well
            print(f"{model}: not built: {traceback.format_exc().splitlines()[-1]}"[:200])  # noqa: T201
            continue
        if not found.own_class:
            print(f"{model}: no class of its own")  # noqa: T201  a campaign's own lines
            continue
        print(  # noqa: T201
            f"{model}: alike {found.alike}, differ {len(found.differ)}, left open"
            f" {len(found.undecided)}, findings {', '.join(found.alarms) or 'none'}"
        )
        for each in (*found.differ[:3], *found.undecided[:3]):
            print(f"    {each}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
