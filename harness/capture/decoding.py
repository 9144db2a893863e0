"""Capture whole layers of our kernels as they decode: inside their CUDA graphs on a GPU.

A decoder shows the tensors of its step to one empty module a component, and an engine's hooks watch
those (engine/session.py). While the step's graph is being recorded the hooks issue copies, which
each replay then makes. Attention, its memory and the experts' products are not shown: kernels keep
them to themselves, or hold them in pages.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from degarble.harness.backends.graph.steps import STEP
from degarble.harness.backends.registry import CUTEDSL
from degarble.harness.base.errors import NotBuilt
from degarble.harness.capture.capture import CaptureSummary, facts_of
from degarble.harness.capture.engine.graphs import GraphCopies
from degarble.harness.capture.engine.maps import ComponentMap, argument_of
from degarble.harness.capture.engine.session import EngineCapture, Scheduled
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.writer import require_free
from degarble.harness.capture.options import MOST_BYTES, CaptureRequest
from degarble.harness.engine.conventions.registry import KEY, stored_conventions
from degarble.harness.generate.generate import (
    GenerationOptions,
    TextGenerator,
    open_text_generator,
)
from degarble.harness.inference.generation import Limits, Sampling
from degarble.harness.model.components import components
from degarble.harness.report.files import require_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.backends.graph.decoder import Decoder
    from degarble.harness.backends.graph.steps import Lanes
    from degarble.harness.capture.capture import CaptureSettings
    from degarble.harness.inference.model import OpenModel

# Components of V4 whose tensors a step shows, all of them.
V4_SHOWN = frozenset({
    "attn.hc_pre", "attn.norm", "attn.wq_a", "attn.q_norm", "attn.wq_b", "attn.wkv",
    "attn.compressor.proj", "attn.indexer.wq_b", "attn.indexer.compressor.proj", "attn.wo_b",
    "attn.hc_post", "ffn.hc_pre", "ffn.norm", "ffn.gate", "ffn.topk", "ffn.hc_post",
})  # fmt: skip
_REST = "a lane at rest"


class _Shown(nn.Module):
    """Computes nothing: hooks see what it is given."""

    def forward(self, **tensors: Tensor) -> None:
        """Return nothing."""


class StepSites(nn.Module):
    """A module for each component of a model that its decoder shows."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._components = [each for each in components(config) if each.role in V4_SHOWN]
        self.shown = nn.ModuleDict({_path(c.name): _Shown() for c in self._components})
        self.on_step: Callable[[], None] = lambda: None

    def show(self, component: str, **tensors: Tensor) -> None:
        """Show a component's tensors, by the names of its inputs and outputs."""
        if component == STEP:
            self.on_step()
            return
        self.shown[_path(component)](**tensors)

    def maps(self) -> list[ComponentMap]:
        """Return where hooks find them."""
        found = []
        for component in self._components:
            place = f"shown.{_path(component.name)}"
            inputs = [each.name for each in component.inputs]
            sides = (
                {name: argument_of(place, name) for name in names}
                for names in (inputs, component.outputs)
            )
            found.append(ComponentMap(component.name, *sides))
        return found


def _path(component: str) -> str:
    return component.replace(".", "/")  # a dot would lead to a submodule


@contextmanager
def decoding_captured(
    decoder: Decoder, config: Any, folder: Path, request: CaptureRequest, facts: Mapping[str, Any]
) -> Iterator[None]:
    """Capture every step of a decoder in here, each lane as one sequence."""
    steps = decoder.stepping
    if decoder.prompts is not None:
        raise NotBuilt(
            "capture inside graphs", "a model whose prompts are fed in pieces", "DeepSeek-V4",
            "Capture its components one by one: leave --graph out.",
        )  # fmt: skip
    lanes = tuple(f"lane-{n}" for n in range(steps.room.lanes))
    sites = StepSites(config)
    on_gpu = steps.kernels.device.type == "cuda"
    copies = GraphCopies(request.graph_bytes, steps.kernels.device) if on_gpu else None
    asked = replace(request, requests=lanes, count=len(lanes))
    capture = EngineCapture(folder, sites, sites.maps(), asked, facts, copies)
    with ExitStack() as stack:
        stack.callback(capture.close)
        stack.callback(setattr, steps, "show", steps.show)
        steps.show = sites.show
        if copies is None:
            sites.on_step = lambda: capture.batch(_scheduled(steps.lanes, lanes))
        else:
            stack.callback(copies.close)
            copies.on_replay = lambda recorded: capture.replayed(
                _scheduled(steps.lanes, lanes), recorded
            )
            with copies.recording():
                stack.enter_context(decoder.recaptured())
            capture.require_sound()
        yield


def _scheduled(rows: Lanes, lanes: Sequence[str]) -> list[Scheduled]:
    """Return whose rows a step has; a row at rest has no owner."""
    inputs = (rows.owners.tolist(), rows.positions.tolist(), rows.tokens.tolist())
    return [
        Scheduled(_REST, 0, [0]) if owner < 0 else Scheduled(lanes[owner], position, [token])
        for owner, position, token in zip(*inputs, strict=True)
    ]


def layer_facts(
    source: Path, model: OpenModel, capture_settings: CaptureSettings
) -> dict[str, Any]:
    """Return the manifest's facts about a run by whole layers of our kernels."""
    shown = [each.name for each in components(model.config) if each.role in V4_SHOWN]
    return facts_of(source, model, capture_settings) | {
        "backend": CUTEDSL, "by_backend": shown, "fell_to_torch": [],
        KEY: stored_conventions(capture_settings.asked.conventions),
    }  # fmt: skip


def capture_by_layers(
    source: Path, prompts: list[Any], folder: Path, capture_settings: CaptureSettings
) -> CaptureSummary:
    """Decode prompts by whole layers of our kernels, and write what their components saw."""
    require_folder("--out", folder)
    require_free(folder)
    backend = replace(capture_settings.asked, graph=len(prompts))
    chat = any(isinstance(prompt, list) for prompt in prompts)
    limits = Limits(capture_settings.new_tokens)
    request = CaptureRequest(
        capture_settings.wanted, nbytes=MOST_BYTES, graph_bytes=capture_settings.graph_bytes
    )
    with open_text_generator(source, None, backend) as (model, paired):
        generator = TextGenerator(
            model, GenerationOptions(Sampling(goes_on=True), limits, chat=chat)
        )
        speaker: Any = model.logits_model
        facts = layer_facts(source, model, capture_settings)
        with decoding_captured(speaker.decoder, model.config, folder, request, facts):
            spoken = generator.speak(prompts)
    return CaptureSummary(folder, Capture.open(folder), spoken, paired)
