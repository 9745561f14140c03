# loop.py SASS FUNC_SUBSTR: basic blocks with HGMMA etc
import re,sys
s=open(sys.argv[1]).read().split('Function : ')
for f in s[1:]:
    name=f.split('\n')[0]
    if sys.argv[2] not in name: continue
    ins=re.findall(r'/\*([0-9a-f]{4,5})\*/\s+(.*?);',f)
    print(name,len(ins))
    for a,t in ins: print(a,t)
