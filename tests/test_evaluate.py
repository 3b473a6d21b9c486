"""`mlx-tq eval` on tiny models, its numbers against NumPy."""

import csv
import json
from importlib.util import find_spec

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("mlx_lm")
pytest.importorskip("tqdm")

import tiny_llama
from archs import configs
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import make_prompt_cache as stock_caches
from test_cli import fails

import mlx_tq
from mlx_tq import TQFormat, TQKVCache, cli, evaluate
from mlx_tq.evaluate import CacheFormat, Predictions, Runner, Tokens, parse_format, split_specs

SMALL = "window=32,sinks=2,page=32"  # so that short sequences have packed rows
TINY = [
    *("--limit", "20", "--prefix", "70", "--batch", "2", "--copy-distance", "20"),
    *("--copy-rows", "2", "--needle-lengths", "170", "--needle-depths", "0,1"),
]


class ByteTokenizer:
    """Bytes as tokens, behind a start token."""

    START = 256

    def encode(self, text, add_special_tokens=True):
        return [self.START] * add_special_tokens + list(text.encode())


class Bar:
    n = 0

    def update(self, n=1):
        self.n += n


@pytest.fixture(scope="module")
def model():
    return evaluate.prepare(tiny_llama.tiny_model(["x"] * 260))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_llama.make(tmp_path_factory.mktemp("tiny"))[2])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"he said {i} words." for i in range(60)), encoding="utf-8")
    return str(path)


def arguments(*argv):
    return evaluate.setup_arg_parser().parse_args([*TINY, *argv])


def log_softmax64(logits) -> np.ndarray:
    x = np.array(logits.astype(mx.float32)).astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


# ------------------------------------------------------------------ formats


@pytest.mark.parametrize(
    ("spec", "format"),
    [
        ("default", TQFormat.preset("default")),
        ("tq3", TQFormat.preset("tq3")),
        ("k4v4:sinks=4,centered_keys=true", TQFormat.preset("k4v4", sinks=4, centered_keys=True)),
        (
            "key_bits=3,value_bits=2,codebook=lloyd",
            TQFormat.preset("default", key_bits=3, value_bits=2, codebook="lloyd"),
        ),
        ("norm_correction=0", TQFormat.preset("default", norm_correction=False)),
    ],
)
def test_specs(spec, format):
    assert parse_format(spec) == CacheFormat(spec, format)


def test_specs_of_other_caches():
    assert parse_format("fp16") == CacheFormat("fp16")
    assert parse_format("mlx-lm-4") == CacheFormat("mlx-lm-4", bits=4)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tq9", "one of default, .*k4v4, .*mlx-lm-8, got 'tq9'"),
        ("tq9:window=0", "got 'tq9'"),
        ("k4v4:windows=0", "a field of key_bits, .*, got 'windows=0'"),
        ("k4v4:window", "expected field=value .* got 'window'"),
        ("window=-1", "window must be a whole number, got '-1'"),
        ("qjl=maybe", "qjl must be true or false, got 'maybe'"),
        ("key_bits=5", "key_bits must be one of .*, got 5"),
        ("codebook=best", "codebook must be one of .*, got 'best'"),
        ("fp16:window=0", "got 'fp16'"),
    ],
)
def test_bad_specs(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_format(spec)


def test_specs_are_split_where_a_format_begins():
    given = ["default,k4v4:window=0,sinks=0,tq3", "key_bits=3,value_bits=2,fp16", "window=64", "default"]
    assert split_specs(given) == [
        *("default", "k4v4:window=0,sinks=0", "tq3", "key_bits=3,value_bits=2", "fp16", "window=64"),
    ]


# ------------------------------------------------------------------ numbers


def test_measures_match_numpy():
    rng = np.random.default_rng(0)
    logits = [mx.array(rng.normal(size=(5, 300)) * 3, mx.float32) for _ in range(2)]
    target = rng.integers(0, 300, 5)
    ref, other = (log_softmax64(x) for x in logits)
    got = evaluate.measures(*(evaluate.log_softmax(x) for x in logits), mx.array(target))
    best, best_ref = other.argmax(-1), ref.argmax(-1)
    want = [
        (np.exp(ref) * (ref - other)).sum(-1),
        *(-x[np.arange(5), target] for x in (other, ref)),
        *(best == best_ref, best == target, best_ref == target),
    ]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.array(a), b, rtol=1e-5)


