"""The arithmetic of a reference: definition, official rounding points (bf16), or twin.

* definition: everything in float64 (or float32), nothing rounded and nothing quantised on the way;
* bf16: float32 inside a component, BF16 where the official code stores;
* twin: as bf16, with operands quantised by recipe and products summed in float64.

Every component receives a Numerics record: a working dtype, a stored dtype, and one switch for each
point on which the sources disagree. Components never branch on the mode itself. The defaults are
the official code of each family, except that caches are exact: choose their rounding with a source
of SOURCES or a switch. In the definition, switches that only round change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import DtypeMismatch, ShapeMismatch, UnknownName

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


# --------------------------------------------------------------------------------------------------
# Modes, switches and casts

FEW_TOKENS = 4  # up to here compiled loops do what calls of torch would mostly wait for


class Mode(StrEnum):
    """The three arithmetics."""

    DEFINITION = "definition"
    BF16 = "bf16"
    TWIN = "twin"


class KeyValueCache(StrEnum):
    """Storage of latent rows in the cache; the rotated dims stay BF16."""

    EXACT = "exact"  # early V4-Flash code: its act_quant in place casts to BF16, not to E4M3
    FP8 = "fp8"  # official and vLLM for V4 (64-wide blocks), official V3.2 (128-wide): UE8M0
    FP8_F32 = "fp8_f32"  # FlashMLA's 656-byte rows of V3.2: float32 scales of 128-wide blocks
    NVFP4 = "nvfp4"  # 16-wide blocks, E4M3 scales without tensor scale


class IndexerFormat(StrEnum):
    """Roundings of the indexer's queries and keys."""

    EXACT = "exact"  # transformers
    FP8 = "fp8"  # one UE8M0 scale per 128: vLLM, and the official V3.2 code
    MXFP4 = "mxfp4"  # one UE8M0 scale per 32: the official V4 code


class HeadNorm(StrEnum):
    """Where the weightless RMS of query heads rounds."""

    EACH_STEP = "each_step"  # official: square, mean, rsqrt and product in BF16
    FACTOR = "factor"  # transformers: the factor, then the product
    ONCE = "once"  # vLLM: after the rotation that follows


class DecodedOperands(StrEnum):
    """What happens to a decoded number before the product."""

    EXACT = "exact"  # block and tensor scales are applied in the product
    WEIGHTS = "weights_bf16"  # a BF16 model on decoded weights
    BOTH = "bf16"  # emulation: vLLM decodes weights and activations to BF16, then multiplies


class InputQuantisation(StrEnum):
    """How a run of a traced model quantises the inputs that its checkpoint has quantised."""

    STATED = "stated"
    STEPWISE = "stepwise"  # compressed-tensors: scales and quotients rounded to the model's dtype
    NONE = "none"  # transformers on decoded weights, and kernels of weights alone


class CodeSums(StrEnum):
    """How products of FP8 codes are summed."""

    FLOAT32 = "float32"
    HOPPER = "hopper"
    HOPPER_IN_STAGES = "hopper-in-stages"
    ADA = "ada"
    ADA_IN_STAGES = "ada-in-stages"


class BlockScaleUse(StrEnum):
    """Scales of FP8 blocks, where a checkpoint has any number of float32."""

    STATED = "stated"
    INPUTS = "inputs"  # of inputs, rounded up to powers of two
    BOTH = "both"  # of weights as well, which are quantised again: DeepGEMM's way in vLLM


