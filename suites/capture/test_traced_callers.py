"""Whoever calls a healthy model, and however: its run agrees, or is refused by name."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.capture.recorder import MemoryRun, Recorder
from degarble.harness.capture.traced import recording
from degarble.references.traced.family import TracedConfig
from degarble.suites.references.traced.traced_models import built, config_of, weights_of
from degarble.suites.support.traced_runs import judged_run, prompt, recorded

if TYPE_CHECKING:
    from collections.abc import Callable

    Call = Callable[[Any, torch.Tensor], object]

pytestmark = pytest.mark.needs("transformers")
_PADDING = 6


def _judged(name: str, call: Call, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
    model: Any = built(name, dtype, **settings)
    config, weights = config_of(name, dtype, **settings), weights_of(model)
    run = MemoryRun({})
    with torch.inference_mode(), recording(model, config, Recorder(run)):
        call(model, prompt(config))
    return judged_run(config, weights, run)


def _generated(model: Any, ids: torch.Tensor, padding: int = 0, **more: Any) -> None:
    """Let transformers continue prompts, the first of which begins with padding."""
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    model.generate(
        input_ids=ids * mask, attention_mask=mask, max_new_tokens=3, do_sample=False,
        pad_token_id=0, eos_token_id=None, **more,
    )  # fmt: skip


def _padded_left(model: Any, ids: torch.Tensor) -> None:
    _generated(model, ids, _PADDING)


def _padded_to_one_token(model: Any, ids: torch.Tensor) -> None:
    _generated(model, ids, ids.shape[1] - 1)


def _padded_right(model: Any, ids: torch.Tensor) -> None:
    mask = torch.ones_like(ids)
    mask[0, -_PADDING:] = 0
    model(input_ids=ids * mask, attention_mask=mask, use_cache=False)


def _static(model: Any, ids: torch.Tensor) -> None:
    model.set_attn_implementation("sdpa")
    _generated(model, ids, cache_implementation="static", disable_compile=True)


def _static_padded(model: Any, ids: torch.Tensor) -> None:
    _generated(model, ids, _PADDING, cache_implementation="static", disable_compile=True)


def _speculated(model: Any, ids: torch.Tensor) -> None:
    _generated(model, ids[:1], prompt_lookup_num_tokens=2)


def _last_logits(model: Any, ids: torch.Tensor) -> None:
    model(input_ids=ids, logits_to_keep=3)


def _own_head(model: Any, ids: torch.Tensor) -> None:
    """Compute logits in float32, by a function whose argument has another name."""
    head = model.lm_head.float()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.float(), self.weight)

    head.forward = MethodType(forward, head)
    model(input_ids=ids)


_SETTINGS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 8},
    "mistral": {"sliding_window": 8},
    "llama4_text": {"attention_chunk_size": 8, "no_rope_layers": [1, 0]},
}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("llama", _padded_left),
        ("llama", _padded_right),
        ("llama", _static),
        ("llama", _speculated),
        ("llama", _last_logits),
        ("llama", _own_head),
        # Every layer slides, so generate() makes one mask, of the window's width.
        ("mistral", _static_padded),
        # The last token's rows are not contiguous: torch stores the product before the bias.
        ("phi", _generated),
        # A chunk begins among the decoding steps; the cache keeps one chunk.
        ("llama4_text", _generated),
        # It keeps as many columns of every sequence, which are fewer rows of a short one.
        ("llama4_text", _padded_to_one_token),
        pytest.param("gemma3_text", _padded_left, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", _padded_left, marks=pytest.mark.slow),
        # Latents of a static cache are projected where nothing was written yet, too.
        pytest.param("deepseek_v3", _static, marks=pytest.mark.slow),
    ],
)
def test_a_healthy_run_agrees(name: str, call: Call) -> None:
    found = _judged(name, call, **_SETTINGS.get(name, {}))
    assert [origin.component for origin in found.origins] == []
    assert found.verdict == "AGREES"
    assert not found.unjudged


def test_a_mask_of_float16_holds_no_number_that_hides_a_key() -> None:
    found = _judged("llama", _padded_right, torch.float16)
    assert found.verdict == "AGREES"
    assert not found.unjudged


def test_a_fault_among_padding_is_placed() -> None:
    def call(model: Any, ids: torch.Tensor) -> None:
        model.model.layers[1].self_attn.o_proj.weight.data *= 1.1
        _padded_left(model, ids)

    found = _judged("llama", call)
    assert [origin.component for origin in found.origins] == ["layers.1.self_attn.o_proj"]


def test_a_fault_in_what_a_short_and_a_long_sequence_left_is_placed() -> None:
    def call(model: Any, ids: torch.Tensor) -> None:
        mask = torch.ones_like(ids)
        mask[0, :-1] = 0
        at = (mask.cumsum(1) - 1).clamp(min=0)
        out = model(input_ids=ids * mask, attention_mask=mask, position_ids=at, use_cache=True)
        out.past_key_values.layers[0].keys[1, :, -2] *= 1.02
        mask = torch.cat([mask, mask[:, -1:]], 1)
        model(
            input_ids=ids[:, :1], attention_mask=mask, position_ids=at[:, -1:] + 1,
            past_key_values=out.past_key_values, use_cache=True,
        )  # fmt: skip

    found = _judged("llama4_text", call, **_SETTINGS["llama4_text"])
    (origin,) = found.origins
    assert str(origin.site) == "layers.0.self_attn.cache.in.state_key"
    assert dict(origin.where) == {"row": 6}  # one of the first sequence, and seven


_HALF = torch.float16


@pytest.mark.slow
def test_what_prefill_holds_in_float32_decoding_may_hold_in_float16() -> None:
    found = _judged("nemotron_h", _generated, _HALF)
    assert [origin.component for origin in found.origins] == []
    assert found.verdict == "AGREES"


@pytest.mark.slow
def test_a_fault_in_what_is_held_in_float16_is_placed() -> None:
    def call(model: Any, ids: torch.Tensor) -> None:
        model.model.layers[0].mixer.norm.weight.data *= 1.02
        _generated(model, ids)

    found = _judged("nemotron_h", call, _HALF)
    assert [origin.component for origin in found.origins] == ["layers.0.mixer.norm"]


_GPTJ: dict[str, Any] = {
    "n_embd": 64, "n_layer": 1, "n_head": 4, "rotary_dim": 8, "vocab_size": 128, "n_positions": 64,
}  # fmt: skip


def _judged_gptj(change: Callable[[torch.nn.Module], None]) -> Any:
    dtype = torch.bfloat16
    model: Any = built("gptj", dtype, settings=_GPTJ)
    raw = {**_GPTJ, "model_type": "gptj", "dtype": "bfloat16"}
    config, weights = TracedConfig.of(raw), weights_of(model)
    change(model)
    return judged_run(config, weights, recorded(model, config, prompt(config), 0))


def _load_tables(model: Any, factor: float = 1.0) -> None:
    """Compute tables as loading does: in torch's default dtype, which it leaves alone."""
    for block in model.transformer.h:
        model._init_weights(block.attn)
        block.attn.embed_positions *= factor


