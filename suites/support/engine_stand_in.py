"""Imitate a causal language model of vLLM or SGLang: module names, classes, fusions and ranks.

It computes on the CPU and loads the weights of a model of transformers: Llama, Qwen 3, Qwen 3 MoE.
Written from vllm/model_executor/models/llama.py and qwen3_moe.py of 0.26 and the layers that they
use; it imports neither engine, and nothing of ours that maps them. Ranks run as threads.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor


class Team:
    """Ranks of one model, as threads: sums and concatenations over them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count)
        self._parts: list[Any] = [None] * count

    def gather(self, rank: int, part: Tensor) -> list[Tensor]:
        self._parts[rank] = part
        self._barrier.wait(60)
        found = list(self._parts)
        self._barrier.wait(60)
        return found

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Run `work(rank)` on every rank; an error of one ends all."""
        found: list[Any] = [None] * self.count
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                with torch.inference_mode():
                    found[rank] = work(rank)
            except BaseException as error:  # noqa: BLE001  raised below
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return found


@dataclass
class Rank:
    """One rank, and the batch that runs: sequence, first position and new tokens of each."""

    team: Team
    number: int
    batch: list[tuple[int, int, int]] = field(default_factory=list)
    by_expert: bool = True  # experts are whole, each on one rank; else every rank has a part of all

    def part(self, weight: Tensor, dim: int = 0, least: int = 1) -> Tensor:
        """Return a rank's part; of fewer heads than ranks (`least` wide) neighbours have copies."""
        count = min(self.team.count, weight.shape[dim] // least)
        return weight.chunk(count, dim)[self.number * count // self.team.count].clone()

    def sum(self, x: Tensor) -> Tensor:
        parts = self.team.gather(self.number, x)
        return torch.stack([part.double() for part in parts]).sum(0).to(x.dtype)


def product(x: Tensor, weight: Tensor) -> Tensor:
    return (x.double() @ weight.double().T).to(x.dtype)


class _Linear(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        return product(x, self.weight), None


class ReplicatedLinear(_Linear):
    """The whole matrix on every rank."""


class ColumnParallelLinear(_Linear):
    """Some rows of the matrix on each rank."""


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several matrices, some rows of each."""


class QKVParallelLinear(ColumnParallelLinear):
    """Queries, keys and values, some heads of each."""


class RowParallelLinear(_Linear):
    """Some columns of the matrix on each rank; the results are summed."""

    def __init__(self, weight: Tensor, rank: Rank) -> None:
        super().__init__(rank.part(weight, 1))
        self._rank = rank
        self.reduce_results = True

    def forward(self, x: Tensor) -> Any:
        return self._rank.sum(product(x, self.weight)), None


class RMSNorm(nn.Module):
    """A norm that adds a residual first, where it is given one."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._epsilon = epsilon

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is not None:
            x = (x.float() + residual.float()).to(x.dtype)
        wide = x.float()
        made = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._epsilon)
        out = (made.to(x.dtype) * self.weight).to(x.dtype)
        return out if residual is None else (out, x)


class SiluAndMul(nn.Module):
    """SwiGLU of the two halves."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys."""

    def __init__(self, frequencies: Tensor, width: int) -> None:
        super().__init__()
        self._frequencies, self._width = frequencies.float(), width

    def forward(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        angles = (positions[:, None].float() * self._frequencies).repeat(1, 2)[:, None]
        cos, sin = (each.to(q.dtype).float() for each in (angles.cos(), angles.sin()))
        made = []
        for x in (q, k):
            heads = x.float().view(len(x), -1, self._width)
            low, high = heads.chunk(2, -1)
            made.append((heads * cos + torch.cat([-high, low], -1) * sin).to(x.dtype))
        return made[0].reshape(q.shape), made[1].reshape(k.shape)


class Attention(nn.Module):
    """Causal attention over a cache of its own."""

    def __init__(self, width: int, rank: Rank) -> None:
        super().__init__()
        self._width, self._rank = width, rank
        self._cache: dict[int, list[Tensor]] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.reshape(len(x), -1, self._width) for x in (q, k, v))
        parts, begin = [], 0
        for sequence, start, count in self._rank.batch:
            rows = slice(begin, begin + count)
            begin += count
            kept = self._cache.get(sequence) if start else None
            both = [torch.cat([old, new[rows]]) for old, new in zip(kept, (k, v), strict=True)] \
                if kept else [k[rows], v[rows]]  # fmt: skip
            self._cache[sequence] = both
            keys, values = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in both)
            scores = torch.einsum("qhd,khd->hqk", q[rows].double(), keys) * self._width**-0.5
            seen = torch.arange(len(keys)) <= torch.arange(start, start + count)[:, None]
            shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", shares, values).to(q.dtype))
        return torch.cat(parts).reshape(len(q), -1)


class Router:
    """Chooses experts; no module, as in vLLM."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def select_experts(self, hidden_states: Tensor, router_logits: Tensor) -> Any:
        del hidden_states
        scores = router_logits.float().softmax(-1)
        weights, experts = scores.topk(self._config.num_experts_per_tok, -1)
        if self._config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, experts.int()


class MoERunner(nn.Module):
    """Routed experts; each rank has some of them."""

    def __init__(self, gate: nn.Module, w13: Tensor, w2: Tensor, config: Any, rank: Rank) -> None:
        super().__init__()
        if rank.by_expert:
            w13, w2 = rank.part(w13), rank.part(w2)
        else:
            w13 = torch.cat([rank.part(half, 1) for half in w13.chunk(2, 1)], 1)
            w2 = rank.part(w2, 2)
        self.w13, self.w2 = (nn.Parameter(w, requires_grad=False) for w in (w13, w2))
        self._first = rank.number * len(self.w13) if rank.by_expert else 0
        self._rank = rank
        self.router = Router(config)
        self.multiply = product
        object.__setattr__(self, "_gate", gate)  # a module of the block, as in vLLM

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        del router_logits  # the router runs in here
        logits, _ = self._gate(hidden_states)  # type: ignore[operator]
        weights, experts = self.router.select_experts(
            hidden_states=hidden_states, router_logits=logits
        )
        out = torch.zeros(hidden_states.shape, dtype=torch.float64)
        for number in range(len(self.w13)):
            row, slot = (experts == self._first + number).nonzero(as_tuple=True)
            gate, up = self.multiply(hidden_states[row], self.w13[number]).float().chunk(2, -1)
            inner = (torch.nn.functional.silu(gate) * up).to(hidden_states.dtype)
            made = self.multiply(inner, self.w2[number]).double()
            out.index_add_(0, row, made * weights[row, slot, None].double())
        return self._rank.sum(out.to(hidden_states.dtype))


class VocabParallelEmbedding(nn.Module):
    """Rows of some tokens on each rank; of the others a rank returns zeros, and all are summed."""

    def __init__(self, weight: Tensor, rank: Rank) -> None:
        super().__init__()
        self.weight = nn.Parameter(rank.part(weight), requires_grad=False)
        self.rank = rank

    def forward(self, tokens: Tensor) -> Tensor:
        own = tokens - self.rank.number * len(self.weight)
        held = (own >= 0) & (own < len(self.weight))
        return self.rank.sum(self.weight[torch.where(held, own, 0)] * held[:, None])


class ParallelLMHead(VocabParallelEmbedding):
    """The head's matrix; the logits processor multiplies it."""


class LogitsProcessor(nn.Module):
    """Logits of the last token of each sequence."""

    def forward(self, head: Any, states: Tensor) -> Tensor:
        parts = head.rank.team.gather(head.rank.number, product(states, head.weight))
        return torch.cat(parts, -1)


class _Attention(nn.Module):
    def __init__(self, weights: Mapping[str, Tensor], config: Any, rank: Rank) -> None:
        super().__init__()
        width = config.head_dim
        parts = [rank.part(weights[f"{name}_proj.weight"], least=width) for name in "qkv"]
        self._sizes = [len(part) for part in parts]
        self.qkv_proj = QKVParallelLinear(torch.cat(parts))
        self.o_proj = RowParallelLinear(weights["o_proj.weight"], rank)
        base = config.rope_parameters["rope_theta"]
        self.rotary_emb = RotaryEmbedding(base ** -(torch.arange(0, width, 2) / width), width)
        self.attn = Attention(width, rank)
        if "q_norm.weight" in weights:
            self.q_norm = RMSNorm(weights["q_norm.weight"], config.rms_norm_eps)
            self.k_norm = RMSNorm(weights["k_norm.weight"], config.rms_norm_eps)
        self._width = width

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        both, _ = self.qkv_proj(hidden_states)
        q, k, v = both.split(self._sizes, -1)
        if hasattr(self, "q_norm"):
            q, k = (
                norm(x.view(len(x), -1, self._width)).reshape(x.shape)
                for norm, x in ((self.q_norm, q), (self.k_norm, k))
            )
        q, k = self.rotary_emb(positions, q, k)
        out: Tensor = self.o_proj(self.attn(q, k, v))[0]
        return out


class _Mlp(nn.Module):
    def __init__(self, weights: Mapping[str, Tensor], rank: Rank) -> None:
        super().__init__()
        both = [rank.part(weights[f"{name}_proj.weight"]) for name in ("gate", "up")]
        self.gate_up_proj = MergedColumnParallelLinear(torch.cat(both))
        self.act_fn = SiluAndMul()
        self.down_proj = RowParallelLinear(weights["down_proj.weight"], rank)

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]


