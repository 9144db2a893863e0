"""Generate the quantisation entries of a checkpoint's configs, and parse what configs claim."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from fnmatch import translate
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import NotBuilt
from degarble.harness.base.version import VERSION
from degarble.harness.model.config.json_file import config_to_dict
from degarble.harness.model.family import family_of
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import BF16, Recipe, recipe_named
from degarble.harness.model.types import Kind

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from degarble.harness.model.config.config import Config
    from degarble.harness.model.layouts import Layout
    from degarble.harness.model.parameters import Parameter


# --------------------------------------------------------------------------------------------------
# Entries of config.json and hf_quant_config.json for a layout. There are four kinds: FP8 as
# DeepSeek releases it, NVFP4 experts with FP8 linears (ModelOpt's mixed precision), NVFP4 with BF16
# (ModelOpt), and compressed-tensors. The list of unquantised modules follows from the recipe.
#
# ModelOpt's own exports of V3.2 have no `quantization_config`, but ours do: vLLM 0.33 accepts
# hf_quant_config.json only from the producer "modelopt", and otherwise builds every weight
# unquantised.
#
# Sources: config.json of DeepSeek-V4-Pro; NVIDIA's V4 NVFP4 exports and Model-Optimizer
# examples/deepseek; compressed-tensors 0.20 quantization/quant_config.py.

CONFIG = "config.json"
HF_QUANT_CONFIG = "hf_quant_config.json"

_NVFP4 = "NVFP4"
_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
_FOUR_BITS = {"num_bits": 4, "type": "float", "group_size": 16}
_MODELOPT_GROUP = {
    "weights": {**_FOUR_BITS, "dynamic": False},
    "input_activations": {**_FOUR_BITS, "dynamic": False},
    "targets": ["Linear"],
}
_PACKED_GROUP = {
    "format": "nvfp4-pack-quantized",
    "targets": ["Linear"],
    "weights": {**_FOUR_BITS, "strategy": "tensor_group", "symmetric": True, "dynamic": False},
    "input_activations": {
        **_FOUR_BITS,
        "strategy": "tensor_group",
        "symmetric": True,
        "dynamic": "local",
    },
}


def config_files(config: Config, layout: Layout) -> dict[str, bytes]:
    """Write the config files of a checkpoint in this layout."""
    saved = layout.name.startswith("transformers")
    renamed = layout.spelling in family_of(config).transformers_config
    raw = config_to_dict(config, "transformers" if saved or renamed else "released")
    raw.pop("quantization_config", None)
    stated, beside = quantisation(config, layout)
    return json_files(raw, stated, beside)


def json_files(
    raw: dict[str, Any], stated: dict[str, Any] | None, beside: dict[str, Any] | None
) -> dict[str, bytes]:
    """Write config.json with its `quantization_config`, and hf_quant_config.json if stated."""
    files = {CONFIG: raw | ({"quantization_config": stated} if stated else {})}
    if beside:
        files[HF_QUANT_CONFIG] = beside
    return {
        name: (json.dumps(file, ensure_ascii=False, indent=2) + "\n").encode()
        for name, file in files.items()
    }


def quantisation(
    config: Config, layout: Layout
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return `quantization_config` and hf_quant_config.json's content; None where there is none.

    An engine reads the first, ModelOpt's own tools the second.
    """
    formats = {weight for _, weight in _linears(config, layout)}
    if _NVFP4 not in formats:
        return (None if formats <= {BF16} else dict(_FP8)), None
    if layout.suffixes == "compressed-tensors":
        return _compressed(config, layout), None
    kept = formats - {_NVFP4, BF16}
    ignored = _left_alone(config, layout)
    groups = {"group_0": _MODELOPT_GROUP}
    if kept:
        fields = {
            "moe_quant_algo": _NVFP4,
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "config_groups": groups,
            "quantized_layers": _listed(config, layout),
        }
        return {**_FP8, **fields, "ignore": ignored}, _beside(
            {**fields, "exclude_modules": ignored}
        )
    fields = {"quant_algo": _NVFP4, "kv_cache_quant_algo": None, "group_size": 16}
    beside = _beside({**fields, "exclude_modules": ignored})
    stated = {"quant_method": "modelopt", **fields}
    fused = fused_in_vllm(config, ignored)
    return stated | family_of(config).modelopt_fields(groups, ignored, fused), beside


