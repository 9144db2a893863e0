"""A newcomer's tasks, played in a terminal with the documents' own commands and nothing else.

Every line that is typed is looked up in the page that tells a user to type it. What the suite adds
is the user's own situation: a damaged file, a kernel with a fault, a free port. `vllm` is the
stand-in of suites/vllm, because no vLLM computes a V4 without a GPU; a notebook's cells are run in
one process without Jupyter.
"""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from degarble.harness.inference.processes import free_port
from degarble.suites.documents.blocks import blocks
from degarble.suites.documents.terminal import UserTerminal
from degarble.suites.house.repository import ROOT
from degarble.suites.vllm.vllm_served import PLANT

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.suites.documents.terminal import Typed

MOST = 300.0  # seconds of processor time until a verdict
SMALL = "references/tiny/v1/v4"


def line_of(page: str, line: str) -> str:
    """Return a command line that stands in a page; fail where it does not."""
    text = (ROOT / page).read_text(encoding="utf-8")
    typed = {each for block in blocks() if block.page == page for each in block.commands()}
    typed |= set(re.findall(r"`(degarble [^`]+)`", text))
    assert line in typed, f"{page} does not say: {line}"
    return line


def python_of(page: str, words: str) -> str:
    """Return the Python block of a page that holds these words."""
    (found,) = [
        block.text
        for block in blocks()
        if block.page == page and block.language == "python" and words in block.text
    ]
    return found


def test_a_line_that_no_page_has_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"README.md does not say: degarble doctor NOTHING"):
        line_of("README.md", "degarble doctor NOTHING")


@pytest.mark.skipif(sys.platform != "linux", reason="reads a terminal as Linux closes it")
def test_a_terminal_shows_what_a_program_prints(tmp_path: Path) -> None:
    typed = UserTerminal(tmp_path).type("tput setaf 1; python -c 'import sys; sys.exit(3)'; exit 3")
    assert (typed.status, typed.screen) == (3, "")


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> UserTerminal:
    return UserTerminal(tmp_path_factory.mktemp("user"))


@pytest.fixture(scope="module")
def quantised(terminal: UserTerminal) -> Path:
    """The small model, quantised as docs/families.md says, under the names of the documents."""
    folder = terminal.folder
    (folder / "BF16_CKPT").symlink_to(folder / "clone" / SMALL)
    (folder / "SOURCE").symlink_to(folder / "clone" / SMALL)
    (folder / "PROMPTS").write_text("anna paints blue\nthe old fox sees a tree\n")
    for line in (
        "degarble capture BF16_CKPT --amax-only --out RANGES --prompts PROMPTS",
        "degarble quantise BF16_CKPT OUT --recipe nvfp4-full --calibration RANGES",
    ):
        done = terminal.type(line_of("docs/families.md", line))
        assert done.status == 0, done.screen
    shutil.copytree(folder / "OUT", folder / "CKPT")
    return folder / "CKPT"


def swap_nibbles(checkpoint: Path) -> str:
    """Damage one matrix as a wrong packer does, and return its name."""
    (file,) = checkpoint.glob("*.safetensors")
    tensors = load_file(file)
    with safe_open(file, "pt") as opened:
        facts = opened.metadata()
    name = next(key for key in tensors if key.endswith("experts.1.w2.weight"))
    tensors[name] = (tensors[name].view(dtype=tensors[name].dtype) << 4) | (tensors[name] >> 4)
    save_file(tensors, file, facts)
    (checkpoint / "manifest.json").unlink()  # a packer of somebody else's leaves none
    return name


def require(done: Typed, status: int, *words: str) -> None:
    """Hold what a line answered: status, words, and processor time, which `pytest -rP` shows."""
    sys.stdout.write(f"{done.seconds:6.1f} s  {done.line}\n")
    assert done.status == status, done.screen
    assert [word for word in words if word not in done.screen] == [], done.screen
    assert "Traceback" not in done.screen
    assert done.seconds <= MOST, f"{done.line}: {done.seconds:.0f} s"


