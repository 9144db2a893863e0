"""Show the progress of the first pass over streamed weights, for commands that run a model.

Later passes are not shown: text is printed in their place.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from degarble.harness.cli.terminal import Terminal
    from degarble.harness.inference.weights import StreamedWeights


@contextmanager
def first_pass(
    terminal: Terminal, streamed: StreamedWeights | None
) -> Iterator[Callable[[], None]]:
    """Show how far it is; call what is given when it is over. Held weights show nothing."""
    with ExitStack() as stack:
        if streamed is not None:
            progress = stack.enter_context(terminal.work("first pass", streamed.total))
            streamed.heard = progress.advance
            stack.callback(setattr, streamed, "heard", None)
        yield stack.close
