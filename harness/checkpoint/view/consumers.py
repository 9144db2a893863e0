"""Table of the loaders that read a checkpoint (transformers, vLLM, ours) and the names they know.

Each target of `convert` and each recipe of `quantise` is written for one consumer. A consumer knows
a set of layouts, that is whole checkpoints in its spelling. Single modules do not decide:
transformers' V4 reads `mlp.shared_experts.gate_proj` and `mlp.experts.gate_up_proj`, but knows
`mlp.experts.0.gate_proj` in no spelling.

An entry names transformers or vLLM only if a suite loads what the entry describes; entries whose
names alone are known say so.
Sources: transformers 5.20 conversion_mapping.py and _keys_to_ignore_on_load_unexpected; vLLM 0.33
models/deepseek_v4/nvidia/model.py and models/deepseek_v32; DeepSeek-V4-Pro inference/model.py and
DeepSeek-V3.2-Exp inference/convert.py.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.base.errors import LayoutMismatch, PartnersMismatch, UnknownName
from degarble.harness.model.config.config import V4Config, V32Config
from degarble.harness.model.family import family_named, family_of
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.recipes import BF16
from degarble.harness.model.tensors import PartKind, slots, suffixes_named

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from degarble.harness.model.config.config import Config
    from degarble.harness.model.layouts import Layout
    from degarble.harness.model.parameters import Parameter
    from degarble.harness.model.recipes import Recipe
    from degarble.harness.model.tensors import Slot

V4, V32 = V4Config.family, V32Config.family
FUSED_COMPRESSORS = "official, compressors fused"
WO_A = "attn.wo_a"

_FP8 = frozenset({"FP8_128X128_UE8M0", "FP8_128X128_F32"})
_PLAIN = frozenset({BF16})


@dataclass(frozen=True)
class Consumer:
    """One loader. `reads`: by family, the layouts whose names it knows; writers take the first.

    `formats`: of weights that it loads. `is_silent`: missing tensors keep random values and do not
    stop the load. `no_drafter`: why it skips the drafter; empty where it reads it. `deepgemm_wo_a`:
    wo_a is stored as DeepGEMM's operand, under vLLM's suffixes.
    """

    name: str
    what: str
    reads: Mapping[str, tuple[str, ...]]
    formats: frozenset[str]
    is_silent: bool = False
    no_drafter: str = ""
    deepgemm_wo_a: bool = False

    def layouts(self, config: Config) -> tuple[Layout, ...]:
        """Return the layouts whose names it knows; none for a family that it does not load."""
        return tuple(_layout(name, config) for name in self.reads.get(config.family, ()))

    def knows(self, layout: Layout, config: Config) -> bool:
        """Return whether it reads a checkpoint with this spelling and fusion."""
        return any(_way(each) == _way(layout) for each in self.layouts(config))

    def tensor_of(self, slot: Slot, module: str, weight: str) -> str:
        """Name the tensor of one part, where this consumer has a suffix of its own for it."""
        if (
            self.deepgemm_wo_a
            and slot.parameter.row.name == WO_A
            and slot.part is not PartKind.VALUE
        ):
            return module + suffixes_named("vllm").suffix(slot.part, weight)
        return slot.tensor


def _layout(name: str, config: Config) -> Layout:
    if name == FUSED_COMPRESSORS:
        fused = family_of(config).with_engine_fusions(layout_named("official", config))
        assert fused is not None, "listed for a family that has them"
        return fused
    return layout_named(name, config)


def _way(layout: Layout) -> tuple[object, ...]:
    return layout.spelling, layout.fusions


_NAMES_ONLY = " (names only: none was seen to load it)"
_IGNORED = "transformers does not load drafters"
TRANSFORMERS = Consumer(
    "transformers",
    "transformers 5.20, AutoModelForCausalLM.from_pretrained",
    {V4: ("official", "transformers-saved", "transformers"), V32: ("official", "transformers")},
    _PLAIN | _FP8,
    is_silent=True,
    no_drafter=_IGNORED,
)
VLLM = Consumer(
    "vLLM",
    "vLLM 0.33, its own DeepSeek models",
    {V4: ("official",), V32: ("official",)},
    _PLAIN | _FP8 | {"MXFP4", "NVFP4"},
)
# For V3.2 vLLM 0.33 reads NVFP4 with unquantised linears. With FP8 linears it requires FP8_PB_WO,
# whose scales have four extents and another name (modelopt.py, KFp8Block128), and
# `quant_method: fp8` has no NVFP4 there.
VLLM_NVFP4 = replace(
    VLLM,
    what="vLLM 0.33, its own DeepSeek models (NVFP4 beside BF16; beside FP8: degarble)",
    formats=_PLAIN | {"NVFP4"},
)
# Named as vLLM reads them, but vLLM 0.33 loads none. V4: vLLM builds compressors unquantised
# (deepseek_v4/compressor.py, quant_config=None), and NVFP4 experts need NVFP4 activations as well
# (deepseek_v4/quant_config.py, moe_quant_algo == "NVFP4"). V3.2: NVFP4 experts with FP8 linears.
OWN = replace(
    VLLM,
    name="degarble",
    what="degarble (generate, serve, check; no other loader was seen to load it)",
)
LOSSLESS_V32 = replace(OWN, what="degarble (names only: no built-in recipe writes MXFP4 for V3.2)")
COMPRESSORS = replace(
    VLLM,
    name="vLLM, compressors fused",
    what="vLLM 0.33, whose loader takes a fused compressor whole",
    reads={V4: (FUSED_COMPRESSORS,)},
)
PARAMETERS = replace(
    VLLM,
    name="vLLM's parameters",
    what="a loader that copies vLLM 0.33's parameters by name, its `routed_experts.` left out",
    reads={V4: ("vllm",), V32: ("vllm",)},
)
DEEPGEMM = replace(
    VLLM,
    name="DeepGEMM's operand",
    what="an engine of your own that hands wo_a to DeepGEMM as stored; the rest as vLLM reads it"
    + _NAMES_ONLY,
    reads={V4: ("official",)},
    deepgemm_wo_a=True,
)
DEEPSEEK = Consumer(
    "DeepSeek",
    "DeepSeek's inference code",
    {V4: ("official",), V32: ("inference", "official")},
    _PLAIN | _FP8 | {"MXFP4"},
)
LOADERS = (TRANSFORMERS, VLLM, COMPRESSORS, PARAMETERS, DEEPSEEK)

_BOTH = (V4, V32)
_WRITTEN_FOR: Mapping[str, Mapping[str, Consumer]] = MappingProxyType(
    {
        "bf16": dict.fromkeys(_BOTH, TRANSFORMERS),
        "fp8-block": dict.fromkeys(_BOTH, VLLM),
        "nvfp4": {V4: OWN, V32: VLLM_NVFP4},
        "nvfp4-lossless": {V4: OWN, V32: LOSSLESS_V32},
        "deepgemm-wo-a": dict.fromkeys(_BOTH, DEEPGEMM),
        "fused-compressor": dict.fromkeys(_BOTH, COMPRESSORS),
        "vllm": dict.fromkeys(_BOTH, PARAMETERS),
    }
)
_RECIPES_FOR: Mapping[str, Mapping[str, Consumer]] = MappingProxyType(
    {
        "bf16": dict.fromkeys(_BOTH, TRANSFORMERS),
        "official": dict.fromkeys(_BOTH, VLLM),
        "nvfp4-experts": {V4: VLLM, V32: OWN},
        "nvfp4-full": {V4: OWN, V32: VLLM_NVFP4},
    }
)


def consumer_of(to: str, family: str) -> Consumer:
    """Return the consumer of a conversion's output."""
    if to not in _WRITTEN_FOR:
        raise UnknownName.among("conversion", to, _WRITTEN_FOR)
    return _of_family(f"a checkpoint for {to}", _WRITTEN_FOR[to], family)


