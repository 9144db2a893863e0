"""The museum's models: written by the job behind `degarble quantise`, read as they lie on disk."""

from __future__ import annotations

import json

import torch

from degarble.harness.base.files import read_small_file
from degarble.harness.checkpoint.transform.quantise.conversion_report import REPORT
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.museum.cases import MuseumModel, prepare, prompt_ids
from degarble.references.tiny.configs import TINY_V32
from degarble.suites.museum.museum_stages import KEY, root


def test_the_checkpoint_is_what_quantise_writes() -> None:
    folder = root() / KEY.folder
    told = json.loads(read_small_file(folder / REPORT, 1 << 24))
    assert told["recipe"] == KEY.recipe
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.model == TINY_V32


def test_what_is_there_already_stays() -> None:
    before = {path.name: path.stat().st_mtime_ns for path in (root() / KEY.folder).iterdir()}
    prepare(root(), (KEY,))
    after = {path.name: path.stat().st_mtime_ns for path in (root() / KEY.folder).iterdir()}
    assert before == after
    assert not list(root().glob("*.draft"))


def test_candidate_and_twin_differ_in_their_sums_alone() -> None:
    model = MuseumModel.open(KEY, root())
    candidate, twin = model.candidate(), model.twin()
    assert candidate.weights is twin.weights
    assert candidate.numerics.products == torch.float32
    assert twin.numerics.products == torch.float64
    assert candidate.calls.keys() == twin.calls.keys()
    scale = model.weights["layers.1.ffn.experts.0.w2"].input_scale
    assert scale is not None
    assert float(scale) > 0


def test_weights_are_read_before_the_files_are_closed() -> None:
    model = MuseumModel.open(KEY, root())
    for name in ("embed", "layers.0.attn.wo", "layers.1.ffn.experts.7.w3"):
        assert bool(model.weights[name].values(torch.float64).isfinite().all())


def test_prompts_are_documents_of_the_language() -> None:
    assert prompt_ids(3, 40) == prompt_ids(3, 40)
    assert len(prompt_ids(3, 7)) == 7
    assert len({prompt_ids(seed, 40) for seed in range(20)}) == 20
