"""Every attention on this machine side by side, without installing anything: python bench.py --help.

Read next: minimal_attn/bench/__init__.py, the run.
"""

import sys

from minimal_attn.cli import bench, guarded

if __name__ == "__main__":
    sys.exit(guarded("bench.py", lambda: bench(sys.argv[1:], "python bench.py")))
