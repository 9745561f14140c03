"""The kernels under the sanitizers, by way of driver.cpp, decode_driver.cpp and append_driver.cpp: flash.cu,
flash_bwd.cu and append.cu on the CPU with g++'s, all on a GPU with compute-sanitizer.

A clean run means little where the tool would not have seen a fault, so each is also shown one: a row that is not there,
and a kernel without any one of its barriers (faults.py finds them; campaign.py shows them to racecheck).
compute-sanitizer does not see TMA's copies, so the faults of flash_sm90.cu are shown to the emulator alone, in
test_emulator.py.
"""
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import CUDA_HOME

import faults
from conftest import made_once

pytestmark = pytest.mark.timeout(900)  # a compiler may take the 240 s of run(), and then a tool
DRIVER = Path(__file__).parent / "drivers/driver.cpp"
DECODE_DRIVER, APPEND_DRIVER = DRIVER.with_name("decode_driver.cpp"), DRIVER.with_name("append_driver.cpp")
CSRC = Path(__file__).parents[2] / "csrc"
CXX = os.environ.get("CXX", "g++")


def missing(pattern, *files):
    """Parameters for every statement of some files whose primitive matches a pattern."""
    return [pytest.param(statement, id=str(statement)) for statement in faults.statements(*files)
            if re.fullmatch(pattern, statement.name)]


def run(*command, timeout=240, **env):
    return subprocess.run([str(word) for word in command], env={**os.environ, **env}, capture_output=True, text=True,
                          timeout=timeout)


def compiled(directory, *command, csrc=CSRC, driver=DRIVER):
    """A driver, compiled by a command into a directory."""
    done = run(*command, "-std=c++20", "-I", csrc, driver, "-o", directory / "driver")
    assert done.returncode == 0, done.stderr
    return directory / "driver"


def csrc_without(statement, directory):
    """A copy of csrc that lacks a statement."""
    csrc = Path(shutil.copytree(CSRC, directory / "csrc"))
    faults.leave_out(statement, csrc)
    return csrc


def cases_of_driver():
    return re.findall(r'^    (?:\w+\()*{"(\w+)",', DRIVER.with_name("driver_cases.h").read_text(), re.MULTILINE)


def assert_passed(done):
    said = done.stdout + done.stderr
    assert done.returncode == 0 and re.search(r"^[1-9]\d* passed, 0 failed", done.stdout, re.MULTILINE), said


# On the CPU

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


@pytest.fixture(scope="session")
def asan(tmp_path_factory):
    # At -O1 it runs in half the time, but takes g++ four times as long.
    command = cxx("address,undefined", "-O0")
    return made_once(tmp_path_factory, "asan", lambda folder: compiled(folder, *command)) / "driver"


@pytest.mark.cpu
@pytest.mark.slow
def test_address_sanitizer_finds_nothing(asan):
    """In every fourth case; campaign.py has all."""
    check_clean(run(asan, "--part=1/4"))


@pytest.mark.cpu
@pytest.mark.slow
def test_address_sanitizer_sees_overrun(asan):
    done = run(asan, "--overrun", "one")
    assert done.returncode and "AddressSanitizer: heap-buffer-overflow" in done.stderr


def check_clean(done):
    assert_passed(done)
    assert not done.stderr


@pytest.mark.cpu
def test_address_sanitizer_finds_nothing_in_append(tmp_path):
    check_clean(run(compiled(tmp_path, *cxx("address,undefined", "-O0"), driver=APPEND_DRIVER)))


def run_tsan(driver, *cases, left_out=-1):
    # Older runtimes refuse the address-space layouts of newer kernels, which randomize more bits: randomize none.
    fixed = ("setarch", "-R") if shutil.which("setarch") and run("setarch", "-R", "true").returncode == 0 else ()
    done = run(*fixed, driver, *cases, TSAN_OPTIONS="halt_on_error=1", LEFT_OUT=str(left_out))
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer's runtime cannot start under this kernel")
    return done


# The number of the statement that a run leaves out, before threads begin: reading it puts them in no order.
LEFT_OUT = """
#include <cstdlib>
namespace emulator {
inline const int left_out = std::atoi(std::getenv("LEFT_OUT"));
inline bool is_left_out(int statement) { return statement == left_out; }
}
"""


@pytest.fixture(scope="session")
def tsan(tmp_path_factory):
    """One driver for all faults, as it takes the compiler ten seconds."""
    command = cxx("thread", "-O1")

    def make(folder):
        csrc = Path(shutil.copytree(CSRC, folder / "csrc"))
        faults.make_switchable(csrc)
        (csrc / "left_out.h").write_text(LEFT_OUT)
        compiled(folder, *command, "-include", "left_out.h", csrc=csrc)

    return made_once(tmp_path_factory, "tsan", make) / "driver"


