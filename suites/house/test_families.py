"""No code outside a family's folder asks which family it has: the family's own objects answer.

A check of a type or a name has to be edited for the next family, and whatever it does not know
falls into its `else`. A family's classes derive from ModelFamily or ModelFacts, or are records that
name their `family`.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from degarble.harness.model.registry import entries
from degarble.suites.house.repository import modules, name_of, nodes, tree

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

BASES = frozenset({"ModelFamily", "ModelFacts"})
FAMILIES, TESTS = "degarble.harness.families.", ("degarble.suites.", "conftest")
PLANTED = """
class V9Config:
    family: ClassVar[str] = "v9"

class Ninth(ModelFamily):
    pass

class V9Facts(ModelFacts):
    pass

class V91Facts(V9Facts):
    pass
"""
ASKING = (
    "if isinstance(config, V9Config): pass",
    "if isinstance(facts, V32Config | V9Facts): pass",
    "assert issubclass(kind, (V91Facts, int))",
    "if type(family) is families.Ninth: pass",
    "match config:\n    case V9Config(width=3): pass",
    "if config.family == 'v9': pass",
    "if config.family in {V9Config.family, 'other'}: pass",
    "if family_of(config).name != 'v9': pass",
)
ANSWERED = (
    "if isinstance(call.args[0], ModelFacts): pass",
    "if isinstance(config, dict): pass",
    "if config.family != other.family: pass",
    "if fault.family == 'router': pass",
    "V9Config(width=3)",
)


def family_classes(sources: Mapping[str, ast.Module]) -> dict[str, str]:
    """Return the folder of every class that one family has, by the class's name."""
    classes = {
        node.name: (module, node)
        for module, source in sources.items()
        for node in nodes(source, ast.ClassDef)
    }
    found = {name for name, (_, node) in classes.items() if _names_family(node)}
    while more := {
        name
        for name, (_, node) in classes.items()
        if name not in found | BASES and any(_name(base) in found | BASES for base in node.bases)
    }:
        found |= more
    return {name: classes[name][0].rpartition(".")[0] for name in found}


def _names_family(record: ast.ClassDef) -> bool:
    fields = (line for line in record.body if isinstance(line, ast.AnnAssign) and line.value)
    return any(_name(field.target) == "family" for field in fields)


def _name(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def questions(
    source: ast.Module, module: str, own: Mapping[str, str], names: frozenset[str]
) -> Iterator[str]:
    """Yield every check of a family's class or name, outside the folder that has it."""
    for node in nodes(source, ast.Call, ast.MatchClass, ast.Compare):
        kinds = {_name(kind) for side in _checked(node) for kind in ast.walk(side)} & own.keys()
        foreign = {kind for kind in kinds if not module.startswith(f"{own[kind]}.")}
        for found in sorted(foreign | (_compared_names(node) & names)):
            yield f"{module}:{getattr(node, 'lineno', 0)}: asks for {found}"


def _checked(node: ast.AST) -> list[ast.expr]:
    """Return the expressions of a check that name classes."""
    if isinstance(node, ast.Call) and _name(node.func) in {"isinstance", "issubclass"}:
        return node.args[1:]
    if isinstance(node, ast.MatchClass):
        return [node.cls]
    return [node.left, *node.comparators] if isinstance(node, ast.Compare) else []


def _compared_names(node: ast.AST) -> set[str]:
    """Return the texts that a family's name is compared with."""
    sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
    if not any(_name(side) in {"family", "name"} for side in sides):
        return set()
    parts = (part for side in sides for part in ast.walk(side) if isinstance(part, ast.Constant))
    return {part.value for part in parts if isinstance(part.value, str)}


def test_family_checks_are_found_and_others_are_not() -> None:
    own = family_classes({"degarble.harness.families.v9.family": ast.parse(PLANTED)})
    assert set(own) == {"V9Config", "Ninth", "V9Facts", "V91Facts"}
    for text in ASKING:
        asked = (ast.parse(text), "degarble.harness.engine.x", own, frozenset({"v9"}))
        assert len(list(questions(*asked))) == 1, text
        assert not list(questions(asked[0], "degarble.harness.families.v9.x", own, frozenset()))
    for text in ANSWERED:
        assert not list(questions(ast.parse(text), "degarble.x", own, frozenset({"v9"}))), text


def test_nobody_asks_which_family_it_is() -> None:
    product = (path for path in modules() if not name_of(path).startswith(TESTS))
    sources = {name_of(path): tree(path) for path in product}
    own, names = family_classes(sources), frozenset(entries())
    assert {"V4Config", "V32Config", "TracedConfig", "TracedFacts", "Traced"} <= set(own)
    found = [
        line
        for name, source in sources.items()
        if not name.startswith(FAMILIES)
        for line in questions(source, name, own, names)
    ]
    assert not found, "Give families an attribute or a method that answers.\n" + "\n".join(found)
