"""Make the parts of synthetic parameters: values, codes, block scales, tensor scales, input scales.

A draw chooses which pool rows a matrix takes, its power of two, its group of partners, and the
small tensors: norms, biases, tables. Draws depend on the logical name of the parameter, or of the
group of partners that an engine fuses. Exactly one member of a group holds the pool's largest
value, so that the group's tensor scale follows from its values.
"""

from __future__ import annotations

from functools import cached_property
from math import ldexp, prod
from typing import TYPE_CHECKING

import numpy as np
import torch

from degarble.harness.checkpoint.view.stored import TORCH_DTYPES
from degarble.harness.formats.codec import decode_array
from degarble.harness.formats.dialects import CANONICAL, COMPRESSED_TENSORS, MODELOPT
from degarble.harness.formats.number_formats import (
    E2M1,
    E4M3,
    FP8_128X128_F32,
    FP8_128X128_UE8M0,
    NVFP4,
    UE8M0,
    ScaleDirection,
    block_format,
)
from degarble.harness.model.config.config import Config, V32Config
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.parameters import EXPERT, parameters
from degarble.harness.model.tensors import PartKind
from degarble.harness.model.types import Kind
from degarble.suites.support.synthetic.panels import quantise_panels
from degarble.suites.support.synthetic.pool import BASE_ROWS, RowPool
from degarble.suites.support.synthetic.statistics import Numbers, words

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.formats.dialects import Dialect
    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.harness.model.layouts import Fusion, Layout
    from degarble.harness.model.parameters import Parameter
    from degarble.harness.model.tensors import Slot
    from degarble.suites.support.synthetic.statistics import Statistics

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
        return {member: each for each in fused for member in each.members}

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
        made = self._pool(parameter).quantised(NVFP4, self._nvfp4)
        assert made.tensor_scale is not None
        exponent = self._exponent(parameter)
        sign = 1 if made.direction is ScaleDirection.DECODE else -1
        return torch.tensor(ldexp(float(made.tensor_scale), sign * exponent), dtype=torch.float32)

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
        for each in parameters(self._config):
            drafts = each.block is not None and each.block.is_drafter  # never calibrated
            if EXPERT in each.row.name and not drafts and not self._is_dead(each):
                amax = self._drawn_amax(self._group(each))
                found[each.row.name] = max(found.get(each.row.name, 0.0), amax)
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
        experts = self._config.n_routed_experts
        first = self._numbers.below(f"{parameter.name} first", experts, tokens)
        stride = 1 + self._numbers.below(f"{parameter.name} stride", experts // chosen, tokens)
        ids = (first[:, None] + stride[:, None] * np.arange(chosen)) % experts
        return torch.from_numpy(ids)
