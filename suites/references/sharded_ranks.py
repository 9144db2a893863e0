"""Run every case of test_sharded.py on four ranks; rank 0 writes what it found.

For every case the sharded model reads the same tokens as one rank does alone, in a prefill of two
sequences and two decoding steps, and rank 0 notes how far the logits are apart. The ranks are
forked, so that torch is imported, and weights and logits of one rank are computed, only once.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, multiprocessing

from degarble.harness.model.config.config import V4Config, V32Config, small_v4, small_v32
from degarble.harness.model.recipes import Recipe, Rule
from degarble.harness.model.sharding import plan
from degarble.references.binding import BoundModel
from degarble.references.model import ModelV4, ModelV32, Sequence
from degarble.references.numerics import Mode, Numerics
from degarble.references.sharded import ShardedModel, Teams
from degarble.references.weights import InputAmax, quantised_weights, random_weights

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.formats.weight import Weight
    from degarble.harness.model.config.config import Config

V4 = small_v4(
    vocab_size=64, num_hidden_layers=3, compress_ratios=(4, 0, 128, 0), hidden_size=64, head_dim=64,
    qk_rope_head_dim=16, num_attention_heads=8, o_groups=4, q_lora_rank=32, o_lora_rank=16,
    sliding_window=16, index_n_heads=8, index_head_dim=32, index_topk=4, n_routed_experts=8,
    moe_intermediate_size=128, num_hash_layers=1,
)  # fmt: skip
V32 = small_v32(
    vocab_size=64, num_hidden_layers=3, hidden_size=64, num_attention_heads=4, q_lora_rank=32,
    kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, index_n_heads=4,
    index_head_dim=32, index_topk=12, intermediate_size=64, moe_intermediate_size=32,
)  # fmt: skip
# Nothing to choose, so that rounding cannot turn a choice: hash layers, all entries, all experts.
V4_ALL = replace(V4, num_hash_layers=3, index_topk=64)
V32_ALL = replace(V32, index_topk=64, topk_group=4, num_experts_per_tok=8)
RECIPE = Recipe("experts", (Rule("layers.*.ffn.experts.*", "NVFP4", "NVFP4"),))
EXACT, STORED, TWIN = Numerics.definition(), Numerics.bf16(), Numerics.twin()
STEPWISE = Numerics.bf16(reduction_in_storage_dtype=True)
SHARED = Numerics.twin(input_scale_shared=True)

# name: (config, numerics, keywords of the plan)
CASES: dict[str, tuple[Config, Numerics, dict[str, Any]]] = {
    "v4 tp4": (V4, EXACT, {"tp": 4}),
    "v4 official tp2 ep2": (V4, EXACT, {"tp": 2, "ep": 2, "style": "official"}),
    "v4 tp2 ep4": (V4, EXACT, {"tp": 2, "ep": 4}),
    "v4 ep2 pp2": (V4, EXACT, {"ep": 2, "pp": 2}),
    "v4 pp3": (V4, EXACT, {"pp": 3}),
    "v32 tp2 pp2": (V32, EXACT, {"tp": 2, "pp": 2}),
    "v32 tp4 ep4": (V32, EXACT, {"tp": 4, "ep": 4}),
    "v4 tp4 bf16": (V4_ALL, STORED, {"tp": 4}),
    "v4 tp4 stepwise": (V4_ALL, STEPWISE, {"tp": 4}),
    "v4 tp2 ep4 twin": (V4_ALL, TWIN, {"tp": 2, "ep": 4}),
    "v4 ep4 shared": (V4_ALL, SHARED, {"ep": 4}),
    "v32 tp2 ep2 twin": (V32_ALL, TWIN, {"tp": 2, "ep": 2}),
    "planted": (V4, EXACT, {"tp": 2, "ep": 2}),
}
PLANTED = "layers.1.ffn.experts.combine"  # its sum over ranks is lost
RANKS = 4
PROMPTS = [torch.arange(40) * 7 % 64, torch.arange(11) * 5 % 64]


def recipe_of(numerics: Numerics) -> Recipe | None:
    return RECIPE if numerics.mode is Mode.TWIN else None


@cache
def weights_of(config: Config, numerics: Numerics) -> dict[str, Weight]:
    plain = random_weights(config, 4)
    if recipe_of(numerics) is None:
        return plain
    watch = InputAmax(config)
    read(single(config, STORED, plain, watch))
    return quantised_weights(plain, config, RECIPE, input_amax=watch.largest)


def single(
    config: Config, numerics: Numerics, weights: dict[str, Weight], watch: Any = None
) -> Any:
    bound = BoundModel(config, numerics, weights, recipe_of(numerics), watch)
    if isinstance(config, V4Config):
        return ModelV4(bound, config)
    assert isinstance(config, V32Config)
    return ModelV32(bound, config)


@cache
def expected(config: Config, numerics: Numerics) -> Tensor:
    """Logits of one rank alone."""
    return read(single(config, numerics, weights_of(config, numerics)))


def read(model: Any) -> Tensor:
    """Logits of a prefill of both prompts and of two tokens after each."""
    sequences = [Sequence(), Sequence()]
    made = [model.forward(sequences, PROMPTS)]
    for token in (3, 60):
        made.append(model.forward(sequences, [torch.tensor([token])] * 2))  # noqa: PERF401  in turn
    return torch.cat(made)


def found(name: str) -> dict[str, float] | None:
    """Run one case; rank 0 compares."""
    config, numerics, keywords = CASES[name]
    sharding_plan = plan(config, **keywords)
    teams = Teams.from_plan(sharding_plan)
    if teams is None:
        return None
    weights = weights_of(config, numerics)
    model = ShardedModel(sharding_plan, teams, numerics, weights, recipe_of(numerics))
    if name == "planted":
        wrapped: Any = model.bound.calls[PLANTED]
        model.bound.calls[PLANTED] = wrapped.args[0]
    ours = read(model)
    if distributed.get_rank():
        return None
    theirs = expected(config, numerics)
    gap = (ours - theirs).double()
    return {
        "ranks": sharding_plan.ranks,
        "largest": float(gap.abs().max() / theirs.abs().max()),
        "relative": float(gap.norm() / theirs.norm()),
        "checksum": float(ours.double().sum()),
    }


def run_cases(rank: int, target: str) -> None:
    """Run every case on one rank, one after the other."""
    meeting = f"file://{target}.store"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    try:
        with torch.no_grad():
            results = {name: found(name) for name in CASES}
        if not rank:
            Path(target).write_text(json.dumps(results), encoding="utf-8")
        distributed.barrier()
    finally:
        distributed.destroy_process_group()


def main() -> None:
    """Compute what one rank finds alone, then run the ranks."""
    torch.set_num_threads(1)
    with torch.no_grad():
        for config, numerics, _ in CASES.values():
            expected(config, numerics)
    multiprocessing.start_processes(  # type: ignore[attr-defined, no-untyped-call]
        run_cases, args=(sys.argv[1],), nprocs=RANKS, start_method="fork"
    )


if __name__ == "__main__":
    main()
