"""Decisions of the gateway: no I/O, no clock, no environment."""