@pytest.mark.cpu
@pytest.mark.slow
def test_thread_sanitizer_finds_nothing(tsan):
    """In every fourth case; campaign.py has all."""
    check_clean(run_tsan(tsan, "--part=0/4"))


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("statement", missing("__sync.*|__pipeline_wait_prior", "flash.cu", "simt/flash_bwd.cu",
                                              "simt/tiles.h"))
def test_thread_sanitizer_sees_missing_barrier(statement, tsan):
    done = run_tsan(tsan, "fp32_64", left_out=faults.statements().index(statement))
    # Without the wait for its copies a thread computes with what was in shared memory before: no race, a wrong result.
    is_race = statement.name.startswith("__sync")
    wanted = "ThreadSanitizer: data race" in done.stderr if is_race else " 1 failed" in done.stdout
    assert done.returncode and wanted, "this barrier is not needed, or not tested"


# On the GPU

def cuda_tool(name):
    path = os.pathsep.join([os.environ["PATH"], f"{CUDA_HOME}/bin"])
    return shutil.which(name, path=path) or pytest.skip(f"{name} is neither on PATH nor in CUDA_HOME")


def nvcc():
    """nvcc's command for the GPU at hand."""
    capability = "{}{}".format(*torch.cuda.get_device_capability()).replace("90", "90a")
    return cuda_tool("nvcc"), f"-gencode=arch=compute_{capability},code=sm_{capability}", "-O3", "-lineinfo", "-x", "cu"


def compute_sanitizer(tool, driver, *arguments):
    """The finished process and the tool's summary, such as "ERROR SUMMARY: 0 errors"."""
    # Without padding one allocation may begin where another ends, and hide its overruns.
    options = ["--tool", tool, "--error-exitcode=1", *["--padding=512"] * (tool == "memcheck")]
    done = run(cuda_tool("compute-sanitizer"), *options, driver, *arguments)
    return done, "; ".join(re.findall("=== (.*SUMMARY: .*)", done.stdout)) or "no summary"


@pytest.fixture(scope="module")
def whole_driver(tmp_path_factory):
    """With all that it can call; compiled by all cores, as it takes one of them two minutes."""
    return made_once(tmp_path_factory, "whole_driver", lambda folder: compiled(folder, *nvcc(), "-split-compile=0")) \
        / "driver"


@pytest.fixture(scope="module")
def decode_driver(tmp_path_factory):
    return made_once(tmp_path_factory, "decode_gpu_driver", lambda folder: compiled(
        folder, *nvcc(), "-split-compile=0", driver=DECODE_DRIVER)) / "driver"


@pytest.fixture(scope="module")
def append_driver(tmp_path_factory):
    return made_once(tmp_path_factory, "append_gpu_driver", lambda folder: compiled(
        folder, *nvcc(), driver=APPEND_DRIVER)) / "driver"


def objects(folder, *sources, csrc=CSRC):
    """{source: its object}, all compiled at once."""
    found = {source: folder / f"{Path(source).stem}.o" for source in sources}
    command = *nvcc(), "-std=c++20", "-DMINIMAL_ATTN_LINKED=1", "-I", csrc, "-c"
    with ThreadPoolExecutor(len(sources)) as pool:
        for done in pool.map(lambda source: run(*command, csrc / source, "-o", found[source]), sources):
            assert done.returncode == 0, done.stderr
    return found


def linked(directory, found):
    done = run(cuda_tool("nvcc"), *found.values(), "-o", directory / "driver")
    assert done.returncode == 0, done.stderr
    return directory / "driver"


@pytest.fixture(scope="module")
def gpu_objects(tmp_path_factory):
    """{source: object} of csrc's kernels and the driver, with which the cases of the faults pass."""
    sources = [*(faults.name_of(file, CSRC) for file in CSRC.rglob("*.cu")), str(DRIVER)]

    def make(folder):
        driver = linked(folder, objects(folder, *sources))
        assert_passed(run(driver, *{*FAULT_CASES["sync"].values(), *sum(FAULT_CASES["wait"].values(), [])}))

    folder = made_once(tmp_path_factory, "gpu_objects", make)
    return {source: folder / f"{Path(source).stem}.o" for source in sources}


def driver_without(statement, directory, gpu_objects):
    changed = FILES_WITH.get(statement.file, [statement.file])
    return linked(directory, {**gpu_objects, **objects(directory, *changed, csrc=csrc_without(statement, directory))})


