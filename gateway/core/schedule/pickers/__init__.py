"""Pickers: which of the scored endpoints is taken."""
