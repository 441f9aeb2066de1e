"""The version of llmgw, read by setup.cfg and by every program."""

__version__ = "0.1.0"