def test_tables_of_a_model_that_was_never_loaded_are_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match=r"embed_positions.*computed in torch.bfloat16"):
        _judged_gptj(lambda _model: None)
    assert _judged_gptj(_load_tables).verdict == "AGREES"


def test_other_tables_than_a_loaded_models_are_a_finding() -> None:
    found = _judged_gptj(partial(_load_tables, factor=1.02))
    first = found.origins[0]
    assert first.component == "layers.0.attn_input"


_AHEAD: dict[str, Any] = {
    "use_bidirectional_attention": True,
    "layer_types": ["full_attention"] * 2,
}


def _packed(model: Any, ids: torch.Tensor) -> None:
    at = torch.cat([torch.arange(10), torch.arange(ids.shape[1] - 10)])
    model(input_ids=ids[:1], position_ids=at[None], use_cache=False)


def _padded_without_positions(model: Any, ids: torch.Tensor) -> None:
    mask = torch.ones_like(ids)
    mask[0, :_PADDING] = 0
    model(input_ids=ids, attention_mask=mask)


def _own_mask(model: Any, ids: torch.Tensor) -> None:
    time = ids.shape[1]
    model(input_ids=ids, attention_mask=torch.ones(2, 1, time, time, dtype=torch.bool))


def _beams(model: Any, ids: torch.Tensor) -> None:
    _generated(model, ids, num_beams=2)


def _autocast(model: Any, ids: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=ids)


@pytest.mark.parametrize(
    ("name", "call", "expected"),
    [
        ("llama", _packed, "position_ids = 0: expected 10"),
        ("llama", _padded_without_positions, "position_ids = 6: expected 0"),
        ("llama", _own_mask, r"attention_mask = \[2, 1, 23, 23\]"),
        ("llama", _beams, "num_beams=1"),
        ("llama", _autocast, "autocast = 'torch.bfloat16'"),
        ("lfm2", _padded_right, "attention_mask = '6 tokens of padding'"),
        ("bloom", _padded_right, "attention_mask = '6 tokens of padding'"),
        # generate() makes causal masks for a static cache, of a model that looks ahead as well.
        ("gemma3_text", _static_padded, "the masks that this model makes itself"),
        ("gemma3_text", _static, "the masks that this model makes itself"),
    ],
)
def test_a_run_that_no_twin_repeats_is_refused_by_name(
    name: str, call: Call, expected: str
) -> None:
    with pytest.raises(InvalidArgument, match=expected):
        _judged(name, call, **(_AHEAD if name == "gemma3_text" else {}))


def test_causal_attention_of_a_model_that_looks_ahead_is_a_finding() -> None:
    def call(model: Any, ids: torch.Tensor) -> None:
        model.config.use_bidirectional_attention = False
        _padded_left(model, ids)

    found = _judged("gemma3_text", call, **_AHEAD)
    assert found.origins[0].component == "layers.0.self_attn.attention"


def _longrope(short: int) -> dict[str, Any]:
    """Return settings of a model whose frequencies change after so many tokens."""
    factors = {"short_factor": [1.0 + at / 8 for at in range(8)], "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    return {
        "original_max_position_embeddings": short, "max_position_embeddings": 64,
        "rope_parameters": {**rope, "original_max_position_embeddings": short},
    }  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        _longrope(32),
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
         "max_position_embeddings": 32},
    ],
    ids=["longrope", "dynamic"],
)  # fmt: skip
def test_a_rotation_that_changes_for_longer_texts_is_judged_up_to_there(
    settings: dict[str, Any],
) -> None:
    found = _judged("phi3" if "original_max_position_embeddings" in settings else "llama",
                    _generated, **settings)  # fmt: skip
    assert found.verdict == "AGREES"
    assert not found.unjudged


def test_a_rotation_beyond_its_first_frequencies_is_not_judged() -> None:
    dtype, settings = torch.float32, _longrope(16)
    model, config = built("phi3", dtype, **settings), config_of("phi3", dtype, **settings)
    found = judged_run(config, weights_of(model), recorded(model, config, prompt(config)))
    assert not found.origins
    assert [name for name, _ in found.unjudged] == ["rotary_emb"]
    assert "less than 16" in str(found.unjudged[0])
