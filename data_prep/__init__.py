"""Data preparation: text to shards of examples, without jax."""

import os
import sys

from bert_jax.renamed_modules import refuse_renamed_modules

refuse_renamed_modules()

# So it is while a command of this package is looked for (documentation of sys.argv). numpy would start a thread for
# each other core in each process, which spins for a while, for products of matrices; nothing here has any. A program
# that imports data_prep keeps what it has.
if sys.argv[:1] == ["-m"]:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
