"""The kinds of tokenizer behind bert_jax.tokenization.tokenizer: for each, a specification as plain data and an engine."""
