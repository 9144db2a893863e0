"""Every parameter of a model by logical name, shape and reader, before any format or layout.

A family's tables have one row a parameter: DeepSeek's own name, transformers' name, the shape in
letters, its kind, how it is stored unquantised, which component reads it, and in which blocks it
exists. Layouts, recipes, name maps and sharding plans derive from these rows, so a name or a shape
is stated there and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import UnknownName
from degarble.harness.model.config.config import (
    Config,
    compressor_windows,
    has_parallel_drafter,
)
from degarble.harness.model.registry import registered_for
from degarble.harness.model.types import Block, Dtype, Kind, LayerType, MlpType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

EXPERT = "{e}"  # stands for the expert's number in a row's names


class Row(NamedTuple):
    """One line of a table. `reader` is the component that reads it, `where` the blocks it is in."""

    name: str
    hf: str
    shape: str
    kind: Kind
    dtype: Dtype
    reader: str
    where: str = "all"


@dataclass(frozen=True)
class Parameter:
    """One logical parameter: `layers.3.attn.wq_a`, [1536, 7168].

    `name` is DeepSeek's own without `.weight`, as recipes, plans and components use it.
    """

    name: str
    shape: tuple[int, ...]
    row: Row
    block: Block | None = None
    expert: int | None = None

    @property
    def kind(self) -> Kind:
        """Return its kind; only a LINEAR one can be quantised."""
        return self.row.kind

    @property
    def component(self) -> str:
        """Return the full name of the component that reads it."""
        return f"{self.block.prefix}.{self.row.reader}" if self.block else self.row.reader


def parameters(config: Config) -> tuple[Parameter, ...]:
    """List every parameter of a config, block by block, the ends around them."""
    found: tuple[Parameter, ...] = registered_for(config).parameters(config)
    return found


@dataclass(frozen=True, eq=False)
class ParameterTable:
    """The rows of a family: its ends, every block, and what a drafter's block has besides."""

    ends: tuple[Row, ...]
    block: tuple[Row, ...]
    drafter: tuple[Row, ...] = ()


@lru_cache(maxsize=8)
def tabled_parameters(config: Any, table: ParameterTable) -> tuple[Parameter, ...]:
    """List the parameters that the rows of a table have under a config."""
    common = shape_letters(config)
    # In the order of the forward pass: the embedding, the blocks, then final norm and head.
    ends = table.ends
    first, last = [r for r in ends if r.name == "embed"], [r for r in ends if r.name != "embed"]
    found = [Parameter(row.name, extents_of(row.shape, common), row) for row in first]
    for block in config.blocks:
        letters = common | _block_letters(block)
        rows = (*table.drafter, *table.block) if block.is_drafter else table.block
        present = [row for row in rows if _is_in(row, block, config)]
        found.extend(_spread(present, block, letters, letters.get("E", 0)))
    found.extend(Parameter(row.name, extents_of(row.shape, common), row) for row in last)
    return tuple(found)


def parameter_named(config: Config, name: str) -> Parameter:
    """Look one parameter up by its logical name."""
    known = _by_name(config)
    if name not in known:
        raise UnknownName.among("parameter", name, known)
    return known[name]


@lru_cache(maxsize=8)
def _by_name(config: Config) -> dict[str, Parameter]:
    return {parameter.name: parameter for parameter in parameters(config)}


def _spread(
    rows: list[Row], block: Block, letters: Mapping[str, int], experts: int
) -> Iterator[Parameter]:
    """Yield one parameter a row, or one an expert: all rows of one expert, then the next."""
    routed = [(row, extents_of(row.shape, letters)) for row in rows if EXPERT in row.name]
    for row in rows:
        if EXPERT not in row.name:
            yield Parameter(
                f"{block.prefix}.{row.name}", extents_of(row.shape, letters), row, block
            )
        # All experts are yielded where the first expert row stands in the table.
        elif row is routed[0][0]:
            for expert, (each, shape) in product(range(experts), routed):
                name = f"{block.prefix}.{each.name.replace(EXPERT, str(expert))}"
                yield Parameter(name, shape, each, block, expert)


WHERE: Mapping[str, Callable[[Block, Config], bool]] = {
    "all": lambda _block, _config: True,
    "compressor": lambda block, _config: block.ratio > 0,
    "indexer": lambda block, _config: block.layer_type is LayerType.SPARSE,
    "hash": lambda block, _config: block.mlp_type is MlpType.HASH,
    "scored": lambda block, _config: block.mlp_type is MlpType.SCORED,
    "dense": lambda block, _config: block.mlp_type is MlpType.DENSE,
    "moe": lambda block, _config: block.mlp_type is not MlpType.DENSE,
    "mtp": lambda _block, config: not has_parallel_drafter(config),
    "dspark first": lambda block, config: has_parallel_drafter(config) and block.index == 0,
    "dspark last": lambda block, config: (
        has_parallel_drafter(config) and block.index == config.drafters - 1
    ),
}


def _is_in(row: Row, block: Block, config: Config) -> bool:
    return any(WHERE[place](block, config) for place in row.where.split(", "))


def shape_letters(config: Config, block: Block | None = None) -> dict[str, int]:
    """Return all shape letters that have a number, those of one block included."""
    letters: dict[str, int] = registered_for(config).letters(config)
    return letters | (_block_letters(block) if block is not None else {})


def routed_experts(config: Config) -> int:
    """Return how many routed experts a layer has; 0 where there are none."""
    return shape_letters(config).get("E", 0)


def extents_of(text: str, letters: Mapping[str, int]) -> tuple[int, ...]:
    """Evaluate a shape in letters: extents are split by blanks, then come sums, then products."""
    return tuple(
        sum(prod(_number(factor, letters) for factor in term.split("*")) for term in terms)
        for terms in (extent.split("+") for extent in text.split())
    )


def _block_letters(block: Block) -> dict[str, int]:
    return {"m": block.ratio, "c": compressor_windows(block)}


def _number(factor: str, letters: Mapping[str, int]) -> int:
    return int(factor) if factor.isdigit() else letters[factor]
