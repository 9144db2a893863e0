"""Judge a kernel's saved tensors: operands and output of one call in one .safetensors file.

    x, w, out              tensors; bias too, where the product adds one
    x.codes, x.block_scale, x.tensor_scale    a quantised operand in their place, w likewise

Metadata of the file may state `component` (gemm, rmsnorm, swiglu), `format` (nvfp4, mxfp4, mxfp8,
fp8), `layout` of the block scales (linear, 128x4, 8x4), and `epsilon` of a norm. safetensors holds
no code to run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from degarble.harness.base.errors import InvalidArgument, UnknownName, UnreadableFile
from degarble.harness.engine.diagnose.judge.judge import OPERATIONS, Setting, judge
from degarble.harness.formats.operands import fp8, mxfp4, mxfp8, nvfp4

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.engine.diagnose.judge.report import JudgedKernel
    from degarble.harness.formats.quantise import QuantisedTensor

JUDGED = OPERATIONS[:3]  # those whose output is one tensor
_NAMES = "x, w and out, or x.codes, x.block_scale and x.tensor_scale in the place of x"
_ROLES = {"x", "w", "gate", "up", "bias", "out"}
_PARTS = {"", "codes", "block_scale", "tensor_scale"}
_FORMATS: Mapping[str, Callable[..., QuantisedTensor]] = {
    "nvfp4": nvfp4, "mxfp4": mxfp4, "mxfp8": mxfp8, "fp8": fp8,
}  # fmt: skip


def judge_file(path: Path) -> JudgedKernel:
    """Read the file and judge the call in it."""
    tensors, stated = _read(path)
    component = stated.get("component", JUDGED[0])
    if component not in JUDGED:
        raise InvalidArgument(
            "component in the file's metadata", component, f"one of {', '.join(JUDGED)}",
            "Judge another one in Python: degarble.harness.api.judge.",
        )  # fmt: skip
    operands = {name: _operand(name, tensors, stated) for name in sorted(_ROLES - {"out"})}
    given = {name: operand for name, operand in operands.items() if operand is not None}
    output = tensors.get("out")
    needed = {"gemm": {"x", "w"}, "rmsnorm": {"x"}, "swiglu": {"x"}}[component]
    if component == "swiglu" and {"gate", "up"} <= given.keys():
        needed = set()
    if output is None or needed - given.keys():
        missing = sorted(needed - given.keys()) + (["out"] if output is None else [])
        raise InvalidArgument(
            f"tensors of {path.name}", sorted(tensors), _NAMES, f"Save {', '.join(missing)} too."
        )
    inputs = {name: given[name] for name in ("x", "gate", "up") if name in given}
    weights: Any = {name: given[name] for name in ("w", "bias") if name in given}
    if component == "rmsnorm":
        weights = weights.get("w")
    elif component == "swiglu":
        weights = None
    return judge(component, inputs, weights, output, setting=_setting(stated))


def _read(path: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            _require_known(names)  # before tensors of a whole model are read
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except (SafetensorError, OSError, ValueError) as error:
        raise UnreadableFile(
            str(path), f"{type(error).__name__}: {error}", "a whole .safetensors file",
            "Save it again: safetensors.torch.save_file(tensors, FILE).",
        ) from error  # fmt: skip


def _require_known(names: Sequence[str]) -> None:
    for name in names:
        role, _, part = name.partition(".")
        if role not in _ROLES or part not in _PARTS:
            raise InvalidArgument(
                "tensor", name, f"{_NAMES}; also bias, gate and up",
                "Rename it, or leave it out of the file. Tensors of a whole model are a checkpoint:"
                " name their folder.",
            )  # fmt: skip
        if part and role in names:
            raise InvalidArgument(
                "tensor", name, f"either {role} or its codes and scales", "Leave one of them out."
            )


def _operand(
    name: str, tensors: Mapping[str, Tensor], stated: Mapping[str, str]
) -> Tensor | QuantisedTensor | None:
    """Return one operand: plain, or of its codes and scales; None where it is not there."""
    codes, block_scale = tensors.get(f"{name}.codes"), tensors.get(f"{name}.block_scale")
    if codes is None or block_scale is None:
        return tensors.get(name)
    form, layout = stated.get("format", "nvfp4").lower(), stated.get("layout", "linear")
    if form not in _FORMATS:
        raise UnknownName.among("format in the file's metadata", form, _FORMATS)
    scale = tensors.get(f"{name}.tensor_scale")
    if form == "nvfp4":
        return nvfp4(codes, block_scale, scale, layout)
    if scale is not None:
        raise InvalidArgument(
            "tensor", f"{name}.tensor_scale", f"no tensor scale: {form} has none",
            "Leave it out, or state another format in the metadata.",
        )  # fmt: skip
    return _FORMATS[form](codes, block_scale, layout=layout)


def _setting(stated: Mapping[str, str]) -> Setting:
    text = stated.get("epsilon")
    if text is None:
        return Setting()
    try:
        return Setting(epsilon=float(text))
    except ValueError as error:
        raise InvalidArgument(
            "epsilon in the file's metadata", text, "a number", "Write it as 1e-6."
        ) from error
