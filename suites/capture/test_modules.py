"""Modules of any torch model, and of transformers, are captured as components."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, Refused, UnknownName
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.records import Phase
from degarble.harness.capture.files.writer import CaptureWriter
from degarble.harness.capture.modules import (
    ModulePlace,
    component_of,
    places_by_name,
    places_of,
    recording,
    weights_hash,
)
from degarble.harness.capture.options import CaptureFilter
from degarble.harness.capture.recorder import Recorder
from degarble.harness.engine.localise.localise import localise
from degarble.harness.model.recipes import recipe_named
from degarble.harness.report.verdict import Verdict
from degarble.references.binding import BoundModel
from degarble.references.numerics import SOURCES, Numerics
from degarble.references.weights import random_weights
from degarble.suites.capture.capture_models import THEIRS, Stack

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


TOKENS = torch.tensor([[3, 1, 4], [1, 5, 9]])
FUSED = (
    ModulePlace("embed", ("embed",), {0: "tokens"}),
    ModulePlace(
        "layers.0.ffn.w13", ("layers.0.gate", "layers.0.up"), outputs={(0, 0): "out", (1, 0): "out"}
    ),
    # A whole layer as two components: what goes into the first, and what comes out of the last.
    ModulePlace("layers.1.ffn.norm", ("layers.1",), {0: "x"}, {}),
    ModulePlace("layers.1.ffn.w2", ("layers.1",), {}, {(0, 0): "out"}),
)


def captured(
    folder: Path, places: Any, wanted: CaptureFilter | None = None
) -> tuple[Capture, Stack]:
    torch.manual_seed(1)
    model = Stack()
    with torch.no_grad(), CaptureWriter(folder, {}) as writer:
        with recording(
            model, places(model) if callable(places) else places, Recorder(writer, wanted)
        ):
            model(TOKENS)
        model(TOKENS)  # nobody looks any more
        writer.finish()
    return Capture.open(folder), model


def test_every_leaf_of_an_unknown_model(tmp_path: Path) -> None:
    capture, model = captured(tmp_path, places_by_name)
    assert sorted(capture.by_component()) == [
        "embed", "head",
        *(f"layers.{n}.{name}" for n in (0, 1) for name in ("down", "gate", "norm", "up")),
    ]  # fmt: skip
    (step,) = capture.steps
    assert (step.tokens, step.sequences) == ((3, 1, 4, 1, 5, 9), (0, 0, 0, 1, 1, 1))
    assert step.positions == (0, 1, 2, 0, 1, 2)
    modules = dict(model.named_modules())
    for call in capture.calls:
        x, out = capture.inputs(call)["x"], capture.outputs(call)["out"]
        assert len(x) == len(out) == 6  # one row a token
        assert torch.equal(modules[call.component](x), out)


def test_places_join_and_split_modules(tmp_path: Path) -> None:
    capture, model = captured(tmp_path, FUSED)
    calls = {call.component: call for call in capture.calls}
    assert set(calls) == {place.component for place in FUSED}
    assert capture.inputs(calls["embed"])["tokens"].tolist() == TOKENS.flatten().tolist()
    both, first = calls["layers.0.ffn.w13"], model.layers[0]
    x = capture.inputs(both)["x"]
    halves = torch.cat([first.gate(x), first.up(x)], -1)  # type: ignore[operator]
    assert torch.equal(capture.outputs(both)["out"], halves)
    norm, last = calls["layers.1.ffn.norm"], calls["layers.1.ffn.w2"]
    assert not norm.outputs
    assert not last.inputs
    entered = capture.inputs(norm)["x"]
    assert torch.equal(capture.outputs(last)["out"], model.layers[1](entered))


def test_filters_hook_no_more_than_is_wanted(tmp_path: Path) -> None:
    wanted = CaptureFilter.from_options(layers="1", components="gate", tokens="2")
    capture, _ = captured(tmp_path, places_by_name, wanted)
    (call,) = capture.calls
    assert (call.component, call.inputs["x"].rows) == ("layers.1.gate", (2, 5))


@pytest.mark.parametrize(
    ("module", "component"),
    [
        ("model.layers.3.mlp.0", "layers.3.mlp_0"),
        ("transformer.h.11.Attn.c-proj", "layers.11.attn.c_proj"),
        ("blocks.2.in", "layers.2.in_"),
        ("0.weight_norm", "m0.weight_norm"),
        ("encoder.out", "encoder.out_"),
    ],
)
def test_names_of_modules_become_names_of_components(module: str, component: str) -> None:
    assert component_of(module) == component
    ModulePlace(component, (module,))


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (ModulePlace("embed", ("embedding",)), "module of embed = 'embedding'.*Did you mean embed"),
        (ModulePlace("head", ("head",), {1: "x"}), "argument 1, for head"),
        (ModulePlace("head", ("head",), {"scale": "x"}), "argument scale, for head"),
        (ModulePlace("head", ("head",), outputs={(0, 1): "out"}), "tensor 1 that head returns"),
        (ModulePlace("ffn", ("layers.0.up", "layers.0.gate")), "order layers.0.up, layers.0.gate"),
    ],
)
def test_a_wrong_map_is_refused(place: ModulePlace, told: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=told) as caught:
        captured(tmp_path, [place])
    assert isinstance(caught.value, (InvalidArgument, UnknownName))


def test_names_that_are_no_sites_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="site"):
        ModulePlace("layers.x.norm", ("norm",))


def test_the_hash_of_the_weights_covers_every_byte_that_runs() -> None:
    torch.manual_seed(3)
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model.register_buffer("scale", torch.ones(2), persistent=False)  # no part of the state dict
    before = weights_hash(model)
    assert weights_hash(model) == before
    with torch.no_grad():
        model.scale[1] = torch.nextafter(model.scale[1], torch.tensor(2.0))
        scaled = weights_hash(model)
        model[0].bias[0] = -model[0].bias[0]
    assert len({before, scaled, weights_hash(model), weights_hash(model.bfloat16())}) == 4


def test_a_wrapped_tensor_is_hashed_by_what_it_wraps() -> None:
    class Wrapped(torch.Tensor):
        codes: torch.Tensor

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["codes"], None

    def model(value: float) -> torch.nn.Module:
        made = torch.nn.Module()
        tensor: Any = torch.zeros(3).as_subclass(Wrapped)
        tensor.codes = torch.full((3,), value)
        made.register_buffer("w", tensor)
        return made

    assert weights_hash(model(1.0)) != weights_hash(model(2.0))
    assert weights_hash(model(1.0)) == weights_hash(model(1.0))


# --------------------------------------------------------------------------------------------------
# Their models through our sites: what their modules saw, our references answer alike.

NUMERICS = Numerics.definition(torch.float32, SOURCES["transformers"])
RELATIVE = 1e-5  # of the largest magnitude, in float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("theirs")
    command = [sys.executable, "-W", "ignore", "-m", "degarble.suites.capture.capture_oracle"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, str(path)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(THEIRS))
def test_each_mapped_component_answers_alike(name: str, folder: Path) -> None:
    capture, config = Capture.open(folder / name), THEIRS[name]
    assert list(capture.damage()) == []
    bound = BoundModel(config, NUMERICS, random_weights(config, 1, torch.float32))
    places = {place.component: place for place in places_of(config)}
    assert set(capture.by_component()) == set(places) <= set(bound.calls)
    judged = set()
    for call in capture.calls:
        given = capture.inputs(call)
        whole = all(bound.has_input(call.component, n) for n in given) and given and call.outputs
        if not whole or call.component.endswith("ffn.experts.combine"):
            continue
        if call.component.endswith("attn.wo_a"):  # they hold groups apart
            given = {n: tensor.flatten(1) for n, tensor in given.items()}
        outputs = bound(call.component, **given)
        for port, theirs in capture.outputs(call).items():
            close(f"{call.component}.{port}", outputs[port], theirs)
        judged.add(call.component)
    # The rest are the two ends of what their modules fuse.
    rest = {each.split(".", 2)[-1] for each in set(places) - judged}
    assert rest == {"ffn.topk", "ffn.experts.w13", "ffn.experts.combine", "ffn.moe_sum"}


def close(place: str, ours: Tensor, theirs: Tensor) -> None:
    assert ours.numel() == theirs.numel(), place
    distance = (ours.reshape(theirs.shape) - theirs).abs().max() / theirs.abs().max()
    assert float(distance) <= RELATIVE, (place, float(distance))


@pytest.mark.parametrize("name", sorted(THEIRS))
def test_a_healthy_run_of_theirs_raises_no_alarm(name: str, folder: Path) -> None:
    config = THEIRS[name]
    twin = BoundModel(config, NUMERICS, random_weights(config, 1, torch.float32))
    found = localise(twin, recipe_named("bf16", config), Capture.open(folder / name))
    assert found.verdict is Verdict.AGREES, found.origins
    assert len({row.component.name for row in found.rows if not row.undecided}) > 20
    unjudged = {component.split(".", 2)[-1] for component, _ in found.unjudged}
    assert unjudged <= {"ffn.topk", "ffn.experts.combine", "ffn.moe_sum"}


@pytest.mark.parametrize("name", sorted(THEIRS))
def test_the_ends_of_fused_experts_fit_together(name: str, folder: Path) -> None:
    capture, config = Capture.open(folder / name), THEIRS[name]
    bound = BoundModel(config, NUMERICS, random_weights(config, 1, torch.float32))
    experts = [c for c in capture.by_component() if c.endswith("ffn.experts.w13")]
    assert experts
    for component in experts:
        p = component.removesuffix("experts.w13")
        calls = {n: capture.by_component()[p + n] for n in ("experts.combine", "moe_sum", "topk")}
        for number, first in enumerate(capture.by_component()[component]):
            given = capture.inputs(first)
            combine, total, topk = (calls[call][number] for call in calls)
            shares = capture.inputs(combine)["weights"]
            routed = capture.outputs(topk)
            assert torch.equal(routed["experts"], given["experts"])
            assert torch.equal(routed["weights"], shares)
            owned = {"experts": given["experts"]}
            both = bound(component, **given)["out"]
            act = bound(f"{p}experts.act_quant", x=both, weights=shares, **owned)["out"]
            down = bound(f"{p}experts.w2", x=act, **owned)["out"]
            made = bound(f"{p}experts.combine", x=down, weights=shares)["out"]
            out = capture.outputs(combine)["out"]
            close(component, made, out)
            shared = capture.outputs(capture.by_component()[f"{p}shared.w2"][number])["out"]
            close(f"{p}moe_sum", out + shared, capture.outputs(total)["out"])


@pytest.mark.parametrize("name", sorted(THEIRS))
def test_prefill_and_decode_are_distinguished(name: str, folder: Path) -> None:
    steps = Capture.open(folder / name).steps
    assert [step.phase for step in steps] == [Phase.PREFILL, Phase.DECODE, Phase.DECODE]
    assert steps[0].positions == (*range(20), *range(20))
    assert [step.positions for step in steps[1:]] == [(20, 20), (21, 21)]
    assert steps[2].sequences == (0, 1)
