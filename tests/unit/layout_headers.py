"""The models of configs/models, and what the comments of their layouts say."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

MODELS = sorted(path.stem for path in (ROOT / "configs" / "models").glob("*.args"))


@dataclass(frozen=True)
class Header:
    """The comments of a layout that scripts/pretrain.sh reads."""

    nodes: int
    """Number of nodes that the layout is for, or the least."""

    gpus: int
    """GPUs of each node."""

    cluster: Path | None
    """File of the cluster, if the layout names one."""

    @classmethod
    def of(cls, model: str) -> "Header":
        path = ROOT / "configs" / "layouts" / f"{model}.args"
        path = path if path.exists() else path.with_stem(model.rpartition("_")[0])
        said = dict(re.findall(r"^# (Nodes|GPUs per node|Cluster): (.*)$", path.read_text(), re.MULTILINE))
        cluster = ROOT / said["Cluster"] if "Cluster" in said else None
        return cls(int(said["Nodes"]), int(said.get("GPUs per node", 8)), cluster)
