"""The entry point, the installed vLLM and its pack."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tomllib
import zipfile
from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from degarble.harness.base.errors import InvalidArgument, MissingDependency
from degarble.harness.vllm import entry, installed, pack
from degarble.harness.vllm.installed import VARIABLE
from degarble.harness.vllm.pack import ELF, PTX
from degarble.suites.hang_guard import HANG_SECONDS
from degarble.suites.house.repository import ROOT

# --------------------------------------------------------------------------------------------------
# An installed plugin changes nothing until it is named.


def test_the_entry_points_name_what_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for group, path in (
        ("vllm.general_plugins", "harness/vllm/entry.py"),
        ("vllm.stat_logger_plugins", "harness/vllm/bound/metrics.py"),
    ):
        (value,) = project["entry-points"][group].values()
        module, _, name = value.partition(":")
        assert module == "degarble." + path.removesuffix(".py").replace("/", ".")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {name}(" in text or f"class {name}(" in text


def test_unnamed_it_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(entry, "require_vllm", lambda: pytest.fail("looked for vLLM"))
    entry.register()


def test_named_it_needs_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> str:
        raise MissingDependency("vllm", "not installed", "vLLM", "Install it.")

    monkeypatch.setenv(VARIABLE, "x,degarble")
    monkeypatch.setattr(entry, "require_vllm", absent)
    with pytest.raises(MissingDependency):
        entry.register()


def test_degarble_itself_never_imports_vllm() -> None:
    script = (
        "import sys, degarble.harness.api, degarble.harness.vllm.entry,"
        " degarble.harness.vllm.proof, degarble.harness.vllm.contract;"
        " sys.exit(any(name.split('.')[0] == 'vllm' for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=HANG_SECONDS)
    assert done.returncode == 0


# --------------------------------------------------------------------------------------------------
# Which vLLM versions are served, and when the plugin is active.


def test_without_vllm_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(installed, "version", absent)
    with pytest.raises(MissingDependency, match="make vllm-env"):
        installed.require_vllm()


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "version", lambda _: "0.34.1")
    with pytest.raises(InvalidArgument, match=r"0\.34\.1.*0\.33\.x"):
        installed.require_vllm()
    monkeypatch.setattr(installed, "version", lambda _: "0.33.2")
    assert installed.require_vllm() == "0.33.2"


@pytest.mark.parametrize(
    ("listed", "named"), [(None, False), ("", False), ("degarble2,x", False), ("x,degarble", True)]
)
def test_the_plugin_is_active_only_if_named(
    monkeypatch: pytest.MonkeyPatch, listed: str | None, named: bool
) -> None:
    monkeypatch.delenv(installed.VARIABLE, raising=False)
    if listed is not None:
        monkeypatch.setenv(installed.VARIABLE, listed)
    assert installed.is_named() == named


# --------------------------------------------------------------------------------------------------
# A pack leaves out what it says, blanks other GPUs' code alone, and comes together again.

PACK_ROOT = Path(__file__).parents[2]


def fat(*entries: tuple[int, int]) -> bytes:
    """A fat binary with eight bytes of code, its architecture's number, an entry."""
    made = b""
    for kind, architecture in entries:
        head = pack.ENTRY_HEAD.pack(kind, 0, 64, 8).ljust(pack.ARCHITECTURE_AT, b"\0")
        made += (head + struct.pack("<I", architecture)).ljust(64, b"\0")
        made += bytes([architecture]) * 8
    return pack.HEAD.pack(pack.MAGIC, 1, pack.HEAD.size, len(made)) + made


def codes(data: bytes) -> list[int]:
    """The first byte of every entry's code; 0: blanked."""
    return [
        data[fat_binary_entry.begin]
        for container in pack.containers(data)
        for fat_binary_entry in container
    ]


