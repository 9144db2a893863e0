"""Read calibration records (amax of each linear's input) and derive input scales from them.

File format (docs/calibration.md): one JSON object, `{"format": "degarble-amax", "version": 1,
"linears": {name: {"amax": number, "tokens": count}}}`. Names are logical; each linear and each
expert has one entry. amax must be a positive finite float32 where tokens were counted.

Linears that read the same input share the largest amax. V3.2's experts share one for a layer. An
expert that no token reached takes the largest of all calibrated experts of the same projection, in
any layer, and the report says so. Any other linear with quantised activations needs a record.

Source: the rules of ModelOpt's exports (examples/deepseek, examples/deepseek_v4).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from degarble.harness.base.errors import InvalidArgument, UnreadableFile
from degarble.harness.base.files import read_small_file
from degarble.harness.checkpoint.read.json_scan import ObjectScanner
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.model.family import family_of
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.parameters import parameters
from degarble.harness.model.types import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from degarble.harness.model.config.config import Config
    from degarble.harness.model.parameters import Parameter

FILE = "amax.json"  # inside a capture
FORMAT, VERSION = "degarble-amax", 1
LARGEST_FILE = 256 << 20
FULL_SCALE = np.float32(2688)  # 6 * 448: the largest NVFP4 value at scale 1


class Amax(NamedTuple):
    """The largest magnitude of a linear's input, and the number of tokens it was taken from."""

    amax: float
    tokens: int


class ScaleOrigin(StrEnum):
    """The origin of an input scale."""

    MEASURED = "measured"
    PARTNER = "partner"  # the larger amax of a linear that is fused with this one
    LAYER = "layer"  # the largest of all experts of the layer
    UNREACHED = "unreached"  # the largest of all layers: no token reached this expert


class InputScale(NamedTuple):
    """One decode scale of activations, with its evidence."""

    scale: float
    amax: float
    tokens: int
    origin: ScaleOrigin


@dataclass(frozen=True)
class Calibration:
    """The records of one calibration run, by logical name."""

    records: Mapping[str, Amax]

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Read a capture's records; `path` is the capture's folder, or the file itself."""
        file = path / FILE if path.is_dir() else path
        if path.is_dir() and not file.exists():
            raise UnreadableFile(
                shown(str(path)), f"no {FILE}", "a folder of amax records",
                "Record them with `degarble capture CKPT --amax-only`.",
            )  # fmt: skip
        scan = ObjectScanner(read_small_file(file, LARGEST_FILE), shown(str(file)))
        raw = scan.value(LARGEST_FILE)
        scan.finish()
        if not isinstance(raw, dict) or (raw.get("format"), raw.get("version")) != (
            FORMAT,
            VERSION,
        ):
            found = [raw.get("format"), raw.get("version")] if isinstance(raw, dict) else raw
            raise UnreadableFile(
                shown(str(file)),
                found,
                f"format {FORMAT}, version {VERSION}",
                "Record it with `degarble capture --amax-only`, or see docs/calibration.md.",
            )
        linears = raw.get("linears")
        if not isinstance(linears, dict):
            raise UnreadableFile(
                f"{shown(str(file))}: linears",
                type(linears).__name__,
                "a mapping from linears to amax and tokens",
                "See docs/calibration.md.",
            )
        return cls.from_records({name: _record(name, linear) for name, linear in linears.items()})

    @classmethod
    def from_records(cls, records: Mapping[str, Amax]) -> Calibration:
        """Check the records."""
        for name, (amax, tokens) in records.items():
            with np.errstate(over="ignore"):
                narrow = np.float32(amax)
            usable = np.isfinite(narrow) and (narrow > 0 if tokens > 0 else narrow >= 0)
            if type(tokens) is not int or tokens < 0 or not usable:
                raise InvalidArgument(
                    f"amax record of {shown(name)}",
                    (amax, tokens),
                    "a finite float32 amax, positive where tokens were counted, and their count",
                    "Find out which input was zero or not finite, and calibrate again.",
                )
        return cls(dict(records))  # a plain dict, because it travels between processes

    def merged(self, other: Calibration) -> Calibration:
        """Join two runs: the larger amax, the sum of the tokens."""
        names = sorted({*self.records, *other.records})
        nothing = Amax(0.0, 0)
        both = [(self.records.get(n, nothing), other.records.get(n, nothing)) for n in names]
        return Calibration.from_records(
            {
                name: Amax(max(a.amax, b.amax), a.tokens + b.tokens)
                for name, (a, b) in zip(names, both, strict=True)
            }
        )

    def to_bytes(self) -> bytes:
        """Return the file's content; equal records give equal bytes."""
        linears = {name: record._asdict() for name, record in sorted(self.records.items())}
        raw = {"format": FORMAT, "version": VERSION, "linears": linears}
        return (json.dumps(raw, indent=0, ensure_ascii=False) + "\n").encode()

    @property
    def fingerprint(self) -> str:
        """The hash of all records."""
        return sha256(self.to_bytes()).hexdigest()


