"""The apex norms that megatron-core uses."""
