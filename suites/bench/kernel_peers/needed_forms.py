"""Write the list of forms that rows take from the kernel cache on an H200.

    python -m degarble.suites.bench.kernel_peers.needed_forms

Every row is made ready and run once on a pretended GPU, with tensors that have no memory, up to the
form that would be compiled. The command compiles the listed forms of its rows in parallel before
the first row. A form that is missing is compiled when its row runs: so it is with top-k's on a GPU
of another number of multiprocessors.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from degarble.harness.backends.cutedsl.kernels import Kernels
from degarble.kernels.runtime.forms import KernelForm
from degarble.kernels.runtime.targets import SM90A
from degarble.suites.bench import decoder
from degarble.suites.bench.kernel_peers import report, whole_layers
from degarble.suites.bench.kernel_peers.__main__ import FORMS, GROUPS, rows_of
from degarble.suites.bench.kernel_peers.contest import OURS, TimedRow, Unavailable
from degarble.suites.bench.kernel_peers.rows import PLAIN
from degarble.suites.support.pretended_gpu import noted_in, pretended_gpu

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from degarble.suites.bench.kernel_peers.contest import LargeRow, Row


class RememberingWithoutGpu(decoder.Remembering):
    """Kernels that are launched on the pretended GPU."""

    def __init__(self, settings: Any) -> None:
        Kernels.__init__(self, SM90A.name, torch.device("cpu"))
        self._settings, self._memory, self.calls = settings, nullcontext, []


@contextmanager
def forms_heard(found: dict[KernelForm, None]) -> Iterator[None]:
    """Pretend a GPU; `found` gets the forms that would be compiled."""

    with ExitStack() as stack:
        stack.enter_context(pretended_gpu(SM90A.name, "cpu", noted_in(found)))
        stack.enter_context(mock.patch.object(decoder, "Remembering", RememberingWithoutGpu))
        stack.enter_context(mock.patch.object(decoder, "SETS", 1))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        # Numbers that nobody knows meet all conditions, and every address is aligned.
        stack.enter_context(mock.patch.object(torch.Tensor, "__bool__", return_value=True))
        stack.enter_context(mock.patch.object(torch.Tensor, "data_ptr", return_value=0))
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "data_ptr", return_value=0))
        yield


def run_once(planned: Row | LargeRow | TimedRow) -> None:
    """Run each of our kernels of a row."""
    if isinstance(planned, TimedRow):  # of `layers`, which are measured together
        clock: Any = SimpleNamespace(captured=lambda arm: arm.make(0)())
        graphs = whole_layers.OurGraphs(whole_layers.LayersRun(), clock)
        graphs.capture()
        assert not graphs.reasons, graphs.reasons
        return
    row = planned.ready()
    if row.exact and row.reference is not None:  # by our kernel
        row.reference()
    for contender in row.contenders:
        if contender.name.startswith((OURS, PLAIN)):
            with suppress(Unavailable):
                contender.make(0).run()


def forms_of(group: str) -> Iterator[tuple[str, list[KernelForm]]]:
    """Yield the rows of a group with their forms."""
    found = dict[KernelForm, None]()
    with forms_heard(found):
        for row in rows_of(group):
            found.clear()
            run_once(row)
            yield report.key_of({"group": group, "row": row.name}), list(found)


def text_of(groups: Iterable[str]) -> str:
    """Return the document: a form a line with its rows, in the order in which rows need them."""
    rows = dict[KernelForm, list[str]]()
    for group in groups:
        for row, forms in forms_of(group):
            for form in forms:
                rows.setdefault(form, []).append(row)
    lines = ",\n".join(
        f"  {json.dumps({**form.plain(), 'rows': several})}" for form, several in rows.items()
    )
    return f'{{"forms": [\n{lines}\n]}}\n'


def main() -> int:
    """Write the list."""
    FORMS.write_text(text_of(GROUPS), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
