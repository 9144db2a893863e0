"""The museum's models: the trained small V4 and V3.2, quantised by our own code.

Released weights are calibrated on documents of the small language and quantised by the job behind
`degarble quantise`, into a folder that lives as long as a run. A candidate computes in the
arithmetic of engines (float32 products), its twin exactly on the operands on disk; both read the
same checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from degarble.harness.capture.amax import InputRanges
from degarble.harness.checkpoint.audit.structure.inventory import take_inventory
from degarble.harness.checkpoint.transform.quantise.job import QuantiseJob, run_job, target_layout
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.inference.held_weights import HeldWeights
from degarble.harness.inference.model import open_model, recipe_as_stored
from degarble.harness.model.recipes import recipe_named
from degarble.references import tiny
from degarble.references.binding import Bound
from degarble.references.numerics import Numerics, switches_of
from degarble.references.state import Sequence
from degarble.references.tiny import language

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.checkpoint.transform.quantise.calibration import Calibration
    from degarble.harness.formats.weight import Weight
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.recipes import Recipe
    from degarble.references.numerics import Switches

MODELS = ("v4", "v32")
RECIPES = ("nvfp4-experts", "nvfp4-full")
_DOCUMENTS = 4  # that calibrate
_LENGTH = 320  # of each of them
_RELEASED = Path(tiny.__file__).parent / "v1"


@dataclass(frozen=True, order=True)
class ModelKey:
    """A model and a recipe."""

    model: str
    recipe: str

    def __str__(self) -> str:
        return f"{self.model} {self.recipe}"

    @property
    def folder(self) -> str:
        """Return its folder's name."""
        return f"{self.model}-{self.recipe}"


KEYS = tuple(ModelKey(model, recipe) for model in MODELS for recipe in RECIPES)


@dataclass(frozen=True, eq=False)
class MuseumModel:
    """A quantised checkpoint, read once: candidates and twins share its weights."""

    key: ModelKey
    config: Config
    recipe: Recipe
    weights: Mapping[str, Weight]

    @classmethod
    def open(cls, key: ModelKey, root: Path) -> MuseumModel:
        """Read what `prepare` has written."""
        with Checkpoint.open(root / key.folder) as checkpoint:
            config = checkpoint.model
            names = checkpoint.names
            assert config is not None, "prepare has written a config"
            assert names is not None, "prepare has written known names"
            recipe = recipe_as_stored(take_inventory(names), config)
            weights = HeldWeights(checkpoint.weights)
            for name in checkpoint.weights:
                weights[name].values(torch.float32)  # read before the files are closed
        return cls(key, config, recipe, weights)

    @cached_property
    def switches(self) -> Switches:
        """Return the switches of the family's official code."""
        return switches_of(f"official-{self.key.model}")

    def candidate(self, switches: Switches | None = None) -> Bound:
        """Bind the weights in an engine's arithmetic."""
        numerics = Numerics.twin(switches or self.switches, products=torch.float32)
        return Bound(self.config, numerics, self.weights, self.recipe)

    def twin(self, switches: Switches | None = None) -> Bound:
        """Bind the weights in exact arithmetic."""
        numerics = Numerics.twin(switches or self.switches)
        return Bound(self.config, numerics, self.weights, self.recipe)


def prepare(root: Path, keys: tuple[ModelKey, ...] = KEYS) -> None:
    """Write the checkpoints of the keys; existing ones stay."""
    for key in keys:
        if (root / key.folder).exists():
            continue
        source = _RELEASED / key.model
        with Checkpoint.open(source) as checkpoint:
            config = checkpoint.model
        assert config is not None, "both sources have a config"
        recipe = recipe_named(key.recipe, config)
        job = QuantiseJob(
            source, target_layout(config, recipe), calibration=_calibration(source, config)
        )
        draft = root / f"{key.folder}.draft"
        run_job(job, draft)
        draft.rename(root / key.folder)


def prompt_ids(seed: int, length: int) -> tuple[int, ...]:
    """Return the first so many tokens of a document of the small language."""
    mixture = language.Mixture(length=max(length, 32), facts=4)
    return tuple(language.document(seed, mixture).ids[:length])


def _calibration(source: Path, config: Config) -> Calibration:
    """Measure the inputs of linears."""
    ranges = InputRanges(config)
    with open_model(source, "bf16", absorbed=False) as model:
        model.speaker.bound.observer = ranges
        for number in range(_DOCUMENTS):
            ids = torch.tensor(prompt_ids(number, _LENGTH))
            hidden = model.speaker.hidden([Sequence()], [ids])
            ranges("head", {"x": model.speaker.normed(hidden)}, {})
    return ranges.calibration()
