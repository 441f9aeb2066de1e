"""Scorers: how well an endpoint suits a request, in [0, 1]."""
