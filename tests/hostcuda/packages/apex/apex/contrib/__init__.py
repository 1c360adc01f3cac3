"""The apex extensions that megatron-core uses."""
