"""Weights in MXFP4 are read as transformers reads them, and only if their blocks and scales fit together."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_balance.convert import mxfp4
from megatron_balance.convert.conversion import export_model, import_model
from megatron_balance.convert.safetensors_files import Weights
from tests import hf_models
from tests.hf_models import change, quiet

NAMES = [f"model.layers.{layer}.mlp.experts.{name}" for layer in range(3) for name in ("gate_up_proj", "down_proj")]


def random_blocks(experts: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks and scales of matrices whose numbers are from 2^-9 to 6."""
    generator = torch.Generator().manual_seed(rows)
    blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(119, 128, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)


def test_numbers_are_those_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = random_blocks(3, 8, 96)
    assert torch.equal(mxfp4.decoded(blocks, scales), convert_moe_packed_tensors(blocks, scales))


def test_the_first_number_of_a_byte_is_in_its_lower_half() -> None:
    blocks = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
    blocks[..., 0] = 0x9F
    numbers = mxfp4.decoded(blocks, torch.full((1, 1, 1), 128, dtype=torch.uint8))
    assert numbers[0, :3, 0].tolist() == [-12.0, -1.0, 0.0] and numbers.shape == (1, 32, 1)


@pytest.fixture
def source(tmp_path) -> Path:
    """Return the directory of a tiny gpt-oss whose experts are in MXFP4."""
    hf_models.save("gpt_oss", tmp_path / "hf", intermediate_size=32)

    def quantize(all: dict[str, torch.Tensor]) -> None:
        for name in NAMES:
            experts, columns, rows = all.pop(name).shape
            all[name + mxfp4.BLOCKS], all[name + mxfp4.SCALES] = random_blocks(experts, rows, columns)

    change(tmp_path / "hf", quantize)
    return tmp_path / "hf"


def test_an_import_makes_them_bfloat16(source: Path, tmp_path: Path) -> None:
    said: list[str] = []
    import_model(source, tmp_path / "there", said.append)
    assert said[0] == "6 tensors in MXFP4 become bfloat16\n"
    export_model(tmp_path / "there", tmp_path / "back", quiet)
    before = Weights(source)
    after = Weights(tmp_path / "back")
    assert before.shapes == after.shapes
    assert all(torch.equal(before.read(name), after.read(name)) for name in after.shapes)
    assert all(after.tensors[name].dtype is torch.bfloat16 and after.tensors[name].scales is None for name in NAMES)


SPOILED: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "no scales": lambda all: all.pop(NAMES[0] + mxfp4.SCALES),
    "other scales": lambda all: all.update({NAMES[0] + mxfp4.SCALES: torch.zeros(8, 64, 2, dtype=torch.uint8)}),
    "twice": lambda all: all.update({NAMES[0]: torch.zeros(8, 32, 64)}),
    "not a number": lambda all: all[NAMES[0] + mxfp4.SCALES].fill_(255),
}


@pytest.mark.parametrize("name", SPOILED)
def test_others_are_refused_by_name(source: Path, tmp_path: Path, name: str) -> None:
    change(source, SPOILED[name])
    with pytest.raises(ValueError, match=NAMES[0]):
        import_model(source, tmp_path / "there", quiet)
    assert not (tmp_path / "there").exists()
