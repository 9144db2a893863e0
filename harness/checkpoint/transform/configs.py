"""Write the configs and records next to converted shards, and choose the companion files.

Configs are derived from the formats of the linears after the conversion, never patched.
"""

from __future__ import annotations

import json
import stat
from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import LayoutMismatch, Refused
from degarble.harness.base.files import read_small_file
from degarble.harness.checkpoint.read.safetensors_files import is_of_hub_cache
from degarble.harness.checkpoint.read.types import LARGEST_CONFIG, shown
from degarble.harness.checkpoint.view import quantisation_configs
from degarble.harness.checkpoint.view.consumers import consumer_of
from degarble.harness.checkpoint.view.quantisation_configs import (
    CONFIG,
    HF_QUANT_CONFIG,
    fused_in_vllm,
    quantisation,
)
from degarble.harness.checkpoint.write.writer import CompanionFiles
from degarble.harness.formats.number_formats import FP8_128X128_F32
from degarble.harness.model.config.config import V4Config
from degarble.harness.model.layouts import Spelling, layout_named
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import BF16, Recipe, Rule, recipe_named
from degarble.harness.model.tensors import PartKind
from degarble.harness.model.types import Kind

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from degarble.harness.checkpoint.transform.units import PlannedConversion
    from degarble.harness.checkpoint.view.view import Checkpoint, LogicalNames
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
        "conversion.json",
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
    if isinstance(config, V4Config) and layout.spelling is Spelling.HUGGINGFACE:
        renamed = json.loads(quantisation_configs.config_files(config, layout)[CONFIG])
        renamed.pop("quantization_config", None)
        raw = {**raw, **renamed}
    stated, beside = declared(config, layout)
    files = {CONFIG: raw | ({"quantization_config": stated} if stated else {})}
    if beside:
        files[HF_QUANT_CONFIG] = beside
    return {
        name: (json.dumps(each, ensure_ascii=False, indent=2) + "\n").encode()
        for name, each in files.items()
    }


def declared(config: Config, layout: Layout) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return `quantization_config` and hf_quant_config.json's content, weight-only if need be."""
    stated, beside = quantisation(config, layout)
    if is_weight_only(config, layout):
        return _without_activations(stated), _without_activations(beside)
    return stated, beside


def is_weight_only(config: Config, layout: Layout) -> bool:
    """Return whether there are NVFP4 weights and no activation before them is quantised."""
    recipe = layout.recipe_for(config)
    found = {recipe.format_of(each) for each in parameters(config)}
    return {each.activation for each in found if each.weight == "NVFP4"} == {BF16}


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
# Recipes after a conversion. Linears of one row of the parameter table share a rule where all are
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


def formats_after(job: PlannedConversion) -> dict[str, StoredFormat]:
    """Return the format of each linear of a known model after a conversion."""
    names = job.checkpoint.names
    assert names is not None, "a known model"
    formats = stored_formats(names)
    for unit in job.units:
        formats |= {name: StoredFormat(word, scaled=False) for name, word in unit.formats.items()}
    return formats


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


# --------------------------------------------------------------------------------------------------
# The record of a conversion.
#
# conversion.json records the conversion, its options, and what was left
# out and why. conversion_source.json is written where the conversion can be undone.

CONVERSION = "conversion.json"
SOURCE = "conversion_source.json"
SCHEMA = 1
_NVFP4 = "NVFP4"


def companion_files(job: PlannedConversion) -> CompanionFiles:
    """Return the files to write next to the shards of a conversion."""
    files = _configs(job)
    copied, passed_over = companions(job.checkpoint.root, taken={CONFIG})
    files |= copied
    files[CONVERSION] = _json(_record(job) | {"files_not_copied": passed_over})
    if job.conversion.returns:
        files[SOURCE] = _source(job.checkpoint)
    return CompanionFiles(files, {"conversion": job.to})


