"""Run transformers' own model on a checkpoint's weights, as an engine whose run is captured.

The model is built on the meta device. A module gets its parameters when it runs, as the file's
scheme decodes them and in the dtype of the config, and loses them afterwards where weights are
streamed: a model of any size runs in the memory of its largest module. Inputs are never quantised.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from degarble.harness.base.errors import NotBuilt
from degarble.harness.capture.traced import TracedRecorder, cache_argument
from degarble.harness.inference.model import LogitsModel
from degarble.harness.inference.traced import meta_model
from degarble.harness.model.family import family_of
from degarble.references.linears import matrix_parts
from degarble.references.traced.family import TracedModel, logical_name
from degarble.references.traced.trace import EXPERTS_GATE, ParameterRef

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.harness.capture.recorder import Recorder
    from degarble.harness.inference.model import OpenModel
    from degarble.references.model import Sequence

    _Place = tuple[str, nn.Module, str]  # a parameter, the module that holds it, its name there

_GROUPED = 16  # bytes that torch's grouped product wants rows of experts to be a multiple of
BF16 = "bf16"  # the arithmetic of a run on decoded weights and inputs as they are


@dataclass
class _SequenceRun:
    """A sequence, kept so that no two have one id, its recorder, and the cache of earlier calls."""

    sequence: Sequence
    recorder: TracedRecorder
    cache: Any = None  # of the class that the model makes itself


class TransformersModel(LogitsModel):
    """Logits of transformers' model; every sequence has a cache of its own."""

    def __init__(self, bound: TracedModel, recorder: Recorder, *, held: bool) -> None:
        super().__init__(bound)
        self._model: Any = _FilledModel(bound, held=held).model
        self._cache = cache_argument(self._model)
        self._recorder = recorder
        self._runs: dict[int, _SequenceRun] = {}

    def next_logits(self, sequences: list[Sequence], tokens: list[Tensor]) -> Tensor:
        """Return logits [B, V] after each sequence's last new token, one sequence after another."""
        return torch.stack([self._next(*each) for each in zip(sequences, tokens, strict=True)])

    def _next(self, sequence: Sequence, new: Tensor) -> Tensor:
        run = self._run_of(sequence)
        if sequence.length and run.cache is None:
            raise NotBuilt(
                "--backend transformers", type(self._model).__name__,
                "a model that returns a cache, so that its run can go on",
                "Capture the prompt alone: --max-new-tokens 1.",
            )  # fmt: skip
        with torch.inference_mode(), run.recorder.watching(self._model):
            made = self._model(
                input_ids=new[None], use_cache=True, **{self._cache: run.cache},
                **self._positions(sequence.length, len(new)),
            )  # fmt: skip
        run.cache = getattr(made, self._cache, None)
        sequence.length += len(new)
        logits: Tensor = made.logits[0, -1]
        return logits

    def _run_of(self, sequence: Sequence) -> _SequenceRun:
        if id(sequence) not in self._runs:
            recorder = TracedRecorder(self.config, self._recorder, len(self._runs))
            self._runs[id(sequence)] = _SequenceRun(sequence, recorder)
        return self._runs[id(sequence)]

    def _positions(self, begin: int, count: int) -> dict[str, Tensor]:
        """Return positions for a model that takes them: not every one counts those before."""
        if "position_ids" not in inspect.signature(self._model.forward).parameters:
            return {}
        return {"position_ids": torch.arange(begin, begin + count)[None]}


class _Absent(nn.Parameter):
    """A parameter without values, on the device where they will be.

    Llama 4 moves its token ids to the embedding's device before that runs. To the meta device they
    would lose their values, and torch gives rows of memory that nobody wrote.
    """

    @classmethod
    def like(cls, parameter: Tensor) -> _Absent:
        """Return one of the same shape and dtype, without memory for them; NaN where it is read."""
        filled = float("nan") if parameter.is_floating_point() else 0
        one = torch.full((), filled, dtype=parameter.dtype)
        return cls(one.expand(parameter.shape), requires_grad=False)


