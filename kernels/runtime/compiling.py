"""Compile a CuTe DSL entry for a target, cache the object file on disk, and read its machine code.

The cache key covers the entry and its arguments, the target, the versions of DSL, CUDA and Python,
the DSL's environment variables, and the text of every source that a kernel may import
(harness/formats, harness/model, kernels; suites enforce that limit). Editing sources after their
import switches the cache off. Compiling needs no GPU; calling the result needs the target's.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import InvalidArgument, MissingDependency, UnreadableFile
from degarble.harness.base.files import cache_folder, make_private, opened_private, read_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from degarble.kernels.runtime.targets import Target


# --------------------------------------------------------------------------------------------------
# Environment variables, read once into a record.
#
# * DEGARBLE_KERNEL_CACHE: folder of compiled kernels; `off` compiles anew in every process. By
#   default degarble/kernels under XDG_CACHE_HOME, or under ~/.cache.
# * DEGARBLE_KEEP_KERNELS: folder that receives the PTX and the cubin of every kernel.
#
# The DSL's own variables (CUTE_DSL_...) are recorded, because they change kernels. Only an edge (a
# command, a plugin, conftest) calls `read_settings`; all other code receives the record.

CACHE_VARIABLE = "DEGARBLE_KERNEL_CACHE"
KEEP_VARIABLE = "DEGARBLE_KEEP_KERNELS"
DSL_PREFIX = "CUTE_DSL_"


@dataclass(frozen=True)
class CompileSettings:
    """Folders of the cache and of kept machine code (None: unused); the DSL's variables."""

    cache_folder: Path | None = None
    keep_folder: Path | None = None
    dsl_environment: tuple[str, ...] = ()


def read_settings(environment: Mapping[str, str]) -> CompileSettings:
    """Read the settings from an environment, such as os.environ."""
    keep = environment.get(KEEP_VARIABLE)
    return CompileSettings(
        cache_folder=_cache_folder(environment),
        keep_folder=Path(keep) if keep else None,
        dsl_environment=tuple(
            f"{name}={value}"
            for name, value in sorted(environment.items())
            if name.startswith(DSL_PREFIX)
        ),
    )


def _cache_folder(environment: Mapping[str, str]) -> Path | None:
    named = environment.get(CACHE_VARIABLE)
    if named == "off":
        return None
    if named:
        return Path(named)
    return cache_folder(environment) / "kernels"


# --------------------------------------------------------------------------------------------------
# Read registers, stack and shared memory of a cubin, and find unstated roundings in PTX.
#
# `cubin_facts` runs cuobjdump (package nvidia-cuda-cuobjdump, or the CUDA toolkit's on the PATH); a
# missing program or unknown output raises. `unstated_roundings` finds arithmetic that ptxas may
# contract into an fma. Our kernels keep no arrays in local memory, so a stack means spilled
# registers.

_FUNCTION = re.compile(
    r"Function (?P<name>\S+):\s+REG:(?P<registers>\d+) STACK:(?P<stack>\d+) "
    r"SHARED:(?P<shared>\d+) LOCAL:(?P<local>\d+)"
)
# PTX ISA 9.1, mul, add, sub: without a rounding modifier ptxas may contract them into an fma.
_UNSTATED = re.compile(
    r"^\s*(?:@!?%\w+\s+)?((?:mul|add|sub|mad)(?:\.ftz|\.sat)*\.b?f(?:16|32|64)(?:x2)?\s.*;)",
    re.MULTILINE,
)
_FMA = re.compile(r"^\s*(?:@!?%\w+\s+)?(fma\.\S+\s.*;)", re.MULTILINE)


@dataclass(frozen=True)
class KernelFacts:
    """Resources of one kernel of a cubin: bytes, and registers per thread."""

    name: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    local_bytes: int

    @property
    def spills(self) -> bool:
        """Return whether registers were spilled to memory."""
        return self.stack_bytes > 0 or self.local_bytes > 0


