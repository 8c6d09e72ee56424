"""The peer of benchmarks/loader.py, which runs it in an interpreter that has torch and transformers.

Arguments: rows.npz, tokenizer folder, batch size, repeats. Prints the number of real tokens per second of processor
time as JSON, for each unit of masking. The libraries are imported only when they are used.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import transformers

SECONDS = 1.0


def examples(file: str, unit: str, special_ids: list[int]) -> list[dict[str, object]]:
    """Rows as the `datasets` library passes them to the collator: dicts of lists, with the special tokens mask."""
    rows = np.load(file)
    columns = rows["input_ids"], rows["lengths"].tolist(), rows["first_lengths"].tolist(), rows["labels"].tolist()
    continuation = rows["continuation"]
    special = np.isin(np.arange(len(continuation)), special_ids).astype(int)
    found = []
    for ids, length, first, label in zip(*columns, strict=True):
        example = {
            "input_ids": ids.tolist(),
            "token_type_ids": [0] * first + [1] * (length - first) + [0] * (len(ids) - length),
            "attention_mask": [1] * length + [0] * (len(ids) - length),
            "special_tokens_mask": special[ids].tolist(),
            "next_sentence_label": label,
        }
        if unit == "word":  # the collator recognizes words by gaps between the offsets
            starts = np.cumsum(np.where(continuation[ids], 1, 2))
            example["offset_mapping"] = np.stack([starts, starts + 1], axis=1).tolist()
        found.append(example)
    return found


def rate(file: str, unit: str, tokenizer: transformers.PreTrainedTokenizerBase, batch_size: int, repeats: int) -> float:
    """The median number of real tokens per second of processor time."""
    import torch
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the collator warns that it never replaces whole words by random tokens
        collator = transformers.DataCollatorForLanguageModeling(tokenizer, whole_word_mask=unit == "word")
    rows = examples(file, unit, tokenizer.all_special_ids)
    loader = torch.utils.data.DataLoader(
        rows, batch_size=batch_size, shuffle=True, drop_last=True, collate_fn=collator, num_workers=0
    )
    rates = []
    batches = iter(loader)
    for repeat in range(repeats + 1):
        tokens, began = 0, time.process_time()
        while (seconds := time.process_time() - began) < SECONDS:
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(loader)
                continue
            tokens += int(batch["attention_mask"].sum())
        if repeat:
            rates.append(tokens / seconds)
    return statistics.median(rates)


def main() -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    file, folder, batch_size, repeats = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    result = {unit: rate(file, unit, loaded, batch_size, repeats) for unit in ("token", "word")}
    print(json.dumps(result | {"versions": {"torch": torch.__version__, "transformers": transformers.__version__}}))


if __name__ == "__main__":
    main()
