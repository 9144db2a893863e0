"""Greedy decoding of a small V4 model: tokens a second, against transformers on the same core.

Our references and transformers hold the same weights and continue the same prompt with a cache, in
BF16 as the checkpoint stores them (the default of both), and in float32. A third arm of ours is the
whole path of `degarble generate`, sampler and float64 sums included. In float32 both must generate
the same tokens: decoding is one token at a time, so any deviation would grow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.inference.generation import Continuation, Generation, Limits, Sampling
from degarble.harness.inference.model import LogitsModel, numerics_of, threads_for
from degarble.harness.inference.weights import HeldWeights
from degarble.harness.model.config.config import small_v4
from degarble.references.binding import BoundModel
from degarble.references.model import ModelV4, Sequence
from degarble.references.numerics import SOURCES, Numerics
from degarble.references.weights import random_weights
from degarble.suites.bench import peers_formats as peers
from degarble.suites.bench.timing import (
    Neighbours,
    Section,
    Settings,
    Table,
    Target,
    interleave,
    paired_ratio,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[torch.Tensor], torch.Tensor]

PACKAGES = ("torch", "numba", "transformers")
RATIO = 2.0
TOKENS = 16  # a turn
PROMPT = torch.arange(200) * 37 % 512
# The geometry of the small trained model: real head dims, so real cache rows.
MODEL = small_v4(
    hidden_size=192, num_hidden_layers=6, compress_ratios=(0, 4, 128, 4, 0, 4, 0), head_dim=512,
    num_attention_heads=8, o_groups=8, o_lora_rank=32, q_lora_rank=64, moe_intermediate_size=96,
    index_topk=16,
)  # fmt: skip
DTYPES = {"BF16": torch.bfloat16, "float32": torch.float32}


class Arm:
    """A model with its cache, decoding greedily; the tokens that it named."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._next = step(PROMPT)
        self.named = [int(self._next)]

    def __call__(self) -> None:
        """Decode one turn's tokens."""
        for _ in range(TOKENS):
            self._next = self._step(self._next.reshape(1))
            self.named.append(int(self._next))


def ours(dtype: torch.dtype) -> Step:
    """Our references: BF16 by the official rounding points, float32 as the definition."""
    numerics = Numerics.bf16()
    if dtype is torch.float32:
        numerics = Numerics.definition(torch.float32, SOURCES["transformers"])
    model = ModelV4(BoundModel(MODEL, numerics, random_weights(MODEL, 1, dtype)), MODEL)
    sequence = Sequence()

    def step(ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return model.forward([sequence], [ids], last_only=True).argmax(-1)

    return step


class GenerateArm:
    """The way of `degarble generate`: weights held, the loop with its sampler, the same cache."""

    def __init__(self) -> None:
        weights = HeldWeights(random_weights(MODEL, 1, torch.bfloat16))
        bound = BoundModel(MODEL, numerics_of("bf16", held=True), weights)
        self._generation = Generation(LogitsModel(bound), None, Sampling(), Limits(TOKENS))
        self._speech = Continuation(PROMPT.tolist())
        self()

    def __call__(self) -> None:
        """Generate one turn's tokens behind everything said before."""
        self._speech = Continuation(self._speech.all_ids, self._speech.sequence)
        with threads_for(MODEL):
            self._generation.run([self._speech])


class Alone:
    """An arm by one thread, which suits a narrow model."""

    def __init__(self, arm: Callable[[], None]) -> None:
        self._arm = arm

    def __call__(self) -> None:
        """Run it so."""
        with threads_for(MODEL):
            self._arm()


def theirs(dtype: torch.dtype) -> Step:
    """The model of transformers."""
    from degarble.suites.references.transformers_models import build  # noqa: PLC0415  heavy

    with torch.no_grad():
        model = build(MODEL, random_weights(MODEL, 1, dtype), dtype)
    cache: Any = None

    def step(ids: torch.Tensor) -> torch.Tensor:
        nonlocal cache
        with torch.inference_mode():
            made = model(ids[None], past_key_values=cache, use_cache=True)
        cache = made.past_key_values
        last: torch.Tensor = made.logits[0, -1].argmax(-1)
        return last

    return step


def run(settings: Settings) -> Section:
    """Measure all arms by turns."""
    with Neighbours() as neighbours, peers.quiet():
        named = {f"degarble, {name}": Arm(ours(dtype)) for name, dtype in DTYPES.items()}
        if settings.peers:
            named |= {f"transformers, {name}": Arm(theirs(dtype)) for name, dtype in DTYPES.items()}
        arms: dict[str, Any] = {name: Alone(arm) for name, arm in named.items()}
        arms["degarble generate, BF16"] = GenerateArm()
        if settings.peers:
            arms["transformers, BF16, all cores"] = Arm(theirs(torch.bfloat16))
        readings = interleave(arms, settings.rounds)
    rows = tuple(
        (name, f"{TOKENS / reading.median:.1f}", f"{reading.median / TOKENS * 1e3:.2f}")
        for name, reading in readings.items()
    )
    targets: list[Target] = []
    if settings.peers:
        both = (readings["transformers, BF16"], readings["transformers, BF16, all cores"])
        peer = min(both, key=lambda reading: reading.median)
        ratio = paired_ratio(peer, readings["degarble, BF16"])[0]
        targets.append(Target("times as fast as transformers, BF16 as stored", ratio, RATIO))
        ratio = paired_ratio(peer, readings["degarble generate, BF16"])[0]
        targets.append(Target("generate: times as fast as transformers, BF16", ratio, RATIO))
        pair = [
            named[f"{who}, float32"].named[: TOKENS * 2] for who in ("degarble", "transformers")
        ]
        same = float(pair[0] == pair[1])
        targets.append(Target("float32 arms name the same tokens (1 = yes)", same, 1.0))
    return Section(
        key="references",
        title="Decoding with the references on the CPU",
        tables=(Table("Greedy, one sequence", ("arm", "tokens/s", "ms a token"), rows),),
        targets=tuple(targets),
        notes=(
            f"V4, {MODEL.num_hidden_layers} layers, hidden {MODEL.hidden_size}, head_dim 512",
            f"prompt of {len(PROMPT)} tokens; {settings.rounds} rounds of {TOKENS} tokens",
            "one thread, as generate computes narrow models; the faster arm of transformers counts",
            f"other processes took {neighbours.cores:.2f} cores of this machine meanwhile",
        ),
    )
