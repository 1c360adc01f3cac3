"""tools/report.py: one self-contained file shows all output of a run, and errors name the damaged file."""

import base64
import re
from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

import report
import report_charts as charts
import report_runs as runs
from megatron_balance.cost.calibration import Factors
from megatron_balance.observe.balance import LayerReport, tensorboard_scalars
from megatron_balance.observe.load_log import LoadLog
from megatron_balance.observe.trace import Timeline, TraceSpan
from megatron_balance.placement.placement import Placement

LAYERS = (2, 3)
RANKS = 4
EXPERTS = 8
ITERATIONS = 12
OWNERS = Placement.identity(EXPERTS, RANKS, 1)
COPIED = OWNERS.with_hosts([(0, 2), (0, 3)])
FACTORS = Factors(exchange=1300.0, experts=0.25)
SECTIONS = ["training", "balance", "ranks", "experts", "decisions", "traffic", "prediction", "timeline"]


def counts(iteration: int) -> np.ndarray:
    """Return [D, E]: every rank has 40 tokens for expert 0 and 8 for each other expert."""
    counts_DE = np.full((RANKS, EXPERTS), 8)
    counts_DE[:, 0] = 40
    return counts_DE


def figures(iteration: int, layer: int) -> LayerReport:
    return LayerReport(
        *(1.6, 1.2, 1.1, 3.0, 2, 4e6, 8e6, 3e-3, 0.0, 1e-4, 0.0, 0.01, 0.012 + 0.001 * layer, 0.1),
        experts_moved=1.0,
        transfer_bytes=5e5,
    )


def write_events(directory: Path, balanced: bool, losses: dict[int, float] | None = None) -> Path:
    with SummaryWriter(str(directory)) as writer:
        for iteration in range(1, ITERATIONS + 1):
            scalars = {"lm loss": 8 / iteration, "iteration-time": 0.5, "learning-rate": 1e-3}
            scalars["lm loss"] *= (losses or {}).get(iteration, 1.0)
            if balanced:
                scalars |= tensorboard_scalars({layer: figures(iteration, layer) for layer in LAYERS}, FACTORS)
            for name, value in scalars.items():
                writer.add_scalar(name, value, iteration)
            writer.add_scalar("lm loss vs samples", scalars["lm loss"], 16 * iteration)
    return directory


def write_loads(directory: Path, rank: int = 0, last: int = ITERATIONS, layers: tuple[int, ...] = LAYERS) -> Path:
    log = LoadLog(directory, rank, 1)
    for iteration in range(1, last + 1):
        placement = COPIED if iteration > 1 else OWNERS
        log.add(iteration, {layer: (counts(iteration), placement) for layer in layers})
    log.flush()
    return directory


def write_timeline(directory: Path) -> Path:
    for rank in range(2):
        timeline = Timeline(directory, rank)
        for iteration in (11, 12):
            timeline.add(TraceSpan(iteration, "computation", "L2 FEC m0", 0.0, 0.05))
            timeline.add(TraceSpan(iteration, "communication", "L3 TRANS", 0.02, 0.04, num_bytes=8))
        timeline.flush()
    return directory


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the output of a run with balancing and of one without it, by flag."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        "--tensorboard-dir": write_events(folder / "after", balanced=True),
        "--before-tensorboard-dir": write_events(folder / "before", balanced=False),
        "--balance-log-dir": write_loads(folder / "loads"),
        "--balance-timeline": write_timeline(folder / "timeline"),
    }


def make(output: Path, given: dict[str, Path], *more: str) -> str:
    report.main([*(str(part) for pair in given.items() for part in pair), "--output", str(output), *more])
    return output.read_text(encoding="utf-8")


def pictures(html: str) -> dict[str, str]:
    """Return the pictures by section, decoded if they are text, without sections that explain why theirs is missing."""
    found = {}
    for name, body in re.findall(r'<section id="(\w+)">(.*?)</section>', html, re.DOTALL):
        for kind, content in re.findall(r'<img src="data:image/(png|svg\+xml);base64,([^"]+)"', body):
            raw = base64.b64decode(content, validate=True)
            found[name] = "PNG" if kind == "png" and raw.startswith(b"\x89PNG") else raw.decode()
    return found


