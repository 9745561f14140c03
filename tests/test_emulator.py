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

from conftest import made_once
from test_sanitizers import cxx

DRIVER = Path(__file__).with_name("driver.cpp")
EMULATOR = DRIVER.with_name("emulator")
CSRC = DRIVER.parents[1] / "csrc"
CXX = os.environ.get("CXX", "g++")
KERNEL = "flash_sm90.cu"
SOURCES = {KERNEL: "-Og", "instructions.cpp": "-O3", "wgmma.cpp": "-O3", DRIVER: "-O1"}
# Kernels look at the same bytes as several types. What is aligned as tensor maps are has had another ABI since GCC 4.6.
FLAGS = ("-std=c++20", "-g1", "-fno-strict-aliasing", "-Wno-psabi", "-DMINIMAL_ATTN_LINKED=1",
         "-DMINIMAL_ATTN_EMULATED=1")

SCHEDULES = ["--early=1", "--late=2", "--random=3"]
SANITIZERS = "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Og"
SANITIZED_CASES = ["sm90_40", "sm90_104", "sm90_136_causal", "sm90_96", "sm90_lens_256", "sm90_one", "sm90_scale_0",
                   "sm90_scale_30_256"]

# Lines of the kernel.
AWAIT_O = "warpgroup_wait<0>(acc_o[0], P);\n            "
RELEASE_V = "if (!is_first) release(shared.v_empty[(block - 1) % kStages]);\n"
ROUND_P = ("for (int i = 0; i < 2 * kNTiles; i++) "
           "P[i / 4][i % 4] = pack<T>(acc_s[0][i / 2][i % 2 * 2], acc_s[0][i / 2][i % 2 * 2 + 1]);\n")
AWAIT_OUT = "tma_store_commit_and_wait_read();\n        }\n        "
RELEASE_Q = "release(shared.q_empty[consumer][tile % kQStages]);\n"
ZERO_O = "for (auto &x : acc_o[0]) x[0] = x[1] = x[2] = x[3] = 0.f;"
SKIP_K, SKIP_V = ", release(shared.k_empty[block % kStages]);", ", release(shared.v_empty[block % kStages]);"