def fused_in_vllm(config: Config, ignored: Collection[str]) -> list[str]:
    """Return vLLM's fused names of ignored linears: it looks these up, not the members."""
    layout, names = layout_named("vllm", config), set(ignored)
    fusion_of = {row: each for each in layout.fusions for row in each.members}
    found: dict[str, list[bool]] = defaultdict(list)
    for parameter in parameters(config):
        fusion = fusion_of.get(parameter.row.name)
        if fusion is not None and parameter.expert is None and not layout.omits(parameter, config):
            path = layout.path_of(parameter, config, fusion.target)
            found[path].append(layout.path_of(parameter, config) in names)
    return [path for path, members in found.items() if all(members)]


def _beside(fields: dict[str, Any]) -> dict[str, Any]:
    return {"producer": {"name": "degarble", "version": VERSION}, "quantization": fields}


def _compressed(config: Config, layout: Layout) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": {"group_0": _PACKED_GROUP},
        "ignore": _left_alone(config, layout),
    }


def _linears(config: Config, layout: Layout) -> Iterator[tuple[Parameter, str]]:
    """Yield every linear that the layout stores, one expert for all, with its weight's format."""
    recipe = layout.recipe_for(config)
    for parameter in parameters(config):
        if parameter.kind is not Kind.LINEAR or parameter.expert not in (None, 0):
            continue
        if not layout.omits(parameter, config):
            yield parameter, recipe.format_of(parameter).weight


def _left_alone(config: Config, layout: Layout) -> list[str]:
    """Return the linears that are not NVFP4; a drafter without any becomes one pattern."""
    names: list[str] = []
    drafters: dict[str, list[str]] = defaultdict(list)
    with_nvfp4 = set()
    for parameter, weight in _linears(config, layout):
        path = layout.path_of(parameter, config)
        drafts = parameter.block is not None and parameter.block.is_drafter
        prefix = _prefix(path, parameter) if drafts else ""
        if weight == _NVFP4:
            with_nvfp4.add(prefix)
        elif parameter.expert is None or drafts:
            stack = path.partition(".experts.")[0] + ".experts"
            text = path if parameter.expert is None else stack
            (drafters[prefix] if drafts else names).append(text)
    for prefix, drafter in sorted(drafters.items()):
        names += dict.fromkeys(drafter) if prefix in with_nvfp4 else [f"{prefix}.*"]
    return names


def _listed(config: Config, layout: Layout) -> dict[str, Any]:
    """Return what is NVFP4: stacks of experts, and linears outside of them."""
    found: dict[str, Any] = {}
    for parameter, weight in _linears(config, layout):
        if weight == _NVFP4:
            path = layout.path_of(parameter, config)
            stack = path.partition(".experts.")[0] + ".experts"
            text = path if parameter.expert is None else stack
            found[text] = {"quant_algo": _NVFP4, "group_size": 16}
    return found


def _prefix(path: str, parameter: Parameter) -> str:
    """Cut a path after the number of its block: `model.layers.61`, `mtp.0`."""
    assert parameter.block is not None
    parts = path.split(".")
    number = next(index for index, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[: number + 1])


# --------------------------------------------------------------------------------------------------
# Claims, in four dialects of `quantization_config` (config.json) and hf_quant_config.json:
# DeepSeek's FP8, ModelOpt's quant_algo with exclude_modules or quantized_layers, NVIDIA's FP8 with
# moe_quant_algo, and compressed-tensors' config_groups. For one module a statement returns a
# promise: format, block size, quantised activations, and the words that state it. A module on an
# `ignore` list keeps the source's format where quant_method is fp8, and is unquantised everywhere
# else.
#
# The claims are not trusted: the structure audit compares them with the files. Unknown words are
# kept in `unread`, and so are patterns that could take long to match.
#
# Sources: ModelOpt 0.47 torch/export/{quant_utils,convert_hf_config}.py; compressed-tensors 0.20
# quantization/quant_config.py and utils/match.py; NVIDIA's exports of DeepSeek-V4.

