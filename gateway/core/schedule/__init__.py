"""Choice of an endpoint: filter, score, pick."""
