"""Faults of sharding, planted between real ranks (gloo), and found in what both ranks saw.

A slot's values are taken from the rank that has its expert; all else is the same on both ranks.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.engine.localise.localise import localise
from degarble.harness.engine.localise.recorded_run import InMemoryRun
from degarble.harness.model.sharding import plan
from degarble.harness.museum.cases import MuseumModel, prepare, prompt_ids
from degarble.references.model import Sequence
from degarble.suites.museum.sharded_museum import CASES, KEY, LENGTHS, step_of
from degarble.suites.museum.torchrun import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("museum")
    prepare(made, (KEY,))
    return made


@pytest.fixture(scope="module")
def seen(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("seen")
    module = "degarble.suites.museum.sharded_museum"
    run_ranks(module, 2, str(root), str(target))
    return target


def joined(seen: Path, case: str, model: MuseumModel) -> InMemoryRun:
    """One run of what two ranks saw. It is replayed through a bound model that says it again."""
    name = case.replace(" ", "_")
    parts = [load_file(seen / f"{name}_{rank}.safetensors") for rank in (0, 1)]
    order = [tuple(load) for load in json.loads((seen / f"{name}_0.json").read_text())]
    own = plan(model.config, ep=2).experts_of(0)
    calls = iter(range(len(order)))
    bound = model.twin()

    def say(component: str) -> object:
        def said(_inputs: object, _weights: object) -> dict[str, Tensor]:
            number = next(calls)
            assert order[number][1] == component
            return sides(number, "out")

        return said

    def chosen(number: int) -> Tensor:
        """Who was chosen: an input of this call, or of the one before."""
        while f"{number}/in/experts" not in parts[0]:
            number -= 1
        return parts[0][f"{number}/in/experts"]

    def sides(number: int, side: str) -> dict[str, Tensor]:
        prefix = f"{number}/{side}/"
        names = [key.removeprefix(prefix) for key in parts[0] if key.startswith(prefix)]
        experts = chosen(number) if ".experts." in order[number][1] else None
        return {n: merged(parts[0][prefix + n], parts[1][prefix + n], experts, own) for n in names}

    for component in list(bound.calls):
        bound.calls[component] = say(component)  # type: ignore[assignment]
    return again(bound, [sides(n, "in") for n in range(len(order))], order)


def merged(left: Tensor, right: Tensor, experts: Tensor | None, own: range) -> Tensor:
    if experts is None or left.shape[:2] != experts.shape:
        return left
    here = (experts >= own.start) & (experts < own.stop)
    here = here.reshape(*here.shape, *[1] * (left.ndim - 2))
    code = left.dtype.itemsize == 1
    a, b = (tensor.view(torch.uint8) if code else tensor for tensor in (left, right))
    return torch.where(here, a, b).view(left.dtype)


def again(
    bound: object, inputs: list[dict[str, Tensor]], order: list[tuple[int, str]]
) -> InMemoryRun:
    """Record calls that are made by hand."""
    run, sequences = InMemoryRun(), [Sequence() for _ in LENGTHS]
    tokens = [torch.tensor(prompt_ids(n, length)) for n, length in enumerate(LENGTHS)]
    with run._recording(bound, {}):  # type: ignore[arg-type]
        for (step, component), given in zip(order, inputs, strict=True):
            if step == len(run.steps):
                run.steps.append(step_of(step, sequences, tokens))
                for sequence, new in zip(sequences, tokens, strict=True):
                    sequence.length += len(new)
                tokens = [torch.tensor([step + 3])] * len(LENGTHS)
            bound.calls[component](given, {})  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize("case", CASES)
def test_a_fault_between_ranks_is_found(root: Path, seen: Path, case: str) -> None:
    model = MuseumModel.open(KEY, root)
    fault, component = CASES[case]
    found = localise(model.twin(), model.recipe, joined(seen, case, model))
    assert [discrepancy.component for discrepancy in found.origins] == [component][
        : bool(component)
    ]
    if fault:
        origin = found.origins[0]
        assert origin.record is not None
        said = diagnose(origin.context, (origin.record, *origin.more))
        assert said.named
        assert fault in (said.named[0].id, *said.named[0].alternatives), said.sentence
