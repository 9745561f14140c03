"""csrc/flash_sm90.cu as it is written, on the CPU: tests/emulator has Hopper's instructions, driver.cpp the cases.

Copies and products happen as early or as late as they may, or at any time, and threads run in any order. That all cases
pass says little where the emulator would not see a fault, so it is shown many: the kernel with something wrong in it.
"""
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock

from test_sanitizers import cxx

DRIVER = Path(__file__).with_name("driver.cpp")
EMULATOR = DRIVER.with_name("emulator")
CSRC = DRIVER.parents[1] / "csrc"
CXX = os.environ.get("CXX", "g++")
KERNEL = "flash_sm90.cu"
SOURCES = {KERNEL: "-Og", "instructions.cpp": "-O3", "wgmma.cpp": "-O3", DRIVER: "-O1"}
# Kernels look at the same bytes as several types. What is aligned as tensor maps are has had another ABI since GCC 4.6.
FLAGS = "-std=c++20", "-g1", "-fno-strict-aliasing", "-Wno-psabi", "-DMINIMAL_ATTN_EMULATED=1"

SCHEDULES = ["--early=1", "--late=2", "--random=3"]
SANITIZERS = "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Og"
SANITIZED_CASES = ["sm90_40", "sm90_104", "sm90_136_causal", "sm90_96", "sm90_lens_256", "sm90_one", "sm90_scale_0"]
PING_PONG_CASES = ["sm90_64", "sm90_128_causal", "sm90_many_lens", "sm90_192"]

# Two lines each.
RELEASE_K = "warpgroup_wait<1>(acc_s[0]);\n        release(shared.k_empty[k.stage]), k.advance();"
RELEASE_V = "warpgroup_wait<0>(acc_o[0], P);\n        release(shared.v_empty[v.stage]), v.advance();"
ATTEND = "= attend(softmax, mask, next_work.row0, n_block, n_block_masked);"


def swapped(lines):
    return "\n".join(reversed(lines.split("\n")))


# What is wrong: (file, what is there, what is there instead, cases that show it, what they say).
FAULTS = {
    # Where things are.
    "swizzle": ("matrix_descriptor.cuh", "kRowBytes == 128 ? 1 : 2", "1", "sm90_96", "lse"),
    "leading offset": (KERNEL, ", kBlockN * kRowBytes)", ")", "sm90_128", "out"),
    "panel of K": (KERNEL, "panel * kBlockN * kRowBytes", "panel * 64 * kRowBytes", "sm90_128", "lse"),
    "rows of V": (KERNEL, "kk * 16 * kRowBytes / 16", "kk * 8 * kRowBytes / 16", "sm90_128", "out"),
    "strides": ("tensor_map.h", "bytes(row_stride), bytes(head_stride)", "bytes(head_stride), bytes(row_stride)",
                "sm90_64", "nan"),
    "head of a tile": (KERNEL, "bh0 + i % heads", "bh0", "sm90_many_causal", "nan"),
    "counter": (KERNEL, "atomicAdd(p.tile_counter, 1)", "atomicAdd(p.tile_counter, 2)", "sm90_many_causal", "nan"),
    "causal mask": ("mask.cuh", "row + 8 * i + 1 +", "row + 8 * i +", "sm90_128_causal", "lse"),
    # Barriers.
    "init not awaited": (KERNEL, "__syncthreads();", "", "sm90_128", "is not initialised"),
    "init not fenced": (KERNEL, "fence_mbarrier_init();", "", "sm90_128", "may not see"),
    "an arrival too many": (KERNEL, "(shared.k_empty[s], 4 *", "(shared.k_empty[s], 1 + 4 *", "sm90_128", "deadlock"),
    "an arrival too few": (KERNEL, "(shared.k_empty[s], 4 *", "(shared.k_empty[s], -1 + 4 *", "sm90_128_causal",
                           "lse|deadlock"),
    "bytes": (KERNEL, "sizeof(tile))", "sizeof(tile) / 2)", "sm90_128", "bytes to come"),
    "phase of a ring": (KERNEL, "stage = 0, phase ^= 1;", "stage = 0;", "sm90_128", "deadlock|more arrivals"),
    "phase of the producer": (KERNEL, "mbarrier_wait(empty, phase ^ 1);", "mbarrier_wait(empty, phase);", "sm90_128",
                              "deadlock"),
    "room not awaited": (KERNEL, "mbarrier_wait(empty, phase ^ 1);", "", "sm90_128", "deadlock|more arrivals"),
    "Q not awaited": (KERNEL, "mbarrier_wait(shared.q_full[consumer], q.phase), q.adv", "q.adv", "sm90_many",
                      "nan|lse"),
    "K not awaited": (KERNEL, "mbarrier_wait(shared.k_full[k.stage], k.phase);", "", "sm90_128", "lse|arrivals"),
    "V not awaited": (KERNEL, "mbarrier_wait(shared.v_full[v.stage], v.phase);", "", "sm90_256 sm90_128_causal", "out"),
    "Q not released": (KERNEL, "if (n_block == 0) release(shared.q_empty[consumer]);", "", "sm90_many", "deadlock"),
    "work not awaited": (KERNEL, "mbarrier_wait(shared.work_full[next.stage], next.phase);", "", "sm90_many", "."),
    "K released early": (KERNEL, RELEASE_K, swapped(RELEASE_K), "sm90_128_causal sm90_scale_30", "lse"),
    "V released early": (KERNEL, RELEASE_V, swapped(RELEASE_V), "sm90_128_causal sm90_scale_30", "out"),
    "registers": (KERNEL, "kConsumers == 2 ? 240", "kConsumers == 2 ? 248", "sm90_many_pairs", "deadlock"),
    # Zeros for V after the end of a sample.
    "no zeros": (KERNEL, "[i] = uint4{};", ";", "sm90_lens_128", "nan"),
    "zeros not fenced": (KERNEL, "fence_proxy_async();", "", "sm90_lens_128", "nan"),
    "zeros not awaited": (KERNEL, "barrier_sync(1 + kConsumers, kThreads);", "", "sm90_lens_128", "nan"),
    "zeros of one consumer": (KERNEL, "for (auto &panel :", "if (consumer == 0) for (auto &panel :",
                              "sm90_lens_128 sm90_lens_64", "nan"),
    # From one tile to the next.
    "mask of the tile before": (KERNEL, "mask = Mask(p, next_work.b);", "", "sm90_many_lens", "lse|out"),
    "sum of the tile before": (KERNEL, "if (is_last) softmax =", "if (false) softmax =", "sm90_many", "lse"),
    "O of the tile before": (KERNEL, "x[0] = x[1] = x[2] = x[3] = 0.f;", "(void)x;", "sm90_many", "out"),
    # Products under way.
    "no wgmma.fence": (KERNEL, "warpgroup_arrive();", "", "sm90_128", "without a wgmma.fence"),
    "S not awaited": (KERNEL, "warpgroup_wait<1>(acc_s[0]);", "", "sm90_128", "nan|not told"),
    "P not named": (KERNEL, "(acc_o[0], P);", "(acc_o[0]);", "sm90_128", "not told"),
    "P rounded early": (KERNEL, ATTEND, f"{ATTEND} round_p();", "sm90_128", "out"),
    "O rescaled early": (KERNEL, ATTEND, f"{ATTEND} if (has_grown) softmax.rescale(acc_o, alpha);", "sm90_scale_30",
                         "written while a product"),
}

