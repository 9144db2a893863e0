"""Wiring that V4 and V3.2 share: linears after their quantisation, experts, state of earlier calls.

It decides which output feeds which input and computes nothing.
Legend: T tokens, B sequences, R rows of a sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.model.types import MlpType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from degarble.harness.model.config.config import Config
    from degarble.harness.model.types import Block
    from degarble.references.binding import Bound
    from degarble.references.state import Rows, Step


class Wiring:
    """Calls to bound components that both families make."""

    def __init__(self, bound: Bound, config: Config) -> None:
        self.bound = bound
        self._config = config

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Call one linear, after its act_quant where the recipe has one."""
        return self.bound(name, **self.quantised(name, x))["out"]

    def quantised(self, name: str, x: Tensor) -> dict[str, Tensor]:
        """Return the input of linear `name`: values, or codes and scales."""
        if not self.bound.quantises(name):
            return {"x": x}
        return dict(self.bound(f"{name}.act_quant", x=x))

    def ffn(self, block: Block, x: Tensor, step: Step) -> Tensor:
        """Call the feed-forward half: a dense MLP, or routed experts and a shared one."""
        p, bound = f"{block.prefix}.ffn.", self.bound
        if block.mlp_type is MlpType.DENSE:
            both = self.linear(f"{p}w13", x)
            return self.linear(f"{p}w2", bound(f"{p}act", x=both)["out"])
        logits = bound(f"{p}gate", x=x)["out"]
        tokens = {"tokens": step.tokens} if block.mlp_type is MlpType.HASH else {}
        routed = bound(f"{p}topk", logits=logits, **tokens)
        experts, weights = routed["experts"], routed["weights"]
        given = {"x": x}
        if bound.quantises(f"{p}experts.w13"):
            maker = f"{p}experts.w13.act_quant"
            owned = {"experts": experts} if bound.takes(maker, "experts") else {}
            given = dict(bound(maker, x=x, **owned))
        both = bound(f"{p}experts.w13", **given, experts=experts)["out"]
        act = bound(f"{p}experts.act_quant", x=both, experts=experts, weights=weights)
        given = {"x": act["out"]} if "out" in act else dict(act)
        down = bound(f"{p}experts.w2", **given, experts=experts)["out"]
        total = bound(f"{p}experts.combine", x=down, weights=weights)["out"]
        shared = bound(f"{p}shared.act", x=self.linear(f"{p}shared.w13", x))["out"]
        shared = self.linear(f"{p}shared.w2", shared)
        return bound(f"{p}moe_sum", routed=total, shared=shared)["out"]


def memory(name: str, rows: Iterable[Rows]) -> dict[str, Tensor]:
    """Return earlier rows of all sequences as the input `name`, or nothing where there are none."""
    kept = [each.all() for each in rows if each.count]
    if not kept:
        return {}
    return {name: kept[0] if len(kept) == 1 else torch.cat(kept)}
