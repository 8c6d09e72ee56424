"""Data preparation: text to shards of examples, without jax."""
