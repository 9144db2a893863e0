"""Register what a description consists of, so that it can be written as data and read back.

A recovered change is functions with their arguments (`functools.partial`) and records of them, no
closures. Each function and record is registered once, by `operation`, under the name of its module
and its own: that name stands in files of adopted faults, so renaming one needs an entry in
`RENAMED`. What is not registered is refused by name when a description is to be saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

from degarble.harness.engine.faults.model_faults import (
    changed_facts,
    changed_inputs,
    changed_outputs,
    changed_weights,
    with_switches,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

Registered = TypeVar("Registered")
OPERATIONS: dict[str, Callable[..., Any]] = {}
RENAMED: dict[str, str] = {}  # former names of operations, by which files may call them
_OF_TORCH = (
    "abs", "add", "ceil", "clamp", "clone", "div", "flip", "floor", "full_like", "mul", "neg",
    "ones_like", "reciprocal", "relu", "remainder", "roll", "round", "square", "trunc",
    "zeros_like",
)  # fmt: skip


def operation(made: Registered) -> Registered:
    """Register a function, or a record, as part of a change."""
    module, name = (getattr(made, each) for each in ("__module__", "__name__"))
    name = f"{module.rpartition('.')[2]}.{name.lstrip('_')}"
    assert name not in OPERATIONS, f"two operations are called {name}"
    OPERATIONS[name] = made  # type: ignore[assignment]
    return made


for _each in (changed_facts, changed_inputs, changed_outputs, changed_weights, with_switches):
    operation(_each)
OPERATIONS.update({f"torch.{name}": getattr(torch, name) for name in _OF_TORCH})
