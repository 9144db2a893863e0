"""vLLM's DeepSeek-V4 with degarble's decoder layers, head and a guarded load."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.vllm.bound.attention import adopt, normed
from degarble.harness.vllm.bound.config import DegarbleConfig
from degarble.harness.vllm.bound.experts import ModelOptOfDegarble, adopt_block
from degarble.harness.vllm.bound.linears import launched, widely
from degarble.harness.vllm.bound.start import ranks_of
from degarble.harness.vllm.bound.upstream import (
    DeepseekV4DecoderLayer,
    DeepseekV4ForCausalLM,
    DeepseekV4Model,
    IntermediateTensors,
    LogitsProcessor,
    RMSNorm,
    get_pp_group,
    get_tensor_model_parallel_rank,
)
from degarble.harness.vllm.installed import NAME, VARIABLE
from degarble.harness.vllm.parts import BF16
from degarble.harness.vllm.proof import guarded, require_filled
from degarble.harness.vllm.verify_weights import Readback

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from degarble.harness.vllm.bound.start import Start


# --------------------------------------------------------------------------------------------------
# DeepSeek-V4's decoder layer and model of vLLM with our mHC kernels and norms of blocks.
#
# Before a block the four residual streams are projected, mixed and collapsed, then normed; after it
# the block's output is spread over the streams. After the last layer the streams are collapsed,
# then come the last norm and the head. vLLM fuses mHC by TileLang; here a layer takes and returns
# streams, and blocks are called as vLLM calls them. The layer's weights are split into three BF16
# parts once they are loaded. Sequence parallelism and MegaMoE are not supported.
#
# Shape letters: T tokens, S streams, D hidden.

PLACES = ("attn", "ffn")


class LayerMixing(NamedTuple):
    """Mixing of one mHC place: weights as the kernels read them, iterations, epsilons."""

    weights: tuple[Tensor, Tensor, Tensor]  # split, base, scale
    iterations: int
    epsilon: float
    norm_epsilon: float


class DegarbleDecoderLayer(DeepseekV4DecoderLayer):
    """A layer; made by vLLM, adopted by `adopt_model`."""

    degarble_mixing: dict[str, LayerMixing]

    def forward(
        self, x: Tensor, positions: Tensor, input_ids: Tensor | None, *_: Any, **named: Any
    ) -> tuple[Tensor, None, None, None]:
        """Take streams [T, S, D] and return them; what vLLM hands on beside them stays None."""
        told = named.get("mega_gate_metadata")  # 0.33 alone
        more = () if told is None else (told,)
        h, post, mix = collapsed(x, self.degarble_mixing["attn"], self.attn_norm)
        streams = spread(self.attn(positions, h, None), x, post, mix)
        h, post, mix = collapsed(streams, self.degarble_mixing["ffn"], self.ffn_norm)
        return spread(self.ffn(h, input_ids, *more), streams, post, mix), None, None, None


class DegarbleModel(DeepseekV4Model):
    """The model around its layers."""

    degarble_head: LayerMixing

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any,
        inputs_embeds: Tensor | None = None,
    ) -> Any:
        """Embed, pass the layers, collapse, norm; a stage hands streams to the next."""
        if not get_pp_group().is_first_rank:
            streams = intermediate_tensors["hidden_states"]
        else:
            x = inputs_embeds if inputs_embeds is not None else self.embed_input_ids(input_ids)
            # [T, D] to [T, S, D]: every stream starts as a copy of the embedding.
            streams = x.unsqueeze(1).expand(-1, self.hc_mult, -1).contiguous()
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            streams, *_ = layer(streams, positions, input_ids)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": streams})
        return self.norm(headed(streams, self.degarble_head))


class DegarbleNorm(RMSNorm):
    """The norm in front of the head; made by vLLM, adopted by `adopt_head`."""

    def forward(self, x: Tensor) -> Tensor:
        """Norm by our kernel."""
        return normed(x.contiguous(), self.weight.data, self.variance_epsilon)


class DegarbleLogits(LogitsProcessor):
    """The head in float32, as in DeepSeek's code; vLLM rounds logits to BF16, which makes ties."""

    def _apply_head(self, lm_head: Any, hidden_states: Tensor, embedding_bias: Any) -> Tensor:
        """Multiply by our kernel."""
        if embedding_bias is not None:
            raise InvalidArgument(
                "bias of the head", tuple(embedding_bias.shape), "none: V4 has no biases",
                "Give the head to vLLM: parts.head = vllm.",
            )  # fmt: skip
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        return widely(rows, lm_head.weight.data).view(*hidden_states.shape[:-1], -1)


