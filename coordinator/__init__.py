"""The coordinator: one process per host that owns the shared decisions."""
