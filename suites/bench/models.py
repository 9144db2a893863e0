"""Running models on the CPU: decoding by the references, and streamed weights."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.checkpoint.read.types import DTYPE_BITS
from degarble.harness.formats.weight import Weight
from degarble.harness.inference.generation import Continuation, Generation, Limits, Sampling
from degarble.harness.inference.model import LogitsModel, numerics_of, open_model, threads_for
from degarble.harness.inference.weights import HeldWeights
from degarble.harness.model.config.config import V3_2, V4_FLASH, V4_PRO, small_v4
from degarble.harness.model.family import family_of
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.tensors import tensors_of
from degarble.harness.report.progress import duration
from degarble.references import experts as routing
from degarble.references.binding import BoundModel
from degarble.references.model import ModelV4, Sequence
from degarble.references.numerics import SOURCES, Numerics
from degarble.references.weights import random_weights
from degarble.suites.bench import peers
from degarble.suites.bench.machine import drop_from_cache, in_child, peak_resident, read_all
from degarble.suites.bench.runner import (
    Bench,
    Claim,
    Comparison,
    Part,
    Reading,
    Table,
    Target,
    call,
)
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.model.config.config import Config, V4Config

    Step = Callable[[torch.Tensor], torch.Tensor]

# ---- greedy decoding beside transformers on the same core ----------------------------------------

RATIO = 2.0
TOKENS = 16  # a turn
PROMPT = torch.arange(200) * 37 % 512
# The geometry of the small trained model: real head dims, so real cache rows.
MODEL = small_v4(
    hidden_size=192, num_hidden_layers=6, compress_ratios=(0, 4, 128, 4, 0, 4, 0), head_dim=512,
    num_attention_heads=8, o_groups=8, o_lora_rank=32, q_lora_rank=64, moe_intermediate_size=96,
    index_topk=16,
)  # fmt: skip
DTYPES = {"BF16": torch.bfloat16, "float32": torch.float32}


class Decoding:
    """A model with its cache, decoding greedily; the tokens that it named."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._next = step(PROMPT)
        self.named = [int(self._next)]

    def __call__(self) -> None:
        """Decode one turn's tokens."""
        for _ in range(TOKENS):
            self._next = self._step(self._next.reshape(1))
            self.named.append(int(self._next))