@dataclass(frozen=True)
class Switches:
    """Points on which the sources disagree. `None` means: as the official code of the family."""

    kv_cache: KeyValueCache = KeyValueCache.EXACT
    cache_scale_floored: bool = False  # FlashMLA's helper: scale >= 1e-4; official: amax >= 1e-4
    indexer_format: IndexerFormat = IndexerFormat.EXACT
    indexer_hadamard: bool = True  # transformers and vLLM leave it out
    indexer_in_storage_dtype: bool = True  # V4: products and sums in BF16; others float32
    indexer_weights_in_storage_dtype: bool = True  # V4's head weights, likewise
    head_norm: HeadNorm = HeadNorm.EACH_STEP
    rotation_in_storage_dtype: bool = False  # transformers casts cos and sin to BF16
    attention_in_storage_dtype: bool | None = None  # transformers; official V3.2, not V4
    pooling_in_storage_dtype: bool = False  # transformers projects and pools in BF16
    mixing_in_storage_dtype: bool = False  # transformers casts post and comb to BF16
    router_in_storage_dtype: bool = False  # transformers, V4: logits, scores and shares in BF16
    routing_epsilon: float = 0.0  # transformers adds 1e-20 to the sum of chosen scores
    routing_weight_before_w2: bool = True  # V4; transformers and vLLM after w2, V3.2 always after
    shared_expert_clamped: bool = True  # the early V4-Flash code passes no limit
    input_scale_shared: bool = False  # FlashInfer: one NVFP4 input scale, the largest of a layer
    wo_a_follows_recipe: bool = True  # the official V4 code keeps wo_a's input BF16
    residual_rounded_before_norm: bool = False  # transformers, V3.2
    reduction_in_storage_dtype: bool = False  # vLLM sums ranks in BF16; official in float32
    first_draft_embedding_zeroed: bool = False  # vLLM, MTP block at position 0
    latent_rounded_before_rotation: bool = True  # V4's kv norm; fused kernels keep float32
    entry_rounded_in_between: bool = True  # V4's entries: after pooling and after the norm
    indexer_operand_rounded_in_between: bool = True  # after rotation and after Hadamard
    indexer_sum_in_storage_dtype: bool = True  # V4: the sum over heads, where products are stored
    norm_rounded_before_weight: bool = False  # transformers' norms of Llama's kind
    gate_rounded_before_product: bool = False  # SiLU in BF16, then the product: vLLM, transformers
    activation_rounded_before_codes: bool = True  # routed SwiGLU; fused with its quantisation: not
    decoded_operands: DecodedOperands = DecodedOperands.EXACT  # others: emulated quantisation
    operations_stored: bool = False  # every result of eager code, of a traced model
    attention_operations_stored: bool = False  # likewise, in its attention
    expert_operations_stored: bool = False  # likewise, in its experts
    expert_sums_stored: bool = False  # likewise, the sum over a token's experts after each one
    quantised_inputs: InputQuantisation = InputQuantisation.STATED  # of traced models
    expert_input_scale_shared: bool = False  # of traced models: the largest of a layer
    expert_width_parts: int = 1  # of traced models: ranks that share each expert's width
    input_factors_applied: bool = True  # of traced models: else weights are decoded with them
    cache_quantised: bool = True  # of traced models: where the checkpoint states it
    code_sums: CodeSums = CodeSums.FLOAT32  # others: the short sums of Hopper's and Ada's FP8
    block_scales: BlockScaleUse = BlockScaleUse.STATED  # of traced linears in FP8 blocks
    expert_block_scales: BlockScaleUse = BlockScaleUse.STATED  # likewise, of experts
    latent_norm_epsilon: float | None = None  # transformers, V3.2: 1e-6 in q_norm and kv_norm

    def latent_epsilon(self, configured: float) -> float:
        """Return the epsilon under the root of V3.2's norms of latents."""
        return configured if self.latent_norm_epsilon is None else self.latent_norm_epsilon


_EXACT_INDEXER = Switches(
    indexer_hadamard=False,
    indexer_in_storage_dtype=False,
    indexer_weights_in_storage_dtype=False,
    routing_weight_before_w2=False,
)
SOURCES: Mapping[str, Switches] = MappingProxyType(
    {
        "official-v4": Switches(
            kv_cache=KeyValueCache.FP8,
            indexer_format=IndexerFormat.MXFP4,
            wo_a_follows_recipe=False,
        ),
        "official-v4-flash-early": Switches(
            indexer_format=IndexerFormat.MXFP4,
            wo_a_follows_recipe=False,
            shared_expert_clamped=False,
        ),
        "official-v32": Switches(kv_cache=KeyValueCache.FP8, indexer_format=IndexerFormat.FP8),
        "transformers": replace(
            _EXACT_INDEXER,
            head_norm=HeadNorm.FACTOR,
            rotation_in_storage_dtype=True,
            attention_in_storage_dtype=True,
            pooling_in_storage_dtype=True,
            mixing_in_storage_dtype=True,
            router_in_storage_dtype=True,
            routing_epsilon=1e-20,
            latent_norm_epsilon=1e-6,
            residual_rounded_before_norm=True,
        ),
        "vllm": replace(
            _EXACT_INDEXER,
            kv_cache=KeyValueCache.FP8,
            indexer_format=IndexerFormat.FP8,
            head_norm=HeadNorm.ONCE,
            attention_in_storage_dtype=False,
            input_scale_shared=True,
            reduction_in_storage_dtype=True,
            first_draft_embedding_zeroed=True,
        ),
    }
)


def switches_of(source: str) -> Switches:
    """Return the switches of one source; raise on an unknown name."""
    if source not in SOURCES:
        raise UnknownName.among("source of switches", source, SOURCES)
    return SOURCES[source]


