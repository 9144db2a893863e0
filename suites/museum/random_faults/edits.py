"""Random edits of one component: of its weights, inputs, outputs, sums, choices and masks.

An edit wraps a component's call, as a kernel that goes wrong would, and is known as plain data.
It shares no code with the faults that the engine knows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.formats.codec import pack_nibbles
from degarble.suites.museum.random_faults.masks import drawn_mask
from degarble.suites.museum.random_faults.values import Change, drawn_change, is_finite

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.formats.weight import Weight

    Tensors = Mapping[str, Tensor]
    Wrapper = Callable[[ComponentCall], ComponentCall]

_TRIES = 12
_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Edit:
    """What goes wrong in a component: as plain data, and as a wrapper of its call."""

    truth: dict[str, Any]
    apply: Wrapper


@dataclass(frozen=True, eq=False)
class Scene:
    """A component of a healthy run: what it is given and returns, its weights, those of others."""

    component: str
    inputs: Tensors
    outputs: Tensors
    weights: Mapping[str, Weight]
    others: Sequence[tuple[str, Weight]] = ()


def drawn_edit(drawn: random.Random, scene: Scene) -> Edit | None:
    """Draw an edit of a component; None where nothing that was drawn is possible there."""
    kinds: list[Callable[[random.Random, Scene], Edit | None]] = [_of_output, _of_input]
    if len(scene.weights):
        kinds += [_of_weight, _of_weight, _of_sum]
    if {"query", "key", "value"} <= scene.inputs.keys():
        kinds += [_of_mask] * 2
    for _ in range(_TRIES):
        found = drawn.choice(kinds)(drawn, scene)
        if found is not None:
            return found
    return None


# ---- weights -------------------------------------------------------------------------------------


def _of_weight(drawn: random.Random, scene: Scene) -> Edit | None:
    name = drawn.choice(list(scene.weights))
    weight = scene.weights[name]
    made = _coded(drawn, weight) if weight.is_quantised else _plain(drawn, weight)
    if drawn.random() < 0.15:
        made = _of_other(drawn, weight, scene.others) or made
    if made is None:
        return None
    truth, changed = made
    if not bool(changed.values(torch.float32).isfinite().all()):
        return None

    def apply(call: ComponentCall) -> ComponentCall:
        def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
            return call(inputs, {n: changed if n == name else weights[n] for n in weights})

        return faulty

    return Edit({"operand": f"weight {name}", **truth}, apply)


def _plain(drawn: random.Random, weight: Weight) -> tuple[dict[str, Any], Weight] | None:
    value = weight.value
    if value is None or not is_finite(value) or not value.numel():
        return None
    truth: dict[str, Any] = {}
    part = value
    if value.ndim == 3 and drawn.random() < 0.6:
        truth["expert"] = drawn.randrange(len(value))
        part = value[truth["expert"]]
    matrix = part.double().reshape(-1, part.shape[-1] if part.ndim else 1)
    change = drawn_change(drawn, matrix, rows_too=len(matrix) > 1)
    made = change.apply(matrix).reshape(part.shape).to(value.dtype)
    if "expert" in truth:
        whole = value.clone()
        whole[truth["expert"]] = made
        made = whole
    return {**truth, **change.truth}, replace(weight, value=made, _decoded={})


def _coded(drawn: random.Random, weight: Weight) -> tuple[dict[str, Any], Weight] | None:
    kind = drawn.choice(("codes", "codes", "block scales", "tensor scale"))
    if kind == "tensor scale":
        if weight.tensor_scale is None:
            return None
        factor = drawn.choice((0.5, 2.0, 4.0, round(drawn.uniform(0.7, 1.4), 3)))
        made = replace(weight, tensor_scale=weight.tensor_scale * factor, _decoded={})
        return {"op": "tensor scale", "factor": factor}, made
    tensor = weight.quantised()
    if kind == "block scales":
        scales = tensor.block_scale
        if scales.ndim != 2:
            return None
        truth, changed = _changed_codes(drawn, scales, bits=6)
        return {"of": kind, **truth}, replace(weight, block_scale=changed, _decoded={})
    if tensor.nibble_order is None:
        if tensor.codes.ndim != 2 or tensor.codes.dtype.itemsize != 1:
            return None
        truth, changed = _changed_codes(drawn, tensor.codes, bits=7)
        return {"of": kind, **truth}, replace(weight, codes=changed, _decoded={})
    codes = tensor.element_codes()
    if codes.ndim != 2:
        return None
    truth, changed = _changed_codes(drawn, codes, bits=4)
    packed = pack_nibbles(changed & 0xF, tensor.nibble_order)  # as bytes wrap where codes are wider
    return {"of": kind, **truth}, replace(weight, codes=packed, _decoded={})


def _changed_codes(drawn: random.Random, codes: Tensor, bits: int) -> tuple[dict[str, Any], Tensor]:
    """Flip bits of a few codes, or move codes about; scales that are numbers are changed so."""
    if codes.dtype.itemsize > 1:
        change = drawn_change(drawn, codes.double(), rows_too=True)
        return change.truth, change.apply(codes.double()).to(codes.dtype)
    plain = codes.view(torch.uint8).clone()
    if drawn.random() < 0.5:
        few = drawn.choice((1, 1, 2, 3, 16))
        places = [(drawn.randrange(plain.shape[0]), drawn.randrange(plain.shape[1]))
                  for _ in range(few)]  # fmt: skip
        bit = 1 << drawn.randrange(bits)
        for at in dict.fromkeys(places):
            plain[at] ^= bit
        return {"op": "bit", "bit": bit, "places": places}, plain.view(codes.dtype)
    change = drawn_change(drawn, plain.double(), rows_too=True, exact=True)
    return change.truth, change.apply(plain.double()).to(torch.uint8).view(codes.dtype)


def _of_other(
    drawn: random.Random, weight: Weight, others: Sequence[tuple[str, Weight]]
) -> tuple[dict[str, Any], Weight] | None:
    """Put rows of another weight of this shape in place of its own."""
    alike = [(name, other) for name, other in others if other.shape == weight.shape]
    if len(weight.shape) != 2 or not alike:
        return None
    name, other = drawn.choice(alike)
    count = weight.shape[0]
    begin = drawn.choice((0, count // 2, drawn.randrange(count)))
    own = weight.values(torch.float32).clone()
    own[begin:] = other.values(torch.float32)[begin:]
    truth = {"op": "rows of another weight", "other": name, "from row": begin}
    if weight.value is not None:
        return truth, replace(weight, value=own.to(weight.value.dtype), _decoded={})
    return truth, type(weight)(value=own, input_scale=weight.input_scale, from_codes=True)


# ---- inputs and outputs --------------------------------------------------------------------------


def _of_input(drawn: random.Random, scene: Scene) -> Edit | None:
    names = [name for name, tensor in scene.inputs.items() if tensor.numel()]
    if not names:
        return None
    name = drawn.choice(names)
    alike = [n for n in names if n != name and _alike(scene.inputs[n], scene.inputs[name])]
    if alike and drawn.random() < 0.3:
        other = drawn.choice(alike)

        def exchange(call: ComponentCall) -> ComponentCall:
            return lambda inputs, weights: call(
                {**inputs, name: inputs[other], other: inputs[name]}, weights
            )

        return Edit({"operand": f"input {name}", "op": "exchanged", "with": other}, exchange)
    change = _of_tensor(drawn, name, scene.inputs[name])
    if change is None:
        return None

    def apply(call: ComponentCall) -> ComponentCall:
        def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
            return call({**inputs, name: change.apply(inputs[name])}, weights)

        return faulty

    return Edit({"operand": f"input {name}", **change.truth}, apply)


def _of_output(drawn: random.Random, scene: Scene) -> Edit | None:
    names = [name for name, tensor in scene.outputs.items() if tensor.numel()]
    if not names:  # a call of no rows
        return None
    name = drawn.choice(names)
    like = scene.outputs[name]
    added = [n for n, t in scene.inputs.items() if t.shape == like.shape and is_finite(t)]
    if added and is_finite(like) and drawn.random() < 0.25:
        return _added(drawn, name, drawn.choice(added))
    if drawn.random() < 0.08 and like.ndim > 1:
        return _stale(name, drawn.choice((1, 2, 4)))
    change = _of_tensor(drawn, name, like)
    if change is None:
        return None
    every = slice(None)
    truth = dict(change.truth)
    if like.ndim > 1 and drawn.random() < 0.15:  # rows of a tile
        step = drawn.choice((2, 4, 8, 16))
        every = slice(drawn.randrange(step), None, step)
        truth["rows of call"] = [every.start, every.step]

    def apply(call: ComponentCall) -> ComponentCall:
        def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
            outputs = dict(call(inputs, weights))
            made = outputs[name].clone()
            wrong = change.apply(outputs[name])
            made[every] = wrong[every] if made.ndim else wrong
            outputs[name] = made
            return outputs

        return faulty

    return Edit({"operand": f"output {name}", **truth}, apply)


def _added(drawn: random.Random, name: str, source: str) -> Edit:
    factor = drawn.choice((1.0, -1.0, 0.5, round(drawn.uniform(0.05, 0.5), 3)))

    def apply(call: ComponentCall) -> ComponentCall:
        def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
            outputs = dict(call(inputs, weights))
            total = outputs[name].double() + factor * inputs[source].double()
            outputs[name] = total.to(outputs[name].dtype)
            return outputs

        return faulty

    return Edit(
        {"operand": f"output {name}", "op": "input added", "input": source, "factor": factor}, apply
    )


def _stale(name: str, count: int) -> Edit:
    """Leave the first rows of a call as the call before it wrote them."""

    def apply(call: ComponentCall) -> ComponentCall:
        before: list[Tensor] = []

        def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
            outputs = dict(call(inputs, weights))
            right = outputs[name]
            if before and before[-1].shape[1:] == right.shape[1:]:
                rows = min(count, len(right), len(before[-1]))
                made = right.clone()
                made[:rows] = before[-1][:rows]
                outputs[name] = made
            before[:] = [right]
            return outputs

        return faulty

    return Edit(
        {"operand": f"output {name}", "op": "rows of the call before", "rows": count}, apply
    )


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and not torch.equal(a, b)


def _of_tensor(drawn: random.Random, name: str, like: Tensor) -> Change | None:
    """Draw a change of a tensor whose rows are tokens: of numbers, of codes, of whole numbers."""
    if like.dtype in (torch.int32, torch.int64):
        return _of_numbers_of_rows(drawn, name, like)
    if like.dtype is torch.uint8 or like.dtype.itemsize == 1:
        return _of_codes(drawn, like) if like.ndim > 1 else None
    if not is_finite(like):
        return None
    if like.ndim < 2:
        factor = drawn.choice((0.5, 2.0, round(drawn.uniform(0.7, 1.4), 3)))
        return Change({"op": "scaled", "factor": factor}, lambda x: (x * factor).to(x.dtype))
    if drawn.random() < 0.1:
        return Change({"op": "the row before"}, lambda x: x.roll(1, 0))
    if like.ndim > 2 and drawn.random() < 0.3:
        order = list(range(like.shape[1]))
        drawn.shuffle(order)
        return Change(
            {"op": "heads permuted", "order": order},
            lambda x: x[:, torch.tensor(order)] if x.shape[1] == len(order) else x,
        )
    change = drawn_change(drawn, like.double().flatten(0, -2), rows_too=False)

    def apply(x: Tensor) -> Tensor:
        rows = x.double().flatten(0, -2)
        return change.apply(rows).reshape(x.shape).to(x.dtype)

    return Change(change.truth, apply)


def _of_codes(drawn: random.Random, like: Tensor) -> Change:
    flat = like.view(torch.uint8).flatten(0, -2)
    if drawn.random() < 0.4:
        mask = drawn.choice((0x01, 0x08, 0x10, 0x80, 0x88))
        begin = drawn.randrange(flat.shape[1])

        def flipped(x: Tensor) -> Tensor:
            made = x.view(torch.uint8).clone()
            made[..., begin:] ^= mask
            return made.view(x.dtype)

        return Change({"op": "bits flipped", "mask": mask, "from byte": begin}, flipped)
    change = drawn_change(drawn, flat.double(), rows_too=False, exact=True)

    def apply(x: Tensor) -> Tensor:
        rows = x.view(torch.uint8).flatten(0, -2)
        return change.apply(rows.double()).to(torch.uint8).reshape(x.shape).view(x.dtype)

    return Change({"of": "codes", **change.truth}, apply)


def _of_numbers_of_rows(drawn: random.Random, name: str, like: Tensor) -> Change | None:
    """Change positions, or which experts, entries and tokens were chosen."""
    if name == "positions":
        by = drawn.choice((1, 2, 3, 16, -1))
        kind = drawn.choice(("moved", "stretched", "coarse", "of the row before"))
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            "moved": lambda x: (x + by).clamp(min=0),
            "stretched": lambda x: x * abs(by) * 2,
            "coarse": lambda x: x // (abs(by) + 1),
            "of the row before": lambda x: x.roll(1, 0),
        }
        return Change({"op": f"positions {kind}", "by": by}, ways[kind])
    if name.startswith(("token_offsets", "entry_offsets", "state")) or int(like.amax()) < 2:
        return None
    most = int(like.amax())
    one, other = drawn.sample(range(most + 1), 2)
    if drawn.random() < 0.5:
        return Change(
            {"op": "number exchanged", "one": one, "other": other},
            lambda x: torch.where(x == one, other, torch.where(x == other, one, x)),
        )
    return Change(
        {"op": "number replaced", "one": one, "by": other},
        lambda x: torch.where(x == one, other, x),
    )


# ---- sums and masks ------------------------------------------------------------------------------


def _of_sum(drawn: random.Random, scene: Scene) -> Edit | None:
    """Sum a product in parts: rounded between them, one left out, one taken twice."""
    source = next((n for n in ("x", "codes") if n in scene.inputs), None)
    if source is None or not _is_product(scene, source):
        return None
    parts = drawn.choice((2, 4, 8))
    kind = drawn.choice(("left out", "twice", "stored in bfloat16"))
    at = drawn.randrange(parts)

    def apply(call: ComponentCall) -> ComponentCall:
        def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
            x = inputs[source]
            chunk = torch.arange(x.shape[-1]) * parts // x.shape[-1]

            def of(mask: Tensor) -> Tensors:
                return call({**inputs, source: torch.where(mask, x, torch.zeros_like(x))}, weights)

            if kind == "left out":
                return of(chunk != at)
            if kind == "twice" and x.is_floating_point() and x.dtype.itemsize > 1:
                return call({**inputs, source: torch.where(chunk == at, 2 * x, x)}, weights)
            whole = call(inputs, weights)
            if kind == "twice":
                rest = of(chunk != at)
                return {
                    n: (2 * whole[n].double() - rest[n].double()).to(whole[n].dtype) for n in whole
                }
            nothing = of(chunk < 0)
            total = {n: t.double() for n, t in nothing.items()}
            for number in range(parts):
                own = of(chunk == number)
                total = {
                    n: (total[n] + own[n].double() - nothing[n].double())
                    .to(torch.bfloat16)
                    .double()
                    for n in total
                }
            return {n: total[n].to(whole[n].dtype) for n in whole}

        return faulty

    return Edit({"operand": "sum", "op": f"part {kind}", "parts": parts, "part": at}, apply)


def _is_product(scene: Scene, source: str) -> bool:
    """Return whether outputs are linear in an input, seen from its shape and the weights'."""
    x = scene.inputs[source]
    if not x.is_floating_point() and source == "x":
        return False
    width = x.shape[-1] * (2 if source == "codes" and x.dtype is torch.uint8 else 1)
    shapes = [weight.shape for weight in scene.weights.values() if len(weight.shape) >= 2]
    floats = all(t.is_floating_point() and t.dtype.itemsize > 1 for t in scene.outputs.values())
    wide = {shape[0] for shape in shapes}
    outputs = {t.shape[-1] for t in scene.outputs.values() if t.ndim}
    return (
        bool(shapes) and floats and all(shape[-1] == width for shape in shapes)
        and any(out in (one, 2 * one) for out in outputs for one in wide)
    )  # fmt: skip


def _of_mask(drawn: random.Random, scene: Scene) -> Edit | None:
    found = drawn_mask(drawn, scene.inputs, scene.outputs)
    return None if found is None else Edit({"operand": "mask", **found[0]}, found[1])
