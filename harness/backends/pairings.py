"""Replace reference components of a model by a backend's callables, and record who computes what.

A backend names components in full (`layers.3.attn.wq_b`) or by role (`attn.wq_b`: in every block);
a full name takes precedence. Components that it omits stay with torch, and the record says so.
Errors of a foreign callable are reported with component, file and line, and its outputs are checked
against the component's.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import DegarbleError, InvalidArgument, UnknownName
from degarble.harness.model.sites import Port, Site

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.report.kernel_table import KernelTable
    from degarble.references.binding import BoundModel


@dataclass(frozen=True)
class Paired:
    """Which components the backend computes, and which stayed with torch.

    Our own backends keep a table of launches, with a reason for each component that stayed.
    """

    backend: str = "torch"
    taken: tuple[str, ...] = ()
    fallen: tuple[str, ...] = ()
    table: KernelTable | None = None

    def document(self) -> dict[str, Any]:
        """Return the record as plain data."""
        made: dict[str, Any] = {"name": self.backend, "components": list(self.taken)}
        made["torch"] = list(self.fallen)
        return made if self.table is None else made | {"kernels": self.table.document()}

    def lines(self) -> list[str]:
        """Return it as text by role; empty if torch computes everything."""
        if self.backend == "torch":
            return []
        lines = [f"Backend {self.backend} computes {len(self.taken)} components."]
        if self.fallen:
            roles = dict.fromkeys(_role(name) for name in self.fallen)
            lines.append(f"{len(self.fallen)} fell to torch: {', '.join(roles)}")
        return lines if self.table is None else lines + self.table.lines()

    def require_whole(self) -> None:
        """Raise if some components stayed with torch."""
        if self.fallen:
            roles = dict.fromkeys(_role(name) for name in self.fallen)
            reasons = {} if self.table is None else self.table.reasons
            why = dict.fromkeys(f"{_role(n)}: {reason}" for n, reason in reasons.items())
            raise InvalidArgument(
                "--strict", f"{len(self.fallen)} components fall to torch: {', '.join(roles)}",
                f"every component by backend {self.backend}",
                f"Leave --strict out. {'; '.join(why)}".strip(),
            )  # fmt: skip


@dataclass(eq=False)
class Watched:
    """A foreign callable in a component's place. `whose` begins the name of an error."""

    component: str
    call: ComponentCall
    outputs: tuple[str, ...]
    whose: str
    file: str | None = None  # in which its code stands, where that is known

    def __call__(
        self, inputs: Mapping[str, Tensor], weights: Mapping[str, Any]
    ) -> Mapping[str, Tensor]:
        """Run it; raise a named error if it fails or returns wrong outputs."""
        name = f"{self.whose}: {self.component}"
        try:
            made = self.call(inputs, weights)
        except (Exception, SystemExit) as error:
            raise failed(name, error, self.file) from error
        if not isinstance(made, Mapping) or set(made) != set(self.outputs):
            found = sorted(made) if isinstance(made, Mapping) else type(made).__name__
            raise InvalidArgument(
                name, found, f"a dict of {', '.join(self.outputs)}",
                "Return every output of the component by its name.",
            )  # fmt: skip
        for key, tensor in made.items():
            if not isinstance(tensor, torch.Tensor):
                raise InvalidArgument(
                    f"{name}: {key}", type(tensor).__name__, "a tensor", "Return tensors."
                )
        return made


def failed(name: str, error: BaseException, file: str | None = None) -> InvalidArgument:
    """Return the error for an exception of foreign code, with file and line."""
    place = place_of(error, file)
    if isinstance(error, DegarbleError):  # its own words say what to do, and none may be cut off
        found = f"{error.name} = {error.shown_value}"
        return InvalidArgument(f"{name}: {place}", found, error.expectation, error.remedy)
    words = f"{place}: {type(error).__name__}: {error}"
    return InvalidArgument(name, words, "code that runs", "Correct it at this line.")


def place_of(error: BaseException, file: str | None = None) -> str:
    """Return the last line of `file` in the traceback; without it, the last line of all."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file] or frames
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "outside of any file"


def pair(bound: BoundModel, name: str, offered: Mapping[str, ComponentCall]) -> Paired:
    """Put a backend's callables in place; all names are checked before anything changes."""
    chosen: dict[str, tuple[str, ComponentCall]] = {}
    for exact in (False, True):
        for key, call in offered.items():
            found = [key] if key in bound.calls else _with_role(bound, key)
            if not found:
                known = {*bound.calls, *(_role(each) for each in bound.calls)}
                raise UnknownName.among(f"component of backend {name}", key, known)
            if not callable(call):
                raise InvalidArgument(
                    f"backend {name}: {key}", type(call).__name__,
                    "a callable of inputs and weights", "See harness/base/protocols.py.",
                )  # fmt: skip
            if (key in bound.calls) is exact:
                chosen |= dict.fromkeys(found, (key, call))
    for component, (_, call) in chosen.items():
        replace_call(bound, component, call, f"backend {name}")
    taken = tuple(each for each in bound.calls if each in chosen)
    return Paired(name, taken, tuple(each for each in bound.calls if each not in chosen))


def replace_call(
    bound: BoundModel, component: str, call: ComponentCall, whose: str, file: str | None = None
) -> None:
    """Put one foreign callable in a component's place."""
    what, _ = bound.bound_to(component)
    bound.calls[component] = Watched(component, call, what.outputs, whose, file)


def _with_role(bound: BoundModel, role: str) -> list[str]:
    return [name for name in bound.calls if _role(name) == role]


def _role(component: str) -> str:
    """Return a component's name without its block."""
    return Site(component, Port.OUT).role
