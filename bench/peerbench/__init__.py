"""peerbench: a fake engine and a load generator, cheap enough to measure a gateway with (Rust)."""
