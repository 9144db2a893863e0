"""A pack leaves out what it says, blanks other GPUs' code alone, and comes together again."""

from __future__ import annotations

import struct
import subprocess
import tomllib
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.vllm import pack
from degarble.harness.vllm.pack import ELF, PTX

ROOT = Path(__file__).parents[2]


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
    return [data[each.begin] for found in pack.containers(data) for each in found]


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
    return folder


def test_parts_come_together_where_they_are_unpacked(tmp_path: Path) -> None:
    to = tmp_path / "parts"
    made = pack.pack(wheels(tmp_path / "w"), to, 90, part=300)
    assert len(made) > 1
    assert all(each.stat().st_size <= 300 for each in made)
    site = tmp_path / "site"
    subprocess.run(["sh", str(to / "unpack.sh"), str(site)], check=True, capture_output=True)
    names = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assert {name for name in names if not name.startswith("degarble-")} == {
        "vllm/__init__.py", "vllm/_C.so", *pack.STAND_INS,
        "vllm/third_party/deep_gemm/_C.cpython-312-x86_64-linux-gnu.so",
    }  # fmt: skip
    assert codes((site / "vllm/_C.so").read_bytes()) == [0, 90]
    made[0].write_bytes(b"other" + made[0].read_bytes()[5:])
    broken = subprocess.run(
        ["sh", str(to / "unpack.sh"), str(tmp_path / "s2")], check=False, capture_output=True
    )
    assert broken.returncode != 0
    assert not (tmp_path / "s2").exists()


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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packed = {name: dict(read[name]) for name in read.sections()}
    assert packed == {
        name: each for name, each in project["entry-points"].items() if name.startswith("vllm.")
    }
