"""Enumerate the mutants of a module with cosmic-ray's operators, and draw a sample by a seed.

A mutant's key is made of its file, function, operator and line of text, not of its line number: a
sample stays the same where other functions of the file change.
"""

from __future__ import annotations

import ast
import hashlib
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# One neighbour of each operator: cosmic-ray offers eleven for a plus, and nine of them end in the
# same TypeError, which says nothing about a suite.
BINARY_PAIRS = (
    "Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "Pow_Mul",
    "LShift_RShift", "RShift_LShift", "BitAnd_BitOr", "BitOr_BitAnd", "BitXor_BitAnd",
)  # fmt: skip
COMPARISON_PAIRS = (
    "Eq_NotEq", "NotEq_Eq", "Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt",
    "GtE_Lt", "Is_IsNot", "IsNot_Is",
)  # fmt: skip
UNARY_PAIRS = ("Delete_USub", "Delete_Invert", "Delete_Not")
OPERATORS = (
    *(f"ReplaceBinaryOperator_{pair}" for pair in BINARY_PAIRS),
    *(f"ReplaceComparisonOperator_{pair}" for pair in COMPARISON_PAIRS),
    *(f"ReplaceUnaryOperator_{pair}" for pair in UNARY_PAIRS),
    "AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr",
    "ReplaceOrWithAnd", "ReplaceBreakWithContinue", "ReplaceContinueWithBreak",
    "ExceptionReplacer", "NumberReplacer", "RemoveDecorator", "ZeroIterationForLoop",
)  # fmt: skip
# Without these decorators a function gives the same, later.
FASTER_ONLY = ("cache", "lru_cache", "overload", "runtime_checkable")
_COMPILED = "compiled"  # part of every name of a decorator that compiles: _compiled_ieee
# Trap: cosmic-ray takes the star of `def f(*, a)` and of `{**a}` for a product.
BINARY = {"arith_expr", "term", "expr", "and_expr", "xor_expr", "shift_expr", "power"}
NODES_OF = {
    "binary_operator_replacement": ("operator",),
    "comparison_operator_replacement": ("comparison",),
    "unary_operator_replacement": ("factor", "not_test"),
    "number_replacer": ("number",),
}


@dataclass(frozen=True)
class Mutant:
    """A place of a file, and what stands there instead."""

    key: str
    file: str
    operator: str
    occurrence: int
    line: int
    lines: tuple[int, int]  # first and last line of the statement, or of its head
    scope: str  # the function, or nothing where the code runs at import
    compiled: str  # name of the compiled loop around it
    text: str


@dataclass(frozen=True)
class _Place:
    lines: tuple[int, int]
    scope: str
    compiled: str


