"""What an iteration of a job takes on a cluster that nobody has to own: its schedules, executed on a model.

    job         the stages and teams of a job, and their placements
    loads       the loads of a simulated run: drawn, synthetic or recorded
    layers      the collectives of a parallel schedule, and what an MoE layer of a team computes and sends
    programs    a pipeline stage's schedule and loads -> what a team of ranks does, command by command
    network     ranks, nodes -> resources, and the time that a message takes on each of them
    engine      executes the programs of all teams, event by event; collectives share resources fairly
    result      what the ranks and resources did, as sums, as text and as a trace

A *team* is an expert-parallel group of a pipeline stage, with all shards of its experts: its ranks run one program.
`app/simulation.py` makes the programs of a configuration.
"""
