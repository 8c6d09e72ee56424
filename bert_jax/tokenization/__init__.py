"""The kinds of tokenizer behind bert_jax.tokenizer: of each what decides its ids, as plain data, and its engine."""
