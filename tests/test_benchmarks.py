"""The benchmark scripts on tiny cases, and their tables in the documents."""

import sys
from importlib import import_module
from pathlib import Path

import mlx.core as mx
import pytest
from tiny_llama import byte_tokens, tiny_model

from mlx_tq import evaluate

FOLDER = Path(__file__).parents[1] / "benchmarks"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the benchmarks are not here")


@pytest.fixture
def script(monkeypatch):
    """Imports a script by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield import_module
    for name in ("attention", "generation", "quality", "speed"):
        sys.modules.pop(name, None)


def test_the_results_page_has_the_tables_of_the_files(script, capsys):
    page = (FOLDER / "results" / "README.md").read_text(encoding="utf-8")
    tables = []
    for name in ("quality", "speed"):
        assert script(name).main([]) == 0
        tables += [part.strip() for part in capsys.readouterr().out.split("\n\n") if part.startswith("|")]
    assert len(tables) == 3 and all(table in page for table in tables)


def test_attention_is_timed(script):
    attention = script("attention")
    case = attention.Case("decode", 300, n_heads=4, n_kv_heads=2, head_dim=64)
    row = attention.measure(case, "k4v4", rounds=2, budget_s=0.1, with_q4=True)
    times = "ours_us", "bf16_us", "mlx_lm_q4_us", "host_us", "append_us", "bf16_append_us", "encode_us"
    assert min(row[name] for name in times) > 0
    assert row["p20"] <= row["ours_us"] <= row["p80"]
    assert row["ours_bytes"] < row["bf16_bytes"] == 2 * 2 * 2 * 300 * 64


def test_a_result_that_is_wrong_is_not_timed(script, monkeypatch):
    attention = script("attention")
    monkeypatch.setattr(attention.mlx_tq, "attention", lambda q, *rows, **options: mx.zeros(q.shape))
    with pytest.raises(SystemExit, match="differs"):
        attention.measure(attention.Case("decode", 300, head_dim=64), "k4v4", rounds=1, budget_s=0.1, with_q4=False)


def test_generation_is_timed_over_caches_of_one_length(script):
    generation = script("generation")
    model = tiny_model(byte_tokens())
    shapes = generation.key_shapes(model)
    row = generation.measure(model, "tiny", 600, "default", rounds=2, tokens=3, shapes=shapes)
    assert row["own_tps"] > 0 and row["ours_tps"] > 0 and row["layers"] == 2
    assert row["ours_bytes"] < row["own_bytes"]
    caches = generation.filled(model, "default", 600, shapes)
    for _ in range(2):
        generation.run(model, caches, 2)
        assert [cache.offset for cache in caches] == [600, 600]


def test_the_table_of_the_formats(script, tmp_path, capsys):
    numbers = {"kl_mean": 0.00123, "top1": 0.98, "copy_top1": 0.997, "bits_per_element": 4.5, "settings": "x"}
    about = {"about": "4 bits", "device": "cpu", "dtype": "float32", "mlx": "1", "model": "tiny"}
    rows = [about | numbers | {"format": name} for name in ("mlx-lm-4", "k4v4", "k4v4:sinks=4")]
    rows.append(about | {"format": "mlx-lm-8", "skipped": "no such operation", "settings": "y"})
    file = tmp_path / "quality.json"
    evaluate.write_rows(file, rows)
    assert script("quality").main(["--json", str(file)]) == 0
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines[2:]] == ["`k4v4`", "`mlx-lm-4`"]
    assert lines[2][1:5] == ["4.25 / 4.12", "0.0012", "98.0%", "99.7%"]
    assert lines[3][1] == "4.50" and lines[3][-1] == "4 bits"
