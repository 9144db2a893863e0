"""Router and experts of a model by our kernels: expert by expert, or grouped in one launch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.backends.cutedsl.kernels import (
    FC1,
    FC2,
    GATHER,
    ORDER,
    SUM,
    NoKernelError,
    own,
)
from degarble.harness.backends.cutedsl.linears import (
    LinearRows,
    act_quant,
    input_scale,
    kernel_of_weight,
    nvfp4,
    product,
    rows_in,
)
from degarble.harness.base.errors import InvalidArgument
from degarble.harness.formats.layouts import LINEAR, SWIZZLE_128X4
from degarble.kernels.moe.problem import (
    NONE,
    PLANNED,
    CombineProblem,
    MoeProblem,
    RowsProblem,
    rows_of_call,
    scale_bytes,
)
from degarble.kernels.primitives.quantise_problem import QuantiseProblem
from degarble.kernels.rows.router_problem import RouterProblem
from degarble.kernels.runtime.targets import SM90A

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from degarble.harness.backends.cutedsl.kernels import (
        ComponentCallWork,
        ComponentPart,
        Compute,
        Outputs,
    )


# --------------------------------------------------------------------------------------------------
# Run NVFP4 routed experts by the grouped MoE kernels, one component per step of a single call.
#
# Trap: components arrive one by one, but a layer shares one workspace. The order of rows is made
# once. A step's result is read back slot by slot; if the next component receives exactly those
# bits, the next step continues in the workspace, so that kernels run as they are shipped. Any other
# input is first copied into the workspace. FC1 has SwiGLU and requantisation in its epilogue and
# never stores gate and up: a variant of FC1 that does store them computes the first component, and
# SwiGLU's component launches the shipped FC1. Only visited experts' matrices are stacked, with a
# map from expert number to index, as on a rank with some of the experts.
#
# Shape letters: T tokens, K slots a token, S slots, E experts visited, G experts, R rows, M rows of
# a scale matrix, D hidden, F width.

Names = list[list[str]]  # of every expert's matrices
_BLOCK = 16


@dataclass
class Chain:
    """One layer's call: its problem, its workspace, and the last results that steps returned."""

    layer: str
    rows: RowsProblem
    experts: Tensor
    visited: list[int]
    local: Tensor
    plan: dict[str, Tensor]
    space: dict[str, Tensor] = field(default_factory=dict)
    shown: dict[str, Tensor] = field(default_factory=dict)
    w13: dict[str, Tensor] = field(default_factory=dict)

    @property
    def place(self) -> Tensor:
        """Return the row of each slot, clamped to the workspace whatever a kernel wrote."""
        return self.plan["places"].long().clamp(min=NONE, max=self.rows.rows - 1)

    @property
    def order(self) -> dict[str, Tensor]:
        """Return the operands of a kernel that walks the rows."""
        return {name: self.plan[name] for name in ("rows", "tiles", "slots")}

    def side(self, name: str) -> dict[str, Tensor]:
        """Return the operands of a product that are activations."""
        return {part: self.space[part] for part in (f"{name}_codes", f"{name}_scales")}

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

    def place_rows(self, name: str, codes: Tensor, scales: Tensor) -> None:
        """Copy codes and scales of slots to where the next step reads them; zero all other rows."""
        self.record(name, codes, scales)
        place_S, most, columns = self.place, self.rows.rows, codes.shape[-1]
        here = place_S >= 0
        self.space[f"{name}_codes"] = place_S.new_zeros(most, columns, dtype=torch.uint8)
        size = scale_bytes(most, 2 * columns)
        self.space[f"{name}_scales"] = place_S.new_zeros(size, dtype=torch.uint8)
        self.space[f"{name}_codes"][place_S[here]] = codes.flatten(0, 1)[here]
        offsets = _offsets(place_S[here], scales.shape[-1])
        self.space[f"{name}_scales"][offsets] = scales.flatten(0, 1)[here]

    def record(self, name: str, codes: Tensor, scales: Tensor) -> None:
        """Record what the workspace contains; new inputs invalidate a recorded gate and up."""
        if name == "x":
            self.shown.pop("both", None)
        self.shown |= {f"{name}_codes": codes, f"{name}_scales": scales}

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
    return torch.equal(*(own(tensor).view(torch.uint8) for tensor in (left, right)))


