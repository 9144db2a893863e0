"""Two small models with calibrated input scales, run once; faults are planted into single calls.

A sight is what a candidate in float32 does with a way, on the inputs that a healthy run gave it,
beside what the twin in float64 does without. Scenes of planting are the candidate's, those of
naming the twin's.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.diagnose.trial import make, proof
from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext, FaultVariant
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.model.components import component_named
from degarble.harness.model.config.config import V4Config, small_v4, small_v32
from degarble.harness.model.recipes import recipe_named
from degarble.references.binding import BoundModel
from degarble.references.model import ModelV4, ModelV32, Sequence
from degarble.references.numerics import Numerics, switches_of
from degarble.references.weights import InputAmax, quantised_weights, random_weights

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from degarble.harness.model.config.config import Config
    from degarble.harness.model.recipes import Recipe

CONFIGS: Mapping[str, Config] = {
    "v4": small_v4(
        num_hidden_layers=3, compress_ratios=(0, 4, 128), num_hash_layers=1, hidden_size=128,
        moe_intermediate_size=96, n_routed_experts=4, num_attention_heads=4, o_groups=2,
        vocab_size=64, sliding_window=12, index_topk=5, swiglu_limit=0.5,
        num_nextn_predict_layers=0,
    ),
    "v32": small_v32(
        num_hidden_layers=2, hidden_size=128, intermediate_size=256, moe_intermediate_size=128,
        n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, vocab_size=64,
        index_topk=12, num_nextn_predict_layers=0,
    ),
}  # fmt: skip
_NUMBERS: dict[str, tuple[int, ...]] = {
    "M": (1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 16, 17, 19, 20)
}
_NUMBERS["O"] = (1, 2, 3, 6, 7, 8, 9, 10)
OURS = tuple(f"{letter}{n:02}" for letter, numbers in _NUMBERS.items() for n in numbers)
FAULTS = tuple(fault for fault in MODEL_FAULTS.values() if fault.family in OURS)
PROMPTS = ((torch.arange(133) * 37 + 5) % 60, (torch.arange(19) * 11 + 3) % 60)


@dataclass(frozen=True, eq=False)
class Double:
    """A healthy candidate, its twin, and what every component was given, call by call."""

    candidate: BoundModel
    twin: BoundModel
    recipe: Recipe
    calls: Mapping[str, tuple[Mapping[str, Tensor], ...]]

    def planting(self, name: str) -> ComponentContext:
        """Where a fault is put."""
        component = component_named(self.candidate.config, name, self.recipe)
        return ComponentContext(self.candidate, component, self.recipe)

    def naming(self, name: str) -> ComponentContext:
        """Where it is looked for."""
        return ComponentContext(self.twin, self.planting(name).component, self.recipe)

    @cache  # noqa: B019  a double lives as long as its process
    def expected(self, name: str, number: int) -> Mapping[str, Tensor]:
        """What the twin makes of a call of the healthy run."""
        twin = self.naming(name)
        return dict(twin.call(self.calls[name][number], twin.weights))

    def sights(self, name: str, variant: FaultVariant | None, calls: int = 2) -> list[CallRecord]:
        """What a candidate with a way does on its first calls."""
        planted = self.planting(name)
        call = planted.call if variant is None else variant.apply(planted.call)
        found = []
        with torch.inference_mode():
            for step, inputs in enumerate(self.calls[name][:calls]):
                outputs = dict(call(inputs, planted.weights))
                found.append(CallRecord(inputs, outputs, self.expected(name, step), {}, step))
        return found

    def differs(self, name: str, records: list[CallRecord]) -> bool:
        """Whether what a candidate did is beyond the budget of a healthy one."""
        return any(self.ratio(name, record) > 1 for record in records)

    def ratio(self, name: str, record: CallRecord) -> float:
        """The difference in units of budget."""
        context = self.naming(name)
        with torch.inference_mode():
            variant_outputs = make(context, record, FaultVariant("nothing", lambda call: call))
            assert variant_outputs is not None
            return proof(context, record, variant_outputs).ratio


@cache
def double(family: str, recipe_name: str) -> Double:
    """The healthy run: prompts side by side, then one token each."""
    config = CONFIGS[family]
    if recipe_name != "nvfp4-full":  # FP8 beside the experts needs whole blocks of 128
        config = replace(config, moe_intermediate_size=128)
    recipe = recipe_named(recipe_name, config)
    plain = random_weights(config, 3)
    amax = InputAmax(config)
    _run(BoundModel(config, Numerics.bf16(), plain, observer=amax))
    weights = quantised_weights(plain, config, recipe, input_amax=amax.largest)
    switches = switches_of(f"official-{family}")
    calls: dict[str, list[Mapping[str, Tensor]]] = defaultdict(list)

    def seen(component: str, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        del outputs
        calls[component].append({name: tensor.clone() for name, tensor in inputs.items()})

    numerics = Numerics.twin(switches, products=torch.float32)
    candidate = BoundModel(config, numerics, weights, recipe, observer=seen)
    _run(candidate)
    candidate.observer = None
    twin = BoundModel(config, Numerics.twin(switches), weights, recipe)
    return Double(candidate, twin, recipe, {name: tuple(call) for name, call in calls.items()})


def _run(bound: BoundModel) -> None:
    run_prompts(bound, PROMPTS)


def run_prompts(bound: BoundModel, prompts: Iterable[Tensor]) -> None:
    """Run prompts side by side, then one token each."""
    model = (
        ModelV4(bound, bound.config)
        if isinstance(bound.config, V4Config)
        else ModelV32(bound, bound.config)
    )
    tokens = list(prompts)
    sequences = [Sequence() for _ in tokens]
    with torch.no_grad():
        for _ in range(2):
            logits = model.forward(sequences, tokens, last_only=True)
            tokens = list(logits.argmax(-1, keepdim=True))
