"""Our kernels run small models on an H200: healthy runs agree, planted faults are found and named.

Every healthy run is another one: other weights, prompts, recipe; lengths lie around what layers
are made of (4, 128, the window). A planted fault has to be found in its own component, and in no
other that its kernel does not compute.
"""

from __future__ import annotations

from importlib import import_module
from itertools import zip_longest
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from degarble.harness.backends.cutedsl import backend as cutedsl
from degarble.harness.capture.files.reader import Capture
from degarble.harness.report.verdict import Verdict
from degarble.references.numerics import KeyValueCache
from degarble.references.tiny.configs import TINY_V4, TINY_V32
from degarble.suites.backends import cutedsl_cases as cases
from degarble.suites.backends.cutedsl import cutedsl_faults as faults
from degarble.suites.backends.cutedsl import cutedsl_faults_attention as of_attention
from degarble.suites.backends.cutedsl import cutedsl_faults_experts as experts

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.model.config.config import Config

pytestmark = [pytest.mark.h200, pytest.mark.needs("cutlass")]

SEEDS = (*range(6), 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("h200")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("family", "layout"), cases.CASES)
def test_a_healthy_run_agrees(
    folder: Path, tmp_path: Path, family: str, layout: str, seed: int
) -> None:
    config: Config = TINY_V4 if family == "v4" else TINY_V32
    model = cases.write_model(folder, family, layout, seed, config)
    cases.capture_by(
        None, model.checkpoint, tmp_path / "run", cases.drawn_prompts(seed), device="cuda"
    )
    result = cases.checked(tmp_path / "run", model)
    lines = [
        f"{origin.discrepancy.site}: {origin.discrepancy.sentence}" for origin in result.origins
    ]
    assert result.verdict is Verdict.AGREES, lines


def with_cache(entry: str) -> Any:
    """Let caches have these entries: a convention that the manifest names, and the twin follows."""
    conventions = {**cutedsl.CONVENTIONS, "kv_cache": KeyValueCache(entry)}
    return mock.patch.object(cutedsl, "CONVENTIONS", conventions)


@pytest.mark.parametrize("entry", ["fp8", "nvfp4"])
def test_a_healthy_run_with_a_coded_cache_agrees(folder: Path, tmp_path: Path, entry: str) -> None:
    model = cases.write_model(folder, "v4", "nvfp4-full", 2)
    with with_cache(entry):
        cases.capture_by(
            None, model.checkpoint, tmp_path / "run", cases.drawn_prompts(1), device="cuda"
        )
    result = cases.checked(tmp_path / "run", model)
    assert result.verdict is Verdict.AGREES, [
        str(origin.discrepancy.site) for origin in result.origins
    ]


def test_a_healthy_run_with_split_keys_agrees(folder: Path, tmp_path: Path) -> None:
    model = cases.write_model(folder, "v4", "nvfp4-full", 4)
    ((place, name, tiles),) = of_attention.SPLITS_OF_A_TILE
    with faults.nothing_prepared(), mock.patch.object(import_module(place), name, tiles):
        cases.capture_by(
            None, model.checkpoint, tmp_path / "run", cases.drawn_prompts(0), device="cuda"
        )
    result = cases.checked(tmp_path / "run", model)
    assert result.verdict is Verdict.AGREES, [
        str(origin.discrepancy.site) for origin in result.origins
    ]


def bits(capture: Path) -> list[tuple[str, str]]:
    """Return all that a run kept, each tensor by its digest."""
    calls = Capture.open(capture).calls
    return [(str(site), tensor.sha256) for call in calls for site, tensor in call.sites()]


def differing(one: list[tuple[str, str]], other: list[tuple[str, str]]) -> str:
    """Name the first thing in which two runs are apart; empty where they are equal."""
    return next((str(each) for each in zip_longest(one, other) if each[0] != each[1]), "")


ALL = (*faults.FAULTS, *of_attention.FAULTS, *experts.FAULTS)


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_planted_fault_is_found_in_its_component(
    folder: Path, tmp_path: Path, fault: faults.Fault
) -> None:
    model = cases.write_model(folder, "v4", fault.layout, 1)

    def run(name: str) -> None:
        asked = cases.drawn_prompts(fault.prompts)
        how: dict[str, Any] = {"device": "cuda", "new_tokens": 2}
        with with_cache(fault.cache):
            cases.capture_by(None, model.checkpoint, tmp_path / name, asked, **how)

    with faults.planted(fault):
        run("run")
    table: dict[str, Any] = Capture.open(tmp_path / "run").facts["kernels"]["kernels"]
    result = cases.checked(tmp_path / "run", model)
    if result.verdict is not Verdict.DIFFERS:
        run("whole")
        changed = differing(*(bits(tmp_path / name) for name in ("run", "whole")))
        pytest.fail(
            f"not found: {changed} changed"
            if changed
            else "every bit is the whole kernels': no plant"
        )
    blamed = [origin.discrepancy.component for origin in result.origins]
    own = [
        origin
        for origin in result.origins
        if origin.discrepancy.component.endswith(fault.component)
    ]
    assert own, blamed
    causes = [origin.diagnosed.named for origin in own if origin.diagnosed]
    named = {named_fault.id for known in causes for named_fault in known}
    first = {known[0].id for known in causes if known}
    text = f"{', '.join(sorted(named)) or 'none named'}; first {', '.join(sorted(first))}"
    print(f"CAUSE {fault.name}: {text}")  # noqa: T201  with -rP
    assert fault.cause
    assert any(each.startswith(f"{fault.cause}.") for each in named), named
    others = [
        name for name in blamed
        if not any(each["kernel"] == fault.kernel for each in table.get(name, ()))
        and not (fault.also and name.endswith(fault.also))
    ]  # fmt: skip
    assert not others, f"blamed, and computed by another kernel: {others}"


@pytest.mark.parametrize(("family", "layout"), cases.CASES)
def test_two_runs_have_equal_bits(folder: Path, tmp_path: Path, family: str, layout: str) -> None:
    model = cases.write_model(folder, family, layout)
    asked, names = cases.drawn_prompts(0), ("first", "second")
    for name in names:
        cases.capture_by(None, model.checkpoint, tmp_path / name, asked, device="cuda")
    assert not differing(*(bits(tmp_path / name) for name in names))
