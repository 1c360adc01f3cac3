"""Placements of experts as values, and tables, splits and plans derived from them.

placement    Placement, a frozen value: which ranks own and which ranks host the experts of one layer
tables       arrays derived from a placement
text         placements as text
splits       splits an expert's tokens among its hosts, and assigns each source's tokens to hosts
trans_plan   messages that bring pieces of experts to guests, in order
"""
