"""How a run is saved and resumed.

    checkpoints       save asynchronously, load, prune: the run's interface to this room
    loading           load one checkpoint into a run
    run_state         the state of a run as megatron-core's sharded state dict, and its restoration
    writer            write one rank's files in separate processes
    search            find the newest sound checkpoint

    directory         the layout of `--save DIR`, and the order in which it changes
    save_directory    take `--save` for one job, check that every rank can write there, and clean up
    lease             only one run at a time writes to a directory
    lease_owner       the process that holds a lease, and whether it still runs

    manifest          the list of a checkpoint's files, with sizes and digests
    saved_flags       the flags of the run that saved a checkpoint
    comparison        which flags may change until it is loaded, and what follows
    safe_pickle       check that reading a checkpoint runs no code from it
    metadata_reader   read .metadata without unpickling it
    metadata_schema   the objects that .metadata may contain

Start with `checkpoints`, then `directory`. Every method of `Checkpoints` is collective.
"""
