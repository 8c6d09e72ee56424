"""Writes the golden arrays of tests/testdata from the reference implementation (transformers, PyTorch).

Run it in a separate environment, since neither package is a dependency of bert_jax:

    python -m venv golden_env && golden_env/bin/pip install torch transformers safetensors
    golden_env/bin/python tests/tools/make_golden.py --output tests/testdata

Each file holds a tiny random float32 model with unusual sizes. Its keys:

    config                      JSON text, the model's config.json
    versions                    JSON text, the versions of the packages that produced it
    weights/NAME                the tensors of its model.safetensors by Hugging Face name
    inputs/input_ids ...        i64[B,T]; attention_mask is 0 for the padding at the end of each row
    outputs/hidden_0 ...        f32[B,T,D]; 0 is the embeddings, the last is the encoder's output
    outputs/pooled, outputs/mlm_logits, outputs/next_sentence_logits, outputs/logits
    outputs/loss, outputs/mlm_loss, outputs/next_sentence_loss       means, as computed by the reference
    gradients/NAME              of outputs/loss with respect to each tensor
"""

import argparse
import json
import pathlib
import tempfile

import numpy as np
import safetensors
import safetensors.numpy
import torch
import transformers

IGNORED = -100  # the label that the reference's loss ignores


NAMES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
NAMES += ("max_position_embeddings",)
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # for a deterministic forward pass


def config_of(*sizes: int, **fields: object) -> transformers.BertConfig:
    """Returns a BERT configuration without dropout. `sizes` are the fields in NAMES."""
    named = dict(zip(NAMES, sizes, strict=True))
    return transformers.BertConfig(attn_implementation="eager", **named, **NO_DROPOUT, **fields)


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Moves every parameter far from its initial value, so that an error in any term of the model shows."""
    generator = torch.Generator().manual_seed(seed)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    scales = {id(norm.weight) for norm in norms}
    with torch.no_grad():
        for value in model.parameters():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(1 + 0.2 * noise if id(value) in scales else 0.2 * noise)


def inputs_of(config: transformers.BertConfig, lengths: list[int], length: int, seed: int) -> dict[str, torch.Tensor]:
    """Returns rows of the given lengths, padded to `length`; the second part of each row is segment 1."""
    generator = torch.Generator().manual_seed(seed)
    position = torch.arange(length)
    ends = torch.tensor(lengths)[:, None]
    attended = (position < ends).long()
    ids = torch.randint(1, config.vocab_size, (len(lengths), length), generator=generator)
    return {
        "input_ids": ids * attended,
        "attention_mask": attended,
        "token_type_ids": (position >= (ends * 2) // 3).long() * attended,
    }


def arrays_of(model: transformers.PreTrainedModel) -> dict[str, np.ndarray]:
    """Returns the tensors as save_pretrained writes them, and their gradients by the same names."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        weights = safetensors.numpy.load_file(pathlib.Path(folder) / "model.safetensors")
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    found = {f"weights/{name}": value for name, value in weights.items()}
    return found | {f"gradients/{name}": value.numpy() for name, value in gradients.items()}


def write(path: pathlib.Path, model: transformers.PreTrainedModel, inputs: dict, outputs: dict) -> None:
    versions = {package.__name__: package.__version__ for package in (torch, transformers, safetensors)}
    arrays = arrays_of(model)
    arrays |= {f"inputs/{name}": value.numpy() for name, value in inputs.items()}
    arrays |= {f"outputs/{name}": value.detach().numpy() for name, value in outputs.items()}
    config = json.loads(model.config.to_json_string(use_diff=False))
    config = {name: value for name, value in config.items() if value is not None}
    texts = {"config": json.dumps(config, sort_keys=True), "versions": json.dumps(versions, sort_keys=True)}
    np.savez_compressed(path, **arrays, **{name: np.array(text) for name, text in texts.items()})
    print(f"{path}: {path.stat().st_size} bytes, {len(arrays)} arrays")


def hidden_states(output: transformers.utils.ModelOutput) -> dict[str, torch.Tensor]:
    return {f"hidden_{depth}": value for depth, value in enumerate(output.hidden_states)}


def pretraining(path: pathlib.Path) -> None:
    """Writes BertForPreTraining: every hidden state, both heads, both losses and one backward pass."""
    config = config_of(101, 24, 3, 3, 41, 29)
    model = transformers.BertForPreTraining(config).train()
    randomize(model, seed=1)
    inputs = inputs_of(config, lengths=[19, 7, 12], length=19, seed=2)
    generator = torch.Generator().manual_seed(3)
    chosen = (torch.rand(inputs["input_ids"].shape, generator=generator) < 0.25) & (inputs["attention_mask"] == 1)
    targets = torch.randint(0, config.vocab_size, chosen.shape, generator=generator)
    targets[0, 3], chosen[0, 3] = 0, True  # id 0 is a valid label
    labels = torch.where(chosen, targets, IGNORED)
    next_sentence_label = torch.tensor([0, 1, 1])
    output = model(**inputs, labels=labels, next_sentence_label=next_sentence_label, output_hidden_states=True)
    mlm_loss = torch.nn.functional.cross_entropy(output.prediction_logits.flatten(0, 1), labels.flatten())
    next_sentence_loss = torch.nn.functional.cross_entropy(output.seq_relationship_logits, next_sentence_label)
    torch.testing.assert_close(output.loss, mlm_loss + next_sentence_loss)
    output.loss.backward()
    outputs = hidden_states(output) | {
        "pooled": model.bert.pooler(output.hidden_states[-1]),
        "mlm_logits": output.prediction_logits,
        "next_sentence_logits": output.seq_relationship_logits,
        "loss": output.loss,
        "mlm_loss": mlm_loss,
        "next_sentence_loss": next_sentence_loss,
    }
    write(path, model, inputs | {"labels": labels, "next_sentence_label": next_sentence_label}, outputs)


def classification(path: pathlib.Path) -> None:
    """Writes BertForSequenceClassification with three labels."""
    config = config_of(67, 15, 2, 5, 22, 13, num_labels=3)
    model = transformers.BertForSequenceClassification(config).train()
    randomize(model, seed=4)
    inputs = inputs_of(config, lengths=[5, 11], length=11, seed=5)
    output = model(**inputs, output_hidden_states=True)
    write(path, model, inputs, hidden_states(output) | {"logits": output.logits})


def tagging(path: pathlib.Path) -> None:
    """Writes BertForTokenClassification with five tags, an architecture without a pooler."""
    config = config_of(59, 14, 1, 2, 19, 12, num_labels=5)
    model = transformers.BertForTokenClassification(config).train()
    randomize(model, seed=6)
    inputs = inputs_of(config, lengths=[9, 4, 1], length=9, seed=7)
    output = model(**inputs, output_hidden_states=True)
    write(path, model, inputs, hidden_states(output) | {"logits": output.logits})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("tests/testdata"), help="output folder")
    folder = parser.parse_args().output
    torch.set_num_threads(1)
    pretraining(folder / "bert_pretraining.npz")
    classification(folder / "bert_classification.npz")
    tagging(folder / "bert_tagging.npz")


if __name__ == "__main__":
    main()