class _Places(ast.NodeVisitor):
    """The statement, function and compiled loop of every position; spans without behaviour."""

    def __init__(self, tree: ast.Module) -> None:
        self.statements: list[tuple[tuple[int, int], tuple[int, int], _Place]] = []
        self.dead: list[tuple[tuple[int, int], tuple[int, int]]] = []
        self._scope: list[str] = []
        self._functions = 0
        self._compiled = ""
        self.visit(tree)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self._add(node)
        if isinstance(node, ast.AnnAssign):
            self._leave_out(node.annotation)
        if isinstance(node, ast.arg) and node.annotation:
            self._leave_out(node.annotation)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            self._leave_out(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._enter(node)
        else:
            self.generic_visit(node)

    def _add(self, node: ast.stmt) -> None:
        body = getattr(node, "body", None) or getattr(node, "cases", None)
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        last = node.end_lineno or node.lineno
        if body:
            start = getattr(body[0], "lineno", None) or body[0].pattern.lineno
            last = max(node.lineno, start - 1)
        scope = ".".join(self._scope) if self._functions else ""
        place = _Place((first, last), scope, self._compiled)
        begin = (first, 0 if decorators else node.col_offset)
        self.statements.append((begin, (node.end_lineno or 0, node.end_col_offset or 0), place))

    def _leave_out(self, node: ast.expr | ast.stmt) -> None:
        begin = (node.lineno, node.col_offset)
        self.dead.append((begin, (node.end_lineno or 0, node.end_col_offset or 0)))

    def _enter(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        for decorator in node.decorator_list:
            if _called(decorator) in FASTER_ONLY or _COMPILED in _called(decorator):
                begin = (decorator.lineno, 0)
                self.dead.append((begin, (decorator.end_lineno or 0, 999)))
            self.visit(decorator)
        function = not isinstance(node, ast.ClassDef)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.returns:
                self._leave_out(node.returns)
            self.visit(node.args)
        before = self._compiled
        if any(_COMPILED in _called(decorator) for decorator in node.decorator_list):
            self._compiled = node.name
        self._scope.append(node.name)
        self._functions += function
        for statement in node.body:
            self.visit(statement)
        self._functions -= function
        self._scope.pop()
        self._compiled = before

    def place(self, position: tuple[int, int]) -> _Place | None:
        """Return the innermost statement around `position`, or None where nothing runs."""
        if any(begin <= position < end for begin, end in self.dead):
            return None
        around = [entry for entry in self.statements if entry[0] <= position < entry[1]]
        return max(around, key=lambda entry: entry[0])[2] if around else None


def _called(decorator: ast.expr) -> str:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")


def mutants_of(root: Path, file: str) -> list[Mutant]:
    """Return all mutants of a module below `root`, in the order of its text."""
    source = (root / file).read_text(encoding="utf-8")
    lines = source.splitlines()
    places = _Places(ast.parse(source))
    seen: Counter[str] = Counter()
    found = []
    for operator, occurrence, (line, column) in _positions(source):
        text = lines[line - 1].strip()
        place = places.place((line, len(lines[line - 1][:column].encode())))
        if place is None:
            continue
        name = f"{file}|{place.scope}|{operator}|{text}"
        seen[name] += 1
        key = hashlib.sha256(f"{name}|{seen[name]}".encode()).hexdigest()[:16]
        found.append(
            Mutant(
                key,
                file,
                operator,
                occurrence,
                line,
                place.lines,
                place.scope,
                place.compiled,
                text,
            )
        )
    return found


def _positions(source: str) -> Iterator[tuple[str, int, tuple[int, int]]]:
    from cosmic_ray.ast import ast_nodes, get_ast  # noqa: PLC0415  of the extra `mutation`

    nodes: dict[str, list[Any]] = {"": []}
    for node in ast_nodes(get_ast(source)):
        nodes[""].append(node)
        nodes.setdefault(node.type, []).append(node)
    for name, operator in _operators().items():
        occurrence = -1
        kinds = NODES_OF.get(type(operator).__module__.rpartition(".")[2], ("",))
        chosen = [node for kind in kinds for node in nodes.get(kind, ())]
        if len(kinds) > 1:
            chosen.sort(key=lambda node: node.start_pos)
        for node in chosen:
            for position in operator.mutation_positions(node):
                occurrence += 1
                if node.type != "operator" or node.parent.type in BINARY:
                    yield name, occurrence, position[0]


def _operators() -> dict[str, Any]:
    from cosmic_ray.operators.provider import OperatorProvider  # noqa: PLC0415  as above

    provider = OperatorProvider()
    return {name: provider[name]() for name in OPERATORS}


def mutated(source: str, mutant: Mutant) -> str | None:
    """Return the mutated text, or None where it is no Python or means the same."""
    from cosmic_ray.mutating import mutate_code  # noqa: PLC0415  of the extra `mutation`

    text: str | None = mutate_code(source, _operators()[mutant.operator], mutant.occurrence)
    if text is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, mutant.file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    return None if ast.dump(ast.parse(text)) == ast.dump(ast.parse(source)) else text


def drawn(mutants: list[Mutant], seed: int) -> list[Mutant]:
    """Return the mutants in the order in which a sample of this seed takes them."""

    def place(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed}|{mutant.key}".encode()).digest()

    return sorted(mutants, key=place)
