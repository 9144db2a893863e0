"""All faults that this version can plant and name, by id. A new family is one file and one line.

A family of tensors puts `FAULTS` into its module, a family of running models `MODEL_FAULTS`; a
module may hold both. Ids are unique in each of the two.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from degarble.harness.engine.faults import (
    m01_scale_direction,
    m02_scale_count,
    m03_fused_scales,
    m04_scale_unset,
    m05_number_formats,
    m06_power_of_two,
    m08_scale_range,
    m09_codecs,
    m10_nibble_order,
    m11_scale_layout,
    m12_scale_arithmetic,
    m12_shared_view,
    m12_swizzled_words,
    m13_cache_rows,
    m14_gate_and_up,
    m16_wrong_rows,
    m17_tensor_absent,
    m19_wrong_precision,
    m20_after_loading,
    m21_reduction_count,
    m23_residual_streams,
    m24_fused_operands,
    m25_activation_constant,
    m26_router_semantics,
    m27_routed_scaling,
    m28_rope_convention,
    m29_softmax_scale,
    m30_softmax_merge,
    m31_top_k_selection,
    m32_cache_scales,
    m34_stale_memory,
    m35_poison,
    m36_graph_staleness,
    m37_races,
    m40_output_precision,
    m41_bad_bucket,
    m43_small_gain,
    o01_lost_sign,
    o02_order_of_scales,
    o03_lookup_edges,
    o06_scale_rank,
    o07_prefix_mixup,
    o08_skipped_load,
    o09_ones_for_scales,
    o10_input_scale_in_weights,
    o20_cache_pages,
)
from degarble.harness.errors import UnknownName

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from degarble.harness.engine.faults.family import Fault
    from degarble.harness.engine.faults.model_faults import ModelFault

_FAMILIES: tuple[ModuleType, ...] = (
    m01_scale_direction,
    m02_scale_count,
    m03_fused_scales,
    m04_scale_unset,
    m05_number_formats,
    m06_power_of_two,
    m08_scale_range,
    m09_codecs,
    m10_nibble_order,
    m11_scale_layout,
    m12_scale_arithmetic,
    m12_shared_view,
    m12_swizzled_words,
    m13_cache_rows,
    m14_gate_and_up,
    m16_wrong_rows,
    m17_tensor_absent,
    m19_wrong_precision,
    m20_after_loading,
    m21_reduction_count,
    m23_residual_streams,
    m24_fused_operands,
    m25_activation_constant,
    m26_router_semantics,
    m27_routed_scaling,
    m28_rope_convention,
    m29_softmax_scale,
    m30_softmax_merge,
    m31_top_k_selection,
    m32_cache_scales,
    m34_stale_memory,
    m35_poison,
    m36_graph_staleness,
    m37_races,
    m40_output_precision,
    m41_bad_bucket,
    m43_small_gain,
    o01_lost_sign,
    o02_order_of_scales,
    o03_lookup_edges,
    o06_scale_rank,
    o07_prefix_mixup,
    o08_skipped_load,
    o09_ones_for_scales,
    o10_input_scale_in_weights,
    o20_cache_pages,
)

FAULTS: Mapping[str, Fault] = MappingProxyType(
    {fault.id: fault for family in _FAMILIES for fault in getattr(family, "FAULTS", ())}
)
MODEL_FAULTS: Mapping[str, ModelFault] = MappingProxyType(
    {fault.id: fault for family in _FAMILIES for fault in getattr(family, "MODEL_FAULTS", ())}
)


def fault_named(name: str) -> Fault:
    """Look a fault of a tensor up by its id."""
    if name not in FAULTS:
        raise UnknownName.among("fault", name, FAULTS)
    return FAULTS[name]


def model_fault_named(name: str) -> ModelFault:
    """Look a fault of a running model up by its id."""
    if name not in MODEL_FAULTS:
        raise UnknownName.among("fault", name, MODEL_FAULTS)
    return MODEL_FAULTS[name]
