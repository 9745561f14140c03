import re,sys
s=open('@TMP@/bwd.sass').read().split('Function : ')
for f in s[1:]:
    name=f.split('\n')[0]
    if 'flash_bwdI13' not in name or sys.argv[1] not in name: continue
    ins=re.findall(r'/\*([0-9a-f]{4,5})\*/\s+(.*?);',f)
    print(name,len(ins))
    open('@TMP@/bwd.txt','w').write('\n'.join(a+' '+t for a,t in ins))
    for i,(a,t) in enumerate(ins):
        if re.search(r'STL|LDL|HGMMA|DEPBAR|BRA |RED|SYNCS|STSM|BAR',t): print(i,a,t[:90])
