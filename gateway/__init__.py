"""The gateway's workers: HTTP, dispatch, relay."""
