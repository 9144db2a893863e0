"""vLLM's own DeepSeek models, built on a CPU and loaded with checkpoints, in a process of its own.

Run as `python -m degarble.suites.vllm.loading_model OUT CKPT [CKPT ...]` by an environment
that has vLLM 0.33. vLLM makes its parameters and its loader fills them; which kernel would compute
is pretended, as no GPU is there and nothing is computed. For each checkpoint OUT/<its name> holds
every parameter as it was filled. Prints one JSON object a checkpoint: its name, the parameters that
nothing was written to, the stored tensors that the loader asked for no parameter, or the error.
With `--by-own-names` tensors are copied to the parameters of their own names, not by vLLM's loader.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from degarble.suites.vllm.built_model import pretend_hopper

if TYPE_CHECKING:
    from collections.abc import Iterator

SPARSE = "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_ORACLES = ("fp8", "mxfp4", "nvfp4", "unquantized")
_OF_THE_CACHE = re.compile(r"\.mla_attn\.[kvq]_scale$|\.mla_attn\.prob_scale$")  # not stored
_NESTED = ".routed_experts."  # vLLM 0.33 holds stacks one module deeper than we name them
_INPUT_SCALE, _SINK = "input_scale", ".attn_sink"  # sinks are padded to 64 heads for FlashMLA
_PLAIN = {torch.bfloat16, torch.float32}
_PAIRED = re.compile(r"(\.indexer\.wk)\.weight$")  # loaded when its scale comes


class Kernel:
    """Stands in for the choice of a kernel; it has every method, and does nothing."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def pretend_kernels() -> None:
    """Let every layer believe that it found a kernel."""
    backends = {}
    for each in _ORACLES:
        oracle = import_module(f"{_FUSED_MOE}.oracle.{each}")
        for name, kind in vars(oracle).items():
            if name.endswith("MoeBackend") and hasattr(kind, "__members__"):
                known = kind.__members__
                backends[each] = known.get("TRITON") or known.get("MARLIN") or next(iter(kind))
    for name in ("quantization.modelopt", "quantization.fp8"):
        import_module(f"vllm.model_executor.layers.{name}")
    for module in list(sys.modules.values()):
        if not getattr(module, "__name__", "").startswith("vllm"):
            continue
        for name in list(vars(module)):
            if name.startswith("init_") and name.endswith("_linear_kernel"):
                setattr(module, name, lambda *_, **__: Kernel())
            if name.startswith("select_") and name.endswith("moe_backend"):
                found = next((each for each in _ORACLES if each in name), "nvfp4")
                chosen = backends[found], Kernel
                setattr(module, name, lambda *_, chosen=chosen, **__: chosen)
    platform: Any = type(import_module("vllm.platforms").current_platform)
    torch.accelerator.empty_cache = lambda: None
    platform.get_attn_backend_cls = classmethod(lambda *_, **__: SPARSE)


def built(folder: Path) -> Any:
    """Return vLLM's model for a checkpoint, its parameters not filled yet."""
    configs = import_module("vllm.config")
    model = configs.ModelConfig(
        model=str(folder), dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True,
        max_model_len=64,
    )  # fmt: skip
    config = configs.VllmConfig(
        model_config=model,
        device_config=configs.DeviceConfig(device="cpu"),
        cache_config=configs.CacheConfig(cache_dtype="fp8_ds_mla", block_size=256),
    )
    pretend_hopper()
    pretend_kernels()
    distributed = import_module("vllm.distributed")
    with configs.set_current_vllm_config(config):
        if not distributed.model_parallel_is_initialized():
            met = f"file://{Path(os.environ['DEGARBLE_MET'])}"
            distributed.init_distributed_environment(1, 0, met, 0, "gloo")
            distributed.initialize_model_parallel(1)
            workspace = import_module("vllm.v1.worker.workspace")
            workspace.init_workspace_manager(torch.device("cpu"))
        registry = import_module("vllm.model_executor.models").ModelRegistry
        kind, _ = registry.resolve_model_cls(model.architectures, model)
        pretend_kernels()  # in what the model's module has imported
        torch.set_default_dtype(torch.bfloat16)
        return configs, config, kind(vllm_config=config)


