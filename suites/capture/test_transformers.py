"""Their models through our sites: what their modules saw, our references answer alike."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.records import Phase
from degarble.harness.capture.modules import places_of
from degarble.harness.engine.localise.localise import localise
from degarble.harness.model.recipes import recipe_named
from degarble.harness.report.verdict import Verdict
from degarble.references.binding import BoundModel
from degarble.references.numerics import SOURCES, Numerics
from degarble.references.weights import random_weights
from degarble.suites.capture.capture_models import THEIRS

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

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
        whole = all(bound.takes(call.component, n) for n in given) and given and call.outputs
        if not whole or call.component.endswith("ffn.experts.combine"):
            continue
        if call.component.endswith("attn.wo_a"):  # they hold groups apart
            given = {n: each.flatten(1) for n, each in given.items()}
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
            combine, total, topk = (calls[each][number] for each in calls)
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
