"""Build every causal language model of transformers tiny, run it, and judge what it computed.

    python -m degarble.suites.campaigns.architectures --jobs 2 --out out/campaigns --resume

A model counts as traced where the traced pass, in two calls with state, gives the logits of
transformers' own. Healthy runs of it, a prompt of two sequences and two decoding steps in float32
and BF16, have to agree: anything else is an alarm. A refusal has to be one of our own, by name.
`--models llama,qwen3` runs these alone, `--table` prints an earlier run's lines as Markdown.
"""

from __future__ import annotations

import inspect
import json
import signal
import sys
import tempfile
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import DegarbleError
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
from degarble.suites.support.traced_runs import judged_run, prompt, recorded

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
_MAMBA: Mapping[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 32,
    "mamba_dt_rank": 8, "num_hidden_layers": 4,
}  # fmt: skip
_DELTA: Mapping[str, Any] = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_head_dim": 16, "linear_num_heads": 4,
    "mlp_layer_types": ["dense", "sparse"] * 2,
}  # fmt: skip
_GATED: Mapping[str, Any] = {k: v for k, v in _DELTA.items() if k in {
    "num_hidden_layers", "layer_types", "linear_head_dim", "linear_num_heads", "mlp_layer_types",
}} | {"num_expert_group": 1, "num_experts_per_token": 2, **_LATENT}  # fmt: skip
_ROTARY = {"rotary_dim": 8}
_OWN: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    **dict.fromkeys(("axk1", "axk2", "glm4_moe_lite", "minicpm3", "youtu"), _LATENT),
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2},
    "longcat_flash": {**_LATENT, "expert_ffn_hidden_size": 32, "moe_topk": 2, "zero_expert_num": 4},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "zamba": {
        **_MAMBA, "attn_layer_period": 2, "attn_layer_offset": 1, "attention_head_dim": 32,
        "attention_hidden_size": 128, "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), _GATED),
    "qwen3_5_moe_text": {k: v for k, v in _DELTA.items() if k[:3] in {"num", "lay"} or "_num_" in k
                         or k in {"linear_key_head_dim", "linear_value_head_dim"}},
    "lfm2_moe": {
        "num_hidden_layers": 4, "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "full_attention", "full_attention"],
    },
    "gptj": _ROTARY,
    "codegen": _ROTARY,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [96] * 4, "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0, "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"], "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 16, "per_layer_config": {"1": {"head_dim": 32}},
    },
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"], "head_dim": 16,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2}, "ffn_config": {
        "hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2,
    }},
    "xlstm": {"embedding_dim": 64, "num_blocks": 2, "chunk_size": 16},
    "zaya": {"layer_types": ["hybrid"] * 2, "router_hidden_size": 32},
}  # fmt: skip
_ALWAYS = ("head_dim", "pad_token_id", "is_decoder")  # though a config states none
_MOST = 20_000_000  # parameters of a tiny model
_SECONDS = 240  # for one architecture
_NEAR = 1e-4  # of the largest logit: Zamba 2 itself is 5e-5 off between float32 and float64
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
    return {**_tiny(CONFIG_MAPPING[kind]), **_OWN.get(kind, {})}


def _tiny(config: Any) -> dict[str, Any]:
    stated = config().to_dict()
    known = {*stated, *inspect.signature(config.__init__).parameters}
    found = {
        name: value
        for name, value in _SETTINGS.items()
        if name in known and (stated.get(name) is not None or name in _ALWAYS)
    }
    for name, part in config.sub_configs.items():
        kind = (stated.get(name) or {}).get("model_type", "")
        if inspect.isclass(part) and hasattr(part, "model_type"):
            own = ARCHITECTURES.get(kind, _OWN.get(kind, {}))
            found[name] = {**_tiny(part), **own}
    return found


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


def _verdict(found: Any) -> str:
    if found.origins:
        return "alarm: " + ", ".join(each.component for each in found.origins[:4])
    if found.unjudged or found.verdict != "AGREES":
        return f"{found.verdict}: " + "; ".join(map(str, found.unjudged[:2]))
    return "AGREES"


