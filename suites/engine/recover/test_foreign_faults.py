"""Faults as a stranger would plant them: heads, experts, caches and tables of one component.

None is drawn by the generator of random faults. A right cause does to a held-back run what the
fault does there; what is said of it is compared by a few words.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.engine.faults.attention import FAR, by_lists, without
from degarble.harness.engine.faults.model_faults import facts_of
from degarble.suites.museum.random_faults.answers import CauseAnswer, judged
from degarble.suites.museum.random_faults.conditions import Condition
from degarble.suites.museum.random_faults.edits import Edit
from degarble.suites.museum.random_faults.stages import RandomFault, stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.attention import ListedAttention
    from degarble.harness.formats.weight import Weight
    from degarble.suites.museum.random_faults.answers import FaultAnswer

    Tensors = Mapping[str, Tensor]
    Made = Callable[[Any, Tensors, Mapping[str, Any]], Tensors]

HEAD_WIDTH, BASE = 16, 10000.0
KEY_HEADS = 2


@dataclass(frozen=True)
class ForeignFault:
    """What goes wrong, in which component of which model, and words that tell it."""

    model: str
    component: str
    made: Made
    words: str
    condition: Condition = field(default_factory=Condition)

    def answer(self) -> FaultAnswer:
        """Plant it, and judge what is said."""
        edit = Edit({"operand": "foreign"}, self.applied)
        run = judged(stage(self.model), [RandomFault(self.component, edit, self.condition)])
        assert not run.elsewhere
        (found,) = run.answers
        return found

    def applied(self, call: Any) -> Any:
        """Return the call with what goes wrong."""
        return lambda inputs, weights: self.made(call, inputs, weights)


# ---- attention -----------------------------------------------------------------------------------


def attention(
    inputs: Tensors, *, heads: tuple[int, ...] = (0, 0, 1, 1), scale: float = HEAD_WIDTH**-0.5
) -> Tensor:
    """Return causal attention in which each query head meets a head of keys and values."""
    query = inputs["query"].double()
    keys, values = (inputs[name].double()[:, list(heads)] for name in ("key", "value"))
    positions, begin, parts = inputs["positions"], 0, []
    for a, b in pairwise(inputs["token_offsets"].tolist()):
        count = int(positions[b - 1]) + 1
        own = slice(begin, begin + count)
        scores = torch.einsum("thd,khd->htk", query[a:b], keys[own]) * scale
        seen = torch.arange(count)[None] <= positions[a:b, None]
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        parts.append(torch.einsum("htk,khd->thd", shares, values[own]))
        begin += count
    return torch.cat(parts).to(inputs["value"].dtype)


def in_head(head: int, right: Tensor, wrong: Tensor) -> Tensor:
    """Return outputs [T, H, D] of which one head is wrong."""
    made = right.clone()
    made[:, head] = wrong[:, head]
    return made


def met_another_head(_call: Any, inputs: Tensors, _weights: Any) -> Tensors:
    return {"out": attention(inputs, heads=(0, 0, 0, 1))}


def unscaled_head(call: Any, inputs: Tensors, weights: Any) -> Tensors:
    right = call(inputs, weights)["out"]
    return {"out": in_head(3, right, attention(inputs, scale=1.0))}


def smaller_later(call: Any, inputs: Tensors, weights: Any) -> Tensors:
    return {"out": (call(inputs, weights)["out"].double() * 0.77).to(inputs["value"].dtype)}


def sinkless_head(call: Any, inputs: Tensors, weights: Any) -> Tensors:
    def change(weight: Weight) -> Weight:
        assert weight.value is not None
        value = weight.value.clone()
        value[2] = -1e4
        return replace(weight, value=value, _decoded={})

    return dict(call(inputs, {name: change(weights[name]) for name in weights}))


# ---- rotation ------------------------------------------------------------------------------------


def tables(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [P, D] of the small Llama."""
    half = HEAD_WIDTH // 2
    angles = torch.arange(512)[:, None] * BASE ** (-torch.arange(half).double() / half)
    return angles.cos().repeat(1, 2).to(dtype), angles.sin().repeat(1, 2).to(dtype)


def one_position_on(inputs: Tensors) -> dict[str, Tensor]:
    """Return inputs of a rotation with the angles of the next position."""
    cos, sin = tables(inputs["cos"].dtype)
    far = [(table[None].double() - inputs[name][:, None].double()).abs().sum(-1)
           for name, table in (("cos", cos), ("sin", sin))]  # fmt: skip
    at = (far[0] + far[1]).argmin(1) + 1
    return {**inputs, "cos": cos[at], "sin": sin[at]}


def next_angles(call: Any, inputs: Tensors, weights: Any) -> Tensors:
    return dict(call(one_position_on(inputs), weights))


