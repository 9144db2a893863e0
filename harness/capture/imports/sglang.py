"""Read what SGLang dumps: folders of its dumper, and of --debug-tensor-dump-output-folder.

Two formats, both of torch.save and read without unpickling (torch_files.py):

* The dumper (python/sglang/srt/debug_utils/dumper.py, `DUMPER_ENABLE=1
  DUMPER_NON_INTRUSIVE_MODE=all`) writes a file a tensor, named by its tags:
  `step=0___rank=0___dump_index=7___name=non_intrusive__model.layers.0.mlp.down_proj.output.pt`,
  with `{"value": tensor, "meta": tags}`. It dumps inputs as well, and of the batch `input_ids`,
  `positions`, `seq_lens` and `req_pool_indices`.
* The forward hook (tensor_dump_forward_hook.py) writes a file a pass and rank,
  `TP0_PP0_Rank0_pid1/Pass00000.pt`, a dict from a leaf module's path to what it returned. Trap: the
  file is written when `model` returns, so logits are in the file of the next pass.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.capture.engine.maps import CallSide
from degarble.harness.capture.imports.dumped import DumpedStep
from degarble.harness.capture.imports.torch_files import read_saved

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.capture.imports.dumped import Place

_HOOKED = "non_intrusive__"
_BATCH = frozenset({"input_ids", "positions", "seq_lens", "req_pool_indices", "rids"})
_PASS = re.compile(r"Pass(\d+)\.pt$")
_RANK = re.compile(r"TP(\d+)_PP(\d+)_Rank(\d+)_pid\d+$")
_SIDE = re.compile(r"^(?P<module>.*?)\.?(?P<side>inputs|output)(?:\.(?P<at>\w+))?$")
# Arguments that SGLang passes by name, by their numbers.
_NAMED = {
    "hidden_states": 0, "x": 0, "input": 0, "input_": 0, "q": 0, "query": 0,
    "residual": 1, "k": 1, "key": 1, "v": 2, "value": 2,
}  # fmt: skip


def read_sglang(folder: Path) -> list[DumpedStep]:
    """Read a dump of either format, pass by pass."""
    passes = sorted(path for path in folder.rglob("Pass*.pt") if _RANK.search(str(path.parent)))
    tagged = sorted(path for path in folder.rglob("*.pt") if "___name=" in path.name)
    if passes:
        return _from_passes(passes)
    if not tagged:
        raise InvalidArgument(
            str(folder), "no file of SGLang's dumper", "step=...___name=....pt, or Pass*.pt",
            "Start SGLang with DUMPER_ENABLE=1 DUMPER_NON_INTRUSIVE_MODE=all DUMPER_DIR=...",
        )  # fmt: skip
    runs = {path.parent for path in tagged}
    if len(runs) > 1:
        raise InvalidArgument(
            str(folder), f"{len(runs)} runs, such as {min(each.name for each in runs)}",
            "the folder of one run", "Name one of them.",
        )  # fmt: skip
    return _from_tagged(tagged)


def _from_tagged(paths: Iterable[Path]) -> list[DumpedStep]:
    steps: dict[int, dict[int, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for path in paths:
        tags = dict(pair.partition("=")[::2] for pair in path.name.removesuffix(".pt").split("___"))
        step, rank, name = (tags.get(key, "") for key in ("step", "rank", "name"))
        wanted = name in _BATCH or name.startswith(_HOOKED)
        if not (wanted and step.isdecimal() and rank.isdecimal()):
            continue
        saved = read_saved(path)
        value = saved.get("value") if isinstance(saved, dict) else saved
        # What a module is given or returns first; a module that runs again is no leaf of the model.
        steps[int(step)][int(rank)].setdefault(name, value)
    return [
        _step([steps[number][rank] for rank in sorted(steps[number])]) for number in sorted(steps)
    ]


def _step(ranks: list[dict[str, Any]]) -> DumpedStep:
    first = ranks[0]
    return DumpedStep(
        _numbers(first.get("input_ids")),
        _numbers(first.get("positions")),
        _numbers(first.get("seq_lens")),
        _numbers(first.get("req_pool_indices")),
        [_places(rank) for rank in ranks],
    )


def _numbers(value: Any) -> list[int] | None:
    if not isinstance(value, torch.Tensor) or value.is_floating_point():
        return None
    found: list[int] = value.flatten().tolist()
    return found


def _places(named: Mapping[str, Any]) -> dict[Place, Tensor]:
    found: dict[Place, Tensor] = {}
    for name, value in named.items():
        match = _SIDE.match(name.removeprefix(_HOOKED)) if name.startswith(_HOOKED) else None
        if match is None or not isinstance(value, torch.Tensor):
            continue
        at = match["at"] or "0"
        number = int(at) if at.isdecimal() else _NAMED.get(at)
        if number is not None:
            side = CallSide.ARGUMENT if match["side"] == "inputs" else CallSide.RESULT
            found[match["module"], side, number] = value
    return found


def _from_passes(paths: Iterable[Path]) -> list[DumpedStep]:
    ranks: dict[int, list[Path]] = defaultdict(list)
    for path in paths:
        match = _RANK.search(str(path.parent))
        assert match is not None, "chosen by it"
        if int(match[2]):
            raise InvalidArgument(
                str(path.parent), f"pipeline rank {match[2]}", "ranks that have all layers",
                "Dump a run without --pp-size.",
            )  # fmt: skip
        ranks[int(match[1])].append(path)
    if len({len(files) for files in ranks.values()}) > 1:
        raise InvalidArgument(
            "dump", {rank: len(files) for rank, files in ranks.items()}, "as many passes a rank",
            "Dump all ranks of one engine again, together.",
        )  # fmt: skip
    found: list[DumpedStep] = []
    for files in zip(*(sorted(ranks[rank], key=_pass) for rank in sorted(ranks)), strict=True):
        found.append(_passed([_tensors(path) for path in files], found[-1:]))
    return [step for step in found if step.tokens is not None]


def _pass(path: Path) -> int:
    match = _PASS.search(path.name)
    return int(match[1]) if match else -1


def _tensors(path: Path) -> dict[str, Any]:
    saved = read_saved(path)
    if not isinstance(saved, dict):
        raise InvalidArgument(
            str(path), type(saved).__name__, "a dict from a module's path to a tensor",
            "Name the folder of --debug-tensor-dump-output-folder.",
        )  # fmt: skip
    return saved


def _passed(ranks: list[dict[str, Any]], before: list[DumpedStep]) -> DumpedStep:
    batch = "model.forward_batch_info."
    step = DumpedStep(
        _numbers(ranks[0].get(f"{batch}input_ids")),
        _numbers(ranks[0].get(f"{batch}positions")),
        _numbers(ranks[0].get(f"{batch}seq_lens")),
        None,
    )
    for number, rank in enumerate(ranks):
        places: dict[Place, Tensor] = {}
        for name, value in rank.items():
            if name.startswith(batch):
                continue
            target = places
            if not name.startswith("model."):  # ran after the last file was written
                target = before[0].ranks[number] if before else {}
            values = value if isinstance(value, list) else [value]
            for at, tensor in enumerate(values):
                if isinstance(tensor, torch.Tensor):
                    target[name, CallSide.RESULT, at] = tensor
        step.ranks.append(places)
    return step
