"""Collectives over MPI for the ordinary wheel of torch: a backend of torch.distributed made with `mpi4py`.

`library` loads MPI when it is wanted and registers the backend; nothing else here may be imported before, because that
starts MPI. `group` has the operations, `words` what MPI calls torch's types, `progress` completes what was begun.
"""