def test_impossible_tokens_add_nothing():
    reference = evaluate.log_softmax(mx.array([[0.0, 1.0, -mx.inf]]))
    other = evaluate.log_softmax(mx.array([[0.0, 1.0, -2.0]]))
    kl = evaluate.measures(reference, other, mx.array([1]))[0].item()
    assert kl == pytest.approx(np.log1p(np.exp(-2) / (1 + np.e)), rel=1e-5)


def test_summaries_match_numpy():
    rng = np.random.default_rng(1)
    kl, nll, nll_ref = rng.random((3, 2, 50))
    same, hit, hit_ref = rng.random((3, 2, 50)) < 0.7
    p = Predictions(kl, nll, nll_ref, same, hit, hit_ref)
    assert evaluate.text_results(p) == {
        "tokens": 100,
        "ppl": pytest.approx(np.exp(nll.sum() / 100)),
        "ppl_ref": pytest.approx(np.exp(nll_ref.sum() / 100)),
        "kl_mean": pytest.approx(kl.sum() / 100),
        "kl_p99": pytest.approx(np.sort(kl.ravel())[98] * 0.99 + np.sort(kl.ravel())[99] * 0.01, rel=0.05),
        "top1": pytest.approx(same.sum() / 100),
    }
    cells = evaluate.needle_results(p, 512, [0.0, 1.0], 3)
    assert [c["found"] for c in cells] == [bool(h[-3:].all()) for h in hit]
    assert cells[1]["logprob"] == pytest.approx(-nll[1, -3:].mean())
    assert cells[1]["agreement"] == pytest.approx(same[1, -3:].mean())


