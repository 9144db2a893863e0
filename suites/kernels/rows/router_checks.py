"""Compare the router's kernel on a GPU with its stated arithmetic on tensors, bit for bit.

Scores and keys are those of router_problem; torch's stable sort chooses. Cases have the models'
counts, ties, NaN and infinite logits, groups, and tables with ids out of range. suites/kernels/rows
compares the choices of this definition with the references'.

Shape letters: T tokens, E experts, K chosen, G groups.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.rows import router_problem as facts
from degarble.kernels.rows.router_problem import RouterProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import kernel_named
from degarble.suites.kernels.row_checks import POISON, bits_differ

if TYPE_CHECKING:
    from torch import Tensor


SETTINGS = CompileSettings()
SPREADS = ("ordinary", "wide", "ties", "special", "equal")
V4_PRO: dict[str, Any] = {"experts": 384, "chosen": 6, "scale": 2.5}
V4_FLASH: dict[str, Any] = {"experts": 256, "chosen": 6, "scale": 1.5}
V32: dict[str, Any] = {
    "experts": 256,
    "chosen": 8,
    "scoring": "sigmoid",
    "scale": 2.5,
    "groups": 8,
    "groups_kept": 4,
}


class RoutedTokens(NamedTuple):
    """Results: experts, best first, and their weights."""

    experts: Tensor
    weights: Tensor


@dataclass(frozen=True)
class RouterCase:
    """One launch; everything follows from these facts."""

    problem: RouterProblem
    spread: str = "ordinary"
    seed: int = 0

    @property
    def name(self) -> str:
        """One line that finds the case again."""
        p = self.problem
        what = f"router {p.tokens}x{p.experts} top {p.chosen} {p.scoring}"
        where = f"{p.groups_kept}/{p.groups} groups, table {p.vocabulary}"
        return f"{what}, {where}, {self.spread} seed={self.seed}"

    @cached_property
    def logits(self) -> Tensor:
        """Draw float32 logits."""
        generator = torch.Generator().manual_seed(self.seed)
        logit_TE = torch.randn((self.problem.tokens, self.problem.experts), generator=generator)
        if self.spread == "wide":
            logit_TE *= 40.0
        if self.spread == "ties":
            logit_TE = (logit_TE * 2).round() / 2
        if self.spread == "equal":
            logit_TE = torch.zeros_like(logit_TE)
        if self.spread == "special":
            for number in (torch.inf, -torch.inf, torch.nan):
                logit_TE[torch.rand(logit_TE.shape, generator=generator) < 0.02] = number
        return logit_TE

    @cached_property
    def bias(self) -> Tensor:
        """Draw the float32 correction bias; coarse where ties are wanted."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        bias_E = torch.randn(self.problem.experts, generator=generator) * 0.1
        return bias_E * 0 if self.spread in {"ties", "equal"} else bias_E

    @cached_property
    def table(self) -> tuple[Tensor, Tensor]:
        """Draw token ids and a table of experts, some of both outside."""
        p, generator = self.problem, torch.Generator().manual_seed(self.seed + 2)
        kind = torch.int64 if p.ids == "int64" else torch.int32
        id_T = torch.randint(0, p.vocabulary, (p.tokens,), generator=generator)
        table_VK = torch.rand((p.vocabulary, p.experts), generator=generator).argsort(-1)
        table_VK = table_VK[:, : p.chosen].clone()
        if self.spread == "special":
            id_T[::7], id_T[3::7] = -1, p.vocabulary
            table_VK[::5, 0], table_VK[2::5, -1] = p.experts, -3
        return id_T.to(kind), table_VK.contiguous().to(kind)


def by_definition(case: RouterCase, device: str) -> tuple[Tensor, Tensor]:
    """Return experts and weights."""
    p, logit_TE = case.problem, case.logits.to(device)
    score_TE = facts.score_of(logit_TE, p.scoring, torch.sqrt)
    if p.vocabulary:
        id_T, table_VK = (part.to(device).long() for part in case.table)
        inside = (id_T >= 0) & (id_T < p.vocabulary)
        expert_TK = table_VK[torch.where(inside, id_T, 0)]
        named = inside[:, None] & (expert_TK >= 0) & (expert_TK < p.experts)
        expert_TK = torch.where(named, expert_TK, facts.NONE)
    else:
        expert_TK = chosen_by_definition(ops.add_rn(score_TE, case.bias.to(device)), p)
    chosen_TK = score_TE.gather(1, expert_TK.clamp(min=0))
    chosen_TK = torch.where(expert_TK < 0, 0.0, chosen_TK)
    weight_TK = chosen_TK
    if p.normalises:
        total = chosen_TK[:, 0]
        for place in range(1, p.chosen):
            total = ops.add_rn(total, chosen_TK[:, place])
        weight_TK = ops.divide_rn(chosen_TK, ops.add_rn(total, p.epsilon)[:, None])
    weight_TK = ops.multiply_rn(weight_TK, p.scale)
    return expert_TK.int(), torch.where(expert_TK < 0, 0.0, weight_TK)


