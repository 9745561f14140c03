"""Time the tensor-core kernels of several versions of csrc against one another, in turns and in one process.

    git archive HEAD~1 csrc | tar x -C /tmp/old
    python benchmarks/compare_builds.py /tmp/old/csrc csrc

Kernels are launched without torch's ops. The versions take turns, so that a change of the GPU's clock meets all of them
alike. Everything is dense, in bf16, with 16384 tokens and about 2048 = heads times head_dim. Needs a GPU of sm_90, and
nvcc.

Read next: compare_builds.cpp, which calls the kernels of a version.
"""

import argparse
import ctypes
import itertools
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import geometric_mean, median

import torch

KERNELS = "sm90", "sm80", "backward"  # as numbered in compare_builds.cpp
# The last ones are not in every version.
SOURCES = ("flash_sm90", "flash_sm80", "flash_bwd_sm80", "flash_bwd", "device", "flash_bwd_bias", "flash_mods_sm90",
           "flash_dropout_sm90")
TOKENS, WIDTH = 16384, 2048  # of all samples together; heads times head_dim
TENSORS = "q", "k", "v", "o", "lse", "tile_counter", "dout", "dq", "dk", "dv", "delta", "lse_log2", "workspace"
NUMBERS = "batch_size", "nheads", "seqlen", "head_dim", "is_causal", "workspace_bytes"


class Call(ctypes.Structure):
    _fields_ = ([(name, ctypes.c_void_p) for name in TENSORS] + [(name, ctypes.c_int64) for name in NUMBERS]
                + [("stream", ctypes.c_void_p)])


def build(csrc, folder):
    """The library of a version, compiled in `folder`."""
    flags = ["-O3", "-std=c++20", "-gencode=arch=compute_90a,code=sm_90a", "-Xcompiler=-fPIC", f"-I{csrc}"]

    def compiled(source):
        to = folder / f"{source.stem}.o"
        subprocess.run(["nvcc", *flags, "-c", source, "-o", to], check=True)
        return to

    sources = [Path(__file__).with_suffix(".cpp"),
               *sorted(file for file in csrc.rglob("*.cu") if file.stem in SOURCES)]
    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compiled, sources))
    library = folder / "kernels.so"
    subprocess.run(["nvcc", "-shared", *objects, "-o", library], check=True)
    return ctypes.CDLL(library)


def make_call(seqlen, head_dim, is_causal):
    """A Call and the tensors that it points to, by name."""
    batch_size, nheads = TOKENS // seqlen, WIDTH // head_dim
    shape = batch_size, nheads, seqlen, head_dim
    tensors = {name: torch.randn(shape, device="cuda", dtype=torch.bfloat16)
               for name in ("q", "k", "v", "o", "dout", "dq", "dk", "dv")}
    tensors |= {name: torch.zeros(shape[:3], device="cuda") for name in ("lse", "delta", "lse_log2")}
    tensors["tile_counter"] = torch.zeros(1, dtype=torch.int32, device="cuda")
    # dq in fp32, in whole tiles of rows and columns, and a little more.
    num_bytes = 4 * batch_size * nheads * (seqlen + 128) * 2**(head_dim - 1).bit_length() + 2**24
    tensors["workspace"] = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    call = Call(batch_size=batch_size, nheads=nheads, seqlen=seqlen, head_dim=head_dim, is_causal=is_causal,
                workspace_bytes=num_bytes, stream=torch.cuda.current_stream().cuda_stream)
    for name, x in tensors.items():
        setattr(call, name, x.data_ptr())
    return call, tensors


def milliseconds(launch, repeats):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        launch()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def compare(libraries, kernel, seqlen, head_dim, is_causal, rounds):
    """The median time of each version, and whether its results have the bits of the first one's."""
    call, tensors = make_call(seqlen, head_dim, is_causal)
    results = ("dk", "dv") if kernel == "backward" else ("o", "lse")
    launches, bits = [], []
    for library in libraries:
        def launch(library=library):
            if not library.run(KERNELS.index(kernel), ctypes.byref(call)):
                raise SystemExit("a kernel could not be launched")

        if kernel == "backward":  # of an out and lse that belong together
            assert library.run(KERNELS.index("sm80"), ctypes.byref(call))
        for name in results:
            tensors[name].fill_(torch.nan)  # what is not written equals nothing
        launch()
        launches.append(launch)
        bits.append([tensors[name].clone() for name in results])
    repeats = max(1, min(50, int(6 / milliseconds(launches[0], 2))))
    times = [[milliseconds(launch, repeats) for launch in launches] for _ in range(rounds)]
    same = [all(map(torch.equal, bits[0], other)) for other in bits]
    return [median(column) for column in zip(*times)], same


def tflops(kernel, seqlen, head_dim, is_causal, ms):
    products, width = 5 if kernel == "backward" else 2, WIDTH // head_dim * head_dim
    return products * 2 * TOKENS * seqlen * width / (2 if is_causal else 1) / ms / 1e9


def numbers(text):
    return [int(x) for x in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csrc", nargs="+", type=Path, help="folders of sources; the others are compared with the first")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--head-dims", type=numbers, default=[64, 96, 128, 192, 256])
    parser.add_argument("--seqlens", type=numbers, default=[512, 2048, 8192, 16384])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for csrc in options.csrc:
        if not (csrc / "flash.h").is_file():
            parser.error(f"{csrc} is not a folder with the sources of csrc: it has no flash.h")
    if not all(1 <= seqlen <= TOKENS and TOKENS % seqlen == 0 for seqlen in options.seqlens):
        parser.error(f"--seqlens must divide {TOKENS}, got {options.seqlens}")
    if not all(8 <= head_dim <= 256 and head_dim % 8 == 0 for head_dim in options.head_dims):
        parser.error(f"--head-dims must be multiples of 8 from 8 to 256, got {options.head_dims}")
    if not shutil.which("nvcc") or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        parser.error("needs nvcc on the PATH and a GPU of sm_90, such as an H100 or H200")
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder, str(i)) for i in range(len(options.csrc))]
        for place in places:
            place.mkdir()
        libraries = [build(csrc.resolve(), place) for csrc, place in zip(options.csrc, places)]
    print("kernel, head_dim, seqlen, causal, TFLOP/s of the first, speed of the others by its, = for the same bits")
    for kernel in options.kernels:
        ratios = []
        for head_dim, seqlen, is_causal in itertools.product(options.head_dims, options.seqlens, (False, True)):
            times, same = compare(libraries, kernel, seqlen, head_dim, is_causal, options.rounds)
            ratios.append([times[0] / ms for ms in times])
            others = [f"{ratio:.3f}{'=' if equal else ' '}" for ratio, equal in zip(ratios[-1][1:], same[1:])]
            speed = tflops(kernel, seqlen, head_dim, is_causal, times[0])
            print(f"{kernel:8} {head_dim:3} {seqlen:5} {is_causal!s:5} {speed:4.0f}", *others, flush=True)
        print(f"{kernel}: geometric means", *(f"{geometric_mean(column):.4f}" for column in list(zip(*ratios))[1:]),
              "least", *(f"{min(column):.3f}" for column in list(zip(*ratios))[1:]), flush=True)


if __name__ == "__main__":
    main()
