"""Engines' own maps: every name goes where vLLM's loaders send it, and refusals are by name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import InvalidArgument, LayoutMismatch, UnknownName
from degarble.harness.checkpoint.audit.loader.engine_maps import ONE_RANK, Ranks, engine_map
from degarble.harness.checkpoint.audit.loader.maps import EngineLayout, NameOutcome, NameRules
from degarble.harness.checkpoint.audit.loader.proof import prove
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.model.config.config import V4Config, V32Config
from degarble.harness.model.layouts import LAYOUTS, layout_named
from degarble.harness.model.tensors import tensors_of
from degarble.suites.checkpoint.audit.loader.loader_cases import inventory_of
from degarble.suites.checkpoint.audit.loader.loader_vllm import v4_place, v32_place
from degarble.suites.checkpoint.structure_cases import V4, V32, errors, told, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from degarble.harness.checkpoint.audit.loader.maps import LoaderMap
    from degarble.harness.model.config.config import Config

    Write = Callable[[Config, str], Path]

V4_LAYOUTS = ("official", "bf16", "nvfp4-experts")
V32_LAYOUTS = ("official", "bf16", "nvfp4-experts", "nvfp4-full")
FUSED = {"transformers"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Write:
    made: dict[tuple[str, str], Path] = {}

    def write_once(config: Config, layout: str) -> Path:
        key = (config.family, layout)
        if key not in made:
            made[key] = write(tmp_path_factory.mktemp("engine") / "c", config, layout)
        return made[key]

    return write_once


def map_and_names(folder: Path, ranks: Ranks = ONE_RANK) -> tuple[LoaderMap, NameRules, list[str]]:
    """Return an engine's map, its rules with the engine's parameters, and the stored names."""
    with Checkpoint.open(folder) as checkpoint:
        inventory = inventory_of(checkpoint)
        made = engine_map(inventory, "vllm", ranks)
        assert isinstance(made.parameters, EngineLayout)
        layout = made.parameters.layout
        assert not isinstance(layout, str)
        known = {each.name for each in tensors_of(inventory.config, layout)}
        return made, NameRules(made, known), sorted(checkpoint.entries)


@pytest.mark.parametrize("layout", V4_LAYOUTS)
def test_names_of_v4_go_where_vllm_sends_them(written: Write, layout: str) -> None:
    _, rules, names = map_and_names(written(V4, layout))
    nvfp4 = layout == "nvfp4-experts"
    for name in names:
        if nvfp4 and name.startswith("mtp.") and ".experts." in name:
            continue  # built as NVFP4, so that these tensors have no parameter
        found, wanted = rules.resolve(name), v4_place(name, V4.num_hidden_layers, nvfp4)
        assert found.outcome is NameOutcome.PLACED, name
        assert (found.target, found.slot, found.expert) == wanted, name


@pytest.mark.parametrize("layout", V32_LAYOUTS)
def test_names_of_v32_go_where_vllm_sends_them(written: Write, layout: str) -> None:
    _, rules, names = map_and_names(written(V32, layout))
    drafted = 0
    for name in names:
        found, wanted = rules.resolve(name), v32_place(name, V32.num_hidden_layers)
        if wanted is None:
            drafted += 1
            assert found.outcome is NameOutcome.ELSEWHERE, name
        elif name.endswith(".indexer.wk.weight_scale_inv"):
            assert found.outcome is NameOutcome.DROPPED, name  # the conversion reads it
        else:
            assert found.outcome is NameOutcome.PLACED, name
            assert (found.target, found.slot, found.expert) == wanted, name
    assert drafted


def test_only_names_that_vllm_knows_go_without_a_caveat(written: Write) -> None:
    known = {(V4Config.family, each) for each in V4_LAYOUTS}
    known |= {(V32Config.family, each) for each in (*V32_LAYOUTS, "compressed-tensors")}
    known.add((V32Config.family, "transformers-saved"))
    for family, layout in LAYOUTS:
        if layout not in FUSED:
            config = V4 if family == V4Config.family else V32
            made, _, _ = map_and_names(written(config, layout))
            assert bool(made.caveats) == ((family, layout) not in known), (family, layout)


def test_a_caveat_is_told(written: Write) -> None:
    with Checkpoint.open(written(V4, "transformers-saved")) as checkpoint:
        found = prove(checkpoint, engine_map(inventory_of(checkpoint), "vllm")).findings
    (caveat,) = told(found, "loader.caveat")
    assert caveat.level == "warning"
    assert "these renames are degarble's" in caveat.message


def test_the_drafter_is_built_like_the_other_experts(written: Write) -> None:
    with Checkpoint.open(written(V4, "nvfp4-experts")) as checkpoint:
        found = prove(checkpoint, engine_map(inventory_of(checkpoint), "vllm")).findings
    assert errors(found) == set()
    warned = told(found, "loader.drafter_format")
    assert {each.evidence["built"] for each in warned} == {"NVFP4"}
    assert {each.layer for each in warned} == {V4.num_hidden_layers}
    assert [each.count for each in warned] == [V4.n_routed_experts] * 3


def test_experts_are_not_split_where_they_are_spread(written: Write) -> None:
    folder = written(V4, "official")
    cut = {each.match for each in map_and_names(folder, Ranks(tp=2))[0].split}
    spread = {each.match for each in map_and_names(folder, Ranks(tp=2, ep=2))[0].split}
    assert {each for each in cut - spread if "experts" not in each} == set()
    assert cut - spread
    assert not spread - cut


def test_a_fused_checkpoint_of_transformers_is_refused(written: Write) -> None:
    with Checkpoint.open(written(V4, "transformers")) as checkpoint:
        inventory = inventory_of(checkpoint)
        with pytest.raises(LayoutMismatch, match=r"transformers.*fused for an engine already"):
            engine_map(inventory, "vllm")


@pytest.mark.parametrize("config", [V4, V32], ids=["V4", "V3.2"])
def test_a_checkpoint_in_the_engines_own_names_needs_no_rules(
    written: Write, config: Config
) -> None:
    made, _, _ = map_and_names(written(config, "vllm"), Ranks(tp=2))
    assert (made.convert, made.rename, made.stack, made.elsewhere) == ((), (), (), ())
    assert made.split
    (caveat,) = made.caveats
    assert "no names for stacked experts" in caveat


def test_an_unknown_engine_is_refused(written: Write) -> None:
    with Checkpoint.open(written(V4, "official")) as checkpoint:
        inventory = inventory_of(checkpoint)
        with pytest.raises(UnknownName, match="engine = 'sglang'"):
            engine_map(inventory, "sglang")


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (Ranks(tp=3), "tp = 3: expected a divisor of 2 output groups"),
        (Ranks(ep=3), "ep = 3: expected a divisor of 4 experts"),
        (Ranks(tp=2, ep=1, pp=9), "pp = 9: expected at most 3 layers"),
    ],
)
def test_ranks_that_do_not_divide_the_model_are_refused(
    written: Write, ranks: Ranks, message: str
) -> None:
    with Checkpoint.open(written(V4, "official")) as checkpoint:
        made = engine_map(inventory_of(checkpoint), "vllm", ranks)
        with pytest.raises(InvalidArgument, match=message):
            prove(checkpoint, made)


def test_a_map_that_anatomy_contradicts_never_leaves(
    written: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    from degarble.harness.checkpoint.audit.loader import engine_maps as loader_engine  # noqa: PLC0415  patched here alone

    layout = layout_named("vllm", V4)
    swapped = tuple(replace(each, target=each.target + "_x") for each in layout.fusions)
    monkeypatch.setattr(loader_engine, "layout_named", lambda *_: replace(layout, fusions=swapped))
    with Checkpoint.open(written(V4, "official")) as checkpoint:
        inventory = inventory_of(checkpoint)
        engine_map(inventory, "vllm")  # other names are fine while they agree
        monkeypatch.setattr(loader_engine._Maker, "_stacks", lambda _: iter(()))
        with pytest.raises(AssertionError, match="is Resolved"):
            engine_map(inventory, "vllm")
