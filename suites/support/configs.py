"""The configs of the families that have references written by hand, which many suites run alike."""

from __future__ import annotations

from degarble.harness.model.config.config import V4Config, V32Config

DeepSeekConfig = V4Config | V32Config
