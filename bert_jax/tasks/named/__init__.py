"""The tasks known by name: their options, and the layout of their published files.

layout     the description of a named task
glue       the nine tasks of GLUE, and its diagnostic set
choice     SWAG, and COPA of SuperGLUE
superglue  BoolQ, CB, RTE and WiC of SuperGLUE
squad      SQuAD 1.1 and 2.0
tagging    parts of speech (ewt) and entities (conll2003)
"""

from bert_jax.tasks.named.choice import COPA, SWAG
from bert_jax.tasks.named.glue import GLUE
from bert_jax.tasks.named.layout import NamedTask
from bert_jax.tasks.named.squad import SQUAD
from bert_jax.tasks.named.superglue import SUPERGLUE
from bert_jax.tasks.named.tagging import TAGGING

__all__ = ["TASKS", "NamedTask"]

TASKS: dict[str, NamedTask] = {named.task.name: named for named in (*GLUE, *SUPERGLUE, SWAG, COPA, *SQUAD, *TAGGING)}
