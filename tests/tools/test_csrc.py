"""The sources of csrc as one reads them: their order, and what stays in which file."""

import importlib
import os
import re
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
SOURCES = {file.name: file.read_text() for file in CSRC.iterdir() if file.is_file()}
CODE = {name: re.sub(r"//.*", "", source) for name, source in SOURCES.items()}

pytestmark = pytest.mark.cpu


def test_reading_order_visits_every_file_once():
    order, name = [], "flash.cu"
    while name in SOURCES and name not in order:
        order.append(name)
        following = re.findall(r"^// Read next: ([^\s,]+?)[.,]?\s", SOURCES[name], re.M)
        assert len(following) == 1, f"{name} names {following}"
        name = following[0]
    assert name.startswith("../minimal_attn/") and (CSRC / name).is_file()
    assert sorted(order) == sorted(SOURCES)


def test_members_without_address_are_in_shared_memory_alone():
    """nvcc 13 gives what follows an empty [[no_unique_address]] another place on the GPU than on the host. Parameters of
    kernels must not have one. The host never builds SharedMemory."""
    assert {name for name, code in CODE.items() if "no_unique_address" in code} == {"producer_sm90.cuh"}
    assert CODE["producer_sm90.cuh"].count("no_unique_address") == 1


def test_compare_builds_calls_what_flash_h_declares(monkeypatch):
    caller = CSRC.parent / "benchmarks/compare_builds.cpp"
    monkeypatch.syspath_prepend(caller.parent)
    members = re.search(r"struct Call \{(.*?)\n\};", caller.read_text(), re.S)[1]
    names = re.findall(r"(\w+)[,;]", re.sub(r"//.*", "", members))
    assert names == [name for name, _ in importlib.import_module("compare_builds").Call._fields_]
    subprocess.run([os.environ.get("CXX", "g++"), "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
                    f"-I{CSRC}", caller], check=True)
