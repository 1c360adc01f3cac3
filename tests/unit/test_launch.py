"""launch.py: a user's mistakes are reported before this process joins a job."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_balance.app import launch, preflight
from megatron_balance.job.endings import Ending
from tests.distributed.runs import BASE


@pytest.fixture
def error_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return the error that ends a run with these flags before it joins; `joined` if there is none."""

    def join(*_: Any) -> None:
        raise Ending("joined")

    monkeypatch.setattr(launch.job, "start", join)
    monkeypatch.setattr(launch, "dry_run", join)

    def of(flags: str, base: str = BASE) -> str:
        with pytest.raises(SystemExit) as ended:
            launch.pretrain(f"{base} {flags}".split())
        return str(ended.value.code)

    return of


@pytest.mark.parametrize("dry", ["", "--dry-run"])
@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer"])
def test_tokenizers_that_are_none(error_of: Callable[..., str], tmp_path: Path, kind: str, dry: str) -> None:
    flags = f"{dry} --tokenizer-type {kind}"
    assert error_of(flags) == f"pretrain_gpt_moe.py: error: --tokenizer-type {kind}: also give --tokenizer-model"
    model = tmp_path / "tokenizer.model"
    assert f"error: --tokenizer-model {model}: no such file; give" in error_of(f"{flags} --tokenizer-model {model}")
    model.write_bytes(b"no model of anything")
    said = error_of(f"{flags} --tokenizer-model {model}")
    assert f"error: --tokenizer-model {model}: is not a model of --tokenizer-type {kind} (" in said
    assert said.endswith("give the model that belongs to the type") and "\n" not in said


def test_a_null_tokenizer_has_a_size(error_of: Callable[..., str]) -> None:
    assert "--tokenizer-type NullTokenizer: also give --vocab-size N" in error_of("--vocab-size 0")


@pytest.mark.parametrize("dry", ["", "--dry-run"])
def test_data_of_another_tokenizer(error_of: Callable[..., str], tmp_path: Path, dry: str) -> None:
    prefix = tmp_path / "data"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    builder.add_document(np.array([3, 128]), [2])
    builder.finalize(f"{prefix}.idx")
    base = BASE.replace("--mock-data", f"{dry} --data-path 0.5 {prefix} 0.5 {prefix} --split 1,0,0 --seq-length 1")
    assert f"error: --data-path: {prefix}.bin: token 128, number 1 of the file, is outside" in error_of(
        "--vocab-size 127", base
    )
    assert error_of("--vocab-size 128", base) == "joined"


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (SystemExit(0), 1, "pretrain_gpt_moe.py: error: SystemExit: 0 raised in fail (" + __file__),
        (SystemExit(), 1, "pretrain_gpt_moe.py: error: SystemExit raised in fail ("),
        (GeneratorExit("x"), 1, "pretrain_gpt_moe.py: error: GeneratorExit: x raised in fail ("),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_nobody_else_ends_the_program_as_if_it_were_done(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, said: str
) -> None:
    """For example, a user's module may call sys.exit()."""

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(preflight, "build_tokenizer", fail)
    with pytest.raises(SystemExit) as ended:
        launch.pretrain(BASE.split())
    assert ended.value.code == status if not said else str(ended.value.code).startswith(said)


def test_a_module_that_leaves_when_it_is_imported_is_a_users_mistake(
    error_of: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_codecs.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    said = error_of("--moe-comm-codec my_codecs:Mine --expert-model-parallel-size 1 --moe-layer-impl balanced")
    assert "--moe-comm-codec my_codecs:Mine: cannot be imported: SystemExit: 0; choose from" in said


def test_help_is_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        launch.pretrain(["--help"])
    assert not ended.value.code and "--balance-policy" in capsys.readouterr().out