def _configs(job: PlannedConversion) -> dict[str, bytes]:
    raw = dict(job.checkpoint.config)
    if not raw:
        return {}
    raw.pop("quantization_config", None)
    model, names = job.checkpoint.model, job.checkpoint.names
    if model is None or names is None:
        kept = job.checkpoint.quantisation.get(CONFIG)
        return {CONFIG: _json(raw | ({"quantization_config": kept} if kept and job.copied else {}))}
    layout = layout_named("vllm", model) if job.conversion.whole else job.names.layout
    assert layout is not None, "a known model has a layout"
    formats = formats_after(job)
    _require_one_way(job, formats)
    recipe = recipe_of(formats, names)
    if isinstance(model, V4Config) and _has_fp8_experts(formats):
        raw["expert_dtype"], model = "fp8", replace(model, expert_dtype="fp8")
    if layout.suffixes == "compressed-tensors" and job.conversion.name != "bf16":
        layout = replace(layout, suffixes="huggingface")
    stated, beside = declared(model, layout.with_recipe(recipe))
    if stated and stated.get("quant_method") == "fp8":
        plain = _left_plain(formats, names, layout)
        stated |= {"modules_to_not_convert": plain} if plain else {}
        if beside and plain:
            beside["quantization"] |= {"modules_to_not_convert": plain}
    files = {CONFIG: _json(raw | ({"quantization_config": stated} if stated else {}))}
    return files | ({HF_QUANT_CONFIG: _json(beside)} if beside else {})


def _left_plain(
    formats: Mapping[str, StoredFormat], names: LogicalNames, layout: Layout
) -> list[str]:
    """List all BF16 linears, if quant_method fp8 alone would claim another format for some."""
    released = recipe_named("official", names.config)
    plain, stacks = [], set()
    for name, stored in formats.items():
        parameter = names.present[name]
        if layout.omits(parameter, names.config):
            continue
        path = layout.path_of(parameter, names.config)
        if stored.weight == BF16:
            plain.append((parameter, path))
        elif parameter.expert is not None:
            stacks.add(_stack(path))
    if all(released.format_of(parameter).weight == BF16 for parameter, _ in plain):
        return []
    told = (
        path if parameter.expert is None or _stack(path) in stacks else _stack(path)
        for parameter, path in plain
    )
    ignored = list(dict.fromkeys(told))
    # Stored fused, members have no tensors of their own, and vLLM asks for the fused name.
    return [*ignored, *(fused_in_vllm(names.config, ignored) if layout.fusions else ())]


def _stack(path: str) -> str:
    return path.partition(".experts.")[0] + ".experts"


def _has_fp8_experts(formats: Mapping[str, StoredFormat]) -> bool:
    """Return whether the decoder's experts are FP8, which V4's config states in a separate key."""
    return any(
        ".experts." in name and name.startswith("layers.") and each.weight == FP8_128X128_F32.name
        for name, each in formats.items()
    )


def _require_one_way(job: PlannedConversion, formats: Mapping[str, StoredFormat]) -> None:
    """Raise where some NVFP4 weights have quantised activations and others have not."""
    made = [n for unit in job.units for n, word in unit.formats.items() if word == _NVFP4]
    scaled = [n for n, each in formats.items() if each.weight == _NVFP4 and each.scaled]
    if made and scaled:
        raise LayoutMismatch(
            f"NVFP4 weights after {job.to}",
            f"{len(made)} without input scales, such as {made[0]}, beside {len(scaled)} with them",
            "one or the other: engines read one kind of NVFP4 out of a config",
            "Use `degarble quantise --calibration` for all of them, or decode the others to BF16.",
        )


def _record(job: PlannedConversion) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "to": job.to,
        "promise": job.conversion.promise,
        "options": job.options.told(job.conversion.options),
        "source_layout": str(job.checkpoint.layout),
        "written_for": _written_for(job),
        "converted": len(job.units),
        "copied": len(job.copied),
        "left_out": dict(Counter(job.left_out.values())),
    }


def _written_for(job: PlannedConversion) -> str:
    model = job.checkpoint.model
    return "" if model is None else consumer_of(job.to, model.family).what


def _source(checkpoint: Checkpoint) -> bytes:
    """Describe the source in full, so that `back` needs nothing else."""
    files = {}
    for name in (CONFIG, HF_QUANT_CONFIG):
        path = checkpoint.root / name
        if path.is_file():
            files[name] = read_small_file(path, LARGEST_CONFIG).decode()
    tensors = {each.name: [each.dtype, list(each.shape)] for each in checkpoint.entries.values()}
    told = {"schema": SCHEMA, "files": files, "tensors": tensors}
    return (json.dumps(told, ensure_ascii=False) + "\n").encode()


def _json(value: object) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode()