def next_angles_in_a_head(call: Any, inputs: Tensors, weights: Any) -> Tensors:
    right, wrong = (call(given, weights)["out"] for given in (inputs, one_position_on(inputs)))
    return {"out": in_head(2, right, wrong)}


def pairs_in_a_head(call: Any, inputs: Tensors, weights: Any) -> Tensors:
    """One head is rotated by pairs side by side, not by halves."""
    right = call(inputs, weights)["out"]
    half = HEAD_WIDTH // 2
    x = inputs["x"].reshape(right.shape).double().unflatten(-1, (half, 2))
    cos, sin = (inputs[name][:, None, :half].double() for name in ("cos", "sin"))
    a, b = x.unbind(-1)
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return {"out": in_head(1, right, turned.to(right.dtype))}


def other_cosines(call: Any, inputs: Tensors, weights: Any) -> Tensors:
    """Slow columns hardly differ at few positions, so that several would do for one."""
    order = [0, 1, 2, 3, 4, 6, 7, 10, 5, 11, 9, 8, 12, 13, 14, 15]
    return dict(call({**inputs, "cos": inputs["cos"][:, order]}, weights))


# ---- caches --------------------------------------------------------------------------------------


def sequences(inputs: Tensors) -> Iterator[tuple[int, int]]:
    """Yield the first row of each sequence in a cache, and how many rows it has."""
    begin = 0
    for _, end in pairwise(inputs["token_offsets"].tolist()):
        count = int(inputs["positions"][end - 1]) + 1
        yield begin, count
        begin += count


def page_ends(call: Any, inputs: Tensors, weights: Any) -> Tensors:
    """The last slot of a page of 8 holds what is in the slot before."""
    outputs = dict(call(inputs, weights))
    made = outputs["key"].clone()
    for begin, count in sequences(inputs):
        at = torch.arange(7, count, 8) + begin
        made[at] = outputs["key"][at - 1]
    return {**outputs, "key": made}


def newest_unwritten(call: Any, inputs: Tensors, weights: Any) -> Tensors:
    outputs = {name: tensor.clone() for name, tensor in call(inputs, weights).items()}
    for begin, count in sequences(inputs):
        for made in outputs.values():
            made[begin + count - 1] = 0
    return outputs


def one_slot_late(call: Any, inputs: Tensors, weights: Any) -> Tensors:
    outputs = dict(call(inputs, weights))
    made = outputs["value"].clone()
    for begin, count in sequences(inputs):
        made[begin + 1 : begin + count] = outputs["value"][begin : begin + count - 1]
    return {**outputs, "value": made}


# ---- experts -------------------------------------------------------------------------------------


def with_rows(weights: Mapping[str, Any], ending: str, rows: list[int]) -> dict[str, Any]:
    """Return weights of which one holds its experts in another order."""
    return {
        name: replace(weight, value=weight.value[rows], _decoded={})
        if name.endswith(ending) else weight
        for name, weight in dict(weights).items()
    }  # fmt: skip


def down_exchanged(call: Any, inputs: Tensors, weights: Any) -> Tensors:
    return dict(call(inputs, with_rows(weights, "down_proj", [0, 1, 2, 5, 4, 3, 6, 7])))