def ours(dtype: torch.dtype) -> Step:
    """Our references: BF16 by the official rounding points, float32 as the definition."""
    numerics = Numerics.bf16()
    if dtype is torch.float32:
        numerics = Numerics.definition(torch.float32, SOURCES["transformers"])
    model = ModelV4(BoundModel(MODEL, numerics, random_weights(MODEL, 1, dtype)), MODEL)
    sequence = Sequence()

    def step(ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return model.forward([sequence], [ids], last_only=True).argmax(-1)

    return step


class GenerateArm:
    """The way of `degarble generate`: weights held, the loop with its sampler, the same cache."""

    def __init__(self) -> None:
        weights = HeldWeights(random_weights(MODEL, 1, torch.bfloat16))
        bound = BoundModel(MODEL, numerics_of("bf16", held=True), weights)
        self._generation = Generation(LogitsModel(bound), None, Sampling(), Limits(TOKENS))
        self._speech = Continuation(PROMPT.tolist())
        self()

    def __call__(self) -> None:
        """Generate one turn's tokens behind everything said before."""
        self._speech = Continuation(self._speech.all_ids, self._speech.sequence)
        with threads_for(MODEL):
            self._generation.run([self._speech])


class Alone:
    """An arm by one thread, which suits a narrow model."""

    def __init__(self, arm: Callable[[], None]) -> None:
        self._arm = arm

    def __call__(self) -> None:
        """Run it so."""
        with threads_for(MODEL):
            self._arm()


def theirs(dtype: torch.dtype) -> Step:
    """The model of transformers."""
    from degarble.suites.references.transformers_models import build  # noqa: PLC0415  heavy

    with torch.no_grad():
        model = build(MODEL, random_weights(MODEL, 1, dtype), dtype)
    cache: Any = None

    def step(ids: torch.Tensor) -> torch.Tensor:
        nonlocal cache
        with torch.inference_mode():
            made = model(ids[None], past_key_values=cache, use_cache=True)
        cache = made.past_key_values
        last: torch.Tensor = made.logits[0, -1].argmax(-1)
        return last

    return step


OURS = {name: f"degarble, {name}" for name in DTYPES}
THEIRS = {name: f"transformers, {name}" for name in DTYPES}
ALL_CORES = "transformers, BF16, all cores"
GENERATE = "degarble generate, BF16"


def references(options: Any) -> Iterator[Part]:
    """The same weights continue the same prompt with a cache.

    In float32 both must generate the same tokens: decoding is one token at a time, so any deviation
    would grow. GENERATE is the whole path of `degarble generate`, sampler and float64 sums
    included.
    """
    with peers.quiet():
        named = {OURS[name]: Decoding(ours(dtype)) for name, dtype in DTYPES.items()}
        if options.peers:
            named |= {THEIRS[name]: Decoding(theirs(dtype)) for name, dtype in DTYPES.items()}
        arms = [call(name, Alone(arm)) for name, arm in named.items()]
        arms.append(call(GENERATE, GenerateArm()))
        claims = []
        if options.peers:
            arms.append(call(ALL_CORES, Decoding(theirs(torch.bfloat16))))
            text = "times as fast as transformers, BF16"
            claims.append(Claim(f"{text} as stored", OURS["BF16"], of_the_faster, RATIO))
            claims.append(Claim(f"generate: {text}", GENERATE, of_the_faster, RATIO))
        columns = (
            ("tokens/s", lambda each: f"{TOKENS / each.median:.1f}"),
            ("ms a token", lambda each: f"{each.median / TOKENS * 1e3:.2f}"),
        )
        yield Comparison("Greedy, one sequence", [tuple(arms)], columns, claims)
    if options.peers:
        pair = [named[of["float32"]].named[: TOKENS * 2] for of in (OURS, THEIRS)]
        same = float(pair[0] == pair[1])
        yield Target("float32 arms name the same tokens (1 = yes)", same, 1.0)
    yield f"V4, {MODEL.num_hidden_layers} layers, hidden {MODEL.hidden_size}, head_dim 512"
    yield f"prompt of {len(PROMPT)} tokens; {options.rounds} rounds of {TOKENS} tokens"
    yield "one thread, as generate computes narrow models; the faster arm of transformers counts"


def of_the_faster(reading: Reading) -> float:
    both = (reading.beside[THEIRS["BF16"]], reading.beside[ALL_CORES])
    return reading.times(min(both, key=lambda each: each.median).arm.name)


# ---- a model larger than memory ------------------------------------------------------------------

STREAMED_TOKENS = 1024
SHARE_OF_DISK = 0.35
RESIDENT = 3e9
FULL_WIDTH = 4096  # V4-Flash's; smaller sizes run a smaller model
DISK_BYTES = 4 << 30  # at most, for the disk's own rate
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


def balance(folder: str, tokens: int) -> None:
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

    with open_model(Path(folder), "bf16", held_values=0) as model:
        calls, chosen = model.logits_model.bound.calls, model.config.num_experts_per_tok
        for name in [each for each in calls if each.endswith("ffn.topk")]:
            calls[name] = partial(topk, name, calls[name])
        prompt = prompt_of(tokens, model.config.vocab_size)
        model.logits_model.next_logits([Sequence()], [prompt])
        forms = {name: model.checkpoint.stored(name).form for name in fitted}
        places = {name: next(iter(form.parts.values())) for name, form in forms.items()}
    for name, place in places.items():
        raw = fitted[name].numpy().tobytes()
        assert len(raw) == place.end - place.begin, "biases are float32"
        with place.file.open("r+b") as stream:
            stream.seek(place.begin)
            stream.write(raw)


def write(folder: str, width: int) -> None:
    write_checkpoint(Path(folder), Synthetic(config_of(width), "official"), workers=2)


def streamed_pass(folder: str, tokens: int) -> tuple[float, int, float, int, float]:
    """Forward once from a cold page cache: seconds, bytes handed out, share of experts visited.

    Then the peak of resident memory so far, and the disk's rate: that of reading the same files in
    order from a cold cache. A pass over one token before loads libraries and compiles loops.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    with open_model(Path(folder), "bf16", held_values=0) as model:
        streamed, vocabulary = model.streamed, model.config.vocab_size
        assert streamed is not None
        model.logits_model.next_logits([Sequence()], [torch.tensor([1])])
        drop_from_cache(files)
        seen: set[str] = set()
        streamed.on_read = lambda _size, name: seen.add(name)
        before, start = streamed.read, time.perf_counter()
        model.logits_model.next_logits([Sequence()], [prompt_of(tokens, vocabulary)])
        seconds = time.perf_counter() - start
        experts = {name for name in streamed if ".ffn.experts." in name and "mtp" not in name}
        visited = len(seen & experts) / len(experts)
        read, resident = streamed.read - before, peak_resident()
    drop_from_cache(files)
    start = time.perf_counter()
    return (
        seconds,
        read,
        visited,
        resident,
        read_all(files, DISK_BYTES) / (time.perf_counter() - start),
    )


def official_bytes(config: Config) -> int:
    """Bytes of the main model's tensors in the official layout."""
    main = family_of(config).without_drafters(config)
    layout = layout_named("official", main)
    return sum(
        prod(tensor.shape) * DTYPE_BITS[str(tensor.dtype)] // 8
        for tensor in tensors_of(main, layout)
    )


def streaming(options: Any) -> Iterator[Part]:
    """One pass over 15 GB of streamed weights: V4-Flash's widths, four layers, one of each type.

    Every expert has to be visited, or the pass would be too cheap: routers are balanced first.
    """
    full = options.size >= FULL_WIDTH
    width, tokens = (FULL_WIDTH, STREAMED_TOKENS) if full else (256, 64)
    with tempfile.TemporaryDirectory() as place:
        folder = str(Path(place) / "checkpoint")
        in_child(f"{__name__}:write", folder, width)
        in_child(f"{__name__}:balance", folder, tokens)
        done = in_child(f"{__name__}:streamed_pass", folder, tokens)
    seconds, read, share, resident, disk = done.result
    rate = read / seconds
    cells = (seconds, read / 1e9, rate / 1e9, disk / 1e9, rate / disk, resident / 1e9)
    yield Table(
        f"One forward pass of {tokens} tokens, bf16 arithmetic",
        ("seconds", "GB", "GB/s", "disk, cold, GB/s", "share of the disk", "peak resident GB"),
        (tuple(f"{cell:.2f}" for cell in cells),),
    )
    sizes = {"V4-Pro": official_bytes(V4_PRO), "V3.2": official_bytes(V3_2)}
    yield Table(
        "Estimates: bytes of the official layout / measured rate, not run",
        ("model", "GB", "one pass that visits every expert"),
        tuple((name, f"{size / 1e9:.0f}", duration(size / rate)) for name, size in sizes.items()),
    )
    yield Target("share of the disk's cold sequential rate", rate / disk, SHARE_OF_DISK)
    yield Target("peak resident bytes", resident, RESIDENT, at_least=False)
    yield Target("share of experts visited", share, 1.0)
    yield f"synthetic, official layout, V4-Flash's widths ({width}), 4 layers of all types"
    yield "an estimate holds for a prompt of about as many tokens on as many cores"
    yield "each new token costs a pass over the weights that it visits"


BENCHES = {
    "references": Bench(
        "Decoding with the references on the CPU", references, ("torch", "numba", "transformers"),
        page=True,
    ),
    "streaming": Bench(
        "Models larger than memory", streaming, ("torch", "numba", "numpy"), page=True
    ),
}  # fmt: skip
