"""How a run is saved and resumed.

    checkpoints       save asynchronously, load, prune: the run's interface to this package
    loading           find the newest sound checkpoint, and load it into a run
    run_state         the state of a run as megatron-core's sharded state dict, and its restoration
    writer            write one rank's files in separate processes

    directory         the layout of `--save DIR`, and the order in which it changes
    save_directory    take `--save` for one job, check that every rank can write there, and clean up
    lease             only one run at a time writes to a directory

    manifest          the list of a checkpoint's files, with sizes and digests
    saved_flags       the flags of the run that saved a checkpoint
    comparison        which flags may change until it is loaded, and what follows
    safe_pickle       check that reading a checkpoint runs no code from it

Start with `checkpoints`, then `directory`. Every method of `Checkpoints` is collective.
"""