def cubin_facts(cubin: bytes) -> tuple[KernelFacts, ...]:
    """Return the resources of every kernel in a cubin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        run = subprocess.run(  # noqa: S603  our own file, a program from a known package
            [cuobjdump_path(), "--dump-resource-usage", path],
            capture_output=True,
            text=True,
            check=False,
        )
    facts = tuple(
        KernelFacts(
            name=match["name"],
            registers=int(match["registers"]),
            stack_bytes=int(match["stack"]),
            shared_bytes=int(match["shared"]),
            local_bytes=int(match["local"]),
        )
        for match in _FUNCTION.finditer(run.stdout)
    )
    if run.returncode or not facts:
        raise UnreadableFile(
            "cubin",
            (run.stderr or run.stdout)[:120],
            "resource usage of at least one kernel, as cuobjdump prints it",
            "Use cuobjdump of CUDA 13, and a cubin that ptxas wrote.",
        )
    return facts


def cuobjdump_path() -> Path:
    """Return the path of cuobjdump: in its package, else on the PATH."""
    try:
        files = metadata.files("nvidia-cuda-cuobjdump") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "cuobjdump":
            return Path(str(file.locate()))
    found = shutil.which("cuobjdump")
    if found is None:
        raise MissingDependency(
            "cuobjdump",
            None,
            "the program in its package or on the PATH",
            "Install it with: pip install nvidia-cuda-cuobjdump",
        )
    return Path(found)


def unstated_roundings(ptx: str) -> tuple[str, ...]:
    """Return float instructions that ptxas may contract: mul, add, sub, mad without .rn."""
    return tuple(match.strip() for match in _UNSTATED.findall(ptx))


def fused_instructions(ptx: str) -> tuple[str, ...]:
    """Return the fma instructions, whether written or made by the front end."""
    return tuple(match.strip() for match in _FMA.findall(ptx))


# --------------------------------------------------------------------------------------------------
# Compiling and the cache. A damaged entry is compiled anew.
#
# To call a kernel, pass pointers of make_ptr over device addresses, and the stream
# (`current_stream`) last. Arguments are pointers, DSL numbers and constants with a stable text;
# others raise InvalidArgument, because the key could not tell them apart.

_SOURCE_FOLDERS = ("harness/formats", "harness/model", "kernels")
_OBJECT, _PTX, _CUBIN, _MANIFEST = "kernel.o", "kernel.ptx", "kernel.cubin", "manifest.json"
REQUEST = "request.json"  # kernel and form, for a later night: forms.py; the sources' digest
ENTRY_FILES = (_OBJECT, _PTX, _CUBIN, REQUEST)


@dataclass(frozen=True)
class CompiledKernel:
    """A callable entry with its PTX and cubin."""

    name: str
    target: Target
    ptx: str
    cubin: bytes
    from_cache: bool
    _run: Callable[..., Any]
    _owner: object  # the loaded object file has to outlive the callable

    def __call__(self, *arguments: Any) -> None:
        """Launch on the stream that is the last argument."""
        self._run(*arguments)


@dataclass(frozen=True)
class _Request:
    """Entry, arguments and target to compile; `key` identifies the request."""

    entry: Callable[..., Any]
    arguments: tuple[Any, ...]
    target: Target
    dsl_environment: tuple[str, ...]
    described: Mapping[str, Any] | None = None  # kernel and form; no part of the key

    @property
    def name(self) -> str:
        """Return the stem of file names."""
        return f"{self.entry.__module__.rpartition('.')[2]}.{self.entry.__name__}"

    @cached_property
    def key(self) -> str:
        """Return the digest of everything that the machine code depends on."""
        parts = [
            *versions(),
            *self.dsl_environment,
            self.target.name,
            f"{self.entry.__module__}.{self.entry.__qualname__}",
            *(_described(argument) for argument in self.arguments),
            _SOURCES_AT_IMPORT,
        ]
        return digest_of_bytes("\n".join(parts).encode())[:24]

    @property
    def symbol(self) -> str:
        """Return the prefix of the symbols in the object file."""
        return f"degarble_{self.key}"


def compile_kernel(
    entry: Callable[..., Any],
    arguments: Sequence[Any],
    target: Target,
    settings: CompileSettings,
    described: Mapping[str, Any] | None = None,
) -> CompiledKernel:
    """Compile `entry` (a cute.jit function) for `arguments`, or load it from the cache.

    Arguments that the entry declares Constexpr become part of the kernel and are not passed at
    launch. What `described` says of kernel and form is kept in the cache.
    """
    request = _Request(entry, tuple(arguments), target, settings.dsl_environment, described)
    stem = f"{request.name}.{target.name}"
    folder = settings.cache_folder and settings.cache_folder / f"{stem}.{request.key}"
    if sources_digest(package_root()) != _SOURCES_AT_IMPORT:
        folder = None  # the code in memory and the files on disk differ
    compiled = _load(request, folder) if folder else None
    if compiled is None:
        compiled = _compile(request, folder)
    if settings.keep_folder:
        settings.keep_folder.mkdir(parents=True, exist_ok=True)
        (settings.keep_folder / f"{stem}.{request.key}.ptx").write_text(compiled.ptx)
        (settings.keep_folder / f"{stem}.{request.key}.cubin").write_bytes(compiled.cubin)
    return compiled


def current_stream(device: int = 0) -> Any:
    """Return torch's current stream of a device as the DSL takes it."""
    return _dsl("cuda.bindings.driver").CUstream(torch.cuda.current_stream(device).cuda_stream)


