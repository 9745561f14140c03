"""Compiles the kernels for GPUs that need not be here: csrc/*.cu with nvcc, Triton's ahead of time.

Triton's compiler and its interpreter do not share a process, so this file is also a program. It compiles the Triton
kernels: `python test_compile.py twin 90 1` prints what came out, one JSON object a line. PROGRAMS has the other names.
The last number asks for every case if it is 1, and for every sixth one if it is 6.
"""
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from code_digest import cuobjdump, nvcc
from minimal_attn._build import recipe

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
# Of each file by target: the oldest GPU that it is made for, and Hopper where that takes seconds. campaign.py has all.
# CI leaves out those of LONG, which take most of a minute, and Hopper's files for Turing, where their kernels trap.
TARGETS = {"flash.cu": ["75"], "flash_bwd.cu": ["90a"], "flash_bwd_bias.cu": ["90a"],
           "flash_sm80.cu": ["80"], "flash_bwd_sm80.cu": ["80"],
           "decode.cu": ["90a"], "decode_sm90.cu": ["90a"], "append.cu": ["80", "90a"],
           "flash_bwd_sm90.cu": ["90a"], "flash_bwd_wide_sm90.cu": ["90a"],
           "flash_sm90.cu": ["75", "90a"], "flash_dmma.cu": ["75", "90a"], "device.cu": ["90a"]}
LONG = "flash.cu", "flash_bwd.cu", "flash_sm80.cu", "flash_bwd_sm80.cu"
# (file, kind of its kernel): how many bytes of stack, and of spills, a kernel may have where it is not none. These use
# all their registers and keep a number or two beyond them in memory: in the backward pass dK, dV and the tiles of S and
# dP fill them, in the forward pass the rounds of Philox, or the addresses of a bias, come on top.
SPILLS = {("flash_bwd_sm80.cu", "dense"): 96,  # on sm_120; 12 on sm_90
          ("flash_bwd_sm80.cu", "dropout"): 136,  # on sm_90
          ("flash_bwd_sm80.cu", "scores"): 136,
          ("flash_sm80.cu", "dense"): 32,  # on sm_90, before and after the loop
          ("flash_sm80.cu", "dropout"): 112,  # on sm_120
          ("flash_sm80.cu", "scores"): 288,  # at head_dim 128, where a bias is read by the element
          ("flash_sm90.cu", "dense"): 16,  # three numbers of the mask at head_dim 64, which full blocks do not read
          ("flash_sm90.cu", "dropout"): 32,  # the same, and the words of a row
          ("flash_sm90.cu", "scores"): 80,
          ("flash_bwd_sm90.cu", "dense"): 16,  # after the loop
          ("flash_bwd_sm90.cu", "scores"): 16,
          ("flash_bwd_bias.cu", "dense"): 120,
          ("decode.cu", "dense"): 48,  # at head_dim 128 and 32 rows, numbers of a run and of a join, outside of its steps
          ("flash.cu", "dense"): 136}      # on sm_120, in fp32

# The instruction a 16-bit product becomes, by compute capability.
TWIN_MMA = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
# dtype, head_dim, mask, lengths, dropout: the first of tile_configs, full and partial kBlockD, each mask with and
# without lengths. A pair of head_dims is that of q and k and that of v, and then there are sinks too.
TWIN_CASES = [
    ("fp32", 64, "causal", None, False), ("fp32", 128, None, "used", False),
    ("fp16", 64, None, None, False), ("fp16", 256, "causal", "used", False), ("fp16", 64, "local", None, False),
    ("bf16", 40, "causal", None, False), ("bf16", 128, None, "used", False), ("bf16", 128, "causal", None, True),
    ("bf16", 128, "local", "packed", False), ("bf16", (192, 128), "causal", None, False),
    ("fp16", (64, 256), "local", "packed", False), ("fp32", (64, 32), "causal", "used", False),
]
# With scores that something changes: the same, and which.
SCORED_TWIN_CASES = [("bf16", 64, "causal", None, False, "all"), ("fp16", 128, None, None, False, "softcap"),
                     ("fp32", 64, None, None, False, "all"), ("bf16", 256, "causal", "used", False, "mask")]
SCORED_BACKWARD_CASES = [("kv", "bf16", 64, "causal", None, False, "all"), ("q", "fp16", 128, None, None, False, "all"),
                         ("kv", "bf16", 128, None, None, False, "mask"),
                         ("q", "fp32", 64, None, None, False, "softcap")]