def loaded(folder: Path, out: Path) -> dict[str, Any]:
    """Load one checkpoint by vLLM's loader and leave its parameters in `out`."""
    configs, config, model = built(folder)
    parameters = dict(model.named_parameters())
    written: list[bool] = []

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in _stored(folder):
            seen.append(name)
            written.append(False)
            yield name, tensor

    seen: list[str] = []
    for parameter in parameters.values():
        _watch(parameter, written)
    with configs.set_current_vllm_config(config):
        done = model.load_weights(counted())
    _leave(folder, out, model)
    unread = [name for name, taken in zip(seen, written, strict=True) if not taken]
    taken = set(seen) - set(unread)
    return {
        "parameters": len(parameters),
        "missing": sorted(_wanted(model) - done),
        "unexpected": [
            name for name in unread if _PAIRED.sub(r"\1.weight_scale_inv", name) not in taken
        ],
    }


def copied(folder: Path, out: Path) -> dict[str, Any]:
    """Copy each tensor to the parameter of its name, dtype and shape; leave them in `out`."""
    _, _, model = built(folder)
    named = {name.replace(_NESTED, "."): each for name, each in model.named_parameters()}
    done, unexpected = set(), []
    for name, tensor in _stored(folder):
        parameter = named.get(name)
        if parameter is None or not _fits(parameter, tensor, name):
            unexpected.append(name)
            continue
        parameter.data.view(-1)[: tensor.numel()].copy_(tensor.view(-1))
        done.add(name)
    wanted = {name.replace(_NESTED, ".") for name in _wanted(model)}
    _leave(folder, out, model)
    return {
        "parameters": len(named),
        "missing": sorted(wanted - done),
        "unexpected": sorted(unexpected),
    }


def _fits(parameter: torch.Tensor, tensor: torch.Tensor, name: str) -> bool:
    """Tell whether a tensor can be copied; norms may be float32, and FlashMLA's sinks padded."""
    if parameter.dtype != tensor.dtype and not {parameter.dtype, tensor.dtype} <= _PLAIN:
        return False
    if name.endswith(_SINK):
        return parameter.numel() >= tensor.numel()
    return parameter.shape == tensor.shape or parameter.numel() == tensor.numel() == 1


def _stored(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    files = [str(path) for path in sorted(folder.glob("*.safetensors"))]
    weights = import_module("vllm.model_executor.model_loader.weight_utils")
    yield from weights.safetensors_weights_iterator(files, False)


def _wanted(model: Any) -> set[str]:
    """Name the parameters that a checkpoint has to fill.

    Behind unquantised activations vLLM makes input scales, reads none and drops them: modelopt.py,
    _DropInputScale for linears; use_a16 for experts.
    """
    found = {name for name, _ in model.named_parameters() if not _OF_THE_CACHE.search(name)}
    for prefix, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        spec = getattr(method, "spec", None)
        if getattr(method, "use_a16", False) or (spec is not None and spec.activation is None):
            own = (name for name, _ in module.named_parameters(recurse=False))
            found -= {f"{prefix}.{name}" for name in own if name.endswith(_INPUT_SCALE)}
    return found


def _leave(folder: Path, out: Path, model: Any) -> None:
    """Save what a checkpoint filled, under the names of our layout."""
    wanted = _wanted(model)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    heads = config["num_attention_heads"]
    state = {
        name.replace(_NESTED, "."): (each[:heads] if name.endswith(_SINK) else each)
        .detach()
        .contiguous()
        .clone()
        for name, each in model.named_parameters()
        if name in wanted or _OF_THE_CACHE.search(name)
    }
    out.mkdir(parents=True)
    save_file(state, out / "model.safetensors")
    shutil.copy(folder / "config.json", out)


def _watch(parameter: Any, written: list[bool]) -> None:
    """Note that a stored tensor was handed to a parameter's loader."""
    plain = import_module("vllm.model_executor.model_loader.weight_utils").default_weight_loader
    own = getattr(parameter, "weight_loader", plain)

    def load(*given: Any, **named: Any) -> Any:
        done = own(*given, **named)
        if done is not False:
            written[-1] = True
        return done

    try:
        parameter.weight_loader = load
    except AttributeError:  # vLLM's own classes of parameters keep it under another name
        parameter._weight_loader = load


def main() -> None:
    """Load what the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--by-own-names", action="store_true")
    given = parser.parse_args()
    load = copied if given.by_own_names else loaded
    with TemporaryDirectory() as place:
        os.environ["DEGARBLE_MET"] = f"{place}/met"
        for folder in given.folders:
            try:
                fields = load(folder, given.out / folder.name)
            except (RuntimeError, ValueError, KeyError, AssertionError, SafetensorError) as error:
                fields = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            print(json.dumps({"checkpoint": folder.name} | fields), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
