"""What a training step would cost on TPUs, asked of their compiler, without a TPU (bert_jax.plan)."""