# side, dtype, head_dim, mask, lengths, dropout: of each of the two kernels every head_dim.
TWIN_BACKWARD_CASES = [
    ("kv", "bf16", 64, "causal", None, False), ("kv", "fp16", 64, None, None, True),
    ("kv", "bf16", 128, "causal", None, True), ("kv", "bf16", 256, "causal", None, False),
    ("kv", "fp32", 128, "causal", None, True), ("kv", "fp32", 256, None, None, False),
    ("kv", "bf16", 64, "causal", "packed", False), ("kv", "bf16", 128, "local", "packed", False),
    ("kv", "bf16", (192, 128), "causal", None, False), ("kv", "fp16", (64, 32), "local", "packed", False),
    ("q", "fp16", 64, "causal", None, False), ("q", "bf16", 128, None, None, True),
    ("q", "fp16", 256, "causal", None, False), ("q", "fp32", 256, None, None, True),
    ("q", "bf16", 128, "local", None, False), ("q", "fp16", 64, "causal", "packed", False),
    ("q", "bf16", (192, 128), "causal", None, False), ("q", "fp16", (64, 32), "local", "packed", False),
]
FP8_TWIN_CASES = {90: [("fp8e4nv", 128, "causal", "used", False), ("fp8e5", 64, None, None, False),
                       ("fp8e4nv", 128, "local", "packed", False)]}
SLOW_TWIN_CASES = {80: [("fp32", 256, "causal", "used", False)]}  # 10 s each, and fp32 compiles much the same for all
# dtype, head_dim, packed rows, whether the keys are in pages, whether they are split, which scores are changed.
TWIN_DECODE_CASES = [("bf16", 128, 16, True, True, None), ("fp16", 64, 64, False, True, "all"),
                     ("bf16", 256, 64, True, True, "all"), ("fp32", (192, 128), 16, True, True, None),
                     ("bf16", (40, 128), 16, False, False, None)]
# dtype, head_dim, where new rows go, whether they and q are rotated.
TWIN_APPEND_CASES = [("bf16", 128, "pages", True), ("fp16", (64, 32), "packed", True),
                     ("fp32", (192, 128), "dense", True), ("bf16", (40, 128), "slots", False)]


# dtype, kTma, kTransA, kTransB, kSplits.
MATMUL_CASES = [("fp32", False, False, False, 1), ("fp16", False, False, True, 1), ("bf16", False, True, False, 4)]
MATMUL_TMA_CASES = [("fp16", True, False, False, 1), ("bf16", True, True, True, 1), ("fp16", True, False, True, 4)]


def matmul_cases(capability):
    return MATMUL_CASES + (MATMUL_TMA_CASES if capability >= 90 else [])


def matmul_memory(capability):
    """The shared memory of one program on an A100, or on a GPU of that capability."""
    return (163 if capability == 80 else 227) << 10


def slow(is_in_ci):
    """The marks of cases.slow_unless(), which a program of this file's own cannot import: cases.py knows the kernels."""
    return pytest.mark.slow if is_in_ci else (pytest.mark.slow, pytest.mark.campaign)


EVERY = [6, pytest.param(1, marks=pytest.mark.campaign)]  # of the cases: CI compiles every sixth one


def test_every_cu_file_has_targets():
    assert {file.name for file in (ROOT / "csrc").glob("*.cu")} == set(TARGETS)


def test_no_fast_math():
    assert not any("fast" in flag for flag in recipe()["extra_cuda_cflags"])


@pytest.mark.skipif(not nvcc(), reason="no nvcc on PATH or in CUDA_HOME")
@pytest.mark.parametrize("file, target", [
    pytest.param(file, target, marks=slow(file not in LONG and target != "75"))
    for file in TARGETS for target in TARGETS[file]])
def test_cuda_kernels_do_not_spill(file, target, tmp_path):
    check_spills(file, target, tmp_path)


