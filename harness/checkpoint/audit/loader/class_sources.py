"""Read which modules a class builds from its Python source, without importing or running it.

`SourceTree` finds modules and classes below a folder. `Reader.build` follows a class's `__init__`
through methods and base classes, and returns the tree of the modules that it assigns. Where a
condition is not decided by the model's config, both branches count: an attribute then has several
candidates. What the reader does not understand is an empty set of candidates, never a guess.
"""

from __future__ import annotations

import ast
from collections import ChainMap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.base.files import read_small_file
from degarble.harness.checkpoint.read.types import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, MutableMapping
    from pathlib import Path

_LARGEST_SOURCE = 4 << 20
_DEEPEST = 60  # calls inside calls that are followed
_MOST_STEPS = 40_000  # statements and calls of one model
_MOST_ALIASES = 20  # imports of imports that are followed
_LISTS = ("ModuleList", "Sequential")
_CONFIGS = ("hf_config", "hf_text_config", "text_config")


# --------------------------------------------------------------------------------------------------
# Modules, and what their names stand for


@dataclass(frozen=True)
class SourceModule:
    """A module's top level: what each name is bound to."""

    name: str
    is_package: bool
    names: Mapping[str, ast.AST]


@dataclass(frozen=True)
class SourceClass:
    """A class with the module that defines it."""

    module: SourceModule
    node: ast.ClassDef

    @property
    def name(self) -> str:
        """Name of the class."""
        return self.node.name


@dataclass(frozen=True)
class External:
    """An object of another package, by its dotted name."""

    name: str

    @property
    def leaf(self) -> str:
        """Last part of its name."""
        return self.name.rpartition(".")[2]


class SourceTree:
    """The Python modules below a folder; each is parsed once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, SourceModule | None] = {}
        self._orders: dict[int, tuple[SourceClass | External, ...]] = {}

    def module(self, name: str) -> SourceModule | None:
        """Return a module by its dotted name; None where the folder has no such file."""
        if name not in self._modules:
            self._modules[name] = self._parsed(name)
        return self._modules[name]

    def _parsed(self, name: str) -> SourceModule | None:
        base = self.root.joinpath(*name.split("."))
        for path, is_package in ((base.with_suffix(".py"), False), (base / "__init__.py", True)):
            if path.is_file():
                try:
                    tree = ast.parse(read_small_file(path, _LARGEST_SOURCE))
                except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                    raise UnreadableFile(
                        shown(str(path)), str(error), "Python source",
                        "Point --vllm-source to vLLM's own files.",
                    ) from error  # fmt: skip
                return SourceModule(name, is_package, dict(_bindings(tree.body)))
        return None

    def find(self, module: SourceModule, name: str) -> Any:
        """Return what a name of a module is: a class, a function with its module, an expression.

        None where the module does not bind it.
        """
        for _ in range(_MOST_ALIASES):
            node = module.names.get(name)
            if isinstance(node, ast.ClassDef):
                return SourceClass(module, node)
            if isinstance(node, ast.FunctionDef):
                return Function(module, node)
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                return None if node is None else (module, node)
            owner, original = _imported(module, node, name)
            whole = f"{owner}.{original}" if original else owner
            as_module = self.module(whole)
            if as_module is not None:
                return as_module
            found = self.module(owner)
            if found is None or not original:
                return External(whole)
            module, name = found, original
        return None

    def bases(self, cls: SourceClass) -> tuple[SourceClass | External, ...]:
        """Return a class and its bases in the order in which attributes are looked up."""
        key = id(cls.node)
        if key not in self._orders:
            self._orders[key] = (cls,)  # of a class that derives from itself
            found: list[SourceClass | External] = [cls]
            for base in cls.node.bases:
                parent = self._base(cls.module, base)
                if isinstance(parent, SourceClass):
                    found += self.bases(parent)
                elif isinstance(parent, External):
                    found.append(parent)
            # What several bases share comes last, as in Python's own order.
            last = {_name_of(each): at for at, each in enumerate(found)}
            self._orders[key] = tuple(
                each for at, each in enumerate(found) if last[_name_of(each)] == at
            )
        return self._orders[key]

    def _base(self, module: SourceModule, node: ast.expr) -> Any:
        if isinstance(node, ast.Subscript):
            node = node.value
        if isinstance(node, ast.Call) and node.args:
            # as_embedding_model(Model) and its kin return a class derived from the model.
            node = node.args[0]
        return dotted(self, module, node)

    def attribute(self, cls: SourceClass, name: str) -> tuple[SourceClass, ast.AST] | None:
        """Return a class's method or attribute with the class of the bases that defines it."""
        for base in self.bases(cls):
            if isinstance(base, SourceClass):
                found = dict(_bindings(base.node.body)).get(name)
                if found is not None:
                    return base, found
        return None


