"""launch.py: a user's mistakes are reported before this process joins a job."""

from pathlib import Path
from typing import Any

import pytest

from megatron_balance.app import launch, preflight
from megatron_balance.config.run_config import TokenizerConfig
from megatron_balance.training.tokenizer import build_tokenizer
from tests.distributed.runs import BASE


@pytest.mark.parametrize("kind", ["Llama2Tokenizer", "TikTokenizer"])
def test_a_file_that_is_no_model(tmp_path: Path, kind: str) -> None:
    model = tmp_path / "tokenizer.model"
    model.write_bytes(b"no model of anything")
    with pytest.raises(ValueError, match=rf"^--tokenizer-model {model}: is not a model of --tokenizer-type {kind} \("):
        build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(model)))


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


def test_a_module_that_leaves_when_it_is_imported_is_a_users_mistake(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_codecs.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as ended:
        launch.pretrain(f"{BASE} --moe-comm-codec my_codecs:Mine --expert-model-parallel-size 1".split())
    said = "--moe-comm-codec my_codecs:Mine: cannot be imported: SystemExit: 0; choose from"
    assert said in str(ended.value.code)


def test_help_is_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        launch.pretrain(["--help"])
    assert not ended.value.code and "--balance-policy" in capsys.readouterr().out
