"""Train the small V4 model in resumable pieces, on one GPU.

    python -m degarble.references.tiny.train --out DIR [--resume DIR] --minutes 7 --steps 12000

Writes weights and optimiser state as safetensors into DIR; the same command with --resume goes on.
Prints the loss by kind of token every 100 steps. Data are a function of the step number, so a run
that was interrupted sees what an uninterrupted one sees.
"""

from __future__ import annotations

import argparse
import math
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from degarble.references import mixing
from degarble.references.tiny.configs import TINY_V4
from degarble.references.tiny.language import Mixture, document
from degarble.references.tiny.trainable import Ablation, TrainableV4
from degarble.references.tiny.words import PAD

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("other", "recall", "far recall", "sum", "copy")
_WEIGHTS = torch.tensor([1.0, 4.0, 4.0, 3.0, 1.0])


def example(seed: int, length: int) -> tuple[list[int], list[int]]:
    """Token ids [length + 1] and each target's kind [length]."""
    made = document(seed, Mixture(length=length + 1))
    kinds = [0] * length
    for probe in made.probes:
        if 0 < probe.position <= length:
            far = probe.kind == "recall" and probe.distance > 128
            kinds[probe.position - 1] = KINDS.index("far recall" if far else probe.kind)
    return made.ids[: length + 1], kinds


def _examples(first: int, count: int, length: int) -> list[tuple[list[int], list[int]]]:
    return [example(seed, length) for seed in range(first, first + count)]


class Batches:
    """Batches by step number, made ahead by worker processes."""

    def __init__(self, batch: int, length: int, step: int, workers: int, first: int) -> None:
        self.batch, self.length, self.first = batch, length, first
        self.pool = ProcessPoolExecutor(workers)
        self.ahead = 4 * workers
        self.jobs: dict[int, Future[list[tuple[list[int], list[int]]]]] = {}
        self.next = step
        for _ in range(self.ahead):
            self._submit()

    def _submit(self) -> None:
        first = self.first + self.next * self.batch
        self.jobs[self.next] = self.pool.submit(_examples, first, self.batch, self.length)
        self.next += 1

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Ids [B, T + 1] and kinds [B, T]."""
        self._submit()
        made = self.jobs.pop(step).result()
        return torch.tensor([ids for ids, _ in made]), torch.tensor([kinds for _, kinds in made])


def rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 200 steps, then a cosine down to a fiftieth."""
    if step < 200:
        return peak * (step + 1) / 200
    done = (step - 200) / max(1, steps - 200)
    return peak * (0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done))))


