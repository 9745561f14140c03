"""bwd_ab.py LIB.so[,LIB2.so]: correctness against fp64, then TFLOP/s beside cuDNN's and FA2's backward."""
import ctypes, sys, torch, statistics, os, math
from torch.nn.attention import SDPBackend, sdpa_kernel
class Call(ctypes.Structure):
    _fields_ = [(x, ctypes.c_void_p) for x in "q k v o lse dout dq dk dv delta lse_log2 workspace".split()] + \
        [(x, ctypes.c_int64) for x in "B H HK Sq Sk D causal sm90 fp16 deterministic".split()] + [("stream", ctypes.c_void_p)]
libs = {}
for n in sys.argv[1].split(","):
    l = libs[n.split("/")[-1][:-3]] = ctypes.CDLL(os.path.abspath(n)); l.bwd.restype = ctypes.c_char_p; l.workspace.restype = ctypes.c_int64
dev = "cuda"
def make(lib, B, H, HK, Sq, Sk, D, causal, sm90=1, fp16=0):
    g = torch.Generator(dev).manual_seed(0); dt = torch.float16 if fp16 else torch.bfloat16
    r = lambda *s: torch.randn(*s, generator=g, device=dev).to(dt)
    t = dict(q=r(B, H, Sq, D), k=r(B, HK, Sk, D), v=r(B, HK, Sk, D), dout=r(B, H, Sq, D))
    for x, y in (("dq", "q"), ("dk", "k"), ("dv", "v")): t[x] = torch.full_like(t[y], math.nan)
    for x in ("delta", "lse_log2"): t[x] = torch.empty(B, H, Sq, device=dev)
    c = Call(B=B, H=H, HK=HK, Sq=Sq, Sk=Sk, D=D, causal=causal, sm90=sm90, fp16=fp16)
    t["workspace"] = torch.empty(lib.workspace(ctypes.byref(c)) + 16, dtype=torch.uint8, device=dev)
    return c, t
def finish(c, t, o, lse):
    t["o"], t["lse"] = o.contiguous(), lse.float().contiguous()
    for k, x in t.items(): setattr(c, k, x.data_ptr())
def call(lib, c):
    c.stream = torch.cuda.current_stream().cuda_stream
    e = lib.bwd(ctypes.byref(c))
    if e: raise RuntimeError(e)
bad = 0
for n, lib in libs.items():
    for B, H, HK, Sq, Sk, D in ((2, 4, 2, 200, 333, 128), (1, 2, 2, 1024, 1024, 128), (1, 2, 1, 513, 128, 64), (1, 1, 1, 1, 70, 128)):
        for causal in (0, 1):
            for fp16 in (0, 1):
                c, t = make(lib, B, H, HK, Sq, Sk, D, causal, 1, fp16)
                q, k, v = (t[x].double().requires_grad_() for x in "qkv")
                kk, vv = (x.repeat_interleave(H // HK, 1) for x in (k, v))
                s = q @ kk.mT / math.sqrt(D)
                if causal: s = s.masked_fill(torch.ones(Sq, Sk, device=dev).triu(Sk - Sq + 1).bool(), -math.inf)
                p = s.softmax(-1).nan_to_num(0); o = p @ vv
                o.backward(t["dout"].double())
                finish(c, t, o.detach().to(t["q"].dtype), torch.logsumexp(s.detach(), -1)); call(lib, c); torch.cuda.synchronize()
                for x, w in (("dq", q.grad), ("dk", k.grad), ("dv", v.grad)):
                    e = ((t[x].double() - w).abs().max() / w.abs().max().clamp(min=.1)).item()
                    if not e < .02: bad += 1; print("BAD", n, x, B, H, HK, Sq, Sk, D, causal, fp16, e)
print("bad", bad, flush=True)
def bench(f, iters):
    f(); a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(iters): f()
    b.record(); torch.cuda.synchronize()
    return a.elapsed_time(b) / iters
for D in (128,):
    for S in (16384, 8192, 2048, 512):
        for causal in (0, 1):
            B, H = 16384 // S, 2048 // D
            flops = 10 * B * H * S * S * D / (2 if causal else 1)
            fs = {}
            for n, lib in libs.items():
                c, t = make(lib, B, H, H, S, S, D, causal)
                finish(c, t, torch.randn_like(t["q"]), torch.full((B, H, S), math.log(S) + .5, device=dev)); fs[n] = (lambda lib=lib, c=c, t=t: call(lib, c))
            c8, t8 = make(lib, B, H, H, S, S, D, causal, 0); finish(c8, t8, t["o"], t["lse"]); fs["sm80"] = lambda: call(lib, c8)
            for name, be in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("fa2", SDPBackend.FLASH_ATTENTION)):
                q, k, v = (t[x].clone().requires_grad_() for x in "qkv")
                with sdpa_kernel(be): o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(causal))
                fs[name] = lambda o=o, q=q, k=k, v=v: torch.autograd.grad(o, (q, k, v), t["dout"], retain_graph=True)
            ms = {n: [] for n in fs}
            for _ in range(5):
                for n, f in fs.items(): ms[n].append(bench(f, 3))
            tf = {n: flops / statistics.median(x) / 1e9 for n, x in ms.items()}
            print(D, S, "c" if causal else " ", *(f"{n} {x:.0f} ({x / tf['cudnn']:.2f})" for n, x in tf.items()), flush=True)
