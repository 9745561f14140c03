"""csrc's kernels as they are written, on the CPU: tests/emulator has the instructions, drivers/ the cases.

Copies and products happen as early or as late as they may, or at any time, and threads run in any order. That all cases
pass says little where the emulator would not see a fault. So it is shown every kernel without any one of its statements
that synchronize (faults.py finds them), and selftest.cpp, which uses each instruction wrongly.
"""
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import faults
from cases import slow_unless
from conftest import made_once
from test_sanitizers import assert_passed, cxx

DRIVER = Path(__file__).parent / "drivers/driver.cpp"
# Drivers of single kernels, and what else they call.
OTHER_DRIVERS = {"cache/decode.cu": DRIVER.with_name("decode_driver.cpp"),
                 "simt/append.cu": DRIVER.with_name("append_driver.cpp")}
ALSO_CALLED = {"cache/decode.cu": ["cache/decode_sm90.cu", "cache/prefill_sm90.cu"], "simt/append.cu": []}
EMULATOR = Path(__file__).parent
SELFTEST = EMULATOR / "selftest.cpp"
CXX = os.environ.get("CXX", "g++")
# These ask a real GPU.
KERNELS = sorted({faults.name_of(file, faults.CSRC) for file in faults.CSRC.rglob("*.cu")}
                 - {"common/device.cu", "common/counters.cu"})
PARTS = sorted(file.name for file in EMULATOR.glob("*.cpp") if file != SELFTEST)
# Kernels look at the same bytes as several types. What is aligned as tensor maps are has had another ABI since GCC 4.6.
FLAGS = ("-std=c++20", "-g1", "-fno-strict-aliasing", "-Wno-psabi", "-Wno-unknown-pragmas",
         "-DMINIMAL_ATTN_EMULATED=1")
# Where nvcc takes the kernels for a GPU of sm_90a.
CUDA = "-D__CUDACC__", "-D__CUDA_ARCH__=900", "-D__CUDA_ARCH_FEAT_SM90_ALL", "-include", "common/launch.h"

SCHEDULES = ["--early=1", "--late=2", "--random=3"]
MORE_SCHEDULES = [f"--{mode}={seed}" for seed in range(4, 12) for mode in ("early", "late", "random")]
SANITIZERS = "-fsanitize=address,undefined", "-fno-sanitize-recover=all"
SANITIZED_CASES = ["bf16_256_narrow", "gqa", "simt_bias", "sm80_256_narrow", "sm80_one", "dmma_128", "sm90_40",
                   "sm90_136_causal", "sm90_one", "sm90_mods_drop_128"]
MORE_SANITIZED_CASES = ["fp32_128", "dropout", "sm80_bf16_192", "sm80_mask", "sm90_splits_drop", "sm90_turns",
                        "sm90_lens_256", "sm90_scale_30_256", "sm90_bias", "sm90_mask"]

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
                                   "sm90_splits_turns", "sm90_unseen", "sm90_many_late", "sm90_long_few", "sm90_packed"],
    "sm90/bwd/flash_bwd_wide_sm90.cu": ["sm90_136_causal", "sm90_low_256", "sm90_drop_192", "sm90_drop_256",
                                        "sm90_packed_drop", "sm90_pair_192", "sm90_pair_packed"],
    "sm90/flash_dmma.cu": ["dmma_64", "dmma_64_causal", "dmma_128_causal"],
    "simt/append.cu": [],  # all of the driver's
    "cache/decode.cu": ["one", "d64", "d128", "d256", "narrow", "wide_v", "mqa", "tokens", "many_rows", "pages_16",
                        "pages_3", "interleaved", "leftpad", "leftpad_pages", "batch_idx", "window", "window_both",
                        "softcap", "alibi", "sinks", "everything", "packed_shapes", "packed_joins", "packed_padding",
                        "packed_ones", "tiny_scale", "seqused_q", "no_splits", "tiles_and_splits", "three_splits",
                        "scale_30", "clamped", "tree", "tree_tiles", "tree_64", "tree_causal"],
    "cache/decode_sm90.cu": ["tall_64", "tall_narrow", "tall_pages", "tall_splits", "tall_everything", "tall_tree",
                             "mixed_lengths", "mixed_padding", "all_kernels"],
    "cache/prefill_sm90.cu": ["prefill_pages", "prefill_interleaved", "prefill_leftpad", "prefill_batch_idx",
                              "prefill_clamped"],
    "sm90/flash_sm90.cu": ["sm90_64_causal", "sm90_80_causal", "sm90_104", "sm90_lens_192", "sm90_256", "sm90_one",
                           "sm90_scale_30_96", "sm90_packed_v"],
    "sm90/mods/flash_dropout_sm90.cu": ["sm90_drop_64", "sm90_drop_128", "sm90_drop_192"],
    "sm90/mods/flash_mods_sm90.cu": ["sm90_bias", "sm90_mask_rows", "sm90_mask", "sm90_mods_scale_30",
                                     "sm90_alibi_no_keys"],
}

