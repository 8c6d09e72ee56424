"""`python -m bert_jax`: the command bert-jax."""

from bert_jax.commands import main

if __name__ == "__main__":
    main.start()
