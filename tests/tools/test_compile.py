"""Compiles the kernels for GPUs that need not be here: csrc/*.cu with nvcc, Triton's ahead of time.

Triton's compiler and its interpreter do not share a process, so this file is also a program. It makes calls with tensors
on the CPU, and compiles what they would launch on a GPU: `python test_compile.py forward 90 1` prints what came out, one
JSON object a kernel. CALLS has the other names. The last number asks for every call if it is 1, and for every sixth one
if it is 6.
"""
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest
import torch

from code_digest import cuobjdump, nvcc
from minimal_attn._build import recipe
from minimal_attn.score_function import read
from minimal_attn.score_library import source

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(file.relative_to(ROOT / "csrc").as_posix() for file in (ROOT / "csrc").rglob("*.cu")
               if file.name != "counters.cu")  # which has no kernel
TARGETS = "75", "80,86", "90a", "120"  # nvcc makes the same PTX for sm_86 as for sm_80
# CI compiles for Hopper alone, and leaves out those that take most of a minute.
LONG = ("flash.cu", "simt/flash_bwd.cu", "sm80/flash_sm80.cu", "sm80/flash_bwd_sm80.cu",
        "sm90/bwd/flash_bwd_sm90.cu")
# How many bytes of stack, and of spills, a kernel of a file may have where it is not none. These use all their
# registers and keep a number or two beyond them in memory: in the backward pass dK, dV and the tiles of S and dP fill
# them, in the forward pass the rounds of Philox, or the addresses of a bias, come on top. With block masks the producers
# of sm90/ have too few for the walk.
SPILLS = {"sm80/flash_bwd_sm80.cu": 136, "sm80/flash_sm80.cu": 352, "sm90/flash_sm90.cu": 16,
          "cache/prefill_sm90.cu": 64, "sm90/mods/flash_dropout_sm90.cu": 32, "sm90/mods/flash_mods_sm90.cu": 80,
          "sm90/mods/flash_max_logits_sm90.cu": 24, "sm90/bwd/flash_bwd_sm90.cu": 272,
          "sm90/bwd/flash_bwd_wide_sm90.cu": 144, "sm90/mods/flash_masked_sm90.cu": 72, "simt/flash_bwd.cu": 64,
          "simt/flash_bwd_bias.cu": 120, "cache/decode.cu": 48, "flash.cu": 136}

# The instruction a 16-bit product becomes, by compute capability.
MMA = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
# Dtype, head_dim, and what a call asks for: full and partial tiles of columns, each mask with and without lengths. A
# pair of head_dims is that of q and k and that of v.
FORWARD = [
    ("float32", 64, "causal sinks"), ("float32", 128, "used"), ("float16", 64, "sinks"), ("float16", 256, "causal used"),
    ("float16", 64, "local"), ("bfloat16", 40, "causal sinks"), ("bfloat16", 128, "used"),
    ("bfloat16", 128, "causal dropout"), ("bfloat16", 128, "local packed"), ("bfloat16", (192, 128), "causal sinks"),
    ("float16", (64, 256), "local packed sinks"), ("float32", (64, 32), "causal used"),
    ("bfloat16", 64, "causal softcap alibi bias"), ("float16", 128, "softcap"), ("float32", 64, "softcap alibi bias"),
    ("bfloat16", 256, "causal used mask"), ("bfloat16", 128, "causal units"), ("float32", 64, "units"),
    ("bfloat16", 128, "causal score_mod"), ("float32", 64, "score_mod")]
FP8_FORWARD = [("float8_e4m3fn", 128, "causal used"), ("float8_e5m2", 64, ""), ("float8_e4m3fn", 128, "local packed")]
BACKWARD = [
    ("bfloat16", 64, "causal"), ("float16", 64, "dropout"), ("bfloat16", 128, "causal dropout"), ("float16", 128, ""),
    ("bfloat16", 256, "causal"), ("float32", 64, "causal"), ("float32", 128, "causal dropout"), ("float32", 256, ""),
    ("bfloat16", 128, "local"), ("float16", 64, "causal packed"), ("bfloat16", 128, "local packed"),
    ("bfloat16", (192, 128), "causal sinks"), ("float16", (64, 32), "local packed sinks"),
    ("bfloat16", 64, "causal softcap alibi bias"), ("float16", 128, "softcap alibi bias"), ("bfloat16", 128, "mask"),
    ("float32", 64, "softcap"), ("bfloat16", 128, "units"), ("float16", 64, "causal units"),
    ("bfloat16", 128, "score_mod"), ("float16", 64, "causal score_mod units deterministic")]
DECODE = [("bfloat16", 128, "paged split"), ("float16", 64, "split softcap alibi sinks"),
          ("bfloat16", 256, "paged split"), ("float32", (192, 128), "paged split"), ("bfloat16", (40, 128), "")]
