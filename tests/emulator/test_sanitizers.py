"""The kernels under the sanitizers: flash.cu and flash_bwd.cu on the CPU with g++'s, by way of driver.cpp, and on a GPU
all of driver.cpp and decode_driver.cpp with compute-sanitizer, which does not see TMA's copies.
"""
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import CUDA_HOME

from cases import CAMPAIGN, slow_unless
from conftest import made_once

pytestmark = pytest.mark.timeout(900)  # a compiler may take the 240 s of run(), and then a tool
DRIVERS = Path(__file__).parent / "drivers"
CSRC = Path(__file__).parents[2] / "csrc"
CXX = os.environ.get("CXX", "g++")


def run(*command, timeout=240, **env):
    return subprocess.run([str(word) for word in command], env={**os.environ, **env}, capture_output=True, text=True,
                          timeout=timeout)


def compiled(folder, *command, driver="driver.cpp"):
    """A driver, compiled by a command into a folder."""
    done = run(*command, "-std=c++20", "-I", CSRC, DRIVERS / driver, "-o", folder / "driver")
    assert done.returncode == 0, done.stderr


def assert_passed(done):
    said = done.stdout + done.stderr
    assert done.returncode == 0 and re.search(r"^[1-9]\d* passed, 0 failed", done.stdout, re.MULTILINE), said


def cxx(sanitizer, level):
    """The compiler's command for a sanitizer, at a level of optimization; skips where it has no runtime for it."""
    if not shutil.which(CXX):
        pytest.skip(f"no C++ compiler: {CXX} is not on PATH")
    # -fno-builtin: g++ expands a small memcpy in line, where ThreadSanitizer does not see it.
    command = (CXX, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-fno-builtin", level, "-g1", "-pthread")
    probe = run(*command, "-shared", "-fPIC", "-x", "c++", os.devnull, "-o", os.devnull)
    if probe.returncode:
        pytest.skip(f"{CXX} has no runtime for -fsanitize={sanitizer}: {probe.stderr}")
    return command


@pytest.mark.cpu
@pytest.mark.parametrize("part", [pytest.param(part, marks=slow_unless(False, part == 0)) for part in range(4)])
# At -O1 AddressSanitizer runs in half the time, but takes g++ four times as long.
@pytest.mark.parametrize("sanitizer, level", [
    ("address,undefined", "-O0"), pytest.param("thread", "-O1", marks=CAMPAIGN)])
def test_sanitizer_finds_nothing(sanitizer, level, part, tmp_path_factory):
    command = cxx(sanitizer, level)
    driver = made_once(tmp_path_factory, sanitizer, lambda folder: compiled(folder, *command)) / "driver"
    # Older runtimes refuse the address-space layouts of newer kernels, which randomize more bits: randomize none.
    fixed = ("setarch", "-R") if shutil.which("setarch") and run("setarch", "-R", "true").returncode == 0 else ()
    done = run(*fixed, driver, f"--part={part}/4", TSAN_OPTIONS="halt_on_error=1")
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer's runtime cannot start under this kernel")
    assert_passed(done)
    assert not done.stderr


# On a GPU.

def cuda_tool(name):
    path = os.pathsep.join([os.environ["PATH"], f"{CUDA_HOME}/bin"])
    return shutil.which(name, path=path) or pytest.skip(f"{name} is neither on PATH nor in CUDA_HOME")


@pytest.fixture
def driver(name, tmp_path_factory):
    """The driver of this name for the GPU at hand, with all that it can call; compiled by all cores, in minutes."""
    capability = "{}{}".format(*torch.cuda.get_device_capability()).replace("90", "90a")
    command = (cuda_tool("nvcc"), f"-gencode=arch=compute_{capability},code=sm_{capability}", "-O3", "-lineinfo",
               "-split-compile=0", "-x", "cu")
    return made_once(tmp_path_factory, f"{name}_gpu", lambda folder: compiled(
        folder, *command, driver=f"{name}.cpp")) / "driver"


# The tools, and in how many parts, for several workers, each runs the cases of a driver.
PARTS = {"driver": {None: 1, "memcheck": 2, "synccheck": 2, "racecheck": 8},
         "decode_driver": {None: 1, "memcheck": 2, "synccheck": 2, "racecheck": 4}}


@pytest.mark.gpu
@pytest.mark.parametrize("name, tool, part, parts", [
    pytest.param(name, tool, part, parts, marks=CAMPAIGN) for name, tools in PARTS.items()
    for tool, parts in tools.items() for part in range(parts)])
def test_compute_sanitizer(name, tool, part, parts, driver):
    """racecheck runs the forward pass of Hopper's kernels alone. In the backward pass the lanes of a warp write, meet
    by __syncwarp, and one of them arrives at an mbarrier for all. racecheck of CUDA 13.0 does not follow that order. It
    reports what the 31 others have written. test_emulator.py leaves out each of these statements."""
    options = {"memcheck": ["--padding=512"]}.get(tool, [])  # where one allocation begins another one may end
    command = [cuda_tool("compute-sanitizer"), "--tool", tool, "--error-exitcode=1", *options] if tool else []
    done = run(*command, driver, *["--forward-only-on-hopper"] * (tool == "racecheck"), f"--part={part}/{parts}")
    assert_passed(done)
    assert not tool or "SUMMARY: 0 " in done.stdout
