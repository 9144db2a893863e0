"""Run NVFP4 routed experts by the grouped MoE kernels, one component per step of a single call.

Trap: components arrive one by one, but a layer shares one workspace. The order of rows is made
once. A step's result is read back slot by slot; if the next component receives exactly those bits,
the next step continues in the workspace, so that kernels run as they are shipped. Any other input
is first copied into the workspace. FC1 has SwiGLU and requantisation in its epilogue and never
stores gate and up: a variant of FC1 that does store them computes the first component, and SwiGLU's
component launches the shipped FC1. Only visited experts' matrices are stacked, with a map from
expert number to index, as on a rank with some of the experts.

Shape letters: T tokens, K slots a token, S slots, E experts visited, G experts, R rows, M rows of a
scale matrix, D hidden, F width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.cutedsl import moe as steps
from degarble.harness.backends.cutedsl.linears import input_scale, nvfp4, rows_in
from degarble.harness.backends.cutedsl.moe import Step
from degarble.harness.backends.cutedsl.parts import own
from degarble.harness.base.errors import InvalidArgument
from degarble.harness.formats.layouts import SWIZZLE_128X4
from degarble.kernels.moe.problem import NONE, MoeProblem

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.backends.cutedsl.linears import Rows
    from degarble.harness.backends.cutedsl.parts import Compute, Outputs, Part, Work

Names = list[list[str]]  # of every expert's matrices
_BLOCK = 16


@dataclass
class Chain:
    """One layer's call: its problem, its workspace, and the last results that steps returned."""

    layer: str
    problem: MoeProblem
    experts: Tensor
    visited: list[int]
    local: Tensor
    space: dict[str, Tensor]
    shown: dict[str, Tensor] = field(default_factory=dict)
    w13: dict[str, Tensor] = field(default_factory=dict)

    @property
    def place(self) -> Tensor:
        """Return the row of each slot, clamped to the workspace whatever a kernel wrote."""
        last = self.space["slots"].numel() - 1
        return self.space["places"][: self.problem.slots].long().clamp(min=NONE, max=last)

    def of_slots(self, rows: Tensor) -> Tensor:
        """Gather rows [R, .] by slot [T, K, .]; zeros for slots without an expert here."""
        place_S = self.place
        made = rows[place_S.clamp(min=0)]
        made[place_S < 0] = 0
        return made.reshape(*self.experts.shape, rows.shape[-1])

    def codes_of_slots(self, name: str) -> tuple[Tensor, Tensor]:
        """Gather codes and scales of the workspace by slot."""
        codes, place_S = self.space[f"{name}_codes"], self.place
        # Columns are bytes: two codes each, 16 codes a block, so blocks = columns / 8.
        scales = self.space[f"{name}_scales"][_offsets(place_S.clamp(min=0), codes.shape[1] // 8)]
        scales[place_S < 0] = 0
        return self.of_slots(codes), scales.reshape(*self.experts.shape, scales.shape[-1])

    def lay(self, name: str, codes: Tensor, scales: Tensor) -> None:
        """Copy codes and scales of slots to where the next step reads them; zero all other rows."""
        self.show(name, codes, scales)
        place_S = self.place
        here = place_S >= 0
        for part in ("codes", "scales"):
            self.space[f"{name}_{part}"].zero_()
        self.space[f"{name}_codes"][place_S[here]] = codes.flatten(0, 1)[here]
        offsets = _offsets(place_S[here], scales.shape[-1])
        self.space[f"{name}_scales"][offsets] = scales.flatten(0, 1)[here]

    def show(self, name: str, codes: Tensor, scales: Tensor) -> None:
        """Record what the workspace contains; new inputs invalidate a recorded gate and up."""
        if name == "x":
            self.shown.pop("both", None)
        self.shown |= {f"{name}_codes": codes, f"{name}_scales": scales}

    def run(self, work: Work, step: str, **tensors: Tensor) -> tuple[Tensor, ...]:
        """Launch a step."""
        kernel = steps.ROWS if step in steps.AROUND else steps.KERNELS
        return work.run(kernel, Step(step, self.problem), **self.space, **tensors)

    def was_shown(self, name: str, given: Tensor) -> bool:
        """Return whether the previous step returned exactly these bits."""
        shown = self.shown.get(name)
        return shown is not None and same(shown, given)


def _offsets(row_M: Tensor, blocks: int) -> Tensor:
    """Return where the scales of rows [M, K / 16] are in 128x4 order."""
    block = torch.arange(blocks, device=row_M.device)
    made: Tensor = SWIZZLE_128X4.offset_of(row_M[:, None], block, None, blocks)
    return made


def same(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors have equal bits."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(*(own(each).view(torch.uint8) for each in (left, right)))


def chain_of(work: Work, part: Part) -> Chain:
    """Return the current call, or begin a new one for another layer or other chosen experts."""
    block, expert_TK = part.component.block, work.inputs["experts"]
    assert block is not None, "only blocks have experts"
    known: Any = work.kernels.chain
    is_ours = isinstance(known, Chain) and known.layer == block.prefix
    if is_ours and same(known.experts, expert_TK):
        return known  # type: ignore[no-any-return]
    c, device = part.config, work.kernels.device
    # At least one: no matrices cannot be stacked.
    visited = [int(each) for each in expert_TK.unique().tolist() if each >= 0] or [0]
    problem = _problem(part, expert_TK.shape[0], len(visited))
    local_G = torch.full((c.n_routed_experts,), NONE, dtype=torch.int32)
    local_G[visited] = torch.arange(len(visited), dtype=torch.int32)
    space = steps.empty_space(problem, device)
    made = Chain(block.prefix, problem, expert_TK, visited, local_G.to(device), space)
    made.run(work, steps.ORDER, experts=own(expert_TK.to(torch.int32)), local=made.local)
    work.kernels.chain = made
    return made


def _problem(part: Part, tokens: int, experts: int) -> MoeProblem:
    c = part.config
    return MoeProblem(
        tokens, c.hidden_size, c.moe_intermediate_size, experts, c.num_experts_per_tok,
        c.n_routed_experts, part.facts.limit,
    )  # fmt: skip


def _by_expert(work: Work, chain: Chain, names: Names) -> Tensor:
    """Return the decode scale of each visited expert's input activations [E]."""
    return torch.cat([input_scale(work, names[expert]) for expert in chain.visited])


def _of_slots(chain: Chain, scale_E: Tensor) -> Tensor:
    """Expand scales of experts to slots [T, K]; 1 where a slot has none."""
    here_TK = chain.local.long()[chain.experts.clamp(min=0)]
    return torch.where(chain.experts < 0, 1.0, scale_E[here_TK])


def _stack(work: Work, chain: Chain, names: Names, rows: Rows) -> dict[str, Tensor]:
    """Stack the visited experts' matrices, with the activation scale of each expert."""
    parts = [
        [work.weights.made(name, "nvfp4 in 128x4", partial(nvfp4, work)) for name in names[expert]]
        for expert in chain.visited
    ]
    both = len(names[0]) > 1

    def stacked(index: int) -> Tensor:
        made = torch.stack([torch.stack([matrix[index] for matrix in each]) for each in parts])
        return own(made if both else made[:, 0])

    decode = stacked(2).squeeze(-1)
    scale_E = _scales_in_front(chain, names[0][0], rows)
    return {
        "codes": stacked(0),
        "scales": stacked(1),
        "decode": own(decode),
        "input_scale": scale_E,
    }


def _scales_in_front(chain: Chain, name: str, rows: Rows) -> Tensor:
    """Return the tensor scale of each expert's rows [E]; raise if an expert's rows differ."""
    scale = rows.tensor_scale
    assert scale is not None, "NVFP4 activations have a tensor scale"
    scale_TK = scale.float().expand(chain.experts.shape)
    here, there = chain.experts >= 0, chain.local.long()[chain.experts.clamp(min=0)]
    # Any row of an expert may win this assignment, hence the check below.
    made = torch.ones(len(chain.visited), dtype=torch.float32, device=scale.device)
    made[there[here]] = scale_TK[here]
    if bool((made[there[here]] != scale_TK[here]).any()):
        raise InvalidArgument(
            f"tensor scales in front of {name}", "rows of one expert with scales of their own",
            "one input scale for all rows of an expert",
            "Quantise with --calibration, so that the checkpoint has input scales.",
        )  # fmt: skip
    return made


def _rows(chain: Chain, work: Work, name: str) -> Rows:
    """Return the rows by slot, copied into the workspace unless they are there already."""
    rows = rows_in(work)
    codes, scales = rows.codes, rows.block_scale
    assert codes is not None, "NVFP4 activations are codes"
    assert scales is not None, "and their block scales"
    if codes.ndim == 2:  # a token's, for all of its slots
        shape = (*chain.experts.shape, -1)
        codes, scales = (each[:, None].expand(shape) for each in (codes, scales))
    if not (chain.was_shown(f"{name}_codes", codes) and chain.was_shown(f"{name}_scales", scales)):
        chain.lay(name, codes, scales)
    return rows


def _shown_codes(chain: Chain, name: str, scale_E: Tensor) -> Outputs:
    codes, scales = chain.codes_of_slots(name)
    chain.show(name, codes, scales)
    scale_TK = _of_slots(chain, scale_E)
    return {"codes": codes, "block_scale": scales, "tensor_scale": scale_TK}


def gather(part: Part, names: Names) -> Compute:
    """Quantise every slot's input to NVFP4 with its expert's own scale."""
    _problem(part, 1, 1)

    def compute(work: Work) -> Outputs:
        chain = chain_of(work, part)
        scale_E = _by_expert(work, chain, names)
        chain.run(work, steps.GATHER, x=work.bf16(), input_scale=scale_E)
        return _shown_codes(chain, "x", scale_E)

    return compute


def first(part: Part, names: Names) -> Compute:
    """Compute gate and up of every slot, by the variant of FC1 that stores them."""
    _problem(part, 1, 1)

    def compute(work: Work) -> Outputs:
        chain = chain_of(work, part)
        chain.w13 = _stack(work, chain, names, _rows(chain, work, "x"))
        unused = torch.ones(len(chain.visited), dtype=torch.float32, device=work.kernels.device)
        (both,) = chain.run(
            work, steps.SHOWN, **chain.w13, hidden_scale=unused, weights=_no_weights(chain)
        )
        chain.shown["both"] = chain.of_slots(both)
        return {"out": chain.shown["both"]}

    return compute


def _no_weights(chain: Chain) -> Tensor:
    """Return routing weights for a variant that reads none."""
    return torch.zeros(chain.experts.shape, dtype=torch.float32, device=chain.experts.device)


def act(part: Part, names: Names, alone: Compute) -> Compute:
    """Apply SwiGLU and requantise: the shipped FC1, or `alone` on inputs not from FC1."""

    def compute(work: Work) -> Outputs:
        chain, x = work.kernels.chain, work.inputs["x"]
        known = isinstance(chain, Chain) and chain.was_shown("both", x)
        if not known or chain_of(work, part) is not chain or not chain.w13:
            return alone(work)
        scale_E = _by_expert(work, chain, names)
        chain.run(work, steps.FIRST, **chain.w13, hidden_scale=scale_E, weights=_no_weights(chain))
        chain.w13 = {}
        return _shown_codes(chain, "hidden", scale_E)

    return compute


def second(part: Part, names: Names) -> Compute:
    """Compute the down projection of every slot."""
    _problem(part, 1, 1)

    def compute(work: Work) -> Outputs:
        chain = chain_of(work, part)
        stack = _stack(work, chain, names, _rows(chain, work, "hidden"))
        (out,) = chain.run(work, steps.SECOND, **stack)
        chain.shown["out"] = chain.of_slots(out)
        return {"out": chain.shown["out"]}

    return compute


def rows_to_sum(work: Work, x_TKD: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and the row of each slot: FC2's workspace if `x_TKD` is exactly its result."""
    chain: Any = work.kernels.chain
    if isinstance(chain, Chain) and chain.was_shown("out", x_TKD):
        return chain.space["out"], own(chain.space["places"][: chain.problem.slots])
    slots = torch.arange(x_TKD.shape[0] * x_TKD.shape[1], dtype=torch.int32, device=x_TKD.device)
    return own(x_TKD.flatten(0, 1)), slots
