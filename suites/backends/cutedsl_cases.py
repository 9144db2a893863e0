"""Small models that our kernels run, with true heads and rows, and one way to judge a run."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.backends.cutedsl import kernels as cutedsl_kernels
from degarble.harness.capture.capture import CaptureSettings, capture
from degarble.harness.capture.options import CaptureFilter
from degarble.harness.cli.values import settings_here
from degarble.harness.commands.check.check import CheckRun
from degarble.harness.commands.check.check import CheckSettings as WantedCheck
from degarble.references.tiny.configs import TINY_V4, TINY_V32
from degarble.suites.serve.talking_cases import write_tokenizer
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.backends.cutedsl.kernels import Kernels
    from degarble.harness.capture.capture import CaptureSummary
    from degarble.harness.commands.check.check import CheckResult
    from degarble.harness.model.config.config import Config
    from degarble.suites.support.configs import DeepSeekConfig

# Every kind of layer once: hashed and dense choices, both compressions, the indexer, scored routes.
CONFIG_V4 = replace(TINY_V4, num_hidden_layers=3, compress_ratios=(0, 4, 128), vocab_size=64)
CONFIGS: dict[str, DeepSeekConfig] = {
    "v4": CONFIG_V4,
    "v32": replace(TINY_V32, vocab_size=64),
}
CASES = (
    ("v4", "nvfp4-full"), ("v4", "nvfp4-experts"), ("v4", "bf16"),
    ("v32", "nvfp4-full"), ("v32", "nvfp4-experts"),
)  # fmt: skip
PROMPTS = (tuple(range(6, 26)), (9, 40, 9))
# Around what layers are made of (4, 128, the window). Then 30 entries more than are chosen, and
# rows of more than a part of a tile of scales.
LENGTHS = (
    (3, 128, 17), (4, 131), (5, 129, 1), (127, 2), (140,), (64, 65, 63), (3, 17), (250,), (60, 17),
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A checkpoint as a recipe has it, and the BF16 one that it came from."""

    checkpoint: Path
    reference: Path


def write_model(
    folder: Path, family: str, layout: str, seed: int = 3, config: Config | None = None
) -> Model:
    """Write both; their values are the same."""
    chosen = config or CONFIGS[family]
    names = (f"{family}-{kind}-{seed}-{len(chosen.layers)}" for kind in (layout, "bf16"))
    model = Model(*(folder / name for name in names))
    for path, kind in ((model.checkpoint, layout), (model.reference, "bf16")):
        if not path.exists():
            write_checkpoint(path, Synthetic(chosen, kind, seed=seed))
            write_tokenizer(path)
    return model


def drawn_prompts(seed: int) -> tuple[tuple[int, ...], ...]:
    """Draw prompts of one of LENGTHS."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        tuple(torch.randint(6, 64, (length,), generator=generator).tolist())
        for length in LENGTHS[seed % len(LENGTHS)]
    )


def capture_by(
    kernels: Kernels | None,
    source: Path,
    out: Path,
    prompts: tuple[Any, ...] = PROMPTS,
    **more: Any,
) -> CaptureSummary:
    """Capture a run by these kernels in place of the GPU's own."""
    wanted = CaptureFilter.from_options(None, more.pop("components", None), None)
    capture_settings = CaptureSettings(
        wanted, more.pop("new_tokens", 3), backend="cutedsl", settings=settings_here(), **more
    )
    with pytest.MonkeyPatch.context() as patch:
        if kernels is not None:
            patch.setattr(cutedsl_kernels, "KernelsOnGpu", lambda _settings, **_how: kernels)
            patch.setattr(cutedsl_kernels, "require_gpu", lambda: None)
        return capture(
            source, list(prompts), out, lambda _streamed: nullcontext(), capture_settings
        )


def checked(capture_folder: Path, model: Model) -> CheckResult:
    """Judge a capture by the twin of its checkpoint."""
    with CheckRun(WantedCheck(capture_folder, model.reference)) as run:
        return run.judge()
