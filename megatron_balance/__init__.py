"""Mixture-of-Experts training on megatron-core: balanced experts, scheduled communication.

Words

    logical expert    an expert that the router can choose
    owner             the rank that keeps an expert's parameters and optimizer state
    host              a rank that computes an expert in this iteration
    replica           an expert that several ranks compute
    guest             a replica of an expert on a rank that is not its owner
    slot              room for one expert's weights on a rank: a home slot for an owned expert, a guest slot for a guest
    physical expert   a (rank, slot) pair
    Placement         the owner and the hosts of each expert of one layer; a policy chooses the next Placement
    Plan              the decision about the next Placement
    Trans, Agg        weights from owners to guests; gradients from guests to owners
    Transfer          an expert changes its owner: its parameters and optimizer state move
    load matrix       tokens from each source rank to each expert; a Placement turns it into a DispatchPlan

Shapes

Names of tensors and arrays end in one letter per dimension. A file says where its letters differ.

    A   alternatives that a search compares      M   messages or moves
    B   batch: placements, loads, stages         N   nodes
    C   chunks                                   P   physical experts
    D   ranks of an expert-parallel group        Q   DEMI's mini-tasks
    E   logical experts                          R   rows: one per token and chosen expert
    G   guest slots of a rank                    S   slots of a rank
    H   hidden size                              T   tokens
    I   hidden size of an FFN                    U   DEMI's time slots
    J   DEMI's (source, expert) pairs            V   shards of an expert
    K   experts per token                        W   hosts, where they differ from D
    L   layers
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
    # Lazy: importing megatron-core takes seconds and must wait until the machine's device is known
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
