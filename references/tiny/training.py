"""Prepare batches by step number in worker processes, and optimise with Muon and AdamW."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import Future, ProcessPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from degarble.references.tiny.language import Mixture, document

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn


# --------------------------------------------------------------------------------------------------
# Batches
#
# A batch is a function of its number alone, so a run that was interrupted trains on the same data
# as an uninterrupted one.

KINDS = ("other", "recall", "far recall", "sum", "copy")
_Example = tuple[np.ndarray, np.ndarray]


def example(seed: int, mixture: Mixture) -> tuple[list[int], list[int]]:
    """Return token ids [length] and the kind of each next token [length - 1]."""
    made = document(seed, mixture)
    kinds = [0] * (mixture.length - 1)
    for probe in made.probes:
        if 0 < probe.position < mixture.length:
            far = probe.kind == "recall" and probe.distance > 128
            kinds[probe.position - 1] = KINDS.index("far recall" if far else probe.kind)
    return made.ids[: mixture.length], kinds


def _examples(first: int, count: int, mixture: Mixture) -> _Example:
    made = [example(seed, mixture) for seed in range(first, first + count)]
    ids = np.array([ids for ids, _ in made], dtype=np.int16)
    return ids, np.array([kinds for _, kinds in made], dtype=np.uint8)


class Batches:
    """Batches by worker processes. Call it with consecutive step numbers."""

    def __init__(self, batch: int, mixture: Mixture, first: int, step: int, workers: int) -> None:
        self.batch, self.mixture, self.first = batch, mixture, first
        self.pool = ProcessPoolExecutor(workers)
        self.jobs: dict[int, Future[_Example]] = {}
        self.next = step
        for _ in range(4 * workers):
            self._submit()

    def _submit(self) -> None:
        first = self.first + self.next * self.batch
        self.jobs[self.next] = self.pool.submit(_examples, first, self.batch, self.mixture)
        self.next += 1

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Return ids [B, T + 1] and kinds [B, T]."""
        self._submit()
        ids, kinds = self.jobs.pop(step).result()
        return torch.from_numpy(ids).long(), torch.from_numpy(kinds).long()


# --------------------------------------------------------------------------------------------------
# Optimiser: Muon for hidden matrices, AdamW for the rest, in CUDA-graph-safe steps
#
# Muon replaces a matrix's momentum by the nearest matrix with equal singular values (five
# Newton-Schulz steps), scaled so that its entries are as large as AdamW's (0.2 in root mean
# square). Sources: Jordan et al. 2024 (the method and the coefficients), Liu et al. 2025 (the
# scale).

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_MOMENTUM = 0.95
_DECAY = 0.05
# Lookups and choices are not hidden matrices: their rows are used one by one.
_OTHERS = ("embed", "head", "gate", "_fn", "ape", "weights_proj", "tid2eid")


def orthogonal(x_NRC: Tensor) -> Tensor:
    """Return matrices with the same singular vectors and singular values near 1."""
    a, b, c = _COEFFICIENTS
    x: Tensor = x_NRC.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Optimiser:
    """Optimiser steps on gradients. `state` and `load` carry it from one process to the next."""

    def __init__(self, weights: nn.ParameterDict, *, muon: bool = True) -> None:
        trained = {name: p for name, p in weights.named_parameters() if p.requires_grad}
        device = next(iter(trained.values())).device
        self.rate = torch.zeros((), device=device)
        hidden = {n: p for n, p in trained.items() if muon and _is_hidden(n, p)}
        by_shape: dict[torch.Size, list[str]] = defaultdict(list)
        for name, parameter in hidden.items():
            by_shape[parameter.shape].append(name)
        self.trained, self.groups = trained, list(by_shape.values())
        self.momenta = [
            torch.zeros(len(names), *trained[names[0]].shape, device=device)
            for names in self.groups
        ]
        rest = [p for n, p in trained.items() if n not in hidden]
        self.adam = torch.optim.AdamW(
            [
                {"params": [p for p in rest if p.ndim >= 2], "weight_decay": _DECAY},
                {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=self.rate if device.type == "cuda" else 0.0,
            betas=(0.9, 0.95),
            fused=device.type == "cuda",
            capturable=device.type == "cuda",
        )

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next step."""
        self.rate.fill_(rate)
        if self.rate.device.type != "cuda":
            for group in self.adam.param_groups:
                group["lr"] = rate

    def clear(self) -> None:
        """Clear all gradients."""
        for parameter in self.trained.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights."""
        self.adam.step()
        for names, momentum in zip(self.groups, self.momenta, strict=True):
            parameters: list[Tensor] = [self.trained[name] for name in names]
            gradient = torch.stack([_gradient(p) for p in parameters])
            momentum.lerp_(gradient, 1.0 - _MOMENTUM)
            update = orthogonal(gradient.lerp(momentum, _MOMENTUM)).float()
            update *= self.rate * (0.2 * max(update.shape[1:]) ** 0.5)
            torch._foreach_mul_(parameters, 1.0 - _DECAY * self.rate)
            torch._foreach_sub_(parameters, list(update.unbind()))

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the moments by kind and name."""
        found: dict[str, dict[str, Tensor]] = {"exp_avg": dict(self._momenta()), "exp_avg_sq": {}}
        for name, parameter in self.trained.items():
            for kind, kept in found.items():
                if kind in self.adam.state.get(parameter, {}):
                    kept[name] = self.adam.state[parameter][kind]
        return found

    def _momenta(self) -> Iterator[tuple[str, Tensor]]:
        for names, momentum in zip(self.groups, self.momenta, strict=True):
            yield from zip(names, momentum, strict=True)

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        """Restore the moments."""
        momenta = dict(self._momenta())
        for name, value in state["exp_avg"].items():
            if name in momenta:
                momenta[name].copy_(value)
                continue
            p = self.trained[name]
            self.adam.state[p] = {
                "step": torch.tensor(float(step), device=p.device),
                "exp_avg": value.to(p.device, torch.float32),
                "exp_avg_sq": state["exp_avg_sq"][name].to(p.device, torch.float32),
            }


def _is_hidden(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and not name.endswith(_OTHERS)


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
