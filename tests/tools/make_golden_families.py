"""Writes golden arrays of BERT's relatives, of GPT-2, and of BERT's question and multiple-choice heads.

See make_golden.py for the keys and the environment:

    golden_env/bin/python tests/tools/make_golden_families.py --output tests/testdata

Sizes are unusual, and ModernBERT's windows are shorter than the rows. Each file has labels, the loss and its gradients,
except modernbert_cls.npz and modernbert_tagging.npz, which have no gradients.

Additional keys: inputs/start_positions, inputs/end_positions, inputs/labels; outputs/start_logits,
outputs/end_logits. The inputs of multiple choice are i64[B,C,T], C choices per question.

electra_pair.npz holds a discriminator and, under outputs/generator_weights/ and outputs/generator_gradients/, its
generator, whose embeddings are the discriminator's; inputs/sampled has the generator's samples at the masked positions,
and outputs/mlm_loss, rtd_loss and loss follow Clark et al. 2020, section 3.1.
"""

import argparse
import pathlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers
from make_golden import IGNORED, NAMES, NO_DROPOUT, hidden_states, inputs_of, randomize, write

Inputs = dict[str, torch.Tensor]
Sizes = tuple[int, int, int, int, int, int]

SPECIAL = 4  # <s> <pad> </s> <unk>: words have this id or a larger one
DISTILBERT_NAMES = ("vocab_size", "dim", "n_layers", "n_heads", "hidden_dim", "max_position_embeddings")
ROBERTA = {"type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "layer_norm_eps": 1e-5}
# By family: the fields that turn dropout off and set the special ids of published models.
FIELDS: dict[str, dict[str, Any]] = {
    "Bert": NO_DROPOUT,
    "Roberta": NO_DROPOUT | ROBERTA,
    "XLMRoberta": NO_DROPOUT | ROBERTA,
    "DistilBert": dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout", "qa_dropout"), 0.0)
    | {"pad_token_id": 0},
    "MPNet": NO_DROPOUT | {"layer_norm_eps": 1e-5},
    "Albert": {"classifier_dropout_prob": 0.0},
    "Electra": NO_DROPOUT | {"summary_last_dropout": 0.0},
}
WITHOUT_SEGMENTS = ("Roberta", "XLMRoberta", "DistilBert", "MPNet")
# The reference's loss includes padding, whose hidden states are meaningless, so rows with answers have none.
ANSWERS = {"start_positions": torch.tensor([2, 0, 7]), "end_positions": torch.tensor([4, 0, 7])}
LONG, SHORT, FULL, CHOICES = [17, 6, 21], [5, 11], [13, 13, 13], [11, 3, 7, 8, 9, 4]
ELECTRA: Sizes = (67, 18, 2, 3, 27, 23)


class Case(NamedTuple):
    """One forward and backward pass of a model with random parameters."""

    family: str
    head: str
    sizes: Sizes  # the fields in NAMES
    lengths: list[int]  # of rows; the longest one sets T
    seed: int  # of parameters; the next seeds are those of inputs and labels
    labels: Sequence[int] = ()  # of rows or questions, unless the head implies them
    fields: Mapping[str, Any] = MappingProxyType({})


CASES = {
    "roberta_masked_lm": Case("Roberta", "MaskedLM", (83, 18, 3, 3, 31, 23), LONG, 11),
    # Its head is a pooler and a classifier.
    "xlm_roberta_classification": Case(
        "XLMRoberta", "SequenceClassification", (61, 15, 2, 5, 22, 15), SHORT, 14, [2, 0], {"num_labels": 3}
    ),
    "roberta_tagging": Case(
        "Roberta", "TokenClassification", (59, 14, 1, 2, 19, 12), [9, 4, 1], 16, fields={"num_labels": 4}
    ),
    "roberta_question": Case("Roberta", "QuestionAnswering", (53, 12, 2, 3, 17, 16), FULL, 19),
    "roberta_choices": Case("Roberta", "MultipleChoice", (47, 12, 1, 2, 21, 13), CHOICES, 23, [2, 0]),
    "bert_question": Case("Bert", "QuestionAnswering", (53, 12, 2, 3, 17, 14), FULL, 21),
    "bert_choices": Case("Bert", "MultipleChoice", (47, 12, 1, 4, 21, 12), CHOICES, 25, [1, 0, 1]),
    "distilbert_masked_lm": Case("DistilBert", "MaskedLM", (79, 18, 3, 3, 29, 22), LONG, 61),
    "distilbert_classification": Case(
        "DistilBert", "SequenceClassification", (61, 15, 2, 5, 22, 13), SHORT, 64, [2, 0], {"num_labels": 3}
    ),
    "distilbert_question": Case("DistilBert", "QuestionAnswering", (53, 12, 1, 3, 17, 14), FULL, 66),
    # The rows are long enough that distances share buckets.
    "mpnet_masked_lm": Case("MPNet", "MaskedLM", (71, 18, 3, 3, 25, 43), [40, 6, 31], 68),
    "mpnet_classification": Case(
        "MPNet", "SequenceClassification", (57, 14, 2, 2, 19, 15), SHORT, 71, [1, 2], {"num_labels": 3}
    ),
    "albert_classification": Case(
        *("Albert", "SequenceClassification", (57, 14, 2, 2, 19, 15), SHORT, 76, [1, 2]),
        {"embedding_size": 11, "hidden_act": "gelu", "num_labels": 3},
    ),
    "electra_masked_lm": Case("Electra", "MaskedLM", ELECTRA, LONG, 78, fields={"embedding_size": 10}),
    "electra_classification": Case(
        "Electra", "SequenceClassification", ELECTRA, SHORT, 81, [1, 2], {"embedding_size": 18, "num_labels": 3}
    ),
    "electra_choices": Case("Electra", "MultipleChoice", ELECTRA, CHOICES, 83, [1, 0, 1], {"embedding_size": 10}),
}


def config_of(family: str, sizes: Sizes, **fields: object) -> transformers.PretrainedConfig:
    """Returns a configuration without dropout."""
    names = DISTILBERT_NAMES if family == "DistilBert" else NAMES
    named = dict(zip(names, sizes, strict=True)) | FIELDS[family] | fields
    return getattr(transformers, f"{family}Config")(attn_implementation="eager", **named)


def rows_of(config: transformers.PretrainedConfig, family: str, lengths: list[int], seed: int) -> Inputs:
    """Returns rows of these lengths. Families without token types pad with their padding token."""
    if family not in WITHOUT_SEGMENTS:
        return inputs_of(config, lengths, max(lengths), seed)
    generator = torch.Generator().manual_seed(seed)
    attended = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(SPECIAL, config.vocab_size, attended.shape, generator=generator)
    return {"input_ids": torch.where(attended == 1, ids, config.pad_token_id), "attention_mask": attended}


def masked_labels(inputs: Inputs, vocab_size: int, seed: int) -> Inputs:
    """Returns a label at about a quarter of the positions."""
    generator = torch.Generator().manual_seed(seed)
    chosen = (torch.rand(inputs["input_ids"].shape, generator=generator) < 0.25) & (inputs["attention_mask"] == 1)
    targets = torch.randint(0, vocab_size, chosen.shape, generator=generator)
    return {"labels": torch.where(chosen, targets, IGNORED)}


def write_case(path: pathlib.Path, case: Case) -> None:
    config = config_of(case.family, case.sizes, **case.fields)
    model = getattr(transformers, f"{case.family}For{case.head}")(config)
    randomize(model, case.seed)
    inputs = rows_of(config, case.family, case.lengths, case.seed + 1)
    labels = {"labels": torch.tensor(case.labels)}
    if case.head == "MaskedLM":
        labels = masked_labels(inputs, config.vocab_size, case.seed + 2)
    elif case.head == "QuestionAnswering":
        labels = ANSWERS
    elif case.head == "TokenClassification":
        generator = torch.Generator().manual_seed(case.seed + 2)
        tags = torch.randint(0, config.num_labels, inputs["input_ids"].shape, generator=generator)
        labels = {"labels": torch.where(inputs["attention_mask"] == 1, tags, IGNORED)}
    elif case.head == "MultipleChoice":
        inputs = {name: value.reshape(len(case.labels), -1, value.shape[-1]) for name, value in inputs.items()}
    output = model.train()(**inputs, **labels, output_hidden_states=True)
    output.loss.backward()
    logits = ("start_logits", "end_logits") if labels is ANSWERS else ("logits",)
    outputs = hidden_states(output) | {name: output[name] for name in logits} | {"loss": output.loss}
    write(path, model, inputs | labels, outputs)


def albert_pretraining(path: pathlib.Path) -> None:
    """Writes AlbertForPreTraining: three layers that share their parameters."""
    config = config_of("Albert", (73, 18, 3, 3, 27, 24), embedding_size=10, type_vocab_size=2)
    model = transformers.AlbertForPreTraining(config).train()
    randomize(model, seed=73)
    inputs = inputs_of(config, LONG, length=21, seed=74)
    labels = masked_labels(inputs, config.vocab_size, seed=75)
    order = torch.tensor([0, 1, 1])
    output = model(**inputs, **labels, sentence_order_label=order, output_hidden_states=True)
    mlm_loss = torch.nn.functional.cross_entropy(output.prediction_logits.flatten(0, 1), labels["labels"].flatten())
    order_loss = torch.nn.functional.cross_entropy(output.sop_logits, order)
    torch.testing.assert_close(output.loss, mlm_loss + order_loss)
    output.loss.backward()
    outputs = hidden_states(output) | {
        "pooled": torch.tanh(model.albert.pooler(output.hidden_states[-1][:, 0])),
        "mlm_logits": output.prediction_logits,
        "next_sentence_logits": output.sop_logits,
        "loss": output.loss,
        "mlm_loss": mlm_loss,
        "next_sentence_loss": order_loss,
    }
    write(path, model, inputs | labels | {"next_sentence_label": order}, outputs)


def electra_pair(path: pathlib.Path) -> None:
    """Writes one step of a generator and a discriminator that share their embeddings, on fixed samples."""
    config = config_of("Electra", ELECTRA, embedding_size=10)
    small = config_of("Electra", (67, 12, 2, 2, 18, 23), embedding_size=10)
    model, generator = transformers.ElectraForPreTraining(config), transformers.ElectraForMaskedLM(small)
    randomize(model, seed=85)
    randomize(generator, seed=86)
    generator.electra.embeddings = model.electra.embeddings
    generator.generator_lm_head.weight = model.electra.embeddings.word_embeddings.weight
    inputs = inputs_of(config, LONG, 21, seed=87)
    labels = masked_labels(inputs, config.vocab_size, seed=88)["labels"]
    source = torch.Generator().manual_seed(89)
    sampled = torch.randint(0, config.vocab_size, labels.shape, generator=source)
    sampled = torch.where(torch.rand(labels.shape, generator=source) < 0.3, labels, sampled)  # some samples are right
    masked = labels != IGNORED
    mlm_loss = generator(**inputs, labels=labels).loss
    text = torch.where(masked, labels, inputs["input_ids"])
    corrupted = torch.where(masked, sampled, inputs["input_ids"])
    output = model(**inputs | {"input_ids": corrupted}, labels=(corrupted != text).long(), output_hidden_states=True)
    loss = mlm_loss + 50 * output.loss
    loss.backward()
    outputs = hidden_states(output) | {
        "logits": output.logits,
        "mlm_loss": mlm_loss,
        "rtd_loss": output.loss,
        "loss": loss,
        **{f"generator_weights/{name}": value for name, value in generator.named_parameters()},
        **{f"generator_gradients/{name}": value.grad for name, value in generator.named_parameters()},
    }
    write(path, model, inputs | {"labels": labels, "sampled": torch.where(masked, sampled, 0)}, outputs)


MODERNBERT = dict(zip(NAMES, (47, 18, 2, 3, 23, 31), strict=True)) | {
    "local_attention": 8,
    "global_attn_every_n_layers": 2,
    # Each type of attention layer has its own rotary base.
    "global_rope_theta": 160_000.0,
    "local_rope_theta": 10_000.0,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "cls_token_id": 2,
    "eos_token_id": 3,
    "sep_token_id": 3,
    "attn_implementation": "eager",
}


def modernbert(path: pathlib.Path, head: str, lengths: list[int], seed: int, **fields: object) -> None:
    """Writes a ModernBERT. In five layers, 0 and 3 have global attention; the others see 4 positions on each side."""
    config = transformers.ModernBertConfig(**MODERNBERT | fields)
    model = getattr(transformers, f"ModernBertFor{head}")(config).train()
    randomize(model, seed)
    inputs = inputs_of(config, lengths, max(lengths), seed + 1)
    inputs.pop("token_type_ids")
    labels, name = {"labels": torch.tensor([2, 0])}, "logits"
    if head == "MaskedLM":
        labels, name = masked_labels(inputs, config.vocab_size, seed + 2), "mlm_logits"
    elif head == "TokenClassification":
        labels = {}
    output = model(**inputs, **labels, output_hidden_states=True)
    outputs = hidden_states(output) | {name: output.logits} | ({"loss": output.loss} if labels else {})
    if labels and path.stem != "modernbert_cls":
        output.loss.backward()
    write(path, model, inputs | labels, outputs)


def gpt2(path: pathlib.Path) -> None:
    """Writes GPT2LMHeadModel, tied; the label of a position is the next token, unless that is padding."""
    sizes = {"vocab_size": 53, "n_embd": 20, "n_layer": 3, "n_head": 4, "n_inner": 27, "n_positions": 19}
    config = transformers.GPT2Config(
        **sizes,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        bos_token_id=2,
        eos_token_id=3,
        use_cache=False,
        attn_implementation="eager",
    )
    model = transformers.GPT2LMHeadModel(config).train()
    randomize(model, seed=61)
    inputs = inputs_of(config, lengths=[17, 5, 11], length=17, seed=62)
    inputs.pop("token_type_ids")
    labels = torch.where(inputs["attention_mask"] == 1, inputs["input_ids"], IGNORED)
    output = model(**inputs, labels=labels, output_hidden_states=True)
    output.loss.backward()
    outputs = hidden_states(output) | {"lm_logits": output.logits, "loss": output.loss}
    write(path, model, inputs | {"labels": labels}, outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("tests/testdata"), help="output folder")
    folder = parser.parse_args().output
    torch.set_num_threads(1)
    for name, case in CASES.items():
        write_case(folder / f"{name}.npz", case)
    albert_pretraining(folder / "albert_pretraining.npz")
    electra_pair(folder / "electra_pair.npz")
    five = {"num_hidden_layers": 5, "global_attn_every_n_layers": 3}
    classes = {"num_labels": 3, "classifier_pooling": "mean"}
    # No published ModernBERT has biases.
    biases = dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), True)
    modernbert(folder / "modernbert_mlm.npz", "MaskedLM", [23, 6, 17], 51, **five)
    modernbert(folder / "modernbert_mean.npz", "SequenceClassification", [7, 13], 54, **classes)
    modernbert(
        folder / "modernbert_cls.npz", "SequenceClassification", [7, 13], 54, **classes | {"classifier_pooling": "cls"}
    )
    modernbert(folder / "modernbert_tagging.npz", "TokenClassification", [11, 4], 56, num_labels=5, **biases)
    gpt2(folder / "gpt2.npz")


if __name__ == "__main__":
    main()