def consumer_of_recipe(recipe: str, family: str) -> Consumer:
    """Return the consumer of what `quantise` writes by a built-in recipe."""
    if recipe not in _RECIPES_FOR:
        raise UnknownName.among("recipe", recipe, _RECIPES_FOR)
    return _of_family(f"a checkpoint of {recipe}", _RECIPES_FOR[recipe], family)


def _of_family(what: str, known: Mapping[str, Consumer], family: str) -> Consumer:
    if family not in known:
        remedy = "Write it by a tool of this family; no consumer of it is known here."
        raise family_named(family).lacks(what, remedy)
    return known[family]


def table() -> list[str]:
    """Return the table of consumers as lines of Markdown."""
    lines = ["| written by | V4 is read by | V3.2 is read by |", "|---|---|---|"]
    commands = (("convert --to", _WRITTEN_FOR), ("quantise --recipe", _RECIPES_FOR))
    for command, known in commands:
        for word, by_family in known.items():
            cells = (
                by_family[V4].what,
                by_family[V32].what if by_family[V32].reads.get(V32) else "-",
            )
            lines.append(f"| `{command} {word}` | {cells[0]} | {cells[1]} |")
    return lines


class NameCoverage(NamedTuple):
    """The tensors that a consumer finds by name. `passed_over`: drafter tensors that it skips."""

    consumer: Consumer
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    passed_over: int


def name_coverage(
    consumer: Consumer, config: Config, recipe: Recipe, stored: Iterable[str], *, packed: bool
) -> NameCoverage | None:
    """Compare the names of a checkpoint with those that a consumer reads.

    `recipe`: the stored formats; `packed`: named as compressed-tensors does. Of several spellings
    that the consumer knows, the one that most names follow counts; None where none of them can
    hold these formats.
    """
    names = set(stored)
    found = []
    for layout in consumer.layouts(config):
        with suppress(LayoutMismatch, PartnersMismatch):  # it cannot hold these formats
            held = replace(layout, suffixes="compressed-tensors") if packed else layout
            found.append(_compared(consumer, config, held.with_recipe(recipe), names))
    return min(
        found, key=lambda coverage: len(coverage.missing) + len(coverage.unexpected), default=None
    )


def _compared(consumer: Consumer, config: Config, layout: Layout, names: set[str]) -> NameCoverage:
    wanted: dict[str, Parameter] = {}
    for slot, tensor in _tensors(consumer, config, layout):
        wanted.setdefault(tensor, slot.parameter)
    drafter = {
        name for name, parameter in wanted.items() if parameter.block and parameter.block.is_drafter
    }
    optional = drafter if consumer.no_drafter or not drafter & names else set()  # as a whole
    missing = wanted.keys() - optional - names
    passed_over = len(drafter & names) if consumer.no_drafter else 0
    return NameCoverage(
        consumer, tuple(sorted(missing)), tuple(sorted(names - wanted.keys())), passed_over
    )


def _tensors(consumer: Consumer, config: Config, layout: Layout) -> Iterator[tuple[Slot, str]]:
    recipe = layout.recipe_for(config)
    for slot in slots(config, layout):
        if consumer.deepgemm_wo_a and slot.parameter.row.name == WO_A:
            module = layout.path_of(slot.parameter, config)
            yield slot, consumer.tensor_of(slot, module, recipe.format_of(slot.parameter).weight)
        else:
            yield slot, slot.tensor
