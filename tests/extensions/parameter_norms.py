"""A hook of its own: the norm of the parameters every 100 steps, and at the end of the run."""

import optax

from bert_jax.train.hooks import Hook


class ParameterNorms(Hook):
    every = 100

    def __init__(self):
        self.norms = {}

    def __call__(self, point):
        self.norms[point.step] = float(optax.tree.norm(point.state.params))