APPEND = [("bfloat16", 128, "paged rotary"), ("float16", (64, 32), "rotary"), ("float32", (192, 128), "rotary q"),
          ("bfloat16", (40, 128), "paged slots")]
HOPPER = [("bfloat16", head_dim, mask) for head_dim in (64, 128, 256) for mask in ("causal", "")]
MATMUL = [("float32", 64, ""), ("float16", 64, "b"), ("bfloat16", 64, "a split"), ("float16", 64, "split"),
          ("bfloat16", 64, "a b")]  # which matrices are transposed


def slow(is_in_ci):
    """The marks of cases.slow_unless(), which a program of this file's own cannot import: cases.py knows the kernels."""
    return pytest.mark.slow if is_in_ci else (pytest.mark.slow, pytest.mark.campaign)


def test_no_fast_math():
    assert not any("fast" in flag for flag in recipe()["extra_cuda_cflags"])


@pytest.mark.skipif(not nvcc(), reason="no nvcc on PATH or in CUDA_HOME")
@pytest.mark.parametrize("file, target", [
    pytest.param(file, target, marks=slow(file not in LONG and target == "90a"))
    for file in FILES for target in TARGETS])
def test_cuda_kernels_do_not_spill(file, target, tmp_path):
    codes = [f"sm_{code}" for code in target.split(",")]
    gpu = f"-gencode=arch=compute_{codes[0].removeprefix('sm_')},code=[{','.join(codes)}]"
    what = "-c" if target == "90a" else "-fatbin"  # the host's code once, which is the same for all
    command = [nvcc(), *recipe()["extra_cuda_cflags"], "-Xptxas=-v", gpu, what, f"-I{ROOT}/csrc",
               ROOT / "csrc" / file, "-o", tmp_path / "kernel"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
    assert done.returncode == 0, done.stdout
    kernels = re.findall(r"Compiling entry function '(\w+)' for '(\w+)'", done.stdout)
    memory = re.findall(r"Function properties for (\w+)\s+(\d+ bytes stack frame, .*)", done.stdout)
    assert {code for _, code in kernels} == set(codes) and len(memory) >= len(kernels), done.stdout
    spills = [f"{name}: {use}" for name, use in memory
              if max(map(int, re.findall(r"(\d+) bytes", use))) > SPILLS.get(file, 0)]
    assert not spills, "\n".join(spills)
    assert "serialized" not in done.stdout, done.stdout  # ptxas, of wgmma that it could not let run on


@pytest.mark.slow
@pytest.mark.skipif(not nvcc(), reason="no nvcc on PATH or in CUDA_HOME")
@pytest.mark.parametrize("head_dim, has_block_mask", [(64, False), (128, True)])
def test_score_mod_compiles(head_dim, has_block_mask, tmp_path):
    """A library of a function of five operations, with no more spills than these."""
    table = torch.zeros(4, 9, requires_grad=True)
    graph, root, _ = read(lambda score, b, h, q_idx, kv_idx: torch.tanh(score + table[h, q_idx - kv_idx]) / 2)
    (tmp_path / "score.cu").write_text(source(graph, root, [table.dtype], head_dim, has_block_mask))
    command = [nvcc(), *recipe()["extra_cuda_cflags"], "-Xptxas=-v", "-gencode=arch=compute_90a,code=sm_90a",
               "-c", f"-I{ROOT}/csrc", "score.cu"]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=240)
    assert done.returncode == 0, done.stdout
    assert "serialized" not in done.stdout, done.stdout
    assert max(map(int, re.findall(r"(\d+) bytes spill loads", done.stdout))) <= 320, done.stdout


def printed(directory, *arguments):
    """Runs this file as a program and returns the facts that it prints about each kernel."""
    pytest.importorskip("triton", reason="triton is not installed")
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "TRITON_CACHE_DIR": str(directory)}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, __file__, *map(str, arguments)], env=env, capture_output=True, text=True,
                          timeout=240)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert kernels
    for kernel in kernels:
        assert kernel["shared"] <= max_shared_memory(arguments[1]) and not kernel["tf32"], kernel  # true fp32
    return kernels


def max_shared_memory(capability):
    """Bytes of shared memory for one program. Code for 80 also runs on 86 and 120, which have the 99 KiB."""
    return (99 if capability == 80 else 227) << 10


def uses_tma(capability, dtype):
    return capability >= 90 and dtype != "float32"


