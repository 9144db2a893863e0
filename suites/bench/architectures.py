"""How the components of tested architectures are judged: by a derived budget, or a measured one.

`suites/campaigns/architectures.py` tries every architecture of transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from degarble.suites.bench.runner import Bench, Part, Table, Target
from degarble.suites.references.traced.traced_models import ARCHITECTURES, config_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_WANTED = ("llama", "qwen3_moe", "gpt_oss")


def _derived(kind: str) -> tuple[int, int]:
    """Components with a derived budget, and all: what runs along the tokens has a measured one."""
    config: Any = config_of(kind)
    components = config.graph.components
    derived = sum(not each.is_recurrent or each.is_rectangular for each in components)
    return derived, len(components)


def derived_budgets(_options: Any) -> Iterator[Part]:
    """Count the components of the tested architectures whose budget is derived."""
    for kind in _WANTED:
        derived, whole = _derived(kind)
        yield Target(f"components of {kind} with a derived budget (share)", derived / whole, 0.95)
    yield "the others are measured; suites/capture/test_traced.py fails where one has no budget"
    rows = ((kind, *_derived(kind)) for kind in ARCHITECTURES)
    yield Table(
        "Components with a derived budget", ("architecture", "derived", "all", "share"),
        tuple((kind, str(own), str(whole), f"{own / whole:.1%}") for kind, own, whole in rows),
    )  # fmt: skip


BENCHES = {
    "derived-budgets": Bench(
        "Traced components with a derived budget", derived_budgets, ("torch", "transformers"),
        page=True,
    ),
}  # fmt: skip