def check_spills(file, target, tmp_path):
    codes = [f"sm_{code}" for code in target.split(",")]
    gpu = f"-gencode=arch=compute_{codes[0].removeprefix('sm_')},code=[{','.join(codes)}]"
    what = "-c" if target == TARGETS[file][0] else "-fatbin"  # the host's code once, which is the same for all
    command = [nvcc(), *recipe()["extra_cuda_cflags"], "-Xptxas=-v", gpu, what, ROOT / "csrc" / file, "-o",
               tmp_path / "kernel"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
    assert done.returncode == 0, done.stdout
    kernels = re.findall(r"Compiling entry function '(\w+)' for '(\w+)'", done.stdout)
    memory = re.findall(r"Function properties for (\w+)\s+(\d+ bytes stack frame, .*)", done.stdout)
    assert {code for _, code in kernels} == set(codes) and len(memory) >= len(kernels), done.stdout
    spills = [f"{name}: {use}" for name, use in memory
              if max(map(int, re.findall(r"(\d+) bytes", use))) > SPILLS.get((file, kind_of(file, name)), 0)]
    assert not spills, "\n".join(spills)
    assert "serialized" not in done.stdout, done.stdout  # ptxas, of wgmma that it could not let run on
    if file == "flash_sm90.cu" and target == "90a":
        dump = subprocess.run([cuobjdump(), "-sass", tmp_path / "kernel"], capture_output=True, text=True, timeout=60)
        kernels_overlap(dump.stdout)


def kind_of(file, name):
    """What the kernel of this mangled name is for, by its Kind, or its template's last parameter and its first of type
    bool."""
    if kind := re.search(r"4KindE(\d)", name):
        return ("dense", "dropout", "scores", "dense")[int(kind[1])]
    flags = re.findall(r"Lb([01])E", name)
    if file == "flash_bwd_wide_sm90.cu":  # scores are never changed
        return "dropout" if flags[:1] == ["1"] else "dense"
    if flags and flags[-1] == "1":
        return "scores"
    has_dropout = flags and flags[0] == "1" and ("sm80" in file or file == "flash_bwd_sm90.cu")
    return "dropout" if has_dropout else "dense"


def kernels_overlap(sass):
    """Hopper's kernels load by TMA, and a block's exponentials come before the wait for the product beside them."""
    kernels = [kernel for kernel in sass.split("Function : ")[1:] if "flash_fwd" in kernel.split()[0]]
    # Six tiles in two dtypes, three with dropout, five where scores are changed, and five with a cache.
    assert len(kernels) == 2 * (6 + 3 + 5 + 5)
    for kernel in kernels:
        name = kernel.split()[0]
        head_dim, consumers, block_n = map(int, re.search(r"ShapeILi(\d+)ELi(\d+)ELi(\d+)", name).groups())
        assert f"HGMMA.64x{block_n}x16" in kernel and f"HGMMA.64x{head_dim}x16" in kernel and "UTMALDG" in kernel, name
        assert "UTMASTG" in kernel, name
        if kind_of("flash_sm90.cu", name) == "scores":
            assert "MUFU.TANH" in kernel and kernel.count("WARPGROUP.DEPBAR.LE gsb0, 0x1") == 1, name
            continue
        if kind_of("flash_sm90.cu", name) == "dropout":
            assert kernel.count("LDL") <= {64: 7, 128: 1, 256: 0}[head_dim], name
            assert kernel.count("WARPGROUP.DEPBAR.LE gsb0, 0x1") == 1, name
            continue
        assert kernel.count("LDL") <= (3 if head_dim == 64 else 0), name
        # The loop, from the wait for the first Q Kᵀ on: a softmax, the wait for P V beside it, the products after it
        # and the wait for Q Kᵀ, which leaves P V running.
        _, softmax, products, _ = kernel.split("WARPGROUP.DEPBAR.LE gsb0, 0x0", 3)
        assert softmax.count("MUFU.EX2") >= 64 * block_n / 128, name  # a thread's share
        assert products.count("WARPGROUP.DEPBAR.LE gsb0, 0x1") == 1, name


def printed(directory, *arguments):
    """What this program prints of each kernel it compiles."""
    pytest.importorskip("triton", reason="triton is not installed")
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "TRITON_CACHE_DIR": str(directory)}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, __file__, *map(str, arguments)], env=env, capture_output=True, text=True,
                          timeout=240)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("capability", [pytest.param(x, marks=slow(x == 90)) for x in TWIN_MMA])
@pytest.mark.parametrize("every", EVERY)
def test_twin_compiles(every, capability, tmp_path):
    kernels = printed(tmp_path, "twin", capability, every)
    assert len(kernels) == len(twin_cases(capability)[::every])
    for kernel in kernels:
        assert kernel["shared"] <= max_shared_memory(capability), kernel
        if kernel["dtype"] == "fp32":
            assert not kernel["tf32"] and not kernel["mma"], kernel  # products in true fp32
        else:
            assert kernel["mma"], kernel
        assert kernel["tma"] == uses_tma(capability, kernel["dtype"]), kernel


