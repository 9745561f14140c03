"""csrc's kernels as they are written, on the CPU: tests/emulator has the instructions, drivers/ the cases.

Copies and products happen as early or as late as they may, or at any time, and threads run in any order. That all cases
pass says little where the emulator would not see a fault. So it is shown every kernel without any one of its statements
that synchronize (faults.py finds them).
"""
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import faults
from cases import CAMPAIGN, slow_unless
from conftest import made_once
from test_sanitizers import assert_passed, cxx, run

EMULATOR = Path(__file__).parent
DRIVER, DECODE_DRIVER = EMULATOR / "drivers/driver.cpp", EMULATOR / "drivers/decode_driver.cpp"
CXX = os.environ.get("CXX", "g++")
PARTS = sorted(file.name for file in EMULATOR.glob("*.cpp"))
# Kernels look at the same bytes as several types. What is aligned as tensor maps are has had another ABI since GCC 4.6.
FLAGS = ("-std=c++20", "-g1", "-fno-strict-aliasing", "-Wno-psabi", "-Wno-unknown-pragmas",
         "-DMINIMAL_ATTN_EMULATED=1")
# Where nvcc takes the kernels for a GPU of sm_90a.
CUDA = "-D__CUDACC__", "-D__CUDA_ARCH__=900", "-D__CUDA_ARCH_FEAT_SM90_ALL", "-include", "common/launch.h"

SCHEDULES = ["--early=1", "--late=2", "--random=3"]
MORE_SCHEDULES = [f"--{mode}={seed}" for seed in range(4, 12) for mode in ("early", "late", "random")]
SANITIZERS = "-fsanitize=address,undefined", "-fno-sanitize-recover=all"
SANITIZED_CASES = ["bf16_256_narrow", "gqa", "simt_bias", "sm80_256_narrow", "sm80_one", "dmma_128", "sm90_40",
                   "sm90_136_causal", "sm90_one", "sm90_mods_drop_128", "fp32_128", "dropout", "sm80_bf16_192",
                   "sm80_mask", "sm90_splits_drop", "sm90_turns", "sm90_lens_256", "sm90_scale_30_256", "sm90_bias",
                   "sm90_mask"]

# Cases of each kernel that `make test` runs: a case for each size of tiles, with a mask, without one and with lengths.
KERNEL_CASES = {
    "flash.cu": ["fp32_64", "fp32_128", "fp32_256_long", "fp16_64", "fp16_128", "bf16_256", "dropout", "dropout_part",
                 "simt_softcap"],
    "simt/flash_bwd.cu": ["fp32_256", "fp16_256_narrow", "bf16_128", "gqa", "dropout_part", "seq_lens_clamped",
                          "rows_without_keys", "simt_alibi"],
    "simt/flash_bwd_bias.cu": ["simt_bias", "simt_bias_of_keys"],
    "sm80/flash_sm80.cu": ["sm80_bf16_96", "sm80_fp16_192", "sm80_bf16_256", "sm80_128_narrow", "sm80_packed_drop",
                           "sm80_bias_fp32", "sm80_sinks", "sm80_window_below_0"],
    "sm80/flash_bwd_sm80.cu": ["sm80_fp16_64", "sm80_order_narrow", "sm80_256_narrow", "sm80_one", "sm80_softcap_drop"],
    "sm90/bwd/flash_bwd_sm90.cu": ["sm90_drop_64", "sm90_drop_128", "sm90_turns", "sm90_turns_causal",
                                   "sm90_mods_drop_128", "sm90_low_128", "sm90_softcap", "sm90_packed_turns",
                                   "sm90_splits_turns", "sm90_unseen", "sm90_many_late", "sm90_long_few", "sm90_packed",
                                   "sm90_narrow_v", "sm90_narrow_v_late", "sm90_narrow_v_lens",
                                   "sm90_narrow_v_splits", "sm90_narrow_v_window", "sm90_narrow_v_packed"],
    "sm90/bwd/flash_bwd_wide_sm90.cu": ["sm90_136_causal", "sm90_low_256", "sm90_drop_192", "sm90_drop_256",
                                        "sm90_packed_drop", "sm90_pair_192", "sm90_pair_packed",
                                        "sm90_narrow_v_drop"],
    "sm90/flash_dmma.cu": ["dmma_64", "dmma_64_causal", "dmma_128_causal"],
    "cache/decode.cu": ["one", "d64", "d128", "d256", "narrow", "wide_v", "mqa", "tokens", "many_rows", "pages_16",
                        "pages_3", "interleaved", "leftpad", "leftpad_pages", "batch_idx", "window", "window_both",
                        "softcap", "alibi", "sinks", "everything", "packed_shapes", "packed_joins", "packed_padding",
                        "packed_ones", "tiny_scale", "seqused_q", "no_splits", "tiles_and_splits", "three_splits",
                        "scale_30", "clamped", "tree", "tree_tiles", "tree_64", "tree_causal", "uneven",
                        "uneven_heads"],
    "cache/decode_sm90.cu": ["tall_64", "tall_narrow", "tall_pages", "tall_splits", "tall_everything", "tall_tree",
                             "tall_uneven", "mixed_lengths", "mixed_padding", "all_kernels"],
    "cache/prefill_sm90.cu": ["prefill_pages", "prefill_interleaved", "prefill_leftpad", "prefill_batch_idx",
                              "prefill_clamped"],
    "sm90/flash_sm90.cu": ["sm90_64", "sm90_77", "sm90_window_both", "sm90_64_causal", "sm90_80_causal", "sm90_104",
                           "sm90_lens_192", "sm90_256", "sm90_one", "sm90_scale_30_96", "sm90_packed_v",
                           "sm90_narrow_v"],
    "sm90/mods/flash_dropout_sm90.cu": ["sm90_drop_64", "sm90_drop_128", "sm90_drop_192"],
    "sm90/mods/flash_masked_sm90.cu": ["sm90_units", "sm90_units_causal", "sm90_mask"],
    "sm90/mods/flash_max_logits_sm90.cu": ["sm90_max", "sm90_max_scale_30", "sm90_max_packed"],
    "sm90/mods/flash_mods_sm90.cu": ["sm90_bias", "sm90_mask_rows", "sm90_mask", "sm90_mods_scale_30",
                                     "sm90_alibi_no_keys"],
}
KERNELS = list(KERNEL_CASES)