# The cases that are shown the faults of a file.
SIMT = ["fp32_64", "fp16_128", "fp16_256"]
SM80 = ["sm80_one", "sm80_order", "sm80_fp16_192", "sm80_256_narrow"]
SM90 = ["sm90_128_causal", "sm90_200_causal", "sm90_256", "sm90_lens_128", "sm90_many_causal", "sm90_packed"]
SM90_BACKWARD = ["sm90_128_causal", "sm90_splits", "sm90_turns", "sm90_turns_causal", "sm90_packed", "sm90_drop_64",
                 "sm90_many_causal", "sm90_long", "sm90_many_late", "sm90_long_late", "sm90_softcap"]
SHOWN_TO = {
    "simt/tiles.h": SIMT, "flash.cu": SIMT, "simt/flash_bwd.cu": SIMT, "simt/flash_bwd_bias.cu": ["simt_bias"],
    "sm80/tiles.cuh": SM80, "sm80/flash_sm80.cu": ["sm80_fp16_64", "sm80_fp16_192"], "sm80/flash_bwd_sm80.cu": SM80,
    "sm90/bwd/flash_bwd_sm90.cu": SM90_BACKWARD, "sm90/bwd/producer.cuh": SM90_BACKWARD,
    "sm90/bwd/dq.cuh": SM90_BACKWARD, "sm90/bwd/consumer.cuh": SM90_BACKWARD,
    "sm90/bwd/flash_bwd_wide_sm90.cu": ["sm90_pair", "sm90_pair_causal", "sm90_pair_lens", "sm90_pair_packed",
                                        "sm90_pair_window", "sm90_136_causal", "sm90_many_192", "sm90_256_rows",
                                        "sm90_lens_256"],
    "sm90/bwd/launch.cuh": SM90_BACKWARD,
    "sm90/flash_dmma.cu": ["dmma_64_causal", "dmma_128_causal"],
    "sm90/tiles.cuh": SM90, "sm90/producer.cuh": SM90, "sm90/flash_sm90.cuh": SM90,
    "sm90/mods/bias.cuh": ["sm90_bias"], "cache/prefill_sm90.cu": ["prefill", "prefill_pages"],
    "cache/decode.cu": ["one", "d64", "d128", "scale_30"], "cache/share.cuh": ["d64", "d128", "many"],
    "cache/decode_sm90.cu": ["tall_64"], "cache/keys.cuh": ["d64", "d128"],
    "cache/join.cuh": ["d64", "d128", "mqa", "many_rows", "packed", "three_splits"],
}