def uses_tma(capability, dtype):
    return capability >= 90 and dtype != "fp32"


def lengths_of(lengths):
    """The types of a kernel's parameters for "packed" and "used" lengths, and the constexprs of those it goes without."""
    given = {None: (), "used": ("seqused_q", "seqused_k"), "packed": ("cu_seqlens_q", "cu_seqlens_k")}[lengths]
    absent = {"seqused_q", "seqused_k", "cu_seqlens_q", "cu_seqlens_k"}.difference(given)
    return {f"{name}_ptr": "*i32" for name in given}, {f"{name}_ptr": None for name in absent}


def scores_of(scores, capability, dtype):
    """The same of the parameters of scores.py: "softcap", "mask" or "all"."""
    types = {"softcap": "fp32"} if scores in ("softcap", "all") else {}
    absent = {"alibi_ptr", "alibi_batch_stride", "bias_row_stride", "bias_key_stride", "bias_ptr", "bias_batch_stride",
              "bias_head_stride", "softcap"}.difference(types)
    if scores == "mask":
        types |= {"bias_ptr": "*u8"}
    if scores == "all":
        types |= {"alibi_ptr": "*fp32", "bias_ptr": "*fp32"}
    absent -= {"alibi_ptr", "alibi_batch_stride"} if scores == "all" else set()
    absent -= {"bias_ptr", "bias_batch_stride", "bias_head_stride", "bias_row_stride"} if "bias_ptr" in types else set()
    constexprs = dict.fromkeys(absent) | {"kFastTanh": "softcap" in types and dtype != "fp32" and capability >= 75}
    return types, constexprs | ({"bias_key_stride": 1} if "bias_ptr" in types else {})


def twin_cases(capability):
    return TWIN_CASES + SCORED_TWIN_CASES + SLOW_TWIN_CASES.get(capability, []) + FP8_TWIN_CASES.get(capability, [])


# The last number is 4 for one kernel alone.
@pytest.mark.parametrize("head_dim, every", [(64, 4), pytest.param(256, 1, marks=slow(True)),
                                             *(pytest.param(x, 1, marks=slow(False)) for x in (64, 128))])
def test_hopper_twin_compiles(head_dim, every, tmp_path):
    """attention_hopper.py, every tile: tensor cores, TMA and registers that move from the producer to the consumers."""
    pytest.importorskip("triton.experimental.gluon", reason="needs a Triton with Gluon")
    kernels = printed(tmp_path, "hopper", head_dim, every)
    assert {kernel["causal"] for kernel in kernels} == ({True} if every > 1 else {False, True})
    for kernel in kernels:
        assert kernel["mma"] and kernel["tma"] and kernel["setmaxnreg"] and kernel["shared"] <= 227 << 10, kernel
        assert kernel["stack"] <= 256, kernel  # 0 to 32 with Triton 3.6, up to 168 with 3.9


@pytest.mark.parametrize("capability", [pytest.param(x, marks=slow(x == 90)) for x in (80, 90)])
@pytest.mark.parametrize("every", EVERY)
def test_twin_backward_compiles(every, capability, tmp_path):
    kernels = printed(tmp_path, "backward", capability, every)
    cases = (TWIN_BACKWARD_CASES + SCORED_BACKWARD_CASES)[::every]
    assert len(kernels) == sum(len(backward_configs(capability, *case)) for case in cases)
    for kernel in kernels:
        is_fp32 = kernel["dtype"] == "fp32"
        assert kernel["shared"] <= max_shared_memory(capability), kernel
        assert not kernel["tf32"] and kernel["mma"] == (not is_fp32), kernel
        assert kernel["tma"] == uses_tma(capability, kernel["dtype"]), kernel
        if capability == 90:  # 0 to 264 in 16 bits with Triton 3.7 and 3.9, 608 with dropout, up to 376 in fp32
            may_spill = kernel["dropout"] or kernel["scores"] or is_fp32
            assert kernel["stack"] <= (1024 if may_spill else 272), kernel


