"""Placements of experts as values, and what follows from them. Arrays in, values out.

placement    Placement, a frozen value: which ranks own and which ranks host the experts of one layer; its tables
text         placements as text
splits       how the hosts of an expert share its tokens, and which tokens each source sends to which host
trans_plan   which rank sends which piece of which expert to which rank, and in which order
"""
