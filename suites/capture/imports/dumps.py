"""Dumps as SGLang, FlashInfer and vLLM write them, of a model that computes as theirs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from degarble.suites.references.traced.traced_models import built, raw_config
from degarble.suites.support.engine_stand_in import engine_models, generated

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor, nn

    from degarble.suites.support.engine_stand_in import EngineModel

PROMPTS = ([5, 17, 99, 3, 42, 8, 100], [7, 7, 1, 90])


def checkpoint(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Write a tiny checkpoint, and return its model of transformers."""
    model = built(name, dtype)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw_config(name, dtype)))
    weights = {key: each.contiguous() for key, each in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    return model


def engines(
    source: nn.Module, ranks: int = 1, plant: Callable[[EngineModel], object] | None = None
) -> list[EngineModel]:
    """Return the engine's models, with a fault on each rank where one is planted."""
    models = engine_models(source, ranks)
    for model in models:
        if plant is not None:
            plant(model)
    return models


class SglangDumper:
    """Writes as sglang/srt/debug_utils/dumper.py does with DUMPER_NON_INTRUSIVE_MODE=all."""

    def __init__(self, folder: Path, models: list[EngineModel], without: str = "") -> None:
        self._folder, self._without = folder / "dump_20260922_1", without
        self._folder.mkdir(parents=True)
        self._steps, self._index = [0] * len(models), 0
        for rank, model in enumerate(models):
            for path, module in model.named_modules():
                if path:
                    self._watch(rank, path, module)

    def _watch(self, rank: int, path: str, module: nn.Module) -> None:
        def before(_module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            for key, value in [*enumerate(given), *named.items()]:
                self._value(rank, f"{path}.inputs.{key}", value)

        def after(_module: Any, _given: Any, made: Any) -> None:
            tensors = [each for each in made if isinstance(each, torch.Tensor)] \
                if isinstance(made, tuple) else [made]  # fmt: skip
            for at, tensor in enumerate(tensors):
                end = f".{at}" if len(tensors) > 1 else ""
                self._value(rank, f"{path}.output{end}", tensor)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)

    def _value(self, rank: int, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and not (self._without and self._without in name):
            self.write(rank, f"non_intrusive__{name}", value)

    def write(self, rank: int, name: str, value: Any) -> None:
        """Write one tensor."""
        self._index += 1
        tags = {
            "step": self._steps[rank], "rank": rank, "dump_index": self._index, "name": name,
            "recompute_status": "disabled",
        }  # fmt: skip
        file = "___".join(f"{key}={tag}" for key, tag in tags.items()) + ".pt"
        meta = {**tags, "world_rank": rank, "sglang_parallel_info": {"tp_rank": rank}}
        torch.save({"value": value.clone(), "meta": meta}, self._folder / file)

    def begin(self, rank: int, batch: Any, ids: Tensor, positions: Tensor) -> None:
        """Write what a forward pass is given."""
        lengths = torch.tensor([start + len(tokens) for _, start, tokens in batch])
        slots = torch.tensor([3 + number for number, _, _ in batch])
        for name, value in (
            ("input_ids", ids), ("positions", positions), ("seq_lens", lengths),
            ("req_pool_indices", slots),
        ):  # fmt: skip
            self.write(rank, name, value)

    def end(self, rank: int) -> None:
        """End a forward pass."""
        self._steps[rank] += 1


def sglang_folder(
    folder: Path,
    source: nn.Module,
    ranks: int = 1,
    plant: Callable[[EngineModel], object] | None = None,
    without: str = "",
) -> Path:
    """Write the folder of a run of three passes over two requests."""
    models = engines(source, ranks, plant)
    dumper = SglangDumper(folder, models, without)
    generated(models, PROMPTS, 3, dumper.begin, dumper.end)
    return folder


def sglang_passes(folder: Path, source: nn.Module) -> Path:
    """Write what --debug-tensor-dump-output-folder does: results of leaves, a file a pass."""
    models = engines(source)
    place = folder / "TP0_PP0_Rank0_pid77"
    place.mkdir(parents=True)
    held: dict[str, Any] = {}
    number = 0

    def kept(path: str) -> Callable[..., None]:
        def hook(_module: Any, _given: Any, made: Any) -> None:
            found = [each for each in (made if isinstance(made, tuple) else [made])
                     if isinstance(each, torch.Tensor)]  # fmt: skip
            held[path] = found[0].clone() if len(found) == 1 else [each.clone() for each in found]

        return hook

    for path, module in models[0].named_modules():
        if path and next(module.children(), None) is None:
            module.register_forward_hook(kept(path))
    batch: dict[str, Tensor] = {}

    def begin(_rank: int, scheduled: Any, ids: Tensor, positions: Tensor) -> None:
        lengths = torch.tensor([start + len(tokens) for _, start, tokens in scheduled])
        batch.update(input_ids=ids, positions=positions, seq_lens=lengths)

    def write(_module: Any, _given: Any, made: Tensor) -> None:
        nonlocal number
        held.update({f"model.forward_batch_info.{name}": each for name, each in batch.items()})
        torch.save(held, place / f"Pass{number:05d}.pt")
        number += 1
        held.clear()
        held["model"] = made.clone()

    models[0].model.register_forward_hook(write)
    generated(models, PROMPTS, 3, begin)
    return folder


def vllm_states(folder: Path, source: nn.Module, layers: tuple[int, ...], scale: float = 1) -> Path:
    """Write a file a request, as ExampleHiddenStatesConnector does; `scale` is layer 1's fault."""
    models = engines(source)
    folder.mkdir()
    if scale != 1:
        plant: Any = models[0].model.layers[1]
        plant.mlp.down_proj.weight.data.mul_(scale)
    streams: dict[int, Tensor] = {}

    def kept(number: int) -> Callable[..., None]:
        def hook(_module: Any, given: tuple[Any, ...], _made: Any) -> None:
            _, x, residual = given
            streams[number] = x if residual is None else x + residual

        return hook

    def last(_module: Any, given: tuple[Any, ...], _made: Any) -> None:
        streams[len(models[0].model.layers)] = given[0] + given[1]

    for number, layer in enumerate(models[0].model.layers):
        layer.register_forward_hook(kept(number))
    models[0].model.norm.register_forward_hook(last)
    for number, prompt in enumerate(PROMPTS):
        generated(models, [prompt], 1, lambda *_: None)
        states = torch.stack([streams[layer] for layer in layers], 1)
        tensors = {"hidden_states": states, "token_ids": torch.tensor(prompt)}
        save_file(tensors, folder / f"cmpl-{number}.safetensors")
    return folder


class FlightRecorder:
    """Writes a call of FlashInfer's API as flashinfer/api_logging.py does."""

    def __init__(self, folder: Path, *, plain: bool = True) -> None:
        folder.mkdir()
        self._folder, self._plain, self._calls = folder, plain, 0

    def write(
        self, function: str, given: dict[str, Tensor], made: dict[str, Tensor] | None = None
    ) -> None:
        """Write one call."""
        self._calls += 1
        time = f"20260922_120000_{self._calls:03d}"
        place = self._folder / f"{time}_pid9_{function}_call{self._calls:04d}"
        place.mkdir()
        for side, tensors in (("inputs", given), ("outputs", made or {})):
            copies = {name: each.contiguous().clone() for name, each in tensors.items()}
            if copies and self._plain:
                save_file(copies, place / f"{side}.safetensors")
            elif copies:
                torch.save(copies, place / f"{side}.pt")
        line = {"function_name": function, "call_sequence": self._calls, "timestamp": time}
        text = json.dumps(line | {"execution_status": "inputs_saved"})
        done = json.dumps(line | {"execution_status": "completed"})
        (place / "metadata.jsonl").write_text(f"{text}\n{done}\n")


def flashinfer_folder(
    folder: Path,
    source: nn.Module,
    plant: Callable[[EngineModel], object] | None = None,
    *,
    plain: bool = True,
    rope: bool = True,
) -> Path:
    """Write the norms, activations and rotations of one pass over a prompt."""
    (model,) = engines(source, plant=plant)
    recorder = FlightRecorder(folder, plain=plain)
    for _, module in model.named_modules():
        kind = type(module).__name__
        if kind == "RMSNorm":

            def norm(each: Any, given: Any, made: Any) -> None:
                tensors = {f"arg_{at}": x for at, x in enumerate((*given, each.weight))}
                name = "fused_add_rmsnorm" if len(given) == 2 else "rmsnorm"
                recorder.write(name, tensors, None if len(given) == 2 else {"result": made})

            module.register_forward_hook(norm)
        elif kind == "SiluAndMul":
            module.register_forward_hook(
                lambda _, given, made: recorder.write(
                    "silu_and_mul", {"arg_0": given[0]}, {"result": made}
                )
            )
        elif kind == "RotaryEmbedding" and rope:
            module.register_forward_hook(
                lambda _, given, __: recorder.write(
                    "apply_rope_pos_ids_inplace",
                    {"arg_0": given[1], "arg_1": given[2], "kwarg_pos_ids": given[0].int()},
                )
            )
    recorder.write("BatchPrefillWithPagedKVCacheWrapper.run", {"arg_1": torch.zeros(2)})
    generated([model], PROMPTS[:1], 1, lambda *_: None)
    return folder
