"""What transformers makes of random models, in float64 throughout: checkpoint, logits, choices.

Its code asks for float32 by name inside norms, rotations, softmax and routing, which would hide
errors below 1e-6 and turn near-ties of a top-k the other way. While a model is built and run those
names mean float64. Equal scores are taken in order, as ours are: theirs leaves that open.
Run as a process of its own, it reads asked.json of a folder and leaves its answers there.
"""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from degarble.suites.references.random_models import RandomModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

warnings.filterwarnings("ignore")


class Wide:
    """The module torch, in which float32 is float64 and a top-k takes equals in order."""

    float32 = torch.float64
    float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def topk(x: Tensor, k: int, dim: int = -1, **more: Any) -> Any:
        """Return the k largest, the lower index first among equals."""
        del more
        order = torch.sort(x, dim=dim, descending=True, stable=True)
        chosen = order.values.narrow(dim, 0, k), order.indices.narrow(dim, 0, k)
        return torch.return_types.topk(chosen)


@contextmanager
def float64(*modules: Any) -> Iterator[None]:
    """Compute in float64 what these modules of transformers compute in float32."""
    plain, narrow, widened = torch.Tensor.topk, torch.Tensor.float, Wide()
    known = torch.get_default_dtype()
    torch.Tensor.topk = Wide.topk  # type: ignore[method-assign,assignment]
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    torch.set_default_dtype(torch.float64)
    for module in modules:
        module.torch = widened
    try:
        yield
    finally:
        torch.Tensor.topk = plain  # type: ignore[method-assign]
        torch.Tensor.float = narrow  # type: ignore[method-assign]
        torch.set_default_dtype(known)
        for module in modules:
            module.torch = torch


def family_of(model: RandomModel) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return transformers' config class, model class, and the modules that compute."""
    from transformers import DeepseekV4Config, DeepseekV32Config, modeling_rope_utils  # noqa: PLC0415
    from transformers.models.deepseek_v4 import modeling_deepseek_v4  # noqa: PLC0415  heavy
    from transformers.models.deepseek_v32 import modeling_deepseek_v32  # noqa: PLC0415  heavy

    if model.family == "deepseek_v4":
        own: Any = modeling_deepseek_v4
        return DeepseekV4Config, own.DeepseekV4ForCausalLM, (own, modeling_rope_utils)
    own = modeling_deepseek_v32
    return DeepseekV32Config, own.DeepseekV32ForCausalLM, (own, modeling_rope_utils)


def answer(model: RandomModel, folder: Path) -> dict[str, Tensor]:
    """Save a checkpoint of the model in `folder`; return tokens and logits, whole and by calls."""
    make_config, make_model, modules = family_of(model)
    generator = torch.Generator().manual_seed(model.weights_seed)
    arguments = json.loads(json.dumps(model.arguments))  # a config keeps and changes what it gets
    with torch.no_grad(), float64(*modules):
        theirs = make_model._from_config(
            make_config(**arguments), attn_implementation="eager", experts_implementation="eager"
        ).eval()
        _fill(theirs, generator)
        saved = make_model(make_config(**json.loads(json.dumps(model.arguments))))
        saved.load_state_dict(theirs.state_dict())
        saved.to(getattr(torch, model.dtype)).save_pretrained(folder)
        if model.refused:
            return {}
        tokens = torch.randint(
            0, model.arguments["vocab_size"], (1, model.length), generator=generator
        )
        whole = theirs(tokens, use_cache=False).logits[0]
        parts, cache = [], None
        for part in tokens.split(model.calls, dim=1):
            made = theirs(part, past_key_values=cache, use_cache=True)
            cache = made.past_key_values
            parts.append(made.logits[0])
        return {"tokens": tokens[0], "whole": whole, "parts": torch.cat(parts)}


def rope_of(stated: dict[str, Any]) -> tuple[list[float], float, float]:
    """Return frequencies, the scale of cos and sin, and that of logits, of a V3.2's YaRN."""
    from transformers import DeepseekV32Config, modeling_rope_utils  # noqa: PLC0415  heavy
    from transformers.models.deepseek_v32 import modeling_deepseek_v32  # noqa: PLC0415  heavy

    config = DeepseekV32Config(
        qk_rope_head_dim=8, max_position_embeddings=4096, rope_parameters=dict(stated)
    )
    with float64(modeling_rope_utils):
        made, rotation = modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](config)
    logits = modeling_deepseek_v32.yarn_apply_mscale(config.rope_parameters, 1.0)
    return made.tolist(), rotation, logits


def _fill(model: Any, generator: torch.Generator) -> None:
    """Give every parameter values that BF16 holds, none of them near 0 or 1 by habit."""
    for name, place in model.state_dict().items():
        if place.dtype is torch.int64:
            experts = int(model.config.n_routed_experts)
            rows = torch.rand(len(place), experts, generator=generator).argsort(-1)
            place.copy_(rows[:, : place.shape[1]])
            continue
        value = torch.randn(place.shape, generator=generator)
        if place.ndim > 1 and "embed" not in name:
            value = value * place.shape[-1] ** -0.5
        elif name.endswith("norm.weight") or "layernorm" in name:
            value = 1 + 0.3 * value
        place.copy_(value.bfloat16())


def main() -> None:
    """Answer every case of one folder there: checkpoints, tensors, and ropes."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    asked = json.loads((folder / "asked.json").read_text("utf-8"))
    for name, fields in asked["models"].items():
        made = answer(RandomModel(**fields), folder / name)
        save_file(
            {key: tensor.contiguous().clone() for key, tensor in made.items()},
            folder / f"{name}.safetensors",
        )
    ropes = [rope_of(stated) for stated in asked["ropes"]]
    (folder / "ropes.json").write_text(json.dumps(ropes), "utf-8")


if __name__ == "__main__":
    main()
