import sys, importlib, torch, statistics, math, time
sys.path.insert(0, ".scratch"); sys.path.insert(0, ".")
from minimal_attn.backends import Options
import triton
dev="cuda"; B,H,S,D=2,16,8192,128
torch.manual_seed(0)
q,k,v=(torch.randn(B,H,S,D,device=dev,dtype=torch.bfloat16) for _ in range(3))
bias=torch.randn(1,H,S,S,device=dev,dtype=torch.bfloat16)
mask=torch.rand(1,1,S,S,device=dev)<.75
slopes=2**(-8*(torch.arange(H,device=dev).float()+1)/H)
kinds=dict(softcap=dict(softcap=30.0),alibi=dict(alibi_slopes=slopes),bias=dict(attn_bias=bias),mask=dict(attn_bias=mask))
tiles=[(64,64,4,3),(64,128,4,3),(128,64,8,3),(128,128,8,3),(128,128,8,2),(128,32,4,4)]
ref={}
for name in sys.argv[1].split(","):
    A=importlib.import_module(name+".attention")
    for kind,o in kinds.items():
        if len(sys.argv)>2 and kind not in sys.argv[2].split(","): continue
        line=[]
        for t in tiles:
            cfg=dict(zip(("kBlockM","kBlockN","kBlockD","kBlockDv","num_warps","num_stages"),(t[0],t[1],128,128,t[2],t[3])))
            opt=Options(softmax_scale=D**-.5,**o)
            try:
                out,lse=A.run(q,k,v,opt,cfg); torch.cuda.synchronize()
                if kind not in ref: ref[kind]=out
                err=(out-ref[kind]).abs().max().item()
                ms=[]
                for _ in range(5):
                    a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
                    a.record()
                    for _ in range(3): A.run(q,k,v,opt,cfg)
                    b.record(); torch.cuda.synchronize(); ms.append(a.elapsed_time(b)/3)
                line.append(f"{t[0]}x{t[1]}w{t[2]}s{t[3]}:{4*B*H*S*S*D/statistics.median(ms)/1e9:.0f}"+("" if err<.03 else f"!{err:.2f}"))
            except Exception as e:
                line.append(f"{t}:{type(e).__name__}")
        print(name,kind,*line,flush=True)