def on_gpu(test):
    """A GPU's record does without these, as they take minutes each."""
    for mark in ("gpu", "slow", "campaign"):
        test = getattr(pytest.mark, mark)(test)
    return test


@on_gpu
@pytest.mark.parametrize("driver", ["whole_driver", "decode_driver", "append_driver"])
def test_gpu_driver(driver, request):
    assert_passed(run(request.getfixturevalue(driver)))


# In how many parts, for several workers, a tool runs the cases of a driver. Under racecheck those of driver.cpp take so
# long that campaign.py has them. append.cu has no shared memory and no barriers, and its driver no parts.
PARTS = {"whole_driver": {"memcheck": 2, "initcheck": 4, "synccheck": 2},
         "decode_driver": {"memcheck": 2, "initcheck": 2, "synccheck": 2, "racecheck": 4},
         "append_driver": {"memcheck": 1, "initcheck": 1}}


@on_gpu
@pytest.mark.parametrize("driver, tool, part, parts", [
    (driver, tool, part, parts) for driver, tools in PARTS.items() for tool, parts in tools.items()
    for part in range(parts)])
def test_compute_sanitizer(driver, tool, part, parts, request):
    arguments = [] if parts == 1 else [*["--valid-only"] * (tool == "initcheck"), f"--part={part}/{parts}"]
    done, summary = compute_sanitizer(tool, request.getfixturevalue(driver), *arguments)
    assert_passed(done)
    assert "SUMMARY: 0 " in summary


def needs_hopper(file):
    if "dmma" in file and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of sm_90")


@on_gpu
@pytest.mark.parametrize("case", ["one", "sm80_one", "dmma_one"])
def test_memcheck_sees_overrun(case, whole_driver):
    needs_hopper(case)
    done, _ = compute_sanitizer("memcheck", whole_driver, "--overrun", case)
    assert done.returncode and "Invalid __global__ read" in done.stdout, done.stdout


# The sources that include a file.
FILES_WITH = {"simt/tiles.h": ["flash.cu", "simt/flash_bwd.cu", "simt/flash_bwd_bias.cu"],
              "sm80/tiles.cuh": ["sm80/flash_sm80.cu", "sm80/flash_bwd_sm80.cu"]}
# The cases that show a fault in a file: of a barrier between threads, and of a wait for a copy or a warp.
SM80 = "sm80/flash_sm80.cu", "sm80/flash_bwd_sm80.cu", "sm80/tiles.cuh"
FAULT_CASES = {
    "sync": {"simt/tiles.h": "bf16_64",  # whose tiles are written by plain stores
             **dict.fromkeys(SM80[:2], "sm80_fp16_192"), "sm90/flash_dmma.cu": "dmma_128_causal"},
    "wait": {**dict.fromkeys(SM80, ["sm80_fp16_192", "sm80_bf16_256", "sm80_fp16_128", "sm80_bf16_64"]),
             "sm90/flash_dmma.cu": ["dmma_64", "dmma_64_causal", "dmma_128", "dmma_128_causal"]},
}


PATTERNS = {"sync": "__syncthreads", "wait": "cp_async_wait|__syncwarp"}


def missing_from(kind):
    """missing() from the files that have cases for this kind of fault; not what racecheck cannot see."""
    return [param for param in missing(PATTERNS[kind], *FAULT_CASES[kind])
            if param.values[0].unobserved_by != "racecheck"]


def check_missing_barrier(statement, tmp_path, gpu_objects):
    needs_hopper(statement.file)
    line_before = (CSRC / statement.file).read_text().splitlines()[statement.line - 2]
    if "kStages == 1" in line_before:  # as a narrow tile alone has
        csrc = csrc_without(statement, tmp_path)
        case, driver = "sm80_256_narrow", compiled(tmp_path, *nvcc(), "-split-compile=0", csrc=csrc)
    else:
        case, driver = FAULT_CASES["sync"][statement.file], driver_without(statement, tmp_path, gpu_objects)
    done, summary = compute_sanitizer("racecheck", driver, case)
    assert done.returncode and re.match("RACECHECK SUMMARY: [1-9]", summary), done.stdout


def check_missing_wait(statement, tmp_path, gpu_objects):
    """By racecheck, or by a wrong result, with or without the tool."""
    needs_hopper(statement.file)
    driver, cases = driver_without(statement, tmp_path, gpu_objects), FAULT_CASES["wait"][statement.file]
    checked, summary = compute_sanitizer("racecheck", driver, *cases)
    alone = run(driver, *cases)
    assert all(" failed" in done.stdout for done in (checked, alone)), checked.stdout + alone.stdout + alone.stderr
    assert checked.returncode or alone.returncode, summary
