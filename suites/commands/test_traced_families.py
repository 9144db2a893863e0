"""Every command on checkpoints of families that transformers alone describes."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from degarble.harness.capture.capture import CaptureSettings, capture
from degarble.harness.capture.files.reader import Capture
from degarble.suites.commands.calls import call
from degarble.suites.commands.traced_checkpoints import (
    PROMPT,
    TEMPLATE,
    write_checkpoint,
    write_tokenizer,
)
from degarble.suites.references.traced.traced_models import ARCHITECTURES, built, raw_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from degarble.suites.commands.calls import Result

    Capsys = pytest.CaptureFixture[str]

pytestmark = pytest.mark.needs("transformers")

QUICK = ("llama", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", "lfm2")
RECURRENT = (
    "qwen3_next", "qwen3_5_text", "nemotron_h", "minimax", "granitemoehybrid", "falcon_h1", "lfm2",
    "mamba", "mamba2", "jamba", "bamba", "zamba2",
)  # fmt: skip
NAMES = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ARCHITECTURES]
_SETTLED = ("--prompt", PROMPT, "--max-new-tokens", 3)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one checkpoint for all suites that damage a copy of it."""
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


_WITHOUT_CACHE = {"recurrent_gemma"}  # transformers' own model returns none


def captured(capsys: Capsys, source: Path, folder: Path, *options: object) -> Result:
    """Capture a run."""
    return call(capsys, "capture", source, "--out", folder, *_SETTLED, *options)


def checked(capsys: Capsys, folder: Path, reference: Path) -> dict[str, Any]:
    """Judge it."""
    made = call(capsys, "check", folder, "--reference", reference, "--json")
    assert made.out, made.err
    return made.document


def test_token_ids_reach_an_embedding_whose_weights_are_not_there_yet(
    capsys: Capsys, tmp_path: Path
) -> None:
    # Llama 4 moves them to the device of the embedding's weight.
    source = write_checkpoint(tmp_path / "llama4", "llama4_text")
    made = captured(capsys, source, tmp_path / "run", "--backend", "transformers")
    assert made.status == 0, made.err
    table = next(
        held["model.embed_tokens.weight"]
        for held in map(load_file, sorted(source.glob("*.safetensors")))
        if "model.embed_tokens.weight" in held
    )
    (stored,) = (load_file(file) for file in (tmp_path / "run").glob("*.safetensors"))
    steps = [name for name in stored if name.endswith("embed_tokens.out")]
    assert steps
    for name in steps:
        tokens = stored[name.replace(".out", ".in.tokens")]
        assert torch.equal(stored[name], table[tokens])


def test_experts_of_a_width_that_no_grouped_product_takes(capsys: Capsys, tmp_path: Path) -> None:
    made: Any = built("qwen3_moe", torch.bfloat16, num_hidden_layers=1, moe_intermediate_size=20)
    made.save_pretrained(tmp_path / "moe")
    write_tokenizer(tmp_path / "moe")
    done = captured(capsys, tmp_path / "moe", tmp_path / "run", "--backend", "transformers")
    assert done.status == 0, done.err


@pytest.mark.parametrize("name", NAMES)
def test_every_command_runs_and_a_healthy_run_agrees(
    capsys: Capsys, tmp_path: Path, name: str
) -> None:
    source = write_checkpoint(tmp_path / name, name)
    assert call(capsys, "audit", source).status == 0
    said = call(capsys, "generate", source, *_SETTLED, "--json").document
    texts, ends = [], [23, 24, 25]
    for backend in ("torch", "transformers"):
        folder = tmp_path / backend
        made = captured(capsys, source, folder, "--backend", backend)
        if backend == "transformers" and name in _WITHOUT_CACHE:
            assert "--max-new-tokens 1" in made.err
            ends = ends[:1]
            made = captured(capsys, source, folder, "--backend", backend, "--max-new-tokens", 1)
        assert made.status == 0, made.err
        found = checked(capsys, folder, source)
        assert found["verdict"] == "AGREES", found["origins"]
        run = Capture.open(folder)
        assert [step.positions[-1] for step in run.steps] == ends
        texts.append(run.facts["sequences"][0])
    # transformers rounds elsewhere, so it may choose another token at a near tie.
    assert texts[0]["new"] == said["texts"][0]["tokens"]
    assert len(texts[1]["new"]) == len(ends)