@pytest.mark.parametrize("capability, every", [pytest.param(90, 6, marks=slow(True)), *(
    pytest.param(capability, 1, marks=slow(False)) for capability in MMA)])
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_twin_compiles(name, capability, every, tmp_path):
    for kernel in printed(tmp_path, name, capability, every):
        is_fp32 = kernel["dtype"] == "float32"
        assert kernel["mma"] == (not is_fp32) and kernel["tma"] == uses_tma(capability, kernel["dtype"]), kernel
        if capability == 90 and name == "backward":  # 0 to 264 in 16 bits with Triton 3.7 and 3.9, 608 with dropout
            may_spill = is_fp32 or any(x in kernel["asks"] for x in ("dropout", "softcap", "bias", "mask", "score_mod"))
            assert kernel["stack"] <= (1024 if may_spill else 272), kernel


# Every sixth call is one alone, and every second one is that with a causal mask.
@pytest.mark.parametrize("every", [6, pytest.param(2, marks=slow(True)), pytest.param(1, marks=slow(False))])
def test_hopper_twin_compiles(every, tmp_path):
    """attention_hopper.py: tensor cores, TMA and registers that move from the producer to the consumers."""
    pytest.importorskip("triton.experimental.gluon", reason="needs a Triton with Gluon")
    for kernel in printed(tmp_path, "hopper", 90, every):
        assert kernel["mma"] and kernel["tma"] and kernel["setmaxnreg"], kernel
        assert kernel["stack"] <= 256, kernel  # 0 to 32 with Triton 3.6, up to 168 with 3.9


@pytest.mark.parametrize("capability", [pytest.param(x, marks=slow(x == 90)) for x in MMA])
@pytest.mark.parametrize("name", ["decode", "append", "matmul"])
def test_other_twins_compile(name, capability, tmp_path):
    for kernel in printed(tmp_path, name, capability, 1):
        is_16_bit = kernel["dtype"] != "float32"
        if name == "matmul":
            assert kernel["mma"] == is_16_bit and kernel["tma"] == uses_tma(capability, kernel["dtype"]), kernel
            continue
        assert kernel["stack"] == 0 and (kernel["vectors"] or name != "append" or kernel["head_dim"] != 128), kernel
        if kernel["kernel"] == "_decode":  # K and V come 16 bytes at a time while others are in use
            assert kernel["any_mma"] == is_16_bit and kernel["cp_async"] == is_16_bit, kernel


# The program.

def pair(head_dim):
    """The head_dim of q and k, and that of v."""
    return head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)


def call_attention(dtype, head_dim, asks):
    import torch

    from minimal_attn import flash_attention
    from minimal_attn.block_mask import BlockMask

    D, Dv = pair(head_dim)
    tensors = [torch.empty(1 if "packed" in asks else 2, 4, 512, d, dtype=getattr(torch, dtype)) for d in (D, D, Dv)]
    lengths, bias = torch.tensor([300, 512], dtype=torch.int32), torch.zeros(1, 4, 512, 512)
    ends = torch.tensor([0, 300, 512], dtype=torch.int32)
    options = {"packed": dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=300, max_seqlen_k=300),
               "used": dict(seqused_q=lengths, seqused_k=lengths), "causal": dict(causal=True),
               "local": dict(window_size=(100, 7)), "sinks": dict(sinks=torch.zeros(4)), "dropout": dict(dropout_p=0.1),
               "deterministic": dict(deterministic=True),
               "softcap": dict(softcap=30.0), "alibi": dict(alibi_slopes=torch.ones(4)), "bias": dict(attn_bias=bias),
               "mask": dict(attn_bias=bias == 0), "units": dict(block_mask=BlockMask.from_dense(bias == 0))}
    table, slopes = torch.zeros(4, 1023, requires_grad=True), torch.zeros(4, requires_grad=True)
    document = torch.arange(512) // 64
    options["score_mod"] = dict(score_mod=lambda score, b, h, q_idx, kv_idx: torch.where(
        document[q_idx] == document[kv_idx], torch.tanh(score) + table[h, q_idx - kv_idx + 511], score * slopes[h]))
    keywords = {key: value for name in asks.split() for key, value in options[name].items()}
    if "float8" not in dtype:
        tensors = [x.requires_grad_() for x in tensors]
    return flash_attention(*tensors, backend="triton", **keywords)


def make_cache(dtype, head_dim, asks):
    """The keys and values of a cache for two samples, the lengths in it, and the page table in a dict, if any."""
    import torch

    size = (512, 16) if "paged" in asks else (2, 4096)
    k, v = (torch.empty(size[0], 8, size[1], d, dtype=getattr(torch, dtype)) for d in pair(head_dim))
    paged = dict(page_table=torch.arange(512, dtype=torch.int32).view(2, 256)) if "paged" in asks else {}
    return k, v, torch.tensor([2000, 4000], dtype=torch.int32), paged


