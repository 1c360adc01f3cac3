"""Joins processes into a job, and detects that one of them failed.

    job                 read the launcher's settings; join the job and initialize torch.distributed
    agreement           compare the settings of all ranks before anything is built
    clocks              compare the wall clocks of the job's machines
    groups              create process groups; nodes; actions on rank 0
    layout              the process groups of a parallel layout
    limits              limits of the machine: file descriptors, shared memory, memory
    errors              raise the error of one rank on all ranks

    hang_guard          end the whole job when one rank stalls or dies
    stall               decide which rank holds up the job
    stacks              tell from stacks whether a rank waits in a collective
    collectives         record the operations that a rank enters
    collective_order    find where the ranks' operations first differ

    launcher            end this rank when its launcher ends
    endings             exceptions that end the program, and its exit status

Start with `job`, then `hang_guard`.
"""
