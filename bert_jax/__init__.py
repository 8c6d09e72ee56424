"""bert_jax: pretrain, fine-tune and export bidirectional encoders in JAX."""

from bert_jax.renamed_modules import refuse_renamed_modules

refuse_renamed_modules()

# setup.cfg reads the version from here, so that a checkout that is not installed knows it too.
__version__ = "0.1.0"