# {fault in selftest.cpp: the emulator's message}
SELFTEST_FAULTS = {
    # Places.
    "cp.async from an unaligned address": "cp.async of 16 bytes to",
    "cp.async of what is outside": r"ampere\[28\]",
    "ldmatrix without the swizzle": "ampere",
    "ldmatrix without the transpose": "ampere",
    "ldmatrix beyond the end": "shared memory at",
    "fragment of mma": "ampere",
    "fragment of mma in fp64": "doubles",
    "red_add to an unaligned address": "red of 16 bytes",
    "a store of two blocks": "stores 16 bytes where block",
    "tensor map of an unaligned tensor": "TMA cannot take",
    "swizzle of a load": "TMA cannot take",
    "box of a load": "bytes to come",
    "place of a load": "TMA writes at",
    "coordinates of a load": r"hopper\[0\]\[64\]",
    "start of a descriptor": "not in the first row of its pattern",
    "swizzle of a descriptor": "not in the first row of its pattern",
    "leading offset": r"hopper\[0\]\[64\]",
    "columns of K": "hopper",
    "rows of V": "hopper",
    "swizzle of stmatrix": "hopper",
    "box of a store": "shared memory at",
    "place of a store": "TMA writes at",
    # Waiting.
    "cp.async not committed": "copies that thread 0 has not waited for",
    "cp.async not awaited": "copies that thread 0 has not waited for",
    "barrier left out": "ampere",
    "threads of a barrier": "deadlock.* of 352 threads",
    "turn that never comes": "deadlock.* another block",
    "fence of mbarrier_init left out": "may not see yet",
    "proxy fence before a copy left out": r"pairs: number \d+ is",
    "cluster_sync left out": "is not initialised",
    "bytes from the other block": "bytes to come",
    "arrivals of the other block": "deadlock.* 1 arrivals",
    "end of the other block not awaited": "a block that has ended",
    "arrivals": "deadlock.* 1 arrivals",
    "bytes to expect": "deadlock.* bytes to come",
    "phase": "A was written before",
    "registers": "deadlock.* registers",
    "wgmma.fence left out": "without a wgmma.fence",
    "scores not awaited": "not told of registers",
    "P not named": "not told of registers",
    "P written early": "hopper",
    "out written early": "registers were written while",
    "proxy fence left out": "hopper.* is -?nan",
    "lanes of a store not awaited": "hopper",
    "store not awaited": "has not waited for|under way",
}

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(600),  # the first test compiles csrc
              pytest.mark.skipif(not shutil.which(CXX), reason=f"no C++ compiler: {CXX} is not on PATH")]


def run(driver, *arguments):
    return subprocess.run([driver, *arguments], capture_output=True, text=True, timeout=240)


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
    folders = {}
    for kernel, driver in OTHER_DRIVERS.items():
        parts = [csrc / f"objects/{Path(part).stem}.o" for part in (kernel, *ALSO_CALLED[kernel], *PARTS)]
        folders[kernel] = made_once(tmp_path_factory, driver.stem, lambda folder: linked(
            [*compiled(csrc, folder / "objects", sources=[driver]), *parts], "driver"))

    def driver(name):
        assert (csrc / name).is_file(), name
        reads_caches = name.startswith("cache/")
        return folders.get("cache/decode.cu" if reads_caches else name, csrc) / "objects/driver"

    return driver


@pytest.fixture(scope="session")
def selftest(csrc, tmp_path_factory):
    parts = [csrc / f"objects/{Path(part).stem}.o" for part in PARTS]
    folder = made_once(tmp_path_factory, "selftest", lambda folder: linked(
        [*compiled(csrc, folder / "objects", sources=[SELFTEST]), *parts], "selftest"))
    return folder / "objects/selftest"


def test_emulator_has_cases_of_every_kernel():
    assert set(KERNEL_CASES) == set(KERNELS)


@pytest.mark.parametrize("kernel", KERNEL_CASES)
def test_kernel(kernel, driver_of):
    assert_passed(run(driver_of(kernel), *SCHEDULES, *KERNEL_CASES[kernel]))


@pytest.mark.slow
def test_all_decode_cases(driver_of):
    assert_passed(run(driver_of("cache/decode.cu"), SCHEDULES[1]))