def any_stream() -> Any:
    """Return a null stream to compile with; the launch passes the real one."""
    return _dsl("cuda.bindings.driver").CUstream(0)


def _compile(request: _Request, folder: Path | None) -> CompiledKernel:
    cute, runtime = _dsl("cutlass.cute"), _dsl("cutlass.cute.runtime")
    with tempfile.TemporaryDirectory() as dump:
        options = f"--gpu-arch {request.target.name} --keep-ptx --keep-cubin --dump-dir {dump}"
        run = cute.compile(request.entry, *request.arguments, options=options)
        ptx, cubin = run.artifacts.PTX, run.artifacts.CUBIN
    if folder:
        # Trap: exporting resolves the launch symbols, and finds them only in libraries that are
        # loaded globally.
        for library in runtime.find_runtime_libraries(enable_tvm_ffi=False):
            ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
        objects = run.dump_to_object(request.symbol)
        told = {"request": request.described, "sources": _SOURCES_AT_IMPORT}
        files = {_OBJECT: objects, _PTX: ptx.encode(), _CUBIN: cubin}
        store_entry(folder, files | {REQUEST: json.dumps(told).encode()})
    return CompiledKernel(
        name=request.name,
        target=request.target,
        ptx=ptx,
        cubin=cubin,
        from_cache=False,
        _run=run,
        _owner=run,
    )


def _load(request: _Request, folder: Path) -> CompiledKernel | None:
    """Return the cached kernel if its entry is complete and intact, else None."""
    files = _whole(folder)
    if files is None:
        return None
    # Loads the bytes that were verified, even if another process replaces the entry meanwhile; the
    # copy is in the cache, because nobody else can write there.
    place = folder.parent if os.access(folder.parent, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place, prefix=".loading-") as own:
        (Path(own) / _OBJECT).write_bytes(files[_OBJECT])
        module = _dsl("cutlass.cute.runtime").load_module(str(Path(own) / _OBJECT))
    return CompiledKernel(
        name=request.name,
        target=request.target,
        ptx=files[_PTX].decode(),
        cubin=files[_CUBIN],
        from_cache=True,
        _run=module[request.symbol],
        _owner=module,
    )


