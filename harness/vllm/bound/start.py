"""One start of vLLM with the plugin: its options, its loader proof, and the kernel of each module.

The quantisation config makes it when the first layer needs a method. It logs what runs at the end
of loading. The checkpoint must be a local folder, since files elsewhere cannot be proven.
"""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.vllm import log_messages, parts
from degarble.harness.vllm.bound.upstream import (
    VERSION,
    current_platform,
    get_tensor_model_parallel_rank,
    init_logger,
)
from degarble.harness.vllm.parts import ACTIVATIONS, THEIRS, PluginOptions, read_options
from degarble.harness.vllm.proof import StartProof, prove_start

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = init_logger("vllm.degarble")
_THEIR_GRAPHS = "ALWAYS"  # at most: builders of 0.26 declare less, and vLLM asks each of them
_WAY_OUT = "Start without it, or without the plugin."


class Start:
    """State of the plugin in one process of vLLM."""

    def __init__(
        self, options: PluginOptions, proven: StartProof, target: str, instance: str
    ) -> None:
        self.options = options
        self.proven = proven
        self.target = target
        self.instance = instance
        self.running: list[parts.RunningPart] = []
        self.kernels: list[parts.PartKernel | None] = []

    @classmethod
    def from_config(cls, config: Any) -> Start:
        """Begin with vLLM's config: refuse what is not served, then prove the checkpoint."""
        require_served(config)
        folder = Path(config.model_config.model)
        if not folder.is_dir():
            raise InvalidArgument(
                "model", config.model_config.model, "a local folder with a checkpoint",
                "Fetch it first: what is not there cannot be proven.",
            )  # fmt: skip
        capability = current_platform.get_device_capability()
        if capability is None:
            raise InvalidArgument(
                "device", str(current_platform.device_type), "a CUDA device", "Start on a GPU."
            )
        target = parts.target_of((capability.major, capability.minor))
        options = read_options(config.additional_config)
        return cls(options, prove_start(folder, ranks_of(config)), target, config.instance_id)

    def kernel(
        self, module: str, part: str, form: str, tactic: str = ""
    ) -> parts.PartKernel | None:
        """Choose what runs a part of a module, and note it; None: vLLM's own."""
        kernel = parts.kernel_of(part, form, self.target, self.options)
        self.kernels.append(kernel)
        self.running.append(
            parts.theirs(module, part, form)
            if kernel is None
            else parts.ours(module, part, form, kernel, tactic)
        )
        return kernel

    def other_class(self, module: str, part: str, one: object) -> None:
        """Note that a part stays vLLM's because its class is not the one on record."""
        why = f"{type(one).__name__} is not on record"
        self.running.append(parts.RunningPart(module, part, "", THEIRS, "its own", why))

    def linear_format(self, stored: str) -> str:
        """Name the format of a linear as it is multiplied."""
        bf16 = self.options.nvfp4_activations == ACTIVATIONS[1]
        return parts.NVFP4_A16 if stored == parts.NVFP4 and bf16 else stored

    def banner(self) -> log_messages.Banner:
        """Log which code runs which checkpoint."""
        try:
            commit = log_messages.commit_of(version("degarble"))
        except PackageNotFoundError:
            commit = log_messages.NO_COMMIT
        ours = {kernel.module for kernel in self.kernels if kernel is not None}
        return log_messages.Banner(
            manifest=self.proven.manifest,
            recipe=self.proven.recipe,
            target=self.target,
            kernels=tuple(sorted(ours)),
            graphs=self.graphs(),
            proof=self.proven.summary,
            known=tuple(known_failures(self.options.ledger)),
            commit=commit,
            vllm=VERSION,
        )

    def graphs(self) -> str:
        """Return the level of CUDA graphs of all that runs."""
        return parts.graph_level(self.kernels, _THEIR_GRAPHS)

    def report(self) -> None:
        """Write the log's lines and the rank's record."""
        rank = get_tensor_model_parallel_rank()
        running = [*self.running, *parts.unhooked("model")]
        banner = self.banner()
        if rank == 0:
            for line in (*banner.lines(), *log_messages.lines(running)):
                _log.info("%s", line)
        log_messages.leave(
            log_messages.folder_of(self.instance, self.options.told), rank, banner, running
        )


def ranks_of(config: Any) -> tuple[int, int, int]:
    """Return (tp, ep, pp) as the loader proof counts them."""
    parallel = config.parallel_config
    tp = parallel.tensor_parallel_size
    ep = tp if parallel.enable_expert_parallel else 1
    return tp, ep, parallel.pipeline_parallel_size


def require_served(config: Any) -> None:
    """Refuse, by name, what the plugin does not serve."""
    parallel = config.parallel_config
    refused = {
        "speculative decoding": config.speculative_config is not None,
        "LoRA": config.lora_config is not None,
        "expert load balancing": parallel.enable_eplb,
        "data parallelism": parallel.data_parallel_size > 1,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "online quantisation": config.model_config.quantization_config is not None,
        "a dummy load format": config.load_config.load_format == "dummy",
    }
    for name, asked in refused.items():
        if asked:
            raise InvalidArgument(name, "asked for", "what degarble's plugin serves", _WAY_OUT)
    if str(config.model_config.dtype) != "torch.bfloat16":
        raise InvalidArgument(
            "dtype", str(config.model_config.dtype), "bfloat16", "Start with --dtype bfloat16."
        )


def known_failures(ledger: str | None) -> Iterator[str]:
    """Yield the entries of a ledger of known failures, as a night keeps it."""
    if ledger is None:
        return
    from degarble.harness.history.ledger import read_ledger  # noqa: PLC0415  only where asked

    for entry in read_ledger(Path(ledger), datetime.now(UTC).date()).entries:
        yield f"{entry.component} {entry.verdict} until {entry.until}: {entry.why} ({entry.issue})"
