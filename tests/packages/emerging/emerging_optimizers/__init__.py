"""Stand-in for NVIDIA's package of this name, as far as megatron-core's Muon uses it, for machines without it.

Written from the interface that megatron-core calls, and from the definition of Muon
(https://kellerjordan.github.io/posts/muon/). Names are those of versions 0.1 and 0.2 of the package.
"""