FP8_BLOCKS = "FP8 blocks"  # 128x128, whatever the type of its scales
_SOURCE = "fp8"
# Methods whose codes are none of the formats that are read here.
OTHER_METHODS = frozenset(
    {"bitsandbytes", "gguf", "hqq", "quanto", "aqlm", "eetq", "bitnet", "vptq"}
)
_INTEGER_METHODS = frozenset({"gptq", "awq"})
# Methods whose codes are read here, as configs name them.
READ_METHODS = frozenset(
    {"fp8", "fbgemm_fp8", "modelopt", "compressed-tensors", "torchao", "mxfp4", *_INTEGER_METHODS}
)
_INTEGER_ALGORITHMS = frozenset({"INT4_AWQ", "W4A16_AWQ", "W4A8_AWQ"})  # of ModelOpt
_MIXED = "MIXED_PRECISION"
_MOST_PATTERNS = 1000  # with an asterisk or a regular expression; names are looked up
_LONGEST_PATTERN = 500
_MOST_REPEATS = 3  # of unbounded length in one expression, so that matching stays polynomial
_REPEATED_GROUP = re.compile(r"\)[*+{?]")
_WITHOUT_LAYERS = frozenset({"", "Linear"})

# quant_algo of ModelOpt to format and whether activations are quantised with a stored scale.
ALGORITHMS: Mapping[str, tuple[str, bool]] = {
    "NVFP4": ("NVFP4", True),
    "W4A16_NVFP4": ("NVFP4", False),
    "W4A8_NVFP4_FP8": ("NVFP4", True),
    "MXFP4": ("MXFP4", False),
    "W4A8_MXFP4_FP8": ("MXFP4", False),
    "MXFP8": ("MXFP8", False),
    "FP8_PB_WO": (FP8_BLOCKS, False),
    "FP8_PB_REAL": (FP8_BLOCKS, False),
    "NVFP4_AWQ": ("NVFP4", True),
    "FP8": ("FP8_TENSOR", True),
    "FP8_PER_CHANNEL_PER_TOKEN": ("FP8_ROW", False),
    # Integers: what is stated about them is compared without a known model, see integer_claims.
    **{
        name: (name, False)
        for name in (
            "INT8_SQ",
            "W8A8_SQ_PER_CHANNEL",
            "W8A16",
            "INT4_AWQ",
            "W4A16",
            "W4A16_AWQ",
            "W4A8_AWQ",
        )
    },
}
# num_bits, type and group_size of a config group
_FP8_STRATEGIES = {"channel": "FP8_ROW", "tensor": "FP8_TENSOR"}
_GROUPS = {(4, "float", 16): "NVFP4", (4, "float", 32): "MXFP4", (8, "float", 32): "MXFP8"}
# vLLM builds the router without a quantisation config; the head is given one, like any linear.
_BUILT_PLAIN = frozenset({"ffn.gate"})


class Promise(NamedTuple):
    """The claim of a statement about one module. `format` None: a quantisation unknown here."""

    format: str | None
    text: str
    activations: bool = False
    explicit: bool = True  # the module, or its group, is named; not just all linears


@dataclass(frozen=True)
class StatedBlock:
    """One stated group or block size, with its format if the config names one.

    `builds`: engines that read this file allocate scales by it.
    """

    text: str
    sizes: tuple[int, ...]
    format: str | None
    builds: bool = False


class _Patterns:
    """Names, dotted prefixes, globs and regular expressions that cover modules."""

    def __init__(self, raw: Iterable[str], unread: list[str], sentence: str) -> None:
        self._names: set[str] = set()
        expressions: list[str] = []
        for each in raw:
            if each.startswith("re:"):
                text = each.removeprefix("re:")
            elif any(sign in each for sign in "*?["):
                text = translate(each)
            else:
                self._names.add(each)
                continue
            if len(expressions) >= _MOST_PATTERNS or not _is_quick(each):
                unread.append(f"{sentence}: pattern {each[:_LONGEST_PATTERN]}")
            else:
                expressions.append(text)
        self._expressions = [re.compile(text) for text in expressions]

    def find(self, names: Iterable[str]) -> str | None:
        """Return the entry that covers one of the names: itself, a parent module, or a pattern."""
        for name in names:
            covered = name
            while covered:
                if covered in self._names:
                    return covered
                covered = covered.rpartition(".")[0]
            for expression in self._expressions:
                if expression.match(name):
                    return expression.pattern
        return None


