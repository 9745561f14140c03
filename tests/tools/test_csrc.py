"""The sources of csrc as one reads them: their folders, their order, and what stays in which file."""

import importlib
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
SOURCES = {file.relative_to(CSRC).as_posix(): file.read_text() for file in CSRC.rglob("*") if file.is_file()}
CODE = {name: re.sub(r"//.*", "", source) for name, source in SOURCES.items()}
INCLUDES = {name: re.findall(r'^#include "(.*)"', source, re.M) for name, source in SOURCES.items()}

# The folders that a folder includes beside itself and flash.h. Each of them stands before it.
BELOW = {"ptx": "", "common": "ptx", "mods": "common", "simt": "common mods", "host": "simt",
         "sm80": "ptx common mods", "sm90": "ptx common mods", "cache": "ptx common mods sm80 sm90",
         "ops": "common", "binding": "ops"}
DEVELOPING = (ROOT / "docs/developing.md").read_text().split("## The folders of csrc\n")[1].split("\n## ")[0]
FIRST_FILES = dict(re.findall(r"^\| `([\w/]+)/` \|.*\| `(\S+)` \|$", DEVELOPING, re.M))

pytestmark = pytest.mark.cpu


def folder_of(name):
    return {"flash.cu": "simt", "main.cpp": "binding"}.get(name, name.split("/")[0])


def files_named(text):
    """The files in the code spans of a text. `a/{b,c}.h` stands for two of them."""
    for span in re.findall(r"`(\S+\.[a-z{},]+)`", text):
        head, names, tail = re.fullmatch(r"([^{]*)(?:\{(.*)\})?(.*)", span).groups()
        yield from (head + name + tail for name in (names or "").split(","))


def test_folders_include_downwards():
    for name, included in INCLUDES.items():
        for path in set(included) - {"flash.h"}:
            assert path in SOURCES, f"{name} includes {path}, which is no path in csrc"
            assert folder_of(path) in {folder_of(name), *BELOW[folder_of(name)].split()}, f"{name} includes {path}"
    assert list(BELOW) == [folder for folder in FIRST_FILES if "/" not in folder]
    for i, folder in enumerate(BELOW):
        assert {*BELOW[folder].split()} <= {*list(BELOW)[:i]}


def test_way_in_is_one_sitting():
    way = list(files_named(DEVELOPING.split("\n1. ")[1].split("\n\n")[0]))
    assert way == [name for name in files_named((ROOT / "README.md").read_text().split("## Reading order")[1])
                   if name in SOURCES]
    assert (way[0], way[-1]) == ("flash.cu", "sm90/flash_sm90.cu") and len({*way}) == len(way)
    for path in {path for name in way for path in INCLUDES[name]} - {*way}:
        assert {"ptx", "mods"} & {*path.split("/")}, f"{path} is included, and not on the way"
    assert sum(SOURCES[name].count("\n") for name in way) < 2700


@pytest.mark.parametrize("folder", FIRST_FILES)
def test_first_file_names_the_others(folder):
    header = " ".join(line[3:] for line in SOURCES[f"{folder}/{FIRST_FILES[folder]}"].split("\n//\n")[0].splitlines())
    order, beside = re.search(rf"^The folder {folder}/ .* Order in {folder}/: (\S+(?:, \S+)*)\."
                              r"(?: Beside it: (\S+(?:, \S+)*)\.)?$", header).groups(default="")
    order, beside = order.split(", "), beside.split(", ") if beside else []
    assert order[0] == FIRST_FILES[folder]
    assert sorted(order + beside) == sorted(file.name for file in (CSRC / folder).iterdir() if file.is_file())
    assert sum(SOURCES[f"{folder}/{name}"].count("\n") for name in order) <= 1300


def test_members_without_address_are_in_shared_memory_alone():
    """nvcc 13 gives what follows an empty [[no_unique_address]] another place on the GPU than on the host. Parameters of
    kernels must not have one. The host never builds SharedMemory."""
    assert {name for name, code in CODE.items() if "no_unique_address" in code} == {"sm90/producer.cuh"}
    assert CODE["sm90/producer.cuh"].count("no_unique_address") == 1


def test_compare_builds_calls_what_flash_h_declares(monkeypatch):
    caller = CSRC.parent / "benchmarks/compare_builds.cpp"
    monkeypatch.syspath_prepend(caller.parent)
    members = re.search(r"struct Call \{(.*?)\n\};", caller.read_text(), re.S)[1]
    names = re.findall(r"(\w+)[,;]", re.sub(r"//.*", "", members))
    assert names == [name for name, _ in importlib.import_module("compare_builds").Call._fields_]
    subprocess.run([os.environ.get("CXX", "g++"), "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
                    f"-I{CSRC}", caller], check=True)