@pytest.mark.slow
def test_i_have_a_checkpoint(terminal: UserTerminal, quantised: Path) -> None:
    healthy = terminal.type(line_of("README.md", "degarble doctor CKPT"))
    require(healthy, 0, "✓ NO ERRORS FOUND", "No kernel was tested", "Next: degarble doctor CKPT")
    damaged = swap_nibbles(quantised).removesuffix(".weight")
    found = terminal.type(line_of("README.md", "degarble doctor CKPT --reference SOURCE"))
    require(found, 1, "≠ DIFFERS", damaged, "high_even", "Open the report: degarble-doctor/")
    assert "Next, once that is mended: degarble doctor CKPT --reference SOURCE" in found.screen


@pytest.mark.slow
def test_i_have_a_run_of_my_own(terminal: UserTerminal, quantised: Path) -> None:
    del quantised
    line = 'degarble capture CKPT --out PLANTED --prompt "anna paints blue" --fault '
    line += "M10.nibble_order@layers.1.ffn.experts.w2"
    require(terminal.type(line_of("docs/faults.md", line)), 0, "Wrote PLANTED")
    found = terminal.type(line_of("docs/faults.md", "degarble check PLANTED"))
    require(found, 1, "Layer 1, ffn.experts.w2: The two nibbles of every byte are swapped.")


@pytest.mark.slow
def test_i_have_a_kernel(terminal: UserTerminal) -> None:
    example = python_of("README.md", 'print(judge("gemm"')
    (terminal.folder / "kernel.py").write_text(example)
    require(
        terminal.type("python kernel.py"),
        0,
        "AGREES: gemm agrees with its twin",
    )
    wrong = example.replace("print(", "out[:32] *= 2\nprint(")
    (terminal.folder / "wrong.py").write_text(wrong)
    require(terminal.type("python wrong.py"), 0, "DIFFERS: gemm", "in rows 0 to 31")
    (terminal.folder / "save.py").write_text(python_of("docs/doctor.md", "save_file("))
    require(terminal.type("python save.py"), 0)
    (terminal.folder / "KERNEL.safetensors").symlink_to("kernel.safetensors")
    line = line_of("docs/doctor.md", "degarble doctor KERNEL.safetensors")
    require(terminal.type(line), 0, "✓ AGREES", "gemm agrees with its twin")


@pytest.mark.slow
def test_i_have_a_torch_model_of_my_own(terminal: UserTerminal) -> None:
    (terminal.folder / "model.py").write_text(python_of("docs/api.md", "api.Twin("))
    require(terminal.type("python model.py"), 0, "DIFFERS: 1 of 2", "M43.whole")


@pytest.mark.slow
def test_i_have_a_notebook(terminal: UserTerminal) -> None:
    line = "python -m degarble.suites.documents.notebook clone/docs/notebook.ipynb"
    require(terminal.type(line), 0, "AGREES: gemm", "M10.nibble_order", "'M02.applied_twice')]")


@pytest.mark.slow
def test_i_have_a_vllm_command(tmp_path: Path) -> None:
    terminal = UserTerminal(tmp_path)
    terminal.program("vllm", f'"{sys.executable}" -m degarble.suites.vllm.vllm_served')
    (tmp_path / "CKPT").symlink_to(tmp_path / "clone" / SMALL)
    line = line_of("README.md", 'degarble doctor CKPT --engine "vllm serve CKPT --port 8000"')
    port = str(free_port())
    line = line.replace("8000", port)
    words = ("✓ AGREES", "Next, with the server started as you run it: degarble probe ")
    require(terminal.type(line), 0, *words)
    terminal.variables[PLANT] = "gate_up_swapped"
    found = terminal.type(line)
    require(found, 1, "≠ DIFFERS", "Layer 1, ffn.shared.w13", "Next: python degarble-doctor/")


@pytest.mark.slow
def test_i_have_a_server(terminal: UserTerminal) -> None:
    port = free_port()
    serve = line_of("docs/serving.md", f"degarble serve {SMALL}").replace(SMALL, f"clone/{SMALL}")
    ask = line_of("README.md", "degarble doctor http://localhost:8000")
    with terminal.serve(f"{serve} --port {port}", port) as server:
        answer = terminal.type(ask.replace("8000", str(port)))
    together = replace(answer, seconds=answer.seconds + server.seconds)
    require(together, 0, "✓ AGREES", "From outside no component can be named")
    assert "Traceback" not in server.screen
