"""Map the tensors of an engine to our sites: how a place is described, and vLLM's DeepSeek-V4."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.capture.files.records import site_of
from degarble.harness.model.config.config import V4Config, compressor_windows
from degarble.harness.model.family import family_of
from degarble.harness.model.sites import Port
from degarble.harness.model.types import LayerType, MlpType

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from degarble.harness.model.config.config import Config
    from degarble.harness.model.types import Block


# --------------------------------------------------------------------------------------------------
# Describe where an engine holds our tensors: module, argument or result, columns, rank's share.
#
# A ComponentMap is one component and a TensorLocation of each of its tensors. It names a module
# (`model.layers.0.attn.wq_b`) or a method of an object after a colon
# (`model.layers.0.ffn.experts:router.select_experts`), an argument or result of its call, the
# columns if the engine fused several components into one tensor, and the rank's share. Imports no
# engine.

METHOD = ":"  # behind it: attributes, and a method of what they lead to


class CallSide(StrEnum):
    """Which side of a call shows a tensor."""

    ARGUMENT = "argument"
    RESULT = "result"


class RowMeaning(StrEnum):
    """Meaning of a row of a tensor."""

    TOKENS = "tokens"
    LAST = "last"  # tokens, of which the last one of each sequence is meant
    SEQUENCES = "sequences"


class ShareKind(StrEnum):
    """One rank's share of a tensor."""

    WHOLE = "whole"  # as every other rank has it
    PART = "part"  # a run of one dimension, in the order of ranks
    TERM = "term"  # a term of the sum over ranks


@dataclass(frozen=True)
class CapturedRankShare:
    """A rank's share of a tensor.

    `extents`: of PART, the whole extent of each slot along `dim`. Where an engine fused slots, a
    rank has its part of the first, then its part of the second. Padding behind the last is cut off.
    `copies`: how many consecutive ranks have the same part, as of few key heads.
    """

    held: ShareKind = ShareKind.WHOLE
    extents: tuple[int, ...] = ()
    dim: int = -1
    copies: int = 1

    def __post_init__(self) -> None:
        if (self.held is ShareKind.PART) != bool(self.extents) or any(n < 1 for n in self.extents):
            raise InvalidArgument(
                f"share ({self.held})", self.extents, "extents of the whole, for a part alone",
                "Correct the engine's map.",
            )  # fmt: skip


WHOLE, TERM = CapturedRankShare(), CapturedRankShare(ShareKind.TERM)


def partial_share(*extents: int, dim: int = -1) -> CapturedRankShare:
    """Return a shard of one tensor, or of several consecutive slots."""
    return CapturedRankShare(ShareKind.PART, extents, dim)


@dataclass(frozen=True)
class TensorLocation:
    """Place of one tensor. `at`: number or keyword of an argument, number of a result.

    `paired`: only of calls with a second tensor (True), or without (False), as a norm that adds a
    residual first. `otherwise` is the place in the other calls.
    """

    module: str
    of: CallSide = CallSide.RESULT
    at: int | str = 0
    columns: tuple[int, int] | None = None
    share: CapturedRankShare = WHOLE
    rows: RowMeaning = RowMeaning.TOKENS
    paired: bool | None = None
    otherwise: TensorLocation | None = None

    @property
    def alternatives(self) -> Iterator[TensorLocation]:
        """This place, then those of other calls."""
        yield self
        if self.otherwise is not None:
            yield from self.otherwise.alternatives

    def __post_init__(self) -> None:
        if self.columns is not None and not 0 <= self.columns[0] < self.columns[1]:
            raise InvalidArgument(
                f"columns of {self.module}", self.columns, "begin and end, the smaller one first",
                "Correct the engine's map.",
            )  # fmt: skip


@dataclass(frozen=True)
class ComponentMap:
    """One component and its places. Tensors that the engine does not expose are left out."""

    component: str
    inputs: Mapping[str, TensorLocation] = field(default_factory=lambda: MappingProxyType({}))
    outputs: Mapping[str, TensorLocation] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        for port, names in ((Port.IN, self.inputs), (Port.OUT, self.outputs)):
            for name in names:
                site_of(self.component, port, name)