def _is_quick(pattern: str) -> bool:
    """Return whether a pattern compiles and cannot take long."""
    if len(pattern) > _LONGEST_PATTERN:
        return False
    if not pattern.startswith("re:"):
        return True  # fnmatch makes atomic groups of its asterisks
    text = pattern.removeprefix("re:")
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return False
    repeats = len(re.findall(r"[*+{]", text))
    return repeats <= _MOST_REPEATS and not _REPEATED_GROUP.search(text)


@dataclass(frozen=True)
class Statement:
    """One quantisation config. Use `statements` to read it."""

    file: str
    base: Recipe | None  # what holds where nothing is said: the source's recipe; None: unquantised
    base_told: str
    left_alone: _Patterns  # as in the source
    left_plain: _Patterns
    listed: tuple[tuple[_Patterns, Promise], ...]
    experts: Promise | None
    linears: Promise | None
    blocks: tuple[StatedBlock, ...] = ()
    unread: list[str] = field(default_factory=list)

    @property
    def keeps_source(self) -> bool:
        """Return whether a module on an ignore list keeps the source's format."""
        return self.base is not None

    def promise(self, parameter: Parameter, module: str) -> Promise:
        """Return the claim about one linear, stored as `module`."""
        names = _names_of(parameter, module)
        pattern = self.left_plain.find(names)
        if pattern is not None:
            return Promise(BF16, f"{self.file} leaves {pattern} unquantised")
        pattern = self.left_alone.find(names)
        if pattern is not None:
            return self._base(parameter, f"{self.file} leaves {pattern} alone", explicit=True)
        for patterns, promise in self.listed:
            pattern = patterns.find(names)
            if pattern is not None:
                return promise._replace(text=f"{promise.text} for {pattern}")
        if self.experts is not None and parameter.expert is not None:
            return self.experts
        if self.linears is not None and parameter.row.name not in _BUILT_PLAIN:
            return self.linears
        return self._base(parameter, self.base_told, explicit=False)

    def _base(self, parameter: Parameter, text: str, *, explicit: bool) -> Promise:
        if self.base is None:
            return Promise(BF16, text, explicit=explicit)
        return Promise(
            weight_family(self.base.format_of(parameter).weight), text, explicit=explicit
        )


def weight_family(weight: str) -> str:
    """Return a format's name as statements have it: they do not distinguish types of FP8 scales."""
    return FP8_BLOCKS if weight.startswith("FP8_128X128") else weight


def _names_of(parameter: Parameter, module: str) -> tuple[str, ...]:
    """Return the names, stored and logical, by which a config may refer to a module."""
    inner = module.removeprefix("model.")
    names = (module, inner, f"model.{inner}", parameter.name, f"model.{parameter.name}")
    return tuple(dict.fromkeys(names))


def statements(configs: Mapping[str, Mapping[str, Any]], config: Config) -> tuple[Statement, ...]:
    """Read all quantisation configs of a checkpoint, by file; the one for engines comes first."""
    # hf_quant_config.json does not repeat that the source was FP8; config.json does.
    keeps_source = any(raw.get("quant_method") == _SOURCE for raw in configs.values())
    return tuple(_statement(file, raw, config, keeps_source) for file, raw in configs.items())


