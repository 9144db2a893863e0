"""The loader proof: its moves carried out on numbered elements, against vLLM's loaders and itself.

Every stored element gets a number of its own. The moves that a proof claims are carried out for
every rank; what then lies where is compared with an independent loader (loader_vllm.py), and what
is left over on either side with what the proof says is unread and unwritten.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from degarble.harness.checkpoint.audit.loader.engine_maps import Ranks
from degarble.harness.checkpoint.audit.loader.routes import Writer
from degarble.harness.model.config.config import V4Config
from degarble.harness.model.layouts import LAYOUTS
from degarble.suites.checkpoint.audit.loader.loader_cases import FIELD, proven
from degarble.suites.checkpoint.audit.loader.loader_moves import (
    moved,
    numbered,
    require_claims,
    sliced,
)
from degarble.suites.checkpoint.audit.loader.loader_vllm import Rank, loaded, v4_place, v32_place
from degarble.suites.checkpoint.structure_cases import V4, V32, errors, told, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from degarble.harness.model.config.config import Config
    from degarble.suites.checkpoint.audit.loader.loader_vllm import Place

    Write = Callable[[Config, str], Path]

# Wide enough to be cut into eight: whole blocks, heads and groups for every rank.
WIDE_V4 = replace(V4, num_attention_heads=8, o_groups=8, n_routed_experts=8)
WIDE_V32 = replace(
    V32,
    num_attention_heads=16,
    qk_nope_head_dim=128,
    v_head_dim=128,
    n_routed_experts=8,
    n_group=4,
    intermediate_size=1024,
    moe_intermediate_size=1024,
)
SPREADS = [Ranks(), Ranks(tp=2), Ranks(tp=8), Ranks(tp=2, ep=4), Ranks(tp=8, ep=8)]
FUSED = {"transformers"}  # as an engine does that has no map here


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Write:
    made: dict[tuple[Config, str], Path] = {}

    def write_once(config: Config, layout: str) -> Path:
        if (config, layout) not in made:
            made[config, layout] = write(tmp_path_factory.mktemp("proof") / "c", config, layout)
        return made[config, layout]

    return write_once


def places(names: list[str], config: Config, layout: str) -> dict[str, Place]:
    """Say where vLLM puts every stored tensor of a layout that it reads itself."""
    if isinstance(config, V4Config):
        nvfp4 = layout == "nvfp4-experts"
        found = {name: v4_place(name, config.num_hidden_layers, nvfp4) for name in names}
        if nvfp4:  # the drafter is built in another format than it is stored in
            found = {k: v for k, v in found.items() if ".mtp_block.ffn.experts." not in v[0]}
        return found
    each = {name: v32_place(name, config.num_hidden_layers) for name in names}
    return {name: place for name, place in each.items() if place is not None}


@pytest.mark.parametrize("ranks", SPREADS, ids=str)
@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (WIDE_V4, "official"),
        (WIDE_V4, "nvfp4-experts"),
        (WIDE_V4, "bf16"),
        (WIDE_V32, "official"),
        (WIDE_V32, "nvfp4-full"),
    ],
    ids=["V4", "V4 NVFP4", "V4 BF16", "V3.2", "V3.2 NVFP4"],
)
def test_every_element_lies_where_vllm_puts_it(
    written: Write, config: Config, layout: str, ranks: Ranks
) -> None:
    proof = proven(written(config, layout), {"base": "vllm", **ranks._asdict()})
    stored = numbered(proof)
    memories = moved(proof, stored)
    wanted = {
        name: (place, stored[name])
        for name, place in places(list(stored), config, layout).items()
        if proof.outcomes[name] == "placed"
    }
    compared = 0
    for held in proof.held():
        rank = Rank(held.rank, ranks.tp, ranks.ep, config.n_routed_experts)
        for name, parts in loaded(wanted, rank).items():
            target = held.targets.get(name)
            for (expert, slot), part in parts.items():
                if target is None:  # a shared expert's padding fills all of this rank's share
                    assert (part == -2).all(), name
                    continue
                member = target.members[expert if target.stacked else None, slot]
                memory = memories[held.rank, name][sliced(member.box)]
                np.testing.assert_array_equal(
                    memory.ravel(), part[part != -2].ravel(), err_msg=f"{name} {expert} {slot}"
                )
                compared += 1
    assert compared >= len(wanted)


@pytest.mark.parametrize("ranks", [Ranks(), Ranks(tp=2), Ranks(tp=8), Ranks(tp=2, ep=4)], ids=str)
@pytest.mark.parametrize(
    ("family", "layout"), [key for key in LAYOUTS if key[1] not in FUSED], ids=str
)
def test_healthy_checkpoints_raise_no_error(
    written: Write, family: str, layout: str, ranks: Ranks
) -> None:
    config = WIDE_V4 if family == V4Config.family else WIDE_V32
    raw = {"base": "vllm"}
    if (family, layout) == (V4Config.family, "nvfp4-full"):  # as its engine was built
        raw = FIELD
    proof = proven(written(config, layout), {**raw, **ranks._asdict()})
    assert errors(proof.findings) == set()
    assert proof.unread == {} or told(proof.findings, "loader.drafter_format")
    assert proof.unwritten == {} or told(proof.findings, "loader.drafter_format")


@pytest.mark.parametrize(
    "ranks", [Ranks(tp=2), Ranks(tp=2, ep=4), Ranks(tp=2, ep=2, pp=3)], ids=str
)
@pytest.mark.parametrize("layout", ["official", "nvfp4-experts", "nvfp4-full", "vllm"])
def test_claims_hold_for_healthy_maps(written: Write, layout: str, ranks: Ranks) -> None:
    raw = FIELD if layout == "nvfp4-full" else {"base": "vllm"}
    require_claims(proven(written(V4, layout), {**raw, **ranks._asdict()}))


SPOILT: dict[str, dict[str, object]] = {
    "skipped": {"skip": [r"layers\.1\.attn\.wq_b"]},
    "dropped": {"rename": [{"match": r"\.wo_a\.scale$", "to": ".wo_a.lost"}]},
    "partners swapped": {
        "stack": [
            {"match": rf"\.experts\.(?P<expert>\d+)\.{w}\.", "into": ".experts.w13_", "slot": slot}
            for w, slot in (("w1", 1), ("w3", 0))
        ],
    },
    "slot that is not there": {
        "stack": [{"match": r"\.attn\.wkv\.", "into": ".attn.fused_wqa_wkv.", "slot": 7}],
    },
    "both to one slot": {
        "stack": [{"match": r"_experts\.w3\.", "into": "_experts.gate_up_proj.", "slot": 0}],
    },
    "cut along the other dimension": {"split": [{"match": r"\.attn\.wq_b\.", "dim": 1}]},
    "not cut": {"split": [{"match": r"\.attn\.wo_a\.", "dim": 9}]},
    "cut in large pieces": {"split": [{"match": "attn_sink$", "dim": 0, "multiple": 64}]},
    "everything to one": {"rename": [{"match": "^.*", "to": "norm.weight"}]},
    "nothing known": {"rename": [{"match": "^", "to": "x."}]},
}


@pytest.mark.parametrize("what", SPOILT)
def test_claims_hold_for_spoilt_maps(written: Write, what: str) -> None:
    raw = {"base": "vllm", "tp": 2, "ep": 1, **SPOILT[what]}
    proof = proven(written(V4, "official"), raw)
    assert errors(proof.findings)
    # Where two tensors go to one place, the order of files decides which of them is read.
    require_claims(proof, sources=what not in {"both to one slot", "everything to one"})


def test_alike_writes_are_the_single_ones(written: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def summary(ranks: Ranks, **changes: object) -> object:
        raw = {"base": "vllm", **ranks._asdict(), **changes}
        proof = proven(written(V4, "official"), raw)
        return proof.findings, proof.unread, proof.unwritten, proof.summary()

    cases: list[tuple[Ranks, dict[str, object]]] = [
        (ranks, {}) for ranks in (Ranks(), Ranks(tp=2), Ranks(tp=2, ep=4), Ranks(2, 2, 3))
    ]
    cases += [(Ranks(tp=2), change) for change in list(SPOILT.values())[::2]]
    together = [summary(ranks, **changes) for ranks, changes in cases]
    monkeypatch.setattr(Writer, "whole", lambda *_: ())
    assert [summary(ranks, **changes) for ranks, changes in cases] == together
