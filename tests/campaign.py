"""Long campaigns over drawn shapes and over every fault, which `make campaign` runs and no other target. It also runs
the tests of other files that carry the marker `campaign`: the rest of grids of which CI runs a part.

A few shapes with fixed seeds are drawn by test_forward.py, test_backward.py, test_lengths.py and test_scores.py too.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import test_backward
import test_compile
import test_emulator
import test_forward
import test_lengths
import test_scores
from cases import Case, dtypes_of, serves
from conftest import IMPLEMENTATIONS, OF_16_BITS, ON_TENSOR_CORES
from test_emulator import csrc, driver_of, sanitized  # noqa: F401
from test_sanitizers import (asan, assert_passed, cases_of_driver, check_clean, check_missing_barrier,  # noqa: F401
                             check_missing_wait, compute_sanitizer, gpu_objects, missing_from, run, run_tsan, tsan,
                             whole_driver)

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1800)]
SEEDS = range(16)
# How many batches of lengths, and of scores, each seed draws: about 1,000 for each kernel of csrc, and 200 for Triton,
# which compiles for each of them.
BATCHES = {"triton": 13}


def dtypes_served(impl):
    return [dtype for dtype in dtypes_of(impl) if serves(impl, Case("any"), dtype)]


def head_dims_of(impl):
    if impl in OF_16_BITS:
        return range(8, 257, 8)
    return range(4, 129, 4) if impl in ON_TENSOR_CORES else range(1, 257)


@pytest.mark.parametrize("impl", [impl for impl in IMPLEMENTATIONS if impl != "torch"])
@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_forward(impl, seed, poisoned_outputs):
    test_forward.check_drawn_cases(impl, seed, 50, head_dims_of(impl), dtypes_served(impl))


@pytest.mark.parametrize("impl", test_backward.KERNELS)
@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_backward(impl, seed, poisoned_outputs):
    test_backward.check_drawn_cases(impl, seed, 30, head_dims_of(impl), dtypes_served(impl))


@pytest.mark.parametrize("impl", test_lengths.KERNELS)
@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_lengths(impl, seed, poisoned_outputs):
    test_lengths.check_drawn_batches(impl, seed, BATCHES.get(impl, 63))


@pytest.mark.parametrize("impl", test_scores.KERNELS)
@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_scores(impl, seed, poisoned_outputs):
    test_scores.check_drawn_scores(impl, seed, BATCHES.get(impl, 63))


# The oldest Triton that a torch served here asks for, with a NumPy that its interpreter takes, and the newest one.
@pytest.mark.cpu
@pytest.mark.parametrize("packages", [("triton==3.6.0", "numpy<2.4"), ("triton",)], ids=" ".join)
def test_interpreter_of_other_triton(packages, tmp_path):
    """The kernels of triton_ref, one by one."""
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path, *packages],
                   check=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env.update(PYTHONPATH=str(tmp_path), TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    files = sorted(Path(__file__).parent.rglob("test_twin*.py"))
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "not slow", *files], env=env,
                          cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.cpu
@pytest.mark.parametrize("part", range(8))
def test_address_sanitizer_finds_nothing(part, asan):  # noqa: F811
    check_clean(run(asan, f"--part={part}/8"))


@pytest.mark.cpu
@pytest.mark.parametrize("part", range(8))
def test_thread_sanitizer_finds_nothing(part, tsan):  # noqa: F811
    check_clean(run_tsan(tsan, f"--part={part}/8"))


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("is_hopper", [False, True])
def test_racecheck_finds_nothing(is_hopper, part, whole_driver):  # noqa: F811
    """Hopper's kernels run the forward pass alone. In the backward pass the lanes of a warp write, meet by __syncwarp,
    and one of them arrives at an mbarrier for all. racecheck of CUDA 13.0 does not follow that order, and reports what
    the 31 others have written. test_missing_synchronization_is_seen below leaves out each of them."""
    names = [name for name in cases_of_driver() if name.startswith("sm90") == is_hopper][part::4]
    done, summary = compute_sanitizer("racecheck", whole_driver, *["--forward-only"] * is_hopper, *names)
    assert_passed(done)
    assert "SUMMARY: 0 " in summary


@pytest.mark.gpu
@pytest.mark.parametrize("statement", missing_from("sync"))
def test_racecheck_sees_missing_barrier(statement, tmp_path, gpu_objects):  # noqa: F811
    check_missing_barrier(statement, tmp_path, gpu_objects)


@pytest.mark.gpu
@pytest.mark.parametrize("statement", missing_from("wait"))
def test_missing_wait_is_seen(statement, tmp_path, gpu_objects):  # noqa: F811
    check_missing_wait(statement, tmp_path, gpu_objects)


@pytest.mark.skipif(not test_compile.nvcc(), reason="no nvcc on PATH or in CUDA_HOME")
@pytest.mark.parametrize("target", ["75", "80,86", "90a", "120"])  # nvcc makes the same PTX for sm_86 as for sm_80
@pytest.mark.parametrize("file", [file for file in test_compile.TARGETS if not file.startswith("common/")])
def test_cuda_kernels_do_not_spill(file, target, tmp_path):
    test_compile.check_spills(file, target, tmp_path)


@pytest.mark.cpu
@pytest.mark.timeout(600)  # the first one compiles csrc
@pytest.mark.parametrize("statement", test_emulator.OBSERVED)
def test_missing_synchronization_is_seen(statement, driver_of):  # noqa: F811
    test_emulator.check_missing_synchronization(statement, driver_of)


@pytest.mark.cpu
@pytest.mark.parametrize("part", range(12))
def test_emulator_runs_all_cases(part, csrc):  # noqa: F811
    """In every schedule, with the same bits in all results."""
    assert_passed(test_emulator.run(csrc / "objects/driver", *test_emulator.SCHEDULES, f"--part={part}/12"))


@pytest.mark.cpu
def test_emulator_runs_all_cases_of_decoding(driver_of):  # noqa: F811
    assert_passed(test_emulator.run(driver_of("cache/decode.cu"), *test_emulator.SCHEDULES))


@pytest.mark.cpu
@pytest.mark.parametrize("case", test_emulator.MORE_SANITIZED_CASES)
def test_address_sanitizer_finds_nothing_in_emulator(case, sanitized):  # noqa: F811
    assert_passed(test_emulator.run(sanitized, "--random=5", case))
