"""All faults that this version can plant and name, by id, and those with an adjustable strength.

Faults of a quantised tensor and faults of a running model are listed apart; ids are unique in each
of the two.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING

from degarble.harness.base.errors import UnknownName
from degarble.harness.engine.faults import attention as m29
from degarble.harness.engine.faults import fused_operations as m24
from degarble.harness.engine.faults import precision as m43
from degarble.harness.engine.faults.attention import (
    SOFTMAX_MERGE_FAULTS,
    SOFTMAX_SCALE_FAULTS,
    TOP_K_SELECTION_FAULTS,
)
from degarble.harness.engine.faults.block_scales import (
    ONES_FOR_SCALES_FAULTS,
    POWER_OF_TWO_FAULTS,
    SCALE_ARITHMETIC_FAULTS,
    SCALE_RANGE_FAULTS,
    SCALE_RANK_FAULTS,
    SCALE_UNSET_FAULTS,
)
from degarble.harness.engine.faults.caches import (
    CACHE_PAGES_FAULTS,
    CACHE_ROWS_FAULTS,
    CACHE_SCALES_FAULTS,
    SHARED_VIEW_FAULTS,
)
from degarble.harness.engine.faults.codes import (
    CODECS_FAULTS,
    LOOKUP_EDGES_FAULTS,
    LOST_SIGN_FAULTS,
    NIBBLE_ORDER_FAULTS,
    NIBBLE_ORDER_TENSOR_FAULTS,
    NUMBER_FORMATS_FAULTS,
)
from degarble.harness.engine.faults.fused_operations import (
    ACTIVATION_CONSTANT_FAULTS,
    FUSED_OPERANDS_FAULTS,
)
from degarble.harness.engine.faults.gain_fit import gain_text, gain_variant, planted_gain
from degarble.harness.engine.faults.integers import (
    INTEGER_GROUP_FAULTS,
    INTEGER_GROUP_TENSOR_FAULTS,
)
from degarble.harness.engine.faults.kernel_tiles import BAD_BUCKET_FAULTS, RACES_FAULTS
from degarble.harness.engine.faults.layouts import (
    GATE_AND_UP_FAULTS,
    SCALE_LAYOUT_FAULTS,
    SCALE_LAYOUT_TENSOR_FAULTS,
    SWIZZLED_WORDS_FAULTS,
)
from degarble.harness.engine.faults.loading import (
    AFTER_LOADING_FAULTS,
    PREFIX_MIXUP_FAULTS,
    SKIPPED_LOAD_FAULTS,
    TENSOR_ABSENT_FAULTS,
    WRONG_PRECISION_FAULTS,
    WRONG_ROWS_FAULTS,
)
from degarble.harness.engine.faults.precision import (
    OUTPUT_PRECISION_FAULTS,
    SMALL_GAIN_FAULTS,
)
from degarble.harness.engine.faults.reductions import (
    REDUCTION_COUNT_FAULTS,
    RESIDUAL_STREAMS_FAULTS,
)
from degarble.harness.engine.faults.rope import ROPE_CONVENTION_FAULTS
from degarble.harness.engine.faults.router import ROUTED_SCALING_FAULTS, ROUTER_SEMANTICS_FAULTS
from degarble.harness.engine.faults.stale_memory import (
    GRAPH_STALENESS_FAULTS,
    POISON_FAULTS,
    STALE_MEMORY_FAULTS,
)
from degarble.harness.engine.faults.tensor_scales import (
    FUSED_SCALES_FAULTS,
    INPUT_SCALE_IN_WEIGHTS_FAULTS,
    ORDER_OF_SCALES_FAULTS,
    SCALE_COUNT_FAULTS,
    SCALE_COUNT_TENSOR_FAULTS,
    SCALE_DIRECTION_FAULTS,
    SCALE_DIRECTION_TENSOR_FAULTS,
)
from degarble.harness.engine.faults.traced.components import TRACED_COMPONENT_FAULTS
from degarble.harness.engine.faults.traced.inputs import TRACED_INPUT_FAULTS
from degarble.harness.engine.faults.traced.operations import TRACED_OPERATION_FAULTS
from degarble.harness.engine.faults.traced.products import TRACED_PRODUCT_FAULTS
from degarble.harness.engine.faults.traced.ranks import TRACED_RANK_FAULTS
from degarble.harness.engine.faults.traced.weights import TRACED_WEIGHT_FAULTS
from degarble.harness.report.number_text import number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from degarble.harness.engine.faults.model_faults import (
        ComponentContext,
        FaultVariant,
        ModelFault,
    )
    from degarble.harness.engine.faults.tensor_faults import TensorFault

    AdjustableFault = Callable[[ComponentContext, float], FaultVariant | None]


# --------------------------------------------------------------------------------------------------
# All faults that this version can plant and name, by id.

FAULTS: Mapping[str, TensorFault] = MappingProxyType(
    {
        fault.id: fault
        for family in (
            SCALE_DIRECTION_TENSOR_FAULTS,
            SCALE_COUNT_TENSOR_FAULTS,
            NIBBLE_ORDER_TENSOR_FAULTS,
            SCALE_LAYOUT_TENSOR_FAULTS,
            INTEGER_GROUP_TENSOR_FAULTS,
        )
        for fault in family
    }
)
MODEL_FAULTS: Mapping[str, ModelFault] = MappingProxyType(
    {
        fault.id: fault
        for family in (
            SCALE_DIRECTION_FAULTS,
            SCALE_COUNT_FAULTS,
            FUSED_SCALES_FAULTS,
            SCALE_UNSET_FAULTS,
            NUMBER_FORMATS_FAULTS,
            POWER_OF_TWO_FAULTS,
            SCALE_RANGE_FAULTS,
            CODECS_FAULTS,
            NIBBLE_ORDER_FAULTS,
            SCALE_LAYOUT_FAULTS,
            SCALE_ARITHMETIC_FAULTS,
            SHARED_VIEW_FAULTS,
            SWIZZLED_WORDS_FAULTS,
            CACHE_ROWS_FAULTS,
            GATE_AND_UP_FAULTS,
            WRONG_ROWS_FAULTS,
            TENSOR_ABSENT_FAULTS,
            WRONG_PRECISION_FAULTS,
            AFTER_LOADING_FAULTS,
            REDUCTION_COUNT_FAULTS,
            RESIDUAL_STREAMS_FAULTS,
            FUSED_OPERANDS_FAULTS,
            ACTIVATION_CONSTANT_FAULTS,
            ROUTER_SEMANTICS_FAULTS,
            ROUTED_SCALING_FAULTS,
            ROPE_CONVENTION_FAULTS,
            SOFTMAX_SCALE_FAULTS,
            SOFTMAX_MERGE_FAULTS,
            TOP_K_SELECTION_FAULTS,
            CACHE_SCALES_FAULTS,
            STALE_MEMORY_FAULTS,
            POISON_FAULTS,
            GRAPH_STALENESS_FAULTS,
            RACES_FAULTS,
            OUTPUT_PRECISION_FAULTS,
            BAD_BUCKET_FAULTS,
            SMALL_GAIN_FAULTS,
            LOST_SIGN_FAULTS,
            ORDER_OF_SCALES_FAULTS,
            LOOKUP_EDGES_FAULTS,
            SCALE_RANK_FAULTS,
            PREFIX_MIXUP_FAULTS,
            SKIPPED_LOAD_FAULTS,
            ONES_FOR_SCALES_FAULTS,
            INPUT_SCALE_IN_WEIGHTS_FAULTS,
            CACHE_PAGES_FAULTS,
        )
        for fault in family
    }
)


_OF_WEIGHTS = (
    SCALE_DIRECTION_FAULTS, SCALE_COUNT_FAULTS, SCALE_UNSET_FAULTS, NUMBER_FORMATS_FAULTS,
    POWER_OF_TWO_FAULTS, SCALE_RANGE_FAULTS, CODECS_FAULTS, NIBBLE_ORDER_FAULTS,
    SCALE_LAYOUT_FAULTS, SCALE_ARITHMETIC_FAULTS, SWIZZLED_WORDS_FAULTS, WRONG_ROWS_FAULTS,
    TENSOR_ABSENT_FAULTS, WRONG_PRECISION_FAULTS, AFTER_LOADING_FAULTS, LOST_SIGN_FAULTS,
    ORDER_OF_SCALES_FAULTS, LOOKUP_EDGES_FAULTS, SKIPPED_LOAD_FAULTS, ONES_FOR_SCALES_FAULTS,
)  # fmt: skip
_OF_PRODUCTS = tuple(
    fault
    for fault in (*BAD_BUCKET_FAULTS, *RACES_FAULTS, *OUTPUT_PRECISION_FAULTS)
    if fault.id in {
        "M41.rows_unwritten", "M41.columns_unwritten", "M41.rows_repeated", "M37.tile",
        "M40.coarse_output", "M40.small_accumulator", "M40.short_sums",
    }
)  # fmt: skip
# Faults of components that are known by what they compute and not by a role: those of any weight,
# and those by kind. Of faults that explain a difference equally well the first is named: those of
# weights stand before those of the kernel that multiplies them.
KIND_FAULTS: Mapping[str, ModelFault] = MappingProxyType(
    {
        fault.id: fault
        for family in (
            TRACED_RANK_FAULTS,
            TRACED_WEIGHT_FAULTS,
            TRACED_COMPONENT_FAULTS,
            TRACED_INPUT_FAULTS,
            TRACED_OPERATION_FAULTS,
            INTEGER_GROUP_FAULTS,
            *_OF_WEIGHTS,
            _OF_PRODUCTS,
            TRACED_PRODUCT_FAULTS,
        )
        for fault in family
    }
)


_ADOPTED: ContextVar[tuple[ModelFault, ...]] = ContextVar("adopted", default=())


@contextmanager
def with_adopted(faults: Iterable[ModelFault]) -> Iterator[None]:
    """Search these faults as well, after those of the catalogue."""
    known = {fault.id: fault for fault in (*_ADOPTED.get(), *faults)}
    token = _ADOPTED.set((*known.values(),))
    try:
        yield
    finally:
        _ADOPTED.reset(token)


def faults_for(context: ComponentContext) -> Iterable[ModelFault]:
    """Return the faults that a component may have, by its kind where it has one."""
    known = KIND_FAULTS if context.component.kind else MODEL_FAULTS
    return (*known.values(), *_ADOPTED.get())


def faults_of_kernel(context: ComponentContext) -> list[ModelFault]:
    """Return the faults of a product whose operands are given: its own, then those of weights."""
    stored = {fault.id for family in (INTEGER_GROUP_FAULTS, *_OF_WEIGHTS) for fault in family}
    return sorted(faults_for(context), key=lambda fault: fault.id in stored)


def plantable_faults() -> Mapping[str, ModelFault]:
    """Return the faults that the museum plants, adopted ones among them."""
    return {**MODEL_FAULTS, **{fault.id: fault for fault in _ADOPTED.get()}}


def model_fault_named(name: str) -> ModelFault:
    """Return a fault of a running model by its id."""
    if name not in MODEL_FAULTS:
        raise UnknownName.among("fault", name, MODEL_FAULTS)
    return MODEL_FAULTS[name]


# --------------------------------------------------------------------------------------------------
# Faults with an adjustable strength, such as a gain or an epsilon.
#
# Strength 0 changes nothing; 0.01 is one percent of a gain or of a factor of the logits, or the
# amount added under a root. The museum adjusts it until the effect has the wanted size in units of
# budget. Faults without a number have no entry in STRENGTHS.


def _with_epsilon(context: ComponentContext, strength: float) -> FaultVariant:
    return m24.epsilon_variant(context, m24.own_epsilon(context) + strength)


def _with_gain(context: ComponentContext, strength: float) -> FaultVariant:
    gain = 1 + strength
    return planted_gain(
        context, f"{gain_text(gain)} on the whole output", gain, places={"gain": gain}
    )


def _with_head_gain(context: ComponentContext, strength: float) -> FaultVariant:
    return next(m43.head_variants(context, 0, 1 + strength))


def _with_expert_gain(context: ComponentContext, strength: float) -> FaultVariant:
    return next(m43.expert_variants(context, 0, 1 + strength))


def _with_tile_gain(context: ComponentContext, strength: float) -> FaultVariant:
    return next(m43.tile_variants(context, 0, 1 + strength))


def _with_logits_factor(context: ComponentContext, strength: float) -> FaultVariant:
    factor = 1 + strength
    return m29.scaled(context, f"logits times {number(factor)}", factor)


def _with_value_factor(_context: ComponentContext, strength: float) -> FaultVariant:
    factor = 1 + strength
    return gain_variant(f"values read without their scale: {number(factor)}", factor)


STRENGTHS: Mapping[str, AdjustableFault] = MappingProxyType(
    {
        "M24.epsilon": _with_epsilon,
        "M29.other_scale": _with_logits_factor,
        "M32.values": _with_value_factor,
        "M43.whole": _with_gain,
        "M43.one_head": _with_head_gain,
        "M43.one_expert": _with_expert_gain,
        "M43.one_tile": _with_tile_gain,
    }
)