@pytest.mark.parametrize("part", [pytest.param(part, marks=slow_unless(False, part == 0)) for part in range(4)])
def test_all_cases(part, csrc):
    """Each as late as may be or at random, a quarter of them in CI. test_kernel compares the bits of all schedules,
    campaign.py of all cases."""
    assert_passed(run(csrc / "objects/driver", SCHEDULES[1 + part // 2], f"--part={part}/4"))


@pytest.fixture(scope="session")
def sanitized(csrc, tmp_path_factory):
    """The driver with the sanitizers."""
    cxx("address,undefined", "-Og")  # skips without their runtime
    folder = made_once(tmp_path_factory, "sanitized", lambda folder: linked(
        compiled(csrc, folder / "objects", *SANITIZERS, "-O0"), "driver", *SANITIZERS))
    return folder / "objects/driver"


@pytest.mark.slow
@pytest.mark.campaign  # the driver takes minutes to compile
def test_address_sanitizer_finds_nothing(sanitized):
    """In a case or two of each kernel and of each way to read scores; campaign.py has more."""
    assert_passed(run(sanitized, "--random=5", *SANITIZED_CASES))


@pytest.mark.slow
@pytest.mark.campaign
def test_address_sanitizer_sees_overrun(sanitized):
    done = run(sanitized, "--random=5", "--overrun", "sm90_one")
    assert done.returncode and "AddressSanitizer: heap-buffer-overflow" in done.stderr


def program(csrc, folder, body, includes=""):
    """A program of its own that calls the kernels."""
    source = folder / "main.cpp"
    source.write_text("""
        #include <cstdio>
        #include <stdexcept>
        #include <utility>
        #include "flash_bwd.h"
        #include "flash_cache.h"
        #include "common/launch.h"
        """ + includes + """
        int main() try {""" + body + """
        } catch (const std::exception &error) { std::puts(error.what()); }
        """)
    objects = [file for file in (csrc / "objects").glob("*.o") if file.stem != DRIVER.stem]
    return linked([*compiled(csrc, folder / "objects", sources=[source]), *objects], "main")


@pytest.mark.slow
def test_kernels_are_one_source(csrc, tmp_path):
    """For compute-sanitizer, driver.cpp includes all of its kernels. So no two of their functions may take each other's
    place."""
    names = re.findall(r'^#include "(.*\.cu)"$', DRIVER.read_text(), re.MULTILINE)
    source = tmp_path / "all.cpp"
    source.write_text("".join(f'#include "{name}"\n' for name in names if name in KERNELS))
    done = subprocess.run([CXX, *FLAGS, *CUDA, "-I", csrc, "-fsyntax-only", source], capture_output=True, text=True,
                          timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_order_of_tiles(csrc, tmp_path):
    """Each tile of each head has one place. Under a causal mask, some heads go together, as many as have 128 tiles: the
    first tiles of all of them, then their second ones, and so on. So do tiles of keys in every deterministic pass.
    Otherwise the tiles of a head follow each other, but the key heads of a packed batch all go together. The last rows
    go first, and in a deterministic causal pass the last keys."""
    main = program(csrc, tmp_path, """
            for (int i = 0; i < 5 * 4 * 3 * 8; i++) {
                AttnBackwardParams p{};
                p.seqlen_q = p.seqlen_k = std::array{1, 130, 1000, 2047, 9000}[i % 5];
                p.nheads_k = std::array{1, 2, 3, 24}[i / 5 % 4];
                p.batch_size = std::array{1, 3, 8}[i / 20 % 3], p.nheads = (1 + i / 60 % 2) * p.nheads_k;
                p.set_window(-1, i / 120 % 2 - 1), p.deterministic = i / 240;
                const int group = p.nheads / p.nheads_k;
                std::set<std::array<int, 3>> seen;
                auto see = [&](const Tile &tile, int block_size, bool is_right) {
                    if (is_right && tile.b < p.batch_size && tile.h < p.nheads && tile.block * block_size < p.seqlen_k)
                        seen.insert({tile.b, tile.h, tile.block});
                };
                const int keys = int(KeyTiles<128>::count(p)), rows = int(RowTiles<64>::count(p));
                const auto order = KeyTiles<128>::order<Divisor>(p);
                for (int idx = 0; idx < keys; idx++) {
                    const Tile tile = KeyTiles<128>::at(p, order, idx), same = KeyTiles<128>::at(p, idx);
                    see(tile, 128, tile.h == tile.h_k * group && tile.h == same.h && tile.block == same.block);
                }
                if (int(seen.size()) != keys) std::printf("case %d: %zu of %d tiles of keys\\n", i, seen.size(), keys);
                seen.clear();
                for (int idx = 0; idx < rows; idx++) {
                    const Tile tile = RowTiles<64>::at(p, idx);
                    see(tile, 64, tile.h_k == tile.h / group);
                }
                if (int(seen.size()) != rows) std::printf("case %d: %zu of %d tiles of rows\\n", i, seen.size(), rows);
            }
            for (uint32_t power = 1; power < 1u << 31; power *= 2)
                for (uint32_t value : {std::max(1u, power - 1), power, power + 1, power / 3 * 2 + 1})
                    for (uint32_t n : {0u, 1u, value - 1, value, 2 * value - 1, ~0u / 2 / value * value, ~0u / 2})
                        if (n < 1u << 31 && Divisor(value).quotient(n) != n / value)
                            std::printf("%u / %u\\n", n, value);
            auto print = [](auto tiles, const AttnBackwardParams &p, std::initializer_list<int> indices) {
                for (int idx : indices) {
                    const Tile tile = tiles.at(p, idx);
                    std::printf("%d %d %d, ", tile.b, tile.h, tile.block);
                }
                std::puts("");
            };
            AttnBackwardParams p{};
            p.batch_size = 3, p.nheads = p.nheads_k = 4, p.seqlen_q = p.seqlen_k = 2048, p.set_window(-1, 0);
            print(KeyTiles<128>(p), p, {0, 7, 8, 127, 128, 131, 132, 191});
            print(RowTiles<128>(p), p, {0, 7, 8, 127, 128, 131, 132, 191});
            p.deterministic = true, print(KeyTiles<128>(p), p, {0, 15, 16, 191});
            p.set_window(-1, -1), print(KeyTiles<128>(p), p, {0, 15, 16, 191});
            p.deterministic = false;
            print(KeyTiles<128>(p), p, {0, 15, 16, 191});
            print(RowTiles<128>(p), p, {0, 15, 16, 191});
            const int cu_seqlens[] = {0, 100, 300};
            p.batch_size = 2, p.seqlen_q = p.seqlen_k = 300, p.cu_seqlens_q = p.cu_seqlens_k = cu_seqlens;
            for (int right : {-1, 0}) {
                p.set_window(-1, right);
                print(KeyTiles<128>(p), p, {0, 3, 4, 7, 8, 11, 12, 15});
                print(RowTiles<128>(p), p, {0, 1, 2, 3, 4, 7, 12, 15});
            }
            """, '#include <array>\n#include <set>\n#include "common/key_tiles.cuh"')
    assert run(main).stdout.splitlines() == [
        "0 0 0, 1 3 0, 0 0 1, 1 3 15, 2 0 0, 2 3 0, 2 0 1, 2 3 15, ",
        "0 0 15, 1 3 15, 0 0 14, 1 3 0, 2 0 15, 2 3 15, 2 0 14, 2 3 0, ",
        "0 0 15, 1 3 14, 0 0 13, 2 3 0, ",
        "0 0 0, 1 3 1, 0 0 2, 2 3 15, ",
        "0 0 0, 0 0 15, 0 1 0, 2 3 15, ",
        "0 0 15, 0 0 0, 0 1 15, 2 3 0, ",
        *["0 0 0, 0 3 0, 1 0 0, 1 3 0, 1 0 1, 1 3 1, 1 0 2, 1 3 2, ",  # the last tile of each head has no rows or keys
          "1 0 2, 1 0 1, 1 0 0, 0 0 0, 1 1 2, 0 1 0, 1 3 2, 0 3 0, "] * 2]


@pytest.mark.slow
def test_number_of_tiles_beyond_int(csrc, tmp_path):
    """An error before anything is looked at, as there are no tensors."""
    main = program(csrc, tmp_path, """
            AttnParams p{.batch_size = 1 << 21, .nheads = 1024, .nheads_k = 1, .seqlen_q = 1, .head_dim = 64};
            sm90::flash_forward(p);""")
    assert re.match("minimal_attn: .*q has .* tiles", run(main).stdout)


@pytest.mark.slow
def test_more_work_than_decoding_can_count(csrc, tmp_path):
    main = program(csrc, tmp_path, """
            for (auto flash_decode : {sm80::flash_decode, sm90::flash_decode})
                for (auto [nheads, seqlen_k] : {std::pair(1, 1 << 30), {(1 << 15) + 1, 64}}) try {
                    DecodeParams p{};
                    p.batch_size = 1 << 10, p.nheads = nheads, p.nheads_k = 1, p.num_sequences = 1, p.page_size = 64;
                    p.num_sms = emulator::gpu.num_sms;
                    p.seqlen_q = p.max_seqlen_q = p.max_rows = 1, p.seqlen_k = seqlen_k;
                    p.head_dim = p.head_dim_v = 64, p.q = p.k = p.v = p.o = {nullptr, 64, 64, 64};
                    flash_decode(p);
                } catch (const std::invalid_argument &error) { std::puts(error.what()); }""")
    assert [re.sub("minimal_attn: (.*?[0-9^]+).*", r"\1", line) for line in run(main).stdout.splitlines()] == [
        "the call has over 2^30", "a key head has over 32768"] * 2


@pytest.mark.slow
def test_sm90_needs_hopper(csrc, tmp_path):
    main = program(csrc, tmp_path, "emulator::gpu.capability = 80; sm90::flash_forward({});")
    assert run(main).stdout == "minimal_attn: flash_sm90.cu needs a GPU of sm_90\n"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_selftest(schedule, selftest):
    assert run(selftest, schedule).stdout == "ok\n"


@pytest.mark.slow
@pytest.mark.parametrize("fault", SELFTEST_FAULTS)
def test_selftest_sees_fault(fault, selftest):
    said = [run(selftest, schedule, fault).stdout for schedule in [*SCHEDULES, *MORE_SCHEDULES]]
    assert any(re.search(SELFTEST_FAULTS[fault], text) for text in said), said[0]


def test_selftest_has_these_faults():
    assert set(re.findall(r'\bis\("(.*?)"\)', SELFTEST.read_text())) == set(SELFTEST_FAULTS)


def test_faults_finds_every_synchronization():
    """So that each can be left out: faults.py does not find others."""
    for file in faults.kernel_files():
        for call, is_alone in faults.calls(file.name, file.read_text()):
            assert is_alone, f"write it as a statement at the start of a line: {call}"


OBSERVED = {str(statement): n for n, statement in enumerate(faults.statements())
            if statement.unobserved_by != "the emulator"}


# The first statement of each file and primitive is left out; campaign.py leaves out all, `make test` one of each file.
FIRST = {(x.split(":")[0], x.rpartition("-")[2]): x for x in reversed(OBSERVED)}.values()
IN_GATE = {x.split(":")[0]: x for x in reversed(OBSERVED)}.values()


@pytest.mark.parametrize("statement", [pytest.param(x, marks=slow_unless(x in IN_GATE)) for x in FIRST])
def test_missing_synchronization_is_seen(statement, driver_of):
    check_missing_synchronization(statement, driver_of)


def check_missing_synchronization(statement, driver_of):
    """By a wrong result, other bits, a deadlock, or an error of the emulator; a wild pointer ends the driver."""
    cases = SHOWN_TO[statement.split(":")[0]]
    for schedules in SCHEDULES, MORE_SCHEDULES:
        done = run(driver_of(statement.split(":")[0]), f"--without={OBSERVED[statement]}", *schedules, *cases)
        if done.returncode:
            return
    pytest.fail(f"it is not needed, or no case shows that it is: {done.stdout}")
