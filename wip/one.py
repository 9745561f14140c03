"""one.py OUT.o "64, 2, 128, 2" [dropout mods]...: compiles single instantiations of flash_bwd_sm90.cu in bf16 and says of
each what ptxas has to say: spills, serialized products, waits that it has injected."""
import re, subprocess, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ["-O3", "-std=c++20", "-split-compile=0", "-diag-suppress", "177", "-Xptxas=-warn-spills,-v", "-D__CUDA_ARCH_LIST__=900",
         "-gencode", "arch=compute_90a,code=sm_90a", "-Xcompiler", "-fPIC", "-I", str(ROOT / "csrc")]


def main(out, shape, *variants):
    source = (ROOT / "csrc/flash_bwd_sm90.cu").read_text()
    source = source[:source.index("// {kHeadDim, kConsumers, kBlockM, kStages")]
    for v in variants or ["0,0", "1,0", "1,1"]:
        source += f"template __global__ void flash_bwd<__nv_bfloat16, BwdShape<{shape}>, {v}>(const __grid_constant__ BwdParams<BwdShape<{shape}>>);\n"
    file = Path(out).with_suffix(".cu")
    file.write_text(source + "}\n")
    done = subprocess.run(["nvcc", *FLAGS, "-c", file, "-o", out], capture_output=True, text=True)
    print(shape, *variants)
    for line in done.stderr.splitlines():
        if re.search("error|C75", line):
            print("   ", re.sub("function '.*?Lb([01])ELb([01])EEEvNS.*", r"\1\2", line)[:170] if "C75" in line else line)
        if m := re.search(r"Compiling entry function .*?Lb([01])ELb([01])EEEvNS", line):
            print("   ", m[1], m[2], end=": ")
        if "spill" in line and "stack" in line:
            print(line.strip())


main(*sys.argv[1:])
