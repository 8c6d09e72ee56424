"""bert_jax: pretrain, fine-tune and export bidirectional encoders in JAX."""
