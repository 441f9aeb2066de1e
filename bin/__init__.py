"""Programs of llmgw; in the wheel this folder is the package `llmgw`."""
