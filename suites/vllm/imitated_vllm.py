"""What `any_model` asks of vLLM, by the stand-in: plugins, loading, a worker's extension, requests.

`install` writes a package `vllm` that leads here, for a process that has it in its PYTHONPATH.
Names and order of calls are those of vLLM 0.26: entrypoints/llm.py, plugins/__init__.py,
model_executor/model_loader/base_loader.py, v1/worker/gpu_model_runner.py.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from degarble.suites.support.engine_stand_in import engine_models, generated

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_LOADER = "vllm.model_executor.model_loader.base_loader"


def install(folder: Path) -> Path:
    """Write the package; return the folder for PYTHONPATH."""
    place = folder / "vllm" / "model_executor" / "model_loader"
    place.mkdir(parents=True)
    own = "from degarble.suites.vllm.imitated_vllm import"
    (folder / "vllm" / "__init__.py").write_text(f"{own} LLM, SamplingParams\n")
    for package in (place.parent, place):
        (package / "__init__.py").touch()
    (place / "base_loader.py").write_text(f"{own} process_weights_after_loading\n")
    return folder


def process_weights_after_loading(model: Any, _model_config: Any, _device: Any) -> None:
    """Change nothing: these weights have their layout."""
    del model


class SamplingParams(SimpleNamespace):
    """How tokens are chosen."""


class _Runner:
    """Prepares batches, as a model runner does before each forward pass."""

    def _prepare_inputs(self, scheduled: Any) -> Any:
        counts = scheduled.num_scheduled_tokens
        return SimpleNamespace(req_ids=[*counts], num_scheduled_tokens=[*counts.values()])


class LLM:
    """An engine in this process, on one rank."""

    def __init__(self, model: str, worker_extension_cls: str, **options: Any) -> None:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415  heavy

        wanted = os.environ["VLLM_PLUGINS"].split(",")
        for point in entry_points(group="vllm.general_plugins"):
            if point.name in wanted:
                point.load()()
        source = AutoModelForCausalLM.from_pretrained(model, dtype=options["dtype"]).eval()
        (self._model,) = engine_models(source)
        config = SimpleNamespace(model=model, quantization=None, **options)
        import_module(_LOADER).process_weights_after_loading(self._model, config, "cpu")
        parallel = SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=1)
        module, _, name = worker_extension_cls.rpartition(".")
        self._extension = getattr(import_module(module), name)
        self._runner = _Runner()
        self._worker = SimpleNamespace(
            vllm_config=SimpleNamespace(model_config=config, parallel_config=parallel),
            get_model=lambda: self._model, model_runner=self._runner, rank=0,
        )  # fmt: skip

    def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        """Call a method of the worker's extension."""
        return [getattr(self._extension, method)(self._worker, *args)]

    def generate(self, prompts: Sequence[dict[str, Any]], params: SamplingParams) -> list[Any]:
        """Continue prompts greedily."""

        def before(_rank: int, batch: Any, _ids: Any, _positions: Any) -> None:
            counts = {f"{number}": len(tokens) for number, _, tokens in batch}
            self._runner._prepare_inputs(SimpleNamespace(num_scheduled_tokens=counts))

        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        texts = generated([self._model], ids, params.max_tokens, before)
        new = [text[len(prompt) :] for text, prompt in zip(texts, ids, strict=True)]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=each)]) for each in new]