def _whole(folder: Path) -> dict[str, bytes] | None:
    """Return an entry's files if all exist with the bytes of the manifest, else None."""
    try:
        files = read_private(folder.parent, folder.name, (_MANIFEST, *ENTRY_FILES))
        recorded = json.loads(files.pop(_MANIFEST)) if files else None
    except ValueError:
        return None
    return (
        files
        if files and recorded == {f: digest_of_bytes(text) for f, text in files.items()}
        else None
    )


def manifest_of(files: Mapping[str, bytes]) -> bytes:
    """Return the manifest of an entry: the digest of each file, by name."""
    manifest = {file: digest_of_bytes(text) for file, text in sorted(files.items())}
    return json.dumps(manifest, indent=1).encode()


def cached_entries(folder: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield name and files of every whole entry of a cache, by name; damaged ones are left out."""
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            files = None if path.name.startswith(".") else _whole(path)
            if files is not None:
                yield path.name, files


def store_entry(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a cache entry atomically: readers see all of it or nothing."""
    make_private(folder.parent)
    with opened_private(folder.parent):
        pass  # raises if others can write to the folder
    staged = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".writing-"))
    for file, text in files.items():
        (staged / file).write_bytes(text)
    (staged / _MANIFEST).write_bytes(manifest_of(files))
    if _whole(folder) is None:  # damaged; an intact one may be in use by other processes
        shutil.rmtree(folder, ignore_errors=True)
    try:
        staged.rename(folder)
    except OSError:  # another process was faster, with the same kernel
        shutil.rmtree(staged, ignore_errors=True)


def versions() -> tuple[str, ...]:
    """Return the versions that machine code depends on: DSL and CUDA, Python and machine."""
    dsl = _dsl("cutlass")
    return (
        f"{dsl.__version__} {dsl.CUDA_VERSION}",
        f"{sys.implementation.cache_tag} {platform.machine()}",
    )


def sources_at_import() -> str:
    """Return the digest of the sources that this process imported."""
    return _SOURCES_AT_IMPORT


def _described(argument: Any) -> str:
    """Return a text that is equal for two arguments exactly if they compile alike."""
    if isinstance(argument, tuple) and all(_is_of_dsl(each) for each in argument):
        return f"({', '.join(_described(each) for each in argument)})"
    if hasattr(argument, "__cache_key__"):  # pointers: element type, memory space, alignment
        return f"{type(argument).__name__}{argument.__cache_key__}"
    if _is_of_dsl(argument):
        return type(argument).__name__  # a number or a stream, known at the call only
    text = f"{type(argument).__module__}.{type(argument).__qualname__} {argument!r}"
    is_constant = isinstance(argument, bool | int | float | str | None) or is_dataclass(argument)
    if is_constant and " at 0x" not in text:
        return text
    raise InvalidArgument(
        "argument to compile with",
        text,
        "a pointer, a DSL number, a stream, a Python constant or a frozen record of constants",
        "Pass a name, and look the object up inside the kernel.",
    )


def _is_of_dsl(argument: Any) -> bool:
    return type(argument).__module__.partition(".")[0] in {"cutlass", "cuda"}


def package_root() -> Path:
    """Return the folder that holds harness/ and kernels/."""
    return Path(__file__).resolve().parents[2]


def sources_digest(root: Path) -> str:
    """Return the digest of every source that a kernel may import."""
    digest = hashlib.sha256()
    for folder in _SOURCE_FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def digest_of_bytes(text: bytes) -> str:
    """Return the SHA-256 of bytes."""
    return hashlib.sha256(text).hexdigest()


def _dsl(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingDependency(
            module,
            str(error),
            "the CuTe DSL",
            'Install it with: pip install "degarble[gpu]"',
        ) from error


# Taken at import, when the sources on disk are those in memory.
_SOURCES_AT_IMPORT = sources_digest(package_root())