@dataclass(frozen=True)
class Numerics:
    """The arithmetic of one run: `work` inside a component, `store` between components."""

    mode: Mode
    work: torch.dtype
    store: torch.dtype
    products: torch.dtype  # in which matrix products are summed
    switches: Switches = field(default_factory=Switches)
    within: torch.dtype | None = None  # attention stores this on its way; None: as its output

    @classmethod
    def definition(
        cls, dtype: torch.dtype = torch.float64, switches: Switches | None = None, **changes: Any
    ) -> Numerics:
        """Make the arithmetic without rounding; float64 unless float32 is requested."""
        if dtype not in (torch.float64, torch.float32):
            raise DtypeMismatch(
                "dtype", dtype, "float64 or float32", "Use Numerics.bf16() for stored BF16."
            )
        return cls(Mode.DEFINITION, dtype, dtype, dtype, _chosen(switches, changes))

    @classmethod
    def bf16(cls, switches: Switches | None = None, **changes: Any) -> Numerics:
        """Make float32 inside a component and one BF16 rounding where the official code stores."""
        chosen = _chosen(switches, changes)
        return cls(Mode.BF16, torch.float32, torch.bfloat16, torch.float32, chosen)

    @classmethod
    def twin(
        cls,
        switches: Switches | None = None,
        products: torch.dtype = torch.float64,
        **changes: Any,
    ) -> Numerics:
        """Make exact products of quantised operands; `products` is the dtype they are summed in."""
        chosen = _chosen(switches, changes)
        return cls(Mode.TWIN, torch.float32, torch.bfloat16, products, chosen)

    @property
    def decoded(self) -> torch.dtype:
        """Return the dtype that emulated quantisation multiplies: BF16, unless FP16 is stored."""
        return torch.float16 if self.store is torch.float16 else torch.bfloat16

    @property
    def exact(self) -> bool:
        """Return whether this is the definition, where nothing is quantised."""
        return self.mode is Mode.DEFINITION

    @property
    def on_the_way(self) -> Numerics:
        """Return the arithmetic of what attention stores before its output."""
        return self if self.within is None else replace(self, store=self.within, within=None)

    @property
    def operands(self) -> DecodedOperands:
        """Return what happens to quantised operands after their decoding."""
        return DecodedOperands.EXACT if self.exact else self.switches.decoded_operands

    @property
    def code_sums(self) -> CodeSums:
        """Return how products of FP8 codes are summed."""
        emulated = self.operands is not DecodedOperands.EXACT
        return CodeSums.FLOAT32 if self.exact or emulated else self.switches.code_sums

    @property
    def norm_stored_before(self) -> torch.dtype | None:
        """Return the dtype in which norms store rows before the weight; None where they do not."""
        rounds = self.switches.norm_rounded_before_weight and not self.exact
        return self.store if rounds else None

    def transforms(self, width: int) -> bool:
        """Return whether the indexer's rows of this width go through a Hadamard transform.

        Only a power of two has one. Others are left unchanged, which changes no exact score.
        """
        return self.switches.indexer_hadamard and width & (width - 1) == 0

    def with_switches(self, **changes: Any) -> Numerics:
        """Return the same arithmetic on the other side of some disagreements."""
        return replace(self, switches=replace(self.switches, **changes))


