"""What the ranks recorded appears in Prometheus' text, where the plugin was asked for."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.vllm import log_messages
from degarble.harness.vllm.installed import VARIABLE
from degarble.suites.vllm.test_log_messages import BANNER, RUNNING

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.vllm


def logger(folder: Path) -> Any:
    module = import_module("degarble.harness.vllm.bound.metrics")
    asked = {"degarble": {"told": str(folder)}}
    return module.PartInfo(SimpleNamespace(additional_config=asked, instance_id="x"), 0)


def text() -> str:
    client = import_module("prometheus_client")
    made: str = client.generate_latest().decode()
    return made


def test_nothing_is_shown_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    log_messages.leave(tmp_path, 0, BANNER, RUNNING)
    made = logger(tmp_path)
    made.log_engine_initialized()
    assert made.shown == 0


def test_every_part_of_every_rank_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "degarble")
    for rank in range(2):
        log_messages.leave(tmp_path, rank, BANNER, RUNNING)
    made = logger(tmp_path)
    made.log_engine_initialized()
    made.log_engine_initialized()  # an engine that starts again
    made.record(None, None)
    lines = [line for line in text().splitlines() if line.startswith("degarble_part_info{")]
    assert len(lines) == 4
    assert all(line.endswith(" 1.0") for line in lines)
    assert sum('by="vllm"' in line and 'part="attend"' in line for line in lines) == 2
