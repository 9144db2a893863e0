"""All faults that this version can plant and name, by id. A new family is one file and one line.

A family of tensor faults defines `FAULTS` in its module, a family of faults in running models
`MODEL_FAULTS`; a module may define both. Ids are unique in each of the two.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from degarble.harness.base.errors import UnknownName
from degarble.harness.engine.faults.attention import (
    rope_convention,
    softmax_merge,
    softmax_scale,
    top_k_selection,
)
from degarble.harness.engine.faults.codes import (
    codecs,
    lookup_edges,
    lost_sign,
    nibble_order,
    number_formats,
)
from degarble.harness.engine.faults.layout import (
    fused_operands,
    gate_and_up,
    scale_layout,
    shared_view,
    swizzled_words,
)
from degarble.harness.engine.faults.memory import (
    bad_bucket,
    cache_pages,
    cache_rows,
    cache_scales,
    graph_staleness,
    poison,
    races,
    stale_memory,
)
from degarble.harness.engine.faults.reduction import (
    activation_constant,
    output_precision,
    reduction_count,
    residual_streams,
    small_gain,
)
from degarble.harness.engine.faults.router import routed_scaling, router_semantics
from degarble.harness.engine.faults.scales import (
    fused_scales,
    input_scale_in_weights,
    ones_for_scales,
    order_of_scales,
    power_of_two,
    scale_arithmetic,
    scale_count,
    scale_direction,
    scale_range,
    scale_rank,
    scale_unset,
)
from degarble.harness.engine.faults.weights import (
    after_loading,
    prefix_mixup,
    skipped_load,
    tensor_absent,
    wrong_precision,
    wrong_rows,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from degarble.harness.engine.faults.family import Fault
    from degarble.harness.engine.faults.model_faults import ModelFault

_FAMILIES: tuple[ModuleType, ...] = (
    scale_direction,
    scale_count,
    fused_scales,
    scale_unset,
    number_formats,
    power_of_two,
    scale_range,
    codecs,
    nibble_order,
    scale_layout,
    scale_arithmetic,
    shared_view,
    swizzled_words,
    cache_rows,
    gate_and_up,
    wrong_rows,
    tensor_absent,
    wrong_precision,
    after_loading,
    reduction_count,
    residual_streams,
    fused_operands,
    activation_constant,
    router_semantics,
    routed_scaling,
    rope_convention,
    softmax_scale,
    softmax_merge,
    top_k_selection,
    cache_scales,
    stale_memory,
    poison,
    graph_staleness,
    races,
    output_precision,
    bad_bucket,
    small_gain,
    lost_sign,
    order_of_scales,
    lookup_edges,
    scale_rank,
    prefix_mixup,
    skipped_load,
    ones_for_scales,
    input_scale_in_weights,
    cache_pages,
)

FAULTS: Mapping[str, Fault] = MappingProxyType(
    {fault.id: fault for family in _FAMILIES for fault in getattr(family, "FAULTS", ())}
)
MODEL_FAULTS: Mapping[str, ModelFault] = MappingProxyType(
    {fault.id: fault for family in _FAMILIES for fault in getattr(family, "MODEL_FAULTS", ())}
)


def fault_named(name: str) -> Fault:
    """Return a fault of a tensor by its id."""
    if name not in FAULTS:
        raise UnknownName.among("fault", name, FAULTS)
    return FAULTS[name]


def model_fault_named(name: str) -> ModelFault:
    """Return a fault of a running model by its id."""
    if name not in MODEL_FAULTS:
        raise UnknownName.among("fault", name, MODEL_FAULTS)
    return MODEL_FAULTS[name]
