"""The admin listener: metrics and read-only state."""