class _Moe(nn.Module):
    def __init__(self, weights: Mapping[str, Tensor], config: Any, rank: Rank) -> None:
        super().__init__()
        self.gate = ReplicatedLinear(weights["gate.weight"])
        self.experts = MoERunner(
            self.gate, weights["experts.gate_up_proj"], weights["experts.down_proj"], config, rank,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Any:
        return self.experts(hidden_states=x, router_logits=x)


class _Layer(nn.Module):
    def __init__(self, weights: Mapping[str, Tensor], config: Any, rank: Rank) -> None:
        super().__init__()
        self.self_attn = _Attention(_under(weights, "self_attn."), config, rank)
        inner = _under(weights, "mlp.")
        self.mlp = _Moe(inner, config, rank) if "gate.weight" in inner else _Mlp(inner, rank)
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(weights[f"{name}.weight"], config.rms_norm_eps)
            for name in ("input_layernorm", "post_attention_layernorm")
        )

    def forward(self, positions: Tensor, x: Tensor, residual: Tensor | None) -> Any:
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(positions=positions, hidden_states=x)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class _Model(nn.Module):
    hf_to_vllm_mapper = SimpleNamespace(
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        }
    )

    def __init__(self, weights: Mapping[str, Tensor], config: Any, rank: Rank) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(weights["embed_tokens.weight"], rank)
        self.layers = nn.ModuleList(
            _Layer(_under(weights, f"layers.{number}."), config, rank)
            for number in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(weights["norm.weight"], config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Any:
        x, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            x, residual = layer(positions, x, residual)
        return self.norm(x, residual)[0]


class EngineModel(nn.Module):
    """A causal language model as an engine builds it, on one rank."""

    def __init__(self, source: nn.Module, rank: Rank) -> None:
        super().__init__()
        config: Any = source.config
        if getattr(config, "head_dim", None) is None:
            config.head_dim = config.hidden_size // config.num_attention_heads
        weights = {name: each.detach().clone() for name, each in source.state_dict().items()}
        self.rank = rank
        self.model = _Model(_under(weights, "model."), config, rank)
        self.lm_head = ParallelLMHead(weights["lm_head.weight"], rank)
        self.logits_processor = LogitsProcessor()

    def forward(self, input_ids: Tensor, positions: Tensor) -> Any:
        return self.model(input_ids, positions)

    def compute_logits(self, states: Tensor) -> Any:
        last, at = [], 0
        for _, _, count in self.rank.batch:
            at += count
            last.append(at - 1)
        return self.logits_processor(self.lm_head, states[last])


def _under(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}


def generated(
    models: Sequence[EngineModel],
    prompts: Sequence[Sequence[int]],
    new: int,
    before: Callable[[int, list[tuple[int, int, list[int]]], Tensor, Tensor], None],
    after: Callable[[int], None] = lambda _rank: None,
) -> list[list[int]]:
    """Continue prompts greedily on all ranks.

    `before(rank, scheduled, ids, positions)` is called in front of every forward pass.
    """
    texts = [list(prompt) for prompt in prompts]
    done = [0] * len(prompts)
    team = models[0].rank.team
    for _ in range(new):
        batch = [(n, done[n], text[done[n] :]) for n, text in enumerate(texts)]
        ids = torch.tensor([token for _, _, tokens in batch for token in tokens])
        positions = torch.tensor([start + n for _, start, ts in batch for n in range(len(ts))])

        def one(
            number: int,
            batch: list[tuple[int, int, list[int]]] = batch,
            ids: Tensor = ids,
            positions: Tensor = positions,
        ) -> Tensor:
            model = models[number]
            model.rank.batch = [(n, start, len(tokens)) for n, start, tokens in batch]
            before(number, batch, ids, positions)
            logits: Tensor = model.compute_logits(model(ids, positions))
            after(number)
            return logits

        logits = team.run(one)[0]
        for n, text in enumerate(texts):
            done[n] = len(text)
            text.append(int(logits[n].argmax()))
    return texts


def engine_models(
    source: nn.Module, ranks: int = 1, *, by_expert: bool = True
) -> list[EngineModel]:
    """Return the model of every rank."""
    team = Team(ranks)
    members = [Rank(team, number, by_expert=by_expert) for number in range(ranks)]
    return [EngineModel(source, rank).eval() for rank in members]
