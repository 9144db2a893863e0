"""Compare a checkpoint with a reference, config and every weight, and judge the differences.

`measure_against` reads both sides once, with threads of this process. `judge_against` is separate,
so that tables of several machines can be joined and judged as one. Layouts, formats, names, fusing
and sharding may differ: weights are compared as float32 values. A reference of another model, or
without a weight in common, is rejected.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from degarble.harness.checkpoint.audit import value_rules as rules
from degarble.harness.checkpoint.audit.against.causes import CauseSearch, ReportedCause
from degarble.harness.checkpoint.audit.against.comparison import (
    compare,
    pairs_of,
    reference_weight,
)
from degarble.harness.checkpoint.audit.findings import NOWHERE, FindingLocation, Findings, in_order
from degarble.harness.checkpoint.audit.structure.structure import is_known_extra
from degarble.harness.checkpoint.audit.table import FORMATS, AgainstTable, indices, percent, walk
from degarble.harness.checkpoint.read.types import ProblemKind, shown
from degarble.harness.checkpoint.view.weight_units import layer_in, stored_of, without_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from numpy.typing import NDArray

    from degarble.harness.checkpoint.audit.findings import Finding
    from degarble.harness.checkpoint.audit.rules import AuditRule
    from degarble.harness.checkpoint.view.stored import PositionedReader
    from degarble.harness.checkpoint.view.view import Checkpoint


# --------------------------------------------------------------------------------------------------
# Configs: every number and choice that changes what a model computes. Two spellings of one known
# family are compared as records. Other configs are compared as JSON, key by key, with rotary keys
# brought to one spelling. Tools that save a config again add keys with their defaults, so a key
# that only the checkpoint states is no difference.

if TYPE_CHECKING:
    Difference = tuple[str, object, object]  # key, here, in the reference

_ABSENT = "not stated"
# Of records: a checkpoint may leave its drafter out, and its experts' format is its own.
_DRAFTER = frozenset({"num_nextn_predict_layers", "dspark"})
_FREE = frozenset({"expert_dtype", "max_position_embeddings", "quantisation", "other"})
# Words inside of keys that say how something is computed, in any family's config.
_COMPUTES = re.compile(
    r"eps|theta|scal|top_?k|^num_|^n_|_num_|_size$|_dim|rank|window|heads|layers|^hidden_act"
    r"|activation|bias|softcap|clip|limit|norm_topk|tie_word|group|ratio|rope|rotary|partial"
    r"|scoring|alpha|multiplier|experts|freq|step|sink|^model_type$|^architectures$"
)
_NEVER = re.compile(
    r"initializer|loss|dropout|max_position|quant|_attn_implementation|num_labels|id2label"
    r"|num_return|num_beams|chunk_size|pretraining|top_k$|_token|max_window_layers|transformers"
)
_ROPE = ("rope_parameters", "rope_scaling")
# Values that mean the same as a key that is absent.
_NEUTRAL: tuple[object, ...] = (None, False, 0, 1, 10000, 1e-6, [], {}, "", "default", "silu")


def judge_configs(checkpoint: Checkpoint, reference: Checkpoint) -> list[Finding]:
    """Report the keys that two configs state differently."""
    findings = Findings()
    unread = checkpoint.problems.counts[ProblemKind.UNREADABLE_CONFIG]
    if not checkpoint.config or not reference.config:
        return []  # without one there is a finding of its own
    for key, here, there in differences(checkpoint, reference):
        if unread and there == _ABSENT:
            continue
        findings.add(
            rules.CONFIG,
            NOWHERE,
            f"config.json: {shown(key)} is {shown(str(here))}, in the reference"
            f" {shown(str(there))}.",
            f"Set {shown(key)} to {shown(str(there))}, if this checkpoint was made from it.",
            key=shown(key),
            here=shown(str(here)),
            reference=shown(str(there)),
        )
    return findings.sorted()


def differences(checkpoint: Checkpoint, reference: Checkpoint) -> Iterator[Difference]:
    """Yield each key that two configs state differently, with both values."""
    here, there = checkpoint.model, reference.model
    if here is None or there is None or type(here) is not type(there):
        yield from _of_json(checkpoint.config, reference.config)
        return
    free = _FREE | (_DRAFTER if here.drafters < there.drafters else frozenset())
    ours, theirs = asdict(here), asdict(there)
    for key in ours.keys() - free:
        yield from _of_values(key, ours[key], theirs[key])
    classes = checkpoint.config.get("architectures"), reference.config.get("architectures")
    if all(classes) and classes[0] != classes[1]:
        yield ("architectures", *classes)


def _of_values(key: str, here: object, there: object) -> Iterator[Difference]:
    if here == there:
        return
    if isinstance(here, dict) and isinstance(there, dict):
        for name in here:
            yield from _of_values(f"{key}.{name}", here[name], there.get(name))
        return
    yield key, here, there


def _of_json(here: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[Difference]:
    ours, theirs = _flat(here), _flat(there)
    for key, value in theirs.items():
        last = key.rpartition(".")[2]
        if not _COMPUTES.search(last) or _NEVER.search(last):
            continue
        stated = ours.get(key, _ABSENT)
        if stated == value or (stated in (None, _ABSENT) and _is_neutral(value)):
            continue
        if value is None and stated == _ABSENT:
            continue
        if value is None:  # the same as silence: the tool that saved it again wrote its default
            continue
        yield key, stated, value


def _is_neutral(value: object) -> bool:
    return any(value is each or value == each for each in _NEUTRAL)


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Return a config as one level of keys, with rotary keys in one spelling."""
    found: dict[str, object] = {}
    for key, value in config.items():
        if key in _ROPE:
            inner = value if isinstance(value, dict) else {}
            named = {("rope_type" if k == "type" else k): v for k, v in inner.items()}
            for name, each in named.items():
                told = name if name.startswith("rope") else f"rope_{name}"
                found.setdefault(prefix + told, each)
        elif key in {"text_config", "llm_config", "language_config"} and isinstance(value, dict):
            found |= _flat(value, f"{key}.")
        elif not isinstance(value, dict):
            found[prefix + key] = value
    return found