@pytest.mark.parametrize("capability", [pytest.param(x, marks=slow(x == 90)) for x in (80, 90)])
def test_twin_decode_compiles(capability, tmp_path):
    kernels = printed(tmp_path, "decode", capability)
    assert len(kernels) == len(TWIN_DECODE_CASES) + sum(case[4] for case in TWIN_DECODE_CASES)
    for kernel in kernels:
        assert kernel["shared"] <= max_shared_memory(capability) and not kernel["tf32"] and kernel["stack"] == 0, kernel
        is_16_bit = kernel["kernel"] == "_decode" and kernel["dtype"] != "fp32"
        assert kernel["any_mma"] == is_16_bit, kernel
        # K and V come 16 bytes at a time while others are in use. A head_dim of 40 is masked by the element.
        assert kernel["cp_async"] == (is_16_bit and kernel["head_dim"] != [40, 128]), kernel


@pytest.mark.parametrize("capability", [pytest.param(x, marks=slow(x == 90)) for x in (80, 90)])
def test_twin_append_compiles(capability, tmp_path):
    kernels = printed(tmp_path, "append", capability)
    assert len(kernels) == len(TWIN_APPEND_CASES)
    for kernel in kernels:
        # A head_dim that is no power of two is masked by the element.
        assert kernel["stack"] == 0 and kernel["vectors"] == (kernel["head_dim"] in (128, [64, 32])), kernel


@pytest.mark.parametrize("capability", [pytest.param(x, marks=slow(x == 90)) for x in TWIN_MMA])
def test_matmul_compiles(capability, tmp_path):
    kernels = printed(tmp_path, "matmul", capability)
    assert len(kernels) == len(matmul_cases(capability))
    for kernel in kernels:
        dtype, is_tma, *_ = kernel["case"]
        assert kernel["shared"] <= matmul_memory(capability) and kernel["tma"] == is_tma, kernel
        assert kernel["mma"] == (dtype != "fp32") and not kernel["tf32"], kernel  # fp32: products in true fp32


def max_shared_memory(capability):
    """Of one program on the GPUs of that capability; for 80 that of 86 and 120, which run such code with less."""
    return (99 if capability == 80 else 227) << 10


def compile_hopper(head_dim, config, causal):
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from triton_ref.attention_hopper import REGISTERS, _flash_fwd, _layout

    def descriptor(rows):
        return f"tensordesc<bf16[1, 1, {rows}, {head_dim}],{_layout(rows, head_dim, torch.bfloat16)!r}>"

    constexprs = dict(kIsCausal=causal, kConsumers=config["kConsumers"], kStages=config["kStages"],
                      kRegisters=REGISTERS[config["kConsumers"]])
    types = dict.fromkeys(_flash_fwd.arg_names, "i32")
    types |= dict(q_desc=descriptor(64), k_desc=descriptor(config["kBlockN"]), v_desc=descriptor(config["kBlockN"]),
                  o_desc=descriptor(64), lse_ptr="*fp32", softmax_scale="fp32",
                  **dict.fromkeys(constexprs, "constexpr"))
    source = GluonASTSource(fn=_flash_fwd, signature=types, constexprs=constexprs)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4))


def torch_dtype(dtype):
    """torch's name of Triton's."""
    import torch

    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn,
            "fp8e5": torch.float8_e5m2}[dtype]


def both(head_dim):
    """The head_dim of q and k, and that of v."""
    return head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)


