"""Decides the next placement of each layer: arrays in, values out.

    predictor        the next iteration's load, from past iterations
    manager          the placement of one layer over time: asks the policy, validates and adopts its plan
    ownership        experts that change their owner (Transfer)
    hosting          the hosts of a layer's experts during a search, and the layer's seconds under many alternatives
    leveling         Pro-Prophet's greedy search for even loads
    fit              moves of tokens from ranks above their capacity to ranks below it, with few guests
    plans            plans of the policy `quota`, each made in one of several ways
    search           the search for the fastest of these plans
    within           plans for the exact load of one microbatch
    replacing        replacements of a plan's guests
    tuning           shifts of tokens between the hosts of a plan
    policies/        one file per policy
    demi/            DEMI's scheduling problem: linear program, search, list scheduling
    policy_process   a user's policy in its own process

Read policies/interface first.
"""
