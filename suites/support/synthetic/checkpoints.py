"""Synthetic checkpoints of both families, small enough for suites."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections import defaultdict
from dataclasses import asdict
from functools import cache, cached_property
from itertools import groupby
from math import ldexp, prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.checkpoint.view.quantisation_configs import config_files
from degarble.harness.checkpoint.view.stored import TORCH_DTYPES
from degarble.harness.checkpoint.write.plan import (
    SHARD_BYTES,
    PlannedTensor,
    WritePlan,
)
from degarble.harness.checkpoint.write.writer import CompanionFiles, write
from degarble.harness.formats.codec import decode_array, encode_array
from degarble.harness.formats.dialects import CANONICAL, COMPRESSED_TENSORS, MODELOPT
from degarble.harness.formats.number_formats import (
    E2M1,
    E4M3,
    FP8_1X128_UE8M0,
    FP8_128X128_F32,
    FP8_128X128_UE8M0,
    NVFP4,
    UE8M0,
    ScaleDirection,
    block_format,
)
from degarble.harness.formats.quantise import quantise
from degarble.harness.model.config.config import Config, V32Config
from degarble.harness.model.config.json_file import config_to_dict
from degarble.harness.model.layouts import Layout, layout_named
from degarble.harness.model.parameters import EXPERT, parameter_named, parameters, routed_experts
from degarble.harness.model.tensors import PartKind, slots, tensors_of
from degarble.harness.model.types import Kind
from degarble.suites.support.synthetic.statistics import Numbers, Statistics, words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.checkpoint.write.manifest import Manifest, ShardRecord
    from degarble.harness.checkpoint.write.plan import ShardPlan
    from degarble.harness.checkpoint.write.workers import Workers
    from degarble.harness.formats.dialects import Dialect
    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.harness.model.layouts import Fusion
    from degarble.harness.model.parameters import Parameter
    from degarble.harness.model.recipes import Recipe
    from degarble.harness.model.tensors import Slot


# --------------------------------------------------------------------------------------------------
# Pools of rows, one for each K, from which all synthetic matrices of that K are assembled.
#
# A pool has 256 rows of Student's t with outlier channels, each at every gain of the row spread, in
# bfloat16 and quantised once by the definition of a producer's dialect. A matrix takes rows by
# number and scales them by a power of two. That is exact in bfloat16, keeps the codes of NVFP4 and
# MX formats, and moves their scales exactly. So the matrix is, bit for bit, what quantising its
# bfloat16 values would give, at the speed of copying. In exchange rows repeat, two in a few hundred
# within one matrix.
#
# Formats whose blocks span rows (128x128) are not pooled.

BASE_ROWS = 256
_STORED = ("codes", "block_scale")


class PooledRows(NamedTuple):
    """All rows of a pool in one format: codes and block scales as bytes."""

    codes: Tensor
    block_scale: Tensor
    tensor_scale: Tensor | None
    direction: ScaleDirection | None


class RowPool:
    """All rows of one K, each made at its first use."""

    def __init__(self, numbers: Numbers, statistics: Statistics, columns: int) -> None:
        self.columns = columns
        self.rows = BASE_ROWS * statistics.row_spread
        self._numbers = numbers
        self._statistics = statistics
        self._values: Tensor | None = None
        self._quantised: dict[tuple[str, str], PooledRows] = {}
        self._peak: int | None = None

    @property
    def peak(self) -> int:
        """The row that holds the largest magnitude of the pool."""
        if self._peak is None:
            self._made()
        assert self._peak is not None
        return self._peak

    def values(self, rows: Tensor, exponent: int) -> Tensor:
        """Return the given rows, times 2^exponent, in bfloat16."""
        if self._values is None:
            self._values = self._made()
        return self._values.index_select(0, rows) * 2.0**exponent

    def quantised(self, fmt: BlockFormat, dialect: Dialect) -> PooledRows:
        """Return all rows in a format whose blocks lie within rows; one tensor scale for all."""
        key = fmt.name, dialect.name
        if key not in self._quantised:
            values = self._made() if self._values is None else self._values
            amax = values.abs().max().float() if fmt.tensor_scale else None
            tensors = [quantise(each, fmt, dialect, amax=amax) for each in values.split(BASE_ROWS)]
            codes, scales = ([getattr(tensor, name) for tensor in tensors] for name in _STORED)
            self._quantised[key] = PooledRows(
                torch.cat(codes).view(torch.uint8),
                torch.cat(scales).view(torch.uint8),
                tensors[0].tensor_scale,
                tensors[0].direction,
            )
        return self._quantised[key]

    def _made(self) -> Tensor:
        """Draw the rows; the same ones whenever they are drawn."""
        count, facts = BASE_ROWS * self.columns, self._statistics
        name = f"pool {self.columns}"
        drawn = self._numbers.student(name, count, facts.degrees_of_freedom)
        base = drawn.reshape(BASE_ROWS, self.columns) * self._channel_gains(name)
        halves = np.sqrt(0.5)
        gain, parts = 1.0, []
        for _ in range(facts.row_spread):
            parts.append(torch.from_numpy((base * gain).astype(np.float32)).bfloat16())
            gain *= halves
        made = torch.cat(parts)
        self._peak = int(made[:BASE_ROWS].abs().amax(1).argmax())
        return made

    def _channel_gains(self, name: str) -> NDArray[np.float64]:
        """Return a factor for each column: that of outliers for a share of them, else 1."""
        facts = self._statistics
        limit = 1 << 32
        drawn = self._numbers.below(f"{name} channels", limit, self.columns)
        return np.where(drawn < facts.outlier_share * limit, facts.outlier_gain, 1.0)


# --------------------------------------------------------------------------------------------------
# Quantise bfloat16 to FP8 with UE8M0 scales a 128x128 block, by a table of all bfloat16 numbers.
#
# Fast twin of `quantise(values, FP8_128X128_UE8M0, CANONICAL)` for bfloat16 values in whole blocks,
# equal bit for bit. Dividing by a power of two is exact in bfloat16, so the code of an element
# follows from 16 bits; the table of codes and the scale of a block both come from harness.formats.
# Values of other extents use the definition.

_BLOCK = 128


def quantise_panels(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [M, K] and scale codes [M/128, K/128], both as bytes."""
    rows, columns = values.shape
    if rows % _BLOCK or columns % _BLOCK:
        made = quantise(values, FP8_128X128_UE8M0, CANONICAL)
        return made.codes.view(torch.uint8), made.block_scale.view(torch.uint8)
    x_RrCc = values.view(rows // _BLOCK, _BLOCK, columns // _BLOCK, _BLOCK)
    scale_RC = _scales(x_RrCc.abs().amax((1, 3)))
    factor_R1C1 = decode_array(scale_RC, UE8M0).reciprocal().bfloat16()[:, None, :, None]
    bits = (x_RrCc * factor_R1C1).view(torch.int16).numpy().view(np.uint16)
    return torch.from_numpy(_codes()[bits]).reshape(rows, columns), scale_RC


def _scales(amax_RC: Tensor) -> Tensor:
    """Return the scale of each block: of a row that has the block's amax and zeros."""
    row = torch.zeros((amax_RC.numel(), _BLOCK), dtype=torch.bfloat16)
    row[:, 0] = amax_RC.reshape(-1)
    scales = quantise(row, FP8_1X128_UE8M0, CANONICAL).block_scale.view(torch.uint8)
    return scales.reshape(amax_RC.shape)


@cache
def _codes() -> NDArray[np.uint8]:
    """Tabulate the E4M3 code of every finite bfloat16 number; NaN where there is none."""
    bits = torch.arange(1 << 16).to(torch.int32).to(torch.int16)
    codes: NDArray[np.uint8] = encode_array(bits.view(torch.bfloat16).float(), E4M3).numpy()
    return codes


# --------------------------------------------------------------------------------------------------
# Make the parts of synthetic parameters: values, codes, block scales, tensor scales, input scales.
#
# A draw chooses which pool rows a matrix takes, its power of two, its group of partners, and the
# small tensors: norms, biases, tables. Draws depend on the logical name of the parameter, or of the
# group of partners that an engine fuses. Exactly one member of a group holds the pool's largest
# value, so that the group's tensor scale follows from its values.

CHUNK_BYTES = 16 << 20
_PANEL = 128  # rows of one scale, where blocks span rows
_FULL_SCALE = np.float32(E2M1.largest * E4M3.largest)  # 2688: NVFP4's largest value at scale 1

# End of the name to (centre, spread) of what no linear is; the first that matches.
_PLAIN = (
    ("norm", 1.0, 0.1),
    ("_scale", 1.0, 0.1),
    (".bias", 0.0, 0.05),
    ("_base", 0.0, 0.5),
    ("_sink", 0.0, 0.5),
    ("", 0.0, 0.02),
)


class Parts:
    """Makes the bytes of any slot."""

    def __init__(self, config: Config, layout: Layout, seed: int, statistics: Statistics) -> None:
        self._config = config
        self._recipe = layout.recipe_for(config)
        self._statistics = statistics
        self._numbers = Numbers(seed)
        packs_divisors = layout.suffixes == "compressed-tensors"
        self._nvfp4 = COMPRESSED_TENSORS if packs_divisors else MODELOPT
        self._pools: dict[int, RowPool] = {}
        self._panels: tuple[str, Tensor] | None = None  # scales behind the codes made last

    def chunks(self, slot: Slot) -> Iterator[Tensor]:
        """Yield the slot's elements in order, typed so that their bytes are what is stored."""
        parameter, part = slot.parameter, slot.part
        if part is PartKind.TENSOR_SCALE:
            yield self._tensor_scale(parameter)
        elif part is PartKind.INPUT_SCALE:
            yield self._input_scale(parameter)
        elif part is PartKind.VALUE:
            dtype = TORCH_DTYPES[slot.dtype]
            if parameter.kind in (Kind.LINEAR, Kind.EMBEDDING):
                for rows in self._row_chunks(parameter, 2 * parameter.shape[1]):
                    yield self._values(parameter, rows).to(dtype)
            else:
                # What one layout keeps in fp32 is what the release rounded to its own dtype.
                source = TORCH_DTYPES[parameter.row.dtype]
                yield self._plain(parameter).to(source).to(dtype)
        else:
            yield from self._quantised(parameter, part)

    def _quantised(self, parameter: Parameter, part: PartKind) -> Iterator[Tensor]:
        """Yield codes or block scales."""
        fmt = block_format(self._recipe.format_of(parameter).weight)
        if fmt.block[0] > 1:
            yield from self._by_panels(parameter, part, fmt)
            return
        whole = self._pool(parameter).quantised(fmt, self._dialect(fmt))
        source = whole.codes if part is PartKind.CODES else whole.block_scale
        # A power of two moves every exponent alike; of unsigned bytes, a negative one wraps around.
        moved = part is PartKind.BLOCK_SCALE and not fmt.tensor_scale
        for rows in self._row_chunks(parameter, source.shape[1]):
            picked = source.index_select(0, rows)
            yield picked + self._exponent(parameter) % 256 if moved else picked

    def _by_panels(
        self, parameter: Parameter, part: PartKind, fmt: BlockFormat
    ) -> Iterator[Tensor]:
        """Yield codes or scales of 128x128 blocks, quantised on the way.

        Scales are powers of two in either format: DeepSeek's scale_fmt is ue8m0.
        """
        if part is PartKind.BLOCK_SCALE and self._panels and self._panels[0] == parameter.name:
            yield self._panels[1]
            return
        scales = []
        assert fmt in (FP8_128X128_UE8M0, FP8_128X128_F32)
        for rows in self._row_chunks(parameter, 4 * parameter.shape[1]):
            codes, scale = quantise_panels(self._values(parameter, rows))
            if fmt == FP8_128X128_F32:
                scale = decode_array(scale, UE8M0)
            scales.append(scale)
            if part is PartKind.CODES:
                yield codes
        if part is PartKind.CODES:
            self._panels = parameter.name, torch.cat(scales)
        else:
            yield torch.cat(scales)

    def _values(self, parameter: Parameter, rows: Tensor) -> Tensor:
        return self._pool(parameter).values(rows, self._exponent(parameter))

    def _pool(self, parameter: Parameter) -> RowPool:
        columns = parameter.shape[1]
        if columns not in self._pools:
            self._pools[columns] = RowPool(self._numbers, self._statistics, columns)
        return self._pools[columns]

    def _dialect(self, fmt: BlockFormat) -> Dialect:
        return self._nvfp4 if fmt == NVFP4 else CANONICAL

    def _row_chunks(self, parameter: Parameter, row_bytes: int) -> Iterator[Tensor]:
        """Yield the pool rows of a matrix, so many that a chunk stays small, in whole panels."""
        pool, count = self._pool(parameter), parameter.shape[0]
        if parameter.row.name == "ffn.gate":
            rows = self._router_rows(parameter, pool.rows)
        else:
            rows = self._numbers.below(f"{parameter.name} rows", pool.rows, count)
        if parameter.row.name != "ffn.gate" and self._holds_peak(parameter):
            rows[self._numbers.word(f"{parameter.name} peak") % count] = pool.peak
        step = max(CHUNK_BYTES // max(row_bytes, 1) // _PANEL, 1) * _PANEL
        for begin in range(0, count, step):
            yield torch.from_numpy(rows[begin : begin + step])

    def _router_rows(self, parameter: Parameter, limit: int) -> NDArray[np.int64]:
        """Give every expert a row of its own, all at one gain: a louder one would take the tokens.

        Beyond the pool's rows they come again, at the next gain.
        """
        order = np.argsort(words(self._numbers.word(f"{parameter.name} rows"), BASE_ROWS))
        return np.resize(np.arange(limit).reshape(-1, BASE_ROWS)[:, order], parameter.shape[0])

    # Partners

    @cached_property
    def _fusions(self) -> Mapping[str, Fusion]:
        """Return the parameters that engines fuse: their rows share a tensor scale and an input."""
        fused = layout_named("vllm", self._config).fusions
        return {member: fusion for fusion in fused for member in fusion.members}

    def _group(self, parameter: Parameter) -> str:
        """Name the group of partners: the expert's own, where there are experts."""
        fusion = self._fusions.get(parameter.row.name)
        if fusion is None or parameter.block is None:
            return parameter.name
        expert = "" if parameter.expert is None else f" of expert {parameter.expert}"
        return f"{parameter.block.prefix} {'+'.join(fusion.members)}{expert}"

    def _holds_peak(self, parameter: Parameter) -> bool:
        fusion = self._fusions.get(parameter.row.name)
        if fusion is None:
            return True
        chosen = self._numbers.word(f"{self._group(parameter)} peak") % len(fusion.members)
        return fusion.members[chosen] == parameter.row.name

    def _exponent(self, parameter: Parameter) -> int:
        """Return the power of two that scales a matrix: about 1/sqrt(K), a little by group."""
        width = (parameter.shape[1] - 1).bit_length()
        own = self._numbers.word(f"{self._group(parameter)} gain") % 3 - 1
        dead = self._statistics.dead_exponent if self._is_dead(parameter) else 0
        return own - width // 2 + dead

    def _is_dead(self, parameter: Parameter) -> bool:
        if parameter.expert is None or parameter.block is None:
            return False
        name = f"{parameter.block.prefix} expert {parameter.expert} dead"
        return self._numbers.share(name) < self._statistics.dead_share

    # Scalars and small tensors

    def _tensor_scale(self, parameter: Parameter) -> Tensor:
        pooled_rows = self._pool(parameter).quantised(NVFP4, self._nvfp4)
        assert pooled_rows.tensor_scale is not None
        exponent = self._exponent(parameter)
        sign = 1 if pooled_rows.direction is ScaleDirection.DECODE else -1
        return torch.tensor(
            ldexp(float(pooled_rows.tensor_scale), sign * exponent), dtype=torch.float32
        )

    def _input_scale(self, parameter: Parameter) -> Tensor:
        amax = self._input_amax(parameter)
        decode = np.float32(amax) / _FULL_SCALE
        divides = self._nvfp4 is COMPRESSED_TENSORS
        return torch.tensor(np.float32(1) / decode if divides else decode, dtype=torch.float32)

    def _input_amax(self, parameter: Parameter) -> float:
        """Return the largest activation that a calibration saw in front of a linear."""
        if parameter.expert is None:
            return self._drawn_amax(self._group(parameter))
        if isinstance(self._config, V32Config):  # one for all experts of a layer
            return self._drawn_amax(self._group(parameter).partition(" of expert")[0])
        if self._is_dead(parameter):
            return self._largest_amax.get(parameter.row.name, self._statistics.input_amax)
        return self._drawn_amax(self._group(parameter))

    @cached_property
    def _largest_amax(self) -> Mapping[str, float]:
        """Return the largest amax of reached experts, by projection: unreached experts get it."""
        found: dict[str, float] = {}
        for parameter in parameters(self._config):
            drafts = parameter.block is not None and parameter.block.is_drafter  # never calibrated
            if EXPERT in parameter.row.name and not drafts and not self._is_dead(parameter):
                amax = self._drawn_amax(self._group(parameter))
                found[parameter.row.name] = max(found.get(parameter.row.name, 0.0), amax)
        return found

    def _drawn_amax(self, group: str) -> float:
        share = self._numbers.share(f"{group} input")
        return self._statistics.input_amax * (1 + 31 * share * share) / 32

    def _plain(self, parameter: Parameter) -> Tensor:
        name, shape = parameter.name, parameter.shape
        if name.endswith("tid2eid"):
            return self._table(parameter)
        _, centre, spread = next(row for row in _PLAIN if name.endswith(row[0]))
        drawn = self._numbers.normal(name, prod(shape)) * spread + centre
        return torch.from_numpy(drawn.astype(np.float32)).reshape(shape)

    def _table(self, parameter: Parameter) -> Tensor:
        """Choose different experts for each token."""
        tokens, chosen = parameter.shape
        experts = routed_experts(self._config)
        first = self._numbers.below(f"{parameter.name} first", experts, tokens)
        stride = 1 + self._numbers.below(f"{parameter.name} stride", experts // chosen, tokens)
        ids = (first[:, None] + stride[:, None] * np.arange(chosen)) % experts
        return torch.from_numpy(ids)


# --------------------------------------------------------------------------------------------------
# Write synthetic checkpoints: any config, layout and recipe, with weights like a trained model's.
#
# A parameter depends only on the seed, the statistics and its logical name. So the same model in
# another layout has the same values, each quantised as that layout's producer does (ModelOpt or
# compressed-tensors for NVFP4, DeepSeek for FP8 and MXFP4), and any tensor can be made again alone.
# Fused partners share their tensor scale and their input scale; dead experts are tiny and take the
# input scale of the living.
#
# With `sparse` the heads are real and the data are holes, so a checkpoint of any size takes no
# disk.
#
# Sources: facts of ModelOpt's exports (input_scale = amax / (6 * 448), shared by w1 and w3; experts
# that no token reached take the largest of all layers; V3.2: one for all experts of a layer).

GENERATION = "2"  # of the numbers below: raise it when the same seed gives other bytes


class Synthetic:
    """A model that never was trained. It makes the bytes of any tensor of its layout, by name."""

    def __init__(
        self,
        config: Config,
        layout: Layout | str,
        recipe: Recipe | str | None = None,
        *,
        seed: int = 0,
        statistics: Statistics | None = None,
    ) -> None:
        chosen = layout_named(layout, config) if isinstance(layout, str) else layout
        self.config = config
        self.layout = chosen if recipe is None else chosen.with_recipe(recipe)
        self.seed = seed
        self.statistics = statistics or Statistics()
        if type(seed) is not int or seed < 0:
            raise InvalidArgument("seed", seed, "an integer that is not negative", "Use 0.")
        self._parts = Parts(config, self.layout, seed, self.statistics)
        self._block: tuple[str, dict[str, list[Slot]]] = ("", {})

    def planned(self) -> tuple[PlannedTensor, ...]:
        """List the tensors of the layout; their keys are the parameters that they begin with."""
        keys: dict[str, str] = {}
        for slot in slots(self.config, self.layout):
            keys.setdefault(slot.tensor, slot.parameter.name)
        return tuple(
            PlannedTensor(tensor.name, str(tensor.dtype), tensor.shape, keys[tensor.name])
            for tensor in tensors_of(self.config, self.layout)
        )

    def sources(self) -> dict[str, str]:
        """Name all that the bytes depend on."""
        recipe = self.layout.recipe_for(self.config)
        facts = {
            "config": config_to_dict(self.config),
            "layout": [repr(self.layout), repr(recipe)],
            "statistics": asdict(self.statistics),
        }
        hashed = {
            name: hashlib.sha256(json.dumps(fact, sort_keys=True).encode()).hexdigest()
            for name, fact in facts.items()
        }
        return {"synthetic": GENERATION, "seed": str(self.seed), **hashed}

    def __call__(self, tensor: PlannedTensor) -> Iterator[Tensor]:
        """Yield the bytes of one tensor, in chunks of at most 16 MiB or a row of blocks."""
        for slot in self._slots(tensor.key)[tensor.name]:
            yield from self._parts.chunks(slot)

    def chunks(self, name: str) -> Iterator[Tensor]:
        """Yield the bytes of one tensor by its name alone."""
        for tensor in self.planned():
            if tensor.name == name:
                yield from self(tensor)
                return
        raise UnknownName.among(
            "tensor", name, [planned_tensor.name for planned_tensor in self.planned()]
        )

    def _slots(self, key: str) -> dict[str, list[Slot]]:
        """Place the parameters of the block that `key` belongs to; tensors with their slots."""
        parameter = parameter_named(self.config, key)
        place = parameter.block.prefix if parameter.block else key
        if self._block[0] != place:
            members = self._members[place] if parameter.block else [parameter]
            found: dict[str, list[Slot]] = defaultdict(list)
            for slot in slots(self.config, self.layout, members):
                found[slot.tensor].append(slot)
            for each in found.values():
                each.sort(key=lambda slot: slot.box.ranges)
            self._block = place, dict(found)
        return self._block[1]

    @property
    def _members(self) -> Mapping[str, list[Parameter]]:
        return _by_block(self.config)


_BY_BLOCK: dict[Config, Mapping[str, list[Parameter]]] = {}


def _by_block(config: Config) -> Mapping[str, list[Parameter]]:
    if config not in _BY_BLOCK:
        found: dict[str, list[Parameter]] = defaultdict(list)
        for parameter in parameters(config):
            if parameter.block:
                found[parameter.block.prefix].append(parameter)
        _BY_BLOCK.clear()
        _BY_BLOCK[config] = found
    return _BY_BLOCK[config]


def shard_bytes_for(tensors: Iterable[PlannedTensor], shards: int) -> int:
    """Return the smallest `shard_bytes` that cuts the tensors into at most that many shards."""
    groups = groupby(tensors, key=lambda tensor: tensor.key or tensor.name)
    sizes = [sum(tensor.nbytes for tensor in group) for _, group in groups]

    def is_enough(limit: int) -> bool:
        count, filled = 1, 0
        for size in sizes:
            if filled and filled + size > limit:
                count, filled = count + 1, 0
            filled += size
        return count <= shards

    return 1 + bisect_left(range(1, sum(sizes)), 1, key=is_enough)


def write_checkpoint(
    target: Path,
    model: Synthetic,
    *,
    sparse: bool = False,
    shards: int | None = None,
    workers: Workers = 1,
    progress: Callable[[ShardPlan, ShardRecord], None] | None = None,
) -> Manifest:
    """Write a synthetic model; it can be interrupted and resumed like any other output.

    `shards`: at most so many files; by default one for every 5 GB. `sparse`: true heads over holes.
    """
    tensors = model.planned()
    size = SHARD_BYTES if shards is None else shard_bytes_for(tensors, shards)
    plan = WritePlan.from_tensors(tensors, shard_bytes=size, sources=model.sources())
    ending = CompanionFiles(config_files(model.config, model.layout))
    return write(
        target, plan, None if sparse else model, ending, workers=workers, progress=progress
    )
