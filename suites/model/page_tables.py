"""The generated parts of docs/anatomy.md, made from the tables that they describe.

`python -m degarble.suites.model.page_tables` prints them all; test_names_page.py requires that
the page holds each one word for word.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from degarble.harness.families.deepseek_v4.tables import (
    V4_BLOCK,
    V4_BLOCK_WIRING,
    V4_ENDS,
    V4_FIRST_WIRING,
    V4_LAST_WIRING,
    V4_MTP,
)
from degarble.harness.families.deepseek_v32.tables import (
    V32_BLOCK,
    V32_BLOCK_WIRING,
    V32_ENDS,
    V32_FIRST_WIRING,
    V32_LAST_WIRING,
    V32_MTP,
)
from degarble.harness.model.config.config import (
    LAYER_TYPES,
    V3_2,
    V4_FLASH,
    V4_PRO,
    V4Config,
    compressor_windows,
)
from degarble.harness.model.layouts import Layout, layout_named
from degarble.harness.model.parameters import EXPERT, Parameter, Row, parameters
from degarble.harness.model.recipes import recipe_named
from degarble.harness.model.tensors import tensors_of
from degarble.harness.model.types import RECIPE_NAMES, Block, Kind, LayerType, MlpType
from degarble.suites.support.families import LAYOUTS, STYLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from degarble.harness.model import components
    from degarble.harness.model.sharding import ShardCut
    from degarble.suites.support.configs import DeepSeekConfig

DSPARK = {"dspark first", "dspark last"}
MODELS: dict[str, DeepSeekConfig] = {"V4-Pro": V4_PRO, "V4-Flash": V4_FLASH, "V3.2": V3_2}


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines) + "\n"


def totals(config: DeepSeekConfig, layout: Layout) -> tuple[int, int]:
    """Count a layout's tensors and bytes.

    Both grow evenly with the number of experts, so two small models tell: quickly, and exactly.
    """
    found = []
    for experts in (16, 32):
        stored = tensors_of(replace(config, n_routed_experts=experts), layout)
        found.append((len(stored), sum(tensor.nbytes for tensor in stored)))
    (few, small), (more, large) = found
    steps = (config.n_routed_experts - 16) // 16
    return few + steps * (more - few), small + steps * (large - small)


def layer_types() -> str:
    """What the compress ratio of a layer means."""
    rows = []
    for ratio, kind in LAYER_TYPES.items():
        block = Block("layers", 0, kind, MlpType.SCORED, ratio)
        rope = V4_PRO.rope(block)
        windows = compressor_windows(block)
        rows.append(
            (
                ratio,
                kind.name.lower(),
                f"`{kind}`",
                f"{windows} window{'s' if windows > 1 else ''} of {ratio}" if windows else "none",
                "top-k" if kind is LayerType.SPARSE else "none",
                f"{rope.theta}{', YaRN' if rope.yarn else ''}",
            )
        )
    return table(
        ("ratio", "layer type", "transformers says", "an entry sees", "indexer", "RoPE base"), rows
    )


def models() -> str:
    """The released geometries."""
    rows = []
    for name, config in MODELS.items():
        kinds = Counter(block.layer_type for block in config.layers)
        count, size = totals(config, layout_named("official", config))
        rows.append(
            (
                name,
                config.num_hidden_layers,
                ", ".join(f"{number} {kind.name.lower()}" for kind, number in kinds.items()),
                config.hidden_size,
                config.num_attention_heads,
                f"{config.n_routed_experts}, {config.num_experts_per_tok} a token",
                f"{count:,}",
                f"{size / 1e9:.1f} GB",
            )
        )
    header = (
        "model",
        "layers",
        "of them",
        "hidden",
        "heads",
        "experts",
        "tensors",
        "published size",
    )
    return table(header, rows)


def layouts() -> str:
    """The layouts and what they make of the largest model of their family."""
    rows = []
    for (family, name), layout in LAYOUTS.items():
        config: DeepSeekConfig = V4_PRO if family == V4Config.family else V3_2
        count, size = totals(config, layout)
        rows.append(
            (
                "V4" if family == V4Config.family else "V3.2",
                f"`{name}`",
                layout.spelling,
                f"`{layout.recipe}`",
                "no" if layout.no_drafter else "yes",
                f"{count:,}",
                f"{size / 1e9:.1f} GB",
            )
        )
    header = ("family", "layout", "spelled as", "recipe", "drafter", "tensors", "size")
    return table(header, rows)


def _cell(layout: Layout, row: Row, block: Block | None, config: DeepSeekConfig) -> str:
    """Spell one row in a layout, with N and E for numbers."""
    parameter = Parameter(row.name, (), row, block)
    if layout.omits(parameter, config) or not set(row.where.split(", ")) - DSPARK:
        return ""
    fusion = next((f for f in layout.fusions if row.name in f.members), None)
    path = layout.path_of(parameter, config, fusion.target if fusion else "")
    number = config.num_hidden_layers + block.index if block and block.is_drafter else 0
    path = path.replace(f"layers.{number}.", "layers.{L}." if number else "layers.N.", 1)
    path = path.removeprefix("model.").removeprefix("layers.N.").replace(EXPERT, "E")
    order = f" ({fusion.members.index(row.name) + 1})" if fusion and len(fusion.members) > 1 else ""
    return f"`{path}`{order}"


def names(family: str) -> str:
    """Every parameter in three spellings."""
    config: DeepSeekConfig = V4_PRO if family == V4Config.family else V3_2
    v4 = isinstance(config, V4Config)
    ends, inner, drafter = (V4_ENDS, V4_BLOCK, V4_MTP) if v4 else (V32_ENDS, V32_BLOCK, V32_MTP)
    saved = layout_named("transformers", config)
    served = layout_named("vllm", config)
    block, draft = config.blocks[0], config.blocks[-1]
    rows = []
    for each, place in ((ends, None), (inner, block), (drafter, draft)):
        for row in each:
            name = row.name.replace(EXPERT, "E")
            rows.append(
                (
                    f"`mtp.K.{name}`" if place is draft else f"`{name}`",
                    _cell(saved, row, place, config),
                    _cell(served, row, place, config),
                    row.shape.replace("*", "·").replace(" ", " × "),
                    row.dtype,
                    f"`{row.reader}`",
                    row.where,
                )
            )
    header = ("DeepSeek", "transformers", "vLLM", "shape", "dtype", "read by", "in blocks")
    return table(header, rows)


def diagram(lines: Iterable[components.ComponentWiring]) -> str:
    """What feeds what, one line a component; outputs are told where there is more than `out`."""
    text = []
    for line in lines:
        sources = [word.partition("=")[2] or word for word in line.inputs.split()]
        said = f"{line.name:<29}<- {', '.join(dict.fromkeys(sources))}"
        if line.outputs != "out":
            said += f"\n{'':<29}-> {', '.join(line.outputs.split())}"
        if line.where != "all":
            said += f"   [{line.where}]"
        text.append(said)
    return "\n".join(text) + "\n"


def recipes() -> str:
    """Weight formats by recipe, one line a group of linears that are alike."""
    rows = []
    for name, config in (("V4", V4_PRO), ("V3.2", V3_2)):
        groups: dict[tuple[str, ...], list[str]] = {}
        for parameter in parameters(config):
            block = parameter.block
            chosen = (
                block is None
                or block.is_drafter
                or block.index in {0, config.num_hidden_layers - 1}
            )
            if parameter.kind is Kind.LINEAR and chosen and parameter.expert in {None, 0}:
                said = tuple(
                    recipe_named(each, config).format_of(parameter).weight for each in RECIPE_NAMES
                )
                role = parameter.row.name.replace(EXPERT, "E")
                role = f"mtp.K.{role}" if block and block.is_drafter else role
                if role not in groups.setdefault(said, []):
                    groups[said].append(role)
        for said, roles in groups.items():
            rows.append((name, " ".join(f"`{role}`" for role in roles), *said))
    return table(("family", "linears", *(f"`{each}`" for each in RECIPE_NAMES)), rows)


def shards() -> str:
    """How engines cut."""
    rows = []
    for (family, style), cuts in STYLES.items():
        groups: dict[ShardCut, list[str]] = {}
        for name, cut in cuts.items():
            groups.setdefault(cut, []).append(name.replace(EXPERT, "E"))
        for cut, roles in groups.items():
            how = "rows" if cut.dim == 0 else "columns"
            how += f", whole blocks of {cut.multiple}" if cut.padded else ""
            rows.append((family, style, how, " ".join(f"`{role}`" for role in roles)))
    return table(("family", "style", "cut by", "parameters"), rows)


# Every generated part, as what makes it: names and sizes of whole models take seconds.
PARTS: dict[str, Callable[[], str]] = {
    "layer types": layer_types,
    "models": models,
    "v4 diagram": lambda: diagram((*V4_FIRST_WIRING, *V4_BLOCK_WIRING, *V4_LAST_WIRING)),
    "v3.2 diagram": lambda: diagram((*V32_FIRST_WIRING, *V32_BLOCK_WIRING, *V32_LAST_WIRING)),
    "v4 names": lambda: names(V4Config.family),
    "v3.2 names": lambda: names("deepseek_v32"),
    "layouts": layouts,
    "recipes": recipes,
    "shards": shards,
}


def main() -> None:
    """Print every part."""
    for name, part in PARTS.items():
        print(f"## {name}\n\n{part()}")  # noqa: T201  that is what it is for


if __name__ == "__main__":
    main()