def test_the_models_own_cache_against_itself_and_the_whole_sequence(model):
    ids = np.random.default_rng(2).integers(0, 256, (2, 60))
    bar = Bar()
    (p,) = evaluate.compare(*[Runner(model, CacheFormat("fp16"))], [Runner(model, CacheFormat("fp16"))], ids, 20, bar)
    assert p.kl.shape == (2, 39)
    assert not p.kl.any() and p.same.all()
    log = log_softmax64(model(mx.array(ids)))[:, 20:-1]
    nll = -np.take_along_axis(log, ids[:, 21:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(p.nll, nll, atol=1e-4)
    np.testing.assert_array_equal(p.nll, p.nll_ref)
    np.testing.assert_array_equal(p.hit, log.argmax(-1) == ids[:, 21:])
    assert bar.n == 2 * (39 + 2)


@pytest.mark.parametrize("spec", [f"k4v4:{SMALL}", "tq3", "mlx-lm-4"])
def test_formats_decode_through_their_caches(model, spec):
    ids = np.random.default_rng(3).integers(0, 256, (1, 110))
    format = parse_format(spec)
    runner = Runner(model, format)
    (p,) = evaluate.compare(Runner(model, CacheFormat("fp16")), [runner], ids, 80, Bar())
    caches = stock_caches(model) if format.bits else mlx_tq.make_prompt_cache(model, format.format)
    model(mx.array(ids[:, :80]), cache=caches)
    if format.bits:
        caches = [c.to_quantized(group_size=64, bits=4) for c in caches]
    log = []
    for t in range(80, 109):
        log.append(log_softmax64(model(mx.array(ids[:, t : t + 1]), cache=caches)[:, -1]))
    ref = log_softmax64(model(mx.array(ids)))[0, 80:-1]
    log = np.concatenate(log)
    np.testing.assert_allclose(p.kl[0], (np.exp(ref) * (ref - log)).sum(-1), rtol=0.02, atol=1e-6)
    np.testing.assert_allclose(p.nll[0], -log[np.arange(29), ids[0, 81:]], atol=1e-4)
    assert p.kl.mean() > 1e-7
    assert type(runner.caches[0]).__name__ == ("QuantizedKVCache" if format.bits else "TQKVCache")
    assert runner.seconds > 0


def test_the_prepared_model_computes_the_same():
    plain, prepared = (tiny_llama.tiny_model(["x"] * 260) for _ in range(2))
    prepared = evaluate.prepare(prepared)
    plain.set_dtype(mx.float32)
    ids = mx.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    for part in (ids, ids[:, :1]):
        np.testing.assert_allclose(np.array(prepared(part)), np.array(plain(part)), atol=1e-5)


class Layers:
    """A model of which only the caches are asked for."""

    def __init__(self, n):
        self.make_cache = lambda: [KVCache() for _ in range(n)]


@pytest.mark.parametrize(
    "spec", ["default", "k4v4", "tq3", "k4v4:key_bits=16", "key_bits=3,value_bits=2,centered_keys=1"]
)
def test_bytes_are_measured(spec):
    format = parse_format(spec)
    shapes = [((1, 3, 64), (1, 3, 64)), ((1, 2, 128), (1, 2, 64))]
    want = 0
    for layer in shapes:
        held = []
        for length in (2048, 3072):
            cache = TQKVCache(format.format)
            cache.update_and_fetch(*(mx.zeros((1, heads, length, d), mx.float16) for _, heads, d in layer))
            held.append(cache.nbytes)
        want += (held[1] - held[0]) / 1024
    rows = [(*layer, mx.float16) for layer in shapes]
    assert evaluate.bytes_per_token(format, Layers(2), rows) == want
    exact = sum(h * (d + v) * format.format.bits_per_element(d, v) for (_, h, d), (_, _, v) in shapes) / 8
    assert want == pytest.approx(exact)


@pytest.mark.parametrize(("spec", "bits"), [("fp16", 16), ("mlx-lm-4", 4.5), ("mlx-lm-8", 8.5)])
def test_bytes_of_other_caches(spec, bits):
    rows = [((1, 2, 64), (1, 2, 64), mx.bfloat16)] * 3
    assert evaluate.bytes_per_token(parse_format(spec), Layers(3), rows) == 3 * 2 * 128 * bits / 8


def test_cached_rows():
    rows = (1, 1, 64), (1, 1, 64), mx.float16
    assert evaluate.cached_rows(tiny_llama.tiny_model(["x"] * 260)) == [rows] * 2

    class Bounded:
        layers = ()

        def make_cache(self):
            return [type("Other", (KVCache,), {})()]

        def __call__(self, tokens, cache):
            return mx.zeros(1)

    with pytest.raises(ValueError, match="no plain KV cache"):
        evaluate.cached_rows(Bounded())


@pytest.mark.parametrize("name", ("longcat_flash", "falcon_h1"))
def test_latents_and_caches_in_lists(name, text, monkeypatch):
    """Their bytes are those of the caches that `enable` makes, in the formats it derives."""

    class Tokenizer(ByteTokenizer):
        START = 0  # the model knows fewer tokens

    monkeypatch.setattr(evaluate, "_TRIAL", 4)  # these models are slow
    args = arguments("--text", text, "--no-needle", "--no-copy", "--limit", "4", "--batch", "1")
    formats = [parse_format(spec) for spec in ("fp16", f"k4v4:{SMALL}")]
    stock, ours = evaluate.evaluate(args, formats, configs.build(name), Tokenizer())
    assert stock["kl_mean"] == 0 < ours["kl_mean"] < 0.1
    model = configs.build(name)
    sizes = []
    for length in (2048, 3072):
        caches = mlx_tq.make_prompt_cache(model, formats[1].format)
        model(mx.zeros((1, length), mx.int32), cache=caches)
        sizes.append(sum(cache.nbytes for cache in caches))
    assert ours["bytes_per_token"] == (sizes[1] - sizes[0]) / 1024
    assert stock["bits_per_element"] == 32


def test_group_size():
    assert [evaluate.group_size(*d) for d in ((64, 128), (96, 96), (192, 64))] == [64, 32, 64]
    with pytest.raises(ValueError, match="multiples of 32"):
        evaluate.group_size(80, 80)


# ------------------------------------------------------------------ sequences


def test_default_text_is_long_prose():
    text = evaluate.default_text()
    assert text == evaluate.default_text()
    assert len(text) > 100_000
    assert "  " not in text and len(set(text.split("\n\n"))) == len(text.split("\n\n"))


def test_text_rows_are_consecutive():
    tokens = Tokens(ByteTokenizer(), "abc def.\n\nghi jkl mno")
    rows = tokens.text_rows(2, 6)
    assert rows[:, 0].tolist() == [256, 256]
    assert bytes(rows[:, 1:].ravel().tolist()) == b"abc def.\n\n"
    with pytest.raises(ValueError, match="must have 30 tokens for these settings, got 21"):
        tokens.text_rows(3, 11)
    with pytest.raises(ValueError, match="must not be empty"):
        Tokens(ByteTokenizer(), "")


@pytest.mark.parametrize("random", [False, True])
def test_copy_rows_repeat_a_passage(random):
    text = "the quick brown fox jumps over the lazy dog"
    tokens = Tokens(ByteTokenizer(), text)
    rows = tokens.copy_rows(3, 8, random)
    assert rows.shape == (3, 1 + 3 * 8)
    np.testing.assert_array_equal(rows[:, 1:17], rows[:, 9:])
    assert len({tuple(row[1:9]) for row in rows}) == 3
    assert (bytes(rows[0, 1:9].tolist()).decode() == text[:8]) != random
    np.testing.assert_array_equal(rows, tokens.copy_rows(3, 8, random))


def test_the_last_copy_is_measured(model, text):
    tokens = Tokens(ByteTokenizer(), "the quick brown fox jumps over the lazy dog")
    args = arguments("--text", text, "--limit", "2", "--prefix", "4", "--no-needle")
    plan = evaluate.Evaluation(model, tokens, evaluate.cached_rows(model), args).plan
    name, ids, prefix = plan[1]
    assert name == "copy"
    np.testing.assert_array_equal(ids[:, prefix:], ids[:, 1:21])
    (p,) = evaluate.compare(
        Runner(model, CacheFormat("fp16")), [Runner(model, CacheFormat("fp16"))], ids, prefix, Bar()
    )
    assert evaluate.copy_results(p)["copy_tokens"] == 2 * 19


def test_needle_rows_hold_the_fact():
    tokens = Tokens(ByteTokenizer(), "the quick brown fox jumps over the lazy dog ")
    rows, question, answer = tokens.needle_rows(220, [0.0, 0.5, 1.0])
    assert rows.shape == (3, 220 + answer)
    places = []
    for row in rows:
        text = bytes(row[1:].tolist()).decode()
        code = text[-answer:]
        assert text[: -question - answer].count(f"lighthouse is{code}.") == 1
        places.append(text.index("The secret code"))
    assert places[0] == 1 and places[0] < places[1] < places[2]
    with pytest.raises(ValueError, match="leave room for the fact and the question, got 20"):
        tokens.needle_rows(20, [0.5])


# ------------------------------------------------------------------ the command


def test_the_command(folder, text, tmp_path, capsys):
    out, table, pictures = tmp_path / "rows.json", tmp_path / "rows.csv", tmp_path / "plots"
    argv = ["--model", folder, "--text", text, *TINY, "--out", str(out), "--csv", str(table)]
    argv += ["--formats", f"fp16,k4v4:{SMALL}", "mlx-lm-4"]
    plots = ["--plot", str(pictures)] if find_spec("matplotlib") else []
    assert evaluate.main([*argv, *plots]) == 0
    printed = capsys.readouterr()
    assert "100%" in printed.err
    rows = json.loads(out.read_text())
    assert [row["format"] for row in rows] == ["fp16", f"k4v4:{SMALL}", "mlx-lm-4"]
    assert all(row["format"] in printed.out for row in rows)
    wanted = "bits_per_element bytes_per_token ppl ppl_ref kl_mean kl_p99 top1 copy_kl copy_top1 tokens model seconds"
    for row in rows:
        assert not {*wanted.split(), "device", "dtype", "mlx", "mlx_tq", "settings", "text_sha256"} - set(row)
        assert row["tokens"] == 20 and len(row["needle"]) == 2
    fp16, ours, stock = rows
    assert (fp16["kl_mean"], fp16["top1"], fp16["copy_kl"], fp16["copy_top1"]) == (0, 1, 0, 1)
    assert fp16["ppl"] == fp16["ppl_ref"] == ours["ppl_ref"]
    assert (fp16["bits_per_element"], ours["bits_per_element"], stock["bits_per_element"]) == (16, 4.25, 4.5)
    assert ours["kl_mean"] > 0 and ours["ppl"] != ours["ppl_ref"]
    with table.open(newline="") as file:
        assert [float(row["kl_mean"]) for row in csv.DictReader(file)] == [row["kl_mean"] for row in rows]
    if plots:
        assert sorted(p.name for p in pictures.iterdir()) == ["kl.png", "needle.png"]
        assert all(p.read_bytes().startswith(b"\x89PNG") for p in pictures.iterdir())


def test_resume_runs_what_is_missing(model, text, tmp_path, monkeypatch):
    out = tmp_path / "rows.json"
    ran = []
    run = evaluate.Evaluation.run

    def counted(self, formats, bar):
        ran.extend(format.name for format in formats)
        if "tq3" in ran:
            raise KeyboardInterrupt
        return run(self, formats, bar)

    monkeypatch.setattr(evaluate, "_GROUP", 1)
    monkeypatch.setattr(evaluate.Evaluation, "run", counted)
    args = arguments("--text", text, "--out", str(out), "--resume", "--no-needle", "--no-copy")
    formats = [parse_format(s) for s in ("k4v4", "tq3", "fp16")]
    with pytest.raises(KeyboardInterrupt):
        evaluate.evaluate(args, formats, model, ByteTokenizer())
    assert [row["format"] for row in json.loads(out.read_text())] == ["k4v4"]

    ran.clear()
    rows = evaluate.evaluate(args, [formats[0], formats[2]], model, ByteTokenizer())
    assert ran == ["fp16"] and [row["format"] for row in rows] == ["k4v4", "fp16"]
    assert rows[0]["needle_found"] is None and "copy_kl" not in rows[0]
    ran.clear()
    assert evaluate.evaluate(args, [formats[2]], None, None) == [rows[1]]  # nothing is loaded
    assert not ran
    args.limit = 10
    evaluate.evaluate(args, [formats[2]], model, ByteTokenizer())
    args.resume = False
    evaluate.evaluate(args, [formats[2]], model, ByteTokenizer())
    assert ran == ["fp16", "fp16"]
    assert [(r["format"], r["limit"]) for r in json.loads(out.read_text())] == [
        ("k4v4", 20),
        ("fp16", 20),
        ("fp16", 10),
    ]


def without_quantised_products(monkeypatch):
    """MLX as on a backend that cannot multiply quantised matrices."""

    def missing(*args, **kwargs):
        raise RuntimeError("quantized_matmul: No implementation")

    monkeypatch.setattr(mx, "quantized_matmul", missing)


def test_a_format_that_the_device_cannot_run_is_skipped_and_run_elsewhere(model, text, tmp_path, capsys):
    out = tmp_path / "rows.json"
    args = arguments("--text", text, "--out", str(out), "--resume", "--no-needle", "--no-copy")
    formats = [parse_format(s) for s in ("mlx-lm-4", "k4v4")]
    for _ in range(2):  # the second time, k4v4 is not run again and mlx-lm-4 is skipped again
        with pytest.MonkeyPatch.context() as patch:
            without_quantised_products(patch)
            rows = evaluate.evaluate(args, formats, model, ByteTokenizer())
        assert [row.get("skipped") for row in rows] == ["quantized_matmul: No implementation", None]
        assert "kl_mean" not in rows[0] and rows[0]["device"] == rows[1]["device"]
        assert sorted(row["format"] for row in json.loads(out.read_text())) == ["k4v4", "mlx-lm-4"]
    assert evaluate.table(rows).splitlines()[1].split()[:3] == ["mlx-lm-4", "-", "-"]
    # As a device would do that computes in another dtype.
    with pytest.MonkeyPatch.context() as patch:
        settings = evaluate.settings_of
        patch.setattr(evaluate, "settings_of", lambda *a: settings(*a) | {"computed_in": "elsewhere"})
        (row,) = evaluate.evaluate(args, formats[:1], model, ByteTokenizer())
    assert row["kl_mean"] > 0
    assert [(r["format"], "skipped" in r, r["computed_in"]) for r in json.loads(out.read_text())] == [
        ("k4v4", False, "float32"),
        ("mlx-lm-4", False, "elsewhere"),
    ]


def test_a_run_of_nothing_but_skipped_formats_fails(folder, text, monkeypatch, capsys):
    without_quantised_products(monkeypatch)
    assert evaluate.main(["--model", folder, "--text", text, *TINY, "--formats", "mlx-lm-4"]) == 1
    assert "mlx-lm-4 was skipped on cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--formats", "tq9"], "--formats: format must be one of"),
        (["--copy-distance", "1"], "--copy-distance must be at least 2, got 1"),
        (["--formats", ","], "--formats must name a format"),
        (["--resume"], "--resume needs --out"),
        (["--limit", "0"], "at least 1, got '0'"),
        (["--needle-depths", "0,2"], "numbers from 0 to 1, separated by commas, got '0,2'"),
        (["--out", "/no/such/folder/rows.json"], "must be in a folder that exists, got '/no/such/"),
        (["--text", "/no/such/text"], "--text '/no/such/text' cannot be read"),
        (["--model", "/no/such/folder"], "got '/no/such/folder'"),
    ],
)
def test_mistakes_are_named(argv, message, capsys):
    assert message in fails(capsys, "eval", *argv)


def test_files_that_are_no_results(folder, text, tmp_path, capsys):
    out = tmp_path / "rows.json"
    command = ["eval", "--model", folder, "--text", text, "--out", str(out)]
    for content in ("[", '{"a": 1}', "[1]", '[{"format": "x"}]'):
        out.write_text(content)
        assert "holds no results of this command" in fails(capsys, *command)


def test_short_texts(folder, text, capsys):
    assert "lower --limit, --prefix or --batch" in fails(capsys, "eval", "--model", folder, "--text", text)


def test_the_subcommand(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["eval", "--help"])
    assert stopped.value.code == 0
    assert "usage: mlx-tq eval" in capsys.readouterr().out