def call_decode(dtype, head_dim, asks):
    import torch

    from minimal_attn import attention_with_kvcache

    k, v, lengths, paged = make_cache(dtype, head_dim, asks)
    options = dict(softcap=dict(softcap=30.0, window_size=(3000, 0)), alibi=dict(alibi_slopes=torch.ones(8)),
                   sinks=dict(sinks=torch.zeros(8)))
    keywords = {key: value for name in asks.split() for key, value in options.get(name, {}).items()}
    q = torch.empty(2, 8, 1, k.shape[-1], dtype=k.dtype)
    attention_with_kvcache(q, k, v, lengths, num_splits=3 if "split" in asks else 1, backend="triton", **paged,
                           **keywords)


def call_append(dtype, head_dim, asks):
    import torch

    from minimal_attn import append_to_kvcache, attention_with_kvcache, reshape_and_cache

    k, v, lengths, paged = make_cache(dtype, head_dim, asks)
    new = [torch.empty(2, 8, 3, x.shape[-1], dtype=x.dtype) for x in (k, v)]
    cos = torch.empty(4096, 16, dtype=k.dtype)
    rotary = dict(rotary_cos=cos, rotary_sin=cos, rotary_interleaved=dtype == "float16") if "rotary" in asks else {}
    if "slots" in asks:
        slots = torch.arange(3)
        reshape_and_cache(*(x[0].transpose(0, 1) for x in new), *(x.transpose(1, 2) for x in (k, v)), slots,
                          backend="triton")
    elif "q" in asks:
        attention_with_kvcache(new[0], k, v, lengths, k=new[0], v=new[1], causal=True, backend="triton", **rotary)
    else:
        append_to_kvcache(*new, k, v, lengths, backend="triton", **paged, **rotary)


def call_matmul(dtype, head_dim, asks):
    import torch

    from triton_ref.matmul import _multiply

    m, n, k = (256, 256, 8192) if "split" in asks else (4096, 4096, 256)
    a, b = (torch.empty(size, dtype=getattr(torch, dtype)) for size in ((m, k), (k, n)))
    a, b = (x.t().contiguous().t() if name in asks.split() else x for name, x in (("a", a), ("b", b)))
    _multiply(a, b, None, None, None, False)


CALLS = {"forward": (call_attention, FORWARD, ["_flash_fwd"]), "hopper": (call_attention, HOPPER, ["_flash_fwd"]),
         "backward": (lambda *case: call_attention(*case).sum().backward(), BACKWARD,
                      ["_flash_bwd_kv", "_flash_bwd_q"]),
         "decode": (call_decode, DECODE, ["_decode", "combine_splits"]), "append": (call_append, APPEND, ["_append"]),
         "matmul": (call_matmul, MATMUL, ["_matmul"])}


def pretend_gpu(capability):
    """Triton finds a GPU of that capability, and minimal_attn lets its kernels have tensors on the CPU."""
    import triton
    from triton.backends.compiler import GPUTarget

    import triton_ref.ops

    found = {"max_shared_mem": max_shared_memory(capability), "multiprocessor_count": 132}
    triton.runtime.driver.set_active(types.SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0, set_current_device=lambda device: None,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        utils=types.SimpleNamespace(get_device_properties=lambda device: found)))
    triton_ref.ops.INTERPRETING = True


def main(name, capability, every):
    from triton.runtime.jit import JITFunction

    from triton_ref import autotune

    pretend_gpu(capability)
    call, cases, kernels = CALLS[name]
    cases = cases + FP8_FORWARD if (name, capability) == ("forward", 90) else cases

    def compile_instead(function, *arguments, grid, warmup, **options):
        """In place of a launch."""
        if function.fn.__name__ in kernels:
            compiled = run(function, *arguments, grid=grid, warmup=True, **options)
            print_facts(compiled, capability, function.fn.__name__, *case)

    def every_choice(kernel, key, configs, run, device):
        """In place of the fastest one."""
        for config in configs:
            if name != "hopper" or "kConsumers" in config:
                run(config)
        return configs[0]

    run, JITFunction.run = JITFunction.run, compile_instead
    autotune.is_on = lambda: every == 1 and capability == 90 and name != "forward"
    autotune.fastest = every_choice
    for case in cases[::every]:
        call(*case)


def print_facts(compiled, capability, kernel, dtype, head_dim, asks):
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([cuobjdump(), "-res-usage", file.name], capture_output=True, text=True,
                               check=True).stdout
    print(json.dumps({"kernel": kernel, "dtype": dtype, "head_dim": head_dim, "asks": asks,
                      "shared": compiled.metadata.shared, "tf32": "tf32" in ptx, "any_mma": "mma" in ptx,
                      "mma": MMA[capability] in ptx, "tma": "cp.async.bulk.tensor" in ptx,
                      "cp_async": "cp.async.cg" in ptx, "setmaxnreg": "setmaxnreg.dec" in ptx,
                      "vectors": "st.global.v4" in ptx, "stack": int(re.search(r"STACK:(\d+)", usage)[1])}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
