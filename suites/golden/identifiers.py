"""Every name that users type, read or store: ids, options, statuses, variables, public names."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from typing import TYPE_CHECKING, Any

from degarble.harness import api
from degarble.harness.base import errors
from degarble.harness.base.protocols import BACKEND_ENTRY_POINT_GROUP
from degarble.harness.checkpoint.audit.findings import RULES
from degarble.harness.checkpoint.transform.convert.job import CONVERSIONS
from degarble.harness.cli.imports import EXIT_INTERRUPTED
from degarble.harness.cli.main import EXIT_PIPE_CLOSED
from degarble.harness.cli.terminal import EXIT_CRASHED
from degarble.harness.engine.conventions.registry import REGISTRY
from degarble.harness.engine.faults.registry import FAULTS, MODEL_FAULTS
from degarble.harness.formats.dialects import DIALECTS
from degarble.harness.formats.number_formats import BLOCK_FORMATS, ELEMENT_FORMATS
from degarble.harness.history.records import MEASURES
from degarble.harness.model.components import components
from degarble.harness.model.types import RECIPE_NAMES
from degarble.harness.museum.plants import roles_of
from degarble.harness.nightly.table import STEPS
from degarble.harness.plugins.pytest_plugin import MARKERS, OPTIONS, PATH_OPTIONS
from degarble.harness.report.verdict import Verdict
from degarble.kernels.runtime.targets import TARGETS
from degarble.references.tiny.configs import TINY_V4, TINY_V32
from degarble.suites.house.pages.command_line import commands, parameters
from degarble.suites.house.repository import ROOT, modules, nodes, shown, tree
from degarble.suites.support.families import LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Iterator

# Other programs' variables that we read.
_FOREIGN_VARIABLES = (
    "CI", "COLUMNS", "MASTER_ADDR", "MASTER_PORT", "NO_COLOR", "RANK", "RAY_ADDRESS",
    "TERMINAL_WIDTH", "VLLM_PLUGINS", "WORLD_SIZE",
)  # fmt: skip
_OURS = re.compile(r"DEGARBLE_[A-Z0-9_]+")


def data() -> dict[str, Any]:
    """Return the names, which never change."""
    return {
        "rules": {rule.id: str(rule.level) for rule in RULES.values()},
        "faults": {fault.id: list(map(str, roles_of(fault))) for fault in MODEL_FAULTS.values()},
        "faults of numbers": list(FAULTS),
        "components": {
            config.family: {
                component.name: [str(site) for site in component.sites]
                for component in components(config)
            }
            for config in (TINY_V4, TINY_V32)
        },
        "recipes": list(RECIPE_NAMES),
        "layouts": [f"{family} {name}" for family, name in LAYOUTS],
        "conversions": list(CONVERSIONS),
        "block formats": list(BLOCK_FORMATS),
        "element formats": list(ELEMENT_FORMATS),
        "dialects": list(DIALECTS),
        "conventions": {
            name: [str(value) for value in one.values] for name, one in REGISTRY.items()
        },
        "steps of a night": [step.name for step in STEPS],
        "measures of a history": list(MEASURES),
        "targets": list(TARGETS),
        "options": {name: list(_options(name, command)) for name, command in commands()},
        "options of pytest": [*PATH_OPTIONS, "--backend", "--report-dir", *OPTIONS],
        "markers of pytest": [line.partition(":")[0] for line in MARKERS],
        "verdicts": {str(verdict): verdict.exit_status for verdict in Verdict},
        "errors": {
            name: value.exit_status
            for name, value in vars(errors).items()
            if isinstance(value, type) and issubclass(value, errors.DegarbleError)
        },
        "other exit statuses": {
            "crashed": EXIT_CRASHED,
            "interrupted": EXIT_INTERRUPTED,
            "pipe closed": EXIT_PIPE_CLOSED,
        },
        "environment": sorted(_variables()),
        "entry points": _entry_points(),
        "api": {name: _surface(getattr(api, name)) for name in sorted(api.__all__)},
    }


def texts() -> dict[str, Any]:
    """Return the sentences that belong to the names; help and refusals are in suites/cli."""
    return {
        "rules": {rule.id: [rule.statement, rule.source] for rule in RULES.values()},
        "faults": {
            fault.id: [fault.title, fault.effect, fault.remedy] for fault in MODEL_FAULTS.values()
        },
        "conventions": {
            name: [one.subject, *one.values.values()] for name, one in REGISTRY.items()
        },
        "verdicts": {str(verdict): verdict.meaning for verdict in Verdict},
    }


def _options(name: str, command: Any) -> Iterator[str]:
    """Yield each parameter: its names, what it takes, and its default."""
    for one in parameters(name, command):
        spelled = " ".join((*one.opts, *one.secondary_opts))
        takes = "flag" if getattr(one, "is_flag", False) else str(one.metavar)
        needed = ", required" if one.required else ""
        several = ", several" if getattr(one, "multiple", False) or one.nargs != 1 else ""
        yield f"{one.param_type_name} {spelled} {takes}{needed}{several} = {one.default}"


def _variables() -> set[str]:
    """Collect the environment variables that product code names."""
    found = set()
    for path in modules():
        if not shown(path).startswith(("harness", "kernels", "references", "reports")):
            continue
        for node in nodes(tree(path), ast.Constant):
            if isinstance(node.value, str):
                text = node.value
                if _OURS.fullmatch(text) or text in _FOREIGN_VARIABLES:
                    found.add(text)
    return found


def _entry_points() -> dict[str, list[str]]:
    """Return groups and names; where they lead moves with the modules."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {
        "scripts": list(project["scripts"]),
        **{group: list(names) for group, names in project["entry-points"].items()},
        "backends": [BACKEND_ENTRY_POINT_GROUP],
    }


def _surface(value: Any) -> list[str]:
    """Return what a user of the name may call or read."""
    if not inspect.isclass(value):
        return [_signature(value)] if inspect.isfunction(value) else _surface(type(value))
    own = {
        name: member
        for parent in reversed(value.__mro__)
        if parent.__module__.startswith("degarble.")
        for name, member in (*vars(parent).items(), *dict.fromkeys(parent.__annotations__).items())
        if not name.startswith("_")
    }
    return [
        f"{name}{_signature(member.__func__ if isinstance(member, classmethod) else member)}"
        if inspect.isroutine(member)
        else name
        for name, member in sorted(own.items())
    ]


def _signature(function: Any) -> str:
    """Return names, kinds and defaults of parameters, without types."""
    bare = inspect.unwrap(getattr(function, "__func__", function))
    taken = inspect.signature(bare).parameters.values()
    return f"({', '.join(str(one.replace(annotation=one.empty)) for one in taken)})"
