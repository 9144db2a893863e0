"""The museum plants adopted faults: by role in its models, by kind in a product."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from degarble.harness.commands.adopt import page_of
from degarble.harness.engine.adopted.files import fault_of, fault_text, read_fault, searching
from degarble.harness.museum.cases import MuseumCase
from degarble.harness.museum.museum import MuseumExtent, MuseumTask, chosen, perform
from degarble.harness.museum.plants import CauseAnswer, PlaceAnswer, PlantOutcome
from degarble.harness.museum.products import plant_in_product
from degarble.suites.engine.adopted.test_data import adopted
from degarble.suites.engine.adopted.test_files import saved
from degarble.suites.engine.recover.test_described import of_outputs, told
from degarble.suites.museum.museum_stages import KEY, root

if TYPE_CHECKING:
    from pathlib import Path


def test_a_fault_of_a_product_is_planted_found_and_named(tmp_path: Path) -> None:
    data = saved(tmp_path)
    extent = MuseumExtent(plants=1, healthy=0, adopted=data.parent)
    with searching(data.parent):
        assert chosen(["adopted"]) == (data.stem,)
    (outcome,) = perform(tmp_path, MuseumTask(extent, data.stem))
    assert isinstance(outcome, PlantOutcome)
    assert outcome.effect > 3
    assert (outcome.place, outcome.cause) == (PlaceAnswer.EXACT, CauseAnswer.FIRST)


def test_what_cannot_be_planted_in_its_case_has_no_outcome(tmp_path: Path) -> None:
    own = read_fault(saved(tmp_path))
    assert plant_in_product(fault_of(own), replace(own, case={})) is None
    assert "No case of the museum is of this kind" in page_of(replace(own, case={}))
    small = {"product": {**own.case["product"], "shape": [4, 16]}}  # it has no row 5
    outcome = plant_in_product(fault_of(own), replace(own, case=small))
    assert outcome is None or outcome.effect == 0


def test_a_product_of_codes_is_planted_as_well(tmp_path: Path) -> None:
    data = saved(tmp_path)
    own = read_fault(data)
    product = {**own.case["product"], "format": "NVFP4", "input": "NVFP4"}
    with searching(data.parent):
        outcome = plant_in_product(fault_of(own), replace(own, case={"product": product}))
    assert outcome is not None
    assert (outcome.place, outcome.cause) == (PlaceAnswer.EXACT, CauseAnswer.FIRST)


def test_a_fault_of_a_role_is_planted_in_the_models(tmp_path: Path) -> None:
    description = told("layers.1.attn.norm", of_outputs(lambda x: x.abs()))
    assert description is not None
    own = adopted(description, "adopted.signs")
    own = replace(
        own, families=(*own.families, "deepseek_v32"), components=("attn.norm", "ffn.norm")
    )
    (tmp_path / "adopted.signs.json").write_text(fault_text(own))
    assert json.loads(fault_text(own))["families"] == ["deepseek_v4", "deepseek_v32"]
    cases = (MuseumCase(KEY, 1, (40, 7)),)
    extent = MuseumExtent(plants=1, healthy=0, cases=cases, adopted=tmp_path)
    found = perform(root(), MuseumTask(extent, "adopted.signs"))
    (outcome,) = (each for each in found if isinstance(each, PlantOutcome) and each.effect > 1)
    assert outcome.place is PlaceAnswer.EXACT
    assert outcome.cause is CauseAnswer.FIRST
