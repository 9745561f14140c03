import sys
src=open(".scratch/ab.py").read()
i=src.index("bad = 0"); j=src.index("def bench(c")
exec(src[:i]); exec(src[j:src.index("for D, S, causal in")])
for D, S, causal in ((128, 8192, 0), (128, 2048, 0), (64, 8192, 0)):
    base=None
    for kind in ("dense","bias","rowbias","headbias","smallbias","mask"):
        c, t = make("bias" if "bias" in kind else kind, 2 if S > 4096 else 8, 16, S, S, D, causal)
        if kind == "rowbias": c.br = 0
        if kind == "headbias": c.bh = 0   # one for all heads: 128 MB
        if kind == "smallbias": c.bh = 0; c.br = 8  # rows overlap in memory: 64 KB, all in L2, same TMA work
        flops = 4 * c.B * c.H * S * S * D
        ms = []
        bench(c, names[0], 3)
        for _ in range(5): ms.append(bench(c, names[0], 5))
        tf = flops / statistics.median(ms) / 1e9
        base = base or tf
        print(D, S, kind, f"{tf:.0f} {tf/base:.3f}", flush=True)
        del t
