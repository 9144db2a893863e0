"""Stand in for the program `vllm`: it serves a V4 in BF16 with vLLM's names, and can be captured.

`python -m degarble.suites.vllm.vllm_served serve CKPT --port N --middleware M ...` answers health,
models and completions. The middleware is the one that the line names. PLANT names faults of
vllm_stand_in to plant.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from torch import distributed

from degarble.harness.chat.tokenizer import Tokenizer
from degarble.harness.inference.model import open_model
from degarble.harness.model.sharding import plan
from degarble.harness.vllm import capture as plugin
from degarble.references.sharded import ShardedModel, Teams
from degarble.suites.vllm.test_vllm_switch import Client, Worker
from degarble.suites.vllm.vllm_stand_in import StandIn

if TYPE_CHECKING:
    from starlette.requests import Request

PLANT = "DEGARBLE_STAND_IN_PLANT"


def application(worker: Worker, tokenizer: Tokenizer, key: str | None, switch: str) -> Starlette:
    """The server around a worker; `key` guards vLLM's own paths."""
    turn = asyncio.Lock()

    async def models(request: Request) -> JSONResponse:
        del request
        return JSONResponse({"data": [{"id": "small"}]})

    async def health(request: Request) -> JSONResponse:
        del request
        return JSONResponse({})

    async def completions(request: Request) -> JSONResponse:
        if key is not None and request.headers.get("authorization") != f"Bearer {key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        raw: dict[str, Any] = await request.json()
        assert raw["model"] == "small"
        async with turn:
            number = len(worker.model_runner.sequences)
            ids = tokenizer.encode(raw["prompt"])
            worker.serve({f"cmpl-{number}-0": ids}, raw["max_tokens"])
        return JSONResponse({"choices": [{"text": "."}]})

    routes = [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/completions", completions, methods=["POST"]),
    ]
    app = Starlette(routes=routes)
    module, _, name = switch.rpartition(".")
    app.add_middleware(getattr(importlib.import_module(module), name))
    app.state.engine_client = Client(worker)
    return app


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["serve"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--api-key")
    parser.add_argument("--middleware", required=True)
    parser.add_argument("--worker-extension-cls", required=True, choices=[plugin.EXTENSION])
    parser.add_argument("--enforce-eager", action="store_true")
    given = parser.parse_args()
    checkpoint = given.model.resolve()
    # The stand-in computes as the official source.
    plugin.stated_conventions = lambda method: {}  # noqa: ARG005  called by position
    planted = [name for name in os.environ.get(PLANT, "").split(",") if name]
    with tempfile.TemporaryDirectory() as meeting, open_model(checkpoint) as model:
        distributed.init_process_group(
            "gloo", init_method=f"file://{meeting}/store", rank=0, world_size=1
        )
        sharding_plan = plan(model.config)
        teams = Teams.from_plan(sharding_plan)
        assert teams is not None
        bound = model.logits_model.bound
        sharded = ShardedModel(sharding_plan, teams, bound.numerics, bound.weights)
        worker = Worker(StandIn(sharded, 0, planted), eager=given.enforce_eager)
        vocabulary = model.config.vocab_size
        tokenizer = Tokenizer.of_checkpoint(checkpoint, model.checkpoint.config, vocabulary)
        app = application(worker, tokenizer, given.api_key, given.middleware)
        uvicorn.run(app, host="127.0.0.1", port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
