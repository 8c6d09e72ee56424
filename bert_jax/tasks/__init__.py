"""Fine-tuning tasks, and the use of fine-tuned and pretrained models on texts.

From a row of a file to a metric, with the function that takes each step:

registry.resolve       a configuration -> its Task (task.py, kinds/) and files
registry.read          a file -> a Split: Task.read takes the columns of items (reading/labelled.py, or the module of
                       the kind) from a table (reading/tables.py)
Task.encode            a Split -> TaskRows (rows.py): token ids, with the labels as arrays
batches.TaskSource     TaskRows -> a TaskBatch for each training step; sorted_batches for one pass of inference
TaskObjective          a TaskBatch -> the heads' outputs -> the loss, or the rows' answers (task.py, kinds/)
inference.Predictor    runs the model over all batches and returns the answers in the order of the rows
Task.measure           answers -> metrics by name (metrics.py)
Task.predictions       answers -> the objects that `bert-jax predict` prints

finetuning.py trains on this path (runs.py prepares it, trials.py has the seeds), evaluation.py measures,
prediction.py predicts inputs without labels. embedder.py, features.py, fill_mask.py and retrieval.py use the encoder or
its pretraining heads.
"""
