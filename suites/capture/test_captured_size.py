"""The estimated size of a capture, and what `degarble capture --budget` keeps within one."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.capture import capture as capturing
from degarble.harness.capture import captured_size
from degarble.harness.capture.capture import CaptureSettings
from degarble.harness.capture.captured_size import (
    SequenceTokens,
    captured_bytes,
    choose_within,
    steps_of,
)
from degarble.harness.capture.files.records import Phase
from degarble.harness.capture.files.writer import CaptureWriter
from degarble.harness.capture.options import CaptureFilter
from degarble.harness.capture.recorder import Recorder
from degarble.harness.inference import generation
from degarble.harness.inference.model import open_model
from degarble.harness.model.config.config import V4_PRO
from degarble.references.binding import BoundModel
from degarble.references.model import ModelV4, ModelV32, Sequence
from degarble.references.numerics import Numerics
from degarble.references.weights import random_weights
from degarble.suites.checkpoint.reading_cases import TINY_V4, TINY_V32
from degarble.suites.commands.calls import call
from degarble.suites.commands.check.test_check import gain
from degarble.suites.commands.traced_checkpoints import write_checkpoint
from degarble.suites.serve.talking_cases import write_speaker

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.capture.files.reader import Capture
    from degarble.suites.support.configs import DeepSeekConfig

# --------------------------------------------------------------------------------------------------
# The estimated size equals that of written captures: both families, prefill, decode, filters.

LENGTHS, NEW = [140, 30], 4


def written(bound: BoundModel, folder: Path, wanted: CaptureFilter) -> int:
    """Run prompts and new tokens; the bytes of tensors that the capture has."""
    config = bound.config
    model: ModelV4 | ModelV32
    v32 = config is TINY_V32
    model = ModelV32(bound, TINY_V32) if v32 else ModelV4(bound, TINY_V4)
    sequences = [Sequence() for _ in LENGTHS]
    chance = torch.Generator().manual_seed(1)
    with torch.inference_mode(), CaptureWriter(folder, {}) as writer:
        recorder = Recorder(writer, wanted)
        recorder.wrap(bound)
        for step in steps_of(LENGTHS, NEW, 2048):
            pieces = [torch.randint(0, 60, (fed.tokens,), generator=chance) for fed in step]
            positions = [at for f in step for at in range(f.before, f.before + f.tokens)]
            recorder.begin(Phase.PREFILL, [0] * len(positions), positions, [0] * len(positions))
            model.forward(sequences, pieces, last_only=True)
        return writer.finish().stored_bytes


@pytest.mark.parametrize("config", [TINY_V4, TINY_V32], ids=["v4", "v32"])
@pytest.mark.parametrize(
    ("words", "low", "high"),
    [({}, 0.97, 1.1), ({"layers": "1"}, 0.9, 1.1), ({"tokens": "0-9"}, 0.3, 1.5)],
    ids=["all", "one layer", "ten tokens"],
)
def test_the_estimate_is_near_what_is_written(
    config: DeepSeekConfig,
    words: dict[str, str],
    low: float,
    high: float,
    tmp_path: Path,
) -> None:
    bound = BoundModel(config, Numerics.bf16(), random_weights(config, 1, torch.float32))
    wanted = CaptureFilter.from_options(**words)
    estimate = captured_bytes(bound, steps_of(LENGTHS, NEW, 2048), wanted)
    found = written(bound, tmp_path, wanted)
    assert low * found <= estimate <= high * found, estimate / found


def test_steps_are_pieces_and_then_tokens() -> None:
    assert steps_of([5, 3], 3, 4) == [
        [SequenceTokens(4, 0), SequenceTokens(3, 0)], [SequenceTokens(1, 4)],
        [SequenceTokens(1, 5), SequenceTokens(1, 3)], [SequenceTokens(1, 6), SequenceTokens(1, 4)],
    ]  # fmt: skip


def test_v4_pro_is_estimated_without_weights() -> None:
    bound = BoundModel(V4_PRO, Numerics.bf16(), {})
    total = captured_bytes(bound, steps_of([1000], 1, 2048), CaptureFilter())
    assert 50e9 < total < 200e9
    assert (
        captured_bytes(bound, steps_of([1000], 1, 2048), CaptureFilter.from_options(layers="3"))
        < total / 40
    )


# --------------------------------------------------------------------------------------------------
# A budget: one layer of each type first, whole pieces of tokens, and a check that says so.

PIECE = 2048
PRO = BoundModel(V4_PRO, Numerics.bf16(), {})


def chosen(budget: float) -> captured_size.BudgetChoice:
    return choose_within(PRO, [31_000], 4, CaptureFilter(), int(budget))


def test_layers_come_before_pieces_and_nothing_exceeds_the_budget() -> None:
    with pytest.raises(InvalidArgument, match="layer of each type") as refused:
        chosen(1e6)
    least = float(str(refused.value.remedy).split()[2].removesuffix("GB.")) * 1e9
    small, more = chosen(least), chosen(4 * least)
    types = {each.layer_type for each in V4_PRO.layers}
    known = {f"layers.{each.index}": each.layer_type for each in V4_PRO.layers}
    kept = (small.wanted.blocks or frozenset()) - {"ends"}
    assert {known[name] for name in kept} == types
    assert len(kept) < len(known) / 4
    assert small.wanted.pieces == (range(14 * PIECE, 31_004),)  # the last 280 are no piece
    assert small.estimate <= least
    assert more.wanted.pieces == (range(PIECE), range(14 * PIECE, 31_004))
    assert small.wanted.blocks < more.wanted.blocks  # type: ignore[operator]
    assert more.estimate <= 4 * least < more.whole
    assert more.layers_left_out
    assert more.tokens_left_out == (range(PIECE, 14 * PIECE),)


def test_a_budget_for_all_keeps_all() -> None:
    bound = BoundModel(TINY_V4, Numerics.bf16(), {})
    most = choose_within(bound, [9000, 3], 4, CaptureFilter(), 10**12)
    assert (most.layers_left_out, most.tokens_left_out) == ((), ())
    assert most.estimate == most.whole == captured_bytes(
        bound, steps_of([9000, 3], 4, PIECE), most.wanted
    )  # fmt: skip


def test_steps_are_kept_whole_by_their_last_position() -> None:
    wanted = CaptureFilter(pieces=(range(4), range(8, 12)))
    assert wanted.rows([0, 1, 2, 3]) is None
    assert wanted.rows([4, 5, 6, 7, 2]) == ()  # of another sequence that decodes meanwhile
    assert wanted.rows([9, 3]) is None
    assert CaptureFilter.from_options(pieces="0-3,8-11") == wanted
    assert "pieces" not in CaptureFilter().document()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (generation, captured_size, capturing):
        monkeypatch.setattr(module, "PREFILL_TOKENS", 8)
    monkeypatch.setattr(captured_size, "_LEAST_LAST", 4)


def budgeted(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, faulty: str = ""
) -> Capture:
    healthy = open_model

    def opened(*args: Any, **named: Any) -> Any:
        model = healthy(*args, **named)
        calls = model.logits_model.bound.calls
        if faulty:
            calls[faulty] = partial(gain, calls[faulty])
        return model

    monkeypatch.setattr(capturing, "open_model", opened)
    prompts = [" ".join(f"w{n}" for n in range(7, 44)), "w9 w7"]
    with pytest.raises(InvalidArgument) as refused:
        run(source, prompts, folder, 1)
    assert not folder.exists()
    least = float(str(refused.value.remedy).split()[2].removesuffix("kB.").removesuffix("MB."))
    unit = 1000 if "kB" in str(refused.value.remedy) else 10**6
    return run(source, prompts, folder, int(2.2 * least * unit))


def run(source: Path, prompts: list[Any], folder: Path, budget: int) -> Capture:
    settings = CaptureSettings(new_tokens=3, budget=budget)
    return capturing.capture(
        source, prompts, folder, lambda _streamed: nullcontext(), settings
    ).capture


@pytest.mark.slow
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("kind", "faulty"),
    [
        ("v4", ""), ("v4", "layers.1.attn.wq_b"), ("v32", ""), ("v32", "layers.1.attn.wq_b"),
        ("llama", ""), ("llama", "layers.0.mlp.down_proj"),
    ],
)  # fmt: skip
def test_what_a_budget_kept_is_judged_and_what_it_left_out_is_said(
    kind: str,
    faulty: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write = partial(write_checkpoint, name="llama") if kind == "llama" else write_speaker
    source = write(tmp_path / "model", *([kind] if kind != "llama" else []))
    capture = budgeted(source, tmp_path / "capture", monkeypatch, faulty)
    stated = capture.facts["budget"]
    assert stated["tokens_left_out"]
    kept = {call.step for call in capture.calls}
    assert 0 < len(kept) < len(capture.steps)
    last = capture.steps[-1].number
    assert last in kept
    rows = {tensor.rows for call in capture.calls for _, tensor in call.sites()}
    assert rows == {None}
    done = call(
        capsys, "--json", "check", tmp_path / "capture", "--reference", source,
        "--report", tmp_path / "report",
    )  # fmt: skip
    fields = done.document
    assert fields["verdict"] == ("DIFFERS" if faulty else "AGREES")
    assert [f"layers.{o['layer']}.{o['component']}" for o in fields["origins"]] == (
        [faulty] if faulty else []
    )
    assert fields["budget"] == stated
    words = f"tokens {', '.join(stated['tokens_left_out'])}"
    assert words in fields["notes"][0]
    (page,) = (tmp_path / "report").glob("*.html")
    assert words in page.read_text()
    assert fields["shares"] is None
    assert any("Shares of the final difference" in note for note in fields["notes"]) == bool(faulty)


def test_what_was_not_chosen_is_not_called_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fault is in a layer that was not captured."""
    (tmp_path / "patch.py").write_text(
        "def patch(candidate):\n"
        "    own = candidate.components['layers.0.attn.q_norm']\n"
        "    candidate.components['layers.0.attn.q_norm'] = (\n"
        "        lambda *given: {'out': 1.1 * own(*given)['out']}\n"
        "    )\n"
    )
    made = call(
        capsys, "capture", write_speaker(tmp_path / "model"), "--out", tmp_path / "capture",
        "--prompt", "w9 w7", "--patch", tmp_path / "patch.py", "--layers", "1",
        "--components", "attn.w*", "--tokens", "0-1",
    )  # fmt: skip
    assert made.status == 0, made.err
    done = call(capsys, "--json", "check", tmp_path / "capture")
    assert done.status == 0, done.err
    assert done.document["sentence"].startswith("Every component that was captured does what")
    note = "Captured, and so judged, were only layers.1; attn.w*; tokens 0-1."
    assert done.document["notes"] == [note]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--budget", "5 bananas"), "500MB, 10GB or 10GiB"),
        (("--budget", "0GB"), "500MB, 10GB or 10GiB"),
        (("--budget", "1GB", "--layers", "0"), "exactly one of --budget, --layers"),
        (("--budget", "1GB", "--tokens", "0"), "exactly one of --budget, --tokens"),
        (("--budget", "1GB", "--backend", "vllm"), "an engine cuts its own"),
        (("--budget", "1GB", "--backend", "cutedsl", "--graph"), "an engine cuts its own"),
        (("--budget", "1GB", "--amax-only"), "exactly one of"),
    ],
)
def test_budgets_that_cannot_be_kept_are_refused(
    more: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("capture", tmp_path, "--out", tmp_path / "capture", "--prompt", "w7", *more)
    done = call(capsys, *line)
    assert (done.status, done.out) == (2, "")
    assert words in done.err
    assert not (tmp_path / "capture").exists()