def compile_twin(capability, dtype, head_dim, mask, lengths, dropout, scores=None):
    from triton_ref.attention import _flash_fwd, tile_configs

    (head_dim, head_dim_v), has_sinks = both(head_dim), isinstance(head_dim, tuple)
    tma, fp8 = uses_tma(capability, dtype), dtype.startswith("fp8")
    (length_types, absent_lengths), (score_types, score_constants) = lengths_of(lengths), scores_of(scores, capability,
                                                                                                   dtype)
    constexprs = dict(tile_configs(torch_dtype(dtype), head_dim, 99 << 10, head_dim_v=head_dim_v,
                                   bias_bytes={"all": 4, "mask": 1}.get(scores, 0))[0])
    options = {name: constexprs.pop(name) for name in ("num_warps", "num_stages")}
    kBlockM, kBlockN, kBlockD, kBlockDv = constexprs.values()
    constexprs.update(kIsCausal=mask == "causal", kIsLocal=mask == "local", kNegateQ=False,
                      kMaskCols=head_dim < kBlockD or head_dim_v < kBlockDv, kTma=tma, **absent_lengths,
                      **score_constants)
    constexprs.update({} if dropout else {"seed_ptr": None})
    constexprs.update({} if has_sinks else {"sinks_ptr": None})
    constexprs.update({} if fp8 else {f"{x}_descale_ptr": None for x in "qkv"})
    types = dict.fromkeys(_flash_fwd.arg_names, "i32")
    types |= dict.fromkeys(["q_ptr", "k_ptr", "v_ptr"], f"*{dtype}")
    if tma:
        v_tile = f"{kBlockDv}, {kBlockN}" if fp8 and lengths != "packed" else f"{kBlockN}, {kBlockDv}"
        types |= {"q_ptr": f"tensordesc<{dtype}[1, 1, {kBlockM}, {kBlockD}]>",
                  "k_ptr": f"tensordesc<{dtype}[1, 1, {kBlockN}, {kBlockD}]>",
                  "v_ptr": f"tensordesc<{dtype}[1, 1, {v_tile}]>"}
    types |= {"o_ptr": "*bf16" if fp8 else f"*{dtype}", "lse_ptr": "*fp32", "sinks_ptr": "*fp32", "seed_ptr": "*i64",
              "softmax_scale": "fp32", "keep_scale": "fp32", **length_types, **score_types}
    types |= {f"{x}_descale_ptr": "*fp32" for x in "qkv"}
    return compile_for(capability, _flash_fwd, types, constexprs, options)


def backward_configs(capability, side, dtype, head_dim, mask, lengths, dropout, scores=None):
    """The first of tile_configs. For sm_90 all, unless there is dropout, which takes longer to compile. Of those of
    head_dim 256, the ones with 32 rows are left out: they are for GPUs with less memory, and wgmma takes 64 rows."""
    from triton_ref.attention_bwd import tile_configs

    head_dim, head_dim_v = both(head_dim)
    configs = tile_configs(side, torch_dtype(dtype), head_dim, max_shared_memory(capability), head_dim_v,
                           4 if scores == "all" else 0, scores is not None)
    if capability != 90 or dropout:
        return configs[:1]
    if max(head_dim, head_dim_v) <= 128:
        return configs
    return [config for config in configs if config["kBlockM"] >= 64] or configs[:1]


def compile_twin_backward(capability, config, side, dtype, head_dim, mask, lengths, dropout, scores=None):
    from triton_ref import attention_bwd

    function = {"kv": attention_bwd._flash_bwd_kv, "q": attention_bwd._flash_bwd_q}[side]
    config = dict(config)
    options = {name: config.pop(name) for name in ("num_warps", "num_stages")}
    kBlockM, kBlockN, kBlockD, kBlockDv = config.values()
    head_dim, head_dim_v = both(head_dim)
    tma = uses_tma(capability, dtype)
    (length_types, absent_lengths), (score_types, score_constants) = lengths_of(lengths), scores_of(scores, capability,
                                                                                                   dtype)
    constexprs = dict(kIsCausal=mask == "causal", kIsLocal=mask == "local", kEmptyRows=lengths == "packed",
                      kMaskCols=head_dim < kBlockD or head_dim_v < kBlockDv, kTma=tma, **config, **absent_lengths,
                      **score_constants)
    has_sinks = head_dim != head_dim_v
    constexprs.update({"kRaggedRows": True, "kClearDelta": has_sinks and lengths == "packed"} if side == "kv" else {})
    constexprs.update({} if dropout else {"seed_ptr": None})
    types = dict.fromkeys(function.arg_names, "i32") | dict.fromkeys(["softmax_scale", "keep_scale"], "fp32")
    for name, rows, columns in (("q", kBlockM, kBlockD), ("k", kBlockN, kBlockD), ("v", kBlockN, kBlockDv),
                                ("dout", kBlockM, kBlockDv)):
        types[f"{name}_ptr"] = f"tensordesc<{dtype}[1, 1, {rows}, {columns}]>" if tma else f"*{dtype}"
    types |= dict.fromkeys(["lse_ptr", "delta_ptr"], f"tensordesc<fp32[1, {kBlockM}]>" if tma else "*fp32")
    types |= dict.fromkeys(["dk_ptr", "dv_ptr"] if side == "kv" else ["dq_ptr"], f"*{dtype}")
    types |= length_types | score_types | {"seed_ptr": "*i64"}
    return compile_for(capability, function, types, constexprs, options)