# --------------------------------------------------------------------------------------------------
# Judging. The explained error is that of an ideal conversion to the stored format, joined (as
# squares) with the error that a quantised reference may have itself against the common source. A
# weight beyond it is searched for a cause: a gain, another tensor, another order, lost signs, or a
# coarser format on its way. An unexplained error is an error above a fifth of the weight, which no
# chain of 4-bit formats reaches, and a warning below.

# Relative errors that a format leaves of trained weights, rounded up: what a reference in that
# format may itself be off from what both were made of.
OWN_ERROR: Mapping[str, float] = {"NVFP4": 0.11, "MXFP4": 0.14, "MXFP8": 0.04}
_FP8_ERROR = 0.04
GAIN_OFF, GAIN_SHARP = 0.05, 0.01
SHARP = 1.1  # times the floor: nothing else was on the way
UNEXPLAINED = 0.2
FAR = 1.5  # times what is explained, where that is more than UNEXPLAINED
ABOVE, SLIGHTLY = 1.25, 1.02
NEXT_TO_NOTHING = 2.0**-8  # relative: twice what one rounding to bfloat16 leaves, on any way
_AGAIN = "Convert it again from its source, and compare once more."


def judge_table(
    checkpoint: Checkpoint, reference: Checkpoint, table: AgainstTable
) -> list[Finding]:
    """Judge every row of a table; return findings, the worst first."""
    judging = _Judging(checkpoint, reference, table)
    judging.unpaired()
    judging.not_finite()
    judging.integers()
    judging.values()
    return judging.findings.sorted()


def explained_errors(table: AgainstTable) -> NDArray[np.float64]:
    """Return each row's relative error that formats explain."""
    own = np.array([_own_error(row) for row in table["reference_format"]])
    floor = np.nan_to_num(table["floor"], nan=0.0)
    explained: NDArray[np.float64] = np.hypot(floor, own)
    return explained


def _own_error(number: int) -> float:
    name = FORMATS[number]
    return _FP8_ERROR if name.startswith("FP8") else OWN_ERROR.get(name, 0.0)