def test_all_is_in_one_file(tmp_path: Path, written: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "picture.png"
    html = make(tmp_path / "report.html", written, "--token-bytes", "512", "--picture", str(picture))
    assert not re.search(r"https?:|//[a-z]|<script|<link|@import|url\(", re.sub(r"base64,[^\"]+", "", html))
    assert re.findall(r'src="(.{5})', html) == ["data:"] * len(SECTIONS)
    shown = pictures(html)
    assert list(shown) == SECTIONS and f"Iterations 1 to {ITERATIONS}, " in html
    assert 'class="missing"' not in html
    for section, text in (
        *(("training", "lm loss"), ("balance", "layer 3"), ("ranks", "as computed"), ("experts", "layer 2: load")),
        *(("decisions", "hosts added"), ("traffic", "Agg: gradients"), ("prediction", "predicted, ms")),
        ("prediction", "exchange"),
    ):
        assert text in shown[section] and "<path" in shown[section], section
    assert shown["timeline"] == "PNG" and picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["picture.png", "report.html"]
    printed = capsys.readouterr().out
    assert str(tmp_path / "report.html") in printed.replace("\n", "")
    for text in ("before", "after", "1.60", "1.20", "lm loss, last iteration", "0.6667"):
        assert text in printed and text in html, text


def test_the_summary(written: dict[str, Path]) -> None:
    after = runs.read_run(*(written[flag] for flag in list(written) if "before" not in flag), "local_first")
    before = runs.read_run(written["--before-tensorboard-dir"], None, None, "local_first")
    rows = {row.name: (row.before, row.after) for row in report.summary(before, after, None)}
    assert rows == {
        "max/mean load of ranks, mean of layers": ("1.60", "1.20"),
        "hosts added per iteration": ("", "4.0"),
        "experts moved per iteration": ("", "2.00"),
        "Trans and Agg per iteration, MB": ("", "24.0"),
        "predicted over measured layer time, median": ("", "0.69"),
        # For two layers: each rank sends away the tokens of 6 experts; copies keep two ranks' 40 tokens local
        "all-to-alls per iteration, tokens": ("576.0", f"{2 * (288 - 80 * 11 / 12):.1f}"),
        "iteration time, median, ms": ("500", "500"),
        "lm loss, last iteration": ("0.6667", "0.6667"),
    }
    megabytes = report.summary(before, after, 10**6)[4]
    assert (megabytes.name, megabytes.before) == ("all-to-alls per iteration, MB", "2,304.0")


def test_loads_of_ranks(tmp_path: Path) -> None:
    write_loads(tmp_path, rank=0)
    write_loads(tmp_path, rank=4, last=10)
    own = report.read_run(None, tmp_path, None, "local_first").loads[3]
    # Only iterations that both groups of four ranks logged
    assert own.iterations_N.tolist() == list(range(1, 11))
    assert own.by_owners.computed_NR.tolist() == [[192, 64, 64, 64] * 2] * 10
    assert own.as_computed.computed_NR.tolist() == [[192, 64, 64, 64] * 2] + [[112, 64, 104, 104] * 2] * 9
    assert own.tokens_NE[0].tolist() == [320] + [64] * 7
    assert own.hosts_NE[:, 0].tolist() == [1] + [3] * 9


def test_stages_that_end_apart(tmp_path: Path) -> None:
    loads = write_loads(tmp_path / "loads")
    write_loads(loads, rank=4, last=10, layers=(5,))
    picture = ("--picture", str(tmp_path / "picture.png"))
    shown = pictures(make(tmp_path / "report.html", {"--balance-log-dir": loads}, *picture))
    assert "layer 5: load" in shown["experts"]
    assert (tmp_path / "picture.png").exists()


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        ({}, "of all 12 iterations agree"),
        ({5: 1.001}, "until iteration 4"),
        ({1: 1.001}, "did not train the same model"),
    ],
)
def test_losses_are_compared(tmp_path: Path, losses: dict[int, float], says: str) -> None:
    before = runs.read_run(write_events(tmp_path / "before", False), None, None, "local_first")
    after = runs.read_run(write_events(tmp_path / "after", True, losses), None, None, "local_first")
    assert any(says in note for note in report.notices(before, after))


