"""The MTP blocks of both families, from their formulas, and fed in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.model.config.config import small_v4, small_v32
from degarble.references.binding import Bound
from degarble.references.model.v4 import ModelV4
from degarble.references.model.v32 import ModelV32
from degarble.references.numerics import Numerics
from degarble.references.state import Sequence, Step
from degarble.references.weights import random_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

V4 = small_v4(
    vocab_size=64, num_hidden_layers=1, compress_ratios=(4, 0), hidden_size=32, head_dim=24,
    qk_rope_head_dim=8, num_attention_heads=4, o_groups=2, q_lora_rank=16, o_lora_rank=12,
    sliding_window=9, index_head_dim=16, moe_intermediate_size=16, num_hash_layers=1,
)  # fmt: skip
V32 = small_v32(
    vocab_size=64, num_hidden_layers=1, hidden_size=32, q_lora_rank=16, kv_lora_rank=20,
    qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, index_head_dim=16,
    intermediate_size=32, moe_intermediate_size=16,
)  # fmt: skip
TOKENS = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(3))
NEXT = TOKENS.roll(-1)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def model_v4() -> tuple[ModelV4, dict[str, Tensor]]:
    weights = random_weights(V4, 1)
    values = {n: w.values(torch.float64) for n, w in weights.items() if "tid2eid" not in n}
    return ModelV4(Bound(V4, Numerics.definition(), weights), V4), values


def test_v4_adds_the_next_embedding_to_every_stream() -> None:
    model, w = model_v4()
    sequence, step = Sequence(), Step.of([0], [TOKENS])
    streams = model.streams(step, [sequence])
    logits, after = model.draft([sequence], streams, [NEXT])
    e = rms(w["embed"][NEXT], w["mtp.0.enorm"]) @ w["mtp.0.e_proj"].T
    h = rms(streams, w["mtp.0.hnorm"]) @ w["mtp.0.h_proj"].T
    block = V4.blocks[-1]
    assert (block.prefix, block.ratio) == ("mtp.0", 0)
    expected = model.block(block, e[:, None] + h, step, [Sequence()])
    assert (after - expected).abs().max() < 1e-12
    flat = after.flatten(1)
    m = flat @ w["mtp.0.hc_head_fn"].T / torch.sqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
    gates = torch.sigmoid(m * w["mtp.0.hc_head_scale"] + w["mtp.0.hc_head_base"]) + 1e-6
    y = rms((gates[..., None] * after).sum(1), w["mtp.0.norm"])
    assert (logits - y @ w["head"].T).abs().max() < 1e-11
    assert sequence.drafted == {0: 40}
    assert (model.logits(streams) - logits).abs().max() > 0.1


def test_v4_drafts_the_same_in_pieces() -> None:
    model, _ = model_v4()
    sequence, step = Sequence(), Step.of([0], [TOKENS])
    streams = model.streams(step, [sequence])
    whole, _ = model.draft([Sequence()], streams, [NEXT])
    again, parts = Sequence(), torch.arange(40).split([11, 1, 1, 27])
    pieces = [model.draft([again], streams[part], [NEXT[part]])[0] for part in parts]
    assert (torch.cat(pieces) - whole).abs().max() < 1e-12


def test_v4_first_embedding_is_zeroed_where_the_switch_says() -> None:
    model, _ = model_v4()
    made: dict[str, Tensor] = {}
    numerics = Numerics.definition(first_draft_embedding_zeroed=True)

    def watch(component: str, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        del inputs
        made[component] = next(iter(outputs.values()))

    bound = Bound(V4, numerics, random_weights(V4, 1), None, watch)
    other = ModelV4(bound, V4)
    streams = model.streams(Step.of([0], [TOKENS]), [Sequence()])
    other.draft([Sequence()], streams, [NEXT])
    assert not made["mtp.0.embed"][0].any()
    assert made["mtp.0.embed"][1].any()


def test_v32_joins_embedding_and_hidden_state() -> None:
    weights = random_weights(V32, 1)
    w = {n: each.values(torch.float64) for n, each in weights.items()}
    model = ModelV32(Bound(V32, Numerics.definition(), weights), V32)
    sequence, step = Sequence(), Step.of([0], [TOKENS])
    hidden = model.hidden(step, [sequence])
    logits, after = model.draft([sequence], hidden, [NEXT])
    e, h = rms(w["mtp.0.embed"][NEXT], w["mtp.0.enorm"]), rms(hidden, w["mtp.0.hnorm"])
    x = torch.cat((e, h), dim=-1) @ w["mtp.0.eh_proj"].T
    made = model.block(V32.blocks[-1], {"x": x}, step, [Sequence()])
    expected = rms(made["x"] + made["residual"], w["mtp.0.norm"])
    assert (after - expected).abs().max() < 1e-12
    assert (logits - expected @ w["mtp.0.head"].T).abs().max() < 1e-12
    turned = torch.cat((h, e), dim=-1) @ w["mtp.0.eh_proj"].T
    assert (turned - x).abs().max() > 0.1  # the other order is seen


def test_v32_drafts_the_same_in_pieces() -> None:
    model = ModelV32(Bound(V32, Numerics.definition(), random_weights(V32, 1)), V32)
    hidden = model.hidden(Step.of([0], [TOKENS]), [Sequence()])
    whole, _ = model.draft([Sequence()], hidden, [NEXT])
    again, parts = Sequence(), torch.arange(40).split([9, 1, 30])
    pieces = [model.draft([again], hidden[part], [NEXT[part]])[0] for part in parts]
    assert (torch.cat(pieces) - whole).abs().max() < 1e-12