# The cases that are shown the faults of a file.
SIMT = ["fp32_64", "fp16_128", "fp16_256"]
SM80 = ["sm80_one", "sm80_order", "sm80_fp16_192", "sm80_256_narrow"]
SM90 = ["sm90_128_causal", "sm90_200_causal", "sm90_256", "sm90_lens_128", "sm90_many_causal", "sm90_packed"]
SM90_BACKWARD = ["sm90_128_causal", "sm90_splits", "sm90_turns", "sm90_turns_causal", "sm90_packed", "sm90_drop_64",
                 "sm90_many_causal", "sm90_long", "sm90_many_late", "sm90_long_late", "sm90_softcap", "sm90_narrow_v",
                 "sm90_narrow_v_late"]
SHOWN_TO = {
    "simt/tiles.h": SIMT, "flash.cu": SIMT, "simt/flash_bwd.cu": SIMT, "simt/flash_bwd_bias.cu": ["simt_bias"],
    "sm80/tiles.cuh": SM80, "sm80/flash_sm80.cu": ["sm80_fp16_64", "sm80_fp16_192"], "sm80/flash_bwd_sm80.cu": SM80,
    "sm90/bwd/flash_bwd_sm90.cuh": SM90_BACKWARD, "sm90/bwd/producer.cuh": SM90_BACKWARD,
    "sm90/bwd/dq.cuh": SM90_BACKWARD, "sm90/bwd/consumer.cuh": SM90_BACKWARD,
    "sm90/bwd/flash_bwd_wide_sm90.cu": ["sm90_pair", "sm90_pair_causal", "sm90_pair_lens", "sm90_pair_packed",
                                        "sm90_pair_window", "sm90_136_causal", "sm90_many_192", "sm90_256_rows",
                                        "sm90_lens_256"],
    "sm90/bwd/launch.cuh": SM90_BACKWARD,
    "sm90/flash_dmma.cu": ["dmma_64_causal", "dmma_128_causal"],
    "sm90/tiles.cuh": SM90, "sm90/producer.cuh": SM90, "sm90/flash_sm90.cuh": SM90,
    "sm90/mods/bias.cuh": ["sm90_bias"], "sm90/mods/flash_masked_sm90.cu": ["sm90_mask_all", "sm90_units"],
    "sm90/mods/masked_scores.cuh": ["sm90_mask_all", "sm90_units"],
    "cache/prefill_sm90.cu": ["prefill", "prefill_pages"],
    "cache/decode.cu": ["one", "d64", "d128", "scale_30", "packed_long"],
    "cache/work.cuh": ["uneven", "uneven_packed", "uneven_clusters"],
    "cache/decode_sm90.cu": ["tall_64", "tall_splits", "tall_pages", "tall_tiles"],
    "cache/combine.cuh": ["d64", "d128", "mqa", "packed_long", "uneven_heads"],
}

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(600),  # the first test compiles csrc
              pytest.mark.skipif(not shutil.which(CXX), reason=f"no C++ compiler: {CXX} is not on PATH")]