def _record(name: str, raw: Any) -> Amax:
    if not isinstance(raw, dict) or raw.keys() != {"amax", "tokens"}:
        found = sorted(raw) if isinstance(raw, dict) else raw
        raise InvalidArgument(
            f"amax record of {shown(name)}", found, "amax and tokens", "See docs/calibration.md."
        )
    amax, tokens = raw["amax"], raw["tokens"]
    if isinstance(amax, bool) or not isinstance(amax, int | float) or type(tokens) is not int:
        raise InvalidArgument(
            f"amax record of {shown(name)}",
            (amax, tokens),
            "a number and a count",
            "See docs/calibration.md.",
        )
    return Amax(float(amax), tokens)


class InputScales:
    """The input scales of the linears whose activations a recipe quantises."""

    def __init__(
        self, config: Config, calibration: Calibration, wanted: Iterable[Parameter]
    ) -> None:
        self._config = config
        self._records = calibration.records
        linears = {
            parameter.name for parameter in parameters(config) if parameter.kind is Kind.LINEAR
        }
        for name in calibration.records:
            if name not in linears:
                raise InvalidArgument(
                    f"amax record of {shown(name)}", "no linear", f"a linear of {config.family}",
                    "Calibrate with the model that is quantised, or remove the record.",
                )  # fmt: skip
        missing = [
            parameter.name
            for parameter in wanted
            if parameter.expert is None and not self._own(parameter.name).tokens
        ]
        if missing:
            raise InvalidArgument(
                "calibration",
                f"no tokens in front of {len(missing)} linears, such as {missing[0]}",
                "a record for every linear whose activations the recipe quantises",
                "Capture these linears too, or give them BF16 activations in the recipe.",
            )

    def scale_of(self, parameter: Parameter) -> InputScale:
        """Return the input scale of one linear."""
        own, origin = self._own(parameter.name), ScaleOrigin.MEASURED
        amax = max((self._own(name).amax for name in self._partners(parameter)), default=0.0)
        if amax > own.amax:
            origin = ScaleOrigin.PARTNER
        if parameter.expert is not None and family_of(self._config).input_scale_of_layer:
            layer = self._of_layers.get(self._key(parameter), 0.0)
            amax, origin = layer, ScaleOrigin.LAYER if layer > own.amax else ScaleOrigin.MEASURED
        if not amax:
            amax, origin = self._of_all.get(self._input(parameter), 0.0), ScaleOrigin.UNREACHED
        if not amax:
            raise InvalidArgument(
                f"calibration of {parameter.row.name}",
                "no expert in any layer saw a token",
                "at least one calibrated expert of each projection",
                "Calibrate with more tokens.",
            )
        scale = float(np.float32(amax) / FULL_SCALE)
        return InputScale(scale, float(np.float32(amax)), own.tokens, origin)

    def _own(self, name: str) -> Amax:
        """Return a linear's record; one without tokens counts as missing."""
        amax = self._records.get(name)
        return amax if amax and amax.tokens else Amax(0.0, 0)

    @cached_property
    def _fusions(self) -> Mapping[str, tuple[str, ...]]:
        fusions = layout_named("vllm", self._config).fusions
        return {member: fusion.members for fusion in fusions for member in fusion.members}

    def _partners(self, parameter: Parameter) -> list[str]:
        """Return the linears that read the same input and are fused by engines."""
        return partners_of(parameter, self._fusions)

    def _input(self, parameter: Parameter) -> tuple[str, ...]:
        return self._fusions.get(parameter.row.name, (parameter.row.name,))

    def _key(self, parameter: Parameter) -> tuple[Any, tuple[str, ...]]:
        return parameter.block, self._input(parameter)

    @cached_property
    def _of_layers(self) -> Mapping[tuple[Any, tuple[str, ...]], float]:
        found: dict[tuple[Any, tuple[str, ...]], float] = {}
        for parameter in parameters(self._config):
            if parameter.expert is not None:
                key = self._key(parameter)
                found[key] = max(found.get(key, 0.0), self._own(parameter.name).amax)
        return found

    @cached_property
    def _of_all(self) -> Mapping[tuple[str, ...], float]:
        found: dict[tuple[str, ...], float] = {}
        for (_, rows), amax in self._of_layers.items():
            found[rows] = max(found.get(rows, 0.0), amax)
        return found


def partners_of(parameter: Parameter, fusions: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return a parameter and those that an engine fuses with it into one tensor."""
    members = fusions.get(parameter.row.name)
    if members is None or parameter.block is None:
        return [parameter.name]
    expert = "" if parameter.expert is None else str(parameter.expert)
    return [f"{parameter.block.prefix}.{member.replace('{e}', expert)}" for member in members]
