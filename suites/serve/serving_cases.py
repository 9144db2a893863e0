"""A server in this process: a synthetic model with a tokenizer of 64 words, and its real paths."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.testclient import TestClient

from degarble.harness.generate.generate import GenerationOptions, TextGenerator
from degarble.harness.inference.generation import Limits, Sampling
from degarble.harness.inference.model import open_model
from degarble.harness.serve.admission import AccessControl
from degarble.harness.serve.app import CountingApp, Service
from degarble.harness.serve.capturing import RequestCapture
from degarble.harness.serve.engine import Engine
from degarble.harness.serve.messages import Bounds
from degarble.harness.serve.metrics import Metrics
from degarble.harness.serve.served_model import ServedModel
from degarble.suites.hang_guard import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BOUNDS = Bounds(prompt_tokens=200, new_tokens=40, sequences=64, body_bytes=100_000)
LOCAL = "http://127.0.0.1"


@dataclass(frozen=True)
class Running:
    """A server without a socket."""

    desk: ServedModel
    engine: Engine
    service: Service
    app: CountingApp
    client: TestClient

    def post(self, path: str, **fields: Any) -> Any:
        """Ask, with the model's name put in."""
        return self.client.post(path, json={"model": self.desk.name} | fields)

    def complete(self, prompt: object, **fields: Any) -> dict[str, Any]:
        """Complete a prompt greedily; the answer has to be there."""
        found = self.post("/v1/completions", **({"prompt": prompt, "temperature": 0} | fields))
        assert found.status_code == 200, found.text
        answer: dict[str, Any] = found.json()
        return answer

    def said(self, prompt: str, tokens: int, **how: Any) -> str:
        """What `degarble generate` says to a prompt alone."""
        stops = how.pop("stops", ())
        manner = GenerationOptions(Sampling(**how), Limits(tokens, stops))
        return TextGenerator(self.desk.model, manner).speak([prompt]).speeches[0].text

    def counted(self, name: str) -> float:
        """One number of /metrics."""
        lines = self.client.get("/metrics").text.splitlines()
        return float(next(line.split()[-1] for line in lines if line.startswith(name)))


@contextmanager
def running(
    checkpoint: Path,
    bounds: Bounds = BOUNDS,
    token: str | None = None,
    *,
    endless: bool = False,
    captures: Path | None = None,
) -> Iterator[Running]:
    """Serve a checkpoint in this process; `endless`: no token ends a text."""
    with open_model(checkpoint) as model:
        served, metrics = ServedModel(model, "words", bounds), Metrics()
        switch = None if captures is None else RequestCapture(captures, model)
        engine = Engine(model.logits_model, served.tokenizer, bounds.sequences, metrics, switch)
        if endless:
            object.__setattr__(served.tokenizer, "ends", frozenset())
        gate = AccessControl.for_host("127.0.0.1", token, anyone=False)
        service = Service(served, engine, gate, metrics, switch)
        app = service.app()
        client = TestClient(app, base_url=LOCAL)
        engine.start()
        try:
            until(lambda: engine.ready or engine.failure is not None)
            yield Running(served, engine, service, app, client)
        finally:
            engine.stop()
            engine.join()


def events(text: str) -> list[str]:
    """The data of a stream's events; comments are left out."""
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
