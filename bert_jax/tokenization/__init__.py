"""The kinds of tokenizer behind bert_jax.tokenizer: for each, a specification as plain data and an engine."""
