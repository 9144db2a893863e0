"""Every causal language model of transformers that has no family of its own, as it was traced."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from degarble.harness.model.family import ModelFamily

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.model.components import Component
    from degarble.harness.model.parameters import Parameter
    from degarble.harness.model.recipes import Recipe
    from degarble.references.traced.family import TracedConfig, TracedModel
    from degarble.references.traced.model import TracedForward


class Traced(ModelFamily):
    """The family of traced models. No config.json is recognised as one: ask for it by its name."""

    name = "traced"
    known_by_parameters = True
    has_chat_template = True
    runs_in_transformers = True

    def read(self, raw: Mapping[str, Any]) -> TracedConfig:
        """Keep the config.json whole: transformers reads it."""
        from degarble.references.traced.family import TracedConfig  # noqa: PLC0415  heavy

        return TracedConfig.of(raw)

    def write(self, config: TracedConfig, spelling: str) -> dict[str, Any]:
        """Return the config.json as it was read."""
        del spelling
        raw: dict[str, Any] = json.loads(config.text)
        return raw

    def parameters(self, config: TracedConfig) -> tuple[Parameter, ...]:
        """Return what the traced components read."""
        from degarble.references.traced.family import traced_parameters  # noqa: PLC0415  heavy

        return traced_parameters(config)

    def components(self, config: TracedConfig, recipe: Recipe) -> tuple[Component, ...]:
        """Return the traced components."""
        from degarble.references.traced.family import traced_components  # noqa: PLC0415  heavy

        return traced_components(config, recipe)

    def bound_model(self) -> type[TracedModel]:
        """Return the class that binds components to what was traced."""
        from degarble.references.traced.family import TracedModel  # noqa: PLC0415  heavy

        return TracedModel

    def forward(self, bound: TracedModel, *, absorbed: bool = True) -> TracedForward:
        """Return the forward pass; a trace has one form."""
        from degarble.references.traced.model import TracedForward  # noqa: PLC0415  heavy

        del absorbed
        return TracedForward(bound)

    def rows_needed(self, config: TracedConfig, component: Component, earlier: int) -> int | None:
        """Return how far attention looks back into what this cache gives it."""
        from degarble.references.traced.family import rows_needed  # noqa: PLC0415  heavy

        return rows_needed(config, component, earlier)

    def arrived(self, config: TracedConfig, via: str, made: Tensor) -> Tensor | None:
        """Return a view of an output."""
        from degarble.references.traced.family import arrived  # noqa: PLC0415  heavy

        return arrived(config, via, made)


FAMILY = Traced()