# What is wrong: (file, what is there, what is there instead, cases that show it, what they say).
FAULTS = {
    # Where things are.
    "swizzle": ("matrix_descriptor.cuh", "kRowBytes == 128 ? 1 : 2", "1", "sm90_96", "lse"),
    "leading offset": (KERNEL, ", kBlockN * kRowBytes)", ")", "sm90_128", "out"),
    "panel of K": (KERNEL, "panel * kBlockN * kRowBytes", "panel * 32 * kRowBytes", "sm90_128", "lse"),
    "rows of V": (KERNEL, "kk * 16 * kRowBytes / 16", "kk * 8 * kRowBytes / 16", "sm90_128", "out"),
    "strides": ("tensor_map.h", "bytes(row_stride), bytes(head_stride)", "bytes(head_stride), bytes(row_stride)",
                "sm90_many", "lse"),
    "head of a tile": (KERNEL, "bh0 + i % heads", "bh0", "sm90_many_causal", "nan"),
    "counter": (KERNEL, "atomicAdd(p.tile_counter, 1)", "atomicAdd(p.tile_counter, 2)", "sm90_many_causal", "nan"),
    "causal mask": ("mask.cuh", "row + 8 * i + 1 +", "row + 8 * i +", "sm90_128_causal", "lse"),
    "another GPU": ("launch.h", "{ return 90; }", "{ return 80; }", "sm90_one", "needs a GPU of sm_90"),
    # Barriers.
    "init not awaited": (KERNEL, "__syncthreads();", "", "sm90_128", "is not initialised"),
    "init not fenced": (KERNEL, "fence_mbarrier_init();", "", "sm90_128", "may not see"),
    "an arrival too many": (KERNEL, "(shared.k_empty[s], 4 *", "(shared.k_empty[s], 1 + 4 *", "sm90_128", "deadlock"),
    "an arrival too few": (KERNEL, "(shared.k_empty[s], 4 *", "(shared.k_empty[s], -1 + 4 *", "sm90_128_causal",
                           "lse|deadlock"),
    "bytes": (KERNEL, "sizeof(tile))", "sizeof(tile) / 2)", "sm90_128", "bytes to come"),
    "phase of a ring": (KERNEL, "i / n % 2", "i % 2", "sm90_128", "deadlock|more arrivals"),
    "phase of the producer": (KERNEL, "await(empty, i + n)", "await(empty, i)", "sm90_128", "deadlock"),
    "room for Q not awaited": (KERNEL, "await_room(shared.q_empty[c], tile);", "", "sm90_many", "A was|lse|arrivals"),
    "room for K not awaited": (KERNEL, "await_room(shared.k_empty, block);", "", "sm90_128", "lse|arrivals"),
    "room for V not awaited": (KERNEL, "await_room(shared.v_empty, block);", "", "sm90_128", "out|arrivals"),
    "Q not awaited": (KERNEL, "await(shared.q_full[consumer], tile);", "", "sm90_many", "A was|nan|lse"),
    "first K not awaited": (KERNEL, "await(shared.k_full, block);", "", "sm90_128", "lse"),
    "K not awaited": (KERNEL, "await(shared.k_full, block + 1);", "", "sm90_128 sm90_256", "lse"),
    "V not awaited": (KERNEL, "await(shared.v_full, block);", "", "sm90_256 sm90_128_causal", "out"),
    "Q not released": (KERNEL, RELEASE_Q, "", "sm90_many", "deadlock"),
    "skipped K not released": (KERNEL, SKIP_K, ";", "sm90_128_causal", "deadlock"),
    "skipped V not released": (KERNEL, SKIP_V, ";", "sm90_128_causal", "deadlock"),
    "work not awaited": (KERNEL, "await(shared.work_full, tile);", "", "sm90_many", "."),
    "work overwritten": (KERNEL, "shared.work[tile % 4]", "shared.work[tile % 2]", "sm90_many", "lse|out|deadlock"),
    "V released early": (KERNEL, AWAIT_O + RELEASE_V, RELEASE_V + AWAIT_O, "sm90_128_causal sm90_256", "out"),
    "registers": (KERNEL, ": 160;", ": 168;", "sm90_many_pairs", "deadlock"),
    "registers of two": (KERNEL, "kConsumers == 2 ? 240", "kConsumers == 2 ? 248", "sm90_256", "deadlock"),
    "lanes of a skipped block": (KERNEL, "__syncwarp(), release", "release", "sm90_lens_128", "deadlock"),
    # Zeros for V after the end of a sample.
    "no zeros": (KERNEL, "[i] = uint4{};", ";", "sm90_lens_128", "nan"),
    "zeros not fenced": (KERNEL, "fence_proxy_async();\n            barrier_sync(1", "barrier_sync(1", "sm90_lens_128",
                         "nan"),
    "zeros not awaited": (KERNEL, "barrier_sync(1, kThreads);", "", "sm90_lens_128", "nan"),
    "zeros of one consumer": (KERNEL, "for (auto &panel :", "if (consumer == 0) for (auto &panel :",
                              "sm90_lens_128 sm90_lens_64", "nan"),
    # From one tile to the next.
    "mask of another sample": (KERNEL, "Mask mask(p, work.b);", "Mask mask(p, 0);", "sm90_many_lens", "lse|out"),
    "O of what was there": (KERNEL, ZERO_O, ZERO_O.replace("0.f", "NAN"), "sm90_many", "nan"),
    # Products under way.
    "no wgmma.fence": (KERNEL, "warpgroup_arrive();", "", "sm90_128", "without a wgmma.fence"),
    "first S not awaited": (KERNEL, "warpgroup_wait<0>(acc_s[0]);", "", "sm90_128", "nan|not told"),
    "S not awaited": (KERNEL, "warpgroup_wait<1>(acc_s[0]);", "", "sm90_128", "nan|not told"),
    "P not named": (KERNEL, "(acc_o[0], P);", "(acc_o[0]);", "sm90_128", "not told"),
    "P rounded early": (KERNEL, AWAIT_O + RELEASE_V, ROUND_P + AWAIT_O + RELEASE_V, "sm90_128", "out"),
    "O rescaled early": (KERNEL, AWAIT_O + RELEASE_V, "if (has_grown) softmax.rescale(acc_o, alpha);\n" + AWAIT_O +
                         RELEASE_V, "sm90_scale_30", "written while a product"),
    # Scores that have grown too large.
    "growth not seen": (KERNEL, "> kMaxSum)", "> 1e30f)", "sm90_scale_30", "nan|out"),
    "growth not seen at 256": (KERNEL, "> kMaxSum)", "> 1e30f)", "sm90_scale_30_256", "nan|out"),
    "growth under a mask": (KERNEL, "follows = n_block >= n_block_full - 1", "follows = is_first",
                            "sm90_scale_30_causal", "lse"),
    "scores added to": (KERNEL, "for (auto &x : acc_s[0]) x[0] = x[1] = x[2] = x[3] = 0.f;", "", "sm90_scale_30",
                        "lse"),
    "rows of Q again": (KERNEL, "[consumer], 64, 16 * warp_idx", "[consumer], 64, 0", "sm90_scale_30_128", "lse"),
    "rows of K again": (KERNEL, "lane_idx % 8 + lane_idx / 16 * 8,", "lane_idx % 8,", "sm90_scale_30_128", "lse"),
    "half of Q again": (KERNEL, "  d + lane_idx / 16 * 8)", "  d)", "sm90_scale_30_192", "lse"),
    "half of K again": (KERNEL, "d + lane_idx / 8 % 2 * 8)", "d)", "sm90_scale_30_256", "lse"),
    "panel of K again": (KERNEL, "[block % kStages], kBlockN, 8 * n", "[block % kStages], 64, 8 * n",
                         "sm90_scale_30_96", "lse"),
    "swizzle again": (KERNEL, "(kRowBytes - 16)", "112", "sm90_scale_30_96", "lse"),
    "K of the block before": (KERNEL, "sK[block % kStages], kBlockN", "sK[(block - 1) % kStages], kBlockN",
                              "sm90_scale_30_causal", "lse"),
    "O not rescaled": (KERNEL, "again();\n                has_grown =", "again();\n", "sm90_scale_30", "out"),
    # Out by TMA.
    "out not fenced": (KERNEL, "fence_proxy_async();\n        __syncwarp();", "__syncwarp();", "sm90_128", "out"),
    "lanes not awaited": (KERNEL, "__syncwarp();\n        if (lane_idx == 0) {", "if (lane_idx == 0) {", "sm90_128",
                          "out"),
    "Q not read by all": (KERNEL, "barrier_sync(2 + consumer, 128);", "", "sm90_one sm90_128", "A was written"),
    "Q released early": (KERNEL, AWAIT_OUT + RELEASE_Q, RELEASE_Q + AWAIT_OUT, "sm90_many", "out|lse"),
    "out not awaited": (KERNEL, "tma_store_commit_and_wait_read();", "", "sm90_one", "has not waited for"),
    "rows of out": (KERNEL, "row0 + 16 * warp_idx, work.h", "row0, work.h", "sm90_128", "out"),
    "box of out": (KERNEL, "p.o_row_stride, 16,", "p.o_row_stride, 64,", "sm90_128", "out"),
    "place of out": (KERNEL, "tma_store(sO[i][16 * warp_idx]", "tma_store(sO[i][8 * warp_idx + 1]", "sm90_128",
                     "TMA swizzles"),
    "swizzle of out": (KERNEL, "(kRowBytes - 16)", "112", "sm90_96", "out"),
}

