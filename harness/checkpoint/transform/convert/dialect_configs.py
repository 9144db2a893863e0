"""State the formats of weights and inputs in the configs of another dialect.

Configs follow from the modules, never from the source's own words, but for two things: what inputs
become, which no tensor shows, and modules without a tensor that the source leaves alone (tied
heads). Sources: as in dialects.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import LayoutMismatch
from degarble.harness.base.version import VERSION
from degarble.harness.checkpoint.view.quantisation_configs import cache_format

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from degarble.harness.checkpoint.view.view import Checkpoint

COMPRESSED, MODELOPT, FINE_GRAINED = "compressed-tensors", "modelopt", "finegrained-fp8"
CACHE_SCALES = {"k_scale": "k_proj", "v_scale": "v_proj"}
_MATRIX = 2


class ModuleForm(NamedTuple):
    """The format of a module's weights and of its inputs; `static`: by a stored scale."""

    format: str
    inputs: str | None
    static: bool
    factors: bool = False
    scheme: str = ""  # of integers

    @property
    def text(self) -> str:
        """Say it in words."""
        after = ", factors of inputs" if self.factors else ""
        if self.inputs is None:
            return f"{self.format} with inputs as they are{after}"
        how = "a stored scale" if self.static else "the token"
        return f"{self.format} with inputs in {self.inputs} by {how}{after}"


