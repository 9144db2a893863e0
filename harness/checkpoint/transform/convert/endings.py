"""Write the files next to converted shards: configs and the record of the conversion.

config.json and hf_quant_config.json are derived from the formats of the linears after the
conversion, never patched. conversion.json records the conversion, its options, and what was left
out and why. conversion_source.json is written where the conversion can be undone.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import LayoutMismatch
from degarble.harness.base.input_files import read_small_file
from degarble.harness.checkpoint.read.types import LARGEST_CONFIG
from degarble.harness.checkpoint.transform.configs_out import companions, declared
from degarble.harness.checkpoint.transform.convert.recipes_after import formats_after, recipe_of
from degarble.harness.checkpoint.view.consumers import consumer_of
from degarble.harness.checkpoint.view.quantisation_configs import (
    CONFIG,
    HF_QUANT_CONFIG,
    fused_in_vllm,
)
from degarble.harness.checkpoint.write.writer import Ending
from degarble.harness.formats.block_formats import FP8_128X128_F32
from degarble.harness.model.config.config import V4Config
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.recipes import BF16, recipe_named

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.checkpoint.transform.convert.recipes_after import Stored
    from degarble.harness.checkpoint.transform.units import Work
    from degarble.harness.checkpoint.view.view import Checkpoint, LogicalNames
    from degarble.harness.model.layouts import Layout

CONVERSION = "conversion.json"
SOURCE = "conversion_source.json"
SCHEMA = 1
_NVFP4 = "NVFP4"


def ending_of(job: Work) -> Ending:
    """Return the files to write next to the shards of a conversion."""
    files = _configs(job)
    copied, passed_over = companions(job.checkpoint.root, taken={CONFIG})
    files |= copied
    files[CONVERSION] = _json(_record(job) | {"files_not_copied": passed_over})
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


def _left_plain(formats: Mapping[str, Stored], names: LogicalNames, layout: Layout) -> list[str]:
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


def _has_fp8_experts(formats: Mapping[str, Stored]) -> bool:
    """Return whether the decoder's experts are FP8, which V4's config states in a separate key."""
    return any(
        ".experts." in name and name.startswith("layers.") and each.weight == FP8_128X128_F32.name
        for name, each in formats.items()
    )


def _require_one_way(job: Work, formats: Mapping[str, Stored]) -> None:
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


def _record(job: Work) -> dict[str, Any]:
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


def _written_for(job: Work) -> str:
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