def emulated(csrc):
    """A copy of csrc with the emulator's files in place of its own, and of ptx/sm90.cuh what has no asm."""
    shutil.copytree(faults.CSRC, csrc, dirs_exist_ok=True)
    faults.make_switchable(csrc)
    shutil.copytree(EMULATOR, csrc, dirs_exist_ok=True)
    ptx = (faults.CSRC / "ptx/sm90.cuh").read_text()
    descriptor = re.search(r"^template [^\n]* make_smem_desc\(.*?^}\n", ptx, re.MULTILINE | re.DOTALL)
    (csrc / "make_smem_desc.cuh").write_text(descriptor[0])
    return csrc


def compiled(csrc, folder, *flags, sources=(*KERNELS, *PARTS, DRIVER)):
    """The objects of sources."""
    folder.mkdir()

    def compile(source):
        out = folder / Path(source).with_suffix(".o").name
        # Kernels take a third less time to compile at -O1 than at -O2, and wait for the emulator as long.
        how = ("-O1", *CUDA) if source in KERNELS else ("-O2",)
        done = subprocess.run([CXX, *FLAGS, *how, *flags, "-I", csrc, "-x", "c++", "-c", csrc / source,
                               "-o", out], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return out

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(compile, sources))


def linked(objects, name, *flags):
    """The program `name`, beside the first of the objects."""
    program = objects[0].with_name(name)
    subprocess.run([CXX, *flags, *objects, "-o", program], check=True, timeout=240)
    return program


@pytest.fixture(scope="session")
def csrc(tmp_path_factory):
    """emulated(), with the objects and the driver."""
    return made_once(tmp_path_factory, "emulator",
                     lambda csrc: linked(compiled(emulated(csrc), csrc / "objects"), "driver"))


@pytest.fixture(scope="session")
def driver_of(csrc, tmp_path_factory):
    """A function from the name of a file of csrc to the driver that runs it."""
    kernels = [kernel for kernel in KERNELS if kernel.startswith("cache/")]
    parts = [csrc / f"objects/{Path(part).stem}.o" for part in (*kernels, *PARTS)]
    decode = made_once(tmp_path_factory, "decode_driver", lambda folder: linked(
        [*compiled(csrc, folder / "objects", sources=[DECODE_DRIVER]), *parts], "driver"))
    return lambda name: (decode if name.startswith("cache/") else csrc) / "objects/driver"


@pytest.mark.parametrize("kernel", KERNEL_CASES)
def test_kernel(kernel, driver_of):
    assert_passed(run(driver_of(kernel), *SCHEDULES, *KERNEL_CASES[kernel]))


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.parametrize("schedules, part", [(SCHEDULES, part) for part in range(3)], ids=str)
def test_all_decode_cases(schedules, part, driver_of):
    assert_passed(run(driver_of("cache/decode.cu"), *schedules, f"--part={part}/3"))


