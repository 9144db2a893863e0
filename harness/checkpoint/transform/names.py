"""Name the tensors of a conversion's target as the consumer that it is written for reads them.

A source whose spelling the consumer knows keeps it. Any other is renamed as a whole, copied tensors
included, because no loader reads a checkpoint in two spellings. NVFP4 uses ModelOpt's suffixes in
every spelling. FP8 scales are `.scale` in DeepSeek's and `.weight_scale_inv` elsewhere.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from degarble.harness.checkpoint.view.consumers import consumer_of
from degarble.harness.model.layouts import Spelling
from degarble.harness.model.storage import Part, suffixes_named

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.checkpoint.view.view import LogicalNames
    from degarble.harness.formats.types import BlockFormat
    from degarble.harness.model.layouts import Layout


class TargetNames:
    """The names of one conversion's target, by those of its source.

    `source` None: a model that no config describes; its names stay.
    """

    def __init__(self, source: LogicalNames | None, to: str) -> None:
        self._source = source
        self._to = to

    @cached_property
    def layout(self) -> Layout | None:
        """The layout that spells the target, with the source's suffixes for scales."""
        names = self._source
        if names is None:
            return None
        consumer = consumer_of(self._to, names.config.family)
        known = consumer.layouts(names.config)
        if not known or names.layout.fusions or consumer.knows(names.layout, names.config):
            return names.layout  # what is fused, and a family it does not read, is refused by name
        return replace(known[0], fusions=())

    @cached_property
    def _modules(self) -> Mapping[str, str]:
        names, layout = self._source, self.layout
        if names is None or layout is None or layout.spelling is names.layout.spelling:
            return {}
        return {
            names.module_of(each): layout.path_of(each, names.config)
            for each in names.present.values()
        }

    @cached_property
    def _tensors(self) -> Mapping[str, str]:
        """Map source tensor to target tensor, for every module whose path or suffix changes."""
        names, layout = self._source, self.layout
        if names is None or layout is None:
            return {}
        found = {}
        theirs = suffixes_named(layout.suffixes)
        for before, after in self._modules.items():
            form = names.table.form(before)
            weight = form.format.name if form.format else "BF16"
            for part, entry in form.parts.items():
                suffix = entry.name.removeprefix(before)
                if part is Part.BLOCK_SCALE:  # FP8's alone differs, and packed ones keep theirs
                    suffix = theirs.suffix(part, weight)
                found[entry.name] = after + suffix
        return found

    def module(self, name: str) -> str:
        """Return the target's name of a module of the source."""
        return self._modules.get(name, name)

    def tensor(self, name: str) -> str:
        """Return the target's name of a copied tensor."""
        return self._tensors.get(name, name)

    def beside(self, module: str, name: str) -> str:
        """Return the name of a new module that shares the parent of one of the source."""
        return f"{self.module(module).rpartition('.')[0]}.{name}"

    def parts(self, module: str, fmt: BlockFormat | None) -> Mapping[Part, str]:
        """Name the tensors of a target module that is written in a format; None: BF16."""
        spelling = self.layout.spelling if self.layout else Spelling.HUGGINGFACE
        table = suffixes_named("deepseek" if spelling is Spelling.DEEPSEEK else "huggingface")
        parts = [Part.VALUE] if fmt is None else [Part.CODES, Part.BLOCK_SCALE]
        if fmt is not None and fmt.tensor_scale:
            parts.append(Part.TENSOR_SCALE)
        weight = "BF16" if fmt is None else fmt.name
        return {part: module + table.suffix(part, weight) for part in parts}
