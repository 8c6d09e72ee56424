"""The shape alphabet, used in all signatures and einsums of bert_jax.

    B  batch (rows)              V  vocabulary (padded: see padded_vocabulary)
    T  sequence length           L  layers
    D  model width               M  masked positions per row
    N  attention heads           S  packed sequences per row
    H  head width (D = N * H)    C  classes of a task
    F  feed-forward width        P  learned positions

A *sequence* is one `[CLS] A [SEP] (B [SEP])`. A batch has B *rows*; each contains one sequence, or several packed.
"""

# A multiple of the TPU lane width keeps the vocabulary matmul free of ragged tiles (and shards evenly).
VOCABULARY_MULTIPLE = 128


def padded_vocabulary(vocab_size: int) -> int:
    """The number of rows of the token table: vocab_size rounded up to a multiple of VOCABULARY_MULTIPLE."""
    return -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
