"""bwd_ab.py BWD.so: is each variant right, and how fast is it? One GPU, about 120 s. It needs torch alone; see README.md.

First dq, dk and dv against fp64 at small shapes; then TFLOP/s of the whole backward pass (preprocess, zeroing and the
conversion of dq included) beside cuDNN's, FA2's and flash_bwd_sm80.cu's, in turns, medians."""
import ctypes
import math
import statistics
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

POINTERS = "q k v o lse dout dq dk dv delta lse_log2 workspace".split()
NUMBERS = "B H HK Sq Sk D causal variant fp16 deterministic".split()
# Numbers of bwd_wrap.cu: 0 sm80, 1 sm90 as it is.
NAMES = {0: "sm80", 1: "sm90", 2: "128", 3: "128 in step", 4: "64x4", 5: "64x4 in step", 6: "64x2", 7: "64x2 in step",
         8: "64x4", 9: "80", 10: "80 in step"}
VARIANTS = {64: (1, 2, 3, 4, 5), 128: (1, 6, 7, 8, 9, 10), 192: (1,), 256: (1,)}
LIMIT = time.monotonic() + float(sys.argv[2] if len(sys.argv) > 2 else 110)


class Call(ctypes.Structure):
    _fields_ = ([(x, ctypes.c_void_p) for x in POINTERS] + [(x, ctypes.c_int64) for x in NUMBERS] +
                [("stream", ctypes.c_void_p), ("seed", ctypes.c_void_p), ("dropout_p", ctypes.c_double)])


lib = ctypes.CDLL(sys.argv[1])
lib.bwd.restype, lib.workspace.restype = ctypes.c_char_p, ctypes.c_int64


class Backward:
    """Tensors and a call of one variant. run() overwrites dq, dk and dv."""

    def __init__(self, inputs, variant, causal, deterministic=0):
        self.t = t = dict(inputs)
        B, H, Sq, D = t["q"].shape
        HK, Sk = t["k"].shape[1:3]
        for grad in "qkv":
            t["d" + grad] = torch.full_like(t[grad], math.nan)
        t["delta"], t["lse_log2"] = torch.empty_like(t["lse"]), torch.empty_like(t["lse"])
        self.call = Call(B=B, H=H, HK=HK, Sq=Sq, Sk=Sk, D=D, causal=causal, variant=variant,
                         fp16=t["q"].dtype == torch.float16, deterministic=deterministic)
        self.call.dq = t["dq"].data_ptr()  # its workspace depends on it
        size = lib.workspace(ctypes.byref(self.call))
        t["workspace"] = torch.full((size // 4 + 4,), math.nan, device="cuda")
        for name in POINTERS:
            setattr(self.call, name, t[name].data_ptr())

    def run(self):
        self.call.stream = torch.cuda.current_stream().cuda_stream
        if error := lib.bwd(ctypes.byref(self.call)):
            raise RuntimeError(error.decode())


def random_inputs(B, H, HK, Sq, Sk, D, dtype=torch.bfloat16):
    shapes = dict(q=(B, H, Sq, D), k=(B, HK, Sk, D), v=(B, HK, Sk, D), dout=(B, H, Sq, D))
    return {name: torch.randn(*shape, device="cuda").to(dtype) for name, shape in shapes.items()}


def reference(x, causal):
    """out, lse, and the gradients in fp64."""
    q, k, v = (x[name].double().requires_grad_() for name in "qkv")
    group = q.shape[1] // k.shape[1]
    keys, values = (y.repeat_interleave(group, 1) for y in (k, v))
    scores = q @ keys.mT / math.sqrt(q.shape[-1])
    if causal:
        rows, cols = scores.shape[-2:]
        hidden = torch.ones(rows, cols, device="cuda").triu(cols - rows + 1).bool()
        scores = scores.masked_fill(hidden, -math.inf)
    out = scores.softmax(-1).nan_to_num(0) @ values
    out.backward(x["dout"].double())
    lse = torch.logsumexp(scores.detach(), -1).float()
    return out.detach().to(x["q"].dtype), lse, {"dq": q.grad, "dk": k.grad, "dv": v.grad}


def check():
    shapes = [(2, 4, 2, 200, 333), (1, 2, 2, 1024, 1024), (1, 2, 1, 513, 192), (1, 1, 1, 1, 70), (1, 16, 1, 512, 300)]
    bad = worst = 0
    for D, variants in VARIANTS.items():
        for shape in shapes:
            for causal in 0, 1:
                x = random_inputs(*shape, D)
                x["out"], x["lse"], wanted = reference(x, causal)
                x["o"] = x.pop("out").contiguous()
                for variant in variants:
                    for deterministic in 0, 1:
                        backward = Backward(x, variant, causal, deterministic)
                        backward.run()
                        for name, y in wanted.items():
                            error = (backward.t[name].double() - y).abs().max() / y.abs().max().clamp(min=.1)
                            worst = max(worst, float(error.nan_to_num(9)))
                            if not error < .02:
                                bad += 1
                                print("WRONG", name, D, shape, f"causal={causal} deterministic={deterministic}",
                                      NAMES[variant], float(error))
    print(f"{bad} wrong, largest error {worst:.4f} of the largest element", flush=True)


def milliseconds(f, calls):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        f()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls


def measure(D, S, causal, deterministic):
    B, H = 16384 // S, 2048 // D
    x = random_inputs(B, H, H, S, S, D)
    x["lse"] = torch.full((B, H, S), math.log(S) + .5, device="cuda")
    x["o"] = torch.randn_like(x["q"])
    candidates, peers = {}, {}
    for variant in (0, *VARIANTS[D]):
        candidates[NAMES[variant]] = Backward(x, variant, causal).run
    if deterministic:
        candidates["sm90 det"] = Backward(x, 1, causal, 1).run
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("fa2", SDPBackend.FLASH_ATTENTION)):
        q, k, v = (x[y].clone().requires_grad_() for y in "qkv")
        try:
            with sdpa_kernel(backend):
                out = sdpa(q, k, v, is_causal=bool(causal))
        except RuntimeError as error:
            print(name, "cannot:", str(error).splitlines()[0])
            continue
        peers[name] = lambda out=out, q=q, k=k, v=v: torch.autograd.grad(out, (q, k, v), x["dout"], retain_graph=True)
    times = {name: [] for name in {**peers, **candidates}}
    for turn in range(4):
        for name, f in {**peers, **candidates}.items():
            times[name].append(milliseconds(f, 3))
    flops = 10 * B * H * S * S * D / (2 if causal else 1)
    rate = {name: flops / statistics.median(t[1:]) / 1e9 for name, t in times.items()}
    print(f"{D:4}{S:7} {'causal' if causal else '      '}",
          "  ".join(f"{name} {r:.0f} ({r / rate.get('cudnn', rate['sm80']):.2f})" for name, r in rate.items()), flush=True)


print(torch.cuda.get_device_name(), torch.__version__, "cuDNN", torch.backends.cudnn.version())
check()
for S in 8192, 2048, 16384:
    for D in 128, 64, 256:
        for causal in 0, 1:
            if time.monotonic() < LIMIT:
                measure(D, S, causal, deterministic=S != 16384)
