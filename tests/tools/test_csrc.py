"""The sources of csrc: their folders, and what stays in which file."""

import re
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

pytestmark = pytest.mark.cpu


def folder_of(name):
    return {"flash.cu": "simt", "main.cpp": "binding"}.get(name, name.split("/")[0])


def test_folders_include_downwards():
    for name, included in INCLUDES.items():
        for path in set(included) - {"flash.h", "flash_bwd.h", "flash_cache.h"}:
            assert path in SOURCES, f"{name} includes {path}, which is no path in csrc"
            assert folder_of(path) in {folder_of(name), *BELOW[folder_of(name)].split()}, f"{name} includes {path}"
    for i, folder in enumerate(BELOW):
        assert {*BELOW[folder].split()} <= {*list(BELOW)[:i]}


def test_no_member_is_without_address():
    """nvcc 13 gives what follows an empty [[no_unique_address]] another place on the GPU than on the host."""
    assert not [name for name, code in CODE.items() if "no_unique_address" in code]
