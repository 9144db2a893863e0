"""Record vLLM's CUDA graphs again with copies of sites in them, while a capture is open.

vLLM records a graph for each batch size when it starts. A capture sets those graphs aside, lets the
model runner record new ones by its own method while hooks are installed, and puts the first ones
back when it closes: what is captured is what was served, and between captures nothing is ours.
Names are those of vLLM 0.26: both model runners, compilation/cuda_graph.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument

if TYPE_CHECKING:
    from contextlib import ExitStack

    from degarble.harness.capture.engine.graphs import GraphCopies

# vLLM's options that have it record graphs of modules that are called, not compiled.
GRAPH_OPTIONS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
OPTION_LINE = """--compilation-config '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'"""
_RECORDABLE = frozenset({"FULL", "FULL_DECODE_ONLY"})
_INSTEAD = f"Start it with {OPTION_LINE}, or with --enforce-eager."


def records_graphs(config: Any) -> bool:
    """Return whether an engine replays graphs; raise where copies cannot be recorded into them."""
    if config.model_config.enforce_eager:
        return False
    compilation = config.compilation_config
    mode, graphs = (_name(each) for each in (compilation.mode, compilation.cudagraph_mode))
    if mode != "NONE":
        raise InvalidArgument(
            "vLLM's compilation mode", mode,
            "NONE: compiled code calls no module, so no copy can be placed in it", _INSTEAD,
        )  # fmt: skip
    if graphs == "NONE":
        return False
    if graphs not in _RECORDABLE:
        raise InvalidArgument(
            "vLLM's cudagraph_mode", graphs,
            "FULL_DECODE_ONLY or FULL: one graph holds a whole step", _INSTEAD,
        )  # fmt: skip
    if config.parallel_config.use_ubatching:
        raise InvalidArgument(
            "vLLM", "batches in halves (--enable-dbo)", "one batch a graph",
            "Start it without --enable-dbo.",
        )  # fmt: skip
    return True


def _name(mode: Any) -> str:
    return str(getattr(mode, "name", mode))


def record_again(runner: Any, copies: GraphCopies, stack: ExitStack, graph_class: Any) -> None:
    """Have a model runner record its graphs anew, with copies; `stack` puts the first ones back."""
    _set_aside(runner, stack)
    stack.callback(copies.close)
    # A drafter's graphs are its own, and stay as they are.
    drafter = vars(runner).get("speculator")
    if drafter is not None:
        runner.speculator = None
    try:
        with copies.recording(graph_class):
            runner.capture_model()
    except RuntimeError as error:  # of CUDA: the graphs that were there serve on
        raise InvalidArgument(
            "vLLM's graphs", str(error)[:200], "graphs that can be recorded a second time", _INSTEAD
        ) from error
    finally:
        if drafter is not None:
            runner.speculator = drafter
    if not copies.count:
        raise InvalidArgument(
            "vLLM's model runner", type(runner).__name__,
            "one that records graphs while hooks are installed", _INSTEAD,
        )  # fmt: skip


def _set_aside(runner: Any, stack: ExitStack) -> None:
    """Empty a runner's table of recorded graphs. The graphs stay alive, and so does their pool."""
    places = (
        (vars(runner).get("cudagraph_manager"), "graphs"),  # the newer runner
        (vars(runner).get("model"), "concrete_cudagraph_entries"),  # the older one's wrapper
    )
    holder, name = next(
        ((each, name) for each, name in places if name in getattr(each, "__dict__", ())),
        (None, ""),
    )
    if holder is None or vars(runner).get("encoder_cudagraph_manager") is not None:
        raise InvalidArgument(
            "vLLM's model runner", type(runner).__name__,
            "the graphs of vLLM 0.26's runners, and none of an encoder", _INSTEAD,
        )  # fmt: skip
    stack.callback(setattr, holder, name, getattr(holder, name))
    setattr(holder, name, {})
