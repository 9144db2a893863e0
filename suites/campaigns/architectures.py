"""Build every causal language model of transformers tiny, run it, and judge what it computed.

    python -m degarble.suites.campaigns.architectures --jobs 2 --out out/campaigns --resume

A model counts as traced where the traced pass, in two calls with state, gives the logits of
transformers' own. Healthy runs of it, a prompt of two sequences and two decoding steps in float32
and BF16, have to agree: anything else is an alarm. A refusal has to be one of our own, by name.
`--models llama,qwen3` runs these alone, `--table` writes the rows of docs/families.md from an
earlier run's lines.
"""

from __future__ import annotations

import inspect
import json
import signal
import sys
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import DegarbleError
from degarble.harness.capture.recorder import MemoryRun, Recorder
from degarble.harness.capture.traced import recording
from degarble.harness.engine.localise.localise import localise
from degarble.harness.model.recipes import recipe_named
from degarble.references.model import Sequence
from degarble.references.numerics import Numerics
from degarble.references.traced.family import TracedConfig, TracedModel
from degarble.references.traced.model import TracedForward
from degarble.suites.campaigns.runner import CaseResult, arguments, run_campaign
from degarble.suites.references.traced.traced_models import (
    ARCHITECTURES,
    built,
    raw_config,
    weights_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_SETTINGS: Mapping[str, Any] = {
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
_LATENT: Mapping[str, Any] = {"num_key_value_heads": 4, "head_dim": 8}
_INDEXED: Mapping[str, Any] = {
    **_LATENT, "num_hidden_layers": 3, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 8,
}  # fmt: skip
_OWN: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "glm4_moe_lite", "minicpm3"), _LATENT),
}
_ALWAYS = ("head_dim", "pad_token_id", "is_decoder")  # though a config states none
_MOST = 20_000_000  # parameters of a tiny model
_SECONDS = 240  # for one architecture
_NEAR = 2e-5  # of the largest logit
RUNS = (("eager", torch.float32), ("eager", torch.bfloat16), ("sdpa", torch.bfloat16))


def kinds() -> list[str]:
    """Return every architecture in transformers' list."""
    from transformers.models.auto import modeling_auto  # noqa: PLC0415  heavy

    return sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def settings(kind: str) -> dict[str, Any]:
    """Settings that make an architecture tiny."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415  heavy

    if kind in ARCHITECTURES:
        return {k: v for k, v in raw_config(kind).items() if k not in {"model_type", "dtype"}}
    config = CONFIG_MAPPING[kind]
    stated = config().to_dict()
    known = {*stated, *inspect.signature(config.__init__).parameters}
    found = {
        name: value
        for name, value in _SETTINGS.items()
        if name in known and (stated.get(name) is not None or name in _ALWAYS)
    }
    return {**found, **_OWN.get(kind, {})}


class _NotTiny(Exception):
    """These settings build no model that continues a text."""


def _made(kind: str, own: Mapping[str, Any]) -> tuple[Any, Tensor, Tensor]:
    """Return a model, tokens and their logits."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM  # noqa: PLC0415  heavy

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**own))
    count = sum(parameter.numel() for parameter in empty.parameters())
    if count > _MOST:
        raise _NotTiny(f"{count:,} parameters")
    model: Any = built(kind, settings=own)
    ids = torch.arange(3, 26)
    with torch.no_grad():
        want = model(input_ids=ids[None]).logits[0]
        # A model that looks ahead is none that continues a text.
        if not torch.allclose(model(input_ids=ids[None, :17]).logits[0], want[:17], atol=1e-3):
            raise _NotTiny("a token's logits depend on later tokens")
    return model, ids, want


def judged(model: Any, config: Any, dtype: torch.dtype) -> Any:
    """Judge a healthy run: a prompt of two sequences and two decoding steps."""
    weights, run = weights_of(model), MemoryRun({})
    ids = torch.randint(3, config.vocab_size, (2, 23), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode(), recording(model, config, Recorder(run)):
        out = model(input_ids=ids, use_cache=True)
        for _ in range(2):
            cache = getattr(out, "past_key_values", None)
            if cache is None:
                break
            new = out.logits[:, -1].argmax(-1, keepdim=True)
            out = model(input_ids=new, past_key_values=cache, use_cache=True)
    numerics = replace(Numerics.bf16(), work=torch.float64, products=torch.float64, store=dtype)
    bound = TracedModel(config, numerics, weights)
    return localise(bound, recipe_named("bf16", config), run)


def _verdict(found: Any) -> str:
    if found.origins:
        return "alarm: " + ", ".join(each.component for each in found.origins[:4])
    if found.unjudged or found.verdict != "AGREES":
        return f"{found.verdict}: " + "; ".join(map(str, found.unjudged[:2]))
    return "AGREES"


def _outcome(kind: str, told: dict[str, Any]) -> str:
    try:
        own = settings(kind)
        first, ids, want = _made(kind, own)
    except Exception as error:  # noqa: BLE001  whatever a config of another model raises
        told["why"] = _line(error)
        return "not built"
    config: Any = TracedConfig.of({**own, "model_type": kind, "dtype": "float32"})
    forward = TracedForward(TracedModel(config, Numerics.definition(), weights_of(first)))
    sequence = [Sequence()]
    parts = [forward.forward(sequence, [part]) for part in (ids[:17], ids[17:])]
    off = float((torch.cat(parts) - want).abs().max() / want.abs().max())
    components = config.graph.components
    told["components"] = len(components)
    told["derived"] = sum(not each.is_recurrent or each.is_rectangular for each in components)
    if not off < _NEAR:
        told["why"] = f"logits are {off:.1e} off"
        return "differs"
    bad = ""
    for attention, dtype in RUNS:
        name = f"{attention} {str(dtype).removeprefix('torch.')}"
        try:
            model: Any = built(kind, dtype, settings=own)
            model.set_attn_implementation(attention)
            with torch.no_grad():
                model(input_ids=ids[None])
        except Exception as error:  # noqa: BLE001  transformers refuses what it has not
            told[name] = f"not run: {_line(error)}"
            continue
        typed = TracedConfig.of({**own, "model_type": kind, "dtype": str(dtype)[6:]})
        told[name] = _verdict(judged(model, typed, dtype))
        bad = bad or ("" if told[name] == "AGREES" else told[name].partition(":")[0])
    return bad or "ok"


def architecture(number: int) -> CaseResult:
    """Try one architecture."""
    kind = kinds()[number]
    told: dict[str, Any] = {}
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(_SECONDS)
    try:
        outcome = _outcome(kind, told)
    except DegarbleError as error:
        told["why"] = f"{type(error).__name__}: {error}"
        outcome = "refused"
    except Exception as error:  # noqa: BLE001  a gap of ours is a row, not the end
        told["why"] = _line(error) + " " + traceback.format_exc(limit=-3)
        outcome = "stopped"
    finally:
        signal.alarm(0)
    return CaseResult(number, kind, outcome, json.dumps(told))


def _too_long(*_: object) -> None:
    raise TimeoutError(f"not done after {_SECONDS} s")


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:160]


def main() -> int:
    """Run the campaign; the exit status is 1 where a healthy run alarms or something stops."""
    parser = arguments(__doc__ or "", count=0)
    parser.add_argument("--models", default="", help="architectures, joined by commas")
    asked = parser.parse_args()
    known = kinds()
    chosen = asked.models.split(",") if asked.models else known
    numbers = [known.index(kind) for kind in chosen]
    return run_campaign(
        "architectures", architecture, asked, seeds=numbers, wanted=("ok", "refused", "not built")
    )


if __name__ == "__main__":
    sys.exit(main())
