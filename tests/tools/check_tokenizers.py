"""Loads saved tokenizer folders with transformers and encodes texts, for comparison with bert_jax.

Run with a Python that has transformers (see make_golden.py):

    python tests/tools/check_tokenizers.py TEXTS.json FOLDER [FOLDER ...]

TEXTS.json is a list of texts. Prints one JSON line per folder: class, size, ids (of each text, without special tokens),
pair (ids of the first two texts, with special tokens), roles (ids of pad, unk, cls, sep, mask).
"""

import json
import sys
from pathlib import Path

import transformers

texts = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
for folder in sys.argv[2:]:
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    report = {
        "class": type(loaded).__name__,
        "size": len(loaded),
        "ids": loaded(texts, add_special_tokens=False)["input_ids"],
        "pair": loaded(texts[0], texts[1])["input_ids"],
        "roles": [getattr(loaded, f"{role}_token_id") for role in ("pad", "unk", "cls", "sep", "mask")],
    }
    print(json.dumps(report))
