"""Imitate a model with vLLM's module names, fused layouts and ranks; it computes as our references.

It has what a capture of vLLM meets: fused_wqa_wkv and gate_up_proj whose results are split,
fused_wkv_wgate that is multiplied without a call of its module, routed experts stacked as w13 and
w2 after a router that is no module, sums over ranks where vLLM has them, and results paired with a
bias that is None. What vLLM fuses into kernels is our own component. Written from the names of
models/deepseek_v4 alone; it imports no vLLM. Faults are planted by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from degarble.harness.model.config.config import V4Config
from degarble.harness.model.types import MlpType
from degarble.references.model import ModelV4

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from degarble.harness.model.types import Block
    from degarble.references.model import Sequence, TokenBatch
    from degarble.references.sharded import ShardedModel, Team

FAULTS = {
    "gate_up_swapped": "layers.1: up above gate in gate_up_proj",
    "wqa_wkv_offset": "layers.2: fused_wqa_wkv filled from the wrong row on",
    "down_shards_swapped": "layers.3: each rank has the other's columns of the shared w2",
    "w2_shards_swapped": "layers.2: each rank has the other's columns of the routed w2",
    "rank_copy_old": "layers.1: one rank's copy of wkv is another one",
}


class Linear(nn.Module):
    """A product; `pair`: results come beside a bias, as most of vLLM's layers give them."""

    def __init__(self, weight: Tensor, *, pair: bool = True, team: Team | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._pair, self._team = pair, team

    def forward(self, x: Tensor) -> Any:
        out = product(x, self.weight).to(x.dtype)
        if self._team is not None:
            out = summed(self._team, out)
        return (out, None) if self._pair else out


def product(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().T


def summed(team: Team, x: Tensor) -> Tensor:
    """The sum over ranks, rounded once."""
    parts = [tensor.double() for tensor in team.gather(x)]
    return torch.stack(parts).sum(0).to(x.dtype)


class Seat(nn.Module):
    """A module whose call does what the model gives it to do."""

    def __init__(self, work: Any, **children: nn.Module) -> None:
        super().__init__()
        self._work = work
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, *given: Any, **named: Any) -> Any:
        return self._work(*given, **named)


class _Embedding:
    """The embedding's module as a component."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, inputs: Any, weights: Any) -> Any:
        del weights
        return {"out": self._module(inputs["tokens"])}


class Router:
    """Chooses experts; no module."""

    def __init__(self, model: StandIn, block: Block) -> None:
        self._model, self._block = model, block

    def select_experts(
        self, *, hidden_states: Tensor, router_logits: Tensor, input_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        del hidden_states
        hashed = self._block.mlp_type is MlpType.HASH
        tokens = {"tokens": input_ids} if hashed else {}
        made = self._model.bound(f"{self._block.prefix}.ffn.topk", logits=router_logits, **tokens)
        return made["weights"], made["experts"]


class RoutedExperts(nn.Module):
    """Stacked experts, as one call; every rank has its part of each."""

    def __init__(self, w13: Tensor, w2: Tensor, limit: float) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(w13, requires_grad=False)
        self.w2_weight = nn.Parameter(w2, requires_grad=False)
        self._limit = limit

    def forward_modular(self, *, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        total = torch.zeros(x.shape, dtype=torch.float64)
        for number in topk_ids.unique().tolist():
            rows, slots = (topk_ids == number).nonzero(as_tuple=True)
            both = product(x[rows], self.w13_weight[number]).to(x.dtype)
            act = gated(both, self._limit, topk_weights[rows, slots, None]).to(x.dtype)
            total[rows] += product(act, self.w2_weight[number]).to(x.dtype).double()
        return total.float()


def gated(both: Tensor, limit: float, weight: Tensor | float = 1.0) -> Tensor:
    gate, up = (tensor.double() for tensor in both.chunk(2, -1))
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return nn.functional.silu(gate) * up * torch.as_tensor(weight).double()


class StandIn(ModelV4):
    """The forward pass: attention and experts through modules, the rest through components."""

    def __init__(self, sharded: ShardedModel, rank: int, faults: Iterable[str] = ()) -> None:
        config = sharded.plan.config
        assert isinstance(config, V4Config)
        super().__init__(sharded.bound, config)
        self.team, self.rank, self.faults = sharded.teams.attention, rank, frozenset(faults)
        self._under: Any = None
        layers = [self._layer(block) for block in config.layers]
        own = self.bound.calls["embed"]
        weights = self.bound.weights_of("embed")
        embed = Seat(lambda ids: own({"tokens": ids}, weights)["out"])
        self.bound.calls["embed"] = _Embedding(embed)
        inner = Seat(
            self._streams, embed_tokens=embed, layers=nn.ModuleList(layers),
            norm=Seat(lambda x: self.bound("norm", x=x)["out"]),
        )  # fmt: skip
        self.tree: Any = Seat(
            inner.forward, model=inner,
            logits_processor=Seat(lambda _head, x: self.bound("head", x=x)["out"]),
        )  # fmt: skip

    def _value(self, name: str) -> Tensor:
        value = self.bound.weights[name].value
        assert value is not None
        if "rank_copy_old" in self.faults and name == "layers.1.attn.wkv" and self.rank:
            return value * 1.5
        return value

    def _even(self, name: str, dim: int) -> Tensor:
        """An even part of a matrix: without blocks of scales vLLM pads nothing."""
        whole: Any = self.bound.weights
        value: Tensor = whole._whole[name].value
        return value.chunk(len(self.team.ranks), dim)[self.rank]

    def _layer(self, block: Block) -> nn.Module:
        p = f"{block.prefix}."
        attn: Any = Seat(self._attend(block), **self._projections(block))
        for name in ("wq_a", "wkv"):
            self.bound.calls[f"{p}attn.{name}"] = self._fused(attn, name)
        self._calls(p, "attn.wq_b", attn.wq_b)
        self._calls(p, "attn.wo_b", attn.wo_b)
        if block.ratio:
            self._compressor(f"{p}attn.compressor.", attn)
        if hasattr(attn, "indexer"):
            self._compressor(f"{p}attn.indexer.compressor.", attn.indexer)
            for name in ("wq_b", "weights_proj"):
                self._calls(p, f"attn.indexer.{name}", getattr(attn.indexer, name))
        return Seat(None, attn=attn, ffn=self._ffn(block))

    def _projections(self, block: Block) -> dict[str, nn.Module]:
        p = f"{block.prefix}.attn."
        rows = torch.cat([self._value(f"{p}wq_a"), self._value(f"{p}wkv")])
        if "wqa_wkv_offset" in self.faults and block.index == 2:
            rows = rows.roll(self.config.head_dim, 0)
        found: dict[str, nn.Module] = {
            "fused_wqa_wkv": Linear(rows),
            "wq_b": Linear(self._value(f"{p}wq_b"), pair=False),
            "wo_b": Linear(self._value(f"{p}wo_b"), pair=False, team=self.team),
        }
        if block.ratio:
            found["compressor"] = self._pool(f"{p}compressor.")
        if f"{p}indexer.wq_b" in self.bound.calls:
            found["indexer"] = Seat(
                None, compressor=self._pool(f"{p}indexer.compressor."),
                wq_b=Linear(self._value(f"{p}indexer.wq_b")),
                weights_proj=Linear(self._value(f"{p}indexer.weights_proj")),
            )  # fmt: skip
        return found

    def _pool(self, prefix: str) -> nn.Module:
        rows = torch.cat([self._value(f"{prefix}wkv"), self._value(f"{prefix}wgate")])
        return Seat(lambda _scores, _positions, _rope: None, fused_wkv_wgate=Linear(rows))

    def _attend(self, block: Block) -> Any:
        def run(_positions: Tensor, x: Tensor, _scaling: None) -> Tensor:
            step, states = self._under
            made: Tensor = ModelV4._attention(self, block, x, step, states)
            return made

        return run

    def _attention(self, block: Block, x: Tensor, step: TokenBatch, states: Any) -> Tensor:
        self._under = step, states
        made: Tensor = self._layers[block.index].attn(step.positions, x, None)
        return made

    @property
    def _layers(self) -> Any:
        return self.tree.model.layers

    def _calls(self, prefix: str, name: str, module: nn.Module) -> None:
        def call(inputs: Any, weights: Any) -> Any:
            del weights
            out = module(inputs["x"])
            return {"out": out[0] if isinstance(out, tuple) else out}

        self.bound.calls[prefix + name] = call

    def _fused(self, attn: Any, name: str) -> Any:
        at, kept = self.config.q_lora_rank, self.config.head_dim

        def call(inputs: Any, weights: Any) -> Any:
            del weights
            if name == "wq_a":
                attn.both, _ = attn.fused_wqa_wkv(inputs["x"])
            return {"out": attn.both.split([at, kept], -1)[name == "wkv"]}

        return call

    def _compressor(self, prefix: str, holder: Any) -> None:
        module = holder.compressor
        work = self.bound.numerics.work

        def call(inputs: Any, weights: Any) -> Any:
            del weights
            scores = product(inputs["x"], module.fused_wkv_wgate.weight).float()
            module(scores, None, None)
            latent, gate = scores.to(work).chunk(2, -1)
            return {"latent": latent, "gate": gate}

        self.bound.calls[f"{prefix}proj"] = call

    def _ffn(self, block: Block) -> nn.Module:
        p, c = f"{block.prefix}.ffn.", self.config
        gate_up = [self._even(f"{p}shared_experts.{name}", 0) for name in ("w1", "w3")]
        if "gate_up_swapped" in self.faults and block.index == 1:
            gate_up.reverse()
        down = self._swapped(
            "down_shards_swapped", 3, block, self._even(f"{p}shared_experts.w2", 1)
        )
        shared = Seat(
            None, gate_up_proj=Linear(torch.cat(gate_up)), down_proj=Linear(down),
            act_fn=Seat(lambda both: gated(both, c.swiglu_limit).to(both.dtype)),
        )  # fmt: skip
        numbers = range(c.n_routed_experts)
        w13 = [
            torch.cat([self._value(f"{p}experts.{n}.{name}") for name in ("w1", "w3")])
            for n in numbers
        ]
        w2 = torch.stack([self._value(f"{p}experts.{n}.w2") for n in numbers])
        w2 = self._swapped("w2_shards_swapped", 2, block, w2)
        gate = Seat(lambda x: (self.bound(f"{p}gate", x=x)["out"], None))
        experts: Any = Seat(None)
        experts.routed_experts = RoutedExperts(torch.stack(w13), w2, c.swiglu_limit)
        experts.router = Router(self, block)
        experts._work = self._experts(experts, gate, shared)
        return Seat(
            experts.forward, gate=gate, experts=experts, shared_experts=shared
        )  # fmt: skip

    def _experts(self, experts: Any, gate: nn.Module, shared: Any) -> Any:
        def run(x: Tensor, ids: Tensor) -> Tensor:
            beside, _ = shared.gate_up_proj(x)
            beside, _ = shared.down_proj(shared.act_fn(beside))
            logits, _ = gate(x)
            weights, chosen = experts.router.select_experts(
                hidden_states=x, router_logits=logits, input_ids=ids
            )
            routed = experts.routed_experts.forward_modular(
                x=x, topk_weights=weights, topk_ids=chosen
            )
            return summed(self.team, routed.double() + beside.double()).to(x.dtype)

        return run

    def _swapped(self, fault: str, layer: int, block: Block, weight: Tensor) -> Tensor:
        """What the other rank has; alone, the two halves of the columns."""
        if fault not in self.faults or block.index != layer:
            return weight
        if len(self.team.ranks) == 1:
            return weight.roll(weight.shape[-1] // 2, -1)
        return self.team.gather(weight)[1 - self.rank]

    def ffn(self, block: Block, x: Tensor, step: TokenBatch) -> Tensor:
        made: Tensor = self._layers[block.index].ffn(x, step.tokens)
        return made

    def _streams(self, step: TokenBatch, sequences: list[Sequence]) -> Tensor:
        made: Tensor = ModelV4.streams(self, step, sequences)
        return made

    def run(self, sequences: list[Sequence], step: TokenBatch) -> Tensor:
        """Logits behind each sequence's last token."""
        streams = self.tree.model(step, sequences)
        for sequence, span in zip(sequences, step.spans, strict=True):
            sequence.length += span.stop - span.start
        hidden = self.tree.model.norm(self.bound("hc_head", streams=streams)["out"])
        logits: Tensor = self.tree.logits_processor(None, hidden[step.token_offsets[1:] - 1])
        return logits
