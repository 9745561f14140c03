import random, sys, re, subprocess, shutil
sys.path.insert(0,'@REPO@/tests'); sys.path.insert(0,'@REPO@')
import test_emulator as t
from pathlib import Path
seed=int(sys.argv[1]); n=int(sys.argv[2]); random.seed(seed)
L=[]
for i in range(n):
    d=random.choice([8,64,72,96,104,128,160,192,200,256])
    B=random.choice([1,2,3]); HK=random.choice([1,2]); H=HK*random.choice([1,2,3])
    if d>128: H=min(H,2); HK=min(HK,H)
    if H%HK: HK=1
    Sq=random.choice([1,7,63,64,65,130,192,193,200,300]); Sk=random.choice([1,8,79,80,81,128,160,176,208,250,320,400])
    causal=random.random()<.3
    bias=random.choice(["","","b16","boolean","boolean"]); dt=random.choice(["f16","b16"])
    if bias=="b16": bias=dt; Sk=(Sk+7)//8*8
    softcap=random.choice([0,0,3]); alibi=random.random()<.6
    if not bias and not softcap: alibi=True
    shape="".join(c for c in "BHR" if random.random()<.6)+("K" if bias!="boolean" or random.random()<.85 else "")
    lens=random.random()
    ql=[] ; kl=[]
    if lens<.3: ql=[random.choice([0,1,Sq//2,Sq,Sq+5,-3]) for _ in range(B)]; kl=[random.choice([0,0,1,Sk//2,Sk,Sk+9,-1]) for _ in range(B)]
    elif lens<.5: kl=[random.choice([0,0,1,Sk//2,Sk]) for _ in range(B)]
    case='{"fuzz%d_%d", %s, %d, %d, %d, %d, %d, %d, %s, %s, {%s}, kSm90, 0, %s}'%(seed,i,dt,B,H,HK,Sq,Sk,d,str(causal).lower(),random.choice(["kHeads","kRows"]),",".join(map(str,ql)),random.choice(["1","1","30"]))
    c="with_mods(%s, %s, %s%s)"%(case,softcap,str(alibi).lower(),(', %s, "%s"'%(bias,shape)) if bias else "")
    if kl: c="lengths_of_keys(%s, {%s})"%(c,",".join(map(str,kl)))
    if not causal and random.random()<.25: c="window(%s, %d, %d)"%(c,random.choice([-1,0,30,100]),random.choice([-1,0,20,90]))
    L.append(c)
s=Path('@REPO@/tests/driver.cpp').read_text()
a=s.index("const std::vector<Case> cases = {"); b=s.index("\n};",a)
s=s[:a]+"const std::vector<Case> cases = {\n"+",\n".join(L)+s[b:]
src=Path('@TMP@/emu/csrc/driver_fuzz.cpp'); src.write_text(s)
o=Path('@TMP@/emu/csrc/objects')
subprocess.run([t.CXX,*t.FLAGS,"-O1","-I",'@TMP@/emu/csrc',"-x","c++","-c",src,"-o",f"@TMP@/fuzz/driver{seed}.o"],check=True)
objs=[x for x in o.glob("*.o") if x.name not in ("driver.o",)]
subprocess.run([t.CXX,f"@TMP@/fuzz/driver{seed}.o",*objs,"-o",f"@TMP@/fuzz/fuzz{seed}"],check=True)
