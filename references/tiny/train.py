"""Train a small model in resumable pieces, on one GPU.

    python -m degarble.references.tiny.train --model v4 --out DIR [--resume DIR] --minutes 7

Writes weights and optimiser state as safetensors into DIR; the same command with --resume goes on.
Prints the loss by kind of token every 200 steps. Data are a function of the step number, so a run
that was interrupted sees what an uninterrupted one sees, and takes the very steps that one takes.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from degarble.references import mixing
from degarble.references.tiny import trainable
from degarble.references.tiny.configs import TINY_V4, TINY_V32
from degarble.references.tiny.language import PAD, Mixture
from degarble.references.tiny.trainable import Ablation, TrainableV4, TrainableV32
from degarble.references.tiny.training import KINDS, Batches, Optimiser

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.references.tiny.trainable import Trainable

_WEIGHTS = (1.0, 4.0, 4.0, 3.0, 1.0)  # of each kind in the loss
_EAGER = 8  # steps before a graph is captured; they compile what is compiled


def model_named(name: str, seed: int) -> Trainable:
    """Return the small model of that name, with initial weights."""
    return TrainableV4(TINY_V4, seed) if name == "v4" else TrainableV32(TINY_V32, seed)


def rate(step: int, steps: int, peak: float) -> float:
    """Return the learning rate: warm-up over 200 steps, flat to 0.6, then linear to a hundredth."""
    if step < 200:
        return peak * (step + 1) / 200
    left = (steps - step) / max(1.0, 0.4 * steps)
    return peak * max(0.01, min(1.0, left))


class Trainer:
    """Trains one step on one batch, captured as a graph where there is a GPU."""

    def __init__(self, model: Trainable, optimiser: Optimiser, *, graphs: bool) -> None:
        self.model, self.optimiser, self.graphs = model, optimiser, graphs
        self.weights = torch.tensor(_WEIGHTS, device=optimiser.rate.device)
        self.number = torch.arange(len(KINDS), device=optimiser.rate.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Tensor, Tensor] | None = None
        self.outcome = torch.zeros(3 + len(KINDS), device=optimiser.rate.device)
        self.calls = 0

    def switch(self, ablation: Ablation) -> None:
        """Train with or without an ablation; the captured graph is dropped."""
        if ablation != self.model.ablation:
            self.model.ablation, self.graph, self.calls = ablation, None, 0

    def __call__(self, ids: Tensor, kinds: Tensor) -> Tensor:
        """Return the loss, the indexers' loss, the gradient norm, and each kind's loss."""
        if self.inputs is None:
            device = self.outcome.device
            self.inputs = (
                torch.empty_like(ids, device=device),
                torch.empty_like(kinds, device=device),
            )
        for kept, given in zip(self.inputs, (ids, kinds), strict=True):
            kept.copy_(given)
        self.calls += 1
        if not self.graphs or self.calls < _EAGER:
            self._step()
            return self.outcome
        if self.graph is None:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._step()
        self.graph.replay()
        return self.outcome

    def _step(self) -> None:
        assert self.inputs is not None, "set by the call"
        total, extra, by_kind = self.losses(*self.inputs)
        self.optimiser.clear()
        (total + 0.3 * extra).backward()
        trained = self.optimiser.trained.values()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        self.optimiser.step()
        balance(self.model, 1e-3)
        self.outcome.copy_(torch.cat((torch.stack((total, extra, norm)).detach(), by_kind)))

    def losses(self, ids: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weighted loss, the indexers' loss, and the mean loss of each kind."""
        logits, extra = self.model(ids[:, :-1])
        targets, kind = ids[:, 1:].flatten(), kinds.flatten()
        each = functional.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
        weight = self.weights[kind] * (targets != PAD)
        total = (each * weight).sum() / weight.sum()
        belongs = (kind[:, None] == self.number).float()
        by_kind = (each.detach()[:, None] * belongs).sum(0) / belongs.sum(0).clamp(min=1)
        return total, extra, by_kind


@torch.no_grad()
def balance(model: Trainable, step_size: float) -> None:
    """Move the correction biases toward an even load."""
    for prefix, load in model.loads.items():
        mean = load.float().mean()
        model[f"{prefix}.ffn.gate.bias"].add_(step_size * torch.sign(mean - load.float()))