def compile_twin_decode(capability, dtype, head_dim, rows, paged, splits, scores):
    """_decode, and combine_splits where there are splits."""
    from triton_ref.decode import _decode, tile_of
    from triton_ref.splits import combine_splits

    head_dim, head_dim_v = both(head_dim)
    constexprs = tile_of(torch_dtype(dtype), rows, head_dim, head_dim_v, paged, max_shared_memory(capability))
    options = {name: constexprs.pop(name) for name in ("num_warps", "num_stages")}
    kBlockM, kBlockN, kBlockD, kBlockDv = constexprs.values()
    tables = ["page_table_ptr", "page_table_stride"] if paged else ["batch_idx_ptr", "tree_ptr", "tree_batch_stride"]
    given = {"seqused_k_ptr", *tables,
             *(["alibi_ptr", "alibi_batch_stride", "softcap", "sinks_ptr", "cu_seqlens_q_ptr"] if scores else []),
             *(["o_accum_ptr", "max_accum_ptr", "sum_accum_ptr"] if splits else [])}
    optional = {"o_accum_ptr": "*fp32", "max_accum_ptr": "*fp32", "sum_accum_ptr": "*fp32", "cu_seqlens_q_ptr": "*i32",
                "seqused_q_ptr": "*i32", "seqused_k_ptr": "*i32", "page_table_ptr": "*i32", "batch_idx_ptr": "*i32",
                "leftpad_k_ptr": "*i32", "tree_ptr": "*i64", "sinks_ptr": "*fp32", "alibi_ptr": "*fp32",
                "softcap": "fp32", "page_table_stride": "i32", "tree_batch_stride": "i32", "alibi_batch_stride": "i32"}
    constexprs |= dict(kIsCausal=scores is None, kIsLocal=scores is not None, kNegateQ=False, kPageSize=16, kGroup=4,
                       kFastTanh=scores is not None and dtype != "fp32",
                       kMaskCols=head_dim < kBlockD or head_dim_v < kBlockDv, **dict.fromkeys(set(optional) - given))
    for function in (_decode, combine_splits) if splits else (_decode,):
        names = function.arg_names
        types = dict.fromkeys(names, "i32") | {"o_ptr": f"*{dtype}", "lse_ptr": "*fp32", "softmax_scale": "fp32"}
        types |= {f"{x}_ptr": f"*{dtype}" for x in "qkv"} | {name: optional[name] for name in given}
        of_kernel = {name: types[name] for name in names}
        known = {name: x for name, x in constexprs.items() if name in names}
        yield function, compile_for(capability, function, of_kernel, known,
                                    options if function is _decode else dict(num_warps=4))


def compile_twin_append(capability, dtype, head_dim, place, rotary):
    from triton_ref.append import TILE, _append

    head_dim, head_dim_v = both(head_dim)
    given = {"pages": ["seqused_k_ptr", "lengths_ptr", "page_table_ptr", "page_table_stride"],
             "packed": ["seqused_k_ptr", "lengths_ptr", "cu_seqlens_new_ptr", "cu_seqlens_q_ptr", "batch_idx_ptr"],
             "dense": ["seqused_k_ptr", "lengths_ptr"], "slots": ["slot_mapping_ptr"]}[place]
    of_q = [name for name in _append.arg_names if name.startswith(("q_", "rotated_")) and name != "q_programs"]
    given += [*of_q, "cos_ptr", "sin_ptr", "rotary_seqlens_ptr"] if rotary else []
    optional = ["seqused_k_ptr", "lengths_ptr", "page_table_ptr", "page_table_stride", "cu_seqlens_new_ptr",
                "cu_seqlens_q_ptr", "batch_idx_ptr", "slot_mapping_ptr", "cos_ptr", "sin_ptr", "rotary_seqlens_ptr",
                *of_q]
    of_dtype = ["k_new_ptr", "v_new_ptr", "k_cache_ptr", "v_cache_ptr", "q_ptr", "q_rotated_ptr", "cos_ptr", "sin_ptr"]
    types = {name: f"*{dtype}" if name in of_dtype else "*i64" if name == "slot_mapping_ptr" else
             "*i32" if name.endswith("_ptr") else "i32" for name in _append.arg_names}
    kBlockD, kBlockDv = (1 << (n - 1).bit_length() for n in (head_dim, head_dim_v))
    constexprs = dict(kMaskCols=head_dim < kBlockD or head_dim_v < kBlockDv, kRotaryDim=32 if rotary else 0,
                      kInterleaved=dtype == "fp16", kAdvances=True, kPageSize=16, kHeads=TILE // max(kBlockD, kBlockDv),
                      kBlockD=kBlockD, kBlockDv=kBlockDv, kBlock=128, **dict.fromkeys(set(optional) - set(given)))
    return compile_for(capability, _append, types, constexprs, dict(num_warps=4))


