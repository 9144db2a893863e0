"""Report what runs each part of each layer in vLLM's /metrics: the gauge degarble_part_info.

vLLM's group `vllm.stat_logger_plugins` makes this logger in the process that serves /metrics. It
reads the records that the ranks wrote after loading, and acts only if VLLM_PLUGINS names degarble.
"""

from __future__ import annotations

from typing import Any

from degarble.harness.base.errors import MissingDependency
from degarble.harness.vllm.installed import is_named, require_vllm
from degarble.harness.vllm.log_messages import folder_of, labels, read_records
from degarble.harness.vllm.parts import RunningPart, read_options

require_vllm()

try:  # not through upstream.py: this process needs no model
    from prometheus_client import REGISTRY, Gauge

    from vllm.v1.metrics.loggers import StatLoggerBase
except ImportError as error:
    raise MissingDependency(
        "vllm",
        str(error),
        "vLLM 0.33 with its metrics",
        "make vllm-env builds such an environment.",
    ) from error

METRIC = "degarble_part_info"
LABELS = ("rank", *RunningPart._fields)


class PartInfo(StatLoggerBase):
    """Sets one gauge a part, once the engine stands."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._config = vllm_config
        self._engine = engine_index
        self.shown = 0

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Record nothing: our metrics do not depend on steps."""

    def log_engine_initialized(self) -> None:
        """Show what the ranks recorded; the same start shown again changes nothing."""
        if not is_named():
            return
        asked = read_options(self._config.additional_config).told
        gauge = self._gauge()
        for rank, running in read_records(folder_of(self._config.instance_id, asked)).items():
            for label in labels(rank, running):
                gauge.labels(**label).set(1)
                self.shown += 1

    @staticmethod
    def _gauge() -> Any:
        known = getattr(REGISTRY, "_names_to_collectors", {}).get(METRIC)
        return known or Gauge(METRIC, "What runs each part of each layer.", LABELS)
