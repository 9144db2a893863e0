"""Score a small trained model: answers at probes, grammatical sentences, and the cost of ablations.

The two ablations are patches of a bound model. Callers supply logits and text.
Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from degarble.references.tiny import language

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    from degarble.harness.formats.weight import Weight
    from degarble.references.binding import BoundModel

HELD_OUT = 50_000_000  # first seed of documents that no training saw
WINDOW = 128
_Z = 1.96  # of a normal distribution at 95 %, two-sided
_OCTAVES = (WINDOW, 256, 512, 1024)


@dataclass
class ProbeScore:
    """Right answers by kind of probe, and the surprise (negative log-likelihood) of all tokens."""

    asked: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    guessed: dict[str, float] = field(default_factory=dict)  # right answers that guessing gives
    surprise: float = 0.0
    tokens: int = 0

    def share(self, *kinds: str) -> float:
        """Return the share of right answers over some kinds; NaN where nothing was asked."""
        asked = sum(self.asked[kind] for kind in kinds)
        return sum(self.right[kind] for kind in kinds) / asked if asked else math.nan

    def chance(self, *kinds: str) -> float:
        """Return the share of right answers when guessing among the possible words."""
        asked = sum(self.asked[kind] for kind in kinds)
        return sum(self.guessed.get(kind, 0.0) for kind in kinds) / asked if asked else math.nan

    def interval(self, *kinds: str) -> tuple[float, float]:
        """Return the 95 % interval of the true share by Wilson's score: from, to."""
        asked, share = sum(self.asked[kind] for kind in kinds), self.share(*kinds)
        if not asked:
            return 0.0, 1.0
        z = _Z * _Z / asked
        centre, reach = share + z / 2, _Z * math.sqrt(share * (1 - share) / asked + z / asked / 4)
        return (centre - reach) / (1 + z), (centre + reach) / (1 + z)

    @property
    def perplexity(self) -> float:
        """Return the exponential of the mean surprise."""
        return math.exp(self.surprise / self.tokens)


def possible(probe: language.Probe) -> int:
    """Return how many words may answer a question about a fact: the values of its relation."""
    word = language.WORDS[probe.answer]
    return next(len(values) for values in language.RELATIONS.values() if word in values)


def kind_of(probe: language.Probe) -> str:
    """Return the kind of a probe; recall is named by its distance in octaves."""
    if probe.kind != "recall":
        return probe.kind
    reach = next((each for each in _OCTAVES if probe.distance <= each), _OCTAVES[-1])
    return f"recall {reach}"


FAR = tuple(f"recall {reach}" for reach in _OCTAVES[1:])
NEAR = f"recall {WINDOW}"


def score(
    documents: Iterable[language.Document], logits_of: Callable[[list[int]], Tensor]
) -> ProbeScore:
    """Score a model on documents; `logits_of` gives [T, V] for the ids of one."""
    probe_score = ProbeScore()
    for document in documents:
        logits_TV = logits_of(document.ids).float()
        logp_TV = torch.log_softmax(logits_TV[:-1], dim=-1)
        following = torch.tensor(document.ids[1:])
        probe_score.surprise -= float(logp_TV.gather(1, following[:, None]).double().sum())
        probe_score.tokens += len(following)
        best = logits_TV.argmax(-1)
        for probe in document.probes:
            kind = kind_of(probe)
            probe_score.asked[kind] += 1
            if probe.kind == "recall":
                probe_score.guessed[kind] = probe_score.guessed.get(kind, 0.0) + 1 / possible(probe)
            probe_score.right[kind] += int(best[probe.position - 1]) == probe.answer
    return probe_score


def sentences_in(text: str) -> list[str]:
    """Return the sentences of generated text: items that are no fact, question, sum or list.

    The last item counts only if it ends with its full stop.
    """
    items = [f"{item.strip()} ." for item in text.split(" .")[:-1]]
    return [item for item in items if _claims_to_be_a_sentence(item.split())]


def _claims_to_be_a_sentence(item: list[str]) -> bool:
    first = item[0]
    fact = first in language.NAMES and len(item) > 1 and item[1] in language.RELATIONS
    return not (fact or first in ("recall", "copy") or first in language.NUMBERS)


def grammatical(texts: Iterable[str]) -> tuple[int, int]:
    """Return how many sentences of the texts are in the grammar, and how many there are."""
    found = [item for text in texts for item in sentences_in(text)]
    return sum(language.is_sentence(item) for item in found), len(found)


def window_only(bound: BoundModel) -> None:
    """Ablate: remove everything beyond the window, in every layer."""
    for name, call in list(bound.calls.items()):
        if name.endswith("attn.attend"):
            bound.calls[name] = _near(call)


def random_choice(bound: BoundModel, seed: int) -> None:
    """Ablate: choose at random, among what is visible, in place of the indexer."""
    generator = torch.Generator().manual_seed(seed)
    for name, call in list(bound.calls.items()):
        if name.endswith("attn.indexer.topk"):
            bound.calls[name] = _by_chance(call, generator)


def _near(call: Callable[..., Mapping[str, Tensor]]) -> Callable[..., Mapping[str, Tensor]]:
    def patched(
        inputs: Mapping[str, Tensor], weights: Mapping[str, Weight]
    ) -> Mapping[str, Tensor]:
        given = dict(inputs)
        if "compressed" in given:  # V4: no entries; the window is apart from them
            given["chosen"] = torch.full((len(given["positions"]), 1), -1)
        elif "chosen" in given:  # V3.2: tokens by number
            far = given["positions"][:, None] - given["chosen"] >= WINDOW
            given["chosen"] = given["chosen"].masked_fill(far, -1)
        return call(given, weights)

    return patched


def _by_chance(
    call: Callable[..., Mapping[str, Tensor]], generator: torch.Generator
) -> Callable[..., Mapping[str, Tensor]]:
    def patched(
        inputs: Mapping[str, Tensor], weights: Mapping[str, Weight]
    ) -> Mapping[str, Tensor]:
        scores = inputs["scores"]
        drawn = torch.rand(scores.shape, generator=generator).to(scores.dtype)
        visible = torch.isfinite(scores)
        return call({**inputs, "scores": torch.where(visible, drawn, scores)}, weights)

    return patched