def compile_matmul(capability, dtype, kTma, kTransA, kTransB, kSplits):
    """The first tile of the table, for aligned matrices with contiguous rows, or columns where transposed."""
    from triton_ref.matmul import TILES, _config, _matmul

    kBlockM, kBlockN, kBlockK, _ = TILES[torch_dtype(dtype).itemsize][0]
    constexprs = _config(torch_dtype(dtype), kBlockM, kBlockN, kBlockK, kSplits, kTma, matmul_memory(capability))
    options = {name: constexprs.pop(name) for name in ("num_warps", "num_stages")}
    constexprs.update(kTma=kTma, kTransA=kTransA, kTransB=kTransB)
    types = dict.fromkeys(_matmul.arg_names, "i32")
    for name, shape, is_trans in (("a", [kBlockM, kBlockK], kTransA), ("b", [kBlockK, kBlockN], kTransB),
                                  ("c", [kBlockM, kBlockN], False)):
        item = "fp32" if name == "c" and kSplits > 1 else dtype
        types[name] = f"tensordesc<{item}{shape[::-1] if is_trans else shape}>" if kTma else f"*{item}"
        if not kTma and name != "c":
            constexprs[f"{name}_row_stride" if is_trans else f"{name}_col_stride"] = 1
    return compile_for(capability, _matmul, types, constexprs, options)


def compile_for(capability, function, types, constexprs, options):
    """What triton.compile makes of a call with tensors aligned as torch aligns them: pointers and strides by 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types |= dict.fromkeys(constexprs, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, (name, type) in enumerate(types.items())
               if name.endswith("_stride") and type != "constexpr" or type.startswith("*")}
    source = ASTSource(fn=function, signature=types, constexprs=constexprs, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def stack_bytes(kernel):
    """What a thread keeps in local memory, spills above all."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([cuobjdump(), "-res-usage", file.name], capture_output=True, text=True,
                               check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])


def print_facts(compiled, capability, **more):
    ptx = compiled.asm["ptx"]
    print(json.dumps({**more, "shared": compiled.metadata.shared, "tf32": "tf32" in ptx, "any_mma": "mma" in ptx,
                      "mma": TWIN_MMA[capability] in ptx, "tma": "cp.async.bulk.tensor" in ptx,
                      "cp_async": "cp.async.cg" in ptx,
                      "setmaxnreg": "setmaxnreg.dec" in ptx, "vectors": "st.global.v4" in ptx,
                      "stack": stack_bytes(compiled)}))


def print_hopper(head_dim, every):
    import torch

    from triton_ref.attention_hopper import configs

    cases = [(config, causal) for config in configs(torch.bfloat16, head_dim) for causal in (True, False)]
    for config, causal in cases[::every]:
        print_facts(compile_hopper(head_dim, config, causal), 90, causal=causal)


def print_twin(capability, every):
    for case in twin_cases(capability)[::every]:
        print_facts(compile_twin(capability, *case), capability, dtype=case[0], case=case)


def print_twin_backward(capability, every):
    for case in (TWIN_BACKWARD_CASES + SCORED_BACKWARD_CASES)[::every]:
        for config in backward_configs(capability, *case):
            print_facts(compile_twin_backward(capability, config, *case), capability, dtype=case[1], dropout=case[5],
                        scores=case[6:], case=case, **config)


def print_twin_decode(capability):
    for case in TWIN_DECODE_CASES:
        for function, kernel in compile_twin_decode(capability, *case):
            print_facts(kernel, capability, kernel=function.fn.__name__, dtype=case[0], head_dim=case[1], case=case)


def print_twin_append(capability):
    for case in TWIN_APPEND_CASES:
        print_facts(compile_twin_append(capability, *case), capability, head_dim=case[1], case=case)


def print_matmul(capability):
    for case in matmul_cases(capability):
        print_facts(compile_matmul(capability, *case), capability, case=case)


PROGRAMS = {"twin": print_twin, "backward": print_twin_backward, "decode": print_twin_decode,
            "append": print_twin_append, "hopper": print_hopper, "matmul": print_matmul}
if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*map(int, sys.argv[2:]))
