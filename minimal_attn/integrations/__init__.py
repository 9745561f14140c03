"""Our attention inside other libraries, each in a module of its own that imports the library.

Nothing here is imported by minimal_attn itself.
"""
