"""Runs of SmolLM2 with its real weights agree when healthy, and faults are placed in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.capture.recorder import MemoryRun, Recorder
from degarble.harness.capture.traced import recording
from degarble.harness.engine.localise.localise import localise
from degarble.harness.model.recipes import recipe_named
from degarble.references.numerics import Numerics
from degarble.references.traced.family import TracedConfig, TracedModel
from degarble.suites.real.smollm2 import convert, fetch
from degarble.suites.references.traced.traced_models import weights_of

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.real, pytest.mark.needs("transformers", "gguf")]
TEXT = "A quick brown fox jumps over a lazy dog, and seven wizards box 12 jugs of liquor. " * 4


@pytest.fixture(scope="session")
def folder() -> Path:
    """Return the model as a Hugging Face folder; it stays in out/ for the next run."""
    held = Path(__file__).resolve().parents[2] / "out" / "smollm2"
    if not (held / "bf16" / "tokenizer.json").exists():
        held.mkdir(parents=True, exist_ok=True)
        convert(fetch(held), held / "bf16")
    return held / "bf16"


def loaded(folder: Path, dtype: torch.dtype, attention: str = "eager") -> Any:
    """Return transformers' model."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  heavy

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention
    ).eval()


def judged(
    folder: Path, dtype: torch.dtype, attention: str, plant: Callable[[Any], object] | None = None
) -> Any:
    """Judge a run on 64 tokens; a fault goes into the run alone."""
    from transformers import AutoTokenizer  # noqa: PLC0415  heavy

    model = loaded(folder, dtype, attention)
    raw = {**model.config.to_dict(), "dtype": str(dtype).removeprefix("torch.")}
    config: Any = TracedConfig.of(raw)
    weights = weights_of(model)
    if plant is not None:
        plant(model)
    ids = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")["input_ids"][:, :64]
    run = MemoryRun({})
    with torch.inference_mode(), recording(model, config, Recorder(run)):
        model(input_ids=ids)
    numerics = replace(Numerics.bf16(), work=torch.float64, products=torch.float64, store=dtype)
    return localise(TracedModel(config, numerics, weights), recipe_named("bf16", config), run)


def test_the_model_talks(folder: Path) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415  heavy

    tokenizer, model = AutoTokenizer.from_pretrained(folder), loaded(folder, torch.bfloat16)
    asked: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    told = model.generate(**asked, max_new_tokens=8, do_sample=False)
    assert "capital of France is Paris." in tokenizer.decode(told[0])


@pytest.mark.parametrize(
    ("attention", "dtype"),
    [("eager", torch.float32), ("eager", torch.bfloat16), ("sdpa", torch.bfloat16)],
    ids=["eager-float32", "eager-bfloat16", "sdpa-bfloat16"],
)
def test_a_healthy_run_agrees(folder: Path, attention: str, dtype: torch.dtype) -> None:
    found = judged(folder, dtype, attention)
    assert found.verdict == "AGREES"
    assert not found.unjudged
    assert not found.origins


@pytest.mark.parametrize("layers", [(7,), tuple(range(3, 23, 2))], ids=["one", "ten"])
def test_doubled_products_are_placed(folder: Path, layers: tuple[int, ...]) -> None:
    def plant(model: Any) -> None:
        for layer in layers:
            model.model.layers[layer].mlp.up_proj.weight.data.mul_(2)

    found = judged(folder, torch.bfloat16, "eager", plant)
    assert {origin.component for origin in found.origins} == {
        f"layers.{layer}.mlp.up_proj" for layer in layers
    }
