"""Configuration: schema, loader, reload, errors, logging."""
