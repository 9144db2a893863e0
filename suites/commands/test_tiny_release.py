"""A trained model becomes a checkpoint that opens; the released ones know what they were taught."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.commands import tiny_release
from degarble.harness.inference.model import LogitsModel
from degarble.references import tiny
from degarble.references.binding import BoundModel
from degarble.references.model import Sequence
from degarble.references.numerics import Numerics
from degarble.references.tiny import figures, language, train
from degarble.references.tiny.language import Mixture, document

_RELEASED = Path(tiny.__file__).parent / "v1"


def _trained(folder: Path, name: str) -> dict[str, torch.Tensor]:
    model = train.model_named(name, 3)
    stored = {key: value.detach() for key, value in model.weights.named_parameters()}
    folder.mkdir()
    save_file(stored, folder / "weights_0.safetensors")
    return model.named()


@pytest.mark.parametrize("name", ["v4", "v32"])
def test_a_released_model_holds_the_trained_weights(name: str, tmp_path: Path) -> None:
    trained = _trained(tmp_path / "trained", name)
    out = tmp_path / "out"
    tiny_release.main(["--model", name, "--trained", str(tmp_path / "trained"), "--out", str(out)])
    with Checkpoint.open(out) as checkpoint:
        assert not checkpoint.problems.found
        for key in ("embed", "layers.0.attn.wkv_b", "layers.0.attn.compressor.ape", "head"):
            if key in trained:
                stored = checkpoint.weights[key].values(torch.float32)
                torch.testing.assert_close(stored, trained[key], rtol=2**-8, atol=0.0)


def test_the_tokenizer_is_the_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tiny_release.tokenizer_files()["tokenizer.json"])
    tokenizer = Tokenizer.from_file(str(path))
    text = "recall : anna paints blue . 31 plus 16 is 47 ."
    assert tokenizer.encode(text).ids == language.encode(text)
    assert tokenizer.encode("<bos> anna").ids == [language.BOS, language.IDS["anna"]]
    stated = json.loads(tiny_release.tokenizer_files()["generation_config.json"])
    assert stated["eos_token_id"] == language.EOS


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    _trained(tmp_path / "trained", "v32")
    arguments = ["--model", "v4", "--trained", str(tmp_path / "trained"), "--out", "never"]
    with pytest.raises(InvalidArgument, match="weights of every parameter"):
        tiny_release.main(arguments)


@pytest.mark.parametrize("name", ["v4", "v32"])
def test_a_released_model_recalls_beyond_its_window_adds_and_copies(name: str) -> None:
    with Checkpoint.open(_RELEASED / name) as checkpoint:
        assert checkpoint.model is not None
        weights = {weight: checkpoint.weights[weight] for weight in checkpoint.weights}
        model = LogitsModel(BoundModel(checkpoint.model, Numerics.bf16(), weights))

        def logits(ids: list[int]) -> torch.Tensor:
            return model.logits(model.hidden([Sequence()], [torch.tensor(ids)]))

        known = figures.score([document(figures.HELD_OUT + 7, Mixture(length=400))], logits)
    assert known.asked == {"copy": 9, "recall 128": 12, "recall 256": 7, "sum": 2, "recall 512": 2}
    assert known.right == known.asked


@pytest.mark.parametrize(("name", "most"), [("v4", 12 << 20), ("v32", 4_000_000)])
def test_a_released_model_is_small(name: str, most: int) -> None:
    assert sum(path.stat().st_size for path in (_RELEASED / name).glob("*.safetensors")) <= most
