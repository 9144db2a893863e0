"""The served model as requests use it: name, tokenizer, chat encoding, limits.

Chats are errors if the tokenizer lacks the special tokens of a conversation: other text in their
place would be another prompt.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import DegarbleError
from degarble.harness.base.version import VERSION
from degarble.harness.chat.chat import Chat, chat_of
from degarble.harness.checkpoint.view.view import fingerprint
from degarble.harness.generate.generate import GenerationOptions, TextGenerator
from degarble.harness.model.components import components
from degarble.harness.model.parameters import parameters
from degarble.harness.model.types import Kind
from degarble.harness.serve.messages import ApiError, Bounds, bad_input

if TYPE_CHECKING:
    from degarble.harness.chat.conversation import Style
    from degarble.harness.chat.tokenizer import Tokenizer
    from degarble.harness.inference.model import OpenModel

BACKEND = "torch"  # the references: the twin's arithmetic


@dataclass(frozen=True)
class ServedModel:
    """An open model as requests use it."""

    model: OpenModel
    name: str
    bounds: Bounds = field(default_factory=Bounds)
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def generator(self) -> TextGenerator:
        """Return what turns texts into ids."""
        return TextGenerator(self.model, GenerationOptions())

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return self.generator.tokenizer

    @property
    def context(self) -> int:
        """Return how many tokens a prompt and its continuation may have together."""
        return self.model.logits_model.context

    @cached_property
    def mark(self) -> str:
        """Return version, arithmetic, and a hash of the checkpoint, in one line."""
        digest = fingerprint(self.model.checkpoint)[:12]
        return f"degarble-{VERSION}-{self.model.arithmetic}-{digest}"

    @property
    def gap(self) -> str:
        """Return what the tokenizer writes between tokens: a space where tokens are bare words."""
        number = 0
        one, two = self.tokenizer.decode([number]), self.tokenizer.decode([number, number])
        return two[len(one) : len(two) - len(one)]

    def chat(self, style: Style) -> Chat:
        """Return the chat encoding, in a style."""
        if not self.generator.knows_chat:
            message = (
                f"the tokenizer of {self.name} has no marks of a conversation, so a chat cannot be"
                " written as the model was trained on it; use /v1/completions"
            )
            raise ApiError(400, message, "messages", "chat_unavailable")
        try:
            return chat_of(self.model.config, self.model.checkpoint.root, style)
        except DegarbleError as error:  # V3.2 knows no effort
            raise bad_input("reasoning_effort", error) from error

    def card(self) -> dict[str, Any]:
        """Return the model as /v1/models lists it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "degarble",
            "max_model_len": self.context,
        }

    def info(self) -> dict[str, str]:
        """Return what is served, as labels."""
        return {
            "version": VERSION,
            "model": self.name,
            "numerics": self.model.arithmetic,
            "backend": BACKEND,
            "weights": "held" if self.model.streamed is None else "streamed",
            "checkpoint": self.mark.rpartition("-")[2],
        }

    @cached_property
    def computed(self) -> tuple[dict[str, str], ...]:
        """Return what computes each component of each layer, and in which formats, as labels."""
        model, known = (
            self.model,
            {parameter.name: parameter for parameter in parameters(self.model.config)},
        )
        rows = []
        for component in components(model.config, model.recipe):
            if component.name not in model.logits_model.bound.calls:
                continue
            named = (known[name] for name in component.weights)
            linears = {model.recipe.format_of(p) for p in named if p.kind is Kind.LINEAR}
            weights = " ".join(sorted({formats.weight for formats in linears}))
            taken = sorted({formats.activation for formats in linears})
            row = {
                "layer": "" if component.layer is None else str(component.layer),
                "component": component.role,
                "weights": weights,
                "activations": " ".join(taken) if model.arithmetic == "twin" else "",
                "backend": BACKEND,
            }
            rows.append(row)
        return tuple(rows)
