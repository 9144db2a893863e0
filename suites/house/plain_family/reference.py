"""The reference of the small family: its components as functions, its forward pass, one budget.

Shape letters: T tokens, R rows that a token may see, H heads, d head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.budget.rules import few, output_format
from degarble.references.components import common
from degarble.references.facts import ModelFacts, ReferenceTable, spans_of
from degarble.references.model import ForwardPass, memory
from degarble.references.numerics import cast

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.engine.budget.budget import Budget
    from degarble.harness.engine.budget.rules import JudgeableCall
    from degarble.harness.model.types import Block
    from degarble.references.facts import Inputs, Outputs, Weights
    from degarble.references.model import Sequence, TokenBatch


def _attention(inputs: Inputs, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the attended values, those of |value|, and the largest sum of |q k| of each token."""
    made: list[tuple[Tensor, ...]] = []
    begun = 0
    for span in spans_of(inputs):
        rows = {}
        for name in ("key", "value"):
            own = inputs[name][span.tokens].to(dtype)
            earlier = inputs.get(f"state_{name}", own)[begun : begun + span.start].to(dtype)
            rows[name] = torch.cat([earlier, own]) if span.start else own
        begun += span.start
        q, k, v = (
            x.unflatten(-1, (heads, -1)).transpose(0, 1)
            for x in (inputs["q"][span.tokens].to(dtype), rows["key"], rows["value"])
        )
        positions = inputs["positions"][span.tokens]
        hidden = torch.arange(k.shape[1]) > positions[:, None]
        scale = q.shape[-1] ** -0.5
        shares = (q @ k.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        largest = (q.abs() @ k.abs().mT * scale).amax(-1, keepdim=True).expand_as(q)
        parts = (shares @ v, shares @ v.abs(), largest)
        made.append(tuple(part.transpose(0, 1).flatten(1) for part in parts))
    out, amplitude, logits = (torch.cat(parts) for parts in zip(*made, strict=True))
    return out, amplitude, logits


def attend(facts: ModelFacts, inputs: Inputs, weights: Weights) -> Outputs:
    """Attend to all tokens of the sequence up to one's own."""
    del weights
    heads = facts.config.num_attention_heads
    out, _, _ = _attention(inputs, heads, facts.numerics.work)
    return {"out": cast(out, facts.numerics.store)}


def add(facts: ModelFacts, inputs: Inputs, weights: Weights) -> Outputs:
    """Add to the stream."""
    del weights
    work = facts.numerics.work
    return {"out": cast(inputs["x"].to(work) + inputs["stream"].to(work), facts.numerics.store)}


def attention_budget(call: JudgeableCall) -> dict[str, Budget]:
    """Return the budget of attention in float32.

    A logit of d products errs by d + 2 roundings of its amplitude, a share by twice that.
    """
    heads, out = call.known_facts.config.num_attention_heads, call.outputs["out"]
    _, amplitude, logits = _attention(call.inputs, heads, torch.float64)
    width, rows = out.shape[-1] // heads, int(call.inputs["positions"].max()) + 1
    roundings = 2 * (width + 2) * logits + rows + 8
    return {"out": few(amplitude * roundings, 1, output_format(out), "softmax and its sum")}


def sum_budget(call: JudgeableCall) -> dict[str, Budget]:
    """Return the budget of a sum of two terms."""
    amplitude, out = sum(x.abs().double() for x in call.inputs.values()), call.outputs["out"]
    assert isinstance(amplitude, torch.Tensor)
    return {"out": few(amplitude, 2, output_format(out), "sum of two terms")}


BUDGETS = {"plain.attention": attention_budget, "plain.sum": sum_budget}


class PlainModel(ForwardPass):
    """The forward pass over bound components."""

    def buffers(self, rows: int) -> dict[str, Tensor]:
        """Return room for the stream."""
        shape = rows, self._config.hidden_size
        return {"x": torch.empty(shape, dtype=self.bound.numerics.store)}

    def entering(self, step: TokenBatch) -> dict[str, Tensor]:
        """Return the embedded tokens."""
        return {"x": self.bound("embed", tokens=step.tokens)["out"]}

    def through(
        self, block: Block, state: dict[str, Tensor], step: TokenBatch, sequences: list[Sequence]
    ) -> dict[str, Tensor]:
        """Run one layer: attention, then the MLP, each added to the stream."""
        p, bound = f"{block.prefix}.", self.bound
        own = bound(f"{p}attn.norm", x=state["x"])["out"]
        q, key, value = (self.linear(f"{p}attn.{name}", own) for name in ("wq", "wk", "wv"))
        states = [sequence.block(block.prefix, bound.numerics.work) for sequence in sequences]
        earlier: dict[str, Any] = memory("state_key", (each.rows for each in states))
        earlier |= memory("state_value", (each.entries for each in states))
        attended = bound(
            f"{p}attn.attend", q=q, key=key, value=value, positions=step.positions,
            token_offsets=step.token_offsets, **earlier,
        )["out"]  # fmt: skip
        for each, span in zip(states, step.spans, strict=True):
            each.rows.append(key[span])
            each.entries.append(value[span])
        x = self.linear(f"{p}attn.wo", attended)
        x = bound(f"{p}attn.add", x=x, stream=state["x"])["out"]
        made = self.ffn(block, bound(f"{p}ffn.norm", x=x)["out"], step)
        return {"x": bound(f"{p}ffn.add", x=made, stream=x)["out"]}

    def hidden(self, step: TokenBatch, sequences: list[Sequence]) -> Tensor:
        """Return the normed stream after the last layer."""
        state = self.entering(step)
        for block in self._config.layers:
            state = self.through(block, state, step, sequences)
        return self.bound("norm", **state)["out"]


REFERENCE = ReferenceTable(
    ModelFacts,
    ends={"embed": common.embed, "norm": common.norm, "head": common.head},
    block={
        "attn.norm": common.norm,
        "attn.wq": common.linear,
        "attn.wk": common.linear,
        "attn.wv": common.linear,
        "attn.attend": attend,
        "attn.wo": common.linear,
        "attn.add": add,
        "ffn.norm": common.norm,
        "ffn.w13": common.stacked,
        "ffn.act": common.shared_act,
        "ffn.w2": common.linear,
        "ffn.add": add,
    },
)
