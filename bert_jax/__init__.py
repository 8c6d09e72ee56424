"""bert_jax: pretrain, fine-tune and export bidirectional encoders in JAX."""

# setup.cfg reads the version from here, so that a checkout that is not installed knows it too.
__version__ = "0.1.0"