def test_a_vision_tower_with_layers_of_the_same_names_is_passed_over(
    capsys: Capsys, tmp_path: Path
) -> None:
    import transformers  # noqa: PLC0415  heavy, and optional

    text = {**raw_config("gemma3_text"), "model_type": "gemma3_text", "head_dim": 16}
    vision = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, boi_token_index=120,
        eoi_token_index=121, image_token_index=122,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.Gemma3ForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "gemma3")
    write_tokenizer(tmp_path / "gemma3")
    for backend in ("torch", "transformers"):
        made = captured(capsys, tmp_path / "gemma3", tmp_path / backend, "--backend", backend)
        assert made.status == 0, made.err
        found = checked(capsys, tmp_path / backend, tmp_path / "gemma3")
        assert found["verdict"] == "AGREES", found["origins"]


def test_a_chat_follows_the_template_of_the_checkpoint(capsys: Capsys, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "llama", "llama")
    stated = {"chat_template": TEMPLATE, "eos_token": {"content": "</s>"}}
    (source / "tokenizer_config.json").write_text(json.dumps(stated))
    said = call(capsys, "generate", source, "--chat", "--system", "be brief", *_SETTLED, "--json")
    (text,) = said.document["texts"]
    # One token a letter, and none before the text: this tokenizer adds none by itself.
    assert text["prompt_tokens"] == len(f"<system>be brief<user>{PROMPT}<assistant>")
    assert text["message"] == {"role": "assistant", "content": text["text"]}
    (source / "tokenizer_config.json").unlink()
    refused = call(capsys, "generate", source, "--chat", *_SETTLED)
    assert refused.status == 2
    assert "chat template" in refused.err


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "lfm2" else pytest.mark.slow) for n in RECURRENT]
)
def test_two_sequences_agree_in_float32_by_streamed_weights(
    capsys: Capsys, tmp_path: Path, name: str
) -> None:
    source = write_checkpoint(tmp_path / name, name, torch.float32)
    settings = CaptureSettings(new_tokens=3, backend="transformers", held_values=0)
    prompts = [tuple(range(5, 28)), tuple(range(60, 77))]
    capture(source, prompts, tmp_path / "run", lambda _streamed: nullcontext(), settings)
    found = checked(capsys, tmp_path / "run", source)
    assert found["verdict"] == "AGREES", found["origins"]
    assert any("by a measured budget" in note for note in found["notes"])


_PATCH = """
def patch(candidate):
    candidate.weights["layers.1.self_attn.q_proj.weight"].value.mul_(1.01)
    candidate.weights["model.layers.1.mlp.down_proj"].value.neg_()
    candidate.weights["layers.0.input_layernorm.weight"].value.mul_(1.01)
"""


