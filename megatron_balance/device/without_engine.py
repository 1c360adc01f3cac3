"""Complete megatron-core on a machine without Transformer Engine, with or without CUDA.

megatron-core supports such machines, but version 0.16.1 leaves some names undefined or defines them wrongly. Later
versions define them as below.

| name                                            | without Transformer Engine                       |
|-------------------------------------------------|--------------------------------------------------|
| `te_general_gemm` of the router                 | `None`; if undefined, the router raises NameError |
| `HAVE_TE` of multi-latent attention             | false; otherwise it tests a layer against a mock |
| `get_te_version()`                              | older than any version; `None` is not comparable |
"""


def complete() -> None:
    """Define the missing names. Has no effect if Transformer Engine is installed, or when called again.

    It imports megatron-core, so `cpu.install` calls it last.
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
