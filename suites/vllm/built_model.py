"""vLLM's own DeepSeek-V4 with the plugin, built and loaded on a CPU, in a process of its own.

Run as `python -m degarble.suites.vllm.built_model CKPT [NAME]` with VLLM_PLUGINS=degarble;
NAME is a stored tensor that the stream drops. With `--rank N --store FILE` it is one of two ranks,
experts spread. A GPU's streams, events and capability are pretended: nothing is computed. Prints
one JSON object: classes, counts, shapes, banner, what runs; or the refusal.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.base.errors import Refused
from degarble.harness.model.recipes import Recipe, Rule
from degarble.suites.checkpoint.structure_cases import V4
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from degarble.harness.vllm.bound.start import Start


class Nothing:
    """A stream or an event that is never used."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


def write_served(folder: Path) -> Path:
    """Write a small V4 whose every linear and expert has a kernel of ours on an H200."""

    rules = (
        Rule("layers.*.ffn.experts.*", "NVFP4", "NVFP4"),
        Rule("layers.*.attn.wo_b", "NVFP4", "NVFP4"),
    )
    config = replace(V4, head_dim=512, index_head_dim=128)  # the extents that vLLM serves
    model = Synthetic(config, "nvfp4-experts", Recipe("experts and wo_b", rules))
    write_checkpoint(folder, model, shards=2)
    return folder


class Place(NamedTuple):
    """Which of how many ranks, and the file where they meet."""

    rank: int
    ranks: int
    store: str


def config_of(folder: Path, told: str, place: Place) -> Any:
    """Return vLLM's config of a start."""
    vllm = import_module("vllm.config")
    model = vllm.ModelConfig(
        model=str(folder), quantization="degarble", dtype="bfloat16", skip_tokenizer_init=True,
        enforce_eager=True, max_model_len=64,
    )  # fmt: skip
    return vllm.VllmConfig(
        model_config=model,
        device_config=vllm.DeviceConfig(device="cpu"),
        cache_config=vllm.CacheConfig(cache_dtype="fp8", block_size=256),
        parallel_config=vllm.ParallelConfig(
            tensor_parallel_size=place.ranks, enable_expert_parallel=place.ranks > 1,
            rank=place.rank, distributed_executor_backend="mp" if place.ranks > 1 else None,
        ),
        additional_config={"degarble": {"told": told}},
    )  # fmt: skip


def pretend_hopper() -> None:
    """Let vLLM believe in an H200, as far as its constructors ask."""
    platforms = import_module("vllm.platforms")
    capability = import_module("vllm.platforms.interface").DeviceCapability(9, 0)
    kind: Any = type(platforms.current_platform)
    kind.get_device_capability = classmethod(lambda *_, **__: capability)
    kind.device_type = "cpu"
    torch.cuda.Stream = torch.cuda.Event = Nothing  # type: ignore[assignment,misc]


def build(folder: Path, told: str, dropped: str | None, place: Place) -> dict[str, Any]:
    """Build and load; say what came of it."""
    import_module("vllm.plugins").load_general_plugins()
    config = config_of(folder, told, place)
    pretend_hopper()
    distributed = import_module("vllm.distributed")
    with import_module("vllm.config").set_current_vllm_config(config):
        met = f"file://{place.store}"
        distributed.init_distributed_environment(place.ranks, place.rank, met, place.rank, "gloo")
        distributed.initialize_model_parallel(place.ranks)
        registry = import_module("vllm.model_executor.models").ModelRegistry
        of_model = config.model_config
        made, _ = registry.resolve_model_cls(of_model.architectures, of_model)
        torch.set_default_dtype(torch.bfloat16)
        model = made(vllm_config=config)
        files = [str(path) for path in sorted(folder.glob("*.safetensors"))]
        weights = import_module("vllm.model_executor.model_loader.weight_utils")
        stream = weights.safetensors_weights_iterator(files, False)
        loaded = model.load_weights(each for each in stream if each[0] != dropped)
    start: Start = model.degarble_config.start
    return {
        "model": made.__name__,
        "attention": sorted({type(layer.attn).__name__ for layer in model.model.layers}),
        "parameters": len(list(model.named_parameters())),
        "loaded": len(loaded),
        "shapes": {name: list(each.shape) for name, each in model.named_parameters()},
        "banner": start.banner().lines(),
        "layers": sorted({type(layer).__name__ for layer in model.model.layers}),
        "indexers": sorted({type(layer.attn.indexer).__name__ for layer in model.model.layers}),
        "compressors": compressors(model),
        "running": [part.line() for part in start.running],
        "records": sorted(path.name for path in Path(told).glob("rank-*")),
    }


def compressors(model: Any) -> list[str]:
    """Name the classes of what compresses, each with caches that vLLM's config knows."""
    found = []
    for layer in model.model.layers:
        attention, indexer = layer.attn, layer.attn.indexer
        held = [] if attention.compressor is None else [(attention.compressor, attention)]
        held += [] if indexer is None else [(indexer.compressor, indexer.k_cache)]
        for each, cache in held:
            known = each._static_forward_context
            assert known[each.state_cache.prefix] is each.state_cache
            assert known[each.k_cache_prefix] is cache
            found.append(f"{type(each).__name__} {each.compress_ratio} {each.head_dim}")
    return found


def main() -> None:
    """Build, and print what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("dropped", nargs="?")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store")
    given = parser.parse_args()
    with TemporaryDirectory() as text:
        place = Place(given.rank or 0, 1 if given.rank is None else 2, given.store or f"{text}/met")
        try:
            made = build(given.folder, text, given.dropped, place)
        except Refused as error:
            made = {"refused": str(error)}
    print(json.dumps(made))  # noqa: T201  read by the suite


if __name__ == "__main__":
    main()
