"""What the examples of the documents need around them; which of them cannot run here, and why."""

from __future__ import annotations

import re

# Command lines that no suite on a bare CPU machine can play, and what shows them instead.
NOT_RUN = {
    r"make ": "sets up, or runs, this very suite; .ci/run does",
    r"docker |.*docker compose": "needs a container runtime; suites/house reads the files",
    r".*\bcurl |.*localhost|.*http://127|degarble probe https://HOST": (
        "needs a running server; suites/probe and suites/serve start one"
    ),
    r"degarble serve |.*degarble serve ": "runs until it is stopped; suites/serve starts it",
    r"(VLLM_PLUGINS=degarble|DEGARBLE_CAPTURES=DIR) vllm |.*--engine \"vllm": (
        "needs vLLM; make vllm-test holds the plugin against it"
    ),
    r"(sh unpack|pip install degarble\[gpu\])": "installs into another environment",
    r"pytest -m gpu|pytest suites/nights|torchrun |.*--device cuda": "needs a GPU",
    r".*(--cluster ray|--workers 8)": "needs several machines or cores; suites/engine runs both",
    r".*--vllm-source": "needs vLLM's source; suites/checkpoint/audit/loader reads a part of it",
    r".*--loader vllm:tp=8,ep=8": (
        "needs a model that eight ranks can share; suites/checkpoint/audit/loader has one"
    ),
    r".*--backend transformers": (
        "needs a model that transformers builds; suites/commands/test_traced_families.py has some"
    ),
    r"degarble check DIR/": "needs the capture that a server wrote",
    r"degarble (faults adopt|check OTHER)": (
        "needs a run with a fault that no catalogue has; suites/cli/commands plants one"
    ),
    r"degarble history trends": "needs a model of 24 layers; suites/history",
    r"degarble history compare|degarble bisect": "needs two commits of a kernel; suites/history",
    r"python -m degarble\.harness\.commands\.tiny_release": "trains a model for hours",
    r"degarble generate CKPT --interactive": "needs a terminal; suites/generate types into one",
}
PARSED_ONLY = ("docs/cli.md",)  # written from the commands themselves: synopses, no examples

# Pages on which CKPT is what is to be quantised.
UNQUANTISED = ("docs/generate.md", "docs/families.md")

# Lines of Python that come before the blocks of a page, which are parts of a program.
GIVEN = {
    "docs/api.md": """
import torch
x, w = torch.ones(2, 16), torch.ones(4, 16)
my_kernel = lambda x, w: x @ w.T
""",
    "docs/capture-engine.md": """
from degarble.harness.capture.engine.maps import (
    ComponentMap, argument_of, partial_share, result_of,
)
""",
    "docs/capture.md": """
import torch
from degarble import Place, capture
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.writer import CaptureWriter
from degarble.harness.capture.modules import recording
from degarble.harness.capture.recorder import Recorder

places = [Place("layers.3.attn.wq_a", ("0",))]
capture(torch.nn.Sequential(torch.nn.Linear(8, 8)), torch.ones(2, 8), folder="a", places=places)
folder, facts, tokens = Path("a"), {}, torch.arange(3)
if "recording(" in BLOCK:
    folder = Path("b")
    linear = lambda: torch.nn.Linear(8, 8)
    layer = torch.nn.ModuleDict({
        "self_attn": torch.nn.ModuleDict({"q_a_proj": linear()}),
        "mlp": torch.nn.ModuleDict({"gate_proj": linear(), "up_proj": linear()}),
    })
    inner = torch.nn.ModuleDict({
        "embed_tokens": torch.nn.Embedding(8, 8), "layers": torch.nn.ModuleList([layer])
    })
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = inner
        def forward(self, tokens):
            x = layer["self_attn"]["q_a_proj"](inner["embed_tokens"](tokens))
            return layer["mlp"]["gate_proj"](x) + layer["mlp"]["up_proj"](x)
    model = Model()
""",
    "docs/checking.md": """
from degarble.suites.engine.localise_cases import V4, bound, plain, recipe_named
import torch
recipe = recipe_named("nvfp4-full", V4)
candidate, reference = bound(V4, "nvfp4-full"), plain(V4)
twin = bound(V4, "nvfp4-full", torch.float64)
""",
    "docs/faults.md": """
from degarble.harness.engine.faults import codes
globals().update(vars(codes))
""",
}
# Blocks that need what this machine lacks.
NOT_EXECUTED = {r"import flashinfer": "needs FlashInfer and a Blackwell GPU"}


def reason(table: dict[str, str], text: str) -> str:
    """Return why an example is not run; empty where it is."""
    return next((why for pattern, why in table.items() if re.match(pattern, text)), "")
