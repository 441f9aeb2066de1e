"""The compiled form of a checkout: the request path as extension modules, made by mypyc.

`python -m bin.compiled` makes it below `.cache/compiled`; `bin/boot.py` starts it where it belongs to the
sources as they are at that moment. It is never needed: without it, everything runs as Python.
"""
