"""What bert_jax.report draws: curves as inline SVG, tables, and a model's guesses, in one HTML file."""
