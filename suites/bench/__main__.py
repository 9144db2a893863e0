"""`python -m degarble.suites.bench NAME ...`: measure, print, or rewrite docs/figures.md.

A section of the page lies between two marker lines and is replaced as a whole; text outside of the
markers is written by hand and stays. The page is replaced in one step after each section, as it is
then: others may have written while this one measured.

Exit status 0 when every target was met, 1 otherwise, 2 where nothing can be measured.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import sys
from contextlib import ExitStack
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import (
    EXIT_AGREES,
    EXIT_DIFFERS,
    DegarbleError,
    MissingDevice,
    UnknownName,
)
from degarble.suites.bench import runner
from degarble.suites.bench.machine import machine, pin
from degarble.suites.bench.runner import Bench, Section, document, rendered

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Names of benches by module, which is imported when one of them runs.
MODULES: Mapping[str, tuple[str, ...]] = {
    "tensors": ("formats", "compare"),
    "checkpoints": ("checkpoint-quantise", "checkpoint-large", "full-size", "audit"),
    "runs": ("capture", "check", "check-width"),
    "models": ("references", "streaming"),
    "small_models": ("tiny", "decoder-text"),
    "architectures": ("derived-budgets",),
    "detection": ("peers", "museum", "history"),
    "rows": ("quantise", "rows"),
    "cache": ("cache-rows",),
    "gemm": ("gemm", "grouped", "w4a16", "sm100-gemm"),
    "moe": ("moe", "moe-by-row"),
    "indexer": ("indexer",),
    "attention": ("attention", "latent-attention", "attention-splits"),
    "decoder": ("decoder", "decoder-v32", "decoder-products"),
    "quality_linears": ("cosines",),
    "quality_attention": ("attention-quality", "nvfp4-products"),
    "night": ("night",),
}
HOME = "degarble.suites.bench"
FIGURES = Path(__file__).resolve().parents[2] / "docs" / "figures.md"
HEADING = """# Figures

