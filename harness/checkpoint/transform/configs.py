"""Write the configs next to transformed shards, and choose the companion files.

Configs are derived from the formats of the linears after the conversion, never patched.
"""

from __future__ import annotations

import json
import stat
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import Refused
from degarble.harness.base.files import read_small_file
from degarble.harness.checkpoint.read.safetensors_files import is_of_hub_cache
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.view import quantisation_configs
from degarble.harness.checkpoint.view.quantisation_configs import (
    CONFIG,
    HF_QUANT_CONFIG,
    quantisation,
)
from degarble.harness.model.family import family_of
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import BF16, Recipe, Rule
from degarble.harness.model.tensors import PartKind
from degarble.harness.model.types import Kind

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from degarble.harness.checkpoint.view.view import LogicalNames
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.layouts import Layout


# --------------------------------------------------------------------------------------------------
# Configs and companions.
#
# config.json is the source's own with another `quantization_config`; hf_quant_config.json is
# written anew. Tokenizer, generation config, templates, licence and README are copied. Every other
# file is left out and reported with its reason; code is never copied. A link made by the hub's
# cache counts as the file it points to; any other link is left out.
#
# NVFP4 weights without an input scale are declared W4A16_NVFP4. Declared as NVFP4, an engine would
# quantise activations with the uninitialised memory of an input_scale that nobody wrote.
#
# Sources: nvidia-modelopt 0.47 torch/export/convert_hf_config.py; vLLM #41769 (reads W4A16_NVFP4).

CONVERSION = "conversion.json"  # options of a conversion, and what it left out
LARGEST_COMPANION = 64 << 20  # V4's tokenizer.json has 7 MB
MOST_COMPANIONS = 256 << 20  # of all of them together
COMPANIONS = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "generation_config.json",
        "merges.txt",
        "preprocessor_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
    }
)
_PAPERS = ("LICENSE", "LICENCE", "NOTICE", "README")
_OURS = frozenset(
    {
        CONVERSION,
        "conversion_report.json",
        "conversion_source.json",
        "manifest.json",
        "model.safetensors.index.json",
    }
)
_WEIGHT_ONLY = "W4A16_NVFP4"


def config_files(config: Config, layout: Layout, source: Mapping[str, Any]) -> dict[str, bytes]:
    """Write config.json and hf_quant_config.json; the source's other entries stay as they are."""
    raw = dict(source)
    raw.pop("quantization_config", None)
    if layout.spelling in family_of(config).transformers_config:
        renamed = json.loads(quantisation_configs.config_files(config, layout)[CONFIG])
        renamed.pop("quantization_config", None)
        raw = {**raw, **renamed}
    stated, beside = declared(config, layout)
    return quantisation_configs.json_files(raw, stated, beside)


def declared(config: Config, layout: Layout) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return `quantization_config` and hf_quant_config.json's content, weight-only if need be."""
    stated, beside = quantisation(config, layout)
    if is_weight_only(config, layout):
        return _without_activations(stated), _without_activations(beside)
    return stated, beside


def is_weight_only(config: Config, layout: Layout) -> bool:
    """Return whether there are NVFP4 weights and no activation before them is quantised."""
    recipe = layout.recipe_for(config)
    found = {recipe.format_of(parameter) for parameter in parameters(config)}
    return {formats.activation for formats in found if formats.weight == "NVFP4"} == {BF16}


def companions(source: Path, taken: Collection[str]) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the files to copy unchanged, and the others with the reason for leaving them out."""
    copied: dict[str, bytes] = {}
    passed_over: dict[str, str] = {}
    room = MOST_COMPANIONS
    root = source if source.is_dir() else source.parent
    for path in sorted(root.iterdir()):
        name = path.name
        if name in taken or name in _OURS or name == HF_QUANT_CONFIG or _is_shard(name):
            continue
        reason = _objection(root, path, room)
        if not reason:
            try:
                copied[name] = read_small_file(path, LARGEST_COMPANION)
                room -= len(copied[name])
                continue
            except Refused as error:
                reason = error.expectation
        passed_over[shown(name)] = reason
    return copied, passed_over


def _objection(root: Path, path: Path, room: int) -> str:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        if not is_of_hub_cache(root, path) or not path.exists():
            return "a link"
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        return "no regular file"
    known = path.name in COMPANIONS
    if not known and not (path.name.startswith(_PAPERS) and path.suffix in ("", ".md", ".txt")):
        return "not on the list of companions"
    return "too large" if status.st_size > min(LARGEST_COMPANION, room) else ""


def _is_shard(name: str) -> bool:
    return name.endswith((".safetensors", ".safetensors.index.json"))


def _without_activations(stated: Any) -> Any:
    """Replace W4A4 by W4A16 wherever a config states it."""
    if isinstance(stated, dict):
        return {
            key: _WEIGHT_ONLY if value == "NVFP4" else _without_activations(value)
            for key, value in stated.items()
            if key != "input_activations"
        }
    return stated


# --------------------------------------------------------------------------------------------------
# Stored formats as a recipe. Linears of one row of the parameter table share a rule where all are
# alike.


class StoredFormat(NamedTuple):
    """The format of one linear, and whether its inputs have a calibrated scale."""

    weight: str
    scaled: bool


def stored_formats(names: LogicalNames) -> dict[str, StoredFormat]:
    """Return the format that each linear of a checkpoint is stored in, by logical name."""
    found = {}
    for name, parameter in names.present.items():
        if parameter.kind is Kind.LINEAR:
            form = names.table.form(names.module_of(parameter))
            scaled = PartKind.INPUT_SCALE in form.parts
            found[name] = StoredFormat(form.format.name if form.format else BF16, scaled)
    return found


def recipe_of(formats: Mapping[str, StoredFormat], names: LogicalNames) -> Recipe:
    """Return formats as a recipe; a linear unlike the rest of its row gets its own rule, first."""
    rows: dict[tuple[str, str], dict[str, StoredFormat]] = defaultdict(dict)
    for name, stored in formats.items():
        parameter = names.present[name]
        rows[parameter.block.scope if parameter.block else "", parameter.row.name][name] = stored
    single, common = [], []
    for (scope, row), members in rows.items():
        usual, _ = Counter(members.values()).most_common(1)[0]
        pattern = f"{scope}.*.{row}" if scope else row
        common.append(_rule(pattern.replace("{e}", "*"), usual))
        single += [_rule(name, own) for name, own in members.items() if own != usual]
    return Recipe("as converted", (*single, *common))


def _rule(match: str, stored: StoredFormat) -> Rule:
    return Rule(match, stored.weight, stored.weight if stored.scaled else BF16)