@pytest.mark.parametrize(
    ("flag", "sections"),
    [
        ("--tensorboard-dir", ["training", "balance", "decisions", "traffic", "prediction"]),
        ("--balance-log-dir", ["ranks", "experts", "traffic"]),
        ("--balance-timeline", ["timeline"]),
    ],
)
def test_what_was_not_given_is_said(tmp_path: Path, written: dict[str, Path], flag: str, sections: list[str]) -> None:
    html = make(tmp_path / "report.html", {flag: written[flag]})
    assert list(pictures(html)) == sections
    assert html.count("Not recorded: train with --") == len(SECTIONS) - len(sections)


def test_iterations_that_happened_again_count_once(tmp_path: Path) -> None:
    write_events(tmp_path, balanced=False)
    (first,) = tmp_path.iterdir()
    first.rename(tmp_path / "events.out.tfevents.0")
    write_events(tmp_path, balanced=False, losses={12: 2.0})
    loss = runs.read_scalars(tmp_path)["lm loss"]
    assert loss.iterations_N.tolist() == list(range(1, 13))
    assert loss.values_N[-2:] == pytest.approx([8 / 11, 16 / 12])


def test_long_runs_are_drawn_in_parts() -> None:
    iterations_N = np.arange(9000)
    middles_B, values_BK = charts.binned(iterations_N, np.stack([iterations_N, iterations_N % 30], axis=1))
    assert middles_B.tolist() == values_BK[:, 0].tolist() == [30 * part + 14.5 for part in range(charts.BINS)]
    assert (values_BK[:, 1] == 14.5).all()


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_wrong_input(tmp_path: Path, written: dict[str, Path]) -> None:
    output = tmp_path / "report.html"

    def problem(flag: str, path: Path, *more: str) -> str:
        with pytest.raises(SystemExit) as error:
            make(output, {flag: path}, *more)
        assert not output.exists()
        return str(error.value)

    none = tmp_path / "none"
    assert f"{none}: has no events.out.tfevents.*; train with --tensorboard-dir" in problem("--tensorboard-dir", none)
    assert f"{none}: has no loads_rank" in problem("--balance-log-dir", none)
    assert f"{none}: has no rank*.json; train with --balance-timeline" in problem("--balance-timeline", none)
    SummaryWriter(str(tmp_path / "short")).close()
    assert f"{tmp_path / 'short'}: has no iterations" in problem("--tensorboard-dir", tmp_path / "short")
    Timeline(tmp_path / "empty", 0)
    assert f"{tmp_path / 'empty'}: rank00000.json: no iteration that all recorded" in problem(
        "--balance-timeline", tmp_path / "empty"
    )

    (events,) = write_events(tmp_path / "events", balanced=True).iterdir()
    flip(events, 2000)
    assert f"{events}: is damaged" in problem("--tensorboard-dir", events.parent)
    (loads,) = write_loads(tmp_path / "loads").iterdir()
    flip(loads, len(loads.read_bytes()) // 2)
    assert f"{loads}: is not a log of --balance-log-dir" in problem("--balance-log-dir", loads.parent)
    timeline = write_timeline(tmp_path / "timeline") / "rank00001.json"
    timeline.write_text(timeline.read_text()[:-20])
    assert f"{timeline}: is not JSON" in problem("--balance-timeline", timeline.parent)
    assert "--picture: needs --balance-log-dir" in problem(
        "--tensorboard-dir", written["--tensorboard-dir"], "--picture", str(tmp_path / "picture.png")
    )
    with pytest.raises(SystemExit, match="there is nothing to show"):
        report.main(["--output", str(output)])


def test_a_run_that_was_killed(tmp_path: Path) -> None:
    (events,) = write_events(tmp_path, balanced=True).iterdir()
    # Cut in the middle of the last iteration's figures; there are four of each kind
    events.write_bytes(events.read_bytes()[: -30 * 55])
    run = runs.read_run(tmp_path, None, None, "local_first")
    ends = {tag: series.iterations_N[-1] for tag, series in run.scalars.items()}
    assert set(ends.values()) == {11, 12}
    assert run.over_layers("ratio_before", "measured_agg_seconds").iterations_N.tolist() == list(range(1, 12))
    make(tmp_path / "report.html", {"--tensorboard-dir": tmp_path})