def test_three_faults_are_placed_exactly(capsys: Capsys, tmp_path: Path, llama: Path) -> None:
    patch = tmp_path / "patch.py"
    patch.write_text(_PATCH)
    folder = tmp_path / "capture"
    captured(capsys, llama, folder, "--backend", "transformers", "--patch", patch)
    found = checked(capsys, folder, llama)
    assert found["verdict"] == "DIFFERS"
    assert {(origin["layer"], origin["component"]) for origin in found["origins"]} == {
        (0, "input_layernorm"), (1, "self_attn.q_proj"), (1, "mlp.down_proj"),
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Bad input is refused by name, with what to do.


def _config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Put all tensors into one file, changed."""
    held: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        held |= load_file(shard)
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink()
    change(held)
    save_file(held, folder / "model.safetensors")


def _gguf(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "model.gguf").write_bytes(b"GGUF")


_NORM = "model.layers.1.input_layernorm.weight"
_REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "architecture": (lambda folder: _config(folder, model_type="no_such"), "no_such"),
    "code": (
        lambda folder: _config(folder, model_type="own", auto_map={"AutoConfig": "own.Config"}),
        "code is never run",
    ),
    "no text": (lambda folder: _config(folder, model_type="vit"), "a causal language model"),
    "heads": (
        lambda folder: _config(folder, num_attention_heads=5), "settings that transformers builds"
    ),
    "negative": (lambda folder: _config(folder, hidden_size=-64), "builds this model"),
    "no name": (lambda folder: _config(folder, model_type=["llama"]), "an architecture of"),
    "gguf": (_gguf, "gguf_file=FILE"),
    "missing": (
        lambda folder: _tensors(folder, lambda held: held.pop(_NORM)), f"missing, such as {_NORM}"
    ),
    "renamed": (
        lambda folder: _tensors(folder, lambda held: held.update(NORM=held.pop(_NORM))),
        "1 stored without a parameter, such as NORM",
    ),
    "config": (lambda folder: (folder / "config.json").write_text("{"), "one JSON value"),
    "shape": (
        lambda folder: _tensors(folder, lambda held: held.update({_NORM: torch.ones(3)})),
        f"{_NORM} = 'model.layers.1.input_layernorm [3]'",
    ),
    "unexpected": (
        lambda folder: _tensors(folder, lambda held: held.update(strange=torch.ones(3))),
        "without a parameter, such as strange",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", _REFUSED)
def test_bad_input_is_refused_by_name(capsys: Capsys, tmp_path: Path, case: str) -> None:
    source = write_checkpoint(tmp_path / "llama", "llama")
    damage, expected = _REFUSED[case]
    damage(source)
    made = call(capsys, "generate", source, *_SETTLED)
    assert made.status == 2
    assert expected in " ".join(made.err.split())
    assert captured(capsys, source, tmp_path / "capture").status == 2
    assert not (tmp_path / "capture").exists()


def test_a_cache_with_a_scale_for_each_head_is_read(capsys: Capsys, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "llama", "llama")
    scheme = {"num_bits": 8, "type": "int", "strategy": "attn_head", "dynamic": False}
    stated = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
    _config(source, quantization_config={**stated, "kv_cache_scheme": scheme})
    scales = torch.tensor([0.04, 0.06]).reshape(2, 1, 1)
    names = [f"model.layers.{layer}.self_attn.{side}_scale" for layer in (0, 1) for side in "kv"]
    _tensors(source, lambda held: held.update({name: scales.clone() for name in names}))
    assert captured(capsys, source, tmp_path / "capture").status == 0
    assert checked(capsys, tmp_path / "capture", source)["verdict"] == "AGREES"
    run = Capture.open(tmp_path / "capture")
    (call_, *_) = [each for each in run.calls if each.component == "layers.1.self_attn.cache"]
    given, made = run.inputs(call_)["key"].float(), run.outputs(call_)["key"].float()
    by_head = scales.reshape(1, 2, 1)
    assert torch.equal(made, ((given / by_head).round() * by_head).bfloat16().float())
    assert not torch.equal(given, made)
    held = {name: each.clone() for name, each in load_file(source / "model.safetensors").items()}
    save_file({**held, names[0]: torch.ones(3, 1, 1)}, source / "model.safetensors")
    refused = captured(capsys, source, tmp_path / "other")
    assert refused.status == 2
    assert "each of 2 heads" in refused.err


def test_a_capture_of_another_model_is_refused(capsys: Capsys, tmp_path: Path, llama: Path) -> None:
    other = write_checkpoint(tmp_path / "qwen3", "qwen3")
    captured(capsys, llama, tmp_path / "capture")
    assert call(capsys, "check", tmp_path / "capture", "--reference", other).status == 2
    both = ("--checkpoint", other)
    assert call(capsys, "check", tmp_path / "capture", "--reference", other, *both).status == 2


def test_transformers_computes_no_single_component(
    capsys: Capsys, tmp_path: Path, llama: Path
) -> None:
    made = call(capsys, "generate", llama, "--backend", "transformers", *_SETTLED)
    assert made.status == 2
    assert "a backend with kernels" in made.err
    assert not (tmp_path / "capture").exists()


def test_a_config_that_is_there_is_not_said_to_be_missing(
    capsys: Capsys, tmp_path: Path, llama: Path
) -> None:
    shutil.copytree(llama, tmp_path / "llama")
    (tmp_path / "llama" / "config.json").write_text("{")
    made = call(capsys, "audit", tmp_path / "llama", "--loader", "transformers")
    assert made.status == 2
    assert "config.json = 'unreadable in llama'" in made.err
