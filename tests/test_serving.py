"""mlx-lm's batched generation, speculative decoding, prompt files and server over compressed caches."""

import copy
import json
import sys
import threading
import urllib.request
from http.server import ThreadingHTTPServer

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from oracle import to64

import mlx_tq
from mlx_tq import TQFormat, TQKVCache
from mlx_tq.batch import TQBatchKVCache

mlx_lm = pytest.importorskip("mlx_lm")
pytest.importorskip("transformers")
import tiny_llama  # noqa: E402
from mlx_lm.generate import BatchGenerator, batch_generate, generate_step, speculative_generate_step  # noqa: E402
from mlx_lm.models import cache as cache_module  # noqa: E402
from test_integrate import prompt, tiny_model  # noqa: E402

FORMATS = {
    "high bit": TQFormat(4, 16, qjl=True, window=0, sinks=0),
    "default": TQFormat(),
    "window": TQFormat(window=32, page=32),
    "tq3": TQFormat.preset("tq3"),
}
# Rounding of a batch differs from that of a row alone and can flip a code: tokens are compared up to the first that
# the model is not sure of by this much, in log-probability.
SURE = 0.005


@pytest.fixture(autouse=True)
def disabled_afterwards():
    yield
    mlx_tq.integrate._enabled.clear()
    mlx_tq.view.remove_hook()


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def sure_tokens(model, ids, n, **options):
    """Greedy tokens of the sequence alone, up to the first that could have been another."""
    out = []
    for token, logprobs in generate_step(mx.array(ids), model, max_tokens=n, **options):
        top = np.sort(to64(logprobs))
        if top[-1] - top[-2] < SURE:
            break
        out.append(int(token))
    return out


def check_tokens(got, sure, n):
    """The generated tokens are those of the sequences alone; returns how many could be compared."""
    for tokens, want in zip(got, sure, strict=True):
        assert len(tokens) == n and tokens[: len(want)] == want
    return sum(map(len, sure))


class Words:
    """As much of a tokenizer as batch_generate asks for."""

    eos_token_ids = ()

    def decode(self, ids):
        return " ".join(map(str, ids))


# ------------------------------------------------------------------ batches


@pytest.mark.parametrize("format", FORMATS)
def test_batch_generate_equals_single_runs(model, format):
    prompts = [prompt(n, seed).tolist() for seed, n in enumerate((20, 300, 131))]
    with mlx_tq.enable(model, FORMATS[format]):
        sure = [sure_tokens(model, ids, 12) for ids in prompts]
        result = batch_generate(
            model, Words(), prompts, max_tokens=12, return_token_ids=True, return_prompt_caches=True
        )
        assert check_tokens(result.token_ids, sure, 12) >= 6
        for ids, tokens, caches in zip(prompts, result.token_ids, result.caches, strict=True):
            assert all(type(c) is TQKVCache and c.offset == len(ids) + 12 for c in caches)
            held = mlx_tq.make_prompt_cache(model, FORMATS[format])
            model(mx.array([ids + tokens]), cache=held)
            assert [c.rows[0].layout for c in caches] == [c.rows[0].layout for c in held]
        # The returned caches go on as a batch, and as single sequences.
        more = [[1, 2, 3], [4], [5, 6]]
        again = batch_generate(
            model, Words(), more, prompt_caches=copy.deepcopy(result.caches), max_tokens=6, return_token_ids=True
        )
        sure = [
            sure_tokens(model, ids, 6, prompt_cache=copy.deepcopy(caches))
            for ids, caches in zip(more, result.caches, strict=True)
        ]
        assert check_tokens(again.token_ids, sure, 6) >= 3


@pytest.mark.parametrize("format", ("default", "window"))
@pytest.mark.parametrize("chunk", (32, 2048))
def test_sequences_join_and_leave_a_batch(model, format, chunk):
    """Continuous batching: prompts in small chunks, unequal lives, some removed, memory counted."""
    prompts = [prompt(n, seed).tolist() for seed, n in enumerate((5, 200, 70, 33, 1))]
    lives = [20, 4, 9, 30, 12]
    with mlx_tq.enable(model, FORMATS[format]):
        sure = [sure_tokens(model, ids, n, prefill_step_size=chunk) for ids, n in zip(prompts, lives, strict=True)]
        batch = BatchGenerator(model, prefill_step_size=chunk, completion_batch_size=4, prefill_batch_size=2)
        out, finished = {}, {}
        uids = batch.insert(prompts[:2], lives[:2])
        for step in range(200):
            _, responses = batch.next()
            for r in responses:
                out.setdefault(r.uid, []).append(r.token)
                if r.finish_reason:
                    finished[r.uid] = r.prompt_cache
            if step in (2, 9, 11):
                i = len(uids)
                uids += batch.insert(prompts[i : i + 1], lives[i : i + 1])
            if step == 22:
                kept = batch.remove([uids[3]], return_prompt_caches=True)[uids[3]]
                assert kept[0][0].offset == len(kept[1])
            caches = batch._generation_batch.prompt_cache
            assert all(type(c) is TQBatchKVCache for c in caches)
            assert batch.prompt_cache_nbytes >= sum(c.nbytes for c in caches)
            if step > 25 and len(finished) == 4:
                break
        batch.close()
    for i, uid in enumerate(uids):
        want = sure[i][: len(out[uid])]
        assert out[uid][: len(want)] == want
        assert i == 3 or (len(out[uid]) == lives[i] and finished[uid][0].offset == len(prompts[i]) + lives[i])
    assert sum(map(len, sure)) >= 10


