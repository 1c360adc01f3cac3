"""megatron-core on a machine without Transformer Engine, with CUDA or not.

It is written for both cases, but some names are left undefined, or defined as what they are not. Later versions than
0.16.1 define them as here.

| name                                            | without Transformer Engine                       |
|-------------------------------------------------|--------------------------------------------------|
| `te_general_gemm` of the router                 | `None`; undefined, the router raises NameError   |
| `HAVE_TE` of multi-latent attention             | false; else it asks whether a layer is a mock    |
| `get_te_version()`                              | older than any version; `None` compares with none |
"""


def complete() -> None:
    """Define what is missing; changes nothing where Transformer Engine is there, and nothing when called again.

    It imports megatron-core, and so comes after `cpu.install`.
    """
    from megatron.core import utils
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils
    from packaging.version import Version

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
    if utils.get_te_version() is None:
        utils._te_version = Version("0.0.0")