def chain_of(work: ComponentCallWork, part: ComponentPart) -> Chain:
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
    rows, here = rows_of_call(problem, SM90A.name, mapped=True), local_G.to(device)
    plan = work.run(ORDER, rows, experts=own(expert_TK.to(torch.int32)), local=here)
    by_name = dict(zip(PLANNED, plan, strict=True))
    by_name["places"] = own(by_name["places"][: problem.slots])
    chain = Chain(block.prefix, rows, expert_TK, visited, here, by_name)
    work.kernels.chain = chain
    return chain


def _problem(part: ComponentPart, tokens: int, experts: int) -> MoeProblem:
    c = part.config
    return MoeProblem(
        tokens, c.hidden_size, c.moe_intermediate_size, experts, c.num_experts_per_tok,
        c.n_routed_experts, part.facts.limit,
    )  # fmt: skip


def _by_expert(work: ComponentCallWork, chain: Chain, names: Names) -> Tensor:
    """Return the decode scale of each visited expert's input activations [E]."""
    return torch.cat([input_scale(work, names[expert]) for expert in chain.visited])


def _of_slots(chain: Chain, scale_E: Tensor) -> Tensor:
    """Expand scales of experts to slots [T, K]; 1 where a slot has none."""
    here_TK = chain.local.long()[chain.experts.clamp(min=0)]
    return torch.where(chain.experts < 0, 1.0, scale_E[here_TK])


def _stack(
    work: ComponentCallWork, chain: Chain, names: Names, rows: LinearRows
) -> dict[str, Tensor]:
    """Stack the visited experts' matrices, with the activation scale of each expert."""
    parts = [
        [
            work.weights.derived(name, "nvfp4 in 128x4", partial(nvfp4, work))
            for name in names[expert]
        ]
        for expert in chain.visited
    ]
    both = len(names[0]) > 1

    def stacked(index: int) -> Tensor:
        made = torch.stack([torch.stack([matrix[index] for matrix in part]) for part in parts])
        return own(made if both else made[:, 0])

    product = "w13" if both else "w2"
    return {
        f"{product}_codes": stacked(0),
        f"{product}_scales": stacked(1),
        f"{product}_decode_scale": own(stacked(2).squeeze(-1)),
        f"{product}_input_scale": _scales_in_front(chain, names[0][0], rows),
    }


def _scales_in_front(chain: Chain, name: str, rows: LinearRows) -> Tensor:
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


def _step_rows(chain: Chain, work: ComponentCallWork, name: str) -> LinearRows:
    """Return the rows by slot, copied into the workspace unless they are there already."""
    rows = rows_in(work)
    codes, scales = rows.codes, rows.block_scale
    assert codes is not None, "NVFP4 activations are codes"
    assert scales is not None, "and their block scales"
    if codes.ndim == 2:  # a token's, for all of its slots
        shape = (*chain.experts.shape, -1)
        codes, scales = (tensor[:, None].expand(shape) for tensor in (codes, scales))
    if not (chain.was_shown(f"{name}_codes", codes) and chain.was_shown(f"{name}_scales", scales)):
        chain.place_rows(name, codes, scales)
    return rows


def _shown_codes(chain: Chain, name: str, scale_E: Tensor) -> Outputs:
    codes, scales = chain.codes_of_slots(name)
    chain.record(name, codes, scales)
    scale_TK = _of_slots(chain, scale_E)
    return {"codes": codes, "block_scale": scales, "tensor_scale": scale_TK}


