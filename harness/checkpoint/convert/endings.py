"""The files beside converted shards: configs that say what the tensors are now, and the record.

Owns config.json and hf_quant_config.json of the output, read off the formats that its linears have
after the conversion, never patched by hand; conversion.json (what was done, with which options,
what was left out and why); conversion_source.json, where there is a way back; and the copying of
the small files beside the source's shards.

Refuses nothing of its own. Kept honest by suites/checkpoint/convert/test_bf16.py.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from degarble.harness.anatomy.layouts import layout_named
from degarble.harness.checkpoint.convert.recipes_after import Stored, recipe_of, stored_formats
from degarble.harness.checkpoint.manifest import MANIFEST
from degarble.harness.checkpoint.quantisation_configs import (
    CONFIG,
    HF_QUANT_CONFIG,
    quantisation,
)
from degarble.harness.checkpoint.safetensors_file import read_small_file
from degarble.harness.checkpoint.types import LARGEST_CONFIG
from degarble.harness.checkpoint.writer import Ending

if TYPE_CHECKING:
    from degarble.harness.checkpoint.convert.units import Work
    from degarble.harness.checkpoint.view import Checkpoint

CONVERSION = "conversion.json"
SOURCE = "conversion_source.json"
SCHEMA = 1
_COPIED = frozenset({".json", ".txt", ".jinja", ".model", ".md", ".py"})
_OWN = frozenset({CONFIG, HF_QUANT_CONFIG, CONVERSION, SOURCE, MANIFEST})


def ending_of(job: Work) -> Ending:
    """Make what lies beside the shards of a conversion."""
    files = _beside(job.checkpoint) | _configs(job)
    files[CONVERSION] = _json(_record(job))
    if job.conversion.returns:
        files[SOURCE] = _source(job.checkpoint)
    return Ending(files, {"conversion": job.to})


def _configs(job: Work) -> dict[str, bytes]:
    raw = dict(job.checkpoint.config)
    if not raw:
        return {}
    raw.pop("quantization_config", None)
    model, names = job.checkpoint.model, job.checkpoint.names
    if model is None or names is None:
        kept = job.checkpoint.quantisation.get(CONFIG)
        return {CONFIG: _json(raw | ({"quantization_config": kept} if kept and job.copied else {}))}
    layout = layout_named("vllm", model) if job.conversion.whole else names.layout
    formats = stored_formats(names)
    for unit in job.units:
        formats |= {name: Stored(word, scaled=False) for name, word in unit.formats.items()}
    recipe = recipe_of(formats, names)
    if layout.suffixes == "compressed-tensors" and job.conversion.name != "bf16":
        layout = replace(layout, suffixes="huggingface")
    stated, beside = quantisation(model, layout.with_recipe(recipe))
    files = {CONFIG: _json(raw | ({"quantization_config": stated} if stated else {}))}
    return files | ({HF_QUANT_CONFIG: _json(beside)} if beside else {})


def _record(job: Work) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "to": job.to,
        "promise": job.conversion.promise,
        "options": job.options.told(job.conversion.options),
        "source_layout": str(job.checkpoint.layout),
        "converted": len(job.units),
        "copied": len(job.copied),
        "left_out": dict(Counter(job.left_out.values())),
    }


def _source(checkpoint: Checkpoint) -> bytes:
    """Say what the source was, in full, so that the way back needs nothing else."""
    files = {}
    for name in (CONFIG, HF_QUANT_CONFIG):
        path = checkpoint.root / name
        if path.is_file():
            files[name] = read_small_file(path, LARGEST_CONFIG).decode()
    tensors = {each.name: [each.dtype, list(each.shape)] for each in checkpoint.entries.values()}
    told = {"schema": SCHEMA, "files": files, "tensors": tensors}
    return (json.dumps(told, ensure_ascii=False) + "\n").encode()


def _beside(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Read the small files that belong to a model: tokenizer, chat template, licence."""
    found = {}
    for path in sorted(checkpoint.root.iterdir()):
        usual = path.suffix in _COPIED and path.name not in _OWN
        if not usual or path.name.endswith(".safetensors.index.json") or path.is_symlink():
            continue
        if path.is_file() and path.stat().st_size <= LARGEST_CONFIG:
            found[path.name] = read_small_file(path, LARGEST_CONFIG)
    return found


def _json(value: object) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode()
