"""Bytes of what `quantise` and `convert` write: a digest a file, for both families."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from degarble.harness.checkpoint.transform.quantise.calibration import Amax, Calibration
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import recipe_named
from degarble.references.tiny.configs import TINY_V4, TINY_V32
from degarble.suites.golden.commands import RELEASED, ran
from degarble.suites.golden.store import masked, rounded

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from degarble.harness.model.config.config import Config

CONFIGS: Mapping[str, Config] = {"v4": TINY_V4, "v32": TINY_V32}
QUANTISED = ("nvfp4-full", "official")
CONVERTED = {
    "v4": (
        ("nvfp4-full", "bf16"),
        ("nvfp4-full", "vllm"),
        ("nvfp4-full", "fused-compressor"),
        ("official", "nvfp4-lossless"),
        ("official", "fp8-block"),
    ),
    "v32": (("nvfp4-full", "bf16"), ("nvfp4-full", "vllm"), ("official", "nvfp4")),
}
# Files of JSON that hold degarble's version, or sums in whose last digits processors differ.
_RECORDS = ("manifest.json", "conversion_report.json")
_DIGITS = 4


def write_calibration(family: str, recipe: str, path: Path) -> bool:
    """Write input ranges for every weight whose activations the recipe quantises statically."""
    config = CONFIGS[family]
    chosen = recipe_named(recipe, config)
    names = [p.name for p in parameters(config) if chosen.format_of(p).activation == "NVFP4"]
    ranges = {name: Amax(1.5 + number / 8, 7) for number, name in enumerate(names)}
    if ranges:
        path.write_bytes(Calibration.from_records(ranges).to_bytes())
    return bool(ranges)


def quantised(family: str, recipe: str, folder: Path) -> Path:
    """Quantise a released model once."""
    target = folder / f"{family}-{recipe}"
    if not target.exists():
        ranges = folder / f"{target.name}-ranges.json"
        more = ("--calibration", ranges) if write_calibration(family, recipe, ranges) else ()
        ran("quantise", RELEASED / family, target, "--recipe", recipe, *more)
    return target


def data(folder: Path) -> dict[str, Any]:
    """Quantise and convert, and return digests of all files."""
    found = {}
    for family, conversions in CONVERTED.items():
        for recipe in QUANTISED:
            found[f"{family} {recipe}"] = digests(quantised(family, recipe, folder))
        for recipe, to in conversions:
            target = folder / f"{family}-{recipe}-to-{to}"
            ran("convert", quantised(family, recipe, folder), target, "--to", to, "--prove")
            found[f"{family} {recipe} to {to}"] = digests(target)
    return found


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of every file of a checkpoint."""
    return {path.name: _digest(path) for path in sorted(folder.iterdir())}


def _digest(path: Path) -> str:
    content = path.read_bytes()
    if path.name in _RECORDS:
        record = rounded(masked(json.loads(content)), _DIGITS)
        content = json.dumps(record).encode()
    return hashlib.sha256(content).hexdigest()[:32]