def dotted(tree: SourceTree, module: SourceModule, node: ast.expr) -> Any:
    """Return what `a.b.c` is: a class, module, function or something external; else None."""
    if isinstance(node, ast.Name):
        return tree.find(module, node.id)
    if isinstance(node, ast.Attribute):
        owner = dotted(tree, module, node.value)
        if isinstance(owner, SourceModule):
            return tree.find(owner, node.attr) or tree.module(f"{owner.name}.{node.attr}")
        if isinstance(owner, External):
            return External(f"{owner.name}.{node.attr}")
    return None


def _bindings(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Yield (name, node) of what statements bind; both branches of a condition."""
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name, node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((each.asname or each.name.partition(".")[0], node) for each in node.names)
        elif isinstance(node, ast.Assign):
            yield from ((t.id, node.value) for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and node.value and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
        elif isinstance(node, ast.If):
            yield from _bindings([*node.orelse, *node.body])
        elif isinstance(node, (ast.Try, ast.With)):
            yield from _bindings(node.body)


def _imported(
    module: SourceModule, node: ast.Import | ast.ImportFrom, name: str
) -> tuple[str, str]:
    """Return the module and the name in it that an import binds; no name: the module itself."""
    if isinstance(node, ast.Import):
        alias = next(a for a in node.names if name in (a.asname, a.name.partition(".")[0]))
        return (alias.name if alias.asname else name), ""
    original = next(a.name for a in node.names if (a.asname or a.name) == name)
    owner = node.module or ""
    if node.level:
        parts = module.name.split(".")
        kept = parts[: len(parts) - node.level + module.is_package]
        owner = ".".join([*kept, *filter(None, [node.module])])
    return owner, original


def _name_of(each: SourceClass | External) -> str:
    return each.name if isinstance(each, External) else f"{each.module.name}.{each.name}"


# --------------------------------------------------------------------------------------------------
# Values of expressions. An expression has a tuple of candidates; an empty one is unknown.


@dataclass(frozen=True)
class Const:
    """A value that the source or the config states; the config's mappings are dicts."""

    value: Any


@dataclass(eq=False)
class Built:
    """An object that a class makes: arguments by name, and what its `__init__` assigns."""

    kind: SourceClass | External
    arguments: dict[str, Candidates] = field(default_factory=dict)
    attributes: dict[str, Candidates] = field(default_factory=dict)
    positional: tuple[Candidates, ...] = ()

    def classes(self, tree: SourceTree) -> tuple[str, ...]:
        """Return the names of its class and bases."""
        if isinstance(self.kind, External):
            return (self.kind.leaf,)
        return tuple(
            each.leaf if isinstance(each, External) else each.name for each in tree.bases(self.kind)
        )


@dataclass(eq=False)
class Several:
    """A list of objects that are alike (layers), or a tuple, item by item."""

    items: list[Candidates] = field(default_factory=list)
    numbered: bool = False  # its items are reached by any number

    def every(self) -> Candidates:
        """Return the candidates of all items."""
        return tuple(each for item in self.items for each in item)


@dataclass(frozen=True, eq=False)
class Function:
    """A function, method or lambda with the names around it."""

    module: SourceModule
    node: ast.FunctionDef | ast.Lambda
    around: Mapping[str, Candidates] = field(default_factory=dict)
    owner: Built | None = None
    defined_in: SourceClass | None = None


@dataclass(frozen=True)
class Super:
    """`super()` inside a method of a class."""

    owner: Built
    after: SourceClass


Candidates = tuple[Any, ...]
UNKNOWN: Candidates = ()
_ANYTHING = External("?")  # beside known candidates


@dataclass
class _Frame:
    """Names inside one call."""

    module: SourceModule
    names: MutableMapping[str, Candidates]
    owner: Built | None = None
    defined_in: SourceClass | None = None
    returned: list[Any] = field(default_factory=list)


class SourceReader:
    """Follows the construction of a model.

    `leaves`: classes and functions that are not looked into, in modules whose name has `within`.
    """

    def __init__(
        self, tree: SourceTree, config: Mapping[str, Any], leaves: Iterable[str], within: str
    ) -> None:
        self._tree, self._config = tree, config
        self._leaves, self._within = frozenset(leaves), within
        self._depth = self._steps = 0

    def build(self, cls: SourceClass) -> Built:
        """Return the object that a model's class makes of its config."""
        made = Built(cls)
        self._initialise(made, cls, {})
        return made

    def is_leaf(self, kind: Any) -> bool:
        """Return whether a class, or a class that it derives from, is not looked into."""
        bases = self._tree.bases(kind) if isinstance(kind, SourceClass) else (kind,)
        return any(
            each.name in self._leaves and self._within in each.module.name
            for each in bases
            if isinstance(each, SourceClass)
        )

    def value(self, owner: Built, defined_in: SourceClass, node: ast.expr) -> Candidates:
        """Return what an expression in a method of an object is."""
        frame = _Frame(defined_in.module, {"self": (owner,)}, owner, defined_in)
        return self._value(node, frame)

    # ----------------------------------------------------------------------------------------------
    # Calls

    def _initialise(self, made: Built, cls: SourceClass, given: dict[str, Candidates]) -> None:
        found = self._tree.attribute(cls, "__init__")
        if found is not None and isinstance(found[1], ast.FunctionDef):
            self._enter(Function(found[0].module, found[1], {}, made, found[0]), [], given)

    def _enter(
        self, function: Function, positional: list[Candidates], named: dict[str, Candidates]
    ) -> Candidates:
        """Follow a call; return what it returns."""
        self._steps += 1
        if self._depth >= _DEEPEST or self._steps >= _MOST_STEPS:
            return UNKNOWN
        arguments = function.node.args
        first = [] if function.owner is None else [(function.owner,)]
        frame = _Frame(
            function.module, ChainMap({}, dict(function.around)), function.owner,
            function.defined_in,
        )  # fmt: skip
        order = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
        defaults = zip(reversed(order), reversed(arguments.defaults), strict=False)
        for name, default in defaults:
            frame.names[name] = self._value(default, frame)
        for each, default_or_none in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            if default_or_none is not None:
                frame.names[each.arg] = self._value(default_or_none, frame)
        known = {*order, *(each.arg for each in arguments.kwonlyargs)}
        frame.names.update(zip(order, [*first, *positional], strict=False))
        frame.names.update({name: value for name, value in named.items() if name in known})
        if arguments.kwarg is not None:
            rest = {name: value for name, value in named.items() if name not in known}
            frame.names[arguments.kwarg.arg] = (Const(rest),)
        self._depth += 1
        try:
            if isinstance(function.node, ast.Lambda):
                return self._value(function.node.body, frame)
            self._run(function.node.body, frame, sure=True)
        finally:
            self._depth -= 1
        return tuple(frame.returned)

    def _call(self, node: ast.Call, frame: _Frame) -> Candidates:
        called = node.func
        if isinstance(called, ast.Name) and called.id in _BUILTINS and called.id not in frame.names:
            return self._builtin(called.id, node, frame)
        if isinstance(called, ast.Attribute):
            held = self._container(called, node, frame)
            if held is not None:
                return held
        positional = [self._value(each, frame) for each in node.args]
        named: dict[str, Candidates] = {}
        for keyword in node.keywords:
            value = self._value(keyword.value, frame)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif value and isinstance(value[0], Const) and isinstance(value[0].value, dict):
                named |= {k: v for k, v in value[0].value.items() if isinstance(v, tuple)}
        found: list[Any] = []
        for each in self._value(called, frame):
            found += self._one_call(each, positional, named)
        return tuple(found)

    def _one_call(
        self, called: Any, positional: list[Candidates], named: dict[str, Candidates]
    ) -> Candidates:
        if isinstance(called, External) and called.leaf in _LISTS:
            return (_listed(called.leaf, positional),)
        if isinstance(called, Function):
            name = getattr(called.node, "name", "")
            if name in self._leaves and self._within in called.module.name:
                return (Built(External(f"{called.module.name}.{name}"), dict(named)),)
            if name == "make_layers":
                return (self._layers(positional, named),)
            return self._enter(called, positional, named)
        if isinstance(called, External):
            return (Built(called, dict(named), positional=tuple(positional)),)
        if isinstance(called, SourceClass):
            made = Built(called, dict(named), positional=tuple(positional))
            found = self._tree.attribute(called, "__init__")
            if found is not None and isinstance(found[1], ast.FunctionDef):
                if self.is_leaf(called):
                    order = [each.arg for each in found[1].args.args[1:]]
                    made.arguments |= dict(zip(order, positional, strict=False))
                else:
                    bound = Function(found[0].module, found[1], {}, made, found[0])
                    self._enter(bound, positional, named)
            return (made,)
        return UNKNOWN

    def _layers(self, positional: list[Candidates], named: dict[str, Candidates]) -> Several:
        """Return what vLLM's make_layers returns: two numbers, and the layers."""
        makers = named.get("layer_fn", positional[1] if len(positional) > 1 else UNKNOWN)
        made: list[Any] = []
        for maker in makers:
            if isinstance(maker, Function):
                made += self._enter(maker, [], {"prefix": UNKNOWN})
        return Several([UNKNOWN, UNKNOWN, (Several([tuple(made)], numbered=True),)])

    def _builtin(self, name: str, node: ast.Call, frame: _Frame) -> Candidates:
        if name == "super" and frame.owner is not None and frame.defined_in is not None:
            return (Super(frame.owner, frame.defined_in),)
        values = [self._value(each, frame) for each in node.args]
        if name in ("getattr", "hasattr") and len(node.args) > 1 and _sure(values[1]):
            attribute = values[1][0].value
            found = tuple(v for each in values[0] for v in self._attribute(each, attribute))
            stated = bool(values[0]) and all(_states(each) for each in values[0])
            if name == "hasattr":
                return (Const(bool(found)),) if stated else UNKNOWN
            default = values[2] if len(values) > 2 else UNKNOWN
            return found or (default if stated else UNKNOWN)
        if name in ("list", "tuple") and values:
            return values[0]
        if name == "dict":
            return (Const({k.arg: self._value(k.value, frame) for k in node.keywords if k.arg}),)
        if name in ("len", "bool", "int", "max", "min") and values and all(map(_sure, values)):
            try:
                return (Const(_BUILTINS[name](*(each[0].value for each in values))),)
            except (TypeError, ValueError):
                return UNKNOWN
        return UNKNOWN

    def _container(self, called: ast.Attribute, node: ast.Call, frame: _Frame) -> Candidates | None:
        """Follow calls of a list's or a module's methods; None for any other call."""
        if called.attr not in ("append", "get", "register_parameter", "register_buffer"):
            return None
        values = [self._value(each, frame) for each in node.args]
        for each in self._value(called.value, frame):
            if isinstance(each, Several) and called.attr == "append" and values:
                each.items.append(values[0])
            elif isinstance(each, Built) and len(values) > 1 and _sure(values[0]):
                each.attributes.setdefault(str(values[0][0].value), UNKNOWN)
                each.attributes[str(values[0][0].value)] += (Built(External("torch.Parameter")),)
            elif isinstance(each, Const) and isinstance(each.value, dict) and values:
                if _sure(values[0]):
                    found = each.value.get(values[0][0].value)
                    return found if isinstance(found, tuple) else (Const(found),)
                return _all_of(each.value)
        return UNKNOWN

    # ----------------------------------------------------------------------------------------------
    # Statements

    def _run(self, body: Iterable[ast.stmt], frame: _Frame, *, sure: bool) -> bool:
        """Follow statements; return whether they certainly left the function."""
        for node in body:
            self._steps += 1
            if self._steps >= _MOST_STEPS:
                return True
            if self._statement(node, frame, sure=sure):
                return True
        return False

    def _statement(self, node: ast.stmt, frame: _Frame, *, sure: bool) -> bool:
        match node:
            case ast.Assign():
                value = self._value(node.value, frame)
                for target in node.targets:
                    self._assign(target, value, frame, sure=sure)
            case ast.AnnAssign() if node.value is not None:
                self._assign(node.target, self._value(node.value, frame), frame, sure=sure)
            case ast.Expr():
                self._value(node.value, frame)
            case ast.Return():
                if node.value is not None:
                    frame.returned += self._value(node.value, frame)
                return sure
            case ast.Raise():
                return sure
            case ast.If():
                return self._branch(node, frame, sure=sure)
            case ast.For() | ast.While():
                if isinstance(node, ast.For):
                    self._assign(node.target, UNKNOWN, frame, sure=True)
                self._run(node.body, frame, sure=False)
            case ast.With() | ast.Try():
                return self._run(node.body, frame, sure=sure)
            case ast.FunctionDef():
                local = Function(frame.module, node, frame.names)
                self._assign(ast.Name(node.name), (local,), frame, sure=True)
            case ast.Import() | ast.ImportFrom():
                inner = SourceModule(
                    frame.module.name, frame.module.is_package, dict(_bindings([node]))
                )
                for name in inner.names:
                    found = self._tree.find(inner, name)
                    frame.names[name] = () if found is None else (found,)
            case _:
                pass
        return False

    def _branch(self, node: ast.If, frame: _Frame, *, sure: bool) -> bool:
        decided = truth(self._value(node.test, frame))
        if decided is not None:
            return self._run(node.body if decided else node.orelse, frame, sure=sure)
        before = dict(frame.names)
        self._run(node.body, frame, sure=False)
        self._run(node.orelse, frame, sure=False)
        for name, value in before.items():
            if value and not frame.names.get(name):
                frame.names[name] = value
        return False

    def _assign(self, target: ast.expr, value: Candidates, frame: _Frame, *, sure: bool) -> None:
        if isinstance(target, ast.Name):
            before = UNKNOWN if sure else frame.names.get(target.id, UNKNOWN)
            # One unknown side of a condition makes a number unknown, and leaves objects possible.
            frame.names[target.id] = _joined(before, value) if not sure else value
        elif isinstance(target, ast.Attribute):
            for owner in self._value(target.value, frame):
                if isinstance(owner, Built):
                    before = UNKNOWN if sure else owner.attributes.get(target.attr, UNKNOWN)
                    owner.attributes[target.attr] = _joined(before, value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            several = [each for each in value if isinstance(each, Several)]
            for at, inner in enumerate(target.elts):
                items = [each.items[at] for each in several if at < len(each.items)]
                part = tuple(each for item in items for each in item)
                self._assign(inner, part, frame, sure=sure)

    # ----------------------------------------------------------------------------------------------
    # Expressions

    def _value(self, node: ast.expr, frame: _Frame) -> Candidates:
        match node:
            case ast.Constant():
                return (Const(node.value),)
            case ast.Name():
                if node.id in frame.names:
                    return frame.names[node.id]
                return self._found(self._tree.find(frame.module, node.id))
            case ast.Attribute():
                return self._of_attribute(node, frame)
            case ast.Call():
                return self._call(node, frame)
            case ast.IfExp():
                decided = truth(self._value(node.test, frame))
                sides = [
                    s for s, w in ((node.body, True), (node.orelse, False)) if decided in (w, None)
                ]
                return tuple(v for side in sides for v in self._value(side, frame))
            case ast.Lambda():
                return (Function(frame.module, node, frame.names),)
            case ast.List() | ast.Tuple():
                return (Several([self._value(each, frame) for each in node.elts]),)
            case ast.ListComp() | ast.GeneratorExp():
                for each in node.generators:
                    self._assign(each.target, UNKNOWN, frame, sure=True)
                return (Several([self._value(node.elt, frame)], numbered=True),)
            case ast.Dict():
                keys = [self._value(key, frame) if key else UNKNOWN for key in node.keys]
                values = [self._value(each, frame) for each in node.values]
                pairs = zip(keys, values, strict=True)
                return (Const({_key(k): v for k, v in pairs if _key(k) is not None}),)
            case ast.Subscript():
                return self._subscript(node, frame)
            case ast.BoolOp() | ast.Compare() | ast.UnaryOp() | ast.BinOp():
                return self._operation(node, frame)
            case ast.NamedExpr():
                value = self._value(node.value, frame)
                self._assign(node.target, value, frame, sure=True)
                return value
            case _:
                return UNKNOWN

    def _found(self, found: Any) -> Candidates:
        """Return the candidates of a module's name."""
        if found is None:
            return UNKNOWN
        if isinstance(found, tuple):  # an expression at a module's top level
            if self._depth >= _DEEPEST:
                return UNKNOWN
            self._depth += 1
            try:
                return self._value(found[1], _Frame(found[0], {}))
            finally:
                self._depth -= 1
        return (found,)

    def _of_attribute(self, node: ast.Attribute, frame: _Frame) -> Candidates:
        if node.attr in _CONFIGS[:2]:
            return (Const(dict(self._config)),)
        return tuple(
            value
            for each in self._value(node.value, frame)
            for value in self._attribute(each, node.attr)
        )

    def _attribute(self, owner: Any, name: str) -> Candidates:
        match owner:
            case Built():
                if name in owner.attributes:
                    return owner.attributes[name]
                if isinstance(owner.kind, SourceClass):
                    return self._of_class(owner.kind, name, owner)
            case SourceClass():
                return self._of_class(owner, name, None)
            case Super() if isinstance(owner.owner.kind, SourceClass):
                order = self._tree.bases(owner.owner.kind)
                later = order[order.index(owner.after) + 1 :] if owner.after in order else ()
                for base in later:
                    if isinstance(base, SourceClass):
                        return self._of_class(base, name, owner.owner)
            case SourceModule():
                return self._found(self._tree.find(owner, name))
            case External():
                return (External(f"{owner.name}.{name}"),)
            case Const(dict() as stated) if name in stated:
                found = stated[name]
                return found if isinstance(found, tuple) else (Const(found),)
            case Const(dict() as stated) if name in _CONFIGS and stated:
                return (owner,)  # a config without parts is its own text config
            case _:
                pass
        return UNKNOWN

    def _of_class(self, cls: SourceClass, name: str, owner: Built | None) -> Candidates:
        found = self._tree.attribute(cls, name)
        if found is None:
            return UNKNOWN
        base, node = found
        if isinstance(node, ast.FunctionDef):
            plain = any(
                isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list
            )
            if any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list):
                return UNKNOWN
            return (Function(base.module, node, {}, None if plain else owner, base),)
        if isinstance(node, ast.expr) and self._depth < _DEEPEST:
            self._depth += 1
            try:
                names = dict.fromkeys(dict(_bindings(base.node.body)), None)
                frame = _Frame(base.module, {}, None, base)
                frame.names.update(
                    {n: self._of_class(base, n, None) for n in names if _names_in(node, n)}
                )
                return self._value(node, frame)
            finally:
                self._depth -= 1
        return UNKNOWN

    def _subscript(self, node: ast.Subscript, frame: _Frame) -> Candidates:
        found: list[Any] = []
        key = self._value(node.slice, frame)
        for each in self._value(node.value, frame):
            if isinstance(each, Several):
                known = _sure(key) and not each.numbered and isinstance(key[0].value, int)
                if known and -len(each.items) <= key[0].value < len(each.items):
                    found += each.items[key[0].value]
                else:
                    found += each.every()
            elif isinstance(each, Const) and isinstance(each.value, dict):
                if _sure(key) and _key(key) in each.value:
                    value = each.value[_key(key)]
                    found += value if isinstance(value, tuple) else (Const(value),)
                elif not _sure(key):
                    found += _all_of(each.value)
        return tuple(found)

    def _operation(self, node: ast.expr, frame: _Frame) -> Candidates:
        match node:
            case ast.BoolOp():
                return self._either([self._value(v, frame) for v in node.values], node.op)
            case ast.UnaryOp(op=ast.Not()):
                decided = truth(self._value(node.operand, frame))
                return UNKNOWN if decided is None else (Const(not decided),)
            case ast.Compare() if len(node.ops) == 1:
                sides = [self._value(each, frame) for each in (node.left, node.comparators[0])]
                return _compared(node.ops[0], *sides)
            case ast.BinOp():
                left, right = self._value(node.left, frame), self._value(node.right, frame)
                if isinstance(node.op, ast.BitOr) and left and right:
                    return (Merged(left[0], right[0]),)
                return _arithmetic(node.op, left, right)
            case _:
                return UNKNOWN

    def _either(self, values: list[Candidates], op: ast.boolop) -> Candidates:
        """Return `a or b`, `a and b`: every side that Python may return."""
        ends, possible = isinstance(op, ast.Or), UNKNOWN
        for value in values[:-1]:
            decided = truth(value)
            if decided is ends:
                return possible + value
            if decided is None:
                possible += value or (_ANYTHING,)
        return possible + (values[-1] or (_ANYTHING,)) if possible else values[-1]


@dataclass(frozen=True)
class Merged:
    """Two values joined by `|`."""

    first: Any
    second: Any


_BUILTINS: Mapping[str, Any] = {
    "getattr": None, "hasattr": None, "super": None, "list": None, "tuple": None, "dict": None,
    "len": len, "bool": bool, "int": int, "max": max, "min": min, "isinstance": None,
    "range": None, "enumerate": None, "print": None,
}  # fmt: skip


def _listed(kind: str, positional: list[Candidates]) -> Several:
    if kind == "Sequential":
        return Several(list(positional))
    inside = [each for value in positional for each in value if isinstance(each, Several)]
    return Several([item for each in inside for item in each.items], numbered=True)


def truth(value: Candidates) -> bool | None:
    """Return whether an expression is true; None where the config and the source leave it open."""
    kinds = {
        bool(each.value) if isinstance(each, Const) else None if _may_be_any(each) else True
        for each in value
    }
    return next(iter(kinds)) if len(kinds) == 1 else None


def _may_be_any(each: Any) -> bool:
    # What another package's function returns may be a number or None.
    return isinstance(each, (External, Merged)) or (
        isinstance(each, Built) and isinstance(each.kind, External)
    )


def _sure(value: Candidates) -> bool:
    return len(value) == 1 and isinstance(value[0], Const)


def _states(each: Any) -> bool:
    return isinstance(each, Const) and isinstance(each.value, dict) and bool(each.value)


def _key(value: Candidates) -> Any:
    if len(value) != 1:
        return None
    if isinstance(value[0], Const):
        return value[0].value if isinstance(value[0].value, (str, int)) else None
    # re.compile("...") as a key of a mapper
    if isinstance(value[0], Built):
        return value[0]
    return None


def _all_of(held: Mapping[Any, Any]) -> Candidates:
    return tuple(each for value in held.values() if isinstance(value, tuple) for each in value)


def _joined(before: Candidates, value: Candidates) -> Candidates:
    if not before or not value:
        return before or value
    return (*before, *(each for each in value if each not in before))


def _names_in(node: ast.AST, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))