def argument_of(module: str, at: int | str = 0, share: CapturedRankShare = WHOLE) -> TensorLocation:
    """An argument of a module's call."""
    return TensorLocation(module, CallSide.ARGUMENT, at, share=share)


def result_of(
    module: str,
    at: int = 0,
    share: CapturedRankShare = WHOLE,
    columns: tuple[int, int] | None = None,
) -> TensorLocation:
    """A result of a module's call."""
    return TensorLocation(module, CallSide.RESULT, at, columns, share)


# --------------------------------------------------------------------------------------------------
# Map the modules of vLLM's DeepSeek-V4 to our components and sites.
#
# The names are those of vLLM 0.33's models/deepseek_v4; vLLM is not imported. Fused modules are
# split (fused_wqa_wkv, fused_wkv_wgate, gate_up_proj). Sharding follows vLLM's layers: attention by
# heads and groups, routed and shared experts along the intermediate dimension.
#
# What vLLM fuses into kernels without a module or method (mHC, norm of the rotated key, cache
# writes, attention itself, inverse RoPE with wo_a) is left out, or read from the arguments of its
# neighbours. Routed experts are one block: its input, the chosen experts, and the summed output.

_HIDDEN = 1  # argument of the attention's forward: (positions, hidden_states, ...)


def vllm_component_maps(config: Config, ranks: int = 1) -> list[ComponentMap]:
    """Map vLLM's causal language model of a config; drafters are models of their own there.

    On several `ranks` nobody shows the terms of moe_sum as they are added: each rank adds its own.
    """
    return family_of(config).vllm_maps(config, ranks)


def v4_component_maps(config: V4Config, ranks: int) -> list[ComponentMap]:
    """Map vLLM's model of a V4 config."""
    tokens = argument_of("model.embed_tokens")
    maps = [ComponentMap("embed", {"tokens": tokens}, {"out": result_of("model.embed_tokens")})]
    for block in config.layers:
        maps += _attention(block, config)
        maps += _ffn(block, config, ranks)
    last = TensorLocation("model.norm", CallSide.ARGUMENT, rows=RowMeaning.LAST)
    normed = TensorLocation("model.norm", rows=RowMeaning.LAST)
    maps.append(ComponentMap("norm", {"x": last}, {"out": normed}))
    head = TensorLocation("logits_processor", CallSide.ARGUMENT, 1, rows=RowMeaning.SEQUENCES)
    logits = TensorLocation("logits_processor", rows=RowMeaning.SEQUENCES)
    return [*maps, ComponentMap("head", {"x": head}, {"out": logits})]


def _attention(block: Block, c: V4Config) -> Iterator[ComponentMap]:
    ours, theirs = f"{block.prefix}.attn.", f"model.{block.prefix}.attn"
    ranks, both = c.q_lora_rank, c.q_lora_rank + c.head_dim
    fused, x = f"{theirs}.fused_wqa_wkv", argument_of(theirs, _HIDDEN)
    low = result_of(fused, columns=(0, ranks))
    queries, heads = f"{theirs}.wq_b", partial_share(c.num_attention_heads * c.head_dim)
    yield ComponentMap(f"{ours}norm", outputs={"out": x})
    yield ComponentMap(f"{ours}wq_a", {"x": argument_of(fused)}, {"out": low})
    yield ComponentMap(
        f"{ours}wkv", {"x": argument_of(fused)}, {"out": result_of(fused, columns=(ranks, both))}
    )
    yield ComponentMap(f"{ours}q_norm", {"x": low}, {"out": argument_of(queries)})
    yield ComponentMap(
        f"{ours}wq_b", {"x": argument_of(queries)}, {"out": result_of(queries, share=heads)}
    )
    if block.ratio:
        yield _projections(f"{ours}compressor.proj", f"{theirs}.compressor", x, block, c.head_dim)
    if block.layer_type is LayerType.SPARSE:
        yield from _indexer(block, c, x)
    groups = partial_share(c.o_groups * c.o_lora_rank)
    summed = f"{theirs}.wo_b"
    yield ComponentMap(f"{ours}wo_a", outputs={"out": argument_of(summed, share=groups)})
    yield ComponentMap(
        f"{ours}wo_b", {"x": argument_of(summed, share=groups)}, {"out": result_of(summed)}
    )


