"""Benchmarks: what the gateway costs, beside the bare engine and beside other gateways."""
