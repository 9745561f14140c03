"""A name of classic.py on demand: attention.py has such names too, and classic.py imports attention.py.

Read next: attention.py.
"""

of_classic = None  # name -> function; __init__.py sets it