class _Judging:
    """A table under judgement, with its findings."""

    def __init__(self, checkpoint: Checkpoint, reference: Checkpoint, table: AgainstTable) -> None:
        self.table = table
        self._checkpoint, self._reference = checkpoint, reference
        self.findings = Findings()
        self._reasons = CauseSearch(checkpoint, reference, table)
        self._gain_is_off = _gain_is_off(table)

    def report(
        self, rule: AuditRule, index: int, message: str, remedy: str, **more: object
    ) -> None:
        """Report one weight; `message` follows its name."""
        unit, row = self.table.pairs[index].unit, self.table.row(index)
        told = ("cosine", "gain", "error", "floor", "over_floor")
        evidence = {name: _rounded(row[name]) for name in told}
        place = FindingLocation(None, unit.name, unit.layer)
        self.findings.add(rule, place, f"{shown(unit.name)} {message}", remedy, **evidence, **more)

    def unpaired(self) -> None:
        """Report shapes that differ, missing weights, and weights that were not compared."""
        for name, text in self.table.unlike.items():
            self.findings.add(
                rules.SHAPE,
                FindingLocation(None, name),
                f"{shown(name)} has the shape {text}.",
                _AGAIN,
            )
        for name in self._missing():
            self.findings.add(
                rules.MISSING,
                FindingLocation(None, name, layer_in(name)),
                f"{shown(name)} of the reference is missing.",
                "Look for it under another name, or in a shard that is missing.",
            )
        for where, names in (
            ("this checkpoint", self.table.only_here),
            ("the reference", self.table.only_there),
        ):
            for why in dict.fromkeys(names.values()):
                members = [name for name, sentence in names.items() if sentence == why]
                self.findings.add(
                    rules.NOT_COMPARED,
                    NOWHERE,
                    f"{len(members)} weights of {where} are not compared, {shown(members[0])} for"
                    f" one: {why}.",
                    "Nothing to do if the conversion left them out on purpose.",
                    weights=len(members),
                    examples=[shown(name) for name in members[:8]],
                )

    def _missing(self) -> list[str]:
        """Return the reference's weights that nothing here could hold under another name."""
        table = self.table
        if self._checkpoint.problems.counts[ProblemKind.UNREADABLE_SHARD]:
            return []  # the unreadable shard has its own finding
        names = self._checkpoint.names
        there = {*self._checkpoint.table.suffixes, *(names.present if names else ())}
        roles = {without_numbers(pair.reference_name) for pair in table.pairs}
        return [
            name
            for name in table.only_there
            if not self._is_left_out(name)
            and name not in there
            and (without_numbers(name) in roles or not table.only_here)
        ]

    def _is_left_out(self, name: str) -> bool:
        """Return whether healthy conversions omit it: drafters, engine buffers, a tied head."""
        config, model = self._checkpoint.config, self._reference.model
        if model is not None:
            parameter = self._reference.names and self._reference.names.present.get(name)
            block = parameter.block if parameter else None
            return block is not None and block.is_drafter
        if is_known_extra(name):
            return True
        layers, layer = config.get("num_hidden_layers"), layer_in(name)
        if type(layers) is int and layer is not None and layer >= layers:
            return layers == self._reference.config.get("num_hidden_layers")
        tied = config.get("tie_word_embeddings") and name.partition(".")[0] == "lm_head"
        return bool(tied) or name.startswith("mtp.")

    def not_finite(self) -> None:
        """Report values that are finite only in the reference."""
        for index in indices(self.table["odd_here"] > 0):
            count = int(self.table["odd_here"][index])
            self.report(
                rules.NOT_FINITE,
                index,
                f"has {count} values that are NaN or infinite, and finite in the reference.",
                _AGAIN,
                count=count,
            )

    def integers(self) -> None:
        """Report integer tensors that differ."""
        whole = self.table["format"] == 1
        for index in indices(whole & (self.table["equal"] < 1) & (self.table["elements"] > 0)):
            share = 1 - float(self.table["equal"][index])
            message = f"differs from the reference in {percent(share)} of its numbers."
            self.report(rules.INTEGERS, index, message, _AGAIN, share=share)

    def values(self) -> None:
        """Report weights that are farther off than formats explain."""
        table = self.table
        explained = np.maximum(explained_errors(table), NEXT_TO_NOTHING)
        numbers = (table["format"] != 1) & (table["elements"] > 0)
        error, over = table["error"], table["error"] / explained
        # Negated, so that NaN counts as far.
        far = numbers & (~(over <= ABOVE) | self._gain_is_off)
        for index in indices(far):
            self._far(index, float(explained[index]))
        for index in indices(numbers & ~far & (table["bad_rows"] > 0)):
            self._rows(index)
        told = np.zeros(len(numbers), bool)
        for index in indices(numbers & ~far & (table["bad_rows"] == 0) & (table["misfits"] > 0)):
            reason = self._reasons.of_elements(index, last=True)
            if reason is not None:
                told[index] = True
                self._reason(index, reason)
        exact = np.array([_own_error(number) == 0 for number in table["reference_format"]], bool)
        slightly = numbers & ~far & ~told & exact & (table["bad_rows"] == 0)
        slightly &= table["over_floor"] > SLIGHTLY
        self._slightly(indices(slightly & (error > NEXT_TO_NOTHING)))

    def _reason(self, index: int, reason: ReportedCause) -> None:
        """Report a cause; name the factor if it is a known one."""
        if reason.rule is rules.GAIN:
            gain = float(self.table["gain"][index]) / float(_ideal_gains(self.table)[index])
            named = self._reasons.of_gain(index, gain)
            reason = reason._replace(message=f"{reason.message[:-1]}{named}.")
        self.report(reason.rule, index, reason.message, _AGAIN)

    def _far(self, index: int, explained: float) -> None:
        table = self.table
        error, residual = float(table["error"][index]), float(table["residual"][index])
        # Far off even after the best gain, or inverted: look for another order, signs or tensor.
        wrong = not residual <= max(UNEXPLAINED, FAR * explained) or table["gain"][index] < 0
        if wrong:
            reason = self._reasons.of_values(index)
            if reason is None and table["bad_rows"][index] > 0:
                reason = self._reasons.of_rows(index)
            text = f"is off by {_share(error)} of itself, where formats explain {_share(explained)}"
            self._reason(index, reason or ReportedCause(rules.VALUES, f"{text}."))
            return
        reason = self._reasons.of_rows(index) if table["bad_rows"][index] > 0 else None
        reason = reason or self._reasons.of_elements(index)
        if reason is not None:
            self._reason(index, reason)
        elif self._gain_is_off[index]:
            gain = float(table["gain"][index]) / float(_ideal_gains(table)[index])
            text = self._reasons.of_gain(index, gain)
            self.report(rules.GAIN, index, f"is {gain:.4g} times the reference{text}.", _AGAIN)
        elif table["bad_rows"][index] > 0:
            self._rows(index)
        else:
            self._above(index, error / explained)

    def _above(self, index: int, times: float) -> None:
        """Report a coarser format on the way, another rounding, or an unknown cause."""
        coarser = self._reasons.coarser(index)
        reason = None if coarser else self._reasons.of_elements(index, last=True)
        if coarser is not None:
            self._coarser(index, coarser)
        elif reason is not None:
            self._reason(index, reason)
        else:
            self.report(
                rules.ABOVE_FORMAT,
                index,
                f"is off by {_share(float(self.table['error'][index]))}, {times:.3g} times what its"
                " format explains.",
                "See which rule made it, and whether it was converted more than once.",
                times=_rounded(times),
            )

    def _rows(self, index: int) -> None:
        reason = self._reasons.of_rows(index)
        if reason is not None:
            self._reason(index, reason)
            return
        count, first = (int(self.table[name][index]) for name in ("bad_rows", "first_bad_row"))
        self.report(
            rules.ROWS,
            index,
            f"has {count} rows that are not the reference's, the first of them row {first}.",
            "Look for a part that was never written, or was written elsewhere.",
            rows=count,
            first=first,
        )

    def _coarser(self, index: int, formats: str) -> None:
        """Report once for each role, because layers are converted alike."""
        name = self.table.pairs[index].unit.name
        self.findings.add(
            rules.COARSER,
            FindingLocation(None, name),
            f"{shown(name)} has the error that {formats} leaves: it was stored in that before.",
            "Nothing to do; converting from a finer source would be more exact.",
            format=formats,
        )

    def _slightly(self, rows: list[int]) -> None:
        """Report once for each role, because layers are converted alike."""
        for index in rows:
            unit, over = self.table.pairs[index].unit, float(self.table["over_floor"][index])
            self.findings.add(
                rules.SLIGHTLY_ABOVE,
                FindingLocation(None, unit.name),
                f"{shown(unit.name)} has {over:.3f} times the error of an ideal conversion.",
                "Nothing is wrong; a rule that rounds to nearest would leave less.",
                over_floor=_rounded(over),
            )