pytestmark = [pytest.mark.cpu,
              pytest.mark.skipif(not shutil.which(CXX), reason=f"no C++ compiler: {CXX} is not on PATH")]


def run(driver, *arguments):
    return subprocess.run([driver, *arguments], capture_output=True, text=True, timeout=240)


def emulated(csrc):
    """A copy of csrc with the emulator's files in place of its own, and of ptx_sm90.cuh what has no asm."""
    shutil.copytree(CSRC, csrc, dirs_exist_ok=True)
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
    """emulated(), with the objects and the driver."""
    return made_once(tmp_path_factory, "emulator", lambda csrc: linked(compiled(emulated(csrc), csrc / "objects")))


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


def test_more_tiles_than_an_int_can_count(csrc, tmp_path):
    """An error before anything is looked at, as there are no tensors."""
    source = tmp_path / "main.cpp"
    source.write_text("""
        #include <cstdio>
        #include <exception>
        #include "kernels.h"
        int main() try {
            AttnParams p{.batch_size = 1 << 21, .nheads = 1024, .nheads_k = 1, .seqlen_q = 1, .head_dim = 64};
            sm90::flash_forward(p);
        } catch (const std::exception &error) { std::puts(error.what()); }
        """)
    objects = [x for x in (csrc / "objects").glob("*.o") if x.stem != DRIVER.stem]
    subprocess.run([CXX, *FLAGS, "-I", csrc, source, *objects, "-o", tmp_path / "main"], check=True, timeout=240)
    assert run(tmp_path / "main").stdout == "minimal_attn: there are too many tiles of rows\n"


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_seen(fault, csrc, tmp_path):
    file, old, new, cases, said = FAULTS[fault]
    done = run(changed(csrc, tmp_path, file, old, new), *cases.split())
    assert done.returncode == 1 and re.search(said, done.stdout), done.stdout + done.stderr
