"""Execute a part, or all, of the sm_100a NVFP4 GEMM: on a B200, or by the host model.

sm100_first_minute uses both. Inputs and outputs are alike for one thread block and for a pair: in a
pair the stages and sums of the second block follow those of the first.
"""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol
from unittest import mock

import numpy as np
import torch

from degarble.harness.base.errors import MissingDevice
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import tensor_memory
from degarble.kernels.runtime import kernel as descriptor
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.targets import SM100A, target_of_device
from degarble.suites.kernels import gemm_checks as checks
from degarble.suites.kernels import sm100_checks as blackwell
from degarble.suites.kernels import sm100_model as model

if TYPE_CHECKING:
    from torch import Tensor


class Executor(Protocol):
    """Executor of a part, or of all, of a GEMM."""

    def load(self, case: checks.Case, given: Any) -> Tensor:
        """Return the stages as they lie in shared memory: [steps, bytes]."""

    def multiply(self, case: checks.Case, image: Tensor) -> Tensor:
        """Return the float32 sums of stages that lie so: [rows of a tile, columns]."""

    def store(self, case: checks.Case, sums: Tensor) -> Tensor:
        """Return D of sums: [M, N]."""

    def answer(self, case: checks.Case, given: Any, *, alone: bool = False) -> Tensor:
        """Return D of operands: [M, N]; one cluster walks over all tiles where it is alone."""


class HostModel:
    """Host model in place of a GPU: it shows that the steps tell faults apart, and no more."""

    def load(self, case: checks.Case, given: Any) -> Tensor:
        """See Executor."""
        blocks, steps = self._blocks(case, given), model.steps_of(case.problem, case.form)
        size = facts.expected_bytes(case.form)
        seen = torch.zeros(steps, size, dtype=torch.uint8)
        roles = [block.load([(rank, 0)], steps) for rank, block in enumerate(blocks)]
        blocks[0].run([*roles, blocks[0].watch(seen.numpy(), steps)])
        return seen

    def multiply(self, case: checks.Case, image: Tensor) -> Tensor:
        """See Executor."""
        form, steps = case.form, len(image)
        blocks = self._blocks(case, None)
        blocks[0].fill(image.numpy())
        inner = case.problem.inner // facts.NVFP4.block
        blocks[0].run([blocks[0].multiply([(0, 0)], steps, inner)])
        sums = []
        for block in blocks:
            _, columns = block.memories.columns(block.base, form.tactic.columns)
            sums.append(block.memories.tensor[:, columns].copy().view(np.float32))
        return torch.from_numpy(np.concatenate(sums))

    def store(self, case: checks.Case, sums: Tensor) -> Tensor:
        """See Executor."""
        p = case.problem
        out = torch.full((p.rows, p.columns), torch.nan, dtype=torch.bfloat16)
        blocks, roles = self._blocks(case, None, out), []
        parts = sums.split(tensor_memory.LANES)
        for rank, (block, part) in enumerate(zip(blocks, parts, strict=True)):
            _, columns = block.memories.columns(block.base, case.form.tactic.columns)
            block.memories.tensor[:, columns] = part.numpy().view(np.uint32)
            block.sums_full[0].arrive()
            roles.append(block.store([(rank, 0)], torch.ones(1)))
        blocks[0].run(roles)
        return out

    def answer(self, case: checks.Case, given: Any, *, alone: bool = False) -> Tensor:
        """See Executor."""
        processors = blackwell.cluster_size(case.form) * (1 if alone else 2)
        return blackwell.on_model(case, given, processors=processors)[0]

    def _blocks(
        self, case: checks.Case, given: Any, out: Tensor | None = None
    ) -> tuple[model.Block, ...]:
        p = case.problem
        out = torch.zeros(p.rows, p.columns, dtype=torch.bfloat16) if out is None else out
        given = given or checks.nvfp4_sides(case, "cpu").given
        return blackwell.blocks_of(case.form, blackwell.matrices(case.form, given, out))


class Gpu:
    """A B200: kernels/sm100_probe_*.py for the parts, the GEMM itself for the rest."""

    def __init__(self) -> None:
        target = target_of_device()
        if target is not SM100A:
            raise MissingDevice("target", target.name, SM100A.name, "Run it on a B200.")
        self.settings = CompileSettings()

    def load(self, case: checks.Case, given: Any) -> Tensor:
        """See Executor."""
        image = self._part("load", case, given=given)[1]
        return image[: model.steps_of(case.problem, case.form)].cpu()

    def multiply(self, case: checks.Case, image: Tensor) -> Tensor:
        """See Executor."""
        sums: Tensor = self._part("multiply", case, image=image)[2].cpu()
        return sums

    def store(self, case: checks.Case, sums: Tensor) -> Tensor:
        """See Executor."""
        out: Tensor = self._part("store", case, sums=sums)[0].cpu()
        return out

    def answer(self, case: checks.Case, given: Any, *, alone: bool = False) -> Tensor:
        """See Executor."""
        kernels = import_module("degarble.kernels.gemm.sm100_gemm_nvfp4")
        moved = [type(each)(*(t.cuda() for t in each)) for each in given]
        p = case.problem
        out = torch.full((p.rows, p.columns), torch.nan, dtype=torch.bfloat16, device="cuda")
        with one_cluster(case.form) if alone else nullcontext():
            given = checks.named(p.operands, moved)
            kernels.KERNEL.run(p, self.settings, case.form, **given, out=out)
        return out.cpu()

    def _part(
        self, part: str, case: checks.Case, *, given: Any = None, **held: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run a part; return D, image and sums."""
        form, p = case.form, case.problem
        probe = import_module("degarble.suites.support.probes.sm100_probe_gemm")
        parts = probe if form.tactic.together == 1 else pair_parts()
        a, b = given or checks.nvfp4_sides(case, "cpu").given
        out = torch.full((p.rows, p.columns), torch.nan, dtype=torch.bfloat16, device="cuda")
        shape = (facts.MOST_STAGES, facts.expected_bytes(form))
        image = torch.zeros(shape, dtype=torch.uint8, device="cuda")
        rows = form.tactic.together * tensor_memory.LANES
        sums = torch.zeros(rows, form.tactic.columns, device="cuda")
        if "image" in held:
            image[: len(held["image"])] = held["image"].cuda()
        if "sums" in held:
            sums.copy_(held["sums"])
        moved = tuple(each.cuda() for each in (a.codes, a.scales, b.codes, b.scales))
        kernel = parts.compile_part(part, form, self.settings)
        probe.launch(kernel, form, p, (*moved, out, image, sums))
        torch.cuda.synchronize()
        return out, image, sums


def one_cluster(form: facts.GemmForm) -> Any:
    """Let launches know of no more multiprocessors than one cluster takes."""
    size = blackwell.cluster_size(form)
    return mock.patch.object(descriptor, "processors_of", return_value=size)


def pair_parts() -> Any:
    """Return the parts of two thread blocks together."""
    return import_module("degarble.suites.support.probes.sm100_probe_pair")
