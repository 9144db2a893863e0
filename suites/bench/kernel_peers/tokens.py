"""A whole decoding step of all layers as one graph, and the time that its weights' bytes take."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.graph.matrices import FEW_ROWS, MOST_ROWS, TILES
from degarble.harness.cli.values import settings_here
from degarble.harness.model.config.config import V3_2, V4_FLASH
from degarble.suites.bench import decoder as bench
from degarble.suites.bench.kernel_peers.contest import (
    OURS,
    Call,
    Contender,
    Goal,
    LargeRow,
    Outcome,
    Row,
)
from degarble.suites.bench.runner import COPY, copy_arm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

LANES = (1, 64)
# Milliseconds of all layers for one token and for 64.
WANTED = {"V4-Flash": (5, 50), "V3.2": (9, 95)}
RECIPE = bench.NVFP4
COPIED = 1 << 30  # bytes at most of a copy whose rate is the ceiling


def milliseconds(wanted: float) -> Goal:
    return Goal("ms", lambda of: of.ours.median * 1e3, wanted, at_least=False)


def of_bytes(wanted: float) -> Goal:
    """Report the share of time in which the weights alone could be copied."""

    def value(of: Outcome) -> float:
        return of.ours.share_of(COPY)

    return Goal("of the time of its weights' bytes", value, wanted, COPY)


def tensors_in(record: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of records, tuples and mappings."""
    if isinstance(record, torch.Tensor):
        yield record
    elif isinstance(record, (tuple, list)):
        for each in record:
            yield from tensors_in(each)
    elif isinstance(record, dict):
        yield from tensors_in(list(record.values()))
    elif is_dataclass(record):
        yield from tensors_in([getattr(record, each.name) for each in fields(record)])


def memory_of(record: Any) -> dict[int, int]:
    """Return bytes by address of all memory that tensors have; several may share it."""
    stored = (tensor.untyped_storage() for tensor in tensors_in(record))
    return {memory.data_ptr(): memory.nbytes() for memory in stored}


def visited_share(config: Any, tokens: int) -> float:
    """Return the share of the experts that some token chooses."""
    missed: float = (1 - config.num_experts_per_tok / config.n_routed_experts) ** tokens
    return 1 - missed


def layers_call(kinds: Sequence[Any], steps: dict[Any, list[bench.Step]]) -> Callable[[], None]:
    """Return all layers in order, each on the next buffer set of its kind.

    What layers share is computed once for each kind of them.
    """
    seen: Counter[Any] = Counter()
    runs = []
    for kind in kinds:
        several = steps[kind]
        runs.append((kind, several[seen[kind] % len(several)].run))
        seen[kind] += 1

    def run() -> None:
        shared = {kind: several[0].shared() for kind, several in steps.items()}
        for kind, each in runs:
            each(shared[kind])

    return run


def step_bytes(given: bench.Given, step: bench.Step, tokens: int) -> int:
    """Return the bytes of the weights that a layer's step reads: of experts, the visited ones."""
    shared, every = memory_of(given.every), memory_of(step.weights)
    dense = sum(size for place, size in every.items() if place not in shared)
    if not shared.keys() & every.keys():
        return dense  # a layer without routed experts
    return dense + int(sum(shared.values()) * visited_share(given.config, tokens))


def kind_of(given: bench.Given, block: Any) -> Any:
    """Return what tells kinds of layers apart."""
    return block.ratio if given.entry == bench.ENTRY else block.mlp_type


def steps_of(given: bench.Given, block: Any, lanes: int) -> list[bench.Step]:
    if given.entry == bench.ENTRY:
        return bench.steps_of(given, block, lanes)
    return bench.steps_of_v32(given, block, lanes, lanes)


def token_row(name: str, given: bench.Given, lanes: int, wanted: float) -> Row:
    """One graph of all layers at the end of 8,192 tokens; head and embedding are not part of it."""
    blocks = given.config.layers
    kinds = [kind_of(given, block) for block in blocks]
    one_of = dict(zip(kinds, blocks, strict=True))
    steps = {kind: steps_of(given, block, lanes) for kind, block in one_of.items()}
    moved = sum(step_bytes(given, steps[kind][0], lanes) for kind in kinds)
    run = layers_call(kinds, steps)
    return Row(
        name, [Contender(OURS, lambda _number: Call(run))], moved,
        goals=[milliseconds(wanted), of_bytes(0.0)], sets=1, repeats=1,
        ceilings=[copy_arm(min(moved, COPIED))],
    )  # fmt: skip


def config_of(model: str) -> Any:
    return replace(V4_FLASH, num_hash_layers=0) if model == "V4-Flash" else V3_2


def given_of(model: str) -> bench.Given:
    """Return what the layers of a model share."""
    config = config_of(model)
    sizes = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    entry = bench.ENTRY if model == "V4-Flash" else bench.ENTRY_V32
    kernels = bench.Remembering(settings_here())
    return bench.Given(kernels, config, bench.every_expert(*sizes), RECIPE, entry)


def tokens() -> Iterator[LargeRow]:
    """A model's experts stay while its rows are measured."""
    for model, several in WANTED.items():
        given, layers = cache(partial(given_of, model)), len(config_of(model).layers)
        for lanes, wanted in zip(LANES, several, strict=True):
            name = f"{model}, {layers} layers, {lanes} token{'s' * (lanes > 1)}"
            yield LargeRow(name, partial(later, name, given, lanes, wanted))


def later(name: str, given: Callable[[], bench.Given], lanes: int, wanted: float) -> Row:
    products = FEW_ROWS if lanes <= MOST_ROWS else TILES
    return token_row(name, replace(given(), products=products), lanes, wanted)
