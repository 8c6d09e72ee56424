"""Tokenizers: text to token ids and back. Read tokenizer.py first, then vocabulary.py and the module of a kind."""
