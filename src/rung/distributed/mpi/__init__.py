"""Collectives over MPI for the ordinary wheel of torch: a torch.distributed backend on top of `mpi4py`.

`backend` loads MPI on demand and registers the backend; no other module here may be imported before, because that
starts MPI. `process_group` has the operations, `datatypes` maps torch's types to MPI's, `progress` completes
operations.
"""

BACKEND = "mpi4py"  # torch refuses the name "mpi" in wheels that were built without it
