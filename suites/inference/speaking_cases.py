"""Small models of both families that speak at once, and a tokenizer that needs no file."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from degarble.harness.inference.model import LogitsModel
from degarble.harness.model.config.config import small_v4, small_v32
from degarble.references.binding import BoundModel
from degarble.references.numerics import Numerics
from degarble.references.weights import random_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from degarble.harness.model.config.config import Config

V4 = small_v4(
    vocab_size=64, num_hidden_layers=3, compress_ratios=(0, 4, 128), hidden_size=32, head_dim=24,
    qk_rope_head_dim=8, num_attention_heads=4, o_groups=2, q_lora_rank=16, o_lora_rank=12,
    sliding_window=33, index_n_heads=16, index_head_dim=16, index_topk=6, n_routed_experts=4,
    moe_intermediate_size=16, num_hash_layers=1, num_nextn_predict_layers=0,
    max_position_embeddings=400,
)  # fmt: skip
V32 = small_v32(
    vocab_size=64, num_hidden_layers=2, hidden_size=32, q_lora_rank=16, kv_lora_rank=20,
    qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, index_n_heads=16, index_head_dim=16,
    index_topk=24, intermediate_size=32, moe_intermediate_size=16, n_routed_experts=4, n_group=2,
    topk_group=2, num_nextn_predict_layers=0, max_position_embeddings=400,
)  # fmt: skip
CONFIGS: dict[str, Config] = {"v4": V4, "v32": V32}


@cache
def speaker(family: str) -> LogitsModel:
    """In float64, where no company moves a token."""
    config = CONFIGS[family]
    return LogitsModel(
        BoundModel(config, Numerics.definition(), random_weights(config, 1, torch.float64))
    )


def ids(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(0, 64, (length,), generator=generator).tolist()
    return found


class Letters:
    """One letter an id; id 63 is the end."""

    def __init__(self) -> None:
        self.begin = None
        self.ends = frozenset({63})

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(33 + number) for number in ids)


def scripted(model: LogitsModel, script: Callable[[int], int]) -> LogitsModel:
    """The same model, whose next token after n tokens is script(n): to plan where texts end."""

    class Scripted(LogitsModel):
        def next_logits(self, sequences: list, tokens: list) -> torch.Tensor:  # type: ignore[type-arg]
            super().hidden(sequences, tokens)
            chosen = torch.tensor([script(sequence.length) for sequence in sequences])
            return torch.nn.functional.one_hot(chosen, 64).double()

    return Scripted(model.bound)
