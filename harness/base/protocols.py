"""Protocols of extension points, without code: what a backend has to offer.

A backend belongs to the entry-point group `degarble.backends`, or is named `module:factory` on the
command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class ComponentCall(Protocol):
    """One component: named inputs and weights in, named outputs out; arguments must not change."""

    def __call__(
        self, inputs: Mapping[str, Tensor], weights: Mapping[str, object]
    ) -> Mapping[str, Tensor]:
        """Compute the component."""
        ...


class Backend(Protocol):
    """Named kernels. Components missing in `components` run in torch, and the report says so.

    A backend may also have `conventions`, a dict such as {"head_norm": "once"}: what its kernels do
    where correct implementations differ (docs/checking.md lists them).
    """

    name: str

    def components(self) -> Mapping[str, ComponentCall]:
        """Map component names to callables."""
        ...


BACKEND_ENTRY_POINT_GROUP = "degarble.backends"