def _indexer(block: Block, c: V4Config, x: TensorLocation) -> Iterator[ComponentMap]:
    """Map the indexer, replicated on every rank; its weights are scaled elsewhere than ours."""
    ours, theirs = f"{block.prefix}.attn.indexer.", f"model.{block.prefix}.attn.indexer."
    queries = f"{theirs}wq_b"
    yield ComponentMap(f"{ours}wq_b", {"x": argument_of(queries)}, {"out": result_of(queries)})
    inner = f"{theirs}compressor"
    yield _projections(f"{ours}compressor.proj", inner, x, block, c.index_head_dim)


def _projections(
    component: str, module: str, x: TensorLocation, block: Block, width: int
) -> ComponentMap:
    """fused_wkv_wgate is multiplied without a call of its module: the compressor shows it."""
    each = width * compressor_windows(block)
    latent = TensorLocation(module, CallSide.ARGUMENT, 0, (0, each))
    gate = TensorLocation(module, CallSide.ARGUMENT, 0, (each, 2 * each))
    return ComponentMap(component, {"x": x}, {"latent": latent, "gate": gate})


def _ffn(block: Block, c: V4Config, ranks: int) -> Iterator[ComponentMap]:
    ours, theirs = f"{block.prefix}.ffn.", f"model.{block.prefix}.ffn"
    yield ComponentMap(f"{ours}norm", outputs={"out": argument_of(theirs)})
    gate = f"{theirs}.gate"
    yield ComponentMap(f"{ours}gate", {"x": argument_of(gate)}, {"out": result_of(gate)})
    choice = f"{theirs}.experts:router.select_experts"
    asked = {"logits": argument_of(choice, "router_logits")}
    if block.mlp_type is MlpType.HASH:
        asked["tokens"] = argument_of(choice, "input_ids")
    weights, experts = result_of(choice, 0), result_of(choice, 1)
    yield ComponentMap(f"{ours}topk", asked, {"weights": weights, "experts": experts})
    routed = f"{theirs}.experts:routed_experts.forward_modular"
    given = {"x": argument_of(routed, "x"), "experts": argument_of(routed, "topk_ids")}
    yield ComponentMap(f"{ours}experts.w13", given)
    summed = {"weights": argument_of(routed, "topk_weights")}
    yield ComponentMap(f"{ours}experts.combine", summed, {"out": result_of(routed, share=TERM)})
    yield from _shared(f"{ours}shared.", f"{theirs}.shared_experts.", c)
    terms = {
        "routed": result_of(routed, share=TERM),
        "shared": result_of(f"{theirs}.shared_experts.down_proj", share=TERM),
    }
    yield ComponentMap(f"{ours}moe_sum", {} if ranks > 1 else terms, {"out": result_of(theirs)})


def _shared(ours: str, theirs: str, c: V4Config) -> Iterator[ComponentMap]:
    width = c.moe_intermediate_size
    halves, half = partial_share(width, width), partial_share(width)
    both, act, down = f"{theirs}gate_up_proj", f"{theirs}act_fn", f"{theirs}down_proj"
    yield _linear(f"{ours}w13", both, WHOLE, halves)
    yield _linear(f"{ours}act", act, halves, half)
    yield _linear(f"{ours}w2", down, half, TERM)


def _linear(
    component: str, module: str, x: CapturedRankShare, out: CapturedRankShare
) -> ComponentMap:
    return ComponentMap(
        component, {"x": argument_of(module, share=x)}, {"out": result_of(module, share=out)}
    )
