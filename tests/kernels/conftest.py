"""The tests here need triton, with which megatron-core behaves differently: unit/test_kernels.py runs them apart."""

collect_ignore_glob = ["test_*.py"]