def dialect_of(quantisation: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the dialect that configs are written in; None: another one, or none."""
    method = str(quantisation.get("config.json", {}).get("quant_method"))
    if method == COMPRESSED:
        return COMPRESSED
    algorithms = [raw.get("quant_algo") for raw in quantisation.values()]
    if method.startswith(MODELOPT) or (method == "None" and any(algorithms)):
        return MODELOPT
    return FINE_GRAINED if method == "fp8" else None


# --------------------------------------------------------------------------------------------------
# compressed-tensors: format, arguments of the weights; formats of inputs that go with them.

_FLOAT: dict[str, Any] = {"type": "float", "symmetric": True, "dynamic": False}
_NVFP4 = {**_FLOAT, "num_bits": 4, "group_size": 16, "strategy": "tensor_group",
          "scale_dtype": "torch.float8_e4m3fn"}  # fmt: skip
_MX = {**_FLOAT, "group_size": 32, "strategy": "group", "scale_dtype": "torch.uint8"}
_FP8 = {**_FLOAT, "num_bits": 8}
_WEIGHTS: Mapping[str, Mapping[str, Any]] = {
    "NVFP4": _NVFP4,
    "MXFP4": {**_MX, "num_bits": 4},
    "MXFP8": {**_MX, "num_bits": 8},
    "FP8_TENSOR": {**_FP8, "strategy": "tensor"},
    "FP8_ROW": {**_FP8, "strategy": "channel"},
    "FP8_128X128_F32": {**_FP8, "strategy": "block", "block_structure": [128, 128]},
}
_STORED = {"NVFP4": "nvfp4-pack-quantized", "MXFP4": "mxfp4-pack-quantized",
           "MXFP8": "mxfp8-quantized"}  # fmt: skip
_BY_TOKEN = {"strategy": "token", "dynamic": True}
# By format and whether a scale is stored.
_INPUTS: Mapping[tuple[str, bool], Mapping[str, Any]] = {
    ("NVFP4", True): {**_NVFP4, "dynamic": "local"},
    ("MXFP4", False): {**_MX, "num_bits": 4, "dynamic": True},
    ("MXFP8", False): {**_MX, "num_bits": 8, "dynamic": True},
    ("FP8_ROW", True): {**_FP8, "strategy": "tensor"},
    ("FP8_ROW", False): {**_FP8, **_BY_TOKEN},
    ("FP8_1X128_F32", False): {**_FP8, "strategy": "group", "group_size": 128, "dynamic": True},
}
_INPUTS_OF_WEIGHTS = {
    "NVFP4": "NVFP4", "MXFP4": "MXFP4", "MXFP8": "MXFP8", "FP8_TENSOR": "FP8_ROW",
    "FP8_ROW": "FP8_ROW", "FP8_128X128_F32": "FP8_1X128_F32",
}  # fmt: skip

# --------------------------------------------------------------------------------------------------
# ModelOpt: the word for weights and inputs together.

_ALGORITHMS: Mapping[tuple[str, str | None, bool], str] = {
    ("NVFP4", "NVFP4", True): "NVFP4",
    ("NVFP4", None, False): "W4A16_NVFP4",
    ("MXFP4", None, False): "MXFP4",
    ("MXFP8", "MXFP8", False): "MXFP8",
    ("FP8_TENSOR", "FP8_ROW", True): "FP8",
    ("FP8_TENSOR", "FP8_ROW", False): "FP8_PER_CHANNEL_PER_TOKEN",  # its scale in every row
    ("FP8_ROW", "FP8_ROW", False): "FP8_PER_CHANNEL_PER_TOKEN",
    ("FP8_128X128_F32", None, False): "FP8_PB_WO",
}
_GROUP_SIZES = {"NVFP4": 16, "W4A16_NVFP4": 16, "MXFP4": 32, "MXFP8": 32}
_MIXED = "MIXED_PRECISION"
# Weights in ModelOpt's own config groups, which it writes for these alone.
_OWN_GROUPS: Mapping[str, Mapping[str, Any]] = {
    "NVFP4": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
    "W4A16_NVFP4": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
    "FP8": {"dynamic": False, "num_bits": 8, "type": "float"},
}


def states(to: str, form: ModuleForm) -> str | None:
    """Return how a dialect calls weights and inputs of these formats; None: it does not."""
    if form.factors or form.scheme:
        return None
    if to == FINE_GRAINED:
        whole = form.format in {"FP8_128X128_F32", "FP8_128X128_UE8M0"}
        known = {"FP8_1X128_F32", "FP8_1X128_UE8M0"}
        return "fp8" if whole and form.inputs in known and not form.static else None
    if to == MODELOPT:
        return _ALGORITHMS.get((form.format, form.inputs, form.static))
    if form.format not in _WEIGHTS or form.inputs not in {None, _INPUTS_OF_WEIGHTS[form.format]}:
        return None
    if form.inputs is not None and (form.inputs, form.static) not in _INPUTS:
        return None
    return _STORED.get(form.format, "float-quantized" if form.inputs else "naive-quantized")


class StatedConfigs(NamedTuple):
    """The `quantization_config` of config.json, and hf_quant_config.json where there is one."""

    config: dict[str, Any]
    beside: dict[str, Any] | None


def stated_configs(
    checkpoint: Checkpoint, to: str, forms: Mapping[str, ModuleForm]
) -> StatedConfigs:
    """State the forms of all quantised modules in a dialect."""
    left = left_plain(checkpoint, forms)
    cache = cache_of(checkpoint.quantisation, to)
    if to == COMPRESSED:
        return StatedConfigs(_compressed(forms, left, cache), None)
    if to == MODELOPT:
        return _modelopt(forms, left, cache)
    stated: dict[str, Any] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128], "modules_to_not_convert": left,
    }  # fmt: skip
    if {form.format for form in forms.values()} == {"FP8_128X128_UE8M0"}:
        stated["scale_fmt"] = "ue8m0"
    return StatedConfigs(stated, None)


def _by_name(to: str, forms: Mapping[str, ModuleForm]) -> dict[ModuleForm, list[str]]:
    """Group modules whose statement is the same."""
    groups: dict[ModuleForm | str | None, tuple[ModuleForm, list[str]]] = {}
    for name, form in forms.items():
        told = states(to, form) if to == MODELOPT else form
        groups.setdefault(told, (form, []))[1].append(name)
    return dict(groups.values())


def _compressed(
    forms: Mapping[str, ModuleForm], left: list[str], cache: Mapping[str, Any] | None
) -> dict[str, Any]:
    groups = _by_name(COMPRESSED, forms)
    # Trap: engines try classes before the names that a fused layer is made of, so that one group
    # of all linears would take the members of the others.
    alone = len(groups) == 1 and not any("embed" in name for name in forms)
    stated, formats = {}, set()
    for number, (form, names) in enumerate(groups.items()):
        word = states(COMPRESSED, form)
        formats.add(word)
        stated[f"group_{number}"] = {
            "format": word,
            "targets": ["Linear"] if alone else sorted(names),
            "weights": dict(_WEIGHTS[form.format]),
            "input_activations": dict(_INPUTS[form.inputs, form.static]) if form.inputs else None,
            "output_activations": None,
        }
    return {
        "quant_method": COMPRESSED,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": cache,
        "config_groups": stated,
        "ignore": left,
    }


def _modelopt(
    forms: Mapping[str, ModuleForm], left: list[str], cache: Mapping[str, Any] | None
) -> StatedConfigs:
    groups = _by_name(MODELOPT, forms)
    words = [states(MODELOPT, form) or "" for form in groups]
    producer = {"name": "degarble", "version": VERSION}
    fields: dict[str, Any] = {}
    if len(groups) == 1:
        fields["quant_algo"] = words[0]
        fields |= {"group_size": _GROUP_SIZES[words[0]]} if words[0] in _GROUP_SIZES else {}
    else:
        fields["quant_algo"] = _MIXED
        fields["quantized_layers"] = {
            name: {"quant_algo": word}
            | ({"group_size": _GROUP_SIZES[word]} if word in _GROUP_SIZES else {})
            for word, names in zip(words, groups.values(), strict=True)
            for name in names
        }
    stated = {**fields, "ignore": left, "producer": producer, "quant_method": MODELOPT}
    if all(word in _OWN_GROUPS for word in words):
        stated["config_groups"] = {
            f"group_{number}": _own_group(word, names if len(groups) > 1 else ["Linear"])
            for number, (word, names) in enumerate(zip(words, groups.values(), strict=True))
        }
    algorithm = None
    if cache is not None:
        stated["kv_cache_scheme"] = cache
        algorithm = "FP8" if cache["type"] == "float" else "INT8"
    beside = {
        "producer": producer,
        "quantization": {**fields, "kv_cache_quant_algo": algorithm, "exclude_modules": left},
    }
    return StatedConfigs(stated, beside)


def _own_group(word: str, targets: list[str]) -> dict[str, Any]:
    weights = dict(_OWN_GROUPS[word])
    inputs = {} if word.startswith("W4A16") else {"input_activations": dict(weights)}
    return {**inputs, "weights": weights, "targets": sorted(targets)}


def cache_of(quantisation: Mapping[str, Mapping[str, Any]], to: str) -> Mapping[str, Any] | None:
    """Return the scheme of the cache; raise for one that the dialect cannot state."""
    found = cache_format(quantisation.values())
    if not found:
        return None
    if found not in {"FP8_ROW", "INT8_ROW"} or to == FINE_GRAINED:
        raise LayoutMismatch(
            f"the cache of keys and values, to {to}", found,
            "a cache in FP8 or INT8 by stored scales, in a dialect that states caches",
            "Remove kv_cache_quant_algo and kv_cache_scheme from the configs if engines are to keep"
            " the cache as it is.",
        )  # fmt: skip
    kind = "float" if found == "FP8_ROW" else "int"
    return {"num_bits": 8, "type": kind, "strategy": "tensor", "symmetric": True, "dynamic": False}


def left_plain(checkpoint: Checkpoint, forms: Iterable[str]) -> list[str]:
    """List what stays unquantised: stored matrices, stacks of experts, and heads without tensors.

    A list names modules, not patterns: each dialect writes patterns in a way of its own.
    """
    taken = set(forms)
    left = set()
    for name, entry in checkpoint.entries.items():
        if name.endswith(".weight") and len(entry.shape) >= _MATRIX:
            left.add(name.removesuffix(".weight"))
        elif len(entry.shape) > _MATRIX and ".experts." in name:
            left.add(f"{name.partition('.experts.')[0]}.experts")
    for raw in checkpoint.quantisation.values():
        for key in ("ignore", "exclude_modules", "modules_to_not_convert"):
            stated = raw.get(key)
            names = stated if isinstance(stated, list) else []
            # A pattern reaches modules that are stored, which are listed above.
            left |= {each for each in names if isinstance(each, str) and _is_name(each)}
    if not any(name.startswith("lm_head.") for name in checkpoint.entries):
        left.add("lm_head")  # tied: a linear that no tensor shows
    covering = {name for module in taken for name in _parents(module)}
    stacks = {name.partition(".experts.")[0] + ".experts" for name in left if ".experts." in name}
    left |= stacks
    return sorted(left - covering)


def _is_name(text: str) -> bool:
    return not text.startswith("re:") and not any(sign in text for sign in "*?[")


def _parents(module: str) -> Iterable[str]:
    while module:
        yield module
        module = module.rpartition(".")[0]
