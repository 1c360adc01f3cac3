"""apex's extensions that megatron-core asks for."""