def gate_and_up_exchanged(call: Any, inputs: Tensors, weights: Any) -> Tensors:
    name = next(each for each in weights if each.endswith("gate_up_proj"))
    value = weights[name].value.clone()
    value[4] = value[4].roll(value.shape[1] // 2, 0)
    changed = replace(weights[name], value=value, _decoded={})
    return dict(call(inputs, {**dict(weights), name: changed}))


def expert_left_out(call: Any, inputs: Tensors, weights: Any) -> Tensors:
    given = torch.where(inputs["experts"] == 6, 0.0, inputs["weights"])
    return dict(call({**inputs, "weights": given.to(inputs["weights"].dtype)}, weights))


def bias_unweighted(call: Any, inputs: Tensors, weights: Any) -> Tensors:
    name = next(each for each in weights if each.endswith("down_proj_bias"))
    own = weights[name].values(torch.float64)[inputs["experts"]]
    more = ((1 - inputs["weights"].double())[..., None] * own).sum(1)
    right = call(inputs, weights)["out"]
    return {"out": (right.double() + more).to(right.dtype)}


# ---- sums and products ---------------------------------------------------------------------------


def shared_twice(_call: Any, inputs: Tensors, _weights: Any) -> Tensors:
    return {"out": (inputs["routed"] + 2 * inputs["shared"].float()).to(torch.bfloat16)}


def too_small(call: Any, inputs: Tensors, weights: Any) -> Tensors:
    """A sum may cancel what was rounded before."""
    return {"out": (call(inputs, weights)["out"].double() - 0.63008).to(torch.bfloat16)}


def other_blocks(call: Any, inputs: Tensors, weights: Any) -> Tensors:
    order = [5, 8, 11, 2, 14, 15, 10, 13, 7, 3, 9, 0, 4, 6, 12, 1]
    return dict(call({**inputs, "block_scale": inputs["block_scale"][:, order]}, weights))


def quantised_larger(call: Any, inputs: Tensors, weights: Any) -> Tensors:
    x = (inputs["x"].double() * 1.151).to(inputs["x"].dtype)
    return dict(call({**inputs, "x": x}, weights))


def rounded_between(call: Any, inputs: Tensors, weights: Any) -> Tensors:
    """A product with a bias is stored in BF16 after every 16 columns."""
    x = inputs["x"]

    def of(begin: int, end: int) -> Tensor:
        part = torch.zeros_like(x)
        part[:, begin:end] = x[:, begin:end]
        stored: Tensor = call({**inputs, "x": part}, weights)["out"].double()
        return stored

    bias = of(0, 0)
    total = bias
    for begin in range(0, x.shape[1], 16):
        own = of(begin, begin + 16) - bias
        total = (total + own).to(torch.bfloat16).double()
    return {"out": total.to(torch.bfloat16)}


def first_row_stale(call: Any) -> Any:
    """Return a call whose first row is the one of the call before."""
    before: list[Tensor] = []

    def stale(inputs: Tensors, weights: Any) -> Tensors:
        right = call(inputs, weights)["out"]
        made = right.clone()
        if before:
            made[:1] = before[-1][:1]
        before[:] = [right]
        return {"out": made}

    return stale


# ---- lists of V4 and V3.2 ------------------------------------------------------------------------


def seeing(seen: Callable[[ListedAttention], Tensor]) -> Made:
    """Return V4's attention in which tokens see some of the places of their lists alone."""

    def made(call: Any, inputs: Tensors, weights: Any) -> Tensors:
        gone = partial(without, lambda listed: ~seen(listed))
        return by_lists(gone, facts_of(call), inputs, weights)

    return made


def scattered(listed: ListedAttention) -> Tensor:
    """Mark places by no rule."""
    token = torch.arange(len(listed.place))[:, None]
    return (listed.place * 7 + token * 3) % 5 != 0


def last_choice_lost(call: Any, inputs: Tensors, weights: Any) -> Tensors:
    chosen = inputs["chosen"].clone()
    chosen[:, -1] = -1
    return dict(call({**inputs, "chosen": chosen}, weights))


def choices_of_the_token_before(call: Any, inputs: Tensors, weights: Any) -> Tensors:
    return dict(call({**inputs, "chosen": inputs["chosen"].roll(1, 0)}, weights))


def choices_one_too_small(call: Any, inputs: Tensors, weights: Any) -> Tensors:
    chosen = inputs["chosen"]
    return dict(call({**inputs, "chosen": torch.where(chosen > 0, chosen - 1, chosen)}, weights))


ATTENTION, CACHE = "layers.1.self_attn.attention", "layers.1.self_attn.cache"
EXPERTS = "layers.1.mlp.experts"
LISTED = [f"layers.{layer}.attn.attend" for layer in range(3)]
FAULTS: dict[str, ForeignFault] = {
    "another head of keys": ForeignFault(
        "llama bf16", ATTENTION, met_another_head, "query head 2 meets head 0 of keys and values"
    ),
    "one head unscaled": ForeignFault(
        "llama bf16", ATTENTION, unscaled_head, "logits times 1.000, not 0.2500, in"
    ),
    "smaller from a position on": ForeignFault(
        "llama bf16", ATTENTION, smaller_later, "multiplied by 0.7700, only from position 36 on",
        Condition("position", 36),
    ),
    "one head without its sink": ForeignFault(
        "gpt_oss bf16", ATTENTION, sinkless_head, "in head 2 of the outputs alone"
    ),
    "next angles": ForeignFault(
        "llama bf16", "layers.1.self_attn.rotation", next_angles,
        "rotated by the angles of 1 position after their own.",
    ),
    "next angles in a head": ForeignFault(
        "llama bf16", "layers.1.self_attn.rotation_2", next_angles_in_a_head,
        "of 1 position after their own, in head 2 of the outputs alone",
    ),
    "pairs in a head": ForeignFault(
        "llama bf16", "layers.1.self_attn.rotation_2", pairs_in_a_head,
        "pairs taken for halves in layers.1.self_attn.rotation_2, in head 1 of the outputs alone",
    ),
    "other cosines": ForeignFault(
        "lfm2 bf16", "layers.2.self_attn.rotation", other_cosines, "others explain it as well"
    ),
    "ends of pages": ForeignFault(
        "llama bf16", CACHE, page_ends,
        "every 8. slot from 7 on (key) holds the row of the slot 1 before",
    ),
    "newest slot unwritten": ForeignFault(
        "llama bf16", CACHE, newest_unwritten, "the newest slot holds zeros"
    ),
    "one slot late": ForeignFault(
        "gemma3_text bf16", CACHE, one_slot_late,
        "all slots (value) hold the row of the slot 1 before.",
    ),
    "down projections exchanged": ForeignFault(
        "qwen3_moe bf16", EXPERTS, down_exchanged, "down_proj of experts 3 and 5 exchanged"
    ),
    "gate and up exchanged": ForeignFault(
        "qwen3_moe bf16", EXPERTS, gate_and_up_exchanged,
        "gate and up exchanged by halves in expert 4",
    ),
    "expert left out": ForeignFault(
        "qwen3_moe bf16", EXPERTS, expert_left_out, "a gain of 0 on expert 6"
    ),
    "bias without weights": ForeignFault(
        "gpt_oss bf16", EXPERTS, bias_unweighted,
        "the bias of the second product added without routing weights",
    ),
    "shared experts twice": ForeignFault(
        "v4 nvfp4-full", "layers.1.ffn.moe_sum", shared_twice, "multiplied by 2.000"
    ),
    "too small by a number": ForeignFault(
        "v32 official", "layers.1.attn.wkv_a", too_small, "all numbers are 0.6301 too small"
    ),
    "rounded between parts": ForeignFault(
        "gpt_oss bf16", "layers.1.self_attn.v_proj", rounded_between,
        "sums over 16 columns are added up in BF16, each stored before",
    ),
    "scales of other blocks": ForeignFault(
        "v32 nvfp4-full", "layers.0.ffn.w2", other_blocks, "block 0 has the scales of block 5"
    ),
    "shorter window": ForeignFault(
        "v4 nvfp4-full", LISTED[0], seeing(lambda listed: listed.place > 1),
        "in its window, a token sees the 10 latest keys only",
    ),
    "hole in a window": ForeignFault(
        "v4 nvfp4-full", LISTED[0], seeing(lambda listed: listed.place != 8),
        "in its window, a token does not see the key 3 back",
    ),
    "first chosen entry unseen": ForeignFault(
        "v4 nvfp4-full", LISTED[1], seeing(lambda listed: listed.place != FAR),
        "a token sees the chosen entries from 1 on only",
    ),
    "entries unseen": ForeignFault(
        "v4 nvfp4-full", LISTED[2], seeing(lambda listed: listed.place < FAR),
        "a token does not see the entry 0",
    ),
    "last choice lost": ForeignFault(
        "v32 official", LISTED[0], last_choice_lost,
        "place 11 of each list of chosen rows is not read",
    ),
    "choices of the token before": ForeignFault(
        "v4 nvfp4-full", LISTED[1], choices_of_the_token_before,
        "each token has the chosen rows of the token before it",
    ),
    "choices one too small": ForeignFault(
        "v4 nvfp4-full", LISTED[1], choices_one_too_small,
        "the numbers of chosen rows are 1 too small",
    ),
    "larger before quantisation": ForeignFault(
        "v4 nvfp4-full", "layers.0.attn.wq_a.act_quant", quantised_larger,
        "the input x is multiplied by 1.151 and stored again",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_what_a_stranger_plants_is_told(name: str) -> None:
    found = FAULTS[name].answer()
    assert found.placed
    assert found.cause in {CauseAnswer.NAMED, CauseAnswer.DESCRIBED}, found.sentence
    assert FAULTS[name].words in found.sentence


@pytest.mark.slow
def test_stale_rows_of_heads_are_looked_up_token_by_token() -> None:
    edit = Edit({"operand": "foreign"}, first_row_stale)
    component = "layers.2.self_attn.rotation_2"
    run = judged(stage("llama fp8"), [RandomFault(component, edit, Condition())])
    assert "the first row of each call holds what the call before wrote" in run.answers[0].sentence


@pytest.mark.slow
def test_rows_of_lists_by_no_rule_are_not_told() -> None:
    fault = ForeignFault("v4 nvfp4-full", LISTED[1], seeing(scattered), "")
    assert fault.answer().cause is CauseAnswer.SILENT


@pytest.mark.slow
def test_one_number_of_a_head_is_not_told_by_a_function() -> None:
    """A sink that weighs nothing is many functions of the sink that was stored."""
    fault = ForeignFault("v4 nvfp4-full", "layers.0.attn.attend", sinkless_head, "")
    found = fault.answer()
    assert "every number of" not in found.sentence
    assert found.cause is CauseAnswer.NAMED
    assert "no sink, in head 2 of the outputs alone" in found.sentence