def gather(part: ComponentPart, names: Names) -> Compute:
    """Quantise every slot's input to NVFP4 with its expert's own scale."""
    _problem(part, 1, 1)

    def compute(work: ComponentCallWork) -> Outputs:
        chain = chain_of(work, part)
        scale_E = _by_expert(work, chain, names)
        given = {"x": work.bf16(), "w13_input_scale": scale_E, **chain.order}
        chain.space["x_codes"], chain.space["x_scales"] = work.run(GATHER, chain.rows, **given)
        return _shown_codes(chain, "x", scale_E)

    return compute


def first(part: ComponentPart, names: Names) -> Compute:
    """Compute gate and up of every slot, by the variant of FC1 that stores them."""
    _problem(part, 1, 1)

    def compute(work: ComponentCallWork) -> Outputs:
        chain = chain_of(work, part)
        chain.w13 = _stack(work, chain, names, _step_rows(chain, work, "x"))
        unused = torch.ones(len(chain.visited), dtype=torch.float32, device=work.kernels.device)
        *_, both = _first_product(work, chain, unused, shown=True)
        chain.shown["both"] = chain.of_slots(both)
        return {"out": chain.shown["both"]}

    return compute


def _first_product(
    work: ComponentCallWork, chain: Chain, scale_E: Tensor, *, shown: bool = False
) -> tuple[Tensor, ...]:
    """Run FC1 with the scales that it requantises by, in a form that reads no routing weights."""
    weights = torch.zeros(chain.experts.shape, dtype=torch.float32, device=chain.experts.device)
    return work.run(
        FC1, replace(chain.rows, shown=shown), **chain.side("x"), **chain.w13, **chain.order,
        w2_input_scale=scale_E, weights=weights,
    )  # fmt: skip


def act(part: ComponentPart, names: Names, alone: Compute) -> Compute:
    """Apply SwiGLU and requantise: the shipped FC1, or `alone` on inputs not from FC1."""

    def compute(work: ComponentCallWork) -> Outputs:
        chain, x = work.kernels.chain, work.inputs["x"]
        known = isinstance(chain, Chain) and chain.was_shown("both", x)
        if not known or chain_of(work, part) is not chain or not chain.w13:
            return alone(work)
        scale_E = _by_expert(work, chain, names)
        made = _first_product(work, chain, scale_E)
        chain.space["hidden_codes"], chain.space["hidden_scales"] = made
        chain.w13 = {}
        return _shown_codes(chain, "hidden", scale_E)

    return compute


def second(part: ComponentPart, names: Names) -> Compute:
    """Compute the down projection of every slot."""
    _problem(part, 1, 1)

    def compute(work: ComponentCallWork) -> Outputs:
        chain = chain_of(work, part)
        stack = _stack(work, chain, names, _step_rows(chain, work, "hidden"))
        (out,) = work.run(FC2, chain.rows, **chain.side("hidden"), **stack, **chain.order)
        chain.space["out"] = out
        chain.shown["out"] = chain.of_slots(out)
        return {"out": chain.shown["out"]}

    return compute


