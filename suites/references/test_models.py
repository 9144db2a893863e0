"""Whole models and drafters in the definition: however tokens are fed, the same logits."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.model.config.config import small_v4, small_v32
from degarble.harness.model.recipes import Recipe, Rule
from degarble.references import attention, sparse_attention
from degarble.references.binding import BoundModel
from degarble.references.model import ModelV4, ModelV32, Sequence, TokenBatch
from degarble.references.numerics import Numerics
from degarble.references.weights import quantised_weights, random_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Sequence as Sizes

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall


# --------------------------------------------------------------------------------------------------
# Whole models in the definition: however tokens are fed, the same logits; and what must not be.
#
# Lengths go around every constant: compress ratios 4 and 128, window, top-k times ratio, pages of
# 64 and 256, each one less, exact and one more.

V4 = small_v4(
    vocab_size=64, num_hidden_layers=3, compress_ratios=(0, 4, 128, 0), hidden_size=32, head_dim=24,
    qk_rope_head_dim=8, num_attention_heads=4, o_groups=2, q_lora_rank=16, o_lora_rank=12,
    sliding_window=33, index_n_heads=16, index_head_dim=16, index_topk=6, n_routed_experts=4,
    moe_intermediate_size=16, num_hash_layers=1,
)  # fmt: skip
V32 = small_v32(
    vocab_size=64, num_hidden_layers=2, hidden_size=32, q_lora_rank=16, kv_lora_rank=20,
    qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, index_n_heads=16, index_head_dim=16,
    index_topk=24, intermediate_size=32, moe_intermediate_size=16, n_routed_experts=4, n_group=2,
    topk_group=2,
)  # fmt: skip
LONGEST = 262
TOKENS = torch.randint(0, 64, (LONGEST,), generator=torch.Generator().manual_seed(7))
FAMILIES = ("v4", "v32", "v32 naive")
BOUND = 1e-12  # of the largest logit, in float64

Model = ModelV4 | ModelV32


def constants(family: str) -> list[int]:
    """Lengths around which something changes."""
    if family == "v4":
        around = [4, 8, V4.sliding_window, 4 * V4.index_topk, 64, 128, 256]
    else:
        around = [V32.index_topk, 64, 256]
    return sorted({n + d for n in around for d in (-1, 0, 1)})


def model(family: str) -> Model:
    if family == "v4":
        return ModelV4(BoundModel(V4, Numerics.definition(), random_weights(V4, 1)), V4)
    bound = BoundModel(V32, Numerics.definition(), random_weights(V32, 1))
    return ModelV32(bound, V32, absorbed=family == "v32")


@cache
def whole(family: str) -> Tensor:
    """Logits of all tokens in one prefill."""
    return model(family).forward([Sequence()], [TOKENS])


def in_parts(made: Model, sizes: Sizes[int], tokens: Tensor = TOKENS) -> Tensor:
    sequence = Sequence()
    return torch.cat([made.forward([sequence], [part]) for part in tokens.split(list(sizes))])


def agrees(ours: Tensor, theirs: Tensor, bound: float = BOUND) -> bool:
    return float((ours - theirs).abs().max()) <= bound * float(theirs.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_split_around_any_constant_gives_the_same(family: str) -> None:
    made = model(family)
    for length in constants(family):
        sizes = [length, 1, LONGEST - length - 1]
        assert agrees(in_parts(made, sizes), whole(family)), length


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_token_by_token_gives_the_same(family: str) -> None:
    assert agrees(in_parts(model(family), [1] * LONGEST), whole(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_any_size_give_the_same(family: str) -> None:
    for size in (4, 31, 130):
        sizes = [size] * (LONGEST // size) + [LONGEST % size] * (LONGEST % size > 0)
        assert agrees(in_parts(model(family), sizes), whole(family)), size


def test_both_forms_of_latent_attention_are_equal() -> None:
    assert agrees(whole("v32"), whole("v32 naive"))


@pytest.mark.parametrize("family", FAMILIES)
def test_batching_changes_nothing(family: str) -> None:
    """A decode, a chunk and a fresh prompt in one call, in any order, equal each one alone."""
    made = model(family)
    others = [TOKENS.flip(0)[:90], TOKENS.roll(50)[:131]]
    alone = [made.forward([Sequence()], [tokens]) for tokens in (TOKENS, *others)]
    first, second, third = Sequence(), Sequence(), Sequence()
    made.forward([first, second], [TOKENS[:130], others[0][:5]])
    lists = [TOKENS[130:131], others[1], others[0][5:]]
    logits = made.forward([first, third, second], lists)
    one, two, three = logits.split([len(tokens) for tokens in lists])
    assert agrees(one, alone[0][130:131])
    assert agrees(two, alone[2])
    assert agrees(three, alone[1][5:])
    last = made.forward([second.copy(), first], [TOKENS[:3], TOKENS[131:]], last_only=True)
    assert last.shape[0] == 2
    assert agrees(last[1:], alone[0][-1:])


@pytest.mark.parametrize("family", FAMILIES)
def test_later_tokens_cannot_reach_earlier_ones(family: str) -> None:
    padded = torch.cat((TOKENS[:140], torch.zeros(60, dtype=torch.int64)))
    assert agrees(model(family).forward([Sequence()], [padded])[:140], whole(family)[:140])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forked_sequence_goes_its_own_way(family: str) -> None:
    made, sequence = model(family), Sequence()
    made.forward([sequence], [TOKENS[:133]])
    fork = sequence.copy()
    made.forward([fork], [TOKENS[:9]])
    assert agrees(made.forward([sequence], [TOKENS[133:150]]), whole(family)[133:150])


@pytest.mark.parametrize("mode", ["definition", "bf16", "twin"])
@pytest.mark.parametrize("family", ["v4", "v32"])
def test_a_repeated_run_gives_the_same_bits(family: str, mode: str) -> None:
    config = V4 if family == "v4" else V32
    numerics = {"definition": Numerics.definition(), "bf16": Numerics.bf16()}.get(
        mode, Numerics.twin()
    )
    recipe = Recipe("experts", (Rule("*.ffn.experts.*", "NVFP4", "NVFP4"),))
    runs = []
    for _ in range(2):
        weights = quantised_weights(random_weights(config, 2), config, recipe)
        bound = BoundModel(config, numerics, weights, recipe)
        made = ModelV4(bound, V4) if family == "v4" else ModelV32(bound, V32)
        runs.append(in_parts(made, [140, 1, 1, 20], TOKENS[:162]))
    assert torch.equal(*runs)


SHIFTED = ("attn.q_head_norm_rope", "attn.kv_norm_rope", "attn.inverse_rope", "attn.rope",
           "attn.indexer.q", "attn.indexer.k")  # fmt: skip


def shifted(made: Model, layers: Callable[[int], bool]) -> Model:
    """The model with rotations of some layers one position on, as if positions began at 1."""

    def later(plain: ComponentCall) -> ComponentCall:
        def call(
            inputs: Mapping[str, Tensor], weights: Mapping[str, object]
        ) -> Mapping[str, Tensor]:
            return plain({**inputs, "positions": inputs["positions"] + 1}, weights)

        return call

    for name, plain in list(made.bound.calls.items()):
        if (
            name.startswith("layers.")
            and name.split(".", 2)[2] in SHIFTED
            and layers(int(name.split(".")[1]))
        ):
            made.bound.calls[name] = later(plain)
    return made


def test_a_uniform_shift_of_positions_is_invisible_without_compression() -> None:
    sliding = shifted(model("v4"), lambda layer: V4.compress_ratios[layer] == 0)
    assert agrees(sliding.forward([Sequence()], [TOKENS]), whole("v4"), 1e-11)
    everywhere = shifted(model("v32"), lambda _: True)
    assert agrees(everywhere.forward([Sequence()], [TOKENS]), whole("v32"), 1e-11)


@pytest.mark.parametrize("layer", [1, 2])
def test_a_uniform_shift_of_positions_is_detected_by_compressed_layers(layer: int) -> None:
    moved = shifted(model("v4"), lambda number: number == layer)
    out = moved.forward([Sequence()], [TOKENS])
    first = V4.compress_ratios[layer] - 1  # before the first entry only the window is seen
    assert agrees(out[:first], whole("v4")[:first], 1e-11)
    assert not agrees(out[first:], whole("v4")[first:], 1e-6)


def test_experts_that_no_token_visits_change_nothing() -> None:
    weights = random_weights(V4, 1)
    table = weights["layers.0.ffn.gate.tid2eid"].value
    assert table is not None
    table[table == 3] = 2  # the hash layer never visits expert 3
    plain = ModelV4(BoundModel(V4, Numerics.definition(), weights), V4)
    before = plain.forward([Sequence()], [TOKENS])
    for part in ("w1", "w2", "w3"):
        value = weights[f"layers.0.ffn.experts.3.{part}"].value
        assert value is not None
        value.fill_(torch.nan)
    assert torch.equal(plain.forward([Sequence()], [TOKENS]), before)


def planted_early(monkeypatch: pytest.MonkeyPatch, made: Model) -> None:
    """A compressed entry is visible one token early."""
    del made
    monkeypatch.setattr(sparse_attention, "visible_entries", lambda t, ratio: (t + 2) // ratio)


def planted_window(monkeypatch: pytest.MonkeyPatch, made: Model) -> None:
    """The window is one row too long."""
    del made
    plain = attention.window_rows
    monkeypatch.setattr(attention, "window_rows", lambda t, f, r, w: plain(t, f, r, w + 1))


def planted_pool(monkeypatch: pytest.MonkeyPatch, made: Model) -> None:
    """Pooling starts each call with an empty window."""
    del monkeypatch
    name = "layers.1.attn.compressor.pool"
    plain = made.bound.calls[name]

    def forgetful(
        inputs: Mapping[str, Tensor], weights: Mapping[str, object]
    ) -> Mapping[str, Tensor]:
        lost = {n: torch.zeros_like(inputs[n]) for n in ("state_latent", "state_gate")}
        return plain({**inputs, **lost}, weights)

    made.bound.calls[name] = forgetful


@pytest.mark.parametrize("plant", [planted_early, planted_window, planted_pool])
def test_planted_faults_of_history_are_detected(
    plant: Callable[[pytest.MonkeyPatch, Model], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model("v4")
    plant(monkeypatch, made)
    once = made.forward([Sequence()], [TOKENS])
    assert not agrees(in_parts(made, [61] + [1] * 10 + [LONGEST - 71]), once, 1e-6)


def test_a_missing_inverse_rotation_is_detected() -> None:
    made = model("v4")
    for layer in range(3):
        name = f"layers.{layer}.attn.inverse_rope"
        made.bound.calls[name] = lambda inputs, _: {"out": inputs["x"].flatten(1)}
    before = made.forward([Sequence()], [TOKENS])
    moved = shifted(made, lambda layer: layer == 0).forward([Sequence()], [TOKENS])
    assert not agrees(moved, before, 1e-6)  # the shift is invisible only with it


# --------------------------------------------------------------------------------------------------
# The MTP blocks of both families, from their formulas, and fed in pieces.

COMMON_DRAFTERS_V4 = small_v4(
    vocab_size=64, num_hidden_layers=1, compress_ratios=(4, 0), hidden_size=32, head_dim=24,
    qk_rope_head_dim=8, num_attention_heads=4, o_groups=2, q_lora_rank=16, o_lora_rank=12,
    sliding_window=9, index_head_dim=16, moe_intermediate_size=16, num_hash_layers=1,
)  # fmt: skip
COMMON_DRAFTERS_V32 = small_v32(
    vocab_size=64, num_hidden_layers=1, hidden_size=32, q_lora_rank=16, kv_lora_rank=20,
    qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, index_head_dim=16,
    intermediate_size=32, moe_intermediate_size=16,
)  # fmt: skip
COMMON_DRAFTERS_TOKENS = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(3))
NEXT = COMMON_DRAFTERS_TOKENS.roll(-1)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def model_v4() -> tuple[ModelV4, dict[str, Tensor]]:
    weights = random_weights(COMMON_DRAFTERS_V4, 1)
    values = {n: w.values(torch.float64) for n, w in weights.items() if "tid2eid" not in n}
    return ModelV4(
        BoundModel(COMMON_DRAFTERS_V4, Numerics.definition(), weights), COMMON_DRAFTERS_V4
    ), values


def test_v4_adds_the_next_embedding_to_every_stream() -> None:
    model, w = model_v4()
    sequence, step = Sequence(), TokenBatch.from_sequences([0], [COMMON_DRAFTERS_TOKENS])
    streams = model.streams(step, [sequence])
    logits, after = model.draft([sequence], streams, [NEXT])
    e = rms(w["embed"][NEXT], w["mtp.0.enorm"]) @ w["mtp.0.e_proj"].T
    h = rms(streams, w["mtp.0.hnorm"]) @ w["mtp.0.h_proj"].T
    block = COMMON_DRAFTERS_V4.blocks[-1]
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
    sequence, step = Sequence(), TokenBatch.from_sequences([0], [COMMON_DRAFTERS_TOKENS])
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

    bound = BoundModel(
        COMMON_DRAFTERS_V4, numerics, random_weights(COMMON_DRAFTERS_V4, 1), None, watch
    )
    other = ModelV4(bound, COMMON_DRAFTERS_V4)
    streams = model.streams(TokenBatch.from_sequences([0], [COMMON_DRAFTERS_TOKENS]), [Sequence()])
    other.draft([Sequence()], streams, [NEXT])
    assert not made["mtp.0.embed"][0].any()
    assert made["mtp.0.embed"][1].any()


def test_v32_joins_embedding_and_hidden_state() -> None:
    weights = random_weights(COMMON_DRAFTERS_V32, 1)
    w = {n: weight.values(torch.float64) for n, weight in weights.items()}
    model = ModelV32(
        BoundModel(COMMON_DRAFTERS_V32, Numerics.definition(), weights), COMMON_DRAFTERS_V32
    )
    sequence, step = Sequence(), TokenBatch.from_sequences([0], [COMMON_DRAFTERS_TOKENS])
    hidden = model.hidden(step, [sequence])
    logits, after = model.draft([sequence], hidden, [NEXT])
    e, h = rms(w["mtp.0.embed"][NEXT], w["mtp.0.enorm"]), rms(hidden, w["mtp.0.hnorm"])
    x = torch.cat((e, h), dim=-1) @ w["mtp.0.eh_proj"].T
    made = model.block(COMMON_DRAFTERS_V32.blocks[-1], {"x": x}, step, [Sequence()])
    expected = rms(made["x"] + made["residual"], w["mtp.0.norm"])
    assert (after - expected).abs().max() < 1e-12
    assert (logits - expected @ w["mtp.0.head"].T).abs().max() < 1e-12
    turned = torch.cat((h, e), dim=-1) @ w["mtp.0.eh_proj"].T
    assert (turned - x).abs().max() > 0.1  # the other order is seen


def test_v32_drafts_the_same_in_pieces() -> None:
    model = ModelV32(
        BoundModel(
            COMMON_DRAFTERS_V32, Numerics.definition(), random_weights(COMMON_DRAFTERS_V32, 1)
        ),
        COMMON_DRAFTERS_V32,
    )
    hidden = model.hidden(TokenBatch.from_sequences([0], [COMMON_DRAFTERS_TOKENS]), [Sequence()])
    whole, _ = model.draft([Sequence()], hidden, [NEXT])
    again, parts = Sequence(), torch.arange(40).split([9, 1, 30])
    pieces = [model.draft([again], hidden[part], [NEXT[part]])[0] for part in parts]
    assert (torch.cat(pieces) - whole).abs().max() < 1e-12