def _ideal_gains(table: AgainstTable) -> NDArray[np.float64]:
    """Return the gains of ideal conversions; 1 where there is none."""
    gains: NDArray[np.float64] = np.nan_to_num(table["floor_gain"], nan=1.0)
    return np.where((gains > 0.5) & (gains < 2), gains, 1.0)


def _gain_is_off(table: AgainstTable) -> NDArray[np.bool_]:
    """Return a mask of gains outside the range from 1 to the least-squares optimum.

    The range is narrow where the stored format alone explains the rest. If another format was on
    the way, or is the reference's own, the gain may be off by a few parts in a hundred.
    """
    ideal = _ideal_gains(table)
    floor = np.nan_to_num(table["floor"], nan=0.0)
    exact = np.array([_own_error(number) == 0 for number in table["reference_format"]], bool)
    sharp = exact & (table["residual"] <= SHARP * np.hypot(floor, NEXT_TO_NOTHING))
    noise = 4 * np.nan_to_num(table["residual"]) / np.sqrt(np.maximum(table["elements"], 1))
    slack = np.where(sharp, np.minimum(GAIN_SHARP + noise, GAIN_OFF), GAIN_OFF)
    least = np.minimum(np.minimum(ideal, 1.0), np.nan_to_num(table["cosine"], nan=1.0) ** 2)
    inside = table["gain"] <= (1 + slack) * np.maximum(ideal, 1.0)
    inside &= table["gain"] >= (1 - slack) * least
    off: NDArray[np.bool_] = ~inside & (table["reference_energy"] > 0)
    return off