pytestmark = pytest.mark.skipif(not shutil.which(CXX), reason=f"no C++ compiler: {CXX} is not on PATH")


def run(driver, *arguments):
    return subprocess.run([driver, *arguments], capture_output=True, text=True, timeout=240)


def emulated(csrc):
    """A copy of csrc with the emulator's files in place of its own, and of ptx_sm90.cuh what has no asm."""
    shutil.copytree(CSRC, csrc)
    shutil.copytree(EMULATOR, csrc, dirs_exist_ok=True)
    ptx = (CSRC / "ptx_sm90.cuh").read_text()
    descriptor = re.search(r"^template [^\n]* matrix_descriptor\(.*?^}\n", ptx, re.MULTILINE | re.DOTALL)
    (csrc / "matrix_descriptor.cuh").write_text(descriptor[0])
    return csrc


def compiled(csrc, folder, *flags, sources=SOURCES):
    """The objects of sources, all compiled at once."""
    folder.mkdir()
    objects = [folder / Path(source).with_suffix(".o").name for source in sources]
    processes = [subprocess.Popen([CXX, *FLAGS, SOURCES[source], *flags, "-I", csrc, "-x", "c++", "-c", csrc / source,
                                   "-o", out], stderr=subprocess.PIPE, text=True)
                 for source, out in zip(sources, objects)]
    errors = [process.communicate(timeout=240)[1] for process in processes]
    assert not any(process.returncode for process in processes), "".join(errors)
    return objects


def linked(objects, *flags):
    """The driver, beside the first of them."""
    driver = objects[0].with_name("driver")
    subprocess.run([CXX, *flags, *objects, "-o", driver], check=True, timeout=240)
    return driver


def changed(csrc, folder, file, old, new):
    """The driver of a kernel of which one thing is changed."""
    source = (csrc / file).read_text()
    assert old in source, f"{file} has no {old!r} any more: say the same in its new words"
    copy = Path(shutil.copytree(csrc, folder / "csrc", ignore=shutil.ignore_patterns("objects")))
    (copy / file).write_text(source.replace(old, new))
    others = [file for file in (csrc / "objects").glob("*.o") if file.stem != Path(KERNEL).stem]
    return linked([*compiled(copy, folder / "objects", sources=[KERNEL]), *others])


@pytest.fixture(scope="session")
def csrc(tmp_path_factory):
    """emulated(), with the objects and the driver; once, whichever of xdist's workers is the first."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with FileLock(folder / "emulator.lock"):
        if not (folder / "emulator").exists():
            emulated(folder / "emulator")
            linked(compiled(folder / "emulator", folder / "emulator/objects"))
    return folder / "emulator"


def assert_passed(done):
    assert done.returncode == 0 and " 0 failed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_cases(schedule, csrc):
    assert_passed(run(csrc / "objects/driver", schedule))


def test_no_bad_access_or_undefined_behaviour(csrc, tmp_path):
    cxx("address,undefined", "-Og")  # skips without their runtime
    driver = linked(compiled(csrc, tmp_path / "objects", *SANITIZERS), *SANITIZERS)
    assert_passed(run(driver, "--random=5", *SANITIZED_CASES))
    overrun = run(driver, "--random=5", "--overrun", "sm90_one")
    assert overrun.returncode and "AddressSanitizer: heap-buffer-overflow" in overrun.stderr


def test_consumers_that_take_turns(csrc, tmp_path):
    driver = changed(csrc, tmp_path, KERNEL, "bool kPingPong_ = false", "bool kPingPong_ = true")
    assert_passed(run(driver, *PING_PONG_CASES))


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_seen(fault, csrc, tmp_path):
    file, old, new, cases, said = FAULTS[fault]
    done = run(changed(csrc, tmp_path, file, old, new), *cases.split())
    assert done.returncode == 1 and re.search(said, done.stdout), done.stdout + done.stderr
