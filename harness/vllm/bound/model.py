"""vLLM's DeepSeek-V4 with degarble's layers, a guarded load, and a start that logs what runs.

The plugin registers this class for DeepseekV4ForCausalLM. It needs our quantisation method as well:
half of the plugin must not run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.vllm.bound.attention import adopt
from degarble.harness.vllm.bound.config import DegarbleConfig
from degarble.harness.vllm.bound.experts import ModelOptOfDegarble
from degarble.harness.vllm.bound.layers import adopt_head, adopt_model, prepare
from degarble.harness.vllm.bound.routing import adopt_block
from degarble.harness.vllm.bound.start import ranks_of
from degarble.harness.vllm.bound.upstream import (
    DeepseekV4ForCausalLM,
    get_tensor_model_parallel_rank,
)
from degarble.harness.vllm.installed import NAME, VARIABLE
from degarble.harness.vllm.proof import guarded, require_filled
from degarble.harness.vllm.verify_weights import Readback

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


class DegarbleDeepseekV4(DeepseekV4ForCausalLM):
    """vLLM's model; its linears are ours by their methods, attention and layers by adoption."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        self.degarble_config = ours(vllm_config.quant_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.degarble_ranks = ranks_of(vllm_config)
        self.degarble_spread = self.degarble_ranks[1] > 1
        for layer in self.model.layers[self.model.start_layer : self.model.end_layer]:
            adopt(layer.attn, self.degarble_config.start)
            adopt_block(layer.ffn, layer.ffn.prefix, self.degarble_config.start)
        self.degarble_mixes = adopt_model(self.model, self.degarble_config.start)
        adopt_head(self, self.degarble_config.start)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load what was proven, refuse what stays empty, and say what runs."""
        start = self.degarble_config.start
        stream = guarded(weights, start.proven, spread=self.degarble_spread)
        readback = self._readback()
        loaded: set[str] = super().load_weights(readback.watched(stream))
        require_filled([name for name, _ in self.named_parameters()], loaded)
        if self.degarble_mixes:
            prepare(self.model)
        self._require_experts(readback)
        start.tell()
        return loaded

    def _readback(self) -> Readback:
        """Watch this rank's share: whole experts under expert parallelism, else a cut of each."""
        tp, ep, _ = self.degarble_ranks
        return Readback() if ep > 1 else Readback(get_tensor_model_parallel_rank(), tp)

    def _require_experts(self, readback: Readback) -> None:
        """Compare what the experts of our method hold with what was handed to the loader."""
        for number in range(self.model.start_layer, self.model.end_layer):
            experts = self.model.layers[number].ffn.experts.routed_experts
            if isinstance(experts.quant_method, ModelOptOfDegarble):
                local = experts.expert_map
                places = range(experts.global_num_experts) if local is None else local.tolist()
                held = [(expert, place) for expert, place in enumerate(places) if place >= 0]
                readback.require(number, experts, held)


def ours(config: object) -> DegarbleConfig:
    """Return the quantisation config if it is ours."""
    if not isinstance(config, DegarbleConfig):
        raise InvalidArgument(
            "quantization", type(config).__name__, NAME,
            f"Start with --quantization {NAME}, or take {NAME} out of {VARIABLE}.",
        )  # fmt: skip
    return config
