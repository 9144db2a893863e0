"""One forward pass over streamed weights, in a process of its own, from a cold page cache.

`python -m degarble.suites.bench.peak_streaming FOLDER TOKENS` prints seconds, bytes of weights
handed out, visited experts' share, and the peak of resident memory in bytes. With `--write` it
writes the checkpoint: V4-Flash's widths, four layers, one of each type. With `--balance` it fits
the routers' correction biases to the prompt, as training does for its load: random routers leave
some experts unvisited, and the pass would be too cheap. A pass over one token before it loads
libraries and compiles loops, and is not counted.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from degarble.harness.formats.weight import Weight
from degarble.harness.inference.model import open_model
from degarble.harness.model.config.config import V4_FLASH
from degarble.references import experts as routing
from degarble.references.model import Sequence
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.model.config.config import V4Config

_BIAS = "ffn.gate.bias"
_ROUNDS, _RATE = 300, 0.03  # of fitting a bias; the rate falls to nothing


def config_of(width: int) -> V4Config:
    """V4-Flash with four layers: window, sparse, heavily compressed; hashed and scored experts.

    Below 4096 a smaller model of the same kind, for suites.
    """
    full = replace(
        V4_FLASH,
        num_hidden_layers=4,
        compress_ratios=(0, 4, 128, 4),
        num_hash_layers=1,
        num_nextn_predict_layers=0,
    )
    if width >= full.hidden_size:
        return full
    return replace(
        full, hidden_size=width, moe_intermediate_size=max(128, width // 2), vocab_size=1024,
        n_routed_experts=16, num_attention_heads=8, o_groups=1, q_lora_rank=128, o_lora_rank=128,
    )  # fmt: skip


def forget(folder: Path) -> int:
    """Drop the files from the page cache; returns their bytes."""
    size = 0
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        size += os.fstat(descriptor).st_size
        os.close(descriptor)
    return size


def cold_rate(folder: Path, limit: int = 4 << 30) -> float:
    """Bytes a second of reading the files from the disk, one after the other."""
    forget(folder)
    buffer, done, start = bytearray(8 << 20), 0, time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as stream:
            while done < limit and (count := stream.readinto(buffer)):
                done += count
    return done / (time.perf_counter() - start)


def prompt_of(tokens: int, vocabulary: int) -> Tensor:
    """Different tokens, as far as the vocabulary goes."""
    return torch.arange(tokens) * 7919 % vocabulary


def fitted_bias(logits_TE: Tensor, chosen: int) -> Tensor:
    """A correction bias under which all experts get about as many of these tokens."""
    score_TE = routing.sqrt_softplus(logits_TE.float())
    tokens, experts = score_TE.shape
    bias, share = torch.zeros(experts), tokens * chosen / experts
    for number in range(_ROUNDS):
        best = (score_TE + bias).topk(chosen, dim=-1).indices
        load = torch.bincount(best.flatten(), minlength=experts)
        bias += _RATE * (1 - number / _ROUNDS) * torch.sign(share - load)
    return bias


def balance(folder: Path, tokens: int) -> None:
    """Fit every router's bias to the prompt, layer after layer, and store it in place."""
    fitted: dict[str, Tensor] = {}

    def topk(
        name: str, call: ComponentCall, inputs: Mapping[str, Tensor], weights: Mapping[str, Weight]
    ) -> Mapping[str, Tensor]:
        if _BIAS in weights:
            bias = fitted_bias(inputs["logits"], chosen)
            fitted[name.removesuffix("ffn.topk") + _BIAS] = bias
            weights = {_BIAS: Weight(value=bias)}
        return call(inputs, weights)

    with open_model(folder, "bf16", held_values=0) as model:
        calls, chosen = model.speaker.bound.calls, model.config.num_experts_per_tok
        for name in [each for each in calls if each.endswith("ffn.topk")]:
            calls[name] = partial(topk, name, calls[name])
        prompt = prompt_of(tokens, model.config.vocab_size)
        model.speaker.next_logits([Sequence()], [prompt])
        forms = {name: model.checkpoint.stored(name).form for name in fitted}
        places = {name: next(iter(form.parts.values())) for name, form in forms.items()}
    for name, place in places.items():
        raw = fitted[name].numpy().tobytes()
        assert len(raw) == place.end - place.begin, "biases are float32"
        with place.file.open("r+b") as stream:
            stream.seek(place.begin)
            stream.write(raw)


def status_bytes(field: str) -> int:
    """One line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def run(folder: Path, tokens: int) -> tuple[float, int, float, int]:
    """Forward once; seconds, bytes handed out, share of experts visited, peak resident bytes."""
    with open_model(folder, "bf16", held_values=0) as model:
        streamed, vocabulary = model.streamed, model.config.vocab_size
        assert streamed is not None
        model.speaker.next_logits([Sequence()], [torch.tensor([1])])
        forget(folder)
        seen: set[str] = set()
        streamed.heard = lambda _size, name: seen.add(name)
        before, start = streamed.read, time.perf_counter()
        model.speaker.next_logits([Sequence()], [prompt_of(tokens, vocabulary)])
        seconds = time.perf_counter() - start
        experts = {name for name in streamed if ".ffn.experts." in name and "mtp" not in name}
        return seconds, streamed.read - before, len(seen & experts) / len(experts), peak()


def peak() -> int:
    """Highest resident memory of this process so far, all libraries included."""
    return status_bytes("VmHWM")


def main(*arguments: str) -> None:
    """Measure once, or write the checkpoint."""
    folder, number = Path(arguments[-2]), int(arguments[-1])
    if "--write" in arguments:
        write_checkpoint(folder, Synthetic(config_of(number), "official"), workers=2)
        return
    if "--balance" in arguments:
        balance(folder, number)
        return
    seconds, read, share, resident = run(folder, number)
    sys.stdout.write(f"{seconds} {read} {share} {resident} {cold_rate(folder)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
