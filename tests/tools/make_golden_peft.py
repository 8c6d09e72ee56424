"""Writes golden adapters of peft, and the outputs of the models that they adapt.

    golden_env/bin/pip install peft        (besides what make_golden.py needs)
    golden_env/bin/python tests/tools/make_golden_peft.py --output tests/testdata

The keys are those of make_golden.py, where `weights` are those of the base model without heads; `adapters/NAME` are the
tensors of adapter_model.safetensors, and `adapter_config` is the text of adapter_config.json.

peft_query_value.npz   queries and values, the pooler and classifier as whole modules
peft_all.npz           all matrices of the layers, rank-stabilized
peft_electra.npz       ELECTRA: queries and values, and the classifier, which has two layers, as a whole module
"""

import argparse
import json
import pathlib
import tempfile

import numpy as np
import peft
import safetensors.numpy
import torch
import transformers
from make_golden import NAMES, inputs_of, randomize

SIZES = dict(zip(NAMES, (31, 12, 2, 2, 14, 16), strict=True)) | {"pad_token_id": 0}
ALL = ["query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense"]
CASES = {
    "peft_query_value": {"r": 3, "lora_alpha": 6, "target_modules": ["query", "value"], "modules_to_save": ["pooler"]},
    "peft_all": {"r": 4, "lora_alpha": 2, "target_modules": ALL, "use_rslora": True, "lora_dropout": 0.1},
    "peft_electra": {"r": 3, "lora_alpha": 6, "target_modules": ["query", "value"]},
}


FAMILIES = {"peft_electra": ("Electra", {"embedding_size": 8})}  # of all other cases: Bert


def write(path: pathlib.Path, seed: int, **options: object) -> None:
    """Writes the base model, the adapters and the logits of one case."""
    family, sizes = FAMILIES.get(path.stem, ("Bert", {}))
    config, base_class, classifier = (
        getattr(transformers, family + part) for part in ("Config", "Model", "ForSequenceClassification")
    )
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        base = base_class(config(**SIZES | sizes))
        randomize(base, seed)
        base.save_pretrained(folder / "base")
        model = classifier.from_pretrained(folder / "base", num_labels=3)
        adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", **options))
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        adapted.save_pretrained(folder / "adapters")
        inputs = inputs_of(model.config, [11, 5, 8], 11, seed + 2)
        logits = adapted.eval()(**inputs).logits
        arrays = {"outputs/logits": logits.detach().numpy()}
        arrays |= {f"inputs/{key}": value.numpy() for key, value in inputs.items()}
        for kind, file in (("weights", "base/model.safetensors"), ("adapters", "adapters/adapter_model.safetensors")):
            tensors = safetensors.numpy.load_file(folder / file)
            arrays |= {f"{kind}/{key}": value for key, value in tensors.items()}
        adapter_config = json.loads((folder / "adapters" / "adapter_config.json").read_text())
        texts = {
            "config": (folder / "base" / "config.json").read_text(),
            "adapter_config": json.dumps(adapter_config | {"base_model_name_or_path": "base"}, sort_keys=True),
            "versions": json.dumps({one.__name__: one.__version__ for one in (torch, transformers, peft)}),
        }
        np.savez_compressed(path, **arrays, **{key: np.array(text) for key, text in texts.items()})
    print(f"{path}: {path.stat().st_size} bytes, {len(arrays)} arrays")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("tests/testdata"), help="output folder")
    folder = parser.parse_args().output
    torch.set_num_threads(1)
    for number, (name, options) in enumerate(CASES.items()):
        write(folder / f"{name}.npz", 10 * number, **options)


if __name__ == "__main__":
    main()
