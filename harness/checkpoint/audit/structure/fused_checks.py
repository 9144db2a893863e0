"""Check modules that several parameters share, such as `gate_up_proj` or a stack of experts.

The format is inferred from the module itself. The model tables then give the tensors and shapes
that its members need in that format, and each is compared with what is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.base.errors import Refused
from degarble.harness.checkpoint.audit import rules
from degarble.harness.checkpoint.audit.structure.module_checks import ModuleCheck
from degarble.harness.model.recipes import BF16, Recipe, Rule
from degarble.harness.model.storage import Part
from degarble.harness.model.tensors import tensors_of

if TYPE_CHECKING:
    from degarble.harness.checkpoint.view.view import LogicalNames
    from degarble.harness.model.parameters import Parameter


def check_fused(names: LogicalNames, module: str, members: list[Parameter]) -> ModuleCheck:
    """Return the format of one fused module and the rules that it breaks."""
    check = ModuleCheck()
    try:
        form = names.table.form(module)
        check.weight = BF16 if form.format is None else form.format.name
        check.has_input_scale = Part.INPUT_SCALE in form.parts
        activation = check.weight if check.has_input_scale and check.weight == "NVFP4" else BF16
        # All members of a fused module share its format.
        recipe = Recipe("as stored", (Rule("*", check.weight, activation),))
        expected = tensors_of(names.config, names.layout.with_recipe(recipe), members)
    except Refused as error:
        check.weight = None
        check.report(
            rules.UNREADABLE_MODULE,
            None,
            f"is {error.shown_value}, expected {error.expectation}",
            error.remedy,
        )
        return check
    for tensor in expected:
        entry = names.table.entries.get(tensor.name)
        suffix = tensor.name.removeprefix(module)
        if entry is None:
            check.report(
                rules.SCALE_MISSING,
                None,
                f"has no {suffix}, as {check.weight} needs",
                "Look for it under another name, or in a shard that is missing.",
            )
        elif entry.shape != tensor.shape:
            check.report(
                rules.WRONG_SHAPE,
                None,
                f"has a {suffix} of {list(entry.shape)}, expected {list(tensor.shape)}",
                "Check that config and shards are of one model.",
                shape=list(entry.shape),
                expected=list(tensor.shape),
            )
    return check
