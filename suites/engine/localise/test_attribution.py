"""The rule of blame: inputs that memory keeps, and everything else."""

from __future__ import annotations

import pytest

from degarble.harness.engine.localise.discrepancy import blamed_on_edge, is_memory, source_of
from degarble.harness.model.components import component_named
from degarble.harness.model.presets import small_v4, small_v32

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
    found = component_named(V4, f"{P}attend")
    assert source_of(found, "token_offsets") is None
    assert str(source_of(found, "state_window")) == f"{P}kv_write.out"