def _compared(op: ast.cmpop, left: Candidates, right: Candidates) -> Candidates:
    if isinstance(op, (ast.In, ast.NotIn)) and _sure(left) and len(right) == 1:
        held = right[0]
        if isinstance(held, Several) and all(map(_sure, held.items)):
            inside = left[0].value in [each[0].value for each in held.items]
        elif isinstance(held, Const) and isinstance(held.value, (list, dict, str)):
            try:
                inside = left[0].value in held.value
            except TypeError:
                return UNKNOWN
        else:
            return UNKNOWN
        return (Const(inside is isinstance(op, ast.In)),)
    if isinstance(op, (ast.Is, ast.IsNot)) and _sure(right) and right[0].value is None and left:
        kinds = {
            each.value is None if isinstance(each, Const) else None if _may_be_any(each) else False
            for each in left
        }
        if len(kinds) == 1 and None not in kinds:
            return (Const(kinds.pop() is isinstance(op, ast.Is)),)
    if _sure(left) and _sure(right) and type(op) in _COMPARISONS:
        try:
            return (Const(_COMPARISONS[type(op)](left[0].value, right[0].value)),)
        except TypeError:
            return UNKNOWN
    return UNKNOWN


_COMPARISONS: Mapping[type[ast.cmpop], Any] = {
    ast.Eq: lambda a, b: a == b, ast.NotEq: lambda a, b: a != b, ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b, ast.Gt: lambda a, b: a > b, ast.GtE: lambda a, b: a >= b,
}  # fmt: skip
_ARITHMETIC: Mapping[type[ast.operator], Any] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b, ast.Mod: lambda a, b: a % b,
}  # fmt: skip


def _arithmetic(op: ast.operator, left: Candidates, right: Candidates) -> Candidates:
    if not (_sure(left) and _sure(right)) or type(op) not in _ARITHMETIC:
        return UNKNOWN
    first, second = left[0].value, right[0].value
    if not all(isinstance(each, (int, float)) for each in (first, second)):
        return UNKNOWN
    try:
        return (Const(_ARITHMETIC[type(op)](first, second)),)
    except (ZeroDivisionError, OverflowError):
        return UNKNOWN
