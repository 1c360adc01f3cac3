"""How long a layer, an exchange or a Trans takes on a cluster. Arrays in, seconds out.

model   seconds of a layer under a placement, after Pro-Prophet and FlexMoE
"""