def adopt_head(causal: Any, start: Start) -> None:
    """Make the last norm and the head ours; refuse other classes than those on record."""
    if not get_pp_group().is_last_rank or start.kernel("model", "head", BF16) is None:
        return
    for name, one, known in (
        ("the last norm", causal.model.norm, RMSNorm),
        ("the head", causal.logits_processor, LogitsProcessor),
    ):
        if type(one) is not known:
            raise InvalidArgument(
                name, type(one).__name__, known.__name__, "Give them to vLLM: parts.head = vllm."
            )
    # Only the class changes: the objects and the weights that vLLM made stay.
    causal.model.norm.__class__ = DegarbleNorm
    causal.logits_processor.__class__ = DegarbleLogits


def adopt_model(model: Any, start: Start) -> bool:
    """Make model and layers ours, if mHC is to be; refuse other classes than those on record."""
    layers = list(islice(model.layers, model.start_layer, model.end_layer))
    kernels = [start.kernel(f"{model_name(n)}", "mhc", BF16) for n in range(len(layers))]
    if not all(kernels):
        return False
    for name, one, known in (
        ("model", model, DeepseekV4Model),
        *((f"layer {n}", layer, DeepseekV4DecoderLayer) for n, layer in enumerate(layers)),
    ):
        if type(one) is not known:
            raise InvalidArgument(
                name, type(one).__name__, known.__name__, "Give mHC to vLLM: parts.mhc = vllm."
            )
    for switch in ("use_sequence_parallel", "use_mega_moe", "use_native_mega_moe"):
        if getattr(model, switch, False):
            raise InvalidArgument(
                switch, True, "off, where mHC is degarble's", "Give mHC to vLLM: parts.mhc = vllm."
            )
    for layer in layers:
        layer.__class__ = DegarbleDecoderLayer
    model.__class__ = DegarbleModel
    return True


def model_name(layer: int) -> str:
    """Name a layer as the log does."""
    return f"model.layers.{layer}"


def prepare(model: Any) -> None:
    """Split the loaded weights of mHC as the kernels read them."""
    for layer in islice(model.layers, model.start_layer, model.end_layer):
        layer.degarble_mixing = {place: mixing_of(layer, f"hc_{place}") for place in PLACES}
    if get_pp_group().is_last_rank:
        model.degarble_head = mixing_of(model, "hc_head", iterations=1)


def mixing_of(module: Any, name: str, iterations: int = 0) -> LayerMixing:
    """Return how a place mixes."""
    from degarble.kernels.rows.mhc_problem import split_weight  # noqa: PLC0415

    fn, base, scale = (getattr(module, f"{name}_{end}").data for end in ("fn", "base", "scale"))
    weights = (split_weight(fn.float()).contiguous(), base.float(), scale.float())
    times = iterations or module.hc_sinkhorn_iters
    return LayerMixing(weights, times, module.hc_eps, module.rms_norm_eps)


def collapsed(streams: Tensor, mixing: LayerMixing, norm: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block's normed input, and what its output will be spread by."""
    made = mixed(streams, mixing, "all")
    out = normed(made["out"], norm.weight.data, norm.variance_epsilon)
    return out, made["post"], made["mix"]


def headed(streams: Tensor, mixing: LayerMixing) -> Tensor:
    """Return the streams collapsed for good."""
    made: Tensor = mixed(streams, mixing, "head")["out"]
    return made


def mixed(streams: Tensor, mixing: LayerMixing, part: str) -> dict[str, Any]:
    """Project and mix by our kernels."""
    from degarble.kernels.rows.mhc_problem import MhcMixProblem, ProjectProblem  # noqa: PLC0415

    tokens, _, width = streams.shape
    split, base, scale = mixing.weights
    project = ProjectProblem(tokens, width, "head" if part == "head" else "layer")
    made = launched("simt_mhc_project", project, streams=streams, split=split)
    numbers = (mixing.iterations, mixing.epsilon, mixing.norm_epsilon)
    problem = MhcMixProblem(tokens, width, part, *numbers)
    return launched("simt_mhc", problem, streams=streams, base=base, scale=scale, **made)


def spread(out: Tensor, streams: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """Return the streams with a block's output, by our kernel."""
    from degarble.kernels.rows.mhc_problem import MhcMixProblem  # noqa: PLC0415  needs the DSL

    tokens, _, width = streams.shape
    made = launched(
        "simt_mhc", MhcMixProblem(tokens, width, "post"), streams=streams, layer=out.contiguous(),
        post=post, mix=mix,
    )  # fmt: skip
    spread_out: Tensor = made["out"]
    return spread_out


# --------------------------------------------------------------------------------------------------
# The model, which the plugin registers for DeepseekV4ForCausalLM. It needs our quantisation method
# as well: half of the plugin must not run.


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
        start.report()
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
