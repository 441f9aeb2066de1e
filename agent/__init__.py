"""The agent of a GPU node, and the simulated engine."""