def losses(model: TrainableV4, ids: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted loss, indexers' loss, and the mean loss of each kind."""
    logits, extra = model(ids[:, :-1])
    targets = ids[:, 1:]
    each = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    kind = kinds.flatten()
    weight = _WEIGHTS.to(each.device)[kind] * (targets.flatten() != PAD)
    total = (each * weight).sum() / weight.sum()
    by_kind = torch.zeros(len(KINDS), device=each.device).index_add(0, kind, each.detach())
    count = torch.bincount(kind, minlength=len(KINDS)).clamp(min=1)
    return total, extra, by_kind / count


def balance(model: TrainableV4, step_size: float) -> None:
    """Move the correction biases toward an even load."""
    with torch.no_grad():
        for prefix, load in model.loads.items():
            mean = load.float().mean()
            model[f"{prefix}.ffn.gate.bias"].add_(step_size * torch.sign(mean - load.float()))


def save(out: Path, model: TrainableV4, optimiser: torch.optim.AdamW, step: int) -> None:
    """Weights in float32 and both moments in BF16, as separate files of bounded size."""
    out.mkdir(parents=True, exist_ok=True)
    named = dict(model.weights.named_parameters())
    half = sorted(named)[: len(named) // 2]
    parts: dict[str, dict[str, Tensor]] = {}
    for name, value in named.items():
        part = parts.setdefault("weights_0" if name in half else "weights_1", {})
        part[name] = value.detach().cpu().contiguous()
        for moment in ("exp_avg", "exp_avg_sq"):
            if moment in optimiser.state.get(value, {}):
                kept = optimiser.state[value][moment]
                parts.setdefault(moment, {})[name] = kept.to(torch.bfloat16).cpu().contiguous()
    for stem, tensors in parts.items():
        save_file(tensors, out / f"{stem}.safetensors", metadata={"step": str(step)})
    (out / "step.txt").write_text(str(step))


def resume(source: Path, model: TrainableV4, optimiser: torch.optim.AdamW) -> int:
    """Put weights and moments back; returns the next step."""
    step = int((source / "step.txt").read_text())
    named = dict(model.weights.named_parameters())
    with torch.no_grad():
        for part in ("weights_0", "weights_1"):
            for name, value in load_file(source / f"{part}.safetensors").items():
                named[name].copy_(value)
    moments = {m: load_file(source / f"{m}.safetensors") for m in ("exp_avg", "exp_avg_sq")}
    for name, value in named.items():
        if name in moments["exp_avg"]:
            optimiser.state[value] = {
                "step": torch.tensor(float(step), device=value.device),
                **{m: kept[name].to(value.device, torch.float32) for m, kept in moments.items()},
            }
    return step


def compile_parts() -> None:
    """Fuse what is bound by memory traffic; about a minute once."""
    torch._dynamo.config.recompile_limit = 64  # noqa: SLF001  each block is a case of its own
    mixing.mixing_pre = torch.compile(mixing.mixing_pre)
    mixing.mixing_post = torch.compile(mixing.mixing_post)
    for part in ("_attention", "_ffn"):
        setattr(TrainableV4, part, torch.compile(getattr(TrainableV4, part), dynamic=False))


@dataclass(frozen=True)
class Plan:
    """What the command line asks for."""

    out: Path
    resume: Path | None
    minutes: float
    steps: int
    batch: int
    length: int
    peak: float
    workers: int
    seed: int
    first: int
    dense_share: float
    compile: bool
    restart: bool


def plan_from(arguments: list[str] | None = None) -> Plan:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1280)
    parser.add_argument("--peak", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=1_000_000, help="first document seed")
    parser.add_argument("--dense-share", type=float, default=0.35)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--restart", action="store_true", help="a new schedule on old weights")
    return Plan(**vars(parser.parse_args(arguments)))


def optimiser_of(model: TrainableV4, peak: float) -> torch.optim.AdamW:
    """AdamW; vectors and scalars do not decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.05},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=trained[0].is_cuda)


def update(model: TrainableV4, optimiser: torch.optim.AdamW, ids: Tensor, kinds: Tensor) -> Tensor:
    """One step; returns the loss, the indexers' loss and each kind's loss. Refuses NaN."""
    total, extra, by_kind = losses(model, ids, kinds)
    optimiser.zero_grad(set_to_none=True)
    (total + 0.3 * extra).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    balance(model, 1e-3)
    return torch.cat((torch.stack((total, extra, norm)).detach(), by_kind))


def report(step: int, spent: float, shown: list[float]) -> None:
    """Print one line; stop when a number is no number."""
    if not math.isfinite(sum(shown)):
        raise SystemExit(f"step {step}: loss or gradient is not finite: {shown}")
    names = ("loss", "index", "gradient", *KINDS)
    text = " ".join(f"{name} {value:.3f}" for name, value in zip(names, shown, strict=True))
    print(f"{step} {spent:.0f}s {text}", flush=True)  # noqa: T201  this is a command


def train(plan: Plan) -> int:
    """Train until the steps or the minutes are over; returns the next step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = TrainableV4(TINY_V4, plan.seed).to(device)
    if plan.compile:
        compile_parts()
    optimiser = optimiser_of(model, plan.peak)
    step = resume(plan.resume, model, optimiser) if plan.resume else 0
    step = 0 if plan.restart else step
    batches = Batches(plan.batch, plan.length, step, plan.workers, plan.first)
    begin, shown = time.monotonic(), None
    while step < plan.steps and time.monotonic() - begin < plan.minutes * 60:
        model.ablation = Ablation(dense_entries=step < plan.dense_share * plan.steps)
        for group in optimiser.param_groups:
            group["lr"] = rate(step, plan.steps, plan.peak)
        ids, kinds = (t.to(device) for t in batches(step))
        seen = update(model, optimiser, ids, kinds)
        shown = seen if shown is None else 0.98 * shown + 0.02 * seen
        step += 1
        if step % 100 == 0:
            report(step, time.monotonic() - begin, shown.tolist())
    batches.pool.shutdown(cancel_futures=True)
    save(plan.out, model, optimiser, step)
    return step


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    print(f"stopped at step {train(plan_from())}")  # noqa: T201  this is a command
