"""Offloading of activations to host memory, as before version 2.10."""