def _chosen(switches: Switches | None, changes: Mapping[str, Any]) -> Switches:
    """Return the switches of a source with some of them changed by keyword."""
    chosen = switches or Switches()
    return replace(chosen, **changes) if changes else chosen


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` in `dtype`; torch's own call takes longer when there is nothing to convert."""
    return x if x.dtype is dtype else x.to(dtype)


def compiles(numerics: Numerics, *tensors: Tensor) -> bool:
    """Return whether compiled float64 loops may run: not in the definition or with gradients."""
    if numerics.exact or numerics.work is not torch.float64:
        return False
    return all(
        tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.requires_grad
        for tensor in tensors
    )


# --------------------------------------------------------------------------------------------------
# Roundings of cache rows and of the indexer's operands, as the official kernels do them
#
# Legend: the last axis is cut into blocks; a value becomes scale * nearest representable code.
# UE8M0 scales are rounded up by the bits of amax * (1 / largest), a float32 product, so exact
# powers of two stay. Everything computes in float32 and returns float32. Rows must be whole blocks.
# Written without harness.formats, which it equals for every code.
# Sources: DeepSeek-V4 inference/kernel.py (act_quant, fp4_act_quant); FlashMLA tests/quant.py for
# the floor of the scale; flashinfer experimental/deepseek_v41/cache.py for NVFP4 rows.

E2M1_LARGEST = 6.0
E4M3_LARGEST = 448.0
FP8_FLOOR = 1e-4  # of amax in the official kernels, of the scale in FlashMLA's test helper
FP4_AMAX_FLOOR = 6.0 * 2.0**-126
NVFP4_SCALE_FLOOR = 2.0**-9  # smallest positive E4M3


def round_e2m1(x: Tensor) -> Tensor:
    """Return the nearest E2M1 value, ties to even, saturating at 6."""
    magnitude = x.abs().clamp(max=E2M1_LARGEST)
    # The spacing is 1/2 below 2, 1 below 4 and 2 above; torch.round takes ties to even.
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    return torch.copysign(torch.round(magnitude / step) * step, x)


def round_e4m3(x: Tensor) -> Tensor:
    """Return the nearest E4M3 value, ties to even, saturating at 448."""
    clamped = x.clamp(-E4M3_LARGEST, E4M3_LARGEST)
    return clamped.to(torch.float8_e4m3fn).to(torch.float32)


def power_of_two_above(x: Tensor) -> Tensor:
    """Return the smallest power of two that is not below x (positive, normal float32)."""
    bits = x.to(torch.float32).contiguous().view(torch.int32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF).ne(0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def _blocks(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the blocks [..., n, block] in float32 and each one's largest magnitude [..., n, 1]."""
    count, rest = divmod(x.shape[-1], block)
    if rest:
        raise ShapeMismatch(
            "last extent", x.shape[-1], f"a multiple of the {block}-wide blocks",
            "Choose another cache or indexer format for this geometry.",
        )  # fmt: skip
    blocks = x.to(torch.float32).reshape(*x.shape[:-1], count, block)
    return blocks, blocks.abs().amax(-1, keepdim=True)


def through_fp8(x: Tensor, block: int, *, scale_floored: bool = False) -> Tensor:
    """Round to E4M3 with one UE8M0 scale per block: latent rows (64 or 128), the indexer (128)."""
    blocks, amax = _blocks(x, block)
    if scale_floored:
        scale = power_of_two_above((amax * (1.0 / E4M3_LARGEST)).clamp(min=FP8_FLOOR))
    else:
        scale = power_of_two_above(amax.clamp(min=FP8_FLOOR) * (1.0 / E4M3_LARGEST))
    return (round_e4m3(blocks / scale) * scale).flatten(-2)


def through_fp8_f32(x: Tensor, block: int) -> Tensor:
    """Round to E4M3 with one float32 scale per block: the 656-byte rows of V3.2."""
    blocks, amax = _blocks(x, block)
    scale = amax.clamp(min=FP8_FLOOR) / E4M3_LARGEST
    return (round_e4m3(blocks / scale) * scale).flatten(-2)


def through_mxfp4(x: Tensor, block: int = 32) -> Tensor:
    """Round to E2M1 with one UE8M0 scale per block: the indexer's queries and keys."""
    blocks, amax = _blocks(x, block)
    scale = power_of_two_above(amax.clamp(min=FP4_AMAX_FLOOR) * (1.0 / E2M1_LARGEST))
    return (round_e2m1(blocks / scale) * scale).flatten(-2)


def through_nvfp4_row(x: Tensor, block: int = 16) -> Tensor:
    """Round to E2M1 with one E4M3 scale per block and no tensor scale: the NVFP4 cache rows."""
    blocks, amax = _blocks(x, block)
    scale = round_e4m3(amax.clamp(min=E2M1_LARGEST * NVFP4_SCALE_FLOOR) / E2M1_LARGEST)
    return (round_e2m1(blocks / scale) * scale).flatten(-2)


def through_cache(x: Tensor, block: int, numerics: Numerics) -> Tensor:
    """Return latents as they are read back; `block` is the family's FP8 block."""
    kind = numerics.switches.kv_cache
    if numerics.exact or kind is KeyValueCache.EXACT:
        return x
    floored = numerics.switches.cache_scale_floored
    if kind is KeyValueCache.FP8:
        return through_fp8(x, block, scale_floored=floored).to(x.dtype)
    if kind is KeyValueCache.FP8_F32:
        return through_fp8_f32(x, block).to(x.dtype)
    return through_nvfp4_row(x).to(x.dtype)


def through_indexer(x: Tensor, numerics: Numerics) -> Tensor:
    """Return the indexer's queries or keys as its kernel multiplies them."""
    kind = numerics.switches.indexer_format
    if numerics.exact or kind is IndexerFormat.EXACT:
        return x
    if kind is IndexerFormat.FP8:
        return through_fp8(x, min(128, x.shape[-1])).to(x.dtype)
    return through_mxfp4(x).to(x.dtype)
