"""Simulates an iteration of a job on any described cluster: executes the job's schedules on a model.

    job         the stages and teams of a job, with their placements
    layers      the collectives of a parallel schedule; the computation and messages of a team's MoE layer
    programs    a pipeline stage's schedule and loads -> the commands of a team of ranks
    context     exchanges of context-parallel ranks
    network     ranks, nodes -> resources, and the time that a message takes on each of them
    engine      executes the programs of all teams, event by event; collectives share resources fairly
    result      activities of the ranks: sums and spans

A *team* is an expert-parallel group of a pipeline stage with all shards of its experts; its ranks run one program.
`app/simulation.py` derives the programs from a configuration.
"""
