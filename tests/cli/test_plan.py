"""``lightning-pipe plan``: what it prints, and that Hydra and LightningCLI take its YAML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_pipe import PipelineStrategy
from lightning_pipe.cli import main
from lightning_pipe.cli.units import bytes_per_second, in_gib, seconds, size_in_bytes
from lightning_pipe.partition.profile import LayerProfile, Profile
from lightning_pipe.planning import plan


def profile() -> Profile:
    mib = 1 << 20
    numbers = (30 * mib, 4 * mib, 50 * mib, 50 * mib, 100 * mib)
    layers = tuple(LayerProfile(str(i), 1e-3, 2e-3, *numbers) for i in range(16))
    return Profile(layers, 8, mib)


@pytest.fixture
def saved(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    profile().save(path)
    return str(path)


LINKS = ["--bandwidth=10GB/s", "--latency=100us", "--batch-size=32"]


def test_table(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", saved, "4", "--memory=6GiB", "--replicas=1", *LINKS]) == 0
    output, errors = capsys.readouterr()
    assert not errors
    best, *_ = plan(profile(), 4, 6 * 2**30, 10e9, 1e-4, batch_size=32, replicas=1)
    rows = [line.split() for line in output.splitlines()]
    first = next(row for row in rows if row and row[0] == best.schedule)
    assert first[1:5] == [
        "4",
        str(best.stages_per_rank),
        str(best.num_microbatches),
        best.activation_checkpointing,
    ]
    assert float(first[5]) == pytest.approx(best.step_seconds, rel=1e-3)
    assert first[7] == f"{best.mean_bubble:.1%}"
    assert " ".join(first[8:]) == in_gib(max(best.peak_bytes))
    assert {"gpipe", "1f1b", "interleaved", "zero_bubble"} <= {row[0] for row in rows if row}
    assert "…" not in output
    assert max(map(len, output.splitlines())) <= 80


def test_json(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", saved, "2", "--json", "--count=3", "--schedules=gpipe,1f1b", *LINKS]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"]
    expected = plan(profile(), 2, None, 10e9, 1e-4, 32, ("gpipe", "1f1b"), count=3)
    assert [row["step_seconds"] for row in answer["candidates"]] == [
        candidate.step_seconds for candidate in expected
    ]
    assert [row["strategy"] for row in answer["candidates"]] == [
        candidate.strategy_config() for candidate in expected
    ]


HYBRID = [
    "--memory=500MiB",
    "--bandwidth=10GB/s",
    "--batch-size=32",
    "--replicas=2",
    "--zero=auto",
    "--tensor=2",
    "--schedules=1f1b",
    "--devices-per-node=4",
    "--node-bandwidth=1GB/s",
]


def assert_takes(strategy: object, document: dict[str, Any]) -> None:
    """The strategy has what the document says, and it is what the planner would choose."""
    assert isinstance(strategy, PipelineStrategy)
    (best,) = plan(
        profile(),
        8,
        500 * 2**20,
        10e9,
        batch_size=32,
        replicas=2,
        zero_stage="auto",
        tensor_parallel_size=2,
        schedules=("1f1b",),
        devices_per_node=4,
        node_bandwidth=1e9,
    )
    assert document == best.strategy_config()
    found = strategy._settings
    assert found.schedule == best.schedule
    assert found.num_microbatches == best.num_microbatches
    assert tuple(found.partition) == best.partition
    assert found.activation_checkpointing == best.activation_checkpointing
    assert strategy._sizes == (2, 2, 2)
    assert strategy._zero_stage == best.zero_stage == 3
    assert strategy._reshards


def test_hydra_takes_it(saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", saved, "8", "--yaml=hydra", *HYBRID]) == 0
    text = capsys.readouterr().out
    assert "trainer.devices=4 trainer.num_nodes=2" in text
    assert "Each of 2 replicas" in text
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "planned.yaml").write_text(text)
    with initialize_config_dir(str(tmp_path), version_base=None):
        config = compose(overrides=["+strategy=planned"])
    document = yaml.safe_load(text)
    assert document.pop("_target_") == "lightning_pipe.PipelineStrategy"
    assert_takes(instantiate(config.strategy), document)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # how Lightning uses jsonargparse
def test_lightning_cli_takes_it(
    saved: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(["plan", saved, "8", "--yaml=cli", *HYBRID]) == 0
    path = tmp_path / "planned.yaml"
    path.write_text(capsys.readouterr().out)
    monkeypatch.setattr("sys.argv", ["app.py"])
    args = [f"--config={path}", "--trainer.accelerator=cpu"]
    cli = LightningCLI(BoringModel, run=False, args=args, seed_everything_default=False)
    assert (cli.trainer.num_devices, cli.trainer.num_nodes) == (4, 2)
    given = yaml.safe_load(path.read_text())["trainer"]["strategy"]["init_args"]
    assert_takes(cli.trainer.strategy, given)


def test_table_of_replicas(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They are compared without being asked for, where they have a price."""
    words = ["plan", saved, "8", "--memory=600MiB", "--zero=0,1,2,3", *LINKS]
    assert main([*words, "--schedules=1f1b,gpipe", "--tensor=2"]) == 0
    output = capsys.readouterr().out
    rows = [line.split() for line in output.splitlines() if line.startswith(("1f1b", "gpipe"))]
    assert {row[5] for row in rows} >= {"1", "2"}
    assert {row[6] for row in rows} >= {"0", "2", "3*"}
    assert "2 devices share each layer: an upper bound." in output
    assert "…" not in output
    assert max(map(len, output.splitlines())) <= 80


