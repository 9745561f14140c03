import sys; sys.path.insert(0,'@REPO@/tests'); sys.path.insert(0,'@REPO@')
from pathlib import Path
import test_emulator as t, shutil
p=Path('@TMP@/emu'); shutil.rmtree(p,ignore_errors=True); p.mkdir()
c=t.emulated(p/'csrc')
print(t.linked(t.compiled(c, c/'objects'),'driver'))
