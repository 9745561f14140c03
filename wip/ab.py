import ctypes, sys, torch, statistics, os, math
names = sys.argv[1].split(',')
class Call(ctypes.Structure):
    _fields_ = [(x, ctypes.c_void_p) for x in "q k v o lse tile_counter mask_words slopes bias".split()] + \
        [(x, ctypes.c_int64) for x in "bb bh br bk B H Sq Sk D causal bias_bool mods".split()] + [("softcap", ctypes.c_double), ("stream", ctypes.c_void_p)]
libs = {}
for n in names:
    libs[n] = ctypes.CDLL(os.path.abspath(f".scratch/{n}.so")); libs[n].fwd.restype = ctypes.c_char_p
dev = "cuda"
def make(kind, B, H, Sq, Sk, D, causal, seed=0):
    g = torch.Generator(dev).manual_seed(seed)
    r = lambda *s: torch.randn(*s, generator=g, device=dev).bfloat16()
    t = dict(q=r(B, H, Sq, D), k=r(B, H, Sk, D), v=r(B, H, Sk, D)); t["o"] = torch.empty_like(t["q"])
    t["lse"] = torch.empty(B, H, Sq, device=dev); t["tile_counter"] = torch.zeros(1, dtype=torch.int32, device=dev)
    t["mask_words"] = torch.empty(2*B*H*Sq*((Sk + 63)//64)*4 if B*H*Sq*Sk < 1e8 else Sq*((Sk+63)//64)*4, dtype=torch.int32, device=dev)
    c = Call(B=B, H=H, Sq=Sq, Sk=Sk, D=D, causal=causal, mods=kind != "dense", softcap=30.0 if "softcap" in kind else 0.0)
    if "alibi" in kind: t["slopes"] = 2 ** (-8 * (torch.arange(H, device=dev).float() + 1) / H)
    if "bias" in kind:
        t["bias"] = r(H, Sq, Sk); c.bh, c.br, c.bk = Sq * Sk, Sk, 1
    if "mask" in kind:
        t["bias"] = (torch.rand(Sq, Sk, generator=g, device=dev) > .2); c.br, c.bk, c.bias_bool = Sk, 1, 1
    if "keys" in kind:
        t["bias"] = (torch.rand(B, Sk, generator=g, device=dev) > .2); c.bb, c.br, c.bk, c.bias_bool = Sk, 0, 1, 1
    for k, x in t.items(): setattr(c, k, x.data_ptr())
    return c, t
def call(n, c):
    c.stream = torch.cuda.current_stream().cuda_stream
    e = libs[n].fwd(ctypes.byref(c))
    if e: raise RuntimeError(e)
def ref(c, t):
    q, k, v = (t[x].double() for x in "qkv")
    s = q @ k.mT / math.sqrt(c.D)
    if c.softcap: s = c.softcap * torch.tanh(s / c.softcap)
    i, j = torch.arange(c.Sq, device=dev)[:, None], torch.arange(c.Sk, device=dev)
    if c.slopes: s = s - t["slopes"].double()[:, None, None] * (i + c.Sk - c.Sq - j).abs()
    if c.bias:
        b = t["bias"]; b = b[:, None, None] if c.br == 0 else b
        s = s.masked_fill(~b, -math.inf) if c.bias_bool else s + b.double()
    if c.causal: s = s.masked_fill(j > i + c.Sk - c.Sq, -math.inf)
    return torch.nan_to_num(s.softmax(-1)) @ v, torch.logsumexp(s, -1)
bad = 0
for D in (128, 64):
    for kind in ("dense", "softcap", "alibi", "bias", "mask", "keysmask", "softcap_alibi_mask", "alibi_bias"):
        if kind == "keysmask": kind = "keys"
        for Sq, Sk in ((200, 330), (513, 520), (1024, 1024)):
            for causal in (0, 1):
                Sk_ = (Sk + 15)//16*16
                c, t = make(kind, 2, 2, Sq, Sk_, D, causal)
                o, lse = ref(c, t)
                for n in names:
                    t["o"].fill_(math.nan); call(n, c); torch.cuda.synchronize()
                    e = (t["o"].double() - o).abs().max().item(); f = (t["lse"].double() - lse).nan_to_num(0, 0, 0).abs().max().item()
                    if not (e < .02 and f < .01): bad += 1; print("BAD", n, D, kind, Sq, Sk_, causal, e, f)
print("bad", bad, flush=True)
def bench(c, n, iters):
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(iters): call(n, c)
    b.record(); torch.cuda.synchronize()
    return a.elapsed_time(b) / iters
for D, S, causal in ((128, 8192, 0), (128, 8192, 1), (64, 8192, 0)):
    base = {}
    for kind in ("dense", "softcap", "alibi", "bias", "mask", "keys"):
        c, t = make(kind, 2 if S > 4096 else 8, 16, S, S, D, causal)
        flops = 4 * c.B * c.H * S * S * D / (2 if causal else 1)
        ms = {n: [] for n in names}
        for n in names: bench(c, n, 3)
        for _ in range(7):
            for n in names: ms[n].append(bench(c, n, 5))
        tf = {n: flops / statistics.median(ms[n]) / 1e9 for n in names}
        if kind == "dense": base = dict(tf)
        print(f"{D} {S} {'c' if causal else ' '} {kind:8}", " ".join(f"{n} {tf[n]:4.0f} {tf[n]/base[names[0]]:.3f}" for n in names), flush=True)
        del t
