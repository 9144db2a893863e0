"""Which causal language models of transformers can be traced, and how their components are judged.

Every architecture in transformers' list is built tiny with random weights. It counts as equal if
the traced forward pass, in two calls with state, gives the logits of transformers' own. What cannot
be built tiny by these settings, for want of a package or of a config that fits, is listed apart.
"""

from __future__ import annotations

import inspect
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import DegarbleError
from degarble.references.model import Sequence
from degarble.references.numerics import Numerics
from degarble.references.traced.family import TracedConfig, TracedModel
from degarble.references.traced.model import TracedForward
from degarble.suites.bench.runner import Bench, Part, Table, Target
from degarble.suites.references.traced.traced_models import (
    ARCHITECTURES,
    built,
    config_of,
    raw_config,
    weights_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SETTINGS: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"), 96),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    "num_key_value_heads": 2, "vocab_size": 128, "head_dim": 16, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True,
}  # fmt: skip
_ALWAYS = ("head_dim", "pad_token_id", "is_decoder")  # though a config states none
_MOST = 20_000_000  # parameters of a tiny model
_SECONDS = 30  # for one architecture
_NEAR = 2e-5  # of the largest logit
_WANTED = ("llama", "qwen3_moe", "gpt_oss")
_EQUAL, _UNLIKE, _REFUSED, _UNBUILT = "equal", "differs", "refused", "not built tiny"


def settings(kind: str) -> dict[str, Any]:
    """Settings that make an architecture tiny."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415  heavy

    if kind in ARCHITECTURES:
        return {k: v for k, v in raw_config(kind).items() if k not in {"model_type", "dtype"}}
    config = CONFIG_MAPPING[kind]
    stated = config().to_dict()
    known = {*stated, *inspect.signature(config.__init__).parameters}
    return {
        name: value
        for name, value in _SETTINGS.items()
        if name in known and (stated.get(name) is not None or name in _ALWAYS)
    }


def outcome(kind: str) -> tuple[str, str]:
    """What became of one architecture, and why."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM  # noqa: PLC0415  heavy

    signal.alarm(_SECONDS)
    try:
        own = settings(kind)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**own))
        count = sum(parameter.numel() for parameter in empty.parameters())
        if count > _MOST:
            return _UNBUILT, f"{count:,} parameters"
        model: Any = built(kind, settings=own)
        ids = torch.arange(3, 26)
        with torch.no_grad():
            want = model(input_ids=ids[None]).logits[0]
            # A model that looks ahead is none that continues a text.
            if not torch.allclose(model(input_ids=ids[None, :17]).logits[0], want[:17], atol=1e-3):
                return _UNBUILT, "a token's logits depend on later tokens"
    except Exception as error:  # noqa: BLE001  whatever a config of another model raises
        return _UNBUILT, _first_line(error)
    config: Any = TracedConfig.of({**own, "model_type": kind, "dtype": "float32"})
    try:
        forward = TracedForward(TracedModel(config, Numerics.definition(), weights_of(model)))
        sequence = [Sequence()]
        parts = [forward.forward(sequence, [part]) for part in (ids[:17], ids[17:])]
    except DegarbleError as error:
        return _REFUSED, _first_line(error)
    except Exception as error:  # noqa: BLE001  a gap of ours is a row, not the end of the bench
        return _UNLIKE, _first_line(error)
    off = float((torch.cat(parts) - want).abs().max() / want.abs().max())
    return (_EQUAL, "") if off < _NEAR else (_UNLIKE, f"logits are {off:.1e} off")


def _too_long(*_: object) -> None:
    raise TimeoutError(f"not done after {_SECONDS} s")


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:120].replace("|", "/")


def _derived(kind: str) -> tuple[int, int]:
    """Components with a derived budget, and all: what runs along the tokens has a measured one."""
    config: Any = config_of(kind)
    components = config.graph.components
    return sum(not each.is_recurrent for each in components), len(components)


def architectures(_options: Any) -> Iterator[Part]:
    """Try every causal language model of transformers."""
    from transformers.models.auto import modeling_auto  # noqa: PLC0415  heavy

    signal.signal(signal.SIGALRM, _too_long)
    found = {
        kind: outcome(kind) for kind in sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    }
    counts = Counter(result for result, _ in found.values())
    tried = len(found) - counts[_UNBUILT]
    yield f"{len(found)} architectures, {tried} of them built tiny"
    yield Target("architectures whose traced pass equals transformers'", counts[_EQUAL], 18)
    yield Target("share of those built tiny that are equal", counts[_EQUAL] / tried, 0.5)
    yield Table(
        "What became of them", ("outcome", "architectures", "which"),
        tuple(
            (result, str(counts[result]), ", ".join(k for k in found if found[k][0] == result))
            for result in (_EQUAL, _UNLIKE, _REFUSED, _UNBUILT)
        ),
    )  # fmt: skip
    yield Table(
        "Why not", ("architecture", "outcome", "reason"),
        tuple((kind, *found[kind]) for kind in found if found[kind][0] in {_UNLIKE, _REFUSED}),
    )  # fmt: skip


def derived_budgets(_options: Any) -> Iterator[Part]:
    """Count the components of the tested architectures whose budget is derived."""
    for kind in _WANTED:
        derived, whole = _derived(kind)
        yield Target(f"components of {kind} with a derived budget (share)", derived / whole, 0.95)
    yield "the others are measured; suites/capture/test_traced.py fails where one has no budget"
    rows = ((kind, *_derived(kind)) for kind in ARCHITECTURES)
    yield Table(
        "Components with a derived budget", ("architecture", "derived", "all", "share"),
        tuple((kind, str(own), str(whole), f"{own / whole:.1%}") for kind, own, whole in rows),
    )  # fmt: skip


BENCHES = {
    "architectures": Bench(
        "Architectures of transformers", architectures, ("torch", "transformers")
    ),
    "derived-budgets": Bench(
        "Traced components with a derived budget", derived_budgets, ("torch", "transformers"),
        page=True,
    ),
}  # fmt: skip
