"""The `mlx-tq` command on a tiny model."""

import io
import sys

import pytest

pytest.importorskip("mlx_lm")

import tiny_llama

import mlx_tq
from mlx_tq import cli, demo


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
        (["formats", "--head-dim", "0"], "--head-dim must be at least 1, got 0"),
        (["generate"], "required: --prompt/-p"),
        (["generate", "-p", "x", "--tq-format", "tq9"], "got 'tq9'"),
        (["generate", "-p", "x", "-m", "0"], "at least 1, got '0'"),
        (["generate", "-p", "x", "--model", "/no/such/folder"], "got '/no/such/folder'"),
        (["demo", "--tq-format", "tq9"], "got 'tq9'"),
    ],
)
def test_mistakes_are_named(argv, message, capsys):
    assert message in fails(capsys, *argv)


def test_a_folder_that_is_no_model(tmp_path, capsys):
    assert "config.json" in fails(capsys, "generate", "-p", "x", "--model", str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "cannot be loaded: No safetensors" in fails(capsys, "generate", "-p", "x", "--model", str(tmp_path))


def test_generate(model, capsys, monkeypatch):
    command = ["generate", "--model", model, "-m", "5", "--seed", "1", "--temp", "0.7"]
    assert cli.main([*command, "-p", "he said"]) == 0
    out, err = capsys.readouterr()
    assert "format default (K4/V4" in err
    assert "prompt: 8 tokens" in err  # with the template's two
    monkeypatch.setattr(sys, "stdin", io.StringIO("he said"))
    assert cli.main([*command, "-p", "-"]) == 0
    assert capsys.readouterr().out == out


def test_generate_without_compression(model, capsys):
    assert cli.main(["generate", "--model", model, "-m", "3", "-p", "he", "--tq-off"]) == 0
    err = capsys.readouterr().err
    assert "format off" in err
    assert "attention: mlx-lm's own" in err


def test_generate_needs_a_prompt(model, capsys):
    command = ["generate", "--model", model, "--ignore-chat-template", "-p", ""]
    assert "--prompt must not be empty" in fails(capsys, *command)


def test_demo(model, capsys):
    assert cli.main(["demo", "--model", model, "-m", "4", "--tq-format", "k4v4"]) == 0
    out = capsys.readouterr().out
    assert "--- float16 cache" in out
    assert "times smaller" in out
    assert "of 4 tokens agree" in out


def test_the_demo_counts_what_agrees(capsys):
    def answer(tokens, nbytes):
        return demo.Answer(tokens, "text", nbytes, 1.0, 1.0)

    demo.report(
        mlx_tq.TQFormat(), 10, "float16", answer([1, 2, 3, 4], 400), answer([1, 2, 9, 4], 100), "kernels (metal)"
    )
    out = capsys.readouterr().out
    assert "4.00 times smaller. The first 2 of 4 tokens agree." in out
    assert "portable path" not in out
