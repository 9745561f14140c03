"""sass.py OBJECT [SUBSTRING...]: of each kernel whose name has all substrings, instructions per basic block that has
HGMMA, by kind, in the order of the code; --list prints the blocks themselves, --order the marks alone (products, waits,
barriers) with the number of other instructions between them."""
import collections, re, subprocess, sys
from pathlib import Path

NV = Path(sys.executable).parent.parent / "lib/python3.11/site-packages/triton/backends/nvidia/bin"
MARKS = "HGMMA", "WARPGROUP", "SYNCS", "BAR", "DEPBAR", "RED", "BRA", "WARPSYNC", "STSM", "FENCE", "UTMALDG", "EXIT"


def functions(path):
    text = subprocess.run([NV / "cuobjdump", "-sass", path], capture_output=True, text=True, check=True).stdout
    for part in text.split("Function : ")[1:]:
        name = part.split("\n")[0]
        yield name, [(int(a, 16), t) for a, t in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?)\s*;", part)]


def opcode(text):
    return re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]


def blocks(code):
    """Basic blocks: they end at branches and begin at targets."""
    starts = {code[0][0]}
    for (a, t), (b, _) in zip(code, code[1:]):
        if re.match(r"(@!?U?P\w+\s+)?(BRA|EXIT|RET|WARPSYNC.COLLECTIVE)", t):
            starts.add(b)
            if m := re.search(r"0x([0-9a-f]+)", t):
                starts.add(int(m[1], 16))
    block = []
    for a, t in code:
        if a in starts and block:
            yield block
            block = []
        block.append((a, t))
    yield block


def main():
    flags = [x for x in sys.argv[1:] if x.startswith("--")]
    path, *words = [x for x in sys.argv[1:] if not x.startswith("--")]
    for name, code in functions(path):
        if not all(w in name for w in words):
            continue
        print(f"\n{name}: {len(code)} instructions")
        if "--order" in flags:
            n = 0
            for a, t in code:
                if opcode(t).startswith(MARKS):
                    print(f"{n:5}  {a:6x}  {t}")
                    n = 0
                else:
                    n += 1
            continue
        for block in blocks(code):
            count = collections.Counter(opcode(t).split(".")[0] for _, t in block)
            if not count["HGMMA"] and len(block) < 40 and "--all" not in flags:
                continue
            print(f"{block[0][0]:6x}..{block[-1][0]:6x} {len(block):5}  " +
                  " ".join(f"{k} {v}" for k, v in count.most_common()), " ->", block[-1][1])
            if "--list" in flags:
                print(*(f"    {a:6x}  {t}" for a, t in block), sep="\n")


main()
