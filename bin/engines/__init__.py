"""Install and start engines on this machine: llama.cpp, vLLM on the CPU, and our simulated one.

For `make demo`, the tests and `make bench`; not part of the wheel. Everything is kept below `.cache/` of the
checkout, and every installation may be run again: what is there stays.
"""
