"""Decides the next placement of each layer. Arrays in, values out.

    predictor        the next iteration's load, from past iterations
    manager          the placement of one layer over time: asks the policy, validates and adopts its answer
    ownership        which experts change their owner (Transfer)
    hosting          the hosts of a layer's experts during a search, and its seconds under many others
    selection        Pro-Prophet's search: guests for one expert after the other
    leveling         a greedy search for even loads
    searches         selections of guests that greedy searches find on their way to even loads
    fit              moves of tokens from ranks above their capacity to ranks below it, with few guests
    paying           whether a policy's latest plans would have saved time under the loads that came
    vexperts         FlexMoE's vExperts: modifications
    policies/        one file per policy
    demi/            DEMI's scheduling problem: linear program, search, list scheduling
    policy_process   a user's policy in its own process, as the rank sees it
    policy_server    the program of that process

Read policies/interface first.
"""