def chosen_by_definition(biased_TE: Tensor, problem: RouterProblem) -> Tensor:
    """Return the chosen experts [T, K], best first, ties to the lower id."""
    key_TE = facts.key_of(biased_TE)
    if problem.groups > 1:
        shape = (biased_TE.shape[0], problem.groups, -1)
        order = key_TE.reshape(shape).sort(dim=-1, descending=True).indices
        two = biased_TE.reshape(shape).gather(2, order[..., :2])
        worth_TG = ops.add_rn(two[..., 0], two[..., 1]) if two.shape[-1] > 1 else two[..., 0]
        kept = _largest(facts.key_of(worth_TG), problem.groups_kept)
        is_open = torch.zeros_like(worth_TG, dtype=torch.bool).scatter_(1, kept, value=True)
        is_open = is_open.repeat_interleave(problem.experts_of_group, dim=1)
        key_TE = torch.where(is_open, key_TE, facts.LOWEST_KEY)
    return _largest(key_TE, problem.chosen)


def _largest(key_TE: Tensor, count: int) -> Tensor:
    return torch.sort(key_TE, dim=-1, descending=True, stable=True).indices[:, :count]


def on_device(case: RouterCase) -> RoutedTokens:
    """Run a case on the GPU, into poisoned memory; the result stays there."""
    kernel = kernel_named("simt_router")
    problem, given = case.problem, {"logits": case.logits.cuda()}
    if problem.vocabulary:
        ids, table = case.table
        given |= {"ids": ids.cuda(), "table": table.cuda()}
    else:
        given["bias"] = case.bias.cuda()
    out = kernel.allocate(problem, given["logits"].device)
    for tensor in out.values():
        tensor.view(torch.uint8).fill_(POISON)
    return RoutedTokens(**kernel.run(problem, SETTINGS, **given, **out))


def mismatch(case: RouterCase) -> str:
    """Say how a case differs from its definition on the GPU; empty where it does not."""
    got = on_device(case)
    experts, weights = by_definition(case, case.logits.cuda().device.type)
    found = (
        bits_differ(f"{case.name}, experts", got.experts, experts),
        bits_differ(f"{case.name}, weights", got.weights, weights),
    )
    return "; ".join(filter(None, found))


def cases() -> list[RouterCase]:
    """Return the named cases."""
    made = []
    for kind in SPREADS:
        for facts_of_model in (V4_PRO, V4_FLASH, V32):
            made.append(RouterCase(RouterProblem(333, **facts_of_model), kind, 1))
            by_table = dict(facts_of_model, groups=1, groups_kept=1, vocabulary=50)
            made.append(RouterCase(RouterProblem(57, **by_table, ids="int32"), kind, 2))
        made.append(RouterCase(RouterProblem(9, 512, 16, epsilon=1e-20, scale=1.5), kind, 3))
        made.append(RouterCase(RouterProblem(9, 5, 5, "sigmoid", normalises=False), kind, 4))
        made.append(RouterCase(RouterProblem(9, 32, 3, groups=32, groups_kept=7), kind, 5))
        made.append(RouterCase(RouterProblem(9, 480, 9, groups=3, groups_kept=1), kind, 6))
    made.append(RouterCase(RouterProblem(8192, **V4_PRO), "ordinary", 7))
    return made


def fuzzed(seed: int, count: int) -> list[RouterCase]:
    """Draw cases among few forms, so that few are compiled."""
    drawn = random.Random(seed)
    made = []
    for _ in range(count):
        tokens = drawn.choice((drawn.randint(1, 64), drawn.randint(1, 300)))
        kind = drawn.choice(SPREADS)
        which = drawn.randrange(4)
        if which == 0:
            problem = RouterProblem(tokens, drawn.randint(257, 384), 6, scale=2.5)
        elif which == 1:
            problem = RouterProblem(tokens, 8 * drawn.randint(17, 32), **_without_experts(V32))
        elif which == 2:
            problem = RouterProblem(
                tokens, drawn.randint(8, 512), 8, vocabulary=drawn.randint(1, 99)
            )
        else:
            problem = RouterProblem(tokens, drawn.randint(16, 128), 16, "sigmoid", scale=0.5)
        made.append(RouterCase(problem, kind, drawn.randrange(1 << 30)))
    return made


def _without_experts(of_model: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in of_model.items() if name != "experts"}