def _statement(file: str, raw: Mapping[str, Any], config: Config, keeps_source: bool) -> Statement:
    """Parse one config; words that cannot be judged go to `unread`."""
    unread: list[str] = []
    reader = _Reader(file, raw, unread)
    method = str(raw.get("quant_method", "modelopt"))
    if method not in {_SOURCE, "modelopt", "compressed-tensors", *_INTEGER_METHODS}:
        unread.append(f"{file}: quant_method {method[:80]}")
    listed, linears = reader.groups() if method == "compressed-tensors" else reader.layers()
    if method in _INTEGER_METHODS:  # which integers: see integer_claims
        linears = Promise(None, f"{file}: quant_method {method}", explicit=False)
    text = "quant_method fp8" if keeps_source else f"{file} does not name it"
    return Statement(
        file,
        recipe_named("official", config) if keeps_source else None,
        text,
        _Patterns(reader.names("ignore", "exclude_modules"), unread, file),
        _Patterns(reader.names("modules_to_not_convert", "ignored_layers"), unread, file),
        listed,
        reader.algorithm("moe_quant_algo", explicit=True),
        linears,
        tuple(reader.blocks()),
        unread,
    )


class _Reader:
    """A parser of one config."""

    def __init__(self, file: str, raw: Mapping[str, Any], unread: list[str]) -> None:
        self._file = file
        self._raw = raw
        self._unread = unread

    def names(self, *keys: str) -> list[str]:
        """Return the names under these keys."""
        found: list[str] = []
        for key in keys:
            value = self._raw.get(key) or []
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                self._unread.append(f"{self._file}: {key} is no list of names")
                continue
            found += value
        return found

    def algorithm(self, key: str, *, explicit: bool) -> Promise | None:
        """Return the promise of a quant_algo."""
        value = self._raw.get(key)
        if value is None or value == _MIXED:
            return None
        return self._promise(value, f"{self._file}: {key} {str(value)[:80]}", explicit=explicit)

    def _promise(self, algorithm: object, text: str, *, explicit: bool) -> Promise:
        known = ALGORITHMS.get(str(algorithm))
        if known is None:
            self._unread.append(text)
            return Promise(None, text, explicit=explicit)
        return Promise(known[0], text, known[1], explicit)

    def layers(self) -> tuple[tuple[tuple[_Patterns, Promise], ...], Promise | None]:
        """Read ModelOpt's quantized_layers and quant_algo."""
        by_promise: dict[Promise, list[str]] = {}
        for name, each in self.mapping("quantized_layers").items():
            algorithm = each.get("quant_algo") if isinstance(each, dict) else each
            text = f"{self._file}: quantized_layers {str(algorithm)[:80]}"
            by_promise.setdefault(self._promise(algorithm, text, explicit=True), []).append(name)
        listed = tuple(
            (_Patterns(names, self._unread, self._file), promise)
            for promise, names in by_promise.items()
        )
        return listed, self.algorithm("quant_algo", explicit=False)

    def groups(self) -> tuple[tuple[tuple[_Patterns, Promise], ...], Promise | None]:
        """Read compressed-tensors' config_groups."""
        listed: list[tuple[_Patterns, Promise]] = []
        linears = None
        for name, group in self.mapping("config_groups").items():
            promise = self._group(name, group)
            targets = group.get("targets") if isinstance(group, dict) else None
            chosen = [each for each in targets or [] if isinstance(each, str)]
            if "Linear" in chosen:
                linears = promise._replace(explicit=False)
            named = [each for each in chosen if each not in _WITHOUT_LAYERS]
            if named:
                listed.append((_Patterns(named, self._unread, self._file), promise))
        return tuple(listed), linears

    def _group(self, name: str, group: object) -> Promise:
        text = f"{self._file}: config_groups.{name[:80]}"
        weights = _inside(group, "weights")
        inputs = _inside(group, "input_activations")
        found = _group_format(weights)
        if weights.get("block_structure") in ([128, 128], "128x128"):
            found = FP8_BLOCKS
        if (weights.get("num_bits"), weights.get("type")) == (8, "float"):
            found = _FP8_STRATEGIES.get(str(weights.get("strategy")), found)
        if found is None and weights.get("type") != "int":
            self._unread.append(text)
        # A dynamic scale a token needs no stored one; `local` ones still need the tensor's.
        return Promise(found, text, bool(inputs) and inputs.get("dynamic") is not True)

    def blocks(self) -> Iterator[StatedBlock]:
        """Yield every block size that is stated anywhere."""
        algorithm = ALGORITHMS.get(str(self._raw.get("quant_algo")), (None, False))[0]
        moe = ALGORITHMS.get(str(self._raw.get("moe_quant_algo")), (None, False))[0]
        group_size = self._raw.get("group_size")
        yield from self._block("group_size", group_size, moe or algorithm, builds=True)
        block = self._raw.get("weight_block_size")
        yield from self._block("weight_block_size", block, FP8_BLOCKS, builds=True)
        seen = set()
        for each in self.mapping("quantized_layers").values():
            size = each.get("group_size") if isinstance(each, dict) else None
            if _is_plain(size) and size not in seen:
                seen.add(size)
                found = ALGORITHMS.get(str(each.get("quant_algo")), (None, False))[0]
                yield from self._block("quantized_layers group_size", size, found)
        for name, group in self.mapping("config_groups").items():
            weights = _inside(group, "weights")
            bits = algorithm or moe or ("NVFP4" if weights.get("num_bits") == 4 else None)
            place = f"config_groups.{name[:80]}.weights.group_size"
            # Trap: 4 bits in groups of 32 are MXFP4's, unless the algorithm says otherwise.
            named = algorithm if algorithm == "NVFP4" and weights.get("num_bits") == 4 else None
            fmt = named or _group_format(weights) or bits
            size = weights.get("group_size")
            yield from self._block(place, size, fmt, builds=group_size is None)

    def _block(
        self, key: str, value: object, fmt: str | None, *, builds: bool = False
    ) -> Iterator[StatedBlock]:
        sizes: list[Any] = value if isinstance(value, list) else [value]
        if all(type(size) is int for size in sizes):
            yield StatedBlock(f"{self._file}: {key} {value}", tuple(sizes), fmt, builds)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return the mapping under a key; empty where there is none."""
        value = self._raw.get(key) or {}
        if isinstance(value, dict):
            return value
        self._unread.append(f"{self._file}: {key} is no mapping")
        return {}


# --------------------------------------------------------------------------------------------------
# Integers by group: the words of AutoGPTQ, AutoAWQ and compressed-tensors, whatever the model.

_BITS = ("bits", "w_bit", "num_bits")
_GROUP = ("group_size", "q_group_size")


class IntegerClaim(NamedTuple):
    """The claim about a module of integers; None: nothing is said. `group` -1: a whole row."""

    text: str
    bits: int | None
    group: int | None
    symmetric: bool | None
    act_order: bool | None


@dataclass(frozen=True)
class IntegerClaims:
    """The claims of one config: by pattern first, then for all linears."""

    ignored: _Patterns
    listed: tuple[tuple[_Patterns, IntegerClaim], ...]
    linears: IntegerClaim | None

    def claim(self, module: str) -> IntegerClaim | None:
        """Return the claim about a stored module; None where nothing is stated."""
        names = (module, module.removeprefix("model."))
        if self.ignored.find(names) is not None:
            return None
        for patterns, claim in self.listed:
            if patterns.find(names) is not None:
                return claim
        return self.linears


def integer_claims(file: str, raw: Mapping[str, Any]) -> IntegerClaims | None:
    """Return what a config says about integer weights; None for another method."""
    method, unread = raw.get("quant_method"), list[str]()
    if method in _INTEGER_METHODS:
        symmetric = raw.get("sym") if method == "gptq" else _negated(raw.get("zero_point"))
        claim = IntegerClaim(
            f"{file}: quant_method {method}",
            _number_of(raw, _BITS),
            _number_of(raw, _GROUP),
            symmetric if isinstance(symmetric, bool) else None,
            raw["desc_act"] if isinstance(raw.get("desc_act"), bool) else None,
        )
        skipped = _Reader(file, raw, unread).names("modules_to_not_convert")
        return IntegerClaims(_Patterns(skipped, unread, file), (), claim)
    algorithm = raw.get("quant_algo")
    if algorithm in _INTEGER_ALGORITHMS:
        # Trap: config.json leaves the group size out, hf_quant_config.json states it.
        claim = IntegerClaim(
            f"{file}: quant_algo {algorithm}", 4, _number_of(raw, _GROUP),
            symmetric=None, act_order=None,
        )  # fmt: skip
        left = _Reader(file, raw, unread).names("ignore", "exclude_modules")
        return IntegerClaims(_Patterns(left, unread, file), (), claim)
    if method != "compressed-tensors" or not isinstance(raw.get("config_groups"), dict):
        return None
    listed: list[tuple[_Patterns, IntegerClaim]] = []
    linears = None
    for name, group in raw["config_groups"].items():
        weights = _inside(group, "weights")
        if weights.get("type") != "int":
            continue
        size = _number_of(weights, _GROUP)
        claim = IntegerClaim(
            f"{file}: config_groups.{str(name)[:80]}",
            _number_of(weights, _BITS),
            -1 if weights.get("strategy") == "channel" else size,
            weights["symmetric"] if isinstance(weights.get("symmetric"), bool) else None,
            None,
        )
        targets = group.get("targets") if isinstance(group, dict) else None
        chosen = [target for target in targets or [] if isinstance(target, str)]
        if "Linear" in chosen:
            linears = claim
        named = [target for target in chosen if target not in _WITHOUT_LAYERS]
        if named:
            listed.append((_Patterns(named, unread, file), claim))
    ignored = _Patterns(_Reader(file, raw, unread).names("ignore"), unread, file)
    return IntegerClaims(ignored, tuple(listed), linears)


def _number_of(raw: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    found = next((raw[key] for key in keys if key in raw), None)
    return found if type(found) is int else None


def _negated(value: object) -> bool | None:
    return not value if isinstance(value, bool) else None


def _inside(group: object, key: str) -> Mapping[str, Any]:
    value = group.get(key) if isinstance(group, dict) else None
    return value if isinstance(value, dict) else {}


def _group_format(weights: Mapping[str, Any]) -> str | None:
    form = (weights.get("num_bits"), weights.get("type"), weights.get("group_size"))
    return _GROUPS.get(form) if all(_is_plain(each) for each in form) else None  # type: ignore[arg-type]


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (int, str))


# --------------------------------------------------------------------------------------------------
# The formats of quantised inputs, as configs state them by module.
#
# Which modules are quantised follows from their tensors; a config says what their inputs become. A
# format with one scale a token is also that of one stored scale for all tokens: the stored one is
# taken where there is one.

_ROWS = "FP8_ROW"
# quant_algo of ModelOpt; those of weights alone are missing.
_INPUTS_OF_ALGORITHMS = {
    "NVFP4": "NVFP4",
    "NVFP4_AWQ": "NVFP4",
    "W4A8_NVFP4_FP8": _ROWS,
    "W4A8_MXFP4_FP8": _ROWS,
    "W4A8_AWQ": _ROWS,
    "MXFP8": "MXFP8",
    "FP8": _ROWS,
    "FP8_PER_CHANNEL_PER_TOKEN": _ROWS,
    "FP8_PB_REAL": "FP8_1X128_F32",
    "INT8_SQ": "INT8_ROW",
    "W8A8_SQ_PER_CHANNEL": "INT8_ROW",
}
# num_bits, type and group_size of `input_activations`; one scale a token or a tensor has no size.
_INPUTS_OF_GROUPS: Mapping[tuple[Any, Any, Any], str] = {
    (8, "float", None): _ROWS,
    (8, "float", 128): "FP8_1X128_F32",
    (8, "float", 32): "MXFP8",
    (4, "float", 16): "NVFP4",
    (4, "float", 32): "MXFP4",
    (8, "int", None): "INT8_ROW",
}
_FP8_METHODS = frozenset({_SOURCE, "fbgemm_fp8"})
_BLOCKS_OF_INPUTS = {
    "FP8_128X128_F32": "FP8_1X128_F32",
    "FP8_128X128_UE8M0": "FP8_1X128_UE8M0",
}


def moves_factors(configs: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether an exporter divided weights by factors, and multiplied norms before them."""
    algorithms = {str(raw.get("quant_algo")) for raw in configs}
    return any(name.endswith("_AWQ") for name in algorithms)


