"""Convert Hugging Face models and Megatron-LM's checkpoints into checkpoints to train from, or back to Hugging Face.

    python tools/convert_checkpoint.py import --load-dir HF_MODEL --save-dir CHECKPOINTS
    python tools/convert_checkpoint.py export --load-dir CHECKPOINTS --save-dir HF_MODEL
    python tools/convert_checkpoint.py roundtrip --load-dir HF_MODEL
    python tools/convert_checkpoint.py import-megatron --load-dir MEGATRON_CHECKPOINTS --save-dir CHECKPOINTS

`import` writes iteration 0; train from it with `--load CHECKPOINTS --use-checkpoint-args`, on any layout. `export`
converts the weights of the latest iteration. Both read and write piece by piece, check every file and every tensor's
name and shape, and remove partial output after an error. `roundtrip` does both and compares bit for bit.
Supported are DeepSeek-V2 and V3, Kimi-K2, Mixtral, OLMoE, Qwen2-MoE and Qwen3-MoE, as safetensors, and torch_dist
checkpoints of Megatron-LM. A checkpoint need not be split for a layout: every layout reads the same checkpoint.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_balance.device import cpu, quiet


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("action", choices=["import", "export", "roundtrip", "import-megatron"])
    add("--load-dir", type=Path, metavar="DIR", required=True, help="what is read")
    add("--save-dir", type=Path, metavar="DIR", help="what is written; does not apply to roundtrip")
    add("--hf-dir", type=Path, metavar="DIR", help="export: config.json and tokenizer (default: the imported ones)")
    without = "import: leave out the tensors whose names begin so (* stands for any text); may be repeated"
    add("--without", metavar="PATTERN", action="append", default=[], help=without)
    add("--ckpt-step", type=int, metavar="N", help="iteration of the checkpoint to read (default: the latest)")
    args = parser.parse_args(argv)
    if (args.save_dir is None) != (args.action == "roundtrip"):
        parser.error(f"{args.action}: {'give' if args.save_dir is None else 'leave out'} --save-dir")
    for flag, value, actions in (
        ("--without", args.without, ["import"]),
        ("--hf-dir", args.hf_dir, ["export"]),
        ("--ckpt-step", args.ckpt_step, ["export", "import-megatron"]),
    ):
        if value not in ([], None) and args.action not in actions:
            parser.error(f"{flag}: does not apply to {args.action}")
    quiet.silence_expected_warnings()
    cpu.install()
    from megatron_balance.convert.conversion import export_model, import_megatron, import_model

    def log(text: str) -> None:
        print(f"\r{args.action}: {text}", end="", file=sys.stderr, flush=True)

    try:
        if args.action == "import":
            import_model(args.load_dir, args.save_dir, log, args.without)
        elif args.action == "import-megatron":
            import_megatron(args.load_dir, args.save_dir, log, args.ckpt_step)
        elif args.action == "export":
            export_model(args.load_dir, args.save_dir, log, hf_dir=args.hf_dir, step=args.ckpt_step)
        else:
            with tempfile.TemporaryDirectory() as directory:
                imported = Path(directory, "imported")
                exported = Path(directory, "exported")
                import_model(args.load_dir, imported, log)
                export_model(imported, exported, log)
                compare(args.load_dir, exported)
    except (ValueError, OSError) as error:
        print(f"\nconvert_checkpoint.py: error: {error}", file=sys.stderr)
        return 1
    print(file=sys.stderr)
    return 0


def compare(left: Path, right: Path) -> None:
    """Raise ValueError unless two models have the same tensors, bit for bit, without those that import leaves out."""
    import torch

    from megatron_balance.convert.conversion import checked_model
    from megatron_balance.convert.safetensors_files import Weights

    (_, one), other = checked_model(left), Weights(right)
    unequal = sorted(one.shapes.keys() ^ other.shapes.keys())
    unequal += [
        name for name in one.shapes.keys() & other.shapes.keys() if not torch.equal(one.read(name), other.read(name))
    ]
    if unequal:
        raise ValueError(f"differ after import and export: {', '.join(unequal[:20])}")


if __name__ == "__main__":
    sys.exit(main())
