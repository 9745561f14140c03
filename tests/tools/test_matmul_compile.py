"""Compiles the Triton matmul for GPUs that need not be here, as test_compile.py does the other kernels.

This file is also the program that does it, in a process without the interpreter: `python test_matmul_compile.py 90`
prints what came out for sm_90, one JSON object a line.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

# By compute capability: shared memory of a program, and the instruction that a 16-bit product becomes.
GPUS = {80: (163 << 10, "mma.sync"), 90: (227 << 10, "wgmma.mma_async"), 100: (227 << 10, "tcgen05.mma")}
# dtype, kTma, kTransA, kTransB, kSplits.
CASES = [("fp32", False, False, False, 1), ("fp16", False, False, True, 1), ("bf16", False, True, False, 4)]
TMA_CASES = [("fp16", True, False, False, 1), ("bf16", True, True, True, 1), ("fp16", True, False, True, 4)]


def cases(capability):
    return CASES + (TMA_CASES if capability >= 90 else [])


@pytest.mark.parametrize("capability", [90, *(pytest.param(x, marks=pytest.mark.slow) for x in (80, 100))])
def test_matmul_compiles(capability, tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, __file__, str(capability)], env=env, capture_output=True, text=True,
                          timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == len(cases(capability))
    for kernel in kernels:
        dtype, is_tma, *_ = kernel["case"]
        assert kernel["shared"] <= GPUS[capability][0], kernel
        assert kernel["tma"] == is_tma, kernel
        assert kernel["mma"] == (dtype != "fp32") and not kernel["tf32"], kernel  # fp32: products in true fp32


def compiled(capability, dtype, kTma, kTransA, kTransB, kSplits):
    """The first tile of the table, for aligned matrices with contiguous rows, or columns where transposed."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from triton_ref.matmul import TILES, _config, _matmul

    torch_dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    kBlockM, kBlockN, kBlockK, _ = TILES[torch_dtype.itemsize][0]
    constexprs = _config(torch_dtype, kBlockM, kBlockN, kBlockK, kSplits, kTma, GPUS[capability][0])
    options = {name: constexprs.pop(name) for name in ("num_warps", "num_stages")}
    constexprs.update(kTma=kTma, kTransA=kTransA, kTransB=kTransB)
    types = dict.fromkeys(_matmul.arg_names, "i32")
    for name, shape, is_trans in (("a", [kBlockM, kBlockK], kTransA), ("b", [kBlockK, kBlockN], kTransB),
                                  ("c", [kBlockM, kBlockN], False)):
        item = "fp32" if name == "c" and kSplits > 1 else dtype
        types[name] = f"tensordesc<{item}{shape[::-1] if is_trans else shape}>" if kTma else f"*{item}"
        if not kTma and name != "c":
            constexprs[f"{name}_row_stride" if is_trans else f"{name}_col_stride"] = 1
    types |= dict.fromkeys(constexprs, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, type in enumerate(types.values()) if type[0] in "*i"}
    source = ASTSource(fn=_matmul, signature=types, constexprs=constexprs, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


if __name__ == "__main__":
    capability = int(sys.argv[1])
    for case in cases(capability):
        kernel = compiled(capability, *case)
        ptx = kernel.asm["ptx"]
        print(json.dumps({"case": case, "shared": kernel.metadata.shared, "tf32": "tf32" in ptx,
                          "mma": GPUS[capability][1] in ptx, "tma": "cp.async.bulk.tensor" in ptx}))