@pytest.mark.parametrize("schedules, part, parts", [
    *(pytest.param([SCHEDULES[1 + part // 4]], part, 8, marks=slow_unless(False, part == 0)) for part in range(8)),
    *(pytest.param(SCHEDULES, part, 12, marks=CAMPAIGN) for part in range(12))], ids=str)
def test_all_cases(schedules, part, parts, csrc):
    """Each as late as may be or at random, an eighth of them in CI. With all schedules, the bits of the results are
    compared, too, as test_kernel does it for some."""
    assert_passed(run(csrc / "objects/driver", *schedules, f"--part={part}/{parts}"))


@pytest.fixture(scope="session")
def sanitized(csrc, tmp_path_factory):
    """The driver with the sanitizers."""
    cxx("address,undefined", "-Og")  # skips without their runtime
    folder = made_once(tmp_path_factory, "sanitized", lambda folder: linked(
        compiled(csrc, folder / "objects", *SANITIZERS, "-O0"), "driver", *SANITIZERS))
    return folder / "objects/driver"


@pytest.mark.slow
@pytest.mark.campaign  # the driver takes minutes to compile
@pytest.mark.parametrize("part", range(4))
def test_address_sanitizer_finds_nothing(part, sanitized):
    """In a few cases of each kernel and of each way to read scores."""
    assert_passed(run(sanitized, "--random=5", *SANITIZED_CASES[part::4]))


CALLS_THAT_FAIL = """
    #include <cstdio>
    #include <stdexcept>
    #include <utility>
    #include "flash_cache.h"
    #include "common/launch.h"
    void report(auto call) try { call(); } catch (const std::exception &error) { std::puts(error.what()); }
    int main() {
        for (auto flash_decode : {sm80::flash_decode, sm90::flash_decode})
            for (std::pair<int, int> size : {std::pair(1, 1 << 30), {(1 << 15) + 1, 64}}) report([=] {
                DecodeParams p{};
                p.batch_size = 1 << 10, p.nheads = size.first, p.nheads_k = 1, p.num_sequences = 1, p.page_size = 64;
                p.num_sms = emulator::gpu.num_sms;
                p.seqlen_q = p.max_seqlen_q = p.max_rows = 1, p.seqlen_k = size.second;
                p.head_dim = p.head_dim_v = 64, p.q = p.k = p.v = p.o = {nullptr, 64, 64, 64};
                flash_decode(p);
            });
        report([] {
            AttnParams p{.batch_size = 1 << 21, .nheads = 1024, .nheads_k = 1, .seqlen_q = 1, .head_dim = 64};
            sm90::flash_forward(p);
        });
        emulator::gpu.capability = 80;
        report([] { sm90::flash_forward({}); });
    }"""


@pytest.mark.slow
def test_errors_before_anything_is_looked_at(csrc, tmp_path):
    """More work than there are numbers for, and another GPU, are refused. There are no tensors."""
    source = tmp_path / "main.cpp"
    source.write_text(CALLS_THAT_FAIL)
    objects = [file for file in (csrc / "objects").glob("*.o") if file.stem != DRIVER.stem]
    done = run(linked([*compiled(csrc, tmp_path / "objects", sources=[source]), *objects], "main"))
    wanted = [r"the call has over 2\^22", "a key head has over 32768"] * 2 + [
        ".*q has .* tiles", "flash_sm90.cu needs a GPU of sm_90"]
    for line, want in zip(done.stdout.splitlines(), wanted, strict=True):
        assert re.match(f"minimal_attn: {want}", line)


def test_faults_finds_every_synchronization():
    """So that each can be left out: faults.py does not find others."""
    for file in faults.kernel_files():
        for call, is_alone in faults.calls(file.name, file.read_text()):
            assert is_alone, f"write it as a statement at the start of a line: {call}"


OBSERVED = {str(statement): n for n, statement in enumerate(faults.statements()) if statement.is_observed}
# `make test` leaves out the first statement of each file, CI of each file and primitive, and `make campaign` all.
FIRST = {(x.split(":")[0], x.rpartition("-")[2]): x for x in reversed(OBSERVED)}.values()
IN_GATE = {x.split(":")[0]: x for x in reversed(OBSERVED)}.values()


@pytest.mark.parametrize("statement", [pytest.param(x, marks=slow_unless(x in IN_GATE, x in FIRST)) for x in OBSERVED])
def test_missing_synchronization_is_seen(statement, driver_of):
    """By a wrong result, other bits, a deadlock, or an error of the emulator; a wild pointer ends the driver."""
    file = statement.split(":")[0]
    for schedules in SCHEDULES, MORE_SCHEDULES:
        done = run(driver_of(file), f"--without={OBSERVED[statement]}", *schedules, *SHOWN_TO[file])
        if done.returncode:
            return
    pytest.fail(f"it is not needed, or no case shows that it is: {done.stdout}")
