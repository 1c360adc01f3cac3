"""Facilities of the machine, and replacements for those that megatron-core expects and the machine lacks."""
