"""python -m minimal_attn: the command minimal-attn. Read cli.py."""

import sys

from .cli import main

sys.exit(main())
