"""Our configs and weights as models of transformers; imported only in a process of its own."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.model.config.config import V4Config
from degarble.harness.model.config.json_file import config_to_dict
from degarble.harness.model.parameters import parameters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.formats.weight import Weight
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.parameters import Parameter

warnings.filterwarnings("ignore")


def build(config: Config, weights: Mapping[str, Weight], dtype: torch.dtype) -> Any:
    """Return a causal language model of transformers that holds exactly these weights."""
    from transformers import (  # noqa: PLC0415  heavy
        DeepseekV4Config,
        DeepseekV4ForCausalLM,
        DeepseekV32Config,
    )
    from transformers.models.deepseek_v32 import DeepseekV32ForCausalLM  # noqa: PLC0415  heavy

    raw = config_to_dict(config, "transformers")
    kind: tuple[Any, Any] = (DeepseekV32Config, DeepseekV32ForCausalLM)
    if isinstance(config, V4Config):
        kind = (DeepseekV4Config, DeepseekV4ForCausalLM)
    theirs = kind[0](**{key: value for key, value in raw.items() if key != "model_type"})
    model = kind[1]._from_config(theirs, attn_implementation="eager").eval()
    state = model.state_dict()
    left = set(state)
    for parameter in parameters(config):
        if parameter.block is not None and parameter.block.is_drafter:
            continue  # transformers leaves drafters out
        name, place = _place(parameter, state)
        value = weights[parameter.name].values(torch.float64)
        place.copy_(value)
        left.discard(name)
    assert not left, f"not filled: {sorted(left)}"
    return model.to(dtype) if dtype is not torch.float32 else model.float()


def _place(parameter: Parameter, state: Mapping[str, Tensor]) -> tuple[str, Tensor]:
    """Return the tensor of transformers that holds a parameter, or the part of it that does."""
    block = f"model.layers.{parameter.block.index}." if parameter.block else ""
    if parameter.expert is not None:
        part = parameter.row.name.rpartition(".")[2]
        if part == "w2":
            name = f"{block}mlp.experts.down_proj"
            return name, state[name][parameter.expert]
        name = f"{block}mlp.experts.gate_up_proj"
        half = 0 if part == "w1" else 1
        return name, state[name][parameter.expert].chunk(2, 0)[half]
    stems = [block + parameter.row.hf] if block else ["model." + parameter.row.hf, parameter.row.hf]
    found = [n for stem in stems for n in (stem, f"{stem}.weight") if n in state]
    assert len(found) == 1, (parameter.name, found)
    return found[0], state[found[0]]
