"""Make the unit that recodes one module: names, parts and proof of a Recoded weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.checkpoint.transform.proof.checks import check_recoded
from degarble.harness.checkpoint.transform.recode import Recoded
from degarble.harness.checkpoint.transform.units import Unit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from degarble.harness.checkpoint.transform.names import TargetNames
    from degarble.harness.checkpoint.transform.recode import Partners
    from degarble.harness.checkpoint.transform.source import Linear
    from degarble.harness.checkpoint.transform.units import TensorProof
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.checkpoint.write.plan import PlannedTensor
    from degarble.harness.formats.types import BlockFormat


def recoding(
    names: TargetNames,
    module: str,
    members: Sequence[Linear],
    fmt: BlockFormat | None,
    partners: Partners | None = None,
) -> Unit:
    """Return the unit that makes `module` of the target from linears stacked along rows."""
    recoded = Recoded([each.weight for each in members], fmt, partners)
    parts = names.parts(module, fmt)
    part_of = {name: part for part, name in parts.items()}

    def make(tensor: PlannedTensor) -> Iterator[Tensor]:
        return recoded.chunks(part_of[tensor.name])

    def check(target: Checkpoint) -> Iterator[TensorProof]:
        return check_recoded(target, module, recoded)

    word = "BF16" if fmt is None else fmt.name
    return Unit(
        key=module,
        tensors=recoded.planned(parts, module),
        sources=tuple(name for each in members for name in each.tensors),
        make=make,
        check=check,
        left_out=tuple(pair for each in members for pair in each.input_scale),
        formats={each.name: word for each in members},
    )