class InputFormats:
    """The formats of quantised inputs that the configs of a checkpoint state."""

    def __init__(self, configs: Iterable[Mapping[str, Any]]) -> None:
        self._claims = [_claims_of_inputs(raw) for raw in configs]

    def of(self, module: str, weight: str) -> str | None:
        """Return the format of what a stored module multiplies, given its weight's; None: none."""
        names = tuple(dict.fromkeys((module, module.removeprefix("model."))))
        for claims in self._claims:
            for patterns, chosen in claims:
                if patterns is None or patterns.find(names) is not None:
                    if chosen in {_ROWS, "FP8_1X128_F32"}:
                        return _BLOCKS_OF_INPUTS.get(weight, chosen)
                    return chosen
        return None


# The formats of cached keys and values: of ModelOpt's algorithms, of compressed-tensors' schemes.
_CACHES_OF_ALGORITHMS = {"FP8": _ROWS, "INT8": "INT8_ROW", "NVFP4": "NVFP4"}
_CACHES_OF_SCHEMES: Mapping[tuple[Any, Any], str] = {(8, "float"): _ROWS, (8, "int"): "INT8_ROW"}
_CACHE_STRATEGIES = frozenset({None, "tensor", "attn_head"})


def cache_format(configs: Iterable[Mapping[str, Any]]) -> str:
    """Return the format in which keys and values are cached by stored scales; empty for none.

    Caches with zero points, and with scales that are computed anew, have no reference.
    """
    for raw in configs:
        algorithm = str(raw.get("kv_cache_quant_algo")).upper()
        if algorithm in _CACHES_OF_ALGORITHMS:
            return _CACHES_OF_ALGORITHMS[algorithm]
        stated = raw.get("kv_cache_scheme")
        if isinstance(stated, dict) and not stated.get("dynamic") and stated.get("symmetric", True):
            form = _CACHES_OF_SCHEMES.get((stated.get("num_bits"), stated.get("type")))
            if form is not None and stated.get("strategy") in _CACHE_STRATEGIES:
                return form
    return ""


