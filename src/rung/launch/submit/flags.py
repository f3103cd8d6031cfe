"""Which flags `rung submit` has, for the command line, which must load quickly, and for the code that reads them."""

from __future__ import annotations

from rung.spec.flags import TRAIN_FLAGS

# The flags of `rung train`, except those that the job sets itself.
_OWN = ("nnodes", "rdzv", "rdzv_key")
SUBMITTED = {title: tuple(name for name in names if name not in _OWN) for title, names in TRAIN_FLAGS.items()}
# Options of sbatch that have a flag here, with metavar and help.
SBATCH_OPTIONS = {
    "partition": ("NAME", "as of sbatch"),
    "account": ("NAME", "as of sbatch"),
    "qos": ("NAME", "as of sbatch"),
    "time": ("TIME", "limit, as in 30, 4:00:00 or 2-12; the job saves before its end, and is requeued and resumed"),
    "constraint": ("WHAT", "features of the nodes, as in 'a100|h100'"),
    "mem": ("SIZE", "memory of each node, as in 64G"),
    "cpus-per-task": ("N", "cores of each node (default: one for each process and data worker)"),
}
NOTICE_SECONDS = 120
FORMS = ("job", "jobset", "trainjob")  # of a job on Kubernetes