@pytest.mark.parametrize("name", ("gemma3_text", "gpt_oss", "lfm2"))
def test_mixed_and_hybrid_models_in_a_batch(name):
    """Sliding windows, attention sinks and recurrent state beside compressed layers."""
    model = tiny_model(name)
    prompts = [prompt(n, seed).tolist() for seed, n in enumerate((40, 150))]
    with mlx_tq.enable(model, FORMATS["window"]):
        sure = [sure_tokens(model, ids, 8) for ids in prompts]
        result = batch_generate(model, Words(), prompts, max_tokens=8, return_token_ids=True)
    assert check_tokens(result.token_ids, sure, 8) >= 4


def test_another_thread_may_generate_batches(model):
    prompts = [prompt(n, seed).tolist() for seed, n in enumerate((20, 140))]
    mlx_tq.enable(model, TQFormat(seed=4321, window=32, page=32))
    results = []

    def work():
        stream = mx.default_stream(mx.default_device())
        result = batch_generate(model, Words(), prompts, max_tokens=6, return_token_ids=True, stream=stream)
        results.append(result.token_ids)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    work()
    assert len(results) == 2 and results[0] == results[1]


# ------------------------------------------------------------------ speculation and prompt reuse


@pytest.mark.parametrize("format", ("high bit", "default", "window"))
@pytest.mark.parametrize("draft", ("itself", "another"))
def test_speculative_decoding_equals_greedy(model, format, draft):
    ids = prompt(150, 3)
    other = model if draft == "itself" else tiny_model(seed=1)
    with mlx_tq.enable(model, FORMATS[format]), mlx_tq.enable(other, FORMATS[format]):
        sure = sure_tokens(model, ids, 20)
        caches = cache_module.make_prompt_cache(model) + cache_module.make_prompt_cache(other)
        steps = list(
            speculative_generate_step(
                mx.array(ids), model, other, num_draft_tokens=3, max_tokens=20, prompt_cache=caches
            )
        )
    tokens = [int(token) for token, _, _ in steps]
    assert check_tokens([tokens], [sure], 20) >= 3
    assert any(drafted for _, _, drafted in steps) or draft == "another"
    assert all(type(c) is TQKVCache for c in caches)
    assert {c.offset for c in caches[:3]} == {150 + 20 - 1}


@pytest.mark.parametrize("format", ("default", "window", "tq3"))
def test_prompt_reuse(model, format):
    """The server's prompt cache: caches of finished batch rows, fetched by the nearest prompt and trimmed."""
    ids = prompt(200, 5).tolist()
    lru = cache_module.LRUPromptCache(max_size=4)
    with mlx_tq.enable(model, FORMATS[format]):
        result = batch_generate(model, Words(), [ids[:9], ids], max_tokens=5, return_prompt_caches=True)
        for tokens, caches in zip((ids[:9], ids), result.caches, strict=True):
            assert cache_module.trim_prompt_cache(caches, 5) == 5
            lru.insert_cache("model", tokens, caches)
        assert lru.nbytes == sum(c.nbytes for c in result.caches[1])  # a prefix of the long prompt is dropped
        for ask, rest in ((ids, 0), ([*ids, 7, 8], 2), ([*ids[:150], 3, 4], 2), (ids[:20], 1)):
            caches, left = lru.fetch_nearest_cache("model", ask)
            assert len(left) == rest and {c.offset for c in caches} == {len(ask) - rest}
            held = [c.state for c in lru.fetch_nearest_cache("model", ids)[0]]
            (joined,) = batch_generate(
                model, Words(), [left or [1]], prompt_caches=[caches], max_tokens=4, return_token_ids=True
            ).token_ids
            assert len(joined) == 4
            for before, after in zip(held, lru.fetch_nearest_cache("model", ids)[0], strict=True):
                assert all(mx.array_equal(a, b).item() for a, b in zip(before[1:], after.state[1:], strict=True))


# ------------------------------------------------------------------ commands and the server


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_llama.make(tmp_path_factory.mktemp("tiny"))[2])


