"""The `mlx-tq` command on a tiny model."""

import csv
import os
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

pytest.importorskip("mlx_lm")

import tiny_llama
from archs import configs
from mlx_lm.models.cache import make_prompt_cache as stock_cache

import mlx_tq
from mlx_tq import bench, cli, demo, loading


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a tiny model."""
    return str(tiny_llama.make(tmp_path_factory.mktemp("tiny"))[2])


def fails(capsys, *argv) -> str:
    """The message of a command that ends with an error."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(argv))
    assert stopped.value.code not in (0, None)
    return stopped.value.code if isinstance(stopped.value.code, str) else capsys.readouterr().err


@pytest.mark.parametrize("command", [[], *([name] for name in cli.COMMANDS)])
def test_help(command, capsys):
    if command == ["evaluate"]:
        pytest.importorskip("lm_eval")
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command, "--help"])
    assert stopped.value.code == 0
    assert "usage: " + " ".join(["mlx-tq", *command]) in capsys.readouterr().out


def test_no_command_lists_them(capsys):
    assert cli.main([]) == 2
    err = capsys.readouterr().err
    assert all(name in err for name in cli.COMMANDS)


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == mlx_tq.__version__


def test_formats_lists_every_preset(capsys):
    assert cli.main(["formats", "--head-dim", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(mlx_tq.TQFormat.presets())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["sing"], "invalid choice: 'sing'"),
        (["formats", "--head-dim", "0"], "--head-dim: must be a whole number of at least 1, got '0'"),
        (["demo", "--tq-format", "tq9"], "got 'tq9'"),
        (["demo", "-m", "0"], "at least 1, got '0'"),
        (["demo", "--model", "/no/such/folder"], "got '/no/such/folder': no such folder"),
        (["demo", "--model", "./folder"], "no such folder"),
        (["demo", "--model", "no/such/folder"], "no such folder"),
        (["demo", "--model", "folder"], "a hub id such as owner/name, or smollm2"),
        (["bench", "-b", "0"], "at least 1, got '0'"),
        (["bench", "--delay", "-1"], "at least 0, got '-1'"),
        (["bench", "--delay", "nan"], "at least 0, got 'nan'"),
        (["bench", "--tq-format", "k4v4", "tq9"], "got 'tq9'"),
    ],
)
def test_mistakes_are_named(argv, message, capsys):
    assert message in fails(capsys, *argv)


def test_a_folder_that_is_no_model(tmp_path, capsys):
    assert "config.json" in fails(capsys, "demo", "--model", str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "cannot be loaded: FileNotFoundError: No safetensors" in fails(capsys, "demo", "--model", str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"half a download")
    assert "cannot be loaded: RuntimeError" in fails(capsys, "demo", "--model", str(tmp_path))


def test_the_reader_of_a_pipe_may_leave():
    """As `mlx-tq formats | head -0` does: no traceback."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "mlx_tq.cli", "formats"], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert done.returncode == 1
    assert done.stderr == b""


def test_quantised_weights_are_unpacked_on_a_cpu(capsys):
    quantised = tiny_llama.tiny_model(["x"] * 64)
    loading.unpack_on_cpu(quantised)
    assert capsys.readouterr().err == ""
    ids = mx.array([[1, 2, 3]])
    nn.quantize(quantised, group_size=32, bits=8)
    want = quantised(ids)
    loading.unpack_on_cpu(quantised)
    if mx.default_device() == mx.Device(mx.cpu):
        assert "quantised weights are unpacked" in capsys.readouterr().err
        assert not any(hasattr(module, "bits") for module in quantised.modules())
    np.testing.assert_allclose(quantised(ids), want, rtol=0, atol=5e-2)  # float16, of a few units


def test_demo(model, capsys):
    assert cli.main(["demo", "--model", model, "-m", "4", "--tq-format", "k4v4"]) == 0
    out = capsys.readouterr().out
    assert "--- float16 cache" in out
    assert "times smaller" in out
    assert "of 4 tokens agree" in out


@pytest.mark.parametrize("name", ("longcat_flash", "falcon_h1"))
def test_demo_and_bench_of_caches_in_lists(name, model, monkeypatch, capsys):
    built, (_, tokenizer) = configs.build(name), loading.load(model)
    for module in (demo, bench):
        monkeypatch.setattr(module, "load", lambda _: (built, tokenizer))
    monkeypatch.setattr(demo, "encode", lambda *_: list(range(1, 100)))
    assert cli.main(["demo", "-m", "4", "--tq-format", "k4v4"]) == 0
    assert "--- float32 cache" in capsys.readouterr().out
    # Tokens that the model knows: the tokenizer has more.
    monkeypatch.setattr(bench.mx.random, "randint", lambda low, high, shape: mx.ones(shape, mx.int32))
    assert cli.main(["bench", "-p", "20", "-g", "2", "-n", "1"]) == 0
    assert ("prompts over decoded rows" in capsys.readouterr().out) == (name == "longcat_flash")


def test_the_demo_counts_what_agrees(capsys):
    def answer(tokens, nbytes):
        return demo.Answer(tokens, "text", nbytes, 1.0, 1.0)

    demo.report(
        mlx_tq.TQFormat(), 10, "float16", answer([1, 2, 3, 4], 400), answer([1, 2, 9, 4], 100), "kernels (metal)"
    )
    out = capsys.readouterr().out
    assert "4.00 times smaller. The first 2 of 4 tokens agree." in out
    assert "portable path" not in out


@pytest.mark.parametrize("batch", (1, 2))
def test_bench(model, batch, tmp_path, capsys):
    command = ["bench", "--model", model, "-p", "40", "-g", "4", "-n", "2", "-b", str(batch), "--csv"]
    assert cli.main([*command, str(tmp_path / "out.csv"), "--tq-format", "k4v4", "tq3"]) == 0
    out, err = capsys.readouterr()
    assert "40 prompt tokens, 4 generated" in out
    assert "trial 2 of 2" in err
    with (tmp_path / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["cache"] for row in rows] == ["mlx-lm", "k4v4", "tq3"]
    assert all(float(row["prompt_tps"]) > 0 and float(row["generation_tps"]) > 0 for row in rows)
    assert all(row["batch_size"] == str(batch) and row["model"] == model for row in rows)
    assert rows[0]["attention"] == "mlx-lm's own" != rows[1]["attention"]
    if batch == 1:
        loaded, _ = loading.load(model)
        made = [mlx_tq.make_prompt_cache(loaded, name) for name in ("k4v4", "tq3")]
        for row, caches in zip(rows, [stock_cache(loaded), *made], strict=True):
            loaded(mx.zeros((1, 43), mx.int32), cache=caches)
            assert int(row["cache_bytes"]) == sum(cache.nbytes for cache in caches)


def test_medians():
    trials = [bench.Trial(*values) for values in ((1, 30, 5, 7), (3, 10, 5, 7), (2, 20, 9, 7))]
    assert bench.medians(trials) == bench.Trial(2, 20, 5, 7)
