"""Published results of another model, for comparison."""

# bert-base-cased on the dev files, the mean of five seeds, three epochs of batches of 32: the table of
# huggingface/transformers, examples/flax/text-classification/README.md. Of MNLI the matched dev file.
MODEL = "bert-base-cased (Hugging Face's Flax example; dev, mean of 5 seeds)"
FIGURES: dict[str, dict[str, float]] = {
    "cola": {"matthews_correlation": 0.590},
    "sst2": {"accuracy": 0.922},
    "mrpc": {"f1": 0.890, "accuracy": 0.844},
    "stsb": {"pearson": 0.889, "spearman": 0.886},
    "qqp": {"accuracy": 0.908, "f1": 0.875},
    "mnli": {"accuracy": 0.838},
    "qnli": {"accuracy": 0.908},
    "rte": {"accuracy": 0.648},
    "wnli": {"accuracy": 0.370},
}