def _groups_experts(model: nn.Module) -> bool:
    """Return whether torch's grouped product takes the rows of all stacks of experts."""
    banks = (each for each in model.modules() if hasattr(each, EXPERTS_GATE))
    stacks = (each for bank in banks for each in bank.parameters(recurse=False) if each.ndim == 3)
    return all(each.shape[at] * each.itemsize % _GROUPED == 0 for each in stacks for at in (1, 2))


class _FilledModel:
    """A model on the meta device whose modules are filled when they run."""

    def __init__(self, bound: TracedModel, *, held: bool) -> None:
        config: Any = bound.config
        self._bound, self._dtype, self._held = bound, config.torch_dtype, held
        self._trace = config.graph.trace
        made: Any = meta_model(config)
        if not _groups_experts(made):
            made.set_experts_implementation("eager")
        self.model: nn.Module = made
        # Tied parameters are one object under two names; a trace knows the first.
        names = {id(each): name for name, each in self.model.named_parameters()}
        known = dict(self.model.named_modules())
        places: dict[str, list[_Place]] = {
            path: [(names[id(each)], module, local) for local, each in _own(module)]
            for path, module in known.items()
        }
        owned = {each[0]: each for own in reversed(places.values()) for each in own}
        for operation in self._trace.operations:
            # A module may read the weights of a child that it does not run, as a convolution's.
            read = {ref.name for ref in operation.reads() if isinstance(ref, ParameterRef)}
            own = places[operation.module]
            own += [owned[name] for name in read - {each[0] for each in own} if name in owned]
        for path, module in known.items():
            self._fill_buffers(path, module)
            for local, each in _own(module):
                module._parameters[local] = _Absent.like(each)  # noqa: SLF001
            if places[path]:
                self._fill_when_it_runs(module, places[path])

    def _fill_when_it_runs(self, module: nn.Module, read: list[_Place]) -> None:
        """Fill what a module reads before it runs, and empty it afterwards where none is held."""
        filled: list[tuple[nn.Module, str, Any]] = []

        def fill(*_: Any) -> None:
            for name, owner, local in read:
                empty = owner._parameters[local]  # noqa: SLF001
                if isinstance(empty, _Absent):
                    made = nn.Parameter(self._value(name), requires_grad=False)
                    owner._parameters[local] = made  # noqa: SLF001
                    filled.append((owner, local, empty))

        def drop(*_: Any) -> None:
            while filled:
                owner, local, empty = filled.pop()
                owner._parameters[local] = empty  # noqa: SLF001

        module.register_forward_pre_hook(fill)
        if not self._held:
            module.register_forward_hook(drop)

    def _fill_buffers(self, path: str, module: nn.Module) -> None:
        for local, buffer in module.named_buffers(recurse=False):
            name = f"{path}.{local}" if path else local
            kept = self._trace.buffers.get(name)
            value = self._read(name, buffer.dtype) if kept is None else kept.clone()
            module._buffers[local] = value  # noqa: SLF001

    def _value(self, name: str) -> Tensor:
        dtype = self._trace.parameters[name].dtype
        return self._read(name, dtype)

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        weight = self._bound.weights[logical_name(name)]
        if weight.value is not None:
            return weight.value.to(dtype)  # of the same dtype: the pages of the file themselves
        # Decoded in float32, part by part, and rounded once.
        made = torch.empty(weight.shape, dtype=dtype)
        for part in matrix_parts(weight.shape):
            made[part] = weight.rows(part, torch.float32)
        return made


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, each) for name, each in module._parameters.items() if each is not None]  # noqa: SLF001


@contextmanager
def run_by_transformers(model: OpenModel, recorder: Recorder) -> Iterator[None]:
    """Let transformers compute an open model's logits, and record its components."""
    plain, bound = model.logits_model, model.logits_model.bound
    assert isinstance(bound, TracedModel), "refused before it is captured"
    model.logits_model = TransformersModel(bound, recorder, held=model.streamed is None)
    try:
        yield
    finally:
        model.logits_model = plain


def require_traced(bound: Any) -> None:
    """Raise for a family whose components are not those of transformers' modules."""
    if not family_of(bound.config).runs_in_transformers:
        raise NotBuilt(
            "--backend transformers", bound.config.family,
            "a family that is read from transformers' own modules",
            "Capture this family by torch or vllm, or with degarble.harness.api.capture.",
        )  # fmt: skip
