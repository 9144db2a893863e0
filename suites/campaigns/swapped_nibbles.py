"""Swap the nibbles of each packed matrix of a checkpoint in turn; count what the audit finds alone.

    degarble quantise BF16_CKPT NVFP4_CKPT --recipe weights.yaml
    python -m degarble.suites.campaigns.swapped_nibbles NVFP4_CKPT [CKPT ...]

A swap exchanges neighbouring columns of the profile that the audit takes of a matrix, which is what
it reads of swapped bytes. A matrix counts as found if it is named alone. Alarms are matrices that
are named while nothing is swapped.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from degarble.harness.checkpoint.audit.numbers.numbers import NAMED_ROWS
from degarble.harness.checkpoint.audit.statistics.inference import ORDER_NAMES, BlockProfiles
from degarble.harness.checkpoint.audit.statistics.tensor import statistics_of
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.checkpoint.view.weight_units import stored_of, units_of

if TYPE_CHECKING:
    from degarble.harness.checkpoint.audit.statistics.tensor import TensorStatistics
    from degarble.harness.checkpoint.view.weight_units import WeightUnit

    Measured = list[tuple[WeightUnit, TensorStatistics]]


def measured(checkpoint: Checkpoint) -> list[Measured]:
    """Return the weights of each layer with their statistics."""
    layers: dict[str, Measured] = defaultdict(list)
    for unit in units_of(checkpoint).units:
        if unit.is_linear or unit.component:
            found = statistics_of(stored_of(checkpoint, unit), profile=True, rows=NAMED_ROWS)
            layers[unit.place].append((unit, found))
    return list(layers.values())


def named(layer: Measured, swapped: int | None = None) -> set[int]:
    """Return the weights of a layer whose packing order is said to be another one."""
    profiles = BlockProfiles({}, by_name=True)
    for at, (unit, found) in enumerate(layer):
        if at == swapped and found.columns is not None:
            columns = found.columns.reshape(-1, 2)[:, ::-1].reshape(-1)
            profiles.add(at, unit, replace(found, columns=columns))
        else:
            profiles.add(at, unit, found)
    usual = {None, ORDER_NAMES[0]}
    return {each.row for each in profiles.judge() if each.inferred.value not in usual}


def main(paths: list[str]) -> None:
    """Print counts by projection."""
    total, found, others, alarms = Counter[str](), Counter[str](), 0, 0
    for path in paths:
        with Checkpoint.open(Path(path)) as checkpoint:
            for layer in measured(checkpoint):
                alarms += len(named(layer))
                for at, (unit, _) in enumerate(layer):
                    if not unit.is_linear:
                        continue
                    leaf = unit.module.rpartition(".")[2]
                    got = named(layer, at)
                    total[leaf] += 1
                    found[leaf] += got == {at}
                    others += bool(got - {at})
    counts = f"{found.total()} of {total.total()} found, {others} with another one, {alarms} alarms"
    rows = [f"  {leaf}: {found[leaf]} of {total[leaf]}" for leaf in sorted(total)]
    sys.stdout.write("\n".join([counts, *rows, ""]))


if __name__ == "__main__":
    main(sys.argv[1:])