def test_infeasible(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", saved, "2", "--memory=1GiB", "--batch-size=32"]) == 1
    output, error = capsys.readouterr()
    assert not output
    assert "No configuration fits" in error
    assert " MiB more" in error
    assert "devices instead of 2" in error

    assert main(["plan", saved, "2", "--memory=1GiB", "--batch-size=32", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] is False
    assert answer["missing_bytes"] > 2**20
    assert any("devices" in remedy for remedy in answer["remedies"])


def test_costs_that_the_user_estimates(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "1,1,2.5,1,1,1.5", "2", "--batch-size=16", "--json", "--schedules=1f1b"]
    assert main(words) == 0
    (row,) = json.loads(capsys.readouterr().out)["candidates"]
    assert row["partition"] == [3, 3] or sum(row["partition"]) == 6
    assert row["step_seconds"] == pytest.approx(3 * (16 + 1) * 4.5, rel=0.15)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["1,2", "2"], "--batch-size"),
        (["1,2", "2", "--batch-size=4", "--memory=lots"], "--memory=lots is not understood"),
        (["1,2", "2", "--batch-size=4", "--memory=1GiB"], "has no bytes"),
        (["1,2", "2", "--batch-size=4", "--bandwidth=fast"], "--bandwidth=fast"),
        (["1,2", "2", "--batch-size=4", "--latency=20GB"], "--latency=20GB"),
        (["1,2", "2", "--batch-size=4", "--schedules=gpip"], "Did you mean 'gpipe'"),
        (["1,2", "2", "--batch-size=4", "--yaml=cli", "--json"], "choose one"),
        (["1,2", "2", "--batch-size=4", "--activation-checkpointing=all"], "'all'"),
        (["1,2", "2", "--batch-size=4", "--zero=4"], "--zero=4"),
        (["1,2", "2", "--batch-size=4", "--tensor=3"], "tensor_parallel_size=3 must be 1 to 2"),
        (["1,2", "2", "--batch-size=4", "--node-bandwidth=1GB/s"], "needs devices_per_node"),
        (["no-such-file.json", "2"], "no-such-file.json"),
        (["1,2"], "devices"),
    ],
)
def test_wrong_usage(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    output, error = capsys.readouterr()
    assert not output
    assert reason in error
    assert "Traceback" not in error


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "lightning-pipe plan profile.json 8 --memory 80GiB" in output


@pytest.mark.parametrize(
    ("text", "expected"),
    [("80GiB", 80 * 2**30), ("1.5 GB", 1.5e9), ("512mib", 2**29), ("123", 123), ("1e9", 1e9)],
)
def test_sizes(text: str, expected: float) -> None:
    assert size_in_bytes(text, "memory") == expected


def test_bandwidths_and_times() -> None:
    assert bytes_per_second("25GB/s", "b") == bytes_per_second("25GB", "b") == 25e9
    assert bytes_per_second("100Gbit/s", "b") == 12.5e9
    assert seconds("20us", "l") == pytest.approx(2e-5)
    assert seconds("0.5", "l") == 0.5
    for wrong in ("1.2.3GB", "GB", "-1GB", "5XB"):
        with pytest.raises(ValueError, match="not understood"):
            size_in_bytes(wrong, "memory")
