"""Documents of prepared TFDS datasets: tfds:NAME[:SPLIT] (bert_jax/data/tfds_source.py)."""

from bert_jax.data.tfds_source import open_tfds
from bert_jax.storage.compression import OnRead, ignore_progress
from data_prep.readers import plain_text
from data_prep.readers.file_blocks import damaged
from data_prep.readers.refusal import Items, Refusal, check

PREFIX = "tfds:"


def size(address: str) -> int:
    """The stored bytes of a split. Raises UserError if it is not prepared, or only for TensorFlow."""
    builder, split = open_tfds(address)
    return int(builder.info.splits[split].num_bytes)


def documents(address: str, field: str, on_read: OnRead = ignore_progress) -> Items:
    """The documents of a split: the text of each example's `field`."""
    builder, split = open_tfds(address)
    features = builder.info.features
    if field not in features:
        what = f"no feature {field!r}; the features are {', '.join(features)}"
        raise Refusal("no_text_column", address, what, "Use another --text_field")
    try:
        for number, example in enumerate(builder.as_data_source(split), start=1):
            text = example[field]
            if isinstance(text, str):
                text = text.encode()
            where = f"{address}, example {number}"
            if not isinstance(text, bytes):
                yield Refusal("no_text_field", where, f"no text in {field!r}", "Use another --text_field")
                continue
            long = len(text) > plain_text.MAX_DOCUMENT_BYTES
            yield plain_text.too_long(where) if long else check(text, where)
            on_read(len(text))
    except Exception as error:  # TFDS has no exception for a file that is missing or damaged
        raise damaged(address, error) from None
