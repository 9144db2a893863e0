"""Probe a live `vllm serve` on a tiny model: `python -m degarble.suites.vllm.probe_server OUT`.

Needs a GPU and vLLM in this environment. It writes a tiny Llama, starts the server with CUDA graphs
and its prefix cache on, probes it, and ends it. A healthy server has to AGREE. `--vllm PATH` names
the program, further words after `--` go to it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from degarble.harness.cli.main import main as degarble

_READY = 600.0  # seconds that a server may take to start


def write_tiny(folder: Path, tokenizer: Path) -> Path:
    """Write a tiny random Llama with a tokenizer of text."""
    import torch  # noqa: PLC0415  only here
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  only here

    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tokenizer / name).exists():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(tokenizer / name, folder / name)
    vocabulary = len(json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
        initializer_range=0.08,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server answers."""
    begin = time.monotonic()
    while time.monotonic() - begin < _READY and process.poll() is None:
        try:
            with urlopen(f"{url}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(2)
    raise RuntimeError(f"the server did not start within {_READY:g} s")


def main() -> int:
    """Serve, probe, end; give the probe's status."""
    parser = argparse.ArgumentParser(prog="python -m degarble.suites.vllm.probe_server")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, help="a checkpoint in place of the tiny one")
    parser.add_argument("--tokenizer", type=Path, help="a folder with tokenizer.json")
    parser.add_argument("--prompts", type=Path, help="one a line, in the tokenizer's words")
    parser.add_argument("--vllm", default="vllm")
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    options, engine = parser.parse_args(given[:cut]), given[cut + 1 :]
    if options.model is None and options.tokenizer is None:
        parser.error("--model CKPT, or --tokenizer FOLDER for a tiny one")
    model = options.model or write_tiny(options.out / "tiny", options.tokenizer)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [options.vllm, "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    line += ["--max-logprobs", "20", *engine]
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "server.log").open("wb") as log:
        process = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            until_ready(url, process)
            words = ["probe", url, "--report", str(options.out), f"--json={options.out}/probe.json"]
            if options.prompts is not None:
                words += ["--prompts", str(options.prompts)]
            return degarble(words)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


if __name__ == "__main__":
    sys.exit(main())
