"""Mixture-of-Experts training on megatron-core: balanced experts, scheduled communication.

Words

    logical expert    what the router chooses
    owner             the rank that keeps an expert's parameters and optimizer state
    host              a rank that computes an expert in this iteration; a host that is not the owner is a guest host
    slot              room for one expert's weights on a rank: home slots for the experts that the rank owns, guest
                      slots for copies of others'
    physical expert   a (rank, slot) pair
    Placement         which ranks own and which host the experts of one layer; a policy decides the next one
    Trans, Agg        weights from owners to guests; gradients from guests to owners
    Transfer          an expert's parameters and optimizer state move to another owner
    load matrix       tokens from each source rank to each expert; with a Placement it gives the DispatchPlan

Rooms

    app          what a person starts: a training run, a dry run, balancing inside another program
    cli          a command line and what it means
    config       every setting, as frozen dataclasses
    build        a configuration -> model, optimizer, data, balancer
    training     the loop, one iteration after another
    checkpoint   how a run is saved and resumed
    convert      checkpoints from and to other formats
    flow         where a token goes: one layer, one iteration
    timeline     when experts' weights and gradients move: one iteration to the next
    planning     which placement comes next: predictions, policies, Transfers
    kernels      decisions on the device, for loads that the host would have to wait for
    cost         how long a layer, an exchange or a Trans takes, from a cluster's profile
    placement    which ranks own and host which experts, and the messages that follow
    comm         how rows and experts travel: all-to-alls, codecs, transfers
    measure      how fast this cluster communicates and computes
    simulate     how long an iteration would take on another cluster
    profile      the same as data
    observe      loads, balance and traces, for people to look at
    workloads    synthetic routing, so that imbalance repeats
    job          how processes become a job, and how a job notices that one of them failed
    device       what the machine offers, and what megatron-core lacks on it
    files        files that others wrote, and output that appears only when complete

Shapes

Names of tensors and arrays end in one letter per dimension. A file says where its letters differ.

    A   candidates of a search; samples            M   moves of a search, next to A; DEMI's mini-tasks
    B   batch of placements, loads, chunks         N   shards of an expert; nodes; iterations
        or stages                                  O   orders
    C   chunks                                     P   physical experts; DEMI's (source, expert) pairs
    D   ranks of an expert-parallel group;         R   rows: one per expert that a token chose
        sources of rows                            S   slots of a rank
    E   logical experts                            T   tokens; DEMI's time slots
    G   guest slots; DEMI's groups of experts      W   ranks of an all-to-all
    H   hidden size; next to D: hosts
    K   experts per token
    L   layers; ranks of a node
"""

import importlib

_HOMES = {
    "AllToAll": "comm.alltoall",
    "Balancing": "app.integrate",
    "Codec": "comm.codecs",
    "CostModel": "cost.model",
    "Placement": "placement.placement",
    "Policy": "planning.policies.interface",
    "add_balance_args": "app.integrate",
    "attach": "app.integrate",
    "balanced_layer_spec": "app.integrate",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> object:
    # On demand: importing megatron-core takes seconds, and has to wait until the machine's device is known
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