def _claims_of_inputs(raw: Mapping[str, Any]) -> list[tuple[_Patterns | None, str | None]]:
    """Return formats with the modules that have them; what names modules goes first."""
    unread: list[str] = []
    method = raw.get("quant_method")
    if method in _FP8_METHODS:
        scheme = raw.get("activation_scheme", "dynamic")
        return [(None, _ROWS if scheme in {"dynamic", "static"} else None)]
    reader = _Reader("", raw, unread)
    found: list[tuple[_Patterns | None, str | None]] = []
    if method == "compressed-tensors":
        whole: list[tuple[_Patterns | None, str | None]] = []
        for name, group in reader.mapping("config_groups").items():
            chosen = _format_of_inputs(str(name), _inside(group, "input_activations"))
            targets = group.get("targets") if isinstance(group, dict) else None
            words = [each for each in targets or [] if isinstance(each, str)]
            named = [each for each in words if each not in _WITHOUT_LAYERS]
            if named:
                found.append((_Patterns(named, unread, ""), chosen))
            if len(named) < len(words):
                whole.append((None, chosen))
        return found + whole
    layers = reader.mapping("quantized_layers")
    if raw.get("quant_algo") in {None, _MIXED}:
        for name, each in layers.items():
            algorithm = each.get("quant_algo") if isinstance(each, dict) else each
            found.append((_Patterns([name], unread, ""), _of_algorithm(algorithm)))
        return found
    return [(None, _of_algorithm(raw["quant_algo"]))]


def _of_algorithm(algorithm: object) -> str | None:
    return _INPUTS_OF_ALGORITHMS.get(str(algorithm).upper())


def _format_of_inputs(group: str, stated: Mapping[str, Any]) -> str | None:
    if not stated:
        return None
    form = stated.get("num_bits"), stated.get("type"), stated.get("group_size")
    found = _INPUTS_OF_GROUPS.get(form) if all(map(_is_plain, form)) else None
    if found is None or stated.get("symmetric") is False:
        raise NotBuilt(
            f"config_groups.{group[:80]}.input_activations",
            f"{form[0]} bits, {form[1]}, group_size {form[2]}"
            + (", asymmetric" if stated.get("symmetric") is False else ""),
            "symmetric inputs in FP8, NVFP4, MXFP8, MXFP4 or INT8",
            "Quantise the inputs in one of these, or remove input_activations to judge a run that"
            " leaves them as they are.",
        )
    return found
