"""`mlx-tq plan`: what it counts is what caches hold, and it reads no weight."""

import json
import re

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("mlx_lm")
import tiny_llama
from archs.configs import build
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from test_cli import fails
from test_integrate import tiny_model

from mlx_tq import cli, plan

STEP, STEPS = 96, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama.make(tmp_path_factory.mktemp("tiny"))[2]


@pytest.mark.parametrize(
    "name",
    (
        *("llama", "gemma3_text", "gpt_oss", "lfm2", "llama4", "deepseek_v3", "deepseek_v32"),
        *("longcat_flash", "longcat_flash_ngram", "falcon_h1", "baichuan_m1"),
    ),
)
def test_bytes_are_those_of_caches_in_use(name):
    """Plain caches, sliding and chunked windows, recurrent state, latents, several caches in one."""
    model = build(name)
    held = plan.tried(model)
    for kind, make in plan.kinds(model).items():
        if name != "llama" and kind not in ("mlx-lm", "mlx-lm 4-bit", "default"):
            continue
        try:
            caches = make()
            sizes = plan.curve(make(), held, STEP, STEPS)
        except Exception as error:
            assert "-bit" in kind
            steps = generate_step(mx.arange(8), model, max_tokens=4, kv_bits=int(kind[7]), quantized_kv_start=0)
            with pytest.raises(type(error), match=re.escape(str(error)[:40])):
                list(steps)
            continue
        real = []
        for i in range(STEPS):
            mx.eval(model(mx.full((1, STEP), i), cache=caches))
            real.append(sum(cache.nbytes for cache in caches))
        np.testing.assert_array_equal(sizes, real, err_msg=kind)


def test_a_model_that_cannot_use_a_kind_says_why():
    lines = plan.table(tiny_model("gemma3_text"), 10**9, 500, 2048)
    assert [line.split("  ")[0] for line in lines if "not for this model" in line] == ["mlx-lm 8-bit", "mlx-lm 4-bit"]


def test_state_that_grows_otherwise_is_refused():
    class Growing:
        nbytes = 0

    class Model:
        def make_cache(self):
            return [Growing()]

        def __call__(self, x, cache):
            cache[0].nbytes += x.size

    with pytest.raises(ValueError, match="Growing grows with the context"):
        plan.tried(Model())


def test_what_fits():
    sizes = np.array([100, 200, 200, 300])
    assert [plan.fitting(sizes, memory, 10) for memory in (99, 100, 199, 200, 299, 300, 1000)] == [
        *(0, 10, 10, 30, 30, 40, 40)
    ]


def test_the_longest_sequence_fits_and_one_step_more_does_not():
    model = tiny_model("llama")
    model.set_dtype(mx.float16)  # a stock cache of 256 tokens fits in little memory
    held, memory = plan.tried(model), 700_000
    for line in plan.table(model, memory, 256, 8192)[1:-2]:
        kind, longest = line[:14].strip(), line.split()[-1]
        if kind not in ("mlx-lm", "default", "k4v4"):
            continue
        assert longest != "(all)"
        count = int(longest.replace(",", "")) // 256
        sizes = plan.curve(plan.kinds(model)[kind](), held, 256, count + 1)
        assert sizes[count - 1] <= memory < sizes[count]
        caches = plan.kinds(model)[kind]()
        for _ in range(count):
            mx.eval(model(mx.zeros((1, 256), mx.int32), cache=caches))
        assert sum(cache.nbytes for cache in caches) == sizes[count - 1]


def test_no_weight_is_read(folder, monkeypatch):
    """Neither is any parameter computed: all memory the plan takes is less than the smallest matrix."""
    (folder / "other").mkdir(exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | {"hidden_size": 1 << 14, "intermediate_size": 1 << 15}
    config |= {"num_attention_heads": 128, "head_dim": 128, "torch_dtype": "bfloat16"}
    (folder / "other" / "config.json").write_text(json.dumps(config))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model, _ = plan.build(folder / "other")
    lines = plan.table(model, 10**9, 1000, 4096)
    assert (
        mx.get_peak_memory() - before
        < 1 << 20
        < min(a.nbytes for _, a in tree_flatten(model.parameters()) if a.ndim > 1)
    )
    assert "100.0%" in lines[1]
    assert plan.rows_of(plan.tried(model)[0])[2] == mx.bfloat16


def test_weight_bytes(tmp_path):
    assert plan.weight_bytes(tmp_path) is None
    index = {"metadata": {"total_size": 700}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").write_bytes(bytes(500))
    assert plan.weight_bytes(tmp_path) == 700
    (tmp_path / "model-2.safetensors").write_bytes(bytes(300))
    assert plan.weight_bytes(tmp_path) == 800


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("16GB", 16 * 10**9),
        ("16 gib", 16 << 30),
        ("1.5M", 1_500_000),
        ("512KiB", 512 << 10),
        ("1000", 1000),
        ("1T", 10**12),
    ],
)
def test_sizes(text, want):
    assert plan.size(text) == want


@pytest.mark.parametrize("text", ("", "16 apples", "iB", "0", "-1GB", "1.GB"))
def test_bad_sizes(text):
    with pytest.raises(plan.argparse.ArgumentTypeError, match="such as 16GB"):
        plan.size(text)


def test_the_command(folder, capsys):
    weights = (folder / "model.safetensors").stat().st_size
    assert cli.main(["plan", "--model", str(folder), "--memory", "10MB", "--tokens", "4000"]) == 0
    out = capsys.readouterr().out
    assert f"weights {weights / 1e9:.2f} GB, context length 8,192 tokens" in out
    assert all(f"\n{name} " in out for name in ("mlx-lm 8-bit", *plan.TQFormat.presets()))
    assert cli.main(["plan", "--model", str(folder)]) == 0
    assert "(all)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["--memory", "1KB"], "--memory must be more than the weights"), (["--memory", "lots"], "got 'lots'")],
)
def test_mistakes_are_named(folder, argv, message, capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--model", str(folder), *argv])
    assert message in capsys.readouterr().err


def test_a_config_alone_needs_the_size_of_weights(folder, tmp_path, capsys):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(SystemExit):
        cli.main(["plan", "--model", str(tmp_path)])
    assert "--weights must be given" in capsys.readouterr().err
    assert cli.main(["plan", "--model", str(tmp_path), "--weights", "1MB", "--memory", "1GB"]) == 0
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(SystemExit, match="cannot be planned for: ValueError: Model type no_such_model not supported"):
        cli.main(["plan", "--model", str(tmp_path), "--weights", "1MB"])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match="cannot be planned for: KeyError: 'model_type'"):
        cli.main(["plan", "--model", str(tmp_path), "--weights", "1MB"])


@pytest.mark.parametrize("index", ("[]", "{}", '{"weight_map": {"a": "b"}, "metadata": {"total_size": "many"}}'))
def test_an_index_that_is_none(folder, tmp_path, capsys, index):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "has no readable index" in fails(capsys, "plan", "--model", str(tmp_path))


def test_an_index_without_a_size(folder, tmp_path, capsys):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b"}, "metadata": null}')
    assert "--weights must be given" in fails(capsys, "plan", "--model", str(tmp_path))
