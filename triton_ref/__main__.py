"""python -m triton_ref: the checks of classic.py."""

from .classic import main

if __name__ == "__main__":
    main()
