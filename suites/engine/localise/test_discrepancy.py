"""Discrepancies: the component or edge to blame, and the location in the tensor."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.capture.files.records import CapturedStep, Phase
from degarble.harness.engine.faults.model_faults import RowPositions
from degarble.harness.engine.localise.discrepancy import (
    blamed_on_edge,
    constant_at,
    is_memory,
    locate_difference,
    location_in_steps,
    source_of,
    spans,
)
from degarble.harness.model.components import component_named
from degarble.harness.model.config.config import small_v4, small_v32

# --------------------------------------------------------------------------------------------------
# The rule of blame: inputs that memory keeps, and everything else.

V4 = small_v4(num_hidden_layers=2, compress_ratios=(0, 4, 0))
V32 = small_v32(num_hidden_layers=1)
P = "layers.1.attn."


@pytest.mark.parametrize(
    ("config", "component", "name", "blamed"),
    [
        (V4, f"{P}q_norm", "x", f"{P}q_norm"),
        (V4, f"{P}attend", "q", f"{P}attend"),
        (V4, f"{P}attend", "positions", f"{P}attend"),
        (V4, f"{P}attend", "window", f"{P}kv_write"),
        (V4, f"{P}attend", "state_window", f"{P}kv_write"),
        (V4, f"{P}attend", "state_compressed", f"{P}compressor.write"),
        (V4, f"{P}compressor.pool", "latent", f"{P}compressor.pool"),
        (V4, f"{P}compressor.pool", "state_gate", f"{P}compressor.pool"),
        (V4, f"{P}indexer.scores", "state_keys", f"{P}indexer.compressor.pool"),
        (V32, "layers.0.attn.attend", "state_rows", "layers.0.attn.kv_write"),
        (V32, "layers.0.attn.indexer.scores", "state_keys", "layers.0.attn.indexer.k"),
        (V32, "layers.0.ffn.norm", "residual", "layers.0.ffn.norm"),
    ],
)
def test_memory_is_blamed_on_its_writer_and_the_rest_on_the_consumer(
    config: object, component: str, name: str, blamed: str
) -> None:
    found = component_named(config, component)  # type: ignore[arg-type]
    assert blamed_on_edge(found, name) == blamed
    assert is_memory(found, name) == (blamed != component or name.startswith("state_"))


def test_what_comes_from_outside_has_no_source() -> None:
    component = component_named(V4, f"{P}attend")
    assert source_of(component, "token_offsets") is None
    assert str(source_of(component, "state_window")) == f"{P}kv_write.out"


# --------------------------------------------------------------------------------------------------
# Where a difference sits: told only where it is a part, by the constants of the config.

T = 20


def rows(decode_from: int = T) -> RowPositions:
    at = torch.arange(T)
    return RowPositions(at, at >= decode_from, torch.zeros(T, dtype=torch.int64))


def told(
    role: str, bad: torch.Tensor, row_positions: RowPositions | None = None
) -> tuple[dict[str, object], str]:
    component = component_named(V4, f"layers.1.{role}")
    twin = torch.ones(bad.shape)
    location = locate_difference(V4, component, (twin + bad, twin), row_positions or rows())
    return dict(location.where), location.sentence


def test_what_is_everywhere_has_no_place() -> None:
    assert told("attn.wq_a", torch.ones(T, 8)) == ({}, "")
    assert told("attn.wq_a", torch.zeros(T, 8)) == ({}, "")


def test_positions_phases_and_single_rows() -> None:
    bad = torch.ones(T, 8)
    bad[0] = 0
    assert told("attn.wq_a", bad) == ({"first position": 1}, " (exact at position 0)")
    bad[:4] = 0
    where, words = told("attn.compressor.proj", bad)
    assert where == {"first position": 4}
    assert words == " (from position 4 on, the compress ratio 4)"
    bad[:15] = 0
    where, words = told("attn.wq_a", bad, rows(decode_from=15))
    assert where["phase"] == "decode"
    assert "only in decode" in words
    only = torch.zeros(T, 8)
    only[7] = 1
    where, words = told("attn.wq_a", only)
    assert where["first position"] == 7
    assert "only position 7" in words


def test_heads_experts_halves_and_columns() -> None:
    heads = torch.zeros(T, 8, 4)
    heads[:, 2:4] = 1
    assert told("attn.q_head_norm_rope", heads)[0] == {"head": "2-3"}
    half = torch.zeros(T, 16)
    half[:, 8:] = 1
    where, words = told("ffn.shared.w13", half)
    assert where == {"half": "up", "columns": "8-15"}
    experts = torch.tensor([[0, 1], [1, 2]] * (T // 2))
    routed = (experts != 0)[..., None].float().expand(T, 2, 8)
    at = rows()
    row_positions = RowPositions(at.position, at.decode, at.sequence, experts)
    where, words = told("ffn.experts.w2", routed, row_positions)
    assert where["expert"] == "1-2"
    assert "expert 0 exact" in words


def test_only_what_is_beyond_its_slack_counts_where_something_is() -> None:
    component = component_named(V4, "layers.1.attn.wq_a")
    twin = torch.ones(T, 8)
    near = twin + 1e-6
    near[3, 2] = 2.0
    location = locate_difference(V4, component, (near, twin), rows(), torch.full((T, 8), 1e-5))
    assert location.where["columns"] == "2"
    assert location.where["first position"] == 3


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([3], "3"), ([1, 2, 3, 7], "1-3, 7"), (list(range(0, 20, 2)), "10 from 0 to 18")],
)
def test_numbers_are_written_as_ranges(numbers: list[int], text: str) -> None:
    assert spans(numbers) == text


def test_constants_have_names() -> None:
    component = component_named(V4, "layers.1.attn.attend")
    assert "sliding window" in constant_at(V4, component, V4.sliding_window)
    assert not constant_at(V4, component, 77)


def experts_with(gains: dict[int, float], slack: float) -> tuple[dict[str, object], str]:
    """Eight experts in BF16, some with a faint gain; roundings went the other way everywhere."""
    noise = torch.Generator().manual_seed(5)
    exact = torch.randn(64, 2, 96, generator=noise, dtype=torch.float64)
    number = torch.arange(128).reshape(64, 2) % 8
    gain = torch.ones(8, dtype=torch.float64)
    for expert, own in gains.items():
        gain[expert] = own
    off = slack * (2 * torch.rand(exact.shape, generator=noise, dtype=torch.float64) - 1)
    candidate = (exact * gain[number][..., None] + off).bfloat16()
    row_positions = RowPositions(
        torch.full((64,), -1), torch.zeros(64, dtype=torch.bool), torch.full((64,), -1), number
    )
    bound = torch.full(exact.shape, 2 * slack, dtype=torch.float64)
    component = component_named(V4, "layers.1.ffn.experts.w2")
    location = locate_difference(V4, component, (candidate, exact.bfloat16()), row_positions, bound)
    return dict(location.where), location.sentence


@pytest.mark.parametrize("gain", [1.002, 1.004, 1.02, 2.0])
def test_a_faint_fault_names_no_healthy_expert(gain: float) -> None:
    where, _ = experts_with(dict.fromkeys((4, 5, 6, 7), gain), 1e-4)
    assert where.pop("expert") == "4-7"
    assert not where


def test_what_no_place_shows_by_itself_has_none() -> None:
    assert experts_with({}, 1e-4) == ({}, "")
    assert experts_with({4: 1.0001, 5: 1.0001}, 1e-4) == ({}, "")


PHASES = (Phase.PREFILL, Phase.PREFILL, Phase.DECODE, Phase.DECODE, Phase.DECODE)
STEPS = {
    number: CapturedStep(number, phase, (1,) * count, tuple(range(count)), (0,) * count)
    for number, (phase, count) in enumerate(zip(PHASES, (9, 4, 1, 2, 1), strict=True))
}


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({0, 1}, {"phase": "prefill"}),
        ({2, 3, 4}, {"phase": "decode"}),
        ({3}, {"step": 3}),
        ({3, 4}, {"steps": "from 3"}),
        ({0, 1, 2}, {"steps": "to 2"}),
        ({2, 4}, {"tokens": "<= 1"}),
        ({1, 3}, {"steps": "1, 3"}),
        ({0, 1, 3}, {"tokens": ">= 2"}),
        ({0, 1, 2, 3, 4}, {}),
        (set(), {}),
    ],
)
def test_the_simplest_rule_separates_wrong_steps_from_right_ones(
    wrong: set[int], where: dict[str, object]
) -> None:
    assert dict(location_in_steps(STEPS, wrong, set(STEPS)).where) == where
