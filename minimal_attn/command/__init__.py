"""Parts of the command minimal-attn: info.py prints what is here, crosscheck.py is `check`, which compares all backends
with the reference, and progress.py draws the bar of a long run.

../cli.py is the command itself.
"""