Measured by `make figures`, which rewrites the sections below; nothing between the markers is typed
by hand. A figure counts for the machine that stands beside it. Arms run side by side in one
process, in turns. Times are medians, ratios are medians of the ratios within a round; quartiles
stand in brackets.
"""


def names() -> list[str]:
    return [name for several in MODULES.values() for name in several]


def bench_named(name: str) -> Bench:
    """Return a bench; an unknown name is refused."""
    if name not in names():
        raise UnknownName.among("bench", name, names())
    module = next(module for module, several in MODULES.items() if name in several)
    bench: Bench = import_module(f"{HOME}.{module}").BENCHES[name]
    return bench


def on_page() -> list[str]:
    return [name for name in names() if bench_named(name).page]


def parser_of(benches: Sequence[Bench]) -> argparse.ArgumentParser:
    """Return the options of every run, and those of these benches."""
    parser = argparse.ArgumentParser(prog=f"python -m {HOME}", description="Measure benches.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names()))
    parser.add_argument("--list", action="store_true", help="say what each bench measures")
    parser.add_argument("--only", nargs="+", action="extend", default=[], metavar="WORD",
                        help="tables, arms or sections with a WORD in their name")  # fmt: skip
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--size", type=int, default=7168, help="rows and columns of matrices")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-peers", dest="peers", action="store_false",
                        help="leave outside packages out")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="a document a bench, one a line")
    parser.add_argument("--page", nargs="?", type=Path, const=FIGURES, help="rewrite its sections")
    for name, default in {k: v for bench in benches for k, v in bench.options.items()}.items():
        flag = f"--{name}"
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", default=default)
        elif isinstance(default, tuple) and isinstance(default[0], int):
            parser.add_argument(flag, type=int, nargs="+", default=default)
        elif isinstance(default, tuple):  # the first of the choices is the default
            parser.add_argument(flag, choices=default, default=default[0])
        else:
            parser.add_argument(flag, type=type(default), default=default)
    return parser


def options_of(name: str, **changed: Any) -> Any:
    """Return the options of a bench as its defaults say, or changed."""
    bench = bench_named(name)
    options = parser_of([bench]).parse_args([name])
    vars(options).update({"rounds": bench.rounds, **changed})
    return options


def device_for(bench: Bench, options: Any) -> str:
    """Return the name of the GPU that a bench needs, or refuse."""
    wanted = bench.device(options)
    if not wanted:
        return ""
    from degarble.kernels.runtime.targets import target_of_device  # noqa: PLC0415  imports torch

    found = target_of_device().name
    if wanted not in ("gpu", found):
        raise MissingDevice("target", found, wanted, bench.remedy)
    return found


def measure(name: str, options: Any, say: Any = lambda _text: None) -> tuple[Section, str]:
    """Run one bench; return its section and the device."""
    bench = bench_named(name)
    device = device_for(bench, options)
    with ExitStack() as stack:
        if device:
            import torch  # noqa: PLC0415  a bench of cold starts must not have it

            stack.enter_context(torch.inference_mode())
        return runner.run(name, bench, options, say), device


def origin_of(name: str, options: Any, device: str, arguments: Sequence[str]) -> list[str]:
    """Say date, command and machine."""
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    command = " ".join([f"python -m {HOME}", *arguments])
    if options.page:
        told = ("--page", str(options.page))
        rest = " ".join(argument for argument in arguments if argument not in told)
        command = f'make figures ARGS="{rest}"' if rest else "make figures"
    lines = [f"{today}, `{command}`", machine(bench_named(name).packages)]
    if device:
        import torch  # noqa: PLC0415  as above

        return [*lines, f"{torch.cuda.get_device_name()} ({device})"]
    return [
        *lines, f"pinned to {options.threads} cores, load average before {os.getloadavg()[0]:.2f}",
    ]  # fmt: skip


def replaced(page: str, key: str, text: str) -> str:
    """Return `page` with the section `key` exchanged, or with it at the end."""
    begin, end = f"<!-- figures: {key} -->", f"<!-- end of figures: {key} -->"
    block = f"{begin}\n{text}{end}\n"
    if begin not in page:
        return f"{page.rstrip()}\n\n{block}"
    before, rest = page.split(begin, 1)
    if end not in rest:
        raise UnknownName(
            "docs/figures.md", begin, f"the line {end} after it", "Restore the marker."
        )
    return before + block + rest.split(end, 1)[1].lstrip("\n")


def _keep(page: Path, key: str, text: str) -> None:
    whole = replaced(page.read_text() if page.exists() else HEADING, key, text)
    draft = page.with_suffix(f".md.{os.getpid()}")
    draft.write_text(whole)
    draft.replace(page)


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201  a script


def _measured(name: str, options: Any, arguments: Sequence[str]) -> bool:
    """Measure and tell; return whether every target was met."""
    if not bench_named(name).device(options):
        pin(options.threads)
    streams = not options.json and not options.page
    say = (lambda text: _say(f"{text}\n")) if streams else (lambda _text: None)
    section, device = measure(name, options, say)
    if options.json:
        _say(json.dumps(document(section, device)))
        return section.met
    origin = origin_of(name, options, device, arguments)
    if streams:
        _say(rendered(Section(name, section.title, (), section.targets, section.notes), origin))
    else:
        text = rendered(section, origin)
        _say(text)
        _keep(options.page, name, text)
    return section.met


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the benches that were asked for."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        asked = list(takewhile(lambda each: not each.startswith("-"), arguments))
        benches = [bench_named(name) for name in asked]
        options: Any = parser_of(benches).parse_args(arguments)
        if options.list:
            for name in asked or names():
                _say(f"{name:20} {bench_named(name).what}")
            return EXIT_AGREES
        if options.page and not asked:
            asked = options.only or on_page()
            options.only = []
        if not asked:
            raise UnknownName.among("bench", "", names())
        met, rounds = True, options.rounds
        for name in asked:
            options.rounds = rounds or bench_named(name).rounds
            met = _measured(name, options, arguments) and met
    except DegarbleError as error:
        sys.stderr.write(f"REFUSED: {error}\n")
        return error.exit_status
    return EXIT_AGREES if met else EXIT_DIFFERS


if __name__ == "__main__":
    sys.exit(main())
