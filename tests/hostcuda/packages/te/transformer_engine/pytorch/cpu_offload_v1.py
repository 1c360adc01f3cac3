"""Activations in the host's memory, as they were before version 2.10."""
