"""emu.py [FILE...]: builds tests/driver.cpp with the emulator in $EMU (default /tmp/emu); with names of files, compiles
those alone anew. Then: $EMU/csrc/objects/driver --random=3 CASE..."""
import os, subprocess, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
import test_emulator as t

csrc = Path(os.environ.get("EMU", "/tmp/emu")) / "csrc"
objects = csrc / "objects"
csrc.mkdir(parents=True, exist_ok=True), objects.mkdir(exist_ok=True)
t.emulated(csrc)
sources = sys.argv[1:] or [*t.KERNELS, *t.PARTS, t.DRIVER.name]


def compile(source):
    name = ROOT / "tests/driver.cpp" if source == "driver.cpp" else csrc / source
    out = objects / Path(source).with_suffix(".o").name
    cuda = t.CUDA if source.endswith(".cu") else ()
    subprocess.run([t.CXX, *t.FLAGS, "-O2", *cuda, "-I", csrc, "-x", "c++", "-c", name, "-o", out], check=True)


list(t.ThreadPoolExecutor(2).map(compile, sources))
subprocess.run([t.CXX, *objects.glob("*.o"), "-o", objects / "driver"], check=True)
