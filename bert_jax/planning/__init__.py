"""Estimates what a training step costs on TPUs by asking their compiler; no TPU is needed (bert_jax.plan)."""