def _loaded(first: Any, dtype: torch.dtype) -> Any:
    """Save a model in another dtype and load it, as users do: buffers are made by loading."""
    if dtype is torch.float32:
        return first
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  heavy

    with tempfile.TemporaryDirectory() as folder:
        first.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def _outcome(kind: str, facts: dict[str, Any], device: str) -> str:
    try:
        own = settings(kind)
        first, ids, want = _made(kind, own)
    except Exception as error:  # noqa: BLE001  whatever a config of another model raises
        facts["why"] = _line(error)
        return "not built"
    config: Any = TracedConfig.of({**own, "model_type": kind, "dtype": "float32"})
    forward = TracedForward(TracedModel(config, Numerics.definition(), weights_of(first)))
    sequence = [Sequence()]
    parts = [forward.forward(sequence, [part]) for part in (ids[:17], ids[17:])]
    off = float((torch.cat(parts) - want).abs().max() / want.abs().max())
    components = config.graph.components
    facts["components"] = len(components)
    facts["derived"] = sum(not each.is_recurrent or each.is_rectangular for each in components)
    if not off < _NEAR:
        facts["why"] = f"logits are {off:.1e} off"
        return "differs"
    bad = ""
    for attention, dtype in RUNS:
        name = _name_of((attention, dtype))
        try:
            model = _loaded(first, dtype)
            model.set_attn_implementation(attention)
            with torch.no_grad():
                model(input_ids=ids[None])
        except Exception as error:  # noqa: BLE001  transformers refuses what it has not
            facts[name] = f"not run: {_line(error)}"
            continue
        typed = TracedConfig.of({**own, "model_type": kind, "dtype": str(dtype)[6:]})
        weights = weights_of(model)
        run = recorded(model.to(device), typed, prompt(typed, device))
        facts[name] = _verdict(judged_run(typed, weights, run))
        bad = bad or ("" if facts[name] == "AGREES" else facts[name].partition(":")[0])
    return bad or "ok"


def architecture(number: int, device: str = "cpu") -> CaseResult:
    """Try one architecture."""
    kind = kinds()[number]
    facts: dict[str, Any] = {}
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(_SECONDS)
    try:
        outcome = _outcome(kind, facts, device)
    except DegarbleError as error:
        facts["why"] = f"{type(error).__name__}: {error}"
        outcome = "refused"
    except Exception as error:  # noqa: BLE001  a gap of ours is a row, not the end
        facts["why"] = _line(error) + " " + traceback.format_exc(limit=-3)
        outcome = "stopped"
    finally:
        signal.alarm(0)
    return CaseResult(number, kind, outcome, json.dumps(facts))


def _too_long(*_: object) -> None:
    raise TimeoutError(f"not done after {_SECONDS} s")


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:160]


def table(lines: list[str]) -> str:
    """Return the results of a campaign as Markdown, one architecture a row."""
    rows = ["| architecture | components | derived | runs that agree | result |", "|---" * 5 + "|"]
    for line in sorted(lines, key=lambda each: json.loads(each)["seed"]):
        result = json.loads(line)
        facts = json.loads(result["detail"])
        runs = [facts.get(name, "") for name in map(_name_of, RUNS)]
        agree = f"{runs.count('AGREES')} of {sum(not each.startswith('not run') for each in runs)}"
        share = f"{facts['derived'] / facts['components']:.0%}" if "components" in facts else ""
        why = "" if result["outcome"] == "ok" else facts.get("why", "").split(" Register ")[0]
        cells = (
            result["kind"], str(facts.get("components", "")), share, agree if share else "",
            f"{result['outcome']} {why.splitlines()[0] if why else ''}".strip().replace("|", "/"),
        )  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _name_of(run: tuple[str, torch.dtype]) -> str:
    attention, dtype = run
    return f"{attention} {str(dtype).removeprefix('torch.')}"


def main() -> int:
    """Run the campaign; the exit status is 1 where a healthy run alarms or something stops."""
    parser = arguments(__doc__ or "", count=0)
    parser.add_argument("--models", default="", help="architectures, joined by commas")
    parser.add_argument("--device", default="cpu", help="where models run")
    parser.add_argument("--table", action="store_true", help="print what an earlier run found")
    asked = parser.parse_args()
    if asked.table:
        lines = (asked.out / "architectures.jsonl").read_text(encoding="utf-8").splitlines()
        sys.stdout.write(table(lines) + "\n")
        return 0
    known = kinds()
    chosen = asked.models.split(",") if asked.models else known
    numbers = [known.index(kind) for kind in chosen]
    return run_campaign(
        "architectures", partial(architecture, device=asked.device), asked, seeds=numbers,
        wanted=("ok", "refused", "not built"),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