def save(out: Path, model: Trainable, optimiser: Optimiser, step: int) -> None:
    """Write weights and moments in float32, as separate files of bounded size."""
    out.mkdir(parents=True, exist_ok=True)
    names = sorted(name for name, _ in model.weights.named_parameters())
    parts: dict[str, dict[str, Tensor]] = {
        "weights_0": {n: model.weights[n].detach() for n in names[: len(names) // 2]},
        "weights_1": {n: model.weights[n].detach() for n in names[len(names) // 2 :]},
    }
    for kind, kept in optimiser.state().items():
        parts[kind] = dict(kept)
    for stem, tensors in parts.items():
        held = {name: value.cpu().contiguous() for name, value in tensors.items()}
        save_file(held, out / f"{stem}.safetensors", metadata={"step": str(step)})
    (out / "step.txt").write_text(str(step))


def resume(source: Path, model: Trainable, optimiser: Optimiser) -> int:
    """Load weights and moments; return the next step."""
    step = int((source / "step.txt").read_text())
    with torch.no_grad():
        for part in ("weights_0", "weights_1"):
            for name, value in load_file(source / f"{part}.safetensors").items():
                model.weights[name].copy_(value)
    state = {kind: load_file(source / f"{kind}.safetensors") for kind in optimiser.state()}
    optimiser.load(state, step)
    return step


def compile_parts() -> None:
    """Compile what memory traffic bounds; takes about a minute once."""
    torch._dynamo.config.recompile_limit = 64  # noqa: SLF001  each block is a case of its own
    mixing.mixing_post = torch.compile(mixing.mixing_post)
    trainable.mixing_pre = torch.compile(trainable.mixing_pre)
    for model in (TrainableV4, TrainableV32):
        for part in ("_attention", "_ffn"):
            setattr(model, part, torch.compile(getattr(model, part), dynamic=False))


@dataclass(frozen=True)
class TrainingPlan:
    """The options of the command line."""

    model: str
    out: Path
    resume: Path | None
    minutes: float
    steps: int
    batch: int
    length: int
    facts: int
    single: float
    peak: float
    workers: int
    seed: int
    first: int
    dense_share: float
    adam: bool
    compile: bool
    graphs: bool
    restart: bool


def plan_from(arguments: list[str] | None = None) -> TrainingPlan:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("v4", "v32"), default="v4")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1280)
    parser.add_argument("--facts", type=int, default=16)
    parser.add_argument("--single", type=float, default=0.0, help="documents of one relation")
    parser.add_argument("--peak", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=1_000_000, help="first document seed")
    parser.add_argument("--dense-share", type=float, default=0.35)
    parser.add_argument("--adam", action="store_true", help="AdamW for all, without Muon")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--graphs", action="store_true", help="capture steps as CUDA graphs")
    parser.add_argument("--restart", action="store_true", help="a new schedule on old weights")
    return TrainingPlan(**vars(parser.parse_args(arguments)))


def report(step: int, spent: float, shown: list[float]) -> None:
    """Print one line; stop when a loss is not finite."""
    if not math.isfinite(sum(shown)):
        raise SystemExit(f"step {step}: loss or gradient is not finite: {shown}")
    names = ("loss", "index", "gradient", *KINDS)
    text = " ".join(f"{name} {value:.3f}" for name, value in zip(names, shown, strict=True))
    print(f"{step} {spent:.0f}s {text}", flush=True)  # noqa: T201  this is a command


def train(plan: TrainingPlan) -> int:
    """Train until the steps or the minutes are over; return the next step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model_named(plan.model, plan.seed).to(device)
    if plan.compile:
        compile_parts()
    optimiser = Optimiser(model.weights, muon=not plan.adam)
    step = resume(plan.resume, model, optimiser) if plan.resume else 0
    step = 0 if plan.restart else step
    mixture = Mixture(length=plan.length + 1, facts=plan.facts, single=plan.single)
    batches = Batches(plan.batch, mixture, plan.first, step, plan.workers)
    trainer = Trainer(model, optimiser, graphs=plan.graphs and device.type == "cuda")
    begin, shown = time.monotonic(), None
    while step < plan.steps and time.monotonic() - begin < plan.minutes * 60:
        trainer.switch(Ablation(dense_entries=step < plan.dense_share * plan.steps))
        optimiser.set_rate(rate(step, plan.steps, plan.peak))
        seen = trainer(*batches(step)).clone()
        shown = seen if shown is None else 0.98 * shown + 0.02 * seen
        step += 1
        if step % 200 == 0:
            report(step, time.monotonic() - begin, shown.tolist())
    batches.pool.shutdown(cancel_futures=True)
    save(plan.out, model, optimiser, step)
    return step


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    print(f"stopped at step {train(plan_from())}")  # noqa: T201  this is a command
