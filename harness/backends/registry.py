"""Look up backends by name: built in, installed as an entry point, or the user's `module:factory`.

`module` is imported as Python does, or from the current folder; `factory` takes no arguments and
returns an object with `name`, `components()` and, if its kernels deviate from the conventions of
the official code, `conventions`; or a plain mapping of component names to callables. This executes
code, so the name is accepted from the command line only. `cutedsl` is ours, and needs a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from degarble.harness.backends.pairings import Paired, failed, pair
from degarble.harness.base.errors import InvalidArgument, MissingDependency, NotBuilt, UnknownName
from degarble.harness.base.protocols import BACKEND_ENTRY_POINT_GROUP
from degarble.harness.engine.conventions.registry import read_conventions
from degarble.kernels.runtime.compiling import CompileSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.harness.backends.cutedsl.kernels import Kernels
    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.model.recipes import Recipe
    from degarble.references.binding import BoundModel

TORCH, CUTEDSL = "torch", "cutedsl"
TRANSFORMERS = "transformers"  # runs whole models, and only to be captured
_WITHOUT_KERNELS = ("vllm", TRANSFORMERS)


@dataclass(frozen=True)
class AskedBackend:
    """The requested backend. `strict`: raise if torch computes some components."""

    name: str = TORCH
    strict: bool = False
    settings: CompileSettings = field(default_factory=CompileSettings)  # of our own kernels
    graph: int = 0  # sequences side by side in captured whole layers of our own kernels; 0: none

    @cached_property
    def offered(self) -> Offered:
        """Return the backend, made once; ours is made later, when weight formats are known."""
        if self.name == CUTEDSL:
            from degarble.harness.backends.cutedsl.backend import CONVENTIONS  # noqa: PLC0415  our kernels

            return Offered(CUTEDSL, {}, CONVENTIONS)
        if self.name == TRANSFORMERS:
            return Offered(TRANSFORMERS, {})
        return backend_named(self.name)

    @property
    def conventions(self) -> Mapping[str, Any]:
        """Return the twin's switches for what its kernels do where implementations differ."""
        return self.offered.conventions


@dataclass(frozen=True, eq=False)
class Offered:
    """A backend's name and the components that it computes."""

    name: str
    components: Mapping[str, ComponentCall]
    conventions: Mapping[str, Any] = field(default_factory=dict)


def backend_named(value: str) -> Offered:
    """Find and make the backend that `--backend` names; torch has no components of its own."""
    if value == TORCH:
        return Offered(TORCH, {})
    if value in _WITHOUT_KERNELS:
        raise NotBuilt(
            "--backend", value, "a backend with kernels; this one has none in this version",
            "Name your own kernels as module:factory.",
        )  # fmt: skip
    return _offered(value, _made(value, _factory(value)))


def use_backend(bound: BoundModel, backend: AskedBackend, recipe: Recipe) -> Paired:
    """Put a backend's kernels into a bound model; omitted components stay with torch.

    The recipe gives the formats in which weights are stored.
    """
    if backend.name == CUTEDSL:
        from degarble.harness.backends.cutedsl.backend import use_kernels  # noqa: PLC0415  only where asked for

        paired = use_kernels(bound, recipe, kernels_of(backend, poison=True))
    else:
        offered = backend.offered
        if backend.name in _WITHOUT_KERNELS:
            offered = backend_named(backend.name)
        if backend.name == TORCH:
            return Paired()
        paired = pair(bound, offered.name, offered.components)
    if backend.strict:
        paired.require_whole()
    return paired


def kernels_of(backend: AskedBackend, *, poison: bool = False) -> Kernels:
    """Return our kernels on this machine's GPU; memory is poisoned if each component runs alone."""
    from degarble.harness.backends.cutedsl.kernels import KernelsOnGpu  # noqa: PLC0415  as above

    return KernelsOnGpu(backend.settings, poison=poison)


def require_backend(name: str) -> None:
    """Raise before anything is opened if our own backend is requested without a GPU for it."""
    if name == CUTEDSL:
        from degarble.harness.backends.cutedsl.kernels import require_gpu  # noqa: PLC0415  as above

        require_gpu()


def _factory(value: str) -> Callable[[], Any]:
    if ":" in value:
        module_name, _, attribute = value.partition(":")
        module = _imported(value, module_name)
        found = getattr(module, attribute, None)
        if found is None:
            names = [each for each in vars(module) if not each.startswith("_")]
            raise UnknownName.among(f"factory in {module_name}", attribute, names)
    else:
        points = {point.name: point for point in entry_points(group=BACKEND_ENTRY_POINT_GROUP)}
        if value not in points:
            known = {TORCH, CUTEDSL, *_WITHOUT_KERNELS, *points}
            raise UnknownName.among("--backend", value, known)
        try:
            found = points[value].load()
        except (Exception, SystemExit) as error:
            raise failed(f"--backend {value}", error) from error
    if not callable(found):
        raise InvalidArgument(
            f"--backend {value}", type(found).__name__, "a function or class without arguments",
            "Name the factory, not what it makes.",
        )  # fmt: skip
    return found  # type: ignore[no-any-return]


def _imported(value: str, module: str) -> Any:
    """Import a module; the current folder is searched after everything that is installed."""
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise failed(f"--backend {value}", error) from error
        raise MissingDependency(
            f"--backend {value}", module, "a module that can be imported",
            "Install it, or give the command in its folder.",
        ) from error  # fmt: skip
    except (Exception, SystemExit) as error:
        raise failed(f"--backend {value}", error) from error
    finally:
        sys.path.remove(here)


def _made(value: str, factory: Callable[[], Any]) -> Any:
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise failed(f"--backend {value}", error) from error


def _offered(value: str, made: Any) -> Offered:
    if isinstance(made, Mapping):
        return Offered(value, made)
    name, components = getattr(made, "name", None), getattr(made, "components", None)
    if not isinstance(name, str) or not name or not callable(components):
        raise InvalidArgument(
            f"--backend {value}", type(made).__name__,
            "an object with `name` and `components()`, or a dict of callables",
            "See harness/base/protocols.py.",
        )  # fmt: skip
    found = _made(value, components)
    if not isinstance(found, Mapping):
        raise InvalidArgument(
            f"--backend {value}: components()", type(found).__name__,
            "a dict of component names to callables", "See harness/base/protocols.py.",
        )  # fmt: skip
    stated = getattr(made, "conventions", None) or {}
    return Offered(name, found, read_conventions(stated, f"of --backend {value}"))