def rows_to_sum(work: ComponentCallWork, x_TKD: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and the row of each slot: FC2's workspace if `x_TKD` is exactly its result."""
    chain: Any = work.kernels.chain
    if isinstance(chain, Chain) and chain.was_shown("out", x_TKD):
        return chain.space["out"], chain.plan["places"]
    slots = torch.arange(x_TKD.shape[0] * x_TKD.shape[1], dtype=torch.int32, device=x_TKD.device)
    return own(x_TKD.flatten(0, 1)), slots


# --------------------------------------------------------------------------------------------------
# Run MoE routing and experts by our kernels: top-k, gate and up, SwiGLU, down projection, sum.
#
# NVFP4 weights and activations use the grouped kernels, step by step (above); other formats
# use one launch for each visited expert. For these, slots (token, chosen expert) are sorted by
# expert first and restored afterwards. SwiGLU runs inside the quantiser, which also stores its
# values if they are the component's output.
#
# Shape letters: T tokens, K slots a token, E experts, D hidden, F expert width.

_FIRST, _SECOND = ("w1", "w3"), ("w2",)
_NAME = "ffn.experts.{}.{}"


@dataclass(frozen=True)
class ExpertSlots:
    """Slots sorted by expert: `order[n]` is the flat slot at place n, `offsets` begins experts."""

    order: Tensor
    offsets: tuple[int, ...]
    per_token: int

    @classmethod
    def from_choices(cls, expert_TK: Tensor, experts: int) -> ExpertSlots:
        """Sort; slots without an expert come last."""
        flat = expert_TK.flatten()
        key = torch.where(flat < 0, experts, flat)
        counts = torch.bincount(key, minlength=experts + 1)[:experts]
        ends = counts.cumsum(0).tolist()
        return cls(torch.argsort(key, stable=True), (0, *ends), expert_TK.shape[1])

    def visited(self) -> Iterator[tuple[int, slice]]:
        """Yield each expert that has rows, and their range."""
        for expert, (begin, end) in enumerate(zip(self.offsets, self.offsets[1:], strict=False)):
            if end > begin:
                yield expert, slice(begin, end)

    def rows(self, x: Tensor, *, by_slot: bool) -> Tensor:
        """Return the row of each place: of the slot itself, or of its token."""
        if by_slot:
            return x.flatten(0, 1)[self.order]
        return x[self.order // self.per_token]

    def back(self, made: Tensor) -> Tensor:
        """Restore rows to the order of their slots [T, K, .]."""
        out = torch.empty_like(made)
        out[self.order] = made
        return out.reshape(-1, self.per_token, *made.shape[1:])


def topk(part: ComponentPart) -> Compute:
    """Return the chosen experts and their weights."""
    c, name = part.config, part.name
    by_table = name.endswith("tid2eid")
    problem = RouterProblem(
        1, c.n_routed_experts, c.num_experts_per_tok, c.scoring_func,
        scale=c.routed_scaling_factor,
        epsilon=part.facts.numerics.switches.routing_epsilon,
        groups=getattr(c, "n_group", 1),
        groups_kept=getattr(c, "topk_group", 1),
        vocabulary=part.shapes[name][0] if by_table else 0,
    )  # fmt: skip

    def compute(work: ComponentCallWork) -> Outputs:
        logits = work.fp32("logits")
        fields = {each: getattr(problem, each) for each in problem.__dataclass_fields__}
        here = RouterProblem(**(fields | {"tokens": logits.shape[0]}))
        if by_table:
            ids = own(work.inputs["tokens"].to(torch.int64))
            given = {"table": work.weights.plain(name, torch.int64), "ids": ids}
        else:
            given = {"bias": work.weights.plain(name, torch.float32)}
        experts, weights = work.run("simt_router", here, logits=logits, **given)
        return {"experts": experts.to(torch.int64), "weights": weights}

    return compute


def _names(part: ComponentPart, parts: Sequence[str]) -> list[list[str]]:
    """Return the names of every expert's weights."""
    count = part.config.n_routed_experts
    return [[_NAME.format(expert, each) for each in parts] for expert in range(count)]


def _products(part: ComponentPart, parts: Sequence[str]) -> Compute:
    names = _names(part, parts)
    ways = [kernel_of_weight(part, name) for name in names[0]]  # a recipe treats all experts alike
    if all(kernel.kernel == "sm90_gemm_nvfp4" for kernel in ways):
        return (first if parts == _FIRST else second)(part, names)
    width = sum(part.shapes[name][0] for name in names[0])

    def compute(work: ComponentCallWork) -> Outputs:
        given = work.inputs
        slots = ExpertSlots.from_choices(given["experts"], len(names))
        rows = _rows(work, slots)
        made = torch.zeros(
            given["experts"].numel(), width, dtype=torch.bfloat16, device=work.kernels.device
        )
        for expert, span in slots.visited():
            place = torch.arange(span.start, span.stop, device=made.device)
            own_rows = rows.select(place)
            each = zip(ways, names[expert], strict=True)
            made[span] = torch.cat(
                [product(work, kernel, n, own_rows) for kernel, n in each], dim=-1
            )
        return {"out": slots.back(made)}

    return compute


def _rows(work: ComponentCallWork, slots: ExpertSlots) -> LinearRows:
    """Return every slot's activations, sorted by expert."""
    given = work.inputs
    if "codes" not in given:
        x = work.bf16()
        return LinearRows(values=slots.rows(x, by_slot=x.ndim == 3))
    by_slot = given["codes"].ndim == 3
    scale = given.get("tensor_scale")
    if scale is not None and scale.ndim:
        scale = scale.flatten()[slots.order]
    codes, block_scale = (
        slots.rows(given[name], by_slot=by_slot) for name in ("codes", "block_scale")
    )
    return LinearRows(None, codes, block_scale, scale)


def w13(part: ComponentPart) -> Compute:
    """Compute gate and up of every slot, gate first."""
    return _products(part, _FIRST)


def w2(part: ComponentPart) -> Compute:
    """Compute the down projection of every slot."""
    return _products(part, _SECOND)


def _expert_scales(work: ComponentCallWork, names: Sequence[Sequence[str]]) -> Tensor:
    """Return the decode scale of each expert's input activations [E]."""
    return torch.cat([input_scale(work, name) for name in names])


def _quantised(
    work: ComponentCallWork, slots: ExpertSlots, x: Tensor, scales: Tensor, problem: QuantiseProblem
) -> Outputs:
    """Quantise rows that are sorted by expert, and restore them to the order of slots."""
    offsets = torch.tensor(slots.offsets, dtype=torch.int32, device=x.device)
    codes, block_scales = work.run(
        "simt_quantise_nvfp4", problem, values=own(x), decode_scale=scales, offsets=offsets
    )
    expert_TK = work.inputs["experts"]
    of_slot = torch.where(expert_TK < 0, 1.0, scales[expert_TK.clamp(min=0)])
    return {
        "codes": slots.back(codes),
        "block_scale": slots.back(block_scales.reshape(x.shape[0], -1)),
        "tensor_scale": of_slot,
    }


def _require_shares(part: ComponentPart) -> None:
    if part.facts.numerics.switches.input_scale_shared:
        raise NoKernelError("the quantiser has a scale for every expert, not one for a layer")


def w13_act_quant(part: ComponentPart) -> Compute:
    """Quantise every slot's input to NVFP4 with its expert's own scale."""
    names = _names(part, _FIRST)
    activation = part.facts.activation(names[0][0])
    if activation != "NVFP4":
        return act_quant(part)  # a token once for all of its experts
    _require_shares(part)
    if part.target == SM90A.name:
        return gather(part, names)
    return _gathered(part, names)


def _gathered(part: ComponentPart, names: Sequence[Sequence[str]]) -> Compute:
    """Quantise every slot's input without the grouped kernels."""
    columns, count = part.shapes[names[0][0]][-1], len(names)
    QuantiseProblem(1, columns, LINEAR.name, experts=count)

    def compute(work: ComponentCallWork) -> Outputs:
        slots = ExpertSlots.from_choices(work.inputs["experts"], count)
        x = slots.rows(work.bf16(), by_slot=False)
        problem = QuantiseProblem(x.shape[0], columns, LINEAR.name, experts=count)
        return _quantised(work, slots, x, _expert_scales(work, names), problem)

    return compute


def routed_act(part: ComponentPart) -> Compute:
    """Apply clamped SwiGLU to every slot and requantise with its expert's own scale."""
    names = _names(part, _SECOND)
    if part.facts.weight_before_w2:
        raise NoKernelError("the quantiser's SwiGLU takes no routing weight in front of w2")
    activation = part.facts.activation(names[0][0])
    if activation is None:
        return swiglu(part.config.moe_intermediate_size, part.facts.limit)
    if activation != "NVFP4":
        raise NoKernelError(f"no kernel quantises activations to {activation}")
    _require_shares(part)
    count, limit, columns = len(names), part.facts.limit, part.config.moe_intermediate_size
    QuantiseProblem(1, columns, LINEAR.name, "swiglu", experts=count, limit=limit)

    def compute(work: ComponentCallWork) -> Outputs:
        slots = ExpertSlots.from_choices(work.inputs["experts"], count)
        x = slots.rows(work.bf16(), by_slot=True)
        problem = QuantiseProblem(
            x.shape[0], columns, LINEAR.name, "swiglu", experts=count, limit=limit
        )
        return _quantised(work, slots, x, _expert_scales(work, names), problem)

    return act(part, names, compute) if part.target == SM90A.name else compute


def combine(part: ComponentPart) -> Compute:
    """Sum a token's slots, multiplied by routing weights if those come last."""
    c = part.config
    weighted = not part.facts.weight_before_w2
    _problem(part, 1, c.n_routed_experts)

    def compute(work: ComponentCallWork) -> Outputs:
        x = work.bf16()
        rows, places = rows_to_sum(work, x)
        terms = {"products": rows, "places": places, "weights": work.fp32("weights")}
        here = CombineProblem(
            len(x), c.hidden_size, c.num_experts_per_tok, len(rows), weighted, shared=False
        )
        (made,) = work.run(SUM, here, **terms)
        work.kernels.summed = SlotSum(here, terms, made)
        return {"out": made}

    return compute


class SlotSum(NamedTuple):
    """A sum of slots, with the operands that it was made of."""

    problem: CombineProblem
    terms: dict[str, Tensor]
    out: Tensor


def moe_sum(part: ComponentPart) -> Compute:
    """Add routed and shared experts: repeat the sum with the shared expert as its last term.

    A sum that the kernel did not make has no slots: torch adds it, and the table records that.
    """
    del part

    def compute(work: ComponentCallWork) -> Outputs:
        routed, shared = work.inputs["routed"], work.bf16("shared")
        summed: SlotSum | None = work.kernels.summed
        work.kernels.summed = None
        if summed is None or not same(summed.out, routed):
            work.kernels.note("torch", "added to a sum that no kernel made")
            return {"out": (routed.float() + shared.float()).to(torch.bfloat16)}
        total = replace(summed.problem, shared=True)
        (made,) = work.run(SUM, total, **summed.terms, shared=shared)
        return {"out": made}

    return compute


def shared_act(part: ComponentPart) -> Compute:
    """Apply SwiGLU of the shared expert, or of a dense layer."""
    c, dense = part.config, part.component.role == "ffn.act"
    columns = c.intermediate_size if dense else c.moe_intermediate_size
    return swiglu(columns, part.facts.shared_limit)


def swiglu(columns: int, limit: float | None) -> Compute:
    """Return the SwiGLU values that the quantiser encodes."""
    QuantiseProblem(1, columns, LINEAR.name, "swiglu", keeps_values=True, limit=limit)

    def compute(work: ComponentCallWork) -> Outputs:
        x = work.bf16()
        rows = own(x.reshape(-1, x.shape[-1]))
        problem = QuantiseProblem(
            rows.shape[0], rows.shape[1] // 2, LINEAR.name, "swiglu", keeps_values=True, limit=limit
        )
        unused = torch.ones(1, dtype=torch.float32, device=rows.device)
        tensors = work.run("simt_quantise_nvfp4", problem, values=rows, decode_scale=unused)
        return {"out": tensors[2].reshape(*x.shape[:-1], -1)}

    return compute
