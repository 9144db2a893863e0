"""What transformers computes for a config, weights and tokens, module by module.

Run in a process of its own: it imports widely and warns. Reads a pickle of our own making, a list
of cases {config, weights, tokens [B, T], decode}, and writes for each what its modules took in and
put out: `seen`, a mapping from (module name, "in" or "out", number) to the tensors of the whole
prompt, and `logits`; with `decode` > 0 the last tokens are fed one by one into its cache instead.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from degarble.suites.references.transformers_models import build

Seen = dict[tuple[str, str, int], torch.Tensor]


def observed(model: Any, seen: Seen) -> None:
    """Write down inputs and outputs of every module, and of the eager attention."""
    for name, module in model.named_modules():
        module.register_forward_hook(_writer(name, seen), with_kwargs=True)
    source: Any = sys.modules[type(model).__module__]
    plain = source.eager_attention_forward

    def attention(module: Any, *tensors: Any, **more: Any) -> Any:
        result = plain(module, *tensors, **more)
        name = f"layers.{module.layer_idx}.attention"
        _write(seen, name, "in", tensors)
        _write(seen, name, "out", result)
        return result

    source.eager_attention_forward = attention
    topk = torch.Tensor.topk

    def kept_topk(tensor: Any, *more: Any, **named: Any) -> Any:
        seen["topk", "in", len([key for key in seen if key[0] == "topk"])] = tensor.clone()
        return topk(tensor, *more, **named)

    torch.Tensor.topk = kept_topk  # type: ignore[method-assign,assignment]


def _writer(name: str, seen: Seen) -> Any:
    def write(_module: Any, given: Any, named: Any, result: Any) -> None:
        _write(seen, name, "in", [*given, *named.values()])
        _write(seen, name, "out", result)

    return write


def _write(seen: Seen, name: str, side: str, found: Any) -> None:
    for number, tensor in enumerate(found if isinstance(found, (tuple, list)) else [found]):
        if isinstance(tensor, torch.Tensor):
            seen[name, side, number] = tensor.detach().clone()


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case."""
    model = build(case["config"], case["weights"], torch.float32)
    tokens, decode = case["tokens"], case["decode"]
    if decode:
        made = model(tokens[:, :-decode], use_cache=True)
        logits = [made.logits]
        for column in tokens[:, -decode:].T:
            made = model(column[:, None], past_key_values=made.past_key_values, use_cache=True)
            logits.append(made.logits)
        return {"seen": {}, "logits": torch.cat(logits, dim=1)}
    seen: Seen = {}
    original = torch.Tensor.topk
    source: Any = sys.modules[type(model).__module__]
    plain = source.eager_attention_forward
    observed(model, seen)
    try:
        logits = model(tokens, use_cache=False).logits
    finally:
        torch.Tensor.topk = original  # type: ignore[method-assign]
        source.eager_attention_forward = plain
    return {"seen": seen, "logits": logits}


def main() -> None:
    """Answer every case of one file in another."""
    source, target = sys.argv[1:]
    torch.set_num_threads(1)
    with torch.no_grad():
        cases = torch.load(source, weights_only=False)
        torch.save([answer(case) for case in cases], target)


if __name__ == "__main__":
    main()