def test_only_other_gpus_code_is_blanked() -> None:
    both = fat((ELF, 80), (ELF, 90), (PTX, 90), (ELF, 100))
    older = fat((ELF, 80), (PTX, 80), (PTX, 100))
    library = b"code" + both + b"between" + older + struct.pack("<I", pack.MAGIC) + b"no container"
    made = pack.for_gpu(library.ljust(600, b"x"), 90)
    assert codes(library.ljust(600, b"x")) == [80, 90, 90, 100, 80, 80, 100]
    assert codes(made) == [0, 90, 0, 0, 0, 80, 0]  # PTX stays where nothing else would run
    assert len(made) == 600
    assert made.startswith(b"code")
    assert made.endswith(b"xxx")


def wheels(folder: Path) -> Path:
    folder.mkdir()
    with zipfile.ZipFile(folder / "vllm-0.26.0-any.whl", "w") as archive:
        for name in (
            "vllm/__init__.py", "vllm/vllm-rs", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
            "vllm/third_party/deep_gemm/_C.cpython-311-x86_64-linux-gnu.so",
            "vllm/third_party/deep_gemm/_C.cpython-312-x86_64-linux-gnu.so",
        ):  # fmt: skip
            archive.writestr(name, name)
        archive.writestr("vllm/_C.so", fat((ELF, 80), (ELF, 90)))
        archive.writestr("vllm/program", b"\x7fELF and the rest")
    return folder


def test_parts_come_together_where_they_are_unpacked(tmp_path: Path) -> None:
    to = tmp_path / "parts"
    paths = pack.pack(wheels(tmp_path / "w"), to, 90, part=300)
    assert len(paths) > 1
    assert all(path.stat().st_size <= 300 for path in paths)
    site = tmp_path / "site"
    subprocess.run(["sh", str(to / "unpack.sh"), str(site)], check=True, capture_output=True)
    names = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assert {name for name in names if not name.startswith("degarble-")} == {
        "vllm/__init__.py", "vllm/_C.so", "vllm/program", *pack.STAND_INS,
        "vllm/third_party/deep_gemm/_C.cpython-312-x86_64-linux-gnu.so",
    }  # fmt: skip
    assert codes((site / "vllm/_C.so").read_bytes()) == [0, 90]
    assert os.access(site / "vllm/program", os.X_OK)
    assert not os.access(site / "vllm/__init__.py", os.X_OK)
    paths[0].write_bytes(b"other" + paths[0].read_bytes()[5:])
    broken = subprocess.run(
        ["sh", str(to / "unpack.sh"), str(tmp_path / "s2")], check=False, capture_output=True
    )
    assert broken.returncode != 0
    assert not (tmp_path / "s2").exists()


@pytest.mark.parametrize(
    ("name", "stays"),
    [
        ("tilelang/3rdparty/cutlass/include/cute/tensor.hpp", True),
        ("tilelang/3rdparty/tvm/include/tvm/runtime/base.h", True),
        ("tilelang/3rdparty/composable_kernel/include/ck/ck.hpp", False),
        ("tilelang/3rdparty/tvm/src/ir/expr.cc", False),
        ("z3/lib/libz3.so", True),
        ("z3/lib/libz3.so.4.15", False),
        ("z3_solver-4.15.4.0.data/data/bin/z3", False),
    ],
)
def test_of_tilelang_what_compiles_stays(name: str, stays: bool) -> None:
    assert pack.kept(name) == stays


def test_without_vllm_or_over_another_pack_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgument, match="make vllm-pack"):
        pack.pack(tmp_path / "empty", tmp_path / "to", 90)
    assert not (tmp_path / "to").exists()
    with pytest.raises(InvalidArgument, match="does not exist"):
        pack.pack(wheels(tmp_path / "w"), tmp_path, 90)
    assert pack.main([str(tmp_path / "empty"), str(tmp_path / "to")]) == 2


def test_entry_points_are_those_of_the_project() -> None:
    read = ConfigParser()
    read.read_string(pack.ENTRY_POINTS)
    project = tomllib.loads((PACK_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packed = {name: dict(read[name]) for name in read.sections()}
    assert packed == {
        name: each for name, each in project["entry-points"].items() if name.startswith("vllm.")
    }