def _share(value: float) -> str:
    return percent(value) if value < 100 else f"{value:.3g} times"


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def bytes_against(checkpoint: Checkpoint, reference: Checkpoint) -> int:
    """Return how many bytes a comparison reads on both sides, for a progress bar."""
    return pairs_of(named_alike(checkpoint, reference), reference).nbytes


def named_alike(checkpoint: Checkpoint, reference: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its names resolved by the reference's config.

    A config that is damaged, or counts other layers, must not decide what is compared.
    """
    named = checkpoint.named_by(reference.model)
    return named if named.names is not None else checkpoint


def measure_against(
    checkpoint: Checkpoint,
    reference: Checkpoint,
    *,
    workers: int = 1,
    places: Collection[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> AgainstTable:
    """Compare all weights, or those of some `places` (Unit.place), with `workers` threads.

    `progress` receives the number of bytes done on both sides, from the thread that did them.
    """
    checkpoint = named_alike(checkpoint, reference)
    found = pairs_of(checkpoint, reference)
    table = AgainstTable.empty(p for p in found.pairs if places is None or p.unit.place in places)
    if places is None:
        table.unlike.update(found.unlike)
        table.only_here.update(found.only_here)
        table.only_there.update(found.only_there)

    def measure(index: int, ours: PositionedReader, theirs: PositionedReader) -> None:
        pair = table.pairs[index]
        here = ours.over(stored_of(checkpoint, pair.unit))
        there = theirs.over(reference_weight(reference, pair))
        table.put(index, compare(here, there, pair.rows[0] if pair.rows else 0).facts())

    sizes = [pair.nbytes for pair in table.pairs]
    walk(sizes, [checkpoint, reference], measure, workers=workers, progress=progress)
    return table


def judge_against(
    checkpoint: Checkpoint, reference: Checkpoint, table: AgainstTable
) -> list[Finding]:
    """Judge the table of a whole checkpoint; return findings, the worst first."""
    configs = judge_configs(checkpoint, reference)
    values = judge_table(named_alike(checkpoint, reference), reference, table)
    return in_order([*configs, *values])
