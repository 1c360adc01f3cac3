"""Checkpoints from and to other formats.

    conversion           import and export: Hugging Face models, Megatron-LM's checkpoints
    settings             config.json as settings of a run, and back
    model                a Hugging Face model: its flags, and its tensors as pieces
    architectures        the supported Hugging Face architectures: their flags, and the names of their tensors
    config_fields        check config.json against known types and ranges
    pieces               parts of a checkpoint's tensors, and the Hugging Face tensors they correspond to
    safetensors_files    read and write the files of a Hugging Face model
    mxfp4                weights of 4 bits
    torch_dist           read and write torch_dist checkpoints piece by piece
    megatron             read Megatron-LM's checkpoints

Start with `conversion`, then `pieces`.
"""
