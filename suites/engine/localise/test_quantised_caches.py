"""Runs with a quantised cache agree, and so do runs without; another scale is placed and named."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.formats.weight import Weight
from degarble.harness.report.verdict import Verdict
from degarble.suites.engine.quantised_runs import Inputs, emulated, learned
from degarble.suites.references.traced.traced_models import built, config_of, weights_of
from degarble.suites.support.traced_runs import judged_run, prompt, recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from degarble.harness.engine.localise.localise import Localised

    # Layer and the two scales of the checkpoint to (written, read) by key and value
    Cached = Callable[[int, Sequence[Tensor]], Sequence[tuple[Tensor, Tensor]]]

pytestmark = pytest.mark.needs("transformers")

LAYERS, AT = 3, 1
KEYS, VALUES = 0.005, 0.013  # scales of the first layer's FP8 cache
LARGER = {"FP8_ROW": 1.0, "INT8_ROW": 448 / 127, "NVFP4": 1 / 6}  # those of other formats
HEADS = torch.tensor([1.0, 1.7])  # of two heads with scales of their own


class Form(NamedTuple):
    """A format of a cache, and whether every head has a scale."""

    name: str = "FP8_ROW"
    by_head: bool = False

    def scales(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the checkpoint's scales of keys and values."""
        heads = HEADS if self.by_head else torch.ones(())
        key, value = (LARGER[self.name] * (1 + layer) * each * heads for each in (KEYS, VALUES))
        return key, value


FORMS = {
    "fp8": Form(), "fp8 heads": Form(by_head=True), "int8": Form("INT8_ROW"),
    "int8 heads": Form("INT8_ROW", by_head=True), "nvfp4": Form("NVFP4"),
}  # fmt: skip
SLOW = ("int8", "int8 heads")  # what they cover the others do
NAMED = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in FORMS]


def _healthy(_layer: int, own: Sequence[Tensor]) -> Sequence[tuple[Tensor, Tensor]]:
    return [(scale, scale) for scale in own]


def _rounded(form: Form, rows: Tensor, written: Tensor, read: Tensor) -> Tensor:
    """Cache rows [B, G, T, D] by one scale, and read them by another."""
    way = Inputs("", form.name, static=True)
    over = [each.reshape(-1, 1, 1, 1) if each.ndim else each for each in (written, read)]
    made = emulated(rows, way, over[0])
    factor = over[1] / over[0]
    return (made * (factor[..., 0] if factor.ndim else factor)).to(rows.dtype)


def _run(cached: Cached | None, dtype: torch.dtype, name: str, form: Form) -> Localised:
    from transformers.cache_utils import Cache  # noqa: PLC0415  heavy

    model: Any = built(name, dtype, num_hidden_layers=LAYERS)
    config: Any = replace(config_of(name, dtype, num_hidden_layers=LAYERS), cache=form.name)
    weights = weights_of(model)
    for layer in range(LAYERS):
        for side, scale in zip("kv", form.scales(layer), strict=True):
            weights[f"layers.{layer}.self_attn.{side}_scale"] = Weight(value=scale)
    updating = Cache.update

    def update(cache: Any, keys: Tensor, values: Tensor, layer: int, *a: Any, **named: Any) -> Any:
        if cached is not None:
            ways = cached(layer, form.scales(layer))
            keys, values = (
                _rounded(form, rows, *way) for rows, way in zip((keys, values), ways, strict=True)
            )
        return updating(cache, keys, values, layer, *a, **named)

    with mock.patch.object(Cache, "update", update):
        run = recorded(model, config, prompt(config))
    return judged_run(config, weights, run)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)],
    ids=["bf16", "fp32"],
)
@pytest.mark.parametrize("form", NAMED)
def test_a_healthy_run_agrees_with_the_cache_and_without(form: str, dtype: torch.dtype) -> None:
    name = "qwen3" if form == "fp8" else "llama"
    found = _run(_healthy, dtype, name, FORMS[form])
    assert found.verdict is Verdict.AGREES, [each.sentence for each in found.origins]
    assert "cache_quantised" not in learned(found)
    found = _run(None, dtype, name, FORMS[form])
    assert found.verdict is Verdict.AGREES, [each.sentence for each in found.origins]
    assert learned(found)["cache_quantised"] is False


_FAULTS: dict[str, Callable[[Sequence[Tensor]], Sequence[tuple[Tensor, Tensor]]]] = {
    "k_scale for v": lambda own: [(own[0],) * 2, (own[0],) * 2],
    "exchanged": lambda own: [(own[1],) * 2, (own[0],) * 2],
    "values read by k_scale": lambda own: [(own[0],) * 2, (own[1], own[0])],
    "lost": lambda own: [(torch.ones_like(each),) * 2 for each in own],
    "keys read without": lambda own: [(own[0], torch.ones_like(own[0])), (own[1],) * 2],
    "of another layer": lambda own: [(each * (AT + 2) / (AT + 1),) * 2 for each in own],
    "of the next head": lambda own: [(own[0].flip(0),) * 2, (own[1],) * 2],
    "one for all heads": lambda own: [(own[0],) * 2, (own[1].max().expand(2),) * 2],
}


_QUICK = {"exchanged", "lost", "of another layer"}


def _in_one_layer(
    change: Any, layer: int, own: Sequence[Tensor]
) -> Sequence[tuple[Tensor, Tensor]]:
    chosen = change(own) if layer == AT else _healthy(layer, own)
    return [(written, read) for written, read in chosen]


def _cases() -> Iterator[Any]:
    for name, form in FORMS.items():
        for fault in _FAULTS:
            if form.by_head or not fault.endswith(("head", "heads")):
                for dtype in (torch.bfloat16, torch.float32):
                    quick = (name == "fp8" and fault in _QUICK) or (
                        name == "fp8 heads" and "head" in fault
                    )
                    marks = () if quick and dtype is torch.bfloat16 else pytest.mark.slow
                    case = f"{name}-{fault}-{str(dtype)[6:]}"
                    yield pytest.param(form, fault, dtype, marks=marks, id=case)


@pytest.mark.parametrize(("form", "fault", "dtype"), list(_cases()))
def test_another_scale_of_a_cache_is_placed_and_named(
    form: Form, fault: str, dtype: torch.dtype
) -> None:
    found = _run(partial(_in_one_layer, _FAULTS[fault]), dtype, "llama", form)
    (origin,) = found.origins
    assert origin.component == f"layers.{AT}.self_attn.cache"
    assert origin.record is not None
    told = diagnose(origin.context, [origin.record, *origin.more])
    assert told.named, told.sentence
    assert told.named[0].id == "M32.cache_scale", told.sentence
