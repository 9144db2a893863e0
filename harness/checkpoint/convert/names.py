"""What converted modules are called: suffixes as the source's spelling has them.

Owns the suffix of every part that a conversion writes. DeepSeek's spelling says `.scale` where
transformers' says `.weight_scale_inv`; NVFP4 is named as ModelOpt names it in both.
Kept honest by suites/checkpoint/convert/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.anatomy.layouts import Spelling
from degarble.harness.anatomy.storage import Part, suffixes_named

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.checkpoint.view import Checkpoint
    from degarble.harness.formats.types import BlockFormat


def part_names(checkpoint: Checkpoint, module: str, fmt: BlockFormat | None) -> Mapping[Part, str]:
    """Name the tensors of a module that is written in a format; None: BF16."""
    spelling = checkpoint.names.layout.spelling if checkpoint.names else Spelling.HUGGINGFACE
    table = suffixes_named("deepseek" if spelling is Spelling.DEEPSEEK else "huggingface")
    parts = [Part.VALUE] if fmt is None else [Part.CODES, Part.BLOCK_SCALE]
    if fmt is not None and fmt.tensor_scale:
        parts.append(Part.TENSOR_SCALE)
    weight = "BF16" if fmt is None else fmt.name
    return {part: module + table.suffix(part, weight) for part in parts}
