"""`python -m bert_jax`: the command bert-jax."""

from bert_jax import commands

if __name__ == "__main__":
    commands.start()
