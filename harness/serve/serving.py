"""Run `degarble serve`: socket, model, computing thread, web side, shutdown.

The port is taken first, so that a server that cannot listen loads nothing. Readiness comes with the
first token; an error there ends the server with that error. Whatever ends the web side also ends
the thread before files are released.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from degarble.harness.inference.model import open_model
from degarble.harness.serve.app import Service
from degarble.harness.serve.auth import Gate
from degarble.harness.serve.capturing import Switch
from degarble.harness.serve.engine import Engine
from degarble.harness.serve.messages import Bounds
from degarble.harness.serve.metrics import Metrics
from degarble.harness.serve.served_model import Desk
from degarble.harness.serve.transport import Listener, bound_socket, quiet_logs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True)
class Serving:
    """Where and how a checkpoint is served. `anyone`: without a token, under any name."""

    checkpoint: Path
    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    token: str | None = field(default=None, repr=False)
    anyone: bool = False
    numerics: str | None = None
    bounds: Bounds = field(default_factory=Bounds)
    captures: Path | None = None  # the folder that the capture switch writes to


def serve(how: Serving, say: Callable[[dict[str, str]], None]) -> None:
    """Serve until a signal arrives; `say` receives what is served and where, once."""
    quiet_logs()
    with (
        bound_socket(how.host, how.port) as listening,
        open_model(how.checkpoint, how.numerics) as model,
    ):
        desk = Desk(model, how.name or how.checkpoint.resolve().name, how.bounds)
        metrics = Metrics()
        switch = None if how.captures is None else Switch(how.captures, model)
        engine = Engine(model.speaker, desk.tokenizer, how.bounds.sequences, metrics, switch)
        gate = Gate.of(how.host, how.token, anyone=how.anyone)
        service = Service(desk, engine, gate, metrics, switch)

        def stopping() -> None:
            service.stopping = True

        listener = Listener(service.app(), how.bounds, stopping)
        listener.give_up = engine.stop
        place = listening.getsockname()
        host = f"[{place[0]}]" if ":" in place[0] else place[0]
        say({"model": desk.name, "mark": desk.mark, "url": f"http://{host}:{place[1]}/v1"})

        def ended() -> None:
            listener.should_exit = True

        engine.start(ended)
        try:
            listener.run(sockets=[listening])
        finally:
            engine.stop()
            engine.join()
            if switch is not None:
                switch.close()
    if engine.failure is not None:
        raise engine.failure
