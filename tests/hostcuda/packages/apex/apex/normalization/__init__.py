"""apex's norms that megatron-core asks for."""