def enabling_load(format):
    """mlx_lm.load that enables what it loads, in float32 so that rounding decides no token.

    The output layer becomes a random one, of printable ASCII: with its embeddings for that, the tiny model repeats the
    last token.
    """

    def load(*args, **options):
        loaded = mlx_lm.load(*args, **options)
        model = loaded[0]
        mx.random.seed(1)
        model.args.tie_word_embeddings = False
        model.lm_head = nn.Linear(model.args.hidden_size, model.args.vocab_size, bias=False)
        printable = mx.arange(model.args.vocab_size) - len(tiny_llama.SPECIAL)
        printable = (printable >= 0) & (printable < 94)
        model.lm_head.weight = mx.where(printable[:, None], model.lm_head.weight, 0)
        model.set_dtype(mx.float32)
        mlx_tq.enable(model, format)
        return loaded

    return load


def test_cache_prompt_and_prompt_cache_file(folder, tmp_path, monkeypatch, capsys):
    """A prompt computed by one command goes on in another, as compressed as it was saved."""
    from mlx_lm import cache_prompt

    generate_command = sys.modules["mlx_lm.generate"]
    path = str(tmp_path / "prompt.safetensors")
    for module in (cache_prompt, generate_command):
        monkeypatch.setattr(module, "load", enabling_load(FORMATS["window"]))
    text = "he said 12 " * 20
    arguments = ["x", "--model", folder, "--prompt-cache-file", path, "--prompt", text]
    monkeypatch.setattr(sys, "argv", arguments)
    cache_prompt.main()
    caches = cache_module.load_prompt_cache(path)
    assert all(type(c) is TQKVCache and c.format == FORMATS["window"] and c.offset > 32 for c in caches)
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["x", "--prompt-cache-file", path, "--prompt", "more", "-m", "8"])
    generate_command.main()
    out = capsys.readouterr().out
    assert "Prompt: " in out and "Generation: " in out


@pytest.fixture
def serve(folder, monkeypatch):
    """Starts mlx_lm.server's own parts on a free local port; the function it gives posts a completion."""
    from mlx_lm import server

    running = []

    def start(format, *options):
        monkeypatch.setattr(server, "load", enabling_load(format))
        monkeypatch.setattr(server, "run", lambda host, port, provider: running.append(provider))
        monkeypatch.setattr(sys, "argv", ["server", "--model", folder, "--port", "0", *options])
        server.main()
        provider = running.pop()
        generator = server.ResponseGenerator(provider, cache_module.LRUPromptCache(10))
        httpd = ThreadingHTTPServer(
            ("127.0.0.1", 0), lambda *a, **k: server.APIHandler(generator, *a, system_fingerprint="x", **k)
        )
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        running.append((httpd, generator, thread))

        def post(text, n):
            body = json.dumps({"prompt": text, "max_tokens": n, "temperature": 0}).encode()
            request = urllib.request.Request(
                f"http://127.0.0.1:{httpd.server_address[1]}/v1/completions", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.loads(response.read())

        return post, generator

    yield start
    for httpd, generator, thread in running:
        httpd.shutdown()
        generator.stop_and_join()
        thread.join()
        httpd.server_close()


def alone(folder, format, text, n):
    """Text the model gives for one prompt, and whether it was sure of each token."""
    model, tokenizer = enabling_load(format)(folder)
    ids = tokenizer.encode(text)
    out = list(mlx_lm.stream_generate(model, tokenizer, ids, max_tokens=n))
    return "".join(r.text for r in out), len(sure_tokens(model, ids, n)) >= len(out)


def at_once(post, jobs):
    results = [None] * len(jobs)

    def work(i):
        results[i] = post(*jobs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


JOBS = [("he 12 ", 12), ("abc " * 50, 5), ("some 12 words he said " * 7, 20)]


@pytest.mark.parametrize("format", ("default", "window"))
def test_the_server_batches_concurrent_requests(folder, serve, format):
    format = FORMATS[format]
    wanted = [alone(folder, format, *job) for job in JOBS]
    post, generator = serve(format)
    results = at_once(post, JOBS)
    assert generator.model_provider.is_batchable
    compared = 0
    for (_, n), (want, sure), result in zip(JOBS, wanted, results, strict=True):
        assert result["usage"]["completion_tokens"] <= n
        if sure:
            assert result["choices"][0]["text"] == want
            compared += 1
    assert compared >= 1
    for text, _ in JOBS:  # again, from the prompts it has seen
        usage = post(text + "and more", 4)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert generator.prompt_cache.nbytes > 0 and generator.is_healthy


def test_the_server_drafts(folder, serve):
    format = FORMATS["default"]
    text, n = JOBS[0]
    want, sure = alone(folder, format, text, n)
    post, generator = serve(format, "--draft-model", folder, "--num-draft-tokens", "3")
    got = post(text, n)["choices"][0]["text"]
    assert generator.model_provider.draft_model is not None
    assert sure and got == want
    again = post(text + "and more", 4)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert generator.is_healthy
