import sys; kind=sys.argv[1]; sys.argv=["x","G"]
src=open(".scratch/ab.py").read().split("bad = 0")[0]
exec(src)
c,t=make(kind,2,16,8192,8192,128,0); call("G",c); torch.cuda.synchronize()
