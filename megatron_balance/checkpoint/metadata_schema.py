"""The classes, fields and calls that a torch_dist checkpoint's .metadata may contain."""

from pathlib import PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.serialization import _get_layout

_Types = tuple[type, ...]
_NONE = type(None)

FIELDS: dict[type, dict[str, _Types]] = {
    Metadata: {
        "state_dict_metadata": (dict,),
        "planner_data": (_NONE, dict, list),
        "storage_data": (dict,),
        "storage_meta": (_NONE, StorageMeta),
        "version": (_NONE, str),
        "all_local_plans": (list,),
    },
    BytesStorageMetadata: {},
    ChunkStorageMetadata: {"offsets": (torch.Size,), "sizes": (torch.Size,)},
    TensorStorageMetadata: {"properties": (TensorProperties,), "size": (torch.Size,), "chunks": (list,)},
    MetadataIndex: {"fqn": (str,), "offset": (_NONE, torch.Size), "index": (_NONE, int)},
    StorageMeta: {
        "checkpoint_id": (_NONE, str, PosixPath),
        "save_id": (_NONE, str),
        "load_id": (_NONE, str),
        "modules": (list,),
    },
    # Without `transform_descriptors`: they name code that would decode the bytes
    _StorageInfo: {"relative_path": (str,), "offset": (int,), "length": (int,)},
    SavePlan: {"items": (list,), "storage_data": (_NONE,), "planner_data": (_NONE, dict, list), "usable": (bool,)},
    WriteItem: {
        "index": (MetadataIndex,),
        "type": (WriteItemType,),
        "bytes_io_data": (_NONE, BytesIOWriteData),
        "tensor_data": (_NONE, TensorWriteData),
    },
    BytesIOWriteData: {"nbytes": (int,)},
    TensorWriteData: {"chunk": (ChunkStorageMetadata,), "properties": (TensorProperties,), "size": (torch.Size,)},
}
"""Classes of .metadata, and the types that each field may have."""

OPTIONAL = {"all_local_plans", "offset", "index"}
"""Fields that may be absent."""

PROPERTIES = (torch.dtype, torch.layout, bool, _MEM_FORMAT_ENCODING, bool)
"""Types of the state of a TensorProperties, which is a tuple."""

CALLS = {torch.Size: int, PosixPath: str, _get_layout: str, _MEM_FORMAT_ENCODING: int, WriteItemType: int}
"""Functions that .metadata may call, and the type of their arguments."""

ARGUMENT_TYPES = {id(function): wanted for function, wanted in CALLS.items()}
"""`CALLS` by the function's identity: a damaged file may have an unhashable object in place of a function."""

CLASSES = {id(made) for made in (*FIELDS, TensorProperties)}
"""Classes of .metadata, by identity."""

GLOBALS: dict[tuple[str, str], Any] = {
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{(known.__module__, known.__name__): known for known in (*FIELDS, *CALLS, TensorProperties)},
    # Python 3.13 moved the class
    ("pathlib._local", "PosixPath"): PosixPath,
    ("pathlib", "PosixPath"): PosixPath,
}
"""Classes and functions that .metadata may refer to, by module and name."""
