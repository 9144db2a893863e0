"""Faults of a loader, planted in the processes of one server, which the engine proof has to name.

Each fault wraps a method of vLLM in the process that selects it by DEGARBLE_PLANT, through an entry
point in a folder of its own. vLLM's files are not changed.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import UnknownName

if TYPE_CHECKING:
    from pathlib import Path

NAME, VARIABLE = "degarble_plant", "DEGARBLE_PLANT"
LINEAR = "vllm.model_executor.layers.linear"
EXPERTS = "vllm.model_executor.layers.fused_moe.routed_experts"
_ABOUT = "Metadata-Version: 2.1\nName: degarble-plant\nVersion: 1\n"
_POINTS = f"[vllm.general_plugins]\n{NAME} = degarble.harness.vllm.engine.plants:register\n"


def register() -> None:
    """Plant what this process was started with; a second time changes nothing."""
    asked = os.environ.get(VARIABLE, "")
    if not asked:
        return
    if asked not in PLANTS:
        raise UnknownName.among(VARIABLE, asked, PLANTS)
    PLANTS[asked]()


def gate_and_up_swapped() -> None:
    """Layer 1's shared expert: gate is written where up belongs, and up where gate does."""
    kind: Any = import_module(LINEAR).MergedColumnParallelLinear
    own = kind.weight_loader_v2

    def load(self: Any, param: Any, loaded_weight: Any, loaded_shard_id: Any = None) -> Any:
        here = str(self.prefix).endswith("layers.1.ffn.shared_experts.gate_up_proj")
        if here and loaded_shard_id in {0, 1}:
            loaded_shard_id = 1 - loaded_shard_id
        return own(self, param, loaded_weight, loaded_shard_id)

    if own.__module__ == LINEAR:
        kind.weight_loader_v2 = load


def w2_exchanged() -> None:
    """Layer 2: the second matrices of experts 3 and 5 are exchanged."""
    kind: Any = import_module(EXPERTS).RoutedExperts
    own = kind.weight_loader

    def load(  # as vLLM calls it
        self: Any, param: Any, loaded_weight: Any, weight_name: str, shard_id: str, expert_id: int,
        **more: Any,
    ) -> Any:  # fmt: skip
        if shard_id == "w2" and ".2." in weight_name.partition("experts")[0]:
            expert_id = {3: 5, 5: 3}.get(expert_id, expert_id)
        return own(self, param, loaded_weight, weight_name, shard_id, expert_id, **more)

    if own.__module__ == EXPERTS:
        for name, value in vars(own).items():
            setattr(load, name, value)
        kind.weight_loader = load


def ranks_turned() -> None:
    """Layer 1's wq_b: each rank holds the rows of heads that are another rank's."""
    kind: Any = import_module(LINEAR).ColumnParallelLinear
    own = kind.weight_loader_v2

    def load(self: Any, param: Any, loaded_weight: Any) -> Any:
        rank = param.tp_rank
        if str(self.prefix).endswith("layers.1.attn.wq_b"):
            param.tp_rank = param.tp_size - 1 - rank
        try:
            return own(self, param, loaded_weight)
        finally:
            param.tp_rank = rank

    if own.__module__ == LINEAR:
        kind.weight_loader_v2 = load


PLANTS = {"gate and up": gate_and_up_swapped, "ranks": ranks_turned, "w2": w2_exchanged}


def entry_point(folder: Path) -> Path:
    """Write the folder that makes vLLM find `register`, to be named in PYTHONPATH."""
    about = folder / "degarble_plant-1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text(_ABOUT, encoding="utf-8")
    (about / "entry_points.txt").write_text(_POINTS, encoding="utf-8")
    return folder
